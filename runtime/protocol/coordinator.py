"""The coordinator's side of a session: requests to workers, two-phase steps, who is alive.

An operation sends one order to each of some workers and settles when all have replied, when one
fails or is lost, or at its deadline. A step is an operation whose end is a decision: commit when
every worker has computed it, abort otherwise; each worker is told the same one. A commit rides on
the next order, so that a step is one message each way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from sys import intern

from graphflow.base.addresses import is_loopback
from graphflow.errors import (
    GraphflowError,
    ProtocolError,
    SessionError,
    StaleEpoch,
    StaleSession,
    StepTimeout,
)
from graphflow.runtime.protocol.clock_sync import BURST, PeerClock
from graphflow.runtime.protocol.coordinator_events import (
    AttachWorkerMemory,
    BeginOperation,
    CancelSteps,
    CoordinatorAction,
    CoordinatorEvent,
    CoordinatorTick,
    LinkDown,
    LinkUp,
    OfferMemoryToWorker,
    ReleaseStep,
    ReportDraining,
    SendToWorker,
    SettleOperation,
    WorkerGone,
    WorkerMessageReceived,
)
from graphflow.runtime.protocol.operations import Operation, OperationTable
from graphflow.runtime.protocol.peer_liveness import (
    BEAT,
    FailureDetector,
    Peer,
    blocked_error,
    deadline_error,
    unreachable_error,
)
from graphflow.runtime.protocol.reliable_stream import (
    OutgoingMessage,
    ReceiveStatus,
    ReliableStream,
    Version,
    stale_error,
)
from graphflow.runtime.protocol.remote_errors import error_from_message, printable_text
from graphflow.runtime.wire.frame_codec import Buffer, return_borrowed
from graphflow.runtime.wire.messages import (
    COORDINATOR,
    UNNUMBERED,
    Abort,
    Broken,
    Chunk,
    Close,
    Commit,
    Compute,
    Done,
    Draining,
    Envelope,
    Failed,
    Fenced,
    Hello,
    Message,
    Open,
    Ping,
    Pong,
    Ready,
    Share,
    Spans,
    Unreached,
    Welcome,
    replace_fields,
)

DEAD_AFTER = 4.5  # seconds out of reach after which a worker is lost: found within 5
COMMIT_AFTER = 0.005  # seconds that a commit waits for an order to ride on
GRACE = 0.5  # seconds after a step's deadline in which workers may say what they waited for


class CoordinatorMachine:
    """One epoch of a session over the workers at `addresses`, in their order.

    Args:
        epoch: higher than that of every coordinator of the session before.
        token: the secret of the session.
        dead_after: seconds that a worker may be out of reach.
        home: which clock `now` is of, see `clock.identity`.
    """

    def __init__(
        self,
        session: str,
        addresses: Sequence[str],
        now: float,
        epoch: int = 1,
        token: str = "",
        dead_after: float = DEAD_AFTER,
        home: str = "",
    ) -> None:
        self._version = Version.own()
        self._far = [not is_loopback(address) for address in addresses]
        self._session, self._epoch, self._token = session, epoch, intern(token)
        self._peers = [
            Peer(
                index,
                address,
                ReliableStream(session, epoch, COORDINATOR, token),
                now,
                PeerClock(home),
            )
            for index, address in enumerate(addresses)
        ]
        self._failure_detector = FailureDetector(self._peers, dead_after)
        self._now = now
        self._operations = OperationTable()
        self._last_beat = now
        self._commits_owed: set[int] = set()  # workers that were not told yet to commit
        self._commit_at = inf
        self._losses = 0  # of workers
        self._fenced: StaleEpoch | None = None

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        """What to do about an event. Time is monotonic, in seconds."""
        self._now = now
        if isinstance(event, WorkerMessageReceived):  # nearly always
            return self._receive(event)
        match event:
            case BeginOperation():
                return self._begin(event)
            case ReleaseStep(request):
                return self._release(request)
            case OfferMemoryToWorker(worker, token):
                told = self._peers[worker].stream.send_unnumbered(Share(token))
                return self._send_all(worker, [told])
            case LinkUp(worker):
                self._failure_detector.link_up(self._peers[worker], now)
                # The worker learns the new way to us, and what it missed.
                return self._send_all(worker, self._contact(self._peers[worker]))
            case LinkDown(worker, reason):
                self._failure_detector.link_down(self._peers[worker], reason, now)
                return []
            case WorkerGone():
                return self._lose(event)
            case CancelSteps():
                return self._cancel()
            case CoordinatorTick():
                return self._tick()

    def wake_at(self, now: float) -> float:
        """When the next Tick is due."""
        due = min(self._last_beat + BEAT, self._failure_detector.due, self._commit_at)
        for operation in self._operations.values():
            due = min(due, operation.deadline)
        return due if due > now else now

    def unanswered_workers(self) -> list[int]:
        """The workers whose replies an operation waits for."""
        return self._operations.unanswered_workers()

    def unwelcomed_workers(self) -> list[int]:
        """The workers that have not answered yet."""
        return [index for index, peer in enumerate(self._peers) if not peer.welcomed]

    def duplicate_workers(self) -> list[int]:
        """Two workers that have answered and are one process; none if there are no such."""
        found: dict[int, int] = {}
        for index, peer in enumerate(self._peers):
            first = found.setdefault(peer.process, index) if peer.process else index
            if first != index:
                return [first, index]
        return []

    def clock(self, worker: int) -> PeerClock:
        """How a worker's clock stands to ours, to look at."""
        return self._peers[worker].clock

    def loss_reasons(self) -> dict[int, str]:
        """The workers that are lost, and why."""
        return {index: peer.gone.reason for index, peer in enumerate(self._peers) if peer.gone}

    def is_lost(self, worker: int) -> bool:
        """Whether a worker is lost."""
        return self._peers[worker].gone is not None

    def stream(self, worker: int) -> ReliableStream:
        """The numbering of messages with a worker, to look at."""
        return self._peers[worker].stream

    # Events ------------------------------------------------------------------------------------

    def _begin(self, begin: BeginOperation) -> list[CoordinatorAction]:
        operation = Operation(begin, self._now)
        if self._fenced is not None:
            return [SettleOperation(begin.request, self._fenced)]
        for worker in begin.orders if self._losses else ():
            if self._peers[worker].gone is not None:
                error = self._peers[worker].loss_error(f"was lost before {operation.description}")
                return [SettleOperation(begin.request, error)]
        if operation.is_step:
            operation.deadline += GRACE
            if (before := self._operations.predecessor(operation)) is not None:
                operation.deadline = inf
                operation.is_withheld = before.is_withheld or not operation.is_free
        cut = operation.split_arrays(self._far)
        if not operation.waiting:
            return [SettleOperation(begin.request, operation.replies)]
        self._operations[begin.request] = operation
        actions: list[CoordinatorAction] = []
        for worker in begin.orders:
            if not operation.is_step:
                actions += self._send_commit(worker)
            if worker in cut:
                for chunk, data in cut[worker]:
                    actions += self._send(worker, chunk, begin.step, data)
            if not operation.is_withheld:
                actions += self._send_order(operation, worker)
        return actions

    def _send_order(self, operation: Operation, worker: int) -> list[CoordinatorAction]:
        """Sends what comes after an operation's arrays: the order itself."""
        message, peer = operation.begin.orders[worker].message, self._peers[worker]
        actions: list[CoordinatorAction] = []
        step = operation.begin.step
        if isinstance(message, Compute):
            if peer.commit_owed >= 0:  # it tells to commit the step before it, too
                message = replace_fields(message, commits=peer.commit_owed)
                peer.commit_owed = -1
                self._mark_commit_sent(worker)
            if message.trace:  # its clock, as it is now
                actions += self._ping(worker)
        elif isinstance(message, Open):
            peer.opening, step = True, peer.process
        return actions + self._send(worker, message, step)

    def _receive(self, event: WorkerMessageReceived) -> list[CoordinatorAction]:
        worker, envelope, message, data = event
        peer = self._peers[worker]
        if peer.gone or self._fenced or envelope.session != self._session:
            return []
        stale = stale_error(envelope, self._epoch, self._token)
        if stale is not None:
            return self._handle_stale(worker, envelope, message, stale)
        outbound = peer.stream.outbound
        before = outbound.acknowledged
        arrival, letters = peer.stream.receive(envelope, message, data)
        peer.note_heard(self._now)
        if outbound.acknowledged > before or not peer.opened:
            peer.note_hears_us(self._now)
            peer.opened = peer.opened or (peer.opening and not outbound.pending)
        actions = self._send_all(worker, letters) if letters else []
        if arrival is ReceiveStatus.DUPLICATE or arrival is ReceiveStatus.MISSING:
            return actions
        try:
            actions += self._handle_message(worker, envelope, message, data)
        except ProtocolError as error:
            reason = f"it sent what is not valid here: {error}"
            return actions + self._lose(WorkerGone(worker, reason, ended=False))
        if peer.asked_at == inf:  # nothing that it was asked is open
            return actions
        if self._failure_detector.is_deaf(peer, self._now):
            reason = f"it speaks, but has not heard us for {self._now - peer.heard_us_at:.1f} s"
            actions += self._lose(WorkerGone(worker, reason, ended=False))
        elif peer.deaf_since < inf:  # as soon as it hears us again, it shall say so
            actions += self._ping(worker)
        return actions

    def _handle_stale(
        self, worker: int, envelope: Envelope, message: Message, stale: GraphflowError
    ) -> list[CoordinatorAction]:
        """What to do about a message of another epoch or session: never what it says."""
        if isinstance(stale, StaleSession):
            return []
        if envelope.epoch < self._epoch:
            told = Fenced(type(stale).__name__, str(stale))
            return self._send_all(worker, [self._peers[worker].stream.send_unnumbered(told)])
        if not isinstance(message, Fenced):
            return []
        self._fenced = StaleEpoch(
            f"session {self._session[:8]} goes on under epoch {envelope.epoch}, while this "
            f"coordinator has epoch {self._epoch}: another one took over; end this one"
        )
        return self._fail_all(self._fenced)

    def _handle_message(
        self, worker: int, envelope: Envelope, message: Message, data: Buffer | None
    ) -> list[CoordinatorAction]:
        peer = self._peers[worker]
        if type(message) is Done:  # nearly always
            operation = self._operations.get(message.request)
            if operation is None or worker not in operation.waiting:
                return []  # it ended before: aborted, timed out
            return self._accept_reply(operation, worker, message)
        match message:
            case Broken(reason, op, ended):
                return self._lose(WorkerGone(worker, printable_text(reason), op, ended))
            case Fenced(StaleSession.__name__, reason):
                if peer.left:  # as it was told, while others are waited for
                    peer.note_hears_us(self._now)
                    return []
                for operation in self._operations.for_worker(worker):
                    if type(operation.first_order) is Close and worker in operation.waiting:
                        # Its answer comes by another way, later; or it was restarted meanwhile.
                        return self._accept_reply(operation, worker, Ready(operation.begin.request))
                return self._lose(WorkerGone(worker, printable_text(reason), ended=False))
            case Pong():
                peer.note_hears_us(message.sent)
                peer.clock.add_round_trip(message.sent, message.clock, self._now, message.home)
                return self._ping(worker) if peer.clock.round_trips < BURST else []
            case Welcome():
                peer.process = envelope.step
            case Draining(seconds):
                return [ReportDraining(worker, seconds)]
            case Share(token):
                return [AttachWorkerMemory(worker, token)]
            case Unreached():
                return self._handle_unreached(worker, envelope.step, message)
            case Chunk():
                if message.purpose != "fetch" or data is None:
                    raise ProtocolError(f"an array for {message.purpose!r} was not asked for")
                if message.number in self._operations:
                    peer.inbox.add(worker, message, data)
                else:
                    return_borrowed(data)
                return []
        operation = self._operations.get(getattr(message, "request", -1))
        if isinstance(message, UNNUMBERED) or operation is None or worker not in operation.waiting:
            return []  # it ended before: aborted, timed out
        if isinstance(message, Failed):
            return self._handle_failure(operation, worker, error_from_message(message, str(peer)))
        if isinstance(message, Spans):
            reading = peer.clock.estimate_at(self._now)
            operation.replies.spans.extend(reading.shift_spans(message.spans))
            operation.replies.errors[worker] = reading.error
            return []
        return self._accept_reply(operation, worker, message)

    def _accept_reply(
        self, operation: Operation, worker: int, message: Message
    ) -> list[CoordinatorAction]:
        peer = self._peers[worker]
        operation.accept(worker, message, peer.inbox)
        peer.left = peer.left or type(operation.begin.orders[worker].message) is Close
        if type(message) is Welcome:
            peer.welcomed = True
            self._failure_detector.watch(peer)
            if Version.from_message(message) != self._version:
                return self._end(
                    operation, peer.mismatch_error(Version.from_message(message), self._version)
                )
        if operation.peer_timeouts:
            return self._end_if_blamed(operation)
        return self._end_if_answered(operation)

    def _end_if_answered(self, operation: Operation) -> list[CoordinatorAction]:
        """An answer to an operation is taken, perhaps the last one."""
        if operation.waiting:
            return []
        if operation.is_held:
            operation.deadline = inf
            return []
        return self._end(operation, None)

    def _handle_failure(
        self, operation: Operation, worker: int, error: GraphflowError
    ) -> list[CoordinatorAction]:
        """A worker could not do its part of an operation; of a step perhaps because it has waited
        in vain for another one, which may be about to say that it has, too."""
        if not operation.is_step or not isinstance(error, StepTimeout) or error.worker is None:
            return self._fail(operation, error)
        if error.worker >= len(self._peers):
            raise ProtocolError(f"there is no worker {error.worker} for it to wait for")
        operation.peer_timeouts[worker] = error
        operation.deadline = min(operation.deadline, self._now + GRACE)
        return self._end_if_blamed(operation)

    def _end_if_blamed(self, operation: Operation) -> list[CoordinatorAction]:
        """Ends a step that is late as soon as it is known who kept the others waiting."""
        if operation.may_report_wait(operation.blocking_chain()[-1]):
            return []
        return self._fail(operation, blocked_error(operation, self._peers, self._now))

    def _release(self, request: int) -> list[CoordinatorAction]:
        operation = self._operations.get(request)
        if operation is None:
            return []
        before = self._operations.predecessor(operation)
        if before is not None and before.is_held:
            error = SessionError(
                f"{operation.description} was to be decided before {before.description}, which it "
                "follows; finish steps in the order in which they were begun"
            )
            operation.failure = error  # it ends when that one does, as workers have to see it
            return [SettleOperation(request, error)]
        operation.is_held = False
        return [] if operation.waiting else self._end(operation, None)

    def _cancel(self) -> list[CoordinatorAction]:
        return [
            action
            for operation in self._operations.steps()
            for action in self._end(
                operation, SessionError(f"{operation.description} was cancelled")
            )
        ]

    # Time ----------------------------------------------------------------------------------------

    def _contact(self, peer: Peer) -> list[OutgoingMessage]:
        if peer.gone or self._fenced:
            return []
        if peer.opened:
            peer.asked_at = min(peer.asked_at, self._now)
            return [peer.stream.send_unnumbered(Ping(sent=self._now))]
        letters = list(peer.stream.outbound.all_from(0))  # it cannot ask for what it does not know
        if peer.welcomed and not letters:  # others have not answered yet; it shall not be silent
            own = self._version
            letters = [peer.stream.send_unnumbered(Hello(0, own.version, own.wire, own.python))]
        return letters

    def _ping(self, worker: int) -> list[CoordinatorAction]:
        peer = self._peers[worker]
        return self._send_all(worker, [peer.stream.send_unnumbered(Ping(sent=self._now))])

    def _tick(self) -> list[CoordinatorAction]:
        now = self._now
        actions: list[CoordinatorAction] = []
        for gone in self._failure_detector.pop_overdue(now):
            actions += self._lose(gone)
        for operation in list(self._operations.values()):
            if now >= operation.deadline:
                actions += self._fail(operation, deadline_error(operation, self._peers, now))
        if now >= self._commit_at:
            self._commit_at = inf
            for worker in sorted(self._commits_owed):
                actions += self._send_commit(worker)
        if now >= self._last_beat + BEAT:
            self._last_beat = now
            for worker, peer in enumerate(self._peers):
                actions += self._send_all(worker, self._contact(peer))
        return actions

    def _lose(self, gone: WorkerGone) -> list[CoordinatorAction]:
        peer = self._peers[gone.worker]
        if peer.gone is not None:
            return []
        peer.gone = gone
        self._losses += 1
        self._failure_detector.unwatch(peer)
        actions: list[CoordinatorAction] = []
        for operation in self._operations.for_worker(gone.worker):
            what = f"was lost in {operation.description}"
            actions += self._end(operation, peer.loss_error(what, operation))
        return actions

    def _handle_unreached(self, source: int, step: int, told: Unreached) -> list[CoordinatorAction]:
        """A worker does not reach another: a step that needs their link ends, if it is the link and
        not that other one, which then is lost or late."""
        if not 0 <= told.worker < len(self._peers):
            raise ProtocolError(f"there is no worker {told.worker} for it to reach")
        target = self._peers[told.worker]
        operation = self._operations.using_link(source, told.worker, step)
        if operation is None or not self._failure_detector.is_cut(target, told.asked, self._now):
            return []
        return self._fail(
            operation, unreachable_error(self._peers[source], target, operation, told.edge)
        )

    # Ends --------------------------------------------------------------------------------------

    def _end(self, operation: Operation, error: GraphflowError | None) -> list[CoordinatorAction]:
        """Settles an operation; for a step this is the decision, which all its workers are told."""
        request, step = operation.begin.request, operation.begin.step
        if self._operations.pop(request, None) is None:
            return []  # it ended with the one that it follows
        actions: list[CoordinatorAction] = []
        for worker in operation.begin.orders:
            peer = self._peers[worker]
            if not peer.inbox.is_empty:
                peer.inbox.forget("fetch", request)
            if not operation.is_step or peer.gone is not None:
                continue
            if error is None:
                peer.commit_owed = step
                self._commits_owed.add(worker)
            elif self._fenced is None:
                actions += self._send_commit(worker)  # of those before it, which it does not undo
                if operation.is_withheld:
                    if not operation.begin.orders[worker].arrays:
                        continue
                    # It follows what is undone: the worker lets go of its arrays, and of it.
                    actions += self._send_order(operation, worker)
                told = Abort(type(error).__name__, str(error)[:2000])
                actions += self._send(worker, told, step)
        if self._commits_owed:
            self._commit_at = min(self._commit_at, self._now + COMMIT_AFTER)
        actions.append(SettleOperation(request, operation.replies if error is None else error))
        return actions + self._start_followers(operation, error) if self._operations else actions

    def _fail(self, operation: Operation, error: GraphflowError) -> list[CoordinatorAction]:
        """Ends an operation that failed; a free step when the one before it is decided, for workers
        give up all that they have computed up to a step that is aborted."""
        if operation.is_free and self._operations.predecessor(operation) is not None:
            operation.failure = operation.failure or error
            operation.deadline = inf
            return []
        return self._end(operation, error)

    def _start_followers(
        self, decided: Operation, error: GraphflowError | None
    ) -> list[CoordinatorAction]:
        """The steps that follow one that is decided may compute, or never will."""
        actions: list[CoordinatorAction] = []
        if not decided.is_step:
            return actions
        for operation in self._operations.successors(decided):
            if error is not None:
                what = f"{operation.description} was not run, because {decided.description} failed"
                actions += self._end(operation, SessionError(what))
                continue
            if operation.failure is not None:
                actions += self._end(operation, operation.failure)
                continue
            operation.deadline = inf
            if operation.waiting or not operation.is_held:
                seconds = 0.0 if operation.peer_timeouts else operation.begin.seconds
                operation.deadline = self._now + seconds + GRACE
            if operation.is_withheld:
                operation.is_withheld = False
                for worker in operation.begin.orders:
                    actions += self._send_order(operation, worker)
        return actions

    def _fail_all(self, error: GraphflowError) -> list[CoordinatorAction]:
        return [
            action
            for operation in list(self._operations.values())
            for action in self._end(operation, error)
        ]

    # Sending -----------------------------------------------------------------------------------

    def _mark_commit_sent(self, worker: int) -> None:
        """A worker has been told to commit; after the last one there is nothing to wake up for."""
        self._commits_owed.discard(worker)
        if not self._commits_owed:
            self._commit_at = inf

    def _send_commit(self, worker: int) -> list[CoordinatorAction]:
        peer = self._peers[worker]
        step, peer.commit_owed = peer.commit_owed, -1
        self._mark_commit_sent(worker)
        if step < 0 or peer.gone is not None or self._fenced is not None:
            return []
        return self._send(worker, Commit(), step)

    def _send(
        self, worker: int, message: Message, step: int, data: memoryview | None = None
    ) -> list[CoordinatorAction]:
        return self._send_all(worker, self._peers[worker].stream.send(message, step, data))

    def _send_all(self, worker: int, letters: Iterable[OutgoingMessage]) -> list[CoordinatorAction]:
        known = self._peers[worker].stream.outbound.acknowledged
        return [
            SendToWorker(worker, each.envelope, each.message, each.data, known) for each in letters
        ]
