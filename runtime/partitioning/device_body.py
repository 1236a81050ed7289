"""One device's part of a body, and of the node that holds it.

`body_partition` decides which nodes of a body run where. This module writes what a device gets: its
nodes, sends and receives, the states of a loop that it carries, and the operands that it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.graph import Body, Graph
from graphflow.ir.op import REGISTRY, Node, Tensor
from graphflow.ir.spec import TensorSpec
from graphflow.ops.control_flow.control import UNPLACED_OPS, scan


def make_node(op: Any, inputs: tuple[Tensor, ...], attrs: dict[str, Any], like: Node) -> Node:
    """Return a node of an op, with the name, pin, location and origin of another node."""
    specs = op.infer(*(t.spec for t in inputs), **attrs)
    return Node(
        op, inputs, attrs, (specs,) if isinstance(specs, TensorSpec) else specs, name=like.name,
        device=like.device, location=like.location, origin=like.origin,
    )  # fmt: skip


@dataclass
class DeviceBody:
    """One device's part of a body, under construction.

    Attributes:
        twins: tensor of the body -> this device's tensor.
        sends: outputs of its sends.
        recv_attrs: attributes of the receive of each tensor that comes from another device.
    """

    body: Body
    twins: dict[Tensor, Tensor] = field(default_factory=dict)
    sends: list[Tensor] = field(default_factory=list)
    recv_attrs: dict[Tensor, dict[str, Any]] = field(default_factory=dict)

    def local_tensor(self, tensor: Tensor) -> Tensor:
        """Return this device's tensor for a tensor of the body.

        Parameters and constants are on every device. A tensor of another device is received where
        it is first read, not earlier: it may depend on something that this device computes.
        """
        if tensor.node.op.name in UNPLACED_OPS:
            return tensor
        if tensor not in self.twins:
            recv = make_node(REGISTRY["recv"], (), self.recv_attrs[tensor], tensor.node)
            self.twins[tensor] = recv.outputs[0]
        return self.twins[tensor]

    def build(self, wanted: Sequence[Tensor], parameters: Sequence[Node]) -> Body:
        """Return the body with the given results and with all sends."""
        outputs = [self.local_tensor(t) for t in wanted]
        return Body(
            tuple(parameters), Graph([*outputs, *self.sends]), len(outputs),
            bindings=self.body.bindings,
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class PlacedBody:
    """A body whose nodes run on one device each.

    Attributes:
        devices: device of each node, in execution order.
        effects: (device, output) of nodes whose results nobody reads; they run for their sends.
    """

    body: Body
    devices: Mapping[Node, str]
    effects: Sequence[tuple[str, Tensor]]


def states_read_by(placed: Mapping[str, PlacedBody], device: str, count: int) -> list[int]:
    """Return the indices of the states that a device has to carry."""
    needed: set[int] = set()
    for each in placed.values():
        numbers = {p.outputs[0]: i for i, p in enumerate(each.body.inputs[:count])}
        for inner, at in each.devices.items():
            if at == device:
                needed.update(numbers[t] for t in inner.inputs if t in numbers)
        if "test" in placed:  # the predicate itself may be a state
            outputs = placed["test"].body.outputs
            needed.update(numbers[t] for t in outputs if t in numbers)
    body = placed["body"].body
    numbers = {p.outputs[0]: i for i, p in enumerate(body.inputs[:count])}
    while True:  # a state whose new value is another state needs that one
        further = {numbers[body.outputs[i]] for i in needed if body.outputs[i] in numbers}
        if further <= needed:
            return sorted(needed)
        needed |= further


def select_states(body: Body, states: Sequence[int], count: int) -> Body:
    """Return a body of a loop with some of its `count` states as parameters."""
    inputs = (*(body.inputs[i] for i in states), *body.inputs[count:])
    return Body(inputs, body.graph, body.results, bindings=body.bindings)


def drop_unread_operands(
    node: Node,
    operands: tuple[Tensor, ...],
    changed: Mapping[str, Any],
    kept: int,
    lead: int,
    items: int = 0,
    whole: bool = True,
) -> Node:
    """Make a part of a node without the operands that its bodies do not read.

    Args:
        changed: attributes that replace those of the node.
        kept: number of leading operands that stay: predicate or count, and states.
        lead: number of these without a parameter in the bodies (predicate or count).
        items: number of operands after those that a scan takes rows of.
        whole: whether the part has the node's other attributes, too.
    """
    attrs = {**(node.attrs if whole else {}), **changed}
    read = {
        i
        for value in attrs.values()
        if isinstance(value, Body)
        for i, parameter in enumerate(value.inputs, start=lead)
        if parameter in value.graph.names
    }
    keep = [i for i in range(len(operands)) if i < kept or i in read]
    for name, value in attrs.items():
        if isinstance(value, Body):
            inputs = tuple(value.inputs[i - lead] for i in keep if i >= lead)
            attrs[name] = Body(inputs, value.graph, value.results, bindings=value.bindings)
    if node.op is scan:
        attrs["items"] = sum(kept <= i < kept + items for i in keep)
    return make_node(node.op, tuple(operands[i] for i in keep), attrs, node)


def make_token(node: Node) -> Tensor:
    """Make the constant that a part without results returns."""
    value = np.zeros((), np.bool_)
    return make_node(REGISTRY["constant"], (), {"value": value}, node).outputs[0]
