"""Arrays lent to another process of the same host, in memory that both see.

The lender copies an array once, into a slot of a segment of its own, and a message tells the slot.
The message may leave before the copy is complete, because its way takes as long. A word in front of
the slot says when it is. The borrower reads the array where it lies. When nothing refers to the
array any more, the borrower returns the slot by another word, without a message. A slot is lent
again only then, so a borrower that keeps an array never sees it overwritten. If no slot is free,
the array travels in a message.
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
from graphflow.runtime.wire.array_codec import SMALL_BYTES, Announce, BorrowedBuffer

Array = np.ndarray[Any, np.dtype[Any]]

LEND_MIN_BYTES = SMALL_BYTES  # smaller arrays are quicker in the message

_POOL_CAP = 4 << 30  # bytes of a lender's segment
_SHARE = 4  # of the free memory, a lender takes 1 / 4 at most
_SLOT_HEADER = 64  # bytes in front of a slot, a cache line with two words
_RETURNED, _WRITTEN = range(2)  # the last turn that was returned, and that was written
_TAIL_BYTES = 4 << 20
"""Bytes that are still to be copied when an array is announced.

Copying them takes 0.15 to 0.5 ms, as long as a sleeping processor needs to receive the message.
"""
PATIENCE = 0.02
"""Seconds for an announced array to be complete: a hundred times as long as it takes."""
_FORWARD_PATIENCE = 1.0  # the same where the array is copied into another one that is announced
_NAP = 1e-4  # seconds between two polls, after the first ones
_POOL_HEADER = 64  # bytes at the start; the first word says that the borrower has attached
_GROWTH = 1 << 20  # bytes taken at once for small slots


@dataclass
class _Slot:
    """A part of the segment that holds one array at a time."""

    start: int
    words: Array
    turn: int = 0
    is_written_to: bool = False  # the borrower may return it before

    @property
    def is_free(self) -> bool:
        """True if the borrower has returned the slot and nothing is being copied into it."""
        return int(self.words[_RETURNED]) == self.turn and not self.is_written_to


class SharedArrayPool:
    """The memory that one process lends to one other. Thread-safe."""

    def __init__(self, most: int = _POOL_CAP) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._segment: SharedMemorySegment | None = None
        self._slots: dict[int, list[_Slot]] = {}  # by capacity
        self._paces: dict[int, CopyStrategyTuner] = {}  # by the logarithm of a size
        self._reserved = self._used = _POOL_HEADER
        self._turn = 0

    def offer(self) -> str:
        """Return the token by which the peer attaches the memory; "" if this system has none.

        An offer reserves no memory until something is lent.
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
        """True if the peer has attached the memory."""
        return self._segment is not None and bool(self._segment.memory[0])

    def lend(self, raw: memoryview, announce: Announce | None = None) -> tuple[int, int] | None:
        """Copy bytes into a slot and return its start and its turn; None if no slot is free.

        An array that `keep` has made is in its slot already.

        Args:
            announce: Called with the same two numbers before the last bytes are copied. If it
                raises, the slot is free again.
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
        """Return a copy of `array` in a slot, for reading, which `lend` lends without copying.

        Return None if the array is not contiguous or no slot is free. If the copy is never lent,
        the slot is free again when nothing refers to it.
        """
        segment = self._segment
        if segment is None or not array.flags.c_contiguous:
            return None
        found = self.lend(array.reshape(-1).view(np.uint8).data)
        if found is None:
            return None
        kept = np.asarray(_RetainedLease(self, segment.memory, *found, array.nbytes))
        return kept.view(array.dtype).reshape(array.shape)

    def reserve(self, raw: memoryview) -> tuple[int, int, Callable[[], None]] | None:
        """As `lend`, but return the copying as a function, to be called once the peer was told.

        Return None for an array so large that the peer would wait for the copy, too.
        """
        slot = self._acquire_slot(raw.nbytes) if raw.nbytes <= _TAIL_BYTES else None
        if slot is None:
            return None
        return slot.start, slot.turn, partial(self._write_reserved, slot, raw)

    def _write_reserved(self, slot: _Slot, raw: memoryview) -> None:
        """Copy into a slot that `reserve` has returned."""
        try:
            self._write(slot, raw, past=False)
        finally:
            slot.is_written_to = False

    def _acquire_slot(self, nbytes: int) -> _Slot | None:
        """Return a free slot for so many bytes, or None."""
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
        """Return the tuner of copies of about that size."""
        kind = nbytes.bit_length()
        if (pace := self._paces.get(kind)) is None:
            pace = self._paces[kind] = CopyStrategyTuner(nbytes)
        return pace

    def _time_read(self, slot: _Slot, nbytes: int) -> float:
        """Return the seconds that reading a slot takes."""
        segment = self._segment
        began = time.perf_counter()
        if segment is not None:
            read(segment.memory[slot.start : slot.start + nbytes])
        return time.perf_counter() - began

    def _write(
        self, slot: _Slot, raw: memoryview, past: bool, start: int = 0, stop: int | None = None
    ) -> None:
        """Copy the bytes from `start` to `stop`, or all; with the last ones the slot is complete.

        With `past` the copy bypasses the caches.
        """
        segment = self._segment
        if segment is None:
            return  # the pool was closed meanwhile
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
        """Release the memory. The borrower keeps the arrays that it has."""
        with self._lock:
            if self._segment is not None:
                self._segment.close()
                self._segment = None
                self._slots.clear()

    def _find_slot(self, capacity: int) -> _Slot | None:
        """Return a free slot of that capacity, an old one or a new one, or None."""
        kept = self._slots.setdefault(capacity, [])
        for slot in kept:
            if slot.is_free:
                return slot
        if self._used + _SLOT_HEADER + capacity > self._most and all(
            s.is_free for s in self._all_slots()
        ):
            self._slots = {capacity: (kept := [])}  # sizes have changed: divide the segment anew
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
        """Reserve the segment's memory up to `end`."""
        if end <= self._reserved:
            return
        assert self._segment is not None
        end = min(max(end, self._reserved + _GROWTH), self._segment.memory.nbytes)
        self._segment.reserve(self._reserved, end - self._reserved)
        self._reserved = end


