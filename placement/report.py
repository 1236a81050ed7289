"""What a plan comes to, in tables: who is busy and idle, what travels, what the step waits for.

    Plan ─report→ Report;  Plan, Plan ─diff→ Difference;  [Plan, …] ─compare→ Comparison

All three are plain data that print themselves, in a terminal and in a notebook.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import TYPE_CHECKING

from graphflow.errors import PlanError
from graphflow.placement.explain import show_bytes, show_seconds
from graphflow.placement.notices import PortUse, Taken, ports, taken
from graphflow.placement.tables import Table
from graphflow.placement.view.text import printable

if TYPE_CHECKING:
    from graphflow.placement.plan import Plan, PlannedNode, PlannedTransfer

SHOWN = 20
"""Rows of a list that may be long, when it is printed."""
VISITS = 20_000_000
"""Nodes and edges to visit, at most, to say what single changes cost."""


@dataclass(frozen=True)
class DeviceUse:
    """A device in a step. Seconds and bytes; measured ones are None without a trace."""

    device: str
    nodes: int
    busy: float
    busy_measured: float | None
    idle: float
    peak_memory: int | None
    peak_measured: int | None
    memory: int


@dataclass(frozen=True)
class LinkUse:
    """What goes from one device to another in a step."""

    source: str
    target: str
    transfers: int
    bytes: int
    busy: float
    busy_measured: float | None


@dataclass(frozen=True)
class Segment:
    """A part of the critical path: a node, a transfer, or a wait for nothing that a plan shows.

    `where` is a device, or a link "a → b"; `location` the user's line.
    """

    kind: str
    name: str
    where: str
    start: float
    finish: float
    location: str


@dataclass(frozen=True)
class Report:
    """A plan in tables: print it, or show it in a notebook.

    Args:
        idle: share of the devices' time in which they compute nothing, predicted.
        critical_path: from the step's start to its end, each waiting for the one before.
        ports: what several pairs of devices share on their way, where something went through it.
        taken: constraints and fallbacks that took choices away.
        overhead: the part of the makespan that no node and no transfer takes.
        steps: that were measured.
    """

    makespan: float
    measured: float | None
    devices: tuple[DeviceUse, ...]
    links: tuple[LinkUse, ...]
    critical_path: tuple[Segment, ...]
    ports: tuple[PortUse, ...] = ()
    taken: tuple[Taken, ...] = ()
    placer: str = ""
    reproducible: bool = True
    overhead: float = 0.0
    steps: int = 0

    @property
    def idle(self) -> float:
        """Share of all devices' time in which they compute nothing."""
        total = self.makespan * len(self.devices)
        return 1.0 - sum(use.busy for use in self.devices) / total if total else 0.0

    def _tables(self) -> Iterator[Table]:
        heads = (
            "device", "nodes", "busy", "measured", "off by", "idle", "peak memory", "measured",
            "of",
        )  # fmt: skip
        rows = [
            (
                use.device, str(use.nodes), show_seconds(use.busy), _seconds(use.busy_measured),
                off_by(use.busy, use.busy_measured),
                f"{100 * use.idle:.0f} %", _bytes(use.peak_memory), _bytes(use.peak_measured),
                show_bytes(use.memory),
            )
            for use in self.devices
        ]  # fmt: skip
        yield _told("Devices", heads, rows)
        links = sorted(self.links, key=lambda use: -use.bytes)
        shown = tuple(
            (
                f"{use.source} → {use.target}", str(use.transfers), show_bytes(use.bytes),
                show_seconds(use.busy), _seconds(use.busy_measured),
            )
            for use in links[:SHOWN]
        )  # fmt: skip
        columns = ("from → to", "tensors", "bytes", "moving", "measured")
        yield _told(f"Links{_more(len(links))}", columns, shown)
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
        title = f"Critical path: {len(self.critical_path)} parts, {told}"
        if len(path) < len(self.critical_path):
            title += f"; the longest {len(path)}"
        yield Table(title, ("node", "", "where", "at", "takes", "line"), tuple(path), left=3)

    def _notices(self) -> Iterator[Table]:
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
            yield Table(f"Ports that links share{_more(len(self.ports))}", heads, rows)
        if self.taken:
            cells = tuple(
                (each.why, f"{each.nodes:,}" if each.nodes else "", each.example)
                for each in self.taken[:SHOWN]
            )
            columns = ("what took choices away", "nodes", "such as")
            yield Table(f"Constraints{_more(len(self.taken))}", columns, cells)

    @property
    def _headline(self) -> str:
        text = f"predicted step: {show_seconds(self.makespan)}"
        if self.overhead:
            text += f" ({show_seconds(self.overhead)} of it beyond nodes and transfers)"
        if self.measured is not None:
            text += f", measured {show_seconds(self.measured)} (median of {self.steps} steps"
            text += f", {off_by(self.makespan, self.measured)})" if self.makespan else ")"
        text += f"; devices idle {100 * self.idle:.0f} % of it"
        if self.placer:
            again = "reproducible" if self.reproducible else "not reproducible: see below"
            text += f"; placer: {self.placer}, {again}"
        return text

    def __str__(self) -> str:
        return "\n".join([self._headline, *map(str, self._tables())])

    def _repr_html_(self) -> str:
        headline = escape(printable(self._headline))
        return f"<p>{headline}</p>" + "".join(table.html() for table in self._tables())


