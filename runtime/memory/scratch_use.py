"""Scratch memory of a program's kernels: packed panels, columns, tiles, sums of each thread.

Native calls run one at a time and share one buffer of their device (`CpuBackend.shared_scratch`):
recorded kernels, and the shares of products that several threads compute. Kernels that run as
Python, in bodies of loops or since they read elements, have slots that their thread keeps
(`ops/kernels/jit/scratch_memory.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from graphflow.ir.device_name import DeviceName
from graphflow.ir.op import Node
from graphflow.ops.kernels.fusion.region_kernels import THREADING_NANOSECONDS, is_jit_enabled
from graphflow.ops.kernels.jit.array_address import align_up
from graphflow.ops.kernels.jit.compiler import KernelTask, TaskShare
from graphflow.ops.kernels.jit.scratch_memory import LEAST_SLOT_BYTES
from graphflow.ops.kernels.jit.thread_team import MOST_SHARES
from graphflow.runtime.memory.memory_layout import MemoryLayout
from graphflow.runtime.memory.recorded_kernels import KernelScratch, RecordableKernel
from graphflow.runtime.partitioning.partition import Partition


def shared_bytes(
    part: Partition, layout: MemoryLayout, bindings: Mapping[str, int], threads: int
) -> int:
    """Return the bytes of the buffer that a program's native calls share.

    Args:
        threads: of its device.
    """
    if not _has_native_kernels(part):
        return 0
    recorded = (s.recorded for _, s in _kernel_scratch(part, layout, bindings, threads))
    tasks = {id(t): t for t in (*layout.tasks.values(), *(f.task for f in layout.regions.values()))}
    shares = (_bytes_of_shares(task, threads) for task in tasks.values() if task.scratch)
    return max((0, *recorded, *shares))


def kept_bytes(
    part: Partition, layout: MemoryLayout, bindings: Mapping[str, int], threads: int
) -> int:
    """Return the bytes of the slots that a program's thread keeps."""
    slots: dict[str, int] = {}
    if _has_native_kernels(part):
        _collect_slots(part, layout, bindings, threads, slots, is_body=False)
    return sum(max(nbytes, LEAST_SLOT_BYTES) for nbytes in slots.values())


def shares_of(task: KernelTask, threads: int) -> Sequence[TaskShare]:
    """Return the shares of a task that threads run at the same time."""
    if task.cut is None or not task.is_divisible:
        return [TaskShare(0, task.rows)]
    return task.cut(min(threads, MOST_SHARES, int(task.nanoseconds / task.share)))


def _bytes_of_shares(task: KernelTask, threads: int) -> int:
    """Return the scratch memory of all shares but the first, which has its place in the arena."""
    count = len(shares_of(task, threads)) if threads > 1 else 1
    if len(task.blocks) >= threads:  # an epilogue may follow block by block, on all threads
        count = max(count, min(threads, MOST_SHARES))
    return align_up(task.scratch) * (count - 1)


def _has_native_kernels(part: Partition) -> bool:
    return is_jit_enabled() and DeviceName.parse(part.device).kind == "cpu"


def _kernel_scratch(
    part: Partition, layout: MemoryLayout, bindings: Mapping[str, int], threads: int
) -> Iterator[tuple[Node, KernelScratch]]:
    """Yield each node whose op may be recorded, and its scratch memory."""
    for node in part.graph.nodes:
        if not node.op.records or node in layout.regions or node in layout.deferred:
            continue
        task = layout.tasks.get(node)
        is_long = task is not None and task.nanoseconds > THREADING_NANOSECONDS and threads > 1
        if task is not None and (task.cut is not None or not is_long):
            continue  # one native call
        kernel = RecordableKernel(node, layout, bindings, node in layout.kept_weights)
        if kernel.into is not None:
            yield node, kernel.count_scratch(threads)


def _collect_slots(
    part: Partition, layout: MemoryLayout, bindings: Mapping[str, int], threads: int,
    slots: dict[str, int], is_body: bool,
) -> None:  # fmt: skip
    """Add the slots of kernels that run as Python; a slot is as large as its largest use."""
    for node, scratch in _kernel_scratch(part, layout, bindings, threads):
        # A kernel that keeps layouts of weights also runs as Python, to write them.
        if is_body or not scratch.recorded or node in layout.kept_weights:
            for slot, nbytes in scratch.slots.items():
                slots[slot] = max(nbytes, slots.get(slot, 0))
    for inner in layout.body_layouts.values():
        for body, body_layout in inner.parts:
            _collect_slots(body, body_layout, bindings, threads, slots, is_body=True)
