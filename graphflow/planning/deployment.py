"""Optimise, place and partition each set of fetches once, and send it to the workers.

    fetches ─compile→ CompiledFetches ─place_and_partition→ partitions ─send_programs→ workers

Everything that can fail because of the fetches fails before workers or variables are changed.
"""

from __future__ import annotations

import itertools
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from graphflow.base.formatting import show_count
from graphflow.base.process.gc_pause import without_collection
from graphflow.base.progress import show_progress, show_stage
from graphflow.errors import FeedError
from graphflow.execution.compiled_fetches import CompiledFetches, key_of
from graphflow.execution.step_executor import StepExecutor
from graphflow.execution.variable_store import VariableStore
from graphflow.execution.warmup_shapes import shape_signatures
from graphflow.frontend.pytree import depends_on_placeholder, fed_sizes, placeholders_behind
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor, user_location
from graphflow.passes import optimize
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.placers.construction.execution_order import order_in_turns
from graphflow.placement.plans.device_choice import BITS, describe_choice
from graphflow.placement.plans.plan import Plan, devices_of, order_of
from graphflow.planning.automatic_gpus import AutomaticGpus
from graphflow.planning.mirrors.mirror_devices import check_replicas
from graphflow.planning.mirrors.mirrors import Mirrors
from graphflow.planning.pin_checks import check_pins
from graphflow.planning.placement_check import (
    PATIENCE,
    LostPlacement,
    PlacementCheck,
    has_choice,
    is_spread,
)
from graphflow.planning.planner import Planner
from graphflow.planning.used_strategies import UsedStrategies
from graphflow.runtime.host.host_interface import Hosts
from graphflow.runtime.partitioning.partition import UNPLACED_OPS, partition, specialisation_limit
from graphflow.runtime.telemetry.logs import Log
from graphflow.strategy import COUNTER, PartitionedGraph

_log = Log("graphflow.session")
GROWTH = 2
"""Ratio of the elements of feeds from which fetches are planned again, on automatic GPUs."""
MAX_LOST = 16
"""Placements that lost which are remembered."""
_WARN_AT = 100
"""Sets of fetches from one source line at which a warning suggests to build the graph once."""


