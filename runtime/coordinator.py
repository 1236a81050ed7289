"""The hosts of a cluster as a session sees them: the coordinator's machine over real sockets.

The thread that asks for something moves messages between the sockets and the machine until it has
its answer; a thread of their own does so while nobody asks, so that heartbeats go on while the
user's code computes. An interrupt waits until the machine is between two events.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import itertools
import math
import os
import secrets
import signal
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from graphflow.errors import (
    ClusterError,
    GraphflowError,
    ProtocolError,
    RendezvousTimeout,
    SessionError,
    TransportError,
    WorkerLost,
)
from graphflow.progress import telling, waiting
from graphflow.runtime.activity import SessionActivity
from graphflow.runtime.checkpoint.manifest import Shard
from graphflow.runtime.checkpoint.remote import shard_name
from graphflow.runtime.checkpoint.store import Store
from graphflow.runtime.clock import identity
from graphflow.runtime.foreign import check_modules
from graphflow.runtime.hosts import Saving, Written
from graphflow.runtime.launch.local import LocalWorkers
from graphflow.runtime.logs import Log
from graphflow.runtime.messages import (
    Array,
    Chunk,
    Close,
    Compute,
    Done,
    Forget,
    Hello,
    Key,
    Load,
    Measure,
    Measured,
    Meet,
    Open,
    Prepare,
    Probe,
    Probed,
    Read,
    Save,
    Saved,
    Span,
    StepResult,
    Welcome,
    Write,
)
from graphflow.runtime.protocol.coordinator import DEAD_AFTER, GRACE, CoordinatorMachine
from graphflow.runtime.protocol.orders import (
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
    Order,
    Received,
    Release,
    Replies,
    Send,
    Settle,
    Tick,
)
from graphflow.runtime.protocol.stream import Version
from graphflow.runtime.security.guard import Guard
from graphflow.runtime.security.keys import COORDINATOR, WORKER, KeyPair, Keyring
from graphflow.runtime.transport import transport_of
from graphflow.runtime.transport.bell import Bell, Sleeper
from graphflow.runtime.transport.helm import LINGER, SLICE, Helm
from graphflow.runtime.transport.lending import LENT_FROM, Borrower, Lender
from graphflow.runtime.wire import SMALL_TOGETHER, Borrowed, decode_frames, encode, lent, small

if TYPE_CHECKING:
    from graphflow.placement.cluster import Cluster
    from graphflow.runtime.partition import Partition

LEASE = 30.0  # seconds without a ping after which a worker forgets the session
_RETRY = 0.005  # seconds, while a connection's queue is full
_SLACK = 5.0  # seconds beyond a deadline before the sockets themselves are given up
_PATIENCE = 0.02  # seconds between two looks at whether somebody still drives the sockets
_OFFERS = 10  # of memory to a worker, before it counts as one of another host
_BELL = 1 << 30  # no worker's number
_CLOSE_SECONDS = 1.0  # for the workers to confirm that the session is closed
_REQUEST_SECONDS = 300.0  # for loading, reading, writing and measuring
_SAVE_SECONDS = 600.0  # for the shards of a checkpoint
_REOPEN_SECONDS = 15.0  # for workers that are there to begin a session anew
_ANSWER_SECONDS = 2.0  # that a worker which is there may take to say so
_LOCAL_EXIT_SECONDS = 0.2  # between the end of a process's link and its exit status

_log = Log("graphflow.coordinator")


class _Pending:
    """An operation under way, and its outcome once there is one."""

    __slots__ = ("_event", "outcome")

    def __init__(self) -> None:
        self.outcome: Replies | GraphflowError | None = None
        self._event: threading.Event | None = None

    def settle(self, outcome: Replies | GraphflowError) -> None:
        """Tells whoever waits."""
        self.outcome = outcome
        if self._event is not None:
            self._event.set()

    def wait(self, seconds: float) -> None:
        """Waits while another thread drives the sockets."""
        self._event = event = self._event or threading.Event()
        if self.outcome is None:
            event.wait(seconds)


class _Loop:
    """The sockets and the machine of one session.

    Whoever asks for something drives them until it is done; at other times a thread of their own
    watches. See `transport.helm`.
    """

    def __init__(
        self,
        session: str,
        addresses: list[str],
        *,
        insecure: bool,
        local: LocalWorkers | None,
        pair: KeyPair | None,
        keys: Sequence[str],
        activity: SessionActivity,
        epoch: int,
        token: str,
        dead_after: float,
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._local = local
        self._activity = activity
        self._addresses = addresses
        self._channels: list[Any] = []
        self._lenders: list[Lender] = [Lender() for _ in addresses]
        try:
            guard = None if pair is None else Guard(self._context, pair, Keyring())
            for address, key in zip(addresses, keys, strict=True):
                channel = transport_of(address).Channel(
                    self._context, address, insecure=insecure, watch=True, guard=guard, key=key
                )
                self._channels.append(channel)
        except BaseException:
            self._free()
            raise
        self._machine = CoordinatorMachine(
            session, addresses, time.monotonic(), epoch, token, dead_after, identity()
        )
        activity.watch(self._machine, addresses)
        self.draining: set[int] = set()
        """Workers that were asked to end."""
        self.on_draining: Callable[[], None] | None = None
        self._unsent: list[deque[list[Any]]] = [deque() for _ in addresses]
        self._offers = [_OFFERS for _ in addresses]
        self._borrowers: dict[int, Borrower] = {}
        self._full: set[int] = set()  # workers whose connection takes no more now
        self._touched: set[int] = set()  # workers that were sent to since they were last drained
        self._events: deque[CoordinatorEvent] = deque()
        self._pending: dict[int, _Pending] = {}
        self._bell = Bell()
        self._helm = Helm(self._bell)
        self._due = 0.0  # when the machine's next Tick is
        self._sleeper = Sleeper()
        self._sleeper.add(self._bell.fileno(), _BELL)
        # A socket tells of what comes only once it has been found empty.
        self._unread = [~worker for worker, _ in enumerate(addresses)]
        for worker, channel in enumerate(self._channels):
            self._sleeper.add(channel.socket.getsockopt(zmq.FD), worker)
            self._sleeper.add(channel.monitor.getsockopt(zmq.FD), ~worker)
        self._stopping = False
        self._failure: BaseException | None = None
        name = f"coordinator-{session[:8]}"
        self._thread = threading.Thread(target=self._watch, name=name, daemon=True)
        self._thread.start()

    # From any thread ---------------------------------------------------------------------------

    def ask(self, begin: Begin, seconds: float) -> Replies:
        """Runs an operation to its end, within `seconds`.

        Raises:
            GraphflowError: how it failed; SessionError if the session is closed meanwhile.
            KeyboardInterrupt: and the operation goes on.
        """
        pending = self.submit(begin)
        return self.finish(begin.request, pending, seconds)

    def submit(self, begin: Begin) -> _Pending:
        """Starts an operation, before any that is asked for later."""
        pending = self._pending[begin.request] = _Pending()
        self._events.append(begin)
        return pending

    def finish(self, request: int, pending: _Pending, seconds: float) -> Replies:
        """Runs an operation that was started to its end; raises as `ask`."""
        until = time.monotonic() + seconds
        if threading.current_thread() is threading.main_thread():
            self._await_interruptibly(pending, until)
        else:
            self._await(pending, until, [])
        outcome = pending.outcome
        if isinstance(outcome, Replies):
            return outcome
        self._pending.pop(request, None)
        raise outcome or WorkerLost("the coordinator's sockets do not answer")

    def lend(
        self, worker: int, purpose: str, request: int, name: Key, array: Array
    ) -> Array | Chunk:
        """An array for a worker, lent if it is worth it and the worker is of this host, which is
        found out by an offer."""
        if array.nbytes < LENT_FROM:
            return array
        lender = self._lenders[worker]
        if lender.accepted:
            return lent(purpose, request, name, array, lender.lend) or array
        if self._offers[worker] and (token := lender.offer()):
            self._offers[worker] -= 1
            self.post(Offer(worker, token))
        return array

    def post(self, event: CoordinatorEvent) -> None:
        """Gives the machine an event."""
        self._events.append(event)
        self._bell.ring()

    def lost(self) -> dict[int, str]:
        """The workers that are lost, and why."""
        return self._machine.lost()

    def awaited(self) -> list[int]:
        """The workers whose replies an operation waits for."""
        return self._machine.awaited()

    def refused(self) -> list[int]:
        """The workers with which the last handshake failed: keys that are not trusted."""
        return [worker for worker, channel in enumerate(self._channels) if channel.refused]

    def stop(self) -> None:
        """Ends the thread and frees the sockets. Idempotent."""
        self._stopping = True
        self._bell.ring()
        self._thread.join(_SLACK)

    # Waiting -----------------------------------------------------------------------------------

    def _await_interruptibly(self, pending: _Pending, until: float) -> None:
        """As `_await` on the main thread, where Ctrl-C may come at any moment: it is held back
        until the machine is between two events, and is then what it would have been."""
        came: list[int] = []

        def hold_back(number: int, frame: object) -> None:
            came.append(number)
            self._bell.ring()

        while pending.outcome is None and time.monotonic() < until:
            # `signal.signal` would do, but takes longer than a small step's other parts.
            before = _signal.signal(signal.SIGINT, hold_back)
            try:
                self._await(pending, until, came)
            finally:
                _signal.signal(signal.SIGINT, before)
            if came:
                came.clear()
                signal.raise_signal(signal.SIGINT)

    def _await(self, pending: _Pending, until: float, came: list[int]) -> None:
        while pending.outcome is None and not came:
            left = until - time.monotonic()
            if left <= 0:
                return
            if self._stopping:
                self._fail_all()
            if self._helm.take(_PATIENCE):
                try:
                    self._drive(pending, until, came)
                finally:
                    self._helm.leave()
            else:
                self._bell.ring()
                pending.wait(min(left, _PATIENCE))

    def _watch(self) -> None:
        """Drives while nobody else does."""
        nobody = _Pending()
        try:
            while not self._stopping:
                due = bool(self._events) or time.monotonic() >= self._due
                if not self._helm.watch(SLICE if due or self._pending else LINGER):
                    time.sleep(SLICE)
                    continue
                try:
                    self._drive(nobody, 0.0 if due else math.inf, [])
                finally:
                    self._helm.leave()
                if self._helm.wanted:
                    time.sleep(SLICE)
        finally:
            self._stopping = True
            if self._helm.take(_SLACK):
                self._fail_all()
                self._bell.close()
                self._sleeper.close()
                self._free()

    # At the helm -------------------------------------------------------------------------------

    def _drive(self, pending: _Pending, until: float, came: list[int]) -> None:
        """Moves messages until the operation has an outcome, an interrupt came, or somebody who
        waits for one takes over from the watch."""
        try:
            while not (pending.outcome or came or self._stopping or self._helm.wanted):
                self._turn(until)
                if time.monotonic() >= until:
                    break
            if self._stopping:
                self._fail_all()
        except BaseException as error:
            _log.tell("loop.failed", reason=repr(error), raised=error)
            self._failure, self._stopping = error, True
            self._fail_all()

    def _turn(self, until: float) -> None:
        """Handles what has come, after waiting for it if there is nothing yet."""
        while self._events:
            self._handle(self._events.popleft())
        now = time.monotonic()
        if now >= self._machine.wake_at(0.0):
            self._handle(Tick())
        for worker in list(self._full):
            self._flush(worker)
        self._due = self._machine.wake_at(0.0)
        # Sending may take in what has arrived, of which the sleeper then would not know.
        came = [worker for worker in self._touched if self._channels[worker].has_message()]
        came += self._unread
        self._touched.clear()
        self._unread = []
        for tag in came or self._sleeper.sleep(min(until, self._due, now + self._retry()) - now):
            if tag == _BELL:
                self._bell.hear()
            elif tag >= 0:
                self._drain(tag, self._channels[tag])
            else:  # what a worker said before it was lost counts: messages first, then the link
                self._drain(~tag, self._channels[~tag])
                self._look(~tag, self._channels[~tag])

    def _retry(self) -> float:
        return _RETRY if self._full else math.inf

    def _drain(self, worker: int, channel: Any) -> None:
        while channel.has_message() and (frames := channel.receive()) is not None:
            try:
                envelope, message, data = decode_frames(frames)
            except ProtocolError as error:
                _log.tell("message.refused", peer=f"worker {worker}", reason=str(error))
                continue
            if isinstance(message, Chunk) and message.slot and worker in self._borrowers:
                borrow = self._borrowers[worker].borrow
                data = Borrowed(partial(borrow, message.slot, message.turn, message.nbytes))
            self._handle(Received(worker, envelope, message, data))

    def _look(self, worker: int, channel: Any) -> None:
        for up in channel.changes():
            if up:
                self._handle(LinkUp(worker))
            else:
                self._handle(self._down(worker))

    def _down(self, worker: int) -> CoordinatorEvent:
        ended = self._local.ended(worker, _LOCAL_EXIT_SECONDS) if self._local else None
        if ended is not None:
            return Gone(worker, ended.reason, ended.op)
        return LinkDown(worker, "its process ended, froze or cannot be reached")

    def _handle(self, event: CoordinatorEvent) -> None:
        try:
            actions = self._machine.handle(event, time.monotonic())
        except GraphflowError as error:
            if not isinstance(event, Begin):  # an array whose dtype cannot travel
                raise
            self._settle(Settle(event.request, error))
            return
        for action in actions:
            match action:
                case Send():
                    self._send(action)
                case Settle():
                    self._settle(action)
                case Attach(worker, token):
                    with suppress(TransportError):
                        self._borrowers[worker] = Borrower(token)
                case Leaving():
                    self.draining.add(action.worker)
                    if self.on_draining is not None:
                        threading.Thread(target=self.on_draining, daemon=True).start()
        if not isinstance(event, Begin | Received) or self._is_loss(actions):
            self._activity.lost(self._machine.lost(), self._addresses)

    @staticmethod
    def _is_loss(actions: Sequence[CoordinatorAction]) -> bool:
        return any(isinstance(a, Settle) and isinstance(a.outcome, WorkerLost) for a in actions)

    def _send(self, action: Send) -> None:
        try:
            head = encode(action.envelope, action.message)
        except ProtocolError as error:
            reason = f"a message to it cannot be sent: {error}"
            self._handle(Gone(action.worker, reason, ended=False))
            return
        frames: list[Any] = [head] if action.data is None else [head, action.data]
        self._unsent[action.worker].append(frames)
        self._flush(action.worker)

    def _flush(self, worker: int) -> None:
        waiting = self._unsent[worker]
        if self._machine.is_lost(worker):
            waiting.clear()
        while waiting and self._channels[worker].send(waiting[0]):
            waiting.popleft()
        self._touched.add(worker)
        (self._full.add if waiting else self._full.discard)(worker)

    def _settle(self, action: Settle) -> None:
        pending = self._pending.pop(action.request, None)
        if pending is not None:
            pending.settle(action.outcome)

    def _fail_all(self) -> None:
        reason = f": {self._failure!r}" if self._failure else ""
        while self._pending:
            _, pending = self._pending.popitem()
            pending.settle(SessionError(f"the session is closed{reason}"))

    def _free(self) -> None:
        for lender in self._lenders:
            lender.close()
        for channel in self._channels:
            channel.close()
        self._context.destroy(linger=0)


@dataclass(frozen=True)
class Begun:
    """A step that was begun and is not decided."""

    step: int
    deadline: float
    request: int
    pending: _Pending


class RemoteHosts:
    """The workers of a cluster, opened for one session.

    Methods may be called from any thread; steps come one at a time.
    """

    can_be_lost = True

    begins = True

    def __init__(
        self,
        cluster: Cluster,
        *,
        deadline: float,
        host: str | None = None,
        ops: Sequence[str] = (),
        dead_after: float = DEAD_AFTER,
        store: Store | None = None,
    ) -> None:
        """Joins the workers at the cluster's addresses, or starts local ones.

        Args:
            deadline: seconds until all workers are ready.
            host: `path.py:Name`, another host in started workers, for tests.
            ops: names of the modules of users' ops that the workers import.
            dead_after: seconds out of reach after which a worker is lost.
            store: where the session's checkpoints are, with its name, its secret and its epoch.

        Raises:
            ModuleNotAllowed: a worker was not started with one of `ops` allowed.
            RendezvousTimeout: a worker did not start, answer, or reach another in time.
            VersionMismatch: a worker runs other code, or another Python.
            ClusterError: a worker does not have the devices that the cluster says.
            TransportError: an address cannot be used.
        """
        until = time.monotonic() + deadline
        self.session = store.session if store is not None else secrets.token_hex(16)
        self.token = store.token if store is not None else secrets.token_hex(16)
        self._dead_after = dead_after
        self._activity = SessionActivity(self.session)
        self.meters = self._activity.meters
        self._requests = itertools.count(1)
        self._programs: dict[str, list[int]] = {}
        self._last_step = -1
        self._stepping = threading.Lock()
        self._ops = list(ops)
        self._told_draining: Callable[[], None] | None = None
        self._suspects: set[int] = set()  # workers that were lost since the session last began
        self._local = _launch(cluster, deadline, host, ops, store)
        self._loop: _Loop | None = None
        try:
            self._connect(cluster, until, store.epoch if store is not None else 1)
        except BaseException:
            self._abandon()
            raise

    def _connect(self, cluster: Cluster, until: float, epoch: int) -> None:
        """Begins the session on all workers of a cluster."""
        self._addresses = (
            self._local.addresses
            if self._local
            else [worker.address or "" for worker in cluster.workers]
        )
        self._keys, pair = _keys(cluster, len(self._addresses))
        self._loop = _Loop(
            self.session, self._addresses, insecure=cluster.insecure, local=self._local,
            pair=pair, keys=self._keys, activity=self._activity,
            epoch=epoch, token=self.token, dead_after=self._dead_after,
        )  # fmt: skip
        self._loop.on_draining = self._told_draining
        self._end = weakref.finalize(self, _shut, self._loop, self._local, os.getpid())
        with waiting(self._missing, self._tell_missing):
            self._meet(cluster, until)
        _log.tell(
            "cluster.ready", session=self.session, workers=self._addresses,
            seconds=time.monotonic() - self._activity.opened,
        )  # fmt: skip

    # Programs and steps --------------------------------------------------------------------------

    def add(self, program: str, partitions: Mapping[int, Sequence[Partition]]) -> None:
        """Gives each worker its partitions of a program; raises as `load` does.

        Raises:
            ModuleNotAllowed: an op or a host function is of a module that is not among `ops`.
        """
        from graphflow.runtime.codec import encode as encode_partitions

        check_modules(partitions, self._ops)
        self.load(program, {w: encode_partitions(mine) for w, mine in partitions.items()})

    def load(self, program: str, partitions: Mapping[int, tuple[bytes, list[Array]]]) -> None:
        """Gives each worker its partition of a program: header and constants.

        Raises:
            GraphLimitError: a worker refuses the partition.
            WorkerLost: a worker was lost before or meanwhile.
        """
        orders = {}
        request = next(self._requests)
        for worker, (header, buffers) in partitions.items():
            parts = [np.frombuffer(header, np.uint8), *buffers]
            arrays = [("part", index, part) for index, part in enumerate(parts)]
            orders[worker] = Order(Load(request, program, len(parts)), arrays)
        started = time.monotonic()
        with telling(f"loading a program on {len(orders)} workers"):
            self._ask(request, orders, _REQUEST_SECONDS)
        self._programs[program] = list(partitions)
        _log.tell(
            "program.loaded", session=self.session, program=program, workers=list(partitions),
            bytes=sum(array.nbytes for o in orders.values() for _, _, array in o.arrays),
            seconds=time.monotonic() - started,
        )  # fmt: skip

    def step(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[int, Mapping[str, Array]],
        trace: bool,
        deadline: float,
    ) -> StepResult:
        """Runs one step on the workers of a program; returns when it is decided to commit.

        Args:
            step: larger than that of every step before, failed ones included.
            bindings: sizes of the program's symbolic dims.
            feeds: by worker and name.
            trace: whether spans are measured.
            deadline: seconds.

        Raises:
            OpError, CheckError: an op failed; nothing has changed.
            StepTimeout: the deadline passed; nothing has changed.
            WorkerLost: a worker died, froze or cannot be reached; its state is gone.
            SessionError: cancelled, closed, an unknown program, or a step that is not new.
        """
        with self._stepping:
            request, orders = self._orders(program, step, bindings, feeds, trace, deadline, -1)
            with self._activity.step(step):
                return self._fetched(self._ask(request, orders, deadline, step))

    def begin(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[int, Mapping[str, Array]],
        deadline: float,
        follows: int,
    ) -> Begun:
        """Begins a step that is not decided before `finish`; its feeds travel at once, and it
        computes as soon as the step that it `follows` has committed (-1: now).

        Raises:
            SessionError: closed, an unknown program, or a step that is not new.
        """
        with self._stepping:
            if self._loop is None:
                raise SessionError("the session is closed")
            request, orders = self._orders(program, step, bindings, feeds, False, deadline, follows)
            begin = Begin(request, orders, deadline, step, follows, held=True)
            return Begun(step, deadline, request, self._loop.submit(begin))

    def finish(self, begun: Begun) -> StepResult:
        """Decides a step that was begun, the first of those that are not decided; as `step`."""
        with self._stepping, self._activity.step(begun.step):
            if self._loop is None:
                raise SessionError("the session is closed")
            self._loop.post(Release(begun.request))
            try:
                # Its own deadline runs from when it may compute.
                seconds = 2 * begun.deadline + _SLACK
                return self._fetched(self._loop.finish(begun.request, begun.pending, seconds))
            except KeyboardInterrupt:
                self.cancel()
                raise

    def undo(self, begun: Sequence[Begun]) -> None:
        """Ends steps that were begun and are not decided: nothing of them happens."""
        self.cancel()
        for each in begun:
            with suppress(GraphflowError):
                if self._loop is not None:
                    self._loop.finish(each.request, each.pending, _SLACK)

    def _orders(
        self,
        program: str,
        step: int,
        bindings: Mapping[str, int],
        feeds: Mapping[int, Mapping[str, Array]],
        trace: bool,
        deadline: float,
        follows: int,
    ) -> tuple[int, dict[int, Order]]:
        """What the workers of a program are told of a step, under a new request."""
        workers = self._programs.get(program)
        if workers is None:
            raise SessionError(f"program {program!r} is not loaded")
        if step <= self._last_step:
            raise SessionError(f"step {step} is not after step {self._last_step}")
        self._last_step = step
        request = next(self._requests)
        orders = {}
        for worker in workers:
            order = Compute(request, program, dict(bindings), [], trace, deadline, follows=follows)
            orders[worker] = self._compute(order, worker, feeds.get(worker, {}))
        fed = sum(np.asarray(a).nbytes for given in feeds.values() for a in given.values())
        self.meters.add("graphflow_feed_bytes_total", fed)
        return request, orders

    def _fetched(self, replies: Replies) -> StepResult:
        result = _result(replies)
        nbytes = sum(array.nbytes for array in result.fetches.values())
        self.meters.add("graphflow_fetch_bytes_total", nbytes)
        return result

    def _compute(self, order: Compute, worker: int, fed: Mapping[str, Array]) -> Order:
        """The order with its feeds: in it, in shared memory, or before it."""
        arrays = []
        room = SMALL_TOGETHER
        for name, array in fed.items():
            array = np.asarray(array)
            found = small(name, array) if room > 0 else None
            if found is not None:
                order.small.append(found)
                room -= len(found[3])
            else:
                order.feeds.append(name)
                sent = self._lend(worker, "feed", order.request, name, array)
                arrays.append(("feed", name, sent))
        return Order(order, arrays)

    def _lend(
        self, worker: int, purpose: str, request: int, name: Key, array: Array
    ) -> Array | Chunk:
        if self._loop is None:
            return array
        return self._loop.lend(worker, purpose, request, name, array)

    def cancel(self) -> None:
        """Aborts the step that runs, if any: its caller gets SessionError, unless it was decided
        already. For other threads; Ctrl-C in `step` does the same."""
        if self._loop is not None:
            self._loop.post(Cancel())

    # Variables -----------------------------------------------------------------------------------

    def read(self, worker: int, variable: str) -> Array:
        """The value of a variable after the last committed step."""
        request = next(self._requests)
        order = Order(Read(request, variable))
        replies = self._ask(request, {worker: order}, _REQUEST_SECONDS)
        return _owned(replies.arrays[worker][variable])

    def write(self, worker: int, variable: str, value: Array) -> None:
        """Sets a variable."""
        request = next(self._requests)
        order = Order(Write(request, variable), [("value", variable, np.asarray(value))])
        self._ask(request, {worker: order}, _REQUEST_SECONDS)

    def prepare(self, program: str, bindings: Mapping[str, int]) -> None:
        """Lets the workers compile a program for the sizes of coming steps.

        Raises:
            WorkerLost: a worker was lost before or meanwhile.
        """
        request = next(self._requests)
        order = Order(Prepare(request, program, dict(bindings)))
        self._ask(request, dict.fromkeys(self._programs[program], order), _REQUEST_SECONDS)

    def ready(self, program: str, bindings: Mapping[str, int]) -> None:
        """A step over processes has no shorter way."""

    def forget(self, programs: Sequence[str], variables: Mapping[int, Sequence[str]]) -> None:
        """Lets go of programs, and of variables by worker: they live elsewhere from now on."""
        there: dict[int, list[str]] = {worker: [] for worker in variables}
        for name in programs:
            for worker in self._programs.pop(name, ()):
                there.setdefault(worker, []).append(name)
        if there:
            request = next(self._requests)
            orders = {
                worker: Order(Forget(request, names, list(variables.get(worker, ()))))
                for worker, names in there.items()
            }
            self._ask(request, orders, _REQUEST_SECONDS)

    # Checkpoints and recovery --------------------------------------------------------------------

    def save(self, root: Path, folder: str, step: int, workers: Sequence[int]) -> Saving:
        """Has workers copy their variables at once, and write or send them by and by."""
        if self._loop is None:
            raise SessionError("the session is closed")
        loop, request = self._loop, next(self._requests)
        files = {worker: shard_name(worker) for worker in workers}
        orders = {w: Order(Save(request, folder, file, step)) for w, file in files.items()}
        pending = loop.submit(Begin(request, orders, _SAVE_SECONDS))

        def wait(seconds: float) -> dict[int, Written]:
            replies = loop.finish(request, pending, seconds)
            written: dict[int, Written] = {}
            for worker, message in replies.messages.items():
                assert isinstance(message, Saved)
                arrays = {str(n): array for n, array in replies.arrays[worker].items()}
                shard = Shard(files[worker], message.sha256, message.nbytes, ())
                written[worker] = shard if message.sha256 else arrays
            return written

        return wait

    def reopen(self, cluster: Cluster, epoch: int, seconds: float) -> Cluster:
        """Begins the session anew, at a higher epoch. Own processes that have ended are started
        again; other workers have some seconds to come back, and then it goes on without them.

        Raises:
            WorkerLost: none is there, or one was lost meanwhile.
        """
        leaving: set[int] = set()
        if self._loop is not None:
            leaving = self.draining()
            self._suspects |= {*self._loop.lost()}
            self._release(leaving)
            self._end.detach()
            self._loop.stop()
            self._loop = None
        self._programs.clear()
        try:
            if self._local is not None:
                self._local.renew(self._suspects, leaving, cluster.deadline)
            else:
                ending = {self._addresses[worker] for worker in leaving}
                cluster = self._answering(cluster, seconds, ending)
            self._connect(cluster, time.monotonic() + _REOPEN_SECONDS, epoch)
        except (RendezvousTimeout, SessionError) as error:
            raise WorkerLost(f"a worker was lost while the session began anew: {error}") from error
        self._suspects.clear()
        return cluster

    def draining(self) -> set[int]:
        """The workers that were asked to end, and wait for the session to go elsewhere."""
        return self._loop.draining - {*self._loop.lost()} if self._loop is not None else set()

    def on_draining(self, told: Callable[[], None]) -> None:
        """Has a method called, on another thread, when a worker is asked to end; it does not keep
        its object alive."""
        method = weakref.WeakMethod(told)

        def tell() -> None:
            there = method()
            if there is not None:
                there()

        self._told_draining = tell
        if self._loop is not None:
            self._loop.on_draining = tell

    def _release(self, workers: Collection[int]) -> None:
        """Has workers forget the session, so that they may end."""
        request = next(self._requests)
        with suppress(GraphflowError):
            self._ask(request, {w: Order(Close(request)) for w in workers}, _CLOSE_SECONDS)

    def _answering(self, cluster: Cluster, seconds: float, ending: Collection[str]) -> Cluster:
        """The workers of a cluster that answer within some seconds, without those that are about to
        end as long as there are others."""
        addresses = [worker.address or "" for worker in cluster.workers]
        keys, pair = _keys(cluster, len(addresses))
        until = time.monotonic() + max(seconds, _ANSWER_SECONDS)
        loop = _Loop(
            secrets.token_hex(16), addresses, insecure=cluster.insecure, local=None, pair=pair,
            keys=keys, activity=SessionActivity(self.session), epoch=1,
            token=secrets.token_hex(16), dead_after=self._dead_after,
        )  # fmt: skip
        others = [worker for worker, address in enumerate(addresses) if address not in ending]
        if not others:
            time.sleep(min(seconds, _ANSWER_SECONDS))  # until they have ended, and perhaps are back
        try:
            asked = {}
            for worker in others or range(len(addresses)):
                hello = _hello(next(self._requests))
                begin = Begin(hello.request, {worker: Order(hello)}, _left(until))
                asked[worker] = (hello.request, loop.submit(begin))
            there = []
            for worker, (request, pending) in asked.items():
                with suppress(RendezvousTimeout, WorkerLost):
                    loop.finish(request, pending, _left(until) + _SLACK)
                    there.append(worker)
        finally:
            loop.stop()
        if not there:
            raise WorkerLost(
                f"none of the workers at {', '.join(addresses)} answered within "
                f"{max(seconds, _ANSWER_SECONDS):g} s"
            )
        return cluster.without(set(range(len(addresses))) - {*there})

    # Measuring -----------------------------------------------------------------------------------

    def measure(self) -> dict[int, dict[str, Any]]:
        """The calibration of each worker's machine, one worker after the other: those of one
        machine would slow each other down."""
        reports = {}
        for worker in range(len(self._addresses)):
            request = next(self._requests)
            replies = self._ask(request, {worker: Order(Measure(request))}, _REQUEST_SECONDS)
            message = replies.messages[worker]
            assert isinstance(message, Measured)
            reports[worker] = dict(message.report)
        return reports

    def probe_link(self, source: int, target: int, nbytes: int, repeats: int) -> float:
        """The median time in seconds that `nbytes` take from one worker to another: half of a
        round trip.

        Raises:
            StepTimeout: the target did not answer; the link is named.
        """
        request = next(self._requests)
        order = Order(Probe(request, target, nbytes, repeats, _REQUEST_SECONDS))
        replies = self._ask(request, {source: order}, _REQUEST_SECONDS + GRACE)
        message = replies.messages[source]
        assert isinstance(message, Probed)
        return message.seconds

    # Start and end -------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the session on its workers, and ends those that were started. Idempotent."""
        if self._loop is None:
            self._abandon()  # of a recovery that failed, own processes may be left
            return
        request = next(self._requests)
        orders = {worker: Order(Close(request)) for worker in self._living()}
        try:
            if orders:
                self._ask(request, orders, _CLOSE_SECONDS)
        except GraphflowError as error:
            _log.tell("session.unconfirmed", session=self.session, reason=str(error))
        finally:
            self._abandon()
            self._activity.ended()

    def __enter__(self) -> RemoteHosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """The numbers of the processes that were started for this session."""
        return self._local.pids if self._local else []

    def _living(self) -> list[int]:
        lost = self._loop.lost() if self._loop else {}
        return [worker for worker in range(len(self._addresses)) if worker not in lost]

    def _missing(self, seconds: float) -> str:
        """What the rendezvous waits for, for whoever watches."""
        return f"waiting for {', '.join(self._awaited())}, {seconds:.0f} s"

    def _tell_missing(self, seconds: float) -> None:
        _log.tell(
            "cluster.waiting", session=self.session, seconds=round(seconds, 1),
            workers=self._awaited(),
        )  # fmt: skip

    def _awaited(self) -> list[str]:
        missing = self._loop.awaited() if self._loop else []
        return [f"worker {each} at {self._addresses[each]}" for each in missing] or ["the workers"]

    def _meet(self, cluster: Cluster, until: float) -> None:
        """Versions, sessions, and the links between the workers: the readiness barrier."""
        hello = _hello(next(self._requests))
        workers = range(len(self._addresses))
        try:
            replies = self._ask(hello.request, {w: Order(hello) for w in workers}, _left(until))
        except RendezvousTimeout as error:
            raise self._refused() or error from None
        for worker in workers:
            welcome = replies.messages[worker]
            assert isinstance(welcome, Welcome)
            self._check_devices(cluster, worker, welcome)
        request = next(self._requests)
        shown = self._keys if any(self._keys) else []
        orders = {
            w: Order(Open(request, w, self._addresses, LEASE, self._ops, shown)) for w in workers
        }
        self._ask(request, orders, _left(until))
        request, left = next(self._requests), _left(until)
        try:
            self._ask(request, {w: Order(Meet(request, left)) for w in workers}, left + GRACE)
        except GraphflowError as error:
            if isinstance(error, WorkerLost):
                raise
            raise RendezvousTimeout(f"the workers do not reach each other: {error}") from error

    def _refused(self) -> RendezvousTimeout | None:
        """What to say if workers did not answer because of keys."""
        assert self._loop is not None
        refused = self._loop.refused()
        if not refused:
            return None
        where = ", ".join(f"worker {w} at {self._addresses[w]}" for w in refused)
        return RendezvousTimeout(
            f"{where} and this process do not trust each other's keys; there, run `graphflow keys "
            "add` with the .public file of this machine's key; here, check that the cluster file "
            "has the worker's key (`graphflow keys list` shows both)"
        )

    def _check_devices(self, cluster: Cluster, worker: int, welcome: Welcome) -> None:
        wanted = [device.name.rpartition("/")[2] for device in cluster.workers[worker].devices]
        missing = [name for name in wanted if name not in welcome.devices]
        if missing:
            raise ClusterError(
                f"worker {worker} at {self._addresses[worker]} has {', '.join(welcome.devices)}, "
                f"but not {', '.join(missing)} as the cluster says; start it with "
                f"`graphflow worker --devices {','.join(wanted)}`, or change the cluster"
            )

    def _ask(
        self, request: int, orders: Mapping[int, Order], seconds: float, step: int = 0
    ) -> Replies:
        if self._loop is None:
            raise SessionError("the session is closed")
        try:
            return self._loop.ask(Begin(request, orders, seconds, step), seconds + _SLACK)
        except KeyboardInterrupt:
            self.cancel()
            raise

    def _abandon(self) -> None:
        loop, self._loop = self._loop, None
        if loop is not None:
            self._end.detach()
        _shut(loop, self._local, os.getpid())


