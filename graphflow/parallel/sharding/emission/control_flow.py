"""Nodes that hold bodies (call, cond, scan, while_loop): each place runs a body on its own shards.

A body is partitioned as its operands are, if no communication is needed inside it. A recurrent
network over a split batch is an example: each place carries its partial sums of the weights'
gradients along.

If a call would need communication, its body is written in its place. A loop or a branch instead
gets its operands whole along the mesh axes that would need it. So replicas keep their shards even
if weights in the body are split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, takewhile
from typing import Any

from graphflow.errors import GraphflowError
from graphflow.frontend.tracing import make_parameter
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Body, Graph
from graphflow.ir.op import FUNCTIONS, Node, Tensor, make_node, origin_scope
from graphflow.ir.spec import TensorSpec
from graphflow.parallel.mesh.axis_split import WHOLE, AxisSplit
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.mesh.layouts import Layout, ShardedTensor, whole
from graphflow.parallel.resharding.communication_log import user_name
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.sharding.emission.emitter import Emitter
from graphflow.parallel.sharding.propagation.propagation import propagate

MAX_ROUNDS = 6
"""The most times that a loop's body is partitioned anew because a carried value came back in
another layout."""
Layouts = list[Layout]


class NeedsCommunication(GraphflowError):
    """A body would need communication between places."""


class LocalResharder(Resharder):
    """A resharder that works within each place only. Nodes are on the device of the node that holds
    the body."""

    def __init__(self, resharder: Resharder, node: Node) -> None:
        super().__init__(resharder.mesh, resharder.partitioner)
        self._outside = resharder
        self._node = node

    def device_of(self, node: Node, place: Place) -> DeviceName:
        return self._outside.device_of(self._node, place)

    def device_index(self, node: Node, place: Place) -> int:
        return self._outside.device_index(self._node, place)

    def _map_groups(self, *args: Any) -> ShardedTensor:
        raise NeedsCommunication("a sum or a whole is needed")

    def _all_to_all(self, *args: Any) -> ShardedTensor:
        raise NeedsCommunication("pieces change places")

    def fetch_windows(self, *args: Any) -> tuple[Tensor, ...]:
        raise NeedsCommunication("windows see their neighbours' pieces")

    def cross_device(self, cause: Node) -> origin_scope:
        raise NeedsCommunication("something is exchanged")


def emit_control(emitter: Emitter, node: Node) -> None:
    """Write a node that holds bodies, with as much of it split as possible."""
    call = node.op.name == "call"
    for axes in _kept_axis_sets(emitter, node):
        work = _ControlEmitter(emitter, node, axes)
        before = emitter.resharder.checkpoint()
        try:
            match node.op.name:
                case "call":
                    work.call()
                case "cond":
                    work.cond()
                case "scan":
                    work.scan()
                case _:
                    work.while_loop()
            return
        except NeedsCommunication:
            emitter.resharder.roll_back(before)
            if call:
                break
    work = _ControlEmitter(emitter, node)
    if call:
        work.inline()
    else:
        work.whole()


def _kept_axis_sets(emitter: Emitter, node: Node) -> Iterator[frozenset[str]]:
    """Yield sets of mesh axes along which operands may stay split: all axes, then all but one, and
    so on.

    Among sets of one size, the set that gathers the fewest elements comes first.
    """
    values = [emitter.values[t] for t in node.inputs]
    cut = sorted({axis for v in values for d in v.layout.dims for axis in d.axes})

    def gathered_size(kept: tuple[str, ...]) -> int:
        loose = [v for v in values if any(a not in kept for d in v.layout.dims for a in d.axes)]
        return sum(emitter.partitioner.guess(v.spec.size) for v in loose)

    for count in range(len(cut), -1, -1):
        for kept in sorted(combinations(cut, count), key=gathered_size):
            yield frozenset(kept)


def _accumulated_carries(body: Body, carries: int) -> dict[int, Tensor]:
    """Return, by number, what a loop adds to those carried values with which it does nothing
    else."""
    found: dict[int, Tensor] = {}
    for i, (node, result) in enumerate(zip(body.inputs, body.outputs[:carries], strict=False)):
        own, last = node.outputs[0], result.node
        if last.op.name == "add" and body.graph.consumers.get(node) == [last]:
            others = [t for t in last.inputs if t is not own]
            if len(others) == 1 and others[0].spec == own.spec:
                found[i] = others[0]
    return found


class _ControlEmitter:
    """Writes one node that holds bodies.

    Args:
        emitter: the emitter of the graph that the node is in.
        node: the node.
        axes: the mesh axes along which operands stay split.
    """

    def __init__(self, emitter: Emitter, node: Node, axes: frozenset[str] = frozenset()) -> None:
        self.emitter = emitter
        self.axes = axes
        self.resharder = emitter.resharder
        self.node = node
        self.places = emitter.mesh.places

    # Kinds of nodes -------------------------------------------------------------------------------

    def call(self) -> None:
        """Write a call with a body for each place."""
        values = self._operands()
        body: Body = self.node.attrs["body"]
        bodies, layouts = self._partition_body(body, [v.layout for v in values])
        self._write(values, [{"body": b} for b in bodies], layouts)

    def cond(self) -> None:
        """Write a branch with bodies for each place, whose results have one layout in both."""
        pred, *values = self._operands()
        if pred.layout != whole(0):
            raise NeedsCommunication("the predicate is not whole")
        given = [v.layout for v in values]
        branches = self.node.attrs["then"], self.node.attrs["orelse"]
        (_, first), (_, second) = (self._partition_body(body, given) for body in branches)
        layouts = [
            a if len(a.partial) >= len(b.partial) and len(a.axes()) >= len(b.axes()) else b
            for a, b in zip(first, second, strict=True)
        ]
        (then, _), (orelse, _) = (self._partition_body(body, given, layouts) for body in branches)
        attrs = [{"then": a, "orelse": b} for a, b in zip(then, orelse, strict=True)]
        self._write([pred, *values], attrs, layouts)

    def scan(self) -> None:
        """Write a scan with a body for each place."""
        attrs = self.node.attrs
        counted = int(attrs.get("counted", False))
        carries, items = attrs["carries"], attrs["items"]
        values = self._operands()
        for value in values[counted + carries : counted + carries + items]:
            if value.layout.dims[0]:
                raise NeedsCommunication("it goes along an axis that is cut")
        if counted and values[0].layout != whole(0):
            raise NeedsCommunication("the count is not whole")

        def inside(given: Sequence[ShardedTensor]) -> Layouts:
            rows = given[counted + carries : counted + carries + items]
            return [
                *(v.layout for v in given[counted : counted + carries]),
                *(Layout(v.layout.dims[1:], v.layout.partial) for v in rows),
                *(v.layout for v in given[counted + carries + items :]),
            ]

        values, bodies, layouts = self._find_fixed_point(
            attrs["body"], values, counted, carries, inside
        )
        layouts = [
            *layouts[:carries],
            *(Layout((WHOLE, *at.dims), at.partial) for at in layouts[carries:]),
        ]
        self._write(values, [{"body": b} for b in bodies], layouts)

    def while_loop(self) -> None:
        """Write a loop with a body and a test for each place."""
        attrs = self.node.attrs
        states = attrs["states"]

        def inside(given: Sequence[ShardedTensor]) -> Layouts:
            return [v.layout for v in given]

        values, bodies, layouts = self._find_fixed_point(
            attrs["body"], self._operands(), 0, states, inside
        )
        tests, (verdict,) = self._partition_body(attrs["test"], inside(values))
        if verdict != whole(0):
            raise NeedsCommunication("its condition is for all")
        layouts = [
            whole(0),
            *layouts[:states],
            *(Layout((WHOLE, *at.dims), at.partial) for at in layouts[states:]),
        ]
        both = [{"body": b, "test": t} for b, t in zip(bodies, tests, strict=True)]
        self._write(values, both, layouts)

    def whole(self) -> None:
        """Write the node at each place with whole operands."""
        values = [
            self.resharder.convert(
                self.emitter.values[t], whole(t.ndim), self.node, user_name(t.node)
            )
            for t in self.node.inputs
        ]
        layouts = [whole(s.rank) for s in self.node.specs]
        self._write(values, [{} for _ in self.places], layouts)

    def inline(self) -> None:
        """Write the nodes of a call's body in the place of the call."""
        body: Body = self.node.attrs["body"]
        known = self.emitter.values
        inner = [t for n in body.graph.nodes for t in n.outputs]
        for tensor in inner:
            known.pop(tensor, None)
        for parameter_, tensor in zip(body.inputs, self.node.inputs, strict=True):
            known[parameter_.outputs[0]] = known[tensor]
        self.emitter.emit_graph(body.graph)
        for own, result in zip(self.node.outputs, body.outputs, strict=True):
            known[own] = known[result]

    # Bodies and operands --------------------------------------------------------------------------

    def _operands(self) -> list[ShardedTensor]:
        """Return the operands, split along the axes that stay, with sums completed."""
        found = []
        for tensor in self.node.inputs:
            value = self.emitter.values[tensor]
            layout = Layout(tuple(self._kept_split(split) for split in value.layout.dims))
            found.append(self.resharder.convert(value, layout, self.node, user_name(tensor.node)))
        return found

    def _kept_split(self, split: AxisSplit) -> AxisSplit:
        """Return the split along the leading mesh axes that stay."""
        count = len(list(takewhile(self.axes.__contains__, split.axes)))
        return split.keep_first(count)

    def _find_fixed_point(
        self,
        body: Body,
        values: list[ShardedTensor],
        first: int,
        carries: int,
        inside: Callable[[Sequence[ShardedTensor]], Layouts],
    ) -> tuple[list[ShardedTensor], list[Body], Layouts]:
        """Partition a loop's body until every carried value comes back in the layout that it went
        in with.

        Args:
            first: the number of the first carried operand.
            carries: how many values are carried.
            inside: maps operands to the layouts of the body's inputs.

        Returns:
            The operands, a body for each place, and the layouts of the results.

        Raises:
            NeedsCommunication: layouts do not settle in `MAX_ROUNDS` rounds.
        """
        added = _accumulated_carries(body, carries)
        if added:  # carry sums in the layout of their addends
            outputs = [added.get(i, t) for i, t in enumerate(body.graph.outputs)]
            _, layouts = self._partition_body(replace(body, graph=Graph(outputs)), inside(values))
            for i in [i for i in added if layouts[i].partial]:
                values[first + i] = self._convert_carry(values[first + i], layouts[i])
        for _ in range(MAX_ROUNDS):
            bodies, layouts = self._partition_body(body, inside(values))
            changed = False
            for i in range(carries):
                have = values[first + i]
                if layouts[i] != have.layout:
                    values[first + i] = self._convert_carry(have, layouts[i])
                    changed = True
            if not changed:
                return values, bodies, layouts
        raise NeedsCommunication("what is carried comes back in ever other pieces")

    def _convert_carry(
        self, value: ShardedTensor, layout: Layout, resharder: Resharder | None = None
    ) -> ShardedTensor:
        """Convert a carried value to a layout without communication.

        For a sum that is completed after the loop, the first place of each group keeps the value;
        the others start with zeros.
        """
        resharder = resharder or self.resharder
        if any(p not in layout.partial for p in value.layout.partial):
            raise NeedsCommunication("a sum is needed")
        fresh = [axis for axis, kind in layout.partial if (axis, kind) not in value.layout.partial]
        if any(kind != "sum" for _, kind in layout.partial):
            raise NeedsCommunication("what is carried is no sum")
        plain = Layout(layout.dims, value.layout.partial)
        value = resharder.convert(value, plain, self.node, "carried")
        parts = []
        for place, part in zip(self.places, value.shards, strict=True):
            if any(self.emitter.mesh.coordinate(place, axis) for axis in fresh):
                with resharder.on_device(place, self.node):
                    part = FUNCTIONS["zeros_like"](part)
            parts.append(part)
        return ShardedTensor(value.spec, layout, tuple(parts))

    def _partition_body(
        self, body: Body, layouts: Layouts, wanted: Layouts | None = None
    ) -> tuple[list[Body], Layouts]:
        """Return a body for each place, and the layouts of its results.

        Args:
            layouts: the layouts of the body's inputs.
            wanted: the layouts of the results; default: the layouts in which they come.

        Raises:
            NeedsCommunication: the body would need communication.
        """
        resharder = LocalResharder(self.resharder, self.node)
        given = {n.outputs[0]: at for n, at in zip(body.inputs, layouts, strict=True)}
        plain = {t: Layout(at.dims) for t, at in given.items()}
        preferred = propagate(body.graph.nodes, plain, self.resharder.partitioner)
        inside = self.emitter.body_emitter(resharder, preferred)
        parameters: list[tuple[Node, ...]] = []
        for node, at in zip(body.inputs, layouts, strict=True):
            parts = tuple(self._parameter(node, at, place) for place in self.places)
            parameters.append(parts)
            own = tuple(p.outputs[0] for p in parts)
            inside.values[node.outputs[0]] = ShardedTensor(node.specs[0], at, own)
        inside.emit_graph(body.graph)
        results = [inside.values[t] for t in body.graph.outputs]
        for i, layout in enumerate(wanted or ()):
            if results[i].layout != layout:
                results[i] = self._convert_carry(results[i], layout, resharder)
        bodies = []
        for number in range(len(self.places)):
            graph = Graph([value.shards[number] for value in results])
            inputs = tuple(parts[number] for parts in parameters)
            bodies.append(Body(inputs, graph, body.results))
        return bodies, [value.layout for value in results[: body.results]]

    def _parameter(self, node: Node, layout: Layout, place: Place) -> Node:
        """Return the parameter of a body at a place."""
        spec = node.specs[0]
        shape = self.resharder.local_shape(spec.shape, layout, place)
        return make_parameter(TensorSpec(shape, spec.dtype), node.name)

    def _write(
        self,
        values: Sequence[ShardedTensor],
        attrs: Sequence[dict[str, Any]],
        layouts: Sequence[Layout],
    ) -> None:
        """Write the node at each place."""
        made: list[tuple[Tensor, ...]] = []
        for number, place in enumerate(self.places):
            inputs = tuple(value.shards[number] for value in values)
            with self.resharder.on_device(place, self.node):
                own = {**self.node.attrs, **attrs[number]}
                made.append(make_node(self.node.op, inputs, own, self.node.name).outputs)
        for o, (tensor, layout) in enumerate(zip(self.node.outputs, layouts, strict=True)):
            parts = tuple(outputs[o] for outputs in made)
            self.emitter.values[tensor] = ShardedTensor(tensor.spec, layout, parts)
