"""Means of variables over replicas, in buckets, by the collectives that sum gradients.

If a replica has several devices with the same values, each of them exchanges a part of a bucket
with the devices in its place of other replicas, and the parts are gathered within the replica. So
each value travels once between replicas, however many devices they have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from graphflow.base.formatting import show_count
from graphflow.ir.op import FUNCTIONS, REGISTRY, Node, Tensor, origin_scope
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


class ExchangedBucket(NamedTuple):
    """Values that are exchanged at once, flattened and concatenated.

    Attributes:
        values: the values.
        spare: the mesh axes within a replica along which devices have the same values.
        size: the number of elements at each device.
        parts: what each device exchanges with other replicas: all elements, or its part of those
            that the devices of its replica have in common.
        teams: the devices of a replica that exchange a part each.
    """

    values: Sequence[Exchanged]
    spare: tuple[str, ...]
    size: int
    parts: Sequence[Tensor]
    teams: Sequence[Sequence[int]]

    @property
    def cause(self) -> Node:
        """The node that stands for the exchange in reports."""
        return self.values[-1].variable

    @property
    def description(self) -> str:
        """The values, for reports."""
        if len(self.values) == 1:
            return user_name(self.values[0].variable)
        return show_count(len(self.values), "variable")


class Combination(Protocol):
    """Computes the result of an exchange from the values of all replicas."""

    def combine(
        self, unroller: ReplicaUnroller, bucket: ExchangedBucket, places: Sequence[int]
    ) -> list[Tensor]:
        """Return the results at some devices, one of each replica; record what is sent."""


class Mean:
    """Takes the mean over replicas, by an all-reduce."""

    def combine(
        self, unroller: ReplicaUnroller, bucket: ExchangedBucket, places: Sequence[int]
    ) -> list[Tensor]:
        """Return the mean of the parts of some devices, one of each replica, at each of them."""
        with unroller.cross_device(bucket.cause):
            means = all_reduce([bucket.parts[place] for place in places], op="mean")
        _record(unroller, "all-reduce", (REPLICA,), means, bucket.cause, bucket.description)
        return means


def mean_over_replicas(
    unroller: ReplicaUnroller, values: Sequence[Exchanged], limit: int
) -> list[list[Tensor]]:
    """Return the mean of each value over replicas, at each device of each replica.

    Args:
        unroller: the replicas.
        values: the values.
        limit: bytes of a bucket; 0: each value travels by itself.
    """
    return finish_exchange(unroller, values, begin_exchange(unroller, values, limit), Mean())


def begin_exchange(
    unroller: ReplicaUnroller, values: Sequence[Exchanged], limit: int
) -> list[ExchangedBucket]:
    """Put values into buckets, and cut these into the parts that devices exchange.

    Args:
        unroller: the replicas.
        values: the values.
        limit: bytes of a bucket; 0: each value travels by itself.
    """
    return [
        _pack_bucket(unroller, own, spare) for own, spare in _fill_buckets(unroller, values, limit)
    ]


def finish_exchange(
    unroller: ReplicaUnroller,
    values: Sequence[Exchanged],
    buckets: Sequence[ExchangedBucket],
    combination: Combination,
) -> list[list[Tensor]]:
    """Return what replicas make of each value, at each device of each replica."""
    found: dict[Node, list[Tensor]] = {}
    for bucket in buckets:
        rows: dict[int, Tensor] = {}
        for column in unroller.mesh.groups(REPLICA):
            places = [unroller.mesh.index_of(place) for place in column]
            rows |= zip(places, combination.combine(unroller, bucket, places), strict=True)
        for team in bucket.teams:
            with unroller.cross_device(bucket.cause):
                rows |= zip(team, all_gather([rows[place] for place in team]), strict=True)
        ordered = [rows[place] for place in range(len(rows))]
        if bucket.teams:
            _record(unroller, "all-gather", bucket.spare, ordered, bucket.cause, bucket.description)
        for value, own in zip(bucket.values, _unpack(unroller, bucket, ordered), strict=True):
            found[value.variable] = own
    return [found[value.variable] for value in values]


def require_equal(unroller: ReplicaUnroller, variable: Node) -> list[Tensor]:
    """Return a variable's current value at each device, after a check that all are equal.

    The step raises CheckError if they are not.
    """
    name = unroller.name_of(variable)
    message = f"{name!r} (made at {variable.location}) has to be equal at all replicas"
    values = unroller.current[variable]
    with unroller.cross_device(variable):
        least, most = (all_reduce([_as_int(v) for v in values], op=op) for op in ("min", "max"))
    found = []
    for place, (value, low, high) in enumerate(zip(values, least, most, strict=True)):
        with unroller.on_device(place, variable):
            equal = FUNCTIONS["equal"](low, high)
            found.append(REGISTRY["check"](value, equal, message=message))
    for made in (least, most):
        _record(unroller, "all-reduce", unroller.mesh.names, made, variable, name)
    return found


def _as_int(tensor: Tensor) -> Tensor:
    """Return a tensor of bools as integers; integers as they are."""
    if tensor.dtype != bool:
        return tensor
    with origin_scope(tensor.node, "checked/"):
        numbers: Tensor = FUNCTIONS["astype"](tensor, "uint8")
    return numbers


def _fill_buckets(
    unroller: ReplicaUnroller, values: Sequence[Exchanged], limit: int
) -> Iterator[tuple[list[Exchanged], tuple[str, ...]]]:
    """Yield values of one dtype that are whole along the same mesh axes, and these axes. A large
    value has a bucket of its own."""
    found: dict[tuple[str, tuple[str, ...]], tuple[list[Exchanged], int]] = {}
    for value in values:
        used = unroller.variables[value.variable].layout.axes()
        spare = tuple(axis for axis in unroller.template.mesh if axis not in used)
        size = _size(value.parts[0]) * value.parts[0].dtype.itemsize
        if size * SMALL_FRACTION > limit:
            yield [value], spare
            continue
        key = (value.parts[0].dtype.name, spare)
        own, held = found.pop(key, ([], 0))
        own.append(value)
        if held + size >= limit:
            yield own, spare
        else:
            found[key] = own, held + size
    yield from ((own, key[1]) for key, (own, _) in found.items())


def _pack_bucket(
    unroller: ReplicaUnroller, values: Sequence[Exchanged], spare: tuple[str, ...]
) -> ExchangedBucket:
    """Flatten and concatenate values at each device, and cut them into the parts of devices that
    have the same."""
    mesh, cause = unroller.mesh, values[-1].variable
    rows = []
    for place in range(len(mesh.places)):
        own = [value.parts[place] for value in values]
        with unroller.on_device(place, cause):
            flat = [FUNCTIONS["reshape"](part, (-1,)) for part in own]
            rows.append(flat[0] if len(flat) == 1 else FUNCTIONS["concat"](flat))
    size = _size(rows[0])
    groups = [[mesh.index_of(place) for place in group] for group in mesh.groups(*spare)]
    teams = [team for team in groups if 1 < len(team) <= size]
    parts = [*rows]
    for team in teams:
        begin = 0
        for place, count in zip(team, shares(size, len(team)), strict=True):
            with unroller.on_device(place, cause):
                parts[place] = slice_axis(rows[place], 0, begin, count)
            begin += count
    return ExchangedBucket(values, spare, size, parts, teams)


def _unpack(
    unroller: ReplicaUnroller, bucket: ExchangedBucket, rows: Sequence[Tensor]
) -> list[list[Tensor]]:
    """Return the values of a bucket at each device, from their concatenation there."""
    found: list[list[Tensor]] = [[] for _ in bucket.values]
    for place, row in enumerate(rows):
        begin = 0
        for value, own in zip(bucket.values, found, strict=True):
            part = value.parts[place]
            with unroller.on_device(place, value.variable):
                piece = slice_axis(row, 0, begin, _size(part))
                own.append(FUNCTIONS["reshape"](piece, part.shape))
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


def _size(tensor: Tensor) -> int:
    """Return the number of elements of a tensor of known shape."""
    return int(product(tensor.shape))


__all__ = [
    "Combination",
    "Exchanged",
    "ExchangedBucket",
    "Mean",
    "begin_exchange",
    "finish_exchange",
    "mean_over_replicas",
    "require_equal",
]
