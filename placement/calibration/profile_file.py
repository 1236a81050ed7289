"""The file of a machine's profile: its form, its name, reading and writing.

Each machine, and each build of the libraries that compute, has a file of its own in the cache
folder. `calibrate` measures the speeds that stand in it.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from graphflow._version import __version__
from graphflow.base.atomic_write import write_atomically
from graphflow.ops.kernels.jit.object_cache import cache_folder
from graphflow.placement.calibration.held_out import is_scatter
from graphflow.placement.clusters.machine.host_facts import cores, numa_nodes

FORMAT = 4
Profile = dict[str, Any]
"""{"format", "key", "devices": {kind: speeds}, "links": {kind: [seconds, bytes/s or None]},
"steps": {"here" or "process": [seconds on one, seconds on two]}}; steps may be missing.

The speeds of a device kind:
    launch: seconds to start an op (of a GPU: a kernel of a graph that is replayed);
    handoff: seconds that a kernel which threads share takes beside its work;
    cache_bytes: beyond which neighbours share the way to memory;
    traffic: [[bytes, seconds], …] of passing over arrays of growing size, one thread;
    random_rows: how many times longer rows anywhere in a large array take than such a pass;
    matmul: {"float32", "float64", "other": [[flops, seconds beyond the launch], …]}, one thread;
        "float16" as well where 16 bits are multiplied as such, "bfloat16" where AMX does it;
    ops: {name: {"launch", "rate", "itemsize"}}, flop/s (bytes/s for ops without flops) in cache;
    classes: the same for classes of ops, medians;
    contention: {"threads": [1, 2, …], "compute": […], "memory": […]}: how many times longer each
        of so many busy threads takes than one alone.
    scatter, of ops too: how far they are off, see `held_out`; may be missing, as of a GPU;
    of a GPU also product: what they are of; call: seconds to start an op from Python.
A link's bandwidth of None is infinite: a reference is passed.
"""

_unsaved: dict[Path, Profile] = {}  # profiles that could not be written


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
        "numa": [len(node) for node in numa_nodes()],
        "numpy": np.__version__,
        "blas": _blas(),
        "graphflow": __version__,
    }


def read_profile(path: Path) -> Profile | None:
    """Return the kept profile of this machine, or None."""
    if path in _unsaved:
        return _unsaved[path]
    try:
        known = json.loads(path.read_text())
        return known if is_profile(known) and known.get("key") == machine_key() else None
    except (OSError, ValueError, RecursionError):
        return None


def write_profile(path: Path, made: Profile) -> None:
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
        write_atomically(path, json.dumps(data, indent=indent))
    except OSError as error:
        return error
    return None
