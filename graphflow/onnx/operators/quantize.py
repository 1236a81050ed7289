"""Quantisation: conversions to and from ints, and products of ints.

Sums of products of 8-bit ints stay below 2²⁴ (float32) or 2⁵³ (float64). So floats compute them
exactly, and several times faster than ints. 2- and 4-bit types and 8-bit floats stay on the host,
where onnx's reference implementation converts them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.ir.op import Tensor
from graphflow.ir.spec import Size, kind, show_shape
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.onnx.operators.networks.convolution import padding_of, steps_of
from graphflow.onnx.operators.shape import axis_of
from graphflow.ops.matrices import matmul as linalg
from graphflow.ops.pointwise import arithmetic, select
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.tensors.repetition import repeat
from graphflow.ops.tensors.shape import expand_dims, reshape
from graphflow.ops.tensors.slicing import window
from graphflow.ops.windows import conv

# Scales and zero points -----------------------------------------------------------------------


def _broadcast_scale(call: NodeCall, t: Tensor, x: Tensor) -> Tensor:
    """Reshape a scale or zero point so that it broadcasts against x.

    There is one for the whole tensor, for each element of an axis, or for each block along it.
    """
    if t.ndim == 0 or t.size == 1:
        return reshape(t, ())
    axis, block = axis_of(call, 1, x.ndim), call.attr("block_size", 0)
    if not block:
        if t.ndim != 1:
            scales = f"scales of shape {show_shape(t.shape)}"
            raise call.unsupported_error(f"{scales} without a block_size")
        return reshape(t, tuple(-1 if i == axis else 1 for i in range(x.ndim)))
    if block < 0 or t.ndim != x.ndim:
        raise call.unsupported_error(
            f"blocks of {block}, scales {show_shape(t.shape)} for {show_shape(x.shape)}"
        )
    return window(repeat(t, block, axis), axis, 0, x.shape[axis])


def saturate(y: Tensor, zero: Tensor | None, dtype: np.dtype[Any]) -> Tensor:
    """Round floats (half to even), add a zero point, and clip to the range of an int dtype."""
    y = arithmetic.round(y)
    if zero is not None:
        y = y + astype(zero, y.dtype)
    limits = np.iinfo(dtype)
    return astype(select.clip(y, int(limits.min), int(limits.max)), dtype)


@operator("QuantizeLinear")
def _quantize(call: NodeCall) -> Outputs:
    x, scale, zero = call.tensor(0), call.tensor(1), call.optional(2)
    code = call.attr("output_dtype", 0)
    if zero is not None:
        dtype = zero.dtype
        if code and call.dtype_of(code) != dtype:
            raise call.unsupported_error(f"a zero point of {dtype} and another output_dtype")
    else:
        dtype = call.dtype_of(code) if code else np.dtype("uint8")
    if kind(dtype) != "int":
        raise call.unsupported_error(f"quantisation to {dtype}")
    precision = call.attr("precision", 0)
    how = call.dtype_of(precision) if precision else scale.dtype
    if kind(how) != "float":
        how = np.dtype("float32")
    quotient = astype(x, how) / astype(_broadcast_scale(call, scale, x), how)
    if how != np.dtype("float64"):
        quotient = astype(quotient, "float32")  # 16-bit floats cannot represent all 16-bit ints
    return saturate(quotient, None if zero is None else _broadcast_scale(call, zero, x), dtype)


@operator("DequantizeLinear")
def _dequantize(call: NodeCall) -> Outputs:
    x, scale, zero = call.tensor(0), call.tensor(1), call.optional(2)
    code = call.attr("output_dtype", 0)
    dtype = call.dtype_of(code) if code else scale.dtype
    values = astype(x, "int32")
    if zero is not None:
        values = values - astype(_broadcast_scale(call, zero, x), "int32")
    return astype(
        astype(values, "float32") * astype(_broadcast_scale(call, scale, x), "float32"), dtype
    )


# Products -------------------------------------------------------------------------------------


def _exact_dtype(terms: Size) -> str:
    """Return the float dtype that holds sums of `terms` products of 9-bit ints exactly."""
    return "float32" if isinstance(terms, int) and terms * 255 * 255 < 1 << 24 else "float64"


def _subtract_zero_point(x: Tensor, zero: Tensor | None, dtype: str) -> Tensor:
    """Return x - zero point, as floats."""
    x = astype(x, dtype)
    return x if zero is None else x - astype(zero, dtype)


def _per_row(t: Tensor | None, x: Tensor) -> Tensor | None:
    """Reshape a vector with one entry for each row of x, so that it broadcasts against x."""
    if t is None or t.ndim != 1 or t.shape[0] == 1 or x.ndim < 2:
        return t if t is None or t.size != 1 else reshape(t, ())
    return expand_dims(t, -1)


def _product(call: NodeCall, a: int, a_zero: int, b: int, b_zero: int) -> Tensor:
    """Multiply two quantised inputs, given by number; the result is floats of integral value."""
    x, y = call.tensor(a), call.tensor(b)
    floats = _exact_dtype(x.shape[-1])
    left = _subtract_zero_point(x, _per_row(call.optional(a_zero), x), floats)
    return linalg.matmul(left, _subtract_zero_point(y, call.optional(b_zero), floats))


def _to_int32(x: Tensor) -> Tensor:
    """Convert floats of integral value to int32, which wraps around."""
    return astype(astype(x, "int64"), "int32") if x.dtype == np.float64 else astype(x, "int32")


@operator("MatMulInteger")
def _matmul_integer(call: NodeCall) -> Outputs:
    return _to_int32(_product(call, 0, 2, 1, 3))


@operator("QLinearMatMul")
def _matmul_quantised(call: NodeCall) -> Outputs:
    total = astype(_product(call, 0, 2, 3, 5), "float64")
    left = _per_row(call.tensor(1), call.tensor(0))
    factor = left * call.tensor(4) / call.tensor(6)
    zero = call.tensor(7)
    return saturate(total * astype(factor, "float64"), zero, zero.dtype)


def _per_channel(t: Tensor, rank: int) -> Tensor:
    """Reshape a vector with one entry for each output channel to (outputs, 1, …) of `rank` axes."""
    if t.ndim == 0 or t.size == 1:
        return reshape(t, ())
    return reshape(t, (-1, *(1,) * (rank - 1)))


def _convolve(
    call: NodeCall, x: Tensor, w: Tensor, x_zero: Tensor | None, w_zero: Tensor | None
) -> Tensor:
    """Convolve quantised tensors; the result is floats of integral value."""
    rank = w.ndim - 2
    floats = _exact_dtype(math.prod(call.static_size(n) for n in w.shape[1:]))
    if w_zero is not None:
        w_zero = _per_channel(w_zero, w.ndim)
    if x_zero is not None:
        x_zero = reshape(x_zero, ())
    y: Tensor = conv.conv(
        _subtract_zero_point(x, x_zero, floats),
        _subtract_zero_point(w, w_zero, floats),
        padding=padding_of(call, rank),
        groups=call.attr("group", 1),
        exact=True,
        **steps_of(call, rank),
    )
    return y


@operator("ConvInteger")
def _conv_integer(call: NodeCall) -> Outputs:
    x, w = call.tensor(0), call.tensor(1)
    return _to_int32(_convolve(call, x, w, call.optional(2), call.optional(3)))


@operator("QLinearConv")
def _conv_quantised(call: NodeCall) -> Outputs:
    x, w = call.tensor(0), call.tensor(3)
    total = astype(_convolve(call, x, w, call.tensor(2), call.tensor(5)), "float64")
    bias = call.optional(8)
    if bias is not None:
        total = total + astype(_per_channel(bias, w.ndim - 1), "float64")
    factor = call.tensor(1) * _per_channel(call.tensor(4), w.ndim - 1) / call.tensor(6)
    zero = call.tensor(7)
    return saturate(total * astype(factor, "float64"), zero, zero.dtype)
