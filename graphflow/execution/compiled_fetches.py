"""A set of fetches on its way through a session, and everything of a step that depends on it
alone."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import FeedError, LinkLost, MemoryLimitError, ProtocolError
from graphflow.execution.cached_step import CachedStep
from graphflow.frontend.pytree import accepts_feed, bind, depends_on_placeholder, fed_sizes
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import evaluate
from graphflow.ops.communication.send_recv import RECEIVING_OPS, edges_of
from graphflow.ops.kernels.jit.kernel_recording import MOST_SCRATCH
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.worker_devices import threads_by_device
from graphflow.placement.plans.plan import Plan
from graphflow.placement.plans.plan_records import MeasuredSteps, PlacementVerdict
from graphflow.runtime.host.host_interface import Hosts
from graphflow.runtime.memory.memory_layout import plan_layout
from graphflow.runtime.memory.memory_use import memory_use
from graphflow.runtime.partitioning.partition import Partition
from graphflow.runtime.tracing.events import Exchange
from graphflow.runtime.tracing.trace import Trace
from graphflow.runtime.wire.step_values import CREDIT_PREFIX, EDGE_BITS, EXCHANGE_PREFIX, Key
from graphflow.strategy import PartitionedGraph, name_strategy_in_errors, strategy_of

Array = np.ndarray[Any, Any]
MAX_TIMES = 31
"""Steps whose durations are kept."""
MAX_CACHED_STEPS = 64
"""Cached steps of one set of fetches, one for each combination of sizes.

