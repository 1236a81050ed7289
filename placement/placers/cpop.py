"""CPOP: the critical path on one processor."""

from __future__ import annotations

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.placers.base import Placer, register_placer
from graphflow.placement.placers.list_schedule import (
    Flat,
    ListSchedule,
    fit_to_memory,
    insert,
    round_ranks,
)
from graphflow.placement.problems.problem import Assignment, Floats, Ints, Problem


@dataclass(frozen=True)
class Cpop(Placer):
    """Ready nodes by the longest path through them; those of the critical path on the one device
    that computes them fastest, the others where they finish first, with insertion.

    A node of the critical path that the device cannot run counts among the others. Time O((n +
    e)·d).

    Raises:
        MemoryLimitError: neither this schedule nor the greedy placer's fits the devices' memory.

    Source: Topcuoglu, Hariri & Wu, IEEE TPDS 13(3), 2002.
    """

    def place(self, problem: Problem) -> Assignment:
        return fit_to_memory(problem, self.schedule(Flat(problem)))

    def schedule(self, flat: Flat) -> ListSchedule:
        """The schedule before memory over time is looked at."""
        through = flat.upward + flat.downward
        fixed = np.full(flat.n, -1, dtype=np.int64)
        path = critical_path(flat.problem, through)
        if path:
            allowed = np.isfinite(flat.costs[path])
            total = np.where(allowed, flat.costs[path], 0.0).sum(axis=0)
            at = int(np.lexsort((total, (~allowed).sum(axis=0)))[0])
            chosen = np.array(path)[allowed[:, at]]
            fixed[chosen] = at
        return insert(flat, flat.ready_order(through), fixed=fixed)


def critical_path(problem: Problem, through: Floats) -> list[int]:
    """From the source with the longest path through it, down to a sink; ties to the lowest
    index.
    """
    if problem.nodes == 0:
        return []
    length = round_ranks(through)
    start: Ints = problem.predecessors.start
    sources = np.flatnonzero(np.diff(start) == 0)
    node = int(sources[np.argmax(length[sources])])
    path = [node]
    while len(leaving := problem.successors.edges_of(node)):
        readers = np.unique(problem.edges[leaving, 1])
        node = int(readers[np.argmax(length[readers])])
        path.append(node)
    return path


register_placer("cpop", Cpop())
