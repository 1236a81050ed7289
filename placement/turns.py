"""Turns: the order among the tasks of a device that a pipeline's schedule asks for.

A placer decides in which order a device runs its nodes, so that a step ends soonest. A schedule
decides otherwise: for the memory of activations, or because the tasks of another stage wait. Its
nodes have a turn, and those of a lower one go first; the others go as soon as they can.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graphflow.op import Node
from graphflow.placement.problem import Assignment, Problem


def in_turns(assignment: Assignment, problem: Problem, nodes: Sequence[Node]) -> Assignment:
    """The assignment with its nodes in the order of their turns, as far as what they read allows.

    Args:
        nodes: of the problem, in its order; nodes of the problem beyond them have no turn.
    """
    turns = [node.turn for node in nodes]
    if max(turns, default=-1) < 0:
        return assignment
    turns += [-1] * (problem.nodes - len(turns))
    rank = np.empty(problem.nodes, np.int64)
    rank[assignment.order] = np.arange(problem.nodes)
    readers: list[list[int]] = [[] for _ in range(problem.nodes)]
    missing = [0] * problem.nodes
    for source, target in problem.edges.tolist():
        readers[source].append(target)
        missing[target] += 1
    after = [0] * problem.nodes  # the turn of what a node without one reads
    ready: list[tuple[int, int, int]] = []

    def add(node: int) -> None:
        turn = turns[node] if turns[node] >= 0 else after[node]
        heapq.heappush(ready, (turn, int(rank[node]), node))

    for node in range(problem.nodes):
        if not missing[node]:
            add(node)
    order = []
    while ready:
        turn, _, node = heapq.heappop(ready)
        order.append(node)
        for reader in readers[node]:
            after[reader] = max(after[reader], turn)
            missing[reader] -= 1
            if not missing[reader]:
                add(reader)
    return replace(assignment, order=np.array(order, np.int64))
