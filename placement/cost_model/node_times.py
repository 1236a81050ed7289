"""Predicted times of a graph's nodes on the devices of a cluster.

A roofline over calibrated rates, for each node alone and for those that run as one kernel,
corrected by traced steps.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from graphflow.ir.graph import Graph, bind_attrs
from graphflow.ir.op import Node, Tensor
from graphflow.ir.spec import TensorSpec, is_inexact, nbytes
from graphflow.ops.communication.rows_in_use import expected_specs
from graphflow.ops.control_flow.control import is_control
from graphflow.ops.kernels.fusion.fusion import regions_of
from graphflow.passes.duplicates import key_of
from graphflow.placement.calibration.cluster_rates import device_classes
from graphflow.placement.calibration.node_bucket import TRANSPOSED_MARK, Bucket, half_octaves
from graphflow.placement.calibration.roofline import STATELESS, Rates, op_class, work
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.cost_model.device_constraints import DeviceConstraints
from graphflow.placement.problems.problem import Ints

UNPLACED = frozenset({"constant", "group"})
"""Ops outside the problem: constants are wherever they are read, groups only hold others."""


class NodeTimes:
    """Seconds of the nodes of a graph whose symbols have known sizes.

    Attributes:
        nodes: The placed nodes, in order; after them come the sinks, the tensors that the client
            gets.
        regions: For a node that may run as one kernel with others, all of these.
    """

    def __init__(self, graph: Graph, cluster: Cluster, bindings: Mapping[str, int]) -> None:
        self.graph = graph
        self.cluster = cluster
        self.bindings = bindings
        self.nodes = tuple(node for node in graph.nodes if node.op.name not in UNPLACED)
        free = (*UNPLACED, "placeholder")
        self.sinks = tuple(dict.fromkeys(t for t in graph.outputs if t.node.op.name not in free))
        self.count = len(self.nodes) + len(self.sinks)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.specs = {t: t.spec.bind(bindings) for node in graph.nodes for t in node.outputs}
        self._in_use = {**self.specs, **expected_specs(graph, self.specs, bindings)}
        variables = sum(self.specs[node.outputs[0]].nbytes for node in graph.variables)
        self._stays = float(variables) / max(1, len(cluster.devices))
        self.outputs = frozenset(graph.outputs)
        self._bytes: dict[TensorSpec, int] = {}
        kinds = {device.kind for worker in cluster.workers for device in worker.devices}
        # a GPU's kernels convert 16 bits themselves; those of a CPU read converted values
        kind = "gpu" if "gpu" in kinds else "cpu"
        regions = regions_of(graph, kind, self.specs, bindings)
        self.regions = {node: nodes for nodes in regions for node in nodes if len(nodes) > 1}
        self._alike, self._examples = self._group_alike()

    def nbytes(self, tensor: Tensor) -> int:
        """Return the bytes of a tensor."""
        spec = self.specs[tensor]
        known = self._bytes.get(spec)
        if known is None:
            known = self._bytes[spec] = nbytes(spec)
        return known

    @property
    def alike(self) -> Ints:
        """The class of each node, (n,): nodes of a class take the same time."""
        return self._alike

    def compute(
        self, limits: DeviceConstraints, speeds: Mapping[str, Rates]
    ) -> np.ndarray[Any, Any]:
        """Return (n, d) seconds; inf where a node may not be."""
        devices = self.cluster.devices
        compute = np.full((self.count, len(devices) + 1), np.inf)
        compute[len(self.nodes) :, -1] = 0.0
        rows: dict[frozenset[str], int] = {}
        places = [
            rows.setdefault(limits.allowed_devices(n), len(rows))
            for n in self._skip_placeholders(compute)
        ]
        allowed = np.array([[name in row for name in devices] for row in rows], dtype=bool)
        takes = np.empty((len(self._examples), len(devices)))
        for number, node in enumerate(self._examples):
            takes[number] = self._node_seconds(node, [speeds[name] for name in devices])
        if places:
            placed = np.array([node.op.name != "placeholder" for node in self.nodes])
            compute[: len(self.nodes), :-1][placed] = np.where(
                allowed[places], takes[self._alike[placed]], np.inf
            )
        self._fuse(compute, limits, speeds)
        return compute

    def _fuse(
        self, compute: np.ndarray[Any, Any], limits: DeviceConstraints, speeds: Mapping[str, Rates]
    ) -> None:
        """Replace the seconds of nodes that run as one kernel by their shares of it, in place.

        Shares are by flops, as in traces. Devices of one kind and rate are predicted once, and so
        are equal regions.
        """
        columns: dict[int, list[int]] = {}
        for at, name in enumerate(self.cluster.devices):
            columns.setdefault(id(speeds[name]), []).append(at)
        regions = [
            (nodes, [self.index[node] for node in nodes], self._region_traffic(nodes))
            for nodes in self._fusible_groups(limits)
        ]
        known: dict[Hashable, list[float]] = {}
        for members in columns.values():
            rate = speeds[self.cluster.devices[members[0]]]
            for nodes, rows, moved in regions:
                key = (id(rate), tuple(self._alike[rows].tolist()), moved)
                if key not in known:
                    known[key] = self._region_seconds(nodes, rate, moved)
                for i, seconds in zip(rows, known[key], strict=True):
                    row = compute[i, members]
                    compute[i, members] = np.where(np.isfinite(row), seconds, row)

    def _fusible_groups(self, limits: DeviceConstraints) -> list[list[Node]]:
        """Return the nodes of each region that surely share a device.

        Pins and variables may separate others.
        """
        kept = []
        for nodes in dict.fromkeys(self.regions.values()):
            alike: dict[Hashable, list[Node]] = {}
            for node in nodes:
                alike.setdefault(limits.allowed_devices(node), []).append(node)
            kept += [each for each in alike.values() if len(each) > 1]
        return kept

    def _region_traffic(self, nodes: Sequence[Node]) -> float:
        """Return the bytes that a region reads of other nodes, and others of it."""
        inside = set(nodes)
        read = {t for node in nodes for t in node.inputs if t.node not in inside}
        kept = [
            t
            for node in nodes
            for t in node.outputs
            if t in self.outputs or any(c not in inside for c in self.graph.consumers[node])
        ]
        return float(sum(nbytes(self._in_use[t]) for t in (*read, *kept)))

    def _region_seconds(self, nodes: Sequence[Node], rate: Rates, moved: float) -> list[float]:
        """Return the seconds of each node of a region."""
        parts = []
        for node in nodes:
            inputs = [self._in_use[t] for t in node.inputs]
            outputs = [self._in_use[t] for t in node.outputs]
            amount = work(node.op, inputs, outputs, bind_attrs(node.attrs, self.bindings))
            parts.append((node.op, amount, outputs))
        total = rate.fused_seconds(parts, moved)
        flops = sum(amount.flops for _, amount, _ in parts)
        return [total * amount.flops / max(flops, 1.0) for _, amount, _ in parts]

    def _skip_placeholders(self, compute: np.ndarray[Any, Any]) -> Iterator[Node]:
        """Yield all nodes but placeholders, which are assigned to the client here."""
        for i, node in enumerate(self.nodes):
            if node.op.name == "placeholder":
                compute[i, -1] = 0.0
            else:
                yield node

    def _node_seconds(self, node: Node, speeds: Sequence[Rates]) -> list[float]:
        """Return the seconds of a node on each device."""
        if self.is_in_place(node):
            return [0.0] * len(speeds)
        attrs = bind_attrs(node.attrs, self.bindings)
        inputs = [self._in_use[t] for t in node.inputs]
        outputs = [self._in_use[t] for t in node.outputs]
        copied = 0.0 if self._is_updated_in_place(node) else 2.0 * self.nbytes(node.inputs[0])
        stays = self._stays if _reads_variable(node) else 0.0
        known: dict[int, float] = {}
        for rate in speeds:
            if id(rate) not in known:
                seconds = rate.seconds(node.op, inputs, outputs, attrs, stays)
                known[id(rate)] = seconds + rate.move_seconds(copied)
        return [known[id(rate)] for rate in speeds]

    def correct(
        self, compute: np.ndarray[Any, Any], contention: bool, learned: TraceCorrections
    ) -> None:
        """Multiply predictions by what was learned, in place."""
        named = device_classes(self.cluster)
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
        """Return the bucket in which traces of a node are collected, on a class of devices."""
        outputs = [self._in_use[t] for t in node.outputs]
        attrs = bind_attrs(node.attrs, self.bindings)
        inputs = [self._in_use[t] for t in node.inputs]
        amount = work(node.op, inputs, outputs, attrs, self.bindings)
        flops = predicted * 1e9 if is_control(node.op) else amount.flops
        return Bucket(
            device, busy, op_class(node.op), _variant(node.op.name, attrs),
            outputs[0].dtype.name if outputs else "",
            half_octaves(flops), half_octaves(amount.bytes),
        )  # fmt: skip

    def is_in_place(self, node: Node) -> bool:
        """Return True if a new value is computed straight into its variable, so that nothing is
        copied.
        """
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
            and {node, *self.regions.get(value.node, ())}.issuperset(
                self.graph.consumers[value.node]
            )
            and node.outputs[0] not in self.outputs
            and value not in self.outputs
        )

    def _is_updated_in_place(self, node: Node) -> bool:
        """Return True unless a node copies its first input before it updates some of it."""
        copies = node.op.in_place and node.op.rate is None
        return not copies or any(map(self.is_in_place, self.graph.consumers[node]))

    def _group_alike(self) -> tuple[Ints, list[Node]]:
        """Return the class of each node, (n,), and an example of each class.

        Nodes of a class take the same time. Large graphs have few classes.
        """
        numbers: dict[Hashable, int] = {}
        alike = np.empty(len(self.nodes), dtype=np.int64)
        examples: list[Node] = []
        for i, node in enumerate(self.nodes):
            key: Hashable = node
            if node.op.name not in STATELESS:
                specs = tuple([self._in_use[t] for t in (*node.inputs, *node.outputs)])
                attrs = key_of(dict(node.attrs)) if node.attrs else ()
                in_place = self.is_in_place(node), self._is_updated_in_place(node)
                key = (node.op, specs, node.specs, attrs, in_place, _reads_variable(node))
            alike[i] = number = numbers.setdefault(key, len(examples))
            if number == len(examples):
                examples.append(node)
        return alike, examples


def _reads_variable(node: Node) -> bool:
    """Return True if the first input of a node is a variable."""
    return bool(node.inputs) and node.inputs[0].node.op.name == "variable"


def _variant(name: str, attrs: Mapping[str, Any]) -> str:
    """Return an op's name with the operands that its kernel reads transposed.

    A product of a few rows takes twice as long in one orientation as in another.
    """
    across = "".join(side for side in "ab" if attrs.get(f"transpose_{side}"))
    return f"{name}{TRANSPOSED_MARK}{across}" if across else name
