"""The second baseline: deal the nodes out like cards."""

from __future__ import annotations

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.placers.base import Placer, register_placer
from graphflow.placement.placers.construction.evaluator import EvaluatedPlacement, Evaluator
from graphflow.placement.problems.problem import Assignment, Ints, Problem


@dataclass(frozen=True)
class RoundRobin(Placer):
    """Nodes in topological order to the devices in turn, skipping devices that a node cannot use.

    A colocation group is dealt once, with its first node. Time O(n·d + (n + e) log n).
    """

    def place(self, problem: Problem) -> Assignment:
        return round_robin(Evaluator(problem)).run.assignment()


def round_robin(evaluator: Evaluator) -> EvaluatedPlacement:
    """The dealt-out candidate."""
    return evaluator.best(deal_round_robin(evaluator.problem).tolist())


def deal_round_robin(problem: Problem) -> Ints:
    """(n,) the device each node is dealt to."""
    allowed, groups = problem.allowed.tolist(), problem.groups.tolist()
    choices, devices = problem.allowed.sum(axis=1).tolist(), problem.devices
    device = [0] * problem.nodes
    homes: dict[int, int] = {}
    turn = 0
    for node in problem.topological.tolist():
        group = groups[node]
        if group in homes:
            device[node] = homes[group]
            continue
        if choices[node] == 1:  # pinned: takes no turn
            device[node] = allowed[node].index(True)
        else:
            while not allowed[node][turn % devices]:
                turn += 1
            device[node] = turn % devices
            turn += 1
        if group >= 0:
            homes[group] = device[node]
    return np.array(device, dtype=np.int64)


register_placer("round_robin", RoundRobin())
