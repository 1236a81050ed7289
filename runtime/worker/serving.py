"""A worker process from start to end: its command line, signals, and the report of its end.

`serve` is the implementation of `graphflow worker`, `main` the command of launched workers.
`announce_exit` stands in for a worker whose process has ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TextIO

from graphflow import _version
from graphflow.base.process.data_folders import restrict_data_folders
from graphflow.errors import AddressInUse, GraphflowError, TransportError
from graphflow.placement.clusters.machine.host_facts import pin_to_cores
from graphflow.runtime.diagnostics.crash_recorder import start_recording
from graphflow.runtime.memory.malloc_tuning import raise_trim_threshold
from graphflow.runtime.protocol.worker import ExitReport
from graphflow.runtime.security.keys import WORKER, KeyPair, Keyring
from graphflow.runtime.telemetry.logs import Log, configure_by_environment
from graphflow.runtime.telemetry.metrics_endpoint import MetricsServer
from graphflow.runtime.transport import transport_of
from graphflow.runtime.wire.graph_limits import GraphLimits
from graphflow.runtime.worker.announcement import STDOUT, Announcement, keep_announced
from graphflow.runtime.worker.host_protocol import HostFactory, default_factory
from graphflow.runtime.worker.process import WorkerProcess

_ANNOUNCE_SECONDS = 0.7  # of an exit report; clients have reconnected by then
_BIND_SECONDS = 0.8  # in which an announcer of an exit frees the address
_BIND_RETRY = 0.005  # seconds between two tries
_DRAIN_SECONDS = (
    30.0  # for sessions to write a checkpoint and leave when the worker is asked to end
)

_log = Log("graphflow.worker")


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
    metrics: str | None = None,
    connections: int | None = None,
    limits: GraphLimits | None = None,
    checkpoints: str | None = None,
    data: Sequence[str] | None = None,
    announce: str | None = None,
    on_address: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve as a worker until SIGTERM or Ctrl-C; called on the main thread.

    At SIGTERM, or when its terminal is closed, the worker asks its sessions to write checkpoints
    and leave. It ends when they have.

    Args:
        listen: `tcp://host:port`; port `*` takes any free port.
        devices: of this worker, such as "cpu:0"; a session names them "/worker:1/cpu:0".
        threads: of each CPU device; None: all cores.
        insecure: accept an address beyond loopback, on a trusted network.
        parent_pid: serve as long as this process lives, which holds the other end of stdin.
            Interrupts of the terminal are left to it.
        output: receives the line with the address; None: stdout.
        allow_ops: names of modules of ops that sessions may have this process import.
        key: the name of this worker's own key, "" for the only one that exists. Beyond loopback
            that one is the default. With a key, only peers connect whose keys are trusted here.
        keys: the folder of keys; default: see `security.keys`.
        metrics: where metrics are served over HTTP, such as "127.0.0.1:9100".
        connections: most connections at a time; default: a quarter of the process's file
            descriptors, at most 4096.
        limits: on graphs from the wire.
        checkpoints: the directory of sessions' checkpoints, if this worker sees the same file
            system. The worker then writes its shard itself, there and nowhere else.
        data: folders below which ops may read files for sessions; None: everywhere.
        announce: the file that receives one JSON line for launchers, see `announcement`; "-" is
            `output`, and the line with the address then goes to stderr.
        on_address: receives the address, with the port that was taken.

    Raises:
        AddressInUse, InsecureAddress, TransportError: the address cannot be used.
        KeyFileError: the key cannot be used.
        ArgumentError: the file of the announcement cannot be written.
    """
    factory = host_factory or partial(default_factory, limits=limits)
    raise_trim_threshold()
    started = time.monotonic()
    ring = Keyring(keys)
    pair = _worker_key(ring, key, listen, insecure=insecure)
    worker = _bind_worker(
        partial(
            WorkerProcess, listen, devices=devices, threads=threads, insecure=insecure,
            factory=factory, allow_ops=allow_ops, ring=ring, connections=connections,
            key=pair, checkpoints=checkpoints,
        )
    )  # fmt: skip
    on_address(worker.address)
    restore_handlers = _set_signal_handlers(worker, has_parent=parent_pid is not None)
    out = output or sys.stdout
    where = f"listening on {worker.address} with {', '.join(devices)}"
    server: MetricsServer | None = None
    try:
        if metrics is not None:
            server = MetricsServer(metrics, worker.meters)
        stream = sys.stderr if announce == STDOUT else out
        print(f"graphflow worker {_version.__version__} {where}", file=stream, flush=True)
        _log.tell(
            "worker.listening", address=worker.address, devices=list(devices),
            version=_version.__version__, pid=os.getpid(),
        )  # fmt: skip
        restrict_data_folders(data)
        public = None if pair is None else pair.public.key
        told = Announcement.of_this_process(worker.address, public, devices)
        try:
            with keep_announced(announce, out, told):
                worker.run(parent_pid)
        finally:
            restrict_data_folders(None)
            took = time.monotonic() - started
            _log.tell("worker.stopped", address=worker.address, seconds=took)
    finally:
        if server is not None:
            server.close()
        worker.close()
        restore_handlers()


