"""A nursery: one process that has loaded everything, from which local workers are forked.

Most of a worker's start is the interpreter's: each would load the same modules. The nursery loads
them once, and has one thread and no socket of ZeroMQ, so that its forks are what a fresh process
would be; they share its memory. It is asked over a socket, reaps its workers and tells how each
ended; it ends with its parent, and they with it. Where a process cannot be waited for by a
descriptor (other systems than Linux), workers are started one by one.
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

from graphflow.base.interrupts import defer_signals
from graphflow.errors import RendezvousTimeout, WorkerLost
from graphflow.runtime.diagnostics.oom_detection import prefer_as_oom_victim
from graphflow.runtime.launch import child

_PRELOADED = (
    "graphflow.runtime.worker.serving", "graphflow.runtime.host.host",
    "graphflow.runtime.wire.graph_codec",
    "threadpoolctl", "llvmlite.binding",
)  # fmt: skip
"""What a worker loads by its first step."""

_PARENT_POLL_SECONDS = 1.0  # seconds between two looks at whether the parent is there
_MAX_MESSAGE = 128 << 10  # bytes of a message
_GRACE = 2.0  # seconds for the nursery to end
_ORPHAN_SECONDS = 30.0  # seconds that its workers have to end once their parent has, unasked
_END_REQUEST = b"[]"  # the request to end, with whoever is left
_UNKNOWN_STATUS = 255  # the exit status of one whose nursery ended by itself before it


@cache
def can_fork() -> bool:
    """Whether this system lets a process be waited for by a descriptor."""
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    return True


# In the nursery --------------------------------------------------------------------------------


def serve_forks(descriptor: int) -> list[str] | None:
    """Forks workers as asked over a socket. Returns in each of them, with its arguments; in the
    nursery itself None, when it is to end.

    Args:
        descriptor: of the socket, to which the parent holds the other end.
    """
    for name in _PRELOADED:
        import_module(name)
    gc.freeze()  # what is never looked at again is never copied
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else the kernel keeps no statuses
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # its workers may have something to write still
    parent, children = os.getppid(), dict[int, int]()  # processes by their descriptors
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
    """Waits for the workers that are left, which end when their parent does or gives them up, and
    kills them after that: they are nobody's when this process has ended, and are seen until
    somebody asks how they ended."""
    until = time.monotonic() + seconds
    for place, number in children.items():
        if not select.select([place], [], [], max(0.0, until - time.monotonic()))[0]:
            signal.pidfd_send_signal(place, signal.SIGKILL)
        os.waitpid(number, 0)


def _fork(asked: socket.socket) -> int:
    """0 in the new process, its number in this one; -1 where there can be no more."""
    try:
        number = os.fork()
    except OSError as error:
        _send_event(asked, "failed", error.strerror, 0)
        return -1
    if number > 0:
        _send_event(asked, "started", number, 0)
    return number


def _prepare_child(arguments: list[str], given: Sequence[int]) -> list[str]:
    """Gives a new process its own standard streams; the arguments, with what it records to."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    np.random.seed()  # users' functions on two workers do not draw the same
    for target, each in enumerate(given[:3]):
        os.dup2(each, target)
        os.close(each)
    for each in given[3:]:
        os.set_inheritable(each, False)
    return [*arguments, "--recorder", ",".join(map(str, given[3:]))]


def _receive_request(asked: socket.socket) -> tuple[bytes, list[int]]:
    """Arguments and descriptors of a process to be; nothing if the parent has ended."""
    try:
        return socket.recv_fds(asked, _MAX_MESSAGE, 5)[:2]
    except OSError:
        return b"", []


def _send_event(asked: socket.socket, what: str, subject: object, status: int) -> None:
    with contextlib.suppress(OSError):  # the parent has ended, which the next look tells
        asked.send(json.dumps([what, subject, status]).encode())


# In its parent ---------------------------------------------------------------------------------


class ForkedProcess:
    """A process of a nursery: what is needed of a `subprocess.Popen` for it."""

    def __init__(self, pid: int, streams: Sequence[IO[bytes]]) -> None:
        self.pid = pid
        self.stdin, self.stdout, self.stderr = streams
        self.returncode: int | None = None
        self.end_reason = ""  # it ended, where its status does not say
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._pidfd = -1  # what stands for it, and for no later process of its number
        with contextlib.suppress(OSError):  # it has ended already
            self._pidfd = os.pidfd_open(pid)

    def record_exit(self, status: int, why: str = "") -> None:
        """Takes note of how it ended."""
        with self._lock:
            self.returncode, self.end_reason = status, why
            if self._pidfd >= 0:
                os.close(self._pidfd)
                self._pidfd = -1
        self._ended.set()

    def poll(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, as of `Popen`.

        Raises:
            subprocess.TimeoutExpired: it runs.
        """
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def terminate(self) -> None:
        """Asks it to end."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once."""
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with self._lock, contextlib.suppress(OSError):
            if self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, number)


def start_process(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """A process that runs `child.py`. Ctrl-C comes to all processes of a terminal: this one holds
    it back until it can say that it ignores it, a while after its interpreter begins."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        return subprocess.Popen(command, **options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class ForkServer:
    """Forks processes that run `graphflow.runtime.worker`. For one thread at a time."""

    def __init__(self, environment: Mapping[str, str], first: str = child.__file__) -> None:
        """Starts its process.

        Args:
            environment: of the process.
            first: the file that it runs, which calls `grow`.
        """
        self._socket, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # A program without standard streams, such as a daemon, has other things in their places.
        place = fcntl.fcntl(other, fcntl.F_DUPFD_CLOEXEC, 3)
        command = [sys.executable, "-P", first, "--nursery", str(place)]
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
        self._early_exits: dict[int, int] = {}  # how those ended of whom nobody knows yet
        self._end_reason = ""  # how it ended, once it has
        self._has_answered = False  # it has loaded what its workers need, and answers
        self._reader = threading.Thread(target=self._listen, name="nursery", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can be asked."""
        return not self._end_reason

    def fork(self, arguments: Sequence[str], kept: Sequence[int], until: float) -> ForkedProcess:
        """Starts a process.

        Args:
            arguments: of the worker.
            kept: two descriptors that it records to.
            until: a monotonic time.

        Raises:
            RendezvousTimeout: none could be started in time.
            WorkerLost: the nursery has ended.
        """
        started = time.monotonic()
        streams: list[Any] = []
        given: list[int] = []
        try:
            with defer_signals():  # else nobody would close them
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
        except BaseException:  # an interrupt: what may have started sees that nobody wants it
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
        """Ends it, and the processes that it has left: of one whose start was interrupted, only the
        nursery knows. Idempotent."""
        with contextlib.suppress(OSError):
            self._socket.send(_END_REQUEST)
            self._socket.shutdown(socket.SHUT_RDWR)
        try:  # one that still loads takes seconds on a busy machine, and has no workers
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
            self._end_reason = f"with its nursery{how}"
            for forked in self._forked.values():
                forked.record_exit(status or _UNKNOWN_STATUS, self._end_reason)
        self._answers.put(("failed", "could not be started: its nursery has ended"))

    def _receive_message(self) -> bytes:
        try:
            return self._socket.recv(_MAX_MESSAGE)
        except OSError:
            return b""
