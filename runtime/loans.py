"""Loans: arrays that a session lends to its workers on this host, instead of sending them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from graphflow.runtime.messages import Array, Chunk, Key
from graphflow.runtime.protocol.orders import Offer
from graphflow.runtime.transport.lending import LENT_FROM, Lender
from graphflow.runtime.wire import Announce, Lend, lent

_PROMISES = 8  # arrays that are copied after their receivers were told, who wait for them then
_OFFERS = 10  # of memory to a worker, before it counts as one of another host


class Loans:
    """What a session lends.

    Args:
        workers: how many there are.
        offer: offers memory to one of them.

    Attributes:
        promised: what copies arrays of which their receivers are told before.
    """

    def __init__(self, workers: int, offer: Callable[[Offer], None]) -> None:
        self.promised: deque[Callable[[], None]] = deque()
        self._lenders = [Lender() for _ in range(workers)]
        self._offers = [_OFFERS for _ in range(workers)]
        self._offer = offer

    def lend(
        self, worker: int, purpose: str, request: int, name: Key, array: Array, later: bool
    ) -> Array | Chunk:
        """An array for a worker, lent if it is worth it and the worker is of this host, which is
        found out by an offer.

        Args:
            later: whether it may be copied after the worker has been told: the array stays as it is
                until the operation ends.
        """
        if array.nbytes < LENT_FROM:
            return array
        lender = self._lenders[worker]
        if lender.accepted:
            soon = later and len(self.promised) < _PROMISES
            how: Lend = partial(self._promise, lender) if soon else lender.lend
            return lent(purpose, request, name, array, how) or array
        if self._offers[worker] and (token := lender.offer()):
            self._offers[worker] -= 1
            self._offer(Offer(worker, token))
        return array

    def _promise(
        self, lender: Lender, raw: memoryview, announce: Announce | None
    ) -> tuple[int, int] | None:
        """Where bytes are going to be lent: they are copied when all have been told, who wake up
        meanwhile."""
        found = lender.promise(raw)
        if found is None:
            return lender.lend(raw, announce)
        start, turn, write = found
        self.promised.append(write)
        return start, turn

    def keep_promises(self) -> None:
        """Copy what was promised."""
        while self.promised:
            self.promised.popleft()()

    def close(self) -> None:
        """Let go of the memory; who borrows keeps what it has."""
        for lender in self._lenders:
            lender.close()
