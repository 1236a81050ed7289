"""Array lending: a session and its workers share arrays on a host instead of sending them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from graphflow.runtime.transport.shared_memory_arrays import LEND_MIN_BYTES, SharedArrayPool
from graphflow.runtime.wire.array_codec import Announce, Lend, lend_array
from graphflow.runtime.wire.messages import Array, Chunk
from graphflow.runtime.wire.step_values import Key

_MAX_DEFERRED = 8  # copies after the receivers were told: they wait for these
_MAX_OFFERS = 10  # of memory, before the peer counts as one of another host

DeferredCopies = deque[Callable[[], None]]
"""Copies into shared memory that run after their receivers were told of the arrays."""


class PeerSharedMemory:
    """The arrays that are lent to one peer.

    Args:
        offer: Sends the peer a token, by which it can attach the memory.
        deferred: Where copies are put that are to run later, for the caller to run.
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
        """Return the array, or the `Chunk` that tells where it lies in shared memory.

        It is lent if it is large enough and the peer has attached the memory. If the peer has not,
        the memory is offered, which shows whether the peer is on this host.

        Args:
            defer: The copy may run after the peer was told. The array must not change until the
                operation ends.
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
        """Return a copy of `array` that `lend` finds in place; None if `lend` would not lend it."""
        is_worth_it = array.nbytes >= LEND_MIN_BYTES and self.pool.is_attached
        return self.pool.keep(array) if is_worth_it else None

    def _defer_copy(self, raw: memoryview, announce: Announce | None) -> tuple[int, int] | None:
        """Reserve a slot and queue the copy into it.

        The receivers wake up meanwhile.
        """
        found = self.pool.reserve(raw)
        if found is None:
            return self.pool.lend(raw, announce)
        start, turn, write = found
        self._deferred.append(write)
        return start, turn

    def close(self) -> None:
        """Release the memory. The peer keeps the arrays that it has borrowed."""
        self.pool.close()
