"""A GPU's memory: plain allocations for buffers, and pools for ops, constants and CUDA graphs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import DeviceOutOfMemory
from graphflow.ops.kernels.jit.array_address import ALIGNMENT

_lock = threading.Lock()
_all_pools: weakref.WeakSet[GpuMemoryPools] = weakref.WeakSet()
"""All pools of this process. If one lacks memory, the pools of all on its GPU are trimmed."""


@dataclass(frozen=True)
class GpuMemory:
    """Bytes of a GPU's memory, and of the host's memory for it.

    Attributes:
        plain: live plain allocations: arenas, variables, buffers of feeds.
        pool: the most that ops have allocated for themselves.
        persistent: constants, tensors on their way, and workspaces of libraries.
        pinned: the host's pinned memory for feeds.
    """

    plain: int
    pool: int
    persistent: int
    pinned: int


class GpuMemoryPools:
    """The memory that one backend has on the current GPU.

    Attributes:
        op: pool for memory that ops allocate for themselves.
        persistent: pool for constants, tensors on their way, and workspaces of libraries.
        graph: pool for captured work, which writes to the same addresses in each replay.
        allocations: number of allocations by ops so far.
        pinned: bytes of the host's pinned memory for feeds.
    """

    def __init__(self, cupy: Any, index: int) -> None:
        self.index = index
        self.op = cupy.cuda.MemoryPool()
        self.persistent = cupy.cuda.MemoryPool()
        self.graph = cupy.cuda.MemoryPool(self._allocate_plain)
        self.allocations = 0
        self.pinned = 0
        self._cupy = cupy
        # CuPy's own class does not support weak references, which report when memory is freed.
        self._plain_memory_class = type("Plain", (cupy.cuda.Memory,), {})
        self._plain_bytes = 0
        with _lock:
            _all_pools.add(self)

    def allocate_buffer(self, nbytes: int) -> Any:
        """Return a pointer to a plain allocation of at least `nbytes`."""
        size = max(nbytes, ALIGNMENT)
        memory = self._allocate_or_trim(size, self._plain_memory_class)
        self._plain_bytes += size
        weakref.finalize(memory, self._on_freed, size)
        return self._cupy.cuda.MemoryPointer(memory, 0)

    def _on_freed(self, size: int) -> None:
        self._plain_bytes -= size

    def allocate(self, nbytes: int) -> Any:
        """Allocate memory for an op."""
        self.allocations += 1
        return self._allocate_or_trim(nbytes, self.op.malloc)

    def allocate_for_graphs(self, nbytes: int) -> Any:
        """Allocate memory for an op whose work is captured now or later."""
        self.allocations += 1
        return self.graph.malloc(nbytes)

    def _allocate_plain(self, nbytes: int) -> Any:
        """Allocate from the driver, for the pool of captured work.

        If memory is short, CuPy's own allocator would free blocks of this pool. A graph may still
        write to them.
        """
        cuda = self._cupy.cuda
        return self._allocate_or_trim(nbytes, lambda size: cuda.MemoryPointer(cuda.Memory(size), 0))

    def _allocate_or_trim(self, size: int, take: Callable[[int], Any]) -> Any:
        """Allocate memory; if it is short, trim this process's pools on the GPU and try again.

        Raises:
            DeviceOutOfMemory: memory is short even then.
        """
        cuda = self._cupy.cuda
        errors = (cuda.runtime.CUDARuntimeError, cuda.memory.OutOfMemoryError)
        try:
            return take(size)
        except errors as error:
            if not _is_out_of_memory(error):
                raise
        with _lock:
            here = [each for each in _all_pools if each.index == self.index]
        pools = [pool for each in here for pool in (each.op, each.persistent)]
        for pool in (*pools, self._cupy.get_default_memory_pool()):
            pool.free_all_blocks()
        try:
            return take(size)
        except errors as error:
            free, total = cuda.runtime.memGetInfo()
            raise DeviceOutOfMemory(
                f"gpu:{self.index} has {free / 1e9:.3g} of {total / 1e9:.3g} GB free, and "
                f"{size / 1e9:.3g} GB ({size:,} bytes) are needed ({error}); feed smaller batches, "
                "checkpoint layers (gf.checkpoint), or use more devices"
            ) from None

    def usage(self) -> GpuMemory:
        """Return the bytes that are in use, by purpose."""
        op, persistent, graph = (
            int(pool.total_bytes()) for pool in (self.op, self.persistent, self.graph)
        )
        return GpuMemory(self._plain_bytes, op + graph, persistent, self.pinned)


def _is_out_of_memory(error: Exception) -> bool:
    """Return True if memory is short, not if, for example, a capture forbids to allocate."""
    return isinstance(error, MemoryError) or "cudaErrorMemoryAllocation" in str(error)
