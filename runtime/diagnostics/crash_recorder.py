"""Flight recorder: which op a process was in when a signal ended it.

Two files outlive the process, and whoever started it reads them: where each line of its generated
code comes from, written when that is compiled, and the Python stacks at the signal, by
`faulthandler`. A process without a recorder writes nothing.
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
"""Bytes of lines that are kept; what is compiled after that goes unnamed."""
_FRAME = re.compile(r'^  File "<(?:compute|commit|traced|routine) (\d+)>", line (\d+)', re.M)
_THREAD = re.compile(r"^(?=Current thread |Thread )", re.M)


_SIGNAL = re.compile(r"^Fatal Python error: (.+)$", re.M)
_FAREWELL = b"\n"
OUT_OF_MEMORY = "out of memory"

ReportExit = Callable[[str, str, str, str], None]
"""What is done after a process: with its address, the reason of its end, the op it was in, and the
session whose op that was."""

computing_session: ContextVar[str] = ContextVar("computing", default="")
"""For which session code is generated on this thread."""


class _LineFile:
    """Where this process notes its lines, if anywhere."""

    def __init__(self) -> None:
        self.file: int | None = None
        self.written = 0
        self.numbers = itertools.count(1)


_line_file = _LineFile()


def start_recording(stacks: int, lines: int) -> None:
    """From now on, this process writes to these two descriptors, which a `Recorder` gave."""
    faulthandler.enable(stacks, all_threads=True)
    _line_file.file = lines


def name_code(kind: str, lines: Iterable[str]) -> str:
    """The file name of generated code, `kind` being compute, commit, traced or routine.

    Args:
        lines: what each line of the function is of, from its second line on.
    """
    if _line_file.file is None or _line_file.written > _MAX_BYTES:
        return f"<{kind}>"
    number = next(_line_file.numbers)
    text = "".join(
        f"{number}:{at}\t{' '.join(line.split())}\n"
        for at, line in enumerate((computing_session.get(), *lines), start=1)
    ).encode()
    _line_file.written += len(text)
    with contextlib.suppress(OSError):  # a full disk costs a name, not a step
        os.write(_line_file.file, text)
    return f"<{kind} {number}>"


def is_generated_code(filename: str) -> bool:
    """Whether a file name is one of those above."""
    return filename.startswith(("<compute", "<commit", "<traced", "<routine"))


@contextlib.contextmanager
def supervise(mourn: ReportExit) -> Iterator[Callable[[str], None]]:
    """Let a process of its own wait for the end of this one, say on stderr in which op it was if a
    signal ended it, and `mourn`. For a process that nobody started who would; before threads start.
    Yields what is to be told the address at which this process listens."""
    recorder = CrashRecorder()
    alive, held = os.pipe()  # it ends with whoever holds it
    watcher = os.fork()
    if watcher == 0:
        os.close(held)
        _watch(alive, recorder, mourn)
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


def _watch(alive: int, recorder: CrashRecorder, mourn: ReportExit) -> NoReturn:
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)  # those of a terminal come to both
        kills = MemoryKills(os.getppid())
        told = b"".join(iter(lambda: os.read(alive, 4096), b""))
        op = recorder.failed_op()
        if op:
            os.write(2, f"graphflow worker: a signal ended it in {op}\n".encode())
        if told and not told.endswith(_FAREWELL):
            silent = os.open(os.devnull, os.O_WRONLY)
            for ours in (1, 2):  # whoever reads what the worker wrote need not wait for this
                os.dup2(silent, ours)
            reason = OUT_OF_MEMORY if kills.has_happened() else recorder.signal() or "killed"
            mourn(told.decode(), reason, op, recorder.session())
    finally:
        os._exit(0)


def _open_unnamed_file() -> IO[bytes]:
    """A file without a name: on disk, in memory where no folder takes one (all is read-only, the
    disk is full), and nowhere where neither goes."""
    try:
        return tempfile.TemporaryFile(prefix="graphflow-")
    except OSError:
        if hasattr(os, "memfd_create"):
            return os.fdopen(os.memfd_create("recorder"), "w+b")
        return open(os.devnull, "w+b")


class CrashRecorder:
    """The two files of one process that is about to start."""

    def __init__(self) -> None:
        self._stacks, self._lines = _open_unnamed_file(), _open_unnamed_file()

    @property
    def descriptors(self) -> tuple[int, int]:
        """What `record` takes, in the process that inherits them."""
        return self._stacks.fileno(), self._lines.fileno()

    def failed_op(self) -> str:
        """The op that the process was in at a signal, with its node and the user's line; of a body,
        the node in it. "" where no signal came, or it was in no op."""
        place = self._find_frame()
        return self._line(*place) if place is not None else ""

    def session(self) -> str:
        """The session whose op that was; "" where that is not known."""
        place = self._find_frame()
        return self._line(place[0], "1") if place is not None else ""

    def _find_frame(self) -> tuple[str, str] | None:
        """The number of the generated code that the process was in at a signal, and the line."""
        stacks = self._read(self._stacks.fileno()).decode(errors="replace")
        starts = [found.start() for found in _THREAD.finditer(stacks)]
        threads = [stacks[a:b] for a, b in zip(starts, [*starts[1:], None], strict=bool(starts))]
        # The thread of the signal is told first; one of a device's pool works for another thread.
        threads.sort(key=lambda text: not text.startswith("Current"))
        for thread in threads:
            frame = _FRAME.search(thread)
            if frame is not None:
                return frame[1], frame[2]
        return None

    def signal(self) -> str:
        """Which signal it was, in words; "" where none is known."""
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
        """Let go of the files."""
        self._stacks.close()
        self._lines.close()