def report(plan: Plan) -> Report:
    """See `Plan.report`."""
    measured = plan.measured
    took: dict[tuple[str, str], float] = {}
    for row in measured.timeline if measured else ():
        key = (row.kind, row.track)
        took[key] = took.get(key, 0.0) + row.finish - row.start
    busy, count = dict.fromkeys(plan.cluster.devices, 0.0), dict.fromkeys(plan.cluster.devices, 0)
    for node in plan.nodes:
        if node.device in busy:
            busy[node.device] += node.finish - node.start
            count[node.device] += 1
    devices = tuple(
        DeviceUse(
            device=name,
            nodes=count[name],
            busy=busy[name],
            busy_measured=None if measured is None else took.get(("compute", name), 0.0),
            idle=1.0 - busy[name] / plan.makespan if plan.makespan else 0.0,
            peak_memory=plan.peak_memory.get(name),
            peak_measured=None if measured is None else measured.peak_memory.get(name),
            memory=plan.cluster.device(name).memory,
        )
        for name in plan.cluster.devices
    )
    links: dict[tuple[str, str], list[PlannedTransfer]] = {}
    for transfer in plan.transfers:
        links.setdefault((transfer.source, transfer.target), []).append(transfer)
    uses = tuple(
        LinkUse(
            source, target, len(rows), sum(row.bytes for row in rows),
            sum(row.finish - row.start for row in rows),
            None if measured is None else took.get(("transfer", f"{source} → {target}"), 0.0),
        )
        for (source, target), rows in links.items()
    )  # fmt: skip
    seconds = None if measured is None else measured.makespan
    return Report(
        plan.makespan, seconds, devices, uses, critical_path(plan), ports(plan), taken(plan),
        plan.placer, plan.reproducible, plan.overhead, measured.steps if measured else 0,
    )  # fmt: skip


def critical_path(plan: Plan) -> tuple[Segment, ...]:
    """What the end of a step waits for, back to its start: inputs, transfers, its device's turn.

    Time O(n log n + e): every part is found by what ended when it began.
    """
    came = _Arrivals(plan)
    nodes = [came.of_node(node) for node in plan.nodes if node.finish > node.start]
    ends = nodes + [came.of_transfer(row) for row in plan.transfers]
    if not ends:
        return ()
    part: Segment | None = max(ends, key=lambda each: each.finish)
    path: list[Segment] = []
    while part is not None and len(path) <= 2 * (len(plan.nodes) + len(plan.transfers)):
        path.append(part)
        before = came.before(part)
        if before is not None and part.start - before.finish > 1e-9 * plan.makespan:
            gap = (before.finish, part.start)
            path.append(Segment("waiting", "", part.where, *gap, ""))
        part = before
    return tuple(each for each in reversed(path) if each.finish > each.start)


