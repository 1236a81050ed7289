"""A worker process from its start to its end: the command, signals, and what is told of its end.

`serve` is what `graphflow worker` calls, `main` the same for the launchers; `mourn` stands in for a
worker whose process has ended.
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
from graphflow.errors import AddressInUse, GraphflowError, TransportError
from graphflow.placement.clusters.host_facts import pin_to_cores
from graphflow.runtime.diagnostics.crash_recorder import start_recording
from graphflow.runtime.memory.malloc_tuning import raise_trim_threshold
from graphflow.runtime.protocol.worker import ExitReport
from graphflow.runtime.security.keys import WORKER, KeyPair, Keyring
from graphflow.runtime.telemetry.logs import Log, configure_by_environment
from graphflow.runtime.telemetry.metrics_endpoint import MetricsServer
from graphflow.runtime.transport import transport_of
from graphflow.runtime.wire.graph_limits import GraphLimits
from graphflow.runtime.worker.hosted_session import HostFactory, default_factory
from graphflow.runtime.worker.process import WorkerProcess

_ANNOUNCE_SECONDS = (
    0.7  # seconds in which it is told how a worker ended: connections are made anew by then
)
_BIND_SECONDS = 0.8  # in which an address may become free where that is told
_BIND_RETRY = 0.005  # seconds between two tries
_DRAIN_SECONDS = 30.0  # for sessions to write a checkpoint and go when the worker is asked to end

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
    on_address: Callable[[str], None] = lambda address: None,
) -> None:
    """Serves as a worker until SIGTERM or Ctrl-C; called on the main thread. At SIGTERM, or when
    its terminal is closed, it asks its sessions to write checkpoints and go, and ends when they
    have.

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
        metrics: where metrics are served over HTTP, such as "127.0.0.1:9100"; see `endpoint`.
        connections: at a time; default: a quarter of the file descriptors that the process may
            have, at most 4096.
        limits: on graphs from the wire.
        checkpoints: the directory that sessions keep their checkpoints in, where this worker sees
            the same one: then it writes its part itself, there and nowhere else.
        told: is given the address, with the port that was taken.

    Raises:
        AddressInUse, InsecureAddress, TransportError: the address cannot be used.
        KeyFileError: the key cannot.
    """
    factory = host_factory or partial(default_factory, limits=limits)
    raise_trim_threshold()
    started = time.monotonic()
    ring = Keyring(keys)
    worker = _bind_worker(
        partial(
            WorkerProcess, listen, devices=devices, threads=threads, insecure=insecure,
            factory=factory, allow_ops=allow_ops, ring=ring, connections=connections,
            key=_worker_key(ring, key, listen, insecure=insecure), checkpoints=checkpoints,
        )
    )  # fmt: skip
    on_address(worker.address)
    interrupt = signal.SIG_IGN if parent_pid is not None else _stop_handler(worker)
    before = {
        signal.SIGTERM: signal.signal(signal.SIGTERM, _drain_handler(worker)),
        signal.SIGINT: signal.signal(signal.SIGINT, interrupt),
    }
    if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL:  # no nohup: its terminal was closed
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, _drain_handler(worker))
    out = output or sys.stdout
    where = f"listening on {worker.address} with {', '.join(devices)}"
    server: MetricsServer | None = None
    try:
        if metrics is not None:
            server = MetricsServer(metrics, worker.meters)
        print(f"graphflow worker {_version.__version__} {where}", file=out, flush=True)
        _log.tell(
            "worker.listening", address=worker.address, devices=list(devices),
            version=_version.__version__, pid=os.getpid(),
        )  # fmt: skip
        try:
            worker.run(parent_pid)
        finally:
            took = time.monotonic() - started
            _log.tell("worker.stopped", address=worker.address, seconds=took)
    finally:
        if server is not None:
            server.close()
        worker.close()
        for number, action in before.items():
            signal.signal(number, action)


def _bind_worker(make: Callable[[], WorkerProcess]) -> WorkerProcess:
    """A worker at its address, as soon as that one is free."""
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
    """Tells for a moment, at the address of a worker whose process has ended, how that came: a
    session that had it learns at once what otherwise nobody could tell it.

    Args:
        reason: of the end, in a few words.
        op: in which it was, with its node and the user's line; "" if that is not known.
        session: whose op that was, which alone is told of it; "" if that is not known.
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
        return  # the next worker is there already
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


def _stop_handler(worker: WorkerProcess) -> Callable[[int, object], None]:
    return lambda number, frame: worker.stop()


def _drain_handler(worker: WorkerProcess) -> Callable[[int, object], None]:
    return lambda number, frame: worker.drain(_DRAIN_SECONDS)


def _load_host_factory(place: str) -> HostFactory:
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
    parser.add_argument("--checkpoints", help="the directory of the session's checkpoints")
    parser.add_argument("--metrics", help="where metrics are served, such as 127.0.0.1:9100")
    parser.add_argument("--recorder", help=argparse.SUPPRESS)  # two descriptors of a `Recorder`
    parser.add_argument("--core", type=int, action="append", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    pin_to_cores(given.core)
    if given.recorder:
        start_recording(*map(int, given.recorder.split(",")))
    configure_by_environment()
    sys.path += given.ops_path  # at the end: nothing there shadows what this process imports
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
        # An op that does not return holds its thread: waiting for it would keep the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0
