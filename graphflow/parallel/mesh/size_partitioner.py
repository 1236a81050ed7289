"""The extents of shards: how sizes, symbolic ones too, are divided over a mesh.

If a size does not divide evenly, the first extents are larger by one, as in numpy's array_split.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from graphflow.errors import ShardingError
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
from graphflow.parallel.mesh.axis_split import AxisSplit, ShardExtent
from graphflow.parallel.mesh.device_mesh import Mesh, Place

MAX_SYMBOLS = 1024
"""The most extents of a symbolic size. Each has a symbol of its own and begins at a sum of those
before it."""


_NOMINAL = 64
"""The size that stands for every symbol before one is fed, unless a mesh needs more."""


class SizePartitioner:
    """The extents of sizes over one mesh.

    A symbol that is split gets a symbol for each extent, `n@data=0`. Their values are known when a
    step is fed (`bindings`). Each symbol is split in one way only.

    Args:
        mesh: the mesh.
        fed: the sizes of symbols, as far as they are known. A size that is too small is not split.
        same: the symbols that ops require to be equal (see `equal_sizes`). They are split as one.

    Attributes:
        symbols: the mesh axes that split each symbol.
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
        self._least: dict[str, int] = {}  # symbols that are whole below this size

    def _canonical(self, size: Size) -> Size:
        """Replace each symbol by the first of those that it equals."""
        return substitute(size, self._same) if self._same else size

    def can_split(self, size: Size, split: AxisSplit) -> bool:
        """Return True if every place would get an extent that is not empty."""
        if not split:
            return True
        if split.ranges is not None:
            return split.ranges.rows == size
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
        """Return the axes that split a size's symbol already, if they are not those of `split`."""
        known = self.symbols.get(_single_symbol(self._canonical(size)) or "", split.axes)
        return () if known[: len(split.axes)] == split.axes else known

    def pieces(self, size: Size, split: AxisSplit) -> list[ShardExtent]:
        """Return the extent of each place."""
        return [self.piece(size, split, place) for place in self.mesh.places]

    def piece(self, size: Size, split: AxisSplit, place: Place) -> ShardExtent:
        """Return the extent of a place.

        With many places, the start of a symbolic extent is a long sum. Extents are therefore
        cached.
        """
        if not split:
            return ShardExtent(0, size, size)
        key = (size, split, tuple([self.mesh.coordinate(place, axis) for axis in split.axes]))
        found = self._pieces.get(key)
        if found is None:
            found = self._pieces[key] = self._piece(size, split, place)
        return found

    def _piece(self, size: Size, split: AxisSplit, place: Place) -> ShardExtent:
        """Compute the extent of a place.

        Raises:
            ShardingError: a symbolic size cannot be split, or is split in another way already.
        """
        if split.ranges is not None:
            owner = self.mesh.coordinate(place, split.axes[0])
            return ShardExtent(split.ranges.starts[owner], split.ranges.sizes[owner], size)
        size, split = self._canonical(size), replace(split, unit=self._canonical(split.unit))
        if split.outer != 1:  # the start is relative to each row
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
        if isinstance(base, int):  # a number of units of symbolic size
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
        """Return how many rows of a size a place has, or their relative lengths."""
        if split.over is None:
            return split.outer
        return self.piece(size, split.over, place).size // (
            self._canonical(size) // self._canonical(split.rows)
        )

    def _parts(
        self, symbol: str, axes: Sequence[str], depth: int
    ) -> Mapping[Place, tuple[Size, Size]]:
        """Return (start, size) for each coordinate along the first `depth` axes, as sums of the
        smallest extents."""
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
                    own = own + Dim.symbol(piece_symbol(symbol, axes, (*head, *tail)))
                found[head] = before, own
                before = before + own
            self._known[key] = found
        return self._known[key]

    def longest_split(self, size: Size, split: AxisSplit) -> AxisSplit:
        """Return the split along as many of its mesh axes, from the outermost, as leave no extent
        empty."""
        while split and not self.can_split(size, split):
            split = split.drop_last()
        return split

    def suits(self, sizes: Mapping[str, int]) -> bool:
        """Return True if symbols of these sizes would be split as they are."""
        return all(
            sizes.get(symbol, inf) >= self.mesh.part_count(axes)
            for symbol, axes in self.symbols.items()
        ) and all(sizes.get(symbol, 0) < least for symbol, least in self._least.items())

    def bindings(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Return the values of the symbols of extents, given those of the whole sizes.

        Raises:
            ShardingError: an extent would be empty.
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
                found[piece_symbol(symbol, axes, leaf)] = stop - start
        return found

    def describe_size(self, size: Size) -> str:
        """Describe a size for messages: by the number that is fed, if it is known."""
        symbol = _single_symbol(size)
        known = None if symbol is None else self._fed.get(symbol)
        return str(size) if symbol is None or known is None else _describe_symbol(symbol, known)

    def guess(self, size: Size) -> int:
        """Return a size, or a nominal number for a symbolic one. Extents have their share of that
        number."""
        if not isinstance(size, Dim):
            return int(size)
        return evaluate(size, self._usual)


def batch_too_small_error(size: str, axes: Sequence[str], mesh: Mesh) -> ShardingError:
    """Return the error of a batch that would leave shards empty."""
    count = mesh.part_count(axes)
    return ShardingError(
        f"a batch of {size} is smaller than its {count} shards, {mesh.describe_parts(axes)}; feed "
        f"at least {count}, or use fewer"
    )


class _Nominal(dict[str, int]):
    """Sizes of symbols before they are fed: one nominal size, which extents share."""

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


def piece_symbol(symbol: str, axes: Sequence[str], numbers: Sequence[int]) -> str:
    """Return the name of the symbol of an extent: `n@data=0,model=1`."""
    return f"{symbol}@" + ",".join(f"{a}={i}" for a, i in zip(axes, numbers, strict=True))


def _nested_range(size: int, at: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return (start, stop) of an extent, given (coordinate, count) for each level of nesting."""
    start, stop = 0, size
    for i, parts in at:
        whole, rest = divmod(stop - start, parts)
        begin = start + i * whole + min(i, rest)
        start, stop = begin, begin + whole + (i < rest)
    return start, stop


def _describe_symbol(symbol: str, size: int) -> str:
    """Describe a fed size, with the user's name for it if there is one."""
    return f"{size}" if is_fresh(symbol) else f"{size} (size {symbol!r})"


def _single_symbol(size: Any) -> str | None:
    """Return the one symbol of which a size is a multiple, or None."""
    if not isinstance(size, Dim) or len(size.terms) != 1:
        return None
    ((monomial, _),) = size.terms.items()
    names = [atom for atom in monomial if isinstance(atom, str)]
    return names[0] if len(names) == len(monomial) == 1 else None
