"""The numbering of messages between two parties of a session, so that each is applied once and in
order over connections that lose, repeat and reorder; and the versions they compare.

The sender keeps what is not acknowledged, at most a window of it. The receiver takes what is next;
when it sees that something is missing, it asks for everything from there on. It sees a gap by the
next message, or by an unnumbered one (a beat), which repeats the last number before it.
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
from graphflow.runtime.wire.frame_codec import WIRE_VERSION, Buffer, checksum, is_intact
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

WINDOW = 512  # messages that are not acknowledged: fewer than a socket's queue takes
WINDOW_BYTES = 64 << 20  # and their bytes: 50 ms of 10 Gbit/s
ACK_EVERY = WINDOW // 8  # messages
ACK_BYTES = WINDOW_BYTES // 8

NumberedFrame = tuple[bytes, int, int]
"""The frame of a message, its number, and the last one that has been acknowledged."""

_BEATS = (Ping, Pong, Ack)
_UNNUMBERED = frozenset(UNNUMBERED)


class ReceiveStatus(Enum):
    """What a receiver makes of a message's number."""

    FRESH = "fresh"
    DUPLICATE = "duplicate"
    MISSING = "something before it is missing, or it is damaged"
    UNNUMBERED = "it has no number of its own"


class OutgoingMessage(NamedTuple):
    """A message as it is sent, the bytes of its second frame included."""

    envelope: Envelope
    message: Message
    data: memoryview | None = None


def with_checksum(letter: OutgoingMessage) -> OutgoingMessage:
    """A letter whose piece of an array, if there is one, has the checksum of what it is now."""
    message, data = letter.message, letter.data
    if not isinstance(message, Chunk) or data is None:
        return letter
    return letter._replace(message=replace_fields(message, checksum=checksum(data)))


class Outbound:
    """What one party sends another in a session and epoch: numbered, and kept until acknowledged.

    Not safe for threads: whoever sends numbers and sends under one lock.
    """

    def __init__(self, session: str, epoch: int, origin: int, token: str = "") -> None:
        self.session = session
        self.epoch = epoch
        self.origin = origin
        self.token = intern(token)
        self.last_sent = 0
        self.acknowledged = 0
        self.received = 0  # in the other direction, for the acknowledgements that ride along
        self.answered_attempt = 0  # the last attempt that was answered
        self.resent_count = 0  # messages that were sent once more
        # Number, step, message or the frame that it went in, and data.
        self._kept: deque[tuple[int, int, Message | bytes, memoryview | None]] = deque()
        self._kept_bytes = 0

    @property
    def pending(self) -> int:
        """How many messages are not acknowledged."""
        return len(self._kept)

    @property
    def pending_bytes(self) -> int:
        """The bytes of the arrays among them."""
        return self._kept_bytes

    def has_room(self, nbytes: int) -> bool:
        """Whether a message with so many bytes of an array fits the window; one always does."""
        fits = len(self._kept) < WINDOW and self._kept_bytes + nbytes <= WINDOW_BYTES
        return fits or not self._kept

    def post(
        self, message: Message, step: int = 0, data: memoryview | None = None
    ) -> OutgoingMessage:
        """Numbers and keeps a message."""
        self.last_sent = number = self.last_sent + 1
        self._kept.append((number, step, message, data))
        if data is not None:
            self._kept_bytes += data.nbytes
        return tuple.__new__(OutgoingMessage, (self._envelope(step, number), message, data))

    def keep_frame(self, step: int, frame: bytes) -> NumberedFrame:
        """Keeps a message without data that has just been numbered, as the frame that it goes
        in."""
        self._kept.append((self.last_sent, step, frame, None))
        return frame, self.last_sent, self.acknowledged

    def _envelope(self, step: int, number: int) -> Envelope:
        said = (self.session, self.epoch, self.origin, step, number, self.received, self.token)
        return tuple.__new__(Envelope, said)

    def wrap_unnumbered(self, message: Message, step: int = 0) -> OutgoingMessage:
        """A message of `UNNUMBERED`."""
        if isinstance(message, Ack):
            message = replace(
                message, resent=self.answered_attempt, asks=message.asks and self.pending > 0
            )
        elif isinstance(message, _BEATS):
            message = replace(message, resent=self.answered_attempt)
        return OutgoingMessage(self._envelope(step, self.last_sent), message)

    def acknowledge(self, number: int) -> bool:
        """Lets go of what the receiver has; whether that was anything."""
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
        """What is to be sent again; nothing for an attempt that was answered already."""
        if request.attempt <= self.answered_attempt:
            return []
        self.answered_attempt = request.attempt
        again = list(self.all_from(request.first))
        self.resent_count += len(again)
        return again

    def all_from(self, first: int) -> Iterator[OutgoingMessage]:
        """Everything that is kept from a number on, sealed anew: after an abort, an array may have
        been written to since."""
        for number, step, kept, data in self._kept:
            if number >= first:
                message = unpack(kept)[1] if isinstance(kept, bytes) else kept
                yield with_checksum(OutgoingMessage(self._envelope(step, number), message, data))


