"""The outlook of a step: what a plan would predict as a whole, for searches over many graphs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.gc_pause import without_collection
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.placement.calibration.calibrate import StepCost
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.problem_builder import GraphProblem, build_problems
from graphflow.placement.placers import Placer
from graphflow.placement.placers.construction.execution_order import in_turns
from graphflow.placement.plans.building.placement_choice import run_placer
from graphflow.placement.plans.building.step_totals import (
    device_memory,
    memory_peaks,
    model_without_names,
    overhead_beyond,
)
from graphflow.placement.plans.building.step_uncertainty import (
    StepJudge,
)
from graphflow.placement.problems.problem import Assignment


@dataclass(frozen=True)
class Outlook:
    """The summary of a plan: a step as a whole.

    Attributes:
        seconds: of a step, with its overhead.
        busy: seconds that each device computes.
        peak_memory: bytes by device.
        sent: bytes that devices send each other.
    """

    seconds: float
    busy: Mapping[str, float]
    peak_memory: Mapping[str, int]
    sent: int


def _add_send_time(made: GraphProblem, cluster: Cluster, assignment: Assignment) -> GraphProblem:
    """The problem in which processors are busy while they send: with their half of a message, and
    with a copy of what it carries. The simulator knows of links only."""
    problem, device = made.problem, assignment.device
    kinds = [cluster.device(name).kind for name in cluster.devices]
    names = [DeviceName.parse(name).worker for name in cluster.devices]
    compute = problem.compute.copy()
    sent: set[tuple[int, int]] = set()
    for (source, target), size, tensor in zip(
        problem.edges.tolist(), problem.bytes.tolist(), problem.tensor.tolist(), strict=True
    ):
        at, to = int(device[source]), int(device[target])
        if at == to or problem.client in (at, to) or kinds[at] != "cpu" or (tensor, to) in sent:
            continue
        joint = target < len(made.nodes) and made.nodes[target].op.joint is not None
        if joint or names[at] == names[to] or cluster.link(*(cluster.devices[i] for i in (at, to))):
            continue
        sent.add((tensor, to))
        compute[source, at] += problem.latency[at, to] / 2 + size / problem.bandwidth[at, to]
    return replace(made, problem=problem.with_compute(compute))


@without_collection
def outlook(
    graph: Graph,
    cluster: Cluster,
    bindings: Mapping[str, int],
    placer: str | Placer = "greedy",
    learned: TraceCorrections | None = None,
    steps: StepCost | None = None,
) -> Outlook:
    """Return what `plan_graph` would predict for a step as a whole, without the details of a plan.

    The seconds that sending keeps processors busy are included, since they decide between
    strategies that send much and little.

    Raises:
        DeviceError, MemoryLimitError: as `plan_graph`.
    """
    alone, shared = build_problems(graph, cluster, bindings, learned=learned)
    judge = StepJudge(cluster, learned, partial(overhead_beyond, alone, cluster, learned, steps))
    placed = run_placer(
        alone, shared, placer, None, judge, partial(device_memory, cluster, bindings)
    )
    made = placed.problem
    assignment = in_turns(placed.assignment, made.problem, made.nodes)
    made = _add_send_time(made, cluster, assignment)
    model = model_without_names(made, assignment)
    timeline = model.timeline
    seconds = judge.seconds(assignment, timeline.makespan)
    busy = dict(zip(cluster.devices, timeline.busy.tolist(), strict=False))
    rows, client = timeline.transfers, made.problem.client
    between = (rows["source"] != client) & (rows["target"] != client)
    sent = int(rows["bytes"][between].sum())
    return Outlook(seconds, busy, memory_peaks(made, model, cluster, bindings), sent)
