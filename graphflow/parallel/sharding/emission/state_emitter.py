"""A graph's boundary over a mesh: placeholders, variables, assignments, groups and fetches.

What computes between them is `emitter.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphflow.frontend.initial_shards import SharedInitial
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor, origin_scope
from graphflow.ir.spec import Span
from graphflow.parallel.mesh.axis_split import AxisSplit, ShardExtent
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.mesh.layouts import Layout, ShardedTensor, whole
from graphflow.parallel.resharding.update_gathering import UpdateGatherer
from graphflow.parallel.sharding.emission.emitter import Emitter
from graphflow.parallel.sharding.emission.initial_parts import initial_part
from graphflow.parallel.sharding.emission.sharded_graph import FeedSlice, ShardedVariable
from graphflow.parallel.sharding.emission.whole_nodes import copy_to_places, have_spec_of
from graphflow.parallel.tables.row_updates import RowUpdate, order_by_update


class StateEmitter:
    """Writes a whole graph for all places of a mesh.

    Args:
        graph: the whole graph.
        emitter: writes the nodes that compute.
        known: the shards of variables that exist already.
        bucket: bytes of new values that are gathered in one exchange; 0: each by itself.
        row_updates: the updates of tables that their rows' owners compute.

    Attributes:
        feeds: what the placeholders of shards are fed.
        variables: the shards of the user's variables.
    """

    def __init__(
        self,
        graph: Graph,
        emitter: Emitter,
        known: Mapping[Node, ShardedVariable],
        bucket: int,
        row_updates: Sequence[RowUpdate] = (),
    ) -> None:
        self._graph = graph
        self._emitter = emitter
        self._resharder = emitter.resharder
        self._mesh = emitter.mesh
        self._known = known
        self.feeds: dict[Node, FeedSlice] = {}
        self.variables: dict[Node, ShardedVariable] = {}
        self._initial: dict[Node, SharedInitial] = {}  # initial values that are split
        self._groups: dict[Tensor, list[Tensor]] = {}
        self._updates = UpdateGatherer(emitter.resharder, bucket, self._emit_assign)
        self._row_updates = row_updates

    def run(self) -> Graph:
        """Write all nodes, and return the graph of all places."""
        handlers: dict[str, Callable[[Node], None]] = {
            "placeholder": self._placeholder,
            "variable": self._variable,
            "assign": self._assign,
            "group": self._group,
        }
        for node in order_by_update(self._graph.nodes, self._row_updates):
            if isinstance(node, RowUpdate):
                self._emitter.tables.emit_update(node)
                continue
            if any(tensor.node.op.name == "assign" for tensor in node.inputs):
                self._updates.flush()  # the node reads a new value
            handlers.get(node.op.name, self._emitter.emit_node)(node)
        self._updates.flush()
        return self._with_all_updates([self._fetch(t) for t in self._graph.outputs])

    def _layout(self, tensor: Tensor) -> Layout:
        """Return the preferred layout of a tensor; whole if there is none."""
        return self._emitter.preferred.get(tensor) or whole(tensor.ndim)

    def _placeholder(self, node: Node) -> None:
        """Write a placeholder for each different part of the user's; keep the user's if it is not
        split."""
        (tensor,) = node.outputs
        layout = self._layout(tensor)
        if not any(layout.dims):
            self._keep(tensor, layout, [tensor] * len(self._mesh.places))
            return
        parts = []
        known: dict[Any, Tensor] = {}
        for place in self._mesh.places:
            pieces = self._pieces(tensor, layout, place)
            home = self._resharder.device_index(node, place)
            key = (home, tuple(pieces)) if self._mesh.sequential else place
            if key not in known:
                with self._resharder.on_device(place, node):
                    own = REGISTRY["placeholder"](
                        shape=tuple(p.size for p in pieces), dtype=tensor.dtype.name,
                        name=node.name,
                    )  # fmt: skip
                known[key] = own
                self.feeds[own.node] = FeedSlice(node, tuple(pieces))
            parts.append(known[key])
        self._keep(tensor, layout, parts)

    def _variable(self, node: Node) -> None:
        """Take the existing shards of a variable, or make them."""
        (tensor,) = node.outputs
        if node in self._known:
            pieces = self._known[node]
            layout = pieces.layout
        else:
            layout = self._layout(tensor)
            pieces = self._split_variable(node, tensor, layout)
        self.variables[node] = pieces
        self._keep(tensor, layout, [n.outputs[0] for n in pieces.nodes])

    def _split_variable(self, node: Node, tensor: Tensor, layout: Layout) -> ShardedVariable:
        """Make a variable for each place; places with the same device and spans share one."""
        nodes, every = [], []
        made: dict[Any, Node] = {}
        spans = tuple([Span(0, int(size)) for size in tensor.shape])
        for place in self._mesh.places:
            if not layout.is_whole:
                pieces = self._pieces(tensor, layout, place)
                spans = tuple(
                    self._span_at(p, s, place) for p, s in zip(pieces, layout.dims, strict=True)
                )
            key = (
                (self._resharder.device_index(node, place), spans)
                if self._mesh.sequential
                else place
            )
            if key not in made:
                made[key] = self._emit_variable_shard(node, place, spans)
            nodes.append(made[key])
            every.append(spans)
        return ShardedVariable(tuple(nodes), tuple(every), layout, self._mesh.sizes)

    def _span_at(self, piece: ShardExtent, split: AxisSplit, place: Place) -> Span:
        """Return the span of an extent of known size."""
        if split.ranges is not None:
            owner = self._mesh.coordinate(place, split.axes[0])
            return Span(0, int(piece.size), ranges=split.ranges.bounds_of(owner))
        start, size = int(piece.start), int(piece.size // split.rows)
        rows = split.outer if isinstance(split.outer, tuple) else int(split.outer)
        return Span(start, start + size, rows)

    def _emit_variable_shard(self, node: Node, place: Place, spans: tuple[Span, ...]) -> Node:
        """Write the variable of a place, with its part of the initial value."""
        shape = tuple([s.size for s in spans])
        name = f"{self._graph.names[node]}{self._mesh.tag(place)}"
        device = self._resharder.device_of(node, place)
        if shape == tuple(node.attrs["shape"]):
            return node.copy_for((), name, device, node, {**node.attrs, "named": False})
        with origin_scope(node, "", device):
            tensor: Tensor = REGISTRY["variable"](
                initial=self._initial_part(node, shape, spans),
                trainable=node.attrs["trainable"],
                shape=shape,
                dtype=node.attrs["dtype"],
                named=False,
                name=name,
            )
        return tensor.node

    def _initial_part(self, node: Node, shape: tuple[int, ...], spans: tuple[Span, ...]) -> Any:
        """Return a part of an initial value. An initialiser draws what it would have drawn
        there."""
        return initial_part(node, shape, spans, self._initial)

    def _pieces(self, tensor: Tensor, layout: Layout, place: Place) -> list[ShardExtent]:
        """Return the extent of each axis at a place."""
        return [
            self._resharder.partitioner.piece(size, split, place)
            for size, split in zip(tensor.shape, layout.dims, strict=True)
        ]

    def _assign(self, node: Node) -> None:
        """Hand a new value to the gatherer of updates, which may let it wait for others."""
        variable, given = node.inputs
        self._emitter.reduce_inputs(node)
        layout = self._emitter.values[variable].layout
        self._updates.add(node, self._emitter.values[given], layout)

    def _emit_assign(self, node: Node, value: ShardedTensor) -> None:
        """Write the assignments of all places, given a value in the layout of the variable."""
        targets = self._emitter.values[node.inputs[0]].shards
        variable, given = node.inputs
        apart = len(set(targets)) == len(targets)
        if apart and have_spec_of(targets, variable) and have_spec_of(value.shards, given):
            inputs = [*zip(targets, value.shards, strict=True)]
            copies = copy_to_places(self._resharder, node, inputs, node.op.name)
            self._keep(node.outputs[0], value.layout, [copy.outputs[0] for copy in copies])
            return
        made: dict[Tensor, Tensor] = {}
        parts = []
        for place, target, part in zip(self._mesh.places, targets, value.shards, strict=True):
            if target not in made:
                with self._resharder.on_device(place, node):
                    made[target] = REGISTRY["assign"](target, part)
            parts.append(made[target])
        self._keep(node.outputs[0], value.layout, parts)

    def _group(self, node: Node) -> None:
        """Write one group of what stands for the members at all places."""
        members: dict[Tensor, None] = {}
        for tensor in node.inputs:
            for part in self._groups.get(tensor) or self._emitter.values[tensor].shards:
                members[part] = None
        with self._resharder.cross_device(node):
            group = REGISTRY["group"](*members, name=node.name)
        self._groups[node.outputs[0]] = [group]

    def _fetch(self, tensor: Tensor) -> Tensor:
        """Return what stands for a fetch: the whole tensor at the first place."""
        if tensor in self._groups:
            return self._groups[tensor][0]
        return self._resharder.gather_to_first(self._emitter.values[tensor], tensor.node)

    def _with_all_updates(self, outputs: list[Tensor]) -> Graph:
        """Return the graph of the outputs, and of the updates at other places that no output needs.

        A fetch of an assignment is that of the first place. A group keeps the others alive.
        """
        graph = Graph(outputs)
        reached = set(graph.nodes)
        every = {
            part: node
            for node in self._graph.of_op("assign")
            for part in self._emitter.values[node.outputs[0]].shards
        }
        missing = [part for part in every if part.node not in reached]
        if not missing:
            return graph
        with self._resharder.cross_device(every[missing[0]]):
            rest: Tensor = REGISTRY["group"](*missing, name="updates")
        return Graph([*outputs, rest])

    def _keep(self, tensor: Tensor, layout: Layout, parts: Sequence[Tensor]) -> None:
        """Record what stands for a tensor."""
        self._emitter.values[tensor] = ShardedTensor(tensor.spec, layout, tuple(parts))


__all__ = ["StateEmitter"]
