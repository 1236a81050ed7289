"""Keep the workers of a launcher running, for sessions that come and go: `graphflow up`.

Sessions of `gf.launch.start` restart their workers themselves, and have no supervisor.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from graphflow.errors import LaunchError
from graphflow.runtime.launch.worker_launcher import ENDED, RUNNING, LaunchedWorker, WorkerLauncher

_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds before a restart
_STEADY = 60.0  # seconds after which a running worker counts as healthy again


class _Life:
    """The state of one worker, as its supervisor knows it.

    Attributes:
        running_since: on the monotonic clock; None for a worker that does not listen.
        restart_at: on the monotonic clock; None unless it has ended.
    """

    def __init__(self) -> None:
        self.restarts = 0
        self.pause = 0.0
        self.running_since: float | None = None
        self.restart_at: float | None = None


class Supervisor:
    """Restarts workers that end: the first time at once, then after pauses that double.

    Args:
        tell: receives a line for people about each end, restart and return.
    """

    def __init__(self, launcher: WorkerLauncher, tell: Callable[[str], None]) -> None:
        self._launcher, self._tell = launcher, tell
        self._lives = [_Life() for _ in launcher.workers()]

    @property
    def restarts(self) -> list[int]:
        """The number of restarts of each worker."""
        return [life.restarts for life in self._lives]

    def check(self, now: float) -> bool:
        """Restart workers whose time has come; return True if anything has changed.

        Args:
            now: on the monotonic clock.
        """
        pairs = zip(self._launcher.workers(), self._lives, strict=True)
        changes = [self._check_worker(worker, life, now) for worker, life in pairs]
        return any(changes)

    def _check_worker(self, worker: LaunchedWorker, life: _Life, now: float) -> bool:
        if worker.state == ENDED and life.restart_at is None:
            life.restart_at, life.running_since = now + life.pause, None
            when = f"in {life.pause:g} s" if life.pause else "now"
            last = f"; its last lines:\n{worker.log}" if worker.log else ""
            self._tell(
                f"worker {worker.index} ended ({worker.where}) and is restarted {when}{last}"
            )
            life.pause = min(max(_FIRST_PAUSE, 2 * life.pause), _LONGEST_PAUSE)
            return True
        if worker.state == ENDED and life.restart_at is not None and now >= life.restart_at:
            life.restart_at, life.restarts = None, life.restarts + 1
            with suppress(LaunchError):  # it has ended then, with the reason in its log
                self._launcher.restart(worker.index)
            return True
        if worker.state == RUNNING and life.running_since is None and worker.announcement:
            life.running_since = now
            if life.restarts:
                told = worker.announcement
                self._tell(f"worker {worker.index} is up again: process {told.pid}, {told.address}")
            return True
        if life.running_since is not None and now > life.running_since + _STEADY:
            life.pause = 0.0
        return False
