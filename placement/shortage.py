"""Why nothing fits: what no placement could hold, told with nodes and bytes.

Placers only find that their answers do not fit; these bounds hold for every answer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from graphflow.placement.problem import Problem


@dataclass(frozen=True)
class Shortage:
    """Nodes that need more bytes than there is room for.

    Args:
        nodes: that must share the room; biggest first.
        device: the roomiest one that may hold them all; None: all devices together.
    """

    nodes: tuple[int, ...]
    need: float
    room: float
    device: int | None

    @property
    def missing(self) -> float:
        """Bytes."""
        return self.need - self.room


def shortages(problem: Problem) -> list[Shortage]:
    """What fits nowhere, the most missing first; [] where only the search has failed."""
    found = [*_alone(problem), *_together(problem)]
    return sorted(found, key=lambda each: (each.device is None, -each.missing))


def _alone(problem: Problem) -> Iterator[Shortage]:
    """Nodes, with their group's persistent memory, that exceed every device they may use."""
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


def _together(problem: Problem) -> Iterator[Shortage]:
    """All persistent memory against all capacity."""
    usable = problem.allowed.any(axis=0)
    room, need = float(problem.capacity[usable].sum()), float(problem.memory.sum())
    if need > room:
        order = np.argsort(-problem.memory, kind="stable")
        nodes = tuple(int(v) for v in order if problem.memory[v] > 0)
        yield Shortage(nodes, need, room, None)
