"""A product of matrices as native code: run on the threads of a pool, or recorded by a program."""

from __future__ import annotations

import ctypes
import threading
from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise, zip_longest
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.jit.array_address import address, align_up, empty_aligned
from graphflow.ops.kernels.jit.call_recorder import current_recorder
from graphflow.ops.kernels.jit.compiler import KernelTask, NativeFunction, TaskShare, compiler
from graphflow.ops.kernels.jit.kernel_recording import operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import Pool, current_pool, run_native_parts

_THREADING_NANOSECONDS = 20_000
"""Nanoseconds of work from which threads share it."""
_GIL_RELEASE_NANOSECONDS = 20_000
"""Nanoseconds of work from which the GIL is released."""


@dataclass(frozen=True)
class NativeProduct:
    """A kernel with the sizes of a product; only addresses are left to give.

            void kernel(ptr* {x, y, out, scratch}, i64* sizes, i64 start, i64 stop)
            void kernel(ptr* {x, y, addend, out, scratch}, …)  # of a product that is added

    Attributes:
        sizes: the kernel's table.
        units: the kernel runs from 0 to this. Parts may run at once on any threads, each with
            scratch memory of its own.
        swapped: whether x is b, and y is a.
        nanoseconds: a rough estimate of one thread's time.
        scratch: bytes, 64-byte aligned.
        blocks: as in `KernelTask`, if the result is contiguous and larger than what stays in a
            cache.
    """

    sizes: tuple[int, ...]
    units: int
    swapped: bool
    nanoseconds: float
    scratch: int
    blocks: tuple[tuple[int, int], ...] = ()

    @property
    @abstractmethod
    def kernel(self) -> tuple[str, str]:
        """The kernel's name and the text of its module."""

    @abstractmethod
    def cut(self, count: int) -> list[TaskShare]:
        """Cut the product into at most `count` shares that may run at once."""

    def _cut_columns(
        self, ends: Sequence[int], columns: int, steps: Sequence[int]
    ) -> list[TaskShare]:
        """Return shares of all units and some columns, for `cut`.

        Args:
            ends: columns at which shares begin, and where the last one ends.
            columns: index of the number of columns among the sizes.
            steps: bytes that the address of each operand and result moves with a column.
        """
        shares = []
        for start, stop in pairwise(ends):
            own = list(self.sizes)
            own[columns] = stop - start
            offsets = tuple(start * step for step in steps)
            shares.append(TaskShare(0, self.units, tuple(own), offsets))
        return shares

    @property
    def task(self) -> KernelTask:
        """The product as an entry of a table of native calls."""
        name, text = self.kernel
        order = (1, 0) if self.swapped else ()
        return KernelTask(
            name, text, self.sizes, self.units, self.nanoseconds, self.scratch, order,
            blocks=self.blocks, cut=self.cut,
            share=_THREADING_NANOSECONDS / 2,
        )  # fmt: skip

    @cached_property
    def function(self) -> NativeFunction:
        return compiler().function(*self.kernel)

    @cached_property
    def table(self) -> np.ndarray[Any, Any]:
        """The sizes as the function takes them."""
        return np.array(self.sizes, np.int64)

    @cached_property
    def _table_pointer(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(address(self.table))

    def run(self, out: int, a: int, b: int, addend: int | None = None) -> None:
        """Run the product for operands at these addresses, on the threads of the current pool.

        A product that is added takes the address of the array that it is added to.
        """
        x, y = (b, a) if self.swapped else (a, b)
        given = (x, y, out) if addend is None else (x, y, addend, out)
        if current_recorder() is not None:
            self._record(given)
            return
        pool = current_pool() if self.nanoseconds > _THREADING_NANOSECONDS else None
        if pool is None or pool.threads < 2:
            function = (
                self.function.holding_gil
                if self.nanoseconds < _GIL_RELEASE_NANOSECONDS
                else self.function.releasing_gil
            )
            function(_Pointers(*given, _scratch(self.scratch)), self._table_pointer, 0, self.units)
            return
        self._run_shared(pool, given)

    def _record(self, given: Sequence[int]) -> None:
        """Add the product's shares to the current recorder."""
        recorder = current_recorder()
        assert recorder is not None
        count = 1 if recorder.recording is None else recorder.recording.threads
        is_long = self.nanoseconds > _THREADING_NANOSECONDS
        shares = self.cut(count) if is_long else [TaskShare(0, self.units)]

        def part(i: int) -> None:
            share = shares[i]
            own = operand_place(scratch(np, "product", (self.scratch,), np.uint8))
            places = [g + by for g, by in zip_longest(given, share.offsets, fillvalue=0)]
            call_native(
                self.function, (*places, own), share.sizes or self.sizes, share.start, share.stop
            )

        run_native_parts(part, len(shares))

    def _run_shared(self, pool: Pool, given: Sequence[int]) -> None:
        """Run the product on the threads of a pool."""
        shares = self.cut(pool.threads)
        own = align_up(self.scratch)
        memory = address(scratch(np, "shares of products", (len(shares) * own,), np.uint8))
        tables = [
            np.array([*(g + by for g, by in zip_longest(given, share.offsets, fillvalue=0)),
                      memory + i * own], np.int64)
            for i, share in enumerate(shares)
        ]  # fmt: skip
        sizes = [np.array(share.sizes or self.sizes, np.int64) for share in shares]
        words = [
            (self.function.address, address(table), address(size), share.start, share.stop)
            for table, size, share in zip(tables, sizes, shares, strict=True)
        ]
        pool.run_entries(np.array(words, np.int64), len(shares))


_Pointers = ctypes.c_void_p * 5
_thread_local = threading.local()


def _scratch(nbytes: int) -> int:
    """Return the address of the calling thread's scratch memory."""
    if nbytes > getattr(_thread_local, "nbytes", -1):
        _thread_local.memory = empty_aligned(nbytes)
        _thread_local.place = address(_thread_local.memory)
        _thread_local.nbytes = nbytes
    place: int = _thread_local.place
    return place
