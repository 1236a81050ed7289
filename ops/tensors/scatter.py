"""Writes at computed positions: rows and elements that are set, added, multiplied or compared.

All use one op, `scatter_rows`. For indices along several axes, `flat_rows` or `flat_elements` first
compute row numbers. If the new value of an assignment is such an op, the commit writes straight
into the variable and touches only the rows that change.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import Shape, TensorSpec, equate, is_inexact, product, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.row_costs import ROW_FLOPS, touched_bytes
from graphflow.ops.base.shape_rules import kernel_like_first, normalize_axis, require_kind
from graphflow.ops.kernels.sparse.scatter_rows import REDUCTIONS, combine_rows, normalize_indices
from graphflow.ops.pointwise.comparison import equal
from graphflow.ops.pointwise.convert import astype, full_like
from graphflow.ops.pointwise.select import where
from graphflow.ops.sharding import gather_scatter as gather_sharding
from graphflow.ops.tensors.creation import arange, full
from graphflow.ops.tensors.flat_indices import flat_elements, flat_rows
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.shape import reshape
from graphflow.ops.tensors.take import as_indices, take, take_grad

F = spec("float32", (3, 4))


# The op -----------------------------------------------------------------------------------------


def _infer(
    x: TensorSpec, rows: TensorSpec, updates: TensorSpec, reduction: str, axes: int = 1
) -> TensorSpec:
    require_kind(rows, "int")
    if reduction in ("add", "mul"):
        require_kind(x, "int", "float", "complex")
    elif reduction != "none":
        require_kind(x, "int", "float")
    if not 0 < axes <= x.rank:
        raise ShapeError(f"{x} has no {axes} axes to index")
    _require_updates(x, updates, (*rows.shape, *x.shape[axes:]))
    return x


def _require_updates(x: TensorSpec, updates: TensorSpec, wanted: Shape) -> None:
    if updates.dtype != x.dtype:
        raise DTypeError(f"updates are {updates.dtype}, x is {x.dtype}; convert with .astype")
    what = f"updates are {show_shape(updates.shape)}, the indices choose {show_shape(wanted)}"
    if updates.rank != len(wanted):
        raise ShapeError(what)
    for have, want in zip(updates.shape, wanted, strict=True):
        equate(have, want, what)


def _scatter_into(
    xp: Any, out: Any, x: Any, rows: Any, updates: Any, reduction: str, axes: int = 1
) -> None:
    n, width = math.prod(x.shape[:axes]), math.prod(x.shape[axes:])
    places = normalize_indices(xp, rows, n, 0).reshape(-1)
    if out is not x:
        xp.copyto(out, x)
    flat = updates.reshape(places.size, width)
    combine_rows(xp, out.reshape(n, width), places, flat, reduction)


def _vjp(
    g: Tensor,
    y: Tensor,
    x: Tensor,
    rows: Tensor,
    updates: Tensor,
    reduction: str,
    axes: int = 1,
) -> tuple[Tensor | None, None, Tensor | None]:
    if not is_inexact(x.dtype):
        return None, None, None
    flat = (product(x.shape[:axes]), *x.shape[axes:])
    g, y, x, shape = reshape(g, flat), reshape(y, flat), reshape(x, flat), x.shape
    if reduction == "add":
        by_x, by_updates = g, take(g, rows, 0)
    elif reduction == "none":
        by_x, by_updates = _vjp_of_setting(g, rows, updates)
    elif reduction == "mul":
        by_x, by_updates = _vjp_of_products(g, x, rows, updates)
    else:
        by_x, by_updates = _vjp_of_extrema(g, y, x, rows, updates)
    return reshape(by_x, shape), None, by_updates


def _vjp_of_setting(g: Tensor, rows: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiate "none": of several updates of a row the last one stays and has the gradient."""
    numbers = reshape(arange(rows.size), rows.shape)
    stamps = full((g.shape[0],), -1, "int64")
    stamps = scatter_rows(stamps, rows, numbers, reduction="none")
    stays = equal(take(stamps, rows, 0), numbers)
    stays = reshape(stays, (*rows.shape, *(1,) * (g.ndim - 1)))
    overwritten = scatter_rows(g, rows, full_like(updates, 0), reduction="none")
    return overwritten, where(stays, take(g, rows, 0), 0)


