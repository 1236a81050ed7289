"""A cluster in numbers: the rates of its devices and the links between them.

Values of a cluster file precede shipped tables of the named products. These precede measurements,
and measurements defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphflow.errors import DeviceError
from graphflow.ir.device_name import DeviceName
from graphflow.placement.calibration import calibrate
from graphflow.placement.calibration.roofline import Rates, contention_factor, speeds_from_numbers
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT, Device
from graphflow.placement.clusters.hardware_catalog import speeds_of

Links = Mapping[tuple[str, str], calibrate.LinkSpeed]
"""Measured links by ends: devices, workers ("/worker:0") or "/client"."""


def is_described(cluster: Cluster) -> bool:
    """Return True if every device's speeds are given, so that nothing needs to be measured."""
    return all(device.is_described for worker in cluster.workers for device in worker.devices)


def rates(
    cluster: Cluster, profiles: Mapping[int, Mapping[str, Any]] | None, contention: bool
) -> dict[str, Rates]:
    """Return the rates of each device by name; equal devices share one object."""
    here: Mapping[str, Any] | None = None
    made: dict[Any, Rates] = {}
    result: dict[str, Rates] = {}
    busy = _busy_threads(cluster)
    for worker in cluster.present_workers:
        neighbours = len(worker.devices)
        for device in worker.devices:
            profile = (profiles or {}).get(worker.index)
            if profile is None and not device.is_described:
                here = profile = here or _this_machine(cluster)
            threads = device.threads or 1
            active = busy[host_name(cluster, worker.index)] if contention else threads
            key = (
                id(profile), device.kind, threads, active, neighbours,
                device.flops, device.bandwidth, device.launch, device.product,
            )  # fmt: skip
            if key not in made:
                made[key] = _rates(
                    device, profile, threads, active, neighbours if contention else 1
                )
            result[device.name] = made[key]
    return result


def _rates(
    device: Device, profile: Mapping[str, Any] | None, threads: int, active: int, neighbours: int
) -> Rates:
    """Return rates while `active` threads of the machine and `neighbours` in the process run."""
    if device.product is not None:
        return Rates(_scale_speeds(speeds_of(device.product), device))
    if profile is None or device.is_described:
        assert device.flops and device.bandwidth and device.launch is not None
        return Rates(speeds_from_numbers(device.flops, device.bandwidth, device.launch))
    speeds = profile["devices"].get(device.kind)
    if speeds is None:
        raise DeviceError(
            f"the speed of {device.name} is unknown: no {device.kind} was measured there; give "
            "flops, bandwidth and launch in the cluster file, or run graphflow calibrate there"
        )
    speeds = _scale_speeds(speeds, device)
    if device.kind != "cpu":
        return Rates(speeds)
    slower = {
        what: contention_factor(speeds["contention"], what, active)
        / contention_factor(speeds["contention"], what, threads)
        for what in ("compute", "memory")
    }
    # Devices of one process take turns at the interpreter.
    return Rates(speeds, threads, slower["compute"], slower["memory"], float(neighbours))


def _scale_speeds(speeds: Mapping[str, Any], device: Device) -> Mapping[str, Any]:
    """Return measured speeds, scaled to the given numbers of a device."""
    made = dict(speeds)
    if device.flops is not None:
        flops, seconds = speeds["matmul"]["float32"][-1]
        factor = flops / seconds / device.flops
        made["matmul"] = {
            dtype: [[f, t * factor] for f, t in points]
            for dtype, points in speeds["matmul"].items()
        }
    if device.bandwidth is not None:
        moved, seconds = speeds["traffic"][-1]
        factor = moved / seconds / device.bandwidth
        made["traffic"] = [[size, t * factor] for size, t in speeds["traffic"]]
    if device.launch is not None:
        made["launch"] = made["call"] = device.launch
        made["ops"] = {n: {**entry, "launch": device.launch} for n, entry in speeds["ops"].items()}
    return made


def _this_machine(cluster: Cluster) -> Mapping[str, Any]:
    """Return this machine's profile, for the kinds of devices that can be measured here."""
    kinds = {device.kind for worker in cluster.workers for device in worker.devices}
    if cluster.kind not in ("here", "local"):
        kinds = {"cpu"}  # a GPU elsewhere cannot be measured here
    return calibrate.profile(kinds)


