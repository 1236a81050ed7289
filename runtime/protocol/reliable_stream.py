"""Reliable, ordered delivery between two parties of a session.

Messages are numbered, so that each one is applied once and in order although connections lose,
repeat and reorder them. The sender keeps a window of unacknowledged messages. The receiver takes
the next number only. If a number is missing, it asks for all messages from there on. It notices a
gap by the next message, or by a heartbeat, which repeats the last number sent before it.

The module also checks epochs and tokens (`stale_error`), and holds the `Version` that processes
compare.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from enum import Enum
from hmac import compare_digest
from sys import intern
from typing import NamedTuple

from graphflow import _version
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphflowError, StaleEpoch, StaleSession
from graphflow.runtime.wire.array_codec import Buffer, checksum, is_intact
from graphflow.runtime.wire.frame_codec import WIRE_VERSION
from graphflow.runtime.wire.messages import (
    UNNUMBERED,
    Ack,
    Chunk,
    Compute,
    Done,
    Envelope,
    Hello,
    Message,
    Ping,
    Pong,
    Resend,
    Tensor,
    Welcome,
    replace_fields,
)
from graphflow.runtime.wire.step_frame_codec import unpack

WINDOW = 512  # unacknowledged messages; below the high-water mark of a socket's queue
WINDOW_BYTES = 64 << 20  # of their arrays: 50 ms of 10 Gbit/s
ACK_EVERY = WINDOW // 8  # messages
ACK_BYTES = WINDOW_BYTES // 8

NumberedFrame = tuple[bytes, int, int]
"""The frame of a message, its number, and the last acknowledged number."""

_BEATS = (Ping, Pong, Ack)
_UNNUMBERED = frozenset(UNNUMBERED)


class ReceiveStatus(Enum):
    """The receiver's verdict on a message's number."""

    FRESH = "fresh"
    DUPLICATE = "duplicate"
    MISSING = "something before it is missing, or it is damaged"
    UNNUMBERED = "it has no number of its own"


class OutgoingMessage(NamedTuple):
    """A message to send, with the bytes of its second frame."""

    envelope: Envelope
    message: Message
    data: memoryview | None = None


def with_checksum(outgoing: OutgoingMessage) -> OutgoingMessage:
    """Return a message whose piece of an array carries the checksum of its present bytes."""
    message, data = outgoing.message, outgoing.data
    if not isinstance(message, Chunk) or data is None:
        return outgoing
    return outgoing._replace(message=replace_fields(message, checksum=checksum(data)))


class Outbound:
    """The sending half: numbers messages of one party, and keeps them until they are acknowledged.

    Not thread-safe. The caller numbers and sends under one lock, or the order on the wire would
    differ from the numbers.

    Attributes:
        last_sent, acknowledged: the last number that was sent, and that the receiver has.
        received: the last number received in the other direction; it rides along as
            acknowledgement.
        answered_attempt: the last attempt to request a resend that was answered.
        resent_count: messages that were sent again.
    """

    def __init__(self, session: str, epoch: int, origin: int, token: str = "") -> None:
        self.session = session
        self.epoch = epoch
        self.origin = origin
        self.token = intern(token)
        self.last_sent = 0
        self.acknowledged = 0
        self.received = 0
        self.answered_attempt = 0
        self.resent_count = 0
        # (number, step, message or its encoded frame, data)
        self._kept: deque[tuple[int, int, Message | bytes, memoryview | None]] = deque()
        self._kept_bytes = 0

    @property
    def pending(self) -> int:
        """Number of unacknowledged messages."""
        return len(self._kept)

    @property
    def pending_bytes(self) -> int:
        """Bytes of the arrays in unacknowledged messages."""
        return self._kept_bytes

    def has_room(self, nbytes: int) -> bool:
        """Return True if a message with `nbytes` of array data fits the window.

        An empty window takes a message of any size, or a large one could never be sent.
        """
        fits = len(self._kept) < WINDOW and self._kept_bytes + nbytes <= WINDOW_BYTES
        return fits or not self._kept

    def post(
        self, message: Message, step: int = 0, data: memoryview | None = None
    ) -> OutgoingMessage:
        """Number a message, and keep it until it is acknowledged."""
        self.last_sent = number = self.last_sent + 1
        self._kept.append((number, step, message, data))
        if data is not None:
            self._kept_bytes += data.nbytes
        return tuple.__new__(OutgoingMessage, (self._envelope(step, number), message, data))

    def keep_frame(self, step: int, frame: bytes) -> NumberedFrame:
        """Keep a message that `ReliableStream.take_number` has numbered, as its encoded frame."""
        self._kept.append((self.last_sent, step, frame, None))
        return frame, self.last_sent, self.acknowledged

    def _envelope(self, step: int, number: int) -> Envelope:
        said = (self.session, self.epoch, self.origin, step, number, self.received, self.token)
        return tuple.__new__(Envelope, said)

    def wrap_unnumbered(self, message: Message, step: int = 0) -> OutgoingMessage:
        """Wrap a message of `UNNUMBERED`, which is never resent."""
        if isinstance(message, Ack):
            message = replace(
                message, resent=self.answered_attempt, asks=message.asks and self.pending > 0
            )
        elif isinstance(message, _BEATS):
            message = replace(message, resent=self.answered_attempt)
        return OutgoingMessage(self._envelope(step, self.last_sent), message)

    def acknowledge(self, number: int) -> bool:
        """Drop messages up to `number`, which the receiver has; return True if there were any."""
        before = self.acknowledged
        if number <= before:
            return False
        kept = self._kept
        while kept and kept[0][0] <= number:
            self.acknowledged, _, _, data = kept.popleft()
            if data is not None:
                self._kept_bytes -= data.nbytes
        return self.acknowledged > before

    def resend(self, request: Resend) -> list[OutgoingMessage]:
        """Return the messages that a receiver asks for; none for an attempt answered already."""
        if request.attempt <= self.answered_attempt:
            return []
        self.answered_attempt = request.attempt
        again = list(self.all_from(request.first))
        self.resent_count += len(again)
        return again

    def all_from(self, first: int) -> Iterator[OutgoingMessage]:
        """Yield all kept messages from number `first` on.

        Checksums are computed anew: after an abort, the program may have overwritten an array.
        """
        for number, step, kept, data in self._kept:
            if number >= first:
                message = unpack(kept)[1] if isinstance(kept, bytes) else kept
                yield with_checksum(OutgoingMessage(self._envelope(step, number), message, data))


class Inbound:
    """The receiving half: accepts messages of one party once, and in order.

    Attributes:
        received: the last number that was received in order.
        last_reported: the acknowledgement of the sender that was last passed on to its link.
    """

    def __init__(self, received: int = 0) -> None:
        self.received = received
        self.last_reported = 0
        self._requested_from = 0  # the first missing number of the last request
        self._attempt = 0
        self._unacknowledged = 0  # received messages
        self._unacknowledged_bytes = 0

    @property
    def owes_acknowledgement(self) -> bool:
        """True if a received message has not been acknowledged."""
        return self._unacknowledged > 0

    def receive(
        self, envelope: Envelope, message: Message, data: Buffer | None
    ) -> tuple[ReceiveStatus, Ack | Resend | None]:
        """Classify a message, and return the acknowledgement or request to send back, if any."""
        number, due = envelope.sequence, self.received + 1
        unnumbered = type(message) in _UNNUMBERED
        if number == due and not unnumbered:
            if not _is_intact(message, data):
                return ReceiveStatus.MISSING, self._request_resend(is_new=True)
            self.received = number
            self._unacknowledged += 1
            if data is not None:
                self._unacknowledged_bytes += len(data)
            overdue = self._unacknowledged >= ACK_EVERY or self._unacknowledged_bytes >= ACK_BYTES
            return ReceiveStatus.FRESH, Ack() if overdue else None
        if unnumbered:
            if number < due or not isinstance(message, _BEATS):
                # The peer asks because an acknowledgement may have been lost.
                asked = isinstance(message, Ack) and message.asks
                return ReceiveStatus.UNNUMBERED, Ack() if asked else None
            # The answer to the last attempt was sent before this heartbeat, so it was lost.
            answered = message.resent >= self._attempt
            return ReceiveStatus.UNNUMBERED, self._request_resend(
                is_new=answered or self._requested_from != due
            )
        if number < due:
            return ReceiveStatus.DUPLICATE, None
        return ReceiveStatus.MISSING, None if self._requested_from == due else self._request_resend(
            is_new=True
        )

    def mark_acknowledged(self) -> None:
        """Note that the sender is being told what has arrived."""
        self._unacknowledged = self._unacknowledged_bytes = 0

    def _request_resend(self, *, is_new: bool) -> Resend:
        self._attempt += is_new
        self._requested_from = self.received + 1
        return Resend(self._requested_from, self._attempt)


def _is_intact(message: Message, data: Buffer | None) -> bool:
    """Return True if the checksums of a message's arrays hold."""
    kind = type(message)
    if kind is Tensor:
        return is_intact(message.array)  # type: ignore[attr-defined]
    if kind is Compute or kind is Done:
        return not message.small or all(map(is_intact, message.small))  # type: ignore[attr-defined]
    if isinstance(message, Chunk) and message.checksum:
        return isinstance(data, bytes | memoryview) and checksum(data) == message.checksum
    return True