A step with other feeds than the last tries them all, and each keeps its compiled program alive.
"""
MAX_ID_FEEDS = 16
"""Steps whose ids of tables are kept."""
MAX_FACTS = 64
"""Steps whose recorded facts are kept."""
MAX_CHECKED_SIZES = 4096
"""Combinations of sizes that are known to fit."""
_OF_GROUP = re.compile(rf"{EXCHANGE_PREFIX}[^/]+/([0-9]{{1,9}})/")
_OF_EDGE = re.compile(rf"{CREDIT_PREFIX}([0-9]{{1,9}})/")
_Shapes = frozenset[tuple[Node, tuple[int, ...]]]


def key_of(tensors: Sequence[Tensor], variant: int = 0) -> tuple[int, ...]:
    """Return the key of a set of fetches: their identities and the number of the division."""
    return (*map(id, tensors), *((variant,) if variant else ()))


@dataclass
class CompiledFetches:
    """A set of fetches, optimised; later placed, partitioned and sent to the workers.

    Attributes:
        fetches: the user's tensors.
        source: their graph as it was built.
        graph: the optimised graph; output i is fetch i (see `outputs`).
        sizes: shapes of the placeholders for which it was placed.
        program: its name on the workers; empty while they do not have it.
        name: the same name, kept for when it has to be sent again.
        plan: the placement; None on a single device.
        devices: the device of each node.
        partitions: the part of each device.
        trace: its steps inside the session's open trace block.
        runs: steps that ran.
        traced: the sizes of symbols in each traced step.
        measured: the measurements of the last trace block.
        recent_seconds: durations of the last steps that were neither traced nor begun ahead.
        cached_step: the fast path for feeds like those of the last step, if there is one.
        division: how a strategy partitioned the source before it was optimised.
        variant: number of the division; a strategy may partition batches of other sizes in
            other ways.
        is_warm: True once a step ran with the present program.
        warmup_seconds: duration of that step.
        is_timed: True while placements are compared: steps run one by one, in full.
        verdict: the outcome of the last comparison.
        mirror_homes: the devices of its variables' mirrors; see `planning.mirrors`.
        mirror_reads: the other variables whose mirrors each mirror's update reads.
        sent_to_mirrors: bytes of a step that travel for mirrors alone, by device.
        id_feeds: the ids of the last steps, if they look rows up in tables that lie in ranges.
        facts: the number of the last steps, and what each recorded, if the division records facts.
    """

    fetches: tuple[Tensor, ...]
    source: Graph
    graph: Graph
    sizes: Mapping[Node, tuple[int, ...]] = field(default_factory=dict)
    program: str = ""
    name: str = ""
    runs: int = 0
    plan: Plan | None = None
    devices: Mapping[Node, str] = field(default_factory=dict)
    partitions: Mapping[str, Partition] = field(default_factory=dict)
    trace: Trace = field(default_factory=Trace)
    traced: list[dict[str, int]] = field(default_factory=list)
    measured: MeasuredSteps | None = None
    recent_seconds: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TIMES))
    cached_step: CachedStep | None = None
    division: PartitionedGraph | None = None
    variant: int = 0
    is_warm: bool = False
    warmup_seconds: float = 0.0
    is_timed: bool = False
    verdict: PlacementVerdict | None = None
    mirror_homes: Mapping[Node, str] = field(default_factory=dict)
    mirror_reads: Mapping[Node, frozenset[Node]] = field(default_factory=dict)
    sent_to_mirrors: Mapping[str, int] = field(default_factory=dict)
    id_feeds: deque[dict[Node, Array]] = field(default_factory=lambda: deque(maxlen=MAX_ID_FEEDS))
    facts: deque[tuple[int, list[Array]]] = field(default_factory=lambda: deque(maxlen=MAX_FACTS))
    _cached_steps: dict[int, CachedStep] = field(default_factory=dict)  # by id of `bindings`
    _bindings: dict[_Shapes, dict[str, int]] = field(default_factory=dict)
    _accepted: set[Node] = field(
        default_factory=set
    )  # placeholders whose feeds were accepted before
    _concerns: dict[Node, bool] = field(default_factory=dict)
    _fitting: set[tuple[tuple[str, int], ...]] = field(default_factory=set)

    @property
    def key(self) -> tuple[int, ...]:
        """Key among the session's sets of fetches. The set keeps the tensors alive whose ids it
        is."""
        return key_of(self.fetches, self.variant)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Outputs of the graph that stand for the fetches.

        The graph may have one more output, for side effects of the step.
        """
        return self.graph.outputs[: len(self.fetches)]

    def set_partitions(self, partitions: Mapping[str, Partition]) -> None:
        """Take new partitions, and forget what was derived from those before."""
        self.partitions = partitions
        self._fitting.clear()
        self.__dict__.pop("_worker_placeholders", None)

    @property
    def by_worker(self) -> dict[int, list[Partition]]:
        """Partitions of each worker's devices."""
        result: dict[int, list[Partition]] = {}
        for device, part in self.partitions.items():
            result.setdefault(worker_of(device), []).append(part)
        return result

    def check_feeds(
        self, given: Mapping[Node, Array], others: Iterable[CompiledFetches] = ()
    ) -> dict[Node, Array]:
        """Return the feeds, after checking that the fetches have all that they need.

        Args:
            others: other fetches of the session. Their feeds are accepted too, so that one dict
                serves all of them. The same holds for feeds of functions whose derivatives are
                fetched.

        Raises:
            FeedError: a feed is missing, or unknown to all of these.
        """
        records = None if self.division is None else self.division.facts
        optional = frozenset() if records is None else records.optional
        for node in given:
            if node in self._accepted:
                continue
            known = node in optional or accepts_feed(self.source, node)
            if not known and not any(node in c.source.placeholders for c in others):
                raise FeedError(
                    f"feed {node.name!r} (made at {node.location}) is unknown to these fetches and "
                    "to those that ran before: none of them depends on it; leave it out"
                )
            self._accepted.add(node)
        for node in self.source.placeholders:
            if node not in given:
                raise FeedError(
                    f"placeholder {node.name!r} (made at {node.location}) is not fed, and the "
                    f"fetches depend on it; add it to the feeds: {node.specs[0]}"
                )
        return dict(given)

    def _depends_on(self, node: Node) -> bool:
        """Return True if the fetches depend on a placeholder's value or size."""
        if node not in self._concerns:
            self._concerns[node] = depends_on_placeholder(self.source, node)
        return self._concerns[node]

    def suits(
        self,
        shapes: Mapping[Node, tuple[int, ...]],
        counter: Mapping[str, int] = MappingProxyType({}),
    ) -> bool:
        """Return True if feeds of such shapes would be partitioned as this set is.

        Args:
            counter: the value of the strategy's counter, as `COUNTER`, if there is one.
        """
        if self.division is None or (not counter and frozenset(shapes.items()) in self._bindings):
            return True
        return self.division.suits({**fed_sizes(self.source, shapes), **counter})

    def bindings(self, shapes: Mapping[Node, tuple[int, ...]]) -> dict[str, int]:
        """Return the sizes of the symbols; feeds of each combination of shapes are checked once.

        Raises:
            FeedError: sizes that must agree do not.
        """
        key = frozenset(shapes.items())
        if key not in self._bindings:
            sizes = bind(self.source, {n: s for n, s in shapes.items() if self._depends_on(n)})
            if len(self._bindings) >= MAX_CHECKED_SIZES:
                self._bindings.clear()
            if self.division is not None:
                with name_strategy_in_errors(strategy_of(self.source)):
                    sizes = self.division.bindings(sizes)
            self._bindings[key] = sizes
        return self._bindings[key]

    def check_memory(self, cluster: Cluster, bindings: Mapping[str, int]) -> bool:
        """Check that every device has enough memory, once for each combination of sizes.

        Return True if these sizes are new.

        Raises:
            MemoryLimitError: a device has not; names the largest tensors.
        """
        key = tuple(sorted(bindings.items()))
        is_new = key not in self._fitting
        if is_new:
            threads = threads_by_device(cluster.present_workers)
            for name, part in self.partitions.items():
                _check_fit(part, bindings, cluster.device(name).memory, threads[name])
            if len(self._fitting) >= MAX_CHECKED_SIZES:
                self._fitting.clear()
            self._fitting.add(key)
        return is_new

    def worker_feeds(self, arrays: Mapping[Node, Array]) -> dict[int, dict[str, Array]]:
        """Return each worker's feeds by name."""
        if self.division is not None:
            sizes = self.bindings({node: a.shape for node, a in arrays.items()})
            arrays = {**arrays, **self.division.feeds(arrays, sizes)}
        return {
            worker: {name: arrays[node] for name, node in wanted.items()}
            for worker, wanted in self._worker_placeholders.items()
        }

    @cached_property
    def _worker_placeholders(self) -> dict[int, dict[str, Node]]:
        """The placeholders that each worker reads, by name. Valid once the set is partitioned."""
        named = {self.graph.names[node]: node for node in self.graph.placeholders}
        return {
            worker: {name: named[name] for part in parts for name in part.feeds}
            for worker, parts in self.by_worker.items()
        }

    def find_cached_step(
        self, hosts: Hosts, shapes: Mapping[Node, tuple[int, ...]], names: dict[str, int]
    ) -> None:
        """Prepare the fast path for the next steps with feeds of such shapes, if they can have one.

        Args:
            names: sizes of the symbols, as `bindings` returned them.
        """
        self.cached_step = self._cached_steps.get(id(names))
        if self.cached_step is not None or not self.partitions or self.division is not None:
            return
        ready = hosts.direct_step(self.program, names)
        if ready is None:
            return
        if len(self._cached_steps) >= MAX_CACHED_STEPS:
            del self._cached_steps[next(iter(self._cached_steps))]
        parts = [part for mine in self.by_worker.values() for part in mine]
        fetched = [name for part in parts for name in part.fetches]
        numbers = {name: i for i, name in enumerate(fetched)}
        fed = {name for part in parts for name in part.feeds}
        named = {
            node: self.graph.names[node]
            for node in self.graph.placeholders
            if self.graph.names[node] in fed
        }
        self.cached_step = self._cached_steps[id(names)] = CachedStep(
            ready,
            [(node.outputs[0], named.get(node), shape) for node, shape in shapes.items()],
            [
                numbers.get(str(i))
                if str(i) in numbers or output.node.op.name == "group"
                else partial(_client_value, output)
                for i, output in enumerate(self.outputs)
            ],
            names,
        )

    def match_other_step(
        self, hosts: Hosts, feeds: Any
    ) -> tuple[CachedStep, dict[str, Array]] | None:
        """Return an earlier cached step that the feeds fit, and the feeds by name; else None."""
        for cached in self._cached_steps.values():
            named = cached.match_feeds(feeds) if cached is not self.cached_step else None
            if named is not None:
                self.cached_step = cached
                # Marks the compiled form as used last, so that it is not the next one dropped.
                hosts.direct_step(self.program, cached.bindings)
                return cached, named
        return None

    def drop_cached_steps(self) -> None:
        """Forget the cached steps, after the workers have freed the program."""
        self.cached_step = None
        self._cached_steps.clear()

    def note_duration(self, bindings: Mapping[str, int], seconds: float) -> None:
        """Note the duration of a step; while placements are compared, of the planned sizes only."""
        if not self.is_warm:
            self.warmup_seconds = seconds
        elif not self.is_timed or bindings == self.bindings(self.sizes):
            self.recent_seconds.append(seconds)

    def note_ids(self, arrays: Mapping[Node, Array]) -> None:
        """Keep what a step was fed as ids of tables whose rows lie in ranges."""
        if self.division is not None and self.division.id_feeds:
            self.id_feeds.append({node: arrays[node].copy() for node in self.division.id_feeds})

    def note_facts(self, step: int, fetched: Mapping[str, Array]) -> None:
        """Keep what a step recorded. A step that is done again replaces what it recorded before."""
        if self.division is None or self.division.facts is None:
            return
        while self.facts and self.facts[-1][0] >= step:
            self.facts.pop()
        self.facts.append((step, [np.array(fetched[str(i)]) for i in self.division.facts.outputs]))

    def replayed_feeds(self) -> Mapping[Node, Array]:
        """Return the feeds by which the last step would give the same bits again, beside those that
        it had."""
        if self.division is None or self.division.facts is None or not self.facts:
            return {}
        return self.division.facts.replayed_feeds(self.facts[-1][1])

    def history(self) -> tuple[Any, ...]:
        """Return what the last steps recorded, the oldest first."""
        if self.division is None or self.division.facts is None:
            return ()
        return tuple(self.division.facts.describe(step, values) for step, values in self.facts)

    def keep_measured(self) -> None:
        """Summarise the traced steps, if any, at the end of a trace block."""
        if self.trace.steps:
            self.measured, self.trace, self.traced = self.trace.measured(), Trace(), []

    def edges(self, bindings: Mapping[str, int]) -> dict[int, tuple[str, str, str, int]]:
        """Return tensor, source device, target device and bytes of each cut edge.

        Edges inside loops and branches are included.
        """
        return {
            edge: (
                _tensor_name(part.graph.names.get(node, node.name), edge),
                source,
                part.device,
                evaluate(node.specs[0].nbytes, bindings),
            )
            for part in self.partitions.values()
            for node in part.graph.walk()
            if node.op.name in RECEIVING_OPS
            for edge, source in edges_of(node).items()
        }

    def explain_link_loss(self, error: LinkLost) -> LinkLost:
        """Add to the error of a link which tensor or collective the link was to carry."""
        op, number = _find_receiver(error.edge)
        for part in self.partitions.values():
            for node in part.graph.walk():
                if _receives(node, op, number):
                    name = _tensor_name(part.graph.names.get(node, node.name), number)
                    what = f"is of {node.attrs['kind']}" if op != "recv" else "carries"
                    error.args = (f"{error}; it {what} {name!r}, made at {node.location}",)
                    return error
        return error

    def exchanges(self, bindings: Mapping[str, int]) -> dict[tuple[str, str], Exchange]:
        """Return the collectives between devices, by device and name of the span of each part."""
        return {
            (part.device, part.graph.names[node]): Exchange(
                node.attrs["group"],
                node.attrs["kind"],
                node.attrs["devices"],
                evaluate(node.inputs[0].spec.nbytes, bindings),
            )
            for part in self.partitions.values()
            for node in part.graph.of_op("collective_start")
            if node.inputs
        }

    def values(self, fetched: Mapping[str, Array], arrays: Mapping[Node, Array]) -> list[Any]:
        """Return the value of each fetch: from the workers, or from the client itself."""
        return [
            _client_value(output, arrays) if str(i) not in fetched else fetched[str(i)]
            for i, output in enumerate(self.outputs)
        ]


