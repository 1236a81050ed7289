"""The loop that orders nodes by rank, producers first; run through `loops`, see there."""

from __future__ import annotations

from typing import Any

from graphflow.ops.kernels.compiled_loops.heaps import heap_pop, heap_push

LOOPS = ("ready_order",)


def ready_order(
    n: int, key: Any, start: Any, node: Any, missing: Any, heap_key: Any, heap_item: Any,
    order: Any,
) -> None:  # fmt: skip
    """Write ready nodes in order of least `key` (floats), then lowest index.

    Args:
        missing: unwritten inputs of each node; counted down.
        heap_key, heap_item: memory for a heap of n nodes.
    """
    size = 0
    for v in range(n):
        if missing[v] == 0:
            heap_push(heap_key, heap_item, 0, size, key[v], v)
            size += 1
    for i in range(n):
        v = heap_pop(heap_key, heap_item, 0, size)
        size -= 1
        order[i] = v
        for e in range(start[v], start[v + 1]):
            to = node[e]
            missing[to] -= 1
            if missing[to] == 0:
                heap_push(heap_key, heap_item, 0, size, key[to], to)
                size += 1
