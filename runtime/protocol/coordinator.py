"""The coordinator's side of a session: requests to workers, two-phase steps, who is alive.

An operation sends one order to each of some workers and settles when all have replied, when one
fails or is lost, or at its deadline. A step is an operation whose end is a decision: commit when
every worker has computed it, abort otherwise; each worker is told the same one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphflow.errors import (
    GraphflowError,
    ProtocolError,
    RendezvousTimeout,
    SessionError,
    StepTimeout,
    VersionMismatch,
    WorkerLost,
)
from graphflow.runtime.messages import (
    COORDINATOR,
    Abort,
    Array,
    Broken,
    Chunk,
    Close,
    Commit,
    Compute,
    Done,
    Envelope,
    Failed,
    Forget,
    Hello,
    Key,
    Load,
    Measure,
    Measured,
    Message,
    Open,
    Ping,
    Pong,
    Prepare,
    Probe,
    Probed,
    Read,
    Ready,
    Span,
    Spans,
    Welcome,
    Write,
)
from graphflow.runtime.protocol.faults import raised
from graphflow.runtime.protocol.stream import Arrival, Stream, Version
from graphflow.runtime.wire import Assembler, Buffer, chunks

BEAT = 1.0  # seconds between two pings
DEAD_AFTER = 4.0  # seconds of silence after which a worker without a live link is lost
GRACE = 0.5  # seconds after a step's deadline in which workers may say what they waited for

_REPLIES: dict[type[Message], type[Message]] = {
    Hello: Welcome,
    Open: Ready,
    Load: Ready,
    Prepare: Ready,
    Compute: Done,
    Read: Done,
    Write: Ready,
    Forget: Ready,
    Measure: Measured,
    Probe: Probed,
    Close: Ready,
}


@dataclass(frozen=True)
class Order:
    """What one worker is asked, and the arrays (purpose, name, array) that go before it."""

    message: Message
    arrays: Sequence[tuple[str, Key, Array]] = ()


# Events ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Begin:
    """Starts an operation; `seconds` is its deadline from now."""

    request: int
    orders: Mapping[int, Order]
    seconds: float
    step: int = 0


@dataclass(frozen=True)
class Received:
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
    """The worker's process ended, froze, or cannot be reached."""

    worker: int
    reason: str


@dataclass(frozen=True)
class Cancel:
    """Aborts the steps that are not decided."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


CoordinatorEvent = Begin | Received | LinkUp | LinkDown | Cancel | Tick


# Actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Sends a message to a worker."""

    worker: int
    envelope: Envelope
    message: Message
    data: memoryview | None = None


@dataclass
class Replies:
    """What the workers replied: messages and arrays by worker, and the spans of a traced step."""

    messages: dict[int, Message] = field(default_factory=dict)
    arrays: dict[int, dict[Key, Array]] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True)
class Settle:
    """An operation has ended, with replies or with an error."""

    request: int
    outcome: Replies | GraphflowError


CoordinatorAction = Send | Settle


# State -----------------------------------------------------------------------------------------


@dataclass
class _Peer:
    address: str
    stream: Stream
    inbox: Assembler
    heard: float
    welcomed: bool = False
    opened: bool = False  # it was told of the session: before, it would not know what a Ping is of
    link: bool = False  # the transport vouches for the process
    lost: str = ""  # why, once it is lost


@dataclass
class _Operation:
    begin: Begin
    deadline: float
    waiting: set[int]
    replies: Replies = field(default_factory=Replies)

    @property
    def is_step(self) -> bool:
        return any(isinstance(order.message, Compute) for order in self.begin.orders.values())

    @property
    def what(self) -> str:
        message = next(iter(self.begin.orders.values())).message
        if isinstance(message, Compute):
            return f"step {self.begin.step}"
        subject = getattr(message, "variable", getattr(message, "program", ""))
        return f"{type(message).__name__.lower()} {subject}".rstrip()