class _Arrivals:
    """Finds what a node or a transfer waited for."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._nodes = plan.by_name
        self._sent = {(plan.maker(row.tensor), row.target): row for row in plan.transfers}
        self._by_tensor = {(row.tensor, row.target): row for row in plan.transfers}
        self._lines: dict[str, list[PlannedNode]] = {}
        for node in sorted(plan.nodes, key=lambda node: (node.start, node.finish)):
            if node.finish > node.start:
                self._lines.setdefault(node.device, []).append(node)
        self._ends = {at: [node.finish for node in line] for at, line in self._lines.items()}
        self._wires: dict[str, list[PlannedTransfer]] = {}
        for row in sorted(plan.transfers, key=lambda row: (row.start, row.finish)):
            self._wires.setdefault(f"{row.source} → {row.target}", []).append(row)
        self._leaves = {wire: [row.start for row in rows] for wire, rows in self._wires.items()}

    def of_node(self, node: PlannedNode) -> Segment:
        return Segment("computing", node.name, node.device, node.start, node.finish, node.location)

    def of_transfer(self, row: PlannedTransfer) -> Segment:
        maker = self._nodes.get(self._plan.maker(row.tensor))
        where = f"{row.source} → {row.target}"
        line = maker.location if maker is not None else ""
        return Segment("moving", row.tensor, where, row.start, row.finish, line)

    def before(self, part: Segment) -> Segment | None:
        """What ended last of all that had to end before a part could begin."""
        if part.kind == "moving":
            return self._before_transfer(part)
        node = self._nodes[part.name]
        found: list[Segment] = []
        for name in node.inputs:
            source = self._nodes[name]
            row = self._sent.get((name, node.device))
            if source.device == node.device:
                found.append(self.of_node(source))
            elif row is not None:
                found.append(self.of_transfer(row))
        ends = self._ends.get(node.device, [])
        at = bisect_right(ends, node.start)
        if at:  # what kept the device busy; nodes that take no time keep nobody waiting
            found.append(self.of_node(self._lines[node.device][at - 1]))
        return self._latest(found)

    def _before_transfer(self, part: Segment) -> Segment | None:
        """Its maker, or the tensor that the link moved before; of that, until it had left."""
        maker = self._nodes.get(self._plan.maker(part.name))
        if maker is not None and maker.finish >= part.start:
            return self._latest([self.of_node(maker)])
        found = [] if maker is None else [self.of_node(maker)]
        at = bisect_left(self._leaves[part.where], part.start)
        if at:
            left = self.of_transfer(self._wires[part.where][at - 1])
            found.append(replace(left, finish=min(left.finish, part.start)))
        return self._latest(found)

    @staticmethod
    def _latest(found: list[Segment]) -> Segment | None:
        """The last to end; where several end at once, one that took time."""
        real = [each for each in found if each.finish > 0.0]
        return max(
            real, key=lambda each: (each.finish, each.finish > each.start, each.start), default=None
        )


# Two plans ------------------------------------------------------------------------------------


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
class Difference:
    """What another plan does otherwise; print it, or show it in a notebook.

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
        """Whether anything differs."""
        first, other = self.makespans
        return bool(self.moved or self.only_first or self.only_other) or first != other

    @property
    def _headline(self) -> str:
        first, other = self.makespans
        ratio = f" ({_times(first, other)})" if first and other else ""
        text = f"predicted step: {show_seconds(first)} → {show_seconds(other)}{ratio}"
        if any(each is not None for each in self.measured):
            text += f"; measured {' → '.join(_seconds(each) or '–' for each in self.measured)}"
        text += f"; {len(self.moved)} of {self.nodes} nodes moved"
        return text if self.one_graph else f"{text}; these are plans of different graphs"

    def _tables(self) -> Iterator[Table]:
        if self.moved:
            ranked = sorted(self.moved, key=lambda each: -abs(each.cost or 0.0))
            heads = ("node", "op", "from → to", "line", "alone, the step takes")
            moves = tuple(
                (each.name, each.op, f"{each.source} → {each.target}", each.location,
                 _change(each.cost))
                for each in ranked[:SHOWN]
            )  # fmt: skip
            yield Table(f"Moved{_more(len(ranked))}", heads, moves, left=4)
        for title, names in (
            ("Only in the first", self.only_first),
            ("Only in the other", self.only_other),
        ):
            if names:
                rows = tuple((name,) for name in names[:SHOWN])
                yield Table(f"{title}{_more(len(names))}", ("node",), rows)
        changed = [(ends, sizes) for ends, sizes in self.links.items() if sizes[0] != sizes[1]]
        if changed:
            ranked_links = sorted(changed, key=lambda item: -abs(item[1][1] - item[1][0]))
            yield Table(
                f"Bytes a step{_more(len(ranked_links))}",
                ("from → to", "first", "other", "change"),
                tuple(
                    (f"{source} → {target}", show_bytes(first), show_bytes(other),
                     f"{'+' if other >= first else '-'}{show_bytes(abs(other - first))}")
                    for (source, target), (first, other) in ranked_links[:SHOWN]
                ),
            )  # fmt: skip

    def __str__(self) -> str:
        return "\n".join([self._headline, *map(str, self._tables())])

    def _repr_html_(self) -> str:
        headline = escape(printable(self._headline))
        return f"<p>{headline}</p>" + "".join(table.html() for table in self._tables())


def difference(first: Plan, other: Plan) -> Difference:
    """See `Plan.diff`."""
    here, there = first.placement, other.placement
    moved = [name for name in here if name in there and here[name] != there[name]]
    costs = _costs(first, {name: there[name] for name in moved})
    links: dict[tuple[str, str], list[int]] = {}
    for which, plan in enumerate((first, other)):
        for row in plan.transfers:
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


def _costs(plan: Plan, targets: Mapping[str, str]) -> dict[str, float]:
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
            known[key] = model.moved(node, at).makespan - model.timeline.makespan
        costs[name] = known[key]
    return costs


