"""The fork server: one process that has imported everything, from which local workers are forked.

Most of a worker's start is spent in imports. The fork server does them once. It has one thread and
no ZeroMQ socket, so its forks are as good as fresh processes, and they share its memory. It is
asked over a socket, reaps its workers, and reports how each one ended. It ends with its parent, and
the workers end with it.

Systems without process descriptors (other than Linux) start workers one by one.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import IO, Any

import numpy as np

from graphflow.base.process.interrupts import defer_signals
from graphflow.errors import RendezvousTimeout, WorkerLost
from graphflow.runtime.diagnostics.oom_detection import prefer_as_oom_victim
from graphflow.runtime.launch import child

_PRELOADED = (
    "graphflow.runtime.worker.serving", "graphflow.runtime.host.host",
    "graphflow.runtime.wire.graph_codec",
    "threadpoolctl", "llvmlite.binding",
)  # fmt: skip
"""Modules that a worker has imported by its first step."""

_PARENT_POLL_SECONDS = 1.0  # seconds between two checks whether the parent lives
_MAX_MESSAGE = 128 << 10  # bytes
_GRACE = 2.0  # seconds for the fork server to end
_ORPHAN_SECONDS = 30.0  # seconds for workers to end after their parent did
_END_REQUEST = b"[]"  # the request to end, together with all workers left
_UNKNOWN_STATUS = 255  # the exit status of a worker whose fork server ended before it


@cache
def can_fork() -> bool:
    """Return True if this system has process descriptors, by which a process can be waited for."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


# In the fork server ----------------------------------------------------------------------------


def serve_forks(descriptor: int) -> list[str] | None:
    """Fork workers on request over a socket.

    Returns in each forked worker, with its arguments. Returns None in the fork server, when it
    ends.

    Args:
        descriptor: of the socket whose other end the parent holds.
    """
    for name in _PRELOADED:
        import_module(name)
    gc.freeze()  # untouched objects are never copied on write
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # otherwise the kernel keeps no exit statuses
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its workers may still have to write checkpoints
    parent, children = os.getppid(), dict[int, int]()  # process ids by descriptor
    with socket.socket(fileno=descriptor) as asked, contextlib.closing(select.epoll()) as ready:
        ready.register(asked, select.EPOLLIN)
        while os.getppid() == parent:
            for found, _ in ready.poll(_PARENT_POLL_SECONDS):
                if found in children:
                    ready.unregister(found)
                    os.close(found)
                    number, status = os.waitpid(children.pop(found), 0)
                    _send_event(asked, "ended", number, os.waitstatus_to_exitcode(status))
                    continue
                data, given = _receive_request(asked)
                if data in (b"", _END_REQUEST):
                    _reap(children, _ORPHAN_SECONDS if not data else 0.0)
                    return None
                number = _fork(asked)
                if number == 0:
                    prefer_as_oom_victim()
                    for each in children:
                        os.close(each)
                    return _prepare_child(json.loads(data), given)
                for each in given:
                    os.close(each)
                if number > 0:
                    place = os.pidfd_open(number)
                    children[place] = number
                    ready.register(place, select.EPOLLIN)
        _reap(children, _ORPHAN_SECONDS)
    return None


def _reap(children: Mapping[int, int], seconds: float) -> None:
    """Wait for the remaining workers to end, and kill them after `seconds`.

    Their parent is gone or has given them up. After this process they would have no parent to reap
    them.
    """
    until = time.monotonic() + seconds
    for place, number in children.items():
        if not select.select([place], [], [], max(0.0, until - time.monotonic()))[0]:
            signal.pidfd_send_signal(place, signal.SIGKILL)
        os.waitpid(number, 0)


def _fork(asked: socket.socket) -> int:
    """Fork; return 0 in the new process, its id in this one, -1 if no process can start."""
    try:
        number = os.fork()
    except OSError as error:
        _send_event(asked, "failed", error.strerror, 0)
        return -1
    if number > 0:
        _send_event(asked, "started", number, 0)
    return number


def _prepare_child(arguments: list[str], given: Sequence[int]) -> list[str]:
    """Set up a new process's streams, signals and random numbers; return its arguments."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    np.random.seed()  # or users' functions would draw the same numbers on all workers
    for target, each in enumerate(given[:3]):
        os.dup2(each, target)
        os.close(each)
    for each in given[3:]:
        os.set_inheritable(each, False)
    return [*arguments, "--recorder", ",".join(map(str, given[3:]))]


def _receive_request(asked: socket.socket) -> tuple[bytes, list[int]]:
    """Return a request's arguments and descriptors; nothing if the parent has ended."""
    try:
        return socket.recv_fds(asked, _MAX_MESSAGE, 5)[:2]
    except OSError:
        return b"", []


def _send_event(asked: socket.socket, what: str, subject: object, status: int) -> None:
    with contextlib.suppress(OSError):  # the parent has ended, which the next check finds
        asked.send(json.dumps([what, subject, status]).encode())


# In the parent ---------------------------------------------------------------------------------


