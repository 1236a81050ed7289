"""The worker's state machine: several sessions at once, each with a queue of jobs of its own.

A session belongs to whoever knows its token, and of these to the coordinator with the highest
epoch. An order of an older coordinator is refused, and answered with the reason. Jobs of a session
run one at a time, in order. Tensors of other workers, pings and aborts are handled at once.

If its coordinator falls silent, a session stays as it is after its present step, so that another
coordinator can take over. It is closed when its lease ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from graphflow.base.addresses import is_loopback
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import (
    GraphflowError,
    ProtocolError,
    SessionError,
    StaleEpoch,
    StaleSession,
    WorkerLost,
)
from graphflow.runtime.protocol.reliable_stream import (
    Inbound,
    ReceiveStatus,
    ReliableStream,
    Version,
    stale_error,
)
from graphflow.runtime.protocol.remote_errors import failure_message
from graphflow.runtime.protocol.worker_events import (
    AttachPeerMemory,
    BeatPeerLinks,
    CancelStep,
    DeliverTensor,
    DrainWorker,
    EndSession,
    EndWorker,
    JobFinished,
    MessageReceived,
    OfferMemoryToCoordinator,
    PeerUnreached,
    Route,
    RunJob,
    SendMessage,
    UpdatePeerLink,
    WorkerAction,
    WorkerEvent,
    WorkerTick,
)
from graphflow.runtime.protocol.worker_session import WorkerSession
from graphflow.runtime.wire.array_codec import Buffer, decode_small, return_borrowed
from graphflow.runtime.wire.chunk_assembler import ByteBudget, ChunkAssembler
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    Abort,
    Ack,
    Adopt,
    Broken,
    Chunk,
    Close,
    Commit,
    Compute,
    Draining,
    Envelope,
    Fenced,
    Forget,
    Hello,
    Join,
    Load,
    Measure,
    Meet,
    Message,
    Open,
    Ping,
    Pong,
    Prepare,
    Probe,
    Read,
    Ready,
    Resend,
    Save,
    Share,
    Tensor,
    Unreached,
    Welcome,
    Write,
    replace_fields,
)
from graphflow.runtime.wire.step_values import Computed, step_of

MAX_SESSIONS = 64
MAX_LEASE = 86_400.0  # seconds; an abandoned session must not be kept for ever
_UNANSWERED = (Close, Chunk)
_DECISIONS = (Commit, Abort)
_COMMIT = Commit()
_REPORT_EVERY = 8  # small tensors, after which their acknowledgement is passed to the link
_QUIET_SECONDS = 1.5  # seconds without a message of the coordinator, which sends one every second
_MAX_CLOSED = 4096  # closed sessions that are remembered, to recognise their late messages
_MAX_NAME = 64  # characters of a session's name; generated ones have 32
_PARKED_AFTER = 5.0  # seconds without a message of the coordinator until a session is parked


@dataclass(frozen=True)
class _ClosedSession:
    epoch: int
    reason: str


@dataclass(frozen=True)
class ExitReport:
    """The end of the earlier worker process: the reason, the op, and the op's session."""

    reason: str
    op: str = ""
    session: str = ""

    def message_for(self, session: str) -> Broken:
        """Return the message for one of the sessions that the worker served.

        Only the session whose op it was is told the op; the work of other sessions stays private.
        """
        if self.session and session != self.session:
            return Broken(f"its process has ended in what another session computed, {self.reason}")
        return Broken(self.reason, self.op, ended=True)


