"""The output of a started process: read line by line on threads, so that its pipes never fill."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Protocol

_TAIL_LINES = 20
_JOIN_SECONDS = 1.0  # for the rest of its output after a process's end


class PipedProcess(Protocol):
    """A process whose standard streams are pipes, as `subprocess.Popen` makes it."""

    @property
    def stdin(self) -> IO[bytes] | None:
        """The end to write to."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """The end to read from."""

    @property
    def stderr(self) -> IO[bytes] | None:
        """The end to read from."""

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""


class ProcessOutput:
    """Gives the lines of a process's stdout and stderr to functions, and keeps the last ones.

    Args:
        name: of the threads that read.
        on_output, on_error: called on these threads with each line, without its end; True keeps it.
        on_end: called after the last line of stdout.
    """

    def __init__(
        self,
        process: PipedProcess,
        name: str,
        on_output: Callable[[str], bool],
        on_error: Callable[[str], bool],
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._process = process
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._readers = [
            threading.Thread(target=self._read, args=given, name=name, daemon=True)
            for given in ((process.stdout, on_output, on_end), (process.stderr, on_error, None))
        ]
        for reader in self._readers:
            reader.start()

    def tail(self) -> str:
        """Return the last lines that were kept: with all its lines, if the process has ended."""
        if self._process.poll() is not None:
            self._join()
        return "\n".join(self._tail)

    def close(self) -> None:
        """Close the pipes of a process that has ended."""
        self._join()
        for stream in (self._process.stdin, self._process.stdout, self._process.stderr):
            if stream is not None:
                stream.close()

    def _join(self) -> None:
        for reader in self._readers:
            reader.join(_JOIN_SECONDS)

    def _read(
        self,
        stream: IO[bytes] | None,
        take: Callable[[str], bool],
        on_end: Callable[[], None] | None,
    ) -> None:
        for line in stream or ():
            text = line.decode(errors="replace").rstrip("\n")
            if take(text):
                self._tail.append(text)
        if on_end is not None:
            on_end()
