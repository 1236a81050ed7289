"""Segments: a run of generated kernels in a program is one native call.

A call's pointers are fixed when the program is compiled, but for those to what is fed or received,
which are filled in when it comes. The driver (`ops/kernels/jit/call_table_driver.py`) runs the
calls in order, so the bits are those of the kernels one by one.
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
from graphflow.ops.kernels.jit.call_table_driver import WORDS, driver
from graphflow.ops.kernels.jit.compiler import KernelTask, compiler
from graphflow.runtime.native_calls.gemm_epilogues import Used, Work, steps

LONGEST = 5e6
"""Nanoseconds of work after which a program looks whether its step was given up."""

Slot = Tensor | tuple[str, int]
"""What comes when the program runs, and says then where it is: a tensor that is fed or received; in
a loop, what moves on with its iterations."""
Place = int | Slot
"""An address, or what will say it."""


@dataclass(frozen=True)
class Call:
    """A kernel and what it is called with.

    Attributes:
        node: the node that it computes (of several, the last).
        places: of operands, results, and scratch memory.
        nbytes: of each.
        written: the first of the places that is written to.
    """

    node: Node
    task: KernelTask
    places: tuple[Place, ...]
    nbytes: tuple[int, ...] = ()
    written: int = 0

    @property
    def work(self) -> Work:
        """What it reads and writes, as far as that is known."""
        used = [
            Used(place if isinstance(place, int) else None, nbytes)
            for place, nbytes in zip(self.places, self.nbytes, strict=False)
        ]
        return Work(self.task, tuple(used[: self.written]), tuple(used[self.written :]))


class Segment:
    """Calls that run one after the other.

    Attributes:
        slots: which pointers lead to what comes when the program runs.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        self.nanoseconds = sum(call.task.nanoseconds for call in calls)
        self.slots: dict[Slot, list[int]] = {}
        places: list[int] = []
        starts: list[int] = []
        for call in calls:
            starts.append(len(places))
            for place in call.places:
                if not isinstance(place, int):
                    self.slots.setdefault(place, []).append(len(places))
                    place = 0
                places.append(place)
        self.pointers = np.array(places, np.uint64)
        self._sizes, first = _joined([call.task for call in calls])
        self.entries = self._entries(starts, first)
        self._turns = self._by_turns()
        self._place = address(self._turns) if calls else 0
        function = driver().walk
        self._walk = (
            function.releasing_gil
            if self.nanoseconds > GIL_RELEASE_NANOSECONDS
            else function.holding_gil
        )
        self.run: Callable[[], None] = partial(
            self._walk, ctypes.c_void_p(self._place), None, ctypes.c_int64(0),
            ctypes.c_int64(len(self._turns) // WORDS),
        )  # fmt: skip

    def _entries(self, starts: Sequence[int], first: Sequence[int]) -> np.ndarray[Any, Any]:
        native = compiler()
        where, sizes = address(self.pointers), address(self._sizes)
        words: list[int] = []
        for call, start, at in zip(self.calls, starts, first, strict=True):
            task = call.task
            function = native.function(task.name, task.text).address
            words += (function, where + 8 * start, sizes + 8 * at, 0, task.rows)
        return np.array(words, np.uint64)

    def _by_turns(self) -> np.ndarray[Any, Any]:
        """The entries with epilogues block by block."""
        whole = self.entries.reshape(-1, WORDS)
        found = steps([call.work for call in self.calls])
        turns = whole[[step.call for step in found]]
        turns[:, 3:] = [(step.start, step.stop) for step in found]
        return turns.reshape(-1)

    @property
    def freely(self) -> Callable[[], None]:
        """As `run`, but other threads go on meanwhile."""
        return partial(driver().walk.releasing_gil, *self.run.args)  # type: ignore[attr-defined]

    def one(self, i: int) -> None:
        """Run one of the calls."""
        self._walk(address(self.entries), None, i, i + 1)

    def slot(self, i: int) -> int:
        """The address at which a pointer is kept."""
        return address(self.pointers) + 8 * i


def _joined(tasks: Iterable[KernelTask]) -> tuple[np.ndarray[Any, Any], list[int]]:
    """The sizes of tasks in one array, equal tasks once, and where those of each begin."""
    sizes: list[int] = [0]  # an array of none has no address
    at: dict[int, int] = {}
    first = []
    for task in tasks:
        start = at.get(id(task))
        if start is None:
            start = at[id(task)] = len(sizes)
            sizes += task.sizes
        first.append(start)
    return np.array(sizes, np.int64), first


class Fed:
    """Takes what is fed or received: on the device, where its segments look for it.

    Args:
        spec: what it must be; a native function trusts its pointers.

    Attributes:
        read: whether a line of Python reads it, so that it must be aligned; generated kernels give
            the same bits wherever it is.
    """

    def __init__(self, spec: TensorSpec, to_device: Callable[[Any], Any]) -> None:
        self.read = False
        self._shape = spec.shape
        self._dtype = spec.dtype
        self._to_device = to_device
        self._slots: list[tuple[Any, Any]] = []

    def lead(self, segment: Segment, slots: Sequence[int]) -> None:
        """Let these pointers of a segment lead to what comes."""
        which = slots[0] if len(slots) == 1 else np.array(slots)
        self._slots.append((segment.pointers, which))

    def __call__(self, given: Any) -> Any:
        if not self._slots and self.read:
            return self._to_device(given)
        array = given
        if type(array) is not np.ndarray or not array.flags.c_contiguous:
            array = self._to_device(given)
        place = address(array)
        if self.read and place % ALIGNMENT:
            array = self._to_device(given)
            place = address(array)
        if array.shape != self._shape or array.dtype != self._dtype:
            raise ShapeError(
                f"{self._dtype}{self._shape} is wanted, not {array.dtype}{array.shape}"
            )
        for pointers, which in self._slots:
            pointers[which] = place
        return array
