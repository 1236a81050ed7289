"""Nurseries that tests share: a session of local workers starts one of its own, which loads the
package for half a second, and hundreds of tests open such sessions.

The workers are forks of a process that has loaded everything, as ever; but that process stays for
the next session of the same environment. Tests that are about processes have `own_nurseries`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from graphflow.runtime.launch.fork_server import ForkedProcess, ForkServer

_KEPT = 2
"""Nurseries that wait for a session, which is as many as tests open at a time."""


class Nurseries:
    """Takes the place of `ForkServer`: makes one only where none that waits would be the same."""

    def __init__(self) -> None:
        self._waiting: list[tuple[object, ForkServer]] = []  # the last one was used last

    def __call__(self, environment: Mapping[str, str]) -> Lent:
        kind = _kind(environment)
        for entry in reversed(self._waiting):
            if entry[0] == kind:
                self._waiting.remove(entry)
                if entry[1].is_alive:
                    return Lent(self, kind, entry[1])
                entry[1].close()
        return Lent(self, kind, ForkServer(environment))

    @property
    def waiting(self) -> list[ForkServer]:
        """Those that are kept and not lent."""
        return [nursery for _, nursery in self._waiting]

    def take_back(self, kind: object, nursery: ForkServer) -> None:
        self._waiting.append((kind, nursery))
        while len(self._waiting) > _KEPT:
            self._waiting.pop(0)[1].close()

    def close(self) -> None:
        while self._waiting:
            self._waiting.pop()[1].close()


def _kind(environment: Mapping[str, str]) -> object:
    """What a process takes over from the one that starts it."""
    told = {name: text for name, text in environment.items() if name != "PYTEST_CURRENT_TEST"}
    return told, os.getcwd(), os.sched_getaffinity(0)


class Lent:
    """A nursery for one session, which is given back rather than closed."""

    def __init__(self, nurseries: Nurseries, kind: object, nursery: ForkServer) -> None:
        self._nurseries, self._kind, self._nursery = nurseries, kind, nursery
        self._is_lent = True

    @property
    def pid(self) -> int:
        return self._nursery.pid

    @property
    def is_alive(self) -> bool:
        return self._nursery.is_alive

    def fork(self, arguments: Sequence[str], kept: Sequence[int], until: float) -> ForkedProcess:
        return self._nursery.fork(arguments, kept, until)

    def close(self) -> None:
        if self._is_lent:
            self._is_lent = False
            if self.is_alive:
                self._nurseries.take_back(self._kind, self._nursery)
            else:
                self._nursery.close()
