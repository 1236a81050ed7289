"""Calibration: how fast this machine is, measured with the ops' own kernels and kept on disk.

`profile()` gives the cost model what it knows of a machine as plain data, so that a worker can send
its own. Transfers between processes are measured by callables that the caller gives.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from graphflow._version import __version__
from graphflow.base.progress import show_progress
from graphflow.ops.kernels.jit.object_cache import cache_folder
from graphflow.placement.calibration.held_out import add_cpu_scatter, is_scatter
from graphflow.placement.calibration.measure import measure_cpu, measure_handoff
from graphflow.placement.calibration.measure_gpu import gpu_product, measure_gpu, measure_gpu_link
from graphflow.placement.clusters.host_facts import cores

_DRAFT = ".part"  # suffix of a file that is being written
_STALE_SECONDS = 3600.0  # since its last change: its writer was killed
FORMAT = 3
Profile = dict[str, Any]
"""{"format", "key", "devices": {kind: speeds}, "links": {kind: [seconds, bytes/s or None]},
"steps": {"here" or "process": [seconds on one, seconds on two]}}; steps may be missing.

The speeds of a device kind:
    launch: seconds to start an op (of a GPU: a kernel of a graph that is replayed);
    handoff: seconds to hand work to another thread;
    cache_bytes: beyond which neighbours share the way to memory;
    traffic: [[bytes, seconds], …] of passing over arrays of growing size, one thread;
    matmul: {"float32", "float64", "other": [[flops, seconds beyond the launch], …]}, one thread;
        "float16" as well where 16 bits are multiplied as such;
    ops: {name: {"launch", "rate", "itemsize"}}, flop/s (bytes/s for ops without flops) in cache;
    classes: the same for classes of ops, medians;
    contention: {"threads": [1, 2, …], "compute": […], "memory": […]}: how many times longer each
        of so many busy threads takes than one alone.
    scatter, of ops too: how far they are off, see `held_out`; may be missing, as of a GPU;
    of a GPU also product: what they are of; call: seconds to start an op from Python.
A link's bandwidth of None is infinite: a reference is passed.
"""
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

_unsaved: dict[Path, Profile] = {}  # profiles that could not be written

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


# Keeping --------------------------------------------------------------------------------------


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
    known = None if refresh else _load(path)
    missing = sorted(kind for kind in set(kinds) if not _covers(known, kind))
    if known is not None and not missing:
        return known
    with show_progress("measuring how fast this machine is, which is kept"):
        fresh = measure_machine(missing)
    before = known or _load(path) or {"devices": {}, "links": {}}
    made = {
        **fresh,
        "devices": {**before["devices"], **fresh["devices"]},
        "links": {**before["links"], **fresh["links"]},
    }
    if "steps" in before and not refresh:
        made["steps"] = before["steps"]
    _save(path, made)
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
    _save(profile_path(folder), made)
    return made


def save_step_cost(kind: str, cost: StepCost, folder: Path | None = None) -> None:
    """Keep the cost of a step of a kind of session ("here", "process") on this machine."""
    known = profile(folder=folder)
    if known.get("key") != machine_key():
        return
    steps = {**known.get("steps", {}), kind: list(cost)}
    _save(profile_path(folder), {**known, "steps": steps})


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


def profile_path(folder: Path | None = None) -> Path:
    """Return the path of this machine's profile."""
    key = json.dumps(machine_key(), sort_keys=True)
    name = hashlib.sha256(key.encode()).hexdigest()[:12]
    return (folder or cache_folder()) / f"machine-{name}.json"


@cache
def _processor() -> tuple[str, str]:
    """Return model and features of the processor."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.M)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.M)
    return (
        model[1] if model else platform.machine(),
        hashlib.sha256((flags[1] if flags else "").encode()).hexdigest()[:12],
    )


@cache
def _blas() -> str:
    """Return name and version of the BLAS library."""
    built: Any = np.show_config(mode="dicts")
    found = built.get("Build Dependencies", {}).get("blas", {})
    return f"{found.get('name', '?')} {found.get('version', '?')}"


def machine_key() -> dict[str, Any]:
    """Return the key of a profile: another machine, or another build, has another one."""
    model, features = _processor()
    return {
        "processor": model,
        "features": features,
        "cores": cores(),
        "numpy": np.__version__,
        "blas": _blas(),
        "graphflow": __version__,
    }


def _load(path: Path) -> Profile | None:
    """Return the kept profile of this machine, or None."""
    if path in _unsaved:
        return _unsaved[path]
    try:
        known = json.loads(path.read_text())
        return known if is_profile(known) and known.get("key") == machine_key() else None
    except (OSError, ValueError, RecursionError):
        return None


def _save(path: Path, made: Profile) -> None:
    """Write a profile. If that fails, this process keeps it in memory, and warns once."""
    why = write_json(path, made, indent=1)
    if why is None:
        _unsaved.pop(path, None)
        return
    if path not in _unsaved:
        warnings.warn(
            f"what was measured of this machine cannot be kept in {path.parent} ({why.strerror}): "
            "each process measures it anew, some seconds long; set GRAPHFLOW_CACHE to a folder "
            "that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
    _unsaved[path] = made


def is_profile(known: Any) -> bool:
    """Return True if what a file or a worker holds is a profile of a machine, with sane numbers."""
    if not isinstance(known, dict) or known.get("format") != FORMAT:
        return False
    devices, links = known.get("devices"), known.get("links")
    if not isinstance(devices, dict):
        return False
    needed = ("launch", "handoff", "cache_bytes")
    steps = known.get("steps", {})
    return (
        bool(devices)
        and isinstance(steps, dict)
        and all(
            isinstance(cost, list) and len(cost) == 2 and all(map(_is_positive, cost))
            for cost in steps.values()
        )
        and isinstance(links, dict)
        and all(isinstance(link, list) and len(link) == 2 for link in links.values())
        and all(
            isinstance(speeds, dict)
            and all(_is_positive(speeds.get(name)) for name in needed)
            and _is_positive(speeds.get("call", 1))
            and all(isinstance(speeds.get(part), dict) for part in _SPEED_TABLES)
            and all(speeds["matmul"].get(dtype) for dtype in ("float32", "float64", "other"))
            and bool(speeds.get("traffic"))
            and is_scatter(speeds)
            for speeds in devices.values()
        )
    )


_SPEED_TABLES = ("matmul", "ops", "classes", "contention")


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < float("inf")


def write_json(path: Path, data: Mapping[str, Any], indent: int | None = None) -> OSError | None:
    """Write plain data as JSON, completely or not at all.

    Return the error that prevented it: a cache that cannot be written is no error of the caller.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale_drafts(path)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=_DRAFT)
    except OSError as error:
        return error
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(data, file, indent=indent)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        return error
    except BaseException:  # Ctrl-C
        Path(name).unlink(missing_ok=True)
        raise
    return None


def _remove_stale_drafts(path: Path) -> None:
    """Remove the drafts of processes that were killed while they wrote a file."""
    for draft in path.parent.glob(f".{path.name}.*{_DRAFT}"):
        with suppress(OSError):  # another process removes them, too
            if time.time() - draft.stat().st_mtime > _STALE_SECONDS:
                draft.unlink()
