"""Plan fetches that have run again, and move variables to where a better plan has them.

Migration happens between two steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.replan_policy import WINDOW, Replanned, shows_drift, window_position
from graphflow.ir.op import Node
from graphflow.placement.plans.plan import Plan, devices_of
from graphflow.planning.deployment import Deployment


def has_drifted(compiled: CompiledFetches) -> bool | None:
    """Return True if the traced window that has just ended differs from the prediction.

    Return None if no window has just ended.
    """
    if window_position(compiled.runs - 1) != WINDOW - 1:
        return None
    if compiled.plan is None or len(compiled.trace.steps) < WINDOW:
        return None
    untraced = list(compiled.recent_seconds)[-WINDOW + 1 :]  # tracing takes time itself
    return shows_drift(untraced, compiled.plan.makespan)


def migrate(deployment: Deployment, least: float) -> Replanned:
    """Plan again, and adopt the new plans if they save at least the share `least` of a step.

    Raises:
        MemoryLimitError: the graph fits in no memory; nothing has moved.
        WorkerLost: a worker was lost while variables moved.
    """
    planner = deployment.planner
    sets = [c for c in deployment.compiled.values() if c.partitions]
    if not sets:
        return Replanned((), 0.0, 0.0)
    stay = [planner.plan_as_placed(c) for c in sets]
    if planner.learn_steps(sets, stay):
        stay = [planner.plan_as_placed(c) for c in sets]
    one = len(deployment.cluster.devices) == 1
    go = stay if one else _plan_without_homes(deployment, sets, stay)
    steps = [max(1, c.runs) for c in sets]
    before, after = (
        sum(plan.makespan * n for plan, n in zip(plans, steps, strict=True)) / sum(steps)
        for plans in (stay, go)
    )
    slowest = max(range(len(sets)), key=lambda at: stay[at].makespan * steps[at])
    if after >= before * min(1 - least, 1 - 1e-6):
        for compiled, plan in zip(sets, stay, strict=True):
            compiled.plan = plan
        return Replanned((), before, before, stay[slowest].no_gain or go[slowest].no_gain)
    return Replanned(_switch_plans(deployment, sets, go), before, after, go[slowest].no_gain)


def _plan_without_homes(
    deployment: Deployment, sets: Sequence[CompiledFetches], stay: Sequence[Plan]
) -> list[Plan]:
    """Return plans as if no variable had a home; the sets that take most time are planned first."""
    shares = [c.runs * plan.makespan for c, plan in zip(sets, stay, strict=True)]
    homes: dict[Node, str] = {}
    plans: dict[int, Plan] = {}
    for at in sorted(range(len(sets)), key=lambda at: -shares[at]):
        graph = sets[at].graph
        plans[at] = deployment.planner.plan(sets[at], homes)
        devices = devices_of(plans[at], graph)
        homes |= {node: devices[node] for node in graph.variables}
    return [plans[at] for at in range(len(sets))]


def _switch_plans(
    deployment: Deployment, sets: Sequence[CompiledFetches], plans: Sequence[Plan]
) -> tuple[str, ...]:
    """Move variables, give the workers new programs, and return the names of the moved variables.

    Everything that can fail because of the plans comes first. The values of moving variables stay
    with the client until their new homes have them.
    """
    state, steps = deployment.state, deployment.steps
    fresh: dict[int, CompiledFetches] = {}
    for number, (old, plan) in enumerate(zip(sets, plans, strict=True)):
        if [(n.name, n.device) for n in plan.nodes] == _placed_nodes(old):
            old.plan = plan
            continue
        new = CompiledFetches(
            old.fetches, old.source, old.graph, old.sizes, plan=plan, runs=old.runs,
            division=old.division, variant=old.variant,
        )  # fmt: skip
        deployment.place_and_partition(new, new.bindings(new.sizes))
        fresh[number] = new
    moved = {
        node: None
        for new in fresh.values()
        for node in new.graph.variables
        if state.homes[node] != new.devices[node]
    }
    leaving = state.release_homes(moved)
    for number in fresh:
        del deployment.compiled[sets[number].key]
    deployment.hosts.forget([sets[number].program for number in fresh], leaving)
    for number, new in fresh.items():
        deployment.send_programs(new)
        if steps.last is sets[number]:
            steps.last = new
    return tuple(state.names[node] for node in moved)


def _placed_nodes(compiled: CompiledFetches) -> list[tuple[str, str]]:
    return [(n.name, n.device) for n in compiled.plan.nodes] if compiled.plan is not None else []
