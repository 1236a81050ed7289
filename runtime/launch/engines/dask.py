"""Workers as actors on a Dask cluster. The session decides who is lost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from graphflow.base.addresses import parse_address
from graphflow.errors import ArgumentError, LaunchError
from graphflow.runtime.launch.engines.worker_holder import HolderReport, WorkerHolder
from graphflow.runtime.launch.worker_launcher import ENDED, RUNNING, WAITING, LaunchedWorker

_END_SECONDS = 6.0


@dataclass
class _DaskActor:
    """A worker's actor on its way or there, the call to it, and the last report."""

    place: str  # the address of the Dask worker
    future: Any  # of the actor
    actor: Any = None
    call: Any = None
    report: HolderReport | None = None
    error: str = ""


class Dask:
    """Starts one worker on each of several Dask workers, as an actor.

    Dask's nannies restart Dask workers. A graphflow worker that was lost with one is started on
    another when the session asks for it.

    Args:
        client: a `distributed.Client`.

    Raises:
        LaunchError: Dask's distributed scheduler is not installed.
        ArgumentError: `client` is none.
    """

    def __init__(self, client: Any) -> None:
        try:
            from distributed import Client
        except ImportError as error:
            raise LaunchError(
                f"Dask is not installed: pip install 'graphflow[dask]' ({error})"
            ) from None
        if not isinstance(client, Client):
            raise ArgumentError(f"Dask takes a distributed.Client, not {client!r}")
        self._client = client
        self._held: list[_DaskActor] = []
        self._options: Sequence[str] = ()
        self._env: Mapping[str, str] = {}

    def start(self, count: int, options: Sequence[str], env: Mapping[str, str]) -> None:
        there = len(self._places())
        if there < count:
            raise LaunchError(
                f"Dask: the scheduler at {self._client.scheduler.address} has {there} workers, and "
                f"{count} are wanted: scale the cluster first, or start fewer"
            )
        self._options, self._env = options, env
        for _ in range(count):
            self._held.append(self._hold())

    def _places(self) -> list[str]:
        """Return the addresses of Dask's workers."""
        return list(self._client.scheduler_info(n_workers=-1)["workers"])

    def _hold(self) -> _DaskActor:
        """Start an actor on the Dask worker that holds the fewest.

        Raises:
            LaunchError: there is no Dask worker.
        """
        held = [each.place for each in self._held if not each.error]
        place = min(self._places(), key=held.count, default=None)
        if place is None:
            raise LaunchError("Dask has no worker left: scale the cluster")
        address = parse_address(place)
        host = "" if address is None else address.host
        future = self._client.submit(
            WorkerHolder, host, list(self._options), dict(self._env),
            actor=True, workers=[place], pure=False,
        )  # fmt: skip
        return _DaskActor(place, future)

    def workers(self) -> list[LaunchedWorker]:
        return [self._describe(index, held) for index, held in enumerate(self._held)]

    def _describe(self, index: int, held: _DaskActor) -> LaunchedWorker:
        if not held.error:
            try:
                _advance(held)
                if held.actor is not None and held.place not in self._places():
                    held.error = "its Dask worker is gone"
            except Exception as error:  # Dask raises what the actor raised, and errors of its own
                held.error = f"{type(error).__name__}: {error}"
        where = f"Dask's worker {held.place}"
        if held.error:
            return LaunchedWorker(index, None, ENDED, f"{where}: {held.error}")
        if held.report is None:
            return LaunchedWorker(index, None, WAITING, where)
        told, status, log = held.report
        state = ENDED if status is not None else WAITING if told is None else RUNNING
        return LaunchedWorker(index, told, state, where, log)

    def restart(self, index: int) -> None:
        held = self._held[index]
        with suppress(Exception):
            if held.actor is not None and held.place in self._places():
                held.actor.end()
        held.error = "it is replaced"
        self._held[index] = self._hold()

    def stop(self) -> None:
        until = time.monotonic() + _END_SECONDS
        for held in self._held:
            with suppress(Exception):
                if held.actor is not None and not held.error:
                    held.actor.end().result(timeout=max(0.1, until - time.monotonic()))
        for held in self._held:
            held.future.cancel()
        self._held = []


def _advance(held: _DaskActor) -> None:
    """Take what has come of a worker's actor: itself, or its report."""
    if held.actor is None:
        if not held.future.done():
            return
        held.actor = held.future.result()
    if held.call is None:
        held.call = held.actor.report()
    elif held.call.done():
        held.report = held.call.result()
        held.call = None