def host_name(cluster: Cluster, worker: int) -> str:
    """Return a name that tells the machines of workers apart."""
    address = cluster.workers[worker].address
    if cluster.kind in ("here", "local"):
        return ""
    if address is None:  # hypothetical: each worker its own
        return f"worker {worker}"
    return "" if cluster.workers[worker].loopback else address.rpartition(":")[0]


def _busy_threads(cluster: Cluster) -> dict[str, int]:
    """Return the threads of all CPU devices of each machine."""
    busy: dict[str, int] = {}
    for worker in cluster.present_workers:
        host = host_name(cluster, worker.index)
        count = sum(d.threads or 1 for d in worker.devices if d.kind == "cpu")
        busy[host] = busy.get(host, 0) + count
    return busy


def device_classes(cluster: Cluster) -> dict[str, str]:
    """Return for each device a name for its speed: its machine, kind and threads, and what is
    given of it.
    """
    return {
        device.name: "|".join(
            str(part)
            for part in (
                host_name(cluster, worker.index), device.kind, device.threads or 1,
                device.product, device.flops, device.bandwidth, device.launch,
            )
            if part is not None
        )
        for worker in cluster.present_workers
        for device in worker.devices
    }  # fmt: skip


def link_classes(cluster: Cluster) -> dict[tuple[int, int], str]:
    """Return by device indices a name for the kind of link between them; described links have
    none.
    """
    names, found = cluster.devices, {}
    for i, source in enumerate(names):
        for j, target in enumerate(names):
            if i != j and cluster.link(source, target) is None:
                a, b = _ends(source)[1], _ends(target)[1]
                if a == b:
                    kind = "gpu" if "gpu" in source or "gpu" in target else "thread"
                else:
                    kind = "process" if cluster.kind == "local" else f"{a} → {b}"
                found[i, j] = kind
    return found


def link_matrices(
    cluster: Cluster,
    profiles: Mapping[int, Mapping[str, Any]] | None = None,
    links: Links | None = None,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return (d, d) latencies (s) and bandwidths (bytes/s) of devices, the client last."""
    ends = (*cluster.devices, CLIENT)
    latency, bandwidth = np.zeros((len(ends),) * 2), np.full((len(ends),) * 2, np.inf)
    profile: Mapping[str, Any] = (profiles or {}).get(0, {})
    if not profiles and not is_described(cluster):
        profile = _this_machine(cluster)
    for i, source in enumerate(ends):
        for j, target in enumerate(ends):
            if i != j:
                link = _link(cluster, source, target, profile, profiles or {}, links or {})
                latency[i, j], bandwidth[i, j] = link
    return latency, bandwidth


def _link(
    cluster: Cluster,
    source: str,
    target: str,
    profile: Mapping[str, Any],
    profiles: Mapping[int, Mapping[str, Any]],
    links: Links,
) -> calibrate.LinkSpeed:
    """Return the link between two ends: described, measured, of the profile, or default."""
    described = cluster.link(source, target)
    if described is not None:
        return described.latency, described.bandwidth
    for a in _ends(source):
        for b in _ends(target):
            if a != b and (a, b) in links:
                return links[a, b]
    workers = [DeviceName.parse(end).worker for end in (source, target) if end != CLIENT]
    gpu = "gpu" in source or "gpu" in target
    if len(workers) == 1:  # the client and a device
        if cluster.kind == "here" and gpu:
            return calibrate.link_of(profile, "gpu")
        if cluster.kind in ("here", "hypothetical"):
            return 0.0, float("inf")
        assert workers[0] is not None
        near = host_name(cluster, workers[0]) == ""
        return calibrate.link_of(profile, "client" if near else "network")
    if workers[0] == workers[1]:
        assert workers[0] is not None
        near_it = profiles.get(workers[0], profile)
        return calibrate.link_of(near_it, "gpu") if gpu else calibrate.link_of(profile, "thread")
    assert workers[0] is not None and workers[1] is not None
    near = host_name(cluster, workers[0]) == host_name(cluster, workers[1])
    return calibrate.link_of(profile, "process" if near else "network")


def _ends(name: str) -> tuple[str, ...]:
    """Return a device and its worker."""
    return (name,) if name == CLIENT else (name, name.rpartition("/")[0])
