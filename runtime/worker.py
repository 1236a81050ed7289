"""A worker process: one socket, the worker's state machine, and the sessions it hosts.

The main thread is the I/O thread: it moves messages between the socket and the machine and never
computes. `serve` is what `graphflow worker` calls; `python -m graphflow.runtime.worker` is the same
for the launchers.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TextIO

import zmq

from graphflow import _version
from graphflow.errors import (
    GraphflowError,
    MessageTooLarge,
    NotAuthorised,
    ProtocolError,
    TransportError,
)
from graphflow.runtime.hosting import HostedSession, HostFactory, default_factory
from graphflow.runtime.logs import Log, configure_by_environment
from graphflow.runtime.messages import Broken, Close, Open
from graphflow.runtime.metrics import Meters
from graphflow.runtime.protocol.faults import failed
from graphflow.runtime.protocol.worker import (
    Deliver,
    Finished,
    Leave,
    Received,
    Run,
    Send,
    Tick,
    Wake,
    WorkerAction,
    WorkerEvent,
    WorkerMachine,
)
from graphflow.runtime.recorder import record
from graphflow.runtime.security.guard import Guard
from graphflow.runtime.security.keys import WORKER, KeyPair, Keyring
from graphflow.runtime.transport import transport_of
from graphflow.runtime.transport.bell import Bell
from graphflow.runtime.wire import decode_frames, encode

_TICK = 0.5  # seconds
_RETRY = 0.005  # seconds, while a connection's queue is full
_BATCH = 64  # messages taken from the socket before anything else has its turn
_LEAVE_SECONDS = 1.0  # for sessions to end when the worker does

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
    ) -> None:
        self._context: zmq.Context[Any] = zmq.Context()
        self._guard: Guard | None = None
        try:
            if key is not None:
                self._guard = Guard(self._context, key, ring or Keyring())
            self._listener = transport_of(listen).Listener(
                self._context, listen, insecure=insecure, guard=self._guard
            )
        except TransportError:
            if self._guard is not None:
                self._guard.close()
            self._context.term()
            raise
        self.address: str = self._listener.address
        self.meters = Meters()
        self._devices = list(devices)
        self._threads = threads
        self._insecure = insecure
        self._factory = factory
        self._allow_ops = frozenset(allow_ops)
        self._machine = WorkerMachine(devices)
        self._sessions: dict[str, HostedSession] = {}
        self._ending: dict[str, HostedSession] = {}  # told to close, but still at something
        self._finished: deque[Finished] = deque()
        self._unsent: dict[bytes, deque[list[Any]]] = {}
        self._bell = Bell()
        self._stopping = False

    def stop(self) -> None:
        """Ends `run` soon; for signal handlers and other threads."""
        self._stopping = True
        self._bell.ring()

    def run(self, parent_pid: int | None = None) -> None:
        """Serves until `stop`, or until the parent process is gone."""
        poller = zmq.Poller()
        poller.register(self._listener.socket, zmq.POLLIN)
        poller.register(self._bell.fileno(), zmq.POLLIN)
        watched = sys.stdin if parent_pid is not None else None
        if watched is not None:
            poller.register(watched.fileno(), zmq.POLLIN)  # the parent holds the other end
        due = time.monotonic() + _TICK
        while not self._stopping:
            wait = _RETRY if self._unsent else max(0.0, due - time.monotonic())
            ready = dict(poller.poll(int(wait * 1000) + 1))
            if self._bell.fileno() in ready:
                self._bell.hear()
            self._turn()
            if watched is not None and watched.fileno() in ready:
                return
            if time.monotonic() >= due:
                due = time.monotonic() + _TICK
                self._handle(Tick())
                if parent_pid is not None and os.getppid() != parent_pid:
                    return

    def close(self) -> None:
        """Ends all sessions and frees the address."""
        self._handle(Leave())
        until = time.monotonic() + _LEAVE_SECONDS
        ended = [
            session.join(max(0.0, until - time.monotonic())) for session in self._ending.values()
        ]
        self._listener.close()
        if self._guard is not None:
            self._guard.close()
        self._bell.close()
        if all(ended):  # else an op that does not return may still want to send
            self._context.destroy(linger=0)

    # One turn of the loop ------------------------------------------------------------------------

    def _turn(self) -> None:
        while self._finished:
            finished = self._finished.popleft()
            if isinstance(finished.job, Close):
                self._ending.pop(finished.session, None)
            self._handle(finished)
        for _ in range(_BATCH):
            arrived = self._listener.receive()
            if arrived is None:
                break
            self._take(*arrived)
        for route in list(self._unsent):
            self._flush(route)

    def _take(self, route: bytes, frames: list[Any], key: str) -> None:
        try:
            envelope, message, data = decode_frames(frames)
            if self._guard is not None:
                self._guard.check(key, envelope, message)
        except NotAuthorised as error:
            self.meters.add("graphflow_forbidden_messages_total")
            _log.tell("key.forbidden", key=key, reason=str(error))
            answer = failed(getattr(message, "request", 0), error)
            self._send(Send(route, replace(envelope, sequence=0), answer))
            return
        except ProtocolError as error:
            self.meters.add("graphflow_refused_messages_total")
            _log.tell("message.refused", peer=key or route.hex(), reason=str(error))
            return
        self._handle(Received(route, envelope, message, data))

    def _handle(self, event: WorkerEvent) -> None:
        for action in self._machine.handle(event, time.monotonic()):
            self._act(action)

    def _act(self, action: WorkerAction) -> None:
        match action:
            case Send():
                self._send(action)
            case Run():
                self._run(action)
            case Deliver(session, step, edge, array, echo):
                hosted = self._sessions[session]
                if echo:
                    hosted.echoed(step)
                else:
                    hosted.deliver(step, edge, array)
            case Wake(session, step, error):
                self._sessions[session].wake(step, error)

    def _run(self, action: Run) -> None:
        if isinstance(action.job, Open):
            if self._guard is not None:
                self._guard.vouch(action.session, action.job.keys)
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
                meters=self.meters,
            )
            _log.tell(
                "session.opened", session=action.session, epoch=action.epoch,
                worker=action.job.worker, workers=len(action.job.peers), address=self.address,
            )  # fmt: skip
            return
        self._sessions[action.session].submit(action)
        if action.session not in self._machine.sessions:  # that was its Close
            if self._guard is not None:
                self._guard.forget(action.session)
            self._ending[action.session] = closed = self._sessions.pop(action.session)
            told = closed.activity.report()
            _log.tell(
                "session.closed", session=action.session, seconds=told["age"],
                steps=told["committed"],
            )  # fmt: skip

    def _report(self, finished: Finished) -> None:
        self._finished.append(finished)
        self._bell.ring()

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
        waiting = self._unsent.setdefault(action.route, deque())
        waiting.append(frames)
        self._flush(action.route)

    def _flush(self, route: bytes) -> None:
        waiting = self._unsent[route]
        while waiting:
            if not self._listener.send(route, waiting[0]):
                return
            waiting.popleft()
        del self._unsent[route]


def serve(
    listen: str,
    *,
    devices: Sequence[str] = ("cpu:0",),
    threads: int | None = None,
    insecure: bool = False,
    parent_pid: int | None = None,
    output: TextIO | None = None,
    host_factory: HostFactory | None = None,
    allow_ops: Sequence[str] = (),
    key: str | None = None,
    keys: str | os.PathLike[str] | None = None,
) -> None:
    """Serves as a worker until SIGTERM or Ctrl-C; called on the main thread.

    Args:
        listen: `tcp://host:port`; port `*` takes any that is free.
        devices: of this worker, such as "cpu:0"; a session names them "/worker:1/cpu:0".
        threads: of each CPU device; None: all cores.
        insecure: accept an address beyond loopback, on a network that is trusted.
        parent_pid: serve as long as this process, which holds the other end of stdin, lives;
            interrupts of the terminal are left to it.
        output: where the line goes that tells the address; None: stdout.
        allow_ops: names of modules of ops that sessions may have this process import.
        key: the name of this worker's own key, "" for the only one that there is; beyond loopback
            that one is the default. With a key, only those connect whose keys are trusted here.
        keys: the folder of keys; default: see `security.keys`.

    Raises:
        AddressInUse, InsecureAddress, TransportError: the address cannot be used.
        KeyFileError: the key cannot.
    """
    factory = host_factory or default_factory
    started = time.monotonic()
    ring = Keyring(keys)
    worker = WorkerProcess(
        listen, devices=devices, threads=threads, insecure=insecure, factory=factory,
        allow_ops=allow_ops, key=_own_key(ring, key, listen, insecure=insecure), ring=ring,
    )  # fmt: skip
    interrupt = signal.SIG_IGN if parent_pid is not None else _stopper(worker)
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, _stopper(worker)),
        signal.SIGINT: signal.signal(signal.SIGINT, interrupt),
    }
    out = output or sys.stdout
    where = f"listening on {worker.address} with {', '.join(devices)}"
    try:
        print(f"graphflow worker {_version.__version__} {where}", file=out, flush=True)
        _log.tell(
            "worker.listening", address=worker.address, devices=list(devices),
            version=_version.__version__, pid=os.getpid(),
        )  # fmt: skip
        worker.run(parent_pid)
    finally:
        worker.close()
        _log.tell(
            "worker.stopped", address=worker.address, seconds=time.monotonic() - started
        )
        for number, action in before.items():
            signal.signal(number, action)


def _own_key(ring: Keyring, key: str | None, listen: str, *, insecure: bool) -> KeyPair | None:
    if key is None:
        beyond = not transport_of(listen).check(listen, insecure=True, listening=True).loopback
        if insecure or not beyond or not any(own.role == WORKER for own in ring.pairs()):
            return None
    return ring.own(key or None, WORKER)


def _stopper(worker: WorkerProcess) -> Callable[[int, object], None]:
    return lambda number, frame: worker.stop()


def _factory_of(place: str) -> HostFactory:
    """The attribute of a Python file, `path.py:Name`: how tests put another host in."""
    path, _, name = place.rpartition(":")
    spec = importlib.util.spec_from_file_location("graphflow_host", path)
    if spec is None or spec.loader is None:
        raise TransportError(f"{path!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    factory: HostFactory = getattr(module, name)
    return factory


def main(arguments: Sequence[str] | None = None) -> int:
    """The command of the launchers; returns the exit status."""
    parser = argparse.ArgumentParser(prog="graphflow.runtime.worker")
    parser.add_argument("--listen", required=True)
    parser.add_argument("--device", action="append", dest="devices")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--insecure", action="store_true")
    parser.add_argument("--parent", type=int, help="end with this process")
    parser.add_argument("--host", help=argparse.SUPPRESS)
    parser.add_argument("--allow-ops", action="append", default=[])
    parser.add_argument("--ops-path", action="append", default=[], help="where modules are found")
    parser.add_argument("--key", help="name of this worker's own key")
    parser.add_argument("--keys", help="the folder of keys")
    parser.add_argument("--recorder", help=argparse.SUPPRESS)  # two descriptors of a `Recorder`
    given = parser.parse_args(arguments)
    if given.recorder:
        record(*map(int, given.recorder.split(",")))
    configure_by_environment()
    sys.path += given.ops_path  # at the end: nothing there shadows what this process imports
    try:
        serve(
            given.listen,
            devices=given.devices or ["cpu:0"],
            threads=given.threads,
            insecure=given.insecure,
            parent_pid=given.parent,
            host_factory=_factory_of(given.host) if given.host else None,
            allow_ops=given.allow_ops,
            key=given.key,
            keys=given.keys,
        )
    except GraphflowError as error:
        print(f"graphflow worker: {error}", file=sys.stderr)
        return 1
    if threading.active_count() > 1:
        # An op that does not return holds its thread: waiting for it would keep the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
