"""Buckets: small sums (or means) over replicas wait until there are a few megabytes of them, and
are exchanged at once, while what comes next is computed.

Gradients are finished in the order of the backward pass and needed only by the updates; so a bucket
is exchanged as soon as it is full, and what is left when someone needs it. A small sum that is only
fetched, such as a loss, goes with one of them, so that it takes no message of its own.
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
"""Bytes of gradients that are summed at once, unless told otherwise."""
SMALL_FRACTION = 16
"""A tensor of more than the sixteenth part of a bucket is exchanged by itself, uncopied."""
MAX_FETCHED = 1 << 10
"""Bytes of what is only fetched, up to which it costs a bucket nothing."""


class _PartialReduction(NamedTuple):
    """Axes of the mesh, and how what is partial over them is combined."""

    axes: tuple[str, ...]
    kind: str


class _Key(NamedTuple):
    """What is exchanged together.

    Attributes:
        axes: of the mesh, over which they are partial.
        kind: "sum", or "mean".
        dtype: its name.
        scattered: the one of these along which each place gets its piece only, if there is one.
        home: where the first place has it: stages of a pipeline have buckets of their own.
    """

    axes: tuple[str, ...]
    kind: str
    dtype: str
    scattered: str | None
    home: int


@dataclass
class _Bucket:
    tensors: list[Tensor] = field(default_factory=list)
    cause: Node | None = None
    bytes: int = 0


class GradientBuckets:
    """Sums that wait, by the axes of the mesh and the dtype, for others that are shared out alike.

    Args:
        values: of all tensors; those of what was exchanged are replaced.
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
            wanted: how it is read, if not whole: where that is cut along the same axis, each place
                gets its piece; other sums do not wait.
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
        """Let a small partial sum that is only fetched go with the next bucket; it stays as it is
        if none follows."""
        across = self._reduction_of(tensor)
        if across is None:
            return
        value = self._values[tensor]
        if self._resharder.nbytes(value.spec, value.layout) > MAX_FETCHED or not self._limit:
            return
        self._reduce_sequential(tensor, across, cause)
        self._riders.setdefault(self._key(tensor, across), []).append(tensor)

    def _reduction_of(self, tensor: Tensor) -> _PartialReduction | None:
        """The axes of several devices over which a tensor of known size is a partial sum (or mean),
        and which of these."""
        value = self._values[tensor]
        local = self._resharder.mesh.sequential
        across = [(axis, kind) for axis, kind in value.layout.partial if axis not in local]
        kinds = {kind for _, kind in across}
        if len(kinds) != 1 or not kinds <= {"sum", "mean"}:
            return None
        if not all(part.spec.is_concrete for part in value.shards):
            return None
        return _PartialReduction(tuple(axis for axis, _ in across), *kinds)

    def _reduce_sequential(
        self, tensor: Tensor, across: _PartialReduction, cause: Node
    ) -> ShardedTensor:
        """The value of a tensor, what takes turns added up."""
        value = self._values[tensor]
        if len(value.layout.partial) > len(across.axes):
            within = Layout(value.layout.dims, tuple((a, across.kind) for a in across.axes))
            value = self._values[tensor] = self._resharder.convert(
                value, within, cause, user_name(tensor.node)
            )
        return value

    def _key(self, tensor: Tensor, across: _PartialReduction, scattered: str | None = None) -> _Key:
        home = self._resharder.device_index(tensor.node, self._resharder.mesh.places[0])
        return _Key(*across, tensor.dtype.name, scattered, home)

    def flush_tensor(self, tensor: Tensor) -> None:
        """Exchange the bucket that a tensor waits in."""
        key = self._where.get(tensor)
        if key is not None:
            self._close(key)

    def _close(self, key: _Key) -> None:
        bucket = self._open.pop(key)
        for tensor in bucket.tensors:
            del self._where[tensor]
        assert bucket.cause is not None
        self._exchange(bucket.tensors, key, bucket.cause, self._riders.pop(key, []))

    def _exchange(
        self, tensors: list[Tensor], key: _Key, cause: Node, riders: Sequence[Tensor] = ()
    ) -> None:
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
            told = " and ".join(
                [show_count(len(tensors), what), *(user_name(t.node) for t in riders)]
            )
            sums, axes = values, key.axes
            if key.scattered is not None:
                axes = tuple(axis for axis in key.axes if axis != key.scattered)
                rest = tuple((axis, key.kind) for axis in axes)
                layouts = [replace(layout, partial=rest) for layout in layouts]
                sums = fused_reduce_scatter(self._resharder, values, layouts, key.scattered, cause)
            if axes:
                sums = fused_all_reduce(self._resharder, sums, axes, cause, told, key.kind)
        self._values.update(zip(together, sums, strict=True))
