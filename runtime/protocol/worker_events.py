"""Events and actions of the worker's machine.

Events are messages, results of jobs and requests of the process. Actions are messages to send and
jobs for the sessions that the worker hosts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphflowError
from graphflow.runtime.wire.array_codec import Buffer
from graphflow.runtime.wire.messages import (
    Abort,
    Ack,
    Adopt,
    Array,
    Chunk,
    Close,
    Commit,
    Compute,
    Envelope,
    Forget,
    Join,
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
from graphflow.runtime.wire.step_values import Computed, Key

Route = bytes  # the transport's identifier of a peer's connection

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
    | Adopt
    | Join
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
    """Event: a message arrived over the connection `route`."""

    route: Route
    envelope: Envelope
    message: Message
    data: Buffer | None = None
    is_fast: bool = False  # the route is a fast channel, which carries short messages only


class JobFinished(NamedTuple):
    """Event: a job of a session ended, with its result or its error."""

    session: str
    job: Job
    step: int
    epoch: int
    outcome: Outcome


@dataclass(frozen=True)
class WorkerTick:
    """Event: time has passed."""


@dataclass(frozen=True)
class DrainWorker:
    """Event: the process was asked to end, and waits some seconds for its sessions to leave."""

    seconds: float


@dataclass(frozen=True)
class EndWorker:
    """Event: the process is about to end."""

    reason: str


@dataclass(frozen=True)
class EndSession:
    """Event: end one session here."""

    session: str
    reason: str


@dataclass(frozen=True)
class OfferMemoryToCoordinator:
    """Event: shared memory exists in which arrays can be lent to a session's coordinator."""

    session: str
    token: str


@dataclass(frozen=True)
class PeerUnreached:
    """Event: another worker does not acknowledge what this one sends.

    It was asked `asked` times. The last message that it did not acknowledge carried `edge` of
    `step`.
    """

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
    """Action: send a message back over a connection.

    If a `fast_route` is given, the message may take that one, once everything sent before it has
    been `acknowledged` and it can overtake nothing.
    """

    route: Route
    envelope: Envelope
    message: Message
    data: memoryview | None = None
    fast_route: Route = b""
    acknowledged: int = 0


class RunJob(NamedTuple):
    """Action: give a session its next job. `Open` is the first of an epoch, `Close` the last.

    Before a step is computed, the session commits the step `commits`. A `Chunk` is an echo to send
    back, and does not wait for other jobs.
    """

    session: str
    job: Job
    step: int
    epoch: int
    arrays: Mapping[Key, Array] = MappingProxyType({})
    token: str = ""  # with Open
    commits: int = -1


class DeliverTensor(NamedTuple):
    """Action: hand over a tensor from another worker.

    If it `is_echo`, it answers a probe of this worker, and `step` is the probe's request.
    """

    session: str
    step: int
    edge: Key
    array: Array
    origin: int
    is_echo: bool = False


class UpdatePeerLink(NamedTuple):
    """Action: tell the link to another worker what that worker reported.

    Attributes:
        acknowledged: the last message that the peer has received of this link.
        received: the last message that this worker has received from the peer.
        told: an acknowledgement or a request to resend, to send to the peer.
        wanted: the peer's request to resend, if it made one.
    """

    session: str
    worker: int
    acknowledged: int
    received: int
    told: Ack | Resend | None = None
    wanted: Resend | None = None


@dataclass(frozen=True)
class BeatPeerLinks:
    """Action: let the links to other workers send a heartbeat.

    A link sends one if messages are unacknowledged, or if its worker is in `owed`: that worker
    waits for an acknowledgement.
    """

    session: str
    owed: frozenset[int]


@dataclass(frozen=True)
class CancelStep:
    """Action: cancel a step. Every wait in it ends with the error."""

    session: str
    step: int
    error: GraphflowError


@dataclass(frozen=True)
class AttachPeerMemory:
    """Action: attach shared memory in which `origin` lends arrays.

    The origin is the coordinator or another worker.
    """

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
