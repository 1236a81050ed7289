"""The cost model: a graph and a cluster -> a `Problem`, by a roofline over calibrated rates.

What a placer needs to know of ops, pins, homes and links becomes arrays here, and its complaints
about node numbers become errors about the user's lines.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from graphflow.errors import MemoryLimitError
from graphflow.graph import Graph, bind_attrs, bodies
from graphflow.op import Node, Tensor
from graphflow.ops.collectives import crossing, groups_of, own_inputs
from graphflow.ops.control import is_control
from graphflow.ops.kernels.fusion import regions_of
from graphflow.passes.duplicates import key_of
from graphflow.placement.body_memory import body_memory
from graphflow.placement.cluster import CLIENT, Cluster
from graphflow.placement.hardware import Links, classes, link_classes, link_matrices, rates
from graphflow.placement.learned import ACROSS, Bucket, Learned, half_octaves
from graphflow.placement.limits import Limits, teams
from graphflow.placement.problem import Ints, Problem
from graphflow.placement.rates import STATELESS, Rates, op_class, work
from graphflow.placement.shortage import shortages
from graphflow.placement.topology import shared_links
from graphflow.spec import TensorSpec, is_inexact, nbytes

UNPLACED = frozenset({"constant", "group"})
"""Ops outside the problem: constants are wherever they are read, groups only hold others."""


@dataclass(frozen=True, eq=False)
class GraphProblem:
    """A problem, and what its numbers mean.

    Args:
        nodes: node i of the problem is `nodes[i]`; after them come the fetches.
        sinks: tensors that the client gets; node `len(nodes) + j` of the problem is `sinks[j]`.
        tensors: by tensor id.
        shares: of those that only stand for what an exchange moves: the collective's node.
        devices: by device index; the client comes last.
        specs: of all tensors, with known shapes.
        regions: of nodes that may run as one kernel with others, all of these.
    """

    problem: Problem
    graph: Graph
    nodes: tuple[Node, ...]
    sinks: tuple[Tensor, ...]
    tensors: tuple[Tensor, ...]
    shares: Mapping[Tensor, Node]
    devices: tuple[str, ...]
    specs: Mapping[Tensor, TensorSpec]
    regions: Mapping[Node, Sequence[Node]]

    @cached_property
    def index(self) -> dict[Node, int]:
        """Number of each node in the problem."""
        return {node: i for i, node in enumerate(self.nodes)}

    def name(self, i: int) -> str:
        """Name of a node of the problem; of a fetch: that of the tensor."""
        if i < len(self.nodes):
            return self.graph.names[self.nodes[i]]
        return self.graph.names[self.sinks[i - len(self.nodes)].node]


def build_problem(
    graph: Graph,
    cluster: Cluster,
    bindings: Mapping[str, int],
    homes: Mapping[Node, str] | None = None,
    profiles: Mapping[int, Mapping[str, Any]] | None = None,
    links: Links | None = None,
    contention: bool = True,
    learned: Learned | None = None,
) -> GraphProblem:
    """The placement problem of a graph.

    Args:
        bindings: sizes of the graph's symbols.
        homes: where variables live already.
        profiles: of each worker's machine; default: this machine's.
        links: measured ones; else those of the profile, else defaults.
        contention: whether devices that share a machine slow each other down. They do, if more
            than one of them is used.
        learned: what corrects the predictions for nodes and links.

    Raises:
        DeviceError: a pin fits no device, or none that has a kernel; a home is unknown; a device
            was neither described nor measured.
    """
    builder = _Builder(graph, cluster, bindings)
    limits = Limits(graph, cluster, homes or {})
    compute = builder.seconds(limits, profiles, contention, learned)
    return builder.problem(compute, *builder.links(profiles, links, learned))


def build_problems(
    graph: Graph,
    cluster: Cluster,
    bindings: Mapping[str, int],
    homes: Mapping[Node, str] | None = None,
    profiles: Mapping[int, Mapping[str, Any]] | None = None,
    links: Links | None = None,
    learned: Learned | None = None,
) -> tuple[GraphProblem, GraphProblem]:
    """`build_problem` without contention and with it; of a single device, one problem twice."""
    builder = _Builder(graph, cluster, bindings)
    limits = Limits(graph, cluster, homes or {})
    compute = builder.seconds(limits, profiles, False, learned)
    alone = builder.problem(compute, *builder.links(profiles, links, learned))
    if len(cluster.devices) == 1:
        return alone, alone
    busy = builder.seconds(limits, profiles, True, learned)
    return alone, replace(alone, problem=alone.problem.with_compute(busy))


class _Builder:
    """The parts of a problem that the graph alone decides, given sizes."""

    def __init__(self, graph: Graph, cluster: Cluster, bindings: Mapping[str, int]) -> None:
        self.graph = graph
        self.cluster = cluster
        self.bindings = bindings
        self.nodes = tuple(node for node in graph.nodes if node.op.name not in UNPLACED)
        free = (*UNPLACED, "placeholder")
        self.sinks = tuple(dict.fromkeys(t for t in graph.outputs if t.node.op.name not in free))
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.specs = {t: t.spec.bind(bindings) for node in graph.nodes for t in node.outputs}
        self.outputs = frozenset(graph.outputs)
        self.tensors: dict[Tensor, int] = {}
        self.shares: dict[Tensor, Node] = {}
        self._exchanged = frozenset(node for group in groups_of(self.nodes) for node in group)
        self._teams = teams(graph)
        self._bytes: dict[TensorSpec, int] = {}
        regions = regions_of(graph, "cpu", self.specs, bindings)
        self._regions = {node: nodes for nodes in regions for node in nodes if len(nodes) > 1}
        self._alike, self._examples = self._classified()

    def _classified(self) -> tuple[Ints, list[Node]]:
        """(n,) the number of the class of nodes that take the same time, and one of each class:
        large graphs have few."""
        numbers: dict[Hashable, int] = {}
        alike = np.empty(len(self.nodes), dtype=np.int64)
        examples: list[Node] = []
        for i, node in enumerate(self.nodes):
            key: Hashable = node
            if node.op.name not in STATELESS:
                specs = tuple([self.specs[t] for t in node.inputs])
                attrs = key_of(dict(node.attrs)) if node.attrs else ()
                key = (node.op, specs, node.specs, attrs, self._in_place(node))
            alike[i] = number = numbers.setdefault(key, len(examples))
            if number == len(examples):
                examples.append(node)
        return alike, examples

    def nbytes(self, tensor: Tensor) -> int:
        """Bytes of a tensor."""
        spec = self.specs[tensor]
        known = self._bytes.get(spec)
        if known is None:
            known = self._bytes[spec] = nbytes(spec)
        return known

    def seconds(
        self,
        limits: Limits,
        profiles: Mapping[int, Mapping[str, Any]] | None,
        contention: bool,
        learned: Learned | None,
    ) -> np.ndarray[Any, Any]:
        """`compute`, corrected by what was learned."""
        compute = self.compute(limits, rates(self.cluster, profiles, contention))
        if learned:
            self.correct(compute, contention, learned)
        return compute

    def links(
        self,
        profiles: Mapping[int, Mapping[str, Any]] | None,
        links: Links | None,
        learned: Learned | None,
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Latencies and bandwidths, corrected by what was learned."""
        latency, bandwidth = link_matrices(self.cluster, profiles, links)
        if learned:
            _correct_links(self.cluster, latency, bandwidth, learned)
        return latency, bandwidth

    def problem(
        self,
        compute: np.ndarray[Any, Any],
        latency: np.ndarray[Any, Any],
        bandwidth: np.ndarray[Any, Any],
    ) -> GraphProblem:
        """The problem in which nodes and links take so long."""
        devices = self.cluster.devices
        shared, routes = shared_links(self.cluster)
        edges, sizes, tensors = self.edges()
        memory, output_memory = self.memory()
        problem = Problem(
            compute=compute,
            edges=np.array(edges, dtype=np.int64).reshape(-1, 2),
            bytes=np.array(sizes, dtype=np.float64),
            tensor=np.array(tensors, dtype=np.int64),
            latency=latency,
            bandwidth=bandwidth,
            memory=np.array(memory),
            output_memory=np.array(output_memory),
            capacity=np.array([*(self.cluster.device(name).memory for name in devices), np.inf]),
            groups=np.array(self.groups(), dtype=np.int64),
            contention=True,
            prefer=np.array(self.preferences(), dtype=np.int64),
            client=len(devices),
            shared=shared,
            routes=routes,
        )
        return GraphProblem(
            problem, self.graph, self.nodes, self.sinks, tuple(self.tensors), self.shares,
            (*devices, CLIENT), self.specs, self._regions,
        )  # fmt: skip

    @property
    def count(self) -> int:
        return len(self.nodes) + len(self.sinks)

    def compute(self, limits: Limits, speeds: Mapping[str, Rates]) -> np.ndarray[Any, Any]:
        """(n, d) seconds; inf where a node may not be."""
        devices = self.cluster.devices
        compute = np.full((self.count, len(devices) + 1), np.inf)
        compute[len(self.nodes) :, -1] = 0.0
        rows: dict[frozenset[str], int] = {}
        places = [rows.setdefault(limits.allowed(n), len(rows)) for n in self._placed(compute)]
        allowed = np.array([[name in row for name in devices] for row in rows], dtype=bool)
        takes = np.empty((len(self._examples), len(devices)))
        for number, node in enumerate(self._examples):
            takes[number] = self._takes(node, [speeds[name] for name in devices])
        if places:
            placed = np.array([node.op.name != "placeholder" for node in self.nodes])
            compute[: len(self.nodes), :-1][placed] = np.where(
                allowed[places], takes[self._alike[placed]], np.inf
            )
        self._fuse(compute, limits, speeds)
        return compute

    def _fuse(
        self, compute: np.ndarray[Any, Any], limits: Limits, speeds: Mapping[str, Rates]
    ) -> None:
        """What nodes take that run as one kernel, shared out by their flops as traces do, in place.

        Devices of one kind and rate are predicted once, and so are regions that are alike.
        """
        columns: dict[int, list[int]] = {}
        for at, name in enumerate(self.cluster.devices):
            columns.setdefault(id(speeds[name]), []).append(at)
        regions = [
            (nodes, [self.index[node] for node in nodes], self._moved(nodes))
            for nodes in self._together(limits)
        ]
        known: dict[Hashable, list[float]] = {}
        for members in columns.values():
            rate = speeds[self.cluster.devices[members[0]]]
            for nodes, rows, moved in regions:
                key = (id(rate), tuple(self._alike[rows].tolist()), moved)
                if key not in known:
                    known[key] = self._shared(nodes, rate, moved)
                for i, seconds in zip(rows, known[key], strict=True):
                    row = compute[i, members]
                    compute[i, members] = np.where(np.isfinite(row), seconds, row)

    def _together(self, limits: Limits) -> list[list[Node]]:
        """Nodes that run as one kernel where they are together; those whom pins, or their
        variables, may part are not counted on."""
        kept = []
        for nodes in dict.fromkeys(self._regions.values()):
            alike: dict[Hashable, list[Node]] = {}
            for node in nodes:
                alike.setdefault(limits.allowed(node), []).append(node)
            kept += [each for each in alike.values() if len(each) > 1]
        return kept

    def _moved(self, nodes: Sequence[Node]) -> float:
        """Bytes that a region reads of others, and that others read of it."""
        inside = set(nodes)
        read = {t for node in nodes for t in node.inputs if t.node not in inside}
        kept = [
            t
            for node in nodes
            for t in node.outputs
            if t in self.outputs or any(c not in inside for c in self.graph.consumers[node])
        ]
        return float(sum(map(self.nbytes, (*read, *kept))))

    def _shared(self, nodes: Sequence[Node], rate: Rates, moved: float) -> list[float]:
        """Seconds of each node of a region."""
        parts = []
        for node in nodes:
            inputs = [self.specs[t] for t in node.inputs]
            outputs = [self.specs[t] for t in node.outputs]
            amount = work(node.op, inputs, outputs, bind_attrs(node.attrs, self.bindings))
            parts.append((node.op, amount, outputs))
        total = rate.fused(parts, moved)
        flops = sum(amount.flops for _, amount, _ in parts)
        return [total * amount.flops / max(flops, 1.0) for _, amount, _ in parts]

    def _placed(self, compute: np.ndarray[Any, Any]) -> Iterator[Node]:
        """Nodes other than placeholders, whose place is noted: the client."""
        for i, node in enumerate(self.nodes):
            if node.op.name == "placeholder":
                compute[i, -1] = 0.0
            else:
                yield node

    def _takes(self, node: Node, speeds: Sequence[Rates]) -> list[float]:
        """Seconds of a node on each device."""
        if self._in_place(node):
            return [0.0] * len(speeds)
        attrs = bind_attrs(node.attrs, self.bindings)
        inputs = [self.specs[t] for t in node.inputs]
        outputs = [self.specs[t] for t in node.outputs]
        known: dict[int, float] = {}
        for rate in speeds:
            if id(rate) not in known:
                known[id(rate)] = rate.seconds(node.op, inputs, outputs, attrs)
        return [known[id(rate)] for rate in speeds]

    def correct(self, compute: np.ndarray[Any, Any], contention: bool, learned: Learned) -> None:
        """Multiply predictions by what was learned, in place."""
        named = classes(self.cluster)
        columns: dict[str, list[int]] = {}
        for at, name in enumerate(self.cluster.devices):
            columns.setdefault(named[name], []).append(at)
        busy = contention and len(self.cluster.devices) > 1
        nodes = compute[: len(self.nodes)]
        for device, members in columns.items():
            rows = nodes[:, members]
            known = np.isfinite(rows) & (rows > 0)
            some = np.flatnonzero(known.any(axis=1))
            predicted = rows[some, known[some].argmax(axis=1)].tolist()
            factors: dict[tuple[int, float], float] = {}
            for i, alike, seconds in zip(
                some.tolist(), self._alike[some].tolist(), predicted, strict=True
            ):
                factor = factors.get((alike, seconds))
                if factor is None:
                    bucket = self.bucket(self.nodes[i], device, busy, seconds)
                    factor = factors[alike, seconds] = learned.factor(bucket)
                rows[i] *= factor
            nodes[:, members] = rows

    def bucket(self, node: Node, device: str, busy: bool, predicted: float) -> Bucket:
        """What a lesson about a node is about, on a class of devices."""
        outputs = [self.specs[t] for t in node.outputs]
        attrs = bind_attrs(node.attrs, self.bindings)
        inputs = [self.specs[t] for t in node.inputs]
        amount = work(node.op, inputs, outputs, attrs, self.bindings)
        flops = predicted * 1e9 if is_control(node.op) else amount.flops
        return Bucket(
            device, busy, op_class(node.op), _variant(node.op.name, attrs),
            outputs[0].dtype.name if outputs else "",
            half_octaves(flops), half_octaves(amount.bytes),
        )  # fmt: skip

    def _in_place(self, node: Node) -> bool:
        """Whether a new value is computed straight into its variable, so that nothing is copied."""
        if node.op.name != "assign":
            return False
        variable, value = node.inputs
        op = value.node.op
        return (
            (
                (op.elementwise and is_inexact(value.dtype))
                or (op.in_place and value.node.inputs[0] is variable)
            )
            and value.spec == variable.spec
            and {node, *self._regions.get(value.node, ())}.issuperset(
                self.graph.consumers[value.node]
            )
            and node.outputs[0] not in self.outputs
            and value not in self.outputs
        )

    def _written(self) -> set[Node]:
        """Nodes of updates that take no memory: what is computed straight into its variable as the
        step commits, and the elementwise nodes on the way that nothing else reads."""
        wanted = {t.node for t in self.outputs}
        consumers = self.graph.consumers
        written: set[Node] = set()

        def sweeps(reader: Node) -> bool:
            new = reader.op.name == "assign" and reader.inputs[0].spec == reader.inputs[1].spec
            unread = all(n.op.name == "group" for n in consumers[reader])
            return reader in written or (new and reader not in wanted and unread)

        for node in reversed(self.nodes):
            if node in wanted or not consumers[node]:
                continue
            if node.op.in_place:
                written.update([node] if any(map(self._in_place, consumers[node])) else [])
            elif node.op.elementwise and is_inexact(node.outputs[0].dtype):
                written.update([node] if all(map(sweeps, consumers[node])) else [])
        return written

    def edges(self) -> tuple[list[tuple[int, int]], list[int], list[int]]:
        """Producer and consumer, bytes and tensor id of each edge.

        A collective's node reads its own rank's tensor; of the others it gets what an exchange
        moves, if they are on other devices.
        """
        edges: list[tuple[int, int]] = []
        carried: list[Tensor] = []
        sizes: dict[Tensor, int] = {}
        for i, node in enumerate(self.nodes):
            if node in self._exchanged:
                for tensor, size in self._shares_of(node):
                    edges.append((self.index[tensor.node], i))
                    carried.append(tensor)
                    sizes[tensor] = size
                continue
            for tensor in node.inputs if len(node.inputs) < 2 else dict.fromkeys(node.inputs):
                if tensor.node.op.name not in UNPLACED:
                    edges.append((self.index[tensor.node], i))
                    carried.append(tensor)
        for i, tensor in enumerate(self.sinks, start=len(self.nodes)):
            edges.append((self.index[tensor.node], i))
            carried.append(tensor)
        for tensor in carried:
            self.tensors.setdefault(tensor, len(self.tensors))
        moved = [sizes[t] if t in sizes else self.nbytes(t) for t in carried]
        return edges, moved, [self.tensors[t] for t in carried]

    def _shares_of(self, node: Node) -> Iterator[tuple[Tensor, int]]:
        """What a collective's node gets of each rank, and its bytes."""
        specs = [self.specs[t] for t in node.inputs]
        for source, tensor in enumerate(node.inputs):
            if tensor.node.op.name in UNPLACED:
                continue
            if source == node.attrs["rank"]:
                yield tensor, self.nbytes(tensor)
                continue
            share = Tensor(tensor.node, tensor.index)
            self.shares[share] = node
            yield share, round(crossing(node, source, specs))

    def memory(self) -> tuple[list[float], list[float]]:
        """Bytes that stay (variables; constants, at their first reader), and bytes of outputs."""
        stays, outputs = [0.0] * self.count, [0.0] * self.count
        last, written = _last_readers(self.graph), self._written()
        for i, node in enumerate(self.nodes):
            size = float(sum([self.nbytes(t) for t in node.outputs]))
            if node.attrs and bodies(node):
                size += body_memory(node, self.bindings)
            if node.op.name == "variable":
                stays[i] = size
            elif node.op.alias:
                # The memory of its input: of account only if it outlives that.
                outlives = last.get(node, 0) > last.get(node.inputs[0].node, 0)
                outputs[i] = size if outlives else 0.0
            elif node in written:
                outputs[i] = 0.0  # written into its variable, or never written at all
            elif node.op.name not in ("placeholder", "assign"):
                outputs[i] = size
        for node in self.graph.of_op("constant"):
            reader = next((r for r in self.graph.consumers[node] if r in self.index), None)
            if reader is not None:
                stays[self.index[reader]] += self.nbytes(node.outputs[0])
        return stays, outputs

    def groups(self) -> list[int]:
        """A variable, its slots and what assigns them share an id."""
        groups = [-1] * self.count
        for node, variable in self._teams.items():
            groups[self.index[node]] = self.index[variable]
        return groups

    def preferences(self) -> list[int]:
        """Gradients near what they differentiate, new values near their variable, a collective's
        nodes near their rank's tensor."""
        prefer = [-1] * self.count
        for i, node in enumerate(self.nodes):
            near = self.index.get(node.origin) if node.origin is not None else None
            if node.op.joint is not None and near is None and own_inputs(node):
                near = self.index.get(own_inputs(node)[0].node)
            if near is not None and near != i:
                prefer[i] = near
            elif node.op.name == "assign":
                maker = self.index.get(node.inputs[1].node)
                if maker is not None and prefer[maker] < 0:
                    prefer[maker] = self.index[node.inputs[0].node]
        return prefer


