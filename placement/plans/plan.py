"""Plan: what users hold of a placement: where each node runs and when, why, and what it costs.

    Graph + Cluster + shapes ─cost─→ Problem ─placer─→ Assignment ─simulate─→ Plan

A session places by a Plan; a saved one gives the same placement again.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphflow.base.argument_checks import checks, meant, spelt
from graphflow.base.formatting import counted, show_bytes, show_seconds
from graphflow.base.interrupts import passes_interrupts
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlanError
from graphflow.frontend.pytree import bind, concerns, flatten
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import show_shape
from graphflow.passes import optimize
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.plans.explanations import Model, explain
from graphflow.placement.plans.graph_fingerprint import fingerprint
from graphflow.placement.plans.plan_records import Interval, Measured, PlannedNode, PlannedTransfer
from graphflow.strategy import partition_for_strategy

if TYPE_CHECKING:
    import networkx

    from graphflow.placement.calibration.calibrate import StepCost
    from graphflow.placement.calibration.trace_corrections import Learned
    from graphflow.placement.placers import Placer
    from graphflow.placement.plans.plan_diff import Difference
    from graphflow.placement.plans.report import Report

SUFFIXES = (".html", ".svg", ".json", ".dot")


@spelt(PlanError)
@dataclass(frozen=True)
class Plan:
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
    """

    cluster: Cluster
    placer: str
    nodes: tuple[PlannedNode, ...]
    transfers: tuple[PlannedTransfer, ...]
    makespan: float
    peak_memory: Mapping[str, int]
    baselines: Mapping[str, float]
    shapes: Mapping[str, tuple[int, ...]]
    fingerprint: str
    measured: Measured | None = None
    reproducible: bool = True
    overhead: float = 0.0
    model: Model | None = field(default=None, compare=False, repr=False)

    @property
    def placement(self) -> Mapping[str, str]:
        """Node name -> device name."""
        return {node.name: node.device for node in self.nodes}

    @property
    def timeline(self) -> tuple[Interval, ...]:
        """What devices and links are predicted to do, by start."""
        rows = [
            Interval(node.device, node.name, node.start, node.finish, "compute")
            for node in self.nodes
            if node.finish > node.start
        ]
        rows += [
            Interval(f"{t.source} → {t.target}", t.tensor, t.start, t.finish, "transfer")
            for t in self.transfers
        ]
        return tuple(sorted(rows, key=lambda row: (row.start, row.finish, row.track, row.name)))

    @cached_property
    def by_name(self) -> dict[str, PlannedNode]:
        """Nodes by name."""
        return {node.name: node for node in self.nodes}

    def maker(self, tensor: str) -> str:
        """The node that makes a tensor: "split:1" is the second output of "split"."""
        return tensor if tensor in self.by_name else tensor.rpartition(":")[0]

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
            name = self._meant(name)
        return explain(self, name)

    def _meant(self, name: str) -> str:
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
                f"{name!r} is a scope of {counted(len(inside), 'node')}: explain one of them, "
                f"such as {told}"
            )
        hint = meant(name, self.by_name, most=3)
        raise PlanError(
            f"no node {name!r} is placed by this plan (constants are not)"
            + (f"; {hint}" if hint else "")
        )

    def report(self) -> Report:
        """A table: busy and idle time and peak memory of each device, predicted and measured;
        bytes over each link; the critical path with names and lines. Print it."""
        from graphflow.placement.plans.report import report

        return report(self)

    def diff(self, other: Plan) -> Difference:
        """What another plan does otherwise: nodes that moved and what each move alone would cost
        here, makespans, bytes over each link. Print it.

        Raises:
            PlanError: the other is no plan.
        """
        from graphflow.placement.plans.plan_diff import difference

        if not isinstance(other, Plan):
            raise PlanError(f"a plan is compared with another gf.Plan, not {other!r}")
        return difference(self, other)

    def compare(self, other: Plan) -> str:
        """What another plan of the same graph does otherwise, as text.

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
            f"transfers: {len(self.transfers)} ({show_bytes(here)}) here, "
            f"{len(other.transfers)} ({show_bytes(there)}) there"
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

    def with_measured(self, measured: Measured) -> Plan:
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
        text = self._rendered(target.suffix)
        try:
            target.write_text(text, encoding="utf-8")
        except OSError as error:
            raise PlanError(f"cannot write the plan to {target}: {error.strerror}") from None
        return target

    def _rendered(self, suffix: str) -> str:
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
    @spelt(PlanError)
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
        return loads(text, str(path))

    def to_networkx(self) -> networkx.DiGraph:
        """The placed graph: attributes of nodes are those of `PlannedNode`; edges have `bytes`, and
        `transfer` (seconds) where they cross devices. `Problem.from_networkx` reads it."""
        from graphflow.placement.plans.to_networkx import digraph_of

        return digraph_of(self)

    def _repr_html_(self) -> str:
        return self._rendered(".svg")

    def __repr__(self) -> str:
        """Short: a plan of 100,000 nodes is not read in a traceback."""
        nodes = counted(len(self.nodes), "node")
        devices = counted(len(self.cluster.devices), "device")
        return f"<Plan of {nodes} on {devices} by {self.placer}: {show_seconds(self.makespan)}>"

    def __str__(self) -> str:
        from graphflow.placement.plans.report import FEW, device_uses, shown_devices

        nodes = counted(len(self.nodes), "node")
        rows = [f"plan of {nodes} by {self.placer}: {show_seconds(self.makespan)}"]
        devices, others = shown_devices(device_uses(self))
        for use in devices:
            peak = "" if use.peak_memory is None else f", peak {show_bytes(use.peak_memory)}"
            rows.append(
                f"  {use.device}: {counted(use.nodes, 'node')}, busy {show_seconds(use.busy)}{peak}"
            )
        at_client = sum(node.device == CLIENT for node in self.nodes)
        rows += [f"  {others}"] if others else []
        rows.append(f"  {CLIENT}: {counted(at_client, 'node')}")
        rows.append(f"  {counted(len(self.transfers), 'transfer')}, {show_bytes(_traffic(self))}")
        ones = [f"one device: {device}" for device in self.cluster.devices]
        if len(ones) > FEW:
            ones = [min(ones, key=lambda name: self.baselines.get(name, inf))]
        for name in (*ones, "round robin"):
            seconds = self.baselines.get(name)
            told = "does not fit in memory" if seconds is None else show_seconds(seconds)
            rows.append(f"  {name}: {told}")
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
    return sum(t.bytes for t in plan.transfers)


# Making plans ---------------------------------------------------------------------------------


@checks(PlanError)
@passes_interrupts
def plan(
    fetches: Any,
    cluster: Cluster | str | os.PathLike[str] | None = None,
    shapes: Mapping[Tensor, Sequence[int]] | None = None,
    placer: str | Placer = "greedy",
) -> Plan:
    """Decide where the nodes of some fetches would run, without running anything.

    Args:
        fetches: a tensor, or a nest of them, as `Session.run` takes it.
        cluster: default: this process. A path is read as a cluster file.
        shapes: for placeholders with sizes that are not known.
        placer: name of the algorithm, or one with settings of its own.

    Raises:
        FetchError, PlanError: fetches that are no tensors; shapes that are missing, unknown, wrong.
        DeviceError, MemoryLimitError: a pin fits no device; the graph fits in no memory.
    """
    if cluster is None:
        cluster = Cluster.here()
    elif isinstance(cluster, str | os.PathLike):
        cluster = Cluster.load(cluster)
    elif not isinstance(cluster, Cluster):
        raise PlanError(f"a plan is for a gf.Cluster or the path of a file, not {cluster!r}")
    source = Graph(flatten(fetches)[0]).verify()
    sizes = sizes_of(source, shapes or {})
    bindings = bind(source, sizes, error=PlanError)
    graph, division = partition_for_strategy(source, cluster, bindings)
    if division is not None:
        bindings = division.bindings(bindings)
    learned, steps = known_of(cluster)
    return plan_graph(
        optimize(graph), cluster, sizes, bindings, placer, learned=learned, steps=steps,
        tasks=() if division is None else division.tasks,
    )  # fmt: skip


def known_of(cluster: Cluster) -> tuple[Learned | None, StepCost | None]:
    """What sessions before learned and measured, if the cluster is this machine."""
    from graphflow.placement.calibration import calibrate
    from graphflow.placement.calibration.cluster_rates import is_described
    from graphflow.placement.calibration.trace_corrections import kept

    if cluster.kind not in ("here", "local") or is_described(cluster):
        return None, None
    profile = calibrate.profile({d.kind for worker in cluster.workers for d in worker.devices})
    kind = "here" if cluster.kind == "here" else "process"
    return kept(profile), calibrate.steps_of(profile, kind)


def sizes_of(graph: Graph, shapes: Mapping[Tensor, Sequence[int]]) -> dict[Node, tuple[int, ...]]:
    """Shapes of all placeholders: given, or known anyway.

    Raises:
        PlanError: one is missing, wrong, or of nothing in the graph.
    """
    if not isinstance(shapes, Mapping):
        raise PlanError(f"shapes are a dict from placeholders to tuples of sizes, not {shapes!r}")
    sizes: dict[Node, tuple[int, ...]] = {}
    for tensor, shape in shapes.items():
        if not isinstance(tensor, Tensor):
            raise PlanError(f"{tensor!r} in shapes is no placeholder; use the tensor itself as key")
        try:
            sizes[tensor.node] = tuple(int(size) for size in shape)
        except (TypeError, ValueError):
            raise PlanError(
                f"the shape of {tensor.name!r} is a tuple of ints such as (128, 64), not {shape!r}"
            ) from None
        if tensor.node.op.name == "placeholder" and not concerns(graph, tensor.node):
            raise PlanError(
                f"placeholder {tensor.name!r} (made at {tensor.node.location}) has a shape, but "
                "nothing fetched depends on it; leave it out"
            )
    for node in graph.placeholders:
        spec = node.specs[0]
        if node not in sizes:
            if not spec.is_concrete:
                raise PlanError(
                    f"placeholder {graph.names[node]!r} (made at {node.location}) takes "
                    f"{show_shape(spec.shape)}: give its sizes, shapes={{{node.name}: (…)}}"
                )
            sizes[node] = tuple(int(s) for s in spec.shape)
    return sizes


def plan_graph(
    graph: Graph,
    cluster: Cluster,
    shapes: Mapping[Node, tuple[int, ...]],
    bindings: Mapping[str, int],
    placer: str | Placer = "greedy",
    homes: Mapping[Node, str] | None = None,
    profiles: Mapping[int, Mapping[str, Any]] | None = None,
    links: Mapping[tuple[str, str], tuple[float, float]] | None = None,
    learned: Learned | None = None,
    steps: StepCost | None = None,
    tasks: Sequence[str] = (),
) -> Plan:
    """Place an optimised graph.

    Args:
        shapes: of the placeholders; bindings: sizes of symbols that follow from them.
        homes: where variables live already.
        profiles, links: measured speeds, by worker and by ends; default: see `build_problem`.
        learned: what traced steps taught about them.
        steps: what a step costs beyond its nodes and transfers; default: nothing.
        tasks: what the nodes of a pipeline belong to, by their turns.

    Raises:
        DeviceError, MemoryLimitError: a pin fits no device; the graph fits in no memory.
    """
    from graphflow.placement.plans.planning import make_plan

    return make_plan(
        graph,
        cluster,
        shapes,
        bindings,
        placer,
        homes or {},
        profiles,
        links,
        learned,
        steps,
        tasks,
    )


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

    Raises:
        PlanError: the plan is of another graph.
    """
    _check_fingerprint(plan, graph)
    by_name = graph.by_name
    planned = [by_name[node.name] for node in plan.nodes]
    return [*graph.of_op("constant"), *planned, *graph.of_op("group")]


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
