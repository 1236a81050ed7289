"""A worker process at the other end of three pipes: of this host, or behind ssh or srun."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress

from graphflow.base.environment import child_environment
from graphflow.errors import ArgumentError, LaunchError
from graphflow.runtime.launch.process_output import ProcessOutput
from graphflow.runtime.worker.announcement import Announcement

_GRACE = 5.0  # seconds between the end of its stdin and SIGKILL


class PipedWorker:
    """A process that prints a worker's announcement as the first line of stdout.

    It ends when its stdin does, so it does not outlive this process.

    Args:
        env: variables to set for it.

    Raises:
        LaunchError: the command cannot be run.
    """

    def __init__(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        try:
            self._process = subprocess.Popen(
                list(command), stdin=pipe, stdout=pipe, stderr=pipe, env=child_environment(env),
                start_new_session=True,  # Ctrl-C is for this process, which then ends the workers
            )  # fmt: skip
        except OSError as error:
            raise LaunchError(f"{command[0]} cannot be run: {error.strerror}") from error
        self.announcement: Announcement | None = None
        self._output = ProcessOutput(
            self._process, "launched-worker", self._take_output, on_error=lambda line: True
        )

    @property
    def pid(self) -> int:
        """The id of the process on this host, which may be that of ssh or srun."""
        return self._process.pid

    @property
    def log(self) -> str:
        """The last lines that it wrote, besides the announcement."""
        return self._output.tail()

    def exit_status(self) -> int | None:
        """Return the exit status; None while it runs."""
        return self._process.poll()

    def request_end(self) -> None:
        """Let the worker end by closing its stdin."""
        if self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def end(self, until: float | None = None) -> None:
        """End the worker: by its stdin, and by force at a monotonic time. Idempotent."""
        self.request_end()
        left = _GRACE if until is None else max(0.0, until - time.monotonic())
        try:
            self._process.wait(left)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.close()

    def _take_output(self, line: str) -> bool:
        if self.announcement is None:
            with suppress(ArgumentError):  # a banner of the shell, for example
                self.announcement = Announcement.parse(line, "its stdout")
                return False
        return True
