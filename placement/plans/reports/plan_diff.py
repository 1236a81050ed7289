"""Differences of two plans: nodes on other devices, and what each move alone costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from graphflow.base.formatting import show_bytes, show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.plans.reports.tables import SHOWN, Printed, TextTable, more, seconds_cell

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData

VISITS = 20_000_000
"""Nodes and edges to visit, at most, to say what single changes cost."""


@dataclass(frozen=True)
class Moved:
    """A node on another device in the other plan.

    `cost` is how many seconds longer the first plan's step would be if only this node, with what
    must live with it, were where the other plan has it; None where that cannot be asked.
    """

    name: str
    op: str
    location: str
    source: str
    target: str
    cost: float | None


@dataclass(frozen=True)
class Difference(Printed):
    """The differences of another plan; print it, or show it in a notebook.

    Args:
        makespans, measured: of the first and the other plan, seconds.
        moved: nodes on other devices, in the first plan's order.
        one_graph: whether both are plans of the same graph.
        only_first, only_other: names of nodes that the other plan does not place.
        links: (source, target) -> bytes a step, in the first and in the other.
    """

    makespans: tuple[float, float]
    measured: tuple[float | None, float | None]
    moved: tuple[Moved, ...]
    only_first: tuple[str, ...]
    only_other: tuple[str, ...]
    links: Mapping[tuple[str, str], tuple[int, int]]
    nodes: int
    one_graph: bool = True

    def __bool__(self) -> bool:
        """Return True if anything differs."""
        first, other = self.makespans
        return bool(self.moved or self.only_first or self.only_other) or first != other

    @property
    def _headline(self) -> str:
        first, other = self.makespans
        ratio = f" ({_times(first, other)})" if first and other else ""
        text = f"predicted step: {show_seconds(first)} → {show_seconds(other)}{ratio}"
        if any(each is not None for each in self.measured):
            text += f"; measured {' → '.join(seconds_cell(each) or '–' for each in self.measured)}"
        text += f"; {len(self.moved)} of {self.nodes} nodes moved"
        return text if self.one_graph else f"{text}; these are plans of different graphs"

    def _tables(self) -> Iterator[TextTable]:
        if self.moved:
            ranked = sorted(self.moved, key=lambda each: -abs(each.cost or 0.0))
            heads = ("node", "op", "from → to", "line", "alone, the step takes")
            moves = tuple(
                (each.name, each.op, f"{each.source} → {each.target}", each.location,
                 _change(each.cost))
                for each in ranked[:SHOWN]
            )  # fmt: skip
            yield TextTable(f"Moved{more(len(ranked))}", heads, moves, left=4)
        for title, names in (
            ("Only in the first", self.only_first),
            ("Only in the other", self.only_other),
        ):
            if names:
                rows = tuple((name,) for name in names[:SHOWN])
                yield TextTable(f"{title}{more(len(names))}", ("node",), rows)
        changed = [(ends, sizes) for ends, sizes in self.links.items() if sizes[0] != sizes[1]]
        if changed:
            ranked_links = sorted(changed, key=lambda item: -abs(item[1][1] - item[1][0]))
            yield TextTable(
                f"Bytes a step{more(len(ranked_links))}",
                ("from → to", "first", "other", "change"),
                tuple(
                    (f"{source} → {target}", show_bytes(first), show_bytes(other),
                     f"{'+' if other >= first else '-'}{show_bytes(abs(other - first))}")
                    for (source, target), (first, other) in ranked_links[:SHOWN]
                ),
            )  # fmt: skip


def difference(first: PlanData, other: PlanData) -> Difference:
    """See `Plan.diff`."""
    here, there = first.placement, other.placement
    moved = [name for name in here if name in there and here[name] != there[name]]
    costs = _costs(first, {name: there[name] for name in moved})
    links: dict[tuple[str, str], list[int]] = {}
    for which, plan in enumerate((first, other)):
        for row in plan.moved:
            links.setdefault((row.source, row.target), [0, 0])[which] += row.bytes
    return Difference(
        makespans=(first.makespan, other.makespan),
        measured=(
            None if first.measured is None else first.measured.makespan,
            None if other.measured is None else other.measured.makespan,
        ),
        moved=tuple(
            Moved(
                name, first.by_name[name].op, first.by_name[name].location, here[name], there[name],
                costs.get(name),
            )
            for name in moved
        ),
        only_first=tuple(name for name in here if name not in there),
        only_other=tuple(name for name in there if name not in here),
        links={ends: (a, b) for ends, (a, b) in links.items()},
        nodes=len(here),
        one_graph=first.fingerprint == other.fingerprint,
    )  # fmt: skip


def _costs(plan: PlanData, targets: Mapping[str, str]) -> dict[str, float]:
    """Seconds that each single move adds to a plan's step, longest nodes first while it is cheap
    to ask."""
    model = plan.model
    if model is None:
        return {}
    problem = model.problem
    number = {name: i for i, name in reversed(list(enumerate(model.names)))}
    left = VISITS // max(1, problem.nodes + len(problem.edges))
    costs: dict[str, float] = {}
    known: dict[tuple[int, int], float] = {}
    took = {name: plan.by_name[name].finish - plan.by_name[name].start for name in targets}
    for name in sorted(targets, key=lambda name: -took[name]):
        node, device = number[name], targets[name]
        at = model.devices.index(device) if device in model.devices else -1
        if at < 0 or not problem.allowed[node, at]:
            continue
        group = int(problem.groups[node])
        key = (group if group >= 0 else -1 - node, at)
        if key not in known:
            if left <= 0:
                break
            left -= 1
            known[key] = model.run_with_move(node, at).makespan - model.timeline.makespan
        costs[name] = known[key]
    return costs


def _times(first: float, other: float) -> str:
    """1.5× as long; 2× as fast"""
    if first == other:
        return "as long"
    return f"{other / first:.3g}× as long" if other > first else f"{first / other:.3g}× as fast"


def _change(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{'+' if seconds >= 0 else '-'}{show_seconds(abs(seconds))}"
