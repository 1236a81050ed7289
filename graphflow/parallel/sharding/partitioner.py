"""Shard: one mechanism for batch, tensor and domain parallelism. A graph of whole tensors becomes
one of shards, a node for each place of a mesh, with the collectives between them.

    whole graph + annotations ─propagate→ wishes ─emit→ Sharded

Gradients and updates are part of the graph that is cut, so nothing is differentiated twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.init import Initializer, SharedInitial
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor, origin_scope
from graphflow.ir.spec import Span, evaluate
from graphflow.parallel.mesh.device_mesh import (
    AxisSplit,
    DeviceAssignment,
    Mesh,
    Place,
    ShardExtent,
    SizePartitioner,
    batch_too_small_error,
)
from graphflow.parallel.mesh.layouts import CommunicationRecord, Layout, ShardedTensor, whole
from graphflow.parallel.pipelining.stage_report import StagedPipeline
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.resharding.update_gathering import UpdateGatherer
from graphflow.parallel.sharding.batch_axis import equal_sizes
from graphflow.parallel.sharding.emitter import Emitter
from graphflow.parallel.sharding.propagation import propagate, split_by_heads
from graphflow.parallel.sharding.replica_terms import (
    NOT_REPLICATED,
    ReplicationConfig,
    split_sequence,
    split_slots,
)
from graphflow.parallel.sharding.whole_nodes import copy_to_places, have_spec_of
from graphflow.passes import MergeBodies
from graphflow.strategy import strategy_of

Array = np.ndarray[Any, Any]


def contiguous(array: Array) -> Array:
    """The array, in the order of its axes in memory (of rank 0 too)."""
    return np.ascontiguousarray(array).reshape(array.shape)


@dataclass(frozen=True)
class FeedSlice:
    """What a placeholder of a shard is fed: a part of what the user's placeholder is.

    Attributes:
        placeholder: the user's.
        pieces: for each axis its piece, of known or symbolic size.
    """

    placeholder: Node
    pieces: tuple[ShardExtent, ...]

    def index(self, sizes: Mapping[str, int]) -> tuple[slice, ...]:
        """The part, for sizes of symbols."""
        return tuple(slice(evaluate(p.start, sizes), evaluate(p.stop, sizes)) for p in self.pieces)


@dataclass(frozen=True)
class ShardedVariable:
    """The variables that stand for one of the user's, and what part of it each has.

    Attributes:
        mesh: the sizes of its axes.
    """

    nodes: tuple[Node, ...]
    spans: tuple[tuple[Span, ...], ...]
    layout: Layout
    mesh: Mapping[str, int]

    def check(self, node: Node, mesh: Mesh) -> ShardedVariable:
        """The same, if they lie on a mesh, or would lie there as they do.

        Raises:
            ShardingError: they were cut for another mesh.
        """
        whole_ones = not any(self.layout.dims) and len(self.nodes) == len(mesh.places)
        if whole_ones or list(self.mesh.items()) == list(mesh.sizes.items()):
            return self
        have, want = (
            " × ".join(f"{axis} {size}" for axis, size in sizes.items())
            for sizes in (self.mesh, mesh.sizes)
        )
        raise ShardingError(
            f"variable {node.name!r} (made at {node.location}) lies over the mesh {have}, as a "
            f"step with another strategy left it, and this one has the mesh {want}; train it by "
            "one strategy in a session, and go on from a checkpoint in another session"
        )


@dataclass(frozen=True, eq=False)
class ShardedGraph:
    """A graph that was cut over a mesh.

    Attributes:
        graph: output i is what fetch i of the whole graph was; one more, where there are updates
            of which no fetch has need.
        shares: what the placeholders of shards are fed.
        variables: the pieces of the user's variables.
        moves: the collectives that were inserted.
        fetched: what goes to the first place, to be fetched.
        values: what stands for each tensor of the whole graph.
        staged: the pipeline that it is, if it is one.
    """

    source: Graph
    graph: Graph
    mesh: Mesh
    partitioner: SizePartitioner
    shares: Mapping[Node, FeedSlice]
    variables: Mapping[Node, ShardedVariable]
    records: tuple[CommunicationRecord, ...]
    fetched: tuple[CommunicationRecord, ...] = ()
    values: Mapping[Tensor, ShardedTensor] = field(repr=False, default_factory=dict)
    pipeline: StagedPipeline | None = None
    _parts: dict[frozenset[tuple[str, int]], dict[Node, tuple[slice, ...]]] = field(
        repr=False, default_factory=dict
    )
    """What placeholders are fed for the sizes that came last: of each, a sum over those before."""

    def bindings(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of all symbols, those of pieces too."""
        return {**sizes, **self.partitioner.bindings(sizes)}

    @property
    def tasks(self) -> tuple[str, ...]:
        """What a pipeline's nodes belong to, by turn: F0, B0, …; else nothing."""
        return () if self.pipeline is None else self.pipeline.labels

    def suits(self, sizes: Mapping[str, int]) -> bool:
        """Whether a step with symbols of these sizes would be cut as this is."""
        return self.partitioner.suits(sizes)

    def map_graph(self, change: Callable[[Graph], Graph]) -> ShardedGraph:
        """The same with another graph, of equal outputs, and what is sent in that."""
        sent = list(dict.fromkeys(t for m in (*self.records, *self.fetched) for t, _ in m.sent))
        graph = change(Graph([*self.graph.outputs, *sent]))
        count = len(self.graph.outputs)
        now = dict(zip(sent, graph.outputs[count:], strict=True))

        def restrict(records: Sequence[CommunicationRecord]) -> tuple[CommunicationRecord, ...]:
            return tuple(
                m.restrict_to({(now[t], to): n for (t, to), n in m.sent.items()}) for m in records
            )

        own = Graph(graph.outputs[:count], graph.names)
        return replace(
            self, graph=own, records=restrict(self.records), fetched=restrict(self.fetched)
        )

    def feeds(self, arrays: Mapping[Node, Array], sizes: Mapping[str, int]) -> dict[Node, Array]:
        """What the placeholders of shards are fed: their part of what the user feeds."""
        key = frozenset(sizes.items())
        if key not in self._parts:
            self._parts.clear()
            self._parts[key] = {node: share.index(sizes) for node, share in self.shares.items()}
        return {
            node: contiguous(arrays[share.placeholder][self._parts[key][node]])
            for node, share in self.shares.items()
            if share.placeholder in arrays
        }


