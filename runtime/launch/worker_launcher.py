"""The interface of launchers: what starts workers with the engine that a cluster has already.

A launcher starts processes and says where they are. It never decides that a worker is lost: that is
the session's part, which then asks for a replacement by `restart`. A new launcher is one file that
provides `WorkerLauncher`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Protocol

from graphflow.base.lazy_dataclass import dataclass
from graphflow.runtime.worker.announcement import Announcement

WAITING, RUNNING, ENDED = "waiting", "running", "ended"


@dataclass(frozen=True)
class LaunchedWorker:
    """One worker as its launcher knows it.

    Attributes:
        index: from 0.
        announcement: its address, key and process; None until it listens.
        state: "waiting" for a place or for its start, "running", or "ended".
        where: the host, and what runs it there; for a waiting worker also what it waits for.
        log: the last lines that it wrote to stderr.
    """

    index: int
    announcement: Announcement | None
    state: str
    where: str
    log: str = ""

    def __str__(self) -> str:
        return f"worker {self.index} ({self.where}): {self.state}"


class WorkerLauncher(Protocol):
    """Starts `graphflow worker` processes somewhere, and restarts them when asked.

    No method blocks for long: `start` and `restart` return before the workers listen.
    """

    def start(self, count: int, options: Sequence[str], env: Mapping[str, str]) -> None:
        """Start workers.

        Args:
            options: of `graphflow worker`, without address and announcement.
            env: variables to set for them.

        Raises:
            LaunchError: the engine is not there, or refuses.
        """

    def workers(self) -> list[LaunchedWorker]:
        """Return what is known of each worker now, in order."""

    def restart(self, index: int) -> None:
        """End a worker's process if it still runs, and start one in its place, maybe elsewhere."""

    def stop(self) -> None:
        """End all workers. Idempotent."""


def worker_command(listen: str, options: Sequence[str], python: str = sys.executable) -> list[str]:
    """Return the command of a worker that announces itself on stdout and ends with its stdin."""
    return [
        python, "-m", "graphflow", "worker", "--listen", listen, "--announce", "-",
        "--until-stdin-ends", *options,
    ]  # fmt: skip