class ForkedProcess:
    """A process of the fork server, with the part of `subprocess.Popen` that is used here.

    Attributes:
        end_reason: why it ended, if its exit status does not tell.
    """

    def __init__(self, pid: int, streams: Sequence[IO[bytes]]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = streams
        self.returncode: int | None = None
        self.end_reason = ""
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._pidfd = -1  # unlike the id, never names a later process
        with contextlib.suppress(OSError):  # it has already ended
            self._pidfd = os.pidfd_open(pid)

    def record_exit(self, status: int, why: str = "") -> None:
        """Record how the process ended."""
        with self._lock:
            self.returncode, self.end_reason = status, why
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
        self._ended.set()

    def poll(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status, as `Popen.wait`.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Ask the process to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End the process at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that runs `child.py`.

    SIGINT is blocked in it at first. Ctrl-C reaches all processes of a terminal, and the child can
    only ignore it once its interpreter runs.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(command, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ForkServer:
    """A fork server, as its parent sees it. For one thread at a time."""

    def __init__(self, environment: Mapping[str, str], first: str = child.__file__) -> None:
        """Start the fork server.

        Args:
            environment: of the process.
            first: the script that it runs, which calls `serve_forks`.
        """
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A program without standard streams, such as a daemon, may use descriptors 0 to 2.
        place = fcntl.fcntl(other, fcntl.F_DUPFD_CLOEXEC, 3)
        command = [sys.executable, "-P", first, "--fork-server", str(place)]
        try:
            self._process = start_process(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                stderr=None if sys.stderr is not None else subprocess.DEVNULL,
                env=environment, pass_fds=[place],
            )  # fmt: skip
        finally:
            os.close(place)
            other.close()
        self._answers: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._forked: dict[int, ForkedProcess] = {}
        self._lock = threading.Lock()
        self._early_exits: dict[int, int] = {}  # exit statuses that arrived before `fork` returned
        self._end_reason = ""  # of the fork server, once it has ended
        self._has_answered = False  # its imports are done
        self._reader = threading.Thread(target=self._listen, name="fork-server", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The fork server's process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """True if it can fork."""
        return not self._end_reason

    def fork(self, arguments: Sequence[str], kept: Sequence[int], until: float) -> ForkedProcess:
        """Start a process.

        Args:
            arguments: of the worker.
            kept: the two descriptors of its crash recorder.
            until: a monotonic time.

        Raises:
            RendezvousTimeout: no process could be started in time.
            WorkerLost: the fork server has ended.
        """
        started = time.monotonic()
        streams: list[Any] = []
        given: list[int] = []
        try:
            with defer_signals():  # an interrupt would leak the pipes
                (stdin, to), (out, stdout), (err, stderr) = [os.pipe() for _ in range(3)]
                given += stdin, stdout, stderr
                streams += os.fdopen(to, "wb", 0), os.fdopen(out, "rb"), os.fdopen(err, "rb")
            try:
                data = json.dumps(list(arguments)).encode()
                socket.send_fds(self._socket, [data], [*given, *kept])
                what, found = self._answers.get(timeout=max(0.0, until - time.monotonic()))
                over = bool(self._end_reason)
            except queue.Empty:
                what, found = "", f"did not start within {time.monotonic() - started:.1f} s"
                over = False
            except OSError as error:
                what, found = "", f"could not be started: {error.strerror}"
                over = isinstance(error, ConnectionError)
        except BaseException:  # an interrupt: a started process ends when its stdin closes
            for stream in streams:
                stream.close()
            raise
        finally:
            for each in given:
                os.close(each)
        if what != "started":
            for stream in streams:
                stream.close()
            self.close()
            raise (WorkerLost if over else RendezvousTimeout)(f"a local worker {found}")
        with self._lock:
            forked = self._forked[found] = ForkedProcess(found, streams)
            if found in self._early_exits:
                forked.record_exit(self._early_exits.pop(found))
            elif self._end_reason:
                forked.record_exit(self._process.returncode or _UNKNOWN_STATUS, self._end_reason)
        return forked

    def close(self) -> None:
        """End the fork server, and all its processes. Idempotent.

        Only the fork server knows of a process whose start was interrupted.
        """
        with contextlib.suppress(OSError):
            self._socket.send(_END_REQUEST)
            self._socket.shutdown(socket.SHUT_RDWR)
        try:  # before its first answer it has no workers to wait for
            self._process.wait(_GRACE if self._has_answered else 0.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_GRACE)
        self._socket.close()

    def _listen(self) -> None:
        while message := self._receive_message():
            what, subject, status = json.loads(message)
            self._has_answered = True
            if what != "ended":
                failed = f"could not be started: {subject}"
                self._answers.put((what, failed if what == "failed" else subject))
                continue
            with self._lock:
                forked = self._forked.pop(subject, None)
                if forked is None:
                    self._early_exits[subject] = status
                else:
                    forked.record_exit(status)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE)
        status = self._process.returncode or 0
        how = f", killed by signal {-status}" if status < 0 else ""
        with self._lock:
            self._end_reason = f"with its fork server{how}"
            for forked in self._forked.values():
                forked.record_exit(status or _UNKNOWN_STATUS, self._end_reason)
        self._answers.put(("failed", "could not be started: its fork server has ended"))

    def _receive_message(self) -> bytes:
        try:
            return self._socket.recv(_MAX_MESSAGE)
        except OSError:
            return b""
