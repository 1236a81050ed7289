"""Order nodes by micro-batch, so that a device finishes one micro-batch before the next one begins.

The activations that a micro-batch needs for its backward pass are freed by then.
"""

from __future__ import annotations

from collections.abc import Mapping

from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph
from graphflow.placement.placers.construction.execution_order import by_turns


def order_by_microbatch(cut: ShardedGraph, axis: str) -> ShardedGraph:
    """Return the partitioned graph, ordered by the coordinate along a sequential mesh axis."""
    at = cut.mesh.names.index(axis)
    turns: dict[Node, int] = {}
    for value in cut.values.values():
        for place, part in zip(cut.mesh.places, value.shards, strict=True):
            turns[part.node] = min(turns.get(part.node, place[at]), place[at])
    return order_by_turns(cut, turns)


def order_by_turns(cut: ShardedGraph, turns: Mapping[Node, int]) -> ShardedGraph:
    """Return the partitioned graph with its nodes in the order of turns.

    Args:
        cut: the graph.
        turns: the turns of nodes; others have the turn of what they read.
    """
    return cut.map_graph(lambda graph: _reorder(graph, turns))


def _reorder(graph: Graph, turns: Mapping[Node, int]) -> Graph:
    """Rebuild a graph in the order of turns, as far as its edges allow."""
    number = {node: i for i, node in enumerate(graph.nodes)}
    readers = [[number[reader] for reader in graph.consumers[node]] for node in graph.nodes]
    mapped: dict[Tensor, Tensor] = {}
    names: dict[Node, str] = {}
    own = [turns.get(node, -1) for node in graph.nodes]
    for i, turn in by_turns(readers, own, range(len(own))):
        node = made = graph.nodes[i]
        if node.inputs:
            inputs = tuple(mapped.get(t, t) for t in node.inputs)
            made = node.with_inputs(inputs, turn=turn)
            mapped.update(zip(node.outputs, made.outputs, strict=True))
        names[made] = graph.names[node]
    return Graph([mapped.get(t, t) for t in graph.outputs], names)
