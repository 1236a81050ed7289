"""Collectives for users: what several replicas compute of each other's tensors.

Each function builds a node for each replica (`ops/communication/collectives.py`). If these nodes
are placed on several devices, they become one exchange between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Tensor, as_tensor, validate_arguments
from graphflow.ir.spec import Dim, Size
from graphflow.ops.base.shape_rules import normalize_axis
from graphflow.ops.communication import collectives
from graphflow.ops.communication.collective_rules import common_shape
from graphflow.ops.communication.collectives import group
from graphflow.ops.communication.reduction_order import ALGORITHMS, REDUCTIONS, shares
from graphflow.parallel.mesh.count_arguments import as_count

F = TypeVar("F", bound=Callable[..., Any])

REPLICAS = 100_000
"""The most replicas of one exchange: each is a node."""


def _public(f: F) -> F:
    """Return a function whose errors name it and the user's line."""
    return cast(F, validate_arguments(f, f"parallel.{f.__name__}"))


@_public
def all_reduce(
    tensors: Sequence[Any],
    op: str = "sum",
    algorithm: str = "auto",
    hosts: Sequence[int] | None = None,
) -> list[Tensor]:
    """Sum the tensors of all replicas; each replica gets the sum.

    Args:
        tensors: one for each replica, of one shape and dtype. Result i is placed as tensor i is.
        op: "sum", "mean" (of floats), "max", "min" or "prod".
        algorithm: the order in which tensors are combined, and how they travel between hosts:
            "ring", "tree", "halving" (recursive halving and doubling), "two_level", "direct", or
            "auto", which follows from the numbers of replicas and elements.
        hosts: the number of each replica's host, for "two_level": each host combines its tensors
            before one of its replicas exchanges them.

    Returns:
        As many tensors, whose values have the same bits.

    Raises:
        ShapeError, DTypeError: the tensors' shapes or dtypes differ, or the dtype has no such op.
        ArgumentError: no tensors, another op or algorithm, "two_level" without hosts.
    """
    xs = _tensors(tensors)
    attrs = _reduction(op, algorithm, hosts, len(xs))
    return group(collectives.all_reduce, xs, xs, attrs)


@_public
def reduce_scatter(
    tensors: Sequence[Any],
    axis: int = 0,
    op: str = "sum",
    sizes: Sequence[Size] | None = None,
    algorithm: str = "auto",
    hosts: Sequence[int] | None = None,
) -> list[Tensor]:
    """Sum the tensors of all replicas; each replica gets a part of the sum along an axis.

    Args:
        tensors: one for each replica, of one shape and dtype. Result i is placed as tensor i is.
        axis: the axis.
        op: "sum" or "mean".
        sizes: the sizes of the parts along the axis; default: as equal as possible, larger ones
            first.
        algorithm, hosts: as in `all_reduce`.

    Raises:
        ShapeError: the tensors' shapes differ; there is no such axis; its size is not known, or is
            not the sum of `sizes`.
        DTypeError: the tensors' dtypes differ, or have no such op.
        ArgumentError: as in `all_reduce`.
    """
    xs = _tensors(tensors)
    axis = normalize_axis(axis, xs[0].ndim)
    if op not in ("sum", "mean"):
        raise ArgumentError(f'op must be "sum" or "mean", not {op!r}')
    attrs = _reduction(op, algorithm, hosts, len(xs))
    parts = _parts(xs[0], axis, len(xs), sizes)
    return group(collectives.reduce_scatter, xs, xs, {"axis": axis, "sizes": parts, **attrs})


@_public
def all_gather(tensors: Sequence[Any], axis: int = 0) -> list[Tensor]:
    """Concatenate the tensors of all replicas along an axis; each replica gets the result.

    Args:
        tensors: one for each replica, of one dtype, and of one shape except for the axis. Result i
            is placed as tensor i is.
        axis: the axis.

    Raises:
        ShapeError, DTypeError: shapes or dtypes do not match, or there is no such axis.
        ArgumentError: no tensors.
    """
    xs = _tensors(tensors)
    return group(collectives.all_gather, xs, xs, {"axis": normalize_axis(axis, xs[0].ndim)})


