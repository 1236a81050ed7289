"""The crash recorder (flight recorder): in which op a process was when a signal ended it.

Two files outlive the process, and the process that started it reads them. One maps lines of
generated code to nodes, and is written when code is compiled. The other has the Python stacks at
the signal, written by `faulthandler`. A process without a recorder writes nothing.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import re
import signal
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import IO, NoReturn

from graphflow.runtime.diagnostics.oom_detection import MemoryKills

_MAX_BYTES = 64 << 20
"""Bytes of lines that are written; code that is compiled after that has no names."""
_FRAME = re.compile(r'^  File "<(?:compute|commit|traced|routine) (\d+)>", line (\d+)', re.M)
_THREAD = re.compile(r"^(?=Current thread |Thread )", re.M)


_SIGNAL = re.compile(r"^Fatal Python error: (.+)$", re.M)
_FAREWELL = b"\n"
OUT_OF_MEMORY = "out of memory"

ReportExit = Callable[[str, str, str, str], None]
"""Called after a process ended: with its address, the reason, its last op, and the op's session."""

computing_session: ContextVar[str] = ContextVar("computing", default="")
"""The session for which this thread generates code."""


class _LineFile:
    """The file for the lines of this process's generated code, if it has a recorder."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.written = 0
        self.numbers = itertools.count(1)


_line_file = _LineFile()


def start_recording(stacks: int, lines: int) -> None:
    """Write to these two descriptors of a `CrashRecorder` from now on."""
    faulthandler.enable(stacks, all_threads=True)
    _line_file.file = lines


def name_code(kind: str, lines: Iterable[str]) -> str:
    """Return the file name of generated code, and record its lines.

    Args:
        kind: compute, commit, traced or routine.
        lines: the node of each line of the function, from its second line on.
    """
    if _line_file.file is None or _line_file.written > _MAX_BYTES:
        return f"<{kind}>"
    number = next(_line_file.numbers)
    text = "".join(
        f"{number}:{at}\t{' '.join(line.split())}\n"
        for at, line in enumerate((computing_session.get(), *lines), start=1)
    ).encode()
    _line_file.written += len(text)
    with contextlib.suppress(OSError):  # a full disk must not fail a step
        os.write(_line_file.file, text)
    return f"<{kind} {number}>"


def is_generated_code(filename: str) -> bool:
    """Return True if a file name is one of `name_code`."""
    return filename.startswith(("<compute", "<commit", "<traced", "<routine"))


@contextlib.contextmanager
def supervise(report_exit: ReportExit) -> Iterator[Callable[[str], None]]:
    """Supervise this process from a process of its own, which reports how it ends.

    If a signal ends this process, the supervisor prints the op to stderr, and calls `report_exit`.
    For a process whose parent does not do that; to be called before threads start. Yields a
    function that takes the address at which this process listens.
    """
    recorder = CrashRecorder()
    alive, held = os.pipe()  # the kernel closes it when this process ends
    watcher = os.fork()
    if watcher == 0:
        os.close(held)
        _watch(alive, recorder, report_exit)
    os.close(alive)
    start_recording(*recorder.descriptors)

    def tell(address: str) -> None:
        os.write(held, address.encode())

    try:
        yield tell
    finally:
        faulthandler.disable()
        _line_file.file = None
        os.write(held, _FAREWELL)
        os.close(held)
        os.waitpid(watcher, 0)
        recorder.close()


def _watch(alive: int, recorder: CrashRecorder, report_exit: ReportExit) -> NoReturn:
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # a terminal sends them to both processes
        kills = MemoryKills(os.getppid())
        address = b"".join(iter(lambda: os.read(alive, 4096), b""))
        op = recorder.failed_op()
        if op:
            os.write(2, f"graphflow worker: a signal ended it in {op}\n".encode())
        if address and not address.endswith(_FAREWELL):
            silent = os.open(os.devnull, os.O_WRONLY)
            for ours in (1, 2):  # readers of the worker's output need not wait for this process
                os.dup2(silent, ours)
            reason = OUT_OF_MEMORY if kills.has_happened() else recorder.signal() or "killed"
            report_exit(address.decode(), reason, op, recorder.session())
    finally:
        os._exit(0)


def _open_unnamed_file() -> IO[bytes]:
    """Return a file without a name: on disk, else in memory, else /dev/null.

    No folder may take a file: all may be read-only, or the disk full.
    """
    try:
        return tempfile.TemporaryFile(prefix="graphflow-")
    except OSError:
        if hasattr(os, "memfd_create"):
            return os.fdopen(os.memfd_create("recorder"), "w+b")
        return open(os.devnull, "w+b")


class CrashRecorder:
    """The two files of a process that is about to start."""

    def __init__(self) -> None:
        self._stacks, self._lines = _open_unnamed_file(), _open_unnamed_file()

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors for `start_recording`, in the process that inherits them."""
        return self._stacks.fileno(), self._lines.fileno()

    def failed_op(self) -> str:
        """Return the op that ran at the signal, with its node and line; "" if there is none.

        For an op in a body, the node is the one in the body.
        """
        place = self._find_frame()
        return self._line(*place) if place is not None else ""

    def session(self) -> str:
        """Return the session whose op it was; "" if it is unknown."""
        place = self._find_frame()
        return self._line(place[0], "1") if place is not None else ""

    def _find_frame(self) -> tuple[str, str] | None:
        """Return the number and the line of the generated code that ran at the signal."""
        stacks = self._read(self._stacks.fileno()).decode(errors="replace")
        starts = [found.start() for found in _THREAD.finditer(stacks)]
        threads = [stacks[a:b] for a, b in zip(starts, [*starts[1:], None], strict=bool(starts))]
        # The signal's thread comes first. If it is a pool thread, another thread waits in the op.
        threads.sort(key=lambda text: not text.startswith("Current"))
        for thread in threads:
            frame = _FRAME.search(thread)
            if frame is not None:
                return frame[1], frame[2]
        return None

    def signal(self) -> str:
        """Return the signal's description; "" if none is known."""
        found = _SIGNAL.search(self._read(self._stacks.fileno()).decode(errors="replace"))
        return found[1] if found is not None else ""

    def _line(self, number: str, at: str) -> str:
        start = f"{number}:{at}\t"
        for line in self._read(self._lines.fileno()).decode(errors="replace").splitlines():
            if line.startswith(start):
                return line.removeprefix(start)
        return ""

    def _read(self, descriptor: int) -> bytes:
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0)

    def close(self) -> None:
        """Close the files."""
        self._stacks.close()
        self._lines.close()