def _variant(name: str, attrs: Mapping[str, Any]) -> str:
    """An op, and which operands its kernel reads across: products of a few rows take twice as long
    by one way as by another, though they have as much to do."""
    across = "".join(side for side in "ab" if attrs.get(f"transpose_{side}"))
    return f"{name}{ACROSS}{across}" if across else name


def _correct_links(
    cluster: Cluster,
    latency: np.ndarray[Any, Any],
    bandwidth: np.ndarray[Any, Any],
    learned: Learned,
) -> None:
    """Take the links between devices as they were learned, in place."""
    for (i, j), name in link_classes(cluster).items():
        latency[i, j], bandwidth[i, j] = learned.link(name, (latency[i, j], bandwidth[i, j]))


def _last_readers(graph: Graph) -> dict[Node, int]:
    """The serial of the last node that reads each node's memory, directly or through aliases.

    An alias counts for its input only by itself: where it outlives it, it is counted on its own.
    """
    last: dict[Node, int] = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            last[tensor.node] = max(last.get(tensor.node, 0), node.serial)
    return last


# Learning -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Lesson:
    """What there is to learn about a placed node: where its ratio belongs, what calibration alone
    predicts (seconds)."""

    bucket: Bucket
    predicted: float


def lessons(
    graph: Graph,
    cluster: Cluster,
    bindings: Mapping[str, int],
    devices: Mapping[Node, str],
    profiles: Mapping[int, Mapping[str, Any]] | None = None,
    busy: bool = False,
) -> dict[str, Lesson]:
    """By name, the nodes whose spans in a trace teach something.

    Args:
        devices: where each node runs; others run where they may.
        busy: whether neighbours compute meanwhile, also where all these are one device.
    """
    builder = _Builder(graph, cluster, bindings)
    at = {name: i for i, name in enumerate(cluster.devices)}
    pinned = {node: device for node, device in devices.items() if device in at}
    limits = Limits(graph, cluster, {n: d for n, d in pinned.items() if n.op.name == "variable"})
    working = {
        device for node, device in pinned.items() if node.op.name not in ("variable", *UNPLACED)
    }
    busy = busy or len(working) > 1
    compute = builder.compute(limits, rates(cluster, profiles, busy))
    named = classes(cluster)
    found = {}
    for i, node in enumerate(builder.nodes):
        if node.op.joint is not None:
            continue  # most of its time is its links'
        device = pinned.get(node) or min(limits.allowed(node))
        predicted = float(compute[i, at[device]])
        if 0 < predicted < np.inf:
            bucket = builder.bucket(node, named[device], busy, predicted)
            found[graph.names[node]] = Lesson(bucket, predicted)
    return found


