"""The devices of a worker, from their names: of this host, or of hypothetical hardware."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from graphflow.errors import ClusterError
from graphflow.placement.clusters.devices import Device, Worker, local_kind
from graphflow.placement.clusters.hardware_catalog import product
from graphflow.placement.clusters.machine.host_facts import (
    MEMORY_SHARE,
    default_threads,
    device_memory,
    gpu_memory,
)


def worker_on_this_host(
    index: int, names: tuple[str, ...] | list[str], threads: int | None, processes: int
) -> Worker:
    """Return a worker of this host, which `processes` workers share."""
    names = as_names(names)
    kinds = [local_kind(name) for name in names]
    cpus = max(1, kinds.count("cpu"))
    share = threads if threads is not None else default_threads(processes * cpus)
    made = []
    for name, kind in zip(names, kinds, strict=True):
        full = f"/worker:{index}/{name}"
        if kind == "cpu":
            made.append(Device(full, kind, device_memory(processes * cpus), share))
        else:
            made.append(
                Device(full, kind, max(1, int(gpu_memory(name) * MEMORY_SHARE / processes)))
            )
    return Worker(index, None, tuple(made))


def threads_by_device(workers: Iterable[Worker]) -> dict[str, int]:
    """Return the threads of each device by full name; a GPU has one.

    A CPU device that was given none takes as many as it would on this host.
    """
    found = {}
    for worker in workers:
        default = default_threads(max(1, sum(d.kind == "cpu" for d in worker.devices)))
        for device in worker.devices:
            found[device.name] = device.threads or (default if device.kind == "cpu" else 1)
    return found


def hypothetical_devices(
    worker: int,
    entries: Sequence[tuple[str, str | None]],
    memory: int | None,
    given: Mapping[str, Any],
) -> tuple[Device, ...]:
    """Return the devices of a hypothetical worker. A product has its own memory by default."""
    made = []
    for local, known in entries:
        size = memory if known is None or memory is not None else product(known).memory
        if size is None:
            raise ClusterError(f"{local} is hypothetical: give its memory (bytes)")
        full = f"/worker:{worker}/{local}"
        made.append(Device(full, local_kind(local), size, product=known, **given))
    return tuple(made)


def as_names(names: str | tuple[str, ...] | list[str]) -> tuple[str, ...]:
    """Return names of devices as a tuple; a single name stands for one."""
    if isinstance(names, str):
        return (names,)
    if not isinstance(names, tuple | list):
        raise ClusterError(f"devices are names, such as ('cpu:0', 'gpu:0'), not {names!r}")
    return tuple(names)
