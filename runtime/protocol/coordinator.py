"""The coordinator's state machine for one session: operations, two-phase steps, worker liveness.

An operation sends one order to each of some workers. It settles when all have replied, when one
fails or is lost, or at its deadline. A step is an operation that ends with a decision, which all
its workers are told: commit if every worker has computed it, abort otherwise. A commit rides on the
next order, so that a step costs one message each way.
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
    AddWorker,
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
from graphflow.runtime.wire.array_codec import Buffer, return_borrowed
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

DEAD_AFTER = 4.5  # seconds out of reach until a worker is lost; detected within 5
COMMIT_AFTER = 0.005  # seconds that a commit waits for an order that can carry it
GRACE = 0.5  # seconds after a step's deadline for workers to report whom they waited for


class CoordinatorMachine:
    """Coordinator of one epoch of a session over the workers at `addresses`.

    Args:
        epoch: higher than that of every earlier coordinator of the session.
        token: the secret of the session.
        dead_after: seconds that a worker may be out of reach.
        home: identity of the clock that `now` is read from, see `clock_sync.clock_identity`.
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
        self._far: list[bool] = []
        self._session, self._epoch, self._token = session, epoch, intern(token)
        self._home = home
        self._now = now
        self._peers: list[Peer] = []
        for address in addresses:
            self._add_peer(address)
        self._failure_detector = FailureDetector(self._peers, dead_after)
        self._operations = OperationTable()
        self._last_beat = now
        self._commits_owed: set[int] = set()  # workers that were not told of a commit yet
        self._commit_at = inf
        self._losses = 0  # of workers
        self._fenced: StaleEpoch | None = None

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        """Return the actions for an event. `now` is monotonic, in seconds."""
        self._now = now
        if isinstance(event, WorkerMessageReceived):  # nearly always
            return self._receive(event)
        match event:
            case BeginOperation():
                return self._begin(event)
            case ReleaseStep(request):
                return self._release(request)
            case OfferMemoryToWorker(worker, token):
                offer = self._peers[worker].stream.send_unnumbered(Share(token))
                return self._send_all(worker, [offer])
            case LinkUp(worker):
                self._failure_detector.link_up(self._peers[worker], now)
                # The worker learns the new route to us, and gets the messages that it missed.
                return self._send_all(worker, self._contact(self._peers[worker]))
            case LinkDown(worker, reason):
                self._failure_detector.link_down(self._peers[worker], reason, now)
                return []
            case WorkerGone():
                return self._lose(event)
            case CancelSteps():
                return self._cancel()
            case AddWorker(address):
                self._add_peer(address)
                return []
            case CoordinatorTick():
                return self._tick()

    def wake_at(self, now: float) -> float:
        """Return when the next `CoordinatorTick` is due."""
        due = min(self._last_beat + BEAT, self._failure_detector.due, self._commit_at)
        for operation in self._operations.values():
            due = min(due, operation.deadline)
        return due if due > now else now

    def unanswered_workers(self) -> list[int]:
        """Return the workers that have yet to reply to an operation."""
        return self._operations.unanswered_workers()

    def unwelcomed_workers(self) -> list[int]:
        """Return the workers that have not sent Welcome yet."""
        return [index for index, peer in enumerate(self._peers) if not peer.welcomed]

    def duplicate_workers(self) -> list[int]:
        """Return two workers that are the same process; an empty list if there are none."""
        found: dict[int, int] = {}
        for index, peer in enumerate(self._peers):
            first = found.setdefault(peer.process, index) if peer.process else index
            if first != index:
                return [first, index]
        return []

    def clock(self, worker: int) -> PeerClock:
        """Return the estimate of a worker's clock, to read only."""
        return self._peers[worker].clock

    def loss_reasons(self) -> dict[int, str]:
        """Return the lost workers, each with the reason."""
        return {index: peer.gone.reason for index, peer in enumerate(self._peers) if peer.gone}

    def is_lost(self, worker: int) -> bool:
        """Return True if a worker is lost."""
        return self._peers[worker].gone is not None

    def stream(self, worker: int) -> ReliableStream:
        """Return the message stream to a worker, to read only."""
        return self._peers[worker].stream

    def _add_peer(self, address: str) -> None:
        """Add a worker, which knows nothing of the session yet."""
        stream = ReliableStream(self._session, self._epoch, COORDINATOR, self._token)
        index, clock = len(self._peers), PeerClock(self._home)
        self._peers.append(Peer(index, address, stream, self._now, clock))
        self._far.append(not is_loopback(address))

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
        """Send an operation's order to a worker, after the operation's arrays."""
        message, peer = operation.begin.orders[worker].message, self._peers[worker]
        actions: list[CoordinatorAction] = []
        step = operation.begin.step
        if isinstance(message, Compute):
            if peer.commit_owed >= 0:  # the order also carries the commit of the step before it
                message = replace_fields(message, commits=peer.commit_owed)
                peer.commit_owed = -1
                self._mark_commit_sent(worker)
            if message.trace:  # for a fresh estimate of its clock
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
        arrival, outgoing = peer.stream.receive(envelope, message, data)
        peer.note_heard(self._now)
        if outbound.acknowledged > before or not peer.opened:
            peer.note_hears_us(self._now)
            peer.opened = peer.opened or (peer.opening and not outbound.pending)
        actions = self._send_all(worker, outgoing) if outgoing else []
        if arrival is ReceiveStatus.DUPLICATE or arrival is ReceiveStatus.MISSING:
            return actions
        try:
            actions += self._handle_message(worker, envelope, message, data)
        except ProtocolError as error:
            reason = f"it sent an invalid message: {error}"
            return actions + self._lose(WorkerGone(worker, reason, ended=False))
        if peer.asked_at == inf:  # it has answered every question
            return actions
        if self._failure_detector.is_deaf(peer, self._now):
            reason = f"it speaks, but has not heard us for {self._now - peer.heard_us_at:.1f} s"
            actions += self._lose(WorkerGone(worker, reason, ended=False))
        elif peer.deaf_since < inf:  # it answers as soon as it receives us again
            actions += self._ping(worker)
        return actions

    def _handle_stale(
        self, worker: int, envelope: Envelope, message: Message, stale: GraphflowError
    ) -> list[CoordinatorAction]:
        """Handle a message of another epoch or session, whose content is never acted upon."""
        if isinstance(stale, StaleSession):
            return []
        if envelope.epoch < self._epoch:
            refusal = Fenced(type(stale).__name__, str(stale))
            return self._send_all(worker, [self._peers[worker].stream.send_unnumbered(refusal)])
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
                if peer.left:  # it closed on request, while other workers still reply
                    peer.note_hears_us(self._now)
                    return []
                for operation in self._operations.for_worker(worker):
                    if type(operation.first_order) is Close and worker in operation.waiting:
                        # Its reply comes later by another connection, or the worker was restarted.
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
        """End an operation if all its workers have replied and it is not held."""
        if operation.waiting:
            return []
        if operation.is_held:
            operation.deadline = inf
            return []
        return self._end(operation, None)

    def _handle_failure(
        self, operation: Operation, worker: int, error: GraphflowError
    ) -> list[CoordinatorAction]:
        """Handle a worker's error in an operation.

        If the worker of a step timed out waiting for another worker, that one may be about to
        report that it was waiting, too. The step then ends a little later, with the worker to
        blame.
        """
        if not operation.is_step or not isinstance(error, StepTimeout) or error.worker is None:
            return self._fail(operation, error)
        if error.worker >= len(self._peers):
            raise ProtocolError(f"it waited for worker {error.worker}, which does not exist")
        operation.peer_timeouts[worker] = error
        operation.deadline = min(operation.deadline, self._now + GRACE)
        return self._end_if_blamed(operation)

    def _end_if_blamed(self, operation: Operation) -> list[CoordinatorAction]:
        """End a late step once it is known which worker blocked the others."""
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
            operation.failure = (
                error  # it ends with its predecessor, so that workers see both in order
            )
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
        """Return the messages of a heartbeat to a worker."""
        if peer.gone or self._fenced:
            return []
        if peer.opened:
            peer.asked_at = min(peer.asked_at, self._now)
            return [peer.stream.send_unnumbered(Ping(sent=self._now))]
        # The worker cannot ask for messages of a session that it does not know yet.
        outgoing = list(peer.stream.outbound.all_from(0))
        # The rendezvous still waits for others: make this worker show that it is alive.
        if peer.welcomed and not outgoing:
            own = self._version
            outgoing = [peer.stream.send_unnumbered(Hello(0, own.version, own.wire, own.python))]
        return outgoing

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

    def _handle_unreached(
        self, source: int, step: int, report: Unreached
    ) -> list[CoordinatorAction]:
        """Handle the report that a worker does not reach another one.

        The step that needs the link ends if the link is cut. If the other worker is at fault, it
        will be lost or late by itself.
        """
        if not 0 <= report.worker < len(self._peers):
            raise ProtocolError(f"it does not reach worker {report.worker}, which does not exist")
        target = self._peers[report.worker]
        operation = self._operations.using_link(source, report.worker, step)
        if operation is None or not self._failure_detector.is_cut(target, report.asked, self._now):
            return []
        return self._fail(
            operation, unreachable_error(self._peers[source], target, operation, report.edge)
        )

    # Ends --------------------------------------------------------------------------------------

    def _end(self, operation: Operation, error: GraphflowError | None) -> list[CoordinatorAction]:
        """Settle an operation. For a step this is its decision, which all its workers are told."""
        request, step = operation.begin.request, operation.begin.step
        if self._operations.pop(request, None) is None:
            return []  # it ended together with its predecessor
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
                actions += self._send_commit(worker)  # the abort must not undo earlier steps
                if operation.is_withheld:
                    if not operation.begin.orders[worker].arrays:
                        continue
                    # The worker drops the order and its arrays: the predecessor was undone.
                    actions += self._send_order(operation, worker)
                abort = Abort(type(error).__name__, str(error)[:2000])
                actions += self._send(worker, abort, step)
        if self._commits_owed:
            self._commit_at = min(self._commit_at, self._now + COMMIT_AFTER)
        actions.append(SettleOperation(request, operation.replies if error is None else error))
        return actions + self._start_followers(operation, error) if self._operations else actions

    def _fail(self, operation: Operation, error: GraphflowError) -> list[CoordinatorAction]:
        """End an operation that failed.

        A free step fails only when its predecessor is decided, because workers drop everything that
        they have computed up to an aborted step.
        """
        if operation.is_free and self._operations.predecessor(operation) is not None:
            operation.failure = operation.failure or error
            operation.deadline = inf
            return []
        return self._end(operation, error)

    def _start_followers(
        self, decided: Operation, error: GraphflowError | None
    ) -> list[CoordinatorAction]:
        """Start the steps that follow a committed step, or end those that follow an aborted one."""
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
        """Record that a worker was told to commit; no wake-up is due after the last one."""
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

    def _send_all(
        self, worker: int, outgoing: Iterable[OutgoingMessage]
    ) -> list[CoordinatorAction]:
        known = self._peers[worker].stream.outbound.acknowledged
        return [
            SendToWorker(worker, each.envelope, each.message, each.data, known) for each in outgoing
        ]
