"""The cost model: a graph and a cluster -> a `Problem`, by a roofline over calibrated rates.

Ops, pins, homes and links become arrays here, and a placer's errors about node numbers become
errors about the user's lines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Graph, bodies
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec, is_inexact
from graphflow.ops.communication.collectives import own_inputs
from graphflow.placement.calibration.cluster_rates import (
    Links,
    device_classes,
    link_classes,
    link_matrices,
    rates,
)
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import CLIENT
from graphflow.placement.clusters.port_routes import shared_links
from graphflow.placement.cost_model.body_memory import body_memory
from graphflow.placement.cost_model.device_constraints import DeviceConstraints, colocation_groups
from graphflow.placement.cost_model.node_errors import ErrorSources, NodeErrors, node_errors
from graphflow.placement.cost_model.node_times import NodeTimes
from graphflow.placement.cost_model.party_nodes import PartyNode, party_nodes
from graphflow.placement.cost_model.problem_edges import ProblemEdges
from graphflow.placement.cost_model.window_pricer import (
    PricedWindow,
    WindowPricer,
    price_windows,
    window_links,
)
from graphflow.placement.problems.problem import Problem
from graphflow.placement.simulation.jitter import Jitter


@dataclass(frozen=True, eq=False)
class GraphProblem:
    """A problem, and the meaning of its numbers.

    Args:
        nodes: Node i of the problem is `nodes[i]`; after them come the fetches, then the parties.
        sinks: Tensors that the client gets; node `len(nodes) + j` of the problem is `sinks[j]`.
        parties: Parties of `concurrent` nodes on other devices than the node's own.
        tensors: By tensor id.
        shares: For tensors that only stand for what a collective moves: its node.
        devices: By device index; the client comes last.
        specs: Of all tensors, with known shapes.
        regions: For a node that may run as one kernel with others, all of these.
        errors: What may be wrong about the seconds of nodes; None if that is not known.
        windows: The `concurrent` nodes as they are predicted, by node and its device.
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
    errors: NodeErrors | None = None
    parties: tuple[PartyNode, ...] = ()
    windows: Mapping[tuple[Node, str], PricedWindow] = field(default_factory=dict)

    @cached_property
    def index(self) -> dict[Node, int]:
        """Number of each node in the problem."""
        return {node: i for i, node in enumerate(self.nodes)}

    def name(self, i: int) -> str:
        """Return the name of a node of the problem; of a fetch, that of its tensor."""
        if i < len(self.nodes):
            return self.graph.names[self.nodes[i]]
        if i < len(self.nodes) + len(self.sinks):
            return self.graph.names[self.sinks[i - len(self.nodes)].node]
        party = self.parties[i - len(self.nodes) - len(self.sinks)]
        return f"{self.graph.names[party.node]}@{party.device}"


def build_problem(
    graph: Graph,
    cluster: Cluster,
    bindings: Mapping[str, int],
    homes: Mapping[Node, str] | None = None,
    profiles: Mapping[int, Mapping[str, Any]] | None = None,
    links: Links | None = None,
    contention: bool = True,
    learned: TraceCorrections | None = None,
    jitter: Jitter | None = None,
) -> GraphProblem:
    """Return the placement problem of a graph.

    Args:
        bindings: Sizes of the graph's symbols.
        homes: Where variables live already.
        profiles: Of each worker's machine. Default: this machine's.
        links: Measured ones; else those of the profile, else defaults.
        contention: Devices of one machine slow each other down, as they do if more than one is
            used.
        learned: Corrects the predictions for nodes and links.
        jitter: Makes turns of windows longer at random.

    Raises:
        DeviceError: A pin fits no device, or none that has a kernel; a home is unknown; a device
            was neither described nor measured.
    """
    builder = _ProblemBuilder(graph, cluster, bindings, jitter)
    limits = DeviceConstraints(graph, cluster, homes or {})
    between = builder.links(profiles, links, learned)
    made = builder.predict(limits, profiles, contention, learned, ErrorSources(), between)
    return replace(builder.problem(made.compute, *between), windows=made.windows)


def build_problems(
    graph: Graph,
    cluster: Cluster,
    bindings: Mapping[str, int],
    homes: Mapping[Node, str] | None = None,
    profiles: Mapping[int, Mapping[str, Any]] | None = None,
    links: Links | None = None,
    learned: TraceCorrections | None = None,
    jitter: Jitter | None = None,
) -> tuple[GraphProblem, GraphProblem]:
    """Return `build_problem` without contention, and with it.

    Of a single device they are one problem. The first is never slower, even if more was learned
    about busy machines than about idle ones.
    """
    builder = _ProblemBuilder(graph, cluster, bindings, jitter)
    limits = DeviceConstraints(graph, cluster, homes or {})
    sources = ErrorSources()
    between = builder.links(profiles, links, learned)
    quiet = builder.predict(limits, profiles, False, learned, sources, between)
    if len(cluster.devices) == 1:
        alone = builder.problem(quiet.compute, *between)
        alone = replace(alone, errors=quiet.errors, windows=quiet.windows)
        return alone, alone
    busy = builder.predict(limits, profiles, True, learned, sources, between)
    alone = builder.problem(np.minimum(quiet.compute, busy.compute), *between)
    shared = replace(
        alone,
        problem=alone.problem.with_compute(busy.compute),
        errors=busy.errors,
        windows=busy.windows,
    )
    return replace(alone, errors=quiet.errors, windows=quiet.windows), shared


