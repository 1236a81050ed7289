"""Records all native calls of a kernel once, so that a program repeats them without Python.

A kernel that is a list of native calls makes the same calls in every step, at the same addresses.
While it is recorded it gets stand-ins instead of arrays: shapes and addresses without elements.
Scratch memory is a stand-in, too. Whatever reads elements in Python raises `NotRecordable`; such a
kernel stays a line of Python.

Addresses of stand-ins lie beyond those that a process can have. Each stand-in has a region of
its own, so that the program finds the pointers to replace by real addresses.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from operator import mul
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from graphflow.ops.kernels.jit.array_address import address, align_up
from graphflow.ops.kernels.jit.call_recorder import CallRecorder, RecordedCall, current_recorder

_REGION = 1 << 48
"""Bytes between stand-ins. Addresses of a process are below half of it."""
MOST_SCRATCH = 1 << 28
"""Bytes of scratch memory beyond which a kernel is not recorded."""

Stage = tuple[tuple[RecordedCall, ...], ...]
"""Shares of calls that may run at the same time."""


class NotRecordable(Exception):
    """A kernel does more than native calls."""


class ArrayStandIn(NDArrayOperatorsMixin):
    """An array's shape and address without its elements; C-contiguous.

    Args:
        place: address of the first element.
    """

    def __init__(self, place: int, shape: Sequence[int], dtype: Any) -> None:
        self.place = place
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)

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
        """The size in bytes."""
        return self.size * int(self.dtype.itemsize)

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes from one element to the next along each axis."""
        sizes = accumulate((1, *self.shape[:0:-1]), mul)
        return tuple(n * self.dtype.itemsize for n in sizes)[::-1][: self.ndim]

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self) -> Iterator[ArrayStandIn]:
        rows = (self[i : i + 1] for i in range(len(self)))
        return (ArrayStandIn(row.place, self.shape[1:], self.dtype) for row in rows)

    def reshape(self, *shape: Any) -> ArrayStandIn:
        """Return a stand-in for the same elements in another shape."""
        given = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        rest = math.prod(n for n in given if n >= 0)
        whole = [self.size // rest if n < 0 else n for n in given]
        return ArrayStandIn(self.place, whole, self.dtype)

    def __getitem__(self, index: Any) -> ArrayStandIn:
        """Return a stand-in for some neighbours along the first axis; other axes stay whole."""
        parts = list(index if isinstance(index, tuple) else (index,))
        if Ellipsis in parts:
            at = parts.index(Ellipsis)
            parts[at : at + 1] = [slice(None)] * (self.ndim - len(parts) + 1)
        if not all(isinstance(part, slice) for part in parts):
            _refuse()
        ranges = [range(*p.indices(n)) for p, n in zip(parts, self.shape, strict=False)]
        if any(r != range(n) for r, n in zip(ranges[1:], self.shape[1:], strict=False)):
            _refuse()
        first = ranges[0]
        if first.step != 1:
            _refuse()
        row = self.nbytes // self.shape[0] if self.shape[0] else 0
        rest = (len(first), *self.shape[1:])
        return ArrayStandIn(self.place + first.start * row, rest, self.dtype)

    def __getattr__(self, name: str) -> Any:
        _refuse()

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse()

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse()

    def __array_ufunc__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse()

    def __array_function__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse()


def _refuse() -> NoReturn:
    raise NotRecordable


class KernelRecording:
    """The native calls of a kernel, in stages.

    Args:
        threads: shares of a stage, at most.
        keeps_calls: False: only count the scratch memory, and compile nothing.

    Attributes:
        stages: run one after the other; threads take a stage's shares.
        scratch_nbytes: size of the scratch memory; its region is number 1.
        kept: arrays that calls point to, by identity.
    """

    def __init__(self, threads: int, keeps_calls: bool = True) -> None:
        self.stages: list[Stage] = []
        self.scratch_nbytes = 0
        self.kept: dict[int, Any] = {}
        self.threads = threads
        self.keeps_calls = keeps_calls
        self._between = CallRecorder(-1, self)  # calls between parts
        self._scratch: dict[tuple[str, int], int] = {}

    def record(self, run: Callable[[], None]) -> None:
        """Collect the calls of a kernel.

        Raises:
            NotRecordable: it does more than native calls.
        """
        with self._between:
            run()
            self._end_serial_stage()
        self._check_pointers()

    @property
    def is_shared(self) -> bool:
        """Whether a stage has several shares."""
        return any(len(stage) > 1 for stage in self.stages)

    def is_between_parts(self, recorder: CallRecorder) -> bool:
        """Return True if a recorder is not that of a share."""
        return recorder is self._between

    def add_parts(self, part: Callable[[int], None], parts: int, keeps_sizes: bool = True) -> None:
        """Append a stage of part(0) to part(parts - 1), which threads may run in any order."""
        self._end_serial_stage()
        count = max(1, min(self.threads, parts))
        shares: list[CallRecorder] = []
        for share in range(count):
            recorder = CallRecorder(share, self, keeps_sizes)
            with recorder:
                for i in range(parts * share // count, parts * (share + 1) // count):
                    part(i)
            shares.append(recorder)
        self.stages.append(tuple(tuple(share.calls) for share in shares if share.calls))

    def _end_serial_stage(self) -> None:
        if self._between.calls:
            self.stages.append((tuple(self._between.calls),))
            self._between.calls = []

    def scratch(self, slot: str, shape: tuple[int, ...], dtype: Any) -> ArrayStandIn:
        """Return a stand-in for scratch memory."""
        found = ArrayStandIn(0, shape, dtype)
        key = slot, found.nbytes
        if key not in self._scratch:
            self._scratch[key] = self.scratch_nbytes
            self.scratch_nbytes += align_up(max(found.nbytes, 1))
            if self.scratch_nbytes > MOST_SCRATCH:
                _refuse()
        found.place = region(1) + self._scratch[key]
        return found

    @property
    def slots(self) -> dict[str, int]:
        """The bytes of each slot of scratch memory (`scratch_memory.py`), outside a recording."""
        return largest_slots(self._scratch, self.threads)

    def _check_pointers(self) -> None:
        """Check that each pointer leads to a stand-in or to memory that the recording keeps.

        Raises:
            NotRecordable: another pointer; its memory may be freed before the calls run.
        """
        pointers = self.all_pointers
        real = pointers[(pointers != 0) & (region_number(pointers) == 0)]
        if not real.size:
            return
        # Pointers to empty arrays are never read.
        spans = sorted((address(a), address(a) + max(1, a.nbytes)) for a in self.kept.values())
        starts = np.array([0, *(start for start, _ in spans)], np.int64)
        reach = np.maximum.accumulate(np.array([0, *(stop for _, stop in spans)], np.int64))
        if (real >= reach[np.searchsorted(starts, real, side="right") - 1]).any():
            _refuse()

    @cached_property
    def all_pointers(self) -> np.ndarray[Any, Any]:
        """The pointers of all calls, in order."""
        found = array("q")
        for call in self.calls():
            found += call.table[: call.pointers]
        return np.array(found, np.int64)

    def calls(self) -> Iterator[RecordedCall]:
        """Iterate over the calls in order."""
        for stage in self.stages:
            for share in stage:
                yield from share


def largest_slots(used: Iterable[tuple[str, int]], threads: int) -> dict[str, int]:
    """Return the largest of the bytes of each slot. One thread has no shares with slots of their
    own."""
    found: dict[str, int] = {}
    for slot, nbytes in used:
        name = slot.partition(",")[0] if threads == 1 else slot
        found[name] = max(nbytes, found.get(name, 0))
    return found


def region(number: Any) -> Any:
    """Return the address of a stand-in: number 1 is scratch memory, operands follow."""
    return number * _REGION


def region_number(pointer: Any) -> Any:
    """Return the number of the stand-in that a pointer, or each of an array, leads to; 0 for a real
    address."""
    return (pointer + _REGION // 2) // _REGION


def operand_place(array: Any) -> int:
    """Return the address of an array for a native call. A recording keeps the array."""
    if isinstance(array, ArrayStandIn):
        return array.place
    recorder = current_recorder()
    if recorder is not None:
        recorder.keep(array)
    return address(array)


def as_contiguous(array: Any) -> Any:
    """Return the array itself if it is C-contiguous, as stand-ins are, else a copy."""
    return array if isinstance(array, ArrayStandIn) else np.ascontiguousarray(array)
