"""Discrete Fourier transforms, public as `gf.fft` with the array API's names.

All functions reduce transforms along several axes, user-defined sizes, and real or complex tensors
to the three ops of `ops/spectral/fft_ops.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, function
from graphflow.ir.spec import (
    Dim,
    Size,
    as_dtype,
    complex_dtype,
    floordiv,
    kind,
    minimum,
    normalize_shape,
)
from graphflow.ops.base.shape_rules import (
    conj,
    normalize_axes,
    normalize_axis,
    require_buildable,
    require_kind,
)
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.spectral.fft_ops import OPPOSITE, fft_op, irfft_op, rfft_op
from graphflow.ops.tensors.slicing import concat, pad_op, window

# Arguments --------------------------------------------------------------------------------------


def _require_transformable(x: Any, norm: Any) -> Tensor:
    tensor = as_tensor(x)
    require_kind(tensor.spec, "float", "complex")
    if not (isinstance(norm, str) and norm in OPPOSITE):
        raise ArgumentError(f"norm must be 'backward', 'ortho' or 'forward', got {norm!r}")
    return tensor


def _as_complex(x: Tensor) -> Tensor:
    return astype(x, complex_dtype(x.dtype))


def _require_real(x: Tensor, instead: str) -> None:
    if kind(x.dtype) == "complex":
        raise DTypeError(f"expected a real tensor, got {x.dtype}; use gf.fft.{instead}")


def _require_length(n: Any) -> Size:
    (size,) = normalize_shape(n, "n") if not isinstance(n, tuple | list) else (None,)
    if n is None or size is None:
        raise ArgumentError(f"n must be an int or a size, got {n!r}")
    if size == 0:
        raise ShapeError("n is at least 1")
    return size


def _resize_axis(x: Tensor, axis: int, size: Size) -> Tensor:
    """Return the first `size` elements along an axis, followed by zeros if it is shorter."""
    if x.shape[axis] == size:
        return x
    x = window(x, axis, 0, minimum(x.shape[axis], size))
    if x.shape[axis] == size:
        return x
    shape = tuple(size if i == axis else n for i, n in enumerate(x.shape))
    result: Tensor = pad_op(x, shape=shape, start=(0,) * x.ndim, step=(1,) * x.ndim, value=0)
    return result


def _axes_and_sizes(x: Tensor, s: Any, axes: Any) -> tuple[list[int], list[Size | None]]:
    """Return axes in the user's order, and the wanted sizes (None: as they are)."""
    if s is not None and not isinstance(s, tuple | list):
        raise ArgumentError(f"s must be a list of sizes, one for each axis, got {s!r}")
    if axes is None:
        chosen = list(range(0 if s is None else max(x.ndim - len(s), 0), x.ndim))
        if s is not None and len(s) > x.ndim:
            raise ArgumentError(f"s has {len(s)} sizes, but the tensor has rank {x.ndim}")
    else:
        normalize_axes(axes, x.ndim)  # refuses an axis given twice
        given = axes if isinstance(axes, tuple | list) else [axes]
        chosen = [normalize_axis(a, x.ndim) for a in given]
    if not chosen:
        raise ArgumentError("axes is empty; give at least one axis to transform")
    if s is not None and len(s) != len(chosen):
        raise ArgumentError(f"s has {len(s)} sizes for {len(chosen)} axes; give one for each")
    return chosen, [None] * len(chosen) if s is None else [_require_length(n) for n in s]


def _complex_transform(
    x: Tensor, axes: Sequence[int], sizes: Sequence[Size | None], inverse: bool, norm: str
) -> Tensor:
    x = _as_complex(x)
    for axis, size in zip(axes, sizes, strict=True):
        if size is not None:
            x = _resize_axis(x, axis, size)
    if not axes:
        return x
    result: Tensor = fft_op(x, axes=tuple(axes), inverse=inverse, norm=norm)
    return result


def _one_axis_arguments(x: Any, n: Any, axis: Any, norm: Any) -> tuple[Tensor, int, Size | None]:
    tensor = _require_transformable(x, norm)
    return tensor, normalize_axis(axis, tensor.ndim), None if n is None else _require_length(n)


# Complex transforms -----------------------------------------------------------------------------


