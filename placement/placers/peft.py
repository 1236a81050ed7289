"""PEFT: predict earliest finish time."""

from __future__ import annotations

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.placers.base import Placer, register_placer
from graphflow.placement.placers.list_schedule import Flat, ListSchedule, fit_to_memory, insert
from graphflow.placement.problems.problem import Assignment, Problem


@dataclass(frozen=True)
class Peft(Placer):
    """HEFT that looks ahead: ready nodes by the mean of their optimistic costs, each to the device
    of least finish time plus optimistic cost.

    The optimistic cost of a node on a device is the longest way on to the end if every later node
    may choose its best device. Time and memory O((n + e)·d).

    Raises:
        MemoryLimitError: neither this schedule nor the greedy placer's fits the devices' memory.

    Source: Arabnejad & Barbosa, IEEE TPDS 25(3), 2014.
    """

    def place(self, problem: Problem) -> Assignment:
        return fit_to_memory(problem, self.schedule(Flat(problem)))

    def schedule(self, flat: Flat) -> ListSchedule:
        """The schedule before memory over time is looked at."""
        table, rank = flat.loops.floats(flat.n * flat.d), flat.loops.floats(flat.n)
        flat.loops.optimistic(
            flat.d, flat.topological, flat.cost, flat.out_start, flat.out_node, flat.out_seconds,
            table, rank,
        )  # fmt: skip
        order = flat.ready_order(np.asarray(rank, dtype=np.float64))
        return insert(flat, order, bias=flat.loops.take(np.asarray(table)))


register_placer("peft", Peft())
