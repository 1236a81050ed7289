"""Partition: a placed graph cut into one subgraph a device, with a send/recv pair for each cut
edge.

A group of collectives that lies on several devices becomes an exchange: each rank starts its part
where its tensor is made, and finishes it where the result is first read (`runtime/collectives`).
All parts of a group are started before its first node's place in the global order, and in this
order groups are numbered, so exchanges cannot wait for each other in a circle.

A tensor crosses to a device once, however many consumers it has there. Each partition's nodes are
rebuilt in the plan's order, so its program is the restriction of one global order and no order can
deadlock. Constants are copied to wherever they are read; placeholders are fed to every device that
reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import PlacementError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Node, Tensor
from graphflow.ops.communication.collectives import groups_of, own_inputs
from graphflow.runtime.partitioning.body_partition import ResolvePin, partition_bodies

UNPLACED_OPS = ("constant", "placeholder", "group")
"""Ops that are not placed: values are wherever they are read, and a group only holds nodes
together."""

SPECIALISATION_LIMITS = range(16, 1025)
"""The numbers of combinations of sizes for which a program may be kept compiled."""
_MAX_COMPILED_NODES = 1 << 18
"""Nodes of all that is kept compiled of a program on a device, which take about 1 KB each."""


@dataclass(frozen=True)
class Partition:
    """What one device computes in a step.

    Attributes:
        device: full device name.
        graph: its nodes in execution order; outputs are fetches, sends, assigns and members of
            groups.
        feeds: names of the placeholders that it reads.
        fetches: names under which the client gets outputs, with the tensors.
        checks: whether results must be finite (`finite.CHECKS`).
        forms: combinations of sizes for which the device keeps it compiled.
    """

    device: str
    graph: Graph
    feeds: tuple[str, ...]
    fetches: Mapping[str, Tensor]
    checks: str = ""
    max_specialisations: int = SPECIALISATION_LIMITS.start


def specialisation_limit(partitions: Iterable[Partition]) -> int:
    """For how many combinations of sizes the devices of a program keep it compiled: all for as
    many, since they meet in them."""
    largest = max((sum(1 for _ in p.graph.walk()) for p in partitions), default=1)
    return min(
        max(_MAX_COMPILED_NODES // max(largest, 1), SPECIALISATION_LIMITS[0]),
        SPECIALISATION_LIMITS[-1],
    )


@dataclass
class _PartitionBuilder:
    """A partition while it grows: the local twin of each tensor, and the outputs so far."""

    device: DeviceName
    twins: dict[Tensor, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    fetches: dict[str, Tensor] = field(default_factory=dict)
    feeds: list[str] = field(default_factory=list)
    names: dict[Node, str] = field(default_factory=dict)


def partition(
    graph: Graph,
    devices: Mapping[Node, str],
    order: Sequence[Node] | None = None,
    variables: Mapping[Node, str] | None = None,
    available: Sequence[str] | None = None,
    pinned: ResolvePin = lambda pin: pin,
) -> dict[str, Partition]:
    """Cut a graph along a placement.

    Args:
        graph: its outputs are the fetches: output i is fetched as `str(i)`.
        devices: a device for each node but constants and placeholders.
        order: a topological order of the nodes; default: the graph's.
        variables: names of the variables in their session; default: their own.
        available: the cluster's devices, from which pins inside bodies choose; default: those in
            `devices`.
        pinned: what these pins mean there; default: what they say.

    Returns:
        Device name to partition, for the devices that have something to do.

    Raises:
        PlacementError: an assignment is not where its variable is.
    """
    _check_assignments(graph, devices)
    order = [n for n in (graph.nodes if order is None else order) if n.op.name not in UNPLACED_OPS]
    if graph.holders:
        places = available or sorted(set(devices.values()))
        graph, devices, order = partition_bodies(graph, devices, order, places, pinned)
    builders = {
        name: _PartitionBuilder(DeviceName.parse(name)) for name in dict.fromkeys(devices.values())
    }
    exchanges = _CollectiveGroups(graph, order, devices, builders)
    targets = _reading_devices(order, devices, exchanges)
    edges: dict[tuple[Tensor, str], int] = {}
    cut = bool(targets or exchanges.groups)

    def local(tensor: Tensor, here: _PartitionBuilder) -> Tensor:
        return _local_twin(graph, tensor, here, devices, edges, exchanges)

    for node in order:
        here = builders[devices[node]]
        if node in exchanges.groups:
            exchanges.start_group(node, local)
            for device in targets.get(node.outputs[0], ()):
                local(node.outputs[0], here)
                edges[node.outputs[0], device] = len(edges)
                _add_send(graph, node.outputs[0], here, device, edges[node.outputs[0], device])
            continue
        twins = here.twins
        inputs = tuple([twins[t] if t in twins else local(t, here) for t in node.inputs])
        _add_twin(graph, node, inputs, here, variables or {})
        if not cut:
            continue
        for tensor in node.outputs:  # a send follows its node at once, a recv waits for its reader
            for device in targets.get(tensor, ()):
                edges[tensor, device] = len(edges)
                _add_send(graph, tensor, here, device, edges[tensor, device])
            exchanges.start_members_reading(tensor, local)
    exchanges.finish_all()
    for group in graph.of_op("group"):
        for tensor in group.inputs:
            if tensor.node.op.name not in UNPLACED_OPS:
                here = builders[devices[tensor.node]]
                here.outputs.append(here.twins[tensor])
    for i, output in enumerate(graph.outputs):
        if output.node.op.name in UNPLACED_OPS:
            continue  # the client has it already
        here = builders[devices[output.node]]
        here.fetches[str(i)] = here.twins[output]
        here.outputs.append(here.twins[output])
    return {
        device: Partition(
            device, Graph(b.outputs, b.names).verify(), tuple(b.feeds), dict(b.fetches)
        )
        for device, b in sorted(builders.items())
        if b.outputs
    }


def _check_assignments(graph: Graph, devices: Mapping[Node, str]) -> None:
    for node in graph.of_op("assign"):
        variable = node.inputs[0].node
        if devices[node] != devices[variable]:
            raise PlacementError(
                f"assign {graph.names[node]!r} (made at {node.location}) is on {devices[node]}, "
                f"its variable {graph.names[variable]!r} on {devices[variable]}; "
                "put both on one device"
            )


def _add_twin(
    graph: Graph,
    node: Node,
    inputs: tuple[Tensor, ...],
    here: _PartitionBuilder,
    variables: Mapping[Node, str],
) -> None:
    twin = node.copy_to_run(inputs, variables.get(node, node.name), here.device)
    here.names[twin] = graph.names[node]
    if len(node.outputs) == 1:
        here.twins[node.outputs[0]] = twin.outputs[0]
    else:
        here.twins.update(zip(node.outputs, twin.outputs, strict=True))
    if node.op.name == "assign":
        here.outputs.append(twin.outputs[0])


class _CollectiveGroups:
    """The complete groups of collectives on several devices, while the graph is cut.

    Attributes:
        groups: of each of their nodes: the group, by rank.
    """

    def __init__(
        self,
        graph: Graph,
        order: Sequence[Node],
        devices: Mapping[Node, str],
        builders: Mapping[str, _PartitionBuilder],
    ) -> None:
        self._graph = graph
        self._devices = devices
        self._builders = builders
        self.groups: dict[Node, list[Node]] = {}
        self._members_by_input: dict[Tensor, list[Node]] = {}
        self._numbers: dict[Node, int] = {}
        self._started: dict[Node, Node] = {}
        place = {node: i for i, node in enumerate(order)}
        found = [g for g in groups_of(order) if len({devices[node] for node in g}) > 1]
        for number, group in enumerate(sorted(found, key=lambda g: min(place[n] for n in g))):
            for node in group:
                self.groups[node] = group
                self._numbers[node] = number
                for tensor in own_inputs(node):
                    self._members_by_input.setdefault(tensor, []).append(node)

    def start_members_reading(
        self, tensor: Tensor, local: Callable[[Tensor, _PartitionBuilder], Tensor]
    ) -> None:
        """Start the parts whose tensor has just been made on their device."""
        for node in self._members_by_input.get(tensor, ()):
            if self._devices[node] == self._devices[tensor.node]:
                self._start(node, local)

    def start_group(self, node: Node, local: Callable[[Tensor, _PartitionBuilder], Tensor]) -> None:
        """Start the parts of a group that have not started: its first node's turn has come."""
        for each in self.groups[node]:
            self._start(each, local)

    def _start(self, node: Node, local: Callable[[Tensor, _PartitionBuilder], Tensor]) -> None:
        if node in self._started:
            return
        here, group = self._builders[self._devices[node]], self.groups[node]
        inputs = tuple(local(tensor, here) for tensor in own_inputs(node))
        attrs = {
            **node.attrs, "kind": node.op.name, "group": self._numbers[node],
            "devices": tuple(self._devices[each] for each in group),
            "shapes": tuple(t.shape for t in node.inputs), "dtype": node.inputs[0].dtype.name,
        }  # fmt: skip
        start = _make_edge_node("collective_start", inputs, attrs, node.outputs[0], here.device)
        here.names[start] = f"start/{self._graph.names[node]}"
        self._started[node] = start

    def add_finish(self, tensor: Tensor, here: _PartitionBuilder) -> Tensor:
        """The result of a group on the device that has it."""
        start = self._started[tensor.node]
        inputs = (*start.outputs, *start.inputs)
        attrs = {"group": self._numbers[tensor.node]}
        finish = _make_edge_node("collective_finish", inputs, attrs, tensor, here.device)
        here.names[finish] = self._graph.names[tensor.node]
        here.twins[tensor] = finish.outputs[0]
        return here.twins[tensor]

    def finish_all(self) -> None:
        """Finish what is only fetched."""
        for node in self._started:
            here = self._builders[self._devices[node]]
            if node.outputs[0] not in here.twins:
                self.add_finish(node.outputs[0], here)


