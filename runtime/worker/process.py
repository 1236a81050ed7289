"""A worker's shell: one socket, the worker's state machine, and the sessions it hosts.

The main thread is the I/O thread: it moves messages between the socket and the machine and never
computes.
"""

from __future__ import annotations

import math
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import zmq

from graphflow.errors import (
    DeviceLost,
    MessageTooLarge,
    NotAuthorised,
    ProtocolError,
    TransportError,
)
from graphflow.placement.clusters.host_facts import host_memory
from graphflow.runtime.memory.malloc_tuning import trim_heap
from graphflow.runtime.polling.io_driver import SLICE, SocketDriverLock
from graphflow.runtime.polling.wakeup import SPIN_SECONDS, EpollWaiter, WakeupFd
from graphflow.runtime.protocol.clock_sync import identity
from graphflow.runtime.protocol.fast_path import FastPathWorker
from graphflow.runtime.protocol.remote_errors import failed
from graphflow.runtime.protocol.worker import ExitReport
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
    Run,
    Send,
    Shut,
    Tick,
    Wake,
    WorkerAction,
    WorkerEvent,
)
from graphflow.runtime.security.authenticator import UNTRUSTED, ZapAuthenticator
from graphflow.runtime.security.keys import COORDINATOR, KeyPair, Keyring
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.telemetry.metrics import Meters
from graphflow.runtime.transport import transport_of
from graphflow.runtime.transport.bulk_tcp import BulkChannel, BulkReceivers
from graphflow.runtime.transport.tcp import abandon_context
from graphflow.runtime.transport.unix_socket import UnixSocketChannel, UnixSocketListener
from graphflow.runtime.wire.frame_codec import decode_frames, encode
from graphflow.runtime.wire.messages import (
    Broken,
    Chunk,
    Close,
    Envelope,
    Message,
    Open,
    Status,
    StatusReport,
)
from graphflow.runtime.worker.hosted_session import HostedSession, HostFactory
from graphflow.runtime.worker.watched import watch_worker
from graphflow.runtime.worker.worker_status import report

_TICK = 0.5  # seconds
_WAKEUP, _LISTENER, _PARENT, _LANES, _FIRST = range(5)  # what wakes who drives the sockets
_RETRY = 0.005  # seconds, while a connection's queue is full
_BATCH = 64  # messages taken from the socket before anything else has its turn
_UNSENT = 4096  # answers that a connection does not take: more than any session has under way
_LEAVE_SECONDS = 1.0  # for sessions to end when the worker does
_LAST_WORDS = 100  # milliseconds in which what they are told may still leave

_log = Log("graphflow.worker")