@dataclass(frozen=True, eq=False)
class _Predicted:
    """Seconds of the nodes of a problem, (n, d), their errors, and the windows among them."""

    compute: np.ndarray[Any, Any]
    errors: NodeErrors | None
    windows: Mapping[tuple[Node, str], PricedWindow]


class _ProblemBuilder:
    """The parts of a problem that the graph alone decides, given sizes."""

    def __init__(
        self,
        graph: Graph,
        cluster: Cluster,
        bindings: Mapping[str, int],
        jitter: Jitter | None = None,
    ) -> None:
        self.graph = graph
        self.cluster = cluster
        self.bindings = bindings
        self.predictions = NodeTimes(graph, cluster, bindings)
        self.nodes = self.predictions.nodes
        self.sinks = self.predictions.sinks
        self.parties = party_nodes(graph, cluster)
        self.count = self.predictions.count + len(self.parties)
        self.index = self.predictions.index
        self.specs = self.predictions.specs
        self.nbytes = self.predictions.nbytes
        self._teams = colocation_groups(graph)
        self._jitter = jitter

    def predict(
        self,
        limits: DeviceConstraints,
        profiles: Mapping[int, Mapping[str, Any]] | None,
        contention: bool,
        learned: TraceCorrections | None,
        sources: ErrorSources,
        links: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
    ) -> _Predicted:
        """Return the seconds of nodes, and what may be wrong about them, if known."""
        times, speeds = self.predictions, rates(self.cluster, profiles, contention)
        compute = times.compute(limits, speeds)
        others = np.full((len(self.parties), compute.shape[1]), np.inf)
        compute = np.concatenate([compute, others])
        busy = contention and len(self.cluster.devices) > 1
        errors = node_errors(times, compute, speeds, busy, learned, sources)
        if learned:
            times.correct(compute, contention, learned)
        shares = {name: self.cluster.device(name).speed for name in self.cluster.devices}
        compute[:, :-1] /= list(shares.values())
        between = window_links(self.cluster, *links, learned)
        pricer = WindowPricer(
            speeds, device_classes(self.cluster), shares, busy, *between, learned, self._jitter
        )
        windows = price_windows(times, self.parties, pricer, compute, errors)
        return _Predicted(compute, errors, windows)

    def links(
        self,
        profiles: Mapping[int, Mapping[str, Any]] | None,
        links: Links | None,
        learned: TraceCorrections | None,
    ) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Return latencies and bandwidths, corrected by what was learned."""
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
        """Return the problem with these times of nodes and links."""
        devices = self.cluster.devices
        shared, routes = shared_links(self.cluster)
        found = ProblemEdges(self.predictions, self.parties)
        edges, sizes, tensors = found.edges()
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
            problem, self.graph, self.nodes, self.sinks, tuple(found.tensors), found.shares,
            (*devices, CLIENT), self.specs, self.predictions.regions, parties=self.parties,
        )  # fmt: skip

    def _nodes_without_memory(self) -> set[Node]:
        """Return the nodes of updates whose results take no memory.

        They are computed straight into their variable when the step commits, or are elementwise
        nodes before it that nothing else reads.
        """
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

    def memory(self) -> tuple[list[float], list[float]]:
        """Return the bytes that stay between steps, and the bytes of outputs.

        Variables stay, and constants, which count at their first reader.
        """
        stays, outputs = [0.0] * self.count, [0.0] * self.count
        last, written = _last_readers(self.graph), self._nodes_without_memory()
        for i, node in enumerate(self.nodes):
            size = float(sum([self.nbytes(t) for t in node.outputs]))
            if node.attrs and bodies(node):
                size += body_memory(node, self.bindings)
            if node.op.name == "variable":
                stays[i] = size
            elif node.op.alias:
                # It has its input's memory, and counts only if it outlives that.
                outlives = last.get(node, 0) > last.get(node.inputs[0].node, 0)
                outputs[i] = size if outlives else 0.0
            elif node in written:
                outputs[i] = 0.0  # written into its variable, or never written
            elif node.op.name not in ("placeholder", "assign"):
                outputs[i] = size
        for node in self.graph.of_op("constant"):
            reader = next((r for r in self.graph.consumers[node] if r in self.index), None)
            if reader is not None:
                stays[self.index[reader]] += self.nbytes(node.outputs[0])
        return stays, outputs

    def groups(self) -> list[int]:
        """Return colocation groups: a variable, its slots and its assigns share one."""
        groups = [-1] * self.count
        for node, variable in self._teams.items():
            groups[self.index[node]] = self.index[variable]
        return groups

    def preferences(self) -> list[int]:
        """Return for each node the node that it prefers to be near.

        Gradients prefer what they differentiate, new values their variable, and a collective's
        nodes the tensor of their rank.
        """
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
    """Correct the links between devices by what was learned, in place."""
    for (i, j), name in link_classes(cluster).items():
        latency[i, j], bandwidth[i, j] = learned.link(name, (latency[i, j], bandwidth[i, j]))


def _last_readers(graph: Graph) -> dict[Node, int]:
    """Return the serial of the last node that reads each node's memory.

    An alias counts as one reader of its input. If it outlives the input, it is counted on its own.
    """
    last: dict[Node, int] = {}
    for node in graph.nodes:
        for tensor in node.inputs:
            last[tensor.node] = max(last.get(tensor.node, 0), node.serial)
    return last