def _reading_devices(
    order: Sequence[Node], devices: Mapping[Node, str], exchanges: _CollectiveGroups
) -> dict[Tensor, tuple[str, ...]]:
    """The other devices that read each tensor, in order of their first reader."""
    targets: dict[Tensor, dict[str, None]] = {}
    for node in order:
        for tensor in own_inputs(node) if node in exchanges.groups else node.inputs:
            if tensor.node.op.name not in UNPLACED_OPS and devices[tensor.node] != devices[node]:
                targets.setdefault(tensor, {})[devices[node]] = None
    return {tensor: tuple(found) for tensor, found in targets.items()}


def _local_twin(
    graph: Graph,
    tensor: Tensor,
    here: _PartitionBuilder,
    devices: Mapping[Node, str],
    edges: Mapping[tuple[Tensor, str], int],
    exchanges: _CollectiveGroups,
) -> Tensor:
    """A tensor's twin in a partition: made there, copied there, fed there, exchanged, or
    received."""
    if tensor not in here.twins:
        if tensor.node in exchanges.groups and devices[tensor.node] == str(here.device):
            return exchanges.add_finish(tensor, here)
        if tensor.node.op.name in UNPLACED_OPS:
            _add_twin(graph, tensor.node, (), here, {})
            if tensor.node.op.name == "placeholder":
                here.feeds.append(graph.names[tensor.node])
        else:
            edge = edges[tensor, str(here.device)]
            here.twins[tensor] = _add_recv(graph, tensor, here, devices[tensor.node], edge)
    return here.twins[tensor]


