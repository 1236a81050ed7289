"""Sums over a mesh axis whose other parts come from the first turn of a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from graphflow.errors import ShardingError
from graphflow.ir.op import FUNCTIONS, Node, Tensor
from graphflow.parallel.mesh.device_mesh import Mesh, Place
from graphflow.parallel.mesh.layouts import (
    CommunicationRecord,
    Layout,
    SentTensor,
    ShardedTensor,
)
from graphflow.parallel.mesh.size_partitioner import SizePartitioner
from graphflow.parallel.resharding.communication_log import CommunicationLog
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.stale_sums.turns import name_in_step


class StaleResharder(Resharder):
    """Converts layouts as `Resharder`, but exchanges sums over one mesh axis in turn 0 only.

    In a later turn a place has own part + (sum of turn 0 − own part of turn 0).

    Args:
        mesh, partitioner, regather_axis: see `Resharder`.
        stale_axis: the mesh axis.

    Attributes:
        exchanged: the records of sums of turn 0, whenever they are first needed.
    """

    def __init__(
        self,
        mesh: Mesh,
        partitioner: SizePartitioner,
        regather_axis: str | None,
        stale_axis: str,
    ) -> None:
        super().__init__(mesh, partitioner, None, regather_axis)
        self.unbucketed = frozenset({stale_axis})
        self.stale_axis = stale_axis
        self.exchanged: list[CommunicationRecord] = []
        self._first: dict[ShardedTensor, ShardedTensor] = {}
        self._sums: dict[ShardedTensor, tuple[int, ShardedTensor]] = {}
        self._others: dict[ShardedTensor, ShardedTensor] = {}

    @property
    def has_stale_sums(self) -> bool:
        """True if a later turn reads a sum."""
        return bool(self._others)

    def is_stale_sum(self, value: ShardedTensor) -> bool:
        """Return True if a value is a partial sum over the stale axis."""
        return any(axis == self.stale_axis for axis, _ in value.layout.partial)

    def set_first(self, value: ShardedTensor, first: ShardedTensor) -> None:
        """Name the partial sum of turn 0 that a partial sum repeats; itself in turn 0."""
        self._first[value] = first

    def roll_back(self, before: tuple[int, int, int]) -> None:
        """Forget the conversions since a mark, and the sums that were made for them."""
        super().roll_back(before)
        self._sums = {value: made for value, made in self._sums.items() if made[0] <= before[0]}

    def scatter_dim(self, value: ShardedTensor, target: Layout, axis: str) -> int | None:
        """Return the axis for a reduce-scatter; None along the stale axis: each place needs the
        whole sum of turn 0."""
        return None if axis == self.stale_axis else super().scatter_dim(value, target, axis)

    def _reduce(
        self, value: ShardedTensor, axes: Sequence[str], kind: str, log: CommunicationLog
    ) -> ShardedTensor:
        """Combine partial results; those over the stale axis by themselves."""
        if self.stale_axis not in axes:
            return super()._reduce(value, axes, kind, log)
        first = self._first.get(value)
        if first is None:
            made = super()._reduce(value, (self.stale_axis,), kind, log)
        elif first is value:
            made = self._sum(value, kind, log)
        else:
            made = self._add_others(value, first, kind, log)
        rest = [axis for axis in axes if axis != self.stale_axis]
        return super()._reduce(made, rest, kind, log) if rest else made

    def _sum(self, value: ShardedTensor, kind: str, log: CommunicationLog) -> ShardedTensor:
        """Exchange a sum of turn 0, once."""
        if value not in self._sums:
            before = len(self.records)
            made = super()._reduce(value, (self.stale_axis,), kind, log)
            self.exchanged += self.records[before:]
            self._sums[value] = len(self.records), made
        return self._sums[value][1]

    def _add_others(
        self, value: ShardedTensor, first: ShardedTensor, kind: str, log: CommunicationLog
    ) -> ShardedTensor:
        """Add to each place's part what the others had in turn 0.

        Raises:
            ShardingError: the parts are not added up.
        """
        if kind != "sum":
            raise ShardingError(
                f"{name_in_step(log.name)!r} (made at {log.cause.location}) is a {kind} over "
                f"{self.stale_axis!r}: only to sums can stale parts of others be added; cut this "
                "tensor along another axis, or refresh=1"
            )
        total = self._sum(first, kind, log)
        if total not in self._others:
            self._others[total] = self._combine("subtract", total, first, log.cause)
        return self._combine("add", self._others[total], value, log.cause)

    def _combine(
        self, name: str, whole: ShardedTensor, part: ShardedTensor, cause: Node
    ) -> ShardedTensor:
        """Apply an op of two arguments at each place."""

        def build(place: Place) -> Tensor:
            made: Tensor = FUNCTIONS[name](self.shard_at(whole, place), self.shard_at(part, place))
            return made

        return self._map_places(whole, whole.layout, cause, build)

    def keep_owned(
        self, value: ShardedTensor, old: ShardedTensor, is_last: bool, cause: Node, name: str
    ) -> ShardedTensor:
        """Return the version of a variable that the first place along the stale axis trains.

        Others keep the old value during a window. They receive the last one, unless they read the
        first place's variable.

        Args:
            value: the new value. Places along the axis hold different ones.
            old: the variable.
            is_last: whether the window ends with this version.
            cause: the node that needs it.
            name: the name of the variable.
        """
        parts, sent = list[Tensor](), dict[SentTensor, float]()
        for place in self.mesh.places:
            owner = self.mesh.group(place, self.stale_axis)[0]
            has_own = self.shard_at(old, place) is not self.shard_at(old, owner)
            keeps = place != owner and not is_last
            part = self.shard_at(old, place) if keeps else self.shard_at(value, owner)
            if place != owner and is_last and has_own:
                sent.update(self.sent_bytes([(owner, part)], place, cause))
            parts.append(part)
        before = len(self.records)
        CommunicationLog(self, cause, name)("broadcast", (self.stale_axis,), sent)
        self.exchanged += self.records[before:]
        return replace(value, shards=tuple(parts))


__all__ = ["StaleResharder"]