def partition_graph(
    graph: Graph,
    mesh: Mesh,
    annotations: Mapping[Tensor, Layout],
    known: Mapping[Node, ShardedVariable] | None = None,
    assignment: DeviceAssignment | None = None,
    replication: ReplicationConfig = NOT_REPLICATED,
    fed: Mapping[str, int] | None = None,
) -> ShardedGraph:
    """A graph cut over a mesh.

    Args:
        graph: as the user built it, with gradients and updates.
        annotations: layouts of some tensors.
        known: pieces of variables that are there already.
        homes: of what stands for nodes, if these are not where the places are.
        terms: on which places go together that have the same model.
        fed: sizes of symbols, where a step is about to be fed. What is too small for its shards is
            cut along fewer axes, or none, if the graph does not train.

    Raises:
        ShardingError: the batch of a step of training is too small, or a variable lies over another
            mesh.
    """
    graph = _with_merged_bodies(graph)
    partitioner = SizePartitioner(mesh, fed, equal_sizes(graph))
    there = _layouts_of(graph, known or {}, mesh)
    annotations = split_by_heads(graph.nodes, annotations, partitioner) | there
    training = strategy_of(graph) is not None
    annotations = {t: _fit_layout(t, lay, partitioner, training) for t, lay in annotations.items()}
    if replication.state_axis is not None:
        annotations = split_slots(graph, annotations, partitioner, replication.state_axis)
    if replication.sequence_axis is not None:
        annotations = split_sequence(graph, annotations, partitioner, replication)
    preferred = propagate(graph.nodes, annotations, partitioner, replication.sequence_axis)
    resharder = Resharder(mesh, partitioner, assignment, replication.sequence_axis)
    readers: dict[Tensor, list[Node | None]] = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            readers.setdefault(tensor, []).append(node)
    for tensor in graph.outputs:
        readers.setdefault(tensor, []).append(None)
    emitter = Emitter(
        resharder,
        preferred,
        readers,
        replication.bucket,
        replication.unsynchronised,
        replication.sequence_axis,
    )
    work = _Division(graph, emitter, known or {}, replication.bucket)
    whole_graph = work.run().verify()
    return ShardedGraph(
        graph,
        whole_graph,
        mesh,
        partitioner,
        work.shares,
        work.variables,
        tuple(resharder.made),
        tuple(resharder.fetched),
        work.emitter.values,
    )


