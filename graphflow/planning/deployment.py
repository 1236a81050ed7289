"""Deployment: fetches are optimised, placed, partitioned, and given to the workers, once for each
set of them.

    fetches ─prepared→ Compiled ─divide→ {device: Partition} ─hand_out→ workers

What can fail for the fetches' sake fails before the workers or the variables know of it.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from graphflow.base.gc_pause import without_collection
from graphflow.base.progress import telling
from graphflow.errors import DeviceError, FeedError
from graphflow.execution.compiled_fetches import Compiled, key_of
from graphflow.execution.step_executor import Steps
from graphflow.execution.variable_store import State
from graphflow.execution.warmup_shapes import signatures
from graphflow.frontend.pytree import concerns, derived_from, fed_sizes
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor, user_location
from graphflow.passes import optimize
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.placers.construction.execution_order import order_in_turns
from graphflow.placement.plans.plan import Plan, devices_of, order_of
from graphflow.planning.planner import Planner
from graphflow.runtime.host.host_interface import Hosts
from graphflow.runtime.partitioning.partition import FREE, forms, partition
from graphflow.strategy import PartitionedGraph, Strategy, partition_by, strategy_of

_MANY = 100
"""Sets of fetches from one line of code that are hardly what was meant."""


class Deployment:
    """The sets of fetches that a cluster's workers have programs of.

    Args:
        plan: to place the first fetches by.
        checks: what partitions look at (`finite.CHECKS`).

    Attributes:
        compiled: sets of fetches, by the identity of these.
    """

    def __init__(
        self,
        cluster: Cluster,
        hosts: Hosts,
        state: State,
        steps: Steps,
        planner: Planner,
        plan: Plan | None,
        checks: str = "",
    ) -> None:
        self.checks = checks
        self.cluster = cluster
        self.hosts = hosts
        self.state = state
        self.steps = steps
        self.planner = planner
        self.compiled: dict[tuple[int, ...], Compiled] = {}
        self._plan = plan  # until it has placed something
        self._whole = cluster  # by which strategies divide, also when workers have been lost
        self._strategies: dict[Node, Strategy] = {}  # by which each variable was divided

    def known(self, tensors: Sequence[Tensor]) -> Compiled | None:
        """What there is of these fetches already."""
        return self.compiled.get(key_of(tensors))

    def placeholders(self, tensors: Sequence[Tensor]) -> list[Sequence[Node]]:
        """Placeholders that feeds may name: those of these fetches, those that they are derived
        from, then the session's others."""
        compiled = self.known(tensors)
        source = compiled.source if compiled is not None else Graph(tensors)
        others = {n: None for c in list(self.compiled.values()) for n in c.source.placeholders}
        derived = sorted(derived_from(source), key=lambda node: node.serial)
        return [list(source.placeholders), derived, list(others)]

    @without_collection
    def of(self, tensors: Sequence[Tensor], shapes: Mapping[Node, Any]) -> Compiled:
        """The same, or else verified and optimised; then nothing is placed or sent yet.

        Args:
            shapes: that are about to be fed: a batch too small for the shards of its strategy is
                divided in another way.
        """
        for variant in itertools.count():
            compiled = self.compiled.get(key_of(tensors, variant))
            if compiled is None:
                break
            if compiled.suits(shapes):
                return compiled
        source = Graph(tensors).verify()
        with telling("optimising", len(source)):
            division = self._divided(source, fed_sizes(source, shapes))
            graph = source if division is None else division.graph
            return Compiled(
                tuple(tensors), source, optimize(graph), division=division, variant=variant
            )

    def _divided(self, source: Graph, fed: Mapping[str, int]) -> PartitionedGraph | None:
        """How a strategy divides a graph: its own, or the one that divided its variables before."""
        pieces = self.state.pieces
        strategy = strategy_of(source)
        if strategy is None:
            strategy = next((self._strategies[v] for v in source.variables if v in pieces), None)
        if strategy is None:
            return None
        division = partition_by(strategy, source, self._whole, pieces, fed)
        self._strategies |= dict.fromkeys(division.variables, strategy)
        return division

    def prepare(
        self, compiled: Compiled, shapes: Mapping[Node, Any], bindings: dict[str, int]
    ) -> None:
        """Place, unless that was done for other sizes: then they must fit there."""
        if compiled.program:
            compiled.check_memory(self.cluster, bindings)
        else:
            self._place(compiled, shapes, bindings)

    # Ahead ------------------------------------------------------------------------------------

    def place_together(self, sets: Sequence[Sequence[Tensor]], sizes: Mapping[Node, Any]) -> None:
        """Place several sets of fetches so that variables live where it suits them all.

        Raises:
            FeedError: a shape that is missing or wrong.
        """
        self._choose_homes([t for tensors in sets for t in tensors], sizes)
        for tensors in sets:
            if self.known(tensors) is None:
                compiled = self.of(tensors, sizes)
                known = _shapes(compiled.source, sizes)
                self._place(compiled, known, compiled.bindings(known))

    def warm_up(self, tensors: Sequence[Tensor], shapes: Mapping[Tensor, Any] | None) -> None:
        """Place fetches, and let the workers compile them for feeds of some shapes.

        Raises:
            FeedError: a placeholder, a shape or the length of a list that is wrong or missing.
        """
        steps = signatures(Graph(tensors), shapes)
        for each in steps:
            compiled = self.of(tensors, each)
            bindings = compiled.bindings(each)
            self.prepare(compiled, each, bindings)
            kept = min((p.forms for p in compiled.partitions.values()), default=len(steps))
            if len(steps) > kept:
                raise FeedError(
                    f"warmup at {user_location()}: {len(steps)} combinations of shapes, but of "
                    f"these fetches at most {kept} are kept; warm up those that come first"
                )
            if compiled.partitions:
                self.hosts.prepare(compiled.program, bindings)
            compiled.find_route(self.hosts, each, bindings)

    def _choose_homes(self, tensors: Sequence[Tensor], sizes: Mapping[Node, Any]) -> None:
        """Place variables as one graph of everything would. Sets may assign a variable each, so
        that this is no graph to run, and it is not verified."""
        if len(self.cluster.devices) == 1 or not tensors or self._plan is not None:
            return
        graph = Graph(tensors)
        joint = Compiled(tuple(tensors), graph, graph)
        joint.sizes = _shapes(graph, sizes)
        for node, device in devices_of(self.planner.plan(joint), graph).items():
            if node.op.name == "variable":
                self.state.homes.setdefault(node, device)

    def undeploy(self, cluster: Cluster | None) -> None:
        """The workers have nothing any more: fetches are given to them when they are next used.

        Args:
            cluster: another one, on which they are placed anew; None: where they were.
        """
        for old in list(self.compiled.values()):  # another thread may still run a first step
            old.program = ""
            old.lose_routes()
        if cluster is not None:
            self.compiled.clear()
            self.cluster, self._plan = cluster, None
            self.planner.move(cluster)

    # Placing ----------------------------------------------------------------------------------

    @without_collection
    def _place(
        self, compiled: Compiled, sizes: Mapping[Node, Any], bindings: Mapping[str, int]
    ) -> None:
        """Place, partition and hand out; on an error the session is as it was."""
        compiled.sizes = sizes
        with telling("placing", len(compiled.graph)):
            self.divide(compiled, bindings)
            self.hand_out(compiled)

    def divide(self, compiled: Compiled, bindings: Mapping[str, int]) -> None:
        """Place, unless it has a plan, and partition; the session does not change."""
        graph = compiled.graph
        _check_pins(compiled.source, self.cluster)
        order: Sequence[Node] | None = None
        if len(self.cluster.devices) == 1 and self._plan is None and compiled.plan is None:
            (device,) = self.cluster.devices
            compiled.devices = {n: device for n in graph.nodes if n.op.name not in FREE}
            order = order_in_turns(graph)
        else:
            if compiled.plan is None and self._plan is None and compiled.division is None:
                self.planner.try_out(compiled, bindings)
            compiled.plan = compiled.plan or self._plan or self.planner.plan(compiled)
            compiled.devices = devices_of(compiled.plan, graph)
            order = order_of(compiled.plan, graph)
        names = self.state.new_names(graph.variables)
        self.state.check(names, compiled.division.variables if compiled.division else {})
        parts = partition(
            graph, compiled.devices, order, {**self.state.names, **names}, self.cluster.devices,
            self.cluster.pinned,
        )  # fmt: skip
        kept = forms(parts.values())
        compiled.partitions = {
            d: replace(p, checks=self.checks, forms=kept) for d, p in parts.items()
        }
        compiled.check_memory(self.cluster, bindings)

    def hand_out(self, compiled: Compiled) -> None:
        """Give the workers their partitions, and new variables their values. Where Ctrl-C ends
        that, it is all done again before a step runs."""
        graph = compiled.graph
        if compiled.division is not None:
            self._take_apart(compiled.division)
        names = self.state.new_names(graph.variables)
        program = self.steps.add(compiled)
        self._plan = None
        self.compiled[compiled.key] = compiled
        self._warn_of_loops(compiled)
        self.state.register(names)
        for node in graph.variables:
            self.state.settle(node, compiled.devices[node])
        compiled.program = program

    def _warn_of_loops(self, compiled: Compiled) -> None:
        """Tell once who builds a graph for each step: that works, slowly, and keeps them all."""
        lines = [c.fetches[0].node.location for c in self.compiled.values() if c.fetches]
        if compiled.fetches and lines.count(line := compiled.fetches[0].node.location) == _MANY:
            warnings.warn_explicit(
                f"{_MANY} graphs that were built on this line have been run, and the session keeps "
                "each of them compiled; build one before the loop, and feed what changes",
                RuntimeWarning,
                line.file,
                line.line,
            )

    def _take_apart(self, division: PartitionedGraph) -> None:
        """Variables that were whole until now are pieces from now on; programs that know them
        whole are given up."""
        fresh = {n: p for n, p in division.variables.items() if n not in self.state.pieces}
        stale = [
            c for c in self.compiled.values() if not fresh.keys().isdisjoint(c.graph.variables)
        ]
        for old in stale:
            del self.compiled[old.key]
        leaving = self.state.take_apart(fresh)
        if stale:
            self.hosts.forget([old.program for old in stale if old.program], leaving)


def _shapes(source: Graph, sizes: Mapping[Node, Any]) -> dict[Node, tuple[int, ...]]:
    """Shapes of all placeholders: those given, and those that are known anyway."""
    shapes = {node: tuple(size) for node, size in sizes.items() if concerns(source, node)}
    for node in source.placeholders:
        if node not in shapes and node.specs[0].is_concrete:
            shapes[node] = tuple(int(s) for s in node.specs[0].shape)
    return shapes


def _check_pins(source: Graph, cluster: Cluster) -> None:
    """Refuse pins that fit no device, also of nodes that need none once they are optimised."""
    pinned: dict[DeviceName, Node] = {}
    last: DeviceName | None = None
    for node in source.walk():
        if node.device is not last:  # nodes that stand together mostly share the object
            last = node.device
            if last:
                pinned.setdefault(last, node)
    for device, node in pinned.items():
        try:
            cluster.match(str(device))
        except DeviceError as error:
            raise DeviceError(
                f"{source.names.get(node, node.name)!r} (made at {node.location}) is pinned: "
                f"{error}"
            ) from None