class ReliableStream:
    """Both directions of the messages between this party and one other.

    A message for which the window has no room waits here.
    """

    def __init__(
        self, session: str, epoch: int, origin: int, token: str = "", *, received: int = 0
    ) -> None:
        self.outbound = Outbound(session, epoch, origin, token)
        self.inbound = Inbound(received)
        self.outbound.received = received
        self._waiting: deque[tuple[Message, int, memoryview | None]] = deque()

    @property
    def waiting_count(self) -> int:
        """Number of messages that wait for room in the window."""
        return len(self._waiting)

    @property
    def is_clear(self) -> bool:
        """True if a message can be sent at once."""
        return not self._waiting and len(self.outbound._kept) < WINDOW

    def take_number(self) -> tuple[int, int]:
        """Return the number of the next message, and the number that it acknowledges.

        For the fast path, which encodes the frame itself and gives it to `Outbound.keep_frame`.
        Requires `is_clear`.
        """
        inbound, outbound = self.inbound, self.outbound
        inbound._unacknowledged = inbound._unacknowledged_bytes = 0
        outbound.last_sent += 1
        return outbound.last_sent, outbound.received

    def accept_next(self, sequence: int, acknowledged: int) -> bool:
        """Accept a message without data if it is the next in order and requires no answer.

        For the fast path. Returns False, with nothing changed, if `receive` must handle the
        message.
        """
        inbound, outbound = self.inbound, self.outbound
        if (
            sequence != inbound.received + 1
            or inbound._unacknowledged + 1 >= ACK_EVERY
            or self._waiting
        ):
            return False
        inbound.received = outbound.received = sequence
        inbound._unacknowledged += 1
        outbound.acknowledge(acknowledged)
        return True

    def send(
        self, message: Message, step: int = 0, data: memoryview | None = None
    ) -> list[OutgoingMessage]:
        """Return what to send now for a message, which may have to wait for the window."""
        if not self._waiting and self.outbound.has_room(data.nbytes if data is not None else 0):
            self.inbound.mark_acknowledged()  # it rides along
            return [self.outbound.post(message, step, data)]
        self._waiting.append((message, step, data))
        return self._flush()

    def send_unnumbered(self, message: Message, step: int = 0) -> OutgoingMessage:
        """Return a message of `UNNUMBERED`, ready to send."""
        self.inbound.mark_acknowledged()
        return self.outbound.wrap_unnumbered(message, step)

    def receive(
        self, envelope: Envelope, message: Message, data: Buffer | None
    ) -> tuple[ReceiveStatus, list[OutgoingMessage]]:
        """Classify a message of this session and epoch; return what to send in response."""
        inbound, outbound = self.inbound, self.outbound
        arrival, response = inbound.receive(envelope, message, data)
        outbound.received = inbound.received
        outgoing = [self.send_unnumbered(response)] if response is not None else []
        if type(message) is Resend:
            outgoing += outbound.resend(message)
        if outbound.acknowledge(envelope.acknowledged) and self._waiting:
            outgoing += self._flush()
        return arrival, outgoing

    def _flush(self) -> list[OutgoingMessage]:
        outgoing = []
        while self._waiting:
            message, step, data = self._waiting[0]
            if not self.outbound.has_room(data.nbytes if data is not None else 0):
                break
            self._waiting.popleft()
            outgoing.append(self.outbound.post(message, step, data))
            self.inbound.mark_acknowledged()  # it rides along
        return outgoing


