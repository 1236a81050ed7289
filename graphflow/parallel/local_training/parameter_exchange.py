"""Means of variables over replicas, in buckets, by the collectives that sum gradients.

If a replica has several devices with the same values, each of them exchanges a part of a bucket
with the devices in its place of other replicas, and the parts are gathered within the replica. So
each value travels once between replicas, however many devices they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from graphflow.base.formatting import show_count
from graphflow.ir.op import FUNCTIONS, Node, Tensor
from graphflow.ir.spec import product
from graphflow.ops.communication.reduction_order import shares
from graphflow.parallel.local_training.replica_unroller import REPLICA, ReplicaUnroller
from graphflow.parallel.mesh.layouts import ShardedTensor, whole
from graphflow.parallel.resharding.collectives import all_gather, all_reduce
from graphflow.parallel.resharding.communication_log import CommunicationLog, user_name
from graphflow.parallel.resharding.gradient_buckets import SMALL_FRACTION
from graphflow.parallel.resharding.local_ops import slice_axis


class Exchanged(NamedTuple):
    """A value that replicas exchange.

    Attributes:
        variable: the user's variable that it belongs to.
        parts: the value at each device of each replica.
    """

    variable: Node
    parts: Sequence[Tensor]


class _ParameterBucket(NamedTuple):
    """Values that are exchanged at once.

    Attributes:
        values: the values.
        spare: the mesh axes within a replica along which devices have the same values.
    """

    values: list[Exchanged]
    spare: tuple[str, ...]


def mean_over_replicas(
    unroller: ReplicaUnroller, values: Sequence[Exchanged], limit: int
) -> list[list[Tensor]]:
    """Return the mean of each value over replicas, at each device of each replica.

    Args:
        unroller: the replicas.
        values: the values.
        limit: bytes of a bucket; 0: each value travels by itself.
    """
    means: dict[Node, list[Tensor]] = {}
    for bucket in _fill_buckets(unroller, values, limit):
        rows = _mean_rows(unroller, bucket)
        for value, own in zip(bucket.values, _unpack(unroller, bucket, rows), strict=True):
            means[value.variable] = own
    return [means[value.variable] for value in values]


def _fill_buckets(
    unroller: ReplicaUnroller, values: Sequence[Exchanged], limit: int
) -> Iterator[_ParameterBucket]:
    """Yield buckets of values of one dtype that are whole along the same mesh axes. A large value
    has a bucket of its own."""
    found: dict[tuple[str, tuple[str, ...]], tuple[_ParameterBucket, int]] = {}
    for value in values:
        used = unroller.variables[value.variable].layout.axes()
        spare = tuple(axis for axis in unroller.template.mesh if axis not in used)
        size = _size(value.parts[0]) * value.parts[0].dtype.itemsize
        if size * SMALL_FRACTION > limit:
            yield _ParameterBucket([value], spare)
            continue
        key = (value.parts[0].dtype.name, spare)
        bucket, held = found.pop(key, (_ParameterBucket([], spare), 0))
        bucket.values.append(value)
        if held + size >= limit:
            yield bucket
        else:
            found[key] = bucket, held + size
    yield from (bucket for bucket, _ in found.values())


def _mean_rows(unroller: ReplicaUnroller, bucket: _ParameterBucket) -> list[Tensor]:
    """Return the mean over replicas of a bucket's concatenated values, at each device."""
    mesh, cause = unroller.mesh, bucket.values[-1].variable
    rows = [_pack(unroller, bucket, place) for place in range(len(mesh.places))]
    within = [[mesh.index_of(p) for p in group] for group in mesh.groups(*bucket.spare)]
    parts = dict(enumerate(rows))
    split = [group for group in within if 1 < len(group) <= _size(rows[group[0]])]
    for group in split:
        begin = 0
        for place, size in zip(group, shares(_size(rows[group[0]]), len(group)), strict=True):
            with unroller.on_device(place, cause):
                parts[place] = slice_axis(rows[place], 0, begin, size)
            begin += size
    name = _describe(bucket)
    means: dict[int, Tensor] = {}
    for column in mesh.groups(REPLICA):
        places = [mesh.index_of(p) for p in column]
        with unroller.builder.cross_device(cause):
            made = all_reduce([parts[p] for p in places], op="mean")
        means.update(zip(places, made, strict=True))
    _record(unroller, "all-reduce", (REPLICA,), [means[p] for p in sorted(means)], cause, name)
    for group in split:
        with unroller.builder.cross_device(cause):
            means.update(zip(group, all_gather([means[p] for p in group]), strict=True))
    result = [means[place] for place in range(len(rows))]
    if split:
        _record(unroller, "all-gather", bucket.spare, result, cause, name)
    return result


def _pack(unroller: ReplicaUnroller, bucket: _ParameterBucket, place: int) -> Tensor:
    """Flatten and concatenate the values of a bucket at a device. A value that needs no slicing
    stays as it is."""
    parts = [value.parts[place] for value in bucket.values]
    if len(parts) == 1 and not bucket.spare:
        return parts[0]
    with unroller.on_device(place, bucket.values[-1].variable):
        rows = [FUNCTIONS["reshape"](part, (-1,)) for part in parts]
        row: Tensor = rows[0] if len(rows) == 1 else FUNCTIONS["concat"](rows)
    return row


def _unpack(
    unroller: ReplicaUnroller, bucket: _ParameterBucket, rows: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Return the values of a bucket at each device, from their concatenation there."""
    found: list[list[Tensor]] = [[] for _ in bucket.values]
    for place, row in enumerate(rows):
        begin = 0
        for value, own in zip(bucket.values, found, strict=True):
            part = value.parts[place]
            with unroller.on_device(place, value.variable):
                if row.shape != part.shape or len(bucket.values) > 1:
                    piece = slice_axis(row, 0, begin, _size(part))
                    own.append(FUNCTIONS["reshape"](piece, part.shape))
                else:
                    own.append(row)
            begin += _size(part)
    return found


def _record(
    unroller: ReplicaUnroller,
    kind: str,
    axes: Sequence[str],
    made: Sequence[Tensor],
    cause: Node,
    name: str,
) -> None:
    """Record a collective by what each device receives in it."""
    value = ShardedTensor(made[0].spec, whole(made[0].ndim), tuple(made))
    CommunicationLog(unroller.builder, cause, name).exchange(kind, axes, value)


def _describe(bucket: _ParameterBucket) -> str:
    """Describe the values of a bucket for reports."""
    if len(bucket.values) == 1:
        return user_name(bucket.values[0].variable)
    return show_count(len(bucket.values), "variable")


def _size(tensor: Tensor) -> int:
    """Return the number of elements of a tensor of known shape."""
    return int(product(tensor.shape))


__all__ = ["Exchanged", "mean_over_replicas"]
