"""The first baseline: everything on one device."""

from __future__ import annotations

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.placers.base import Placer, register_placer
from graphflow.placement.placers.construction.evaluator import EvaluatedPlacement, Evaluator
from graphflow.placement.problems.problem import Assignment, Ints, Problem


@dataclass(frozen=True)
class Single(Placer):
    """Every node on the one device that finishes the step first; pinned nodes where they must be.

    A node (or colocation group) that the device cannot run goes to its cheapest device. Time O(d·(n
    + e) log n).
    """

    def place(self, problem: Problem) -> Assignment:
        evaluator = Evaluator(problem)
        return min(singles(evaluator), key=lambda candidate: candidate.key).run.assignment()


@dataclass(frozen=True)
class OneDevice(Placer):
    """As `Single`, on the device of a given index."""

    device: int

    def place(self, problem: Problem) -> Assignment:
        return singles(Evaluator(problem))[self.device].run.assignment()


def singles(evaluator: Evaluator) -> list[EvaluatedPlacement]:
    """One candidate for each device other than the client."""
    problem = evaluator.problem
    cheapest = cheapest_devices(problem)
    found = []
    for at in range(problem.devices):
        if at != problem.client or problem.devices == 1:
            found.append(evaluator.best(np.where(problem.allowed[:, at], at, cheapest).tolist()))
    return found


def cheapest_devices(problem: Problem) -> Ints:
    """(n,) the device that computes each node fastest, the colocation group as one."""
    cost = np.where(problem.allowed, problem.compute, np.inf)
    members = np.flatnonzero(problem.groups >= 0)
    if len(members):
        _, unit = np.unique(problem.groups[members], return_inverse=True)
        total = np.zeros((int(unit.max()) + 1, problem.devices))
        np.add.at(total, unit, cost[members])
        cost[members] = total[unit]
    return np.asarray(np.argmin(cost, axis=1), dtype=np.int64)


register_placer("single", Single())
