"""HEFT: heterogeneous earliest finish time."""

from __future__ import annotations

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.placers.base import Placer, register_placer
from graphflow.placement.placers.list_schedule import Flat, fit_to_memory, insert
from graphflow.placement.problems.problem import Assignment, Problem


@dataclass(frozen=True)
class Heft(Placer):
    """Nodes by decreasing upward rank, each into the earliest gap on the device that finishes it
    first.

    The rank is the longest way to the end with mean computation and mean transfer times, in
    seconds. Ties: the earlier node, the lower device. Time O((n + e)·d).

    Raises:
        MemoryLimitError: neither this schedule nor the greedy placer's fits the devices' memory.

    Source: Topcuoglu, Hariri & Wu, IEEE TPDS 13(3), 2002.
    """

    def place(self, problem: Problem) -> Assignment:
        flat = Flat(problem)
        return fit_to_memory(problem, insert(flat, flat.by_rank(flat.upward)))


register_placer("heft", Heft())
