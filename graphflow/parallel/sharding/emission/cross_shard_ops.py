"""Ops that shards finish together: each computes on its shard, tells the others a little, and
finishes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.ir.op import Node, Tensor
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.mesh.layouts import SentTensor
from graphflow.parallel.resharding.communication_log import CommunicationLog, user_name
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.sharding.rules.node_rule import ShardingRule


def emit_exchange(
    resharder: Resharder,
    node: Node,
    rule: ShardingRule,
    split: AxisSplit,
    inputs: Sequence[tuple[Tensor, ...]],
) -> list[tuple[Tensor, ...]]:
    """Write a node whose shards exchange intermediate results along one letter
    (`Sharding.exchange`).

    Args:
        resharder: records the exchange.
        node: the node.
        rule: its rule.
        split: the split of the letter.
        inputs: for each input, its shards by place.

    Returns:
        For each place, the outputs.
    """
    exchange, mesh = rule.sharding.exchange, resharder.mesh
    assert exchange is not None
    (axis,) = split.axes
    attrs = dict(node.attrs)
    begun: dict[Place, Any] = {}
    known: dict[Any, Any] = {}
    for number, place in enumerate(mesh.places):
        own = tuple(parts[number] for parts in inputs)
        start = resharder.partitioner.piece(rule.sizes[exchange.letter], split, place).start
        key: Any = (resharder.device_index(node, place), own, start) if mesh.sequential else place
        if key not in known:
            with resharder.on_device(place, node):
                known[key] = exchange.contribute(node.op, start, *own, **attrs)
        begun[place] = known[key]
    sent: dict[SentTensor, float] = {}
    outputs = []
    for place in mesh.places:
        group = mesh.group(place, axis)
        at = group.index(place)
        senders = {"before": group[:at], "after": group[at + 1 :], "all": group}[exchange.senders]
        kept, received = begun[place][0], [begun[other][1] for other in senders]
        for other, tensors in zip(senders, received, strict=True):
            sent |= resharder.sent_bytes([(other, t) for t in tensors], place, node)
        key = (
            (resharder.device_index(node, place), kept, tuple(received))
            if mesh.sequential
            else ("end", place)
        )
        if key not in known:
            with resharder.on_device(place, node):
                known[key] = exchange.combine(node.op, kept, received, **attrs)
        outputs.append(known[key])
    CommunicationLog(resharder, node, user_name(node))("meeting", (axis,), sent)
    return outputs


__all__ = ["emit_exchange"]
