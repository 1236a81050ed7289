"""Conversions between layouts: which collectives, slices and concatenations lead from one to the
other.

A conversion is a set of nodes: slices where a shard is, concatenations or sums where it is needed,
and collectives for large exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor
from graphflow.ir.spec import Outer, segment_count
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.device_mesh import DeviceAssignment, Mesh, Place
from graphflow.parallel.mesh.layouts import Layout, SentTensor, ShardedTensor
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.resharding.collectives import all_gather, all_reduce, reduce_scatter
from graphflow.parallel.resharding.communication_log import (
    CommunicationLog,
    is_gradient,
    user_name,
)
from graphflow.parallel.resharding.halos import exchange_halo
from graphflow.parallel.resharding.local_ops import combine_all, concat_rows, slice_axis, slice_rows
from graphflow.parallel.resharding.shard_builder import ShardBuilder


class Resharder(ShardBuilder):
    """Converts sharded tensors between layouts, and records what travels.

    Args:
        mesh: the mesh.
        partitioner: the extents of shards.
        assignment: the devices of nodes, if they do not follow from the place alone.
        regather_axis: the mesh axis along which a gradient gathers again what the forward pass had
            gathered, so that it is not kept in between.

    Attributes:
        unbucketed: mesh axes over which sums do not wait in buckets.
    """

    unbucketed: frozenset[str] = frozenset()

    def __init__(
        self,
        mesh: Mesh,
        partitioner: SizePartitioner,
        assignment: DeviceAssignment | None = None,
        regather_axis: str | None = None,
    ) -> None:
        super().__init__(mesh, partitioner, assignment)
        self._regather_axis = regather_axis
        self._converted: dict[tuple[ShardedTensor, Layout, bool], ShardedTensor] = {}
        self._windows: dict[Any, tuple[Tensor, ...]] = {}

    def checkpoint(self) -> tuple[int, int, int]:
        """Return a mark of what was converted so far, for `roll_back`."""
        return len(self.records), len(self._converted), len(self._windows)

    def roll_back(self, before: tuple[int, int, int]) -> None:
        """Forget the conversions since a mark. No node that is used may read them."""
        made, known, seen_so_far = before
        del self.records[made:]
        for key in list(self._converted)[known:]:
            del self._converted[key]
        for window in list(self._windows)[seen_so_far:]:
            del self._windows[window]

    def is_same_split(self, size: Any, a: AxisSplit, b: AxisSplit) -> bool:
        """Return True if two splits give every place the same extent of a size."""
        if a == b:
            return True
        return (
            a.axes == b.axes
            and (a.outer, a.over, a.ranges) == (b.outer, b.over, b.ranges)
            and self.partitioner.pieces(size, a) == self.partitioner.pieces(size, b)
        )

    # Conversions --------------------------------------------------------------------------------

    def convert(
        self, value: ShardedTensor, target: Layout, cause: Node, name: str
    ) -> ShardedTensor:
        """Return a value in another layout. Partial results that the target keeps stay partial.

        Equal conversions are made once.
        """
        if value.layout == target:
            return value
        key = (value, target, self._gathers_again(cause))
        if key not in self._converted:
            self._converted[key] = self._convert(value, target, cause, name)
        return self._converted[key]

    def _convert(
        self, value: ShardedTensor, target: Layout, cause: Node, name: str
    ) -> ShardedTensor:
        """Convert a value: first its partial results, then axes that are gathered or exchanged,
        then slices."""
        log = CommunicationLog(self, cause, name)
        together: dict[str, list[str]] = {}
        for axis, kind in sorted(
            value.layout.partial, key=lambda p: p[0] not in self.mesh.sequential
        ):
            if (axis, kind) in target.partial:
                continue
            d = self.scatter_dim(value, target, axis) if kind == "sum" else None
            if d is not None:
                value = self._reduce_scatter(value, axis, d, target.dims[d], log)
            elif axis in self.mesh.sequential or kind not in ("sum", "mean"):
                value = self._reduce(value, (axis,), kind, log)
            else:
                together.setdefault(kind, []).append(axis)
        for kind, axes in together.items():
            value = self._reduce(value, axes, kind, log)
        shape = value.spec.shape
        for d, want in enumerate(target.dims):
            have = value.layout.dims[d]
            elsewhere = have.axes == want.axes and not self.is_same_split(shape[d], have, want)
            plain = have.is_contiguous and want.is_contiguous
            if elsewhere and plain and len(have.axes) == 1:
                value = self._shift_boundaries(value, d, want, log)
                continue
            keep = self._common_prefix(shape[d], have, want)
            while len(value.layout.dims[d].axes) > keep:
                axis = value.layout.dims[d].axes[-1]
                e = self._all_to_all_target(value, target, axis, d)
                if e is None:
                    value = self._all_gather(value, d, log)
                else:
                    value = self._all_to_all(value, d, e, target.dims[e], log)
        for d, want in enumerate(target.dims):
            while not self.is_same_split(shape[d], value.layout.dims[d], want):
                done = len(value.layout.dims[d].axes)
                value = self._slice(value, d, want.keep_first(done + 1))
        return value

    def _gathers_again(self, cause: Node) -> bool:
        """Return True if a gradient needs a value that the forward pass had gathered and did not
        keep."""
        return self._regather_axis is not None and is_gradient(cause)

    def scatter_dim(self, value: ShardedTensor, target: Layout, axis: str) -> int | None:
        """Return the axis along which a reduce-scatter would leave the target's shards; None if it
        would not."""
        for d, (have, want) in enumerate(zip(value.layout.dims, target.dims, strict=True)):
            plain = want.is_contiguous and want.axes[-1:] == (axis,)
            if plain and have == want.drop_last():
                return d
        return None

    def _common_prefix(self, size: Any, have: AxisSplit, want: AxisSplit) -> int:
        """Return how many leading mesh axes two splits share."""
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
        """Return another axis that the target splits along the same mesh axis next, or None."""
        for e, want in enumerate(target.dims):
            done = value.layout.dims[e]
            goes_on = want.axes[: len(done.axes) + 1] == (*done.axes, axis)
            plain = value.layout.dims[d].is_contiguous and want.is_contiguous
            if e != d and plain and goes_on and (not done or done.unit == want.unit):
                return e
        return None

    # Single steps -------------------------------------------------------------------------------

    def _reduce(
        self, value: ShardedTensor, axes: Sequence[str], kind: str, log: CommunicationLog
    ) -> ShardedTensor:
        """Combine the partial results of each group; every place of the group gets the result."""
        layout = replace(
            value.layout, partial=tuple(p for p in value.layout.partial if p[0] not in axes)
        )
        sent: dict[SentTensor, float] = {}

        def build(group: list[Place], own: list[Tensor]) -> list[Tensor]:
            if self.mesh.sequential.issuperset(axes):
                with self.on_device(group[0], log.cause):
                    return [combine_all(kind, own)] * len(own)
            if kind in ("sum", "mean"):
                with self.cross_device(log.cause):
                    return all_reduce(own, op=kind)
            found = []
            for place in group:
                with self.on_device(place, log.cause):
                    found.append(combine_all(kind, own))
                sent.update(self.sent_bytes(zip(group, own, strict=True), place, log.cause))
            return found

        made = self._map_groups(value, layout, axes, build)
        if kind in ("sum", "mean"):
            log.exchange("all-reduce", axes, made)
        else:
            log("all-reduce", axes, sent)
        return made

    def _alias(self, part: Tensor, place: Place, cause: Node) -> Tensor:
        """Return a shard under another name. Passes do not merge it with the original, and it costs
        nothing."""
        with self.on_device(place, cause):
            named: Tensor = REGISTRY["reshape"](part, shape=part.shape)
        return named

    def _reduce_scatter(
        self, value: ShardedTensor, axis: str, d: int, want: AxisSplit, log: CommunicationLog
    ) -> ShardedTensor:
        """Sum the partial results of each group; each place gets its extent along axis `d`."""
        layout = replace(
            value.layout.with_dim(d, want),
            partial=tuple(p for p in value.layout.partial if p[0] != axis),
        )
        size = value.spec.shape[d]

        def build(group: list[Place], own: list[Tensor]) -> list[Tensor]:
            pieces = [self.partitioner.piece(size, want, place) for place in group]
            if axis not in self.mesh.sequential:
                with self.cross_device(log.cause):
                    return reduce_scatter(own, axis=d, sizes=[p.size for p in pieces])
            with self.on_device(group[0], log.cause):
                total = combine_all("sum", own)
                origin = self._origin(size, value.layout.dims[d], group[0])
                return [slice_axis(total, d, p.start - origin, p.size) for p in pieces]

        made = self._map_groups(value, layout, (axis,), build)
        log.exchange("reduce-scatter", (axis,), made)
        return made

    def _all_gather(self, value: ShardedTensor, d: int, log: CommunicationLog) -> ShardedTensor:
        """Gather axis `d` along the innermost mesh axis that splits it."""
        axis = value.layout.dims[d].axes[-1]
        layout = value.layout.with_dim(d, value.layout.dims[d].drop_last())
        size, split = value.spec.shape[d], value.layout.dims[d]
        late = axis == self._regather_axis and self._gathers_again(log.cause)

        def build(group: list[Place], own: list[Tensor]) -> list[Tensor]:
            if late:  # a name of its own keeps passes from merging it with the first gather
                pairs = zip(own, group, strict=True)
                own = [self._alias(part, place, log.cause) for part, place in pairs]
            rows = self.partitioner.rows(size, split, group[0])
            if axis in self.mesh.sequential:
                with self.on_device(group[0], log.cause):
                    return [self._join_pieces(value, d, split, own, group[0])] * len(own)
            with self.cross_device(log.cause):
                wholes = all_gather(own, axis=d)
            if split.ranges is not None:
                return [self._in_row_order(w, d, split) for w in wholes]
            if rows == 1:
                return wholes
            return [in_order(w, p, rows) for w, p in zip(wholes, group, strict=True)]

        def in_order(whole: Tensor, place: Place, rows: Outer) -> Tensor:
            """Reorder gathered pieces row by row."""
            group = self.mesh.group(place, axis)
            begin: Any = 0
            found = []
            with self.on_device(place, log.cause):
                for piece in [self.partitioner.piece(size, split, p) for p in group]:
                    found.append(slice_axis(whole, d, begin, piece.size))
                    begin = begin + piece.size
                return concat_rows(found, d, rows)

        made = self._map_groups(value, layout, (axis,), build)
        log.exchange("all-gather", (axis,), made)
        return made

    def _all_to_all(
        self, value: ShardedTensor, d: int, e: int, want: AxisSplit, log: CommunicationLog
    ) -> ShardedTensor:
        """Split axis `e` along the innermost mesh axis that splits `d`, and make `d` whole along
        it."""
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
                with self.on_device(other, log.cause):
                    found.append(
                        slice_axis(self.shard_at(value, other), e, piece.start - origin, piece.size)
                    )
            sent.update(self.sent_bytes(zip(group, found, strict=True), place, log.cause))
            joined: Tensor = FUNCTIONS["concat"](found, axis=d)
            return joined

        made = self._map_places(value, layout, log.cause, build)
        log("all-to-all", (axis,), sent)
        return made

    def _slice(self, value: ShardedTensor, d: int, split: AxisSplit) -> ShardedTensor:
        """Let each place keep its extent of what it has."""
        layout = value.layout.with_dim(d, split)
        size, before = value.spec.shape[d], value.layout.dims[d]

        def build(place: Place) -> Tensor:
            if split.ranges is not None:
                own_rows = split.ranges.rows_of(self.mesh.coordinate(place, split.axes[0]))
                chosen: Tensor = FUNCTIONS["take"](self.shard_at(value, place), own_rows, d)
                return chosen
            piece, rows = (
                self.partitioner.piece(size, split, place),
                self.partitioner.rows(size, split, place),
            )
            origin = self._origin(size, before, place) if split.over == before.over else 0
            own = piece.size // segment_count(rows)
            return slice_rows(self.shard_at(value, place), d, rows, piece.start - origin, own)

        return self._map_places(value, layout, None, build)

    def _origin(self, size: Any, split: AxisSplit, place: Place) -> Any:
        """Return the start of a place's extent."""
        return self.partitioner.piece(size, split, place).start

    def _shift_boundaries(
        self, value: ShardedTensor, d: int, want: AxisSplit, log: CommunicationLog
    ) -> ShardedTensor:
        """Move elements between neighbours, so that extents along the same mesh axis get other
        boundaries."""
        size = value.spec.shape[d]
        ranges = [self.partitioner.piece(size, want, place) for place in self.mesh.places]
        parts = self.fetch_windows(
            value, d, [(p.start, p.stop) for p in ranges], log.cause, log.name, "all-to-all"
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
        """Return the elements start to stop along axis `d` for each place, wherever they are: a
        halo.

        The size of axis `d` has to be known. Equal windows are fetched once: a gradient reads what
        its forward pass read.
        """
        indices = tuple(self.device_index(cause, place) for place in self.mesh.places)
        key = (value, d, tuple(ranges), indices)
        if key not in self._windows:
            self._windows[key] = exchange_halo(
                self, value, d, ranges, CommunicationLog(self, cause, name), kind
            )
        return self._windows[key]

    def gather_to_first(self, value: ShardedTensor, cause: Node) -> Tensor:
        """Return the whole tensor at the first place only, for a fetch."""
        parts = dict(zip(self.mesh.places, value.shards, strict=True))
        layout = value.layout
        used = layout.axes()
        spare = [axis for axis in self.mesh.names if axis not in used]  # equal along these
        places = [p for p in self.mesh.places if not any(self.mesh.coordinate(p, a) for a in spare)]

        def reduce_axis(axis: str, build: Callable[[list[Tensor], Place], Tensor]) -> None:
            """Combine what places have along a mesh axis, at those with coordinate 0."""
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

    def _in_row_order(self, stored: Tensor, d: int, split: AxisSplit) -> Tensor:
        """Return the rows of all owners in their order along axis `d`."""
        assert split.ranges is not None
        whole: Tensor = FUNCTIONS["take"](stored, split.ranges.positions, d)
        return whole

    def _join_pieces(
        self, value: ShardedTensor, d: int, split: AxisSplit, own: list[Tensor], place: Place
    ) -> Tensor:
        """Concatenate the pieces of a group, along the innermost mesh axis of a split."""
        if split.ranges is not None:
            return self._in_row_order(FUNCTIONS["concat"](own, axis=d), d, split)
        return concat_rows(own, d, self.partitioner.rows(value.spec.shape[d], split, place))


__all__ = ["Resharder"]
