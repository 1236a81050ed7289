"""Micro-batches take turns: the graph in which a device finishes with one before the next begins,
so that what one needs for its backward pass is gone by then.
"""

from __future__ import annotations

import heapq
from dataclasses import replace

from graphflow.graph import Graph
from graphflow.op import Node, Tensor
from graphflow.parallel.shard import Sharded


def in_micro_batches(cut: Sharded, axis: str) -> Sharded:
    """A division whose places along an axis of the mesh take turns."""
    at = cut.mesh.names.index(axis)
    turns: dict[Node, int] = {}
    for value in cut.values.values():
        for place, part in zip(cut.mesh.places, value.parts, strict=True):
            turns[part.node] = min(turns.get(part.node, place[at]), place[at])
    return replace(cut, graph=_reordered(cut.graph, turns, cut.mesh.sizes[axis]))


def _reordered(graph: Graph, turns: dict[Node, int], count: int) -> Graph:
    """The graph built once more in the order of turns, as far as what nodes read allows."""
    missing = {node: len({t.node for t in node.inputs}) for node in graph.nodes}
    after: dict[Node, int] = {}
    ready: list[tuple[int, int, Node]] = []

    def add(node: Node) -> None:
        turn = max(turns.get(node, 0), after.get(node, 0))
        heapq.heappush(ready, (turn, node.serial, node))

    for node in graph.nodes:
        if not missing[node]:
            add(node)
    mapped: dict[Tensor, Tensor] = {}
    names: dict[Node, str] = {}
    while ready:
        turn, _, node = heapq.heappop(ready)
        made = node
        if node.inputs:
            inputs = tuple(mapped.get(t, t) for t in node.inputs)
            made = node.with_inputs(inputs, turn=min(turn, count))
            mapped.update(zip(node.outputs, made.outputs, strict=True))
        names[made] = graph.names[node]
        for reader in graph.consumers[node]:
            after[reader] = max(after.get(reader, 0), turn)
            missing[reader] -= 1
            if not missing[reader]:
                add(reader)
    return Graph([mapped.get(t, t) for t in graph.outputs], names)
