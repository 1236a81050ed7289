"""Totals of a placed step: the devices that compute, the overhead of the step, its memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from graphflow.ir.device_name import DeviceName
from graphflow.placement.calibration.calibrate import StepCost, step_overhead
from graphflow.placement.calibration.trace_corrections import Evidence, TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.clusters.worker_devices import threads_by_device
from graphflow.placement.cost_model.memory_peaks import MemoryPeaks
from graphflow.placement.cost_model.problem_builder import GraphProblem
from graphflow.placement.plans.building.step_uncertainty import (
    Overhead,
)
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.plan_model import PlanModel
from graphflow.placement.problems.problem import Assignment


def overhead_beyond(
    made: GraphProblem,
    cluster: Cluster,
    learned: TraceCorrections | None,
    steps: StepCost | None,
    assignment: Assignment,
    seconds: float,
) -> Overhead:
    """Return what a step takes beyond the `seconds` of its nodes and transfers."""
    units = _units([cluster.devices[at] for at in _busy_devices(assignment, made)], cluster)
    kind = session_kind(cluster)
    found = learned.step_evidence(kind, units, seconds) if learned else Evidence()
    if learned and found.ratios:
        return Overhead(learned.step_overhead(kind, units, seconds), found, units)
    return Overhead(0.0 if steps is None else step_overhead(steps, units), Evidence(), units)


def memory_peaks(
    made: GraphProblem, model: PlanModel, cluster: Cluster, bindings: Mapping[str, int]
) -> MemoryPeaks:
    """The most memory of each device in use at once."""
    timeline, home = model.timeline, model.assignment.device.tolist()
    order = [made.nodes[i] for i in timeline.order.tolist() if i < len(made.nodes)]
    devices = {
        node: made.devices[home[i]]
        for i, node in enumerate(made.nodes)
        if made.devices[home[i]] != CLIENT
    }
    known = {
        name: int(np.ceil(peak))
        for name, peak in zip(cluster.devices, timeline.peak_memory, strict=False)
    }
    order = [*made.graph.of_op("constant"), *order, *made.graph.of_op("group")]
    threads = threads_by_device(cluster.present_workers)
    return MemoryPeaks(known, made.graph, devices, order, bindings, threads)


def model_without_names(made: GraphProblem, assignment: Assignment) -> PlanModel:
    names = tuple(str(i) for i in range(made.problem.nodes))
    return PlanModel(made.problem, assignment, names, (), made.devices, {})


def device_memory(
    cluster: Cluster, bindings: Mapping[str, int], made: GraphProblem, assignment: Assignment
) -> list[int]:
    """The memory that the runtime takes on each device, to the byte."""
    peaks = memory_peaks(made, model_without_names(made, assignment), cluster, bindings)
    return [peaks[name] for name in cluster.devices]


def count_busy_devices(assignment: Assignment, made: GraphProblem) -> int:
    """Count the devices that compute something."""
    return len(_busy_devices(assignment, made))


def _busy_devices(assignment: Assignment, made: GraphProblem) -> set[int]:
    """The devices that compute something."""
    device = assignment.device
    busy = made.problem.compute[np.arange(len(device)), device] > 0
    return set(device[busy].tolist()) - {made.problem.client}


def _units(working: Iterable[str], cluster: Cluster) -> int:
    """Count the participants of a step from the devices that compute: workers, or devices of this
    process."""
    if cluster.kind == "here":
        return len(set(working))
    return len({DeviceName.parse(name).worker for name in working})


def session_kind(cluster: Cluster) -> str:
    """Return the kind of sessions whose steps have about the same overhead."""
    if cluster.kind != "here":
        return "process"
    has_gpu = any(device.kind == "gpu" for w in cluster.workers for device in w.devices)
    return "gpu" if has_gpu else "here"


def units(plan: Plan) -> int:
    """Count the participants of a plan's step; see `TraceCorrections.observe_step`."""
    working = {n.device for n in plan.nodes if n.finish > n.start and n.device != CLIENT}
    return _units(working, plan.cluster)
