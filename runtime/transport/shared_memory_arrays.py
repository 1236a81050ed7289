"""Arrays lent to another process of the same host, in memory that both see.

The lender writes an array once, into a slot of a segment of its own, and a message says which slot
it is. It may say so before the last of the array is written, for the message takes as long, and
what the receiver does before it reads: a word in front of the slot tells when it is whole. The
borrower reads it where it lies; when nothing there refers to it any more, another word returns the
slot, without a message. A slot is lent again
only then, so what a borrower does not let go of is never written over; what has no room goes
another way.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ProtocolError, TransportError
from graphflow.ops.kernels.jit.array_address import address
from graphflow.runtime.polling.wakeup import CROWDED
from graphflow.runtime.transport.nontemporal_copy import BLOCK_BYTES, CopyStrategyTuner, copy, read
from graphflow.runtime.transport.shared_memory import (
    SharedMemorySegment,
    available_memory,
    has_shared_memory,
)
from graphflow.runtime.wire.frame_codec import SMALL_BYTES, Announce, BorrowedBuffer

Array = np.ndarray[Any, np.dtype[Any]]

LEND_MIN_BYTES = SMALL_BYTES  # smaller arrays are quicker in the message

_POOL_CAP = 4 << 30  # bytes that one lender may lend
_SHARE = 4  # and at most this part of the memory that was free: 1 / 4
_SLOT_HEADER = 64  # bytes in front of a slot, a cache line: two words
_RETURNED, _WRITTEN = range(2)  # the last turn that was returned, and that was written
_TAIL_BYTES = 4 << 20
"""Bytes that are still to be written when an array is announced: that takes 0.15 to 0.5 ms, and as
long until a processor that sleeps has taken the message."""
PATIENCE = 0.02
"""Seconds for an array to become whole that was announced: a hundred times as long as it takes."""
_FORWARD_PATIENCE = (
    1.0  # seconds of the same, for who has announced a copy of such an array: an echo
)
_NAP = 1e-4  # seconds between two looks at whether they are, after the first ones
_POOL_HEADER = 64  # bytes at the start; the first word says that the borrower has attached
_GROWTH = 1 << 20  # bytes taken at once for small slots


@dataclass
class _Slot:
    start: int
    words: Array
    turn: int = 0
    is_written_to: bool = False  # the borrower may have returned it before

    @property
    def is_free(self) -> bool:
        return int(self.words[_RETURNED]) == self.turn and not self.is_written_to


class SharedArrayPool:
    """What one process lends to one other. Safe for threads."""

    def __init__(self, most: int = _POOL_CAP) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._segment: SharedMemorySegment | None = None
        self._slots: dict[int, list[_Slot]] = {}  # by capacity
        self._paces: dict[int, CopyStrategyTuner] = {}  # by the logarithm of a size
        self._reserved = self._used = _POOL_HEADER
        self._turn = 0

    def offer(self) -> str:
        """The token by which the other process attaches; "" where it cannot.

        It costs nothing until something is lent.
        """
        with self._lock:
            if self._segment is None and has_shared_memory():
                self._most = min(self._most, available_memory() // _SHARE)
                try:
                    self._segment = SharedMemorySegment.create(
                        _POOL_HEADER + self._most, empty=True
                    )
                    self._segment.reserve(0, _POOL_HEADER)
                except TransportError:
                    return ""
            return self._segment.token if self._segment is not None else ""

    @property
    def is_attached(self) -> bool:
        """Whether the other process has attached."""
        return self._segment is not None and bool(self._segment.memory[0])

    def lend(self, raw: memoryview, announce: Announce | None = None) -> tuple[int, int] | None:
        """Copies bytes into a slot: where it is, and which turn of it; None if there is no room.
        What `keep` has made is there already.

        Args:
            announce: is told the same, while the last bytes are still to be copied; what it raises
                takes the slot back.
        """
        kept = _lease_of(raw.obj)
        if isinstance(kept, _RetainedLease) and kept.covers(self, raw):
            return kept.hand_over()
        slot = self._acquire_slot(raw.nbytes)
        if slot is None:
            return None
        pace = self._tuner_for(raw.nbytes)
        past, first = pace.nontemporal, 0
        try:
            if announce is not None:
                first = max(0, raw.nbytes - _TAIL_BYTES) // BLOCK_BYTES * BLOCK_BYTES
                if first:
                    self._write(slot, raw, past, 0, first)
                announce(slot.start, slot.turn)
            began = time.perf_counter()
            self._write(slot, raw, past, first)
            copied = time.perf_counter()
            seconds = self._time_read(slot, raw.nbytes) if pace.is_trial else 0.0
            pace.record(past, (copied - began) / (raw.nbytes - first), seconds / raw.nbytes)
        except BaseException:
            slot.words[_RETURNED] = slot.turn
            raise
        finally:
            slot.is_written_to = False
        return slot.start, slot.turn

    def keep(self, array: Array) -> Array | None:
        """A copy of a contiguous array in a slot, for reading, which can be lent as it is; None for
        others, and if there is no room. If it is not lent, its end returns the slot."""
        segment = self._segment
        if segment is None or not array.flags.c_contiguous:
            return None
        found = self.lend(array.reshape(-1).view(np.uint8).data)
        if found is None:
            return None
        kept = np.asarray(_RetainedLease(self, segment.memory, *found, array.nbytes))
        return kept.view(array.dtype).reshape(array.shape)

    def reserve(self, raw: memoryview) -> tuple[int, int, Callable[[], None]] | None:
        """As `lend`, with what does the copying: to be called once the borrower has been told. None
        for what would keep the borrower waiting, too."""
        slot = self._acquire_slot(raw.nbytes) if raw.nbytes <= _TAIL_BYTES else None
        if slot is None:
            return None
        return slot.start, slot.turn, partial(self._write_reserved, slot, raw)

    def _write_reserved(self, slot: _Slot, raw: memoryview) -> None:
        """Copies what was promised."""
        try:
            self._write(slot, raw, past=False)
        finally:
            slot.is_written_to = False

    def _acquire_slot(self, nbytes: int) -> _Slot | None:
        """A slot for so many bytes."""
        if not self.is_attached:
            return None
        with self._lock:
            assert self._segment is not None
            slot = self._find_slot(_slot_capacity(nbytes))
            if slot is not None:
                self._turn += 1
                slot.turn, slot.is_written_to = self._turn, True
        return slot

    def _tuner_for(self, nbytes: int) -> CopyStrategyTuner:
        """Of copies of about that size."""
        kind = nbytes.bit_length()
        if (pace := self._paces.get(kind)) is None:
            pace = self._paces[kind] = CopyStrategyTuner(nbytes)
        return pace

    def _time_read(self, slot: _Slot, nbytes: int) -> float:
        """Seconds that it takes to read a slot."""
        segment = self._segment
        began = time.perf_counter()
        if segment is not None:
            read(segment.memory[slot.start : slot.start + nbytes])
        return time.perf_counter() - began

    def _write(
        self, slot: _Slot, raw: memoryview, past: bool, start: int = 0, stop: int | None = None
    ) -> None:
        """Copies bytes, all of them or up to `stop`; with the last ones the slot is whole."""
        segment = self._segment
        if segment is None:
            return  # closed meanwhile
        require_whole(raw.obj)
        place = segment.memory[slot.start : slot.start + raw.nbytes]
        copy(place, np.frombuffer(raw, np.uint8), past, start, stop)
        if stop is None:
            slot.words[_WRITTEN] = slot.turn

    @property
    def lent_bytes(self) -> int:
        """Bytes of the slots that are not returned."""
        with self._lock:
            return sum(
                size for size, slots in self._slots.items() for slot in slots if not slot.is_free
            )

    def close(self) -> None:
        """Lets go of the memory; a borrower keeps what it has."""
        with self._lock:
            if self._segment is not None:
                self._segment.close()
                self._segment = None
                self._slots.clear()

    def _find_slot(self, capacity: int) -> _Slot | None:
        kept = self._slots.setdefault(capacity, [])
        for slot in kept:
            if slot.is_free:
                return slot
        if self._used + _SLOT_HEADER + capacity > self._most and all(
            s.is_free for s in self._all_slots()
        ):
            self._slots = {capacity: (kept := [])}  # sizes have changed: cut it up anew
            self._used = _POOL_HEADER
        if self._used + _SLOT_HEADER + capacity > self._most:
            return None
        start = self._used + _SLOT_HEADER
        try:
            self._reserve_memory(start + capacity)
        except TransportError:
            return None
        assert self._segment is not None
        self._used = start + capacity
        slot = _Slot(start, _slot_words(self._segment.memory, start))
        slot.words[:] = 0
        kept.append(slot)
        return slot

    def _all_slots(self) -> Iterator[_Slot]:
        for slots in self._slots.values():
            yield from slots

    def _reserve_memory(self, end: int) -> None:
        if end <= self._reserved:
            return
        assert self._segment is not None
        end = min(max(end, self._reserved + _GROWTH), self._segment.memory.nbytes)
        self._segment.reserve(self._reserved, end - self._reserved)
        self._reserved = end


class SharedArrayReader:
    """What one process borrows from one other.

    Raises:
        TransportError: the token leads nowhere.
    """

    def __init__(self, token: str) -> None:
        self._memory = SharedMemorySegment.attach(token).memory
        if self._memory.nbytes < _POOL_HEADER:
            raise TransportError("the shared memory has no room for anything")
        self._place = address(self._memory)
        self._memory[0] = 1

    def defer_borrow(self, start: int, turn: int, nbytes: int) -> BorrowedBuffer:
        """The bytes of a slot of which a message tells."""
        return BorrowedBuffer(partial(self.borrow, start, turn, nbytes))

    def borrow(self, start: int, turn: int, nbytes: int) -> Array:
        """The bytes of a slot, where they lie, for reading once `is_whole`; the slot is returned
        when nothing refers to them any more.

        Raises:
            ProtocolError: there is no such slot.
        """
        if (
            start % _SLOT_HEADER
            or not _POOL_HEADER + _SLOT_HEADER <= start <= self._memory.nbytes - nbytes
        ):
            raise ProtocolError(f"no slot of {nbytes} bytes begins at byte {start}")
        if nbytes < 1 or not 0 < turn < 1 << 63:
            raise ProtocolError(f"a slot of {nbytes} bytes has no turn {turn}")
        return np.asarray(
            _Lease(_slot_words(self._memory, start), self._place + start, turn, nbytes)
        )


class _Lease:
    """What arrays refer to that lie in a slot: its end returns the slot."""

    __slots__ = ("__array_interface__", "_turn", "_words")

    def __init__(self, words: Array, place: int, turn: int, nbytes: int) -> None:
        self._turn = turn
        self._words = words  # and with them the memory
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (place, True),  # for reading only
        }

    def __del__(self) -> None:
        self._words[_RETURNED] = self._turn

    def is_whole(self, seconds: float) -> bool:
        """Whether all bytes are there, after waiting for the last of them."""
        words, turn = self._words, self._turn
        if int(words[_WRITTEN]) >= turn:
            return True
        began = time.monotonic()
        while int(words[_WRITTEN]) < turn:
            waited = time.monotonic() - began
            if waited > seconds:
                return False
            if waited < CROWDED:
                os.sched_yield()
            else:
                time.sleep(_NAP)  # the writer has no processor: it may want this one
        return True


class _RetainedLease(_Lease):
    """What arrays refer to that their own process keeps in a slot, and may lend."""

    __slots__ = ("_bytes", "_lender", "_start", "is_lent")

    def __init__(
        self, lender: SharedArrayPool, memory: Array, start: int, turn: int, nbytes: int
    ) -> None:
        place = address(memory) + start
        self._lender, self._start, self._bytes, self.is_lent = lender, start, (place, nbytes), False
        super().__init__(_slot_words(memory, start), place, turn, nbytes)

    def covers(self, lender: SharedArrayPool, raw: memoryview) -> bool:
        """Whether these are its bytes, which that one can lend."""
        is_ours = lender is self._lender and not self.is_lent
        return is_ours and (address(raw.obj), raw.nbytes) == self._bytes

    def hand_over(self) -> tuple[int, int]:
        """The slot and its turn: from now on the borrower returns it."""
        self.is_lent = True
        return self._start, self._turn

    def __del__(self) -> None:
        if not self.is_lent:
            super().__del__()


def _lease_of(array: Any) -> _Lease | None:
    """What an array refers to, if it lies in a slot."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, _Lease) else None


def is_whole(array: Any, seconds: float = PATIENCE) -> bool:
    """Whether all of an array is there, after waiting some seconds for the last of it, where it is
    one that another process lends: to be asked before it is read."""
    loan = _lease_of(array)
    return loan is None or loan.is_whole(seconds)


def require_whole(array: Any) -> None:
    """Waits for the last of an array that is to be sent on.

    Raises:
        TransportError: it does not come.
    """
    if not is_whole(array, _FORWARD_PATIENCE):
        raise TransportError("an array to be sent on has not come to its end")


def _slot_words(memory: Array, start: int) -> Array:
    """What stands in front of a slot."""
    return memory[start - _SLOT_HEADER :][:16].view(np.uint64)


def _slot_capacity(nbytes: int) -> int:
    """The size of a slot: an eighth of a power of two, so that similar sizes share slots."""
    step = max(4096, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
