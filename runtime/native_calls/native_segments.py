"""Native segments: consecutive generated kernels of a program run as one native call.

Pointers are fixed when the program is compiled, except those to feeds and received tensors, which
are filled in when the tensors come. The driver (`ops/kernels/jit/call_table_driver.py`) runs the
calls in order, so the bits are those of the kernels run one by one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShapeError
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec
from graphflow.ops.kernels.fusion.region_kernels import GIL_RELEASE_NANOSECONDS
from graphflow.ops.kernels.jit.array_address import ALIGNMENT, address
from graphflow.ops.kernels.jit.call_table_driver import (
    WORDS,
    clock_nanoseconds,
    driver,
    timed_frame,
)
from graphflow.ops.kernels.jit.compiler import KernelTask, compiler
from graphflow.runtime.native_calls.gemm_epilogues import (
    KernelAccess,
    MemoryRange,
    interleave_epilogues,
)

CANCEL_CHECK_NANOSECONDS = 5e6
"""Nanoseconds of work after which a program checks whether its step was cancelled."""

RuntimeOperand = Tensor | tuple[str, int]
"""An operand whose address is known only at run time: a feed, a received tensor, or, in a loop, a
row that advances with the iterations."""
PointerSource = int | RuntimeOperand
"""A fixed address, or the operand that supplies it at run time."""


@dataclass(frozen=True)
class KernelCall:
    """A kernel and its arguments.

    Attributes:
        node: the node that it computes; of a region, the last one.
        pointers: pointers to operands, results, and scratch memory, in this order.
        nbytes: size of each; empty if unknown.
        first_written: index of the first pointer that is written to.
    """

    node: Node
    task: KernelTask
    pointers: tuple[PointerSource, ...]
    nbytes: tuple[int, ...] = ()
    first_written: int = 0

    @property
    def access(self) -> KernelAccess:
        """The memory that it reads and writes, as far as it is known."""
        used = [
            MemoryRange(place if isinstance(place, int) else None, nbytes)
            for place, nbytes in zip(self.pointers, self.nbytes, strict=False)
        ]
        return KernelAccess(
            self.task, tuple(used[: self.first_written]), tuple(used[self.first_written :])
        )


class NativeSegment:
    """Kernel calls that run in sequence, as one native call `run`.

    Attributes:
        runtime_pointers: run-time operand -> indices of its pointers.
        pointers: addresses of all arguments, which the native code reads.
        entries: the driver's table, with each call as a whole.
    """

    def __init__(self, calls: Sequence[KernelCall]) -> None:
        self.calls = tuple(calls)
        self.nanoseconds = sum(call.task.nanoseconds for call in calls)
        self.runtime_pointers: dict[RuntimeOperand, list[int]] = {}
        places: list[int] = []
        starts: list[int] = []
        for call in calls:
            starts.append(len(places))
            for place in call.pointers:
                if not isinstance(place, int):
                    self.runtime_pointers.setdefault(place, []).append(len(places))
                    place = 0
                places.append(place)
        self.pointers = np.array(places, np.uint64)
        self._sizes, first = _pool_sizes([call.task for call in calls])
        self.entries = self._make_entries(starts, first)
        self._table, self._steps = self._interleaved_entries()
        self._table_address = address(self._table) if calls else 0
        function = driver().walk
        self._walk = (
            function.releasing_gil
            if self.nanoseconds > GIL_RELEASE_NANOSECONDS
            else function.holding_gil
        )
        self.run: Callable[[], None] = partial(
            self._walk, ctypes.c_void_p(self._table_address), None, ctypes.c_int64(0),
            ctypes.c_int64(len(self._table) // WORDS),
        )  # fmt: skip

    def _make_entries(self, starts: Sequence[int], first: Sequence[int]) -> np.ndarray[Any, Any]:
        native = compiler()
        where, sizes = address(self.pointers), address(self._sizes)
        words: list[int] = []
        for call, start, at in zip(self.calls, starts, first, strict=True):
            task = call.task
            function = native.function(task.name, task.text).address
            words += (function, where + 8 * start, sizes + 8 * at, 0, task.rows)
        return np.array(words, np.uint64)

    def _interleaved_entries(self) -> tuple[np.ndarray[Any, Any], list[int]]:
        """Return the driver's table with epilogues interleaved block by block, and the call of
        each entry.
        """
        whole = self.entries.reshape(-1, WORDS)
        found = interleave_epilogues([call.access for call in self.calls])
        turns = whole[[step.call for step in found]]
        turns[:, 3:] = [(step.start, step.stop) for step in found]
        return turns.reshape(-1), [step.call for step in found]

    @property
    def run_without_gil(self) -> Callable[[], None]:
        """As `run`, but without Python's global lock, so that other threads proceed."""
        return partial(driver().walk.releasing_gil, *self.run.args)  # type: ignore[attr-defined]

    def run_call(self, i: int) -> None:
        """Run call `i` by itself, for a step that is traced by a clock of Python."""
        self._walk(address(self.entries), None, i, i + 1)

    def run_timed(self, clock: int) -> np.ndarray[Any, Any]:
        """Run as `run` does, and return the nanoseconds of each call, (calls,).

        Args:
            clock: the clock of the system that counts, `time.CLOCK_MONOTONIC` or another.
        """
        count = len(self._steps)
        times = np.zeros(count + 1, np.int64)
        frame = timed_frame(self._table_address, clock, address(times))
        timed = driver().timed
        long = self.nanoseconds > GIL_RELEASE_NANOSECONDS
        (timed.releasing_gil if long else timed.holding_gil)(address(frame), None, 0, count)
        took = np.maximum(np.diff(times) - clock_nanoseconds(clock), 0)
        return np.bincount(self._steps, took, len(self.calls))

    def pointer_address(self, i: int) -> int:
        """Return the address at which pointer `i` is stored."""
        return address(self.pointers) + 8 * i


