"""The interface of launchers: processes that a session starts itself.

`local.LocalWorkers` provides it: workers on this machine that belong to one session. Launchers by
other engines are in `worker_launcher`; their workers are joined by address.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from graphflow.base.lazy_dataclass import dataclass


@dataclass(frozen=True)
class WorkerExit:
    """The end of a worker's process.

    Attributes:
        reason: in a few words, such as "exit status 1", "killed by signal 9" or `OUT_OF_MEMORY`.
        op: the op that ran when a signal ended the process, with its node and the user's line; ""
            if it is unknown.
        by_itself: neither a signal nor the end of its fork server ended the process.
    """

    reason: str
    op: str = ""
    by_itself: bool = False

    def __str__(self) -> str:
        return f"{self.reason}, in {self.op}" if self.op else self.reason


class Launcher(Protocol):
    """Started worker processes, in the order of the workers' indices."""

    @property
    def addresses(self) -> list[str]:
        """The addresses where the workers listen."""

    @property
    def pids(self) -> list[int]:
        """The process ids of the workers."""

    def wait_exit(self, index: int, seconds: float = 0.0) -> WorkerExit | None:
        """Return how a worker ended; None if it still runs after `seconds`."""

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

    def replace(self, lost: int, until: float) -> str:
        """Start one more process, in place of a worker that was lost; return its address.

        Args:
            lost: the lost worker, which is killed first: a frozen process would still hold memory.
            until: a monotonic time.

        Raises:
            RendezvousTimeout: it did not start in time.
        """

    def start(self, until: float) -> str:
        """Start one more process, and return its address.

        Args:
            until: a monotonic time.

        Raises:
            RendezvousTimeout: it did not start in time.
        """

    def end(self, index: int) -> None:
        """End a process."""

    def end_after(self, count: int) -> None:
        """End the processes after the first `count`."""

    def stop(self) -> None:
        """End all processes: by request, and by force after a grace period. Idempotent."""
