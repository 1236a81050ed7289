"""Results that a body computes in shared memory, in the slot from which they are sent.

A tensor that goes through a ring has to be in its slot before the receiver can read it. If the op
that makes it writes there, the receiver need not wait for a copy. Before the op runs, the body asks
for the slot. If the ring has no free one, or the edge has no ring, the tensor goes to its buffer,
and the send copies it. So the body never waits earlier than its send would.

The slot stays as it is until the body sends over the edge again, so later nodes of the body read
the tensor there. The next state of a loop is copied to the state's buffer at the end of the body,
when its receiver has begun to work.
"""

from __future__ import annotations

from typing import NamedTuple

from graphflow.ir.graph import Graph, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import nbytes
from graphflow.ops.communication.send_recv import RECEIVING_OPS, SENDING_OPS, edges_of
from graphflow.runtime.memory.live_ranges import OUTSIDE_ARENA
from graphflow.runtime.memory.memory_layout import MemoryLayout
from graphflow.runtime.partitioning.partition import Partition

MIN_BYTES = 256 << 10
"""Size of the smallest tensor that is computed in its slot. A copy of less takes about as long as
asking for the slot."""


class SlotResult(NamedTuple):
    """A tensor that can be computed in a slot.

    Attributes:
        tensor: the tensor.
        edges: the edges over which it is sent.
        after: the node after which the slot is asked for; None: before all nodes.
        is_result: whether its buffer is that of a result of the body, to which it is copied.
    """

    tensor: Tensor
    edges: tuple[int, ...]
    after: Node | None
    is_result: bool


def find_slot_results(partition: Partition, layout: MemoryLayout) -> list[SlotResult]:
    """Return the tensors of a body that can be computed in the slots from which they are sent.

    The slot of a tensor is asked for after the last receive before the tensor is made. Then its
    receiver had time to give slots back. Nothing else may go over the edges from then on.
    """
    graph = partition.graph
    position = {node: number for number, node in enumerate(graph.nodes)}
    uses: dict[int, list[int]] = {}
    for node in graph.nodes:
        for edge in _edges_inside(node):
            uses.setdefault(edge, []).append(position[node])
    receives = [node for node in graph.nodes if node.op.name in RECEIVING_OPS]
    last = last_tensors(graph, layout)
    results = {i: layout.roots[t] for i, t in partition.fetches.items()}
    found: dict[Tensor, SlotResult] = {}
    for node in graph.nodes:
        plain = {"send": 1, "send_where": 2}.get(node.op.name)
        if plain != len(node.inputs):  # no send, or one of a ragged edge
            continue
        tensor, edges = node.inputs[0], tuple(edges_of(node))
        before = [r for r in receives if position[r] < position[tensor.node]]
        begin = position[before[-1]] if before else -1
        is_result = results.get(str(layout.outside.get(tensor))) is tensor
        if (
            nbytes(layout.specs[tensor]) >= MIN_BYTES
            and writes_anywhere(tensor, layout)
            and (is_result or last.get(layout.blocks.get(tensor, -1)) is tensor)
            and all([p for p in uses[e] if p > begin] == [position[node]] for e in edges)
        ):
            after = before[-1] if before else None
            found.setdefault(tensor, SlotResult(tensor, edges, after, is_result))
    return [*found.values()]


def _edges_inside(node: Node) -> set[int]:
    """Return the edges over which a node, or a node in its bodies, sends."""
    inner = [each for body in bodies(node) for each in body.graph.walk()]
    sending = [each for each in (node, *inner) if each.op.name in SENDING_OPS]
    return {edge for each in sending for edge in edges_of(each)}


def last_tensors(graph: Graph, layout: MemoryLayout) -> dict[int, Tensor]:
    """Return the last tensor that each buffer of the arena holds.

    An earlier one has to be there, since a later one may be computed in its place.
    """
    return {layout.blocks[t]: t for t in _by_position(graph, layout) if t in layout.blocks}


def _by_position(graph: Graph, layout: MemoryLayout) -> list[Tensor]:
    """Return all tensors in the order in which they are written."""
    position = {node: number for number, node in enumerate(graph.nodes)}
    made = {node: position[fused.last] for node, fused in layout.regions.items()}
    nodes = sorted(graph.nodes, key=lambda node: made.get(node, position[node]))
    return [tensor for node in nodes for tensor in node.outputs]


def writes_anywhere(tensor: Tensor, layout: MemoryLayout) -> bool:
    """Return True if the op that makes a tensor may write it to any memory."""
    node = tensor.node
    if node.op.name in OUTSIDE_ARENA or node.op.alias or node.op.in_place:
        return False
    return node not in layout.body_layouts


__all__ = ["MIN_BYTES", "SlotResult", "find_slot_results", "last_tensors", "writes_anywhere"]
