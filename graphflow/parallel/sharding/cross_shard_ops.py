"""Meetings: ops whose shards begin with their own pieces, tell each other a little, and finish."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.ir.op import Node, Tensor
from graphflow.parallel.mesh.device_mesh import Place, Split
from graphflow.parallel.mesh.layouts import Sent
from graphflow.parallel.resharding.communication_log import Note, called
from graphflow.parallel.resharding.resharder import Moves
from graphflow.parallel.sharding.rules import Rule


def met(
    moves: Moves, node: Node, rule: Rule, split: Split, inputs: Sequence[tuple[Tensor, ...]]
) -> list[tuple[Tensor, ...]]:
    """The outputs of a node at each place, made in a meeting along its letter.

    Args:
        split: of that letter.
        inputs: their parts.
    """
    meeting, mesh = rule.sharding.meeting, moves.mesh
    assert meeting is not None
    (axis,) = split.axes
    attrs = dict(node.attrs)
    begun: dict[Place, Any] = {}
    known: dict[Any, Any] = {}
    for number, place in enumerate(mesh.places):
        own = tuple(parts[number] for parts in inputs)
        start = moves.cuts.piece(rule.sizes[meeting.letter], split, place).start
        key: Any = (moves.home(node, place), own, start) if mesh.local else place
        if key not in known:
            with moves.at(place, node):
                known[key] = meeting.tell(node.op, start, *own, **attrs)
        begun[place] = known[key]
    sent: dict[Sent, float] = {}
    outputs = []
    for place in mesh.places:
        group = mesh.group(place, axis)
        at = group.index(place)
        heard = {"before": group[:at], "after": group[at + 1 :], "all": group}[meeting.who]
        kept, told = begun[place][0], [begun[other][1] for other in heard]
        for other, tensors in zip(heard, told, strict=True):
            sent |= moves.sent([(other, t) for t in tensors], place, node)
        key = (moves.home(node, place), kept, tuple(told)) if mesh.local else ("end", place)
        if key not in known:
            with moves.at(place, node):
                known[key] = meeting.hear(node.op, kept, told, **attrs)
        outputs.append(known[key])
    Note(moves, node, called(node))("meeting", (axis,), sent)
    return outputs


__all__ = ["met"]