class CoordinatorMachine:
    """One session over the workers at `addresses`, in their order."""

    def __init__(self, session: str, addresses: Sequence[str], now: float, epoch: int = 1) -> None:
        self._version = Version.own()
        self._peers = [
            _Peer(address, Stream(session, epoch, COORDINATOR), Assembler(), now)
            for address in addresses
        ]
        self._operations: dict[int, _Operation] = {}
        self._beat = now

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        """What to do about an event. Time is monotonic, in seconds."""
        match event:
            case Begin():
                return self._begin(event, now)
            case Received():
                return self._receive(event, now)
            case LinkUp(worker):
                self._peers[worker].link = True
                return []
            case LinkDown(worker, reason):
                peer = self._peers[worker]
                # Before the welcome the transport keeps trying: the rendezvous has a deadline.
                return self._lose(worker, reason) if peer.welcomed and not peer.lost else []
            case Cancel():
                return self._cancel()
            case Tick():
                return self._tick(now)

    def wake_at(self, now: float) -> float:
        """When the next Tick is due."""
        deadlines = [operation.deadline for operation in self._operations.values()]
        return max(now, min([self._beat + BEAT, *deadlines]))

    def awaited(self) -> list[int]:
        """The workers whose replies an operation waits for."""
        operations = list(self._operations.values())
        return sorted({worker for each in operations for worker in tuple(each.waiting)})

    def lost(self) -> dict[int, str]:
        """The workers that are lost, and why."""
        return {index: peer.lost for index, peer in enumerate(self._peers) if peer.lost}

    # Events ------------------------------------------------------------------------------------

    def _begin(self, begin: Begin, now: float) -> list[CoordinatorAction]:
        operation = _Operation(begin, now + begin.seconds, set(begin.orders))
        for worker in begin.orders:
            if self._peers[worker].lost:
                what = f"was lost before {operation.what}"
                return [Settle(begin.request, self._lost_error(worker, what))]
        if operation.is_step:
            operation.deadline += GRACE
        # All arrays are cut before anything is numbered: one that cannot travel leaves no gap.
        pieces = {
            worker: [
                piece
                for purpose, name, array in order.arrays
                for piece in chunks(purpose, begin.request, name, array)
            ]
            for worker, order in begin.orders.items()
        }
        if not operation.waiting:
            return [Settle(begin.request, operation.replies)]
        self._operations[begin.request] = operation
        actions: list[CoordinatorAction] = []
        for worker, order in begin.orders.items():
            if isinstance(order.message, Open):
                self._peers[worker].opened = True
            actions += [
                self._send(worker, chunk, begin.step, data) for chunk, data in pieces[worker]
            ]
            actions.append(self._send(worker, order.message, begin.step))
        return actions

    def _receive(self, event: Received, now: float) -> list[CoordinatorAction]:
        peer, envelope, message = self._peers[event.worker], event.envelope, event.message
        if peer.lost or envelope.session != peer.stream.session:
            return []
        match peer.stream.receive(envelope):
            case Arrival.DUPLICATE | Arrival.STALE:
                return []
            case Arrival.GAP:
                return self._lose(event.worker, "messages from it were lost by a reconnection")
        peer.heard = now
        try:
            return self._reply(event.worker, message, event.data)
        except ProtocolError as error:
            return self._lose(event.worker, f"it sent what is not valid here: {error}")

    def _reply(self, worker: int, message: Message, data: Buffer | None) -> list[CoordinatorAction]:
        peer = self._peers[worker]
        if isinstance(message, Pong):
            return []
        if isinstance(message, Broken):
            return self._lose(worker, message.reason)
        if isinstance(message, Chunk):
            if message.purpose != "fetch" or data is None:
                raise ProtocolError(f"an array for {message.purpose!r} was not asked for")
            if message.number in self._operations:
                peer.inbox.add(worker, message, data)
            return []
        operation = self._operations.get(getattr(message, "request", -1))
        if operation is None or worker not in operation.waiting:
            return []  # it ended before: aborted, timed out
        request = operation.begin.request
        if isinstance(message, Failed):
            where = f"worker {worker} at {peer.address}"
            return self._end(operation, raised(message, where))
        if isinstance(message, Spans):
            operation.replies.spans.extend(message.spans)
            return []
        expected = _REPLIES[type(operation.begin.orders[worker].message)]
        if not isinstance(message, expected):
            raise ProtocolError(f"{type(message).__name__} is no answer to {operation.what}")
        if isinstance(message, Welcome):
            peer.welcomed = True
            if Version.of(message) != self._version:
                return self._end(operation, self._mismatch(worker, Version.of(message)))
        if isinstance(message, Done):
            operation.replies.arrays[worker] = {
                name: peer.inbox.take(worker, "fetch", request, name) for name in message.fetches
            }
        operation.replies.messages[worker] = message
        operation.waiting.discard(worker)
        return [] if operation.waiting else self._end(operation, None)

    def _cancel(self) -> list[CoordinatorAction]:
        steps = [operation for operation in self._operations.values() if operation.is_step]
        return [
            action
            for operation in steps
            for action in self._end(operation, SessionError(f"{operation.what} was cancelled"))
        ]

    def _tick(self, now: float) -> list[CoordinatorAction]:
        actions: list[CoordinatorAction] = []
        for worker, peer in enumerate(self._peers):
            if peer.welcomed and not peer.lost and not peer.link and now > peer.heard + DEAD_AFTER:
                actions += self._lose(worker, f"it was silent for {now - peer.heard:.1f} s")
        for operation in list(self._operations.values()):
            if now >= operation.deadline:
                actions += self._end(operation, self._late(operation))
        if now >= self._beat + BEAT:
            self._beat = now
            for worker, peer in enumerate(self._peers):
                if peer.opened and not peer.lost:
                    actions.append(self._send(worker, Ping(), 0))
        return actions

    # Ends --------------------------------------------------------------------------------------

    def _end(self, operation: _Operation, error: GraphflowError | None) -> list[CoordinatorAction]:
        """Settles an operation; for a step this is the decision, which all its workers are told."""
        request, step = operation.begin.request, operation.begin.step
        del self._operations[request]
        actions: list[CoordinatorAction] = []
        for worker in operation.begin.orders:
            peer = self._peers[worker]
            peer.inbox.forget("fetch", request)
            if operation.is_step and not peer.lost:
                told = Commit() if error is None else Abort(type(error).__name__, str(error)[:2000])
                actions.append(self._send(worker, told, step))
        actions.append(Settle(request, operation.replies if error is None else error))
        return actions

    def _lose(self, worker: int, reason: str) -> list[CoordinatorAction]:
        self._peers[worker].lost = reason
        actions: list[CoordinatorAction] = []
        for operation in list(self._operations.values()):
            if worker in operation.begin.orders:
                error = self._lost_error(worker, f"was lost in {operation.what}")
                actions += self._end(operation, error)
        return actions

    def _lost_error(self, worker: int, what: str) -> WorkerLost:
        peer = self._peers[worker]
        return WorkerLost(f"worker {worker} at {peer.address} {what}: {peer.lost}")

    def _mismatch(self, worker: int, other: Version) -> VersionMismatch:
        return VersionMismatch(
            f"worker {worker} at {self._peers[worker].address} runs {other}, this process runs "
            f"{self._version}; install the same version on both"
        )

    def _late(self, operation: _Operation) -> GraphflowError:
        seconds = operation.begin.seconds
        late = ", ".join(
            f"worker {worker} at {self._peers[worker].address}"
            for worker in sorted(operation.waiting)
        )
        first = next(iter(operation.begin.orders.values())).message
        if isinstance(first, Hello | Open):
            return RendezvousTimeout(
                f"{late} did not answer within {seconds:g} s; "
                "is `graphflow worker --listen ADDRESS` running there?"
            )
        return StepTimeout(
            f"{operation.what} passed its deadline of {seconds:g} s: {late} had not finished; "
            "raise the deadline if the work is expected to take longer"
        )

    def _send(
        self, worker: int, message: Message, step: int, data: memoryview | None = None
    ) -> Send:
        return Send(worker, self._peers[worker].stream.stamp(step), message, data)