class Inbound:
    """What one party receives from another in a session and epoch."""

    def __init__(self, received: int = 0) -> None:
        self.received = received
        self.last_reported = 0  # what its sender has acknowledged, as it was passed on last
        self._requested_from = 0  # the number that was asked for last
        self._attempt = 0
        self._unacknowledged = 0  # messages that were not acknowledged
        self._unacknowledged_bytes = 0

    @property
    def owes_acknowledgement(self) -> bool:
        """Whether anything that was received is not acknowledged."""
        return self._unacknowledged > 0

    def receive(
        self, envelope: Envelope, message: Message, data: Buffer | None
    ) -> tuple[ReceiveStatus, Ack | Resend | None]:
        """What to make of a message, and what to tell its sender."""
        number, due = envelope.sequence, self.received + 1
        unnumbered = type(message) in _UNNUMBERED
        if number == due and not unnumbered:  # nearly always
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
                # An acknowledgement that was lost is said again to one who asks.
                asked = isinstance(message, Ack) and message.asks
                return ReceiveStatus.UNNUMBERED, Ack() if asked else None
            # What answered the last attempt would have come before this beat.
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
        """The sender is being told what has come."""
        self._unacknowledged = self._unacknowledged_bytes = 0

    def _request_resend(self, *, is_new: bool) -> Resend:
        self._attempt += is_new
        self._requested_from = self.received + 1
        return Resend(self._requested_from, self._attempt)


def _is_intact(message: Message, data: Buffer | None) -> bool:
    """Whether the arrays in a message, or the piece of one behind it, are what was sent."""
    kind = type(message)
    if kind is Tensor:
        return is_intact(message.array)  # type: ignore[attr-defined]
    if kind is Compute or kind is Done:
        return not message.small or all(map(is_intact, message.small))  # type: ignore[attr-defined]
    if isinstance(message, Chunk) and message.checksum:
        return isinstance(data, bytes | memoryview) and checksum(data) == message.checksum
    return True


class ReliableStream:
    """Both directions between this party and one other. What the window has no room for waits."""

    def __init__(
        self, session: str, epoch: int, origin: int, token: str = "", *, received: int = 0
    ) -> None:
        self.outbound = Outbound(session, epoch, origin, token)
        self.inbound = Inbound(received)
        self.outbound.received = received
        self._waiting: deque[tuple[Message, int, memoryview | None]] = deque()

    @property
    def waiting_count(self) -> int:
        """How many messages the window has no room for."""
        return len(self._waiting)

    @property
    def is_clear(self) -> bool:
        """Whether a message can be sent now."""
        return not self._waiting and len(self.outbound._kept) < WINDOW

    def take_number(self) -> tuple[int, int]:
        """The number of a message that is sent where `is_clear`, and what it acknowledges: for who
        writes its frame, and has that kept by `outbound`."""
        inbound, outbound = self.inbound, self.outbound
        inbound._unacknowledged = inbound._unacknowledged_bytes = 0
        outbound.last_sent += 1
        return outbound.last_sent, outbound.received

    def accept_next(self, sequence: int, acknowledged: int) -> bool:
        """As `receive`, of an intact message without data: takes it if it is the next one and
        nothing is to be sent for it."""
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
        """What to send now, for a message that is to be sent."""
        if not self._waiting and self.outbound.has_room(data.nbytes if data is not None else 0):
            self.inbound.mark_acknowledged()  # it rides along
            return [self.outbound.post(message, step, data)]
        self._waiting.append((message, step, data))
        return self._flush()

    def send_unnumbered(self, message: Message, step: int = 0) -> OutgoingMessage:
        """A message of `UNNUMBERED`."""
        self.inbound.mark_acknowledged()
        return self.outbound.wrap_unnumbered(message, step)

    def receive(
        self, envelope: Envelope, message: Message, data: Buffer | None
    ) -> tuple[ReceiveStatus, list[OutgoingMessage]]:
        """What to make of a message of this session and epoch, and what to send."""
        inbound, outbound = self.inbound, self.outbound
        arrival, told = inbound.receive(envelope, message, data)
        outbound.received = inbound.received
        letters = [self.send_unnumbered(told)] if told is not None else []
        if type(message) is Resend:
            letters += outbound.resend(message)
        if outbound.acknowledge(envelope.acknowledged) and self._waiting:
            letters += self._flush()
        return arrival, letters

    def _flush(self) -> list[OutgoingMessage]:
        letters = []
        while self._waiting:
            message, step, data = self._waiting[0]
            if not self.outbound.has_room(data.nbytes if data is not None else 0):
                break
            self._waiting.popleft()
            letters.append(self.outbound.post(message, step, data))
            self.inbound.mark_acknowledged()  # it rides along
        return letters


def matches_secret(shown: str, secret: str) -> bool:
    """Whether a secret is shown, in a time that tells nothing of it."""
    return shown.isascii() and secret.isascii() and compare_digest(shown, secret)


def stale_error(envelope: Envelope, epoch: int, token: str) -> GraphflowError | None:
    """Why a message is not of this session and epoch, or None if it is."""
    if envelope.token is not token and not matches_secret(envelope.token, token):
        return StaleSession(
            f"a message for session {envelope.session[:8]} does not have its token: it was "
            "recorded in another session, or made up"
        )
    if envelope.epoch != epoch:
        late = "its sender" if envelope.epoch < epoch else "who is told it"
        return StaleEpoch(
            f"session {envelope.session[:8]} has epoch {epoch} here, a message is of epoch "
            f"{envelope.epoch}: {late} missed a recovery"
        )
    return None


@dataclass(frozen=True)
class Version:
    """What must agree between the processes of a session: other code, or another Python, may
    give other bits."""

    version: str
    wire: int
    python: str

    @staticmethod
    def own() -> Version:
        """The versions of this process."""
        python = ".".join(platform.python_version_tuple()[:2])
        return Version(_version.__version__, WIRE_VERSION, python)

    @staticmethod
    def from_message(message: Hello | Welcome) -> Version:
        """The versions of the process that sent the message."""
        return Version(message.version, message.wire, message.python)

    def __str__(self) -> str:
        return f"graphflow {self.version} (wire {self.wire}, Python {self.python})"
