"""A mesh of devices, and how sizes are cut along it.

A mesh has named axes, {"data": 2, "model": 2}; each of its places is a device. A size that is cut
along some of these axes has a piece at each place: the first pieces are larger by one where it does
not divide, as numpy's array_split has it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from math import inf, prod
from typing import Any, NamedTuple

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import Node
from graphflow.ir.spec import (
    Dim,
    Outer,
    Size,
    evaluate,
    is_fresh,
    segment_count,
    show_symbol,
    sole_symbol,
    substitute,
)

MAX_SYMBOLS = 1024
"""Pieces of a size that only a feed fixes: each has a symbol, and begins at a sum of them."""

MICRO = "micro"
"""The mesh axis of micro-batches, which run one after the other on the same device."""
PATH = "way"
"""The mesh axis of a bidirectional pipeline: one coordinate for each path of micro-batches through
the devices. Each path has weights of its own."""

_NOMINAL = 64
"""Every symbol's size for choices that are made before one is fed, unless a mesh needs more."""

Place = tuple[int, ...]
"""The place of a shard: its number along each axis of the mesh."""


@dataclass(frozen=True)
class DeviceAssignment:
    """Where what stands for a node at a place is, if not where the place is.

    What is built is told by homes, not by the devices that they are on: it is the same graph, of
    the same bits, on any cluster, one of a single device too.

    Attributes:
        of: the number of the home.
        devices: of the homes.
    """

    device_index: Callable[[Node, Place], int]
    devices: Sequence[DeviceName]


class ShardExtent(NamedTuple):
    """The part of a size that a shard has."""

    start: Size
    size: Size
    total: Size

    @property
    def stop(self) -> Size:
        return self.start + self.size


@dataclass(frozen=True)
class AxisSplit:
    """How a size is cut: along which axes of the mesh, the first one outermost, in multiples of a
    unit. What was several axes and became one may be cut along an inner one of these: then it has
    `outer` rows, of each of which a shard has a piece. These are of equal length; or of such
    lengths, where queries stand beside fewer keys and values. Where the outer one of them is cut,
    too, `over` says how: a shard has so many rows, and its piece of each; `axes` are those of both.
    """

    axes: tuple[str, ...] = ()
    unit: Size = 1
    outer: Outer = 1
    over: AxisSplit | None = None

    def __bool__(self) -> bool:
        return bool(self.axes)

    @property
    def rows(self) -> Size:
        """How many rows of length 1 there are."""
        return segment_count(self.outer)

    def drop_last(self) -> AxisSplit:
        return self.keep_first(len(self.axes) - 1)

    def keep_first(self, count: int) -> AxisSplit:
        """Along the first few axes only."""
        if self.over is not None and count <= len(self.over.axes):
            return self.over.keep_first(count)
        return replace(self, axes=self.axes[:count]) if count else WHOLE

    @property
    def inner(self) -> AxisSplit:
        """How each row is cut."""
        done = 0 if self.over is None else len(self.over.axes)
        return AxisSplit(self.axes[done:], self.unit)

    def combine_with(self, other: AxisSplit, size: Size) -> AxisSplit | None:
        """Both, of a size whose rows the one cuts, and other axes of the mesh each row."""
        over, rows = (self, other) if self.outer == 1 else (other, self)
        plain = over.outer == 1 and over.over is rows.over is None
        if not plain or rows.outer == 1 or isinstance(rows.outer, tuple) or not over or not rows:
            return None
        if set(over.axes) & set(rows.axes) or over.unit * rows.outer != size:
            return None
        return replace(rows, axes=over.axes + rows.axes, over=over)

    def scale_by(self, factor: Size, outer: Outer = 1) -> AxisSplit:
        """The same, each element being `factor` many, in `outer` times as many rows; whole where
        that cannot be said, rows being of unlike lengths."""
        if not self.axes:
            return self
        if self.over is not None:
            over = self.over.scale_by(factor)
            return replace(self, unit=self.unit * factor, over=over) if outer == 1 else WHOLE
        if 1 in (self.outer, outer):
            rows = self.outer if outer == 1 else outer
        elif isinstance(self.outer, tuple) or isinstance(outer, tuple):
            return WHOLE
        else:
            rows = self.outer * outer
        return AxisSplit(self.axes, self.unit * factor, rows)


