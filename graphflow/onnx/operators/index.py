"""Gather, scatter, TopK, and other operators on computed indices."""

from __future__ import annotations

from graphflow.ir.op import Tensor
from graphflow.onnx.loading.translation.node_call import NodeCall
from graphflow.onnx.loading.translation.operator_registry import Outputs, operator
from graphflow.onnx.operators.shape import axis_of
from graphflow.ops.ordering.sort import top_k
from graphflow.ops.pointwise import arithmetic, comparison, select
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.tensors import scatter
from graphflow.ops.tensors import take as index
from graphflow.ops.tensors.creation import arange
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.shape import expand_dims, moveaxis, reshape
from graphflow.ops.tensors.slicing import window
from graphflow.ops.tensors.take_along_axis import take_along_axis


@operator("Gather")
def _gather(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    return index.take(x, call.tensor(1), axis_of(call, 0, x.ndim))


@operator("GatherElements")
def _gather_elements(call: NodeCall) -> Outputs:
    x, places = call.tensor(0), call.tensor(1)
    axis = axis_of(call, 0, x.ndim)
    for i, (have, want) in enumerate(zip(x.shape, places.shape, strict=True)):
        if i != axis and have != want:
            x = window(x, i, 0, want)
    return take_along_axis(x, places, axis)


@operator("GatherND")
def _gather_nd(call: NodeCall) -> Outputs:
    return scatter.gather_nd(call.tensor(0), call.tensor(1), call.attr("batch_dims", 0))


@operator("ScatterND")
def _scatter_nd(call: NodeCall) -> Outputs:
    return scatter.scatter_nd(
        call.tensor(0), call.tensor(1), call.tensor(2), reduction=call.attr("reduction", "none")
    )


@operator("ScatterElements", "Scatter")
def _scatter_elements(call: NodeCall) -> Outputs:
    x = call.tensor(0)
    return scatter.scatter(
        x, call.tensor(1), call.tensor(2), axis_of(call, 0, x.ndim), call.attr("reduction", "none")
    )


@operator("OneHot")
def _one_hot(call: NodeCall) -> Outputs:
    """Translate OneHot; a class outside of the depth gives a row without a one."""
    indices = astype(call.tensor(0), "int64")
    (depth,) = call.sizes(1)
    off, on = (call.tensor(2)[i] for i in (0, 1))
    axis = call.attr("axis", -1)
    counted = select.where(comparison.less(indices, 0), indices + depth, indices)
    hits = comparison.equal(expand_dims(counted, -1), arange(depth))
    axis += indices.ndim + 1 if axis < 0 else 0
    hits = moveaxis(hits, -1, axis)
    return select.where(hits, on, off)


@operator("TopK", since=10)
def _top_k(call: NodeCall) -> Outputs:
    (k,) = call.sizes(1)
    return _select_top(call, call.static_size(k))


@operator("TopK")
def _top_k_1(call: NodeCall) -> Outputs:
    return _select_top(call, call.required_attr("k"))


def _select_top(call: NodeCall, k: int) -> list[Tensor]:
    x = call.tensor(0)
    axis = axis_of(call, -1, x.ndim)
    values, places = top_k(x, k, axis=axis, largest=bool(call.attr("largest", 1)))
    return [values, astype(places, "int64")]


@operator("ReverseSequence")
def _reverse_sequence(call: NodeCall) -> Outputs:
    """Reverse the first `length` elements of each sequence."""
    x, lengths = call.tensor(0), astype(call.tensor(1), "int64")
    time, batch = call.attr("time_axis", 0), call.attr("batch_axis", 1)
    steps = reshape(arange(x.shape[time]), _axis_shape(x, time))
    ends = reshape(lengths, _axis_shape(x, batch))
    places = select.where(comparison.less(steps, ends), ends - 1 - steps, steps)

    return take_along_axis(x, broadcast_to(places, x.shape), time)


def _axis_shape(x: Tensor, axis: int) -> tuple[int, ...]:
    return tuple(-1 if i == axis else 1 for i in range(x.ndim))


@operator("TensorScatter")
def _tensor_scatter(call: NodeCall) -> Outputs:
    """Write new keys or values into a cache, from a position for each element of the batch."""
    cache, update = call.tensor(0), call.tensor(1)
    axis = axis_of(call, -2, cache.ndim)
    size, count = cache.shape[axis], update.shape[axis]
    steps = reshape(arange(count), _axis_shape(update, axis))
    starts = call.optional(2)
    if starts is None:
        starts = astype(arange(cache.shape[0]) * 0, "int64")
    places = reshape(astype(starts, "int64"), _axis_shape(update, 0)) + steps
    if call.attr("mode", "linear") == "circular":
        places = arithmetic.remainder(places, size)

    return scatter.put_along_axis(cache, broadcast_to(places, update.shape), update, axis)
