"""Halos: the elements of other places that windows at one place read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.mesh.layouts import SentTensor, ShardedTensor
from graphflow.parallel.resharding.communication_log import CommunicationLog
from graphflow.parallel.resharding.local_ops import slice_axis
from graphflow.parallel.resharding.shard_builder import ShardBuilder


def exchange_halo(
    builder: ShardBuilder,
    value: ShardedTensor,
    d: int,
    ranges: Sequence[tuple[Any, Any]],
    log: CommunicationLog,
    kind: str,
) -> tuple[Tensor, ...]:
    """Return the elements start to stop along axis `d` for each place. They are sliced where they
    are, and sent.

    Args:
        builder: builds the nodes.
        value: the tensor.
        d: the axis.
        ranges: (start, stop) for each place.
        log: records what is sent.
        kind: the kind of the record, "halo" or "all-to-all".
    """
    split, size = value.layout.dims[d], value.spec.shape[d]
    sent: dict[Any, Tensor] = {}
    received: dict[SentTensor, float] = {}

    def neighbours(place: Place) -> list[Place]:
        """Return the places that have the other extents along the axis, in their order."""
        group = [place]
        for axis in split.axes:
            group = [other for each in group for other in builder.mesh.group(each, axis)]
        return group

    def pieces(place: Place, start: Any, stop: Any) -> list[Tensor]:
        """Return the parts of a range that a place receives, in order."""
        found = []
        for other in neighbours(place):
            own = builder.partitioner.piece(size, split, other)
            first, last = max(start, own.start), min(stop, own.stop)
            if first >= last:
                continue
            part = builder.shard_at(value, other)
            key = (part, first, last)
            if key not in sent:
                with builder.on_device(other, log.cause):
                    sent[key] = slice_axis(part, d, first - own.start, last - first)
            received.update(builder.sent_bytes([(other, sent[key])], place, log.cause))
            found.append(sent[key])
        return found

    parts = []
    for place, (start, stop) in zip(builder.mesh.places, ranges, strict=True):
        own = pieces(place, start, stop)
        with builder.on_device(place, log.cause):
            if not own:
                own = [slice_axis(builder.shard_at(value, place), d, 0, 0)]
            parts.append(own[0] if len(own) == 1 else FUNCTIONS["concat"](own, axis=d))
    across = [axis for axis in split.axes if axis not in builder.mesh.sequential]
    if received and across:
        log(kind, across, received)
    return tuple(parts)


__all__ = ["exchange_halo"]
