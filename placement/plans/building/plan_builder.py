"""Planning: build the problem, place it, compare with the baselines, and tell it as a Plan.

Devices of one machine slow each other down. So there are two problems: one in which neighbours are
busy, for placements over several devices, and one in which they are not, for those on one. Plans
and baselines are judged by the same rule: what pins spread over several has busy neighbours.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.gc_pause import without_collection
from graphflow.base.progress import show_stage
from graphflow.errors import MemoryLimitError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node
from graphflow.placement.calibration.calibrate import StepCost, step_overhead
from graphflow.placement.calibration.trace_corrections import Evidence, TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.cost_model.device_constraints import DeviceConstraints
from graphflow.placement.cost_model.memory_peaks import MemoryPeaks
from graphflow.placement.cost_model.problem_builder import GraphProblem, build_problems
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
from graphflow.placement.plans.building.planned_parts import (
    planned_nodes,
    planned_transfers,
    tensor_name,
)
from graphflow.placement.plans.building.planned_windows import planned_windows
from graphflow.placement.plans.building.step_uncertainty import (
    Candidate,
    Overhead,
    StepJudge,
    gains_surely,
    rival_of,
)
from graphflow.placement.plans.graph_fingerprint import fingerprint
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.plan_model import PlanModel
from graphflow.placement.problems.infeasibility import memory_limit
from graphflow.placement.problems.problem import Assignment, Problem
from graphflow.placement.simulation.jitter import Jitter
from graphflow.placement.simulation.simulator import simulate

SENDING = 0.5
"""Seconds of makespan that a second of transfer must save in a graph that will run. Serialising and
copying a tensor keeps the cores at both ends busy, which the problem's links do not show: at 0.02,
towers of the digits example were torn apart for 1 % of predicted gain and ran a third slower."""


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
    overhead = partial(_step_overhead, alone, cluster, learned, steps)
    judge = StepJudge(cluster, learned, overhead, fingerprint(graph))
    show_stage("simulating baselines")
    plain = _baselines(alone, shared)
    show_stage("choosing devices")
    taken = partial(_device_memory, cluster, bindings)
    placed = _run_placer(alone, shared, placer, plain, judge, taken, tried_gain)
    placed = _fit_in_memory(placed, alone, shared, placer, judge, taken)
    made = placed.problem
    assignment = in_turns(placed.assignment, made.problem, made.nodes)
    if any(node in homes for node in graph.variables):
        alone, shared = problems({})  # "one device" holds the variables, too
        plain = _baselines(alone, shared)
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
    if here is not None and rejected is None and _count_busy_devices(assignment, alone) > 1:
        rejected = _best_single(alone, plain, judge)
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
        peak_memory=_peaks(made, model, cluster, bindings),
        baselines=baselines,
        shapes={graph.names.get(node, node.name): tuple(s) for node, s in shapes.items()},
        fingerprint=judge.graph,
        reproducible=assignment.reproducible,
        model=model,
        notes=tuple(notes),
        windows=planned_windows(made, model),
    )


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
    judge = StepJudge(cluster, learned, partial(_step_overhead, alone, cluster, learned, steps))
    placed = _run_placer(
        alone, shared, placer, None, judge, partial(_device_memory, cluster, bindings)
    )
    made = placed.problem
    assignment = in_turns(placed.assignment, made.problem, made.nodes)
    made = _add_send_time(made, cluster, assignment)
    model = _nameless(made, assignment)
    timeline = model.timeline
    seconds = judge.seconds(assignment, timeline.makespan)
    busy = dict(zip(cluster.devices, timeline.busy.tolist(), strict=False))
    rows, client = timeline.transfers, made.problem.client
    between = (rows["source"] != client) & (rows["target"] != client)
    sent = int(rows["bytes"][between].sum())
    return Outlook(seconds, busy, _peaks(made, model, cluster, bindings), sent)


def _step_overhead(
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


def _peaks(
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
    return MemoryPeaks(known, made.graph, devices, order, bindings, cluster.devices)


def _nameless(made: GraphProblem, assignment: Assignment) -> PlanModel:
    names = tuple(str(i) for i in range(made.problem.nodes))
    return PlanModel(made.problem, assignment, names, (), made.devices, {})


def _device_memory(
    cluster: Cluster, bindings: Mapping[str, int], made: GraphProblem, assignment: Assignment
) -> list[int]:
    """The memory that the runtime takes on each device, to the byte."""
    peaks = _peaks(made, _nameless(made, assignment), cluster, bindings)
    return [peaks[name] for name in cluster.devices]


def _baselines(alone: GraphProblem, shared: GraphProblem) -> list[EvaluatedPlacement]:
    """Everything on one device, for each device, and at last round robin; pinned nodes where they
    must be."""
    quiet = singles(Evaluator(alone.problem))
    evaluator = Evaluator(shared.problem)
    busy = quiet if shared is alone else singles(evaluator)
    ones = [
        one if _count_busy_devices(one.run.assignment(), alone) <= 1 else other
        for one, other in zip(quiet, busy, strict=True)
    ]
    return [*ones, round_robin(evaluator)]


def _run_placer(
    alone: GraphProblem,
    shared: GraphProblem,
    placer: str | Placer,
    plain: list[EvaluatedPlacement] | None,
    judge: StepJudge,
    taken: TakenMemory,
    tried_gain: float = inf,
) -> _Placed:
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
                return _Placed(shared, made)
            raise memory_limit(alone, error.nodes, own) from None
        plain = _baselines(alone, shared) if plain is None else plain
        needed = [
            float(simulate(alone.problem, c.run.assignment()).peak_memory[at])
            for at, c in enumerate(plain[:-1])
        ]
        raise memory_limit(alone, error.nodes, needed) from None

    def choose_problem(assignment: Assignment) -> GraphProblem:
        return alone if _count_busy_devices(assignment, alone) <= 1 else shared

    def worth(assignment: Assignment, seconds: float) -> tuple[float, int]:
        return judge.seconds(assignment, seconds), _count_busy_devices(assignment, alone)

    if isinstance(chosen, Greedy | Auto) and not _is_pinned(alone.problem):
        plain = _baselines(alone, shared) if plain is None else plain
        known = [(c.run.assignment(), c.run.makespan) for c in plain if c.fits]
        least = min(known, key=lambda pair: worth(*pair), default=None)
        seconds = simulate(choose_problem(assignment).problem, assignment).makespan
        if least is not None and worth(*least) < worth(assignment, seconds):
            assignment = replace(least[0], reproducible=assignment.reproducible)
        devices = _count_busy_devices(assignment, alone)
        one = _best_single(alone, plain, judge) if devices > 1 else None
        several = None if one is None else judge.predict(shared, assignment)
        if (
            one is not None
            and several is not None
            and not gains_surely(several, one.step)
            and several.seconds > one.step.seconds * (1.0 - tried_gain)
        ):
            fallback = replace(one.assignment, reproducible=assignment.reproducible)
            return _Placed(alone, fallback, Candidate(assignment, several, devices))
    return _Placed(choose_problem(assignment), assignment)


def _fit_in_memory(
    placed: _Placed,
    alone: GraphProblem,
    shared: GraphProblem,
    placer: str | Placer,
    judge: StepJudge,
    taken: TakenMemory,
) -> _Placed:
    """Return a placement that fits in memory as the runtime lays it out, if one is found.

    Otherwise it is the given one, whose session raises MemoryLimitError.
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
    for _ in range(ROUNDS):
        tight = tighter(alone, groups, room), tighter(shared, groups, room)
        try:
            found = _run_placer(*tight, placer, None, judge, taken).assignment
        except MemoryLimitError:
            break
        made = alone if _count_busy_devices(found, alone) <= 1 else shared
        lacks = measure_excess(made, found)
        if not lacks:
            return _Placed(made, found, is_tight=True)
        room = shrink(room, lacks)
    return placed


