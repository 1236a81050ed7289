"""The base of launchers whose workers are commands of this host: local ones, ssh, srun."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from graphflow.base.addresses import parse_address
from graphflow.runtime.launch.piped_worker import PipedWorker
from graphflow.runtime.launch.worker_launcher import ENDED, RUNNING, WAITING, LaunchedWorker
from graphflow.runtime.worker.announcement import Announcement

EVERYWHERE = "0.0.0.0"  # noqa: S104 - workers that listen at every address have keys
_GRACE = 5.0  # seconds for all workers to end


class WorkerPlace(NamedTuple):
    """The place of a worker, and the command that runs it there.

    Attributes:
        where: for messages.
        host: replaces the host in the address of a worker that listens at every address.
    """

    command: list[str]
    where: str
    host: str


class PipedLauncher(ABC):
    """Starts one command a worker, and ends it by closing its stdin."""

    def __init__(self) -> None:
        self._workers: list[PipedWorker] = []
        self._places: list[WorkerPlace] = []
        self._options: Sequence[str] = ()
        self._env: Mapping[str, str] = {}

    @abstractmethod
    def place(self, index: int, options: Sequence[str], env: Mapping[str, str]) -> WorkerPlace:
        """Return the command of a worker.

        Args:
            options: of `graphflow worker`.
            env: variables that the user sets for the worker.
        """

    def check(self, count: int) -> None:  # noqa: B027 - there may be nothing to check
        """Check that the engine is there, and can start so many workers.

        Raises:
            LaunchError: it is not, or cannot.
        """

    def start(self, count: int, options: Sequence[str], env: Mapping[str, str]) -> None:
        self.check(count)
        self._options, self._env = options, env
        for index in range(count):
            place = self.place(index, options, env)
            self._workers.append(PipedWorker(place.command, env))
            self._places.append(place)

    def workers(self) -> list[LaunchedWorker]:
        return [self._describe(index) for index in range(len(self._workers))]

    def _describe(self, index: int) -> LaunchedWorker:
        worker, place = self._workers[index], self._places[index]
        status, told = worker.exit_status(), worker.announcement
        where = place.where if status is None else f"{place.where}, exit status {status}"
        state = ENDED if status is not None else WAITING if told is None else RUNNING
        if told is not None:
            told = reachable(told, place.host)
        return LaunchedWorker(index, told, state, where, worker.log)

    def restart(self, index: int) -> None:
        self._workers[index].end(until=time.monotonic())
        self._places[index] = place = self.place(index, self._options, self._env)
        self._workers[index] = PipedWorker(place.command, self._env)

    def stop(self) -> None:
        for worker in self._workers:
            worker.request_end()
        until = time.monotonic() + _GRACE
        for worker in self._workers:
            worker.end(until)
        self._workers.clear()


def reachable(told: Announcement, host: str) -> Announcement:
    """Return the announcement of a worker with an address at which others reach it.

    Args:
        host: replaces the host of a worker that listens at every address.
    """
    address = parse_address(told.address)
    if address is None or address.host != EVERYWHERE:
        return told
    return replace(told, address=f"tcp://{host}:{address.port}")
