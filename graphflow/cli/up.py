"""`graphflow up` and `down`: start the workers of a cluster file, keep them up, and stop them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphflow.base.formatting import show_count
from graphflow.base.process.interrupts import defer_signals
from graphflow.cli.arguments import existing_file, option_errors
from graphflow.errors import KeyFileError, LaunchError
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.cluster_file import load_launch_settings

if TYPE_CHECKING:
    from graphflow.runtime.launch.supervisor_records import RecordFile
    from graphflow.runtime.launch.worker_launcher import LaunchedWorker
    from graphflow.runtime.security.keys import Keyring, PublicKey

_POLL = 0.1  # seconds between two looks at the workers
_STOP_SECONDS = 15.0  # for a supervisor to end by itself

ClusterFileToStart = Annotated[
    Path, typer.Argument(metavar="FILE", help="Cluster file (TOML) whose workers have addresses.")
]


def up(
    file: ClusterFileToStart,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Return when all workers listen; go on in background."),
    ] = False,
    log: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Start the workers of a cluster file, and restart those that end.

    Workers run until Ctrl-C or `graphflow down`. Those at addresses of this machine are started
    as processes, the others by ssh, which must not ask for a password. A restarted worker keeps
    its address. Missing keys are made.

    The table 'launch' of the file holds the settings; see docs/deployment/launchers.md.

    Example: graphflow up cluster.toml
    """
    from graphflow.runtime.launch.supervisor_records import RecordFile

    with option_errors("FILE"):
        cluster = Cluster.load(existing_file(file))
    record = RecordFile(file)
    if detach:
        _start_in_background(file, record)
        return
    with ExitStack() as stack:
        stack.enter_context(_other_signals_interrupt())
        stack.enter_context(record.claim())
        run = _ClusterRun(file.resolve(), cluster, record, log)
        stack.callback(run.stop)
        run.start()
        try:
            run.supervise()
        except KeyboardInterrupt:
            return  # the way to end it; an interrupt before has exit code 130


def down(file: ClusterFileToStart) -> None:
    """Stop the workers that `graphflow up` started for a cluster file.

    If none are running, the command says so and succeeds.

    Example: graphflow down cluster.toml
    """
    from graphflow.runtime.launch.supervisor_records import RecordFile

    record_file = RecordFile(file)
    record = record_file.read()
    if record is None:
        existing_file(file)  # a typo is an error
        typer.echo(f"{file} is not up on this machine: nothing to stop")
        return
    if not record_file.stop(record, _STOP_SECONDS):
        typer.echo(f"killed process {record.pid}, which did not end by itself", err=True)
    for worker in record.workers:
        typer.echo(f"stopped {worker}")


