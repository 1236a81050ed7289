"""Links between workers, for the tensors of a session.

A link keeps what its peer has not acknowledged, and resends it on request. Each of two workers has
a connection to the other's listener, so the peer's messages about a link arrive at this worker's
own listener.
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
from graphflow.runtime.wire.array_codec import encode_small, lend_array, split_array
from graphflow.runtime.wire.frame_codec import encode
from graphflow.runtime.wire.messages import Ack, Array, Chunk, Share, Tensor
from graphflow.runtime.wire.step_values import Key

_OFFER_SECONDS = 0.1  # between two offers of memory that were not accepted
_MEMORY_OFFERS = 2  # of shared memory, before a bulk connection is offered
_ROOM_POLL_SECONDS = 0.05  # seconds between two checks whether a step was cancelled
_MAX_UNANSWERED_ASKS = 4  # acknowledgement requests until the coordinator is told

_FLOODED = f"more than {UNFRAMED_CAP >> 20} MiB came over a link, where nothing is to come"

_log = Log("graphflow.security")


class PeerLink:
    """The link to one other worker: a connection, and the numbering of the messages on it.

    Args:
        channel: a connected `Channel`.
        outbound: numbers and keeps the messages.
        lane: a fast channel beside the connection, for short messages.
        bulk_sender: source of a bulk TCP connection for large messages; unused with a fast channel.
        sealed: the connection is encrypted.
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
        # Small pieces: one is encrypted here while the peer decrypts the one before it.
        self._far = sealed or not is_loopback(channel.address)
        self._offered_at = -inf  # when, last
        self._offers = 0
        self._unanswered_asks = 0  # since the peer last acknowledged anything, in one step
        self._last_sent: tuple[int, Key] = (0, "")  # step and edge

    def send(
        self,
        purpose: str,
        number: int,
        name: Key,
        array: Array,
        owned: bool,
        should_continue: Callable[[], bool],
    ) -> None:
        """Send an array in chunks; wait while the peer has acknowledged too little.

        Args:
            owned: the array stays unchanged until the peer acknowledges it. Otherwise it is copied.
            should_continue: called during waits; False ends the send.

        Raises:
            TransportError: `should_continue` returned False.
        """
        step = number if purpose == "edge" else 0
        if step != self._last_sent[0]:
            self._unanswered_asks = 0  # what delayed the last step may be over
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
        # A bulk channel has checksums of its own.
        checked = not isinstance(self._side_channel, BulkChannel)
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
        """Send where an array lies in shared memory; return False if the peer shares no memory."""
        if not self._array_pool.is_attached:
            self.offer_memory()
            return False

        def announce(chunk: Chunk) -> None:
            with self._lock:
                self._await_room(0, should_continue)
                self._transmit(self._outbound.post(chunk, step))

        return lend_array(purpose, number, name, array, self._array_pool.lend, announce) is not None

    def has_room(self, nbytes: int) -> bool:
        """Return True if an array of `nbytes` can be sent without waiting for the peer."""
        with self._lock:
            return self._outbound.has_room(nbytes)

    def offer_memory(self) -> None:
        """Offer the peer shared memory, at most every `_OFFER_SECONDS`.

        If the peer does not accept it, also offer a bulk TCP connection.
        """
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

    def apply_update(self, update: UpdatePeerLink) -> None:
        """Take in the peer's report. Never waits."""
        with self._lock:
            self._outbound.received = update.received
            if self._outbound.acknowledge(update.acknowledged):
                self._unanswered_asks = 0
                self._changed.notify_all()
            if update.told is not None:
                self._transmit(self._outbound.wrap_unnumbered(update.told))
            if update.wanted is not None:
                for outgoing in self._outbound.resend(update.wanted):
                    self._transmit(outgoing)

    @property
    def resent_count(self) -> int:
        """Number of messages that were sent again."""
        return self._outbound.resent_count

    def heartbeat(self, *, owed: bool) -> None:
        """Tell the peer what was received, and ask it to acknowledge what was sent, if need be."""
        with self._lock:
            if owed or self._outbound.pending:
                self._unanswered_asks += self._outbound.pending > 0
                self._transmit(self._outbound.wrap_unnumbered(Ack(asks=True)))

    def check_inflow(self) -> None:
        """Check the connection's receiving side, where a peer should send nothing.

        A peer that sends much there loses the connection.
        """
        with self._lock:
            self._channel.read_link_changes()
            if self._channel.count_unframed(time.monotonic()) > UNFRAMED_CAP:
                _log.tell("connection.dropped", address=self._channel.address, reason=_FLOODED)
                self._channel.reset()

    def find_unacknowledged(self) -> tuple[int, tuple[int, Key]] | None:
        """Return how often the peer was asked in vain, and the last (step, edge) sent.

        None if the peer may just be slow.
        """
        if self._unanswered_asks <= _MAX_UNANSWERED_ASKS or not self._outbound.pending:
            return None
        return self._unanswered_asks, self._last_sent

    def disconnect(self) -> None:
        """End the connection for good: the peer was lost, and another may be at its address."""
        self._channel.disconnect()

    def close(self) -> None:
        """Close the connection and its side channels."""
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

    def _transmit(self, outgoing: OutgoingMessage) -> None:
        frames = _frames(outgoing)
        known = self._outbound.acknowledged
        if (
            self._bulk_sender is not None
            and (bulk_channel := self._bulk_sender.channel) is not self._side_channel
        ):
            self._side_channel = bulk_channel
            if bulk_channel is not None:  # it must not overtake messages on the main connection
                bulk_channel.last_over_zmq = self._outbound.last_sent
        beside = self._side_channel
        if beside is not None and beside.send_in_order(frames, outgoing.envelope.sequence, known):
            return
        # The window is smaller than the queue, which is therefore full only after a long cut. The
        # peer then asks for the messages that the queue refused.
        if isinstance(outgoing.message, Chunk) and not outgoing.message.checksum:
            frames = _frames(with_checksum(outgoing))
        self._channel.send_unlocked(frames)


def _frames(outgoing: OutgoingMessage) -> list[Any]:
    head = encode(outgoing.envelope, outgoing.message)
    return [head] if outgoing.data is None else [head, outgoing.data]
