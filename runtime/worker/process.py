"""A worker process: one listening socket, the worker's state machine, and its sessions.

The main thread is the I/O thread. It moves messages between the socket and the machine, and never
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

from graphflow.errors import (
    DeviceLost,
    MessageTooLarge,
    NotAuthorised,
    ProtocolError,
    TransportError,
)
from graphflow.placement.clusters.machine.host_facts import host_memory
from graphflow.runtime.memory.malloc_tuning import trim_heap
from graphflow.runtime.polling.io_driver import SLICE, SocketDriverLock
from graphflow.runtime.polling.wakeup import SPIN_SECONDS, EpollWaiter, WakeupFd
from graphflow.runtime.protocol.clock_sync import clock_identity
from graphflow.runtime.protocol.fast_path import FastPathWorker
from graphflow.runtime.protocol.remote_errors import failure_message
from graphflow.runtime.protocol.worker import ExitReport
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
    RunJob,
    SendMessage,
    UpdatePeerLink,
    WorkerAction,
    WorkerEvent,
    WorkerTick,
)
from graphflow.runtime.security.authenticator import UNTRUSTED, ZapAuthenticator
from graphflow.runtime.security.keys import COORDINATOR, KeyPair, Keyring
from graphflow.runtime.telemetry.logs import Log
from graphflow.runtime.telemetry.metrics import Meters
from graphflow.runtime.transport import transport_of
from graphflow.runtime.transport.bulk_tcp import BulkChannel, BulkReceivers
from graphflow.runtime.transport.unix_socket import UnixSocketChannel, UnixSocketListener
from graphflow.runtime.transport.zmq_setup import abandon_context, open_context
from graphflow.runtime.wire.frame_codec import decode_frames, encode
from graphflow.runtime.wire.messages import (
    Broken,
    Chunk,
    Close,
    Envelope,
    Join,
    Message,
    Open,
    Status,
    StatusReport,
)
from graphflow.runtime.worker.host_protocol import HostFactory
from graphflow.runtime.worker.hosted_session import HostedSession
from graphflow.runtime.worker.worker_gauges import register_worker_gauges
from graphflow.runtime.worker.worker_status import make_report

_TICK = 0.5  # seconds
# Tags of the waiter's descriptors.
_WAKEUP, _LISTENER, _PARENT, _FAST_LISTENER, _FIRST_CHANNEL = range(5)
_RETRY = 0.005  # seconds, while a connection's queue is full
_BATCH = 64  # messages received in a row, before anything else has its turn
_MAX_UNSENT = 4096  # answers that wait for one connection; no session has as many in flight
_END_SECONDS = 1.0  # for sessions to end when the worker does
_LINGER_MS = 100  # for the last messages to leave

_log = Log("graphflow.worker")


class WorkerProcess:
    """A worker that serves sessions at an address until `stop`.

    Args:
        factory: makes the host of a session.
        connections: most connections at a time; default: see `serving.serve`.
        exit_report: how the earlier process at this address ended, if this one only reports that.

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
        exit_report: ExitReport | None = None,
    ) -> None:
        self._context = open_context()
        self._wakeup = WakeupFd()
        self._guard: ZapAuthenticator | None = None
        try:
            if key is not None:
                self._guard = ZapAuthenticator(self._context, key, ring or Keyring())
            self._listener = transport_of(listen).listen(
                self._context, listen, insecure=insecure, guard=self._guard,
                most=connections, wake=self._recheck_listener,
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
            devices, clock_identity(), host_memory() // 2, exit_report, secrets.randbits(62)
        )
        self._sessions: dict[str, HostedSession] = {}
        self._closing_sessions: dict[str, HostedSession] = {}  # closed, but still running a job
        self._reported: deque[JobFinished | OfferMemoryToCoordinator | PeerUnreached] = deque()
        self._unsent: dict[bytes, deque[list[Any]]] = {}
        self._open_channels()
        self._tick_at = time.monotonic() + _TICK
        self._stopping = False
        self._drain_seconds = 0.0  # for sessions to leave; 0 until the process is asked to end
        self._drain_deadline = math.inf  # the end of that time
        self._failure: BaseException | None = None
        self._end_reason = "it was asked to end"
        self._started = time.monotonic()
        register_worker_gauges(
            self.meters, self.address, self._sessions, self._unsent, self._listener
        )

    def _open_channels(self) -> None:
        """Open the waiter for the listener, for fast channels and for bulk connections."""
        self._driver = SocketDriverLock(self._wakeup)
        self._waiter = EpollWaiter()
        self._waiter.add(self._wakeup.fileno(), _WAKEUP)
        self._waiter.add(self._listener.fileno(), _LISTENER)
        # The socket's descriptor signals new messages only after the socket was found empty.
        self._has_unread = True
        self._fast_listener = UnixSocketListener(self.address if self._guard is None else "")
        self._bulk_receivers = BulkReceivers()
        self._new_bulk_channels: deque[tuple[str, BulkChannel]] = deque()
        # Fast channels and bulk connections, by their tags in the waiter.
        self._fast_channels: dict[int, tuple[bytes, UnixSocketChannel | BulkChannel]] = {}
        if self._fast_listener.fileno() >= 0:
            self._waiter.add(self._fast_listener.fileno(), _FAST_LISTENER)

    def stop(self) -> None:
        """End `run` soon. For signal handlers and other threads."""
        self._stopping = True
        self._wakeup.wake()

    def drain(self, seconds: float) -> None:
        """Ask the sessions to write checkpoints and leave, and end `run` once they have.

        `run` also ends after `seconds`, once the remaining coordinators are silent, or at once at
        the second call.
        """
        if self._drain_seconds:
            self._stopping = True
        self._drain_seconds = seconds
        self._wakeup.wake()

    def run(self, parent_pid: int | None = None) -> None:
        """Serve until `stop`, or until the parent process is gone.

        This thread drives the sockets in the background, while no session's thread does.
        """
        parent = EpollWaiter()
        if parent_pid is not None:
            for waiter in (parent, self._waiter):
                waiter.add(sys.stdin.fileno(), _PARENT)  # the parent holds the other end
        while not (self._stopping or self._has_drained()):
            due = time.monotonic() + _TICK
            if self._driver.acquire_as_background(SLICE):
                try:
                    self._drive(lambda: self._driver.wanted or self._has_drained(), due)
                finally:
                    self._driver.release()
            elif not self._stopping:
                self._driver.wait_in_background()
            if parent.wait(0.0):
                break
            if parent_pid is not None and os.getppid() != parent_pid:
                self._end_reason = "the process that it was started from has ended"
                break
        parent.close()
        if self._failure is not None:
            raise self._failure

    def _has_drained(self) -> bool:
        """Return True if the process was asked to end, and no session is left to wait for."""
        if self._drain_deadline == math.inf:
            return False
        now = time.monotonic()
        here = set(self._machine.sessions) - set(self._machine.parked_sessions(now))
        return now >= self._drain_deadline or not (here or self._closing_sessions or self._unsent)

    def drive_until(self, done: Callable[[], bool], seconds: float) -> bool:
        """Drive the sockets until `done`, for a session's thread that would otherwise wait.

        Returns False, at once, if another thread drives them.
        """
        if self._stopping or not self._driver.acquire(SLICE):
            return False
        try:
            self._drive(done, time.monotonic() + seconds, SPIN_SECONDS)
        except BaseException as error:  # an error of the machine ends the process
            self._failure = error
            self.stop()
        finally:
            self._driver.release()
        return True

    def close(self) -> None:
        """End all sessions, with a message to their coordinators, and free the address."""
        self._stopping = True
        self._driver.preempt(_END_SECONDS)
        words = _LINGER_MS if self._machine.sessions else 0
        self._handle(EndWorker(self._end_reason))
        until = time.monotonic() + _END_SECONDS
        ended = [
            session.join(max(0.0, until - time.monotonic()))
            for session in self._closing_sessions.values()
        ]
        self._listener.close(words)
        for route, _ in list(self._fast_channels.values()):
            self._drop_fast_channel(route)
        while self._new_bulk_channels:
            self._new_bulk_channels.popleft()[1].close()
        self._fast_listener.close()
        if self._guard is not None:
            self._guard.close()
        self._wakeup.close()
        self._waiter.close()
        if all(ended):
            self._context.destroy(linger=0)
        else:  # an op that does not return may still send
            abandon_context(self._context)

    # One turn of the loop ------------------------------------------------------------------------

    def _drive(self, done: Callable[[], bool], until: float, awake: float = 0.0) -> None:
        while not (done() or self._stopping):
            self._turn(until, awake)
            if time.monotonic() >= until:
                break

    def _turn(self, until: float, awake: float) -> None:
        """Handle all events, after waiting for one if there is none."""
        if self._reported:
            self._handle_reported()
        while self._new_bulk_channels:
            self._add_bulk_channel(*self._new_bulk_channels.popleft())
        now = time.monotonic()
        if now >= self._tick_at:
            self._tick_at = now + _TICK
            self._handle(WorkerTick())
            for session in self._guard.revoked_sessions() if self._guard is not None else ():
                self._handle(EndSession(session, f"it is of {UNTRUSTED}"))
        if self._drain_seconds and self._drain_deadline == math.inf:
            self._drain_deadline = now + self._drain_seconds
            self._handle(DrainWorker(self._drain_seconds))
        for route in list(self._unsent) if self._unsent else ():
            self._flush(route)
        if self._has_unread and not self._listener.has_message():
            self._listener.note_drained()
            self._has_unread = False
        soon = now + _RETRY if self._unsent else self._tick_at
        if self._has_unread or self._has_drained():
            soon = now
        for tag in self._waiter.wait(min(until, soon) - now, awake):
            if tag >= _FIRST_CHANNEL:
                self._receive_fast(tag)
            elif tag == _WAKEUP:
                self._wakeup.drain()
            elif tag == _LISTENER:
                self._has_unread = True
            elif tag == _FAST_LISTENER:
                self._accept_fast_channel()
            else:
                self._stopping = True
        if self._has_unread:
            self._receive_batch()

    def _recheck_listener(self) -> None:
        """Make the driving thread check the listener; called by the listener's guard thread."""
        self._has_unread = True
        self._wakeup.wake()

    def _receive_batch(self) -> None:
        for _ in range(_BATCH):
            arrived = self._listener.receive() if self._listener.has_message() else None
            if arrived is None:
                break
            self._handle_frames(*arrived)

    def _accept_fast_channel(self) -> None:
        admitted = self._fast_listener.accept()
        if admitted is not None:
            tag = _FIRST_CHANNEL + admitted[1].fileno()
            self._fast_channels[tag] = admitted
            self._waiter.add(admitted[1].fileno(), tag)

    def _queue_bulk_channel(self, session: str, bulk_channel: BulkChannel) -> None:
        """Queue a bulk connection to add. Callable from any thread."""
        self._new_bulk_channels.append((session, bulk_channel))
        self._wakeup.wake()

    def _add_bulk_channel(self, session: str, bulk_channel: BulkChannel) -> None:
        if session not in self._sessions:
            bulk_channel.close()
        elif (route := self._bulk_receivers.add(session, bulk_channel)) is not None:
            tag = _FIRST_CHANNEL + bulk_channel.fileno()
            self._fast_channels[tag] = route, bulk_channel
            self._waiter.add(bulk_channel.fileno(), tag)

    def _receive_fast(self, tag: int) -> None:
        """Receive the next message of a fast channel or a bulk connection."""
        if tag not in self._fast_channels:
            return  # it was dropped a moment ago
        route, lane = self._fast_channels[tag]
        try:
            frames = lane.receive()
        except (TransportError, ProtocolError) as error:
            if isinstance(error, ProtocolError):
                self._count_refused(route, "", error)
            self._drop_fast_channel(route)
            return
        if frames is None:
            return
        run = self._machine.accept_order(route, frames[0], time.monotonic())
        if run is None:
            self._handle_frames(route, frames, "", True)
        else:
            self._sessions[run.session].submit(run)

    def _count_refused(self, route: bytes, key: str, error: ProtocolError) -> None:
        self.meters.add("graphflow_refused_messages_total")
        _log.tell("message.refused", peer=key or route.hex(), reason=str(error))

    def _drop_fast_channel(self, route: bytes) -> None:
        """Close a fast channel or a bulk connection; its peer's further messages come by ZeroMQ."""
        lane = self._fast_listener.get(route)
        if lane is not None:
            del self._fast_channels[_FIRST_CHANNEL + lane.fileno()]
            self._fast_listener.drop(route)
        elif (bulk_channel := self._bulk_receivers.drop(route)) is not None:
            del self._fast_channels[_FIRST_CHANNEL + bulk_channel.fileno()]
            bulk_channel.close()

    def _handle_reported(self) -> None:
        while self._reported:
            finished = self._reported.popleft()
            if type(finished) is JobFinished and isinstance(finished.outcome, DeviceLost):
                self._fail_process(finished.outcome)
                continue
            if type(finished) is JobFinished and self._try_fast_answer(finished):
                continue
            is_over = isinstance(finished, JobFinished) and isinstance(finished.job, Close)
            if is_over:
                self._closing_sessions.pop(finished.session, None)
            self._handle(finished)
            if is_over:
                trim_heap()

    def _fail_process(self, lost: DeviceLost) -> None:
        """End the process: its device is lost, so no later step could be computed here.

        The order gets no answer but the loss of the worker, which a recovery replaces.
        """
        self._failure, self._end_reason = lost, str(lost)
        self.stop()

    def _try_fast_answer(self, finished: JobFinished) -> bool:
        """Answer by the fast path; return False if it does not apply."""
        answer = self._machine.encode_answer(finished)
        if answer is None:
            return False
        lane, back, (frame, number, acknowledged) = answer
        self._send_frames([frame], lane, back, number, acknowledged)
        return True

    def _handle_frames(self, route: bytes, frames: list[Any], key: str, lane: bool = False) -> None:
        role = COORDINATOR
        try:
            envelope, message, data = decode_frames(frames)
            if self._guard is not None:
                role = self._guard.authorise(key, envelope, message)
        except NotAuthorised as error:
            self.meters.add("graphflow_forbidden_messages_total")
            _log.tell("key.forbidden", key=key, reason=str(error))
            self._listener.report_invalid(route, error)
            answer: Message = failure_message(getattr(message, "request", 0), error)
            if envelope.session in self._sessions:  # its key was revoked
                answer = Broken(str(error))
            said = (envelope.session, envelope.epoch, envelope.origin, envelope.step)
            self._send(SendMessage(route, Envelope(*said, 0, 0, envelope.token), answer))
            return
        except ProtocolError as error:
            self._count_refused(route, key, error)
            if lane:
                self._drop_fast_channel(route)
            else:
                self._listener.report_invalid(route, error)
            return
        hosted = self._sessions.get(envelope.session)
        if hosted is None:
            if not lane:
                self._listener.report_stray(route)
        elif type(message) is Chunk and message.slot:
            data = hosted.read_borrowed(envelope.origin, message)
        if type(message) is Status:
            back = Envelope(envelope.session, envelope.epoch, 0, 0, 1)
            self._send(
                SendMessage(route, back, StatusReport(message.request, self._status_report(role)))
            )
            return
        self._handle(MessageReceived(route, envelope, message, data, lane))
        opened = self._sessions.get(envelope.session)
        if self._guard is not None and type(message) is Open and opened not in (None, hosted):
            self._guard.allow_session_keys(envelope.session, key, message.keys)
        elif self._guard is not None and type(message) is Join and hosted is not None:
            self._guard.allow_session_keys(envelope.session, key, [*hosted.keys, message.key])

    def _status_report(self, role: str) -> dict[str, Any]:
        """Return this worker's status, for a peer whose key has `role`."""
        names = role == COORDINATOR
        return make_report(
            started=self._started, devices=self._devices,
            sessions=[each for each in list(self._sessions.values()) if not each.is_trial],
            parked=self._machine.parked_sessions(time.monotonic()), meters=self.meters, names=names,
        )  # fmt: skip

    def _handle(self, event: WorkerEvent) -> None:
        for action in self._machine.handle(event, time.monotonic()):
            self._act(action)

    def _act(self, action: WorkerAction) -> None:
        if isinstance(action, DeliverTensor):  # most actions are of these types
            self._deliver(action)
            return
        if isinstance(action, RunJob):
            self._run(action)
            return
        if isinstance(action, SendMessage):
            self._send(action)
            return
        match action:
            case AttachPeerMemory(session, origin, token):
                self._sessions[session].attach(origin, token)
            case UpdatePeerLink(session):
                self._sessions[session].update_link(action)
            case BeatPeerLinks(session):
                self._sessions[session].beat_links(action)
            case CancelStep(session, step, error):
                self._sessions[session].cancel_step(step, error)

    def _deliver(self, action: DeliverTensor) -> None:
        session, step, edge, array, origin, echo = action
        hosted = self._sessions[session]
        if echo:
            hosted.accept_echo(step, origin, array)
        else:
            hosted.deliver(step, edge, array, origin)

    def _run(self, action: RunJob) -> None:
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
                report=self._report_event,
                drive_until=self.drive_until,
                wake=self._wakeup.wake,
                meters=self.meters,
                checkpoints=self._checkpoints,
                listen_address=self.address,
                admit_bulk_channel=partial(self._queue_bulk_channel, action.session),
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
            self._closing_sessions[action.session] = closed = self._sessions.pop(action.session)
            for route in self._bulk_receivers.routes_of(action.session):
                self._drop_fast_channel(route)
            activity = closed.activity.report()
            _log.tell(
                "session.closed", session=action.session, seconds=activity["age"],
                steps=activity["committed"],
            )  # fmt: skip

    def _report_event(
        self, finished: JobFinished | OfferMemoryToCoordinator | PeerUnreached
    ) -> None:
        self._reported.append(finished)
        if not self._driver.try_acquire():
            self._wakeup.wake()
            return
        try:
            self._handle_reported()
        finally:
            self._driver.release()

    # Sending never waits: a message that a connection does not accept is kept, and retried --------

    def _send(self, action: SendMessage) -> None:
        if isinstance(action.message, Broken):
            _log.tell(
                "session.broken", session=action.envelope.session, reason=action.message.reason
            )
        try:
            head = encode(action.envelope, action.message)
        except (ProtocolError, MessageTooLarge) as error:
            _log.tell("answer.unsent", session=action.envelope.session, reason=str(error))
            request = getattr(action.message, "request", 0)
            head = encode(action.envelope, failure_message(request, error))
        frames: list[Any] = [head] if action.data is None else [head, action.data]
        number = action.envelope.sequence
        self._send_frames(frames, action.fast_route, action.route, number, action.acknowledged)

    def _send_frames(
        self, frames: list[Any], fast_route: bytes, route: bytes, number: int, acknowledged: int
    ) -> None:
        """Send a message over the fast channel `beside` a connection, or over the connection."""
        lane = self._fast_listener.get(fast_route or route)
        if lane is not None:
            if lane.send_in_order(frames, number, acknowledged):
                return
            if not fast_route:
                return  # there is no other route to that peer
        waiting = self._unsent.setdefault(route, deque())
        if len(waiting) >= _MAX_UNSENT:
            self._listener.drop_slow_reader(route)
            return
        waiting.append(frames)
        self._flush(route)

    def _flush(self, route: bytes) -> None:
        self._has_unread = True  # sending may consume the signal of an arrived message
        waiting = self._unsent[route]
        while waiting:
            if not self._listener.send(route, waiting[0]):
                return
            waiting.popleft()
        del self._unsent[route]
