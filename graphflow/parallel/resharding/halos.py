"""Halos: what windows at one place see of the pieces of others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.mesh.layouts import Sent, Value
from graphflow.parallel.resharding.communication_log import Note
from graphflow.parallel.resharding.local_ops import cut

if TYPE_CHECKING:
    from graphflow.parallel.resharding.resharder import Moves


def seen(
    moves: Moves, value: Value, d: int, ranges: Sequence[tuple[Any, Any]], note: Note, kind: str
) -> tuple[Tensor, ...]:
    """The elements start to stop along `d` for each place, cut out where they are, and sent."""
    split, size = value.layout.dims[d], value.spec.shape[d]
    sent: dict[Any, Tensor] = {}
    received: dict[Sent, float] = {}

    def neighbours(place: Place) -> list[Place]:
        """The places that have the other pieces, in the order of these."""
        group = [place]
        for axis in split.axes:
            group = [other for each in group for other in moves.mesh.group(each, axis)]
        return group

    def pieces(place: Place, start: Any, stop: Any) -> list[Tensor]:
        found = []
        for other in neighbours(place):
            own = moves.cuts.piece(size, split, other)
            first, last = max(start, own.start), min(stop, own.stop)
            if first >= last:
                continue
            part = moves.part(value, other)
            key = (part, first, last)
            if key not in sent:
                with moves.at(other, note.cause):
                    sent[key] = cut(part, d, first - own.start, last - first)
            received.update(moves.sent([(other, sent[key])], place, note.cause))
            found.append(sent[key])
        return found

    parts = []
    for place, (start, stop) in zip(moves.mesh.places, ranges, strict=True):
        own = pieces(place, start, stop)
        with moves.at(place, note.cause):
            if not own:
                own = [cut(moves.part(value, place), d, 0, 0)]
            parts.append(own[0] if len(own) == 1 else FUNCTIONS["concat"](own, axis=d))
    across = [axis for axis in split.axes if axis not in moves.mesh.local]
    if received and across:
        note(kind, across, received)
    return tuple(parts)


__all__ = ["seen"]
