"""Facts about this host that plans need before anything is measured: memory, cores, GPUs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from pathlib import Path

from graphflow.errors import DeviceError
from graphflow.ops.kernels.cuda.cupy_module import import_cupy

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


def cache_bytes(level: int) -> int | None:
    """Bytes of a core's cache of a level from 2, which other cores may share; None if there is
    none, or the system does not say."""
    try:
        path = Path(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size")
        text = path.read_text().strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return None


def cores() -> int:
    """Processor cores that this process may use: those it may run on, or fewer where a container
    has a share of their time."""
    return max(1, min(len(_allowed_cores()), _quota(_CPU_LIMIT)))


def _allowed_cores() -> Collection[int]:
    """The cores that this process may run on, also while it keeps to some of them."""
    if _unpinned_cores:
        return _unpinned_cores
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


_unpinned_cores: set[int] = set()
"""Where this process could run before it kept to some cores."""


def divide_cores(processes: int, threads: int) -> list[list[int]]:
    """The cores that each of some processes keeps to: where their threads are as many as there are
    cores, its own; else none, for the scheduler finds free ones.

    With a core for each thread and none to spare, schedulers put two busy processes on one core
    every now and then, and leave them there for milliseconds.
    """
    free = sorted(_allowed_cores())
    if processes < 2 or not processes * threads == len(free) == cores():
        return [[] for _ in range(processes)]
    return [free[i * threads : (i + 1) * threads] for i in range(processes)]


def pin_to_cores(some: Collection[int]) -> None:
    """Let this thread, and those that it begins from now on, run on these cores only; `cores` goes
    on counting the others. Nothing happens where the system knows no such thing."""
    if some and hasattr(os, "sched_setaffinity"):
        _unpinned_cores.update(_allowed_cores())
        with contextlib.suppress(OSError):  # a core is gone meanwhile
            os.sched_setaffinity(0, some)


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """This thread, and those that it begins, may run on all of the process's cores meanwhile."""
    if not _unpinned_cores:
        yield
        return
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _unpinned_cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


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
        runtime = import_cupy().cuda.runtime
        count = int(runtime.getDeviceCount())
    except Exception as error:  # a missing driver raises CuPy's own types
        raise DeviceError(
            f"{name!r} cannot be used: CuPy finds no GPU here ({type(error).__name__}: {error}); "
            "install graphflow[gpu] on a machine with a GPU, or use 'cpu:0'"
        ) from None
    index = int(name.partition(":")[2])
    if index >= count:
        raise DeviceError(f"{name!r}: this host has {count} GPU(s), numbered from gpu:0")
    # Not `memGetInfo`, which begins a context there, of some hundred MB: who plans needs none.
    return int(runtime.getDeviceProperties(index)["totalGlobalMem"])
