"""Compare a new placement with another one by the steps of both, and remember placements that lost.

    new plans ─steps→ PlacementCheck ─compare→ PlacementVerdict: stay, or go back
                                   └─→ LostPlacement: what it would take to try it again

Nothing here moves or runs anything: see `migration`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from math import hypot, sqrt
from statistics import median, quantiles

from graphflow.base.lazy_dataclass import dataclass
from graphflow.execution.replan_policy import GAIN
from graphflow.ir.graph import Graph
from graphflow.ir.spec import nbytes
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.plan_records import PlacementVerdict, StepQuartiles

SAMPLES = 8
"""Steps of a placement that are timed, after one that warms up."""
LEAST_DIFFERENCE = 0.05
"""Least relative difference of medians that counts, however little the steps scatter."""
MEDIAN_ERROR = 0.93 / sqrt(SAMPLES)
"""Standard error of the median of as many steps, in their interquartile ranges.

The standard error of a median is 1.253 standard deviations by the root of the number of samples,
and an interquartile range is 1.349 standard deviations, if the samples are normal.
"""
CONFIDENCE = 1.64
"""Standard errors that a difference of medians exceeds by chance in 5 % of comparisons."""
SURE = 1.5
"""Measured steps are clearly faster than a prediction if it is this many times as long.

One device is predicted within this factor nearly always, but not within the gain of a second one.
"""
HORIZON = 1000
"""Steps over which a move must pay off. A session that is worth a plan runs that many."""
PATIENCE = 1000
"""Steps of the session after which an undecided check ends: its fetches are no longer run."""
ALIKE = 0.9
"""Share of nodes on the same devices from which two placements count as one."""

Key = tuple[int, ...]
"""Key of a set of fetches: see `CompiledFetches.key`."""
Durations = Mapping[Key, Sequence[float]]


@dataclass
class PlacementCheck:
    """A new placement under comparison with another one.

    Attributes:
        until: steps of the session after which the check ends undecided.
        other: the other placement in words.
        plans: the new plan of each set of fetches.
        others: the other plan of each set. After first plans it is made when it is needed.
        other_makespans: predicted seconds of a step with the other plans.
        durations: seconds of steps with the new plans, once there are enough.
        other_durations: seconds of steps with the other plans.
        tries_other: True while the other placement is in place, to be timed.
    """

    until: int
    other: str = ""
    plans: dict[Key, Plan] = field(default_factory=dict)
    others: dict[Key, Plan] = field(default_factory=dict)
    other_makespans: Mapping[Key, float] = field(default_factory=dict)
    durations: Durations = field(default_factory=dict)
    other_durations: Durations = field(default_factory=dict)
    tries_other: bool = False

    @property
    def accepts_first_plans(self) -> bool:
        """True if further sets of fetches that are placed for the first time may join."""
        return not self.others

    def timed_plans(self) -> Iterator[tuple[Plan, Sequence[float]]]:
        """Yield the plans whose steps were timed in the check, with the seconds of these."""
        for key, seconds in self.durations.items():
            yield self.plans[key], seconds
        if self.tries_other:
            for key, seconds in self.other_durations.items():
                yield self.others[key], seconds

    def should_try_other(self, move: float) -> bool:
        """Return True if the session should go over to the other placement, and time it.

        If steps of both were timed, the new one must be slower beyond the noise. The other one is
        timed again nevertheless: what slowed steps down may have been another load of the machine.
        If the other one was never timed, the new one must not be clearly faster than predicted of
        the other. What may be saved must be worth the move (there and perhaps back).

        Args:
            move: seconds of one move.
        """
        if not self.other_makespans:
            return False
        new, other = self._quartiles()
        if other is not None:
            return is_slower(new, other) and (new.median - other.median) * HORIZON > move
        least = self._mean(self.other_makespans) / SURE
        return (new.high - least) * HORIZON > 2 * move

    def judge(self, move: float) -> PlacementVerdict:
        """Return which placement is to stay: the one in place, unless the other one is faster
        beyond the noise of both, and saves more than the move costs.

        Args:
            move: seconds of one move.
        """
        new, other = self._quartiles()
        stays = not self.tries_other
        if self.tries_other and other is not None and is_slower(other, new):
            stays = (other.median - new.median) * HORIZON > move
        return PlacementVerdict(
            stays,
            self._mean({key: plan.makespan for key, plan in self.plans.items()}),
            new,
            self.other,
            self._mean(self.other_makespans) if self.other_makespans else None,
            other,
        )

    def find_loser(self) -> LostPlacement:
        """Return the new plan of the set of fetches that took most time, of those that were timed
        with both."""
        key = max(self._weights(), key=lambda key: sum(self.durations[key]))
        new, other = median(self.durations[key]), median(self.other_durations[key])
        predicted = _work(self.plans[key]) / _work(self.others[key])
        return LostPlacement(self.plans[key], new / other, predicted)

    def _quartiles(self) -> tuple[StepQuartiles, StepQuartiles | None]:
        """Return quartiles with the new and the other placement, over the same sets."""
        weights = self._weights()
        new = merge_quartiles(self.durations, weights)
        is_timed = weights.keys() <= self.other_durations.keys()
        return new, merge_quartiles(self.other_durations, weights) if is_timed else None

    def _weights(self) -> dict[Key, int]:
        """Return how often each set ran while the new placement was timed, of those for which the
        other one was timed as well, if there are any."""
        keys = self.durations.keys() & self.other_durations.keys() or self.durations.keys()
        return {key: len(self.durations[key]) for key in keys}

    def _mean(self, seconds: Mapping[Key, float]) -> float:
        weights = self._weights()
        return sum(seconds[key] * n for key, n in weights.items()) / sum(weights.values())


@dataclass(frozen=True)
class LostPlacement:
    """A plan whose steps were slower than those of the plan that stayed.

    Args:
        plan: the plan that lost.
        measured: its seconds of a step, divided by those of the plan that stayed.
        predicted: the same ratio as predicted of nodes and transfers when it lost.
    """

    plan: Plan
    measured: float
    predicted: float

    def excludes(self, plan: Plan, present: Plan) -> bool:
        """Return True if a plan is the one that lost, and would lose again by all that is known.

        Its measured ratio is scaled by what changed in the predictions since. So it is tried
        again if new measurements of links or nodes promise that it now saves `GAIN` of a step,
        however wrong the predictions themselves are. Costs of whole steps are left out: they were
        learned from the steps that it lost by.
        """
        if (plan.fingerprint, plan.shapes) != (self.plan.fingerprint, self.plan.shapes):
            return False
        there, here = plan.placement, self.plan.placement
        same = sum(there.get(name) == device for name, device in here.items())
        if same < ALIKE * len(here):
            return False
        ratio = _work(plan) / _work(present)
        return self.measured * ratio / self.predicted > 1 - GAIN


def _work(plan: Plan) -> float:
    """Return the predicted seconds of a step's nodes and transfers."""
    return max(plan.makespan - plan.overhead, 1e-9)


