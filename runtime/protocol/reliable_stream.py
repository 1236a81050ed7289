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

Told = tuple[bytes, int, int]
"""The frame of a message, its number, and the last one that has been acknowledged."""

_BEATS = (Ping, Pong, Ack)
_UNNUMBERED = frozenset(UNNUMBERED)


class Arrival(Enum):
    """What a receiver makes of a message's number."""

    FRESH = "fresh"
    DUPLICATE = "duplicate"
    MISSING = "something before it is missing, or it is damaged"
    BEAT = "it has no number of its own"


class Letter(NamedTuple):
    """A message as it is sent, the bytes of its second frame included."""

    envelope: Envelope
    message: Message
    data: memoryview | None = None


def sealed(letter: Letter) -> Letter:
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
        self.sent = 0
        self.acknowledged = 0
        self.received = 0  # in the other direction, for the acknowledgements that ride along
        self.resent = 0  # the last attempt that was answered
        self.repeats = 0  # messages that were sent once more
        # Number, step, message or the frame that it went in, and data.
        self._kept: deque[tuple[int, int, Message | bytes, memoryview | None]] = deque()
        self._bytes = 0

    @property
    def pending(self) -> int:
        """How many messages are not acknowledged."""
        return len(self._kept)

    @property
    def pending_bytes(self) -> int:
        """The bytes of the arrays among them."""
        return self._bytes

    def room(self, nbytes: int) -> bool:
        """Whether a message with so many bytes of an array fits the window; one always does."""
        fits = len(self._kept) < WINDOW and self._bytes + nbytes <= WINDOW_BYTES
        return fits or not self._kept

    def post(self, message: Message, step: int = 0, data: memoryview | None = None) -> Letter:
        """Numbers and keeps a message."""
        self.sent = number = self.sent + 1
        self._kept.append((number, step, message, data))
        if data is not None:
            self._bytes += data.nbytes
        return tuple.__new__(Letter, (self._envelope(step, number), message, data))

    def keep(self, step: int, frame: bytes) -> Told:
        """Keeps a message without data that has just been numbered, as the frame that it goes
        in."""
        self._kept.append((self.sent, step, frame, None))
        return frame, self.sent, self.acknowledged

    def _envelope(self, step: int, number: int) -> Envelope:
        said = (self.session, self.epoch, self.origin, step, number, self.received, self.token)
        return tuple.__new__(Envelope, said)

    def tell(self, message: Message, step: int = 0) -> Letter:
        """A message of `UNNUMBERED`."""
        if isinstance(message, Ack):
            message = replace(message, resent=self.resent, asks=message.asks and self.pending > 0)
        elif isinstance(message, _BEATS):
            message = replace(message, resent=self.resent)
        return Letter(self._envelope(step, self.sent), message)

    def acknowledge(self, number: int) -> bool:
        """Lets go of what the receiver has; whether that was anything."""
        before = self.acknowledged
        if number <= before:
            return False
        kept = self._kept
        while kept and kept[0][0] <= number:
            self.acknowledged, _, _, data = kept.popleft()
            if data is not None:
                self._bytes -= data.nbytes
        return self.acknowledged > before

    def again(self, request: Resend) -> list[Letter]:
        """What is to be sent again; nothing for an attempt that was answered already."""
        if request.attempt <= self.resent:
            return []
        self.resent = request.attempt
        again = list(self.all_from(request.first))
        self.repeats += len(again)
        return again

    def all_from(self, first: int) -> Iterator[Letter]:
        """Everything that is kept from a number on, sealed anew: after an abort, an array may have
        been written to since."""
        for number, step, kept, data in self._kept:
            if number >= first:
                message = unpack(kept)[1] if isinstance(kept, bytes) else kept
                yield sealed(Letter(self._envelope(step, number), message, data))


class Inbound:
    """What one party receives from another in a session and epoch."""

    def __init__(self, received: int = 0) -> None:
        self.received = received
        self.noted = 0  # what its sender has acknowledged, as it was passed on last
        self._asked = 0  # the number that was asked for last
        self._attempt = 0
        self._owed = 0  # messages that were not acknowledged
        self._owed_bytes = 0

    @property
    def owes(self) -> bool:
        """Whether anything that was received is not acknowledged."""
        return self._owed > 0

    def take(
        self, envelope: Envelope, message: Message, data: Buffer | None
    ) -> tuple[Arrival, Ack | Resend | None]:
        """What to make of a message, and what to tell its sender."""
        number, due = envelope.sequence, self.received + 1
        unnumbered = type(message) in _UNNUMBERED
        if number == due and not unnumbered:  # nearly always
            if not _intact(message, data):
                return Arrival.MISSING, self._ask(anew=True)
            self.received = number
            self._owed += 1
            if data is not None:
                self._owed_bytes += len(data)
            overdue = self._owed >= ACK_EVERY or self._owed_bytes >= ACK_BYTES
            return Arrival.FRESH, Ack() if overdue else None
        if unnumbered:
            if number < due or not isinstance(message, _BEATS):
                # An acknowledgement that was lost is said again to one who asks.
                asked = isinstance(message, Ack) and message.asks
                return Arrival.BEAT, Ack() if asked else None
            # What answered the last attempt would have come before this beat.
            answered = message.resent >= self._attempt
            return Arrival.BEAT, self._ask(anew=answered or self._asked != due)
        if number < due:
            return Arrival.DUPLICATE, None
        return Arrival.MISSING, None if self._asked == due else self._ask(anew=True)

    def acknowledged(self) -> None:
        """The sender is being told what has come."""
        self._owed = self._owed_bytes = 0

    def _ask(self, *, anew: bool) -> Resend:
        self._attempt += anew
        self._asked = self.received + 1
        return Resend(self._asked, self._attempt)


