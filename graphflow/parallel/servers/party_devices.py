"""The devices of servers and workers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.base.formatting import show_count
from graphflow.errors import ShardingError
from graphflow.ir.device_name import DeviceName
from graphflow.placement.clusters.cluster import Cluster


def count_workers(
    cluster: Cluster, servers: int, workers: int | None, named: Sequence[str] | None
) -> int:
    """Return the number of workers: what the user says, else one for each device that is left
    beside the servers, and one at least."""
    if workers is not None:
        return workers
    devices = len(_cpus(cluster)) if named is None else len(named)
    return max(1, devices - servers)


def party_devices(cluster: Cluster, servers: int, workers: int, named: Any) -> list[DeviceName]:
    """Return a device for each server, then one for each worker.

    By default servers take the first CPUs of the cluster, and workers the next. If there are too
    few, workers take all CPUs in turn, and servers the last ones.

    Raises:
        ShardingError: `named` does not name one CPU for each of them.
    """
    if named is None:
        cpus = _cpus(cluster)
        if len(cpus) >= servers + workers:
            return [DeviceName.parse(name) for name in cpus[: servers + workers]]
        count = len(cpus)
        names = [cpus[-1 - s % count] for s in reversed(range(servers))]
        names += [cpus[k % count] for k in range(workers)]
        return [DeviceName.parse(name) for name in names]
    example = [*_cpus(cluster), *["/worker:0/cpu:0"] * (servers + workers)][: servers + workers]
    if (
        isinstance(named, str)
        or not isinstance(named, Sequence)
        or not all(isinstance(name, str) for name in named)
        or len(named) != servers + workers
    ):
        raise ShardingError(
            f"devices must be a list with a name for each of {show_count(servers, 'server')}, then "
            f"for each of {show_count(workers, 'worker')}, such as {example}, not {named!r}; "
            "names may repeat"
        )
    found = [cluster.device(name) for name in named]
    for device in found:
        if device.kind != "cpu":
            raise ShardingError(
                f"devices names {device.name}; servers and workers run on CPUs, such as {example}"
            )
    return [DeviceName.parse(device.name) for device in found]


def _cpus(cluster: Cluster) -> list[str]:
    """Return the names of the cluster's CPUs."""
    return [name for name in cluster.devices if cluster.device(name).kind == "cpu"]


__all__ = ["count_workers", "party_devices"]
