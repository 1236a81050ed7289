"""Plan → Scene: boxes, wires, bars and headline numbers, before any of them is HTML or SVG.

The two big drawings show the same things, so what they show is decided here, once, and as plain
values: names are still raw text and must be escaped by whoever writes them out.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from graphflow.base.formatting import show_bytes, show_count, show_interval, show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.plans.reports.report import DeviceUse, device_uses
from graphflow.placement.view import colours
from graphflow.placement.view.fold import fold_large
from graphflow.placement.view.layout import NODE_WIDTH, EdgeRoute, GraphLayout, arrange
from graphflow.placement.view.text import printable, shorten

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData
    from graphflow.placement.plans.plan_records import Interval, PlannedNode, PlannedTransfer

LABEL_LETTERS, DETAIL_LETTERS = 16, 20
TOLD = 0.1  # share of a step from which its overhead is told


@dataclass(frozen=True)
class Box:
    """A node as drawn: its upper left corner, two lines of text, and `heat`, its share of the
    longest node's seconds."""

    node: PlannedNode
    kernel: str
    left: float
    top: float
    label: str
    detail: str
    shade: colours.Shade
    heat: float
    measured: float | None

    def facts(self) -> list[tuple[str, str]]:
        """Return the facts of a box's tooltip, as (what, text)."""
        node = self.node
        took = show_interval(node.finish - node.start, node.low, node.high)
        if self.measured is not None:
            took += f" predicted, {show_seconds(self.measured)} measured"
        facts = [
            ("op", node.op),
            ("output", f"{node.output} · {show_bytes(node.bytes)}"),
            ("device", node.device),
            ("takes", f"{took}, from {show_seconds(node.start)}"),
            ("known from", node.basis),
            ("one kernel with", self.kernel),
            ("why here", node.why),
            ("made at", node.location),
        ]
        return [(what, printable(text)) for what, text in facts if text]


@dataclass(frozen=True)
class DrawnEdge:
    """A tensor's way to its readers on one device.

    `cut` where it leaves one device for another (feeds come from the client, and are not cut);
    `transfer` is what the plan says of that.
    """

    route: EdgeRoute
    cut: bool
    transfer: PlannedTransfer | None

    @cached_property
    def middle(self) -> tuple[float, float]:
        """Return the place of a cut wire's mark: the middle of its first crossing piece."""
        x0, y0, x1, y1 = self.route.segments()[0]
        return (x0 + x1) / 2, (y0 + y1) / 2

    def title(self) -> str:
        if self.transfer is None:
            return "leaves its device"
        t = self.transfer
        took = show_seconds(t.finish - t.start)
        return printable(f"{t.tensor}: {show_bytes(t.bytes)}, {t.source} → {t.target}, {took}")


@dataclass(frozen=True)
class TimelineRow:
    """One line of the timelines: a device or link, predicted or measured."""

    track: str
    measured: bool
    shade: colours.Shade
    link: bool
    bars: tuple[Interval, ...]


@dataclass(frozen=True)
class Scene:
    """Everything the drawings show of a plan."""

    plan: PlanData
    layout: GraphLayout
    boxes: tuple[Box, ...]
    wires: tuple[DrawnEdge, ...]
    rows: tuple[TimelineRow, ...]
    usage: tuple[DeviceUse, ...]
    lanes: tuple[str, ...]
    shades: dict[str, colours.Shade]

    @property
    def span(self) -> float:
        """Seconds that the common time axis covers."""
        ends = [bar.finish for row in self.rows for bar in row.bars]
        measured = self.plan.measured.makespan if self.plan.measured else 0.0
        return max([self.plan.makespan, measured, *ends]) or 1e-6


def headlines(plan: PlanData) -> list[tuple[str, str, str]]:
    """(title, number, remark): the step, what it would be otherwise, what moves."""
    again = "reproducible" if plan.reproducible else "not reproducible: a clock ended the search"
    remark = f"placer: {printable(plan.placer)}, {again}"
    if plan.overhead > TOLD * plan.makespan:  # else one wonders why the last node ends before
        remark += f" · {show_seconds(plan.overhead)} of it for calling the step and its messages"
    if plan.low is not None and plan.high is not None:
        within = f"{show_seconds(plan.low)} to {show_seconds(plan.high)}"
        remark = f"{within} in 4 of 5 cases · {remark}"
    lines = [("Predicted step", show_seconds(plan.makespan), remark)]
    if plan.steps_alike is not None:
        here, there = plan.steps_alike
        lines.append(("No gain expected", here, f"here, {there}"))
    if plan.measured is not None:
        remark = f"median of {show_count(plan.measured.steps, 'step')}"
        if plan.makespan > 0:
            remark += f" · {plan.measured.makespan / plan.makespan:.2f}× the prediction"
        lines.append(("Measured step", show_seconds(plan.measured.makespan), remark))
    for name, value in _baselines(plan):
        title = printable(name)
        lines.append((title[:1].upper() + title[1:], show_seconds(value), _gain(plan, value)))
    moved = [row for row in plan.moved if CLIENT not in (row.source, row.target)]
    between = f"{show_bytes(sum(row.bytes for row in moved))} between devices"
    lines.append(("Transfers a step", f"{sum(row.transfers for row in moved):,}", between))
    return lines


def _baselines(plan: PlanData) -> list[tuple[str, float]]:
    """All of them, or of many single devices only the fastest."""
    alone = [item for item in plan.baselines.items() if item[0].startswith("one device")]
    kept = alone if len(alone) < 3 else [min(alone, key=lambda item: item[1])]
    return kept + [item for item in plan.baselines.items() if item not in alone]


