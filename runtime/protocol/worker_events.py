"""What goes in and out of a worker's machine: messages, and jobs for the sessions that it hosts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphflowError
from graphflow.runtime.wire.frame_codec import Buffer
from graphflow.runtime.wire.messages import (
    Abort,
    Ack,
    Array,
    Chunk,
    Close,
    Commit,
    Compute,
    Computed,
    Envelope,
    Forget,
    Key,
    Load,
    Measure,
    Meet,
    Message,
    Open,
    Prepare,
    Probe,
    Read,
    Resend,
    Save,
    Saved,
    Write,
)

Route = bytes  # how the transport finds the way back to a peer

Job = (
    Open
    | Load
    | Prepare
    | Compute
    | Commit
    | Abort
    | Read
    | Write
    | Forget
    | Save
    | Measure
    | Meet
    | Probe
    | Close
    | Chunk
)
Outcome = None | Computed | Saved | Array | dict[str, object] | list[int] | float | BaseException


# Events ----------------------------------------------------------------------------------------


class MessageReceived(NamedTuple):
    """A message came over the connection `route`."""

    route: Route
    envelope: Envelope
    message: Message
    data: Buffer | None = None
    is_fast: bool = False  # a way for short messages only, beside the one for all


class JobFinished(NamedTuple):
    """A job of a session ended, with its result or its error."""

    session: str
    job: Job
    step: int
    epoch: int
    outcome: Outcome


@dataclass(frozen=True)
class WorkerTick:
    """Time has passed."""


@dataclass(frozen=True)
class DrainWorker:
    """The worker process is asked to end, and waits so many seconds for its sessions to leave."""

    seconds: float


@dataclass(frozen=True)
class EndWorker:
    """The worker process is about to end, for a reason."""

    reason: str


@dataclass(frozen=True)
class EndSession:
    """A session is to end here, for a reason."""

    session: str
    reason: str


@dataclass(frozen=True)
class OfferMemoryToCoordinator:
    """The worker has memory in which it can lend arrays to the coordinator of a session."""

    session: str
    token: str


@dataclass(frozen=True)
class PeerUnreached:
    """A link to another worker takes nothing, though that one was asked so many times; the last
    that it was to take is an edge of a step."""

    session: str
    worker: int
    step: int
    edge: Key
    asked: int


WorkerEvent = (
    MessageReceived
    | JobFinished
    | OfferMemoryToCoordinator
    | PeerUnreached
    | WorkerTick
    | DrainWorker
    | EndSession
    | EndWorker
)


# Actions ---------------------------------------------------------------------------------------


class SendMessage(NamedTuple):
    """Sends a message back over a connection; if there is a `lane` beside it, over that, unless it
    would overtake what went the other way and has not been `acknowledged`."""

    route: Route
    envelope: Envelope
    message: Message
    data: memoryview | None = None
    fast_route: Route = b""
    acknowledged: int = 0


class RunJob(NamedTuple):
    """Gives a session its next job; Open is the first of an epoch and Close the last.

    A Chunk is an echo to send back, and runs beside the others. Before a step is computed, the one
    that `commits` is to commit.
    """

    session: str
    job: Job
    step: int
    epoch: int
    arrays: Mapping[Key, Array] = MappingProxyType({})
    token: str = ""  # with Open
    commits: int = -1


class DeliverTensor(NamedTuple):
    """A tensor arrived from another worker; or an echo came back, then `step` is the request."""

    session: str
    step: int
    edge: Key
    array: Array
    origin: int
    is_echo: bool = False


class UpdatePeerLink(NamedTuple):
    """Another worker was heard. The link to it takes note of what that one has `acknowledged`, and
    of what was `received` from it; it tells it `told`, and sends again what `wanted` asks for."""

    session: str
    worker: int
    acknowledged: int
    received: int
    told: Ack | Resend | None = None
    wanted: Resend | None = None


@dataclass(frozen=True)
class BeatPeerLinks:
    """The links to other workers say what they have sent, if it is not acknowledged; those to the
    workers in `owed` say in any case what was received."""

    session: str
    owed: frozenset[int]


@dataclass(frozen=True)
class CancelStep:
    """Cancels a step: whatever waits in it wakes up with the error."""

    session: str
    step: int
    error: GraphflowError


@dataclass(frozen=True)
class AttachPeerMemory:
    """The coordinator or another worker, `origin`, has memory in which it can lend arrays."""

    session: str
    origin: int
    token: str


WorkerAction = (
    SendMessage
    | RunJob
    | AttachPeerMemory
    | DeliverTensor
    | UpdatePeerLink
    | BeatPeerLinks
    | CancelStep
)
