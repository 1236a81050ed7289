"""What goes in and out of a coordinator's machine: orders to workers, and what becomes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import GraphflowError
from graphflow.runtime.wire.frame_codec import Buffer
from graphflow.runtime.wire.messages import Array, Chunk, Envelope, Key, Message, Span


class Order(NamedTuple):
    """What one worker is asked, and the arrays (purpose, name, array) that go before it;
    of one that is lent, the message that says where it is."""

    message: Message
    arrays: Sequence[tuple[str, Key, Array | Chunk]] = ()


# Events ----------------------------------------------------------------------------------------


class BeginOperation(NamedTuple):
    """The event that starts an operation; `seconds` is its deadline from now.

    A step may be begun before the one that it `follows` is decided; its time then runs from that
    decision. One that is `held` is decided only when it is released.
    """

    request: int
    orders: Mapping[int, Order]
    seconds: float
    step: int = 0
    follows: int = -1
    is_held: bool = False


class ReleaseStep(NamedTuple):
    """The event that lets a step that was held be decided."""

    request: int


class WorkerMessageReceived(NamedTuple):
    """A message came from a worker."""

    worker: int
    envelope: Envelope
    message: Message
    data: Buffer | None = None


@dataclass(frozen=True)
class LinkUp:
    """The transport vouches for the worker's process from now on, until LinkDown."""

    worker: int


@dataclass(frozen=True)
class LinkDown:
    """The worker cannot be reached; it is lost if that goes on."""

    worker: int
    reason: str


@dataclass(frozen=True)
class WorkerGone:
    """The worker is lost for certain: its process has `ended`, or nothing can be sent to it. `op`
    is the one that it died in, if known."""

    worker: int
    reason: str
    op: str = ""
    ended: bool = True


@dataclass(frozen=True)
class CancelSteps:
    """Aborts the steps that are not decided."""


@dataclass(frozen=True)
class CoordinatorTick:
    """Time has passed."""


@dataclass(frozen=True)
class OfferMemoryToWorker:
    """There is memory in which arrays can be lent to a worker."""

    worker: int
    token: str


CoordinatorEvent = (
    BeginOperation
    | ReleaseStep
    | WorkerMessageReceived
    | OfferMemoryToWorker
    | LinkUp
    | LinkDown
    | WorkerGone
    | CancelSteps
    | CoordinatorTick
)


# Actions ---------------------------------------------------------------------------------------


class Replies:
    """What the workers replied: messages and arrays by worker, and the spans of a traced step, on
    our clock, with the errors of their times in seconds."""

    def __init__(self, messages: dict[int, Message] | None = None) -> None:
        self.messages: dict[int, Message] = messages or {}
        self.arrays: dict[int, dict[Key, Array]] = {}
        self.spans: list[Span] = []
        self.errors: dict[int, float] = {}

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        total = 0
        for mine in self.arrays.values():
            for array in mine.values():
                total += array.nbytes
        return total


class SettleOperation(NamedTuple):
    """The action that ends an operation, with replies or with an error."""

    request: int
    outcome: Replies | GraphflowError


class SendToWorker(NamedTuple):
    """Sends a message to a worker; over a lane, too, unless it would overtake what went another way
    and has not been `acknowledged`."""

    worker: int
    envelope: Envelope
    message: Message
    data: memoryview | None = None
    acknowledged: int = 0


@dataclass(frozen=True)
class ReportDraining:
    """A worker was asked to end, and will after so many seconds."""

    worker: int
    seconds: float


@dataclass(frozen=True)
class AttachWorkerMemory:
    """A worker has memory in which it can lend arrays."""

    worker: int
    token: str


CoordinatorAction = SendToWorker | SettleOperation | ReportDraining | AttachWorkerMemory