def _gain(plan: PlanData, baseline: float) -> str:
    if plan.makespan <= 0:
        return "predicted"
    ratio = baseline / plan.makespan
    if ratio < 0.995:
        return f"this plan takes {1 / ratio:.2f}× as long"
    return f"this plan is {ratio:.2f}× as fast" if ratio > 1.005 else "this plan gains nothing"


def scene(plan: PlanData) -> Scene:
    """Lay a plan out; a large one in groups.

    Raises:
        PlanError: its nodes read each other in a circle.
    """
    lanes = _lanes(plan)
    shades = {name: colours.shade(i) for i, name in enumerate(plan.cluster.devices)}
    shades.setdefault(CLIENT, colours.CLIENT)
    for extra, name in enumerate(lanes):
        shades.setdefault(name, colours.shade(len(plan.cluster.devices) + extra))
    shown = fold_large(plan)
    index = {node.name: i for i, node in enumerate(shown.nodes)}
    lane = {name: i for i, name in enumerate(lanes)}
    edges = [
        (index[name], i)
        for i, node in enumerate(shown.nodes)
        for name in node.inputs
        if name in index
    ]
    where = [lane[node.device] for node in shown.nodes]
    layout = arrange(len(shown.nodes), edges, where, len(lanes))
    return Scene(
        plan,
        layout,
        _boxes(shown, layout, shades),
        _wires(shown, layout, lanes),
        _rows(plan, shades),
        device_uses(plan),
        lanes,
        shades,
    )


def _lanes(plan: PlanData) -> tuple[str, ...]:
    """Devices that hold nodes; the client in the middle, near to all that it feeds."""
    used = dict.fromkeys(node.device for node in plan.nodes)
    devices = [name for name in plan.cluster.devices if name in used]
    devices += [name for name in used if name not in devices and name != CLIENT]
    if CLIENT in used:
        devices.insert(len(devices) // 2, CLIENT)
    return tuple(devices)


def _boxes(
    plan: PlanData, layout: GraphLayout, shades: dict[str, colours.Shade]
) -> tuple[Box, ...]:
    longest = max((node.finish - node.start for node in plan.nodes), default=0.0)
    measured: dict[tuple[str, str], float] = {}
    for bar in plan.measured.timeline if plan.measured else ():
        key = (bar.track, bar.name)
        measured[key] = measured.get(key, 0.0) + bar.finish - bar.start
    others = kernels(plan)
    return tuple(
        Box(
            node,
            _other_nodes(others.get(node.fused, ()), node),
            x - NODE_WIDTH / 2,
            y,
            printable(shorten(node.name, LABEL_LETTERS)),
            printable(shorten(_detail(node), DETAIL_LETTERS)),
            shades[node.device],
            (node.finish - node.start) / longest if longest > 0 else 0.0,
            measured.get((node.device, node.name)),
        )
        for node, x, y in zip(plan.nodes, layout.x, layout.y, strict=True)
    )


def kernels(plan: PlanData) -> dict[str, list[PlannedNode]]:
    """The nodes of each kernel that has several, by the name of its last."""
    found: dict[str, list[PlannedNode]] = {}
    for node in plan.nodes:
        if node.fused:
            found.setdefault(node.fused, []).append(node)
    return {name: nodes for name, nodes in found.items() if len(nodes) > 1}


def _other_nodes(kernel: Sequence[PlannedNode], node: PlannedNode) -> str:
    others = [each.name for each in kernel if each is not node]
    more = f" and {len(others) - 6} more" if len(others) > 6 else ""
    return ", ".join(others[:6]) + more


def _detail(node: PlannedNode) -> str:
    """The shape alone, "(128, 64)": the dtype is told on hovering."""
    start = node.output.find("(")
    return node.output[start:] if start >= 0 else node.op


def _wires(plan: PlanData, layout: GraphLayout, lanes: tuple[str, ...]) -> tuple[DrawnEdge, ...]:
    transfers: dict[tuple[str, str], PlannedTransfer] = {}
    for transfer in plan.transfers:
        transfers.setdefault((plan.maker(transfer.tensor), transfer.target), transfer)
    wires = []
    for route in layout.routes:
        source, target = plan.nodes[route.source], lanes[route.lane]
        cut = source.device not in (target, CLIENT)
        wires.append(DrawnEdge(route, cut, transfers.get((source.name, target))))
    return tuple(wires)


def _rows(plan: PlanData, shades: dict[str, colours.Shade]) -> tuple[TimelineRow, ...]:
    """Devices, links, feeds and fetches, predicted; after a run, measured right below. Feeds and
    fetches are part of the step but no measurement of their own."""
    sides: list[tuple[bool, tuple[Interval, ...]]] = [(False, plan.timeline)]
    if plan.measured is not None:
        sides.append((True, plan.measured.timeline))
    bars: dict[str, dict[bool, list[Interval]]] = {name: {} for name in plan.cluster.devices}
    for measured, timeline in sides:
        for bar in timeline:
            bars.setdefault(bar.track, {}).setdefault(measured, []).append(bar)
    rows = []
    for track, halves in sorted(bars.items(), key=lambda item: CLIENT in item[0]):
        for measured, _ in sides:
            if not halves:
                continue  # a device of the cluster that this plan leaves idle
            if CLIENT in track and measured not in halves:
                continue
            mine = sorted(halves.get(measured, []), key=lambda bar: (bar.start, bar.finish))
            link = track not in shades
            shade = shades[track] if not link else colours.Shade(colours.CUT, "#fbdde8")
            rows.append(TimelineRow(track, measured, shade, link, tuple(mine)))
    return tuple(rows)
