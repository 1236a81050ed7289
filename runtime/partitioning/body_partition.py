"""Nodes whose bodies are pinned to several devices, cut into one node for each device.

Each device runs its own part of the same loop or branch. The part is a node of the same op whose
bodies hold the nodes pinned to this device, and sends and receives for tensors that cross. Nodes
without a pin are on the home device, where the node itself is placed. The home has all results.

Each device has a copy of the loop state that it reads, updated at the end of an iteration. Each
also has the predicate, so that all devices run the same iterations and branches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import DeviceError
from graphflow.ir.device_name import DeviceName
from graphflow.ir.graph import Body, Graph, bodies
from graphflow.ir.op import REGISTRY, Node, Tensor
from graphflow.ops.control_flow.concurrent import channel_ends, concurrent, parties_of
from graphflow.ops.control_flow.control import UNPLACED_OPS, cond, scan
from graphflow.passes.bodies import spans_devices as is_spread
from graphflow.runtime.partitioning.channel_edges import CutChannel, cut_channels
from graphflow.runtime.partitioning.device_body import (
    DeviceBody,
    PlacedBody,
    drop_unread_operands,
    make_node,
    make_token,
    select_states,
    states_read_by,
)

FIRST_EDGE = 1 << 24
"""The first number of edges inside bodies. Edges of the graph itself have smaller numbers."""


class BodyPartition(NamedTuple):
    """A graph whose nodes run on one device each, bodies included; their devices and order."""

    graph: Graph
    devices: dict[Node, str]
    order: list[Node]


def partition_bodies(
    graph: Graph,
    devices: Mapping[Node, str],
    order: Sequence[Node],
    available: Sequence[str],
    pinned: ResolvePin,
) -> BodyPartition:
    """Cut the nodes whose bodies are pinned to several devices.

    Args:
        available: the devices of the cluster, among which partial pins choose.
        pinned: resolves a pin on this cluster, from which workers may have been lost.

    Raises:
        DeviceError: a pin in a body matches no device.
    """
    cutter = _BodyPartitioner([DeviceName.parse(name) for name in available], pinned)
    placed = cutter.expand(graph, devices, order)
    outputs = [placed.mapped[t] for t in graph.outputs]
    if placed.effects:
        effects = tuple(t for _, t in placed.effects)
        group = make_node(REGISTRY["group"], effects, {}, effects[0].node)
        outputs.append(group.outputs[0])
        placed.names[group] = "bodies"
    return BodyPartition(Graph(outputs, placed.names), placed.devices, list(placed.devices))


def _inputs_first(graph: Graph, order: Sequence[Node]) -> list[Node]:
    """Return the nodes of a graph in an order, each after its inputs.

    A plan lets a party begin before another party's operands are there, and so may order the whole
    node before these.
    """
    position = {node: i for i, node in enumerate(order)}
    last = len(position)

    def place(node: Node) -> tuple[int, int]:
        return position.get(node, last if node.inputs else -1), node.serial

    found: dict[Node, None] = {}
    for first in sorted(graph.nodes, key=place):
        stack = [first]
        while stack:
            node = stack[-1]
            missing = [t.node for t in node.inputs if t.node not in found]
            stack += missing
            if not missing:
                found[node] = None
                stack.pop()
    return [*found]


ResolvePin = Callable[[DeviceName], DeviceName]
"""Resolves a user's pin on a cluster; see `Cluster.pinned`."""


@dataclass
class _Expanded:
    """The result of cutting a graph's nodes.

    Attributes:
        mapped: tensor of the graph -> the tensor that replaces it.
        devices: device of each new node, in execution order.
        effects: (device, output) of parts whose results nobody reads; they run for their sends.
        names: name of each new node.
    """

    mapped: dict[Tensor, Tensor] = field(default_factory=dict)
    devices: dict[Node, str] = field(default_factory=dict)
    effects: list[tuple[str, Tensor]] = field(default_factory=list)
    names: dict[Node, str] = field(default_factory=dict)