def is_slower(one: StepQuartiles, other: StepQuartiles) -> bool:
    """Return True if steps are slower beyond the noise of both medians.

    That their interquartile ranges are apart is not asked for: among eight steps, two slow ones
    would hide a difference of a fifth.
    """
    noise = CONFIDENCE * MEDIAN_ERROR * hypot(one.high - one.low, other.high - other.low)
    return one.median - other.median > max(LEAST_DIFFERENCE * other.median, noise)


def merge_quartiles(durations: Durations, weights: Mapping[Key, int]) -> StepQuartiles:
    """Return the weighted means of the quartiles of several sets of fetches."""
    total = sum(weights.values())
    means = [0.0, 0.0, 0.0]
    for key, weight in weights.items():
        for i, quartile in enumerate(quantiles(durations[key], method="inclusive")):
            means[i] += quartile * weight / total
    return StepQuartiles(*means)


def is_spread(plan: Plan) -> bool:
    """Return True if several devices compute."""
    return len({n.device for n in plan.nodes if n.finish > n.start and n.device != CLIENT}) > 1


def has_choice(plan: Plan) -> bool:
    """Return True if some node may run on more than one device: pins leave a choice."""
    return plan.model is None or bool((plan.model.problem.allowed.sum(axis=1) > 1).any())


def move_seconds(moves: Iterable[tuple[Graph, Plan, Plan]]) -> float:
    """Return the predicted seconds in which variables move from the homes of a plan to those of
    another, by way of the client.

    Args:
        moves: graphs, each with both of its plans.
    """
    ways = {
        node: (plan, plan.by_name[graph.names[node]].device, to.by_name[graph.names[node]].device)
        for graph, plan, to in moves
        for node in graph.variables
    }
    seconds = 0.0
    for node, (plan, source, target) in ways.items():
        if plan.model is None or source == target:
            continue
        problem, devices = plan.model.problem, plan.model.devices
        client, size = devices.index(CLIENT), nbytes(node.specs[0])
        for way in ((devices.index(source), client), (client, devices.index(target))):
            seconds += float(problem.latency[way] + size / problem.bandwidth[way])
    return seconds
