"""Rows of a table in ranges on a consistent-hash ring: each range belongs to one place.

Popular rows often stand together: ids are sorted by frequency, say. If each place had one
contiguous part, one place would be asked for nearly all of them. On the ring, another number of
places leaves most ranges where they are.

Source: Karger et al., "Consistent Hashing and Random Trees", STOC 1997.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, cached_property
from hashlib import blake2b
from itertools import accumulate

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError

Int64s = np.ndarray[tuple[int], np.dtype[np.int64]]
UInt64s = np.ndarray[tuple[int], np.dtype[np.uint64]]

MAX_RANGES = 4096
"""The most ranges of a table."""
VIRTUAL = 256
"""Points of each place on the ring. Shares of the ring differ by some per cent then, and 3.5 times
with one point."""


@dataclass(frozen=True)
class RowRanges:
    """The owners of the ranges of an axis. Rows are stored by owner.

    Attributes:
        rows: the number of rows.
        width: the rows of a range; the last one may have fewer.
        owners: the owner of each range, from 0.
        count: the number of owners.
        order: the ranges as each owner has them one after the other; () if they ascend.
        labels: the number of each owner on the ring; () if they are 0, 1, …
    """

    rows: int
    width: int
    owners: tuple[int, ...]
    count: int
    order: tuple[int, ...] = ()
    labels: tuple[int, ...] = ()

    def bounds_of(self, owner: int) -> tuple[tuple[int, int], ...]:
        """Return the rows of an owner: (start, stop) of stretches that do not touch."""
        found: list[tuple[int, int]] = []
        for number in self.order or range(len(self.owners)):
            if self.owners[number] != owner:
                continue
            start, stop = number * self.width, min(self.rows, (number + 1) * self.width)
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
        return tuple(found)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each owner."""
        return tuple(sum(b - a for a, b in self.bounds_of(i)) for i in range(self.count))

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first position of each owner among the stored rows, and the number of rows."""
        return (0, *accumulate(self.sizes))

    @cached_property
    def first_positions(self) -> Int64s:
        """The position of the first row of each range."""
        left = list(self.starts)
        found = np.empty(len(self.owners), np.int64)
        for number in self.order or range(len(self.owners)):
            owner = self.owners[number]
            found[number] = left[owner]
            left[owner] += min(self.width, self.rows - number * self.width)
        return found

    @cached_property
    def positions(self) -> Int64s:
        """The position of each row among the stored rows, (rows,)."""
        rows = np.arange(self.rows, dtype=np.int64)
        found: Int64s = self.first_positions[rows // self.width] + rows % self.width
        return found

    def rows_of(self, owner: int) -> Int64s:
        """Return the rows of an owner, as they are stored."""
        return np.concatenate([np.arange(*each, dtype=np.int64) for each in self.bounds_of(owner)])

    def of_units(self) -> RowRanges:
        """Return the same owners of an axis with one element for each range."""
        return replace(self, rows=len(self.owners), width=1)

    def swap(self, pairs: Sequence[tuple[int, int]]) -> RowRanges:
        """Return the same with pairs of ranges of as many rows in each other's place."""
        owners, order = [*self.owners], [*(self.order or range(len(self.owners)))]
        places = {number: at for at, number in enumerate(order)}
        for a, b in pairs:
            owners[a], owners[b] = owners[b], owners[a]
            places[a], places[b] = places[b], places[a]
            order[places[a]], order[places[b]] = a, b
        return replace(self, owners=tuple(owners), order=tuple(order))

    def join(self, name: str) -> RowRanges:
        """Return the same with one more owner, the last one. It takes its ranges of the ring, about
        1/n of them, and all others stay where they are.

        Args:
            name: the table's name.

        Raises:
            ShardingError: there are fewer ranges than owners.
        """
        if len(self.owners) <= self.count:
            raise ShardingError(
                f"{name!r} has {len(self.owners)} ranges of rows on {self.count} servers; no "
                "further server can have one"
            )
        before = self._ring_labels
        labels = (*before, min({*range(self.count + 1)} - {*before}))
        found = _next_owners(name, len(self.owners), labels)
        owners = [
            self.count if now == self.count else owner
            for now, owner in zip(found, self.owners, strict=True)
        ]
        _fill_owners(owners, self.count + 1)
        return replace(self, owners=tuple(owners), count=self.count + 1, labels=labels)

    def leave(self, name: str, leaving: int) -> RowRanges:
        """Return the same without an owner, whose ranges go to the next owners on the ring. Those
        after it move up by one number, and all other ranges stay where they are.

        Args:
            name: the table's name.
        """
        before = self._ring_labels
        labels = (*before[:leaving], *before[leaving + 1 :])
        found = _next_owners(name, len(self.owners), labels)
        owners = [
            now if owner == leaving else owner - (owner > leaving)
            for now, owner in zip(found, self.owners, strict=True)
        ]
        return replace(self, owners=tuple(owners), count=self.count - 1, labels=labels)

    @property
    def _ring_labels(self) -> tuple[int, ...]:
        return self.labels or tuple(range(self.count))