class _BodyPartitioner:
    """Cuts nodes that hold bodies, and numbers the edges inside the bodies."""

    def __init__(self, available: Sequence[DeviceName], pinned: ResolvePin) -> None:
        self._available = available
        self._pinned = pinned
        self._edges: Iterator[int] = itertools.count(FIRST_EDGE)

    def expand(self, graph: Graph, devices: Mapping[Node, str], order: Sequence[Node]) -> _Expanded:
        """Replace each node with bodies on several devices by its parts.

        The home's part replaces the node for its readers.
        """
        result = _Expanded()
        for node in _inputs_first(graph, order):
            inputs = tuple(result.mapped[t] for t in node.inputs)
            home = devices.get(node, "")
            same = all(a is b for a, b in zip(inputs, node.inputs, strict=True))
            whole = node if same else node.with_inputs(inputs)
            parts, outputs = {home: whole}, whole.outputs
            if home and node.op is concurrent:
                parts, outputs = self._split_parties(whole, home)
            elif home and bodies(node) and is_spread(node):
                parts = self._split_node(node, inputs, home)
                outputs = parts[home].outputs
            for device, part in parts.items():
                if home:
                    result.devices[part] = device
                result.names[part] = graph.names[node] + ("" if device == home else f"@{device}")
                if device != home or node.op is concurrent:
                    result.effects.append((device, part.outputs[0]))
            result.mapped.update(zip(node.outputs, outputs, strict=True))
        return result

    def _split_parties(self, node: Node, home: str) -> tuple[dict[str, Node], tuple[Tensor, ...]]:
        """Cut a `concurrent` node into one for each device.

        Returns:
            Device -> the node with the device's parties; and what replaces the outputs of `node`.
        """
        parties = parties_of(node.attrs)
        places = [self._choose_party_device(node, body, home) for body in parties]
        if len(set(places)) == 1:
            return {places[0]: node}, node.outputs
        edges = {
            channel: CutChannel(next(self._edges), places[source], places[target])
            for channel, (source, target) in sorted(channel_ends(parties).items())
        }
        parts, replaced = {}, {}
        for device in dict.fromkeys(places):
            mine = [i for i, place in enumerate(places) if place == device]
            attrs = {f"party{i}": cut_channels(parties[i], edges) for i in mine}
            part = drop_unread_operands(node, node.inputs, attrs, kept=0, lead=0, whole=False)
            parts[device] = part
            outputs = iter(part.outputs)
            replaced.update({i: [next(outputs) for _ in parties[i].outputs] for i in mine})
        return parts, tuple(t for i in range(len(parties)) for t in replaced[i])

    def _choose_party_device(self, node: Node, body: Body, home: str) -> str:
        """Return the device of a party: that of its nodes with a pin, else the home."""
        pinned = [n for n in body.graph.walk() if n.device and n.op.name not in UNPLACED_OPS]
        chosen = dict.fromkeys(self._choose_device(n, home) for n in pinned)
        if len(chosen) > 1:
            raise DeviceError(
                f"a party of concurrent {node.name!r} (made at {node.location}) has nodes on "
                f"{' and '.join(chosen)}; pin all of its nodes to one device"
            )
        place = next(iter(chosen), home)
        if DeviceName.parse(place).kind != "cpu":
            raise DeviceError(
                f"a party of concurrent {node.name!r} (made at {node.location}) is pinned to "
                f"{place}; parties run on CPUs"
            )
        return place

    def _split_node(self, node: Node, inputs: tuple[Tensor, ...], home: str) -> dict[str, Node]:
        """Return device -> part of a node, the home first. Parts without results yield a token."""
        placed = {
            name: self._place_body(value, home)
            for name, value in node.attrs.items()
            if isinstance(value, Body)
        }
        used = (d for p in placed.values() for d in p.devices.values())
        devices = list(dict.fromkeys((home, *used)))
        if node.op is cond:
            return self._split_cond(node, inputs, home, placed, devices)
        return self._split_loop(node, inputs, home, placed, devices)

    def _place_body(self, body: Body, home: str) -> PlacedBody:
        """Choose a device for each node of a body, and cut the nodes in it that hold bodies."""
        chosen = {
            inner: self._choose_device(inner, home)
            for inner in body.graph.nodes
            if inner.op.name not in UNPLACED_OPS
        }
        expanded = self.expand(body.graph, chosen, tuple(chosen))
        outputs = [expanded.mapped[t] for t in body.outputs]
        everything = Graph([*outputs, *(t for _, t in expanded.effects)], expanded.names)
        inner = Body(body.inputs, everything, len(outputs), bindings=body.bindings)
        return PlacedBody(inner, expanded.devices, expanded.effects)

    def _choose_device(self, node: Node, home: str) -> str:
        """Return the home if the node's pin allows it, else the first device that it allows."""
        pin = self._pinned(node.device)
        if pin.matches(DeviceName.parse(home)):
            return home
        for device in self._available:
            if pin.matches(device):
                return str(device)
        raise DeviceError(
            f"{node.op.name} {node.name!r} (made at {node.location}) is pinned to "
            f"{str(node.device)!r} inside a body, and the cluster has only "
            f"{', '.join(map(str, self._available))}"
        )

    def _split_body(
        self, placed: PlacedBody, wanted: Mapping[str, Sequence[Tensor]]
    ) -> dict[str, DeviceBody]:
        """Cut a body into one part for each device, each with the results wanted there."""
        sides = {device: DeviceBody(placed.body) for device in wanted}
        readers: dict[Tensor, dict[str, None]] = {}
        for node, device in placed.devices.items():
            for tensor in node.inputs:
                readers.setdefault(tensor, {})[device] = None
        for device, tensors in wanted.items():
            for tensor in tensors:
                readers.setdefault(tensor, {})[device] = None
        for node, device in placed.devices.items():
            side = sides[device]
            twin = node.with_inputs(tuple(side.local_tensor(t) for t in node.inputs))
            side.twins.update(zip(node.outputs, twin.outputs, strict=True))
            for tensor in node.outputs:
                for target in readers.get(tensor, ()):
                    if target != device:
                        self._add_edge(tensor, side, device, sides[target], target)
        for device, tensor in placed.effects:
            sides[device].sends.append(sides[device].local_tensor(tensor))
        return sides

    def _add_edge(
        self, tensor: Tensor, source: DeviceBody, here: str, target: DeviceBody, there: str
    ) -> None:
        edge = next(self._edges)
        like = tensor.node
        send = make_node(
            REGISTRY["send"], (source.twins[tensor],), {"edge": edge, "target": there}, like
        )
        attrs = {
            "edge": edge, "source": here, "shape": tensor.shape, "dtype": tensor.dtype.name
        }  # fmt: skip
        source.sends.append(send.outputs[0])
        target.recv_attrs[tensor] = attrs

    def _split_cond(
        self,
        node: Node,
        inputs: tuple[Tensor, ...],
        home: str,
        placed: Mapping[str, PlacedBody],
        devices: Sequence[str],
    ) -> dict[str, Node]:
        made: dict[str, dict[str, Body]] = {device: {} for device in devices}
        for name, each in placed.items():
            body = each.body
            wanted = {d: body.outputs if d == home else (make_token(node),) for d in devices}
            for device, side in self._split_body(each, wanted).items():
                made[device][name] = side.build(wanted[device], body.inputs)
        return {d: drop_unread_operands(node, inputs, made[d], kept=1, lead=1) for d in devices}

    def _split_loop(
        self,
        node: Node,
        inputs: tuple[Tensor, ...],
        home: str,
        placed: Mapping[str, PlacedBody],
        devices: Sequence[str],
    ) -> dict[str, Node]:
        """Cut a loop. A device carries the states that it reads and those that become them."""
        body, test = placed["body"].body, placed.get("test")
        counter = "carries" if node.op is scan else "states"
        count: int = node.attrs[counter]
        stacks = node.op is scan or node.attrs["limit"] is not None
        states = {d: states_read_by(placed, d, count) for d in devices}
        states[home] = list(range(count))
        wanted: dict[str, Sequence[Tensor]] = {
            d: [body.outputs[i] for i in states[d]] or [make_token(node)] * stacks for d in devices
        }
        wanted[home] = body.outputs
        sides = self._split_body(placed["body"], wanted)
        verdicts: dict[str, DeviceBody] = {}
        if test is not None:
            verdicts = self._split_body(test, dict.fromkeys(devices, test.body.outputs))
        lead = int(bool(node.attrs.get("counted")))
        parts: dict[str, Node] = {}
        for device in devices:
            held = states[device]
            attrs: dict[str, Any] = {counter: len(held)}
            part = sides[device].build(wanted[device], body.inputs)
            attrs["body"] = select_states(part, held, count)
            if test is not None:
                verdict = verdicts[device].build(test.body.outputs, test.body.inputs)
                attrs["test"] = select_states(verdict, held, count)
            operands = (*inputs[:lead], *(inputs[lead + i] for i in held), *inputs[lead + count :])
            parts[device] = drop_unread_operands(
                node, operands, attrs, kept=lead + len(held), lead=lead,
                items=node.attrs.get("items", 0),
            )  # fmt: skip
        return parts
