"""Pooling over windows and over whole maps."""

from __future__ import annotations

from typing import Any

from graphflow.ir.op import Tensor
from graphflow.ir.spec import product
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.onnx.operators.networks.convolution import padding_of, steps_of
from graphflow.ops.pointwise import arithmetic
from graphflow.ops.reductions import extrema, reduce
from graphflow.ops.tensors.creation import arange
from graphflow.ops.tensors.shape import reshape
from graphflow.ops.windows import pool


def _window(call: NodeCall) -> dict[str, Any]:
    kernel = call.required_attr("kernel_shape")
    return {
        "kernel": tuple(kernel),
        "padding": padding_of(call, len(kernel)),
        "ceil_mode": bool(call.attr("ceil_mode", 0)),
        **steps_of(call, len(kernel)),
    }


@operator("MaxPool")
def _max_pool(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    window = _window(call)
    if not call.wants(1):
        return pool.max_pool(x, **window)
    values, places = pool.max_pool(x, return_indices=True, **window)
    if call.attr("storage_order", 0):
        places = _column_major(x, places)
    return [values, _over_all(x, places)]


def _column_major(x: Tensor, places: Tensor) -> Tensor:
    """Convert flat indices in a map to those of a map whose first spatial axis is contiguous."""
    result: Any = 0
    rest: Any = places
    factor: Any = 1
    sizes = x.shape[2:]
    for i in range(len(sizes)):
        below = product(sizes[i + 1 :])
        result = result + arithmetic.floor_divide(rest, below) * factor
        rest, factor = arithmetic.remainder(rest, below), factor * sizes[i]
    total: Tensor = result
    return total


def _over_all(x: Tensor, places: Tensor) -> Tensor:
    """Convert flat indices in a map to flat indices in the whole tensor."""
    maps = reshape(arange(x.shape[0] * x.shape[1]), (*x.shape[:2], *(1,) * (x.ndim - 2)))
    result: Tensor = arithmetic.add(places, maps * product(x.shape[2:]))
    return result


@operator("AveragePool")
def _average_pool(call: NodeCall) -> Outputs:
    include = bool(call.attr("count_include_pad", 0))
    return pool.avg_pool(call.tensor(0), count_include_pad=include, **_window(call))


@operator("LpPool")
def _lp_pool(call: NodeCall) -> Outputs:
    return pool.lp_pool(call.tensor(0), p=float(call.attr("p", 2)), **_window(call))


def _spatial(x: Tensor) -> tuple[int, ...]:
    return tuple(range(2, x.ndim))


@operator("GlobalAveragePool")
def _global_average(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    return reduce.mean(x, axis=_spatial(x), keepdims=True)


@operator("GlobalMaxPool")
def _global_max(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    return extrema.max(x, axis=_spatial(x), keepdims=True)


@operator("GlobalLpPool")
def _global_lp(call: NodeCall) -> Outputs:
    x, p = call.tensor(0), float(call.attr("p", 2))
    total = reduce.sum(arithmetic.pow(arithmetic.abs(x), p), axis=_spatial(x), keepdims=True)
    return arithmetic.pow(total, 1.0 / p)
