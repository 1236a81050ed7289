"""Facts about this host that plans need before anything is measured: memory, cores, GPUs."""

from __future__ import annotations

import os
from pathlib import Path

from graphflow.errors import DeviceError

MEMORY_SHARE = 0.8
"""Share of a host's memory that its devices may plan with."""


def device_memory(devices: int = 1) -> int:
    """Bytes a CPU device may plan with when nobody says: an equal part of `MEMORY_SHARE` of this
    host's memory.
    """
    return max(1, int(host_memory() * MEMORY_SHARE / devices))


def host_memory() -> int:
    """Bytes of memory of this host, or of the container around this process where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no container, or the word "max"
        return total
    return min(total, limit)


def cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def gpu_memory(name: str) -> int:
    """Bytes of memory of one of this host's GPUs, "gpu:0".

    Raises:
        DeviceError: CuPy is not installed, or finds no such GPU.
    """
    try:
        import cupy

        count = int(cupy.cuda.runtime.getDeviceCount())
    except Exception as error:  # a missing driver raises CuPy's own types
        raise DeviceError(
            f"{name!r} cannot be used: CuPy finds no GPU here ({type(error).__name__}: {error}); "
            "install graphflow[gpu] on a machine with a GPU, or use 'cpu:0'"
        ) from None
    index = int(name.partition(":")[2])
    if index >= count:
        raise DeviceError(f"{name!r}: this host has {count} GPU(s), numbered from gpu:0")
    with cupy.cuda.Device(index):
        return int(cupy.cuda.runtime.memGetInfo()[1])
