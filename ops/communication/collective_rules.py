"""Kernels of collectives, as plain functions of all ranks' tensors, and their shape rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.spec import Size, TensorSpec, equate, is_inexact, kind
from graphflow.ops.communication.reduction_order import (
    ALGORITHMS,
    REDUCTIONS,
    combine_function,
    finish,
    fold,
    order_of,
    resolve_algorithm,
    shares,
    starts,
)

Sizes = tuple[int, ...]
Hosts = tuple[int, ...] | None

# Kernels --------------------------------------------------------------------------------------


def reduce_into(
    xp: Any, out: Any, *xs: Any, rank: int, reduction: str, algorithm: str, hosts: Hosts
) -> None:
    """Reduce all ranks' tensors into `out`, in the order that algorithm, count and size fix."""
    count, size = len(xs), int(xs[0].size)
    algorithm = resolve_algorithm(algorithm, count, size, hosts)
    whole = [x.reshape(-1) for x in xs]
    result = out.reshape(-1)
    at = starts(shares(size, count)) if algorithm == "ring" else [0, size]
    for share, (start, stop) in enumerate(pairwise(at)):
        order = order_of(algorithm, count, share, hosts)
        parts = [x[start:stop] for x in whole]
        fold(order, parts, combine_function(reduction, xp), result[start:stop], xp.empty_like)
    finish(reduction, count, result)


def scatter_into(
    xp: Any, out: Any, *xs: Any, rank: int, axis: int, sizes: Sizes, reduction: str,
    algorithm: str, hosts: Hosts,
) -> None:  # fmt: skip
    """Reduce a rank's part of all ranks' tensors into `out`."""
    at = starts(sizes)
    parts = [xp.ascontiguousarray(part(x, axis, at[rank], at[rank + 1])) for x in xs]
    algorithm = resolve_algorithm(algorithm, len(xs), int(xs[0].size), hosts)
    order = order_of(algorithm, len(xs), rank, hosts)
    fold(order, parts, combine_function(reduction, xp), out, xp.empty_like)
    finish(reduction, len(xs), out)


def gather_into(xp: Any, out: Any, *xs: Any, rank: int, axis: int) -> None:
    """Concatenate all ranks' tensors into `out`."""
    xp.concatenate(xs, axis=axis, out=out)


def copy_into(xp: Any, out: Any, x: Any, rank: int, count: int) -> None:
    """Copy the tensor of rank 0 into `out`."""
    xp.copyto(out, x)


def exchange_into(
    xp: Any, out: Any, *xs: Any, rank: int, split_axis: int, concat_axis: int,
    sizes: tuple[Sizes, ...],
) -> None:  # fmt: skip
    """Concatenate the parts that all ranks have for one rank into `out`."""
    parts = []
    for x, own in zip(xs, sizes, strict=True):
        at = starts(own)
        parts.append(part(x, split_axis, at[rank], at[rank + 1]))
    xp.concatenate(parts, axis=concat_axis, out=out)


def part(x: Any, axis: int, start: Any, stop: Any) -> Any:
    """Slice an axis of an array or a tensor."""
    return x[(slice(None),) * axis + (slice(start, stop),)]


# Shape rules ----------------------------------------------------------------------------------


def common_shape(specs: Sequence[TensorSpec], but: int | None = None) -> tuple[Size, ...]:
    """Return the shape of all ranks' tensors; the size of axis `but` may differ.

    Raises:
        ArgumentError, DTypeError, ShapeError: there are no tensors, or they differ.
    """
    if not specs:
        raise ArgumentError("there are no tensors; give one for each replica")
    first = specs[0]
    shape = list(first.shape)
    for rank, each in enumerate(specs):
        if each.dtype != first.dtype:
            raise DTypeError(
                f"tensor 0 is {first}, tensor {rank} is {each}: the ranks' dtypes differ; convert "
                "with .astype"
            )
        if len(each.shape) != len(shape):
            raise ShapeError(
                f"tensor 0 is {first}, tensor {rank} is {each}: the ranks' tensors have "
                f"{len(shape)} and {len(each.shape)} axes"
            )
        for axis, size in enumerate(each.shape):
            if axis != but and size != shape[axis]:
                what = f"size of axis {axis} of tensor 0, {first}, and of tensor {rank}, {each}"
                shape[axis] = equate(shape[axis], size, what)
    return tuple(shape)


def replace_size(shape: tuple[Size, ...], axis: int, size: Size) -> tuple[Size, ...]:
    """Return a shape with another size of one axis."""
    return (*shape[:axis], size, *shape[axis + 1 :])


