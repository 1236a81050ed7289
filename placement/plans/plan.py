"""Plan: what users hold of a placement: where each node runs and when, why, and what it costs.

    Graph + Cluster + shapes ─cost─→ Problem ─placer─→ Assignment ─simulate─→ Plan

A session places by a Plan; a saved one gives the same placement again.
"""

from __future__ import annotations

import os
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from graphflow.base.argument_checks import checks_argument_names, did_you_mean
from graphflow.base.formatting import show_bytes, show_count, show_interval, show_seconds
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.interrupts import passes_interrupts
from graphflow.errors import PlanError
from graphflow.ir.graph import Graph
from graphflow.ir.graph_fingerprint import fingerprint
from graphflow.ir.op import Node, Tensor
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.plans.device_choice import BITS, describe_choice
from graphflow.placement.plans.explanations import explain
from graphflow.placement.plans.plan_data import PlanData
from graphflow.placement.plans.plan_records import MeasuredSteps

if TYPE_CHECKING:
    import networkx

    from graphflow.placement.plans.reports.plan_diff import Difference
    from graphflow.placement.plans.reports.report import Report

SUFFIXES = (".html", ".svg", ".json", ".dot")


@checks_argument_names(PlanError)
@dataclass(frozen=True)
class Plan(PlanData):
    """A placement of a graph on a cluster, predicted.

    Args:
        nodes: in the global order of execution.
        makespan: seconds of a step, with the overhead.
        peak_memory: bytes by device.
        baselines: seconds of "one device: …" for each device, and of "round robin", as if no
            variable had a home yet; those that do not fit in memory are left out.
        shapes: of the placeholders, for which it was made.
        fingerprint: of the graph; a plan is for one graph.
        reproducible: whether planning again gives the same plan: not if its placer had a clock.
        overhead: seconds of a step that no node and no transfer takes: calling it, messages, and
            handing over to other threads and processes.
        low, high: ends of the 80 % interval of the makespan; None where devices are described
            instead of measured. See `placement/calibration/uncertainty.py`.
        rival: the placement on one device, or over several, that this plan was compared with.
        verdict: how a session compared its latest placement with another by the steps of both;
            None if it did not. It is not saved.
        notes: sentences of the strategy. They are not saved.
        windows: turns of servers and workers that run beside each other.
    """

    def explain(self, name: str) -> str:
        """Why a node is where it is, what it waited for, and what moving it would do to the step.

        Raises:
            PlanError: no node of that name is placed.
        """
        if isinstance(name, Tensor):
            name = name.name
        if not isinstance(name, str):
            raise PlanError(f"explain takes the name of a node, or a tensor, not {name!r}")
        if name not in self.by_name:
            name = self._resolve_name(name)
        return explain(self, name)

    def _resolve_name(self, name: str) -> str:
        """The node that a tensor's name speaks of ("split:1").

        Raises:
            PlanError: it speaks of none; says what is near, or what a scope of that name holds.
        """
        if self.maker(name) in self.by_name and name.rpartition(":")[2].isdigit():
            return self.maker(name)
        inside = [each for each in self.by_name if each.startswith(f"{name}/")] if name else []
        if inside:
            told = ", ".join(map(repr, inside[:3]))
            raise PlanError(
                f"{name!r} is a scope of {show_count(len(inside), 'node')}: explain one of them, "
                f"such as {told}"
            )
        hint = did_you_mean(name, self.by_name, most=3)
        raise PlanError(
            f"no node {name!r} is placed by this plan (constants are not)"
            + (f"; {hint}" if hint else "")
        )

    def report(self) -> Report:
        """A table: busy and idle time and peak memory of each device, predicted and measured;
        bytes over each link; the critical path with names and lines. Print it."""
        from graphflow.placement.plans.reports.report import report

        return report(self)

    def diff(self, other: Plan) -> Difference:
        """Compare with another plan: nodes that moved and what each move alone would cost
        here, makespans, bytes over each link. Print it.

        Raises:
            PlanError: the other is no plan.
        """
        from graphflow.placement.plans.reports.plan_diff import difference

        if not isinstance(other, Plan):
            raise PlanError(f"a plan is compared with another gf.Plan, not {other!r}")
        return difference(self, other)

    def compare(self, other: Plan) -> str:
        """Describe how another plan of the same graph differs, as text.

        Raises:
            PlanError: the other is no plan.
        """
        if not isinstance(other, Plan):
            raise PlanError(f"a plan is compared with another gf.Plan, not {other!r}")
        ratio = other.makespan / self.makespan if self.makespan else 1.0
        lines = [
            f"predicted step: {show_seconds(self.makespan)} here, "
            f"{show_seconds(other.makespan)} there ({ratio:.2f}×)"
        ]
        for text, plan in (("here", self), ("there", other)):
            if plan.measured is not None:
                lines.append(f"measured step {text}: {show_seconds(plan.measured.makespan)}")
        here, there = _traffic(self), _traffic(other)
        lines.append(
            f"transfers: {_transfers(self)} ({show_bytes(here)}) here, "
            f"{_transfers(other)} ({show_bytes(there)}) there"
        )
        mine, theirs = self.placement, other.placement
        moved = [n for n in mine if n in theirs and mine[n] != theirs[n]]
        lines.append(f"{len(moved)} of {len(mine)} nodes are on other devices")
        lines += [f"  {name}: {mine[name]} here, {theirs[name]} there" for name in moved[:20]]
        if len(moved) > 20:
            lines.append(f"  … and {len(moved) - 20} more")
        only = [sorted(set(mine) - set(theirs)), sorted(set(theirs) - set(mine))]
        for text, names in zip(("here", "there"), only, strict=True):
            if names:
                lines.append(f"only {text}: {', '.join(names[:10])}")
        return "\n".join(lines)

    def with_measured(self, measured: MeasuredSteps) -> Plan:
        """The plan with what happened beside what was predicted."""
        return replace(self, measured=measured)

    # Out and in -------------------------------------------------------------------------------

    @passes_interrupts
    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the plan: .json (to load again), or a drawing: .html, .svg, .dot.

        Raises:
            PlanError: another suffix, a folder that cannot be written, or (.html) a drawing
                library that is not installed.
        """
        target = _path(path)
        if target.suffix not in SUFFIXES:
            raise PlanError(
                f"a plan is saved as {', '.join(SUFFIXES)}, not {target.suffix or 'no suffix'!r}: "
                f"{target}"
            )
        text = self._render(target.suffix)
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot write the plan to {target}: {error.strerror}") from None
        return target

    def _render(self, suffix: str) -> str:
        if suffix == ".json":
            from graphflow.placement.plans.plan_file import dumps

            return dumps(self)
        if suffix == ".html":
            from graphflow.placement.view.page import html

            return html.render(self)
        if suffix == ".svg":
            from graphflow.placement.view import svg

            return svg.render(self)
        from graphflow.placement.view import dot

        return dot.render(self)

    @staticmethod
    @checks_argument_names(PlanError)
    @passes_interrupts
    def load(path: str | os.PathLike[str]) -> Plan:
        """Read a plan that was saved as .json.

        Raises:
            PlanError: unreadable, no plan, or one of another version.
        """
        from graphflow.placement.plans.plan_file import loads

        try:
            text = _path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the plan {path}: {error}") from None
        return Plan(**loads(text, str(path)))

    def to_networkx(self) -> networkx.DiGraph:
        """The placed graph: attributes of nodes are those of `PlannedNode`; edges have `bytes`, and
        `transfer` (seconds) where they cross devices. `Problem.from_networkx` reads it."""
        from graphflow.placement.plans.to_networkx import digraph_of

        return digraph_of(self)

    def _repr_html_(self) -> str:
        return self._render(".svg")

    def __repr__(self) -> str:
        """Short: a plan of 100,000 nodes is not read in a traceback."""
        nodes = show_count(len(self.nodes), "node")
        devices = show_count(len(self.cluster.devices), "device")
        return f"<Plan of {nodes} on {devices} by {self.placer}: {show_seconds(self.makespan)}>"

    def __str__(self) -> str:
        from graphflow.placement.plans.reports.report import FEW, device_uses, shown_devices
        from graphflow.placement.plans.reports.window_lines import window_lines

        nodes = show_count(len(self.nodes), "node")
        step = show_interval(self.makespan, self.low, self.high)
        rows = [f"plan of {nodes} by {self.placer}: {step}"]
        devices, others = shown_devices(device_uses(self))
        for use in devices:
            peak = "" if use.peak_memory is None else f", peak {show_bytes(use.peak_memory)}"
            nodes = show_count(use.nodes, "node")
            slow = f", {use.slowness}" if use.slowness else ""
            rows.append(f"  {use.device}: {nodes}, busy {show_seconds(use.busy)}{peak}{slow}")
        at_client = sum(node.device == CLIENT for node in self.nodes)
        rows += [f"  {others}"] if others else []
        rows.append(f"  {CLIENT}: {show_count(at_client, 'node')}")
        rows.append(f"  {show_count(_transfers(self), 'transfer')}, {show_bytes(_traffic(self))}")
        ones = [f"one device: {device}" for device in self.cluster.devices]
        if len(ones) > FEW:
            ones = [min(ones, key=lambda name: self.baselines.get(name, inf))]
        for name in (*ones, "round robin"):
            seconds = self.baselines.get(name)
            told = "does not fit in memory" if seconds is None else show_seconds(seconds)
            rows.append(f"  {name}: {told}")
        if choice := describe_choice(self):
            rows += [f"  chosen: {choice}", f"  numbers: {BITS}"]
        rows += [f"  {note}" for note in self.notes]
        rows += [f"  {line}" for line in window_lines(self)]
        rows += [f"  {self.no_gain}"] if self.no_gain else []
        if self.measured is not None:
            rows.append(f"  measured: {show_seconds(self.measured.makespan)}")
        if not self.reproducible:
            rows.append("  not reproducible: it was searched for against a clock")
        return "\n".join(rows)


def _path(path: str | os.PathLike[str]) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise PlanError(f"a plan is in a file: give its path, such as 'plan.json', not {path!r}")
    return Path(path)


def _traffic(plan: Plan) -> int:
    return sum(row.bytes for row in plan.moved)


def _transfers(plan: Plan) -> int:
    return sum(row.transfers for row in plan.moved)


def devices_of(plan: Plan, graph: Graph) -> dict[Node, str]:
    """The device of each node of a graph, other than constants, placeholders and groups.

    Raises:
        PlanError: the plan is of another graph.
    """
    _check_fingerprint(plan, graph)
    by_name = graph.by_name
    return {by_name[n.name]: n.device for n in plan.nodes if n.device != CLIENT}


def order_of(plan: Plan, graph: Graph) -> list[Node]:
    """All nodes of a graph in the plan's order: constants first, groups last.

    A window of turns begins with its first party, perhaps before inputs of others. A node comes
    after all of its inputs nevertheless.

    Raises:
        PlanError: the plan is of another graph.
    """
    _check_fingerprint(plan, graph)
    by_name = graph.by_name
    planned = [by_name[node.name] for node in plan.nodes]
    left = dict.fromkeys([*graph.of_op("constant"), *planned, *graph.of_op("group")])
    found = list[Node]()
    stack = [*left][::-1]
    while stack:
        before = [t.node for t in stack[-1].inputs if t.node in left]
        if before and stack[-1] in left:
            stack += before
        elif left.pop(node := stack.pop(), 0) is None:
            found.append(node)
    return found


def _check_fingerprint(plan: Plan, graph: Graph) -> None:
    if fingerprint(graph) == plan.fingerprint:
        return
    planned = set(plan.by_name)
    have = {n for node, n in graph.names.items() if node.op.name not in ("constant", "group")}
    differ = sorted(planned ^ have)[:5]
    told = f"they differ in {', '.join(map(repr, differ))}" if differ else "ops or shapes differ"
    raise PlanError(
        f"the plan is of another graph ({len(planned)} nodes; this one has {len(have)}): {told}; "
        "plan these fetches again with gf.plan"
    )