def _check_fit(part: Partition, bindings: Mapping[str, int], limit: int, threads: int) -> None:
    counts = Counter([id(spec) for node in part.graph.nodes for spec in node.specs])
    known = {id(spec): spec for node in part.graph.nodes for spec in node.specs}
    every = sum([evaluate(known[i].nbytes, bindings) * n for i, n in counts.items()])
    if every + MOST_SCRATCH <= limit:  # fits without reuse of buffers: skip the exact layout
        return
    need = memory_use(part, plan_layout(part, bindings), bindings, threads).peak
    if need > limit:
        tensors = [t for node in part.graph.nodes for t in node.outputs]
        sizes = {t: evaluate(t.spec.nbytes, bindings) for t in tensors}
        largest = sorted(sizes, key=lambda t: -sizes[t])[:3]
        names = ", ".join(
            f"{part.graph.names[t.node]!r} of {t.spec.bind(bindings)} (made at {t.node.location})"
            for t in largest
        )
        raise MemoryLimitError(
            f"these fetches need {need / 1e9:.3g} GB on {part.device}, which has "
            f"{limit / 1e9:.3g} GB; the largest tensors are {names}; feed smaller batches, or use "
            "more devices"
        )


def _receives(node: Node, op: str, number: int) -> bool:
    """Return True if a node receives what `_find_receiver` names."""
    if op == "recv":
        return node.op.name in RECEIVING_OPS and number in edges_of(node)
    return node.op.name == op and node.attrs["group"] == number


