"""The partitioner: from a graph of whole tensors to a graph of shards, one node for each place.

Data, tensor, sequence and domain parallelism are one mechanism with different layouts. Gradients
and updates are part of the graph by then, so nothing is differentiated twice.

    strategy, graph, cluster
      ─lay_out_mesh→       Mesh             a device for each place
      ─strategy.layouts→   layouts          of the tensors that rules and the batch fix
      ─annotate_graph→     AnnotatedGraph   with the layouts of existing variables, slots, tokens
      ─propagate_layouts→  layouts          that every tensor would like best
      ─emit_shards→        EmittedGraph     local nodes, collectives, halos and buckets
      ─assemble_graph→     ShardedGraph     verified, with what feeds and variables map to
      ─order_by_microbatch→ ShardedGraph    if micro-batches share a device

`divide_over_mesh` calls these steps one after the other. `emit_shards` goes through the nodes in
build order; `emitter.py` shows the steps of a node: choose a rule, convert inputs, emit, bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.parallel.mesh.device_mesh import MICRO, DeviceAssignment, Mesh
from graphflow.parallel.mesh.layouts import CommunicationRecord, Layout, ShardedTensor
from graphflow.parallel.mesh.mesh_arguments import check_mesh_size, mesh_devices
from graphflow.parallel.mesh.size_partitioner import SizePartitioner, batch_too_small_error
from graphflow.parallel.pipelining.microbatch_order import order_by_microbatch
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.sharding.emission.control_flow import emit_control
from graphflow.parallel.sharding.emission.emitter import Emitter
from graphflow.parallel.sharding.emission.sharded_graph import (
    FeedSlice,
    ShardedGraph,
    ShardedVariable,
)
from graphflow.parallel.sharding.emission.state_emitter import StateEmitter
from graphflow.parallel.sharding.propagation.batch_axis import equal_sizes
from graphflow.parallel.sharding.propagation.propagation import propagate, split_by_heads
from graphflow.parallel.sharding.propagation.replication import (
    NOT_REPLICATED,
    ReplicationConfig,
    split_sequence,
    split_slots,
)
from graphflow.parallel.tables.row_updates import readers_of
from graphflow.parallel.tables.table_choice import OwnedTables, choose_tables, spread_rows
from graphflow.passes import MergeBodies
from graphflow.placement.clusters.cluster import Cluster
from graphflow.strategy import strategy_of

Layouts = Mapping[Tensor, Layout]


class MeshStrategy(Protocol):
    """The interface of strategies that lay a mesh over a graph, such as `Shard` and `Data`."""

    @property
    def mesh(self) -> Mapping[str, int]:
        """The sizes of the mesh axes, by name."""

    @property
    def accumulate(self) -> int:
        """The number of micro-batches that a place runs one after the other."""

    @property
    def devices(self) -> Any:
        """The devices that the user names, or None."""

    @property
    def examples(self) -> Sequence[Tensor | str] | None:
        """The placeholders that hold the batch, or their names; None: see `batch_placeholders`.
        A Pipeline asks for them in a product."""

    @property
    def replication(self) -> ReplicationConfig:
        """The replication configuration: batch norm, gradients and state of places with the same
        model."""

    def layouts(self, graph: Graph, mesh: Mesh, strict: bool = True) -> dict[Tensor, Layout]:
        """Return the layouts that the strategy fixes. If `strict`, refuse rules without a match."""


@dataclass(frozen=True)
class AnnotatedGraph:
    """A graph to be partitioned, and the layouts that are fixed.

    Attributes:
        graph: the whole graph; a loop and its extension by a gradient are one node.
        partitioner: the extents of shards over the mesh.
        layouts: the fixed layouts.
        known: the shards of variables that exist already.
        replication: how places with the same model work together.
    """

    graph: Graph
    partitioner: SizePartitioner
    layouts: Layouts
    known: Mapping[Node, ShardedVariable]
    replication: ReplicationConfig


@dataclass(frozen=True)
class EmittedGraph:
    """A graph of shards, and what stands in it for the whole graph.

    Attributes:
        graph: the graph of shards.
        feeds: what the placeholders of shards are fed.
        variables: the shards of the user's variables.
        values: the sharded tensor of each whole tensor.
        records: the collectives and halos.
        fetched: the transfers to the first place, for fetches.
    """

    graph: Graph
    feeds: Mapping[Node, FeedSlice]
    variables: Mapping[Node, ShardedVariable]
    values: Mapping[Tensor, ShardedTensor]
    records: tuple[CommunicationRecord, ...]
    fetched: tuple[CommunicationRecord, ...]


def divide_over_mesh(
    strategy: MeshStrategy,
    graph: Graph,
    cluster: Cluster,
    known: Mapping[Node, ShardedVariable] | None,
    fed: Mapping[str, int] | None,
) -> ShardedGraph:
    """Partition a graph over a strategy's mesh (see the module's docstring).

    Args:
        known: the shards of variables that exist already.
        fed: the sizes of symbols, if a step is about to be fed.

    Raises:
        ShardingError: the mesh is too large or the batch too small; see `MeshStrategy.layouts`.
    """
    mesh = lay_out_mesh(strategy, graph, cluster)
    layouts = strategy.layouts(graph, mesh, strict=strategy_of(graph) is not None)
    sharded = partition_graph(graph, mesh, layouts, known, None, strategy.replication, fed)
    return order_by_microbatch(sharded, MICRO) if strategy.accumulate > 1 else sharded


def partition_graph(
    graph: Graph,
    mesh: Mesh,
    annotations: Layouts,
    known: Mapping[Node, ShardedVariable] | None = None,
    assignment: DeviceAssignment | None = None,
    replication: ReplicationConfig = NOT_REPLICATED,
    fed: Mapping[str, int] | None = None,
) -> ShardedGraph:
    """Partition a graph over a mesh.

    Args:
        graph: the graph as the user built it, with gradients and updates.
        annotations: the layouts of some tensors.
        known: the shards of variables that exist already.
        assignment: the devices of nodes, if they do not follow from the place alone (pipelines).
        replication: how places with the same model work together.
        fed: the sizes of symbols, if a step is about to be fed. If a size is too small for its
            shards and the graph does not train, it is split along fewer axes, or none.

    Raises:
        ShardingError: the batch of a training step is too small, or a variable lies over another
            mesh.
    """
    if assignment is not None:
        replication = replace(replication, ring_axis=None, owns_tables=False)
    annotated = annotate_graph(graph, mesh, annotations, known or {}, replication, fed)
    preferred = propagate_layouts(annotated)
    emitted = emit_shards(annotated, preferred, assignment)
    return assemble_graph(annotated, emitted)


# Steps ------------------------------------------------------------------------------------------


def lay_out_mesh(strategy: MeshStrategy, graph: Graph, cluster: Cluster) -> Mesh:
    """Give each place of a strategy's mesh a device. Micro-batches are its last axis, and share a
    device.

    Raises:
        ShardingError: the mesh has more places than a graph can be written for, or than devices.
    """
    sizes, count = dict(strategy.mesh), strategy.accumulate
    every = {**sizes, MICRO: count} if count > 1 else sizes
    check_mesh_size(graph, every)
    owners = mesh_devices(sizes, cluster, strategy.devices)
    devices = [owner for owner in owners for _ in range(count)]
    return Mesh(every, devices, frozenset({MICRO}) & set(every))


def annotate_graph(
    graph: Graph,
    mesh: Mesh,
    annotations: Layouts,
    known: Mapping[Node, ShardedVariable],
    replication: ReplicationConfig,
    fed: Mapping[str, int] | None,
) -> AnnotatedGraph:
    """Complete the layouts that are fixed.

    To a strategy's layouts this adds those of existing variables, of packed heads, of the
    optimiser's slots, and of tokens along the sequence axis.

    Raises:
        ShardingError: see `partition_graph`.
    """
    graph = MergeBodies()(graph) if graph.holders else graph
    partitioner = SizePartitioner(mesh, fed, equal_sizes(graph))
    existing = {
        node.outputs[0]: known[node].check(node, mesh).layout
        for node in graph.variables
        if node in known
    }
    if replication.owns_tables:
        axis = replication.ring_axis
        annotations = spread_rows(graph, readers_of(graph), annotations, existing, mesh, axis)
    layouts = split_by_heads(graph.nodes, annotations, partitioner) | existing
    training = strategy_of(graph) is not None
    layouts = {t: _fit_layout(t, own, partitioner, training) for t, own in layouts.items()}
    if replication.state_axis is not None:
        layouts = split_slots(graph, layouts, partitioner, replication.state_axis)
    if replication.sequence_axis is not None:
        layouts = split_sequence(graph, layouts, partitioner, replication)
    return AnnotatedGraph(graph, partitioner, layouts, known, replication)


def propagate_layouts(annotated: AnnotatedGraph) -> dict[Tensor, Layout]:
    """Return the layouts that follow from the fixed ones through the equations of the ops."""
    sequence_axis = annotated.replication.sequence_axis
    nodes = annotated.graph.nodes
    return propagate(nodes, annotated.layouts, annotated.partitioner, sequence_axis)


def emit_shards(
    annotated: AnnotatedGraph,
    preferred: Layouts,
    assignment: DeviceAssignment | None,
    make_resharder: Callable[..., Resharder] = Resharder,
    make_emitter: Callable[..., Emitter] = Emitter,
    owns_tables: bool = True,
) -> EmittedGraph:
    """Write one node for each node and place, with the communication between places.

    Args:
        annotated: the graph.
        preferred: the layout that each tensor would like best.
        assignment: see `partition_graph`.
        make_resharder, make_emitter: what converts layouts, and what writes nodes.
        owns_tables: whether places may exchange distinct rows of the tables that they own.
    """
    graph, partitioner = annotated.graph, annotated.partitioner
    replication = annotated.replication
    readers = readers_of(graph)
    tables = OwnedTables()
    if assignment is None and owns_tables:  # stages take turns: an owner elsewhere would have none
        mesh, sequence = partitioner.mesh, replication.sequence_axis
        tables = choose_tables(graph, readers, preferred, mesh, sequence)
    resharder = make_resharder(partitioner.mesh, partitioner, assignment, replication.sequence_axis)
    emitter = make_emitter(
        resharder, preferred, readers, emit_control, replication.bucket,
        replication.unsynchronised, replication.sequence_axis, tables,
    )  # fmt: skip
    state = StateEmitter(graph, emitter, annotated.known, replication.bucket, tables.updates)
    local = state.run()
    return EmittedGraph(
        local, state.feeds, state.variables, emitter.values,
        tuple(resharder.records), tuple(resharder.fetched),
    )  # fmt: skip


def assemble_graph(annotated: AnnotatedGraph, emitted: EmittedGraph) -> ShardedGraph:
    """Verify the graph of shards, and join it with what its feeds and variables stand for."""
    partitioner = annotated.partitioner
    return ShardedGraph(
        annotated.graph, emitted.graph.verify(), partitioner.mesh, partitioner, emitted.feeds,
        emitted.variables, emitted.records, emitted.fetched, emitted.values,
    )  # fmt: skip


def _fit_layout(
    tensor: Tensor, layout: Layout, partitioner: SizePartitioner, training: bool
) -> Layout:
    """Return the layout of a tensor with as many splits as leave no shard empty.

    Raises:
        ShardingError: in a training step a placeholder is too small, or its size would be split in
            two ways.
    """
    mesh = partitioner.mesh
    for d, (size, split) in enumerate(zip(tensor.shape, layout.dims, strict=True)):
        known = partitioner.conflicting_axes(size, split)
        fitting = partitioner.longest_split(size, split)
        if fitting != split and tensor.node.op.name == "placeholder":
            if training:
                if known:
                    raise ShardingError(
                        f"{tensor.name!r} (made at {tensor.node.location}) is cut into "
                        f"{mesh.describe_parts(split.axes)}, but its size {size} is that of "
                        f"another placeholder, which is cut into {mesh.describe_parts(known)}; cut "
                        "both alike, or give them numbers for that size, or names where it need "
                        "not be the same"
                    )
                size_text = partitioner.describe_size(size)
                batch = f"{size_text} (of {tensor.name!r}, made at {tensor.node.location})"
                raise batch_too_small_error(batch, split.axes, mesh)
            layout = layout.with_dim(d, fitting)
    return layout


__all__ = [
    "AnnotatedGraph",
    "EmittedGraph",
    "MeshStrategy",
    "annotate_graph",
    "assemble_graph",
    "divide_over_mesh",
    "emit_shards",
    "lay_out_mesh",
    "partition_graph",
    "propagate_layouts",
]