class Deployment:
    """The sets of fetches for which the workers of a cluster have programs.

    Args:
        plan: the plan for the first fetches.
        mirrors: the mirrors of variables, if there are any.
        checks: which values partitions check for NaN and infinity (`nonfinite_check`).
        flush_denormals: whether CPUs count denormal numbers as zero.
        gpus: GPUs that join the cluster when a graph may gain by them.

    Attributes:
        compiled: sets of fetches, by `key_of`.
        check: the comparison of placements that is going on, if any.
        lost: placements that lost such a comparison, the latest.
        strategies: the strategies that partition graphs, and their counters.
        should_replan: all fetches are to be planned again after the step, because GPUs joined or
            feeds outgrew those that were planned for.
    """

    def __init__(
        self,
        cluster: Cluster,
        hosts: Hosts,
        state: VariableStore,
        steps: StepExecutor,
        planner: Planner,
        plan: Plan | None,
        checks: str = "",
        mirrors: Mirrors | None = None,
        gpus: AutomaticGpus | None = None,
        flush_denormals: bool = False,
    ) -> None:
        self.checks = checks
        self.flush_denormals = flush_denormals
        self.gpus = gpus  # None once they are open
        self.should_replan = False
        self.mirrors = mirrors
        self.cluster = cluster
        self.hosts = hosts
        self.state = state
        self.steps = steps
        self.planner = planner
        self.compiled: dict[tuple[int, ...], CompiledFetches] = {}
        self.check: PlacementCheck | None = None
        self.lost: deque[LostPlacement] = deque(maxlen=MAX_LOST)
        self._plan = plan  # None after its first use
        self._has_given_plan = plan is not None
        self._checks_first_plans = plan is None and planner.checks_first_plans
        self._whole = cluster  # strategies partition for it even after workers were lost
        self.strategies = UsedStrategies(state, steps)

    @property
    def has_losses(self) -> bool:
        """True if other workers have the parts of lost ones, by their mirrors.

        Measurements of devices then do not belong to the devices of plans.
        """
        return self.mirrors is not None and bool(self.mirrors.lost)

    def find(self, tensors: Sequence[Tensor]) -> CompiledFetches | None:
        """Return a set of fetches that was compiled before; else None."""
        return self.compiled.get(key_of(tensors))

    def placeholders(self, tensors: Sequence[Tensor]) -> list[Sequence[Node]]:
        """Return the placeholders that feeds may name, nearest first.

        First those of these fetches, then those of functions whose derivatives they are, then the
        session's others.
        """
        compiled = self.find(tensors)
        source = compiled.source if compiled is not None else Graph(tensors)
        own = list(source.placeholders)
        derived = sorted(placeholders_behind(source) - {*own}, key=lambda node: node.serial)
        known = {*own, *derived}
        others = {n: None for c in list(self.compiled.values()) for n in c.source.placeholders}
        return [own, derived, [node for node in others if node not in known]]

    @without_collection
    def compile(self, tensors: Sequence[Tensor], shapes: Mapping[Node, Any]) -> CompiledFetches:
        """Return the set of fetches; if it is new, verified and optimised, but neither placed nor
        sent.

        Args:
            shapes: shapes of the next feeds. A batch that is too small for the shards of a
                strategy is partitioned in another way.
        """
        for variant in itertools.count():
            compiled = self.compiled.get(key_of(tensors, variant))
            if compiled is None:
                break
            counter = None if compiled.division is None else compiled.division.counter
            count = self.strategies.read_counter(counter)
            if compiled.suits(shapes, count):
                if counter is not None:
                    self.strategies.counts.note(counter, count[COUNTER], compiled)
                return compiled
        source = Graph(tensors).verify()
        self._open_gpus_for(source, shapes)
        with show_progress("optimising", len(source)):
            division = self.strategies.divide(source, fed_sizes(source, shapes), self._whole)
            graph = source if division is None else division.graph
            return CompiledFetches(
                tuple(tensors), source, optimize(graph), division=division, variant=variant
            )

    def _open_gpus_for(self, graph: Graph, shapes: Mapping[Node, Any]) -> None:
        """Let the GPUs of this machine join the cluster if a graph may gain by them."""
        if self.gpus is None or not self.gpus.may_help(graph, _shapes(graph, shapes)):
            return
        cluster = self.gpus.open(self.planner)
        self.gpus = None
        self.should_replan = len(cluster.devices) > 1 and bool(self.compiled)
        self.cluster = self._whole = cluster

    @property
    def all_devices(self) -> Cluster:
        """The cluster, with GPUs that are not open yet."""
        return self.cluster if self.gpus is None else self.gpus.find()

    def prepare(
        self,
        compiled: CompiledFetches,
        shapes: Mapping[Node, Any],
        bindings: dict[str, int],
        arrays: Mapping[Node, Any] | None = None,
    ) -> None:
        """Place the fetches; if they are placed, check that these sizes fit as well.

        Args:
            arrays: the feeds of the next step, by which a trial is more like it.

        Raises:
            MemoryLimitError: they do not fit as they are placed; see `migration.place_anew`.
        """
        if not compiled.program:
            self._place(compiled, shapes, bindings, arrays)
        elif compiled.check_memory(self.cluster, bindings):
            self._note_larger_feeds(compiled, shapes)

    def _note_larger_feeds(self, compiled: CompiledFetches, shapes: Mapping[Node, Any]) -> None:
        """Let fetches be planned again if their feeds outgrew those that were planned for.

        A batch of one runs on the CPU, and a batch of thousands of the same model may gain by a
        GPU. Given plans, and placements on devices that the user named, stay.
        """
        if self.gpus is not None:
            self._open_gpus_for(compiled.source, shapes)
            if self.gpus is None:
                compiled.sizes = shapes
        elif self._has_given_plan or not self.cluster.is_automatic:
            return
        elif _elements(shapes) >= GROWTH * _elements(compiled.sizes):
            compiled.sizes, self.should_replan = shapes, True

    # Before the first step --------------------------------------------------------------------

    def place_together(self, sets: Sequence[Sequence[Tensor]], sizes: Mapping[Node, Any]) -> None:
        """Place several sets of fetches so that the homes of variables suit them all.

        Raises:
            FeedError: a shape is missing or wrong.
        """
        self._choose_homes([t for tensors in sets for t in tensors], sizes)
        for tensors in sets:
            if self.find(tensors) is None:
                compiled = self.compile(tensors, sizes)
                known = _shapes(compiled.source, sizes)
                self._place(compiled, known, compiled.bindings(known))

    def warm_up(self, tensors: Sequence[Tensor], shapes: Mapping[Tensor, Any] | None) -> None:
        """Place fetches, and let the workers compile them for feeds of some shapes.

        Raises:
            FeedError: a placeholder, a shape or the length of a list is wrong or missing.
        """
        steps = shape_signatures(Graph(tensors), shapes)
        for each in steps:
            compiled = self.compile(tensors, each)
            bindings = compiled.bindings(each)
            self.prepare(compiled, each, bindings)
            kept = min(
                (p.max_specialisations for p in compiled.partitions.values()), default=len(steps)
            )
            if len(steps) > kept:
                raise FeedError(
                    f"warmup at {user_location()}: {len(steps)} combinations of shapes, but of "
                    f"these fetches at most {kept} are kept; warm up those that come first"
                )
            if compiled.partitions:
                self.hosts.prepare(compiled.program, bindings)
            if not compiled.is_timed:
                compiled.find_cached_step(self.hosts, each, bindings)

    def _choose_homes(self, tensors: Sequence[Tensor], sizes: Mapping[Node, Any]) -> None:
        """Choose homes of variables as a plan of one graph of all fetches would.

        Several sets may assign one variable, so this joint graph cannot run and is not verified.
        """
        graph = Graph(tensors)
        self._open_gpus_for(graph, sizes)
        if len(self.cluster.devices) == 1 or not tensors or self._plan is not None:
            return
        joint = CompiledFetches(tuple(tensors), graph, graph)
        joint.sizes = _shapes(graph, sizes)
        for node, device in devices_of(self.planner.plan(joint), graph).items():
            if node.op.name == "variable":
                self.state.homes.setdefault(node, device)

    def undeploy(self, cluster: Cluster | None) -> None:
        """Note that the workers have no programs any more: fetches are sent again at their next
        use.

        Args:
            cluster: a new cluster, on which they are placed anew; None keeps their placements.
        """
        for old in list(self.compiled.values()):  # another thread may still run a first step
            old.program, old.is_warm = "", False
            old.drop_cached_steps()
        if cluster is not None:
            self.compiled.clear()
            self.lost.clear()
            self.check = None
            self.cluster, self._plan = cluster, None
            self.planner.move(cluster)

    def change_cluster(self, cluster: Cluster) -> None:
        """Take in workers that have joined, and leave out those that have left. Programs and
        variables stay where they are."""
        self.cluster = self._whole = cluster
        self.planner.move(cluster)
        if self.mirrors is not None:
            self.mirrors.change_cluster(cluster)

    # Placing ----------------------------------------------------------------------------------

    @without_collection
    def _place(
        self,
        compiled: CompiledFetches,
        sizes: Mapping[Node, Any],
        bindings: dict[str, int],
        arrays: Mapping[Node, Any] | None = None,
    ) -> None:
        """Place, partition and send; after an error the session is as it was."""
        compiled.sizes = sizes
        is_new = compiled.plan is None and compiled.division is None
        devices = show_count(len(self.cluster.devices), "device")
        with show_progress("placing", len(compiled.graph), f"on {devices}"):
            self.place_and_partition(compiled, bindings, arrays)
            show_stage("sending programs")
            self.send_programs(compiled)
        self._tell_choice(compiled)
        if is_new and self._checks_first_plans:
            self._check_first_plan(compiled)

    def _tell_choice(self, compiled: CompiledFetches) -> None:
        """Log which devices compute the fetches, if there were a CPU and GPUs to choose from."""
        if compiled.plan is None:
            note, numbers = "" if self.gpus is None else self.gpus.note, ""
        else:
            note, numbers = describe_choice(compiled.plan), BITS
        if note:
            _log.tell("devices.chosen", devices=note, numbers=numbers)

    def place_and_partition(
        self,
        compiled: CompiledFetches,
        bindings: dict[str, int],
        arrays: Mapping[Node, Any] | None = None,
    ) -> None:
        """Place the fetches unless they have a plan, and partition them; the session does not
        change."""
        graph = compiled.graph
        check_pins(compiled.source, self.cluster)
        order: Sequence[Node] | None = None
        if len(self.cluster.devices) == 1 and self._plan is None and compiled.plan is None:
            (device,) = self.cluster.devices
            compiled.devices = {n: device for n in graph.nodes if n.op.name not in UNPLACED_OPS}
            order = order_in_turns(graph)
        else:
            is_fresh = compiled.plan is None and self._plan is None and compiled.division is None
            if is_fresh and not self.has_losses:
                self.planner.profile_first_steps(compiled, bindings, arrays)
            compiled.plan = compiled.plan or self._plan or self.planner.plan(compiled)
            compiled.devices = devices_of(compiled.plan, graph)
            order = order_of(compiled.plan, graph)
        show_stage("partitioning")
        self.partition_placed(compiled, order, bindings)

    def partition_placed(
        self, compiled: CompiledFetches, order: Sequence[Node] | None, bindings: dict[str, int]
    ) -> None:
        """Partition fetches whose nodes have devices; the session does not change.

        Args:
            order: the order of the nodes; default: that of the graph.
        """
        graph = compiled.graph
        names = self.state.new_names(graph.variables)
        self.state.check_loaded_checkpoint(
            names, compiled.division.variables if compiled.division else {}
        )
        known = {**self.state.names, **names}
        self._check_copies(compiled)
        if self.mirrors is None or not self.mirrors.is_active:
            parts = partition(
                graph, compiled.devices, order, known, self.cluster.devices, self.cluster.pinned
            )
        else:
            parts = self.mirrors.partition(compiled, order, known, bindings)
        kept = specialisation_limit(parts.values())
        compiled.set_partitions(
            {
                device: replace(
                    part,
                    checks=self.checks,
                    max_specialisations=kept,
                    flush_denormals=self.flush_denormals,
                )
                for device, part in parts.items()
            }
        )
        compiled.check_memory(self.cluster, bindings)

    def _check_copies(self, compiled: CompiledFetches) -> None:
        """Let variables have mirrors from now on, if the strategy of fetches asks for them.

        Raises:
            ArgumentError, ClusterError: it asks for more than there can be.
        """
        divided = compiled.division.variables if compiled.division is not None else ()
        strategy = next((found for v in divided if (found := self.strategies.find(v))), None)
        copies = check_replicas(getattr(strategy, "state_copies", 1), self._whole)
        if copies > 1 and self.mirrors is not None and not self.mirrors.is_active:
            self.mirrors.is_active = True
            programs = [c.program for c in self.compiled.values() if c.program]
            self.undeploy(None)  # those of before would not change the mirrors
            self.hosts.forget(programs, {})

    def _check_first_plan(self, compiled: CompiledFetches) -> None:
        """Let the first plan over several devices show by its steps that it is worth them."""
        plan = compiled.plan
        if plan is None or not is_spread(plan) or not has_choice(plan):
            return
        check = self.check or PlacementCheck(self.steps.committed + PATIENCE)
        if check.accepts_first_plans:
            self.begin_check(replace(check, plans={**check.plans, compiled.key: plan}))

    def begin_check(self, check: PlacementCheck | None) -> None:
        """Time the next steps of the fetches of a check; None: of no fetches."""
        self.check = check
        for key, compiled in list(self.compiled.items()):
            compiled.is_timed = check is not None and key in check.plans
            if compiled.is_timed:
                compiled.drop_cached_steps()
                compiled.recent_seconds.clear()

    def send_programs(self, compiled: CompiledFetches) -> None:
        """Send the workers their partitions, and the values of new variables.

        If Ctrl-C interrupts this, it is repeated as a whole before a step runs.
        """
        graph = compiled.graph
        if compiled.division is not None:
            self._split_variables(compiled.division)
        names = self.state.new_names(graph.variables)
        program = self.steps.add(compiled)
        self._plan = None
        self.compiled[compiled.key] = compiled
        self._warn_of_graphs_in_loops(compiled)
        self.state.register(names)
        self.state.mirrors.add(compiled.mirror_homes, compiled.mirror_reads)
        for node in graph.variables:
            self.state.assign_home(node, compiled.devices[node])
        self.state.mirrors.note_current(())
        compiled.program = program

    def _warn_of_graphs_in_loops(self, compiled: CompiledFetches) -> None:
        """Warn once if a program builds a graph for each step: that is slow and keeps all
        graphs."""
        lines = [c.fetches[0].node.location for c in self.compiled.values() if c.fetches]
        if compiled.fetches and lines.count(line := compiled.fetches[0].node.location) == _WARN_AT:
            warnings.warn_explicit(
                f"{_WARN_AT} graphs that were built on this line have been run, and the session "
                "keeps each of them compiled; build one before the loop, and feed what changes",
                RuntimeWarning,
                line.file,
                line.line,
            )

    def _split_variables(self, division: PartitionedGraph) -> None:
        """Replace whole variables by shards, and drop the programs that use them whole."""
        fresh = {n: p for n, p in division.variables.items() if n not in self.state.shards}
        stale = [
            c for c in self.compiled.values() if not fresh.keys().isdisjoint(c.graph.variables)
        ]
        for old in stale:
            del self.compiled[old.key]
        leaving = self.state.split(fresh)
        if stale:
            self.hosts.forget([old.program for old in stale if old.program], leaving)


def _shapes(source: Graph, sizes: Mapping[Node, Any]) -> dict[Node, tuple[int, ...]]:
    """Return the shapes of all placeholders: those given, and static ones."""
    shapes = {
        node: tuple(size) for node, size in sizes.items() if depends_on_placeholder(source, node)
    }
    for node in source.placeholders:
        if node not in shapes and node.specs[0].is_concrete:
            shapes[node] = tuple(int(s) for s in node.specs[0].shape)
    return shapes


def _elements(shapes: Mapping[Node, Any]) -> int:
    """Return the number of elements of all feeds."""
    return sum(prod(shape) for shape in shapes.values())
