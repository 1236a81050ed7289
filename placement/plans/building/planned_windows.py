"""The windows of a plan as records: turns, updates and messages of their parties."""

from __future__ import annotations

from collections.abc import Iterator

from graphflow.base.formatting import show_count
from graphflow.ir.op import Node
from graphflow.ops.control_flow.concurrent import parties_of
from graphflow.ops.control_flow.turn_rules import TurnRules
from graphflow.placement.cost_model.problem_builder import GraphProblem
from graphflow.placement.cost_model.window_pricer import PricedWindow
from graphflow.placement.plans.plan_model import PlanModel
from graphflow.placement.plans.plan_records import Interval, LinkTotal, PlannedWindow


def planned_windows(made: GraphProblem, model: PlanModel) -> tuple[PlannedWindow, ...]:
    """Return the windows of a plan, one for each `concurrent` node."""
    found = []
    for node in made.graph.of_op("concurrent"):
        i = made.index[node]
        priced = made.windows[node, made.devices[int(model.assignment.device[i])]]
        name = made.graph.names[node]
        busy: dict[str, float] = {}
        for device, seconds in zip(priced.devices, priced.busy, strict=True):
            busy[device] = busy.get(device, 0.0) + seconds
        first = len(made.nodes) + len(made.sinks)
        parts = [k for k, each in enumerate(made.parties, start=first) if each.node is node]
        start = float(model.timeline.start[[i, *parts]].max())
        found.append(
            PlannedWindow(
                name,
                _describe(node),
                float(priced.seconds),
                priced.high,
                busy,
                tuple(_bars(name, priced, start)),
                tuple(LinkTotal(*link) for link in priced.links),
            )
        )
    return tuple(found)


def _bars(name: str, priced: PricedWindow, begin: float) -> Iterator[Interval]:
    for party, letter, number, start, finish in sorted(priced.bars, key=lambda bar: bar.start):
        kind = "send" if letter == "E" else "compute"
        label = f"{name}/{party}/{letter}{number}"
        yield Interval(priced.devices[party], label, begin + start, begin + finish, kind)


def _describe(node: Node) -> str:
    """Describe a window: "ssp (3 turns ahead) of 2 workers, 32 turns each"."""
    rules: TurnRules | None = node.attrs.get("rules")
    if rules is None:
        return f"{len(parties_of(node.attrs))} parties"
    bound = "" if rules.staleness is None else f" ({show_count(rules.staleness, 'turn')} ahead)"
    workers = show_count(len(rules.workers), "worker")
    servers = "" if len(rules.servers) == 1 else f", {len(rules.servers)} servers"
    least, most = min(rules.turns), max(rules.turns)
    turns = show_count(sum(rules.turns), "turn")
    if rules.consistency != "pool":
        turns = f"{most} turns each" if least == most else f"{least} to {most} turns each"
    return f"{rules.consistency}{bound} of {workers}{servers}, {turns}"
