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
from graphflow.parallel.served_tables.table_pieces import (
    assign_pieces,
    choose_read_tables,
    gather_whole,
    look_up,
    make_pieces,
    ranges_of,
)
from graphflow.parallel.served_tables.table_selection import TableKeys
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable


def divide_evaluation(
    graph: Graph,
    mesh: Mesh,
    known: Mapping[Node, ShardedVariable],
    homes: Sequence[DeviceName],
    table_keys: TableKeys,
) -> ShardedGraph:
    """Return a graph that does not train.

    Args:
        graph: the graph.
        mesh: the mesh of servers and workers.
        known: the shards of variables that exist already.
        homes: the devices of servers.
        table_keys: what names the tables.
    """
    own = {v: pieces for v, pieces in known.items() if v in graph.names}
    for table in choose_read_tables(graph, table_keys):
        if table not in own:
            name = graph.names[table]
            own[table] = make_pieces(table, name, ranges_of(table, name, own, len(homes)), homes)
    others: list[Tensor] = []

    def read_first(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
        if node in own and own[node].ranges is None:
            return own[node].nodes[0].outputs
        if node in own:
            with origin_scope(node, "", DeviceName()):
                return (gather_whole(own[node]),)
        if node.op.name == "take" and not node.attrs["axis"]:
            pieces = own.get(node.inputs[0].node)
            if pieces is not None and pieces.ranges is not None:
                with origin_scope(node, "", node.device):
                    return (look_up(node, pieces, inputs[1]),)
        if node.op.name != "assign" or node.inputs[0].node not in own:
            return None
        first, *copies = dict.fromkeys(own[node.inputs[0].node].nodes)
        pieces = own[node.inputs[0].node]
        if pieces.ranges is not None:
            others.extend(assign_pieces(pieces, inputs[1]))
            return (inputs[1],)
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
