"""Several tensors in one exchange: flattened and concatenated, exchanged, and taken apart again.

A small tensor costs an exchange nearly as much as a large one. So tensors that are finished about
the same time travel together (`gradient_buckets.py`, `update_gathering.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from graphflow.ir.op import FUNCTIONS, Node, Tensor
from graphflow.ir.spec import product
from graphflow.parallel.mesh.device_mesh import Place
from graphflow.parallel.mesh.layouts import Layout, ShardedTensor
from graphflow.parallel.resharding.collectives import all_gather, all_reduce, reduce_scatter
from graphflow.parallel.resharding.communication_log import CommunicationLog
from graphflow.parallel.resharding.local_ops import concat_rows, slice_axis
from graphflow.parallel.resharding.resharder import Resharder


def fused_all_reduce(
    resharder: Resharder,
    values: Sequence[ShardedTensor],
    axes: Sequence[str],
    cause: Node,
    description: str,
    kind: str = "sum",
) -> list[ShardedTensor]:
    """Return the sums (or means) of several values over groups, at every place.

    Args:
        resharder: builds the collectives.
        values: the values, partial along the axes.
        axes: the mesh axes.
        cause: the node that needs the results.
        description: the description of the values, for reports.
        kind: "sum" or "mean".
    """

    def exchange(group: Sequence[Place]) -> Sequence[Tensor]:
        rows = [
            _pack(resharder, place, cause, [resharder.shard_at(v, place) for v in values])
            for place in group
        ]
        with resharder.cross_device(cause):
            return all_reduce(rows, op=kind)

    layouts = [_without_partial(value.layout, axes) for value in values]
    sums = _unpack(resharder, values, layouts, axes, cause, exchange)
    CommunicationLog(resharder, cause, description).exchange("all-reduce", axes, sums[0])
    return sums


def fused_reduce_scatter(
    resharder: Resharder,
    values: Sequence[ShardedTensor],
    layouts: Sequence[Layout],
    axis: str,
    cause: Node,
) -> list[ShardedTensor]:
    """Return the sums of several values over groups, of which each place gets its extent.

    Args:
        resharder: builds the collectives.
        values: the values, partial along the axis.
        layouts: the layouts of the results; the mesh axis is the innermost split of each (see
            `Resharder.scatter_dim`).
        axis: the mesh axis.
        cause: the node that needs the results.
    """

    def pieces(own: Place, to: Place) -> Iterable[Tensor]:
        """Yield what one place has of another place's extents."""
        for value, layout in zip(values, layouts, strict=True):
            part = resharder.shard_at(value, own)
            sizes = zip(value.spec.shape, value.layout.dims, layout.dims, strict=True)
            for d, (size, have, want) in enumerate(sizes):
                if have != want:
                    piece = resharder.partitioner.piece(size, want, to)
                    start = piece.start - resharder.partitioner.piece(size, have, own).start
                    part = slice_axis(part, d, start, piece.size)
            yield part

    def exchange(group: Sequence[Place]) -> Sequence[Tensor]:
        rows = []
        for own in group:
            with resharder.on_device(own, cause):
                parts = [part for to in group for part in pieces(own, to)]
            rows.append(_pack(resharder, own, cause, parts))
        each = list(zip(values, layouts, strict=True))
        sizes = [sum(_shard_size(resharder, *one, to) for one in each) for to in group]
        with resharder.cross_device(cause):
            return reduce_scatter(rows, axis=0, sizes=sizes)

    sums = _unpack(resharder, values, layouts, (axis,), cause, exchange)
    CommunicationLog(resharder, cause, f"{len(values)} gradients").exchange(
        "reduce-scatter", (axis,), sums[0]
    )
    return sums