# Errors ---------------------------------------------------------------------------------------


def memory_limit(
    made: GraphProblem, nodes: Iterable[int], needed: Sequence[float]
) -> MemoryLimitError:
    """A placer's complaint that nothing fits, in the user's terms.

    Args:
        nodes: of the problem, the biggest first.
        needed: bytes for each device, of the placement that came closest.
    """
    problem = made.problem
    transient = problem.output_memory
    assert transient is not None
    room = ", ".join(
        f"{name} has {_mib(capacity)}"
        + (f" and would need {_mib(need)}" if need else "")
        + (f" ({_mib(need - capacity)} missing)" if need > capacity else "")
        for name, capacity, need in zip(made.devices[:-1], problem.capacity, needed, strict=False)
    )
    biggest = "; ".join(
        f"{made.nodes[i].op.name} {made.name(i)!r} {_mib(problem.memory[i] + transient[i])} "
        f"(made at {made.nodes[i].location})"
        for i in nodes
        if i < len(made.nodes)
    )
    error = MemoryLimitError(
        f"no placement fits in memory: {room}; variables and constants keep "
        f"{_mib(float(problem.memory.sum()))} between steps. The biggest: {biggest}. "
        f"{_impossible(made)}Use smaller batches, more or larger devices (memory= in the cluster "
        "file), or loosen pins"
    )
    error.nodes = tuple(nodes)
    return error


def _impossible(made: GraphProblem) -> str:
    """What no placement could hold, by names and lines."""
    told = []
    for each in shortages(made.problem)[:3]:
        if each.device is None:
            continue
        own = [made.nodes[i] for i in each.nodes if i < len(made.nodes)]
        names = ", ".join(
            f"{node.op.name} {made.graph.names[node]!r} (made at {node.location})"
            for node in own[:4]
        )
        told.append(
            f"{names}{', …' if len(own) > 4 else ''} alone needs {_mib(each.need)}, and the "
            f"roomiest device that it may use, {made.devices[each.device]}, has "
            f"{_mib(each.room)} ({_mib(each.missing)} missing). "
        )
    return "".join(told)


def _mib(count: float) -> str:
    return f"{count / 2**20:.3g} MiB"
