"""From a training step to a window of turns over a mesh, with stale sums along one of its axes.

graph ─annotate_graph, propagate_layouts→ layouts of one step
      ─unroll_turns→ Window
      ─emit_shards→ EmittedGraph, with sums of turn 0 only
      ─assemble_graph→ ShardedGraph
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import partial

from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import Span
from graphflow.parallel.mesh.device_mesh import Mesh
from graphflow.parallel.mesh.layouts import CommunicationRecord, Layout, SentTensor, whole
from graphflow.parallel.mesh.mesh_arguments import check_mesh_size
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.resharding.communication_log import user_name
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.sharding.emission.sharded_graph import ShardedGraph, ShardedVariable
from graphflow.parallel.sharding.partitioner import (
    AnnotatedGraph,
    EmittedGraph,
    Layouts,
    MeshStrategy,
    annotate_graph,
    assemble_graph,
    emit_shards,
    lay_out_mesh,
    propagate_layouts,
)
from graphflow.parallel.stale_sums.stale_emitter import StaleEmitter
from graphflow.parallel.stale_sums.stale_resharder import StaleResharder
from graphflow.parallel.stale_sums.turns import Window, unroll_turns
from graphflow.placement.clusters.cluster import Cluster


def divide_window(
    strategy: MeshStrategy,
    axis: str,
    count: int,
    graph: Graph,
    cluster: Cluster,
    known: Mapping[Node, ShardedVariable] | None,
    fed: Mapping[str, int] | None,
) -> ShardedGraph:
    """Partition several turns of a training step over a strategy's mesh.

    Args:
        strategy: the strategy of one step.
        axis: the mesh axis over which sums are exchanged in the first turn only.
        count: the number of turns.
        graph, cluster, known, fed: see `divide_over_mesh`.

    Raises:
        ShardingError: no trained variable is cut along the axis, nothing is summed over it, or
            something else has to travel along it in each turn.
    """
    check_mesh_size(graph, {**strategy.mesh, "turn": count})
    mesh = lay_out_mesh(strategy, graph, cluster)
    layouts = strategy.layouts(graph, mesh, strict=True)
    annotated = annotate_graph(graph, mesh, layouts, known or {}, strategy.replication, fed)
    preferred = propagate_layouts(annotated)
    owned = _owned_variables(annotated.graph, preferred, axis)
    annotated = replace(annotated, known=_place_owned(annotated, owned, preferred, axis))
    window = unroll_turns(annotated.graph, count)
    unrolled = replace(annotated, graph=window.graph)
    made: list[StaleResharder] = []

    def make_resharder(mesh: Mesh, sizes: SizePartitioner, _: None, again: str | None) -> Resharder:
        made.append(StaleResharder(mesh, sizes, again, axis))
        return made[-1]

    emitted = emit_shards(
        unrolled, _window_layouts(window, preferred), None,
        make_resharder, partial(StaleEmitter, window=window, owned=owned), owns_tables=False,
    )  # fmt: skip
    if not made[0].has_stale_sums:
        raise ShardingError(
            f"no update reads a sum over {axis!r}, so there is nothing to refresh; cut the axis "
            f'that a product sums over, such as {{"x": (None, {axis!r}), "w": ({axis!r},)}}, or '
            "leave out the AsyncModel"
        )
    emitted = replace(emitted, records=(*emitted.records, *_owner_reads(emitted, owned, axis)))
    return replace(assemble_graph(unrolled, emitted), source=graph)


def _window_layouts(window: Window, preferred: Mapping[Tensor, Layout]) -> dict[Tensor, Layout]:
    """Return the layouts of one step for the tensors of all turns."""
    found = dict(preferred)
    for node, original in window.originals.items():
        for tensor, same in zip(node.outputs, original.outputs, strict=True):
            if same in preferred:
                found[tensor] = preferred[same]
    return found


def _owned_variables(graph: Graph, preferred: Mapping[Tensor, Layout], axis: str) -> Set[Node]:
    """Return the variables that are whole along an axis, and that change by what is cut along it.

    Raises:
        ShardingError: no variable that changes is cut along the axis.
    """
    updates = {node.inputs[0].node: node.inputs[1].node for node in graph.of_op("assign")}
    cut = {
        node
        for node in updates
        if axis in preferred.get(node.outputs[0], whole(node.outputs[0].ndim)).axes()
    }
    if not cut:
        raise ShardingError(
            f"no trained variable is cut along {axis!r}, so all places would train the same ones "
            "with stale gradients; cut the variables, or cut the batch with "
            "gf.parallel.Data instead"
        )
    changing = set(cut)
    while True:
        reached = set(changing)
        for node in graph.nodes:
            if node.op.name != "assign" and any(t.node in reached for t in node.inputs):
                reached.add(node)
        found = {variable for variable, value in updates.items() if value in reached}
        if found <= changing:
            return changing - cut
        changing |= found


def _place_owned(
    annotated: AnnotatedGraph, owned: Set[Node], preferred: Layouts, axis: str
) -> dict[Node, ShardedVariable]:
    """Return the shards of known variables, and those of new ones that a first place owns.

    Such a variable is kept by the first place along the axis only. Others read it there.
    """
    graph, mesh = annotated.graph, annotated.partitioner.mesh
    found = dict(annotated.known)
    for node in sorted(owned - found.keys(), key=lambda each: each.serial):
        layout = preferred.get(node.outputs[0], whole(node.outputs[0].ndim))
        if not layout.is_whole:
            continue
        copies = {
            place: node.copy_for(
                (), f"{graph.names[node]}{mesh.tag(place)}", mesh.devices[mesh.index_of(place)],
                node, {**node.attrs, "named": False},
            )
            for place in dict.fromkeys(mesh.group(place, axis)[0] for place in mesh.places)
        }  # fmt: skip
        spans = tuple(Span(0, int(size)) for size in node.specs[0].shape)
        nodes = tuple(copies[mesh.group(place, axis)[0]] for place in mesh.places)
        found[node] = ShardedVariable(nodes, (spans,) * len(nodes), layout, mesh.sizes)
    return found


def _owner_reads(
    emitted: EmittedGraph, owned: Set[Node], axis: str
) -> Iterator[CommunicationRecord]:
    """Yield a record for each variable of a first place that others read."""
    for variable in (node for node in emitted.variables if node in owned):
        kept = set(emitted.variables[variable].nodes)
        size = int(variable.specs[0].nbytes)
        sent: dict[SentTensor, float] = {
            (tensor, reader.device): size
            for reader in emitted.graph.nodes
            for tensor in reader.inputs
            if tensor.node in kept and str(reader.device) and reader.device != tensor.node.device
        }
        if sent:
            yield CommunicationRecord(
                "broadcast", axis, user_name(variable), round(sum(sent.values())),
                user_name(variable), variable.location, sent,
            )  # fmt: skip


__all__ = ["divide_window"]
