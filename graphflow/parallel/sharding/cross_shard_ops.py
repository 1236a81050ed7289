"""Meetings: ops whose shards begin with their own pieces, tell each other a little, and finish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.ir.op import Node, Tensor
from graphflow.parallel.mesh.axis_split import AxisSplit
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.mesh.layouts import SentTensor
from graphflow.parallel.resharding.communication_log import CommunicationLog, user_name
from graphflow.parallel.resharding.resharder import Resharder
from graphflow.parallel.sharding.rules import ShardingRule


def emit_meeting(
    resharder: Resharder,
    node: Node,
    rule: ShardingRule,
    split: AxisSplit,
    inputs: Sequence[tuple[Tensor, ...]],
) -> list[tuple[Tensor, ...]]:
    """The outputs of a node at each place, made in a meeting along its letter.

    Args:
        split: of that letter.
        inputs: their parts.
    """
    meeting, mesh = rule.sharding.meeting, resharder.mesh
    assert meeting is not None
    (axis,) = split.axes
    attrs = dict(node.attrs)
    begun: dict[Place, Any] = {}
    known: dict[Any, Any] = {}
    for number, place in enumerate(mesh.places):
        own = tuple(parts[number] for parts in inputs)
        start = resharder.partitioner.piece(rule.sizes[meeting.letter], split, place).start
        key: Any = (resharder.device_index(node, place), own, start) if mesh.sequential else place
        if key not in known:
            with resharder.on_device(place, node):
                known[key] = meeting.tell(node.op, start, *own, **attrs)
        begun[place] = known[key]
    sent: dict[SentTensor, float] = {}
    outputs = []
    for place in mesh.places:
        group = mesh.group(place, axis)
        at = group.index(place)
        heard = {"before": group[:at], "after": group[at + 1 :], "all": group}[meeting.who]
        kept, told = begun[place][0], [begun[other][1] for other in heard]
        for other, tensors in zip(heard, told, strict=True):
            sent |= resharder.sent_bytes([(other, t) for t in tensors], place, node)
        key = (
            (resharder.device_index(node, place), kept, tuple(told))
            if mesh.sequential
            else ("end", place)
        )
        if key not in known:
            with resharder.on_device(place, node):
                known[key] = meeting.hear(node.op, kept, told, **attrs)
        outputs.append(known[key])
    CommunicationLog(resharder, node, user_name(node))("meeting", (axis,), sent)
    return outputs


__all__ = ["emit_meeting"]
