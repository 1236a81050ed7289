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

from graphflow.errors import (
    GraphflowError,
    ProtocolError,
    SessionError,
    StaleEpoch,
    StaleSession,
    StepTimeout,
)
from graphflow.runtime.protocol.clock_sync import BURST, Clock
from graphflow.runtime.protocol.coordinator_events import (
    Attach,
    Begin,
    Cancel,
    CoordinatorAction,
    CoordinatorEvent,
    Gone,
    Leaving,
    LinkDown,
    LinkUp,
    Offer,
    Received,
    Release,
    Send,
    Settle,
    Tick,
)
from graphflow.runtime.protocol.operations import Operation, UnderWay
from graphflow.runtime.protocol.peer_liveness import BEAT, Peer, Watch, apart, kept_waiting, late
from graphflow.runtime.protocol.reliable_stream import Arrival, Letter, Stream, Version, fence
from graphflow.runtime.protocol.remote_errors import harmless, raised
from graphflow.runtime.wire.frame_codec import Buffer, may_be_remote, return_borrowed
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
        self._far = [may_be_remote(address) for address in addresses]
        self._session, self._epoch, self._token = session, epoch, intern(token)
        self._peers = [
            Peer(index, address, Stream(session, epoch, COORDINATOR, token), now, Clock(home))
            for index, address in enumerate(addresses)
        ]
        self._watch = Watch(self._peers, dead_after)
        self._now = now
        self._operations = UnderWay()
        self._beat = now
        self._owed: set[int] = set()  # workers that were not told yet to commit
        self._commit_at = inf
        self._losses = 0  # of workers
        self._fenced: StaleEpoch | None = None

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorAction]:
        """What to do about an event. Time is monotonic, in seconds."""
        self._now = now
        if isinstance(event, Received):  # nearly always
            return self._receive(event)
        match event:
            case Begin():
                return self._begin(event)
            case Release(request):
                return self._release(request)
            case Offer(worker, token):
                told = self._peers[worker].stream.tell(Share(token))
                return self._sends(worker, [told])
            case LinkUp(worker):
                self._watch.up(self._peers[worker], now)
                # The worker learns the new way to us, and what it missed.
                return self._sends(worker, self._call(self._peers[worker]))
            case LinkDown(worker, reason):
                self._watch.down(self._peers[worker], reason, now)
                return []
            case Gone():
                return self._lose(event)
            case Cancel():
                return self._cancel()
            case Tick():
                return self._tick()

    def wake_at(self, now: float) -> float:
        """When the next Tick is due."""
        due = min(self._beat + BEAT, self._watch.due, self._commit_at)
        for operation in self._operations.values():
            due = min(due, operation.deadline)
        return due if due > now else now

    def awaited(self) -> list[int]:
        """The workers whose replies an operation waits for."""
        return self._operations.awaited()

    def strangers(self) -> list[int]:
        """The workers that have not answered yet."""
        return [index for index, peer in enumerate(self._peers) if not peer.welcomed]

    def same(self) -> list[int]:
        """Two workers that have answered and are one process; none if there are no such."""
        found: dict[int, int] = {}
        for index, peer in enumerate(self._peers):
            first = found.setdefault(peer.process, index) if peer.process else index
            if first != index:
                return [first, index]
        return []

    def clock(self, worker: int) -> Clock:
        """How a worker's clock stands to ours, to look at."""
        return self._peers[worker].clock

    def lost(self) -> dict[int, str]:
        """The workers that are lost, and why."""
        return {index: peer.gone.reason for index, peer in enumerate(self._peers) if peer.gone}

    def is_lost(self, worker: int) -> bool:
        """Whether a worker is lost."""
        return self._peers[worker].gone is not None

    def stream(self, worker: int) -> Stream:
        """The numbering of messages with a worker, to look at."""
        return self._peers[worker].stream

    # Events ------------------------------------------------------------------------------------

    def _begin(self, begin: Begin) -> list[CoordinatorAction]:
        operation = Operation(begin, self._now)
        if self._fenced is not None:
            return [Settle(begin.request, self._fenced)]
        for worker in begin.orders if self._losses else ():
            if self._peers[worker].gone is not None:
                error = self._peers[worker].lost(f"was lost before {operation.what}")
                return [Settle(begin.request, error)]
        if operation.is_step:
            operation.deadline += GRACE
            if (before := self._operations.before(operation)) is not None:
                operation.deadline = inf
                operation.withheld = before.withheld or not operation.is_free
        cut = operation.cut(self._far)
        if not operation.waiting:
            return [Settle(begin.request, operation.replies)]
        self._operations[begin.request] = operation
        actions: list[CoordinatorAction] = []
        for worker in begin.orders:
            if not operation.is_step:
                actions += self._tell_commit(worker)
            if worker in cut:
                for chunk, data in cut[worker]:
                    actions += self._send(worker, chunk, begin.step, data)
            if not operation.withheld:
                actions += self._order(operation, worker)
        return actions

    def _order(self, operation: Operation, worker: int) -> list[CoordinatorAction]:
        """Sends what comes after an operation's arrays: the order itself."""
        message, peer = operation.begin.orders[worker].message, self._peers[worker]
        actions: list[CoordinatorAction] = []
        step = operation.begin.step
        if isinstance(message, Compute):
            if peer.commits >= 0:  # it tells to commit the step before it, too
                message = replace_fields(message, commits=peer.commits)
                peer.commits = -1
                self._owes_nothing(worker)
            if message.trace:  # its clock, as it is now
                actions += self._ping(worker)
        elif isinstance(message, Open):
            peer.opening, step = True, peer.process
        return actions + self._send(worker, message, step)

    def _receive(self, event: Received) -> list[CoordinatorAction]:
        worker, envelope, message, data = event
        peer = self._peers[worker]
        if peer.gone or self._fenced or envelope.session != self._session:
            return []
        stale = fence(envelope, self._epoch, self._token)
        if stale is not None:
            return self._stale(worker, envelope, message, stale)
        outbound = peer.stream.outbound
        before = outbound.acknowledged
        arrival, letters = peer.stream.receive(envelope, message, data)
        peer.hear(self._now)
        if outbound.acknowledged > before or not peer.opened:
            peer.heeds(self._now)
            peer.opened = peer.opened or (peer.opening and not outbound.pending)
        actions = self._sends(worker, letters) if letters else []
        if arrival is Arrival.DUPLICATE or arrival is Arrival.MISSING:
            return actions
        try:
            actions += self._reply(worker, envelope, message, data)
        except ProtocolError as error:
            reason = f"it sent what is not valid here: {error}"
            return actions + self._lose(Gone(worker, reason, ended=False))
        if peer.asked == inf:  # nothing that it was asked is open
            return actions
        if self._watch.is_deaf(peer, self._now):
            reason = f"it speaks, but has not heard us for {self._now - peer.hears:.1f} s"
            actions += self._lose(Gone(worker, reason, ended=False))
        elif peer.deaf < inf:  # as soon as it hears us again, it shall say so
            actions += self._ping(worker)
        return actions

    def _stale(
        self, worker: int, envelope: Envelope, message: Message, stale: GraphflowError
    ) -> list[CoordinatorAction]:
        """What to do about a message of another epoch or session: never what it says."""
        if isinstance(stale, StaleSession):
            return []
        if envelope.epoch < self._epoch:
            told = Fenced(type(stale).__name__, str(stale))
            return self._sends(worker, [self._peers[worker].stream.tell(told)])
        if not isinstance(message, Fenced):
            return []
        self._fenced = StaleEpoch(
            f"session {self._session[:8]} goes on under epoch {envelope.epoch}, while this "
            f"coordinator has epoch {self._epoch}: another one took over; end this one"
        )
        return self._fail_all(self._fenced)

    def _reply(
        self, worker: int, envelope: Envelope, message: Message, data: Buffer | None
    ) -> list[CoordinatorAction]:
        peer = self._peers[worker]
        if type(message) is Done:  # nearly always
            operation = self._operations.get(message.request)
            if operation is None or worker not in operation.waiting:
                return []  # it ended before: aborted, timed out
            return self._answered(operation, worker, message)
        match message:
            case Broken(reason, op, ended):
                return self._lose(Gone(worker, harmless(reason), op, ended))
            case Fenced(StaleSession.__name__, reason):
                if peer.left:  # as it was told, while others are waited for
                    peer.heeds(self._now)
                    return []
                for operation in self._operations.of(worker):
                    if type(operation.first) is Close and worker in operation.waiting:
                        # Its answer comes by another way, later; or it was restarted meanwhile.
                        return self._answered(operation, worker, Ready(operation.begin.request))
                return self._lose(Gone(worker, harmless(reason), ended=False))
            case Pong():
                peer.heeds(message.sent)
                peer.clock.add(message.sent, message.clock, self._now, message.home)
                return self._ping(worker) if peer.clock.trips < BURST else []
            case Welcome():
                peer.process = envelope.step
            case Draining(seconds):
                return [Leaving(worker, seconds)]
            case Share(token):
                return [Attach(worker, token)]
            case Unreached():
                return self._part(worker, envelope.step, message)
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
            return self._failed(operation, worker, raised(message, str(peer)))
        if isinstance(message, Spans):
            reading = peer.clock.reading(self._now)
            operation.replies.spans.extend(reading.shifted(message.spans))
            operation.replies.errors[worker] = reading.error
            return []
        return self._answered(operation, worker, message)

    def _answered(
        self, operation: Operation, worker: int, message: Message
    ) -> list[CoordinatorAction]:
        peer = self._peers[worker]
        operation.accept(worker, message, peer.inbox)
        peer.left = peer.left or type(operation.begin.orders[worker].message) is Close
        if type(message) is Welcome:
            peer.welcomed = True
            self._watch.begin(peer)
            if Version.of(message) != self._version:
                return self._end(operation, peer.mismatch(Version.of(message), self._version))
        if operation.late:
            return self._blame(operation)
        return self._taken(operation)

    def _taken(self, operation: Operation) -> list[CoordinatorAction]:
        """An answer to an operation is taken, perhaps the last one."""
        if operation.waiting:
            return []
        if operation.held:
            operation.deadline = inf
            return []
        return self._end(operation, None)

    def _failed(
        self, operation: Operation, worker: int, error: GraphflowError
    ) -> list[CoordinatorAction]:
        """A worker could not do its part of an operation; of a step perhaps because it has waited
        in vain for another one, which may be about to say that it has, too."""
        if not operation.is_step or not isinstance(error, StepTimeout) or error.worker is None:
            return self._fail(operation, error)
        if error.worker >= len(self._peers):
            raise ProtocolError(f"there is no worker {error.worker} for it to wait for")
        operation.late[worker] = error
        operation.deadline = min(operation.deadline, self._now + GRACE)
        return self._blame(operation)

    def _blame(self, operation: Operation) -> list[CoordinatorAction]:
        """Ends a step that is late as soon as it is known who kept the others waiting."""
        if operation.may_wait(operation.chain()[-1]):
            return []
        return self._fail(operation, kept_waiting(operation, self._peers, self._now))

    def _release(self, request: int) -> list[CoordinatorAction]:
        operation = self._operations.get(request)
        if operation is None:
            return []
        before = self._operations.before(operation)
        if before is not None and before.held:
            error = SessionError(
                f"{operation.what} was to be decided before {before.what}, which it follows; "
                "finish steps in the order in which they were begun"
            )
            operation.failure = error  # it ends when that one does, as workers have to see it
            return [Settle(request, error)]
        operation.held = False
        return [] if operation.waiting else self._end(operation, None)

    def _cancel(self) -> list[CoordinatorAction]:
        return [
            action
            for operation in self._operations.steps()
            for action in self._end(operation, SessionError(f"{operation.what} was cancelled"))
        ]

    # Time ----------------------------------------------------------------------------------------

    def _call(self, peer: Peer) -> list[Letter]:
        if peer.gone or self._fenced:
            return []
        if peer.opened:
            peer.asked = min(peer.asked, self._now)
            return [peer.stream.tell(Ping(sent=self._now))]
        letters = list(peer.stream.outbound.all_from(0))  # it cannot ask for what it does not know
        if peer.welcomed and not letters:  # others have not answered yet; it shall not be silent
            own = self._version
            letters = [peer.stream.tell(Hello(0, own.version, own.wire, own.python))]
        return letters

    def _ping(self, worker: int) -> list[CoordinatorAction]:
        peer = self._peers[worker]
        return self._sends(worker, [peer.stream.tell(Ping(sent=self._now))])

    def _tick(self) -> list[CoordinatorAction]:
        now = self._now
        actions: list[CoordinatorAction] = []
        for gone in self._watch.overdue(now):
            actions += self._lose(gone)
        for operation in list(self._operations.values()):
            if now >= operation.deadline:
                actions += self._fail(operation, late(operation, self._peers, now))
        if now >= self._commit_at:
            self._commit_at = inf
            for worker in sorted(self._owed):
                actions += self._tell_commit(worker)
        if now >= self._beat + BEAT:
            self._beat = now
            for worker, peer in enumerate(self._peers):
                actions += self._sends(worker, self._call(peer))
        return actions

    def _lose(self, gone: Gone) -> list[CoordinatorAction]:
        peer = self._peers[gone.worker]
        if peer.gone is not None:
            return []
        peer.gone = gone
        self._losses += 1
        self._watch.end(peer)
        actions: list[CoordinatorAction] = []
        for operation in self._operations.of(gone.worker):
            what = f"was lost in {operation.what}"
            actions += self._end(operation, peer.lost(what, operation))
        return actions

    def _part(self, source: int, step: int, told: Unreached) -> list[CoordinatorAction]:
        """A worker does not reach another: a step that needs their link ends, if it is the link and
        not that other one, which then is lost or late."""
        if not 0 <= told.worker < len(self._peers):
            raise ProtocolError(f"there is no worker {told.worker} for it to reach")
        target = self._peers[told.worker]
        operation = self._operations.over(source, told.worker, step)
        if operation is None or not self._watch.is_cut(target, told.asked, self._now):
            return []
        return self._fail(operation, apart(self._peers[source], target, operation, told.edge))

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
                peer.commits = step
                self._owed.add(worker)
            elif self._fenced is None:
                actions += self._tell_commit(worker)  # of those before it, which it does not undo
                if operation.withheld:
                    if not operation.begin.orders[worker].arrays:
                        continue
                    # It follows what is undone: the worker lets go of its arrays, and of it.
                    actions += self._order(operation, worker)
                told = Abort(type(error).__name__, str(error)[:2000])
                actions += self._send(worker, told, step)
        if self._owed:
            self._commit_at = min(self._commit_at, self._now + COMMIT_AFTER)
        actions.append(Settle(request, operation.replies if error is None else error))
        return actions + self._go_on(operation, error) if self._operations else actions

    def _fail(self, operation: Operation, error: GraphflowError) -> list[CoordinatorAction]:
        """Ends an operation that failed; a free step when the one before it is decided, for workers
        give up all that they have computed up to a step that is aborted."""
        if operation.is_free and self._operations.before(operation) is not None:
            operation.failure = operation.failure or error
            operation.deadline = inf
            return []
        return self._end(operation, error)

    def _go_on(self, decided: Operation, error: GraphflowError | None) -> list[CoordinatorAction]:
        """The steps that follow one that is decided may compute, or never will."""
        actions: list[CoordinatorAction] = []
        if not decided.is_step:
            return actions
        for operation in self._operations.after(decided):
            if error is not None:
                what = f"{operation.what} was not run, because {decided.what} failed"
                actions += self._end(operation, SessionError(what))
                continue
            if operation.failure is not None:
                actions += self._end(operation, operation.failure)
                continue
            operation.deadline = inf
            if operation.waiting or not operation.held:
                seconds = 0.0 if operation.late else operation.begin.seconds
                operation.deadline = self._now + seconds + GRACE
            if operation.withheld:
                operation.withheld = False
                for worker in operation.begin.orders:
                    actions += self._order(operation, worker)
        return actions

    def _fail_all(self, error: GraphflowError) -> list[CoordinatorAction]:
        return [
            action
            for operation in list(self._operations.values())
            for action in self._end(operation, error)
        ]

    # Sending -----------------------------------------------------------------------------------

    def _owes_nothing(self, worker: int) -> None:
        """A worker has been told to commit; after the last one there is nothing to wake up for."""
        self._owed.discard(worker)
        if not self._owed:
            self._commit_at = inf

    def _tell_commit(self, worker: int) -> list[CoordinatorAction]:
        peer = self._peers[worker]
        step, peer.commits = peer.commits, -1
        self._owes_nothing(worker)
        if step < 0 or peer.gone is not None or self._fenced is not None:
            return []
        return self._send(worker, Commit(), step)

    def _send(
        self, worker: int, message: Message, step: int, data: memoryview | None = None
    ) -> list[CoordinatorAction]:
        return self._sends(worker, self._peers[worker].stream.send(message, step, data))

    def _sends(self, worker: int, letters: Iterable[Letter]) -> list[CoordinatorAction]:
        known = self._peers[worker].stream.outbound.acknowledged
        return [Send(worker, each.envelope, each.message, each.data, known) for each in letters]
