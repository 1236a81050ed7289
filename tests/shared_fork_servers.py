"""Fork servers that tests share.

A session of local workers starts a fork server, which loads the package for half a second, and
hundreds of tests open such sessions. Here the server stays for the next session of the same
environment. The workers are forks of a fully loaded process, as always. Tests about processes use
the fixture `own_fork_servers`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from graphflow.runtime.launch.fork_server import ForkedProcess, ForkServer

_MAX_WAITING = 2
"""Servers that wait for a session: as many as tests open at a time."""


class SharedForkServers:
    """Replaces `ForkServer`: starts a server only if no waiting one has the same environment."""

    def __init__(self) -> None:
        self._waiting: list[tuple[object, ForkServer]] = []  # the last one was used last

    def __call__(self, environment: Mapping[str, str]) -> LentForkServer:
        key = _environment_key(environment)
        for entry in reversed(self._waiting):
            if entry[0] == key:
                self._waiting.remove(entry)
                if entry[1].is_alive:
                    return LentForkServer(self, key, entry[1])
                entry[1].close()
        return LentForkServer(self, key, ForkServer(environment))

    @property
    def waiting(self) -> list[ForkServer]:
        """Servers that are kept and not lent."""
        return [server for _, server in self._waiting]

    def take_back(self, key: object, server: ForkServer) -> None:
        self._waiting.append((key, server))
        while len(self._waiting) > _MAX_WAITING:
            self._waiting.pop(0)[1].close()

    def close(self) -> None:
        while self._waiting:
            self._waiting.pop()[1].close()


def _environment_key(environment: Mapping[str, str]) -> object:
    """Return what a process inherits from the one that starts it."""
    told = {name: text for name, text in environment.items() if name != "PYTEST_CURRENT_TEST"}
    return told, os.getcwd(), os.sched_getaffinity(0)


class LentForkServer:
    """A fork server for one session; closing it gives it back."""

    def __init__(self, servers: SharedForkServers, key: object, server: ForkServer) -> None:
        self._servers, self._key, self._server = servers, key, server
        self._is_lent = True

    @property
    def pid(self) -> int:
        return self._server.pid

    @property
    def is_alive(self) -> bool:
        return self._server.is_alive

    def fork(self, arguments: Sequence[str], kept: Sequence[int], until: float) -> ForkedProcess:
        return self._server.fork(arguments, kept, until)

    def close(self) -> None:
        if self._is_lent:
            self._is_lent = False
            if self.is_alive:
                self._servers.take_back(self._key, self._server)
            else:
                self._server.close()
