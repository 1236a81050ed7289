"""Arrays lent to another process of the same host, in memory that both see.

The lender writes an array once, into a slot of a segment of its own, and a message says which slot
it is. The borrower reads it where it lies; when nothing there refers to it any more, the slot is
returned by a word in front of it, without a message. A slot is lent again only then, so what a
borrower does not let go of is never written over; what has no room goes another way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphflow.errors import ProtocolError, TransportError
from graphflow.runtime.transport.bypass import copy
from graphflow.runtime.transport.segment import Segment, is_possible, memory_left
from graphflow.runtime.wire import SMALL_BYTES

Array = np.ndarray[Any, np.dtype[Any]]

LENT_FROM = SMALL_BYTES  # smaller arrays are quicker in the message
_MOST = 4 << 30  # bytes that one lender may lend
_SHARE = 4  # and at most this part of the memory that was free: 1 / 4
_HEAD = 64  # bytes: the word that says that a slot is returned, with a cache line of its own
_BOARD = 64  # bytes at the start; the first word says that the borrower has attached
_GROWTH = 1 << 20  # bytes taken at once for small slots


@dataclass
class _Slot:
    start: int
    returned: Array  # one word: the last turn that was returned
    turn: int = 0

    @property
    def free(self) -> bool:
        return int(self.returned[0]) == self.turn


class Lender:
    """What one process lends to one other. Safe for threads."""

    def __init__(self, most: int = _MOST) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._segment: Segment | None = None
        self._slots: dict[int, list[_Slot]] = {}  # by capacity
        self._reserved = self._used = _BOARD
        self._turn = 0

    def offer(self) -> str:
        """The token by which the other process attaches; "" where it cannot.

        It costs nothing until something is lent.
        """
        with self._lock:
            if self._segment is None and is_possible():
                self._most = min(self._most, memory_left() // _SHARE)
                try:
                    self._segment = Segment.create(_BOARD + self._most, empty=True)
                    self._segment.reserve(0, _BOARD)
                except TransportError:
                    return ""
            return self._segment.token if self._segment is not None else ""

    @property
    def accepted(self) -> bool:
        """Whether the other process has attached."""
        return self._segment is not None and bool(self._segment.memory[0])

    def lend(self, raw: memoryview) -> tuple[int, int] | None:
        """Copies bytes into a slot: where it is, and which turn of it; None if there is no room."""
        if not self.accepted:
            return None
        with self._lock:
            assert self._segment is not None
            slot = self._slot(_capacity(raw.nbytes))
            if slot is None:
                return None
            self._turn += 1
            slot.turn = self._turn
        place = self._segment.memory[slot.start : slot.start + raw.nbytes]
        copy(place, np.frombuffer(raw, np.uint8))
        return slot.start, slot.turn

    @property
    def lent(self) -> int:
        """Bytes of the slots that are not returned."""
        with self._lock:
            return sum(
                size for size, slots in self._slots.items() for slot in slots if not slot.free
            )

    def close(self) -> None:
        """Lets go of the memory; a borrower keeps what it has."""
        with self._lock:
            if self._segment is not None:
                self._segment.close()
                self._segment = None
                self._slots.clear()

    def _slot(self, capacity: int) -> _Slot | None:
        kept = self._slots.setdefault(capacity, [])
        for slot in kept:
            if slot.free:
                return slot
        if self._used + _HEAD + capacity > self._most and all(s.free for s in self._all()):
            self._slots = {capacity: (kept := [])}  # sizes have changed: cut it up anew
            self._used = _BOARD
        if self._used + _HEAD + capacity > self._most:
            return None
        start = self._used + _HEAD
        try:
            self._reserve(start + capacity)
        except TransportError:
            return None
        assert self._segment is not None
        self._used = start + capacity
        slot = _Slot(start, self._segment.memory[start - _HEAD :][:8].view(np.uint64))
        slot.returned[0] = 0
        kept.append(slot)
        return slot

    def _all(self) -> Iterator[_Slot]:
        for slots in self._slots.values():
            yield from slots

    def _reserve(self, end: int) -> None:
        if end <= self._reserved:
            return
        assert self._segment is not None
        end = min(max(end, self._reserved + _GROWTH), self._segment.memory.nbytes)
        self._segment.reserve(self._reserved, end - self._reserved)
        self._reserved = end


class Borrower:
    """What one process borrows from one other.

    Raises:
        TransportError: the token leads nowhere.
    """

    def __init__(self, token: str) -> None:
        self._memory = Segment.attach(token).memory
        if self._memory.nbytes < _BOARD:
            raise TransportError("the shared memory has no room for anything")
        self._memory[0] = 1

    def borrow(self, start: int, turn: int, nbytes: int) -> Array:
        """The bytes of a slot, where they lie, for reading; the slot is returned when nothing
        refers to them any more.

        Raises:
            ProtocolError: there is no such slot.
        """
        if start % _HEAD or not _BOARD + _HEAD <= start <= self._memory.nbytes - nbytes:
            raise ProtocolError(f"no slot of {nbytes} bytes begins at byte {start}")
        if nbytes < 1 or not 0 < turn < 1 << 63:
            raise ProtocolError(f"a slot of {nbytes} bytes has no turn {turn}")
        return np.asarray(_Loan(self._memory, start, turn, nbytes))


class _Loan:
    """What arrays refer to that lie in a slot: its end returns the slot."""

    __slots__ = ("__array_interface__", "_returned", "_turn")

    def __init__(self, memory: Array, start: int, turn: int, nbytes: int) -> None:
        self._turn = turn
        self._returned = memory[start - _HEAD :][:8].view(np.uint64)
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (memory.ctypes.data + start, True),  # for reading only
        }

    def __del__(self) -> None:
        self._returned[0] = self._turn


def _capacity(nbytes: int) -> int:
    """The size of a slot: an eighth of a power of two, so that similar sizes share slots."""
    step = max(4096, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
