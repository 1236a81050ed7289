"""Fourier transforms, windows and mel filters. ONNX stores a complex number as two reals."""

from __future__ import annotations

from collections.abc import Callable

from graphflow.ir.op import Tensor
from graphflow.ir.spec import Size
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.ops.pointwise import complex as numbers
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.spectral import fft, signal
from graphflow.ops.tensors.shape import expand_dims, reshape, squeeze
from graphflow.ops.tensors.slicing import stack, window


def _parts_to_numbers(call: NodeCall, x: Tensor) -> Tensor:
    """Convert the last axis, of one or two parts, to real or complex numbers of 32 bits or more."""
    if x.dtype.itemsize < 4:
        x = astype(x, "float32")
    parts = call.static_size(x.shape[-1])
    if parts not in (1, 2):
        raise call.unsupported_error(
            f"a last axis of {parts}; it is 1 of reals, 2 of complex numbers"
        )
    if parts == 1:
        return squeeze(x, -1)
    re, im = (squeeze(window(x, x.ndim - 1, i, 1), -1) for i in range(2))
    result: Tensor = numbers.complex(re, im)
    return result


def _numbers_to_parts(z: Tensor) -> Tensor:
    return stack([numbers.real(z), numbers.imag(z)], -1)


def _transform(call: NodeCall, axis: int) -> Tensor:
    """Transform x along an axis; the last one holds the parts of complex numbers."""
    x = call.tensor(0)
    if not -x.ndim <= axis < x.ndim or axis % x.ndim == x.ndim - 1:
        raise call.unsupported_error(f"axis {axis} of a tensor of rank {x.ndim}, parts included")
    axis %= x.ndim
    length: Size | None = call.sizes(1)[0] if call.has(1) else None
    onesided, inverse = bool(call.attr("onesided", 0)), bool(call.attr("inverse", 0))
    z = _parts_to_numbers(call, x)
    if inverse and onesided:
        return expand_dims(fft.irfft(z, length, axis), -1)
    if inverse:
        return _numbers_to_parts(fft.ifft(z, length, axis))
    if not onesided:
        return _numbers_to_parts(fft.fft(z, length, axis))
    if z.dtype.kind == "c":
        raise call.unsupported_error("a onesided spectrum of complex numbers")
    return _numbers_to_parts(fft.rfft(z, length, axis))


@operator("DFT", since=20)
def _dft(call: NodeCall) -> Outputs:
    axis = call.scalar(2) if call.has(2) else -2
    return astype(_transform(call, axis), call.spec(0).dtype)


@operator("DFT", since=17)
def _dft_17(call: NodeCall) -> Outputs:
    return astype(_transform(call, call.attr("axis", 1)), call.spec(0).dtype)


@operator("STFT")
def _stft(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    if x.ndim == 2:
        x = expand_dims(x, -1)
    weights = call.optional(2)
    if call.has(3):
        length = call.scalar(3)
    else:
        length = call.static_size(x.shape[1] if weights is None else weights.shape[0])
    z = _parts_to_numbers(call, x)
    if weights is not None:
        weights = reshape(weights, (-1,))
    spectra = signal.stft(
        z,
        length,
        call.scalar(1),
        window=weights,
        onesided=bool(call.attr("onesided", 1)),
    )
    return astype(_numbers_to_parts(spectra), x.dtype)


@operator("MelWeightMatrix")
def _mel_weights(call: NodeCall) -> Outputs:
    weights = signal.mel_weight_matrix(*(call.scalar(i) for i in range(5)))
    return astype(weights, call.dtype("output_datatype", 1))


def _register_window(name: str, make: Callable[..., Tensor], **choices: float) -> None:
    @operator(name, since=17)
    def translate(call: NodeCall) -> Outputs:
        periodic = bool(call.attr("periodic", 1))
        values = make(call.scalar(0), periodic, dtype="float32", **choices)
        return astype(values, call.dtype("output_datatype", 1))


_register_window("HannWindow", signal.hann_window)
_register_window("HammingWindow", signal.hamming_window, alpha=25 / 46)
_register_window("BlackmanWindow", signal.blackman_window)
