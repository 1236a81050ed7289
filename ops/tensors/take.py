"""Reading and adding slices at computed positions along an axis, and one_hot.

`take`, `take_grad` and `scatter_add` are each other's gradients. Additions at one position happen
in the order of the indices, on any device, so results do not change from run to run.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import (
    Dim,
    Shape,
    Size,
    TensorSpec,
    as_dtype,
    equate,
    normalize_shape,
    product,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.row_costs import touched_bytes
from graphflow.ops.base.shape_rules import normalize_axis, require_kind
from graphflow.ops.kernels.moves.gathers import take_task
from graphflow.ops.kernels.sparse.scatter_rows import combine_rows, normalize_indices, take_into
from graphflow.ops.sharding import gather_scatter as gather_sharding

F = spec("float32", (3, 4))
CUBE = spec("float32", (3, 2, 4))
I64 = "int64"
NUMBERS = ("int", "float", "complex")


# take and scatter_add: whole slices along an axis -----------------------------------------------


def from_front(xp: Any, indices: Any, n: int, axis: int) -> Any:
    """Return indices as int64, counted from the front.

    On a GPU they were checked before the step (`refuse`), since a check would wait for the device.
    """
    if xp is np:
        return normalize_indices(xp, indices, n, axis)
    indices = indices.astype(np.int64, copy=False)
    return xp.where(indices < 0, indices + n, indices)


def _taken_shape(x: TensorSpec, indices: TensorSpec, axis: int) -> Shape:
    require_kind(indices, "int")
    return x.shape[:axis] + indices.shape + x.shape[axis + 1 :]


def _refuse_take(xp: Any, x: Any, indices: Any, axis: int) -> None:
    normalize_indices(xp, indices, x.shape[axis], axis)


def _take_into(xp: Any, out: Any, x: Any, indices: Any, axis: int) -> None:
    indices = from_front(xp, indices, x.shape[axis], axis)
    if out.size:
        take_into(xp, out, x, indices, axis)


def _cost_take(x: TensorSpec, indices: TensorSpec, axis: int) -> Cost:
    slices = indices.size * product(x.shape[:axis])
    written = product(_taken_shape(x, indices, axis)) * x.dtype.itemsize
    moved = touched_bytes(slices, x, axis + 1) + written + indices.nbytes
    return Cost(flops=0, bytes=moved, spread=x.nbytes)


def _take_kernel(xp: Any, x: Any, indices: Any, axis: int) -> Any:
    out = xp.empty(x.shape[:axis] + indices.shape + x.shape[axis + 1 :], x.dtype)
    _take_into(xp, out, x, indices, axis)
    return out


take_op = register(
    Op(
        "take",
        infer=lambda x, indices, axis: x.with_shape(_taken_shape(x, indices, axis)),
        kernel=_take_kernel,
        into=_take_into,
        vjp=lambda g, y, x, indices, axis: (
            take_grad(g, indices, shape=x.shape, axis=axis),
            None,
        ),
        refuse=_refuse_take,
        bounds=lambda x, indices, axis: (1, -x.shape[axis], x.shape[axis]),
        native=take_task,
        leading=lambda axis: None if axis else (1,),
        batch=batching.take,
        sharding=gather_sharding.take_rule,
        cost=_cost_take,
        halves=True,
        samples=(
            sample(F, spec(I64, (5,)), axis=0),
            sample(CUBE, spec("int32", (2, 2)), axis=2),
            sample(F, spec("uint8", ()), axis=0),
        ),
    )
)


@function
def take(x: Tensor, indices: Any, axis: int | None = None) -> Tensor:
    """Return the slices of x at `indices` along an axis.

    An index outside the axis is an OpError in the step.

    Args:
        indices: ints of any shape; negative ones count from the end.
        axis: may be left out if x has one axis.

    Returns:
        A tensor of shape x.shape[:axis] + indices.shape + x.shape[axis+1:].

    Raises:
        DTypeError: the indices are not ints.
        ArgumentError: x has several axes and none is named.
        ShapeError: axis is outside x.
    """
    x = as_tensor(x)
    if axis is None:
        if x.ndim != 1:
            raise ArgumentError(f"x has {x.ndim} axes; give the axis")
        axis = 0
    result: Tensor = take_op(x, as_indices(indices), axis=normalize_axis(axis, x.ndim))
    return result


def as_indices(indices: Any) -> Tensor:
    """Return indices as a tensor; an empty list counts as ints."""
    if isinstance(indices, list | tuple) and not len(indices):
        return as_tensor(np.zeros(0, np.int64))
    return as_tensor(indices)


def _infer_scatter_add(
    x: TensorSpec, indices: TensorSpec, updates: TensorSpec, axis: int
) -> TensorSpec:
    require_kind(x, "int", "float", "complex")
    wanted = _taken_shape(x, indices, axis)
    require_like(updates, x, wanted)
    return x


def require_like(updates: TensorSpec, x: TensorSpec, wanted: Shape) -> None:
    what = f"updates are {show_shape(updates.shape)}, the indices choose {show_shape(wanted)}"
    if updates.dtype != x.dtype:
        raise ArgumentError(f"updates are {updates.dtype}, x is {x.dtype}; convert with .astype")
    if updates.rank != len(wanted):
        raise ShapeError(what)
    for have, want in zip(updates.shape, wanted, strict=True):
        equate(have, want, what)


def _scatter_add_kernel(xp: Any, x: Any, indices: Any, updates: Any, axis: int) -> Any:
    out = xp.empty(x.shape, x.dtype)
    _scatter_add_into(xp, out, x, indices, updates, axis)
    return out


def _add_slices(xp: Any, out: Any, where: Any, updates: Any, axis: int) -> None:
    """Add `updates` to slices of `out` along an axis, in order; `where` counts from the front."""
    n, where = out.shape[axis], where.reshape(-1)
    if not updates.size:
        return
    outer, width = math.prod(out.shape[:axis]), math.prod(out.shape[axis + 1 :])
    rows = where
    if axis:
        rows = (xp.arange(outer)[:, None] * n + where[None, :]).reshape(-1)
    flat = updates.reshape(rows.size, width)
    combine_rows(xp, out.reshape(outer * n, width), rows, flat, "add")


def _scatter_add_into(xp: Any, out: Any, x: Any, indices: Any, updates: Any, axis: int) -> None:
    if out is not x:
        xp.copyto(out, x)
    _add_slices(xp, out, normalize_indices(xp, indices, x.shape[axis], axis), updates, axis)


scatter_add_op = register(
    Op(
        "scatter_add",
        infer=_infer_scatter_add,
        kernel=_scatter_add_kernel,
        into=_scatter_add_into,
        vjp=lambda g, y, x, indices, updates, axis: (g, None, take(g, indices, axis)),
        batch=batching.scatter_add,
        sharding=gather_sharding.scatter_add_rule,
        cost=lambda x, indices, updates, axis: Cost(
            flops=updates.size, bytes=x.nbytes * 2 + updates.nbytes * 2 + indices.nbytes
        ),
        samples=(
            sample(F, spec(I64, (5,)), spec("float32", (5, 4)), axis=0),
            sample(CUBE, spec("int32", (2, 2)), spec("float32", (3, 2, 2, 2)), axis=2),
            sample(F, spec(I64, ()), spec("float32", (4,)), axis=0),
        ),
    )
)


@function
def scatter_add(x: Tensor, indices: Any, updates: Tensor, axis: int = 0) -> Tensor:
    """Add `updates` to the slices of x at `indices` along an axis, in order.

    An index outside the axis is an OpError in the step.

    Args:
        indices: ints of any shape; negative ones count from the end.
        updates: a tensor of the shape of `take(x, indices, axis)`.

    Raises:
        ShapeError, DTypeError: updates or indices do not fit.
    """
    x = as_tensor(x)
    result: Tensor = scatter_add_op(
        x, as_indices(indices), as_tensor(updates), axis=normalize_axis(axis, x.ndim)
    )
    return result


def _infer_take_grad(g: TensorSpec, indices: TensorSpec, shape: Shape, axis: int) -> TensorSpec:
    x = g.with_shape(shape)
    require_like(g, x, _taken_shape(x, indices, axis))
    return x


def _take_grad_into(
    xp: Any, out: Any, g: Any, indices: Any, shape: tuple[int, ...], axis: int
) -> None:
    out[...] = 0
    _add_slices(xp, out, from_front(xp, indices, shape[axis], axis), g, axis)


def _refuse_take_grad(xp: Any, g: Any, indices: Any, shape: tuple[int, ...], axis: int) -> None:
    normalize_indices(xp, indices, shape[axis], axis)


def _take_grad_kernel(xp: Any, g: Any, indices: Any, shape: tuple[int, ...], axis: int) -> Any:
    out = xp.empty(shape, g.dtype)
    _take_grad_into(xp, out, g, indices, shape, axis)
    return out


# Zeros of `shape` with the slices g added at the indices. Optimisers look for this node: its inputs
# are the slices and their positions, so they update only the rows of a table that occur.
take_grad: Op = register(
    Op(
        "take_grad",
        infer=_infer_take_grad,
        kernel=_take_grad_kernel,
        into=_take_grad_into,
        vjp=lambda h, y, g, indices, shape, axis: (take(h, indices, axis), None),
        refuse=_refuse_take_grad,
        batch=batching.take_grad,
        sharding=gather_sharding.take_grad_rule,
        cost=lambda g, indices, shape, axis: Cost(
            flops=g.size,
            bytes=product(shape) * g.dtype.itemsize + g.nbytes * 3 + indices.nbytes,
        ),
        samples=(
            sample(spec("float32", (5, 4)), spec(I64, (5,)), shape=(3, 4), axis=0),
            sample(spec("float32", (3, 2, 2, 2)), spec("int32", (2, 2)), shape=(3, 2, 4), axis=2),
            sample(spec("float32", (0, 4)), spec(I64, (0,)), shape=(3, 4), axis=0),
        ),
    )
)


@function
def index_add(x: Tensor, indices: Any, updates: Tensor, axis: int = 0) -> Tensor:
    """Add `updates` to slices of x: another name of `scatter_add`."""
    return scatter_add(x, indices, updates, axis)


# one_hot ----------------------------------------------------------------------------------------


def _infer_one_hot(indices: TensorSpec, depth: Size, dtype: str) -> TensorSpec:
    require_kind(indices, "int")
    return TensorSpec((*indices.shape, depth), as_dtype(dtype))


def _one_hot_into(xp: Any, out: Any, indices: Any, depth: int, dtype: str) -> None:
    if indices.size and not 0 <= int(indices.min()) <= int(indices.max()) < depth:
        wrong = indices.min() if int(indices.min()) < 0 else indices.max()
        raise IndexError(f"class {int(wrong)} is outside [0, {depth})")
    out[...] = indices[..., None] == xp.arange(depth)


def _one_hot_kernel(xp: Any, indices: Any, depth: int, dtype: str) -> Any:
    out = xp.empty((*indices.shape, depth), dtype)
    _one_hot_into(xp, out, indices, depth, dtype)
    return out


one_hot_op = register(
    Op(
        "one_hot",
        infer=_infer_one_hot,
        kernel=_one_hot_kernel,
        into=_one_hot_into,
        batch=batching.rows,
        sharding=gather_sharding.one_hot_rule,
        cost=lambda indices, depth, dtype: Cost(flops=indices.size * depth),
        samples=(
            sample(spec(I64, (5,)), depth=3, dtype="float32"),
            sample(spec("int32", (2, 2)), depth=4, dtype="bool"),
        ),
    )
)


@function
def one_hot(indices: Tensor, depth: int | Dim, dtype: Any = "float32") -> Tensor:
    """Return 1 where a new last axis of size `depth` equals the index, else 0.

    An index outside [0, depth) is an OpError in the step.

    Args:
        indices: ints of any shape.
        depth: an int, or the size of another tensor.

    Raises:
        DTypeError: the indices are not ints.
        ArgumentError: depth is no int.
    """
    if not isinstance(depth, int | np.integer | Dim):
        raise ArgumentError(f"the depth must be an int or a size, got {depth!r}")
    (size,) = normalize_shape(depth, "one_hot")
    result: Tensor = one_hot_op(as_tensor(indices), depth=size, dtype=as_dtype(dtype).name)
    return result