def matches_secret(shown: str, secret: str) -> bool:
    """Compare a shown secret with the known one in constant time."""
    return shown.isascii() and secret.isascii() and compare_digest(shown, secret)


def stale_error(envelope: Envelope, epoch: int, token: str) -> GraphflowError | None:
    """Return the error of a message from another session or epoch; None for a current message."""
    if envelope.token is not token and not matches_secret(envelope.token, token):
        return StaleSession(
            f"a message for session {envelope.session[:8]} does not carry its token: it was "
            "recorded in another session, or forged"
        )
    if envelope.epoch != epoch:
        late = "its sender" if envelope.epoch < epoch else "its receiver"
        return StaleEpoch(
            f"session {envelope.session[:8]} has epoch {epoch} here, a message is of epoch "
            f"{envelope.epoch}: {late} missed a recovery"
        )
    return None


@dataclass(frozen=True)
class Version:
    """The versions that must agree between the processes of a session.

    Other code, or another Python, may compute other bits.
    """

    version: str
    wire: int
    python: str

    @staticmethod
    def own() -> Version:
        """Return the versions of this process."""
        python = ".".join(platform.python_version_tuple()[:2])
        return Version(_version.__version__, WIRE_VERSION, python)

    @staticmethod
    def from_message(message: Hello | Welcome) -> Version:
        """Return the versions of the process that sent a message."""
        return Version(message.version, message.wire, message.python)

    def __str__(self) -> str:
        return f"graphflow {self.version} (wire {self.wire}, Python {self.python})"