class WorkerProcess:
    """Serves sessions at an address until `stop`.

    Raises:
        TransportError: the address cannot be used.
    """

    def __init__(
        self,
        listen: str,
        *,
        devices: Sequence[str],
        threads: int | None,
        insecure: bool,
        factory: HostFactory,
        allow_ops: Sequence[str] = (),
        key: KeyPair | None = None,
        ring: Keyring | None = None,
        connections: int | None = None,
        checkpoints: str | None = None,
        epitaph: ExitReport | None = None,
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._wakeup = WakeupFd()
        self._guard: ZapAuthenticator | None = None
        try:
            if key is not None:
                self._guard = ZapAuthenticator(self._context, key, ring or Keyring())
            self._listener = transport_of(listen).Listener(
                self._context, listen, insecure=insecure, guard=self._guard,
                most=connections, wake=self._look_again,
            )  # fmt: skip
        except BaseException:
            if self._guard is not None:
                self._guard.close()
            self._context.destroy(linger=0)
            self._wakeup.close()
            raise
        self.address: str = self._listener.address
        self.meters = Meters()
        self._devices = list(devices)
        self._threads = threads
        self._insecure = insecure
        self._factory = factory
        self._allow_ops = frozenset(allow_ops)
        self._checkpoints = checkpoints
        self._machine = FastPathWorker(
            devices, identity(), host_memory() // 2, epitaph, secrets.randbits(62)
        )
        self._sessions: dict[str, HostedSession] = {}
        self._ending: dict[str, HostedSession] = {}  # told to close, but still at something
        self._finished: deque[Finished | Offer | Cut] = deque()
        self._unsent: dict[bytes, deque[list[Any]]] = {}
        self._driver = SocketDriverLock(self._wakeup)
        self._waiter = EpollWaiter()
        self._waiter.add(self._wakeup.fileno(), _WAKEUP)
        self._waiter.add(self._listener.socket.getsockopt(zmq.FD), _LISTENER)
        # A socket tells of what comes only once it has been found empty.
        self._unread = True
        self._lanes = UnixSocketListener(self.address if self._guard is None else "")
        self._pipes = BulkReceivers()
        self._entering: deque[tuple[str, BulkChannel]] = deque()
        # Lanes and pipes, by what wakes us for them.
        self._heard: dict[int, tuple[bytes, UnixSocketChannel | BulkChannel]] = {}
        if self._lanes.fileno() >= 0:
            self._waiter.add(self._lanes.fileno(), _LANES)
        self._due = time.monotonic() + _TICK
        self._stopping = False
        self._leaving = 0.0  # seconds that sessions have to go, once it was asked to end
        self._left_by = math.inf  # when that time is over
        self._failure: BaseException | None = None
        self._why = "it was asked to end"
        self._started = time.monotonic()
        watch_worker(
            self.meters, self.address, self._sessions, self._unsent, self._listener.limiter
        )

    def stop(self) -> None:
        """Ends `run` soon; for signal handlers and other threads."""
        self._stopping = True
        self._wakeup.wake()

    def leave(self, seconds: float) -> None:
        """Has sessions write checkpoints and go elsewhere; ends `run` when all have gone, or their
        coordinators are silent, or after some seconds. At once when asked again."""
        if self._leaving:
            self._stopping = True
        self._leaving = seconds
        self._wakeup.wake()

    def run(self, parent_pid: int | None = None) -> None:
        """Serves until `stop`, or until the parent process is gone. This thread is the watch: it
        drives the sockets while no session's thread does."""
        parent = EpollWaiter()
        if parent_pid is not None:
            for waiter in (parent, self._waiter):
                waiter.add(sys.stdin.fileno(), _PARENT)  # the parent holds the other end
        while not (self._stopping or self._is_left()):
            due = time.monotonic() + _TICK
            if self._driver.acquire_as_background(SLICE):
                try:
                    self._drive(lambda: self._driver.wanted or self._is_left(), due)
                finally:
                    self._driver.release()
            elif not self._stopping:
                self._driver.wait_in_background()
            if parent.wait(0.0):
                break
            if parent_pid is not None and os.getppid() != parent_pid:
                self._why = "the process that it was started from has ended"
                break
        parent.close()
        if self._failure is not None:
            raise self._failure

    def _is_left(self) -> bool:
        """Whether it was asked to end, and no session is left that could still go."""
        if self._left_by == math.inf:
            return False
        now = time.monotonic()
        here = set(self._machine.sessions) - set(self._machine.parked(now))
        return now >= self._left_by or not (here or self._ending or self._unsent)

    def attend(self, done: Callable[[], bool], seconds: float) -> bool:
        """Drives the sockets until `done`, for a thread of a session that would wait otherwise;
        False: at once, for another one drives."""
        if self._stopping or not self._driver.acquire(SLICE):
            return False
        try:
            self._drive(done, time.monotonic() + seconds, SPIN_SECONDS)
        except BaseException as error:  # what breaks the machine ends the process
            self._failure = error
            self.stop()
        finally:
            self._driver.release()
        return True

    def close(self) -> None:
        """Ends all sessions, which are told so, and frees the address."""
        self._stopping = True
        self._driver.preempt(_LEAVE_SECONDS)
        words = _LAST_WORDS if self._machine.sessions else 0
        self._handle(Leave(self._why))
        until = time.monotonic() + _LEAVE_SECONDS
        ended = [
            session.join(max(0.0, until - time.monotonic())) for session in self._ending.values()
        ]
        self._listener.close(words)
        for route, _ in list(self._heard.values()):
            self._drop(route)
        while self._entering:
            self._entering.popleft()[1].close()
        self._lanes.close()
        if self._guard is not None:
            self._guard.close()
        self._wakeup.close()
        self._waiter.close()
        if all(ended):
            self._context.destroy(linger=0)
        else:  # an op that does not return may still want to send
            abandon_context(self._context)

    # One turn of the loop ------------------------------------------------------------------------

    def _drive(self, done: Callable[[], bool], until: float, awake: float = 0.0) -> None:
        while not (done() or self._stopping):
            self._turn(until, awake)
            if time.monotonic() >= until:
                break

    def _turn(self, until: float, awake: float) -> None:
        """Handles what has come, after waiting for it if there is nothing yet."""
        if self._finished:
            self._finish()
        while self._entering:
            self._adopt(*self._entering.popleft())
        now = time.monotonic()
        if now >= self._due:
            self._due = now + _TICK
            self._handle(Tick())
            for session in self._guard.revoked_sessions() if self._guard is not None else ():
                self._handle(Shut(session, f"it is of {UNTRUSTED}"))
        if self._leaving and self._left_by == math.inf:
            self._left_by = now + self._leaving
            self._handle(Drain(self._leaving))
        for route in list(self._unsent) if self._unsent else ():
            self._flush(route)
        if self._unread and not self._listener.has_message():
            self._listener.limiter.note_drained()
            self._unread = False
        soon = now + _RETRY if self._unsent else self._due
        if self._unread or self._is_left():
            soon = now
        for tag in self._waiter.wait(min(until, soon) - now, awake):
            if tag >= _FIRST:
                self._hear(tag)
            elif tag == _WAKEUP:
                self._wakeup.drain()
            elif tag == _LISTENER:
                self._unread = True
            elif tag == _LANES:
                self._admit()
            else:
                self._stopping = True
        if self._unread:
            self._listen()

    def _look_again(self) -> None:
        """Has whoever drives the sockets look at the listener; from the door's thread."""
        self._unread = True
        self._wakeup.wake()

    def _listen(self) -> None:
        for _ in range(_BATCH):
            arrived = self._listener.receive() if self._listener.has_message() else None
            if arrived is None:
                break
            self._take(*arrived)

    def _admit(self) -> None:
        admitted = self._lanes.accept()
        if admitted is not None:
            tag = _FIRST + admitted[1].fileno()
            self._heard[tag] = admitted
            self._waiter.add(admitted[1].fileno(), tag)

    def _enter(self, session: str, pipe: BulkChannel) -> None:
        """Lets a pipe in; from any thread."""
        self._entering.append((session, pipe))
        self._wakeup.wake()

    def _adopt(self, session: str, pipe: BulkChannel) -> None:
        if session not in self._sessions:
            pipe.close()
        elif (route := self._pipes.add(session, pipe)) is not None:
            tag = _FIRST + pipe.fileno()
            self._heard[tag] = route, pipe
            self._waiter.add(pipe.fileno(), tag)

    def _hear(self, tag: int) -> None:
        """Takes the next message of a lane or a pipe."""
        if tag not in self._heard:
            return  # it has just been dropped
        route, lane = self._heard[tag]
        try:
            frames = lane.receive()
        except (TransportError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                self._refuse(route, "", error)
            self._drop(route)
            return
        if frames is None:
            return
        run = self._machine.repeated(route, frames[0], time.monotonic())
        if run is None:
            self._take(route, frames, "", True)
        else:
            self._sessions[run.session].submit(run)

    def _refuse(self, route: bytes, key: str, error: ProtocolError) -> None:
        self.meters.add("graphflow_refused_messages_total")
        _log.tell("message.refused", peer=key or route.hex(), reason=str(error))

    def _drop(self, route: bytes) -> None:
        """Ends a lane or a pipe; what its peer says from now on comes by ZeroMQ."""
        lane = self._lanes.get(route)
        if lane is not None:
            del self._heard[_FIRST + lane.fileno()]
            self._lanes.drop(route)
        elif (pipe := self._pipes.drop(route)) is not None:
            del self._heard[_FIRST + pipe.fileno()]
            pipe.close()

    def _finish(self) -> None:
        while self._finished:
            finished = self._finished.popleft()
            if type(finished) is Finished and isinstance(finished.outcome, DeviceLost):
                self._fail(finished.outcome)
                continue
            if type(finished) is Finished and self._answer(finished):
                continue
            is_over = isinstance(finished, Finished) and isinstance(finished.job, Close)
            if is_over:
                self._ending.pop(finished.session, None)
            self._handle(finished)
            if is_over:
                trim_heap()

    def _fail(self, lost: DeviceLost) -> None:
        """Ends the process: no later step could be computed here. That is all the answer that the
        order gets, for a worker that is lost can be replaced, and the step done again."""
        self._failure, self._why = lost, str(lost)
        self.stop()

    def _answer(self, finished: Finished) -> bool:
        """Answers by the short way, if that is possible."""
        answer = self._machine.answer(finished)
        if answer is None:
            return False
        lane, back, (frame, number, acknowledged) = answer
        self._carry([frame], lane, back, number, acknowledged)
        return True

    def _take(self, route: bytes, frames: list[Any], key: str, lane: bool = False) -> None:
        role = COORDINATOR
        try:
            envelope, message, data = decode_frames(frames)
            if self._guard is not None:
                role = self._guard.authorise(key, envelope, message)
        except NotAuthorised as error:
            self.meters.add("graphflow_forbidden_messages_total")
            _log.tell("key.forbidden", key=key, reason=str(error))
            self._listener.report_invalid(route, error)
            answer: Message = failed(getattr(message, "request", 0), error)
            if envelope.session in self._sessions:  # its key was revoked meanwhile
                answer = Broken(str(error))
            said = (envelope.session, envelope.epoch, envelope.origin, envelope.step)
            self._send(Send(route, Envelope(*said, 0, 0, envelope.token), answer))
            return
        except ProtocolError as error:
            self._refuse(route, key, error)
            if lane:
                self._drop(route)
            else:
                self._listener.report_invalid(route, error)
            return
        hosted = self._sessions.get(envelope.session)
        if hosted is None:
            if not lane:
                self._listener.report_stray(route)
        elif type(message) is Chunk and message.slot:
            data = hosted.borrowed(envelope.origin, message)
        if type(message) is Status:
            back = Envelope(envelope.session, envelope.epoch, 0, 0, 1)
            self._send(Send(route, back, StatusReport(message.request, self._report_to(role))))
            return
        self._handle(Received(route, envelope, message, data, lane))
        opened = self._sessions.get(envelope.session)
        if self._guard is not None and type(message) is Open and opened not in (None, hosted):
            self._guard.allow_session_keys(envelope.session, key, message.keys)

    def _report_to(self, role: str) -> dict[str, Any]:
        """What this worker does, for who may act so."""
        names = role == COORDINATOR
        return report(
            started=self._started, devices=self._devices,
            sessions=[each for each in list(self._sessions.values()) if not each.is_trial],
            parked=self._machine.parked(time.monotonic()), meters=self.meters, names=names,
        )  # fmt: skip

    def _handle(self, event: WorkerEvent) -> None:
        for action in self._machine.handle(event, time.monotonic()):
            self._act(action)

    def _act(self, action: WorkerAction) -> None:
        if isinstance(action, Deliver):  # these three nearly always
            self._deliver(action)
            return
        if isinstance(action, Run):
            self._run(action)
            return
        if isinstance(action, Send):
            self._send(action)
            return
        match action:
            case Attach(session, origin, token):
                self._sessions[session].attach(origin, token)
            case Heard(session):
                self._sessions[session].heard(action)
            case Beat(session):
                self._sessions[session].beat(action)
            case Wake(session, step, error):
                self._sessions[session].wake(step, error)

    def _deliver(self, action: Deliver) -> None:
        session, step, edge, array, origin, echo = action
        hosted = self._sessions[session]
        if echo:
            hosted.echoed(step, origin, array)
        else:
            hosted.deliver(step, edge, array, origin)

    def _run(self, action: Run) -> None:
        if isinstance(action.job, Open):
            self._sessions[action.session] = HostedSession(
                action,
                context=self._context,
                devices=self._devices,
                threads=self._threads,
                insecure=self._insecure,
                guard=self._guard,
                factory=self._factory,
                allow_ops=self._allow_ops,
                report=self._report,
                attend=self.attend,
                wake=self._wakeup.wake,
                meters=self.meters,
                checkpoints=self._checkpoints,
                listens=self.address,
                admit=partial(self._enter, action.session),
            )
            _log.tell(
                "session.opened", session=action.session, epoch=action.epoch,
                worker=action.job.worker, workers=len(action.job.peers), address=self.address,
            )  # fmt: skip
            return
        self._sessions[action.session].submit(action)
        if isinstance(action.job, Close):
            if self._guard is not None:
                self._guard.forget_session(action.session)
            self._ending[action.session] = closed = self._sessions.pop(action.session)
            for route in self._pipes.routes_of(action.session):
                self._drop(route)
            told = closed.activity.report()
            _log.tell(
                "session.closed", session=action.session, seconds=told["age"],
                steps=told["committed"],
            )  # fmt: skip

    def _report(self, finished: Finished | Offer | Cut) -> None:
        self._finished.append(finished)
        if not self._driver.try_acquire():
            self._wakeup.wake()
            return
        try:
            self._finish()
        finally:
            self._driver.release()

    # Sending never waits: what a connection does not take is kept, and tried again ----------------

    def _send(self, action: Send) -> None:
        if isinstance(action.message, Broken):
            _log.tell(
                "session.broken", session=action.envelope.session, reason=action.message.reason
            )
        try:
            head = encode(action.envelope, action.message)
        except (ProtocolError, MessageTooLarge) as error:
            _log.tell("answer.unsent", session=action.envelope.session, reason=str(error))
            request = getattr(action.message, "request", 0)
            head = encode(action.envelope, failed(request, error))
        frames: list[Any] = [head] if action.data is None else [head, action.data]
        number = action.envelope.sequence
        self._carry(frames, action.lane, action.route, number, action.acknowledged)

    def _carry(
        self, frames: list[Any], beside: bytes, route: bytes, number: int, acknowledged: int
    ) -> None:
        """Sends a message with a number over the lane `beside` a connection, or over that."""
        lane = self._lanes.get(beside or route)
        if lane is not None:
            if lane.send_in_order(frames, number, acknowledged):
                return
            if not beside:
                return  # no other way leads there
        waiting = self._unsent.setdefault(route, deque())
        if len(waiting) >= _UNSENT:
            self._listener.drop_slow_reader(route)
            return
        waiting.append(frames)
        self._flush(route)

    def _flush(self, route: bytes) -> None:
        self._unread = True  # sending may take in what has arrived
        waiting = self._unsent[route]
        while waiting:
            if not self._listener.send(route, waiting[0]):
                return
            waiting.popleft()
        del self._unsent[route]
