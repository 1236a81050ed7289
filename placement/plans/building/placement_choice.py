"""The choice of a placement: a placer's answer beside the baselines, fitted into memory.

`greedy` and `auto` are held to the baselines; several devices are taken only if they surely gain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import MemoryLimitError
from graphflow.placement.cost_model.problem_builder import GraphProblem
from graphflow.placement.placers import Placer, get_placer, place
from graphflow.placement.placers.auto import Auto
from graphflow.placement.placers.construction.evaluator import EvaluatedPlacement, Evaluator
from graphflow.placement.placers.construction.execution_order import in_turns
from graphflow.placement.placers.greedy import Greedy
from graphflow.placement.placers.round_robin import round_robin
from graphflow.placement.placers.single import singles
from graphflow.placement.plans.building.memory_fit import (
    ROUNDS,
    TakenMemory,
    excess,
    heavy_groups,
    shrink,
    tighter,
)
from graphflow.placement.plans.building.memory_limit import memory_limit
from graphflow.placement.plans.building.step_totals import count_busy_devices
from graphflow.placement.plans.building.step_uncertainty import (
    Candidate,
    StepJudge,
    gains_surely,
)
from graphflow.placement.problems.problem import Assignment, Problem
from graphflow.placement.simulation.simulator import simulate

SENDING = 0.5
"""Seconds of makespan that a second of transfer must save in a graph that will run. Serialising and
copying a tensor keeps the cores at both ends busy, which the problem's links do not show: at 0.02,
towers of the digits example were torn apart for 1 % of predicted gain and ran a third slower."""


def place_baselines(alone: GraphProblem, shared: GraphProblem) -> list[EvaluatedPlacement]:
    """Everything on one device, for each device, and at last round robin; pinned nodes where they
    must be."""
    quiet = singles(Evaluator(alone.problem))
    evaluator = Evaluator(shared.problem)
    busy = quiet if shared is alone else singles(evaluator)
    ones = [
        one if count_busy_devices(one.run.assignment(), alone) <= 1 else other
        for one, other in zip(quiet, busy, strict=True)
    ]
    return [*ones, round_robin(evaluator)]


def run_placer(
    alone: GraphProblem,
    shared: GraphProblem,
    placer: str | Placer,
    plain: list[EvaluatedPlacement] | None,
    judge: StepJudge,
    taken: TakenMemory,
    tried_gain: float = inf,
) -> ChosenPlacement:
    """The placer's answer, and the problem in whose numbers it is to be told.

    Placers count what is alive, which is more than the runtime takes where it computes in place.
    Where there is nothing to choose, as for most strategies, that does not refuse what fits by
    what is `taken`, and says what that is.

    Args:
        plain: the baselines, where these were worked out already.
        taken: bytes of each device that the runtime takes for an assignment.
        tried_gain: see `plan_graph`.

    `greedy` and `auto` promise to be no slower than the baselines, a step's own cost included, and
    take one device unless several surely gain; others are taken at their word.
    """
    try:
        chosen = get_placer(placer)
        if isinstance(chosen, Greedy):
            chosen = replace(chosen, thrift=SENDING)
        assignment = place(shared.problem, chosen)
    except MemoryLimitError as error:
        if _is_pinned(shared.problem):
            anywhere = np.full_like(shared.problem.capacity, inf)
            made = place(replace(shared.problem, capacity=anywhere), chosen)
            made = in_turns(made, shared.problem, shared.nodes)
            own = taken(shared, made)
            if all(need <= room for need, room in zip(own, shared.problem.capacity, strict=False)):
                return ChosenPlacement(shared, made)
            raise memory_limit(alone, error.nodes, own) from None
        plain = place_baselines(alone, shared) if plain is None else plain
        needed = [
            float(simulate(alone.problem, c.run.assignment()).peak_memory[at])
            for at, c in enumerate(plain[:-1])
        ]
        raise memory_limit(alone, error.nodes, needed) from None

    def choose_problem(assignment: Assignment) -> GraphProblem:
        return alone if count_busy_devices(assignment, alone) <= 1 else shared

    def worth(assignment: Assignment, seconds: float) -> tuple[float, int]:
        return judge.seconds(assignment, seconds), count_busy_devices(assignment, alone)

    if isinstance(chosen, Greedy | Auto) and not _is_pinned(alone.problem):
        plain = place_baselines(alone, shared) if plain is None else plain
        known = [(c.run.assignment(), c.run.makespan) for c in plain if c.fits]
        least = min(known, key=lambda pair: worth(*pair), default=None)
        seconds = simulate(choose_problem(assignment).problem, assignment).makespan
        if least is not None and worth(*least) < worth(assignment, seconds):
            assignment = replace(least[0], reproducible=assignment.reproducible)
        devices = count_busy_devices(assignment, alone)
        one = best_single_device(alone, plain, judge) if devices > 1 else None
        several = None if one is None else judge.predict(shared, assignment)
        if (
            one is not None
            and several is not None
            and not gains_surely(several, one.step)
            and several.seconds > one.step.seconds * (1.0 - tried_gain)
        ):
            fallback = replace(one.assignment, reproducible=assignment.reproducible)
            return ChosenPlacement(alone, fallback, Candidate(assignment, several, devices))
    return ChosenPlacement(choose_problem(assignment), assignment)


def fit_in_memory(
    placed: ChosenPlacement,
    alone: GraphProblem,
    shared: GraphProblem,
    placer: str | Placer,
    judge: StepJudge,
    taken: TakenMemory,
) -> ChosenPlacement:
    """Return a placement that fits in memory as the runtime lays it out, if one is found.

    If no division does, it is the fastest single device that does. Otherwise it is the given
    placement, whose session raises MemoryLimitError.
    """
    is_free = isinstance(get_placer(placer), Greedy | Auto) and not _is_pinned(alone.problem)
    if shared is alone or not is_free:
        return placed

    def measure_excess(made: GraphProblem, assignment: Assignment) -> dict[int, float]:
        return excess(made, in_turns(assignment, made.problem, made.nodes), taken)

    lacks = measure_excess(placed.problem, placed.assignment)
    if not lacks:
        return placed
    groups, room = heavy_groups(alone.problem, lacks), alone.problem.capacity
    for tries in range(1, ROUNDS + 1):
        tight = tighter(alone, groups, room), tighter(shared, groups, room)
        try:
            found = run_placer(*tight, placer, None, judge, taken).assignment
        except MemoryLimitError:
            break
        made = alone if count_busy_devices(found, alone) <= 1 else shared
        lacks = measure_excess(made, found)
        if not lacks:
            return ChosenPlacement(made, found, is_tight=True)
        room = shrink(room, lacks, tries)
    ones = [c for c in place_baselines(alone, shared)[:-1] if c.fits]
    for one in sorted(ones, key=lambda c: judge.seconds(c.run.assignment(), c.run.makespan)):
        if not measure_excess(alone, one.run.assignment()):
            return ChosenPlacement(alone, one.run.assignment(), is_tight=True)
    return placed


@dataclass(frozen=True, eq=False)
class ChosenPlacement:
    """The answer of a placer, and the placement over several devices that was rejected for it.

    Attributes:
        is_tight: the placer's first answer did not fit in memory as the runtime lays it out.
    """

    problem: GraphProblem
    assignment: Assignment
    rejected: Candidate | None = None
    is_tight: bool = False


def best_single_device(
    alone: GraphProblem, plain: Sequence[EvaluatedPlacement], judge: StepJudge
) -> Candidate | None:
    """Return the fastest baseline on one device; None if none fits, or its errors are unknown."""
    ones = [
        (judge.seconds(assignment, each.run.makespan), i, assignment)
        for i, each in enumerate(plain)
        if each.fits and count_busy_devices(assignment := each.run.assignment(), alone) <= 1
    ]
    if not ones or alone.errors is None:
        return None
    assignment = min(ones)[2]
    step = judge.predict(alone, assignment)
    return None if step is None else Candidate(assignment, step, 1)


def _is_pinned(problem: Problem) -> bool:
    """Return True if there is nothing to choose but the order."""
    return int(problem.allowed.sum(axis=1).max(initial=1)) == 1
