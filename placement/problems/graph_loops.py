"""Loops over the edges of large problems, run as machine code (`native`)."""

from __future__ import annotations

from typing import Any


def topological(n: int, start: Any, node: Any, missing: Any, heap: Any, order: Any) -> int:
    """Nodes, producers first, lowest index first among equals; how many there are (fewer than n
    where edges form a cycle).

    `missing` counts each node's incoming edges; `heap` is room for n.
    """
    size, count = 0, 0
    for v in range(n):
        if missing[v] == 0:
            heap[size] = v  # by rising index: a heap already
            size += 1
    while size > 0:
        v = heap[0]
        size -= 1
        last = heap[size]
        at = 0
        while 2 * at + 1 < size:  # sift down
            child = 2 * at + 1
            if child + 1 < size and heap[child + 1] < heap[child]:
                child += 1
            if heap[child] >= last:
                break
            heap[at] = heap[child]
            at = child
        heap[at] = last
        order[count] = v
        count += 1
        for e in range(start[v], start[v + 1]):
            u = node[e]
            missing[u] -= 1
            if missing[u] == 0:
                at = size
                size += 1
                while at > 0 and heap[(at - 1) // 2] > u:  # sift up
                    heap[at] = heap[(at - 1) // 2]
                    at = (at - 1) // 2
                heap[at] = u
    return count