@contextmanager
def _other_signals_interrupt() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt within the block."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _ClusterRun:
    """The workers of a cluster file while this process supervises them."""

    def __init__(self, file: Path, cluster: Cluster, record: RecordFile, log: Path | None) -> None:
        from graphflow.runtime.launch.engines.addressed_workers import AddressedWorkers
        from graphflow.runtime.security.keys import Keyring

        self._file, self._cluster, self._record, self._log = file, cluster, record, log
        self._started, self._seconds = time.time(), 0.0
        self._ring = Keyring()
        self._settings = load_launch_settings(file)
        self._launcher = AddressedWorkers(
            cluster, self._settings, _session_key(cluster, self._ring)
        )

    def start(self) -> None:
        """Start all workers, and print each as soon as it listens.

        Raises:
            LaunchError: one does not come.
        """
        from graphflow.runtime.launch.launched_workers import wait_for_workers

        self._write_record(is_ready=False)
        began = time.monotonic()
        self._launcher.start(len(self._cluster.workers), (), self._settings.env)
        widths = self._print_head()
        for worker in wait_for_workers(self._launcher, self._cluster.deadline):
            self._trust(worker)
            _print_row(widths, self._cells(worker))
        self._seconds = time.monotonic() - began

    def supervise(self) -> None:
        """Say how to use the workers, and restart those that end, for ever."""
        from graphflow.runtime.launch.supervisor import Supervisor

        what = show_count(len(self._cluster.workers), "worker")
        session = f"import graphflow as gf\n    s = gf.Session({str(self._file)!r})"
        end = "Ctrl-C stops" if self._log is None else f"`graphflow down {self._file}` stops"
        _print(
            f"{what} up after {self._seconds:.1f} s; open a session on them by\n\n    {session}\n\n"
            f"{end} them"
        )
        self._write_record(is_ready=True)
        supervisor = Supervisor(self._launcher, _print_notice)
        while True:
            if supervisor.check(time.monotonic()):
                self._write_record(is_ready=True, restarts=supervisor.restarts)
            time.sleep(_POLL)

    def stop(self) -> None:
        """End all workers."""
        with defer_signals():  # a second Ctrl-C would leave some running
            self._launcher.stop()

    def _trust(self, worker: LaunchedWorker) -> None:
        """Trust the key of a worker that the file names; ssh, or this host, vouches for it."""
        from graphflow.runtime.security.keys import WORKER, PublicKey

        name, told = self._cluster.workers[worker.index].key, worker.announcement
        if name is None or told is None or name == told.key:
            return
        where = f"worker {worker.index} ({worker.where})"
        if told.key is None:
            raise KeyFileError(f"{where} has no key, though {self._file} names {name!r}")
        self._ring.add(str(PublicKey(name, WORKER, told.key)), where)

    def _cells(self, worker: LaunchedWorker) -> list[str]:
        told = worker.announcement
        devices = "" if told is None else ", ".join(told.devices)
        pid = "" if told is None else str(told.pid)
        spec = self._cluster.workers[worker.index]
        return [str(worker.index), str(spec.address), worker.where, pid, devices]

    def _print_head(self) -> list[int]:
        """Print the head of the table of workers; return the widths of its columns."""
        rows = [self._cells(worker) for worker in self._launcher.workers()]
        head = ["worker", "address", "where", "process", "devices"]
        widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
        _print_row(widths, head)
        return widths

    def _write_record(self, *, is_ready: bool, restarts: Sequence[int] = ()) -> None:
        from graphflow.runtime.launch.supervisor_records import ClusterRecord, WorkerRecord

        workers = [
            WorkerRecord(
                worker.index, str(self._cluster.workers[worker.index].address), worker.where,
                None if worker.announcement is None else worker.announcement.pid,
                restarts[worker.index] if restarts else 0,
            )
            for worker in self._launcher.workers()
        ]  # fmt: skip
        log = None if self._log is None else str(self._log)
        self._record.write(
            ClusterRecord(
                str(self._file), os.getpid(), self._started, log, is_ready, tuple(workers)
            )
        )


def _session_key(cluster: Cluster, ring: Keyring) -> PublicKey | None:
    """Return the public key of this user's sessions, made if it is absent; None if none is needed.

    Raises:
        KeyFileError: it cannot be used.
    """
    from graphflow.runtime.security.key_creation import find_or_create_pair
    from graphflow.runtime.security.keys import COORDINATOR

    if cluster.key is None and not any(worker.key for worker in cluster.workers):
        return None
    pair, is_made = find_or_create_pair(ring, cluster.key, COORDINATOR)
    if is_made:
        typer.echo(f"made the key of your sessions: {ring.folder / pair.public.name}.secret")
    return pair.public


def _print_row(widths: Sequence[int], cells: Sequence[str]) -> None:
    _print("  ".join(map(str.ljust, cells, widths)).rstrip())


def _print_notice(text: str) -> None:
    _print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text}")


def _print(text: str) -> None:
    typer.echo(text)
    sys.stdout.flush()  # a supervisor in the background writes to a file


def _start_in_background(file: Path, record_file: RecordFile) -> None:
    """Start a supervisor that outlives this process, and show what it writes until all are up.

    Raises:
        LaunchError: the cluster is up already.
        Exit: the supervisor ended.
    """
    if (known := record_file.read()) is not None:
        raise LaunchError(f"{known}; `graphflow down {file}` stops it")
    log = record_file.log
    command = [sys.executable, "-m", "graphflow", "up", str(file.resolve()), "--log", str(log)]
    try:
        log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        output = log.open("wb")
    except OSError as error:
        raise LaunchError(f"{log} cannot be written: {error.strerror}") from error
    with output, log.open("rb") as follow:
        supervisor = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            while supervisor.poll() is None:
                record = record_file.read()
                typer.echo(follow.read().decode(errors="replace"), nl=False)
                if record is not None and record.is_ready and record.pid == supervisor.pid:
                    typer.echo(f"supervised by process {record.pid}, which writes {log}")
                    return
                time.sleep(_POLL)
        except BaseException:
            supervisor.terminate()
            supervisor.wait(_STOP_SECONDS)
            raise
        typer.echo(follow.read().decode(errors="replace"), nl=False, err=True)
        raise typer.Exit(supervisor.returncode or 1)
