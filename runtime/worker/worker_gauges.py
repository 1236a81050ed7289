"""Gauges of a worker, which are read when its metrics are requested."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING

from graphflow.runtime.telemetry.metrics import Meters, watch_process

if TYPE_CHECKING:
    from graphflow.runtime.transport.interface import Listener
    from graphflow.runtime.worker.hosted_session import HostedSession


def register_worker_gauges(
    meters: Meters,
    address: str,
    sessions: Mapping[str, HostedSession],
    unsent: Mapping[bytes, Sized],
    listener: Listener,
) -> None:
    """Register the gauges of a worker.

    Args:
        sessions: the sessions that it serves, by name.
        unsent: messages that wait for room in a connection, by connection.
    """

    def of_devices(kind: str) -> dict[tuple[str, ...], float]:
        found: dict[tuple[str, ...], float] = {}
        for hosted in list(sessions.values()):
            for device, nbytes in getattr(hosted.usage(), kind).items():
                found[device,] = found.get((device,), 0) + nbytes
        return found

    watch_process(meters, "worker", address)
    meters.watch("graphflow_sessions", lambda: len(sessions))
    meters.watch("graphflow_connections", lambda: listener.connections)
    meters.watch("graphflow_queued_messages", lambda: sum(map(len, list(unsent.values()))))
    meters.watch(
        "graphflow_queued_jobs", lambda: sum(s.queued_jobs for s in list(sessions.values()))
    )
    meters.watch("graphflow_arena_bytes", lambda: of_devices("arenas"))
    meters.watch("graphflow_variable_bytes", lambda: of_devices("variables"))
