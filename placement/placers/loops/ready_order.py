"""The loop that orders nodes by rank, producers first; run through `loops`, see there."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

LOOPS = ("ready_order",)


def ready_order(n: int, key: Any, start: Any, node: Any, missing: Any, order: Any) -> None:
    """Ready nodes in order of least `key` (floats), then lowest index; `missing` counts inputs."""
    ready = [(0.0, 0) for _ in range(0)]
    for v in range(n):
        if missing[v] == 0:
            heappush(ready, (key[v], v))
    for i in range(n):
        v = heappop(ready)[1]
        order[i] = v
        for e in range(start[v], start[v + 1]):
            to = node[e]
            missing[to] -= 1
            if missing[to] == 0:
                heappush(ready, (key[to], to))
