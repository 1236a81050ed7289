"""Reductions over axes, running sums and products, ArgMax and ArgMin."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.op import Tensor
from graphflow.ir.spec import Dim, kind
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.onnx.operators.shape import axes_of, axis_of
from graphflow.ops.pointwise import arithmetic, transcendental
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.reductions import cumulative as product
from graphflow.ops.reductions import extrema, reduce
from graphflow.ops.tensors import slicing as window
from graphflow.ops.tensors.creation import full
from graphflow.ops.tensors.padding import pad
from graphflow.ops.tensors.shape import expand_dims

# The opset from which on the axes are an input, where it is not 18.
_AXES_SINCE = {"ReduceSum": 13}


def _register_reduction(name: str, function: Callable[..., Tensor]) -> None:
    @operator(name)
    def translate(call: NodeCall) -> Outputs:
        x = call.tensor(0)
        axes = axes_of(call, _AXES_SINCE.get(name, 18))
        if not axes:
            if call.attr("noop_with_empty_axes", 0):
                return function(expand_dims(x, 0), axis=(0,), keepdims=False)
            axes = list(range(x.ndim))
        keep = bool(call.attr("keepdims", 1))
        return function(x, axis=tuple(axes), keepdims=keep)


def _reduce_empty(x: Tensor, axis: tuple[int, ...], keepdims: bool, value: Any) -> Tensor | None:
    """Return the result of a reduction over no elements; None if x may have elements."""
    if 0 not in (x.shape[a] for a in axis):
        return None
    chosen = {a % x.ndim for a in axis}
    shape = [1 if i in chosen else n for i, n in enumerate(x.shape) if keepdims or i not in chosen]
    return full(tuple(shape), value, dtype=x.dtype)


def _total(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    """Sum in the dtype of x, also narrow ints."""
    return astype(reduce.sum(x, axis=axis, keepdims=keepdims), x.dtype)


def _mean(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    if x.dtype.kind in "iu":
        mean = reduce.mean(astype(x, "float64"), axis=axis, keepdims=keepdims)
        return astype(mean, x.dtype)
    return reduce.mean(x, axis=axis, keepdims=keepdims)


def _compute_in_float(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.dtype.kind in "iu":
        return astype(function(astype(x, "float64")), x.dtype)
    return function(x)


def _l1(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return _total(arithmetic.abs(x), axis, keepdims)


def _sum_square(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return _total(arithmetic.square(x), axis, keepdims)


def _l2(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return _compute_in_float(lambda v: transcendental.sqrt(_sum_square(v, axis, keepdims)), x)


def _log_sum(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return _compute_in_float(lambda v: transcendental.log(_total(v, axis, keepdims)), x)


def _log_sum_exp(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    none = _reduce_empty(x, axis, keepdims, -math.inf if kind(x.dtype) == "float" else 0)
    if none is not None:
        return none
    return _compute_in_float(lambda v: extrema.logsumexp(v, axis=axis, keepdims=keepdims), x)


def _product(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return astype(product.prod(x, axis=axis, keepdims=keepdims), x.dtype)


def _least(dtype: np.dtype[Any]) -> Any:
    """Return the least value of a dtype."""
    if kind(dtype) == "int":
        return int(np.iinfo(dtype).min)
    return False if kind(dtype) == "bool" else -math.inf


def _greatest(dtype: np.dtype[Any]) -> Any:
    if kind(dtype) == "int":
        return int(np.iinfo(dtype).max)
    return True if kind(dtype) == "bool" else math.inf


def _extremum(
    function: Callable[..., Tensor], neutral: Callable[[np.dtype[Any]], Any]
) -> Callable[..., Tensor]:
    def reduce_axes(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
        none = _reduce_empty(x, axis, keepdims, neutral(x.dtype))
        if none is not None:
            return none
        if x.dtype.kind == "b":
            small = function(astype(x, "uint8"), axis=axis, keepdims=keepdims)
            return astype(small, "bool")
        return function(x, axis=axis, keepdims=keepdims)

    return reduce_axes


for _name, _function in {
    "ReduceSum": _total, "ReduceMean": _mean, "ReduceMax": _extremum(extrema.max, _least),
    "ReduceMin": _extremum(extrema.min, _greatest), "ReduceProd": _product, "ReduceL1": _l1,
    "ReduceL2": _l2, "ReduceLogSum": _log_sum, "ReduceLogSumExp": _log_sum_exp,
    "ReduceSumSquare": _sum_square,
}.items():  # fmt: skip
    _register_reduction(_name, _function)


def _register_arg(name: str, function: Callable[..., Tensor]) -> None:
    @operator(name)
    def translate(call: NodeCall) -> Outputs:
        x = call.tensor(0)
        axis = axis_of(call, 0, x.ndim)
        keep = bool(call.attr("keepdims", 1))
        if call.attr("select_last_index", 0):
            last = function(window.flip(x, axis), axis=axis, keepdims=keep)
            return arithmetic.subtract(x.shape[axis] - 1, last)
        return function(x, axis=axis, keepdims=keep)


_register_arg("ArgMax", extrema.argmax)
_register_arg("ArgMin", extrema.argmin)


def _register_running(name: str, function: Callable[..., Tensor], neutral: int) -> None:
    @operator(name)
    def translate(call: NodeCall) -> Outputs:
        x = call.tensor(0)
        axis = int(call.scalar(1)) % max(x.ndim, 1)
        backward = call.attr("reverse", 0)
        if backward:
            x = window.flip(x, axis)
        total = astype(function(x, axis), x.dtype)
        if call.attr("exclusive", 0):
            widths = [(1 if i == axis else 0, 0) for i in range(x.ndim)]
            padded = pad(total, widths, value=x.dtype.type(neutral).item())
            total = window.window(padded, axis, 0, x.shape[axis])
        return window.flip(total, axis) if backward else total


_register_running("CumSum", product.cumsum, 0)


def _running_product(x: Tensor, axis: int) -> Tensor:
    """Multiply by doubling: after step k, each element is the product of the last 2ᵏ.

    Unlike exp(cumsum(log)), this and its gradient are exact at zeros.

    Raises:
        ShapeError: the size of the axis is symbolic.
    """
    n = x.shape[axis]
    if isinstance(n, Dim):
        raise ShapeError(f"a running product needs the size of axis {axis}, {n}, as a number")
    step = 1
    while step < n:
        before = window.window(x, axis, 0, n - step)
        widths = [(step if i == axis else 0, 0) for i in range(x.ndim)]
        x = x * pad(before, widths, value=1)
        step *= 2
    return x


_register_running("CumProd", _running_product, 1)