def fused_all_gather(
    resharder: Resharder, values: Sequence[ShardedTensor], axis: str, cause: Node
) -> list[ShardedTensor]:
    """Return several values whole along a mesh axis, at every place of each group."""
    dims = [next(d for d, s in enumerate(v.layout.dims) if axis in s.axes) for v in values]

    def build(group: Sequence[Place]) -> list[list[Tensor]]:
        rows = [
            _pack(resharder, place, cause, [resharder.shard_at(v, place) for v in values])
            for place in group
        ]
        with resharder.cross_device(cause):
            wholes = all_gather(rows, axis=0)
        return [unpack_pieces(place, group, row) for place, row in zip(group, wholes, strict=True)]

    def unpack_pieces(place: Place, group: Sequence[Place], row: Tensor) -> list[Tensor]:
        """Return each value's pieces from a gathered row, concatenated."""
        pieces: list[list[Tensor]] = [[] for _ in values]
        begin = 0
        with resharder.on_device(place, cause):
            for other in group:
                for own, value in zip(pieces, values, strict=True):
                    size = _shard_size(resharder, value, value.layout, other)
                    shape = resharder.local_shape(value.spec.shape, value.layout, other)
                    own.append(FUNCTIONS["reshape"](slice_axis(row, 0, begin, size), shape))
                    begin += size
            return [
                concat_rows(own, d, value.layout.dims[d].outer)
                for own, value, d in zip(pieces, values, dims, strict=True)
            ]

    layouts = [
        v.layout.with_dim(d, v.layout.dims[d].drop_last())
        for v, d in zip(values, dims, strict=True)
    ]
    wholes = _map_groups(resharder, values, layouts, (axis,), build)
    CommunicationLog(resharder, cause, f"{len(values)} new values").exchange(
        "all-gather", (axis,), wholes[0]
    )
    return wholes


def _shard_size(resharder: Resharder, value: ShardedTensor, layout: Layout, place: Place) -> int:
    """Return the number of elements of the shard at a place."""
    return int(product(resharder.local_shape(value.spec.shape, layout, place)))


def _without_partial(layout: Layout, axes: Sequence[str]) -> Layout:
    """Return the layout with nothing left to combine along some mesh axes."""
    return replace(layout, partial=tuple(p for p in layout.partial if p[0] not in axes))


def _pack(resharder: Resharder, place: Place, cause: Node, parts: Sequence[Tensor]) -> Tensor:
    """Flatten and concatenate tensors at a place."""
    with resharder.on_device(place, cause):
        row: Tensor = FUNCTIONS["concat"]([FUNCTIONS["reshape"](part, (-1,)) for part in parts])
    return row


def _unpack(
    resharder: Resharder,
    values: Sequence[ShardedTensor],
    layouts: Sequence[Layout],
    axes: Sequence[str],
    cause: Node,
    exchange: Callable[[Sequence[Place]], Sequence[Tensor]],
) -> list[ShardedTensor]:
    """Return the parts of each group's concatenated result."""

    def build(group: Sequence[Place]) -> list[list[Tensor]]:
        found = []
        for place, row in zip(group, exchange(group), strict=True):
            own, begin = [], 0
            for value, layout in zip(values, layouts, strict=True):
                size = _shard_size(resharder, value, layout, place)
                shape = resharder.local_shape(value.spec.shape, layout, place)
                with resharder.on_device(place, cause):
                    own.append(FUNCTIONS["reshape"](slice_axis(row, 0, begin, size), shape))
                begin += size
            found.append(own)
        return found

    return _map_groups(resharder, values, layouts, axes, build)


def _map_groups(
    resharder: Resharder,
    values: Sequence[ShardedTensor],
    layouts: Sequence[Layout],
    axes: Sequence[str],
    build: Callable[[Sequence[Place]], Sequence[Sequence[Tensor]]],
) -> list[ShardedTensor]:
    """Build the shards of several values for each group; once for groups with the same inputs."""
    found: dict[Place, Sequence[Tensor]] = {}
    known: dict[tuple[Tensor, ...], Sequence[Sequence[Tensor]]] = {}
    for group in resharder.mesh.groups(*axes):
        own = tuple(resharder.shard_at(v, place) for place in group for v in values)
        if own not in known:
            known[own] = build(group)
        found.update(zip(group, known[own], strict=True))
    return [
        ShardedTensor(value.spec, layout, tuple(found[p][i] for p in resharder.mesh.places))
        for i, (value, layout) in enumerate(zip(values, layouts, strict=True))
    ]


__all__ = ["fused_all_gather", "fused_reduce_scatter", "fused_all_reduce"]