class WorkerMachine:
    """The sessions of one worker process that offers `devices`.

    Args:
        home: identity of the clock of its times, see `clock_sync.clock_identity`.
        memory: bytes that arrays in transit may take, for all sessions together.
        exit_report: how the earlier process at this address ended. With it, the machine does
            nothing but report that to coordinators.
        process: a random number that identifies this process. An `Open` names it, so that one that
            was sent to an earlier process at this address opens nothing here.
    """

    def __init__(
        self,
        devices: Sequence[str],
        home: str = "",
        memory: int = 1 << 62,
        exit_report: ExitReport | None = None,
        process: int = 0,
    ) -> None:
        self._process = process
        self._devices = list(devices)
        self._home = home
        self._version = Version.own()
        self._shared_budget = ByteBudget(memory)
        self._sessions: dict[str, WorkerSession] = {}
        self._closed: dict[str, _ClosedSession] = {}
        self._draining = False
        self._last_tick = inf
        self._exit_report = exit_report

    @property
    def sessions(self) -> list[str]:
        """The names of the open sessions."""
        return list(self._sessions)

    def parked_sessions(self, now: float) -> list[str]:
        """Return the sessions whose coordinator is silent, and that wait for another one."""
        return [
            name for name, state in self._sessions.items() if now > state.heard_at + _PARKED_AFTER
        ]

    def stream(self, session: str) -> ReliableStream:
        """Return the message stream to a session's coordinator, to read only."""
        return self._sessions[session].stream

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerAction]:
        """Return the actions for an event. `now` is monotonic, in seconds."""
        if isinstance(event, MessageReceived):  # most events are of these two types
            return self._receive(event, now)
        if isinstance(event, JobFinished):
            return self._handle_result(event)
        match event:
            case OfferMemoryToCoordinator(name, token):
                session = self._sessions.get(name)
                return [] if session is None else [session.send_unnumbered(Share(token))]
            case PeerUnreached(name, worker, step, edge, asked):
                session = self._sessions.get(name)
                unreached = Unreached(worker, asked, edge)
                return [] if session is None else [session.send_unnumbered(unreached, step)]
            case WorkerTick():
                return self._tick(now)
            case DrainWorker(seconds):
                return self._drain(seconds)
            case EndSession(name, reason):
                session = self._sessions.get(name)
                return [] if session is None else self._break_session(session, reason)
            case EndWorker(reason):
                last = Broken(reason)
                goodbyes = [session.send_unnumbered(last) for session in self._sessions.values()]
                return [
                    *goodbyes,
                    *self._close_sessions(self.sessions, WorkerLost("the worker ends")),
                ]

    def _tick(self, now: float) -> list[WorkerAction]:
        stopped, self._last_tick = now - self._last_tick, now
        if stopped > _PARKED_AFTER:  # this process was stopped, so the silence is its own
            for session in self._sessions.values():
                session.heard_at = min(now, session.heard_at + stopped)
        actions: list[WorkerAction] = []
        for name, session in list(self._sessions.items()):
            if now > session.heard_at + session.lease:
                why = f"its coordinator was silent for its lease of {session.lease:g} s"
                stopped_too = "was that process stopped, its machine asleep, or the network cut?"
                actions += self._close_sessions([name], WorkerLost(f"{why}; {stopped_too}"))
        for name, session in self._sessions.items():
            # A message of ours shows the coordinator that the link is cut in one direction only.
            quiet = now > session.heard_at + _QUIET_SECONDS
            if (
                quiet
                or session.stream.outbound.pending
                or session.stream.inbound.owes_acknowledgement
            ):
                actions.append(session.send_unnumbered(Ack(asks=True)))
            owed = frozenset(
                index for index, peer in session.peers.items() if peer.owes_acknowledgement
            )
            for index in owed:
                session.peers[index].mark_acknowledged()
            if session.worker_count > 1:
                actions.append(BeatPeerLinks(name, owed))
        return actions

    def _drain(self, seconds: float) -> list[WorkerAction]:
        self._draining = True
        return [
            action
            for session in self._sessions.values()
            for action in session.reply(Draining(seconds))
        ]

    # Messages ----------------------------------------------------------------------------------

    def _receive(self, event: MessageReceived, now: float) -> list[WorkerAction]:
        route, envelope, message, data, is_fast = event
        if self._exit_report is not None:
            concerned = envelope.origin == COORDINATOR and not isinstance(message, Hello)
            report = self._exit_report.message_for(envelope.session)
            return [SendMessage(route, _reply_envelope(envelope, 0), report)] if concerned else []
        if type(message) is Hello:
            own = self._version
            welcome = Welcome(message.request, own.version, own.wire, own.python, self._devices)
            mine = _reply_envelope(envelope, 1)._replace(step=self._process)
            return [SendMessage(route, mine, welcome)]
        session = self._sessions.get(envelope.session)
        if session is None:
            return self._handle_unknown(event, now)
        stale = stale_error(envelope, session.epoch, session.token)
        if stale is not None:
            return self._handle_stale(session, event, stale, now)
        if envelope.origin != COORDINATOR:
            return self._handle_peer_message(session, envelope, message, data)
        answered = session.stream.outbound.answered_attempt
        arrival, outgoing = session.stream.receive(envelope, message, data)
        if arrival is ReceiveStatus.FRESH or session.is_current(
            arrival, envelope, message, answered
        ):
            session.heard_at = now
            if is_fast:
                session.fast_route = route
            else:  # a reconnection has a new route
                session.route = route
        elif isinstance(message, Ping):
            return []
        actions: list[WorkerAction] = (
            [session.make_send(each) for each in outgoing] if outgoing else []
        )
        if arrival is ReceiveStatus.UNNUMBERED:
            return actions + self._handle_unnumbered(session, message, now)
        if arrival is ReceiveStatus.DUPLICATE and isinstance(message, Open):
            return [*actions, session.send_unnumbered(Ack())]  # it is still opening
        if arrival is not ReceiveStatus.FRESH:
            return actions
        try:
            if type(message) is Compute:  # most messages
                if message.commits >= 0:
                    actions += session.settle(_COMMIT, message.commits)
                return actions + session.accept_step(message, envelope.step)
            return actions + self._handle_order(session, message, envelope.step, data)
        except ProtocolError as error:
            if hasattr(message, "request"):
                for purpose in ("feed", "part", "value"):
                    session.inbox.forget(purpose, message.request)
                answer = failure_message(message.request, error)
                return actions + session.reply(answer, envelope.step)
            return actions + self._break_session(session, str(error))

    def _handle_unknown(self, event: MessageReceived, now: float) -> list[WorkerAction]:
        envelope, message = event.envelope, event.message
        closed = self._closed.get(envelope.session)
        later = closed is None or envelope.epoch > closed.epoch
        if isinstance(message, Open) and later and envelope.step == self._process:
            return self._open(event.route, envelope, message, now)
        if envelope.origin != COORDINATOR or isinstance(message, Fenced):
            return []
        if isinstance(message, Close):
            answer = Ready(message.request)
            return [
                SendMessage(
                    event.route, _reply_envelope(envelope, envelope.acknowledged + 1), answer
                )
            ]
        why = "the worker was restarted meanwhile" if closed is None or later else closed.reason
        text = f"it does not know the session any more: {why}"
        return [
            SendMessage(
                event.route, _reply_envelope(envelope, 0), Fenced(StaleSession.__name__, text)
            )
        ]

    def _handle_stale(
        self, session: WorkerSession, event: MessageReceived, stale: GraphflowError, now: float
    ) -> list[WorkerAction]:
        """Handle a message of another epoch, or of a sender without the session's token."""
        envelope, message = event.envelope, event.message
        if isinstance(stale, StaleEpoch) and envelope.epoch > session.epoch:
            if envelope.origin != COORDINATOR:
                return []
            follows = isinstance(message, Open | Fenced)
            closing = self._close_sessions([session.name], stale) if follows else []
            # The message may be of an epoch that an earlier process at this address had.
            return closing + self._handle_unknown(event, now)
        if envelope.origin != COORDINATOR or isinstance(message, Fenced):
            return []
        refusal = Fenced(type(stale).__name__, str(stale))
        answer = _reply_envelope(envelope, 0)._replace(epoch=session.epoch)
        return [SendMessage(event.route, answer, refusal)]

    def _open(
        self, route: Route, envelope: Envelope, message: Open, now: float
    ) -> list[WorkerAction]:
        name, epoch, count = envelope.session, envelope.epoch, len(message.peers)
        error: GraphflowError | None = None
        address = message.peers[message.worker] if message.worker < count else ""
        who = f"worker {message.worker} at {address}"
        if self._draining:
            why = "was asked to end, and takes no more sessions"
            error = SessionError(f"{who} {why}; start it again, or leave it out of the cluster")
        elif len(self._sessions) >= MAX_SESSIONS:
            error = SessionError(f"{who} serves {MAX_SESSIONS} sessions already; close one of them")
        elif len(name) > _MAX_NAME:
            error = ProtocolError(
                f"the session's name has {len(name)} characters, more than {_MAX_NAME}"
            )
        elif not 0 < message.lease <= MAX_LEASE:
            error = ProtocolError(
                f"the lease is {message.lease:g} s; it must be positive, and at most {MAX_LEASE:g}"
            )
        elif message.worker >= count:
            error = ProtocolError(
                f"worker {message.worker} does not exist in a session of {count} workers"
            )
        elif message.keys and len(message.keys) != count:
            error = ProtocolError(f"the session has {len(message.keys)} keys for {count} workers")
        if error is not None:
            answer = failure_message(message.request, error)
            return [
                SendMessage(route, _reply_envelope(envelope, envelope.acknowledged + 1), answer)
            ]
        stream = ReliableStream(
            name, epoch, message.worker, envelope.token, received=envelope.sequence
        )
        stream.outbound.last_sent = 1  # the Welcome, whose number is fixed
        inbox = ChunkAssembler(shared_budget=self._shared_budget)
        far = not is_loopback(message.peers[message.worker])
        session = WorkerSession(route, stream, count, message.lease, now, inbox, far)
        self._sessions[name] = session
        return [RunJob(name, message, 0, epoch, token=envelope.token)]

    def _handle_unnumbered(
        self, session: WorkerSession, message: Message, now: float
    ) -> list[WorkerAction]:
        if isinstance(message, Share):
            return [AttachPeerMemory(session.name, COORDINATOR, message.token)]
        if not isinstance(message, Ping):
            return []
        at = session.last_begun if session.last_begun > session.last_settled else 0
        pong = Pong(sent=message.sent, clock=now, home=self._home)
        return [session.send_unnumbered(pong, at)]

    def _handle_peer_message(
        self, session: WorkerSession, envelope: Envelope, message: Message, data: Buffer | None
    ) -> list[WorkerAction]:
        origin = envelope.origin
        if not 0 <= origin < session.worker_count:
            return []
        inbound = session.peers.get(origin)
        if inbound is None:
            inbound = session.peers[origin] = Inbound()
        arrival, response = inbound.receive(envelope, message, data)
        if response is not None:
            inbound.mark_acknowledged()
        elif arrival is ReceiveStatus.FRESH and type(message) is Tensor:
            small = self._accept_tensor(session, origin, message, envelope.step)
            if envelope.acknowledged < inbound.last_reported + _REPORT_EVERY:
                return small  # the link is told later, for several tensors at once
            inbound.last_reported = envelope.acknowledged
            known = envelope.acknowledged
            return [*small, UpdatePeerLink(session.name, origin, known, inbound.received)]
        wanted = message if isinstance(message, Resend) else None
        inbound.last_reported = envelope.acknowledged
        heard = UpdatePeerLink(
            session.name, origin, envelope.acknowledged, inbound.received, response, wanted
        )
        if isinstance(message, Share):
            return [heard, AttachPeerMemory(session.name, origin, message.token)]
        if arrival is not ReceiveStatus.FRESH:
            return [heard]
        if isinstance(message, Tensor):
            return [*self._accept_tensor(session, origin, message, envelope.step), heard]
        if not isinstance(message, Chunk) or data is None:
            reason = f"worker {origin} sent it a {type(message).__name__}"
            return self._break_session(session, reason)
        try:
            # The link first: an echo that goes back at once then acknowledges this message.
            return [heard, *self._accept_chunk(session, origin, message, data)]
        except ProtocolError as error:
            return self._break_session(
                session, f"worker {origin} sent it an invalid message: {error}"
            )

    def _accept_tensor(
        self, session: WorkerSession, origin: int, message: Tensor, step: int
    ) -> list[WorkerAction]:
        if step <= session.last_settled:
            return []  # its step is over
        try:
            edge, array = decode_small(message.array)
        except ProtocolError as error:
            return self._break_session(
                session, f"worker {origin} sent it an invalid message: {error}"
            )
        return [DeliverTensor(session.name, step, edge, array, origin)]

    def _accept_chunk(
        self, session: WorkerSession, origin: int, chunk: Chunk, data: Buffer
    ) -> list[WorkerAction]:
        purpose, number, key = chunk.purpose, chunk.number, chunk.name
        if purpose == "edge" and number <= session.last_settled:
            return_borrowed(data)
            return []  # its step is over
        if purpose not in ("edge", "echo", "echoed"):
            raise ProtocolError(f"a worker may not send {purpose!r}")
        if not session.inbox.add(origin, chunk, data):
            return []
        array = session.inbox.take(origin, purpose, number, key)
        if purpose == "echo":
            back = replace_fields(chunk, purpose="echoed", name=origin)
            return [RunJob(session.name, back, 0, session.epoch, {key: array})]
        return [
            DeliverTensor(session.name, number, key, array, origin, is_echo=purpose == "echoed")
        ]

    def _handle_order(
        self, session: WorkerSession, message: Message, step: int, data: Buffer | None
    ) -> list[WorkerAction]:
        name, epoch = session.name, session.epoch
        match message:
            case Chunk():
                if message.purpose not in ("feed", "part", "value") or data is None:
                    raise ProtocolError(f"a coordinator may not send {message.purpose!r}")
                session.inbox.add(COORDINATOR, message, data)
                return []
            case Load():
                arrays = session.take_arrays("part", message.request, range(message.parts))
                return [RunJob(name, message, 0, epoch, arrays)]
            case Commit() | Abort():
                return session.settle(message, step)
            case Write():
                arrays = session.take_arrays("value", message.request, [message.variable])
                return [RunJob(name, message, 0, epoch, arrays)]
            case Prepare() | Read() | Forget() | Adopt() | Save() | Measure() | Meet() | Probe():
                return [RunJob(name, message, 0, epoch)]
            case Join():
                if message.worker < session.worker_count:
                    raise ProtocolError(
                        f"worker {message.worker} joins a session of {session.worker_count} workers"
                    )
                session.worker_count = message.worker + 1  # others did not come
                return [RunJob(name, message, 0, epoch)]
            case Close():
                answer = session.reply(Ready(message.request))
                return [
                    *self._close_sessions([name], WorkerLost("the session was closed")),
                    *answer,
                ]
        raise ProtocolError(f"a coordinator may not send {type(message).__name__}")

    # Results -----------------------------------------------------------------------------------

    def _handle_result(self, event: JobFinished) -> list[WorkerAction]:
        session = self._sessions.get(event.session)
        job, outcome = event.job, event.outcome
        if session is None or session.epoch != event.epoch or isinstance(job, _UNANSWERED):
            return []
        if type(job) is Compute and type(outcome) is Computed and event.step > session.last_settled:
            return session.send_result(job, event.step, outcome)  # most results
        if isinstance(job, _DECISIONS):
            if isinstance(outcome, BaseException):
                what = f"{type(job).__name__.lower()} of step {step_of(event.step)} failed"
                return self._break_session(session, f"{what}: {outcome}")
            return []
        if isinstance(job, Compute) and event.step <= session.last_settled:
            return []  # aborted meanwhile: nobody waits for it
        if isinstance(outcome, BaseException):
            actions = session.reply(failure_message(job.request, outcome), event.step)
            if isinstance(job, Open):
                actions += self._close_sessions(
                    [event.session], WorkerLost("it could not be opened")
                )
            return actions
        return session.send_result(job, event.step, outcome)

    # Ends --------------------------------------------------------------------------------------

    def _break_session(self, session: WorkerSession, reason: str) -> list[WorkerAction]:
        """Tell the coordinator that its session cannot go on here, and close it."""
        broken = session.send_unnumbered(Broken(reason))
        return [broken, *self._close_sessions([session.name], WorkerLost(reason))]

    def _close_sessions(self, names: Sequence[str], error: GraphflowError) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        for name in names:
            session = self._sessions.pop(name)
            session.inbox.clear()
            while len(self._closed) >= _MAX_CLOSED:
                del self._closed[next(iter(self._closed))]
            self._closed[name] = _ClosedSession(session.epoch, str(error))
            if session.last_begun > session.last_settled:
                actions.append(CancelStep(name, session.last_begun, error))
            actions.append(RunJob(name, Close(0), 0, session.epoch))
        return actions


def _reply_envelope(envelope: Envelope, sequence: int) -> Envelope:
    """Return the envelope of a reply outside a session, with the token that the sender showed."""
    return Envelope(
        envelope.session, envelope.epoch, 0, envelope.step, sequence, envelope.sequence,
        envelope.token,
    )  # fmt: skip
