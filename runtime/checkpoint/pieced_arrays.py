"""Arrays that are read a part at a time, when it is needed: large partitioned variables.

A checkpoint stores such a variable in pieces. A session on another number of workers needs other
parts, and no process should hold the whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from graphflow.ir.spec import Span, index_of

Array = np.ndarray[Any, Any]
Ranges = Sequence[tuple[int, int]]


class LazyArray:
    """An array that is read when numpy asks for it, and not kept.

    Args:
        shape: its shape.
        dtype: its dtype.
        read: returns it.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], read: Callable[[], Array]
    ) -> None:
        self.shape = shape
        self.dtype = dtype
        self._read = read

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return self.size * self.dtype.itemsize

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        return np.asarray(self._read(), dtype)

    def __getitem__(self, index: Any) -> Array:
        found: Array = self._read()[index]
        return found

    def copy(self) -> Array:
        """Return the array."""
        return np.array(self._read())

    def reshape(self, shape: tuple[int, ...]) -> LazyArray:
        """Return the array in another shape of as many elements."""
        return LazyArray(shape, self.dtype, lambda: np.asarray(self._read()).reshape(shape))


class PiecedArray(LazyArray):
    """An array of pieces, of which parts can be read.

    Args:
        shape: its shape; one axis at least.
        dtype: its dtype.
        pieces: disjoint parts that make up the array, each with its spans.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        pieces: Sequence[tuple[tuple[Span, ...], Any]],
    ) -> None:
        whole = tuple(Span(0, size) for size in shape)
        super().__init__(shape, dtype, lambda: self._read_part(whole))
        self.pieces = tuple(
            (spans, piece.reshape(tuple(span.size for span in spans))) for spans, piece in pieces
        )

    def part(self, spans: tuple[Span, ...]) -> LazyArray:
        """Return a part, given its spans."""
        shape = tuple(span.size for span in spans)
        return LazyArray(shape, self.dtype, lambda: self._read_part(spans))

    @classmethod
    def from_array(cls, array: Any, dtype: np.dtype[Any]) -> PiecedArray:
        """Return an array, of one axis at least, of which parts can be read in another dtype."""
        whole = tuple(Span(0, size) for size in array.shape)
        return cls(array.shape, dtype, [(whole, array)])

    def copy_to(self, out: Array) -> None:
        """Copy the array to `out`, one piece after the other."""
        for spans, piece in self.pieces:
            out[index_of(spans, self.shape)] = np.asarray(piece)

    def _read_part(self, spans: tuple[Span, ...]) -> Array:
        """Return a part, copied from the rows of the pieces that it overlaps."""
        out = np.zeros(tuple(span.size for span in spans), self.dtype)
        wanted = spans[0].to_ranges(self.shape[0])
        for own, piece in self.pieces:
            for to, source, count in _overlaps(wanted, own[0].to_ranges(self.shape[0])):
                rows = np.asarray(piece[source : source + count])
                self._copy_columns(out[to : to + count], spans[1:], rows, own[1:])
        return out

    def _copy_columns(
        self, out: Array, spans: tuple[Span, ...], rows: Array, own: tuple[Span, ...]
    ) -> None:
        """Copy the elements of some rows that both a part and a piece have."""
        if spans == own:
            out[...] = rows
            return
        shape = self.shape[1:]
        every = np.arange(math.prod(shape)).reshape(shape)
        here, there = every[index_of(spans, shape)].ravel(), every[index_of(own, shape)].ravel()
        _, to, source = np.intersect1d(here, there, assume_unique=True, return_indices=True)
        flat = out.reshape(len(out), -1)
        flat[:, to] = rows.reshape(len(rows), -1)[:, source]


def _overlaps(a: Ranges, b: Ranges) -> Iterator[tuple[int, int, int]]:
    """Yield where two lists of ranges overlap: the places in what each selects, and the length."""
    at = 0
    for start, stop in a:
        place = 0
        for first, last in b:
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield at + low - start, place + low - first, high - low
            place += last - first
        at += stop - start


__all__ = ["LazyArray", "PiecedArray"]
