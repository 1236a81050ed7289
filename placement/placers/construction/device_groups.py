"""Islands: devices that are close to each other and far from the rest, such as those of one host.

A list scheduler sends one small tensor across a slow network as readily as another, and ends up
slower on two hosts than it would be on one. So placers also ask for the answer on an island alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from graphflow.placement.problems.problem import Ints, Problem

FAR = 3.0
"""Islands are parted where a typical tensor takes that many times as long as within them."""


def islands(problem: Problem) -> list[Ints]:
    """Devices in groups of at least two, each closer to its own than to the rest; [] where all are
    alike. The client belongs to none. Groups with the same costs and capacities appear once.
    """
    own = np.array([p for p in range(problem.devices) if p != problem.client], dtype=np.int64)
    if len(own) < 3:
        return []
    size = float(problem.bytes.mean()) if len(problem.bytes) else 0.0
    apart = ~np.eye(len(own), dtype=bool)
    took = (problem.latency + size / np.where(problem.bandwidth > 0, problem.bandwidth, np.inf))[
        np.ix_(own, own)
    ]
    seconds = np.maximum(took, took.T)
    near, far = float(seconds[apart].min()), float(seconds[apart].max())
    if far <= FAR * near:
        return []
    joined = apart & (seconds <= np.sqrt(near * far) if near > 0 else seconds < far)
    found, seen = [], set[bytes]()
    for group in _components(joined):
        members = own[group]
        if not 1 < len(members) < len(own):
            continue
        kind = np.sort(problem.compute[:, members], axis=1).tobytes()
        kind += np.sort(problem.capacity[members]).tobytes()
        if kind not in seen:
            seen.add(kind)
            found.append(members)
    return found


def _components(joined: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> Iterator[list[int]]:
    left = set(range(len(joined)))
    while left:
        start = min(left)
        group, edge = {start}, [start]
        while edge:
            reached = set(np.flatnonzero(joined[edge.pop()]).tolist()) - group
            group |= reached
            edge += sorted(reached)
        left -= group
        yield sorted(group)


def on_island(problem: Problem, members: Ints) -> Problem:
    """The problem with every node on the island that can be there, with its whole group."""
    inside = np.zeros(problem.devices, dtype=bool)
    inside[members] = True
    can = np.any(problem.allowed & inside, axis=1).reshape(-1, 1)
    compute = np.where(can & ~inside, np.inf, problem.compute)
    return replace(problem, compute=compute)
