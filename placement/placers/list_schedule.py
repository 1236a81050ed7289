"""Shared parts of list schedulers: a problem as flat sequences, the insertion schedule, memory.

On the way: `Flat` (problem -> sequences for the loops), an order of the nodes from the placer,
`insert` (devices and times), `settled` (the assignment, once it is known to fit).
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from graphflow.placement.placers.base import is_sure_to_fit
from graphflow.placement.placers.construction.coarsening import mean_transfer
from graphflow.placement.placers.construction.evaluator import Evaluator
from graphflow.placement.placers.greedy import Greedy
from graphflow.placement.placers.loops.dispatch import loops
from graphflow.placement.placers.loops.list_schedule import BLOCK
from graphflow.placement.problems.problem import Assignment, Floats, Ints, Problem

DIGITS = 2.0**40
"""Ranks that agree to this share of the greatest are ties: rounding must not decide."""


class ListSchedule(NamedTuple):
    """(n,) devices, the order in which the nodes start, when they finish without contention."""

    device: Ints
    order: Ints
    finish: Floats


class Flat:
    """A problem as the loops take it: flat, teams considered, the diagonal of links free.

    Transfers are priced without contention, as in the papers; the simulator knows better.
    """

    def __init__(self, problem: Problem, compiled: bool | None = None) -> None:
        self.problem = problem
        self.n, self.d = problem.nodes, problem.devices
        steps = (self.n + len(problem.edges)) * self.d
        self.forced = compiled
        self.loops = loops("list_schedule", 2.0 * steps, compiled)
        take = self.loops.take
        eye = np.eye(self.d, dtype=bool)
        grouped = bool((problem.groups >= 0).any())
        self.costs = (
            np.where(problem.allowed, problem.compute, np.inf) if grouped else problem.compute
        )
        self.cost = take(self.costs)
        self.latency = take(np.where(eye, 0.0, problem.latency))
        self.bandwidth = take(np.where(eye, np.inf, problem.bandwidth))
        self.topological = take(problem.topological)
        leaving, entering = problem.successors.edges, problem.predecessors.edges
        self.out_start, self.in_start = (
            take(problem.successors.start),
            take(problem.predecessors.start),
        )
        self.out_node = take(problem.edges[leaving, 1])
        self.in_node = take(problem.edges[entering, 0])
        self.in_size = take(problem.bytes[entering])
        self.mean = self.loops.floats(self.n)
        self.shortest = self.loops.floats(self.d, np.inf)
        self.loops.means(self.n, self.d, self.cost, self.mean, self.shortest)

    @cached_property
    def out_seconds(self) -> Any:
        """Mean seconds of each leaving edge's tensor over pairs of different devices."""
        return self.loops.take(mean_transfer(self.problem)[self.problem.successors.edges])

    @cached_property
    def level(self) -> Floats:
        """(n,) upward ranks with mean computation and free transfers."""
        rank = self.loops.floats(self.n)
        free = self.loops.take(np.zeros(len(self.problem.edges)))
        self.loops.upward(self.topological, self.mean, self.out_start, self.out_node, free, rank)
        return np.asarray(rank, dtype=np.float64)

    @cached_property
    def upward(self) -> Floats:
        """(n,) upward ranks with mean costs."""
        rank = self.loops.floats(self.n)
        self.loops.upward(
            self.topological, self.mean, self.out_start, self.out_node, self.out_seconds, rank
        )
        return np.asarray(rank, dtype=np.float64)

    @cached_property
    def downward(self) -> Floats:
        """(n,) downward ranks with mean costs."""
        rank = self.loops.floats(self.n)
        self.loops.downward(
            self.topological, self.mean, self.out_start, self.out_node, self.out_seconds, rank
        )
        return np.asarray(rank, dtype=np.float64)

    @cached_property
    def team(self) -> Ints:
        """(n,) the team of nodes that must share a device with others, or -1."""
        groups = self.problem.groups
        team = np.full(self.n, -1, dtype=np.int64)
        members = np.flatnonzero(groups >= 0)
        _, index, count = np.unique(groups[members], return_inverse=True, return_counts=True)
        shared = count > 1
        number = np.where(shared, np.cumsum(shared) - 1, -1)
        team[members] = number[index]
        return team

    @cached_property
    def teams(self) -> int:
        """Number of teams."""
        return int(self.team.max(initial=-1)) + 1

    @cached_property
    def team_node(self) -> Ints:
        """The members of all teams, team after team."""
        members: Ints = np.argsort(self.team, kind="stable")[int((self.team < 0).sum()) :]
        return members

    @cached_property
    def team_start(self) -> Ints:
        """(teams + 1,) where each team starts in `team_node`."""
        return np.searchsorted(self.team[self.team_node], np.arange(self.teams + 1))

    @cached_property
    def team_costs(self) -> Floats:
        """(teams, d) seconds of all members."""
        total = np.zeros((self.teams, self.d))
        members = np.flatnonzero(self.team >= 0)
        np.add.at(total, self.team[members], self.costs[members])
        return total

    @cached_property
    def memory(self) -> tuple[Floats, Floats]:
        """(n,) bytes a node takes when it is placed (a team's with its first), (d,) the room.

        What can only be in one place has its room taken from the start.
        """
        problem, team = self.problem, self.team
        room = problem.capacity.astype(np.float64)
        if not np.isfinite(room).any():
            return np.zeros(self.n), room
        need = problem.memory.astype(np.float64)
        members = np.flatnonzero(team >= 0)
        need[members] = np.bincount(
            team[members], weights=problem.memory[members], minlength=self.teams
        )[team[members]]
        single = np.flatnonzero(problem.allowed.sum(axis=1) == 1)
        np.subtract.at(room, problem.allowed[single].argmax(axis=1), problem.memory[single])
        need[single] = 0.0
        return need, room

    def by_rank(self, rank: Floats) -> Ints:
        """Nodes by decreasing rank, producers first among equals; no edge may increase it."""
        position = np.empty(self.n, dtype=np.int64)
        position[self.problem.topological] = np.arange(self.n)
        return np.lexsort((position, -round_ranks(rank)))

    def ready_order(self, rank: Floats) -> Ints:
        """Order nodes so that, of the ready ones, the highest rank comes first, then the lowest
        index.
        """
        run = loops("ready_order", 20.0 * (self.n + len(self.problem.edges)), self.forced)
        order, missing = run.ints(self.n), run.ints(self.n)
        missing[:] = np.diff(self.problem.predecessors.start).tolist()
        run.ready_order(
            self.n, run.take(-round_ranks(rank)), *run.all(self.out_start, self.out_node), missing,
            run.floats(self.n), run.ints(self.n), order,
        )  # fmt: skip
        return np.asarray(order, dtype=np.int64)


