"""Buckets: small sums over replicas wait until there are a few megabytes of them, then travel at
once.

Gradients are finished in the order of the backward pass, and only the updates read them. So a
bucket is exchanged when it is full, while later gradients are computed; the rest is exchanged when
a reader needs it. A small sum that is only fetched, such as a loss, goes with a bucket, so that it
needs no message of its own.

Source: Li et al., "PyTorch Distributed", VLDB 2020.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace
from typing import NamedTuple

from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.op import Node, Tensor
from graphflow.parallel.mesh.layouts import Layout, ShardedTensor
from graphflow.parallel.resharding.communication_log import is_gradient, user_name
from graphflow.parallel.resharding.fused_collectives import fused_all_reduce, fused_reduce_scatter
from graphflow.parallel.resharding.resharder import Resharder

BUCKET_BYTES = 4 << 20
"""The default size of a bucket, in bytes."""
SMALL_FRACTION = 16
"""A tensor larger than this fraction (1/16) of a bucket is exchanged by itself, without a copy."""
MAX_FETCHED = 1 << 10
"""The largest sum, in bytes, that may go with a bucket only to be fetched."""


class _PartialReduction(NamedTuple):
    """The mesh axes along which a value is partial, and the kind by which its parts are
    combined."""

    axes: tuple[str, ...]
    kind: str


class _Key(NamedTuple):
    """The key of a bucket: the properties that sums share if they travel together.

    Attributes:
        axes: the mesh axes along which they are partial.
        kind: "sum" or "mean".
        dtype: the name of their dtype.
        scattered: the mesh axis along which each place gets its extent only, or None.
        home: the device index of the first place. Stages of a pipeline have buckets of their own.
    """

    axes: tuple[str, ...]
    kind: str
    dtype: str
    scattered: str | None
    home: int


@dataclass
class _Bucket:
    """Sums that wait, the node that made the last one, and their total size."""

    tensors: list[Tensor] = field(default_factory=list)
    cause: Node | None = None
    bytes: int = 0


class GradientBuckets:
    """Sums that wait for others with the same axes, dtype and kind of result.

    Args:
        resharder: builds the collectives.
        values: the sharded tensor of each tensor. Sums that were exchanged replace theirs.
        limit: bytes of a bucket; 0: nothing waits.
    """

    def __init__(
        self, resharder: Resharder, values: dict[Tensor, ShardedTensor], limit: int
    ) -> None:
        self._resharder = resharder
        self._values = values
        self._limit = limit
        self._open: dict[_Key, _Bucket] = {}
        self._where: dict[Tensor, _Key] = {}
        self._wanted: dict[Tensor, Layout] = {}
        self._riders: dict[_Key, list[Tensor]] = {}

    def add(self, tensor: Tensor, cause: Node, wanted: Layout | None = None) -> None:
        """Let a partial sum wait, or exchange it now if it is large.

        Args:
            tensor: the tensor.
            cause: the node that made it.
            wanted: the layout in which it is read, if not whole. If that is split along a reduced
                axis, each place gets its extent; other sums do not wait.
        """
        across = self._reduction_of(tensor)
        if across is None:
            return
        value = self._values[tensor]
        layout, scattered = Layout(value.layout.dims), None
        if wanted is not None:
            along = wanted.axes().intersection(across.axes)
            if len(along) != 1 or across.kind != "sum" or wanted.partial:
                return
            (scattered,) = along
            d = self._resharder.scatter_dim(value, wanted, scattered)
            if d is None:
                return
            layout = layout.with_dim(d, wanted.dims[d])
        value = self._reduce_sequential(tensor, across, cause)
        self._wanted[tensor] = layout
        size = self._resharder.nbytes(value.spec, value.layout)
        key = self._key(tensor, across, scattered)
        if size * SMALL_FRACTION > self._limit:
            self._exchange([tensor], key, cause)
            return
        bucket = self._open.setdefault(key, _Bucket())
        bucket.tensors.append(tensor)
        bucket.bytes += size
        bucket.cause = cause
        self._where[tensor] = key
        if bucket.bytes >= self._limit:
            self._close(key)

    def add_fetched(self, tensor: Tensor, cause: Node) -> None:
        """Let a small partial sum that is only fetched go with the next bucket. It stays partial if
        none follows."""
        across = self._reduction_of(tensor)
        if across is None:
            return
        value = self._values[tensor]
        if self._resharder.nbytes(value.spec, value.layout) > MAX_FETCHED or not self._limit:
            return
        self._reduce_sequential(tensor, across, cause)
        self._riders.setdefault(self._key(tensor, across), []).append(tensor)

    def _reduction_of(self, tensor: Tensor) -> _PartialReduction | None:
        """Return how a tensor of known size is reduced across devices; None if it is not a sum or
        mean, or does not wait."""
        value = self._values[tensor]
        local = self._resharder.mesh.sequential
        across = [(axis, kind) for axis, kind in value.layout.partial if axis not in local]
        kinds = {kind for _, kind in across}
        if any(axis in self._resharder.unbucketed for axis, _ in across):
            return None
        if len(kinds) != 1 or not kinds <= {"sum", "mean"}:
            return None
        if not all(part.spec.is_concrete for part in value.shards):
            return None
        return _PartialReduction(tuple(axis for axis, _ in across), *kinds)

    def _reduce_sequential(
        self, tensor: Tensor, across: _PartialReduction, cause: Node
    ) -> ShardedTensor:
        """Return the value of a tensor with sums over micro-batches of one device completed."""
        value = self._values[tensor]
        if len(value.layout.partial) > len(across.axes):
            within = Layout(value.layout.dims, tuple((a, across.kind) for a in across.axes))
            value = self._values[tensor] = self._resharder.convert(
                value, within, cause, user_name(tensor.node)
            )
        return value

    def _key(self, tensor: Tensor, across: _PartialReduction, scattered: str | None = None) -> _Key:
        """Return the key of the bucket for a tensor."""
        home = self._resharder.device_index(tensor.node, self._resharder.mesh.places[0])
        return _Key(*across, tensor.dtype.name, scattered, home)

    def flush_tensor(self, tensor: Tensor) -> None:
        """Exchange the bucket in which a tensor waits, if it waits."""
        key = self._where.get(tensor)
        if key is not None:
            self._close(key)

    def _close(self, key: _Key) -> None:
        """Exchange a bucket."""
        bucket = self._open.pop(key)
        for tensor in bucket.tensors:
            del self._where[tensor]
        assert bucket.cause is not None
        self._exchange(bucket.tensors, key, bucket.cause, self._riders.pop(key, []))

    def _exchange(
        self, tensors: list[Tensor], key: _Key, cause: Node, riders: Sequence[Tensor] = ()
    ) -> None:
        """Exchange several sums at once, and update their values."""
        layouts = [self._wanted.pop(t) for t in tensors]
        together = [*tensors, *riders]
        values = [self._values[t] for t in together]
        if len(values) == 1:
            sums = [
                self._resharder.convert(values[0], layouts[0], cause, user_name(tensors[0].node))
            ]
        else:
            late = all(is_gradient(t.node) for t in tensors)
            what = "gradient" if late and key.kind == "sum" else key.kind
            description = " and ".join(
                [show_count(len(tensors), what), *(user_name(t.node) for t in riders)]
            )
            sums, axes = values, key.axes
            if key.scattered is not None:
                axes = tuple(axis for axis in key.axes if axis != key.scattered)
                rest = tuple((axis, key.kind) for axis in axes)
                layouts = [replace(layout, partial=rest) for layout in layouts]
                sums = fused_reduce_scatter(self._resharder, values, layouts, key.scattered, cause)
            if axes:
                sums = fused_all_reduce(self._resharder, sums, axes, cause, description, key.kind)
        self._values.update(zip(together, sums, strict=True))
