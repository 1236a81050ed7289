"""Local search: start from list schedules, move and swap nodes on the critical path."""

from __future__ import annotations

from collections.abc import Iterable
from time import monotonic

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlacementError
from graphflow.placement.placers.base import Placer, has_closed_form, register_placer
from graphflow.placement.placers.construction.evaluator import (
    EvaluatedPlacement,
    Evaluator,
    lower_bound,
)
from graphflow.placement.placers.greedy import Greedy
from graphflow.placement.placers.list_schedule import (
    Flat,
    ListSchedule,
    as_schedule,
    forward,
    insert,
)
from graphflow.placement.placers.loops.dispatch import loops
from graphflow.placement.problems.problem import Assignment, Ints, Problem

HISTORY = 200
ROAM = 2_000_000
"""Nodes choose their own device in problems of at most this many (n + e)·d."""
COPIES = 20_000_000
"""Under contention arrivals are kept for each tensor and device, up to this many."""

LARGE = 20_000
"""Nodes and edges beyond which schedules are judged by the search's own evaluation where that is
exact, and `VISITS` to nodes and edges limit the budget."""
VISITS = 100_000_000
PROBES = 3
"""Evaluations by which the pace is judged where a clock limits the search."""


@dataclass(frozen=True)
class LocalSearch(Placer):
    """Late acceptance hill climbing over sequences and devices, from several list schedules.

    Nodes, with the team that must share their device, move to other devices, to other places in the
    sequence, or swap devices, mostly on the simulated critical path. The best of all, and of the
    schedules it started from, wins in the simulator. Deterministic for a seed.

    Args:
        budget: evaluations of a whole schedule, O(n + e) each, shared out over the restarts; on
            graphs of more than 20,000 nodes and edges at most 100 million visits in all.
        restarts: searches, each with its own seed, from the best starts in turn.
        seed: an integer >= 0.

    Raises:
        PlacementError: a setting without sense.
        MemoryLimitError: neither what was found nor the greedy placer's answer fits.

    Source: Burke & Bykov, European J. Operational Research 258(1), 2017 (late acceptance).
    """

    budget: int = 20_000
    restarts: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("budget", 0), ("restarts", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise PlacementError(f"{name} must be an integer >= {least}, not {value!r}")

    def place(self, problem: Problem) -> Assignment:
        schedules = list_schedules(Flat(problem))
        if has_closed_form(problem) and problem.nodes + len(problem.edges) > LARGE:
            found = self._large(problem, schedules)
            if found is not None:
                return found
        best = self.improve(Evaluator(problem), schedules)
        return best.run.assignment() if best.fits else Greedy().place(problem)

    def _large(self, problem: Problem, schedules: list[ListSchedule]) -> Assignment | None:
        """The same where the event loop would take longer than the search; None where no schedule
        keeps within persistent memory."""
        visits = problem.nodes + len(problem.edges)
        share = min(self.budget, VISITS // visits) // self.restarts
        searcher = Searcher(problem, share * self.restarts)
        spans = [searcher.makespan(one.device, one.order) for one in schedules]
        best, least = schedules[int(np.argmin(spans))], min(spans)
        bound = float(problem.compute.min(axis=1).sum()) / problem.devices
        for turn in range(self.restarts if least < np.inf else 0):
            moved = searcher.run(best.device, best.order, share, self._seed(turn), bound, False)
            span = searcher.makespan(moved.device, moved.order)
            if span < least:
                best, least = moved, span
        return Assignment(best.device, best.order) if least < np.inf else None

    def _seed(self, turn: int) -> int:
        return (self.seed * 7919 + turn * 104729 + 1) % 2147483646 + 1

    def improve(
        self, evaluator: Evaluator, schedules: Iterable[ListSchedule], deadline: float | None = None
    ) -> EvaluatedPlacement:
        """The best of these schedules and of what the search makes of them.

        Args:
            deadline: of `time.monotonic`, after which no search is begun; one under way is sized
                by how fast the ones before were.
        """
        problem = evaluator.problem
        starts = sorted((judge_schedule(evaluator, one) for one in schedules), key=lambda c: c.key)
        best = starts[0]
        if not best.fits:
            best = min(best, evaluator.best(best.run.device), key=lambda c: c.key)
        bound = lower_bound(problem) * (1 + 1e-12)
        if problem.nodes == 0 or int(problem.allowed.sum()) == 0:
            return best
        searcher = Searcher(problem, self.budget)
        share = self.budget // self.restarts
        roam = (problem.nodes + len(problem.edges)) * problem.devices <= ROAM
        for turn in range(self.restarts):
            if best.fits and best.run.makespan <= bound:
                break
            spend = share if deadline is None else searcher.affordable(share, deadline)
            if spend == 0 and share > 0:
                break
            free = turn % 2 == 0 and roam
            start = best if turn % 2 else starts[turn // 2 % len(starts)]
            found = searcher.run(
                np.array(start.run.device, dtype=np.int64),
                np.array(start.run.order, dtype=np.int64),
                spend,
                self._seed(turn),
                bound,
                free,
            )
            best = min(best, judge_schedule(evaluator, found), key=lambda c: c.key)
        return best


class Searcher:
    """A problem made ready for the search loops."""

    def __init__(self, problem: Problem, evaluations: int, compiled: bool | None = None) -> None:
        steps = 10.0 * evaluations * (problem.nodes + len(problem.edges))
        self.loops = loops("local_search", steps, compiled)
        self.problem = problem
        self.flat = Flat(problem, self.loops.compiled)
        number = np.unique(problem.tensor, return_inverse=True)[1]
        self.tensor: Ints = number[problem.predecessors.edges]
        self._pace: tuple[int, float] | None = None

    def affordable(self, wanted: int, deadline: float) -> int:
        """Return how many evaluations fit before a deadline, at the pace of a first few."""
        if self._pace is None:
            sequence = self.problem.topological
            device = np.argmin(np.where(self.problem.allowed, self.problem.compute, np.inf), axis=1)
            self.makespan(device, sequence)  # compiled, if it will be
            begin = monotonic()
            for _ in range(PROBES):
                self.makespan(device, sequence)
            self._pace = (PROBES, max(monotonic() - begin, 1e-9))
        count, seconds = self._pace
        left = 0.8 * (deadline - monotonic())  # a move costs more than a plain evaluation
        return max(0, min(wanted, int(left * count / seconds / (1 + self.problem.contention))))

    def run(
        self, device: Ints, order: Ints, evaluations: int, seed: int, bound: float, free: bool
    ) -> ListSchedule:
        """Search from a schedule; `free`: nodes go where they finish first until moved."""
        flat, problem, run = self.flat, self.problem, self.loops
        n, d = flat.n, flat.d
        take, floats, ints = run.take, run.floats, run.ints
        slots = (int(self.tensor.max(initial=-1)) + 1) * d
        contention = problem.contention and slots <= COPIES
        slots = slots if contention else 0
        need, room = flat.memory
        sequence, wishes = ints(n), ints(n, -1)
        sequence[:] = order.tolist()
        if not free:
            wishes[:] = device.tolist()
        where, begins, finish = ints(n), floats(n), floats(n)
        routes = problem.routes if contention and problem.ways else problem.routes[:0]
        pair = routes[:, 0] * d + routes[:, 1]
        way = np.searchsorted(np.sort(pair), np.arange(d * d + 1)) if len(routes) else pair
        lane = routes[np.argsort(pair, kind="stable"), 2]
        found = run.search(
            n, d, evaluations, seed, bound, free, sequence, wishes, where, begins, finish,
            flat.cost, flat.latency, flat.bandwidth, flat.in_start, flat.in_node, flat.in_size,
            take(self.tensor), contention, ints(slots), floats(slots),
            floats(d * d if contention else 0), take(way), take(lane), take(problem.shared),
            floats(len(problem.shared)), flat.out_start, flat.out_node, take(flat.team),
            take(flat.team_start), take(flat.team_node), ints(flat.teams), take(need), take(room),
            floats(d), floats(d), ints(d), ints(n), floats(n), floats(n), ints(n), ints(n),
            ints(n), ints(n), floats(HISTORY),
        )  # fmt: skip
        if found == np.inf:  # not even the start kept within persistent memory
            return ListSchedule(device, order, np.zeros(n))
        return as_schedule(problem, where, begins, finish)

    def makespan(self, device: Ints, order: Ints) -> float:
        """Seconds of a device map in a topological order; inf where persistent memory does not
        fit. Contention is not counted.
        """
        flat, run = self.flat, self.loops
        n, d = flat.n, flat.d
        take, floats, ints = run.take, run.floats, run.ints
        need, room = flat.memory
        sequence, wishes = ints(n), ints(n)
        sequence[:], wishes[:] = order.tolist(), device.tolist()
        seconds = run.evaluate(
            n, d, sequence, wishes, flat.cost, flat.latency, flat.bandwidth, flat.in_start,
            flat.in_node, flat.in_size, take(self.tensor), False, 1, ints(0), floats(0),
            floats(0), ints(0), ints(0), floats(0), floats(0), take(flat.team), ints(flat.teams),
            take(need), take(room), floats(d), floats(d), ints(d), ints(n), floats(n), floats(n),
            ints(n),
        )  # fmt: skip
        return float(seconds)


def list_schedules(flat: Flat) -> list[ListSchedule]:
    """Return the starting points of the search: the quick list schedules."""
    return [
        insert(flat, flat.by_rank(flat.upward)),
        forward(flat, flat.upward, by_finish=True),
        forward(flat, flat.level, by_finish=False),
    ]


def judge_schedule(evaluator: Evaluator, schedule: ListSchedule) -> EvaluatedPlacement:
    """A schedule in the simulator: as it is, and critical path first on its devices."""
    device = schedule.device.tolist()
    found = evaluator.by_order(device, schedule.order.tolist())
    if evaluator.problem.contention or not found.fits:
        found = min(found, evaluator.best(device), key=lambda c: c.key)
    return found


register_placer("local_search", LocalSearch())
