"""The ways between workers: tensors of a session from this worker straight to another.

A link keeps what its peer has not acknowledged, and sends it again when asked. Each of two workers
has a connection to the other's listener, so what the peer says of this link comes in there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import inf
from typing import Any

from graphflow.errors import TransportError
from graphflow.runtime.protocol.reliable_stream import Letter, Outbound, sealed
from graphflow.runtime.protocol.worker_events import Heard
from graphflow.runtime.security.receive_accounting import UNFRAMED_CAP
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.transport.bulk_tcp import BulkChannel, BulkSender
from graphflow.runtime.transport.shared_memory_arrays import (
    LEND_MIN_BYTES,
    SharedArrayPool,
    require_whole,
)
from graphflow.runtime.transport.unix_socket import UnixSocketChannel
from graphflow.runtime.wire.frame_codec import (
    encode,
    encode_small,
    lend_array,
    may_be_remote,
    split_array,
)
from graphflow.runtime.wire.messages import Ack, Array, Chunk, Key, Share, Tensor

_OFFER_SECONDS = 0.1  # between two offers of memory that were not taken
_OFFERS = 2  # of memory, before a pipe is offered
_SLICE = 0.05  # seconds between two looks at whether a step was cancelled
_PATIENCE = 4  # times that a peer is asked before anybody else is told

_FLOODED = f"more than {UNFRAMED_CAP >> 20} MiB came over a link, where nothing is to come"

_log = Log("graphflow.security")


class Link:
    """The way to one other worker: a connection and the numbering of what goes over it.

    Args:
        lane: beside it, for short messages; it has no pipe then.
        outlet: where it may get a pipe from.
        sealed: what goes over the connection is encrypted.
    """

    def __init__(
        self,
        channel: Any,
        outbound: Outbound,
        lane: UnixSocketChannel | None = None,
        outlet: BulkSender | None = None,
        *,
        sealed: bool = False,
    ) -> None:
        self._channel = channel
        self._beside: UnixSocketChannel | BulkChannel | None = lane
        self._outlet = outlet if lane is None else None
        self._outbound = outbound
        self._lock = channel.lock
        self._changed = threading.Condition(channel.lock)
        self._lender = SharedArrayPool()
        # A piece is encrypted here while the one before it is decrypted there.
        self._far = sealed or may_be_remote(channel.address)
        self._offered = -inf  # when, last
        self._offers = 0
        self._asked = 0  # times since the peer last took anything, in one step
        self._last: tuple[int, Key] = (0, "")  # step and edge of what it was to take last

    def send(
        self,
        purpose: str,
        number: int,
        name: Key,
        array: Array,
        owned: bool,
        go_on: Callable[[], bool],
    ) -> None:
        """Sends an array, as chunks; waits while the peer has not acknowledged enough of what was
        sent before, and `go_on`. What is not `owned` is copied until it is acknowledged.

        Raises:
            TransportError: `go_on` said to stop.
        """
        step = number if purpose == "edge" else 0
        if step != self._last[0]:
            self._asked = 0  # what ended the step before may have passed
        self._last = (step, name)
        inside = encode_small(name, array) if purpose == "edge" else None
        if inside is not None:
            with self._lock:
                if not self._outbound.room(0):
                    self._await_room(0, go_on)
                self._put(self._outbound.post(Tensor(inside), step))
            return
        if array.nbytes >= LEND_MIN_BYTES and self._lend(purpose, number, name, array, step, go_on):
            return
        require_whole(array)
        checked = not isinstance(self._beside, BulkChannel)  # which seals what it carries itself
        for chunk, data in split_array(
            purpose, number, name, array, checked=checked, far=self._far
        ):
            kept = data if owned else memoryview(bytes(data))
            with self._lock:
                self._await_room(kept.nbytes, go_on)
                self._put(self._outbound.post(chunk, step, kept))

    def _lend(
        self,
        purpose: str,
        number: int,
        name: Key,
        array: Array,
        step: int,
        go_on: Callable[[], bool],
    ) -> bool:
        """Sends where the array lies in memory that the peer sees, if there is such."""
        if not self._lender.is_attached:
            self.offer()
            return False

        def announce(chunk: Chunk) -> None:
            with self._lock:
                self._await_room(0, go_on)
                self._put(self._outbound.post(chunk, step))

        return lend_array(purpose, number, name, array, self._lender.lend, announce) is not None

    def has_room(self, nbytes: int) -> bool:
        """Whether an array of so many bytes can be sent without waiting for the peer."""
        with self._lock:
            return self._outbound.room(nbytes)

    def offer(self) -> None:
        """Offers the peer memory to share, unless it was asked a moment ago; and a pipe, where it
        does not take that."""
        now = time.monotonic()
        if self._lender.is_attached or now < self._offered + _OFFER_SECONDS:
            return
        self._offered = now
        self._offers += 1
        tokens = [self._lender.offer()]
        if self._outlet is not None and (self._offers > _OFFERS or not tokens[0]):
            tokens.append(self._outlet.offer())
        with self._lock:
            for token in filter(None, tokens):
                self._put(self._outbound.tell(Share(token)))

    def heed(self, heard: Heard) -> None:
        """Takes note of what the peer said. Never waits."""
        with self._lock:
            self._outbound.received = heard.received
            if self._outbound.acknowledge(heard.acknowledged):
                self._asked = 0
                self._changed.notify_all()
            if heard.told is not None:
                self._put(self._outbound.tell(heard.told))
            if heard.wanted is not None:
                for letter in self._outbound.again(heard.wanted):
                    self._put(letter)

    @property
    def repeats(self) -> int:
        """Messages that were sent once more."""
        return self._outbound.repeats

    def beat(self, *, owed: bool) -> None:
        """Tells the peer what was sent, if it has not acknowledged that, and what was received."""
        with self._lock:
            if owed or self._outbound.pending:
                self._asked += self._outbound.pending > 0
                self._put(self._outbound.tell(Ack(asks=True)))

    def look(self) -> None:
        """Looks at what comes over the connection, where nothing should: who sends much there ends
        it."""
        with self._lock:
            self._channel.read_link_changes()
            if self._channel.count_unframed(time.monotonic()) > UNFRAMED_CAP:
                _log.tell("connection.dropped", address=self._channel.address, reason=_FLOODED)
                self._channel.reset()

    def untaken(self) -> tuple[int, tuple[int, Key]] | None:
        """How often the peer was asked in vain what it has of ours, and the step and the edge of
        the last of that; None where it may just be slow."""
        if self._asked <= _PATIENCE or not self._outbound.pending:
            return None
        return self._asked, self._last

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()
        if self._outlet is not None:
            self._outlet.close()
        elif self._beside is not None:
            self._beside.close()
        self._lender.close()

    def _await_room(self, nbytes: int, go_on: Callable[[], bool]) -> None:
        while not self._outbound.room(nbytes):
            if not go_on():
                raise TransportError(f"{self._channel.address} takes no more messages")
            self._changed.wait(_SLICE)

    def _put(self, letter: Letter) -> None:
        frames = _frames(letter)
        known = self._outbound.acknowledged
        if self._outlet is not None and (pipe := self._outlet.channel) is not self._beside:
            self._beside = pipe
            if pipe is not None:  # it must not overtake what is on its way
                pipe.last_over_zmq = self._outbound.sent
        beside = self._beside
        if beside is not None and beside.send_in_order(frames, letter.envelope.sequence, known):
            return
        # The window is smaller than the queue: it is full only after a long cut, and then what it
        # does not take is asked for again.
        if isinstance(letter.message, Chunk) and not letter.message.checksum:
            frames = _frames(sealed(letter))
        self._channel.send_unlocked(frames)


def _frames(letter: Letter) -> list[Any]:
    head = encode(letter.envelope, letter.message)
    return [head] if letter.data is None else [head, letter.data]