def _shut(loop: _Loop | None, local: LocalWorkers | None, owner: int) -> None:
    if os.getpid() != owner:  # a fork that ends: threads, sockets and workers are its parent's
        return
    if loop is not None:
        loop.stop()
    if local is not None:
        local.stop()


def _launch(
    cluster: Cluster, deadline: float, host: str | None, ops: Sequence[str], store: Store | None
) -> LocalWorkers | None:
    if cluster.kind != "local":
        return None
    devices = cluster.workers[0].devices
    threads = next((device.threads for device in devices if device.threads is not None), None)
    names = [device.name.rpartition("/")[2] for device in devices]
    return LocalWorkers(
        len(cluster.workers), devices=names, threads=threads, deadline=deadline, host=host,
        ops=ops, checkpoints=str(store.root) if store is not None else None,
    )  # fmt: skip


def _keys(cluster: Cluster, count: int) -> tuple[list[str], KeyPair | None]:
    """The workers' public keys ("" where there is none), and our own pair if there are any.

    Raises:
        KeyFileError: a key is unknown here, or our own cannot be used.
    """
    if cluster.kind == "local":
        return [""] * count, None
    ring = Keyring()
    found = [ring.key_of(each.key, WORKER) if each.key else "" for each in cluster.workers]
    needed = any(found) or cluster.key is not None
    return found, ring.own(cluster.key, COORDINATOR) if needed else None


def _hello(request: int) -> Hello:
    own = Version.own()
    return Hello(request, own.version, own.wire, own.python)


def _left(until: float) -> float:
    return max(0.05, until - time.monotonic())


def _result(replies: Replies) -> StepResult:
    fetches: dict[str, Array] = {}
    spans: list[Span] = replies.spans
    peak: dict[str, int] = {}
    for worker, message in replies.messages.items():
        assert isinstance(message, Done)
        peak |= message.peak
        fetches |= {str(name): _owned(array) for name, array in replies.arrays[worker].items()}
    return StepResult(fetches, spans, peak, replies.errors)


def _owned(array: Array) -> Array:
    """An array that belongs to the caller: what is lent is copied, and thereby returned."""
    return array if array.flags.writeable else array.copy("K")
