"""Channels between parties on several devices, replaced by edges.

A token orders the ops of a party until it is cut. From then on their order in the body does, as it
does for all edges, so every token is a constant.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from graphflow.ir.graph import Body, Graph, bodies
from graphflow.ir.op import REGISTRY, Node, Tensor
from graphflow.ops.communication.channels import CHANNEL_OPS, channels_of
from graphflow.runtime.partitioning.device_body import make_node


class CutChannel(NamedTuple):
    """The edge that replaces a channel, and the devices at its ends."""

    edge: int
    source: str
    target: str


def cut_channels(body: Body, edges: Mapping[int, CutChannel]) -> Body:
    """Return a party's body with edges in the place of channels, also in bodies inside it."""
    effects: list[Tensor] = []
    token = _make_node("constant", (), {"value": np.zeros(0, np.bool_)}, body.graph.nodes[-1])

    def replace(node: Node, inputs: tuple[Tensor, ...]) -> Sequence[Tensor] | None:
        if node.op.name in CHANNEL_OPS:
            ends = [edges[channel] for channel in channels_of(node)]
            made = _replace_op(node, inputs[1:], ends)
            effects.append(made[0])
            return (*(() if node.op.name == "channel_send" else made), token)
        if not bodies(node):
            return None
        attrs = {
            name: cut_channels(value, edges) if isinstance(value, Body) else value
            for name, value in node.attrs.items()
        }
        holder = node.with_inputs(inputs, attrs)
        inner = [each for own in bodies(node) for each in own.graph.walk()]
        if any(each.op.name in CHANNEL_OPS for each in inner):
            effects.append(holder.outputs[0])  # the node stays, though nobody reads its token
        return holder.outputs

    graph = body.graph.rewrite(replace)
    return Body(
        body.inputs, Graph([*graph.outputs, *effects]), body.results, bindings=body.bindings
    )


def _replace_op(node: Node, inputs: tuple[Tensor, ...], ends: Sequence[CutChannel]) -> list[Tensor]:
    """Return what replaces the outputs of a channel's op, without the token."""
    numbers = tuple(end.edge for end in ends)
    if node.op.name == "channel_send":
        targets = tuple(end.target for end in ends)
        value, *number = inputs[:1]
        if value.node.op.name == "used_rows":
            value, *number = value.node.inputs
        if len(inputs) == len(ends) == 1:
            attrs = {"edge": numbers[0], "target": targets[0]}
            return [_make_node("send", (value, *number), attrs, node)]
        every = {"value": np.ones(len(ends), np.bool_)}
        mask = inputs[1] if len(inputs) > 1 else _make_node("constant", (), every, node)
        attrs = {"edges": numbers, "targets": targets}
        return [_make_node("send_where", (value, mask, *number), attrs, node)]
    kept = ("shape", "dtype", "ragged")
    attrs = {name: node.attrs[name] for name in kept if name in node.attrs}
    sources = tuple(end.source for end in ends)
    if node.op.name == "channel_receive":
        attrs |= {"edge": numbers[0], "source": sources[0]}
        return [_make_node("recv", (), attrs, node)]
    value = _make_node("recv_any", inputs, {**attrs, "edges": numbers, "sources": sources}, node)
    return [_make_node("received_from", (value,), {"edge": numbers[0]}, node), value]


def _make_node(op: str, inputs: tuple[Tensor, ...], attrs: dict[str, Any], like: Node) -> Tensor:
    return make_node(REGISTRY[op], inputs, attrs, like).outputs[0]
