"""Arithmetic, comparison, logic, rounding, bits and casts, element by element."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from graphflow.ir.op import Tensor
from graphflow.ir.spec import broadcast_shapes
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.ops.pointwise import arithmetic, bitwise, comparison, select, transcendental
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.shape import expand_dims


def _align_legacy(call: NodeCall, a: Tensor, b: Tensor) -> Tensor:
    """Reshape b as opsets before 7 broadcast it: its axes are a's from `axis` on."""
    if call.version >= 7 or not call.attr("broadcast", 0):
        return b
    axis = call.attr("axis", a.ndim - b.ndim)
    axis += a.ndim if axis < 0 else 0
    trailing = a.ndim - axis - b.ndim
    return expand_dims(b, tuple(range(b.ndim, b.ndim + trailing))) if trailing > 0 else b


def _register_binary(name: str, function: Callable[[Any, Any], Tensor]) -> None:
    @operator(name)
    def translate(call: NodeCall) -> Outputs:
        a, b = call.tensor(0), call.tensor(1)
        return function(a, _align_legacy(call, a, b))


def _register_unary(name: str, function: Callable[[Any], Tensor]) -> None:
    @operator(name)
    def translate(call: NodeCall) -> Outputs:
        return function(call.tensor(0))


def divide(a: Tensor, b: Tensor) -> Tensor:
    """Divide a by b; quotients of ints are rounded towards zero."""
    if a.dtype.kind not in "iu":
        return arithmetic.divide(a, b)
    quotient: Tensor = arithmetic.floor_divide(a, b)
    if a.dtype.kind == "u":
        return quotient
    rest = arithmetic.remainder(a, b)
    zero = np.zeros((), a.dtype)
    inexact = comparison.not_equal(rest, zero)
    below = comparison.less(quotient, zero)
    more = comparison.logical_and(inexact, below)
    truncated: Tensor = arithmetic.add(quotient, astype(more, a.dtype))
    return truncated


_BINARY: dict[str, Callable[[Any, Any], Tensor]] = {
    "Add": arithmetic.add, "Sub": arithmetic.subtract, "Mul": arithmetic.multiply,
    "Div": divide, "Equal": comparison.equal, "Less": comparison.less,
    "LessOrEqual": comparison.less_equal, "Greater": comparison.greater,
    "GreaterOrEqual": comparison.greater_equal, "And": comparison.logical_and,
    "Or": comparison.logical_or, "Xor": comparison.logical_xor,
    "BitwiseAnd": bitwise.bitwise_and, "BitwiseOr": bitwise.bitwise_or,
    "BitwiseXor": bitwise.bitwise_xor,
}  # fmt: skip
for _name, _function in _BINARY.items():
    _register_binary(_name, _function)

_UNARY: dict[str, Callable[[Any], Tensor]] = {
    "Neg": arithmetic.negative, "Abs": arithmetic.abs, "Sign": arithmetic.sign,
    "Ceil": arithmetic.ceil, "Floor": arithmetic.floor, "Round": arithmetic.round,
    "Reciprocal": arithmetic.reciprocal, "Not": comparison.logical_not,
    "IsNaN": comparison.isnan,
    "BitwiseNot": bitwise.bitwise_invert, "Sqrt": transcendental.sqrt, "Exp": transcendental.exp,
    "Log": transcendental.log, "Sin": transcendental.sin, "Cos": transcendental.cos,
    "Tan": transcendental.tan, "Asin": transcendental.asin, "Acos": transcendental.acos,
    "Atan": transcendental.atan, "Sinh": transcendental.sinh, "Cosh": transcendental.cosh,
    "Asinh": transcendental.asinh, "Acosh": transcendental.acosh, "Atanh": transcendental.atanh,
    "Tanh": transcendental.tanh, "Erf": transcendental.erf,
}  # fmt: skip
for _name, _single in _UNARY.items():
    _register_unary(_name, _single)


@operator("Identity")
def _identity(call: NodeCall) -> Outputs:
    return call.tensor(0)


@operator("Pow")
def _pow(call: NodeCall) -> Outputs:
    """Translate Pow, whose result has the dtype of the base."""
    base, exponent = call.tensor(0), call.tensor(1)
    exponent = _align_legacy(call, base, exponent)
    if base.dtype == exponent.dtype:
        return arithmetic.pow(base, exponent)
    if "f" in (base.dtype.kind, exponent.dtype.kind):
        wide = "float64" if "8" in (base.dtype.str[-1], exponent.dtype.str[-1]) else "float32"
        return astype(arithmetic.pow(astype(base, wide), astype(exponent, wide)), base.dtype)
    return astype(arithmetic.pow(astype(base, "int64"), astype(exponent, "int64")), base.dtype)


@operator("Mod")
def _mod(call: NodeCall) -> Outputs:
    function = bitwise.fmod if call.attr("fmod", 0) else arithmetic.remainder
    return function(call.tensor(0), call.tensor(1))


@operator("BitShift")
def _shift(call: NodeCall) -> Outputs:
    left = call.required_attr("direction") == "LEFT"
    function = bitwise.bitwise_left_shift if left else bitwise.bitwise_right_shift
    return function(call.tensor(0), call.tensor(1))


@operator("BitCast")
def _bitcast(call: NodeCall) -> Outputs:
    return bitwise.bitcast(call.tensor(0), call.dtype("to"))


@operator("Max")
def _max(call: NodeCall) -> Outputs:
    return reduce(select.maximum, call.tensors())


@operator("Min")
def _min(call: NodeCall) -> Outputs:
    return reduce(select.minimum, call.tensors())


@operator("Sum")
def _sum(call: NodeCall) -> Outputs:
    return reduce(arithmetic.add, call.tensors())


@operator("Mean")
def _mean(call: NodeCall) -> Outputs:
    tensors = call.tensors()
    return reduce(arithmetic.add, tensors) / len(tensors)


@operator("Where")
def _where(call: NodeCall) -> Outputs:
    condition, a, b = call.tensors()
    return select.where(condition, a, b)


@operator("IsInf")
def _isinf(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    result = comparison.isinf(x)
    if not call.attr("detect_positive", 1):
        result = comparison.logical_and(result, comparison.less(x, 0))
    if not call.attr("detect_negative", 1):
        result = comparison.logical_and(result, comparison.greater(x, 0))
    return result


@operator("Clip", since=11)
def _clip(call: NodeCall) -> Outputs:
    """Translate Clip; the upper limit wins if the limits cross."""
    x, low, high = call.tensor(0), call.optional(1), call.optional(2)
    if low is not None:
        x = select.maximum(x, low)
    return x if high is None else select.minimum(x, high)


@operator("Clip")
def _clip_1(call: NodeCall) -> Outputs:
    return select.clip(call.tensor(0), call.attr("min"), call.attr("max"))


@operator("Cast", since=6)
def _cast(call: NodeCall) -> Outputs:
    return astype(call.tensor(0), call.dtype("to"))


@operator("CastLike")
def _cast_like(call: NodeCall) -> Outputs:
    return astype(call.tensor(0), call.spec(1).dtype)


@operator("Expand")
def _expand(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    return broadcast_to(x, broadcast_shapes(x.shape, tuple(call.sizes(1))))
