"""Planning: build the problem, place it, compare with the baselines, and tell it as a Plan.

Devices of one machine slow each other down. So there are two problems: one in which neighbours are
busy, for placements over several devices, and one in which they are not, for those on one. Plans
and baselines are judged by the same rule: what pins spread over several has busy neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from math import inf
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.gc_pause import without_collection
from graphflow.base.progress import show_stage
from graphflow.ir.graph import Graph
from graphflow.ir.graph_fingerprint import fingerprint
from graphflow.ir.op import Node
from graphflow.placement.calibration.calibrate import StepCost
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.device_constraints import DeviceConstraints
from graphflow.placement.cost_model.problem_builder import GraphProblem, build_problems
from graphflow.placement.placers import Placer
from graphflow.placement.placers.construction.execution_order import in_turns
from graphflow.placement.plans.building.memory_fit import (
    excess,
)
from graphflow.placement.plans.building.placement_choice import (
    best_single_device,
    fit_in_memory,
    place_baselines,
    run_placer,
)
from graphflow.placement.plans.building.planned_parts import (
    planned_nodes,
    planned_transfers,
    tensor_name,
)
from graphflow.placement.plans.building.planned_windows import planned_windows
from graphflow.placement.plans.building.step_totals import (
    count_busy_devices,
    device_memory,
    memory_peaks,
    overhead_beyond,
)
from graphflow.placement.plans.building.step_uncertainty import (
    StepJudge,
    rival_of,
)
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.plan_model import PlanModel
from graphflow.placement.problems.problem import Assignment, Problem
from graphflow.placement.simulation.jitter import Jitter


@without_collection
def plan_graph(
    graph: Graph,
    cluster: Cluster,
    shapes: Mapping[Node, tuple[int, ...]],
    bindings: Mapping[str, int],
    placer: str | Placer = "greedy",
    homes: Mapping[Node, str] | None = None,
    profiles: Mapping[int, Mapping[str, Any]] | None = None,
    links: Mapping[tuple[str, str], tuple[float, float]] | None = None,
    learned: TraceCorrections | None = None,
    steps: StepCost | None = None,
    tasks: Sequence[str] = (),
    tried_gain: float = inf,
    notes: Sequence[str] = (),
    jitter: Jitter | None = None,
) -> Plan:
    """Place an optimised graph.

    Args:
        shapes: of the placeholders; bindings: sizes of symbols that follow from them.
        homes: where variables live already.
        profiles, links: measured speeds, by worker and by ends; default: see `build_problem`.
        learned: what traced steps taught about them.
        steps: what a step costs beyond its nodes and transfers; default: nothing.
        tasks: what the nodes of a pipeline belong to, by their turns.
        tried_gain: share of a step. Several devices that save it are taken even if their gain is
            not sure, because the first steps will show it.
        notes: sentences of the strategy.
        jitter: makes turns of windows longer at random.

    Raises:
        DeviceError, MemoryLimitError: a pin fits no device; the graph fits in no memory.
    """
    homes = homes or {}
    show_stage("predicting times")

    def problems(homes: Mapping[Node, str]) -> tuple[GraphProblem, GraphProblem]:
        return build_problems(graph, cluster, bindings, homes, profiles, links, learned, jitter)

    alone, shared = problems(homes)
    overhead = partial(overhead_beyond, alone, cluster, learned, steps)
    judge = StepJudge(cluster, learned, overhead, fingerprint(graph))
    show_stage("simulating baselines")
    plain = place_baselines(alone, shared)
    show_stage("choosing devices")
    taken = partial(device_memory, cluster, bindings)
    placed = run_placer(alone, shared, placer, plain, judge, taken, tried_gain)
    placed = fit_in_memory(placed, alone, shared, placer, judge, taken)
    made = placed.problem
    assignment = in_turns(placed.assignment, made.problem, made.nodes)
    if any(node in homes for node in graph.variables):
        alone, shared = problems({})  # "one device" holds the variables, too
        plain = place_baselines(alone, shared)
    named = [*(f"one device: {name}" for name in cluster.devices), "round robin"]
    baselines = {
        name: judge.seconds(each.run.assignment(), each.run.makespan)
        for name, each in zip(named, plain, strict=True)
        if each.fits and not (placed.is_tight and excess(alone, each.run.assignment(), taken))
    }
    show_stage("explaining the plan")
    limits = DeviceConstraints(graph, cluster, homes)
    told = {made.name(i): limits.explain(node) for i, node in enumerate(made.nodes)}
    model = PlanModel(
        made.problem,
        assignment,
        tuple(made.name(i) for i in range(made.problem.nodes)),
        tuple(tensor_name(graph, t, made.shares.get(t)) for t in made.tensors),
        made.devices,
        {name: why for name, why in told.items() if why is not None},
    )
    timeline = model.timeline
    beyond = judge.overhead(assignment, timeline.makespan).seconds
    here = judge.predict(made, assignment, timeline)
    low, high = (None, None) if here is None else here.interval
    rejected = placed.rejected
    if here is not None and rejected is None and count_busy_devices(assignment, alone) > 1:
        rejected = best_single_device(alone, plain, judge)
    return Plan(
        cluster=cluster,
        placer=placer if isinstance(placer, str) else type(placer).__name__,
        nodes=planned_nodes(made, model, tasks),
        transfers=planned_transfers(made, model),
        makespan=timeline.makespan + beyond,
        overhead=beyond,
        low=low,
        high=high,
        rival=None if here is None or rejected is None else rival_of(here, rejected),
        peak_memory=memory_peaks(made, model, cluster, bindings),
        baselines=baselines,
        shapes={graph.names.get(node, node.name): tuple(s) for node, s in shapes.items()},
        fingerprint=judge.graph,
        reproducible=assignment.reproducible,
        model=model,
        notes=tuple(notes),
        windows=planned_windows(made, model),
    )


@dataclass(frozen=True)
class FixedAssignment(Placer):
    """An answer that is known: what an earlier plan chose, in the numbers of a new problem."""

    assignment: Assignment

    def place(self, problem: Problem) -> Assignment:
        return self.assignment
