"""Nodes that hold bodies: each place runs a body of its own, on the pieces that it has.

A body is cut as its operands are, if nothing has to travel inside it: a recurrent network over a
batch, say, whose weights' gradients are sums that each place carries along for itself. A call that
needs an exchange is put in the place of what it holds; a loop or a branch gets its operands whole
along those axes of the mesh that ask for one: replicas keep their shares where weights are cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, takewhile
from typing import TYPE_CHECKING, Any

from graphflow.errors import GraphflowError
from graphflow.frontend.tracing import make_parameter
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Body, Graph
from graphflow.ir.op import FUNCTIONS, Node, Tensor, make_node, origin_scope
from graphflow.ir.spec import TensorSpec
from graphflow.parallel.mesh.device_mesh import WHOLE, Place, Split
from graphflow.parallel.mesh.layouts import Layout, Value, whole
from graphflow.parallel.resharding.communication_log import called
from graphflow.parallel.resharding.resharder import Moves
from graphflow.parallel.sharding.propagation import propagate

if TYPE_CHECKING:
    from graphflow.parallel.sharding.emitter import Emitter

TRIES = 6
"""Times that a loop's body is cut anew because what it carries comes back in another layout."""
Layouts = list[Layout]


class Communicates(GraphflowError):
    """Something would have to travel inside a body."""


class Still(Moves):
    """Moves within a place only, each where the node is whose body it is."""

    def __init__(self, moves: Moves, node: Node) -> None:
        super().__init__(moves.mesh, moves.cuts)
        self._outside = moves
        self._node = node

    def device(self, node: Node, place: Place) -> DeviceName:
        return self._outside.device(self._node, place)

    def home(self, node: Node, place: Place) -> int:
        return self._outside.home(self._node, place)

    def _by_groups(self, *args: Any) -> Value:
        raise Communicates("a sum or a whole is needed")

    def _exchanged(self, *args: Any) -> Value:
        raise Communicates("pieces change places")

    def windows(self, *args: Any) -> tuple[Tensor, ...]:
        raise Communicates("windows see their neighbours' pieces")

    def between(self, cause: Node) -> origin_scope:
        raise Communicates("something is exchanged")


def emit_control(emitter: Emitter, node: Node) -> None:
    """Write a node that holds bodies, as much in pieces as it can be."""
    call = node.op.name == "call"
    for axes in _choices(emitter, node):
        work = _Control(emitter, node, axes)
        before = emitter.moves.noted()
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
        except Communicates:
            emitter.moves.forget(before)
            if call:
                break
    work = _Control(emitter, node)
    if call:
        work.inline()
    else:
        work.whole()


def _choices(emitter: Emitter, node: Node) -> Iterator[frozenset[str]]:
    """Axes of the mesh along which operands may stay cut: all, then all but one, …; none is left
    out where that brings the fewest bytes together."""
    values = [emitter.values[t] for t in node.inputs]
    cut = sorted({axis for v in values for d in v.layout.dims for axis in d.axes})

    def gathered(kept: tuple[str, ...]) -> int:
        loose = [v for v in values if any(a not in kept for d in v.layout.dims for a in d.axes)]
        return sum(emitter.cuts.guess(v.spec.size) for v in loose)

    for count in range(len(cut), -1, -1):
        for kept in sorted(combinations(cut, count), key=gathered):
            yield frozenset(kept)


def _added(body: Body, carries: int) -> dict[int, Tensor]:
    """What a loop adds to those of its carried values with which it does nothing else."""
    found: dict[int, Tensor] = {}
    for i, (node, result) in enumerate(zip(body.inputs, body.outputs[:carries], strict=False)):
        own, last = node.outputs[0], result.node
        if last.op.name == "add" and body.graph.consumers.get(node) == [last]:
            others = [t for t in last.inputs if t is not own]
            if len(others) == 1 and others[0].spec == own.spec:
                found[i] = others[0]
    return found


