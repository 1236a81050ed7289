"""Why nothing fits: what no placement could hold, with nodes and bytes.

Placers only find that their own answers do not fit. These bounds hold for every answer.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.problems.problem import Problem


@dataclass(frozen=True)
class Shortage:
    """Nodes that need more bytes than there is room for.

    Args:
        nodes: Those that share the room, the largest first.
        device: The device with most room that may hold them all. None: all devices together.
    """

    nodes: tuple[int, ...]
    need: float
    room: float
    device: int | None

    @property
    def missing(self) -> float:
        """Bytes that are missing."""
        return self.need - self.room


def shortages(problem: Problem) -> list[Shortage]:
    """List what fits nowhere, the largest shortage first; [] if only the search has failed."""
    found = [*_alone(problem), *_total_shortage(problem)]
    return sorted(found, key=lambda each: (each.device is None, -each.missing))


def _alone(problem: Problem) -> Iterator[Shortage]:
    """Yield nodes, with their group's persistent memory, that exceed every device they may use."""
    n = problem.nodes
    output = np.zeros(n) if problem.output_memory is None else problem.output_memory
    label = np.where(problem.groups >= 0, problem.groups + n, np.arange(n))
    _, unit = np.unique(label, return_inverse=True)
    count = int(unit.max(initial=-1)) + 1
    stays = np.bincount(unit, weights=problem.memory, minlength=count)
    peak = np.zeros(count)
    np.maximum.at(peak, unit, output)
    room = np.full(count, -np.inf)
    best = np.where(problem.allowed, problem.capacity, -np.inf)
    np.maximum.at(room, unit, best.max(axis=1, initial=-np.inf))
    for u in np.flatnonzero(stays + peak > room).tolist():
        members = np.flatnonzero(unit == u)
        order = np.argsort(-(problem.memory + output)[members], kind="stable")
        nodes = tuple(int(v) for v in members[order])
        at = int(np.argmax(best[nodes[0]]))
        yield Shortage(nodes, float(stays[u] + peak[u]), float(room[u]), at)


def _total_shortage(problem: Problem) -> Iterator[Shortage]:
    """Yield the shortage of all persistent memory against all capacity, if there is one."""
    usable = problem.allowed.any(axis=0)
    room, need = float(problem.capacity[usable].sum()), float(problem.memory.sum())
    if need > room:
        order = np.argsort(-problem.memory, kind="stable")
        nodes = tuple(int(v) for v in order if problem.memory[v] > 0)
        yield Shortage(nodes, need, room, None)