@_public
def broadcast(tensor: Any, count: int, like: Sequence[Tensor] | None = None) -> list[Tensor]:
    """Copy a tensor to each of `count` replicas; the first one has it.

    Args:
        tensor: the tensor.
        count: the number of replicas.
        like: tensors, one for each replica, with which the results are placed; default: where the
            tensor is pinned, or near the nodes that read them.

    Raises:
        ArgumentError: `count` is no positive int, or not the number of tensors in `like`.
    """
    x = as_tensor(tensor)
    if (number := as_count(count)) is None:
        raise ArgumentError(f"count must be a positive int, not {count!r}")
    count = number
    if count > REPLICAS:
        raise ArgumentError(f"{count:,} replicas are more than a graph holds: {REPLICAS:,}")
    if like is not None and len(like) != count:
        raise ArgumentError(f"like has {len(like)} tensors for {count} replicas; give one each")
    near = [x, *([x] * (count - 1) if like is None else map(as_tensor, like[1:]))]
    return group(collectives.broadcast, [x], near, {"count": count})


@_public
def all_to_all(tensors: Sequence[Any], split_axis: int = 0, concat_axis: int = 0) -> list[Tensor]:
    """Split each replica's tensor along one axis, send part i to replica i, and concatenate what
    arrives.

    Args:
        tensors: one for each replica, of one dtype and shape (except for `concat_axis`). Result i
            is placed as tensor i is.
        split_axis: the axis that is split. Parts differ by at most one element, larger ones come
            first.
        concat_axis: the axis along which the received parts are concatenated.

    Raises:
        ShapeError, DTypeError: shapes or dtypes do not match, there is no such axis, or the size of
            `split_axis` is not known.
        ArgumentError: no tensors.
    """
    xs = _tensors(tensors)
    split, concat = (normalize_axis(a, xs[0].ndim) for a in (split_axis, concat_axis))
    common_shape([x.spec for x in xs], but=concat if split != concat else None)
    sizes = (_parts(xs[0], split, len(xs), None),) * len(xs)
    attrs = {"split_axis": split, "concat_axis": concat, "sizes": sizes}
    return group(collectives.all_to_all, xs, xs, attrs)


def _tensors(given: Any) -> list[Tensor]:
    """Return a list of tensors, one for each replica."""
    if not isinstance(given, list | tuple):
        raise ArgumentError(f"tensors must be a list, one for each replica, not {given!r}")
    if not given:
        raise ArgumentError("there are no tensors; give one for each replica")
    return [as_tensor(x) for x in given]


def _reduction(op: str, algorithm: str, hosts: Any, count: int) -> dict[str, Any]:
    """Check the arguments of a reduction, and return them as attributes."""
    if op not in REDUCTIONS:
        raise ArgumentError(f"op must be one of {', '.join(REDUCTIONS)}, not {op!r}")
    if algorithm not in ALGORITHMS:
        raise ArgumentError(f"algorithm must be one of {', '.join(ALGORITHMS)}, not {algorithm!r}")
    if hosts is not None:
        hosts = tuple(hosts)
        if len(hosts) != count or not all(type(h) is int for h in hosts):
            raise ArgumentError(
                f"hosts must be {count} ints, the number of each replica's host, not {hosts!r}"
            )
    elif algorithm == "two_level":
        raise ArgumentError(
            f"algorithm 'two_level' of {count} replicas needs hosts: the number of each replica's "
            "host, as in hosts=(0, 0, 1, 1)"
        )
    return {"reduction": op, "algorithm": algorithm, "hosts": hosts}


def _parts(x: Tensor, axis: int, count: int, sizes: Sequence[Size] | None) -> tuple[Size, ...]:
    """Return the sizes of the parts along an axis; by default as equal as possible."""
    if sizes is not None:
        if not all(isinstance(each, Dim) or (type(each) is int and each >= 0) for each in sizes):
            raise ArgumentError(f"sizes must be ints of at least 0, not {tuple(sizes)!r}")
        return tuple(sizes)
    whole = x.shape[axis]
    if not isinstance(whole, int):
        raise ShapeError(
            f"axis {axis} of {x.spec} has no known size to divide by {count} ranks; give the "
            "placeholder a size, or divide another axis"
        )
    return tuple(shares(whole, count))


__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"]
