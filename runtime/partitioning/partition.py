"""Partitioning: a placed graph -> one subgraph for each device, with a send and a receive for each
cut edge.

A tensor is sent to a device once, however many readers it has there; of `used_rows`, only the rows
in use are sent. Each partition keeps the plan's order of nodes. So all programs are restrictions of
one global order, and cannot deadlock.
Constants are copied to every device that reads them, and placeholders are fed to all their readers.

A collective on several devices becomes a start and a finish on each: the start where its tensor is
made, the finish where its result is first read (`runtime/collectives`). All starts of a group come
before its first node's position in the global order, and groups are numbered in this order. So
collectives cannot wait for each other in a circle.
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
"""Ops that are not placed: values exist wherever they are read, and a group only lists nodes."""

SPECIALISATION_LIMITS = range(16, 1025)
"""Range of `Partition.max_specialisations`."""
_MAX_COMPILED_NODES = 1 << 18
"""Nodes of all compiled specialisations of a program on a device. A node takes about 1 KB."""


@dataclass(frozen=True)
class Partition:
    """One device's part of a step.

    Attributes:
        device: full device name.
        graph: its nodes in execution order; outputs are fetches, sends, assigns and members of
            groups.
        feeds: names of the placeholders that it reads.
        fetches: name under which the client gets each output -> tensor.
        checks: one of `check_modes.CHECKS`.
        max_specialisations: combinations of sizes for which the device keeps it compiled.
        flush_denormals: whether a CPU counts denormal numbers as zero.
    """

    device: str
    graph: Graph
    feeds: tuple[str, ...]
    fetches: Mapping[str, Tensor]
    checks: str = ""
    max_specialisations: int = SPECIALISATION_LIMITS.start
    flush_denormals: bool = False


def specialisation_limit(partitions: Iterable[Partition]) -> int:
    """Return the number of combinations of sizes for which devices keep a program compiled.

    All devices of a program keep the same number, since they agree on shared memory for each
    combination.
    """
    largest = max((sum(1 for _ in p.graph.walk()) for p in partitions), default=1)
    return min(
        max(_MAX_COMPILED_NODES // max(largest, 1), SPECIALISATION_LIMITS[0]),
        SPECIALISATION_LIMITS[-1],
    )


@dataclass
class _PartitionBuilder:
    """A partition under construction.

    Attributes:
        twins: tensor of the whole graph -> this partition's tensor.
        outputs: fetches, sends, assigns and members of groups so far.
    """

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
        devices: the device of each node except constants, placeholders and groups.
        order: a topological order of the nodes; default: the graph's.
        variables: names of the variables in their session; default: their own.
        available: the cluster's devices, among which pins inside bodies choose; default: those in
            `devices`.
        pinned: resolves these pins on the cluster; default: takes them literally.

    Returns:
        Device name -> partition, for the devices that have outputs.

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

    def send(tensor: Tensor, here: _PartitionBuilder) -> None:
        for device in targets.get(tensor, ()):
            edge = edges[tensor, device] = len(edges)
            _add_send(graph, tensor, here, device, edge)

    for node in order:
        here = builders[devices[node]]
        if node in exchanges.groups:
            exchanges.start_group(node, local)
            if node.outputs[0] in targets:
                local(node.outputs[0], here)
                send(node.outputs[0], here)
            continue
        twins = here.twins
        inputs = tuple([twins[t] if t in twins else local(t, here) for t in node.inputs])
        _add_twin(graph, node, inputs, here, variables or {})
        if not cut:
            continue
        for tensor in node.outputs:  # a send follows its node at once, a recv waits for its reader
            send(tensor, here)
            exchanges.start_members_reading(tensor, local)
    exchanges.finish_all()
    _add_outputs(graph, devices, builders)
    return {
        device: Partition(
            device, Graph(b.outputs, b.names).verify(), tuple(b.feeds), dict(b.fetches)
        )
        for device, b in sorted(builders.items())
        if b.outputs
    }


def _add_outputs(
    graph: Graph, devices: Mapping[Node, str], builders: Mapping[str, _PartitionBuilder]
) -> None:
    """Add the members of groups and the fetches to the outputs of their partitions."""
    for group in graph.of_op("group"):
        for tensor in group.inputs:
            if tensor.node.op.name not in UNPLACED_OPS:
                here = builders[devices[tensor.node]]
                here.outputs.append(here.twins[tensor])
    for i, output in enumerate(graph.outputs):
        if output.node.op.name in UNPLACED_OPS:
            continue  # the client has its value
        here = builders[devices[output.node]]
        here.fetches[str(i)] = here.twins[output]
        here.outputs.append(here.twins[output])


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
    """The collectives on several devices, while the graph is cut.

    Attributes:
        groups: node of a collective -> all nodes of its group, by rank.
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
        """Start the collectives that read a tensor, on the device that has just made it."""
        for node in self._members_by_input.get(tensor, ()):
            if self._devices[node] == self._devices[tensor.node]:
                self._start(node, local)

    def start_group(self, node: Node, local: Callable[[Tensor, _PartitionBuilder], Tensor]) -> None:
        """Start what has not started of a group, when its first node is reached."""
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
        """Finish a collective on the device of its result; return the result's twin."""
        start = self._started[tensor.node]
        inputs = (*start.outputs, *start.inputs)
        attrs = {"group": self._numbers[tensor.node]}
        finish = _make_edge_node("collective_finish", inputs, attrs, tensor, here.device)
        here.names[finish] = self._graph.names[tensor.node]
        here.twins[tensor] = finish.outputs[0]
        return here.twins[tensor]

    def finish_all(self) -> None:
        """Finish the collectives whose results are only fetched."""
        for node in self._started:
            here = self._builders[self._devices[node]]
            if node.outputs[0] not in here.twins:
                self.add_finish(node.outputs[0], here)


def _reading_devices(
    order: Sequence[Node], devices: Mapping[Node, str], exchanges: _CollectiveGroups
) -> dict[Tensor, tuple[str, ...]]:
    """Return, for each tensor, the other devices that read it, in order of their first reader."""
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
    """Return a tensor's twin in a partition.

    If the partition has none yet, a finish, a copied constant, a placeholder or a receive is added.
    """
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
    inputs: tuple[Tensor, ...] = (source.twins[tensor],)
    if tensor.node.op.name == "used_rows":
        inputs = tuple([source.twins[each] for each in tensor.node.inputs])
    attrs = {"edge": edge, "target": target}
    send = _make_edge_node("send", inputs, attrs, tensor, source.device)
    source.names[send] = f"send/{_name(graph, tensor)}/{edge}"
    source.outputs.append(send.outputs[0])


def _add_recv(
    graph: Graph, tensor: Tensor, target: _PartitionBuilder, source: str, edge: int
) -> Tensor:
    attrs = {"edge": edge, "source": source, "shape": tensor.shape, "dtype": tensor.dtype.name}
    if tensor.node.op.name == "used_rows":
        attrs["ragged"] = True
    recv = _make_edge_node("recv", (), attrs, tensor, target.device)
    target.names[recv] = f"recv/{_name(graph, tensor)}/{edge}"
    return recv.outputs[0]


def _make_edge_node(
    op: str, inputs: tuple[Tensor, ...], attrs: dict[str, Any], tensor: Tensor, device: DeviceName
) -> Node:
    """Make one end of a cut edge or of a collective, at the source line of the tensor's node."""
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
