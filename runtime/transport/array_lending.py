"""Loans: arrays that a session and its workers lend each other on a host, instead of sending
them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from graphflow.runtime.transport.shared_memory_arrays import LEND_MIN_BYTES, SharedArrayPool
from graphflow.runtime.wire.frame_codec import Announce, Lend, lend_array
from graphflow.runtime.wire.messages import Array, Chunk, Key

_MAX_DEFERRED = 8  # arrays that are copied after their receivers were told, who wait for them then
_MAX_OFFERS = 10  # of memory, before the other party counts as one of another host

DeferredCopies = deque[Callable[[], None]]
"""What copies arrays of which their receivers are told before."""


class PeerSharedMemory:
    """What is lent to one other party.

    Args:
        offer: offers it memory, by a token.
        deferred: where what is to be copied later is put, for who calls that.
    """

    def __init__(
        self, offer: Callable[[str], None], deferred: DeferredCopies | None = None
    ) -> None:
        self.pool = SharedArrayPool()
        self._offer = offer
        self._offers = _MAX_OFFERS
        self._deferred: DeferredCopies = deque() if deferred is None else deferred

    def lend(
        self, purpose: str, request: int, name: Key, array: Array, *, defer: bool = False
    ) -> Array | Chunk:
        """An array as it goes to the other party: lent if it is worth it and that is of this host,
        which is found out by an offer.

        Args:
            defer: whether it may be copied after the other party has been told: the array stays as
                it is until the operation ends.
        """
        if array.nbytes < LEND_MIN_BYTES:
            return array
        if self.pool.is_attached:
            how: Lend = self.pool.lend
            if defer and len(self._deferred) < _MAX_DEFERRED:
                how = self._defer_copy
            return lend_array(purpose, request, name, array, how) or array
        if self._offers and (token := self.pool.offer()):
            self._offers -= 1
            self._offer(token)
        return array

    def keep(self, array: Array) -> Array | None:
        """A copy of an array where `lend` finds it in its place; None if it would not lend it."""
        is_worth_it = array.nbytes >= LEND_MIN_BYTES and self.pool.is_attached
        return self.pool.keep(array) if is_worth_it else None

    def _defer_copy(self, raw: memoryview, announce: Announce | None) -> tuple[int, int] | None:
        """Where bytes are going to be lent: they are copied when all have been told, who wake up
        meanwhile."""
        found = self.pool.reserve(raw)
        if found is None:
            return self.pool.lend(raw, announce)
        start, turn, write = found
        self._deferred.append(write)
        return start, turn

    def close(self) -> None:
        """Let go of the memory; who borrows keeps what it has."""
        self.pool.close()
