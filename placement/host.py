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
    """Processor cores that this process may use: those it may run on, or fewer where a container
    has a share of their time."""
    if hasattr(os, "sched_getaffinity"):
        here = len(os.sched_getaffinity(0))
    else:
        here = os.cpu_count() or 1
    return max(1, min(here, _quota(_CPU_LIMIT)))


_CPU_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def _quota(file: Path) -> int:
    """Cores' worth of time that a container has, rounded up: its file holds two numbers, the time
    and the period in which it may be used, or "max" instead of the first."""
    try:
        time, period = map(int, file.read_text().split())
        return -(-time // period)
    except (OSError, ValueError, ZeroDivisionError):
        return 1 << 30


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
