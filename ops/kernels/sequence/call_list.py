"""Lists of native calls over the heads of attention.

A list depends on shapes, strides and the mask's pattern. It is made once, and each call of
attention fills in where its arrays are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.call_table_driver import driver
from graphflow.ops.kernels.jit.compiler import NativeFunction
from graphflow.ops.kernels.jit.thread_pool import run_ranges

_CALLS_AT_ONCE = 1 << 14
"""Calls whose operands are filled in at once, about."""
_THREADING_NANOSECONDS = 100_000
"""Nanoseconds of work from which threads share it."""
LINE_BYTES = 64
Place = tuple[int, int]
"""The number of an array, and bytes from its start; array `THREAD_MEMORY` belongs to the thread."""
THREAD_MEMORY = 0


class CallList:
    """Calls of native functions for one head, unit by unit; units may run at the same time.

    Args:
        ahead: bytes at which each head's part of each array begins, (heads, arrays).

    Attributes:
        own: bytes of scratch memory that a thread needs.
        needs_zeroed_sums: whether dk and dv must be 0 before.
    """

    def __init__(self, ahead: Any) -> None:
        self.ahead = ahead
        self.nanoseconds = 0.0
        self.own = 0
        self.needs_zeroed_sums = False
        self._arrays: list[int] = []
        self._bytes: list[int] = []
        self._table: Any = []
        self._sizes: Any = [0]
        self._known: dict[tuple[int, ...], int] = {}
        self._units = [0]

    def add(
        self, native: NativeFunction, places: Sequence[Place], sizes: Sequence[int], rows: int
    ) -> None:
        """Append a call of rows 0 to `rows`; equal sizes are stored once."""
        key = tuple(sizes)
        if key not in self._known:
            self._known[key] = len(self._sizes)
            self._sizes += key
        self._table.append((native.address, 8 * len(self._arrays), 8 * self._known[key], 0, rows))
        self._arrays += [number for number, _ in places]
        self._bytes += [ahead for _, ahead in places]

    def end_unit(self) -> None:
        """End a unit: later calls may run at the same time as those before."""
        if self._units[-1] < len(self._table):
            self._units.append(len(self._table))

    def finalize(self, scratch: int) -> CallList:
        """Turn the lists into tables; places of a thread's memory that are -1 move to `scratch`."""
        arrays, ahead = np.array(self._arrays, np.int64), np.array(self._bytes, np.int64)
        ahead[(arrays == THREAD_MEMORY) & (ahead == -1)] = scratch
        self._arrays, self._bytes = arrays, ahead  # type: ignore[assignment]
        self._sizes = np.array(self._sizes, np.int64)
        self._table = np.array(self._table, np.int64).reshape(-1, 5)
        self._table[:, 2] += address(self._sizes)
        self._known.clear()
        return self

    def run(self, arrays: Sequence[Any]) -> None:
        """Run all units of all heads, on the threads of the current pool."""
        starts = [address(a) for a in arrays]

        def part(first: int, last: int) -> None:
            memory = np.empty(self.own + LINE_BYTES, np.uint8)
            own = -(-address(memory) // LINE_BYTES) * LINE_BYTES
            self._run_units(np.array([own, *starts], np.int64), first, last)

        units = (len(self._units) - 1) * len(self.ahead)
        is_long = self.nanoseconds * len(self.ahead) > _THREADING_NANOSECONDS
        run_ranges(part, units, None if is_long else 1)

    def _run_units(self, bases: Any, first: int, last: int) -> None:
        """Run units `first` to `last`, counted over heads, some heads at a time."""
        each = len(self._units) - 1
        together = max(1, _CALLS_AT_ONCE // len(self._table))
        for head in range(first // each, -(-last // each), together):
            heads = self.ahead[head : min(head + together, -(-last // each))]
            places = np.take(bases + heads, self._arrays, axis=1) + self._bytes
            places = np.ascontiguousarray(places)
            table = np.broadcast_to(self._table, (len(heads), *self._table.shape)).copy()
            starts = address(places) + places.strides[0] * np.arange(len(heads))
            table[:, :, 1] += starts[:, None]
            begin, end = (self._call(min(max(u - head * each, 0), each * len(heads)))
                          for u in (first, last))  # fmt: skip
            driver().walk.releasing_gil(ctypes.c_void_p(address(table)), None, begin, end)

    def _call(self, unit: int) -> int:
        """Return the number of a unit's first call, counted over heads."""
        head, own = divmod(unit, len(self._units) - 1)
        return head * len(self._table) + self._units[own]


class ThreadMemory:
    """Allocates places in a thread's scratch memory."""

    def __init__(self) -> None:
        self.nbytes = 0

    def take(self, nbytes: int) -> Place:
        start = self.nbytes
        self.nbytes += -(-nbytes // LINE_BYTES) * LINE_BYTES
        return THREAD_MEMORY, start


@dataclass(frozen=True)
class MatrixPlace:
    """A matrix at a place; strides of rows and columns in bytes."""

    place: Place
    row: int
    column: int

    @property
    def T(self) -> MatrixPlace:
        return MatrixPlace(self.place, self.column, self.row)
