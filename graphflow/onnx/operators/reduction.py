"""Reductions over axes, running sums, and the place of an extremum."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graphflow.onnx.call import Call
from graphflow.onnx.operators.shape import axes_of, axis_of
from graphflow.onnx.registry import Outputs, operator
from graphflow.op import Tensor
from graphflow.ops import elementwise, extrema, product, reduce, transcendental, window
from graphflow.ops.convert import astype
from graphflow.ops.shape import expand_dims

# The opset since which the axes are an input.
_AXES_SINCE = {"ReduceSum": 13}


def _reduction(name: str, function: Callable[..., Tensor]) -> None:
    @operator(name)
    def translate(call: Call) -> Outputs:
        x = call.tensor(0)
        axes = axes_of(call, 1, _AXES_SINCE.get(name, 18))
        if not axes:
            if call.attr("noop_with_empty_axes", 0):
                return function(expand_dims(x, 0), axis=(0,), keepdims=False)
            axes = list(range(x.ndim))
        keep = bool(call.attr("keepdims", 1))
        return function(x, axis=tuple(axes), keepdims=keep)


def _total(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    """In x's own dtype: ints stay as narrow as they are."""
    return astype(reduce.sum(x, axis=axis, keepdims=keepdims), x.dtype)


def _mean(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    if x.dtype.kind in "iu":
        mean = reduce.mean(astype(x, "float64"), axis=axis, keepdims=keepdims)
        return astype(mean, x.dtype)
    return reduce.mean(x, axis=axis, keepdims=keepdims)


def _through_float(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.dtype.kind in "iu":
        return astype(function(astype(x, "float64")), x.dtype)
    return function(x)


def _l1(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return _total(elementwise.abs(x), axis, keepdims)


def _sum_square(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return _total(elementwise.square(x), axis, keepdims)


def _l2(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return _through_float(lambda v: transcendental.sqrt(_sum_square(v, axis, keepdims)), x)


def _log_sum(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return _through_float(lambda v: transcendental.log(_total(v, axis, keepdims)), x)


def _log_sum_exp(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return _through_float(lambda v: extrema.logsumexp(v, axis=axis, keepdims=keepdims), x)


def _product(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
    return astype(product.prod(x, axis=axis, keepdims=keepdims), x.dtype)


def _extremum(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def reduced(x: Tensor, axis: Any, keepdims: bool) -> Tensor:
        if x.dtype.kind == "b":
            small = function(astype(x, "uint8"), axis=axis, keepdims=keepdims)
            return astype(small, "bool")
        return function(x, axis=axis, keepdims=keepdims)

    return reduced


for _name, _function in {
    "ReduceSum": _total, "ReduceMean": _mean, "ReduceMax": _extremum(extrema.max),
    "ReduceMin": _extremum(extrema.min), "ReduceProd": _product, "ReduceL1": _l1,
    "ReduceL2": _l2, "ReduceLogSum": _log_sum, "ReduceLogSumExp": _log_sum_exp,
    "ReduceSumSquare": _sum_square,
}.items():  # fmt: skip
    _reduction(_name, _function)


def _arg(name: str, function: Callable[..., Tensor]) -> None:
    @operator(name)
    def translate(call: Call) -> Outputs:
        x = call.tensor(0)
        axis = axis_of(call, 0, x.ndim)
        keep = bool(call.attr("keepdims", 1))
        if call.attr("select_last_index", 0):
            last = function(window.flip(x, axis), axis=axis, keepdims=keep)
            return elementwise.subtract(x.shape[axis] - 1, last)
        return function(x, axis=axis, keepdims=keep)


_arg("ArgMax", extrema.argmax)
_arg("ArgMin", extrema.argmin)


def _running(name: str, function: Callable[..., Tensor], neutral: int) -> None:
    @operator(name)
    def translate(call: Call) -> Outputs:
        x = call.tensor(0)
        axis = int(call.scalar(1)) % max(x.ndim, 1)
        backward = call.attr("reverse", 0)
        if backward:
            x = window.flip(x, axis)
        total = astype(function(x, axis), x.dtype)
        if call.attr("exclusive", 0):
            widths = [(1 if i == axis else 0, 0) for i in range(x.ndim)]
            padded = window.pad(total, widths, value=x.dtype.type(neutral).item())
            total = window.window(padded, axis, 0, x.shape[axis])
        return window.flip(total, axis) if backward else total


_running("CumSum", product.cumsum, 0)
