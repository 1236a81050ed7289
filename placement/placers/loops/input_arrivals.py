"""The arrival of a node's inputs on each device, for loops that are compiled."""

from __future__ import annotations

from typing import Any


def input_arrivals(
    v: int, d: int, latency: Any, bandwidth: Any, start: Any, node: Any, size: Any, device: Any,
    finish: Any, ready: Any,
) -> None:  # fmt: skip
    """ready[p]: when the inputs of v would all be on device p."""
    for p in range(d):
        ready[p] = 0.0
    for e in range(start[v], start[v + 1]):
        done, bytes_, row = finish[node[e]], size[e], device[node[e]] * d
        wait, speed = latency[row : row + d], bandwidth[row : row + d]
        for p in range(d):  # without branches, for the vector unit
            arrival = done + wait[p] + bytes_ / speed[p]
            ready[p] = arrival if arrival > ready[p] else ready[p]
