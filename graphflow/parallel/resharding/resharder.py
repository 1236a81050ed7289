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
from graphflow.parallel.mesh.device_mesh import (
    AxisSplit,
    DeviceAssignment,
    Mesh,
    Place,
    ShardExtent,
    SizePartitioner,
)
from graphflow.parallel.mesh.layouts import CommunicationRecord, Layout, SentTensor, ShardedTensor
from graphflow.parallel.resharding.collectives import all_gather, all_reduce, reduce_scatter
from graphflow.parallel.resharding.communication_log import (
    CROSS_DEVICE_SCOPE,
    CommunicationLog,
    is_gradient,
    user_name,
)
from graphflow.parallel.resharding.halos import exchange_halo
from graphflow.parallel.resharding.local_ops import combine_all, concat_rows, slice_axis, slice_rows


class Resharder:
    """Moves values between layouts, and notes what travels.

    Args:
        homes: of what stands for nodes, if these are not where the places are.
        again: the axis of the mesh along which gradients gather anew what a forward pass had
            gathered, so that it is not kept in between.
    """

    def __init__(
        self,
        mesh: Mesh,
        partitioner: SizePartitioner,
        assignment: DeviceAssignment | None = None,
        again: str | None = None,
    ) -> None:
        self.mesh = mesh
        self.partitioner = partitioner
        self._assignment = assignment
        self.made: list[CommunicationRecord] = []
        self.fetched: list[CommunicationRecord] = []
        self._regather_axis = again
        self._known: dict[tuple[ShardedTensor, Layout, bool], ShardedTensor] = {}
        self._seen: dict[Any, tuple[Tensor, ...]] = {}

    def checkpoint(self) -> tuple[int, int, int]:
        """How much was moved so far, for `forget`."""
        return len(self.made), len(self._known), len(self._seen)

    def roll_back(self, before: tuple[int, int, int]) -> None:
        """Take back what was moved since, of which nothing is used."""
        made, known, seen_so_far = before
        del self.made[made:]
        for key in list(self._known)[known:]:
            del self._known[key]
        for window in list(self._seen)[seen_so_far:]:
            del self._seen[window]

    # Layouts ------------------------------------------------------------------------------------

    def is_same_split(self, size: Any, a: AxisSplit, b: AxisSplit) -> bool:
        """Whether two splits cut a size at the same places."""
        if a == b:
            return True
        return (
            a.axes == b.axes
            and (a.outer, a.over) == (b.outer, b.over)
            and self.partitioner.pieces(size, a) == self.partitioner.pieces(size, b)
        )

    def local_shape(self, shape: Shape, layout: Layout, place: Place) -> Shape:
        """The shape of the part at a place."""
        return tuple(
            self.partitioner.piece(size, split, place).size
            for size, split in zip(shape, layout.dims, strict=True)
        )

    def nbytes(self, spec: TensorSpec, layout: Layout) -> int:
        """Bytes of one part, about."""
        parts = 1
        for split in layout.dims:
            parts *= self.mesh.part_count(split.axes)
        return self.partitioner.guess(product(spec.shape)) * spec.dtype.itemsize // parts

    # Moving -------------------------------------------------------------------------------------

    def convert(
        self, value: ShardedTensor, target: Layout, cause: Node, name: str
    ) -> ShardedTensor:
        """A value in another layout; partial results that the target keeps stay."""
        if value.layout == target:
            return value
        key = (value, target, self._gathers_again(cause))
        if key not in self._known:
            self._known[key] = self._convert(value, target, cause, name)
        return self._known[key]

    def _convert(
        self, value: ShardedTensor, target: Layout, cause: Node, name: str
    ) -> ShardedTensor:
        note = CommunicationLog(self, cause, name)
        together: dict[str, list[str]] = {}
        for axis, kind in sorted(
            value.layout.partial, key=lambda p: p[0] not in self.mesh.sequential
        ):
            if (axis, kind) in target.partial:
                continue
            d = self.scatter_dim(value, target, axis) if kind == "sum" else None
            if d is not None:
                value = self._reduce_scatter(value, axis, d, target.dims[d], note)
            elif axis in self.mesh.sequential or kind not in ("sum", "mean"):
                value = self._reduce(value, (axis,), kind, note)
            else:
                together.setdefault(kind, []).append(axis)
        for kind, axes in together.items():
            value = self._reduce(value, axes, kind, note)
        shape = value.spec.shape
        for d, want in enumerate(target.dims):
            have = value.layout.dims[d]
            elsewhere = have.axes == want.axes and not self.is_same_split(shape[d], have, want)
            plain = have.outer == 1 and want.outer == 1
            if elsewhere and plain and len(have.axes) == 1:
                value = self._shift_boundaries(value, d, want, note)
                continue
            keep = self._common_prefix(shape[d], have, want)
            while len(value.layout.dims[d].axes) > keep:
                axis = value.layout.dims[d].axes[-1]
                e = self._all_to_all_target(value, target, axis, d)
                if e is None:
                    value = self._all_gather(value, d, note)
                else:
                    value = self._all_to_all(value, d, e, target.dims[e], note)
        for d, want in enumerate(target.dims):
            while not self.is_same_split(shape[d], value.layout.dims[d], want):
                done = len(value.layout.dims[d].axes)
                value = self._slice(value, d, want.keep_first(done + 1))
        return value

    def _gathers_again(self, cause: Node) -> bool:
        """Whether a gradient asks, where it does not use what the forward pass had gathered."""
        return self._regather_axis is not None and is_gradient(cause)

    def scatter_dim(self, value: ShardedTensor, target: Layout, axis: str) -> int | None:
        """The axis of a tensor along which the sum over a group may stay scattered."""
        for d, (have, want) in enumerate(zip(value.layout.dims, target.dims, strict=True)):
            plain = want.outer == 1 and want.axes[-1:] == (axis,)
            if plain and have == want.drop_last():
                return d
        return None

    def _common_prefix(self, size: Any, have: AxisSplit, want: AxisSplit) -> int:
        """How many axes, from the first on, two splits share."""
        count = 0
        for a, b in zip(have.axes, want.axes, strict=False):
            if a != b:
                break
            count += 1
        while count and not self.is_same_split(
            size, have.keep_first(count), want.keep_first(count)
        ):
            count -= 1
        return count

    def _all_to_all_target(
        self, value: ShardedTensor, target: Layout, axis: str, d: int
    ) -> int | None:
        """Another axis of the tensor that is to be cut along the same axis of the mesh next."""
        for e, want in enumerate(target.dims):
            done = value.layout.dims[e]
            goes_on = want.axes[: len(done.axes) + 1] == (*done.axes, axis)
            plain = value.layout.dims[d].outer == 1 and want.outer == 1
            if e != d and plain and goes_on and (not done or done.unit == want.unit):
                return e
        return None

    # Single moves -------------------------------------------------------------------------------

    def _map_places(
        self,
        value: ShardedTensor,
        layout: Layout,
        cause: Node | None,
        build: Callable[[Place], Tensor],
    ) -> ShardedTensor:
        parts = []
        known: dict[Any, Tensor] = {}
        for place, part in zip(self.mesh.places, value.shards, strict=True):
            own = tuple(
                self.partitioner.piece(size, split, place)
                for size, split in zip(value.spec.shape, layout.dims, strict=True)
            )
            key = (self.device_index(cause or part.node, place), part, own)
            if not self.mesh.sequential or key not in known:
                with self.on_device(place, cause or part.node):
                    known[key] = build(place)
            parts.append(known[key])
        return ShardedTensor(value.spec, layout, tuple(parts))

    def map_shards(
        self,
        value: ShardedTensor,
        spec: TensorSpec,
        cause: Node,
        change: Callable[[Tensor], Tensor],
    ) -> ShardedTensor:
        """What is made of each part where it is, of the same shape."""
        made = self._map_places(
            value, value.layout, cause, lambda place: change(self.shard_at(value, place))
        )
        return replace(made, spec=spec)

    def reshape_shards(self, value: ShardedTensor, cause: Node) -> ShardedTensor:
        """A value of parts that have its elements, each in the shape that its layout says."""

        def build(place: Place) -> Tensor:
            shape = self.local_shape(value.spec.shape, value.layout, place)
            part: Tensor = REGISTRY["reshape"](self.shard_at(value, place), shape=shape)
            return part

        return self._map_places(value, value.layout, cause, build)

    def on_device(self, place: Place, node: Node) -> origin_scope:
        """Nodes built in the block are at a place, and count as made where a node was."""
        return origin_scope(node, self.name_prefix(place), self.device_of(node, place))

    def name_prefix(self, place: Place) -> str:
        """What the names of nodes at a place begin with."""
        return self.mesh.tag(place)[1:] + "/"

    def sites(self, node: Node) -> Sequence[tuple[str, DeviceName]]:
        """For each place, what the names of nodes there begin with, and where what stands for a
        node is."""
        if self._assignment is None:
            return self._sites
        return [
            (self.name_prefix(place), self.device_of(node, place)) for place in self.mesh.places
        ]

    @cached_property
    def _sites(self) -> Sequence[tuple[str, DeviceName]]:
        places = self.mesh.places
        return [(self.name_prefix(p), self.mesh.devices[self.mesh.index_of(p)]) for p in places]

    def device_of(self, node: Node, place: Place) -> DeviceName:
        """Where what stands for a node is."""
        if self._assignment is not None:
            return self._assignment.devices[self._assignment.device_index(node, place)]
        return self.mesh.devices[self.mesh.index_of(place)]

    def device_index(self, node: Node, place: Place) -> int:
        """The number that what stands for nodes has in common where it shares a device, on a
        cluster with a device for each."""
        return (
            self.mesh.device_index(place)
            if self._assignment is None
            else self._assignment.device_index(node, place)
        )

    def cross_device(self, cause: Node) -> origin_scope:
        """Nodes built in the block are at several places: where what they read is."""
        return origin_scope(cause, CROSS_DEVICE_SCOPE, DeviceName())

    def shard_at(self, value: ShardedTensor, place: Place) -> Tensor:
        """The part of a value at a place."""
        return value.shards[self.mesh.index_of(place)]

    def _reduce(
        self, value: ShardedTensor, axes: Sequence[str], kind: str, note: CommunicationLog
    ) -> ShardedTensor:
        """Every place of a group has the sum (or another combination) of its parts."""
        layout = replace(
            value.layout, partial=tuple(p for p in value.layout.partial if p[0] not in axes)
        )
        sent: dict[SentTensor, float] = {}

        def build(group: list[Place], own: list[Tensor]) -> list[Tensor]:
            if self.mesh.sequential.issuperset(axes):
                with self.on_device(group[0], note.cause):
                    return [combine_all(kind, own)] * len(own)
            if kind in ("sum", "mean"):
                with self.cross_device(note.cause):
                    return all_reduce(own, op=kind)
            found = []
            for place in group:
                with self.on_device(place, note.cause):
                    found.append(combine_all(kind, own))
                sent.update(self.sent_bytes(zip(group, own, strict=True), place, note.cause))
            return found

        made = self._map_groups(value, layout, axes, build)
        if kind in ("sum", "mean"):
            note.exchange("all-reduce", axes, made)
        else:
            note("all-reduce", axes, sent)
        return made

    def _map_groups(
        self,
        value: ShardedTensor,
        layout: Layout,
        axes: Sequence[str],
        build: Callable[[list[Place], list[Tensor]], list[Tensor]],
    ) -> ShardedTensor:
        """What `build` makes of the parts of each group along some axes of the mesh; once where the
        places of two groups share their devices and parts."""
        parts: dict[Place, Tensor] = {}
        known: dict[Any, list[Tensor]] = {}
        for group in self.mesh.groups(*axes):
            own = [self.shard_at(value, place) for place in group]
            pieces = [self._extents(value, layout, place) for place in group]
            key = (*own, *map(tuple, pieces))
            if key not in known or not self.mesh.sequential:
                known[key] = [
                    self._with_symbolic_shape(tensor, value, layout, place)
                    for tensor, place in zip(build(group, own), group, strict=True)
                ]
            parts.update(zip(group, known[key], strict=True))
        return ShardedTensor(value.spec, layout, tuple(parts[p] for p in self.mesh.places))

    def _with_symbolic_shape(
        self, tensor: Tensor, value: ShardedTensor, layout: Layout, place: Place
    ) -> Tensor:
        """A part with the symbols of its size: those of pieces add up to that of the whole."""
        shape = self.local_shape(value.spec.shape, layout, place)
        if tensor.shape == shape:
            return tensor
        with self.on_device(place, tensor.node.origin or tensor.node):
            named: Tensor = REGISTRY["reshape"](tensor, shape=shape)
        return named

    def _alias(self, part: Tensor, place: Place, cause: Node) -> Tensor:
        """A part under another name, which costs nothing."""
        with self.on_device(place, cause):
            named: Tensor = REGISTRY["reshape"](part, shape=part.shape)
        return named

    def _extents(self, value: ShardedTensor, layout: Layout, place: Place) -> list[ShardExtent]:
        """The piece of each axis that a place has."""
        axes = zip(value.spec.shape, layout.dims, strict=True)
        return [self.partitioner.piece(size, split, place) for size, split in axes]

    def _reduce_scatter(
        self, value: ShardedTensor, axis: str, d: int, want: AxisSplit, note: CommunicationLog
    ) -> ShardedTensor:
        layout = replace(
            value.layout.with_dim(d, want),
            partial=tuple(p for p in value.layout.partial if p[0] != axis),
        )
        size = value.spec.shape[d]

        def build(group: list[Place], own: list[Tensor]) -> list[Tensor]:
            pieces = [self.partitioner.piece(size, want, place) for place in group]
            if axis not in self.mesh.sequential:
                with self.cross_device(note.cause):
                    return reduce_scatter(own, axis=d, sizes=[p.size for p in pieces])
            with self.on_device(group[0], note.cause):
                total = combine_all("sum", own)
                origin = self._origin(size, value.layout.dims[d], group[0])
                return [slice_axis(total, d, p.start - origin, p.size) for p in pieces]

        made = self._map_groups(value, layout, (axis,), build)
        note.exchange("reduce-scatter", (axis,), made)
        return made

    def _all_gather(self, value: ShardedTensor, d: int, note: CommunicationLog) -> ShardedTensor:
        """Every place of a group has all its parts, along the last axis by which `d` is cut."""
        axis = value.layout.dims[d].axes[-1]
        layout = value.layout.with_dim(d, value.layout.dims[d].drop_last())
        size, split = value.spec.shape[d], value.layout.dims[d]
        late = axis == self._regather_axis and self._gathers_again(note.cause)

        def build(group: list[Place], own: list[Tensor]) -> list[Tensor]:
            if late:  # under names of their own, so that no pass takes them for the same
                pairs = zip(own, group, strict=True)
                own = [self._alias(part, place, note.cause) for part, place in pairs]
            rows = self.partitioner.rows(size, split, group[0])
            if axis in self.mesh.sequential:
                with self.on_device(group[0], note.cause):
                    return [self._join_pieces(value, d, split, own, group[0])] * len(own)
            with self.cross_device(note.cause):
                wholes = all_gather(own, axis=d)
            if rows == 1:
                return wholes
            return [in_order(w, p, rows) for w, p in zip(wholes, group, strict=True)]

        def in_order(whole: Tensor, place: Place, rows: Outer) -> Tensor:
            """Pieces one after the other, stretch by stretch."""
            group = self.mesh.group(place, axis)
            begin: Any = 0
            found = []
            with self.on_device(place, note.cause):
                for piece in [self.partitioner.piece(size, split, p) for p in group]:
                    found.append(slice_axis(whole, d, begin, piece.size))
                    begin = begin + piece.size
                return concat_rows(found, d, rows)

        made = self._map_groups(value, layout, (axis,), build)
        note.exchange("all-gather", (axis,), made)
        return made

    def _all_to_all(
        self, value: ShardedTensor, d: int, e: int, want: AxisSplit, note: CommunicationLog
    ) -> ShardedTensor:
        """The last axis by which `d` is cut cuts `e` instead: everyone sends to everyone."""
        axis = value.layout.dims[d].axes[-1]
        before = value.layout.dims[e]
        after = AxisSplit((*before.axes, axis), want.unit)
        layout = value.layout.with_dim(d, value.layout.dims[d].drop_last()).with_dim(e, after)
        size = value.spec.shape[e]
        sent: dict[SentTensor, float] = {}

        def build(place: Place) -> Tensor:
            origin = self._origin(size, before, place)
            piece = self.partitioner.piece(size, after, place)
            found = []
            group = self.mesh.group(place, axis)
            for other in group:
                with self.on_device(other, note.cause):
                    found.append(
                        slice_axis(self.shard_at(value, other), e, piece.start - origin, piece.size)
                    )
            sent.update(self.sent_bytes(zip(group, found, strict=True), place, note.cause))
            joined: Tensor = FUNCTIONS["concat"](found, axis=d)
            return joined

        made = self._map_places(value, layout, note.cause, build)
        note("all-to-all", (axis,), sent)
        return made

    def _slice(self, value: ShardedTensor, d: int, split: AxisSplit) -> ShardedTensor:
        """Each place takes its piece of what it has."""
        layout = value.layout.with_dim(d, split)
        size, before = value.spec.shape[d], value.layout.dims[d]

        def build(place: Place) -> Tensor:
            piece, rows = (
                self.partitioner.piece(size, split, place),
                self.partitioner.rows(size, split, place),
            )
            origin = self._origin(size, before, place) if split.over == before.over else 0
            own = piece.size // segment_count(rows)
            return slice_rows(self.shard_at(value, place), d, rows, piece.start - origin, own)

        return self._map_places(value, layout, None, build)

    def _origin(self, size: Any, split: AxisSplit, place: Place) -> Any:
        return self.partitioner.piece(size, split, place).start

    def _shift_boundaries(
        self, value: ShardedTensor, d: int, want: AxisSplit, note: CommunicationLog
    ) -> ShardedTensor:
        """Other places of the cuts along the same axis of the mesh."""
        size = value.spec.shape[d]
        ranges = [self.partitioner.piece(size, want, place) for place in self.mesh.places]
        parts = self.fetch_windows(
            value, d, [(p.start, p.stop) for p in ranges], note.cause, note.name, "all-to-all"
        )
        return ShardedTensor(value.spec, value.layout.with_dim(d, want), parts)

    def fetch_windows(
        self,
        value: ShardedTensor,
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
        indices = tuple(self.device_index(cause, place) for place in self.mesh.places)
        key = (value, d, tuple(ranges), indices)
        if key not in self._seen:
            self._seen[key] = exchange_halo(
                self, value, d, ranges, CommunicationLog(self, cause, name), kind
            )
        return self._seen[key]

    def gather_to_first(self, value: ShardedTensor, cause: Node) -> Tensor:
        """The whole tensor, at the first place only: what is fetched."""
        parts = dict(zip(self.mesh.places, value.shards, strict=True))
        layout = value.layout
        used = layout.axes()
        spare = [axis for axis in self.mesh.names if axis not in used]  # all along these have it
        places = [p for p in self.mesh.places if not any(self.mesh.coordinate(p, a) for a in spare)]

        def reduce_axis(axis: str, build: Callable[[list[Tensor], Place], Tensor]) -> None:
            nonlocal places
            places = [p for p in places if self.mesh.coordinate(p, axis) == 0]
            sent: dict[SentTensor, float] = {}
            for place in places:
                group = self.mesh.group(place, axis)
                own = [parts[p] for p in group]
                sent.update(self.sent_bytes(zip(group, own, strict=True), place, cause))
                with self.on_device(place, cause):
                    parts[place] = build(own, place)
            CommunicationLog(self, cause, user_name(cause), self.fetched)("fetch", (axis,), sent)

        def combine_kind(kind: str) -> Callable[[list[Tensor], Place], Tensor]:
            return lambda own, _: combine_all(kind, own)

        for axis, kind in sorted(layout.partial, key=lambda p: p[0] not in self.mesh.sequential):
            reduce_axis(axis, combine_kind(kind))
        for d, split in enumerate(layout.dims):
            for count in range(len(split.axes), 0, -1):
                reduce_axis(
                    split.axes[count - 1],
                    partial(self._join_pieces, value, d, split.keep_first(count)),
                )
        return parts[places[0]]

    def _join_pieces(
        self, value: ShardedTensor, d: int, split: AxisSplit, own: list[Tensor], place: Place
    ) -> Tensor:
        """The pieces of a group at a place, along the last axis of a split."""
        return concat_rows(own, d, self.partitioner.rows(value.spec.shape[d], split, place))

    def sent_bytes(
        self, parts: Iterable[tuple[Place, Tensor]], to: Place, cause: Node
    ) -> dict[SentTensor, int]:
        """What a place gets of parts that are at other places."""
        there = self.device_of(cause, to) if self.mesh.sequential else to
        return {
            (part, there): self.partitioner.guess(product(part.shape)) * part.spec.dtype.itemsize
            for place, part in parts
            if place != to and not (self.mesh.sequential and self.device_of(cause, place) == there)
        }


__all__ = ["Resharder"]
