"""Plan fetches that have run again, and move variables to where a better plan has them.

    migrate ─→ steps are timed ─advance_check→ the new placement stays, or all go back

Migration happens between two steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from graphflow.errors import MemoryLimitError
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.execution.replan_policy import WINDOW, Replanned, shows_drift, window_position
from graphflow.ir.op import Node
from graphflow.placement.placers.single import OneDevice
from graphflow.placement.plans.plan import Plan, devices_of
from graphflow.planning.deployment import Deployment
from graphflow.planning.feedback.trace_feedback import MIN_STEPS
from graphflow.planning.placement_check import (
    PATIENCE,
    SAMPLES,
    Durations,
    Key,
    PlacementCheck,
    has_choice,
    move_seconds,
)
from graphflow.runtime.telemetry.logs import Log

_log = Log("graphflow.session")
_LOST = "another placement was slower when it was tried, and nothing has changed enough since"


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

    The next steps then show whether they do. Plans that lost before are not adopted again.

    Raises:
        MemoryLimitError: the graph fits in no memory; nothing has moved.
        WorkerLost: a worker was lost while variables moved.
    """
    planner = deployment.planner
    sets = [c for c in deployment.compiled.values() if c.partitions]
    if not sets:
        return Replanned((), 0.0, 0.0)
    stay = [planner.plan_as_placed(c) for c in sets]
    if planner.learn_steps(zip(stay, [c.recent_seconds for c in sets], strict=True)):
        stay = [planner.plan_as_placed(c) for c in sets]
    one = len(deployment.cluster.devices) == 1
    go = stay if one else _plan_without_homes(deployment, sets, stay)
    steps = [max(1, c.runs) for c in sets]
    before, after = (
        sum(plan.makespan * n for plan, n in zip(plans, steps, strict=True)) / sum(steps)
        for plans in (stay, go)
    )
    slowest = max(range(len(sets)), key=lambda at: stay[at].makespan * steps[at])
    durations = _durations(sets)
    measured = _mean_duration(sets, durations)
    has_lost = any(
        lost.excludes(new, old)
        for lost in deployment.lost
        for new, old in zip(go, stay, strict=True)
    )
    if has_lost or after >= before * min(1 - least, 1 - 1e-6):
        for compiled, old, new in zip(sets, stay, go, strict=True):
            # An equal plan of the placer also knows which other placement it was preferred to.
            compiled.plan = new if _placed_nodes(new) == _placed_nodes(old) else old
        kept = sets[slowest].plan
        no_gain = _LOST if has_lost else kept.no_gain if kept else ""
        return Replanned((), before, before, no_gain, measured)
    check = PlacementCheck(deployment.steps.committed + PATIENCE, "the placement before")
    for compiled, old, new in zip(sets, stay, go, strict=True):
        if _placed_nodes(new) != _placed_nodes(compiled.plan):
            check.plans[compiled.key], check.others[compiled.key] = new, old
    check.other_makespans = {key: plan.makespan for key, plan in check.others.items()}
    check.other_durations = {key: durations[key] for key in check.plans.keys() & durations.keys()}
    moved = _switch_plans(deployment, sets, go)
    deployment.begin_check(check if check.plans else None)
    return Replanned(moved, before, after, go[slowest].no_gain, measured)


def can_place_anew(compiled: CompiledFetches) -> bool:
    """Return True if fetches are placed, and neither a strategy nor pins decide where."""
    plan = compiled.plan
    return (
        bool(compiled.program) and not compiled.division and plan is not None and has_choice(plan)
    )


def place_anew(
    deployment: Deployment, compiled: CompiledFetches, shapes: Mapping[Node, tuple[int, ...]]
) -> CompiledFetches:
    """Place fetches for sizes that do not fit as they are placed, and move their variables.

    Raises:
        MemoryLimitError: they do not fit in any placement; nothing has moved.
        WorkerLost: a worker was lost while variables moved.
    """
    before, compiled.sizes = compiled.sizes, shapes
    try:
        _adopt(deployment, {compiled.key: deployment.planner.plan(compiled, {})})
    except MemoryLimitError:
        compiled.sizes = before
        raise
    return deployment.compiled[compiled.key]


def _durations(sets: Sequence[CompiledFetches]) -> Durations:
    """Return the seconds of the latest steps of the sets of which enough were timed."""
    return {c.key: [*c.recent_seconds] for c in sets if len(c.recent_seconds) >= MIN_STEPS}


def _mean_duration(sets: Sequence[CompiledFetches], durations: Durations) -> float | None:
    """Return the median seconds of a step, as the mean over the steps of all sets."""
    timed = [c for c in sets if c.key in durations]
    runs = sum(c.runs for c in timed)
    return sum(median(durations[c.key]) * c.runs for c in timed) / runs if runs else None