def _pool_sizes(tasks: Iterable[KernelTask]) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Return the sizes of all tasks in one array, and the index of each task's first size.

    Equal tasks share their sizes.
    """
    sizes: list[int] = [0]  # an empty array has no address
    at: dict[int, int] = {}
    first = []
    for task in tasks:
        start = at.get(id(task))
        if start is None:
            start = at[id(task)] = len(sizes)
            sizes += task.sizes
        first.append(start)
    return np.array(sizes, np.int64), first


class FeedBinding:
    """Binds a feed or a received tensor to the pointers of the segments that read it.

    Args:
        spec: the spec that arrays must have: native code trusts its pointers.
        to_device: copies an array to a contiguous, aligned one.

    Attributes:
        is_read_by_python: whether a line of Python reads it, so that it must be aligned. Generated
            kernels give the same bits at any alignment.
    """

    def __init__(self, spec: TensorSpec, to_device: Callable[[Any], Any]) -> None:
        self.is_read_by_python = False
        self._shape = spec.shape
        self._dtype = spec.dtype
        self._to_device = to_device
        self._bound: list[tuple[Any, Any]] = []

    def bind(self, segment: NativeSegment, slots: Sequence[int]) -> None:
        """Set these pointers of a segment whenever an array comes."""
        which = slots[0] if len(slots) == 1 else np.array(slots)
        self._bound.append((segment.pointers, which))

    def __call__(self, given: Any) -> Any:
        if not self._bound and self.is_read_by_python:
            return self._to_device(given)
        array = given
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            array = self._to_device(given)
        place = address(array)
        if self.is_read_by_python and place % ALIGNMENT:
            array = self._to_device(given)
            place = address(array)
        if array.shape != self._shape or array.dtype != self._dtype:
            raise ShapeError(f"expected {self._dtype}{self._shape}, got {array.dtype}{array.shape}")
        for pointers, which in self._bound:
            pointers[which] = place
        return array