def _find_receiver(key: Key | None) -> tuple[str, int]:
    """Return op and number of edge or group of the receiving node of a key; -1 matches none."""
    if isinstance(key, str):
        group, taken = _OF_GROUP.match(key), _OF_EDGE.match(key)
        if group is not None:
            return "collective_start", int(group[1])
        return "recv", int(taken[1]) if taken is not None else -1
    return "recv", -1 if key is None else key % 2**EDGE_BITS


def _tensor_name(name: str, edge: int) -> str:
    """Return the name of the tensor after which a node is named.

    "recv/tower0/relu/3" receives "tower0/relu" on edge 3; "start/grad" starts a collective on
    "grad".
    """
    return name.removeprefix("start/").removeprefix("recv/").removesuffix(f"/{edge}")


def _client_value(output: Tensor, arrays: Mapping[Node, Array]) -> Array | None:
    match output.node.op.name:
        case "group":
            return None
        case "placeholder":
            return np.array(arrays[output.node])
        case "constant":
            return np.array(output.node.attrs["value"])
    raise ProtocolError(
        f"no worker returned the value of {output.node} at {output.node.location}; do all of them "
        "run the same code?"
    )


def worker_of(device: str) -> int:
    """Return the index of the worker in a full device name."""
    worker = DeviceName.parse(device).worker
    assert worker is not None
    return worker