@dataclass(frozen=True, eq=False)
class _Placed:
    """The answer of a placer, and the placement over several devices that was rejected for it.

    Attributes:
        is_tight: the placer's first answer did not fit in memory as the runtime lays it out.
    """

    problem: GraphProblem
    assignment: Assignment
    rejected: Candidate | None = None
    is_tight: bool = False


def _best_single(
    alone: GraphProblem, plain: Sequence[EvaluatedPlacement], judge: StepJudge
) -> Candidate | None:
    """Return the fastest baseline on one device; None if none fits, or its errors are unknown."""
    ones = [
        (judge.seconds(assignment, each.run.makespan), i, assignment)
        for i, each in enumerate(plain)
        if each.fits and _count_busy_devices(assignment := each.run.assignment(), alone) <= 1
    ]
    if not ones or alone.errors is None:
        return None
    assignment = min(ones)[2]
    step = judge.predict(alone, assignment)
    return None if step is None else Candidate(assignment, step, 1)


def _is_pinned(problem: Problem) -> bool:
    """Return True if there is nothing to choose but the order."""
    return int(problem.allowed.sum(axis=1).max(initial=1)) == 1


def _count_busy_devices(assignment: Assignment, made: GraphProblem) -> int:
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


@dataclass(frozen=True)
class FixedAssignment(Placer):
    """An answer that is known: what an earlier plan chose, in the numbers of a new problem."""

    assignment: Assignment

    def place(self, problem: Problem) -> Assignment:
        return self.assignment