WHOLE = AxisSplit()


@dataclass(frozen=True)
class Mesh:
    """Named axes, and a device for each place.

    Args:
        sizes: of the axes, in order.
        devices: of the places, the last axis running fastest.
        local: axes along which the places share a device: they take turns.
    """

    sizes: Mapping[str, int]
    devices: Sequence[DeviceName]
    sequential: frozenset[str] = field(default_factory=frozenset)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(self.sizes)

    @cached_property
    def places(self) -> tuple[Place, ...]:
        return tuple(itertools.product(*map(range, self.sizes.values())))

    def index_of(self, place: Place) -> int:
        """The place's number, by which what has a value at each place is ordered."""
        number = 0
        for at, size in zip(place, self.sizes.values(), strict=True):
            number = number * size + at
        return number

    def coordinate(self, place: Place, axis: str) -> int:
        """The place's number along an axis."""
        return place[self.names.index(axis)]

    def device_index(self, place: Place) -> int:
        """A number that places have in common if they share a device to take turns."""
        pairs = zip(self.names, place, strict=True)
        return self.index_of(tuple(0 if name in self.sequential else at for name, at in pairs))

    def group(self, place: Place, *axes: str) -> list[Place]:
        """The places along some axes that differ in nothing else, in order."""
        own = [
            range(size) if name in axes else (at,)
            for (name, size), at in zip(self.sizes.items(), place, strict=True)
        ]
        return [*itertools.product(*own)]

    def groups(self, *axes: str) -> Iterator[list[Place]]:
        """All groups along some axes."""
        for place in self.places:
            if not any(self.coordinate(place, axis) for axis in axes):
                yield self.group(place, *axes)

    def part_count(self, axes: Sequence[str]) -> int:
        return prod(self.sizes[a] for a in axes)

    def describe_parts(self, axes: Sequence[str]) -> str:
        """Into what a size is cut along some axes, for people: `2 (data) × 4 micro-batches`."""
        named = [f"{self.sizes[a]} ({a})" for a in axes if a not in (MICRO, PATH)]
        turns = self.part_count([a for a in axes if a in (MICRO, PATH)])
        return " × ".join(named + [f"{turns} micro-batches"] * (turns > 1))

    def tag(self, place: Place) -> str:
        """How what is at a place is named: `@data=0,model=1`."""
        return self._tags[place]

    @cached_property
    def _tags(self) -> dict[Place, str]:
        return {
            place: "@" + ",".join(f"{n}={i}" for n, i in zip(self.names, place, strict=True))
            for place in self.places
        }


