"""Loans: arrays that a session and its workers lend each other on a host, instead of sending
them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from graphflow.runtime.transport.shared_memory_arrays import LENT_FROM, SharedArrayPool
from graphflow.runtime.wire.frame_codec import Announce, Lend, lent
from graphflow.runtime.wire.messages import Array, Chunk, Key

_PROMISES = 8  # arrays that are copied after their receivers were told, who wait for them then
_OFFERS = 10  # of memory, before the other party counts as one of another host

Promises = deque[Callable[[], None]]
"""What copies arrays of which their receivers are told before."""


class PeerSharedMemory:
    """What is lent to one other party.

    Args:
        offer: offers it memory, by a token.
        promised: where what is to be copied later is put, for who calls that.
    """

    def __init__(self, offer: Callable[[str], None], promised: Promises | None = None) -> None:
        self.lender = SharedArrayPool()
        self._offer = offer
        self._offers = _OFFERS
        self._promised: Promises = deque() if promised is None else promised

    def lend(
        self, purpose: str, request: int, name: Key, array: Array, *, later: bool = False
    ) -> Array | Chunk:
        """An array as it goes to the other party: lent if it is worth it and that is of this host,
        which is found out by an offer.

        Args:
            later: whether it may be copied after the other party has been told: the array stays as
                it is until the operation ends.
        """
        if array.nbytes < LENT_FROM:
            return array
        if self.lender.accepted:
            how: Lend = self.lender.lend
            if later and len(self._promised) < _PROMISES:
                how = self._promise
            return lent(purpose, request, name, array, how) or array
        if self._offers and (token := self.lender.offer()):
            self._offers -= 1
            self._offer(token)
        return array

    def keep(self, array: Array) -> Array | None:
        """A copy of an array where `lend` finds it in its place; None if it would not lend it."""
        is_worth_it = array.nbytes >= LENT_FROM and self.lender.accepted
        return self.lender.keep(array) if is_worth_it else None

    def _promise(self, raw: memoryview, announce: Announce | None) -> tuple[int, int] | None:
        """Where bytes are going to be lent: they are copied when all have been told, who wake up
        meanwhile."""
        found = self.lender.promise(raw)
        if found is None:
            return self.lender.lend(raw, announce)
        start, turn, write = found
        self._promised.append(write)
        return start, turn

    def close(self) -> None:
        """Let go of the memory; who borrows keeps what it has."""
        self.lender.close()
