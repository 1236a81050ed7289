"""Facts about this host that plans need before any measurement: memory, cores, GPUs."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from graphflow.base.environment import thread_limit
from graphflow.errors import DeviceError
from graphflow.ops.kernels.cuda.cupy_module import import_cupy

MEMORY_SHARE = 0.8
"""The share of a host's memory that plans may use."""


def device_memory(devices: int = 1) -> int:
    """Return the default memory of a CPU device in bytes.

    It is an equal part of `MEMORY_SHARE` of this host's memory.
    """
    return max(1, int(host_memory() * MEMORY_SHARE / devices))


def host_memory() -> int:
    """Return the bytes of memory of this host, or of the container around this process."""
    if not hasattr(os, "sysconf"):
        return _windows_memory()
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):  # no container, or the word "max"
        return total
    return min(total, limit)


def _windows_memory() -> int:
    """Return the bytes of memory of a host with Windows, where graphs are built and planned."""
    kilobytes = ctypes.c_ulonglong()
    ctypes.windll.kernel32.GetPhysicallyInstalledSystemMemory(ctypes.byref(kilobytes))  # type: ignore[attr-defined]
    return int(kilobytes.value) << 10


def free_memory() -> int:
    """Return the bytes of memory that are free on this host, or in the container around this
    process."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        (found,) = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
        free = int(found) << 10
    except (OSError, ValueError):
        free = host_memory() // 2
    try:
        folder = Path("/sys/fs/cgroup")
        limit = int((folder / "memory.max").read_text())
        used = int((folder / "memory.current").read_text())
        # Files that the kernel keeps in memory count as used, and are dropped when memory is short.
        stat = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        cached = sum(int(each[1]) for each in stat if each[0] in ("active_file", "inactive_file"))
    except (OSError, ValueError, IndexError):
        return free
    return max(0, min(free, limit - used + cached))


def cache_bytes(level: int) -> int | None:
    """Return the bytes of a core's cache of a level from 2, which other cores may share.

    Return None if there is none, or the system does not tell.
    """
    try:
        path = Path(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size")
        text = path.read_text().strip()
        return int(text[:-1]) * {"K": 1 << 10, "M": 1 << 20}[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return None


def cores() -> int:
    """Return how many processor cores this process may use.

    They are those of its affinity, or fewer if a container has a share of their time.
    """
    return max(1, min(len(_allowed_cores()), _quota(_CPU_LIMIT)))


def default_threads(devices: int = 1) -> int:
    """Return the threads of a CPU device unless it is given some.

    They are its share of the cores, but no more than `OMP_NUM_THREADS` allows. People who run
    several processes side by side set that.
    """
    share = max(1, cores() // devices)
    return min(share, thread_limit() or share)


def _allowed_cores() -> Collection[int]:
    """Return the cores that this process may run on, also while it is pinned to some."""
    if _unpinned_cores:
        return _unpinned_cores
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return range(os.cpu_count() or 1)


_unpinned_cores: set[int] = set()
"""The cores that this process could run on before it was pinned."""


def numa_nodes(folder: Path | None = None) -> tuple[tuple[int, ...], ...]:
    """Return the cores that this process may run on by NUMA node, in ascending order.

    Memory of another node is slower to reach. It is one node with all cores where the system
    names none, or where some core belongs to none.

    Args:
        folder: Where Linux describes the nodes. Default: `/sys/devices/system/node`.
    """
    allowed = set(_allowed_cores())
    nodes = []
    for file in (folder or _NUMA_NODES).glob("node[0-9]*/cpulist"):
        try:
            cores_of_node = allowed.intersection(_read_core_list(file.read_text()))
        except (OSError, ValueError):
            continue
        if cores_of_node:
            nodes.append(tuple(sorted(cores_of_node)))
    if set().union(*nodes) != allowed:
        return (tuple(sorted(allowed)),)
    return tuple(sorted(nodes))


_NUMA_NODES = Path("/sys/devices/system/node")


def _read_core_list(text: str) -> Iterator[int]:
    """Yield the numbers of a list as Linux writes it, "0-3,8"."""
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


def divide_cores(processes: int, threads: int) -> list[list[int]]:
    """Return the cores that each of some processes is to be pinned to; [] for none.

    Processes are pinned if their threads are as many as there are cores. Then, with no core to
    spare, schedulers put two busy processes on one core now and then, and leave them there for
    milliseconds. A process gets cores of one NUMA node if they suffice.
    """
    free = [core for node in numa_nodes() for core in node]
    if processes < 2 or not processes * threads == len(free) == cores():
        return [[] for _ in range(processes)]
    return [free[i * threads : (i + 1) * threads] for i in range(processes)]


def pin_to_cores(some: Collection[int]) -> None:
    """Pin this thread, and those that it starts from now on, to these cores.

    `cores` still counts the others. Nothing happens on systems without affinity.
    """
    if some and hasattr(os, "sched_setaffinity"):
        _unpinned_cores.update(_allowed_cores())
        with contextlib.suppress(OSError):  # a core has gone offline
            os.sched_setaffinity(0, some)


@contextlib.contextmanager
def on_all_cores() -> Iterator[None]:
    """Let this thread, and those that it starts, run on all of the process's cores meanwhile."""
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
    """Return the cores' worth of time that a container has, rounded up.

    Its file holds the time and the period in which it may be used, or "max" for no limit.
    """
    try:
        time, period = map(int, file.read_text().split())
        return -(-time // period)
    except (OSError, ValueError, ZeroDivisionError):
        return 1 << 30


def gpu_memory(name: str) -> int:
    """Return the bytes of memory of one of this host's GPUs, "gpu:0", that no process has taken.

    They are all of its memory if NVIDIA's management library cannot be asked.

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
        there = ", ".join(f"gpu:{i}" for i in range(count)) or "no GPU"
        raise DeviceError(f"{name!r} is not here: CuPy finds {there}; 'cpu:0' is always there")
    total = int(runtime.getDeviceProperties(index)["totalGlobalMem"])
    # Not `memGetInfo`, which creates a context of some hundred MB there: planning needs none.
    free = None if (nvml := _load_nvml()) is None else _free_bytes(nvml, runtime, index)
    return total if free is None else min(total, free)


class _NvmlMemory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)
    )  # fmt: skip


@cache
def _load_nvml() -> Any:
    """Return NVIDIA's management library, initialised; None if it is missing or fails."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
        return library if library.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):
        return None


def _free_bytes(nvml: Any, runtime: Any, index: int) -> int | None:
    """Return the free memory of a CUDA device, by its PCI address; None if NVML does not tell.

    NVML has numbers of its own, which `CUDA_VISIBLE_DEVICES` does not change.
    """
    handle, memory = ctypes.c_void_p(), _NvmlMemory()
    address = ctypes.c_char_p(runtime.deviceGetPCIBusId(index).encode())
    if nvml.nvmlDeviceGetHandleByPciBusId_v2(address, ctypes.byref(handle)) != 0:
        return None
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    return max(1, int(memory.free))