@cache
def ring_ranges(
    name: str, rows: int, count: int, width: int | None = None, even: bool = False
) -> RowRanges:
    """Return the owners of the ranges of a table, by the table's name.

    Args:
        rows: the number of rows, at least `count`.
        count: the number of owners.
        width: the rows of a range; `even` follows.
        even: no owner has more than one range more than another, so that all need as much memory.

    Raises:
        ShardingError: there are fewer rows than owners.
    """
    if rows < count:
        raise ShardingError(f"{name!r} has {rows} rows for {count} owners; use fewer")
    even = even or width is not None
    width = width or -(-rows // MAX_RANGES)
    ranges = -(-rows // width)
    if even:
        return RowRanges(rows, width, _even_owners(name, ranges, count), count)
    owners = _next_owners(name, ranges, range(count))
    _fill_owners(owners, count)
    return RowRanges(rows, width, tuple(owners), count)


def _even_owners(name: str, ranges: int, count: int) -> tuple[int, ...]:
    """Return for each range of a table the owner, from 0, with equal shares of the ranges.

    Each further owner takes from the others what they have beyond their new share: the ranges to
    which its points on the ring are nearest. So none move between the others.
    """
    keys, owners = _range_keys(name, ranges), np.zeros(ranges, np.int64)
    for joining in range(1, count):
        points = np.sort(_points_of(joining))
        gaps = points[np.searchsorted(points, keys) % VIRTUAL] - keys  # around the ring
        for owner in range(joining):
            own = np.flatnonzero(owners == owner)
            share = -(-(ranges - owner) // (joining + 1))
            owners[own[np.argsort(gaps[own], kind="stable")[: len(own) - share]]] = joining
    return tuple(owners.tolist())


def _next_owners(name: str, ranges: int, labels: Sequence[int]) -> list[int]:
    """Return for each range of a table the owner, from 0, whose point is next on the ring.

    Args:
        labels: the number of each owner on the ring.
    """
    points = np.concatenate([_points_of(label) for label in labels])
    order = np.argsort(points)
    found = np.searchsorted(points[order], _range_keys(name, ranges)) % len(points)
    return (order[found] // VIRTUAL).tolist()  # type: ignore[no-any-return]


def _points_of(label: int) -> UInt64s:
    """Return the points of an owner on the ring."""
    return np.array([_hash(f"{label}/{v}") for v in range(VIRTUAL)], np.uint64)


def _range_keys(name: str, ranges: int) -> UInt64s:
    """Return where the ranges of a table lie on the ring."""
    return np.array([_hash(f"{name}/{i}") for i in range(ranges)], np.uint64)


def _fill_owners(owners: list[int], count: int) -> None:
    """Let each owner have a range at least: a small table may have left one out."""
    for owner in range(count):
        if owner not in owners:
            most = max(range(count), key=owners.count)
            owners[owners.index(most)] = owner


def _hash(text: str) -> int:
    """Return the 64 bits of BLAKE2 of a text."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


__all__ = ["RowRanges", "ring_ranges"]
