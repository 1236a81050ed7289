"""The devices that hold mirrors: on another host where there is one, spread evenly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from graphflow.base.addresses import parse_address
from graphflow.base.argument_checks import to_builtin
from graphflow.errors import ArgumentError, ClusterError
from graphflow.execution.compiled_fetches import worker_of
from graphflow.ir.device_name import DeviceName
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import Worker


def choose_mirror_device(
    cluster: Cluster, holder: str, lost: Collection[int], loads: Mapping[str, int]
) -> str | None:
    """Return the device that is to mirror the variables of another one; None if none can.

    It belongs to a worker on another host, or to another worker if all are on one host. Of these it
    is one of the least loaded, the next one after the holder's.

    Args:
        lost: workers that were lost.
        loads: the parts that each device holds or mirrors.
    """
    own = cluster.workers[worker_of(holder)]
    away = {*lost, *cluster.left}
    others = [each for each in cluster.workers if each.index not in away and each is not own]
    apart = [each for each in others if host_of(each) != host_of(own)]
    places = [(_counterpart(holder, each), each.index) for each in apart or others]
    count = len(cluster.workers)
    best = min(places, key=lambda at: (loads[at[0]], (at[1] - own.index) % count), default=None)
    return None if best is None else best[0]


def check_replicas(replicas: Any, cluster: Cluster) -> int:
    """Return the number of copies of each variable, if there are places for them.

    Raises:
        ArgumentError: it is not 1 or 2.
        ClusterError: there are fewer hosts, or fewer workers on a single host.
    """
    replicas = to_builtin(replicas)
    if isinstance(replicas, bool) or not isinstance(replicas, int) or replicas < 1:
        raise ArgumentError(f"replicas must be 1 or 2, not {replicas!r}")
    workers, hosts = len(cluster.workers), len({host_of(each) for each in cluster.workers})
    places, kind = (workers, "workers") if hosts == 1 else (hosts, "hosts")
    if replicas > places:
        raise ClusterError(
            f"replicas={replicas} needs {replicas} {kind}, and the cluster has {places}; add "
            f"{kind}, or ask for fewer replicas"
        )
    if replicas > 2:
        raise ArgumentError(f"replicas must be 1 or 2, not {replicas}")
    return replicas


def host_of(worker: Worker) -> str:
    """Return the host of a worker's address; "" for a worker that the session starts here."""
    parts = parse_address(worker.address) if worker.address is not None else None
    return "" if parts is None else parts.host


def _counterpart(device: str, worker: Worker) -> str:
    """Return the device of a worker that is most like another device."""
    own = DeviceName.parse(device)
    names = [each.name for each in worker.devices]
    same = [name for name in names if DeviceName.parse(name).kind == own.kind]
    exact = [name for name in same if DeviceName.parse(name).index == own.index]
    return (exact or same or names)[0]
