"""ETF: earliest time first."""

from __future__ import annotations

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.placers.base import Placer, register_placer
from graphflow.placement.placers.list_schedule import Flat, fit_to_memory, forward
from graphflow.placement.problems.problem import Assignment, Problem


@dataclass(frozen=True)
class Etf(Placer):
    """Takes, of all ready nodes and devices, the pair that can start first; of several nodes the
    one with the most computation on the way to the end.

    Without transfers and on equal devices this is Graham's list schedule by level. Time O((n +
    e)·d·log n).

    Raises:
        MemoryLimitError: neither this schedule nor the greedy placer's fits the devices' memory.

    Source: Hwang, Chow, Anger & Lee, SIAM J. Comput. 18(2), 1989.
    """

    def place(self, problem: Problem) -> Assignment:
        flat = Flat(problem)
        return fit_to_memory(problem, forward(flat, flat.level, by_finish=False))


register_placer("etf", Etf())
