"""JoinPads: replace sums of padded tensors that do not overlap by a concatenation.

The gradient of a split is such a sum: each part's gradient is padded with zeros, and all are added.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor, make_node, replacement_scope
from graphflow.ir.spec import Size
from graphflow.passes.base import Pass, Phase, register_pass

_MAX_PARTS = 64
"""The largest number of parts of a sum."""


@dataclass(frozen=True)
class JoinPads(Pass):
    """Replace a sum of zero-padded tensors that fill an axis without a gap by their concatenation.

    The bits may differ in one way: a sum turns a part's -0 into 0, a concatenation keeps it.
    """

    phase: ClassVar[Phase] = Phase.SIMPLIFY

    def __call__(self, graph: Graph) -> Graph:
        return graph.rewrite(_join_pads, ("add",)) if "pad" in graph.op_names else graph


def _join_pads(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
    if not _is_pad(inputs[1]):
        return None
    pads = _collect_pads(inputs)
    if pads is None:
        return None
    axis, parts = _order_along_axis(pads)
    shape, end = node.specs[0].shape, 0
    for start, part in parts:
        if start != end or part.dtype != node.specs[0].dtype:
            return None
        end = start + part.shape[axis]  # type: ignore[assignment]
    if not parts or end != shape[axis]:
        return None
    with replacement_scope(node):
        return make_node(REGISTRY["concat"], tuple(t for _, t in parts), {"axis": axis}).outputs


def _collect_pads(inputs: tuple[Tensor, ...]) -> list[Node] | None:
    """Return the pads of a sum that has no other terms; None for other sums."""
    pads: list[Node] = []
    left = list(inputs)
    while left:
        tensor = left.pop()
        if _is_pad(tensor):
            pads.append(tensor.node)
        elif tensor.node.op.name == "add":
            left += tensor.node.inputs
        else:
            return None
        if len(pads) + len(left) > _MAX_PARTS:
            return None
    return pads


def _is_pad(tensor: Tensor) -> bool:
    """Return True if a tensor is another one surrounded by zeros."""
    node = tensor.node
    if node.op.name != "pad":
        return False
    value = node.attrs["value"]
    return value == 0 and all(step == 1 for step in node.attrs["step"])


def _order_along_axis(pads: Sequence[Node]) -> tuple[int, list[tuple[Size, Tensor]]]:
    """Return the only axis along which tensors are padded, and each start and tensor in order.

    Without such an axis, there are no tensors.
    """
    shape = pads[0].specs[0].shape
    padded = {
        axis
        for pad in pads
        for axis, (n, whole) in enumerate(zip(pad.inputs[0].shape, shape, strict=True))
        if n != whole
    }
    if len(padded) != 1 or any(pad.specs[0].shape != shape for pad in pads):
        return 0, []
    (axis,) = padded
    parts = [(pad.attrs["start"][axis], pad.inputs[0]) for pad in pads]
    if not all(isinstance(start, int) for start, _ in parts):
        return 0, []
    return axis, sorted(parts, key=lambda part: part[0])


register_pass(JoinPads())
