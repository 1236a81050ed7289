"""Buckets: small sums over replicas wait until there are a few megabytes of them, and are exchanged
at once, while what comes next is computed.

Gradients are finished in the order of the backward pass and needed only by the updates; so a bucket
is exchanged as soon as it is full, and what is left when someone needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphflow.device import DeviceName
from graphflow.op import Node, Tensor
from graphflow.parallel.layouts import Layout, Value
from graphflow.parallel.moves import Moves, called
from graphflow.parallel.together import scattered, summed

BUCKET = 4 << 20
"""Bytes of gradients that are summed at once, unless told otherwise."""
SMALL = 16
"""A tensor of more than the sixteenth part of a bucket is exchanged by itself, uncopied."""


_Key = tuple[str, str, bool, DeviceName]
"""The axis of the mesh, the dtype, whether each place gets its piece only, and where the first
place has it: stages of a pipeline have buckets of their own."""


@dataclass
class _Bucket:
    tensors: list[Tensor] = field(default_factory=list)
    cause: Node | None = None
    bytes: int = 0


class Buckets:
    """Sums that wait, by the axis of the mesh and the dtype, for others that are shared out alike.

    Args:
        values: of all tensors; those of what was exchanged are replaced.
        limit: bytes of a bucket; 0: nothing waits.
    """

    def __init__(self, moves: Moves, values: dict[Tensor, Value], limit: int) -> None:
        self._moves = moves
        self._values = values
        self._limit = limit
        self._open: dict[_Key, _Bucket] = {}
        self._where: dict[Tensor, _Key] = {}
        self._wanted: dict[Tensor, Layout] = {}

    def add(self, tensor: Tensor, cause: Node, wanted: Layout | None = None) -> None:
        """Let a partial sum wait, or exchange it now if it is large; one over a single axis of
        several devices.

        Args:
            wanted: how it is read, if not whole: where that is cut along the same axis, each place
                gets its piece; other sums do not wait.
        """
        value = self._values[tensor]
        local = self._moves.mesh.local
        across = [(axis, kind) for axis, kind in value.layout.partial if axis not in local]
        if len(across) != 1 or across[0][1] != "sum":
            return
        if not all(part.spec.is_concrete for part in value.parts):
            return
        axis, layout = across[0][0], Layout(value.layout.dims)
        if wanted is not None:
            d = None if wanted.partial else self._moves.scatters(value, wanted, axis)
            if d is None:
                return
            layout = layout.with_dim(d, wanted.dims[d])
        if len(value.layout.partial) > 1:  # what takes turns is added up first
            within = Layout(value.layout.dims, tuple(across))
            value = self._values[tensor] = self._moves.to(value, within, cause, called(tensor.node))
        self._wanted[tensor] = layout
        size = self._moves.nbytes(value.spec, value.layout)
        home = self._moves.device(tensor.node, self._moves.mesh.places[0])
        key = (axis, tensor.dtype.name, wanted is not None, home)
        if size * SMALL > self._limit:
            self._exchange([tensor], key, cause)
            return
        bucket = self._open.setdefault(key, _Bucket())
        bucket.tensors.append(tensor)
        bucket.bytes += size
        bucket.cause = cause
        self._where[tensor] = key
        if bucket.bytes >= self._limit:
            self._close(key)

    def empty(self, tensor: Tensor) -> None:
        """Exchange the bucket that a tensor waits in."""
        key = self._where.get(tensor)
        if key is not None:
            self._close(key)

    def _close(self, key: _Key) -> None:
        bucket = self._open.pop(key)
        for tensor in bucket.tensors:
            del self._where[tensor]
        assert bucket.cause is not None
        self._exchange(bucket.tensors, key, bucket.cause)

    def _exchange(self, tensors: list[Tensor], key: _Key, cause: Node) -> None:
        values = [self._values[t] for t in tensors]
        layouts = [self._wanted.pop(t) for t in tensors]
        axis, _, in_pieces, _ = key
        if len(values) == 1:
            sums = [self._moves.to(values[0], layouts[0], cause, called(tensors[0].node))]
        elif in_pieces:
            sums = scattered(self._moves, values, layouts, axis, cause)
        else:
            sums = summed(self._moves, values, axis, cause)
        self._values.update(zip(tensors, sums, strict=True))
