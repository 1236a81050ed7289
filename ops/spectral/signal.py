"""Signals over time, public as `gf.signal`: windows, frames, short-time spectra, mel filters.

Spectra are complex tensors. ONNX keeps real and imaginary parts in a last axis of size 2 instead.
Its STFT of a real signal is `stft(x[..., 0], …)`, with `gf.real` and `gf.imag` of that stacked.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.base.argument_kinds import is_number
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import (
    Size,
    TensorSpec,
    as_dtype,
    equate,
    floordiv,
    kind,
    real_dtype,
    require_nonnegative,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import reciprocal_or_zero, require_buildable, require_kind
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.spectral.fft import fft, ifft, irfft, rfft
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.slicing import window as part

# Windows ----------------------------------------------------------------------------------------


def _cosine_window(size: Any, periodic: Any, dtype: Any, *factors: float) -> Tensor:
    """Compute Σₖ factors[k]·cos(2πk·j/n) for j < size; n is size, or size - 1 if not periodic."""
    if isinstance(size, bool) or not isinstance(size, int | np.integer) or size < 0:
        raise ArgumentError(f"the size must be an int that is not negative, got {size!r}")
    if not isinstance(periodic, bool):
        raise ArgumentError(f"periodic must be True or False, got {periodic!r}")
    wanted = as_dtype(dtype)
    if kind(wanted) != "float":
        raise DTypeError(f"windows must be floats, got {wanted}")
    if size < 2:
        return as_tensor(np.ones(int(size), wanted))
    require_buildable(int(size))
    angles = np.arange(size) * (2 * math.pi / (size if periodic else size - 1))
    values = [factor * np.cos(k * angles) for k, factor in enumerate(factors)]
    return as_tensor(np.sum(values, axis=0).astype(wanted))


@function
def hann_window(size: int, periodic: bool = True, dtype: Any = "float32") -> Tensor:
    """Return the window 0.5 - 0.5·cos(2πj/n), j < size.

    Args:
        size: an int.
        periodic: n is the size, for spectra; otherwise size - 1, which makes the window symmetric.
        dtype: a float dtype.

    Raises:
        ArgumentError: size is no int >= 0, or periodic no bool.
        DTypeError: the dtype is not float.
    """
    return _cosine_window(size, periodic, dtype, 0.5, -0.5)


@function
def hamming_window(
    size: int, periodic: bool = True, alpha: float = 0.54, dtype: Any = "float32"
) -> Tensor:
    """Return the window alpha - (1 - alpha)·cos(2πj/n), j < size; ONNX has alpha = 25/46.

    Other arguments as for `hann_window`.

    Raises:
        ArgumentError: size is no int >= 0, periodic no bool, or alpha no finite number.
        DTypeError: the dtype is not float.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ArgumentError(f"alpha must be a number, got {alpha!r}")
    return _cosine_window(size, periodic, dtype, alpha, alpha - 1)


@function
def blackman_window(size: int, periodic: bool = True, dtype: Any = "float32") -> Tensor:
    """Return the window 0.42 - 0.5·cos(2πj/n) + 0.08·cos(4πj/n), j < size.

    Arguments and errors as for `hann_window`.
    """
    return _cosine_window(size, periodic, dtype, 0.42, -0.5, 0.08)


# Frames -----------------------------------------------------------------------------------------


def _frame_count(n: Size, length: Size, step: int) -> Size:
    return floordiv(n - length, step) + 1


def _infer_frame(x: TensorSpec, length: Size, step: int) -> TensorSpec:
    require_kind(x, "int", "float", "complex")
    if not x.rank:
        raise ShapeError("expected signals along the last axis, got a scalar")
    n = x.shape[-1]
    require_nonnegative(
        n - length, f"a signal of {n} elements has no frame of {length}; pad it first"
    )
    return x.with_shape((*x.shape[:-1], _frame_count(n, length, step), length))


