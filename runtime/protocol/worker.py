"""A worker's side of the protocol: several sessions at once, each a queue of jobs of its own.

A session belongs to those who know its token, and of these to the coordinator with the highest
epoch: an order of another is answered with what it missed, and not done. Jobs run one at a time in
the order in which they were given, while tensors of other workers, pings and aborts are handled at
once. A session whose coordinator falls silent stays as it is, at the end of its step, for another
coordinator to take over; it is closed when its lease ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import (
    GraphflowError,
    ProtocolError,
    SessionError,
    StaleEpoch,
    StaleSession,
    WorkerLost,
)
from graphflow.runtime.protocol.reliable_stream import Arrival, Inbound, Stream, Version, fence
from graphflow.runtime.protocol.remote_errors import failed
from graphflow.runtime.protocol.worker_events import (
    Attach,
    Beat,
    Cut,
    Deliver,
    Drain,
    Finished,
    Heard,
    Leave,
    Offer,
    Received,
    Route,
    Run,
    Send,
    Shut,
    Tick,
    Wake,
    WorkerAction,
    WorkerEvent,
)
from graphflow.runtime.protocol.worker_session import Served
from graphflow.runtime.wire.chunk_assembler import ByteBudget, ChunkAssembler
from graphflow.runtime.wire.frame_codec import Buffer, decode_small, may_be_remote, return_borrowed
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    Abort,
    Ack,
    Broken,
    Chunk,
    Close,
    Commit,
    Compute,
    Computed,
    Draining,
    Envelope,
    Fenced,
    Forget,
    Hello,
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
    step_of,
)

MAX_SESSIONS = 64
LONGEST_LEASE = 86_400.0  # seconds: what nobody speaks for is not kept for good
_UNANSWERED = (Close, Chunk)
_DECISIONS = (Commit, Abort)
_COMMIT = Commit()
_NOTED_EVERY = 8  # small tensors, of whose acknowledgements the link is told together
_QUIET = 1.5  # seconds without a word of the coordinator, who should speak every second
_REMEMBERED = 4096  # closed sessions whose late messages are still known as such
_LONGEST_NAME = 64  # characters of the name of a session; ours have 32
_SILENT = 5.0  # seconds after which a session without a word of its coordinator is parked


@dataclass(frozen=True)
class _Closed:
    epoch: int
    reason: str


@dataclass(frozen=True)
class ExitReport:
    """How a worker's process ended: by the reason, in an op of a session, where these are known.

    Others' losses are not of what they compute, and what another session computes is not told.
    """

    reason: str
    op: str = ""
    session: str = ""

    def read_by(self, session: str) -> Broken:
        """What a session is told that had the worker, too."""
        if self.session and session != self.session:
            return Broken(f"its process has ended in what another session computed, {self.reason}")
        return Broken(self.reason, self.op, ended=True)


class WorkerMachine:
    """The sessions of one worker process that offers `devices`.

    Args:
        home: which clock its time is of, see `clock.identity`.
        memory: bytes that arrays may take on their way in, of all sessions together.
        epitaph: how the process ended that was here before: coordinators that ask for it are told
            that, and nothing else is done here.
        process: a number that no other process had which listened here: what opens a session names
            it, so that a message that was under way to the one before opens nothing here.
    """

    def __init__(
        self,
        devices: Sequence[str],
        home: str = "",
        memory: int = 1 << 62,
        epitaph: ExitReport | None = None,
        process: int = 0,
    ) -> None:
        self._process = process
        self._devices = list(devices)
        self._home = home
        self._version = Version.own()
        self._shared_budget = ByteBudget(memory)
        self._sessions: dict[str, Served] = {}
        self._closed: dict[str, _Closed] = {}
        self._draining = False
        self._ticked = inf
        self._epitaph = epitaph

    @property
    def sessions(self) -> list[str]:
        """The open sessions."""
        return list(self._sessions)

    def parked(self, now: float) -> list[str]:
        """The sessions whose coordinator is silent; they wait for another until their lease
        ends."""
        return [name for name, state in self._sessions.items() if now > state.heard + _SILENT]

    def stream(self, session: str) -> Stream:
        """The numbering of messages with the coordinator of a session, to look at."""
        return self._sessions[session].stream

    def handle(self, event: WorkerEvent, now: float) -> list[WorkerAction]:
        """What to do about an event. Time is monotonic, in seconds."""
        if isinstance(event, Received):  # these two nearly always
            return self._receive(event, now)
        if isinstance(event, Finished):
            return self._finish(event)
        match event:
            case Offer(name, token):
                session = self._sessions.get(name)
                return [] if session is None else [session.tell(Share(token))]
            case Cut(name, worker, step, edge, asked):
                session = self._sessions.get(name)
                told = Unreached(worker, asked, edge)
                return [] if session is None else [session.tell(told, step)]
            case Tick():
                return self._tick(now)
            case Drain(seconds):
                return self._drain(seconds)
            case Shut(name, reason):
                session = self._sessions.get(name)
                return [] if session is None else self._break(session, reason)
            case Leave(reason):
                last = Broken(reason)
                goodbyes = [session.tell(last) for session in self._sessions.values()]
                return [*goodbyes, *self._drop(self.sessions, WorkerLost("the worker ends"))]

    def _tick(self, now: float) -> list[WorkerAction]:
        stopped, self._ticked = now - self._ticked, now
        if stopped > _SILENT:  # this process did not run, and heard nobody: that is no silence
            for session in self._sessions.values():
                session.heard = min(now, session.heard + stopped)
        actions: list[WorkerAction] = []
        for name, session in list(self._sessions.items()):
            if now > session.heard + session.lease:
                why = f"its coordinator was silent for its lease of {session.lease:g} s"
                stopped_too = "was that process stopped, its machine asleep, or the network cut?"
                actions += self._drop([name], WorkerLost(f"{why}; {stopped_too}"))
        for name, session in self._sessions.items():
            quiet = now > session.heard + _QUIET  # who speaks unheard is found to be cut off
            if quiet or session.stream.outbound.pending or session.stream.inbound.owes:
                actions.append(session.tell(Ack(asks=True)))
            owed = frozenset(index for index, peer in session.peers.items() if peer.owes)
            for index in owed:
                session.peers[index].acknowledged()
            if session.count > 1:
                actions.append(Beat(name, owed))
        return actions

    def _drain(self, seconds: float) -> list[WorkerAction]:
        self._draining = True
        return [
            action
            for session in self._sessions.values()
            for action in session.reply(Draining(seconds))
        ]

    # Messages ----------------------------------------------------------------------------------

    def _receive(self, event: Received, now: float) -> list[WorkerAction]:
        route, envelope, message, data, lane = event
        if self._epitaph is not None:
            concerned = envelope.origin == COORDINATOR and not isinstance(message, Hello)
            told = self._epitaph.read_by(envelope.session)
            return [Send(route, _back(envelope, 0), told)] if concerned else []
        if type(message) is Hello:
            own = self._version
            welcome = Welcome(message.request, own.version, own.wire, own.python, self._devices)
            mine = _back(envelope, 1)._replace(step=self._process)
            return [Send(route, mine, welcome)]
        session = self._sessions.get(envelope.session)
        if session is None:
            return self._unknown(event, now)
        stale = fence(envelope, session.epoch, session.token)
        if stale is not None:
            return self._stale(session, event, stale, now)
        if envelope.origin != COORDINATOR:
            return self._from_peer(session, envelope, message, data)
        answered = session.stream.outbound.resent
        arrival, letters = session.stream.receive(envelope, message, data)
        if arrival is Arrival.FRESH or session.is_said_now(arrival, envelope, message, answered):
            session.heard = now
            if lane:
                session.lane = route
            else:  # a reconnection comes by a new way
                session.route = route
        elif isinstance(message, Ping):
            return []
        actions: list[WorkerAction] = [session.sent(each) for each in letters] if letters else []
        if arrival is Arrival.BEAT:
            return actions + self._beat(session, message, now)
        if arrival is Arrival.DUPLICATE and isinstance(message, Open):
            return [*actions, session.tell(Ack())]  # it is still at it
        if arrival is not Arrival.FRESH:
            return actions
        try:
            if type(message) is Compute:  # nearly always
                if message.commits >= 0:
                    actions += session.settle(_COMMIT, message.commits)
                return actions + session.compute(message, envelope.step)
            return actions + self._order(session, message, envelope.step, data)
        except ProtocolError as error:
            if hasattr(message, "request"):
                for purpose in ("feed", "part", "value"):
                    session.inbox.forget(purpose, message.request)
                answer = failed(message.request, error)
                return actions + session.reply(answer, envelope.step)
            return actions + self._break(session, str(error))

    def _unknown(self, event: Received, now: float) -> list[WorkerAction]:
        envelope, message = event.envelope, event.message
        closed = self._closed.get(envelope.session)
        later = closed is None or envelope.epoch > closed.epoch
        if isinstance(message, Open) and later and envelope.step == self._process:
            return self._open(event.route, envelope, message, now)
        if envelope.origin != COORDINATOR or isinstance(message, Fenced):
            return []
        if isinstance(message, Close):
            answer = Ready(message.request)
            return [Send(event.route, _back(envelope, envelope.acknowledged + 1), answer)]
        why = "the worker was restarted meanwhile" if closed is None or later else closed.reason
        text = f"it does not know the session any more: {why}"
        return [Send(event.route, _back(envelope, 0), Fenced(StaleSession.__name__, text))]

    def _stale(
        self, session: Served, event: Received, stale: GraphflowError, now: float
    ) -> list[WorkerAction]:
        """What to do about a message of another epoch, or of nobody who knows the session."""
        envelope, message = event.envelope, event.message
        if isinstance(stale, StaleEpoch) and envelope.epoch > session.epoch:
            if envelope.origin != COORDINATOR:
                return []
            follows = isinstance(message, Open | Fenced)
            closing = self._drop([session.name], stale) if follows else []
            return closing + self._unknown(event, now)  # that epoch may have been in a process here
        if envelope.origin != COORDINATOR or isinstance(message, Fenced):
            return []
        told = Fenced(type(stale).__name__, str(stale))
        answer = _back(envelope, 0)._replace(epoch=session.epoch)
        return [Send(event.route, answer, told)]

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
        elif len(name) > _LONGEST_NAME:
            error = ProtocolError(f"the name of a session has {len(name)} characters")
        elif not 0 < message.lease <= LONGEST_LEASE:
            lease = f"a lease of {message.lease:g} s"
            error = ProtocolError(f"{lease}; it takes more than 0 and at most {LONGEST_LEASE:g}")
        elif message.worker >= count:
            error = ProtocolError(f"no worker {message.worker} among {count}")
        elif message.keys and len(message.keys) != count:
            error = ProtocolError(f"{len(message.keys)} keys for {count} workers")
        if error is not None:
            answer = failed(message.request, error)
            return [Send(route, _back(envelope, envelope.acknowledged + 1), answer)]
        stream = Stream(name, epoch, message.worker, envelope.token, received=envelope.sequence)
        stream.outbound.sent = 1  # Welcome, whatever came of others before it
        inbox = ChunkAssembler(shared_budget=self._shared_budget)
        far = may_be_remote(message.peers[message.worker])
        served = Served(route, stream, count, message.lease, now, inbox, far)
        self._sessions[name] = served
        return [Run(name, message, 0, epoch, token=envelope.token)]

    def _beat(self, session: Served, message: Message, now: float) -> list[WorkerAction]:
        if isinstance(message, Share):
            return [Attach(session.name, COORDINATOR, message.token)]
        if not isinstance(message, Ping):
            return []
        at = session.begun if session.begun > session.settled else 0
        pong = Pong(sent=message.sent, clock=now, home=self._home)
        return [session.tell(pong, at)]

    def _from_peer(
        self, session: Served, envelope: Envelope, message: Message, data: Buffer | None
    ) -> list[WorkerAction]:
        origin = envelope.origin
        if not 0 <= origin < session.count:
            return []
        inbound = session.peers.get(origin)
        if inbound is None:
            inbound = session.peers[origin] = Inbound()
        arrival, told = inbound.take(envelope, message, data)
        if told is not None:
            inbound.acknowledged()
        elif arrival is Arrival.FRESH and type(message) is Tensor:
            small = self._tensor(session, origin, message, envelope.step)
            if envelope.acknowledged < inbound.noted + _NOTED_EVERY:
                return small  # the link is told with one of the next
            inbound.noted = envelope.acknowledged
            known = envelope.acknowledged
            return [*small, Heard(session.name, origin, known, inbound.received)]
        wanted = message if isinstance(message, Resend) else None
        inbound.noted = envelope.acknowledged
        heard = Heard(session.name, origin, envelope.acknowledged, inbound.received, told, wanted)
        if isinstance(message, Share):
            return [heard, Attach(session.name, origin, message.token)]
        if arrival is not Arrival.FRESH:
            return [heard]
        if isinstance(message, Tensor):
            return [*self._tensor(session, origin, message, envelope.step), heard]
        if not isinstance(message, Chunk) or data is None:
            reason = f"worker {origin} sent it a {type(message).__name__}"
            return self._break(session, reason)
        try:
            # The link hears first: so what goes back at once, as echoes do, acknowledges this.
            return [heard, *self._piece(session, origin, message, data)]
        except ProtocolError as error:
            return self._break(session, f"worker {origin} sent it nonsense: {error}")

    def _tensor(
        self, session: Served, origin: int, message: Tensor, step: int
    ) -> list[WorkerAction]:
        if step <= session.settled:
            return []  # of a step that is over
        try:
            edge, array = decode_small(message.array)
        except ProtocolError as error:
            return self._break(session, f"worker {origin} sent it nonsense: {error}")
        return [Deliver(session.name, step, edge, array, origin)]

    def _piece(
        self, session: Served, origin: int, chunk: Chunk, data: Buffer
    ) -> list[WorkerAction]:
        purpose, number, key = chunk.purpose, chunk.number, chunk.name
        if purpose == "edge" and number <= session.settled:
            return_borrowed(data)
            return []  # of a step that is over
        if purpose not in ("edge", "echo", "echoed"):
            raise ProtocolError(f"a worker sends no {purpose!r}")
        if not session.inbox.add(origin, chunk, data):
            return []
        array = session.inbox.take(origin, purpose, number, key)
        if purpose == "echo":
            back = replace_fields(chunk, purpose="echoed", name=origin)
            return [Run(session.name, back, 0, session.epoch, {key: array})]
        return [Deliver(session.name, number, key, array, origin, echo=purpose == "echoed")]

    def _order(
        self, session: Served, message: Message, step: int, data: Buffer | None
    ) -> list[WorkerAction]:
        name, epoch = session.name, session.epoch
        match message:
            case Chunk():
                if message.purpose not in ("feed", "part", "value") or data is None:
                    raise ProtocolError(f"a coordinator sends no {message.purpose!r}")
                session.inbox.add(COORDINATOR, message, data)
                return []
            case Load():
                arrays = session.take("part", message.request, range(message.parts))
                return [Run(name, message, 0, epoch, arrays)]
            case Commit() | Abort():
                return session.settle(message, step)
            case Write():
                arrays = session.take("value", message.request, [message.variable])
                return [Run(name, message, 0, epoch, arrays)]
            case Prepare() | Read() | Forget() | Save() | Measure() | Meet() | Probe():
                return [Run(name, message, 0, epoch)]
            case Close():
                answer = session.reply(Ready(message.request))
                return [*self._drop([name], WorkerLost("the session was closed")), *answer]
        raise ProtocolError(f"a coordinator sends no {type(message).__name__}")

    # Results -----------------------------------------------------------------------------------

    def _finish(self, event: Finished) -> list[WorkerAction]:
        session = self._sessions.get(event.session)
        job, outcome = event.job, event.outcome
        if session is None or session.epoch != event.epoch or isinstance(job, _UNANSWERED):
            return []
        if type(job) is Compute and type(outcome) is Computed and event.step > session.settled:
            return session.answer(job, event.step, outcome)  # nearly always
        if isinstance(job, _DECISIONS):
            if isinstance(outcome, BaseException):
                what = f"{type(job).__name__.lower()} of step {step_of(event.step)} failed"
                return self._break(session, f"{what}: {outcome}")
            return []
        if isinstance(job, Compute) and event.step <= session.settled:
            return []  # aborted meanwhile: nobody waits for it
        if isinstance(outcome, BaseException):
            actions = session.reply(failed(job.request, outcome), event.step)
            if isinstance(job, Open):
                actions += self._drop([event.session], WorkerLost("it could not be opened"))
            return actions
        return session.answer(job, event.step, outcome)

    # Ends --------------------------------------------------------------------------------------

    def _break(self, session: Served, reason: str) -> list[WorkerAction]:
        """Tells the coordinator that the session cannot go on here, and closes it."""
        told = session.tell(Broken(reason))
        return [told, *self._drop([session.name], WorkerLost(reason))]

    def _drop(self, names: Sequence[str], error: GraphflowError) -> list[WorkerAction]:
        actions: list[WorkerAction] = []
        for name in names:
            session = self._sessions.pop(name)
            session.inbox.clear()
            while len(self._closed) >= _REMEMBERED:
                del self._closed[next(iter(self._closed))]
            self._closed[name] = _Closed(session.epoch, str(error))
            if session.begun > session.settled:
                actions.append(Wake(name, session.begun, error))
            actions.append(Run(name, Close(0), 0, session.epoch))
        return actions


def _back(envelope: Envelope, sequence: int) -> Envelope:
    """The envelope of an answer outside a session; of its secret it shows what it was shown."""
    return Envelope(
        envelope.session, envelope.epoch, 0, envelope.step, sequence, envelope.sequence,
        envelope.token,
    )  # fmt: skip
