"""The uncertainty of a predicted step, and whether several devices surely gain over one.

    GraphProblem + Assignment ─StepJudge→ PredictedStep ─rival_of→ Rival

The errors of a step are those of the nodes and transfers that its end waits for, and that of its
overhead. `placement/calibration/uncertainty.py` says how they add up.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import numpy as np

from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.calibration.cluster_rates import link_classes
from graphflow.placement.calibration.trace_corrections import Evidence, TraceCorrections
from graphflow.placement.calibration.uncertainty import (
    LINK_DEVIATION,
    PredictedStep,
    interval,
    observed_deviation,
    overhead_deviation,
)
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.cost_model.problem_builder import GraphProblem
from graphflow.placement.plans.plan_records import ON_ONE, Rival
from graphflow.placement.problems.problem import Assignment
from graphflow.placement.simulation.critical_parts import critical_parts
from graphflow.placement.simulation.simulator import Timeline, simulate


@dataclass(frozen=True)
class Overhead:
    """A step's seconds beyond nodes and transfers, and the observations that they rest on."""

    seconds: float
    evidence: Evidence
    units: int


@dataclass(frozen=True)
class StepJudge:
    """Predicts steps with their errors.

    Args:
        overhead: The overhead of a placement whose nodes and transfers take so many seconds.
        graph: Fingerprint of the graph.
    """

    cluster: Cluster
    learned: TraceCorrections | None
    overhead: Callable[[Assignment, float], Overhead]
    graph: str = ""

    def seconds(self, assignment: Assignment, within: float) -> float:
        """Return the seconds of a step whose nodes and transfers take so many."""
        return within + self.overhead(assignment, within).seconds

    def predict(
        self, made: GraphProblem, assignment: Assignment, timeline: Timeline | None = None
    ) -> PredictedStep | None:
        """Return the step of a placement; None if the errors of its nodes are unknown."""
        if made.errors is None:
            return None
        run = simulate(made.problem, assignment) if timeline is None else timeline
        beyond = self.overhead(assignment, run.makespan)
        nodes, moves = critical_parts(made.problem, run)
        errors = self._node_errors(made, assignment, nodes)
        for row in run.transfers[moves]:
            kind = self._links.get((int(row["source"]), int(row["target"])), CLIENT)
            took = float(row["finish"] - row["start"])
            source = "link", kind
            errors[source] = errors.get(source, 0.0) + took * self._link_deviation(kind)
        errors["overhead", beyond.units] = overhead_deviation(
            beyond.seconds, run.makespan, beyond.evidence.ratios, beyond.evidence.weight
        )
        if self.learned:
            errors["step"] = run.makespan * self.learned.step_deviation(self.graph)
        return PredictedStep(run.makespan + beyond.seconds, errors)

    @staticmethod
    def _node_errors(
        made: GraphProblem, assignment: Assignment, nodes: list[int]
    ) -> dict[Hashable, float]:
        """Return the errors of nodes by the names of their sources."""
        known = made.errors
        assert known is not None
        rows = np.array(nodes, dtype=np.int64)
        at = rows, assignment.device[rows]
        took = made.problem.compute[at]
        sums = np.bincount(known.source[at], weights=took * known.deviation[at])
        names = known.sources.names
        errors: dict[Hashable, float] = {names[i]: float(sums[i]) for i in np.flatnonzero(sums)}
        errors["neighbours"] = float((took * known.slowdown[at]).sum())
        return errors

    @cached_property
    def _links(self) -> dict[tuple[int, int], str]:
        return link_classes(self.cluster)

    def _link_deviation(self, kind: str) -> float:
        ratios = self.learned.link_ratios(kind) if self.learned else []
        return observed_deviation(ratios, LINK_DEVIATION)


@dataclass(frozen=True, eq=False)
class Candidate:
    """A placement that a plan is compared with, its step, and how many devices it uses."""

    assignment: Assignment
    step: PredictedStep
    devices: int


def gains_surely(several: PredictedStep, one: PredictedStep) -> bool:
    """Return True if several devices save more than the uncertainty of what they save."""
    return one.seconds - several.seconds > several.margin_to(one)


def rival_of(here: PredictedStep, there: Candidate) -> Rival:
    """Return the record of another placement that a plan was compared with."""
    where = ON_ONE if there.devices == 1 else f"over {show_count(there.devices, 'device')}"
    return Rival(where, there.step.seconds, there.step.margin, here.margin_to(there.step))


def node_interval(made: GraphProblem, node: int, device: int) -> dict[str, Any]:
    """Return `low`, `high` and `basis` of a `PlannedNode`.

    Nothing is returned if they are unknown, or the node takes no time.
    """
    errors, seconds = made.errors, float(made.problem.compute[node, device])
    if errors is None or not seconds:
        return {}
    deviation = np.hypot(errors.deviation[node, device], errors.slowdown[node, device])
    basis = errors.sources.bases[int(errors.source[node, device])]
    low, high = interval(seconds, float(deviation))
    return {"low": low, "high": high, "basis": basis}
