"""A plan's report: busy and idle time of devices, bytes over links, and the critical path.

    Plan ─report→ Report;  Plan, Plan ─difference→ Difference;  [Plan, …] ─compare→ Comparison

All three are plain data that print themselves, in a terminal and in a notebook; see `difference`
and `comparison`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from graphflow.base.formatting import show_bytes, show_count, show_interval, show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.placement.plans.reports.critical_path import PathSegment, critical_path
from graphflow.placement.plans.reports.plan_notices import Constraint, PortUse, constraints, ports
from graphflow.placement.plans.reports.tables import (
    SHOWN,
    Printed,
    TextTable,
    busy_share,
    more,
    off_by,
    seconds_cell,
)

if TYPE_CHECKING:
    from graphflow.placement.plans.plan_data import PlanData
    from graphflow.placement.plans.plan_records import LinkTotal, PlacementVerdict

FEW = 4
"""Devices that are shown one by one also where they have nothing to do."""


@dataclass(frozen=True)
class DeviceUse:
    """A device in a step. Seconds and bytes; measured ones are None without a trace.

    Attributes:
        slowness: "at 0.51 of its machine's speed"; "" for a device that gets all of it.
    """

    device: str
    nodes: int
    busy: float
    busy_measured: float | None
    idle: float
    peak_memory: int | None
    peak_measured: int | None
    memory: int
    slowness: str = ""


@dataclass(frozen=True)
class LinkUse:
    """The transfers from one device to another in a step."""

    source: str
    target: str
    transfers: int
    bytes: int
    busy: float
    busy_measured: float | None


@dataclass(frozen=True)
class Report(Printed):
    """A plan in tables: print it, or show it in a notebook.

    Args:
        idle: share of the devices' time in which they compute nothing, predicted.
        critical_path: from the step's start to its end, each waiting for the one before.
        ports: what several pairs of devices share on their way, where something went through it.
        taken: constraints and fallbacks that took choices away.
        overhead: the part of the makespan that no node and no transfer takes.
        steps: that were measured.
        low, high: ends of the 80 % interval of the makespan, if that is known.
        no_gain: says that several devices surely gain nothing, if so.
        verdict: how the session compared this placement with another by the steps of both.
    """

    makespan: float
    measured: float | None
    devices: tuple[DeviceUse, ...]
    links: tuple[LinkUse, ...]
    critical_path: tuple[PathSegment, ...]
    ports: tuple[PortUse, ...] = ()
    taken: tuple[Constraint, ...] = ()
    placer: str = ""
    reproducible: bool = True
    overhead: float = 0.0
    steps: int = 0
    low: float | None = None
    high: float | None = None
    no_gain: str = ""
    verdict: PlacementVerdict | None = None

    @property
    def idle(self) -> float:
        """Share of all devices' time in which they compute nothing."""
        total = self.makespan * len(self.devices)
        return 1.0 - sum(use.busy for use in self.devices) / total if total else 0.0

    def _tables(self) -> Iterator[TextTable]:
        heads = (
            "device", "nodes", "busy", "measured", "off by", "idle", "peak memory", "measured",
            "of",
        )  # fmt: skip
        devices, others = shown_devices(self.devices)
        rows = [
            (
                use.device, str(use.nodes), show_seconds(use.busy), seconds_cell(use.busy_measured),
                off_by(use.busy, use.busy_measured),
                f"{100 * use.idle:.0f} %", _bytes(use.peak_memory), _bytes(use.peak_measured),
                show_bytes(use.memory),
            )
            for use in devices
        ]  # fmt: skip
        yield _make_table(f"Devices ({others})" if others else "Devices", heads, rows)
        links = sorted(self.links, key=lambda use: -use.bytes)
        shown = tuple(
            (
                f"{use.source} → {use.target}", str(use.transfers), show_bytes(use.bytes),
                show_seconds(use.busy), seconds_cell(use.busy_measured),
            )
            for use in links[:SHOWN]
        )  # fmt: skip
        columns = ("from → to", "tensors", "bytes", "moving", "measured")
        yield _make_table(f"Links{more(len(links))}", columns, shown)
        yield from self._notices()
        parts: dict[str, float] = {}
        for each in self.critical_path:
            parts[each.kind] = parts.get(each.kind, 0.0) + each.finish - each.start
        told = ", ".join(f"{show_seconds(took)} {kind}" for kind, took in parts.items())
        longest = sorted(self.critical_path, key=lambda each: each.start - each.finish)[:SHOWN]
        path = [
            (
                each.name, each.kind, each.where, show_seconds(each.start),
                show_seconds(each.finish - each.start), each.location,
            )
            for each in self.critical_path
            if each in longest
        ]  # fmt: skip
        title = f"Critical path: {show_count(len(self.critical_path), 'part')}, {told}"
        if len(path) < len(self.critical_path):
            title += f"; the longest {len(path)}"
        yield TextTable(title, ("node", "", "where", "at", "takes", "line"), tuple(path), left=3)

    def _notices(self) -> Iterator[TextTable]:
        if self.verdict is not None:
            yield _verdict_table(self.verdict)
        if self.ports:
            heads = ("port", "tensors", "bytes", "bytes/s", "busy", "of its bandwidth")
            rows = tuple(
                (
                    use.title, str(use.transfers), show_bytes(use.bytes),
                    f"{show_bytes(use.bandwidth)}/s", busy_share(use.busy, self.makespan),
                    f"{100 * use.used:.0f} %",
                )
                for use in self.ports[:SHOWN]
            )  # fmt: skip
            yield TextTable(f"Ports that links share{more(len(self.ports))}", heads, rows)
        if self.taken:
            cells = tuple(
                (each.why, f"{each.nodes:,}" if each.nodes else "", each.example)
                for each in self.taken[:SHOWN]
            )
            columns = ("what took choices away", "nodes", "such as")
            yield TextTable(f"Constraints{more(len(self.taken))}", columns, cells)

    @property
    def _headline(self) -> str:
        text = f"predicted step: {show_interval(self.makespan, self.low, self.high)}"
        if self.overhead:
            text += f" ({show_seconds(self.overhead)} of it beyond nodes and transfers)"
        if self.measured is not None:
            steps = show_count(self.steps, "step")
            text += f", measured {show_seconds(self.measured)} (median of {steps}"
            text += f", {off_by(self.makespan, self.measured)})" if self.makespan else ")"
        text += f"; devices idle {100 * self.idle:.0f} % of it"
        slow = [f"{use.device} runs {use.slowness}" for use in self.devices if use.slowness]
        text += "".join(f"; {each}" for each in slow[:SHOWN]) + more(len(slow))
        if self.placer:
            again = "reproducible" if self.reproducible else "not reproducible: see below"
            text += f"; placer: {self.placer}, {again}"
        return f"{text}; {self.no_gain}" if self.no_gain else text


