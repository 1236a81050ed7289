"""Critical path first, in the order of time."""

from __future__ import annotations

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.placers.base import Placer, register_placer
from graphflow.placement.placers.list_schedule import Flat, fit_to_memory, forward
from graphflow.placement.problems.problem import Assignment, Problem


@dataclass(frozen=True)
class CriticalPath(Placer):
    """Starts, among the earliest nodes, the one with the longest path to the end (transfers
    included, then the one with most readers), to the device that finishes it first.

    CP/MISF where devices are equal and transfers free; a slow device gets a node only where it
    finishes it sooner. Time O((n + e)·d·log n).

    Raises:
        MemoryLimitError: neither this schedule nor the greedy placer's fits the devices' memory.

    Source: Kasahara & Narita, IEEE Trans. Computers C-33(11), 1984.
    """

    def place(self, problem: Problem) -> Assignment:
        flat = Flat(problem)
        return fit_to_memory(problem, forward(flat, flat.upward, by_finish=True))


register_placer("critical_path", CriticalPath())