def _vjp_of_products(g: Tensor, x: Tensor, rows: Tensor, updates: Tensor) -> tuple[Tensor, Tensor]:
    """Differentiate "mul": the slope of a factor is the product of the others.

    It divides by factors that are not 0. A count of zeros handles the rest, since two zeros leave
    no slope. Second derivatives at two zeros are not computed.
    """
    is_zero = equal(updates, 0)
    factors = where(is_zero, 1, updates)
    zeros = take_grad(astype(is_zero, g.dtype), rows, shape=x.shape, axis=0)
    rest = scatter_rows(x, rows, factors, reduction="mul")
    others = take(zeros, rows, 0) - astype(is_zero, g.dtype)
    share = where(equal(others, 0), take(g * rest, rows, 0) / factors, 0)
    by_x = g * scatter_rows(full_like(x, 1), rows, updates, reduction="mul")
    return by_x, share


def _vjp_of_extrema(
    g: Tensor, y: Tensor, x: Tensor, rows: Tensor, updates: Tensor
) -> tuple[Tensor, Tensor]:
    """Differentiate "min" and "max": all elements that attain the extremum share equally."""
    old, new = equal(x, y), equal(updates, take(y, rows, 0))
    ties = take_grad(astype(new, g.dtype), rows, shape=x.shape, axis=0)
    share = g / (astype(old, g.dtype) + ties)
    return where(old, share, 0), where(new, take(share, rows, 0), 0)


def _cost(
    x: TensorSpec, rows: TensorSpec, updates: TensorSpec, reduction: str, axes: int = 1
) -> Cost:
    moved = touched_bytes(rows.size, x, axes) * 2 + updates.nbytes + rows.nbytes
    return Cost(flops=updates.size + rows.size * ROW_FLOPS, bytes=moved, spread=x.nbytes)


# x with updates combined into its rows, in the order of the row numbers. Rows are slices along the
# first `axes`, which count as one axis.
scatter_rows: Op = register(
    Op(
        "scatter_rows",
        infer=_infer,
        kernel=kernel_like_first(_scatter_into),
        into=_scatter_into,
        vjp=_vjp,
        batch=batching.trailing_axis(0, 2),
        sharding=gather_sharding.scatter_rows_rule,
        cost=_cost,
        in_place=True,
        halves=True,
        samples=(
            *(
                sample(F, spec("int64", (5,)), spec("float32", (5, 4)), reduction=reduction)
                for reduction in REDUCTIONS
            ),
            sample(spec("float32", (4,)), spec("int32"), spec("float32"), reduction="none"),
            sample(
                spec("float32", (1, 3, 2)),
                spec("int64", (2,)),
                spec("float32", (2, 2)),
                reduction="mul",
                axes=2,
            ),
            sample(
                spec("int8", (3,)), spec("int64", (2, 2)), spec("int8", (2, 2)), reduction="mul"
            ),
        ),
    )
)


def _infer_update(
    x: TensorSpec, rows: TensorSpec, updates: TensorSpec, number: TensorSpec
) -> TensorSpec:
    require_kind(number, "int")
    return _infer(x, rows, updates, "none")


def _update_into(xp: Any, out: Any, x: Any, rows: Any, updates: Any, number: Any) -> None:
    used = int(number)
    if out is not x:
        xp.copyto(out, x)
    out[rows[:used]] = updates[:used]


# x with the first `number` of the rows set; these rows are distinct.
update_rows: Op = register(
    Op(
        "update_rows",
        infer=_infer_update,
        kernel=kernel_like_first(_update_into),
        into=_update_into,
        cost=lambda x, rows, updates, number: Cost(
            flops=0,
            bytes=touched_bytes(rows.size, x) + updates.nbytes + rows.nbytes,
            spread=x.nbytes,
        ),
        sharding=gather_sharding.update_rows_rule,
        samples=(
            sample(
                F,
                spec("int64", (3,)),
                F,
                spec("int64"),
                make=lambda xs: [xs[0], np.arange(len(xs[1])), xs[2], np.array(len(xs[1]))],
            ),
        ),
        in_place=True,
        counted=lambda inputs: {1: 3, 2: 3},
        halves=True,
    )
)


# Public -----------------------------------------------------------------------------------------


@function
def gather_nd(x: Any, indices: Any, batch_dims: int = 0) -> Tensor:
    """Return the elements or slices of x that vectors of indices select.

    An index outside its axis is an OpError in the step.

    Args:
        x: a tensor.
        indices: ints; vectors lie on the last axis. Negative ones count from the end.
        batch_dims: number b of leading axes that x and `indices` share.

    Returns:
        For vectors of k numbers, a tensor of shape indices.shape[:-1] + x.shape[b+k:].

    Raises:
        DTypeError: the indices are not ints.
        ShapeError: indices have another rank or batch, or more numbers than x has axes.
    """
    x, indices = as_tensor(x), as_indices(indices)
    rows, axes = _rows_of(x, indices, batch_dims)
    table = reshape(x, (product(x.shape[:axes]), *x.shape[axes:]))
    return take(table, rows, 0)


