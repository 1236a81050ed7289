"""Moves of values from one layout to another.

Every move is a set of nodes of the graph: slices where a piece is, and concatenations or sums where
it is wanted; large exchanges are collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, origin_scope
from graphflow.ir.spec import Outer, Shape, TensorSpec, product, segment_count
from graphflow.parallel.mesh.device_mesh import Cuts, Homes, Mesh, Piece, Place, Split
from graphflow.parallel.mesh.layouts import Layout, Move, Sent, Value
from graphflow.parallel.resharding.collectives import all_gather, all_reduce, reduce_scatter
from graphflow.parallel.resharding.communication_log import BETWEEN, Note, called, is_gradient
from graphflow.parallel.resharding.halos import seen
from graphflow.parallel.resharding.local_ops import combined_all, cut, joined, taken


class Moves:
    """Moves values between layouts, and notes what travels.

    Args:
        homes: of what stands for nodes, if these are not where the places are.
        again: the axis of the mesh along which gradients gather anew what a forward pass had
            gathered, so that it is not kept in between.
    """

    def __init__(
        self,
        mesh: Mesh,
        cuts: Cuts,
        homes: Homes | None = None,
        again: str | None = None,
    ) -> None:
        self.mesh = mesh
        self.cuts = cuts
        self._homes = homes
        self.made: list[Move] = []
        self.fetched: list[Move] = []
        self._again = again
        self._known: dict[tuple[Value, Layout, bool], Value] = {}
        self._seen: dict[Any, tuple[Tensor, ...]] = {}

    def noted(self) -> tuple[int, int, int]:
        """How much was moved so far, for `forget`."""
        return len(self.made), len(self._known), len(self._seen)

    def forget(self, before: tuple[int, int, int]) -> None:
        """Take back what was moved since, of which nothing is used."""
        made, known, seen_so_far = before
        del self.made[made:]
        for key in list(self._known)[known:]:
            del self._known[key]
        for window in list(self._seen)[seen_so_far:]:
            del self._seen[window]

    # Layouts ------------------------------------------------------------------------------------

    def same(self, size: Any, a: Split, b: Split) -> bool:
        """Whether two splits cut a size at the same places."""
        if a == b:
            return True
        return (
            a.axes == b.axes
            and (a.outer, a.over) == (b.outer, b.over)
            and self.cuts.pieces(size, a) == self.cuts.pieces(size, b)
        )

    def local_shape(self, shape: Shape, layout: Layout, place: Place) -> Shape:
        """The shape of the part at a place."""
        return tuple(
            self.cuts.piece(size, split, place).size
            for size, split in zip(shape, layout.dims, strict=True)
        )

    def nbytes(self, spec: TensorSpec, layout: Layout) -> int:
        """Bytes of one part, about."""
        parts = 1
        for split in layout.dims:
            parts *= self.mesh.parts(split.axes)
        return self.cuts.guess(product(spec.shape)) * spec.dtype.itemsize // parts

    # Moving -------------------------------------------------------------------------------------

    def to(self, value: Value, target: Layout, cause: Node, name: str) -> Value:
        """A value in another layout; partial results that the target keeps stay."""
        if value.layout == target:
            return value
        key = (value, target, self._is_late(cause))
        if key not in self._known:
            self._known[key] = self._moved(value, target, cause, name)
        return self._known[key]

    def _moved(self, value: Value, target: Layout, cause: Node, name: str) -> Value:
        note = Note(self, cause, name)
        together: dict[str, list[str]] = {}
        for axis, kind in sorted(value.layout.partial, key=lambda p: p[0] not in self.mesh.local):
            if (axis, kind) in target.partial:
                continue
            d = self.scatters(value, target, axis) if kind == "sum" else None
            if d is not None:
                value = self._reduce_scattered(value, axis, d, target.dims[d], note)
            elif axis in self.mesh.local or kind not in ("sum", "mean"):
                value = self._reduced(value, (axis,), kind, note)
            else:
                together.setdefault(kind, []).append(axis)
        for kind, axes in together.items():
            value = self._reduced(value, axes, kind, note)
        shape = value.spec.shape
        for d, want in enumerate(target.dims):
            have = value.layout.dims[d]
            elsewhere = have.axes == want.axes and not self.same(shape[d], have, want)
            plain = have.outer == 1 and want.outer == 1
            if elsewhere and plain and len(have.axes) == 1:
                value = self._recut(value, d, want, note)
                continue
            keep = self._common(shape[d], have, want)
            while len(value.layout.dims[d].axes) > keep:
                axis = value.layout.dims[d].axes[-1]
                e = self._wanted_at(value, target, axis, d)
                if e is None:
                    value = self._gathered(value, d, note)
                else:
                    value = self._exchanged(value, d, e, target.dims[e], note)
        for d, want in enumerate(target.dims):
            while not self.same(shape[d], value.layout.dims[d], want):
                done = len(value.layout.dims[d].axes)
                value = self._sliced(value, d, want.first(done + 1))
        return value

    def _is_late(self, cause: Node) -> bool:
        """Whether a gradient asks, where it does not use what the forward pass had gathered."""
        return self._again is not None and is_gradient(cause)

    def scatters(self, value: Value, target: Layout, axis: str) -> int | None:
        """The axis of a tensor along which the sum over a group may stay scattered."""
        for d, (have, want) in enumerate(zip(value.layout.dims, target.dims, strict=True)):
            plain = want.outer == 1 and want.axes[-1:] == (axis,)
            if plain and have == want.without_last():
                return d
        return None

    def _common(self, size: Any, have: Split, want: Split) -> int:
        """How many axes, from the first on, two splits share."""
        count = 0
        for a, b in zip(have.axes, want.axes, strict=False):
            if a != b:
                break
            count += 1
        while count and not self.same(size, have.first(count), want.first(count)):
            count -= 1
        return count

    def _wanted_at(self, value: Value, target: Layout, axis: str, d: int) -> int | None:
        """Another axis of the tensor that is to be cut along the same axis of the mesh next."""
        for e, want in enumerate(target.dims):
            done = value.layout.dims[e]
            goes_on = want.axes[: len(done.axes) + 1] == (*done.axes, axis)
            plain = value.layout.dims[d].outer == 1 and want.outer == 1
            if e != d and plain and goes_on and (not done or done.unit == want.unit):
                return e
        return None

    # Single moves -------------------------------------------------------------------------------

    def _each(
        self, value: Value, layout: Layout, cause: Node | None, build: Callable[[Place], Tensor]
    ) -> Value:
        parts = []
        known: dict[Any, Tensor] = {}
        for place, part in zip(self.mesh.places, value.parts, strict=True):
            own = tuple(
                self.cuts.piece(size, split, place)
                for size, split in zip(value.spec.shape, layout.dims, strict=True)
            )
            key = (self.home(cause or part.node, place), part, own)
            if not self.mesh.local or key not in known:
                with self.at(place, cause or part.node):
                    known[key] = build(place)
            parts.append(known[key])
        return Value(value.spec, layout, tuple(parts))

    def each(
        self, value: Value, spec: TensorSpec, cause: Node, change: Callable[[Tensor], Tensor]
    ) -> Value:
        """What is made of each part where it is, of the same shape."""
        made = self._each(value, value.layout, cause, lambda place: change(self.part(value, place)))
        return replace(made, spec=spec)

    def in_shape(self, value: Value, cause: Node) -> Value:
        """A value of parts that have its elements, each in the shape that its layout says."""

        def build(place: Place) -> Tensor:
            shape = self.local_shape(value.spec.shape, value.layout, place)
            part: Tensor = REGISTRY["reshape"](self.part(value, place), shape=shape)
            return part

        return self._each(value, value.layout, cause, build)

    def at(self, place: Place, node: Node) -> origin_scope:
        """Nodes built in the block are at a place, and count as made where a node was."""
        return origin_scope(node, self.prefix(place), self.device(node, place))

    def prefix(self, place: Place) -> str:
        """What the names of nodes at a place begin with."""
        return self.mesh.tag(place)[1:] + "/"

    def sites(self, node: Node) -> Sequence[tuple[str, DeviceName]]:
        """For each place, what the names of nodes there begin with, and where what stands for a
        node is."""
        if self._homes is None:
            return self._sites
        return [(self.prefix(place), self.device(node, place)) for place in self.mesh.places]

    @cached_property
    def _sites(self) -> Sequence[tuple[str, DeviceName]]:
        places = self.mesh.places
        return [(self.prefix(p), self.mesh.devices[self.mesh.number(p)]) for p in places]

    def device(self, node: Node, place: Place) -> DeviceName:
        """Where what stands for a node is."""
        if self._homes is not None:
            return self._homes.devices[self._homes.of(node, place)]
        return self.mesh.devices[self.mesh.number(place)]

    def home(self, node: Node, place: Place) -> int:
        """The number that what stands for nodes has in common where it shares a device, on a
        cluster with a device for each."""
        return self.mesh.home(place) if self._homes is None else self._homes.of(node, place)

    def between(self, cause: Node) -> origin_scope:
        """Nodes built in the block are at several places: where what they read is."""
        return origin_scope(cause, BETWEEN, DeviceName())

    def part(self, value: Value, place: Place) -> Tensor:
        """The part of a value at a place."""
        return value.parts[self.mesh.number(place)]

    def _reduced(self, value: Value, axes: Sequence[str], kind: str, note: Note) -> Value:
        """Every place of a group has the sum (or another combination) of its parts."""
        layout = replace(
            value.layout, partial=tuple(p for p in value.layout.partial if p[0] not in axes)
        )
        sent: dict[Sent, float] = {}

        def build(group: list[Place], own: list[Tensor]) -> list[Tensor]:
            if self.mesh.local.issuperset(axes):
                with self.at(group[0], note.cause):
                    return [combined_all(kind, own)] * len(own)
            if kind in ("sum", "mean"):
                with self.between(note.cause):
                    return all_reduce(own, op=kind)
            found = []
            for place in group:
                with self.at(place, note.cause):
                    found.append(combined_all(kind, own))
                sent.update(self.sent(zip(group, own, strict=True), place, note.cause))
            return found

        made = self._by_groups(value, layout, axes, build)
        if kind in ("sum", "mean"):
            note.exchange("all-reduce", axes, made)
        else:
            note("all-reduce", axes, sent)
        return made

    def _by_groups(
        self,
        value: Value,
        layout: Layout,
        axes: Sequence[str],
        build: Callable[[list[Place], list[Tensor]], list[Tensor]],
    ) -> Value:
        """What `build` makes of the parts of each group along some axes of the mesh; once where the
        places of two groups share their devices and parts."""
        parts: dict[Place, Tensor] = {}
        known: dict[Any, list[Tensor]] = {}
        for group in self.mesh.groups(*axes):
            own = [self.part(value, place) for place in group]
            pieces = [self._extents(value, layout, place) for place in group]
            key = (*own, *map(tuple, pieces))
            if key not in known or not self.mesh.local:
                known[key] = [
                    self._shaped(tensor, value, layout, place)
                    for tensor, place in zip(build(group, own), group, strict=True)
                ]
            parts.update(zip(group, known[key], strict=True))
        return Value(value.spec, layout, tuple(parts[p] for p in self.mesh.places))

    def _shaped(self, tensor: Tensor, value: Value, layout: Layout, place: Place) -> Tensor:
        """A part with the symbols of its size: those of pieces add up to that of the whole."""
        shape = self.local_shape(value.spec.shape, layout, place)
        if tensor.shape == shape:
            return tensor
        with self.at(place, tensor.node.origin or tensor.node):
            named: Tensor = REGISTRY["reshape"](tensor, shape=shape)
        return named

    def _named(self, part: Tensor, place: Place, cause: Node) -> Tensor:
        """A part under another name, which costs nothing."""
        with self.at(place, cause):
            named: Tensor = REGISTRY["reshape"](part, shape=part.shape)
        return named

    def _extents(self, value: Value, layout: Layout, place: Place) -> list[Piece]:
        """The piece of each axis that a place has."""
        axes = zip(value.spec.shape, layout.dims, strict=True)
        return [self.cuts.piece(size, split, place) for size, split in axes]

    def _reduce_scattered(self, value: Value, axis: str, d: int, want: Split, note: Note) -> Value:
        layout = replace(
            value.layout.with_dim(d, want),
            partial=tuple(p for p in value.layout.partial if p[0] != axis),
        )
        size = value.spec.shape[d]

        def build(group: list[Place], own: list[Tensor]) -> list[Tensor]:
            pieces = [self.cuts.piece(size, want, place) for place in group]
            if axis not in self.mesh.local:
                with self.between(note.cause):
                    return reduce_scatter(own, axis=d, sizes=[p.size for p in pieces])
            with self.at(group[0], note.cause):
                total = combined_all("sum", own)
                origin = self._origin(size, value.layout.dims[d], group[0])
                return [cut(total, d, p.start - origin, p.size) for p in pieces]

        made = self._by_groups(value, layout, (axis,), build)
        note.exchange("reduce-scatter", (axis,), made)
        return made

    def _gathered(self, value: Value, d: int, note: Note) -> Value:
        """Every place of a group has all its parts, along the last axis by which `d` is cut."""
        axis = value.layout.dims[d].axes[-1]
        layout = value.layout.with_dim(d, value.layout.dims[d].without_last())
        size, split = value.spec.shape[d], value.layout.dims[d]
        late = axis == self._again and self._is_late(note.cause)

        def build(group: list[Place], own: list[Tensor]) -> list[Tensor]:
            if late:  # under names of their own, so that no pass takes them for the same
                pairs = zip(own, group, strict=True)
                own = [self._named(part, place, note.cause) for part, place in pairs]
            rows = self.cuts.rows(size, split, group[0])
            if axis in self.mesh.local:
                with self.at(group[0], note.cause):
                    return [self._one_of(value, d, split, own, group[0])] * len(own)
            with self.between(note.cause):
                wholes = all_gather(own, axis=d)
            if rows == 1:
                return wholes
            return [in_order(w, p, rows) for w, p in zip(wholes, group, strict=True)]

        def in_order(whole: Tensor, place: Place, rows: Outer) -> Tensor:
            """Pieces one after the other, stretch by stretch."""
            group = self.mesh.group(place, axis)
            begin: Any = 0
            found = []
            with self.at(place, note.cause):
                for piece in [self.cuts.piece(size, split, p) for p in group]:
                    found.append(cut(whole, d, begin, piece.size))
                    begin = begin + piece.size
                return joined(found, d, rows)

        made = self._by_groups(value, layout, (axis,), build)
        note.exchange("all-gather", (axis,), made)
        return made

    def _exchanged(self, value: Value, d: int, e: int, want: Split, note: Note) -> Value:
        """The last axis by which `d` is cut cuts `e` instead: everyone sends to everyone."""
        axis = value.layout.dims[d].axes[-1]
        before = value.layout.dims[e]
        after = Split((*before.axes, axis), want.unit)
        layout = value.layout.with_dim(d, value.layout.dims[d].without_last()).with_dim(e, after)
        size = value.spec.shape[e]
        sent: dict[Sent, float] = {}

        def build(place: Place) -> Tensor:
            origin = self._origin(size, before, place)
            piece = self.cuts.piece(size, after, place)
            found = []
            group = self.mesh.group(place, axis)
            for other in group:
                with self.at(other, note.cause):
                    found.append(cut(self.part(value, other), e, piece.start - origin, piece.size))
            sent.update(self.sent(zip(group, found, strict=True), place, note.cause))
            joined: Tensor = FUNCTIONS["concat"](found, axis=d)
            return joined

        made = self._each(value, layout, note.cause, build)
        note("all-to-all", (axis,), sent)
        return made

    def _sliced(self, value: Value, d: int, split: Split) -> Value:
        """Each place takes its piece of what it has."""
        layout = value.layout.with_dim(d, split)
        size, before = value.spec.shape[d], value.layout.dims[d]

        def build(place: Place) -> Tensor:
            piece, rows = self.cuts.piece(size, split, place), self.cuts.rows(size, split, place)
            origin = self._origin(size, before, place) if split.over == before.over else 0
            own = piece.size // segment_count(rows)
            return taken(self.part(value, place), d, rows, piece.start - origin, own)

        return self._each(value, layout, None, build)

    def _origin(self, size: Any, split: Split, place: Place) -> Any:
        return self.cuts.piece(size, split, place).start

    def _recut(self, value: Value, d: int, want: Split, note: Note) -> Value:
        """Other places of the cuts along the same axis of the mesh."""
        size = value.spec.shape[d]
        ranges = [self.cuts.piece(size, want, place) for place in self.mesh.places]
        parts = self.windows(
            value, d, [(p.start, p.stop) for p in ranges], note.cause, note.name, "all-to-all"
        )
        return Value(value.spec, value.layout.with_dim(d, want), parts)

    def windows(
        self,
        value: Value,
        d: int,
        ranges: Sequence[tuple[Any, Any]],
        cause: Node,
        name: str,
        kind: str = "halo",
    ) -> tuple[Tensor, ...]:
        """The elements start to stop along `d` for each place, wherever they are: a halo.

        The size of what is cut along `d` is known. Where it is there already (a gradient's windows
        see what those of the forward pass saw), nothing moves.
        """
        homes = tuple(self.home(cause, place) for place in self.mesh.places)
        key = (value, d, tuple(ranges), homes)
        if key not in self._seen:
            self._seen[key] = seen(self, value, d, ranges, Note(self, cause, name), kind)
        return self._seen[key]

    def at_first(self, value: Value, cause: Node) -> Tensor:
        """The whole tensor, at the first place only: what is fetched."""
        parts = dict(zip(self.mesh.places, value.parts, strict=True))
        layout = value.layout
        used = layout.axes()
        spare = [axis for axis in self.mesh.names if axis not in used]  # all along these have it
        places = [p for p in self.mesh.places if not any(self.mesh.at(p, a) for a in spare)]

        def at_one(axis: str, build: Callable[[list[Tensor], Place], Tensor]) -> None:
            nonlocal places
            places = [p for p in places if self.mesh.at(p, axis) == 0]
            sent: dict[Sent, float] = {}
            for place in places:
                group = self.mesh.group(place, axis)
                own = [parts[p] for p in group]
                sent.update(self.sent(zip(group, own, strict=True), place, cause))
                with self.at(place, cause):
                    parts[place] = build(own, place)
            Note(self, cause, called(cause), self.fetched)("fetch", (axis,), sent)

        def combining(kind: str) -> Callable[[list[Tensor], Place], Tensor]:
            return lambda own, _: combined_all(kind, own)

        for axis, kind in sorted(layout.partial, key=lambda p: p[0] not in self.mesh.local):
            at_one(axis, combining(kind))
        for d, split in enumerate(layout.dims):
            for count in range(len(split.axes), 0, -1):
                at_one(split.axes[count - 1], partial(self._one_of, value, d, split.first(count)))
        return parts[places[0]]

    def _one_of(
        self, value: Value, d: int, split: Split, own: list[Tensor], place: Place
    ) -> Tensor:
        """The pieces of a group at a place, along the last axis of a split."""
        return joined(own, d, self.cuts.rows(value.spec.shape[d], split, place))

    def sent(
        self, parts: Iterable[tuple[Place, Tensor]], to: Place, cause: Node
    ) -> dict[Sent, int]:
        """What a place gets of parts that are at other places."""
        there = self.device(cause, to) if self.mesh.local else to
        return {
            (part, there): self.cuts.guess(product(part.shape)) * part.spec.dtype.itemsize
            for place, part in parts
            if place != to and not (self.mesh.local and self.device(cause, place) == there)
        }


__all__ = ["Moves"]