def _intact(message: Message, data: Buffer | None) -> bool:
    """Whether the arrays in a message, or the piece of one behind it, are what was sent."""
    kind = type(message)
    if kind is Tensor:
        return is_intact(message.array)  # type: ignore[attr-defined]
    if kind is Compute or kind is Done:
        return not message.small or all(map(is_intact, message.small))  # type: ignore[attr-defined]
    if isinstance(message, Chunk) and message.checksum:
        return isinstance(data, bytes | memoryview) and checksum(data) == message.checksum
    return True


class Stream:
    """Both directions between this party and one other. What the window has no room for waits."""

    def __init__(
        self, session: str, epoch: int, origin: int, token: str = "", *, received: int = 0
    ) -> None:
        self.outbound = Outbound(session, epoch, origin, token)
        self.inbound = Inbound(received)
        self.outbound.received = received
        self._waiting: deque[tuple[Message, int, memoryview | None]] = deque()

    @property
    def waiting(self) -> int:
        """How many messages the window has no room for."""
        return len(self._waiting)

    @property
    def is_clear(self) -> bool:
        """Whether a message can be sent now."""
        return not self._waiting and len(self.outbound._kept) < WINDOW

    def number(self) -> tuple[int, int]:
        """The number of a message that is sent where `is_clear`, and what it acknowledges: for who
        writes its frame, and has that kept by `outbound`."""
        inbound, outbound = self.inbound, self.outbound
        inbound._owed = inbound._owed_bytes = 0
        outbound.sent += 1
        return outbound.sent, outbound.received

    def follows(self, sequence: int, acknowledged: int) -> bool:
        """As `receive`, of an intact message without data: takes it if it is the next one and
        nothing is to be sent for it."""
        inbound, outbound = self.inbound, self.outbound
        if sequence != inbound.received + 1 or inbound._owed + 1 >= ACK_EVERY or self._waiting:
            return False
        inbound.received = outbound.received = sequence
        inbound._owed += 1
        outbound.acknowledge(acknowledged)
        return True

    def send(self, message: Message, step: int = 0, data: memoryview | None = None) -> list[Letter]:
        """What to send now, for a message that is to be sent."""
        if not self._waiting and self.outbound.room(data.nbytes if data is not None else 0):
            self.inbound.acknowledged()  # it rides along
            return [self.outbound.post(message, step, data)]
        self._waiting.append((message, step, data))
        return self._flush()

    def tell(self, message: Message, step: int = 0) -> Letter:
        """A message of `UNNUMBERED`."""
        self.inbound.acknowledged()
        return self.outbound.tell(message, step)

    def receive(
        self, envelope: Envelope, message: Message, data: Buffer | None
    ) -> tuple[Arrival, list[Letter]]:
        """What to make of a message of this session and epoch, and what to send."""
        inbound, outbound = self.inbound, self.outbound
        arrival, told = inbound.take(envelope, message, data)
        outbound.received = inbound.received
        letters = [self.tell(told)] if told is not None else []
        if type(message) is Resend:
            letters += outbound.again(message)
        if outbound.acknowledge(envelope.acknowledged) and self._waiting:
            letters += self._flush()
        return arrival, letters

    def _flush(self) -> list[Letter]:
        letters = []
        while self._waiting:
            message, step, data = self._waiting[0]
            if not self.outbound.room(data.nbytes if data is not None else 0):
                break
            self._waiting.popleft()
            letters.append(self.outbound.post(message, step, data))
            self.inbound.acknowledged()  # it rides along
        return letters


def is_same(shown: str, secret: str) -> bool:
    """Whether a secret is shown, in a time that tells nothing of it."""
    return shown.isascii() and secret.isascii() and compare_digest(shown, secret)


def fence(envelope: Envelope, epoch: int, token: str) -> GraphflowError | None:
    """Why a message is not of this session and epoch, or None if it is."""
    if envelope.token is not token and not is_same(envelope.token, token):
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
    def of(message: Hello | Welcome) -> Version:
        """The versions of the process that sent the message."""
        return Version(message.version, message.wire, message.python)

    def __str__(self) -> str:
        return f"graphflow {self.version} (wire {self.wire}, Python {self.python})"