def round_ranks(rank: Floats) -> Floats:
    """Ranks as whole multiples of a tiny share of the greatest."""
    top = float(np.abs(rank).max(initial=0.0))
    return np.rint(rank * (DIGITS / top)) if top > 0.0 else rank


def insert(
    flat: Flat,
    order: NDArray[np.int64],
    bias: Any = None,
    fixed: NDArray[np.int64] | None = None,
) -> ListSchedule:
    """Devices and order of the schedule that puts nodes, in this order, into the earliest gaps.

    `bias` (n·d seconds, flat) is added to finish times in the choice; `fixed` (n,) names devices
    already chosen, or -1. Time O((n + e)·d) where few gaps are open at a time.
    """
    n, d, room_for = flat.n, flat.d, flat.loops
    take, floats, ints = room_for.take, room_for.floats, room_for.ints
    blocks = 4 * n // BLOCK + 2 * d + 2
    need, room = flat.memory
    left = floats(d)
    left[:] = room.tolist()
    device, begins, finish = ints(n, -1), floats(n), floats(n)
    room_for.insertion(
        n, d, take(order), flat.cost, flat.latency, flat.bandwidth, flat.in_start, flat.in_node,
        flat.in_size, bias is not None, take(np.zeros(0)) if bias is None else bias,
        take(np.full(n, -1) if fixed is None else fixed), take(flat.team), take(flat.team_costs),
        ints(flat.teams, -1), take(need), left, flat.shortest, ints(d, -1), ints(1),
        floats(blocks * BLOCK), floats(blocks * BLOCK), ints(blocks), floats(blocks),
        ints(blocks, -1), ints(blocks, -1), floats(d), floats(d), device, begins, finish,
    )  # fmt: skip
    return as_schedule(flat.problem, device, begins, finish)


def forward(flat: Flat, rank: Floats, by_finish: bool) -> ListSchedule:
    """Devices and order of the schedule that starts what can start first; of several nodes the one
    of highest rank, then of most readers, then of lowest index.

    `by_finish`: the node goes where it finishes first, not where it starts first. Time O((n +
    e)·d·log n).
    """
    n, d, problem = flat.n, flat.d, flat.problem
    # Heaps in plain Python take three times as long as the other loops: compiled ones pay earlier.
    run = loops("earliest_start", 60.0 * (n + len(problem.edges)) * d, flat.forced)
    take, floats, ints = run.take, run.floats, run.ints
    readers = np.diff(problem.successors.start)
    ranked = np.lexsort((np.arange(n), -readers, -round_ranks(rank)))
    place = np.empty(n, dtype=np.int64)
    place[ranked] = np.arange(n)
    need, room = flat.memory
    missing, left = ints(n), floats(d)
    missing[:], left[:] = np.diff(problem.predecessors.start).tolist(), room.tolist()
    device, begins, finish = ints(n, -1), floats(n), floats(n)
    run.earliest_start(
        n, d, by_finish, take(place), take(ranked),
        *run.all(flat.cost, flat.latency, flat.bandwidth, flat.out_start, flat.out_node,
                 flat.in_start, flat.in_node, flat.in_size, flat.team, flat.team_costs),
        take(flat.team_start), take(flat.team_node), ints(flat.teams, -1), take(need), left,
        missing, ints(n), ints(n, -1), floats(d), floats(d),
        floats(2 * n * d), ints(2 * n * d), ints(d), floats(2 * n * d), ints(2 * n * d), ints(d),
        device, begins, finish,
    )  # fmt: skip
    return as_schedule(problem, device, begins, finish)


def as_schedule(problem: Problem, device: Any, begins: Any, finish: Any) -> ListSchedule:
    """Return the loops' result as a schedule, ordered by start times, producers first."""
    topological = problem.topological
    begins, finish = np.asarray(begins, dtype=np.float64), np.asarray(finish, dtype=np.float64)
    by_start = np.lexsort((finish[topological], begins[topological]))
    order = np.asarray(topological[by_start], dtype=np.int64)
    return ListSchedule(np.asarray(device, dtype=np.int64), order, finish)


def fit_to_memory(problem: Problem, schedule: ListSchedule) -> Assignment:
    """The schedule as an assignment; short of memory in a more frugal order, or else greedy's.

    Raises:
        MemoryLimitError: nothing that was tried fits.
    """
    if is_sure_to_fit(problem, schedule.device):
        return Assignment(schedule.device, schedule.order)
    evaluator = Evaluator(problem)
    where = schedule.device.tolist()
    found = evaluator.by_order(where, schedule.order.tolist())
    if not found.fits:
        found = evaluator.best(where)
    return found.run.assignment() if found.fits else Greedy().place(problem)
