"""Workers that are started in place of lost ones, in the background, while steps go on."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection
from functools import partial

from graphflow.errors import GraphflowError
from graphflow.runtime.host.host_interface import Hosts
from graphflow.runtime.telemetry.logs import Log

_END_SECONDS = 20.0  # for a worker that is being started when the session ends

_log = Log("graphflow.session")


class Replacements:
    """The workers that join a session in place of lost ones.

    A process that the session has started itself is started again. Another one may be started again
    at its address.
    """

    def __init__(self, hosts: Hosts) -> None:
        self._hosts = hosts
        self._ending = threading.Event()
        self._asked: set[int] = set()
        self._threads: list[threading.Thread] = []
        self._joined: deque[tuple[int, int]] = deque()

    def begin(self, lost: Collection[int]) -> None:
        """Start a worker in place of each lost one for which none was started yet."""
        for worker in sorted(set(lost) - self._asked):
            self._asked.add(worker)
            thread = threading.Thread(
                target=partial(self._replace, worker), name="graphflow-replacement", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    @property
    def are_near(self) -> bool:
        """True while a worker is being started, or has joined and was not taken yet."""
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return bool(self._joined or (self._threads and self._hosts.starts_workers))

    def take_joined(self) -> tuple[int, int] | None:
        """Return the numbers of a lost worker and of the one in its place; None if none joined."""
        return self._joined.popleft() if self._joined else None

    def restart(self) -> None:
        """Forget all of them, after all workers began anew."""
        self.close()
        self._ending.clear()
        self._asked.clear()
        self._joined.clear()

    def close(self) -> None:
        """Wait until none is being started or waited for any more."""
        self._ending.set()
        for thread in self._threads:
            thread.join(_END_SECONDS)
        self._threads.clear()

    def _replace(self, lost: int) -> None:
        try:
            number = self._hosts.replace(lost, self._ending.is_set)
        except GraphflowError as error:  # the session goes on without it
            _log.tell("worker.unreplaced", worker=lost, reason=str(error))
            return
        self._joined.append((lost, number))
        _log.tell("worker.joined", worker=number, replaces=lost)
