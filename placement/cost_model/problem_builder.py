"""The cost model: a graph and a cluster -> a `Problem`, by a roofline over calibrated rates.

What a placer needs to know of ops, pins, homes and links becomes arrays here, and its complaints
about node numbers become errors about the user's lines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec, evaluate, is_inexact
from graphflow.ops.communication.collectives import groups_of, own_inputs, received_bytes
from graphflow.placement.calibration.cluster_rates import Links, link_classes, link_matrices
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.clusters.port_routes import shared_links
from graphflow.placement.cost_model.body_memory import body_memory
from graphflow.placement.cost_model.device_constraints import DeviceConstraints, colocation_groups
from graphflow.placement.cost_model.node_times import UNPLACED, NodeTimes
from graphflow.placement.problems.problem import Problem


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
    learned: TraceCorrections | None = None,
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
    builder = _ProblemBuilder(graph, cluster, bindings)
    limits = DeviceConstraints(graph, cluster, homes or {})
    compute = builder.predictions.seconds(limits, profiles, contention, learned)
    return builder.problem(compute, *builder.links(profiles, links, learned))


def build_problems(
    graph: Graph,
    cluster: Cluster,
    bindings: Mapping[str, int],
    homes: Mapping[Node, str] | None = None,
    profiles: Mapping[int, Mapping[str, Any]] | None = None,
    links: Links | None = None,
    learned: TraceCorrections | None = None,
) -> tuple[GraphProblem, GraphProblem]:
    """`build_problem` without contention and with it; of a single device, one problem twice.

    Without is never slower, whatever was learned of the one on a busy machine and of the other not.
    """
    builder = _ProblemBuilder(graph, cluster, bindings)
    limits = DeviceConstraints(graph, cluster, homes or {})
    compute = builder.predictions.seconds(limits, profiles, False, learned)
    if len(cluster.devices) == 1:
        alone = builder.problem(compute, *builder.links(profiles, links, learned))
        return alone, alone
    busy = builder.predictions.seconds(limits, profiles, True, learned)
    quiet = np.minimum(compute, busy)
    alone = builder.problem(quiet, *builder.links(profiles, links, learned))
    return alone, replace(alone, problem=alone.problem.with_compute(busy))


class _ProblemBuilder:
    """The parts of a problem that the graph alone decides, given sizes."""

    def __init__(self, graph: Graph, cluster: Cluster, bindings: Mapping[str, int]) -> None:
        self.graph = graph
        self.cluster = cluster
        self.bindings = bindings
        self.predictions = NodeTimes(graph, cluster, bindings)
        self.nodes = self.predictions.nodes
        self.sinks = self.predictions.sinks
        self.count = self.predictions.count
        self.index = self.predictions.index
        self.specs = self.predictions.specs
        self.nbytes = self.predictions.nbytes
        self.tensors: dict[Tensor, int] = {}
        self.shares: dict[Tensor, Node] = {}
        self._exchanged = frozenset(node for group in groups_of(self.nodes) for node in group)
        self._teams = colocation_groups(graph)

    def links(
        self,
        profiles: Mapping[int, Mapping[str, Any]] | None,
        links: Links | None,
        learned: TraceCorrections | None,
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
            (*devices, CLIENT), self.specs, self.predictions.regions,
        )  # fmt: skip

    def _nodes_without_memory(self) -> set[Node]:
        """Nodes of updates that take no memory: what is computed straight into its variable as the
        step commits, and the elementwise nodes on the way that nothing else reads."""
        wanted = {t.node for t in self.graph.outputs}
        consumers = self.graph.consumers
        written: set[Node] = set()
        in_place = self.predictions.is_in_place

        def sweeps(reader: Node) -> bool:
            new = reader.op.name == "assign" and reader.inputs[0].spec == reader.inputs[1].spec
            unread = all(n.op.name == "group" for n in consumers[reader])
            return reader in written or (new and reader not in wanted and unread)

        for node in reversed(self.nodes):
            if node in wanted or not consumers[node]:
                continue
            if node.op.in_place:
                written.update([node] if any(map(in_place, consumers[node])) else [])
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
        """Return what a collective's node receives from each rank, and its bytes."""
        specs = [self.specs[t] for t in node.inputs]
        for source, tensor in enumerate(node.inputs):
            if tensor.node.op.name in UNPLACED:
                continue
            if source == node.attrs["rank"]:
                yield tensor, self.nbytes(tensor)
                continue
            share = Tensor(tensor.node, tensor.index)
            self.shares[share] = node
            known = partial(evaluate, bindings=self.bindings)
            yield share, round(received_bytes(node, source, specs, known))

    def memory(self) -> tuple[list[float], list[float]]:
        """Bytes that stay (variables; constants, at their first reader), and bytes of outputs."""
        stays, outputs = [0.0] * self.count, [0.0] * self.count
        last, written = _last_readers(self.graph), self._nodes_without_memory()
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


def _correct_links(
    cluster: Cluster,
    latency: np.ndarray[Any, Any],
    bandwidth: np.ndarray[Any, Any],
    learned: TraceCorrections,
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