def _frame_kernel(xp: Any, x: Any, length: int, step: int) -> Any:
    windows = xp.lib.stride_tricks.sliding_window_view(x, length, axis=-1)
    return xp.ascontiguousarray(windows[..., ::step, :])


def _infer_overlap(x: TensorSpec, size: Size, step: int) -> TensorSpec:
    require_kind(x, "int", "float", "complex")
    if x.rank < 2:
        raise ShapeError(f"expected frames in the last two axes, got {show_shape(x.shape)}")
    frames, length = x.shape[-2:]
    what = f"frames {show_shape(x.shape)}, {step} apart, are not those of {size} elements"
    equate(frames, _frame_count(size, length, step), what)
    return x.with_shape((*x.shape[:-2], size))


def _overlap_kernel(xp: Any, x: Any, size: int, step: int) -> Any:
    """Add frames in the order of their elements, in blocks of one step."""
    frames, length = x.shape[-2:]
    blocks = -(-length // step)
    out = xp.zeros((*x.shape[:-2], frames + blocks, step), x.dtype)
    for block in range(blocks):
        piece = x[..., block * step : (block + 1) * step]
        out[..., block : block + frames, : piece.shape[-1]] += piece
    flat = out.reshape(*x.shape[:-2], (frames + blocks) * step)
    result = xp.zeros((*x.shape[:-2], size), x.dtype)
    covered = min(size, flat.shape[-1])
    result[..., :covered] = flat[..., :covered]
    return result


# `frame` cuts the last axis into frames of `length` elements, `step` apart. `overlap_add` adds
# frames at these positions.
frame_op: Op = register(
    Op(
        "frame",
        infer=_infer_frame,
        kernel=_frame_kernel,
        vjp=lambda g, y, x, length, step: (overlap_add_op(g, size=x.shape[-1], step=step),),
        batch=batching.rows,
        sharding=sharding.matrix_rule(1, outputs=(2,)),
        cost=lambda x, length, step: Cost(flops=0),
        halves=True,
        samples=(
            sample(spec("float32", (2, 9)), length=4, step=2),
            sample(spec("float32", (2, 8)), length=2, step=3),
            sample(spec("complex64", (2, 6)), length=6, step=1),
        ),
    )
)
overlap_add_op: Op = register(
    Op(
        "overlap_add",
        infer=_infer_overlap,
        kernel=_overlap_kernel,
        vjp=lambda g, y, x, size, step: (frame_op(g, length=x.shape[-1], step=step),),
        batch=batching.rows,
        sharding=sharding.matrix_rule(2, outputs=(1,)),
        cost=lambda x, size, step: Cost(flops=x.size),
        autocast="high",
        samples=(
            sample(spec("float32", (2, 3, 4)), size=9, step=2),
            sample(spec("float32", (3, 2)), size=10, step=3),
            sample(spec("complex64", (2, 2, 3)), size=4, step=1),
        ),
    )
)


def _require_positive(what: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ArgumentError(f"{what} must be an int of at least 1, got {value!r}")
    return int(value)


@function
def frame(x: Any, length: int, step: int) -> Tensor:
    """Cut the last axis into frames, `step` apart: (…, n) -> (…, (n - length)//step + 1, length).

    Elements after the last whole frame are dropped.

    Args:
        x: ints, floats or complex numbers.

    Raises:
        ArgumentError: length or step is no positive int.
        ShapeError: the signal is shorter than a frame (FeedError if its size is known only when
            fed).
        DTypeError: x is bool.
    """
    result: Tensor = frame_op(
        as_tensor(x),
        length=_require_positive("length", length),
        step=_require_positive("step", step),
    )
    return result


@function
def overlap_add(x: Any, step: int) -> Tensor:
    """Add frames, each `step` after the one before: (…, k, m) -> (…, (k - 1)·step + m).

    Args:
        x: ints, floats or complex numbers.

    Raises:
        ArgumentError: step is no positive int.
        ShapeError: x has fewer than two axes.
        DTypeError: x is bool.
    """
    tensor, apart = as_tensor(x), _require_positive("step", step)
    if tensor.ndim < 2:
        raise ShapeError(f"expected frames in the last two axes, got {show_shape(tensor.shape)}")
    frames, length = tensor.shape[-2:]
    result: Tensor = overlap_add_op(tensor, size=(frames - 1) * apart + length, step=apart)
    return result


# Short-time spectra -----------------------------------------------------------------------------


def _window_of(window: Any, length: int, dtype: Any) -> Tensor | None:
    if window is None:
        return None
    tensor = as_tensor(window)
    require_kind(tensor.spec, "float")
    if tensor.shape != (length,):
        raise ShapeError(
            f"the window is of shape {show_shape(tensor.shape)}, frames are of length {length}"
        )
    return astype(tensor, real_dtype(dtype))


def _lengths(frame_length: Any, fft_length: Any) -> tuple[int, int]:
    length = _require_positive("frame_length", frame_length)
    points = length if fft_length is None else _require_positive("fft_length", fft_length)
    if points < length:
        raise ArgumentError(f"fft_length {points} is less than frame_length {length}")
    return length, points


@composite("x", to="high")
@function
def stft(
    x: Any,
    frame_length: int,
    frame_step: int,
    *,
    window: Any = None,
    fft_length: int | None = None,
    onesided: bool = True,
) -> Tensor:
    """Compute the spectrum of each frame of a signal: (…, n) -> (…, frames, bins), complex.

    Frames begin at the first element and lie within the signal: there are
    (n - frame_length)//frame_step + 1. Pad the signal to have frames around its ends.

    Args:
        x: floats or complex numbers.
        frame_length, frame_step: elements of a frame, and between the starts of frames.
        window: (frame_length,) factors of each frame; default: none.
        fft_length: elements of each transform, zeros after the frame's; default: frame_length.
        onesided: only the fft_length//2 + 1 bins of a real signal that determine the others.

    Raises:
        DTypeError: x is neither float nor complex, or complex and onesided.
        ShapeError: the window has another shape, or the signal is shorter than a frame.
        ArgumentError: a length is no positive int, or fft_length is below frame_length.

    Source: Allen & Rabiner, Proc. IEEE 65(11), 1977.
    """
    tensor = as_tensor(x)
    require_kind(tensor.spec, "float", "complex")
    length, points = _lengths(frame_length, fft_length)
    weights = _window_of(window, length, tensor.dtype)
    if onesided and kind(tensor.dtype) == "complex":
        raise DTypeError("the spectrum of a complex signal is not onesided; give onesided=False")
    frames = frame(tensor, length, _require_positive("frame_step", frame_step))
    if weights is not None:
        frames = frames * weights
    return rfft(frames, points) if onesided else fft(frames, points)


@function
def istft(
    spectra: Any,
    frame_length: int,
    frame_step: int,
    *,
    window: Any = None,
    fft_length: int | None = None,
    onesided: bool = True,
) -> Tensor:
    """Compute the signal whose `stft` is nearest in squares: (…, frames, bins) -> (…, n).

    n is (frames - 1)·frame_step + frame_length. Elements that no window covers are 0. The signal is
    real if onesided, else complex. Other arguments as for `stft`.

    Raises:
        DTypeError: the spectra are neither float nor complex.
        ShapeError: the window or the bins do not fit.
        ArgumentError: as `stft`.

    Source: Griffin & Lim, IEEE Trans. ASSP 32(2), 1984.
    """
    tensor = as_tensor(spectra)
    require_kind(tensor.spec, "float", "complex")
    length, points = _lengths(frame_length, fft_length)
    step = _require_positive("frame_step", frame_step)
    if tensor.ndim < 2:
        raise ShapeError(f"expected spectra in the last two axes, got {show_shape(tensor.shape)}")
    bins = points // 2 + 1 if onesided else points
    equate(tensor.shape[-1], bins, f"bins of {show_shape(tensor.shape)} for {points} elements")
    frames = irfft(tensor, points) if onesided else ifft(tensor)
    frames = part(frames, frames.ndim - 1, 0, length)
    weights = _window_of(window, length, frames.dtype)
    if weights is None:
        weights = as_tensor(np.ones(length, real_dtype(frames.dtype)))
    else:
        frames = frames * weights
    squares = broadcast_to(weights * weights, frames.shape[-2:])
    total: Tensor = overlap_add(frames, step) * reciprocal_or_zero(overlap_add(squares, step))
    return total


# Mel filters ------------------------------------------------------------------------------------


def _mel_edges(bands: int, points: int, rate: float, low: float, high: float) -> Any:
    """Return the bins where triangles begin, peak and end, evenly spaced in 2595·log10(1 + f/700).

    As in ONNX, the step is the whole range divided by bands + 2.
    """
    lowest, highest = (2595 * math.log10(1 + f / 700) for f in (low, high))
    mels = lowest + np.arange(bands + 2) * ((highest - lowest) / (bands + 2))
    hertz = 700 * (10 ** (mels / 2595) - 1)
    return np.floor((points + 1) * hertz / rate).astype(int)


@function
def mel_weight_matrix(
    num_mel_bins: int,
    dft_length: int,
    sample_rate: float,
    lower_edge_hertz: float,
    upper_edge_hertz: float,
    dtype: Any = "float32",
) -> Tensor:
    """Return triangular filters of peak 1, evenly spaced in mel: (dft_length//2 + 1, num_mel_bins).

    `abs(stft(…)) @ mel_weight_matrix(…)` is a mel spectrogram.

    Args:
        sample_rate: elements of the signal per second.
        lower_edge_hertz, upper_edge_hertz: the range of frequencies that the filters cover.
        dtype: a float dtype.

    Raises:
        ArgumentError: a count is no positive int, or not 0 <= lower < upper <= sample_rate / 2.
        DTypeError: the dtype is not float.

    Source: the operator MelWeightMatrix of ONNX; Davis & Mermelstein, IEEE Trans. ASSP 28(4), 1980.
    """
    bands, points = (
        _require_positive("num_mel_bins", num_mel_bins),
        _require_positive("dft_length", dft_length),
    )
    numbers = (sample_rate, lower_edge_hertz, upper_edge_hertz)
    if not all(map(is_number, numbers)):
        raise ArgumentError(f"the rate and the edges must be numbers, got {numbers}")
    if not 0 <= lower_edge_hertz < upper_edge_hertz <= sample_rate / 2 < math.inf:
        raise ArgumentError(
            f"edges {lower_edge_hertz} and {upper_edge_hertz} Hz are not in order between 0 and "
            f"half of the sample rate, {sample_rate / 2}"
        )
    wanted = as_dtype(dtype)
    if kind(wanted) != "float":
        raise DTypeError(f"weights must be floats, got {wanted}")
    require_buildable(points // 2 + 1, bands)
    edges = _mel_edges(bands, points, sample_rate, lower_edge_hertz, upper_edge_hertz)
    left, peak, right = edges[:-2], edges[1:-1], edges[2:]
    bins = np.arange(points // 2 + 1)[:, None]
    rising = (bins - left) / np.maximum(peak - left, 1)
    falling = (right - bins) / np.maximum(right - peak, 1)
    weights = np.where(bins < peak, rising, np.where(bins > peak, falling, 1.0))
    return as_tensor(np.maximum(weights, 0.0).astype(wanted))


__all__ = [
    "blackman_window", "frame", "hamming_window", "hann_window", "istft", "mel_weight_matrix",
    "overlap_add", "stft",
]  # fmt: skip
