"""Workers as processes of this machine, which end with the session or with this process."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import TextIO

from graphflow.base.environment import child_environment
from graphflow.base.process.interrupts import defer_signals
from graphflow.base.process.user_modules import module_folders
from graphflow.errors import RendezvousTimeout, WorkerLost
from graphflow.placement.clusters.machine.host_facts import divide_cores
from graphflow.runtime.diagnostics.crash_recorder import OUT_OF_MEMORY, CrashRecorder
from graphflow.runtime.diagnostics.oom_detection import MemoryKills
from graphflow.runtime.launch import child
from graphflow.runtime.launch.fork_server import ForkedProcess, ForkServer, can_fork, start_process
from graphflow.runtime.launch.launcher import WorkerExit
from graphflow.runtime.launch.process_output import ProcessOutput

_GRACE = 2.0  # seconds between SIGTERM and SIGKILL
_READY = " listening on "
_BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


class LocalWorker:
    """One worker process. Its output is passed on to this process's stdout and stderr."""

    def __init__(
        self,
        index: int,
        listen: str,
        devices: Sequence[str],
        threads: int | None,
        host: str | None,
        ops: Sequence[str] = (),
        checkpoints: str | None = None,
        cores: Sequence[Sequence[int]] = (),
        *,
        fork_server: ForkServer | None,
        until: float,
    ) -> None:
        """Start the process: as a fork of a fork server, or as a process of its own.

        Args:
            cores: the cores of each worker; none for no affinity.
            until: a monotonic time.

        Raises:
            RendezvousTimeout: the process could not be started in time.
        """
        self.index = index
        parent = fork_server.pid if fork_server else os.getpid()
        command = ["--listen", listen, "--parent", str(parent)]
        command += _worker_arguments(
            devices, threads, host, ops, checkpoints, cores[index % len(cores)] if cores else ()
        )
        self._recorder = CrashRecorder()
        kept = self._recorder.descriptors
        self._process: ForkedProcess | subprocess.Popen[bytes]
        try:
            if fork_server is not None:
                self._process = fork_server.fork(command, kept, until)
            else:
                self._process = _spawn(command, kept, threads)
        except BaseException:
            self._recorder.close()
            raise
        self._kills = MemoryKills(self._process.pid)
        self._exit: WorkerExit | None = None  # kept after the process is closed
        self.address = ""
        self._first: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._output = ProcessOutput(
            self._process, f"worker-{index}-output", self._take_output, self._take_error,
            on_end=partial(self._first.put, ""),
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def wait_ready(self, until: float) -> None:
        """Wait for the worker's address, until a monotonic time.

        Raises:
            RendezvousTimeout: it ended, or printed no address in time; with its stderr.
            WorkerLost: a signal, or the end of the fork server, ended it.
        """
        started = time.monotonic()
        try:
            line = self._first.get(timeout=max(0.0, until - started))
        except queue.Empty:
            line = None
        if line and _READY in line:
            self.address = line.partition(_READY)[2].split()[0]
            return
        ended = self.wait_exit(1.0) if line is not None else None
        if line is None:
            what = f"did not start within {time.monotonic() - started:.1f} s"
        else:
            what = f"ended before it listened, {ended or f'after it printed {line!r}'}"
        message = f"local worker {self.index} {what}; it wrote:\n{self.error_tail()}"
        if ended is not None and not ended.by_itself:
            raise WorkerLost(
                message, worker=self.index, reason=ended.reason, op=ended.op, ended=True
            )
        raise RendezvousTimeout(message)

    def wait_exit(self, seconds: float) -> WorkerExit | None:
        """Return how the process ended; None if it still runs after `seconds`."""
        if self._exit is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._exit = self._explain_exit(self._process.wait(seconds))
        return self._exit

    def _explain_exit(self, status: int) -> WorkerExit:
        if self._is_out_of_memory(status):
            return WorkerExit(OUT_OF_MEMORY)
        if isinstance(self._process, ForkedProcess) and self._process.end_reason:
            return WorkerExit(self._process.end_reason)
        if status >= 0:
            return WorkerExit(f"exit status {status}", by_itself=True)
        return WorkerExit(f"killed by signal {-status}", self._recorder.failed_op())

    def _is_out_of_memory(self, status: int) -> bool:
        """Return True if the kernel killed it for lack of memory, or a MemoryError ended it."""
        if status == -signal.SIGKILL:
            return self._kills.has_happened()
        return status > 0 and "MemoryError" in self.error_tail()

    def error_tail(self) -> str:
        """Return the last lines that it wrote to stderr."""
        return self._output.tail() or "(nothing)"

    def terminate(self) -> None:
        """Ask the process to end."""
        with contextlib.suppress(OSError):
            self._process.terminate()

    def kill(self) -> None:
        """End the process at once, and free its pipes."""
        self._process.kill()
        self.finish(time.monotonic() + _GRACE)

    def finish(self, until: float) -> None:
        """Wait for the process's end until a monotonic time, then kill it; free its pipes."""
        try:
            self._process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.wait_exit(0.0)
        self._output.close()
        self._recorder.close()

    # Output --------------------------------------------------------------------------------------

    def _take_output(self, line: str) -> bool:
        if not self.address and _READY in line:
            self._first.put(line)
        else:
            _print(line, sys.stdout)
        return False

    def _take_error(self, line: str) -> bool:
        _print(line, sys.stderr)
        return True


class LocalWorkers:
    """Worker processes on this machine; the only `Launcher` so far."""

    def __init__(
        self,
        count: int,
        *,
        devices: Sequence[str] = ("cpu:0",),
        threads: int | None = None,
        deadline: float = 30.0,
        host: str | None = None,
        listen: str = "tcp://127.0.0.1:*",
        ops: Sequence[str] = (),
        checkpoints: str | None = None,
    ) -> None:
        """Start the workers, and wait until all listen.

        Args:
            deadline: seconds for all of them.
            host: `path.py:Name` of another host class, for tests.
            listen: an address on this machine, with any free port for more than one worker.
            ops: names of modules that the workers may import, from where this process finds them.
            checkpoints: the directory under which they may write shards of checkpoints.

        Raises:
            RendezvousTimeout: a worker did not start; none is left running.
        """
        until = time.monotonic() + deadline
        self._make_worker = partial(
            LocalWorker, listen=listen, devices=devices, threads=threads, host=host, ops=ops,
            checkpoints=checkpoints,
            cores=divide_cores(count, threads * len(devices)) if threads is not None else (),
        )  # fmt: skip
        self._environment = _environment(threads)
        self._workers: list[LocalWorker] = []
        self._fork_servers: list[ForkServer] = []  # the last one is used
        # Runs also if the object is dropped without `stop`, and when the interpreter ends.
        self._end = weakref.finalize(self, _end_all, self._workers, self._fork_servers, os.getpid())
        try:
            for index in range(count):
                self._workers.append(self._start(index, until))
            for worker in self._workers:
                worker.wait_ready(until)
        except BaseException:
            self.stop()
            raise

    def _start(self, index: int, until: float) -> LocalWorker:
        if can_fork() and not (self._fork_servers and self._fork_servers[-1].is_alive):
            with defer_signals():  # an interrupt would lose a server that is not in the list
                self._fork_servers.append(ForkServer(self._environment))
        return self._make_worker(
            index, fork_server=self._fork_servers[-1] if self._fork_servers else None, until=until
        )

    @property
    def addresses(self) -> list[str]:
        """The addresses where the workers listen, in order."""
        return [worker.address for worker in self._workers]

    @property
    def pids(self) -> list[int]:
        """The workers' process ids, in order."""
        return [worker.pid for worker in self._workers]

    def wait_exit(self, index: int, seconds: float = 0.0) -> WorkerExit | None:
        """Return how a worker ended; None if it still runs after `seconds`."""
        return self._workers[index].wait_exit(seconds)

    def restart_ended(
        self, lost: Collection[int], ending: Collection[int], deadline: float
    ) -> list[int]:
        """Start new processes in place of those that have ended, and return their indices.

        Args:
            lost: workers to kill first, because a frozen process would still hold its memory.
            ending: workers that were asked to end, and are about to.
            deadline: seconds until all workers listen again.

        Raises:
            RendezvousTimeout: a worker did not start in time.
        """
        until = time.monotonic() + deadline
        for index in ending:
            self._workers[index].finish(time.monotonic() + _GRACE)
        gone = [
            index
            for index, worker in enumerate(self._workers)
            if index in lost or worker.wait_exit(0.0) is not None
        ]
        for index in gone:
            self._workers[index].kill()
            self._workers[index] = self._start(index, until)
        for worker in self._workers:
            if not worker.address:  # including one whose start was interrupted
                worker.wait_ready(until)
        return gone

    def replace(self, lost: int, until: float) -> str:
        """Start one more process, in place of a worker that was lost; return its address.

        Args:
            lost: the lost worker, which is killed first: a frozen process would still hold memory.
            until: a monotonic time.

        Raises:
            RendezvousTimeout: it did not start in time.
        """
        self._workers[lost].kill()
        return self._add(self._workers[lost].index, until)

    def start(self, until: float) -> str:
        """Start one more process, and return its address.

        Args:
            until: a monotonic time.

        Raises:
            RendezvousTimeout: it did not start in time.
        """
        return self._add(len(self._workers), until)

    def _add(self, index: int, until: float) -> str:
        worker = self._start(index, until)
        try:
            worker.wait_ready(until)
        except BaseException:
            worker.kill()
            raise
        self._workers.append(worker)
        return worker.address

    def end(self, index: int) -> None:
        """End a process."""
        self._workers[index].terminate()
        self._workers[index].finish(time.monotonic() + _GRACE)

    def end_after(self, count: int) -> None:
        """End the processes after the first `count`."""
        for worker in self._workers[count:]:
            worker.kill()
        del self._workers[count:]

    def stop(self) -> None:
        """End the processes: by request, and by force after a grace period. Idempotent."""
        self._end()


def _end_all(workers: list[LocalWorker], fork_servers: list[ForkServer], owner: int) -> None:
    if os.getpid() != owner:  # in a fork: the workers belong to the parent
        return
    with defer_signals():  # a finalizer runs once: an interrupt would leave the rest running
        for worker in workers:
            worker.terminate()
        until = time.monotonic() + _GRACE
        for worker in workers:
            worker.finish(until)
        for each in fork_servers:
            each.close()


def _worker_arguments(
    devices: Sequence[str],
    threads: int | None,
    host: str | None,
    ops: Sequence[str],
    checkpoints: str | None,
    cores: Sequence[int],
) -> list[str]:
    """Return the options of `python -m graphflow.runtime.worker` for a worker."""
    arguments: list[str] = []
    for device in devices:
        arguments += ["--device", device]
    if threads is not None:
        arguments += ["--threads", str(threads)]
    if host is not None:
        arguments += ["--host", host]
    for name in ops:
        arguments += ["--allow-ops", name]
    for folder in module_folders(ops):
        arguments += ["--ops-path", folder]
    if checkpoints is not None:
        arguments += ["--checkpoints", checkpoints]
    for core in cores:
        arguments += ["--core", str(core)]
    return arguments


def _spawn(
    arguments: Sequence[str], kept: tuple[int, int], threads: int | None
) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-P", child.__file__, *arguments]
    command += ["--recorder", ",".join(map(str, kept))]
    pipe = subprocess.PIPE
    return start_process(
        command, stdin=pipe, stdout=pipe, stderr=pipe, env=_environment(threads), pass_fds=kept
    )


def _print(line: str, stream: TextIO | None) -> None:
    with contextlib.suppress(ValueError, OSError):  # closed, or a full pipe without a reader
        # In one write, or lines of two workers would mingle.
        print(f"{line}\n", end="", file=stream)


def _environment(threads: int | None) -> dict[str, str]:
    """Return a worker's environment, in which BLAS has `threads` threads.

    By default BLAS would start a thread for each core in each worker.
    """
    return child_environment(dict.fromkeys(_BLAS_THREADS, str(threads or 1)))
