"""A worker's side of the protocol: several sessions at once, each a queue of jobs of its own.

A session belongs to the coordinator that opened it: orders that come another way are dropped. Its
jobs run one at a time in the order in which they were given, while tensors of other workers, pings
and aborts are handled at once. A session whose coordinator falls silent is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graphflow.errors import GraphflowError, ProtocolError, SessionError, WorkerLost
from graphflow.runtime.messages import (
    COORDINATOR,
    Abort,
    Array,
    Broken,
    Chunk,
    Close,
    Commit,
    Compute,
    Computed,
    Done,
    Envelope,
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
    Spans,
    Welcome,
    Write,
)
from graphflow.runtime.protocol.faults import error_of, failed
from graphflow.runtime.protocol.stream import Arrival, Stream, Version
from graphflow.runtime.wire import SPANS_A_MESSAGE, Assembler, Buffer, chunks

Route = bytes  # how the transport finds the way back to a peer

MAX_SESSIONS = 64
_REMEMBERED = 256  # closed sessions whose late messages are still known as such

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
    | Measure
    | Probe
    | Close
    | Chunk
)
Outcome = None | Computed | Array | dict[str, object] | float | BaseException


# Events ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Received:
    """A message came over the connection `route`."""

    route: Route
    envelope: Envelope
    message: Message
    data: Buffer | None = None


@dataclass(frozen=True)
class Finished:
    """A job of a session ended, with its result or its error."""

    session: str
    job: Job
    step: int
    outcome: Outcome


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True)
class Leave:
    """The worker process is about to end."""


WorkerEvent = Received | Finished | Tick | Leave


# Actions ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Send:
    """Sends a message back over a connection."""

    route: Route
    envelope: Envelope
    message: Message
    data: memoryview | None = None


@dataclass(frozen=True)
class Run:
    """Gives a session its next job; Open is the first and Close the last.

    A Chunk is an echo to send back, and runs beside the others.
    """

    session: str
    job: Job
    step: int
    epoch: int
    arrays: dict[Key, Array] = field(default_factory=dict)


@dataclass(frozen=True)
class Deliver:
    """A tensor arrived from another worker; or an echo came back, then `step` is the request."""

    session: str
    step: int
    edge: Key
    array: Array
    echo: bool = False


@dataclass(frozen=True)
class Wake:
    """Cancels a step: whatever waits in it wakes up with the error."""

    session: str
    step: int
    error: GraphflowError


WorkerAction = Send | Run | Deliver | Wake


# State -----------------------------------------------------------------------------------------


@dataclass
class _Session:
    route: Route
    stream: Stream  # with the coordinator
    peers: list[Stream]  # with the other workers; only their receiving half is used here
    inbox: Assembler
    lease: float
    heard: float
    begun: int = -1  # the last step that was computed or is being computed
    settled: int = -1  # the last step that was committed or aborted


class WorkerMachine:
    """The sessions of one worker process that offers `devices`."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = list(devices)
        self._version = Version.own()
        self._sessions: dict[str, _Session] = {}
        self._closed: deque[str] = deque(maxlen=_REMEMBERED)

    @property
    def sessions(self) -> list[str]:
        """The open sessions."""
        return list(self._sessions)

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerAction]:
        """What to do about an event. Time is monotonic, in seconds."""
        match event:
            case Received():
                return self._receive(event, now)
            case Finished():
                return self._finish(event)
            case Tick():
                silent = [
                    s for s, state in self._sessions.items() if now > state.heard + state.lease
                ]
                return self._drop(silent, "its coordinator has been silent for too long")
            case Leave():
                return self._drop(self.sessions, "the worker ends")

    # Messages ----------------------------------------------------------------------------------

    def _receive(self, event: Received, now: float) -> list[WorkerAction]:
        envelope, message = event.envelope, event.message
        if isinstance(message, Hello):
            own = self._version
            welcome = Welcome(message.request, own.version, own.wire, own.python, self._devices)
            return [Send(event.route, _back(envelope, 1), welcome)]
        session = self._sessions.get(envelope.session)
        if session is None:
            return self._unknown(event, now)
        if isinstance(message, Chunk) and envelope.origin != COORDINATOR:
            return self._from_peer(session, envelope, message, event.data)
        if event.route != session.route:
            return []  # somebody else's order
        match session.stream.receive(envelope):
            case Arrival.DUPLICATE | Arrival.STALE:
                return []
            case Arrival.GAP:
                return self._break(session, "messages to it were lost by a reconnection")
        session.heard = now
        try:
            return self._order(session, message, envelope.step, event.data)
        except ProtocolError as error:
            if hasattr(message, "request"):
                for purpose in ("feed", "part", "value"):
                    session.inbox.forget(purpose, message.request)
                return [self._reply(session, failed(message.request, error), envelope.step)]
            return self._break(session, str(error))

    def _unknown(self, event: Received, now: float) -> list[WorkerAction]:
        envelope, message = event.envelope, event.message
        if isinstance(message, Open) and envelope.session not in self._closed:
            return self._open(event.route, envelope, message, now)
        if isinstance(message, Close):
            answer = Ready(message.request)
            return [Send(event.route, _back(envelope, envelope.acknowledged + 1), answer)]
        if isinstance(message, Ping | Compute | Load | Prepare | Read | Write | Forget):
            reason = "it does not know the session: it was restarted, or the session's lease ended"
            return [Send(event.route, _back(envelope, envelope.acknowledged + 1), Broken(reason))]
        return []

    def _open(
        self, route: Route, envelope: Envelope, message: Open, now: float
    ) -> list[WorkerAction]:
        name, epoch = envelope.session, envelope.epoch
        error: GraphflowError | None = None
        if len(self._sessions) >= MAX_SESSIONS:
            error = SessionError(f"the worker serves {MAX_SESSIONS} sessions already; close one")
        elif message.worker >= len(message.peers):
            error = ProtocolError(f"no worker {message.worker} among {len(message.peers)}")
        elif message.keys and len(message.keys) != len(message.peers):
            error = ProtocolError(f"{len(message.keys)} keys for {len(message.peers)} workers")
        if error is not None:
            answer = failed(message.request, error)
            return [Send(route, _back(envelope, envelope.acknowledged + 1), answer)]
        # Welcome was the first message to this coordinator, whatever came of others before it.
        stream = Stream(name, epoch, message.worker, sent=1, received=envelope.sequence)
        peers = [Stream(name, epoch, message.worker) for _ in message.peers]
        session = _Session(route, stream, peers, Assembler(), message.lease, now)
        self._sessions[name] = session
        return [Run(name, message, 0, epoch)]

    def _from_peer(
        self, session: _Session, envelope: Envelope, chunk: Chunk, data: Buffer | None
    ) -> list[WorkerAction]:
        if data is None or not 0 <= envelope.origin < len(session.peers):
            return []
        match session.peers[envelope.origin].receive(envelope):
            case Arrival.DUPLICATE | Arrival.STALE:
                return []
            case Arrival.GAP:
                reason = f"messages from worker {envelope.origin} to it were lost"
                return self._break(session, reason)
        name, epoch = session.stream.session, session.stream.epoch
        purpose, number, key = chunk.purpose, chunk.number, chunk.name
        if purpose == "edge" and number <= session.settled:
            return []  # of a step that is over
        try:
            if purpose not in ("edge", "echo", "echoed"):
                raise ProtocolError(f"a worker sends no {purpose!r}")
            if not session.inbox.add(envelope.origin, chunk, data):
                return []
            array = session.inbox.take(envelope.origin, purpose, number, key)
        except ProtocolError as error:
            return self._break(session, f"worker {envelope.origin} sent it nonsense: {error}")
        if purpose == "echo":
            back = replace(chunk, purpose="echoed", name=envelope.origin)
            return [Run(name, back, 0, epoch, {key: array})]
        return [Deliver(name, number, key, array, echo=purpose == "echoed")]

    def _order(
        self, session: _Session, message: Message, step: int, data: Buffer | None
    ) -> list[WorkerAction]:
        name, epoch = session.stream.session, session.stream.epoch
        match message:
            case Ping():
                return [self._reply(session, Pong())]
            case Chunk():
                if message.purpose not in ("feed", "part", "value") or data is None:
                    raise ProtocolError(f"a coordinator sends no {message.purpose!r}")
                session.inbox.add(COORDINATOR, message, data)
                return []
            case Load():
                arrays = self._take(session, "part", message.request, range(message.parts))
                return [Run(name, message, 0, epoch, arrays)]
            case Compute():
                if step <= max(session.begun, session.settled):
                    raise ProtocolError(f"step {step} is not after step {session.begun}")
                arrays = self._take(session, "feed", message.request, message.feeds)
                session.begun = step
                return [Run(name, message, step, epoch, arrays)]
            case Commit() | Abort():
                return self._settle(session, message, step)
            case Write():
                arrays = self._take(session, "value", message.request, [message.variable])
                return [Run(name, message, 0, epoch, arrays)]
            case Prepare() | Read() | Forget() | Measure() | Probe():
                return [Run(name, message, 0, epoch)]
            case Close():
                closing = self._drop([name], "the session was closed")
                return [*closing, self._reply(session, Ready(message.request))]
        raise ProtocolError(f"a coordinator sends no {type(message).__name__}")

    def _take(
        self, session: _Session, purpose: str, request: int, names: Iterable[Key]
    ) -> dict[Key, Array]:
        return {name: session.inbox.take(COORDINATOR, purpose, request, name) for name in names}

    def _settle(self, session: _Session, message: Commit | Abort, step: int) -> list[WorkerAction]:
        name, epoch = session.stream.session, session.stream.epoch
        if step != session.begun or step <= session.settled:
            return []  # the compute order was refused, and its failure is why the step is aborted
        session.settled = step
        session.inbox.forget("edge", step)
        run = Run(name, message, step, epoch)
        if isinstance(message, Commit):
            return [run]
        return [Wake(name, step, error_of(message.error, message.text)), run]

    # Results -----------------------------------------------------------------------------------

    def _finish(self, event: Finished) -> list[WorkerAction]:
        session = self._sessions.get(event.session)
        job, outcome = event.job, event.outcome
        if session is None or isinstance(job, Close | Chunk):
            return []
        if isinstance(job, Commit | Abort):
            if isinstance(outcome, BaseException):
                what = f"{type(job).__name__.lower()} of step {event.step} failed"
                return self._break(session, f"{what}: {outcome}")
            return []
        if isinstance(job, Compute) and event.step <= session.settled:
            return []  # aborted meanwhile: nobody waits for it
        if isinstance(outcome, BaseException):
            actions: list[WorkerAction] = [
                self._reply(session, failed(job.request, outcome), event.step)
            ]
            if isinstance(job, Open):
                actions += self._drop([event.session], "it could not be opened")
            return actions
        if isinstance(outcome, Computed | np.ndarray):
            assert isinstance(job, Compute | Read)
            try:
                return self._results(session, job, event.step, outcome)
            except ProtocolError as error:
                return [self._reply(session, failed(job.request, error), event.step)]
        if isinstance(job, Measure):
            return [self._reply(session, Measured(job.request, outcome))]
        if isinstance(job, Probe) and isinstance(outcome, float):
            return [self._reply(session, Probed(job.request, outcome))]
        return [self._reply(session, Ready(job.request))]

    def _results(
        self, session: _Session, job: Compute | Read, step: int, outcome: Computed | Array
    ) -> list[WorkerAction]:
        if isinstance(outcome, Computed):
            computed = outcome
        else:
            assert isinstance(job, Read)
            computed = Computed({job.variable: outcome})
        # All arrays are cut before anything is numbered: one that cannot travel leaves no gap.
        pieces = [
            piece
            for name, array in computed.fetches.items()
            for piece in chunks("fetch", job.request, name, array)
        ]
        peak = {device: int(nbytes) for device, nbytes in computed.peak.items()}
        messages: list[tuple[Message, memoryview | None]] = [
            (Spans(job.request, computed.spans[start : start + SPANS_A_MESSAGE]), None)
            for start in range(0, len(computed.spans), SPANS_A_MESSAGE)
        ]
        messages += pieces
        messages.append((Done(job.request, list(computed.fetches), peak), None))
        return [self._reply(session, message, step, data) for message, data in messages]

    def _reply(
        self, session: _Session, message: Message, step: int = 0, data: memoryview | None = None
    ) -> Send:
        return Send(session.route, session.stream.stamp(step), message, data)

    # Ends --------------------------------------------------------------------------------------

    def _break(self, session: _Session, reason: str) -> list[WorkerAction]:
        """Tells the coordinator that the session cannot go on here, and closes it."""
        told = self._reply(session, Broken(reason))
        return [told, *self._drop([session.stream.session], reason)]

    def _drop(self, names: Sequence[str], reason: str) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        for name in names:
            session = self._sessions.pop(name)
            self._closed.append(name)
            if session.begun > session.settled:
                actions.append(Wake(name, session.begun, WorkerLost(f"session closed: {reason}")))
            actions.append(Run(name, Close(0), 0, session.stream.epoch))
        return actions


def _back(envelope: Envelope, sequence: int) -> Envelope:
    """The envelope of an answer outside a session."""
    return Envelope(envelope.session, envelope.epoch, 0, envelope.step, sequence)
