"""Graphs that do not train, for variables that servers keep.

They run where the planner places them, and read variables at their servers. All copies of a
variable get what they assign to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor, origin_scope
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.sharding.sharded_graph import ShardedGraph, ShardedVariable


def divide_evaluation(
    graph: Graph, mesh: Mesh, known: Mapping[Node, ShardedVariable]
) -> ShardedGraph:
    """Return a graph that does not train.

    Args:
        graph: the graph.
        mesh: the mesh of servers and workers.
        known: the shards of variables that exist already.
    """
    own = {v: pieces for v, pieces in known.items() if v in graph.names}
    others: list[Tensor] = []

    def read_first(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
        if node in own:
            return own[node].nodes[0].outputs
        if node.op.name != "assign" or node.inputs[0].node not in own:
            return None
        first, *copies = dict.fromkeys(own[node.inputs[0].node].nodes)
        made = []
        for copy in (first, *copies):
            with origin_scope(node, "", copy.device):
                assigned: Tensor = REGISTRY["assign"](copy.outputs[0], inputs[1])
            made.append(assigned)
        others.extend(made[1:])
        return made[:1]

    changed = graph.rewrite(read_first)
    outputs = [*changed.outputs]
    if others:
        with origin_scope(others[0].node, "", DeviceName()):
            outputs.append(REGISTRY["group"](*others, name="copies"))
    return ShardedGraph(
        graph, Graph(outputs, changed.names).verify(), mesh, SizePartitioner(mesh), {}, own, ()
    )


__all__ = ["divide_evaluation"]
