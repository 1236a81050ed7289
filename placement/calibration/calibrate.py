"""Calibration: how fast this machine is, measured with the ops' own kernels.

`profile()` gives the cost model what it knows of a machine as plain data, so that a worker can send
its own. `profile_file` keeps that data on disk. Transfers between processes are measured by
callables that the caller gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from graphflow.base.progress import show_progress
from graphflow.placement.calibration.held_out import add_cpu_scatter
from graphflow.placement.calibration.measure import measure_cpu, measure_handoff
from graphflow.placement.calibration.measure_gpu import gpu_product, measure_gpu, measure_gpu_link
from graphflow.placement.calibration.profile_file import (
    FORMAT,
    Profile,
    machine_key,
    profile_path,
    read_profile,
    write_profile,
)

Probe = Callable[[int, int, int, int], float]
"""(source, target, nbytes, repeats) -> median seconds from one worker to another.

They are half of a round trip.
"""
LinkSpeed = tuple[float, float]
"""Seconds of latency, bytes/s."""
StepCost = tuple[float, float]
"""Seconds of a step that does next to nothing, on one worker and on two, without its links.

In one process, on one and two devices.
"""

DEFAULT_LINKS: dict[str, LinkSpeed] = {
    "thread": (30e-6, float("inf")),  # devices of one process: a hand-over of a reference
    "process": (300e-6, 2.0e9),  # processes of one host, over loopback
    "client": (300e-6, 2.0e9),  # the client and a worker process of its host
    "network": (500e-6, 1.0e9),  # hosts: a 10 Gbit/s network
    "gpu": (20e-6, 10e9),  # a process (its client, its CPUs) and its GPU, over PCIe
}
"""Links that were neither described nor measured."""


# Measuring ------------------------------------------------------------------------------------


def measure_machine(devices: Iterable[Any] = ("cpu",)) -> Profile:
    """Measure kinds of devices, the hand-over between threads, and the link to the GPU.

    Takes three to four seconds a kind, a GPU some more.

    Args:
        devices: Kinds ("cpu"), device names ("/worker:0/cpu:0") or `Device`s; equal kinds once.

    Raises:
        DeviceError: A GPU is asked for and there is none.
    """
    kinds = sorted({_kind(device) for device in devices}) or ["cpu"]
    links: dict[str, list[float | None]] = {"thread": [measure_handoff(), None]}
    if "gpu" in kinds:
        links["gpu"] = list(fit_link(SIZES, measure_gpu_link(SIZES)))
    return {
        "format": FORMAT,
        "key": machine_key(),
        "devices": {kind: measure_device(kind) for kind in kinds},
        "links": links,
    }


def measure_device(kind: str) -> dict[str, Any]:
    """Measure a device of a kind; of a CPU, one thread."""
    return measure_gpu() if kind == "gpu" else add_cpu_scatter(measure_cpu())


def _kind(device: Any) -> str:
    name = str(getattr(device, "kind", device))
    return "gpu" if "gpu" in name else "cpu"


SIZES = (1 << 10, 1 << 20, 1 << 22)
"""Bytes of the messages by which a link is measured."""
SLOW = 0.05
"""Seconds of a transfer from which larger ones are timed once."""


def measure_links(probe: Probe, workers: int) -> dict[tuple[str, str], LinkSpeed]:
    """Return latency and bandwidth between each two workers, by name, "/worker:0"."""
    pairs = combinations(range(workers), 2)
    times = {pair: time_messages(probe, *pair) for pair in pairs}
    return symmetric_links(times, [f"/worker:{i}" for i in range(workers)])


def time_messages(probe: Probe, source: int, target: int, repeats: int = 7) -> list[float]:
    """Return the seconds of messages of `SIZES` from one worker to another.

    Over a slow link, fewer repeats of long messages are enough.
    """
    times: list[float] = []
    for size in SIZES:
        slow = bool(times) and times[-1] > SLOW
        times.append(probe(source, target, size, 1 if slow else repeats))
    return times


def symmetric_links(
    times: Mapping[tuple[int, int], Sequence[float]], names: Sequence[str]
) -> dict[tuple[str, str], LinkSpeed]:
    """Return links by the names of their ends, equal in both directions.

    Half of a round trip was measured.

    Args:
        times: Seconds of messages of `SIZES`, by indices of names.
    """
    found: dict[tuple[str, str], LinkSpeed] = {}
    for (a, b), seconds in times.items():
        one, other = names[a], names[b]
        found[one, other] = found[other, one] = fit_link(SIZES, seconds)
    return found


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> LinkSpeed:
    """Fit latency + size / bandwidth to measured times, with the least relative errors.

    A meaningless fit (noise: larger messages came sooner) is replaced by the largest size's rate.
    """
    x, t = np.asarray(sizes, float), np.maximum(np.asarray(seconds, float), 1e-9)
    columns = np.stack([1 / t, x / t], axis=1)
    (latency, slope), *_ = np.linalg.lstsq(columns, np.ones(len(x)), rcond=None)
    if slope <= 0:
        slope = t[-1] / max(1.0, x[-1])
    return float(min(max(latency, 0.0), t.min())), float(1 / slope)


# Profiles -------------------------------------------------------------------------------------


def profile(
    kinds: Iterable[str] = ("cpu",), *, refresh: bool = False, folder: Path | None = None
) -> Profile:
    """Return this machine's profile, kept from before, or measured now and kept.

    A file that is damaged, or of another machine or version, is measured anew; so is a replaced
    GPU. If nothing can be written, each process measures once, with a warning.

    Args:
        kinds: Device kinds that it must cover.
        refresh: Measure again in any case.
        folder: Default: $GRAPHFLOW_CACHE, else graphflow in $XDG_CACHE_HOME or ~/.cache.
    """
    path = profile_path(folder)
    known = None if refresh else read_profile(path)
    missing = sorted(kind for kind in set(kinds) if not _covers(known, kind))
    if known is not None and not missing:
        return known
    with show_progress("measuring how fast this machine is, which is kept"):
        fresh = measure_machine(missing)
    before = known or read_profile(path) or {"devices": {}, "links": {}}
    made = {
        **fresh,
        "devices": {**before["devices"], **fresh["devices"]},
        "links": {**before["links"], **fresh["links"]},
    }
    if "steps" in before and not refresh:
        made["steps"] = before["steps"]
    write_profile(path, made)
    return made


def _covers(known: Profile | None, kind: str) -> bool:
    """Return True if a kept profile tells of the devices of a kind that are here."""
    if known is None or kind not in known["devices"]:
        return False
    there = gpu_product() if kind == "gpu" else None
    return there is None or known["devices"][kind].get("product") == there


_LOCAL_LINKS = ("thread", "gpu")  # links between devices of a process


def machine_profile(devices: Iterable[str]) -> Profile:
    """Return the kept profile of the named devices; measure them if there is none."""
    known = profile({_kind(device) for device in devices})
    return {
        "format": known["format"],
        "key": known["key"],
        "devices": known["devices"],
        "links": {kind: known["links"][kind] for kind in _LOCAL_LINKS if kind in known["links"]},
    }


def save_links(links: Mapping[str, LinkSpeed], folder: Path | None = None) -> Profile:
    """Keep links of a kind ("process", "client", …) that were measured on this machine."""
    known = profile(folder=folder)
    text = {kind: [latency, bandwidth] for kind, (latency, bandwidth) in links.items()}
    made = {**known, "links": {**known["links"], **text}}
    write_profile(profile_path(folder), made)
    return made


def save_step_cost(kind: str, cost: StepCost, folder: Path | None = None) -> None:
    """Keep the cost of a step of a kind of session ("here", "gpu", "process") on this machine."""
    known = profile(folder=folder)
    if known.get("key") != machine_key():
        return
    steps = {**known.get("steps", {}), kind: list(cost)}
    write_profile(profile_path(folder), {**known, "steps": steps})


def step_cost_of(profile: Mapping[str, Any], kind: str) -> StepCost | None:
    """Return the overhead of a step in a kind of session, or None if it was not measured."""
    cost = profile.get("steps", {}).get(kind)
    return None if cost is None else (float(cost[0]), float(cost[1]))


def step_overhead(cost: StepCost, units: int) -> float:
    """Return the seconds of a step over so many workers (or devices) beyond nodes and transfers.

    Beyond two, each costs as much as the second.
    """
    one, two = cost
    return one + max(0, units - 1) * max(0.0, two - one)


def link_of(profile: Mapping[str, Any], kind: str) -> LinkSpeed:
    """Return a profile's link of a kind, else the default."""
    kept = profile.get("links", {}).get(kind)
    if kept is None:
        return DEFAULT_LINKS[kind]
    return float(kept[0]), float("inf") if kept[1] is None else float(kept[1])
