"""A table that is larger than memory: passes over it, chunk by chunk of rows.

A thread reads the next chunk while the caller works on one.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np

from graphflow.errors import LinearModelError
from graphflow.linear.losses import Floats
from graphflow.linear.tables.disk_table import DiskTable

_ROW_STATE, _COLUMN_STATE = 160, 96
"""Bytes that a solver and certificates take for each row and column."""
_CHUNKS = 8
"""Chunks that fit into memory: one is worked on, with squares of it, one is read and put together,
and one is not yet freed."""
_LEAST, _MOST = 1 << 16, 64 << 20
"""Bytes of a chunk, unless a row has more."""
_SEGMENTS = 16
"""Segments of a chunk, at least."""
_SEGMENT = 1 << 18
"""Bytes of a segment, if that makes enough of them."""


class RowChunk(NamedTuple):
    """Some rows.

    Attributes:
        rows: their numbers; a slice, or an array.
        x: a CSR matrix, or a dense array in C order.
    """

    rows: Any
    x: Any


class TableStream:
    """The rows of a table, of which few are in memory at a time. It multiplies as a matrix does.

    Args:
        table: the table.
        memory: bytes that a fit may use, with a solver's own vectors.
        used: (rows,) bool: rows that are not left out; None for all.
        bias: the value of a further column; 0 for none.

    Raises:
        LinearModelError: the memory is too small; gives the numbers.
    """

    def __init__(self, table: DiskTable, memory: int, used: Any = None, bias: float = 0.0) -> None:
        self.table, self.bias = table, bias
        self._memory, self._used = memory, used
        self._numbers: Any = None if used is None else np.append(0, np.cumsum(used))
        rows = table.rows if used is None else int(used.sum())
        self.shape = rows, table.columns + (1 if bias else 0)
        self._segments, self._together = self._divide()
        self._checked: set[int] = set()

    @property
    def chunks(self) -> int:
        """The number of chunks."""
        return -(-len(self._segments) // self._together)

    @property
    def T(self) -> _Transposed:
        """The transposed matrix."""
        return _Transposed(self)

    def with_column(self, bias: float) -> TableStream:
        """Return the table with a further column of one value."""
        return TableStream(self.table, self._memory, self._used, bias)

    def visit(self, random: np.random.Generator | None = None) -> Iterator[RowChunk]:
        """Read all rows, chunk by chunk, in the order of the file.

        Args:
            random: if given, each chunk gets segments from all over the file, others each time.
                Coordinate methods slow down by far if the same rows are always together.
        """
        count, size = len(self._segments), self._together
        order = np.arange(count) if random is None else random.permutation(count)
        with ThreadPoolExecutor(1, "reader") as reader:
            ahead = None
            for first in range(0, count, size):
                now = ahead
                ahead = reader.submit(self._read_chunk, np.sort(order[first : first + size]))
                if now is not None:
                    yield now.result()
            if ahead is not None:
                yield ahead.result()

    def __matmul__(self, w: Any) -> Floats:
        out = np.empty((self.shape[0], *np.shape(w)[1:]))
        for chunk in self.visit():
            out[chunk.rows] = _multiply(chunk.x, w)
        return out

    def multiply_both(self, w: Floats, beta: Floats) -> tuple[Floats, Floats]:
        """Return X w and Xᵀβ, in one pass."""
        f, v = np.empty(self.shape[0]), np.zeros(self.shape[1])
        for chunk in self.visit():
            f[chunk.rows] = _multiply(chunk.x, w)
            v += _multiply(chunk.x.T, beta[chunk.rows])
        return f, v

    def sum_squares(self, h: Floats) -> Floats:
        """Return Σ_i h_i x_ij² of each column j."""
        out = np.zeros(self.shape[1])
        for chunk in self.visit():
            x, weights = chunk.x, h[chunk.rows]
            if isinstance(x, np.ndarray):
                out += np.einsum("ij,ij,i->j", x, x, weights)
            else:
                out += np.asarray(x.multiply(x).T @ weights).ravel()
        return out

    def _divide(self) -> tuple[list[tuple[int, int]], int]:
        """Return the first row of each segment and that behind its last one, and how many segments
        make a chunk."""
        ends = self.table.row_ends
        rows, columns = self.shape
        state = _ROW_STATE * self.table.rows + _COLUMN_STATE * columns
        size = min((self._memory - state) // _CHUNKS, _MOST)
        widest = int(np.diff(ends).max(initial=0))
        if size < max(widest, min(_LEAST, int(ends[-1]))):
            least = state + _CHUNKS * max(widest, _LEAST)
            raise LinearModelError(
                f"{self.table.path} does not fit into memory={self._memory:,} bytes: vectors of "
                f"{rows:,} rows and {columns:,} columns take {state:,}, and {_CHUNKS} chunks of "
                f"rows at least {least - state:,}; raise memory= to {least:,}"
            )
        segment = max(min(_SEGMENT, size // _SEGMENTS), widest)
        found, first = [], 0
        while first < self.table.rows:
            stop = int(np.searchsorted(ends, ends[first] + segment, "right")) - 1
            stop = min(max(stop, first + 1), self.table.rows)
            found.append((first, stop))
            first = stop
        return found, size // segment

    def _read_chunk(self, segments: Any) -> RowChunk:
        """Read segments; those that follow each other in the file at once."""
        runs = np.split(segments, np.flatnonzero(np.diff(segments) > 1) + 1)
        pieces = [self._read(run) for run in runs]
        x = pieces[0].x if len(pieces) == 1 else _stack([piece.x for piece in pieces])
        rows = pieces[0].rows
        if len(pieces) > 1:
            rows = np.concatenate([np.arange(p.rows.start, p.rows.stop) for p in pieces])
        return RowChunk(rows, _append_column(x, self.bias) if self.bias else x)

    def _read(self, run: Any) -> RowChunk:
        first, stop = self._segments[run[0]][0], self._segments[run[-1]][1]
        x = self.table.read(first, stop)
        if not self._checked.issuperset(run.tolist()):
            self._check_finite(x, first)
            self._checked.update(run.tolist())
        if self._used is not None:
            x = x[self._used[first:stop]]
            first, stop = int(self._numbers[first]), int(self._numbers[stop])
        return RowChunk(slice(first, stop), x)

    def _check_finite(self, x: Any, first: int) -> None:
        """Check values when a chunk is read for the first time."""
        is_dense = isinstance(x, np.ndarray)
        values = x if is_dense else x.data
        if np.isfinite(values.sum()) or np.isfinite(values).all():
            return
        place = int(np.flatnonzero(~np.isfinite(values.ravel()))[0])
        row = (
            place // x.shape[1] if is_dense else int(np.searchsorted(x.indptr, place, "right")) - 1
        )
        raise LinearModelError(
            f"{self.table.path} holds NaN or infinity, first in row {first + row} (from 0); "
            "correct it, or leave the row out"
        )


class _Transposed:
    """A transposed table, which multiplies."""

    def __init__(self, stream: TableStream) -> None:
        self._stream = stream
        self.shape = stream.shape[::-1]

    def __matmul__(self, beta: Any) -> Floats:
        out = np.zeros((self.shape[0], *np.shape(beta)[1:]))
        for chunk in self._stream.visit():
            out += _multiply(chunk.x.T, beta[chunk.rows])
        return out


def _multiply(x: Any, w: Any) -> Any:
    """Return X @ w of a chunk in float64."""
    if isinstance(x, np.ndarray) and x.dtype == np.float32:
        step = max(1, (1 << 18) // max(1, min(x.shape)))
        if x.flags.c_contiguous:
            parts = [x[i : i + step].astype(np.float64) @ w for i in range(0, x.shape[0], step)]
            return np.concatenate(parts)
        return sum(
            x[:, i : i + step].astype(np.float64) @ w[i : i + step]
            for i in range(0, x.shape[1], step)
        )
    return x @ w


def _stack(pieces: list[Any]) -> Any:
    """Return rows of several matrices as one."""
    if isinstance(pieces[0], np.ndarray):
        return np.concatenate(pieces)
    from scipy.sparse import vstack

    return vstack(pieces, format="csr")


def _append_column(x: Any, value: float) -> Any:
    """Return a matrix with a further column of one value."""
    column = np.full((x.shape[0], 1), value, x.dtype)
    if isinstance(x, np.ndarray):
        return np.concatenate([x, column], axis=1)
    from scipy.sparse import csr_matrix, hstack

    return hstack([x, csr_matrix(column)], format="csr")


__all__ = ["RowChunk", "TableStream"]