def _bind_worker(make: Callable[[], WorkerProcess]) -> WorkerProcess:
    """Return a worker at its address, as soon as the address is free."""
    until = time.monotonic() + _BIND_SECONDS
    while True:
        try:
            return make()
        except AddressInUse:
            if time.monotonic() > until:
                raise
            time.sleep(_BIND_RETRY)


def announce_exit(
    address: str,
    reason: str,
    op: str,
    session: str,
    *,
    insecure: bool = False,
    key: str | None = None,
    keys: str | os.PathLike[str] | None = None,
) -> None:
    """Report, at the address of a worker whose process has ended, how it ended; for a moment only.

    Sessions of that worker then learn the reason at once, and need not wait for a timeout.

    Args:
        reason: of the end, in a few words.
        op: the op that ran, with its node and the user's line; "" if it is unknown.
        session: the session whose op it was, which alone is told; "" if it is unknown.
        insecure, key, keys: as of `serve`.
    """
    ring = Keyring(keys)
    try:
        stand_in = WorkerProcess(
            address, devices=[], threads=None, insecure=insecure, factory=default_factory,
            key=_worker_key(ring, key, address, insecure=insecure), ring=ring,
            exit_report=ExitReport(reason, op, session),
        )  # fmt: skip
    except GraphflowError:
        return  # the next worker has the address already
    timer = threading.Timer(_ANNOUNCE_SECONDS, stand_in.stop)
    timer.start()
    stand_in.run()
    stand_in.close()
    timer.join()


def _worker_key(ring: Keyring, key: str | None, listen: str, *, insecure: bool) -> KeyPair | None:
    if key is None:
        beyond = (
            not transport_of(listen).check_address(listen, insecure=True, listening=True).loopback
        )
        if insecure or not beyond or not any(own.role == WORKER for own in ring.pairs()):
            return None
    return ring.own_pair(key or None, WORKER)


def _set_signal_handlers(worker: WorkerProcess, *, has_parent: bool) -> Callable[[], None]:
    """Let signals drain or stop a worker; return a function that restores the handlers before.

    A worker with a parent process ignores SIGINT: Ctrl-C is for the parent.
    """

    def drain(number: int, frame: object) -> None:
        worker.drain(_DRAIN_SECONDS)

    def stop(number: int, frame: object) -> None:
        worker.stop()

    handlers = {signal.SIGTERM: drain, signal.SIGINT: signal.SIG_IGN if has_parent else stop}
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # no nohup: its terminal was closed
        handlers[signal.SIGHUP] = drain
    before = {number: signal.signal(number, action) for number, action in handlers.items()}

    def restore() -> None:
        for number, action in before.items():
            signal.signal(number, action)

    return restore


def _load_host_factory(place: str) -> HostFactory:
    """Return an attribute of a Python file, `path.py:Name`; for tests with another host."""
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
    """Run the command of launched workers; return the exit status."""
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
    parser.add_argument("--checkpoints", help="the directory of the session's checkpoints")
    parser.add_argument("--metrics", help="where metrics are served, such as 127.0.0.1:9100")
    parser.add_argument("--recorder", help=argparse.SUPPRESS)  # two descriptors of a `Recorder`
    parser.add_argument("--core", type=int, action="append", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    pin_to_cores(given.core)
    if given.recorder:
        start_recording(*map(int, given.recorder.split(",")))
    configure_by_environment()
    # Appended, so that nothing there shadows this process's own modules.
    sys.path += given.ops_path
    try:
        serve(
            given.listen,
            devices=given.devices or ["cpu:0"],
            threads=given.threads,
            insecure=given.insecure,
            parent_pid=given.parent,
            host_factory=_load_host_factory(given.host) if given.host else None,
            allow_ops=given.allow_ops,
            key=given.key,
            keys=given.keys,
            metrics=given.metrics,
            checkpoints=given.checkpoints,
        )
    except GraphflowError as error:
        print(f"graphflow worker: {error}", file=sys.stderr)
        return 1
    if threading.active_count() > 1:
        # An op that does not return holds its thread; waiting for it would keep the process alive.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0