class _Control:
    """A node that holds bodies, on its way through an emitter.

    Args:
        axes: of the mesh, along which operands stay cut.
    """

    def __init__(self, emitter: Emitter, node: Node, axes: frozenset[str] = frozenset()) -> None:
        self.emitter = emitter
        self.axes = axes
        self.moves = emitter.moves
        self.node = node
        self.places = emitter.mesh.places

    # Ways -----------------------------------------------------------------------------------------

    def call(self) -> None:
        values = self._operands()
        body: Body = self.node.attrs["body"]
        bodies, layouts = self._cut(body, [v.layout for v in values])
        self._write(values, [{"body": b} for b in bodies], layouts)

    def cond(self) -> None:
        pred, *values = self._operands()
        if pred.layout != whole(0):
            raise Communicates("the predicate is not whole")
        given = [v.layout for v in values]
        branches = self.node.attrs["then"], self.node.attrs["orelse"]
        (_, first), (_, second) = (self._cut(body, given) for body in branches)
        layouts = [
            a if len(a.partial) >= len(b.partial) and len(a.axes()) >= len(b.axes()) else b
            for a, b in zip(first, second, strict=True)
        ]
        (then, _), (orelse, _) = (self._cut(body, given, layouts) for body in branches)
        attrs = [{"then": a, "orelse": b} for a, b in zip(then, orelse, strict=True)]
        self._write([pred, *values], attrs, layouts)

    def scan(self) -> None:
        attrs = self.node.attrs
        counted = int(attrs.get("counted", False))
        carries, items = attrs["carries"], attrs["items"]
        values = self._operands()
        for value in values[counted + carries : counted + carries + items]:
            if value.layout.dims[0]:
                raise Communicates("it goes along an axis that is cut")
        if counted and values[0].layout != whole(0):
            raise Communicates("the count is not whole")

        def inside(given: Sequence[Value]) -> Layouts:
            rows = given[counted + carries : counted + carries + items]
            return [
                *(v.layout for v in given[counted : counted + carries]),
                *(Layout(v.layout.dims[1:], v.layout.partial) for v in rows),
                *(v.layout for v in given[counted + carries + items :]),
            ]

        values, bodies, layouts = self._steady(attrs["body"], values, counted, carries, inside)
        layouts = [
            *layouts[:carries],
            *(Layout((WHOLE, *at.dims), at.partial) for at in layouts[carries:]),
        ]
        self._write(values, [{"body": b} for b in bodies], layouts)

    def while_loop(self) -> None:
        attrs = self.node.attrs
        states = attrs["states"]

        def inside(given: Sequence[Value]) -> Layouts:
            return [v.layout for v in given]

        values, bodies, layouts = self._steady(attrs["body"], self._operands(), 0, states, inside)
        tests, (verdict,) = self._cut(attrs["test"], inside(values))
        if verdict != whole(0):
            raise Communicates("its condition is for all")
        layouts = [
            whole(0),
            *layouts[:states],
            *(Layout((WHOLE, *at.dims), at.partial) for at in layouts[states:]),
        ]
        both = [{"body": b, "test": t} for b, t in zip(bodies, tests, strict=True)]
        self._write(values, both, layouts)

    def whole(self) -> None:
        """The node at each place, with whole operands."""
        values = [
            self.moves.to(self.emitter.values[t], whole(t.ndim), self.node, called(t.node))
            for t in self.node.inputs
        ]
        layouts = [whole(s.rank) for s in self.node.specs]
        self._write(values, [{} for _ in self.places], layouts)

    def inline(self) -> None:
        """What a call holds, in its place."""
        body: Body = self.node.attrs["body"]
        known = self.emitter.values
        inner = [t for n in body.graph.nodes for t in n.outputs]
        for tensor in inner:
            known.pop(tensor, None)
        for parameter_, tensor in zip(body.inputs, self.node.inputs, strict=True):
            known[parameter_.outputs[0]] = known[tensor]
        self.emitter.within(body.graph)
        for own, result in zip(self.node.outputs, body.outputs, strict=True):
            known[own] = known[result]

    # Parts ----------------------------------------------------------------------------------------

    def _operands(self) -> list[Value]:
        """The operands as they are along the axes that stay, sums made."""
        found = []
        for tensor in self.node.inputs:
            value = self.emitter.values[tensor]
            layout = Layout(tuple(self._kept(split) for split in value.layout.dims))
            found.append(self.moves.to(value, layout, self.node, called(tensor.node)))
        return found

    def _kept(self, split: Split) -> Split:
        count = len(list(takewhile(self.axes.__contains__, split.axes)))
        return split.first(count)

    def _steady(
        self,
        body: Body,
        values: list[Value],
        first: int,
        carries: int,
        inside: Callable[[Sequence[Value]], Layouts],
    ) -> tuple[list[Value], list[Body], Layouts]:
        """A loop's bodies, the operands carried being in the layouts in which they come back."""
        added = _added(body, carries)
        if added:  # sums are carried as what is added to them comes
            outputs = [added.get(i, t) for i, t in enumerate(body.graph.outputs)]
            _, layouts = self._cut(replace(body, graph=Graph(outputs)), inside(values))
            for i in [i for i in added if layouts[i].partial]:
                values[first + i] = self._begun(values[first + i], layouts[i])
        for _ in range(TRIES):
            bodies, layouts = self._cut(body, inside(values))
            changed = False
            for i in range(carries):
                have = values[first + i]
                if layouts[i] != have.layout:
                    values[first + i] = self._begun(have, layouts[i])
                    changed = True
            if not changed:
                return values, bodies, layouts
        raise Communicates("what is carried comes back in ever other pieces")

    def _begun(self, value: Value, layout: Layout, moves: Moves | None = None) -> Value:
        """A value in pieces; where sums are made later, at the first place of each group only,
        zeros at others."""
        moves = moves or self.moves
        if any(p not in layout.partial for p in value.layout.partial):
            raise Communicates("a sum is needed")
        fresh = [axis for axis, kind in layout.partial if (axis, kind) not in value.layout.partial]
        if any(kind != "sum" for _, kind in layout.partial):
            raise Communicates("what is carried is no sum")
        plain = Layout(layout.dims, value.layout.partial)
        value = moves.to(value, plain, self.node, "carried")
        parts = []
        for place, part in zip(self.places, value.parts, strict=True):
            if any(self.emitter.mesh.at(place, axis) for axis in fresh):
                with moves.at(place, self.node):
                    part = FUNCTIONS["zeros_like"](part)
            parts.append(part)
        return Value(value.spec, layout, tuple(parts))

    def _cut(
        self, body: Body, layouts: Layouts, wanted: Layouts | None = None
    ) -> tuple[list[Body], Layouts]:
        """A body for each place, and the layouts of its results.

        Args:
            wanted: layouts of the results; default: those that they come in.

        Raises:
            Communicates: something would have to travel.
        """
        moves = Still(self.moves, self.node)
        given = {n.outputs[0]: at for n, at in zip(body.inputs, layouts, strict=True)}
        plain = {t: Layout(at.dims) for t, at in given.items()}
        wishes = propagate(body.graph.nodes, plain, self.moves.cuts)
        inside = self.emitter.inside(moves, wishes)
        parameters: list[tuple[Node, ...]] = []
        for node, at in zip(body.inputs, layouts, strict=True):
            parts = tuple(self._parameter(node, at, place) for place in self.places)
            parameters.append(parts)
            own = tuple(p.outputs[0] for p in parts)
            inside.values[node.outputs[0]] = Value(node.specs[0], at, own)
        inside.within(body.graph)
        results = [inside.values[t] for t in body.graph.outputs]
        for i, layout in enumerate(wanted or ()):
            if results[i].layout != layout:
                results[i] = self._begun(results[i], layout, moves)
        bodies = []
        for number in range(len(self.places)):
            graph = Graph([value.parts[number] for value in results])
            inputs = tuple(parts[number] for parts in parameters)
            bodies.append(Body(inputs, graph, body.results))
        return bodies, [value.layout for value in results[: body.results]]

    def _parameter(self, node: Node, layout: Layout, place: Place) -> Node:
        spec = node.specs[0]
        shape = self.moves.local_shape(spec.shape, layout, place)
        return make_parameter(TensorSpec(shape, spec.dtype), node.name)

    def _write(
        self, values: Sequence[Value], attrs: Sequence[dict[str, Any]], layouts: Sequence[Layout]
    ) -> None:
        """The node at each place."""
        made: list[tuple[Tensor, ...]] = []
        for number, place in enumerate(self.places):
            inputs = tuple(value.parts[number] for value in values)
            with self.moves.at(place, self.node):
                own = {**self.node.attrs, **attrs[number]}
                made.append(make_node(self.node.op, inputs, own, self.node.name).outputs)
        for o, (tensor, layout) in enumerate(zip(self.node.outputs, layouts, strict=True)):
            parts = tuple(outputs[o] for outputs in made)
            self.emitter.values[tensor] = Value(tensor.spec, layout, parts)