# Many plans -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """Plans side by side; print it, or show it in a notebook.

    Args:
        names: of the plans, in the order given.
    """

    names: tuple[str, ...]
    plans: tuple[Plan, ...]

    @property
    def best(self) -> str:
        """Name of the plan with the shortest predicted step."""
        return min(zip(self.names, self.plans, strict=True), key=lambda pair: pair[1].makespan)[0]

    def table(self) -> Table:
        """A column for each plan."""
        reports = [report(plan) for plan in self.plans]
        first = self.plans[0].makespan
        rows: list[tuple[str, ...]] = [
            ("devices", *(summary(plan) for plan in self.plans)),
            ("placer", *(plan.placer for plan in self.plans)),
            ("predicted step", *(show_seconds(plan.makespan) for plan in self.plans)),
            ("speed-up", *(_ratio(first, plan.makespan) for plan in self.plans)),
        ]
        if any(plan.measured is not None for plan in self.plans):
            rows.append(("measured step", *(_seconds(each.measured) for each in reports)))
        rows += [
            ("devices used", *(str(sum(use.busy > 0 for use in r.devices)) for r in reports)),
            ("idle", *(f"{100 * each.idle:.0f} %" for each in reports)),
            ("transfers", *(str(len(plan.transfers)) for plan in self.plans)),
            ("bytes moved", *(show_bytes(sum(t.bytes for t in p.transfers)) for p in self.plans)),
            (
                "peak memory",
                *(show_bytes(max(p.peak_memory.values(), default=0)) for p in self.plans),
            ),
            ("critical path: computing", *(_path_share(each, "computing") for each in reports)),
            ("critical path: moving", *(_path_share(each, "moving") for each in reports)),
        ]
        return Table(f"{len(self.plans)} plans", ("", *self.names), tuple(rows))

    def __str__(self) -> str:
        return str(self.table())

    def _repr_html_(self) -> str:
        return self.table().html()


def compare(plans: Mapping[str, Plan] | Sequence[Plan]) -> Comparison:
    """Plans side by side: predicted steps, idle shares, traffic, memory, what the step waits for.

    Args:
        plans: by name, or a list, which are called plan 1, plan 2, …

    Raises:
        PlanError: no plans, or something else among them.
    """
    from graphflow.placement.plan import Plan

    if isinstance(plans, Mapping):
        named = {str(name): plan for name, plan in plans.items()}
    elif isinstance(plans, list | tuple):
        named = {f"plan {i}": plan for i, plan in enumerate(plans, start=1)}
    else:
        raise PlanError(f"compare takes a list of plans, or a dict of them by name, not {plans!r}")
    if not named:
        raise PlanError("compare needs at least one plan")
    for name, plan in named.items():
        if not isinstance(plan, Plan):
            raise PlanError(f"{name} is no gf.Plan: {plan!r}")
    return Comparison(tuple(named), tuple(named.values()))


def summary(plan: Plan) -> str:
    """What a plan's cluster consists of: "16 × h100-sxm"."""
    counts: dict[str, int] = {}
    for worker in plan.cluster.workers:
        for device in worker.devices:
            kind = device.product or device.kind
            counts[kind] = counts.get(kind, 0) + 1
    return ", ".join(f"{count} × {kind}" for kind, count in counts.items())


# Cells ----------------------------------------------------------------------------------------


def _seconds(value: float | None) -> str:
    return "" if value is None else show_seconds(value)


def _bytes(value: int | None) -> str:
    return "" if value is None else show_bytes(value)


def _times(first: float, other: float) -> str:
    """1.5× as long; 2× as fast"""
    if first == other:
        return "as long"
    return f"{other / first:.3g}× as long" if other > first else f"{first / other:.3g}× as fast"


def _told(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table without the columns that say nothing: those of measurements, before a trace."""
    kept = [i for i in range(len(heads)) if not rows or any(row[i] for row in rows)]
    return Table(
        title, tuple(heads[i] for i in kept), tuple(tuple(row[i] for i in kept) for row in rows)
    )


def off_by(predicted: float, measured: float | None) -> str:
    """How much longer than predicted it took: "+12 %"."""
    if measured is None or predicted <= 0:
        return ""
    return f"{100 * (measured / predicted - 1):+.0f} %"


def busy_share(busy: float, makespan: float) -> str:
    """Seconds, and their share of a step."""
    share = f" ({100 * busy / makespan:.0f} %)" if makespan > 0 else ""
    return show_seconds(busy) + share


def _change(seconds: float | None) -> str:
    if seconds is None:
        return "?"
    return f"{'+' if seconds >= 0 else '-'}{show_seconds(abs(seconds))}"


def _ratio(first: float, other: float) -> str:
    return f"{first / other:.2f}×" if other else "–"


def _path_share(made: Report, kind: str) -> str:
    took = sum(each.finish - each.start for each in made.critical_path if each.kind == kind)
    return f"{100 * took / made.makespan:.0f} %" if made.makespan else "–"


def _more(count: int) -> str:
    return f" ({count}, the first {SHOWN})" if count > SHOWN else ""