class SizePartitioner:
    """The pieces of sizes along one mesh, symbolic ones too.

    A symbol that is cut has a symbol of its own for the piece at each place, `n@data=0`; what sizes
    these are is known when a step is fed (`bindings`). Each symbol is cut in one way only.

    Args:
        fed: sizes of symbols, as far as they are known: one that is too small is not cut.
        same: what ops need symbols to be equal to, see `equal_sizes`: these are cut as one.
    """

    def __init__(
        self,
        mesh: Mesh,
        fed: Mapping[str, int] | None = None,
        same: Mapping[Size, Size] | None = None,
    ) -> None:
        self.mesh = mesh
        self._same = {
            symbol: other
            for size, other in (same or {}).items()
            if (symbol := sole_symbol(size)) and (isinstance(other, int) or sole_symbol(other))
        }
        self.symbols: dict[str, tuple[str, ...]] = {}
        self._fed = fed or {}
        self._usual = _Nominal(self)
        self._known: dict[Any, Mapping[Place, tuple[Size, Size]]] = {}
        self._pieces: dict[tuple[Size, AxisSplit, Place], ShardExtent] = {}
        self._least: dict[str, int] = {}  # of symbols left whole: from which size on they are not

    def _canonical(self, size: Size) -> Size:
        """A size, by the first of the symbols that are equal."""
        return substitute(size, self._same) if self._same else size

    def can_split(self, size: Size, split: AxisSplit) -> bool:
        """Whether a size has a piece that is not empty for every place."""
        if not split:
            return True
        size, split = self._canonical(size), replace(split, unit=self._canonical(split.unit))
        if split.over is not None and not self.can_split(size, split.over):
            return False
        if split.outer != 1:
            row = size // self._canonical(split.rows)
            return row * self._canonical(split.rows) == size and self.can_split(row, split.inner)
        base = size // split.unit
        if isinstance(base, int):
            return base * split.unit == size and base >= self.mesh.part_count(split.axes)
        symbol = _single_symbol(base)
        if symbol is None:
            return False
        parts = self.mesh.part_count(split.axes)
        if self._fed.get(symbol, parts) < parts:
            self._least[symbol] = min(parts, self._least.get(symbol, parts))
            return False
        known = self.symbols.setdefault(symbol, split.axes)
        return known[: len(split.axes)] == split.axes

    def conflicting_axes(self, size: Size, split: AxisSplit) -> tuple[str, ...]:
        """The axes along which a size's symbol is cut already, if they are others than these."""
        known = self.symbols.get(_single_symbol(self._canonical(size)) or "", split.axes)
        return () if known[: len(split.axes)] == split.axes else known

    def pieces(self, size: Size, split: AxisSplit) -> list[ShardExtent]:
        """The piece of a size at each place."""
        return [self.piece(size, split, place) for place in self.mesh.places]

    def piece(self, size: Size, split: AxisSplit, place: Place) -> ShardExtent:
        """The piece of a size at a place. Where many places cut a symbol, the start of one is a sum
        over those before it: each is worked out once."""
        if not split:
            return ShardExtent(0, size, size)
        key = (size, split, tuple([self.mesh.coordinate(place, axis) for axis in split.axes]))
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = self._piece(size, split, place)
        return found

    def _piece(self, size: Size, split: AxisSplit, place: Place) -> ShardExtent:
        size, split = self._canonical(size), replace(split, unit=self._canonical(split.unit))
        if split.outer != 1:  # the start is that in each row
            row = self.piece(size // self._canonical(split.rows), split.inner, place)
            return ShardExtent(
                row.start, row.size * segment_count(self.rows(size, split, place)), size
            )
        at = [(self.mesh.coordinate(place, a), self.mesh.sizes[a]) for a in split.axes]
        if isinstance(size, int):
            unit = evaluate(split.unit, {})
            start, stop = _nested_range(size // unit, at)
            return ShardExtent(start * unit, (stop - start) * unit, size)
        base = size // split.unit
        if isinstance(base, int):  # of so many units of symbolic size
            start, stop = _nested_range(base, at)
            return ShardExtent(start * split.unit, (stop - start) * split.unit, size)
        symbol = _single_symbol(base)
        if symbol is None:
            raise ShardingError(
                f"a size {size} cannot be cut into {self.mesh.describe_parts(split.axes)}; give "
                "sizes that are equal one name, gf.placeholder('float32', ('batch', 'time')), or "
                "numbers"
            )
        axes = self.symbols.setdefault(symbol, split.axes)
        if axes[: len(split.axes)] != split.axes:
            raise ShardingError(
                f"a size {size} is cut into {self.mesh.describe_parts(axes)}, and cannot be cut "
                f"into {self.mesh.describe_parts(split.axes)}, too; give its placeholder a number"
            )
        begin, own = self._parts(symbol, axes, len(at))[tuple(i for i, _ in at)]
        factor = base // Dim.symbol(symbol)
        return ShardExtent(begin * factor * split.unit, own * factor * split.unit, size)

    def rows(self, size: Size, split: AxisSplit, place: Place) -> Outer:
        """In how many rows (or of which lengths) what a place has of a size is."""
        if split.over is None:
            return split.outer
        return self.piece(size, split.over, place).size // (
            self._canonical(size) // self._canonical(split.rows)
        )

    def _parts(
        self, symbol: str, axes: Sequence[str], depth: int
    ) -> Mapping[Place, tuple[Size, Size]]:
        """The pieces of a symbol along the first few axes, as sums of the smallest pieces: all that
        is before each one, and what it is."""
        key = (symbol, tuple(axes), depth)
        if key not in self._known:
            if (count := self.mesh.part_count(axes)) > MAX_SYMBOLS:
                raise ShardingError(
                    f"a size that only a feed fixes, {show_symbol(symbol)}, is cut into {count:,} "
                    f"pieces, and {MAX_SYMBOLS:,} is the most; give its placeholder a number, or "
                    f"cut it into fewer than {self.mesh.describe_parts(axes)}"
                )
            found: dict[Place, tuple[Size, Size]] = {}
            before: Size = 0
            for head in itertools.product(*(range(self.mesh.sizes[a]) for a in axes[:depth])):
                own: Size = 0
                for tail in itertools.product(*(range(self.mesh.sizes[a]) for a in axes[depth:])):
                    own = own + Dim.symbol(_piece_symbol(symbol, axes, (*head, *tail)))
                found[head] = before, own
                before = before + own
            self._known[key] = found
        return self._known[key]

    def longest_split(self, size: Size, split: AxisSplit) -> AxisSplit:
        """As many of a split's axes, from the outermost, as leave no piece empty."""
        while split and not self.can_split(size, split):
            split = split.drop_last()
        return split

    def suits(self, sizes: Mapping[str, int]) -> bool:
        """Whether symbols of these sizes would be cut as they are."""
        return all(
            sizes.get(symbol, inf) >= self.mesh.part_count(axes)
            for symbol, axes in self.symbols.items()
        ) and all(sizes.get(symbol, 0) < least for symbol, least in self._least.items())

    def bindings(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Sizes of the symbols of pieces.

        Raises:
            ShardingError: a piece would be empty.
        """
        found = {}
        for symbol, axes in self.symbols.items():
            if symbol not in sizes:
                continue
            if sizes[symbol] < self.mesh.part_count(axes):
                raise batch_too_small_error(
                    _describe_symbol(symbol, sizes[symbol]), axes, self.mesh
                )
            for leaf in itertools.product(*(range(self.mesh.sizes[a]) for a in axes)):
                at = [(i, self.mesh.sizes[a]) for i, a in zip(leaf, axes, strict=True)]
                start, stop = _nested_range(sizes[symbol], at)
                found[_piece_symbol(symbol, axes, leaf)] = stop - start
        return found

    def describe_size(self, size: Size) -> str:
        """A size for people: that which is fed, where it is known."""
        symbol = _single_symbol(size)
        known = None if symbol is None else self._fed.get(symbol)
        return str(size) if symbol is None or known is None else _describe_symbol(symbol, known)

    def guess(self, size: Size) -> int:
        """A size, or what stands for one that is not known yet: pieces have their share of that."""
        if not isinstance(size, Dim):
            return int(size)
        return evaluate(size, self._usual)


def batch_too_small_error(told: str, axes: Sequence[str], mesh: Mesh) -> ShardingError:
    """Some shards would be empty."""
    count = mesh.part_count(axes)
    return ShardingError(
        f"a batch of {told} is smaller than its {count} shards, {mesh.describe_parts(axes)}; feed "
        f"at least {count}, or use fewer"
    )


class _Nominal(dict[str, int]):
    """Every symbol has one size, which its pieces share."""

    def __init__(self, partitioner: SizePartitioner) -> None:
        super().__init__()
        self._cuts = partitioner

    def __missing__(self, key: str) -> int:
        symbol = key.partition("@")[0]
        axes = self._cuts.symbols.get(symbol, ())
        size = max(_NOMINAL, self._cuts.mesh.part_count(axes))
        if key == symbol or not axes:
            return size
        self.update(self._cuts.bindings({symbol: size}))
        return self[key]


def _piece_symbol(symbol: str, axes: Sequence[str], numbers: Sequence[int]) -> str:
    return f"{symbol}@" + ",".join(f"{a}={i}" for a, i in zip(axes, numbers, strict=True))


def _nested_range(size: int, at: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Start and stop of a piece of a piece of …"""
    start, stop = 0, size
    for i, parts in at:
        whole, rest = divmod(stop - start, parts)
        begin = start + i * whole + min(i, rest)
        start, stop = begin, begin + whole + (i < rest)
    return start, stop


def _describe_symbol(symbol: str, size: int) -> str:
    """A size that was fed, with the name that the user gave it, if there is one."""
    return f"{size}" if is_fresh(symbol) else f"{size} (size {symbol!r})"


def _single_symbol(size: Any) -> str | None:
    """The one symbol of which a size is a multiple."""
    if not isinstance(size, Dim) or len(size.terms) != 1:
        return None
    ((monomial, _),) = size.terms.items()
    names = [atom for atom in monomial if isinstance(atom, str)]
    return names[0] if len(names) == len(monomial) == 1 else None