@function
def fft(x: Any, n: Any = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """Compute y[k] = Σⱼ x[j]·exp(-2πi·jk/n) along an axis; the result is complex.

    A transform costs 5·n·log2(n) flops.

    Args:
        x: floats or complex numbers.
        n: number of elements along the axis; x is cut or padded with zeros to it. Default: all.
        norm: the direction that divides: "backward" the inverse one by n, "forward" this one by n,
            "ortho" both by √n.

    Raises:
        DTypeError: x is neither float nor complex.
        ShapeError: axis is outside x, or there are no elements to transform.
        ArgumentError: n or norm is invalid.
    """
    tensor, at, size = _one_axis_arguments(x, n, axis, norm)
    return _complex_transform(tensor, [at], [size], False, norm)


@function
def ifft(x: Any, n: Any = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """Compute x[j] = 1/n·Σₖ y[k]·exp(2πi·jk/n), the inverse of `fft`.

    Arguments and errors as for `fft`.
    """
    tensor, at, size = _one_axis_arguments(x, n, axis, norm)
    return _complex_transform(tensor, [at], [size], True, norm)


@function
def fftn(x: Any, s: Any = None, axes: Any = None, norm: str = "backward") -> Tensor:
    """Apply `fft` along several axes.

    Args:
        x: floats or complex numbers.
        s: the n of each axis; default: the sizes of x.
        axes: default: all axes, or the last len(s).
        norm: as for `fft`.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `fft`, or an axis is given twice.
    """
    tensor = _require_transformable(x, norm)
    return _complex_transform(tensor, *_axes_and_sizes(tensor, s, axes), False, norm)


@function
def ifftn(x: Any, s: Any = None, axes: Any = None, norm: str = "backward") -> Tensor:
    """Apply `ifft` along several axes, the inverse of `fftn`; arguments and errors as there."""
    tensor = _require_transformable(x, norm)
    return _complex_transform(tensor, *_axes_and_sizes(tensor, s, axes), True, norm)


@function
def fft2(x: Any, s: Any = None, axes: Any = (-2, -1), norm: str = "backward") -> Tensor:
    """Apply `fftn` along two axes, by default the last; arguments and errors as there."""
    return fftn(x, s, axes, norm)


@function
def ifft2(x: Any, s: Any = None, axes: Any = (-2, -1), norm: str = "backward") -> Tensor:
    """Apply `ifftn` along two axes, by default the last; arguments and errors as there."""
    return ifftn(x, s, axes, norm)


# Real transforms --------------------------------------------------------------------------------


def _real_forward(x: Tensor, axis: int, size: Size | None, norm: str) -> Tensor:
    _require_real(x, "fft")
    if size is not None:
        x = _resize_axis(x, axis, size)
    result: Tensor = rfft_op(x, axis=axis, norm=norm, inner=1.0)
    return result


def _real_inverse(x: Tensor, axis: int, size: Size | None, norm: str) -> Tensor:
    x = _as_complex(x)
    if size is None:
        size = (x.shape[axis] - 1) * 2
        if not isinstance(size, Dim) and size < 1:
            raise ShapeError(f"{x.spec} has no 2 frequencies along axis {axis}; give n=1")
    x = _resize_axis(x, axis, floordiv(size, 2) + 1)
    result: Tensor = irfft_op(x, size=size, axis=axis, norm=norm, inner=1.0)
    return result


@function
def rfft(x: Any, n: Any = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """Compute the first n//2 + 1 elements of `fft` of a real tensor, which determine the others.

    Other arguments as for `fft`.

    Raises:
        DTypeError: x is not float.
        ShapeError, ArgumentError: as `fft`.
    """
    tensor, at, size = _one_axis_arguments(x, n, axis, norm)
    return _real_forward(tensor, at, size, norm)


@function
def irfft(x: Any, n: Any = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """Compute the real tensor of n elements whose `rfft` is x.

    Args:
        x: n//2 + 1 frequencies; x is cut or padded with zeros to them.
        n: default: an even number, 2·(frequencies - 1).
        norm: as for `fft`.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `fft`.
    """
    tensor, at, size = _one_axis_arguments(x, n, axis, norm)
    return _real_inverse(tensor, at, size, norm)


@function
def rfftn(x: Any, s: Any = None, axes: Any = None, norm: str = "backward") -> Tensor:
    """Apply `rfft` along the last of several axes, then `fft` along the others.

    Arguments as for `fftn`.

    Raises:
        DTypeError: x is not float.
        ShapeError, ArgumentError: as `fftn`.
    """
    tensor = _require_transformable(x, norm)
    chosen, sizes = _axes_and_sizes(tensor, s, axes)
    half = _real_forward(tensor, chosen[-1], sizes[-1], norm)
    return _complex_transform(half, chosen[:-1], sizes[:-1], False, norm)


@function
def irfftn(x: Any, s: Any = None, axes: Any = None, norm: str = "backward") -> Tensor:
    """Apply the inverse of `rfftn`; s gives sizes of the result. Other arguments as for `fftn`.

    Raises:
        DTypeError, ShapeError, ArgumentError: as `fftn`.
    """
    tensor = _require_transformable(x, norm)
    chosen, sizes = _axes_and_sizes(tensor, s, axes)
    tensor = _complex_transform(tensor, chosen[:-1], sizes[:-1], True, norm)
    return _real_inverse(tensor, chosen[-1], sizes[-1], norm)


@function
def rfft2(x: Any, s: Any = None, axes: Any = (-2, -1), norm: str = "backward") -> Tensor:
    """Apply `rfftn` along two axes, by default the last; arguments and errors as there."""
    return rfftn(x, s, axes, norm)


@function
def irfft2(x: Any, s: Any = None, axes: Any = (-2, -1), norm: str = "backward") -> Tensor:
    """Apply `irfftn` along two axes, by default the last; arguments and errors as there."""
    return irfftn(x, s, axes, norm)


@function
def hfft(x: Any, n: Any = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """Compute the real `fft` of a signal whose second half is the mirrored conjugate of the first.

    Args:
        x: the first n//2 + 1 elements of the signal.
        n: default: an even number, 2·(elements - 1).

    Raises:
        DTypeError, ShapeError, ArgumentError: as `irfft`.
    """
    tensor, at, size = _one_axis_arguments(x, n, axis, norm)
    return _real_inverse(conj(tensor), at, size, OPPOSITE[norm])


@function
def ihfft(x: Any, n: Any = None, axis: int = -1, norm: str = "backward") -> Tensor:
    """Compute the n//2 + 1 complex elements whose `hfft` is x.

    Arguments and errors as for `rfft`.
    """
    tensor, at, size = _one_axis_arguments(x, n, axis, norm)
    return conj(_real_forward(tensor, at, size, OPPOSITE[norm]))


# Frequencies ------------------------------------------------------------------------------------


def _frequencies(n: Any, d: Any, dtype: Any, one_sided: bool) -> Tensor:
    size = _require_length(n)
    if isinstance(d, bool) or not isinstance(d, int | float) or not math.isfinite(d) or d == 0:
        raise ArgumentError(
            f"d must be the distance of samples, a finite number other than 0, got {d!r}"
        )
    wanted = as_dtype(dtype)
    if kind(wanted) != "float":
        raise DTypeError(f"frequencies must be floats, got {wanted}")
    if isinstance(size, int):
        require_buildable(size)
        values = np.fft.rfftfreq(size, d) if one_sided else np.fft.fftfreq(size, d)
        return as_tensor(values.astype(wanted))
    steps: Tensor = FUNCTIONS["arange"](floordiv(size, 2) + 1 if one_sided else size)
    if not one_sided:
        negative = steps >= floordiv(size + 1, 2)
        steps = FUNCTIONS["where"](negative, steps - size, steps)
    frequencies: Tensor = astype(steps, "float64") / (as_tensor(size, "float64") * float(d))
    return astype(frequencies, wanted)


@function
def fftfreq(n: Any, d: float = 1.0, dtype: Any = "float32") -> Tensor:
    """Return the frequency of each element of an `fft` of n samples: float, (n,).

    Zero and the positive frequencies come first, then the negative ones.

    Args:
        d: distance of samples; frequencies are in cycles per unit of d.
        dtype: a float dtype.

    Raises:
        ArgumentError, ShapeError: n is no size of at least 1, or d is 0 or no number.
        DTypeError: the dtype is not float.
    """
    return _frequencies(n, d, dtype, one_sided=False)


@function
def rfftfreq(n: Any, d: float = 1.0, dtype: Any = "float32") -> Tensor:
    """Return the frequency of each element of an `rfft` of n samples; arguments as for `fftfreq`.

    Raises:
        ArgumentError, ShapeError, DTypeError: as `fftfreq`.
    """
    return _frequencies(n, d, dtype, one_sided=True)


def _shift_frequencies(given: Any, axes: Any, forward: bool) -> Tensor:
    x = as_tensor(given)
    for axis in normalize_axes(axes, x.ndim):
        n = x.shape[axis]
        half = floordiv(n, 2)
        first = n - half if forward else half  # the part that goes to the end
        x = concat([window(x, axis, first, n - first), window(x, axis, 0, first)], axis)
    return x


@function
def fftshift(x: Any, axes: Any = None) -> Tensor:
    """Move frequency zero to the middle, along axes (None: all).

    Raises:
        ShapeError: an axis is outside x.
        ArgumentError: an axis is given twice.
    """
    return _shift_frequencies(x, axes, forward=True)


@function
def ifftshift(x: Any, axes: Any = None) -> Tensor:
    """Move frequency zero from the middle to the front, the inverse of `fftshift`.

    Raises:
        ShapeError, ArgumentError: as `fftshift`.
    """
    return _shift_frequencies(x, axes, forward=False)


__all__ = [
    "fft", "fft2", "fftfreq", "fftn", "fftshift", "hfft", "ifft", "ifft2", "ifftn", "ifftshift",
    "ihfft", "irfft", "irfft2", "irfftn", "rfft", "rfft2", "rfftfreq", "rfftn",
]  # fmt: skip
