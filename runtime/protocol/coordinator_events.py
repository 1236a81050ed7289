"""Events and actions of the coordinator's machine.

Events are requests of the session (`BeginOperation`, `CancelSteps`) and reports of the transport
(`WorkerMessageReceived`, `LinkDown`). Actions are what the I/O loop must do (`SendToWorker`,
`SettleOperation`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphflowError
from graphflow.runtime.wire.array_codec import Buffer
from graphflow.runtime.wire.messages import Array, Chunk, Envelope, Message
from graphflow.runtime.wire.step_values import Key, Span


class Order(NamedTuple):
    """An order for one worker, and the arrays that are sent before it.

    Each array is (purpose, name, array). If an array lies in shared memory, the `Chunk` that says
    where stands in its place.
    """

    message: Message
    arrays: Sequence[tuple[str, Key, Array | Chunk]] = ()


# Events ----------------------------------------------------------------------------------------


class BeginOperation(NamedTuple):
    """Event: start an operation, with a deadline `seconds` from now.

    A step may begin before the step that it `follows` is decided. Its deadline then runs from that
    decision. A step that `is_held` is decided only after its `ReleaseStep`.
    """

    request: int
    orders: Mapping[int, Order]
    seconds: float
    step: int = 0
    follows: int = -1
    is_held: bool = False


class ReleaseStep(NamedTuple):
    """Event: let a held step be decided."""

    request: int


class WorkerMessageReceived(NamedTuple):
    """Event: a message arrived from a worker."""

    worker: int
    envelope: Envelope
    message: Message
    data: Buffer | None = None


@dataclass(frozen=True)
class LinkUp:
    """Event: the transport is connected to the worker's process, until `LinkDown`."""

    worker: int


@dataclass(frozen=True)
class LinkDown:
    """Event: the connection to a worker ended. The worker is lost if it stays away."""

    worker: int
    reason: str


@dataclass(frozen=True)
class WorkerGone:
    """Event: a worker is certainly lost.

    Its process has `ended`, or nothing can be sent to it. `op` is the op that ran when the process
    died, if it is known.
    """

    worker: int
    reason: str
    op: str = ""
    ended: bool = True


@dataclass(frozen=True)
class CancelSteps:
    """Event: abort all steps that are not decided."""


@dataclass(frozen=True)
class CoordinatorTick:
    """Event: time has passed (`CoordinatorMachine.wake_at`)."""


@dataclass(frozen=True)
class OfferMemoryToWorker:
    """Event: shared memory exists in which arrays can be lent to a worker."""

    worker: int
    token: str


@dataclass(frozen=True)
class AddWorker:
    """Event: a worker is to join the session; its number is the next one after those before."""

    address: str
    key: str = ""


CoordinatorEvent = (
    BeginOperation
    | ReleaseStep
    | WorkerMessageReceived
    | OfferMemoryToWorker
    | LinkUp
    | LinkDown
    | WorkerGone
    | CancelSteps
    | AddWorker
    | CoordinatorTick
)


# Actions ---------------------------------------------------------------------------------------


class Replies:
    """The workers' replies to an operation.

    Attributes:
        messages: the reply of each worker.
        arrays: the fetched arrays of each worker, by name.
        spans: the spans of a traced step, on this process's clock.
        errors: for each worker the bound, in seconds, of the error of its spans' times.
    """

    def __init__(self, messages: dict[int, Message] | None = None) -> None:
        self.messages: dict[int, Message] = messages or {}
        self.arrays: dict[int, dict[Key, Array]] = {}
        self.spans: list[Span] = []
        self.errors: dict[int, float] = {}

    @property
    def nbytes(self) -> int:
        """Total size of all fetched arrays, in bytes."""
        total = 0
        for mine in self.arrays.values():
            for array in mine.values():
                total += array.nbytes
        return total


class SettleOperation(NamedTuple):
    """Action: end an operation, with its replies or with an error."""

    request: int
    outcome: Replies | GraphflowError


class SendToWorker(NamedTuple):
    """Action: send a message to a worker.

    The message may take the fast channel only if it cannot overtake an earlier message on the main
    connection. That is so once all earlier messages have been `acknowledged`.
    """

    worker: int
    envelope: Envelope
    message: Message
    data: memoryview | None = None
    acknowledged: int = 0


@dataclass(frozen=True)
class ReportDraining:
    """Action: report that a worker was asked to end, and will do so after some seconds."""

    worker: int
    seconds: float


@dataclass(frozen=True)
class AttachWorkerMemory:
    """Action: attach shared memory in which a worker lends arrays."""

    worker: int
    token: str


CoordinatorAction = SendToWorker | SettleOperation | ReportDraining | AttachWorkerMemory
