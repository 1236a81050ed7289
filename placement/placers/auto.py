"""The placer for those who do not want to choose: everything the others find, then refinement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from time import monotonic

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import MemoryLimitError, PlacementError
from graphflow.placement.placers.base import Placer, has_closed_form, memory_error, register_placer
from graphflow.placement.placers.construction.evaluator import (
    EvaluatedPlacement,
    Evaluator,
    lower_bound,
)
from graphflow.placement.placers.cpop import Cpop
from graphflow.placement.placers.greedy import Greedy
from graphflow.placement.placers.list_schedule import Flat, ListSchedule
from graphflow.placement.placers.local_search import (
    ROAM,
    LocalSearch,
    Searcher,
    list_schedules,
)
from graphflow.placement.placers.peft import Peft
from graphflow.placement.placers.round_robin import deal_round_robin, round_robin
from graphflow.placement.placers.single import cheapest_devices, singles
from graphflow.placement.problems.problem import Assignment, Ints, Problem
from graphflow.placement.simulation.memory_use import peak_memory

THOROUGH = 500_000
"""Problems of at most this many (n + e)·d also get the greedy placer and each device alone; beyond,
these alone would take longer than ten seconds."""
CLOSE = 1.25
"""The best baseline is run in full where it comes within this factor of the best list schedule."""
EVALUATIONS = 100_000
VISIT = 5e-6
"""Seconds that the greedy placer takes for a visit of a node or an edge."""


@dataclass(frozen=True)
class Auto(Placer):
    """The best of all list schedules, greedy, one device and round robin, then local search.

    Never predicted slower than any of these, up to (n + e)·d of half a million; beyond that greedy
    is left out. Deterministic, as the budget counts work and not time, unless `seconds` are given:
    then the answer depends on how fast and how busy the machine is, and is marked so.

    Args:
        budget: node, edge and device visits to spend on refinement, about 5 ns each.
        seed: of the local search.
        seconds: after which nothing more is tried. The list schedules are made in any case, and
            what is under way is finished. The answer is not reproducible.

    Raises:
        PlacementError: a setting without sense.
        MemoryLimitError: nothing that was tried fits the devices' memory; peak memory is by
            liveness.
    """

    budget: int = 200_000_000
    seed: int = 0
    seconds: float | None = None

    def __post_init__(self) -> None:
        limit = self.seconds
        if limit is not None and (
            isinstance(limit, bool) or not isinstance(limit, int | float) or not 0 <= limit < np.inf
        ):
            raise PlacementError(f"seconds must be a finite number >= 0, not {limit!r}")
        for name in ("budget", "seed"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise PlacementError(f"{name} must be an integer >= 0, not {value!r}")

    def place(self, problem: Problem) -> Assignment:
        if self.seconds is None:
            return self._place(problem, None)
        found = self._place(problem, monotonic() + self.seconds)
        return replace(found, reproducible=False)

    def _place(self, problem: Problem, deadline: float | None) -> Assignment:
        flat = Flat(problem)
        schedules = [*list_schedules(flat), Peft().schedule(flat), Cpop().schedule(flat)]
        if has_closed_form(problem) and _visits(problem) > THOROUGH:
            quick = self._quick(problem, schedules, deadline)
            if quick is not None:
                return quick
        best = self._thorough(problem, schedules, deadline)
        if not best.fits:
            raise memory_error(problem, peak_memory(problem, best.run))
        return best.run.assignment()

    def _thorough(
        self, problem: Problem, schedules: list[ListSchedule], deadline: float | None
    ) -> EvaluatedPlacement:
        evaluator = Evaluator(problem)
        baselines = [round_robin(evaluator)]
        if _visits(problem) <= THOROUGH:
            baselines += singles(evaluator)
            try:
                answer = _greedy(deadline).place(problem)
                baselines.append(evaluator.by_order(answer.device.tolist(), answer.order.tolist()))
            except MemoryLimitError:
                pass  # the others may still fit
        best = min(baselines, key=lambda c: c.key)
        if best.fits and best.run.makespan <= lower_bound(problem) * (1 + 1e-12):
            return best
        device, order = best.run.device, best.run.order
        start = ListSchedule(np.array(device), np.array(order), np.array(best.run.finish))
        found = self._search(problem).improve(evaluator, [*schedules, start], deadline)
        return min(best, found, key=lambda c: c.key)

    def _quick(
        self, problem: Problem, schedules: list[ListSchedule], deadline: float | None
    ) -> Assignment | None:
        """Try the quick placers on large problems without contention and memory limits: their
        makespans need no event loop. None where no list schedule fits.
        """
        searcher = Searcher(problem, EVALUATIONS)
        spans = [searcher.makespan(s.device, s.order) for s in schedules]
        best = schedules[int(np.argmin(spans))]
        least = min(spans)
        if least == np.inf:
            return None
        baselines = list(_baselines(problem))
        spans = [searcher.makespan(device, problem.topological) for device in baselines]
        if min(spans) < CLOSE * least:
            device = baselines[int(np.argmin(spans))]
            found = Evaluator(problem).best(device.tolist())
            run = found.run
            if found.fits and run.makespan < least:
                least = run.makespan
                best = ListSchedule(device, np.array(run.order), np.array(run.finish))
        share = self._evaluations(problem) // 8  # out of the cache, visits take as much longer
        if deadline is not None:
            share = searcher.affordable(share, deadline)
        bound = float(problem.compute.min(axis=1).sum()) / problem.devices
        moved = searcher.run(best.device, best.order, share, self.seed + 1, bound, False)
        if searcher.makespan(moved.device, moved.order) < least:
            best = moved
        return Assignment(best.device, best.order)

    def _search(self, problem: Problem) -> LocalSearch:
        return LocalSearch(self._evaluations(problem), seed=self.seed)

    def _evaluations(self, problem: Problem) -> int:
        visits = problem.nodes + len(problem.edges)
        if visits * problem.devices <= ROAM:
            visits *= problem.devices
        return min(EVALUATIONS, self.budget // max(1, visits))


def _greedy(deadline: float | None) -> Greedy:
    """The greedy placer, with a budget for the time that is left."""
    whole = Greedy()
    if deadline is None:
        return whole
    return replace(whole, budget=min(whole.budget, int(max(0.0, deadline - monotonic()) / VISIT)))


def _visits(problem: Problem) -> int:
    return (problem.nodes + len(problem.edges)) * problem.devices


def _baselines(problem: Problem) -> Iterator[Ints]:
    """Each device alone, and nodes dealt out in turn."""
    cheapest = cheapest_devices(problem)
    for at in range(problem.devices):
        if at != problem.client:
            yield np.where(problem.allowed[:, at], at, cheapest)
    yield deal_round_robin(problem)


register_placer("auto", Auto())
