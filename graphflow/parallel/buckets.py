"""Buckets: small sums over replicas wait until there are a few megabytes of them, and are exchanged
at once, while what comes next is computed.

Gradients are finished in the order of the backward pass and needed only by the updates; so a bucket
is exchanged as soon as it is full, and what is left when someone needs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphflow.op import Node, Tensor
from graphflow.parallel.moves import Layout, Moves, Value

SMALL = 16
"""A tensor of more than the sixteenth part of a bucket is exchanged by itself, uncopied."""


@dataclass
class _Bucket:
    tensors: list[Tensor] = field(default_factory=list)
    cause: Node | None = None
    bytes: int = 0


class Buckets:
    """Sums that wait, by the axis of the mesh and the dtype.

    Args:
        values: of all tensors; those of what was exchanged are replaced.
        limit: bytes of a bucket; 0: nothing waits.
    """

    def __init__(self, moves: Moves, values: dict[Tensor, Value], limit: int) -> None:
        self._moves = moves
        self._values = values
        self._limit = limit
        self._open: dict[tuple[str, str], _Bucket] = {}
        self._where: dict[Tensor, tuple[str, str]] = {}

    def add(self, tensor: Tensor, cause: Node) -> None:
        """Let a partial sum wait, or exchange it now if it is large; one over a single axis of
        several devices."""
        value = self._values[tensor]
        local = self._moves.mesh.local
        across = [(axis, kind) for axis, kind in value.layout.partial if axis not in local]
        if len(across) != 1 or across[0][1] != "sum":
            return
        if not all(part.spec.is_concrete for part in value.parts):
            return
        if len(value.layout.partial) > 1:  # what takes turns is added up first
            within = Layout(value.layout.dims, tuple(across))
            value = self._values[tensor] = self._moves.to(value, within, cause, tensor.name)
        size = self._moves.nbytes(value.spec, value.layout)
        key = (across[0][0], tensor.dtype.name)
        if size * SMALL > self._limit:
            self._exchange([tensor], key[0], cause)
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

    def _close(self, key: tuple[str, str]) -> None:
        bucket = self._open.pop(key)
        for tensor in bucket.tensors:
            del self._where[tensor]
        assert bucket.cause is not None
        self._exchange(bucket.tensors, key[0], bucket.cause)

    def _exchange(self, tensors: list[Tensor], axis: str, cause: Node) -> None:
        values = [self._values[t] for t in tensors]
        if len(values) == 1:
            (value,) = values
            layout = Layout(value.layout.dims)
            self._values[tensors[0]] = self._moves.to(value, layout, cause, tensors[0].name)
            return
        sums = self._moves.sum_together(values, axis, cause)
        self._values.update(zip(tensors, sums, strict=True))