def advance_check(deployment: Deployment) -> None:
    """After a step: end the comparison of placements if enough steps were timed, and go back if
    the new placement was slower.

    Raises:
        WorkerLost: a worker was lost while variables moved.
    """
    check = deployment.check
    if check is None:
        return
    timed = [c for c in deployment.compiled.values() if c.is_timed]
    if check.tries_other:
        timed = [c for c in timed if c.key in check.durations]
    if all(len(c.recent_seconds) < SAMPLES for c in timed):
        if deployment.steps.committed >= check.until:
            deployment.begin_check(None)
        return
    if check.tries_other:
        check.other_durations = _durations(timed)
    else:
        check.durations = _durations(timed)
        if _try_other(deployment, check):
            return
    _end_check(deployment, check)


def _try_other(deployment: Deployment, check: PlacementCheck) -> bool:
    """Move to the other placement to time it, if that is worth the move."""
    best = None if check.others else _find_one_device(deployment, check)
    if not check.should_try_other(_move_seconds(deployment, check)):
        return False
    try:
        if best is not None:  # plan only now: that takes time, too
            placer = OneDevice(best)
            for key in check.plans.keys() & deployment.compiled.keys():
                check.others[key] = deployment.planner.plan(deployment.compiled[key], {}, placer)
            if not check.should_try_other(_move_seconds(deployment, check)):
                return False
        if _is_same(check.plans, check.others):
            return False
        _adopt(deployment, check.others)
    except MemoryLimitError:  # raised before anything has moved
        return False
    check.tries_other = True
    deployment.begin_check(check)
    return True


def _find_one_device(deployment: Deployment, check: PlacementCheck) -> int | None:
    """Let a check of first plans compare with the one device that is predicted to be fastest.

    Return its index; None if no device has the memory.
    """
    seconds = {
        at: {key: plan.baselines[f"one device: {name}"] for key, plan in check.plans.items()}
        for at, name in enumerate(deployment.cluster.devices)
        if all(f"one device: {name}" in plan.baselines for plan in check.plans.values())
    }
    if not seconds:
        return None
    best = min(seconds, key=lambda at: sum(seconds[at].values()))
    check.other = f"{deployment.cluster.devices[best]} alone"
    check.other_makespans = seconds[best]
    return best


def _end_check(deployment: Deployment, check: PlacementCheck) -> None:
    """Keep the placement that is faster, remember the new one if it is slower, and tell."""
    verdict = check.judge(_move_seconds(deployment, check))
    deployment.planner.learn_steps(check.timed_plans())
    if not verdict.stays:
        deployment.lost.append(check.find_loser())
    deployment.begin_check(None)  # first: after a loss in the move, nothing is left to compare
    if verdict.stays and check.tries_other:
        _adopt(deployment, check.plans)
    for key in check.plans.keys() & deployment.compiled.keys():
        compiled = deployment.compiled[key]
        compiled.verdict = verdict
        if not compiled.recent_seconds and verdict.stays:
            compiled.recent_seconds.extend(check.durations.get(key, ()))
    before = verdict.other_measured
    _log.tell(
        "placement.confirmed" if verdict.stays else "placement.reverted",
        promised=verdict.promised,
        measured=verdict.measured.median,
        before=None if before is None else before.median,
        text=str(verdict),
    )


def _move_seconds(deployment: Deployment, check: PlacementCheck) -> float:
    """Return the seconds that a move from one placement to the other takes.

    Variables take as long as predicted, and steps that warm up as long as the last ones did.
    """
    compiled = {k: c for k, c in deployment.compiled.items() if k in check.plans}
    seconds = move_seconds(
        (compiled[key].graph, check.plans[key], other)
        for key, other in check.others.items()
        if key in compiled
    )
    return seconds + sum(c.warmup_seconds for c in compiled.values())


def _adopt(deployment: Deployment, plans: Mapping[Key, Plan]) -> None:
    """Place fetches by their plans; others that use the variables which move follow them."""
    sets = [c for c in deployment.compiled.values() if c.partitions]
    homes = dict(deployment.state.homes)
    for compiled in sets:
        if compiled.key in plans:
            devices = devices_of(plans[compiled.key], compiled.graph)
            homes |= {node: devices[node] for node in compiled.graph.variables}

    def choose_plan(compiled: CompiledFetches) -> Plan:
        known = plans.get(compiled.key)
        if known is None and compiled.plan is not None:
            present = deployment.state.homes
            if all(homes.get(node) == present.get(node) for node in compiled.graph.variables):
                known = compiled.plan
        return known or deployment.planner.plan(compiled, homes)

    _switch_plans(deployment, sets, [choose_plan(compiled) for compiled in sets])


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
        if _placed_nodes(plan) == _placed_nodes(old.plan):
            old.plan = plan
            continue
        new = CompiledFetches(
            old.fetches, old.source, old.graph, old.sizes, plan=plan, runs=old.runs,
            division=old.division, variant=old.variant, id_feeds=old.id_feeds,
            facts=old.facts,
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


def _is_same(plans: Mapping[Key, Plan], others: Mapping[Key, Plan]) -> bool:
    """Return True if plans place all nodes as others do: pins may leave little choice."""
    return all(_placed_nodes(plans[key]) == _placed_nodes(others[key]) for key in others)


def _placed_nodes(plan: Plan | None) -> list[tuple[str, str]]:
    """Return names and devices of a plan's nodes, in their order."""
    return [] if plan is None else [(node.name, node.device) for node in plan.nodes]