def _add_send(
    graph: Graph, tensor: Tensor, source: _PartitionBuilder, target: str, edge: int
) -> None:
    send = _make_edge_node(
        "send", (source.twins[tensor],), {"edge": edge, "target": target}, tensor, source.device
    )
    source.names[send] = f"send/{_name(graph, tensor)}/{edge}"
    source.outputs.append(send.outputs[0])


def _add_recv(
    graph: Graph, tensor: Tensor, target: _PartitionBuilder, source: str, edge: int
) -> Tensor:
    attrs = {"edge": edge, "source": source, "shape": tensor.shape, "dtype": tensor.dtype.name}
    recv = _make_edge_node("recv", (), attrs, tensor, target.device)
    target.names[recv] = f"recv/{_name(graph, tensor)}/{edge}"
    return recv.outputs[0]


def _make_edge_node(
    op: str, inputs: tuple[Tensor, ...], attrs: dict[str, Any], tensor: Tensor, device: DeviceName
) -> Node:
    """One end of a cut edge; counts as made where the tensor was."""
    spec = REGISTRY[op].infer(*(t.spec for t in inputs), **attrs)
    return Node(
        REGISTRY[op],
        inputs,
        attrs,
        (spec,),  # type: ignore[arg-type]
        name=f"{op}/{tensor.node.name}",
        device=device,
        location=tensor.node.location,
    )


def _name(graph: Graph, tensor: Tensor) -> str:
    return graph.names[tensor.node] + (f":{tensor.index}" if tensor.index else "")
