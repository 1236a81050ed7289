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

from graphflow.base.addresses import is_loopback
from graphflow.errors import TransportError
from graphflow.runtime.protocol.reliable_stream import Outbound, OutgoingMessage, with_checksum
from graphflow.runtime.protocol.worker_events import UpdatePeerLink
from graphflow.runtime.security.receive_accounting import UNFRAMED_CAP
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.transport.bulk_tcp import BulkChannel, BulkSender
from graphflow.runtime.transport.interface import Channel
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
    split_array,
)
from graphflow.runtime.wire.messages import Ack, Array, Chunk, Key, Share, Tensor

_OFFER_SECONDS = 0.1  # between two offers of memory that were not taken
_MEMORY_OFFERS = 2  # of memory, before a pipe is offered
_ROOM_POLL_SECONDS = 0.05  # seconds between two looks at whether a step was cancelled
_MAX_UNANSWERED_ASKS = 4  # times that a peer is asked before anybody else is told

_FLOODED = f"more than {UNFRAMED_CAP >> 20} MiB came over a link, where nothing is to come"

_log = Log("graphflow.security")


class PeerLink:
    """The way to one other worker: a connection and the numbering of what goes over it.

    Args:
        lane: beside it, for short messages; it has no pipe then.
        outlet: where it may get a pipe from.
        sealed: what goes over the connection is encrypted.
    """

    def __init__(
        self,
        channel: Channel,
        outbound: Outbound,
        lane: UnixSocketChannel | None = None,
        bulk_sender: BulkSender | None = None,
        *,
        sealed: bool = False,
    ) -> None:
        self._channel = channel
        self._side_channel: UnixSocketChannel | BulkChannel | None = lane
        self._bulk_sender = bulk_sender if lane is None else None
        self._outbound = outbound
        self._lock = channel.lock
        self._changed = threading.Condition(channel.lock)
        self._array_pool = SharedArrayPool()
        # A piece is encrypted here while the one before it is decrypted there.
        self._far = sealed or not is_loopback(channel.address)
        self._offered_at = -inf  # when, last
        self._offers = 0
        self._unanswered_asks = 0  # times since the peer last took anything, in one step
        self._last_sent: tuple[int, Key] = (0, "")  # step and edge of what it was to take last

    def send(
        self,
        purpose: str,
        number: int,
        name: Key,
        array: Array,
        owned: bool,
        should_continue: Callable[[], bool],
    ) -> None:
        """Sends an array, as chunks; waits while the peer has not acknowledged enough of what was
        sent before, and `go_on`. What is not `owned` is copied until it is acknowledged.

        Raises:
            TransportError: `go_on` said to stop.
        """
        step = number if purpose == "edge" else 0
        if step != self._last_sent[0]:
            self._unanswered_asks = 0  # what ended the step before may have passed
        self._last_sent = (step, name)
        inside = encode_small(name, array) if purpose == "edge" else None
        if inside is not None:
            with self._lock:
                if not self._outbound.has_room(0):
                    self._await_room(0, should_continue)
                self._transmit(self._outbound.post(Tensor(inside), step))
            return
        if array.nbytes >= LEND_MIN_BYTES and self._send_reference(
            purpose, number, name, array, step, should_continue
        ):
            return
        require_whole(array)
        checked = not isinstance(
            self._side_channel, BulkChannel
        )  # which seals what it carries itself
        for chunk, data in split_array(
            purpose, number, name, array, checked=checked, far=self._far
        ):
            kept = data if owned else memoryview(bytes(data))
            with self._lock:
                self._await_room(kept.nbytes, should_continue)
                self._transmit(self._outbound.post(chunk, step, kept))

    def _send_reference(
        self,
        purpose: str,
        number: int,
        name: Key,
        array: Array,
        step: int,
        should_continue: Callable[[], bool],
    ) -> bool:
        """Sends where the array lies in memory that the peer sees, if there is such."""
        if not self._array_pool.is_attached:
            self.offer_memory()
            return False

        def announce(chunk: Chunk) -> None:
            with self._lock:
                self._await_room(0, should_continue)
                self._transmit(self._outbound.post(chunk, step))

        return lend_array(purpose, number, name, array, self._array_pool.lend, announce) is not None

    def has_room(self, nbytes: int) -> bool:
        """Whether an array of so many bytes can be sent without waiting for the peer."""
        with self._lock:
            return self._outbound.has_room(nbytes)

    def offer_memory(self) -> None:
        """Offers the peer memory to share, unless it was asked a moment ago; and a pipe, where it
        does not take that."""
        now = time.monotonic()
        if self._array_pool.is_attached or now < self._offered_at + _OFFER_SECONDS:
            return
        self._offered_at = now
        self._offers += 1
        tokens = [self._array_pool.offer()]
        if self._bulk_sender is not None and (self._offers > _MEMORY_OFFERS or not tokens[0]):
            tokens.append(self._bulk_sender.offer())
        with self._lock:
            for token in filter(None, tokens):
                self._transmit(self._outbound.wrap_unnumbered(Share(token)))

    def apply_update(self, heard: UpdatePeerLink) -> None:
        """Takes note of what the peer said. Never waits."""
        with self._lock:
            self._outbound.received = heard.received
            if self._outbound.acknowledge(heard.acknowledged):
                self._unanswered_asks = 0
                self._changed.notify_all()
            if heard.told is not None:
                self._transmit(self._outbound.wrap_unnumbered(heard.told))
            if heard.wanted is not None:
                for letter in self._outbound.resend(heard.wanted):
                    self._transmit(letter)

    @property
    def resent_count(self) -> int:
        """Messages that were sent once more."""
        return self._outbound.resent_count

    def heartbeat(self, *, owed: bool) -> None:
        """Tells the peer what was sent, if it has not acknowledged that, and what was received."""
        with self._lock:
            if owed or self._outbound.pending:
                self._unanswered_asks += self._outbound.pending > 0
                self._transmit(self._outbound.wrap_unnumbered(Ack(asks=True)))

    def check_inflow(self) -> None:
        """Looks at what comes over the connection, where nothing should: who sends much there ends
        it."""
        with self._lock:
            self._channel.read_link_changes()
            if self._channel.count_unframed(time.monotonic()) > UNFRAMED_CAP:
                _log.tell("connection.dropped", address=self._channel.address, reason=_FLOODED)
                self._channel.reset()

    def find_unacknowledged(self) -> tuple[int, tuple[int, Key]] | None:
        """How often the peer was asked in vain what it has of ours, and the step and the edge of
        the last of that; None where it may just be slow."""
        if self._unanswered_asks <= _MAX_UNANSWERED_ASKS or not self._outbound.pending:
            return None
        return self._unanswered_asks, self._last_sent

    def close(self) -> None:
        """Ends the connection."""
        self._channel.close()
        if self._bulk_sender is not None:
            self._bulk_sender.close()
        elif self._side_channel is not None:
            self._side_channel.close()
        self._array_pool.close()

    def _await_room(self, nbytes: int, should_continue: Callable[[], bool]) -> None:
        while not self._outbound.has_room(nbytes):
            if not should_continue():
                raise TransportError(f"{self._channel.address} takes no more messages")
            self._changed.wait(_ROOM_POLL_SECONDS)

    def _transmit(self, letter: OutgoingMessage) -> None:
        frames = _frames(letter)
        known = self._outbound.acknowledged
        if (
            self._bulk_sender is not None
            and (pipe := self._bulk_sender.channel) is not self._side_channel
        ):
            self._side_channel = pipe
            if pipe is not None:  # it must not overtake what is on its way
                pipe.last_over_zmq = self._outbound.last_sent
        beside = self._side_channel
        if beside is not None and beside.send_in_order(frames, letter.envelope.sequence, known):
            return
        # The window is smaller than the queue: it is full only after a long cut, and then what it
        # does not take is asked for again.
        if isinstance(letter.message, Chunk) and not letter.message.checksum:
            frames = _frames(with_checksum(letter))
        self._channel.send_unlocked(frames)


def _frames(letter: OutgoingMessage) -> list[Any]:
    head = encode(letter.envelope, letter.message)
    return [head] if letter.data is None else [head, letter.data]
