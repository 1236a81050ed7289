"""Why a node is where it is: in a sentence when the plan is made, and in full when asked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphflow.base.formatting import show_bytes, show_interval, show_seconds
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.plans.plan_model import PlanModel
from graphflow.placement.view.text import printable

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData
    from graphflow.placement.plans.plan_records import PlannedNode


def reason(model: PlanModel, node: int, op: str, variable: str | None) -> str:
    """One sentence: why a node is where it is.

    Args:
        variable: name of the variable with which it must live, or None.
    """
    at = int(model.assignment.device[node])
    name = model.names[node]
    if model.devices[at] == CLIENT:
        return "fed by the client"
    if model.problem.devices == 2:
        return "the only device"
    if name in model.limits:
        return model.limits[name]
    if variable is not None:
        return f"beside its variable {variable!r}"
    if sum(model.problem.allowed_rows[node]) == 1:
        return "with what it must live with, which has no other device"
    if op == "variable":
        return _variable_reason(model, node, at)
    finishes = model.finishes(node)
    here = finishes[at]
    others = [f"{model.devices[d]} {show_seconds(t)}" for d, t in finishes.items() if d != at]
    best = min(finishes.values())
    if here <= best * (1 + 1e-9):
        return f"finishes first here: {show_seconds(here)}, {', '.join(others)}"
    return (
        f"finishes here at {show_seconds(here)} ({', '.join(others)}): "
        "chosen for the step as a whole"
    )


def _variable_reason(model: PlanModel, node: int, at: int) -> str:
    edges = model.problem.successors.edges_of(node).tolist()
    readers = dict.fromkeys(int(model.problem.edges[edge, 1]) for edge in edges)
    near = [model.names[r] for r in readers if int(model.assignment.device[r]) == at]
    if near:
        return f"read here by {', '.join(map(repr, near[:3]))}"
    return "all devices are alike for it"


def explain(plan: PlanData, name: str) -> str:
    """Everything about one node of a plan, as text."""
    node = plan.by_name[name]
    lines = [
        f"{name}: {node.op} on {node.device}, made at {node.location}",
        f"  output: {node.output}, {show_bytes(node.bytes)}",
        f"  predicted: {prediction(node)}; it runs "
        f"from {show_seconds(node.start)} to {show_seconds(node.finish)}",
        f"  why here: {node.why}",
        *_kernel(plan, node),
    ]
    lines += _waits(plan, node)
    if node.device != CLIENT:
        lines += _elsewhere(plan, node)
        lines += [f"  {plan.no_gain}"] if plan.no_gain else []
    return printable("\n".join(lines))


def prediction(node: PlannedNode) -> str:
    """Say what a node is predicted to take: "1.3 ms (1.1 to 1.6), from calibration of the op"."""
    took = show_interval(node.finish - node.start, node.low, node.high)
    return f"{took}, from {node.basis}" if node.basis else took


def _kernel(plan: PlanData, node: PlannedNode) -> list[str]:
    """Name the nodes that run with it as one kernel, of whose time its share is predicted."""
    others = [n.name for n in plan.nodes if node.fused and n.fused == node.fused and n is not node]
    if not others:
        return []
    told = ", ".join(others[:6]) + (f" and {len(others) - 6} more" if len(others) > 6 else "")
    return [f"  one kernel with: {told}"]


def _waits(plan: PlanData, node: PlannedNode) -> list[str]:
    """Say what the node waited for: its last input, or its device."""
    if node.start <= 0.0:
        return ["  waited for: nothing"]
    came: list[tuple[float, str]] = []
    for name in node.inputs:
        source = plan.by_name[name]
        if source.device == node.device:
            came.append((source.finish, f"input {name!r}, made here"))
    for transfer in plan.transfers:
        if transfer.target == node.device and plan.maker(transfer.tensor) in node.inputs:
            took = show_seconds(transfer.finish - transfer.start)
            told = f"input {transfer.tensor!r} from {transfer.source} (on its way for {took})"
            came.append((transfer.finish, told))
    for other in plan.nodes:
        if other.device == node.device and other.finish <= node.start and other is not node:
            came.append((other.finish, f"its device, busy with {other.name!r}"))
    if not came:
        return ["  waited for: its turn"]
    when, what = max(came, key=lambda pair: pair[0])
    return [f"  waited for: {what}, until {show_seconds(when)}"]


def _elsewhere(plan: PlanData, node: PlannedNode) -> list[str]:
    """Say what each other device would mean for the node and for the step."""
    model, lines = plan.model, []
    for device in plan.cluster.devices:
        if device == node.device:
            continue
        if device not in node.candidates:
            lines.append(f"  on {device}: not possible ({_limit(plan, node)})")
            continue
        text = f"  on {device}: {show_seconds(node.candidates[device])} to compute"
        if model is not None:
            number, at = model.names.index(node.name), model.devices.index(device)
            if not model.problem.allowed[number, at]:
                lines.append(f"  on {device}: not possible (what it lives with cannot move there)")
                continue
            run = model.run_with_move(number, at)
            whole = run.makespan + plan.overhead
            change = whole - plan.makespan
            text += (
                f", would finish at {show_seconds(run.finish[number])}; the step would take "
                f"{show_seconds(whole)} ({'+' if change >= 0 else '-'}"
                f"{show_seconds(abs(change))})"
            )
            if plan.low is not None and plan.high is not None:
                is_chance = 0 < -change < (plan.high - plan.low) / 2
                text += ": no gain expected, a step is less certain" if is_chance else ""
        lines.append(text)
    return lines


def _limit(plan: PlanData, node: PlannedNode) -> str:
    return plan.model.limits.get(node.name, node.why) if plan.model else node.why