def _fit_layout(
    tensor: Tensor, layout: Layout, partitioner: SizePartitioner, training: bool
) -> Layout:
    """A layout with as many cuts as leave no piece empty.

    Raises:
        ShardingError: there are too many in a step of training, or a size is cut in two ways.
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
                told = f"{size_text} (of {tensor.name!r}, made at {tensor.node.location})"
                raise batch_too_small_error(told, split.axes, mesh)
            layout = layout.with_dim(d, fitting)
    return layout


def _with_merged_bodies(graph: Graph) -> Graph:
    """The graph in which a loop and its extension by a gradient are one, as long as that shows."""
    return MergeBodies()(graph) if graph.holders else graph


def _layouts_of(
    graph: Graph, known: Mapping[Node, ShardedVariable], mesh: Mesh
) -> dict[Tensor, Layout]:
    """How variables lie that are there already.

    Raises:
        ShardingError: they were cut for another mesh.
    """
    return {n.outputs[0]: known[n].check(n, mesh).layout for n in graph.variables if n in known}


class _Division:
    """One graph on its way through an emitter."""

    def __init__(
        self, graph: Graph, emitter: Emitter, known: Mapping[Node, ShardedVariable], bucket: int
    ) -> None:
        self.graph = graph
        self.emitter = emitter
        self.resharder = emitter.resharder
        self.mesh = emitter.mesh
        self.partitioner = emitter.partitioner
        self.known = known
        self.shares: dict[Node, FeedSlice] = {}
        self.variables: dict[Node, ShardedVariable] = {}
        self._initial: dict[Node, SharedInitial] = {}  # of which parts are cut
        self._groups: dict[Tensor, list[Tensor]] = {}
        self._updates = UpdateGatherer(emitter.resharder, bucket, self._divide_assignment)

    def run(self) -> Graph:
        """The graph of all places."""
        for node in self.graph.nodes:
            for tensor in node.inputs:
                if tensor.node.op.name == "assign":
                    self._updates.flush()
                    break
            match node.op.name:
                case "placeholder":
                    self._placeholder(node)
                case "variable":
                    self._variable(node)
                case "assign":
                    self._assign(node)
                case "group":
                    self._group(node)
                case _:
                    self.emitter.emit_node(node)
        self._updates.flush()
        return self._with_all_updates([self._divide_fetch(t) for t in self.graph.outputs])

    def _with_all_updates(self, outputs: list[Tensor]) -> Graph:
        """What is fetched of an assignment is the first place's; the others' happen as well."""
        graph = Graph(outputs)
        reached = set(graph.nodes)
        every = {
            part: node
            for node in self.graph.of_op("assign")
            for part in self.emitter.values[node.outputs[0]].shards
        }
        missing = [part for part in every if part.node not in reached]
        if not missing:
            return graph
        with self.resharder.cross_device(every[missing[0]]):
            rest: Tensor = REGISTRY["group"](*missing, name="updates")
        return Graph([*outputs, rest])

    def _layout(self, tensor: Tensor) -> Layout:
        return self.emitter.preferred.get(tensor) or whole(tensor.ndim)

    def _placeholder(self, node: Node) -> None:
        """A placeholder for each different part; the user's own, where none is cut."""
        (tensor,) = node.outputs
        layout = self._layout(tensor)
        if not any(layout.dims):
            self._keep(tensor, layout, [tensor] * len(self.mesh.places))
            return
        parts = []
        known: dict[Any, Tensor] = {}
        for place in self.mesh.places:
            pieces = self._pieces(tensor, layout, place)
            home = self.resharder.device_index(node, place)
            key = (home, tuple(pieces)) if self.mesh.sequential else place
            if key not in known:
                with self.resharder.on_device(place, node):
                    own = REGISTRY["placeholder"](
                        shape=tuple(p.size for p in pieces), dtype=tensor.dtype.name,
                        name=node.name,
                    )  # fmt: skip
                known[key] = own
                self.shares[own.node] = FeedSlice(node, tuple(pieces))
            parts.append(known[key])
        self._keep(tensor, layout, parts)

    def _variable(self, node: Node) -> None:
        (tensor,) = node.outputs
        if node in self.known:
            pieces = self.known[node]
            layout = pieces.layout
        else:
            layout = self._layout(tensor)
            pieces = self._divided_variable(node, tensor, layout)
        self.variables[node] = pieces
        self._keep(tensor, layout, [n.outputs[0] for n in pieces.nodes])

    def _divided_variable(self, node: Node, tensor: Tensor, layout: Layout) -> ShardedVariable:
        nodes, every = [], []
        made: dict[Any, Node] = {}
        spans = tuple([Span(0, int(size)) for size in tensor.shape])
        for place in self.mesh.places:
            if not layout.is_whole:
                pieces = self._pieces(tensor, layout, place)
                spans = tuple(_span_of(p, s) for p, s in zip(pieces, layout.dims, strict=True))
            key = (
                (self.resharder.device_index(node, place), spans) if self.mesh.sequential else place
            )
            if key not in made:
                made[key] = self._piece(node, place, spans)
            nodes.append(made[key])
            every.append(spans)
        return ShardedVariable(tuple(nodes), tuple(every), layout, self.mesh.sizes)

    def _piece(self, node: Node, place: Place, spans: tuple[Span, ...]) -> Node:
        """The variable of a place, its initial value cut out of the whole one."""
        shape = tuple([s.size for s in spans])
        name = f"{self.graph.names[node]}{self.mesh.tag(place)}"
        device = self.resharder.device_of(node, place)
        if shape == tuple(node.attrs["shape"]):
            return node.copy_for((), name, device, node, {**node.attrs, "named": False})
        with origin_scope(node, "", device):
            tensor: Tensor = REGISTRY["variable"](
                initial=self._part_of(node, shape, spans),
                trainable=node.attrs["trainable"],
                shape=shape,
                dtype=node.attrs["dtype"],
                named=False,
                name=name,
            )
        return tensor.node

    def _part_of(self, node: Node, shape: tuple[int, ...], spans: tuple[Span, ...]) -> Any:
        """A part of an initial value; of an initialiser, what it would have there."""
        initial = node.attrs["initial"]
        if isinstance(initial, Initializer) and initial.kind == "constant":
            return replace(initial, shape=shape)
        if node not in self._initial:
            self._initial[node] = SharedInitial(initial)
        return self._initial[node].add_shard(spans, shape, node.attrs["dtype"])

    def _pieces(self, tensor: Tensor, layout: Layout, place: Place) -> list[ShardExtent]:
        return [
            self.partitioner.piece(size, split, place)
            for size, split in zip(tensor.shape, layout.dims, strict=True)
        ]

    def _assign(self, node: Node) -> None:
        variable, given = node.inputs
        self.emitter.reduce_inputs(node)
        layout = self.emitter.values[variable].layout
        self._updates.add(node, self.emitter.values[given], layout)

    def _divide_assignment(self, node: Node, value: ShardedTensor) -> None:
        """The assignments of all places, of a value that lies as the variable does."""
        targets = self.emitter.values[node.inputs[0]].shards
        variable, given = node.inputs
        apart = len(set(targets)) == len(targets)
        if apart and have_spec_of(targets, variable) and have_spec_of(value.shards, given):
            inputs = [*zip(targets, value.shards, strict=True)]
            copies = copy_to_places(self.resharder, node, inputs, node.op.name)
            self._keep(node.outputs[0], value.layout, [copy.outputs[0] for copy in copies])
            return
        made: dict[Tensor, Tensor] = {}
        parts = []
        for place, target, part in zip(self.mesh.places, targets, value.shards, strict=True):
            if target not in made:
                with self.resharder.on_device(place, node):
                    made[target] = REGISTRY["assign"](target, part)
            parts.append(made[target])
        self._keep(node.outputs[0], value.layout, parts)

    def _group(self, node: Node) -> None:
        members: dict[Tensor, None] = {}
        for tensor in node.inputs:
            for part in self._groups.get(tensor) or self.emitter.values[tensor].shards:
                members[part] = None
        with self.resharder.cross_device(node):
            group = REGISTRY["group"](*members, name=node.name)
        self._groups[node.outputs[0]] = [group]

    def _divide_fetch(self, tensor: Tensor) -> Tensor:
        if tensor in self._groups:
            return self._groups[tensor][0]
        return self.resharder.gather_to_first(self.emitter.values[tensor], tensor.node)

    def _keep(self, tensor: Tensor, layout: Layout, parts: Sequence[Tensor]) -> None:
        self.emitter.values[tensor] = ShardedTensor(tensor.spec, layout, tuple(parts))


def _span_of(piece: ShardExtent, split: AxisSplit) -> Span:
    """A piece of known size."""
    start, size = int(piece.start), int(piece.size // split.rows)
    rows = split.outer if isinstance(split.outer, tuple) else int(split.outer)
    return Span(start, start + size, rows)


__all__ = ["ShardedVariable", "FeedSlice", "ShardedGraph", "partition_graph"]