@function
def scatter_nd(
    x: Any, indices: Any, updates: Any, reduction: str = "none", batch_dims: int = 0
) -> Tensor:
    """Return x with `updates` written where `gather_nd(x, indices, batch_dims)` reads.

    Args:
        updates: a tensor of the shape of that result.
        reduction: "none" sets; "add", "mul", "min" and "max" combine with x. Updates of one
            position apply in order, so the last one set stays.

    Raises:
        ArgumentError: the reduction is unknown.
        DTypeError, ShapeError: indices or updates do not fit.
    """
    x, indices, updates = as_tensor(x), as_indices(indices), as_tensor(updates)
    _require_reduction(reduction)
    rows, axes = _rows_of(x, indices, batch_dims)
    return _scatter_updates(x, rows, updates, reduction, axes)


def _scatter_updates(x: Tensor, rows: Tensor, updates: Tensor, reduction: str, axes: int) -> Tensor:
    _require_updates(x.spec, updates.spec, (*rows.shape, *x.shape[axes:]))
    if not axes:  # the one place is all of x
        rows, x = reshape(rows, (rows.size,)), reshape(x, (1, *x.shape))
        updates = reshape(updates, (rows.size, *x.shape[1:]))
        whole: Tensor = scatter_rows(x, rows, updates, reduction=reduction)
        return reshape(whole, x.shape[1:])
    result: Tensor = scatter_rows(x, rows, updates, reduction=reduction, axes=axes)
    return result


def _rows_of(x: Tensor, indices: Tensor, batch_dims: int) -> tuple[Tensor, int]:
    """Return row numbers, and how many axes of x they index."""
    if isinstance(batch_dims, bool) or not isinstance(batch_dims, int) or batch_dims < 0:
        raise ArgumentError(f"batch_dims must be an int from 0, got {batch_dims!r}")
    if indices.ndim <= batch_dims or not isinstance(indices.shape[-1], int):
        raise ShapeError(
            f"indices are {show_shape(indices.shape)}: after {batch_dims} batch axes, the last "
            "axis, of known size, holds an index for each axis of x"
        )
    indexed = batch_dims + indices.shape[-1]
    if indexed > x.ndim:
        raise ShapeError(
            f"x is {show_shape(x.shape)}, indices {show_shape(indices.shape)} choose along "
            f"{indexed} axes"
        )
    rows: Tensor = flat_rows(indices, sizes=x.shape[:indexed], batch_dims=batch_dims)
    return rows, indexed


def _require_reduction(reduction: Any) -> None:
    if reduction not in REDUCTIONS:
        raise ArgumentError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")


@function
def scatter(x: Any, indices: Any, updates: Any, axis: int = -1, reduction: str = "none") -> Tensor:
    """Return x with `updates` written at the elements that `gather(x, indices, axis)` reads.

    Args:
        indices: ints; along the other axes they may be shorter than x.
        updates: a tensor of the shape of `indices`.
        reduction: as for `scatter_nd`.

    Raises:
        ArgumentError: the reduction is unknown.
        DTypeError, ShapeError: indices or updates do not fit.
    """
    x, indices, updates = as_tensor(x), as_indices(indices), as_tensor(updates)
    _require_reduction(reduction)
    axis = normalize_axis(axis, x.ndim)
    places = flat_elements(indices, shape=x.shape, axis=axis)
    return _scatter_updates(x, places, updates, reduction, x.ndim)


@function
def put_along_axis(x: Any, indices: Any, values: Any, axis: int = -1) -> Tensor:
    """Return x with `values` set at the positions that `indices` give along `axis`.

    Args:
        indices: ints; along the other axes they have the sizes of x or 1.
        values: broadcast to the indices.

    Raises:
        DTypeError, ShapeError: indices or values do not fit.
    """
    x, indices = as_tensor(x), as_indices(indices)
    values = as_tensor(values, None if isinstance(values, Tensor) else x.dtype)
    axis = normalize_axis(axis, x.ndim)
    if indices.ndim != x.ndim:
        raise ShapeError(
            f"x is {show_shape(x.shape)}, indices are {show_shape(indices.shape)}: ranks differ"
        )
    shape = tuple(
        have if i == axis else n
        for i, (have, n) in enumerate(zip(indices.shape, x.shape, strict=True))
    )
    places = broadcast_to(indices, shape)
    result: Tensor = FUNCTIONS["scatter"](x, places, broadcast_to(values, shape), axis)
    return result