class SharedArrayReader:
    """The memory that one process borrows from one other.

    Raises:
        TransportError: The token leads to no such memory.
    """

    def __init__(self, token: str) -> None:
        self._memory = SharedMemorySegment.attach(token).memory
        if self._memory.nbytes < _POOL_HEADER:
            raise TransportError("the shared memory is too small to hold an array")
        self._place = address(self._memory)
        self._memory[0] = 1

    def defer_borrow(self, start: int, turn: int, nbytes: int) -> BorrowedBuffer:
        """Return a buffer that borrows the slot of a message once the message is believed."""
        return BorrowedBuffer(partial(self.borrow, start, turn, nbytes))

    def borrow(self, start: int, turn: int, nbytes: int) -> Array:
        """Return the bytes of a slot, where they lie, for reading.

        Ask `is_whole` first. The slot is returned when nothing refers to the array any more.

        Raises:
            ProtocolError: There is no such slot.
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
    """The base object of arrays that lie in a slot. Its end returns the slot."""

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
        """Return True if all bytes are there, after waiting some seconds for the last of them."""
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
                time.sleep(_NAP)  # the writer has no processor: leave it this one
        return True


class _RetainedLease(_Lease):
    """The base object of arrays that their own process keeps in a slot, and may lend."""

    __slots__ = ("_bytes", "_lender", "_start", "is_lent")

    def __init__(
        self, lender: SharedArrayPool, memory: Array, start: int, turn: int, nbytes: int
    ) -> None:
        place = address(memory) + start
        self._lender, self._start, self._bytes, self.is_lent = lender, start, (place, nbytes), False
        super().__init__(_slot_words(memory, start), place, turn, nbytes)

    def covers(self, lender: SharedArrayPool, raw: memoryview) -> bool:
        """Return True if `raw` is all of this array, and `lender` can lend it."""
        is_ours = lender is self._lender and not self.is_lent
        return is_ours and (address(raw.obj), raw.nbytes) == self._bytes

    def hand_over(self) -> tuple[int, int]:
        """Return the slot and its turn. From now on the borrower returns it."""
        self.is_lent = True
        return self._start, self._turn

    def __del__(self) -> None:
        if not self.is_lent:
            super().__del__()


def _lease_of(array: Any) -> _Lease | None:
    """Return the lease that an array refers to, if it lies in a slot."""
    while isinstance(array, np.ndarray):
        array = array.base
    return array if isinstance(array, _Lease) else None


def is_whole(array: Any, seconds: float = PATIENCE) -> bool:
    """Return True if all of an array is there. Ask before reading an array that may be lent.

    Args:
        seconds: How long to wait for the last bytes of an array that another process lends.
    """
    loan = _lease_of(array)
    return loan is None or loan.is_whole(seconds)


def require_whole(array: Any) -> None:
    """Wait for the last bytes of an array that is to be sent on.

    Raises:
        TransportError: They do not come.
    """
    if not is_whole(array, _FORWARD_PATIENCE):
        raise TransportError("an array that is to be sent on was announced, but is not complete")


def _slot_words(memory: Array, start: int) -> Array:
    """Return the words in front of a slot."""
    return memory[start - _SLOT_HEADER :][:16].view(np.uint64)


def _slot_capacity(nbytes: int) -> int:
    """Return the size of a slot for an array of `nbytes`.

    It is a multiple of an eighth of a power of two, so that similar sizes share slots.
    """
    step = max(4096, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
