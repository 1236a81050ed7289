"""Host nodes in numpy and Python lists: data-dependent shapes, sequences and optionals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.errors import OnnxError
from graphflow.onnx.loading.host.host_nodes import HostNode, HostRun, host_routine
from graphflow.ops.images.nms import suppression_op

# Shapes that depend on data -------------------------------------------------------------------


@host_routine("NonZero")
def _nonzero(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    (x,) = inputs
    return [np.array(np.nonzero(np.atleast_1d(x)), np.int64).reshape(max(x.ndim, 1), -1)]


@host_routine("Compress")
def _compress(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    x, condition = inputs
    return [np.compress(condition, x, axis=node.attr("axis"))]


@host_routine("Unique")
def _unique(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    (x,) = inputs
    axis = node.attr("axis")
    values, first, inverse, counts = np.unique(
        x, return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    inverse = inverse.reshape(-1)
    if not node.attr("sorted", 1):
        order = np.argsort(first)
        rank = np.empty_like(order)
        rank[order] = np.arange(order.size)
        values = np.take(values, order, axis=axis or 0)
        first, counts, inverse = first[order], counts[order], rank[inverse]
    return [values, *(a.astype(np.int64) for a in (first, inverse, counts))]


@host_routine("NonMaxSuppression")
def _suppression(
    run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]
) -> Any:
    """Return one row for each box that is left; our own op fills up a fixed number of rows."""
    boxes, scores = np.asarray(inputs[0]), np.asarray(inputs[1])
    limits = [*inputs[2:], *(None,) * (5 - len(inputs))]
    most, overlap, least = (None if v is None else np.asarray(v).item() for v in limits)
    rows, count = suppression_op.run(
        np,
        [boxes, scores],
        {
            "max_output": min(int(most or 0), boxes.shape[1]),
            "iou_threshold": overlap or 0.0,
            "score_threshold": -np.inf if least is None else least,
            "centers": bool(node.attr("center_point_box", 0)),
        },
    )
    return [rows[: int(count)]]


# Sequences and optionals ----------------------------------------------------------------------


@host_routine("SequenceConstruct")
def _construct(
    run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]
) -> Any:
    return [list(inputs)]


@host_routine("SequenceEmpty")
def _empty(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    return [[]]


@host_routine("SequenceLength")
def _length(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    return [np.array(len(inputs[0]), np.int64)]


def _normalize_position(position: Any, count: int, node: HostNode) -> int:
    """Return a position in a sequence, counted from the front.

    Raises:
        OnnxError: the position is outside of the sequence.
    """
    at = int(np.asarray(position).item())
    if not -count <= at < count:
        raise OnnxError(f"{node.label}: position {at} is outside a sequence of length {count}")
    return at % count


@host_routine("SequenceAt")
def _sequence_at(
    run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]
) -> Any:
    return [inputs[0][_normalize_position(inputs[1], len(inputs[0]), node)]]


@host_routine("SequenceErase")
def _erase(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    items = list(inputs[0])
    position = inputs[1] if len(inputs) > 1 and inputs[1] is not None else -1
    del items[_normalize_position(position, len(items), node)]
    return [items]


@host_routine("SequenceInsert")
def _insert(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    items = list(inputs[0])
    at = len(items)
    if len(inputs) > 2 and inputs[2] is not None:
        position = int(np.asarray(inputs[2]).item())
        at = at if position == at else _normalize_position(position, len(items), node)
    return [[*items[:at], inputs[1], *items[at:]]]


@host_routine("SplitToSequence")
def _split(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    x, axis = inputs[0], node.attr("axis", 0)
    sizes = inputs[1] if len(inputs) > 1 else None
    if sizes is None:
        parts = np.split(x, x.shape[axis], axis)
        keep = node.attr("keepdims", 1)
        return [[part if keep else np.squeeze(part, axis) for part in parts]]
    if np.ndim(sizes) == 0:
        bounds = list(range(int(sizes), x.shape[axis], int(sizes)))
    else:
        bounds = [int(b) for b in np.cumsum(sizes)[:-1]]
        if int(np.sum(sizes)) != x.shape[axis]:
            raise OnnxError(
                f"{node.label}: parts of sizes {list(sizes)} do not make up {x.shape[axis]}"
            )
    return [list(np.split(x, bounds, axis))]


@host_routine("ConcatFromSequence")
def _concat(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    axis = node.attr("axis", 0)
    join = np.stack if node.attr("new_axis", 0) else np.concatenate
    return [join(inputs[0], axis=axis)]


@host_routine("Identity")
def _identity(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    return list(inputs)


@host_routine("Optional")
def _optional(run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]) -> Any:
    return [inputs[0] if inputs else None]


@host_routine("OptionalHasElement")
def _has_element(
    run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]
) -> Any:
    return [np.array(bool(inputs) and inputs[0] is not None)]


@host_routine("OptionalGetElement")
def _get_element(
    run: HostRun, node: HostNode, inputs: Sequence[Any], outer: Mapping[str, Any]
) -> Any:
    if inputs[0] is None:
        raise OnnxError(f"{node.label}: the optional holds nothing")
    return [inputs[0]]
