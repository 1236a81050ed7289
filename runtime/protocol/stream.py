"""The numbering of messages between two parties of a session, and the versions they compare."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from enum import Enum

from graphflow import _version
from graphflow.runtime.messages import Envelope, Hello, Welcome
from graphflow.runtime.wire import WIRE_VERSION


class Arrival(Enum):
    """What a receiver makes of a message's epoch and sequence number."""

    FRESH = "fresh"
    DUPLICATE = "duplicate"
    STALE = "stale"
    GAP = "gap"


@dataclass
class Stream:
    """Both directions between this party and one other, in one session and epoch.

    Not safe for threads: whoever sends on a stream numbers and sends under one lock.
    """

    session: str
    epoch: int
    origin: int
    sent: int = 0
    received: int = 0

    def stamp(self, step: int) -> Envelope:
        """The envelope of the next message that this party sends."""
        self.sent += 1
        return Envelope(self.session, self.epoch, self.origin, step, self.sent, self.received)

    def receive(self, envelope: Envelope) -> Arrival:
        """Whether a message is the next one. Nothing is resent, so a gap ends the stream."""
        if envelope.epoch != self.epoch:
            return Arrival.STALE
        if envelope.sequence <= self.received:
            return Arrival.DUPLICATE
        if envelope.sequence > self.received + 1:
            return Arrival.GAP
        self.received = envelope.sequence
        return Arrival.FRESH


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