def report(plan: PlanData) -> Report:
    """See `Plan.report`."""
    measured, took = plan.measured, _measured_seconds(plan)
    links: dict[tuple[str, str], list[LinkTotal]] = {}
    for row in plan.moved:
        links.setdefault((row.source, row.target), []).append(row)
    uses = tuple(
        LinkUse(
            source, target, sum(row.transfers for row in rows), sum(row.bytes for row in rows),
            sum(row.seconds for row in rows),
            None if measured is None else took.get(("transfer", f"{source} → {target}"), 0.0),
        )
        for (source, target), rows in links.items()
    )  # fmt: skip
    seconds = None if measured is None else measured.makespan
    return Report(
        plan.makespan, seconds, device_uses(plan), uses, critical_path(plan), ports(plan),
        constraints(plan), plan.placer, plan.reproducible, plan.overhead,
        measured.steps if measured else 0, plan.low, plan.high, plan.no_gain, plan.verdict,
    )  # fmt: skip


def shown_devices(uses: Sequence[DeviceUse]) -> tuple[list[DeviceUse], str]:
    """The devices to show, and what is said of those that are left out: they are many and have no
    nodes."""
    used = [use for use in uses if use.nodes]
    idle = len(uses) - len(used)
    return (used, f"{idle} more devices have no nodes") if idle > FEW else (list(uses), "")


def device_uses(plan: PlanData) -> tuple[DeviceUse, ...]:
    """Return each device's busy time, memory and number of nodes in a step."""
    measured, took = plan.measured, _measured_seconds(plan)
    busy, count = dict.fromkeys(plan.cluster.devices, 0.0), dict.fromkeys(plan.cluster.devices, 0)
    windows = {window.node: window.busy for window in plan.windows}
    for node in plan.nodes:
        if node.device in busy:
            inside = windows.get(node.name, {node.device: node.finish - node.start})
            for device, seconds in inside.items():
                busy[device] += seconds
            count[node.device] += 1
    return tuple(
        DeviceUse(
            device=name,
            nodes=count[name],
            busy=busy[name],
            busy_measured=None if measured is None else took.get(("compute", name), 0.0),
            idle=1.0 - busy[name] / plan.makespan if plan.makespan else 0.0,
            peak_memory=plan.peak_memory.get(name),
            peak_measured=None if measured is None else measured.peak_memory.get(name),
            memory=plan.cluster.device(name).memory,
            slowness=plan.cluster.device(name).slowness,
        )
        for name in plan.cluster.devices
    )


def _measured_seconds(plan: PlanData) -> dict[tuple[str, str], float]:
    """Seconds by kind and track."""
    took: dict[tuple[str, str], float] = {}
    for row in plan.measured.timeline if plan.measured else ():
        key = (row.kind, row.track)
        took[key] = took.get(key, 0.0) + row.finish - row.start
    return took


def _bytes(value: int | None) -> str:
    return "" if value is None else show_bytes(value)


def _make_table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> TextTable:
    """A table without the columns that say nothing: those of measurements, before a trace."""
    kept = [i for i in range(len(heads)) if not rows or any(row[i] for row in rows)]
    return TextTable(
        title, tuple(heads[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows)
    )


def _verdict_table(verdict: PlacementVerdict) -> TextTable:
    """Return what was promised of two placements beside what their steps took."""
    other = "" if verdict.other_measured is None else str(verdict.other_measured)
    rows = [("new placement", show_seconds(verdict.promised), str(verdict.measured))]
    if verdict.other_promised is not None:
        rows.append((verdict.other, show_seconds(verdict.other_promised), other or "not tried"))
    outcome = "the new one stays" if verdict.stays else f"back to {verdict.other}"
    heads = ("placement", "promised", "measured (quartiles)")
    return TextTable(f"Compared by steps: {outcome}", heads, tuple(rows))
