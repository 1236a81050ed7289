"""The I/O loop of one session: its sockets, and the coordinator's machine.

The thread that waits for an operation drives the sockets until the outcome is there. In between, a
thread of the loop drives them, so that heartbeats go on while the user's code computes. An
interrupt waits until the machine is between two events.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from functools import partial
from typing import Any, TypeVar

from graphflow.base.process.interrupts import DeferredSignals
from graphflow.errors import (
    GraphflowError,
    ProtocolError,
    SessionError,
    TransportError,
    WorkerLost,
)
from graphflow.runtime.client.pending_operation import PendingOperation
from graphflow.runtime.client.session_activity import SessionActivity
from graphflow.runtime.client.worker_connection import WorkerConnection
from graphflow.runtime.launch.launcher import Launcher
from graphflow.runtime.polling.io_driver import LINGER, SLICE, SocketDriverLock
from graphflow.runtime.polling.wakeup import SPIN_SECONDS, EpollWaiter, WakeupFd
from graphflow.runtime.protocol.clock_sync import clock_identity
from graphflow.runtime.protocol.coordinator import CoordinatorMachine
from graphflow.runtime.protocol.coordinator_events import (
    AddWorker,
    AttachWorkerMemory,
    BeginOperation,
    CoordinatorAction,
    CoordinatorEvent,
    CoordinatorTick,
    LinkDown,
    LinkUp,
    OfferMemoryToWorker,
    ReleaseStep,
    Replies,
    ReportDraining,
    SendToWorker,
    SettleOperation,
    WorkerGone,
    WorkerMessageReceived,
)
from graphflow.runtime.security.authenticator import ZapAuthenticator
from graphflow.runtime.security.keys import KeyPair, Keyring
from graphflow.runtime.security.receive_accounting import (
    ENDLESS_MESSAGE,
    UNFRAMED_CAP,
    check_interval,
)
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.transport import transport_of
from graphflow.runtime.transport.array_lending import DeferredCopies, PeerSharedMemory
from graphflow.runtime.transport.shared_memory_arrays import SharedArrayReader
from graphflow.runtime.transport.zmq_setup import abandon_context, open_context
from graphflow.runtime.wire.frame_codec import decode_frames, encode
from graphflow.runtime.wire.messages import Chunk

# Events that never cause the loss of a worker.
_ROUTINE_EVENTS = frozenset((BeginOperation, WorkerMessageReceived, ReleaseStep))

SLACK = 5.0  # seconds beyond a deadline until the sockets themselves count as stuck
_CATCH_UP = 0.2  # seconds of delay after which a turn first receives what has arrived
_RETRY = 0.005  # seconds between two attempts, while a connection's queue is full
DRIVER_WAIT_SECONDS = 0.02  # seconds between two attempts to take over the sockets
_WAKEUP = 1 << 30  # tag of the wake-up descriptor; above all workers' numbers
_FAST_CHANNEL = 1 << 20  # plus a worker's number: the tag of its fast channel
_LOCAL_EXIT_SECONDS = 0.2  # for the exit status of a process whose connection ended
_MAX_CHECKS_PER_SECOND = 1000  # of connections; each takes 10 µs
_BATCH = 64  # messages received from one worker before other events, and deadlines, have their turn

_T = TypeVar("_T")

_log = Log("graphflow.coordinator")


class SessionIOLoop:
    """The sockets and the machine of one session.

    A thread that waits for an operation drives the sockets until it is done. At other times the
    loop's own thread does. See `polling.io_driver`.

    Attributes:
        array_memory: shared memory for arrays, to each worker.
        draining: workers that were asked to end.
        on_draining: called on a thread of its own when a worker is asked to end.
    """

    _Machine = CoordinatorMachine

    def __init__(
        self,
        session: str,
        addresses: list[str],
        *,
        insecure: bool,
        local: Launcher | None,
        pair: KeyPair | None,
        ring: Keyring | None = None,
        keys: Sequence[str],
        activity: SessionActivity,
        epoch: int,
        token: str,
        dead_after: float,
    ) -> None:
        self._context = open_context()
        self._local = local
        self._activity = activity
        self._addresses = addresses
        self._connections: list[WorkerConnection] = []
        self._insecure = insecure
        self._guard: ZapAuthenticator | None = None
        self._opened = ExitStack()  # closes the wake-up and the waiter
        self._deferred: DeferredCopies = deque()
        self.array_memory: list[PeerSharedMemory] = []
        self._machine = self._Machine(
            session, addresses, time.monotonic(), epoch, token, dead_after, clock_identity()
        )
        activity.watch(self._machine, addresses)
        self.draining: set[int] = set()
        self.on_draining: Callable[[], None] | None = None
        self._borrowed_memory: dict[int, SharedArrayReader] = {}
        self._full: set[int] = set()  # workers whose connection has no room
        self._recently_sent: set[int] = set()  # since their sockets were last drained
        self._events: deque[CoordinatorEvent] = deque()
        self._pending: dict[int, PendingOperation] = {}
        self._next_event_at = 0.0  # the machine's next tick, or the next inflow check
        self._inflow_check_at = 0.0
        # A socket's descriptor signals new messages only after the socket was found empty.
        self._unread = [~worker for worker, _ in enumerate(addresses)]
        self._stopping = False
        self._failure: BaseException | None = None
        self._main = threading.main_thread().ident
        name = f"coordinator-{session[:8]}"
        self._thread = threading.Thread(target=self._drive_in_background, name=name, daemon=True)
        try:
            if pair is not None:
                self._guard = ZapAuthenticator(self._context, pair, ring or Keyring())
            for address, key in zip(addresses, keys, strict=True):
                self._connect(address, key)
            self._open_wakeups()
            self._thread.start()
        except BaseException as error:
            self._free()
            if isinstance(error, OSError):
                raise TransportError(
                    f"no session can begin from here: {error.strerror}; close others, or let the "
                    "process have more file descriptors (`ulimit -n`)"
                ) from error
            raise

    def _connect(self, address: str, key: str) -> None:
        """Open the connection to the next worker."""
        channel = transport_of(address).connect(
            self._context, address, insecure=self._insecure, watch=True, guard=self._guard, key=key
        )
        self._connections.append(WorkerConnection(channel, address, secured=bool(key)))

    def _open_wakeups(self) -> None:
        """Open the descriptors that wake the thread which drives the sockets."""
        self._wakeup = self._opened.enter_context(closing(WakeupFd()))
        self._held_signals = DeferredSignals(self._wakeup.wake)
        self._driver = SocketDriverLock(self._wakeup)
        self._waiter = self._opened.enter_context(closing(EpollWaiter()))
        self._waiter.add(self._wakeup.fileno(), _WAKEUP)
        for worker, _ in enumerate(self._connections):
            self._watch(worker)

    def _watch(self, worker: int) -> None:
        """Receive from a worker's connection, and lend it memory, from now on."""
        offer = partial(_offer_memory, self._events, self._wakeup)
        self.array_memory.append(PeerSharedMemory(partial(offer, worker), self._deferred))
        channel = self._connections[worker].channel
        self._waiter.add(channel.fileno(), worker)
        self._waiter.add(channel.monitor_fileno(), ~worker)

    def _join(self, event: AddWorker) -> None:
        """Open the connection to a worker that is to join, and let the machine know it.

        If that fails, the worker stays unknown.
        """
        try:
            self._connect(event.address, event.key)
        except (OSError, TransportError) as error:
            _log.tell("worker.unfit", session="", address=event.address, reason=str(error))
            return
        worker = len(self._connections) - 1
        self._watch(worker)
        self._unread.append(~worker)
        self._machine.handle(event, time.monotonic())
        self._addresses.append(event.address)

    # From any thread ---------------------------------------------------------------------------

    def ask(
        self, begin: BeginOperation, seconds: float, operation: PendingOperation | None = None
    ) -> Replies:
        """Run an operation to its end, within `seconds`.

        Args:
            operation: gets the outcome, also if an interrupt ends the call.

        Raises:
            GraphflowError: why it failed; SessionError if the session is closed meanwhile.
            KeyboardInterrupt: or another exception of a signal handler. The operation goes on.
        """
        return self.finish(self.submit(begin, operation), seconds)

    def submit(
        self, begin: BeginOperation, operation: PendingOperation | None = None
    ) -> PendingOperation:
        """Start an operation, in the order of the calls."""
        operation = operation or PendingOperation(begin.request)
        self._pending[begin.request] = operation
        self._events.append(begin)
        return operation

    def finish(self, operation: PendingOperation, seconds: float) -> Replies:
        """Run a submitted operation to its end; raises as `ask`."""
        self._wait(operation, time.monotonic() + seconds)
        # This process may have been stopped: what arrived meanwhile counts.
        if operation.outcome is None:
            self._wait(operation, time.monotonic() + _CATCH_UP)
        outcome = operation.outcome
        if isinstance(outcome, Replies):
            return outcome
        self._pending.pop(operation.request, None)
        raise outcome or WorkerLost("the coordinator's sockets do not answer")

    def is_submitted(self, operation: PendingOperation) -> bool:
        """Return True if an operation was submitted, even if it has ended since."""
        return operation.request in self._pending or operation.outcome is not None

    def add(self, event: CoordinatorEvent) -> None:
        """Queue an event without waking the loop's thread: the caller will drive the sockets."""
        self._events.append(event)

    def post(self, event: CoordinatorEvent) -> None:
        """Queue an event, and wake the thread that drives the sockets."""
        self._events.append(event)
        self._wakeup.wake()

    def loss_reasons(self) -> dict[int, str]:
        """Return the lost workers, each with the reason."""
        return self._machine.loss_reasons()

    def wait_for_clocks(self, seconds: float = 1.0) -> None:
        """Wait until each worker's clock was measured once, for at most `seconds`.

        Without that, times that a worker measured in a traced step could not be converted to ours.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until and any(
            not (self._machine.is_lost(worker) or self._machine.clock(worker).round_trips)
            for worker, _ in enumerate(self._addresses)
        ):
            time.sleep(1e-3)  # meanwhile the loop's own thread drives the sockets

    def unanswered_workers(self) -> list[int]:
        """Return the workers that have yet to reply to an operation."""
        return self._machine.unanswered_workers()

    def duplicate_workers(self) -> list[int]:
        """Return two workers that are the same process; an empty list if there are none."""
        return self._machine.duplicate_workers()

    def refused_workers(self) -> list[int]:
        """Return the workers whose last handshake failed; with keys, mostly for lack of trust."""
        return [
            worker
            for worker, connection in enumerate(self._connections)
            if connection.channel.refused
        ]

    def silent_workers(self) -> list[int]:
        """Return the workers that accepted a connection, and have sent nothing on it yet."""
        return [
            worker
            for worker, connection in enumerate(self._connections)
            if connection.channel.silent
        ]

    def unwelcomed_workers(self) -> list[int]:
        """Return the workers that have not answered since the session began."""
        return self._machine.unwelcomed_workers()

    def stop(self) -> None:
        """End the thread and close the sockets. Idempotent."""
        self._stopping = True
        self._wakeup.wake()
        # The garbage collector may call this method on the loop's own thread.
        if threading.current_thread() is not self._thread:
            self._thread.join(SLACK)

    # Waiting -----------------------------------------------------------------------------------

    def _wait(self, operation: PendingOperation, until: float) -> None:
        while operation.outcome is None and time.monotonic() < until:
            self._hold_signals(self._drive_or_wait, operation, until)

    def _hold_signals(self, act: Callable[..., _T], *args: Any) -> _T:
        """Call a function that returns soon after a signal.

        On the main thread, signal handlers are held back during the call, and run after it.
        Otherwise an interrupt could leave the machine in the midst of an event.
        """
        if threading.get_ident() != self._main:
            return act(*args)
        held = self._held_signals
        before = held.hold()
        try:
            return act(*args)
        finally:
            held.restore(before)

    def _drive_or_wait(self, operation: PendingOperation, until: float) -> None:
        came = self._held_signals.received if threading.get_ident() == self._main else []
        while operation.outcome is None and not came:
            left = until - time.monotonic()
            if left <= 0:
                return
            if self._stopping:
                self._fail_all()
            if self._driver.acquire(DRIVER_WAIT_SECONDS):
                try:
                    self._drive(operation, until, came)
                finally:
                    self._driver.release()
            else:
                self._wakeup.wake()
                operation.wait(min(left, DRIVER_WAIT_SECONDS))

    def _drive_in_background(self) -> None:
        """Drive the sockets while no other thread does; the loop's own thread."""
        nobody = PendingOperation(-1)
        try:
            while not self._stopping:
                due = bool(self._events) or time.monotonic() >= self._next_event_at
                if not self._driver.acquire_as_background(
                    SLICE if due or self._pending else LINGER
                ):
                    self._driver.wait_in_background()
                    continue
                try:
                    self._drive(nobody, 0.0 if due else math.inf, [])
                finally:
                    self._driver.release()
                if self._driver.wanted:
                    time.sleep(SLICE)
        finally:
            self._stopping = True
            if self._driver.preempt(SLACK):
                self._fail_all()
                self._free()
            else:
                abandon_context(self._context)

    # With the driver lock held -------------------------------------------------------------------

    def _drive(self, operation: PendingOperation, until: float, came: list[int]) -> None:
        """Drive the sockets until the operation has an outcome.

        It stops earlier if a signal arrived, or if another thread wants to drive.
        """
        try:
            while not (operation.outcome or came or self._stopping or self._driver.wanted):
                self._turn(operation, until)
                if time.monotonic() >= until:
                    break
            if self._stopping:
                self._fail_all()
        except BaseException as error:
            self._fail_session(error)

    def _fail_session(self, error: BaseException) -> None:
        """End the session: the machine's state is undefined after an unexpected error."""
        _log.tell("loop.failed", reason=repr(error), raised=error)
        self._failure, self._stopping = error, True
        self._fail_all()

    def _turn(self, operation: PendingOperation, until: float) -> None:
        """Handle all events, after waiting for one if there is none.

        It does not wait once the operation has an outcome: all answers of a step that was begun
        ahead may have arrived before.
        """
        events = self._events
        while events:
            self._handle(events.popleft())
        while self._deferred:
            self._deferred.popleft()()
        now = time.monotonic()
        if now >= self._inflow_check_at:
            self._inflow_check_at = now + self._check_inflow(now)
        wake_at = self._machine.wake_at(0.0)
        if now >= wake_at:
            if now > wake_at + _CATCH_UP:  # the delay was this process's own
                self._catch_up()
            self._handle(CoordinatorTick())
            self._note_early_exits()
            wake_at = self._machine.wake_at(0.0)
        if wake_at > self._inflow_check_at:
            wake_at = self._inflow_check_at
        self._next_event_at = wake_at
        wake_at = min(wake_at, until) if operation.outcome is None else now
        for worker in list(self._full) if self._full else ():
            wake_at = min(wake_at, now + _RETRY)
            self._flush(worker)
        self._receive(self._wait_ready(wake_at - now, SPIN_SECONDS if self._pending else 0.0))

    def _catch_up(self) -> None:
        """Receive what arrived while this process did not run, because it was stopped or starved.

        Otherwise workers, and the operations that wait for them, would be declared late without
        cause.
        """
        until = time.monotonic() + _CATCH_UP
        while (came := self._wait_ready(0.0)) and time.monotonic() < until:
            self._receive(came)

    def _wait_ready(self, seconds: float, awake: float = 0.0) -> list[int]:
        """Return the tags of channels that have messages, after waiting for the first one."""
        came: list[int] = []
        if self._recently_sent or self._unread:
            # Sending may consume the signal of an arrived message, which epoll would then miss.
            came += [w for w in self._recently_sent if self._connections[w].channel.has_message()]
            came += self._unread
            self._recently_sent.clear()
            self._unread.clear()
        return came or self._waiter.wait(seconds, awake)

    def _receive(self, tags: Iterable[int]) -> None:
        """Receive from the channels that are ready."""
        for tag in tags:
            if tag == _WAKEUP:
                self._wakeup.drain()
            elif tag >= _FAST_CHANNEL:
                self._receive_fast(tag - _FAST_CHANNEL)
            elif tag >= 0:
                if not self._receive_batch(tag):
                    self._recently_sent.add(tag)
            # Messages before link changes: what a worker sent before it was lost counts.
            elif self._receive_batch(~tag):
                self._handle_link_changes(~tag)
            else:
                self._unread.append(tag)

    def _receive_batch(self, worker: int) -> bool:
        """Receive a worker's messages, up to a batch; return True if that was all."""
        channel = self._connections[worker].channel
        for _ in range(_BATCH):
            frames = channel.receive() if channel.has_message() else None
            if frames is None:
                return True
            self._handle_frames(worker, frames)
        return False

    def _handle_frames(self, worker: int, frames: list[Any]) -> None:
        try:
            envelope, message, data = decode_frames(frames)
        except ProtocolError as error:
            _log.tell("message.refused", peer=f"worker {worker}", reason=str(error))
            return
        if type(message) is Chunk and message.slot and worker in self._borrowed_memory:
            place = (message.slot, message.turn, message.nbytes)
            data = self._borrowed_memory[worker].defer_borrow(*place)
        self._handle(WorkerMessageReceived(worker, envelope, message, data))

    def _receive_fast(self, worker: int) -> None:
        """Receive the next message of a worker's fast channel."""
        connection = self._connections[worker]
        try:
            frames = (
                connection.fast_channel.receive() if connection.fast_channel is not None else None
            )
        except (TransportError, ProtocolError):
            # If the worker's process has ended, the main connection reports that.
            connection.disable_fast_channel()
            return
        if frames is not None:
            self._handle_fast_frames(worker, frames)

    def _handle_fast_frames(self, worker: int, frames: list[Any]) -> None:
        """Handle a message that arrived over a worker's fast channel."""
        self._handle_frames(worker, frames)

    def _handle_link_changes(self, worker: int) -> None:
        connection = self._connections[worker]
        for up in connection.channel.read_link_changes():
            if up:
                if (fast_channel := connection.open_fast_channel()) is not None:
                    self._waiter.add(fast_channel.fileno(), _FAST_CHANNEL + worker)
                self._handle(LinkUp(worker))
            else:
                self._handle(self._link_down_event(worker))

    def _check_inflow(self, now: float) -> float:
        """Check the bytes of incomplete messages of each worker; return seconds to the next
        check."""
        most = 0
        for worker, connection in enumerate(self._connections):
            under_way = connection.channel.count_unframed(now)
            most = max(most, under_way)
            if under_way > UNFRAMED_CAP:
                self._check_flooding(worker, now)
        return max(check_interval(most), len(self._connections) / _MAX_CHECKS_PER_SECOND)

    def _check_flooding(self, worker: int, now: float) -> None:
        """Lose a worker that has too many bytes in flight that form no message.

        Whole messages that were not received yet are no reason: receiving them shows which case it
        is.
        """
        channel = self._connections[worker].channel
        if not self._receive_batch(worker):
            self._recently_sent.add(worker)
            return
        self._handle_link_changes(worker)  # a new connection starts from zero
        if channel.count_unframed(now) > UNFRAMED_CAP:
            channel.disconnect()
            self._handle(WorkerGone(worker, ENDLESS_MESSAGE, ended=False))

    def _note_early_exits(self) -> None:
        """Report started processes that ended before they were connected; no link reports them."""
        if self._local is None:
            return
        for worker in self._machine.unwelcomed_workers():
            ended = None if self._machine.is_lost(worker) else self._local.wait_exit(worker)
            if ended is not None:
                self._handle(WorkerGone(worker, ended.reason, ended.op))

    def _link_down_event(self, worker: int) -> CoordinatorEvent:
        ended = self._local.wait_exit(worker, _LOCAL_EXIT_SECONDS) if self._local else None
        if ended is not None:
            return WorkerGone(worker, ended.reason, ended.op)
        return LinkDown(worker, "its process ended, froze or cannot be reached")

    def _handle(self, event: CoordinatorEvent) -> None:
        if type(event) is AddWorker:
            self._join(event)
            return
        try:
            actions = self._machine.handle(event, time.monotonic())
        except GraphflowError as error:
            # Only BeginOperation may fail: an array's dtype may have no name on the wire.
            if not isinstance(event, BeginOperation):
                raise
            self._settle(SettleOperation(event.request, error))
            return
        self._execute(actions)
        if type(event) not in _ROUTINE_EVENTS:
            self._activity.on_workers_lost(self._machine.loss_reasons(), self._addresses)

    def _execute(self, actions: Iterable[CoordinatorAction]) -> None:
        for action in actions:
            if type(action) is SendToWorker:
                self._send(action)
                continue
            match action:
                case SettleOperation():
                    self._settle(action)
                case AttachWorkerMemory(worker, token):
                    with suppress(TransportError):
                        self._borrowed_memory[worker] = SharedArrayReader(token)
                case ReportDraining():
                    self.draining.add(action.worker)
                    if self.on_draining is not None:
                        threading.Thread(target=self.on_draining, daemon=True).start()

    def _send(self, action: SendToWorker) -> None:
        try:
            head = encode(action.envelope, action.message)
        except ProtocolError as error:
            reason = f"a message to it cannot be sent: {error}"
            self._handle(WorkerGone(action.worker, reason, ended=False))
            return
        frames: list[Any] = [head] if action.data is None else [head, action.data]
        if not self._connections[action.worker].send(frames, action):
            self._flush(action.worker)

    def _flush(self, worker: int) -> None:
        connection = self._connections[worker]
        if self._machine.is_lost(worker):
            connection.unsent.clear()
        is_full = connection.flush()
        self._recently_sent.add(worker)
        (self._full.add if is_full else self._full.discard)(worker)

    def _settle(self, action: SettleOperation) -> None:
        if type(action.outcome) is WorkerLost:
            self._activity.on_workers_lost(self._machine.loss_reasons(), self._addresses)
        operation = self._pending.get(action.request)
        if operation is not None:
            operation.set_outcome(action.outcome)
            self._pending.pop(action.request, None)  # later: `is_submitted` asks on another thread

    def _fail_all(self) -> None:
        reason = f": {self._failure!r}" if self._failure else ""
        while self._pending:
            _, operation = self._pending.popitem()
            operation.set_outcome(SessionError(f"the session is closed{reason}"))

    def _free(self) -> None:
        self._opened.close()
        for memory in self.array_memory:
            memory.close()
        for connection in self._connections:
            connection.close()
        self._context.destroy(linger=0)


def _offer_memory(
    events: deque[CoordinatorEvent], wakeup: WakeupFd, worker: int, token: str
) -> None:
    """Offer a worker shared memory.

    A function and not a method: a reference to the loop would keep lent memory in a reference
    cycle.
    """
    events.append(OfferMemoryToWorker(worker, token))
    wakeup.wake()