def infer_reduce(
    *xs: TensorSpec, rank: int, reduction: str, algorithm: str, hosts: Hosts
) -> TensorSpec:
    """Infer the result of all_reduce."""
    shape = _common(xs, rank, reduction, algorithm, hosts)
    return TensorSpec(shape, xs[0].dtype)


def _common(
    xs: Sequence[TensorSpec], rank: int, reduction: str, algorithm: str, hosts: Hosts
) -> tuple[Size, ...]:
    """Return the shape of all ranks' tensors, if they can be reduced.

    Raises:
        ArgumentError, DTypeError, ShapeError: the tensors or the options do not allow it.
    """
    shape = common_shape(xs)
    _require_rank(rank, len(xs))
    if reduction not in REDUCTIONS or algorithm not in ALGORITHMS:
        raise ArgumentError(f"there is no {reduction!r} by {algorithm!r}")
    if (hosts is None and algorithm == "two_level") or (
        hosts is not None and len(hosts) != len(xs)
    ):
        raise ArgumentError(f"hosts {hosts!r} of {len(xs)} ranks; give one for each")
    _require_reducible(xs[0], reduction)
    return shape


def _require_rank(rank: int, count: int) -> None:
    """Check a rank.

    Raises:
        ArgumentError: there is no such rank.
    """
    if not (type(rank) is int and 0 <= rank < count):
        raise ArgumentError(f"there is no rank {rank!r} among {count}")


def _require_reducible(x: TensorSpec, reduction: str) -> None:
    """Check that a dtype allows a reduction.

    Raises:
        DTypeError: it does not.
    """
    if reduction == "mean" and not is_inexact(x.dtype):
        raise DTypeError(f"a mean of {x.dtype} is no {x.dtype}; convert with .astype('float32')")
    if reduction in ("sum", "prod") and kind(x.dtype) == "bool":
        raise DTypeError(
            f"a {reduction} of bools: op='max' is true where any is, op='min' where all are; "
            "convert with .astype('int32') to count"
        )
    if reduction in ("max", "min") and kind(x.dtype) == "complex":
        raise DTypeError(f"complex numbers have no order, so no {reduction}; reduce gf.abs(x)?")


def infer_scatter(
    *xs: TensorSpec, rank: int, axis: int, sizes: Sizes, reduction: str, algorithm: str,
    hosts: Hosts,
) -> TensorSpec:  # fmt: skip
    """Infer a rank's part of reduce_scatter."""
    shape = _common(xs, rank, reduction, algorithm, hosts)
    _require_parts(sizes, len(xs), shape, axis)
    return TensorSpec(replace_size(shape, axis, sizes[rank]), xs[0].dtype)


def _require_parts(sizes: Sizes, count: int, shape: tuple[Size, ...], axis: int) -> None:
    """Check that there is a size for each rank, and that they add up.

    Raises:
        ShapeError: see above.
    """
    if len(sizes) != count:
        raise ShapeError(f"{len(sizes)} sizes for {count} ranks; give one for each")
    whole: Size = 0
    for each in sizes:
        whole = whole + each
    equate(whole, shape[axis], f"sum of sizes {sizes} and size of axis {axis}")


def infer_gather(*xs: TensorSpec, rank: int, axis: int) -> TensorSpec:
    """Infer the result of all_gather."""
    shape = common_shape(xs, but=axis)
    _require_rank(rank, len(xs))
    whole: Size = 0
    for x in xs:
        whole = whole + x.shape[axis]
    return TensorSpec(replace_size(shape, axis, whole), xs[0].dtype)


def infer_broadcast(x: TensorSpec, rank: int, count: int) -> TensorSpec:
    """Infer the result of broadcast."""
    _require_rank(rank, count)
    return x


def infer_exchange(
    *xs: TensorSpec, rank: int, split_axis: int, concat_axis: int, sizes: tuple[Sizes, ...]
) -> TensorSpec:
    """Infer the result of all_to_all."""
    whole: Size = 0
    _require_rank(rank, len(xs))
    if len(sizes) != len(xs):
        raise ShapeError(f"{len(sizes)} rows of sizes for {len(xs)} ranks; give one for each")
    for x, own in zip(xs, sizes, strict=True):
        _require_parts(own, len(xs), x.shape, split_axis)
        size = own[rank] if split_axis == concat_axis else x.shape[concat_axis]
        whole = whole + size
        if own[rank] != sizes[0][rank] and split_axis != concat_axis:
            raise ShapeError(f"parts for rank {rank} have sizes {[s[rank] for s in sizes]}")
    shape = list(xs[0].shape)
    shape[split_axis] = sizes[0][rank]
    shape[concat_axis] = whole
    return TensorSpec(tuple(shape), xs[0].dtype)
