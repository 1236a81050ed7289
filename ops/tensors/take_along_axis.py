"""Reading and adding single elements at computed positions along an axis.

`take_along_axis` and `scatter_add_along_axis` are each other's gradients. Additions at one position
happen in the order of the indices.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import (
    TensorSpec,
    equate,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import normalize_axis, require_kind
from graphflow.ops.kernels.moves.gathers import along_axis_task
from graphflow.ops.kernels.sparse.scatter_rows import combine_rows, normalize_indices, take_into
from graphflow.ops.sharding import gather_scatter as gather_sharding
from graphflow.ops.tensors.creation import zeros
from graphflow.ops.tensors.flat_indices import element_places, flat_elements
from graphflow.ops.tensors.shape import reshape
from graphflow.ops.tensors.take import CUBE, I64, F, from_front, require_like, take


def _infer_along(x: TensorSpec, indices: TensorSpec, axis: int) -> TensorSpec:
    require_kind(indices, "int")
    what = f"x is {show_shape(x.shape)}, indices are {show_shape(indices.shape)}, axis {axis}"
    if x.rank != indices.rank:
        raise ShapeError(f"{what}: ranks differ")
    for i, (have, want) in enumerate(zip(indices.shape, x.shape, strict=True)):
        if i != axis:
            equate(have, want, what)
    return x.with_shape(indices.shape)


def _refuse_along(xp: Any, x: Any, indices: Any, axis: int) -> None:
    normalize_indices(xp, indices, x.shape[axis], axis)


def _along_into(xp: Any, out: Any, x: Any, indices: Any, axis: int) -> None:
    if out.size and xp is np:
        places = element_places(xp, indices, x.shape, axis)
        take_into(xp, out, x.reshape(-1), places)
    elif out.size:
        indices = from_front(xp, indices, x.shape[axis], axis)
        xp.copyto(out, xp.take_along_axis(x, indices, axis))


def _along_kernel(xp: Any, x: Any, indices: Any, axis: int) -> Any:
    out = xp.empty(indices.shape, x.dtype)
    _along_into(xp, out, x, indices, axis)
    return out


take_along_axis_op = register(
    Op(
        "take_along_axis",
        infer=_infer_along,
        kernel=_along_kernel,
        into=_along_into,
        vjp=lambda g, y, x, indices, axis: (
            scatter_add_along_axis(zeros(x.shape, x.dtype), indices, g, axis),
            None,
        ),
        refuse=_refuse_along,
        bounds=lambda x, indices, axis: (1, -x.shape[axis], x.shape[axis]),
        native=along_axis_task,
        batch=batching.along("axis"),
        sharding=gather_sharding.take_along_axis_rule,
        cost=lambda x, indices, axis: Cost(
            flops=0, bytes=indices.nbytes + indices.size * 2 * x.dtype.itemsize
        ),
        halves=True,
        samples=(
            sample(F, spec(I64, (3, 1)), axis=1),
            sample(CUBE, spec("int32", (5, 2, 4)), axis=0),
        ),
    )
)


@function
def take_along_axis(x: Tensor, indices: Any, axis: int = -1) -> Tensor:
    """Return the elements of x whose positions along `axis` are `indices`.

    An index outside the axis is an OpError in the step.

    Args:
        indices: ints of x's shape, but for that axis.

    Returns:
        A tensor of the shape of `indices`.

    Raises:
        ShapeError, DTypeError: the indices do not fit.
    """
    x = as_tensor(x)
    result: Tensor = take_along_axis_op(x, as_tensor(indices), axis=normalize_axis(axis, x.ndim))
    return result


@function
def gather(x: Tensor, indices: Any, axis: int = -1) -> Tensor:
    """Return the elements of x at `indices` along `axis`, as ONNX's GatherElements.

    As `take_along_axis`, but along the other axes, too, `indices` may be shorter than x; the first
    positions of x are read there. An index outside the axis is an OpError in the step.

    Args:
        indices: ints of the rank of x.

    Returns:
        A tensor of the shape of `indices`.

    Raises:
        ShapeError, DTypeError: the indices do not fit.
    """
    x, indices = as_tensor(x), as_tensor(indices)
    axis = normalize_axis(axis, x.ndim)
    if indices.ndim != x.ndim:
        raise ShapeError(
            f"indices must have as many axes as x, got {show_shape(indices.shape)} for "
            f"{show_shape(x.shape)}; gf.take picks whole rows"
        )
    places = flat_elements(indices, shape=x.shape, axis=axis)
    return take(reshape(x, (x.size,)), places, 0)


def _infer_scatter_along(
    x: TensorSpec, indices: TensorSpec, updates: TensorSpec, axis: int
) -> TensorSpec:
    require_kind(x, "int", "float", "complex")
    require_like(updates, x, _infer_along(x, indices, axis).shape)
    return x


def _scatter_along_into(xp: Any, out: Any, x: Any, indices: Any, updates: Any, axis: int) -> None:
    places = element_places(xp, indices, x.shape, axis)
    if out is not x:
        xp.copyto(out, x)
    if updates.size:
        flat = updates.reshape(-1, 1)
        combine_rows(xp, out.reshape(-1, 1), places.reshape(-1), flat, "add")


def _scatter_along_kernel(xp: Any, x: Any, indices: Any, updates: Any, axis: int) -> Any:
    out = xp.empty(x.shape, x.dtype)
    _scatter_along_into(xp, out, x, indices, updates, axis)
    return out


scatter_add_along_axis_op = register(
    Op(
        "scatter_add_along_axis",
        infer=_infer_scatter_along,
        kernel=_scatter_along_kernel,
        into=_scatter_along_into,
        vjp=lambda g, y, x, indices, updates, axis: (g, None, take_along_axis(g, indices, axis)),
        batch=batching.along("axis"),
        sharding=gather_sharding.take_along_axis_rule,
        cost=lambda x, indices, updates, axis: Cost(
            flops=updates.size, bytes=x.nbytes * 2 + updates.nbytes * 2 + indices.nbytes
        ),
        samples=(
            sample(F, spec(I64, (3, 1)), spec("float32", (3, 1)), axis=1),
            sample(CUBE, spec("int32", (5, 2, 4)), spec("float32", (5, 2, 4)), axis=0),
        ),
    )
)


@function
def scatter_add_along_axis(x: Tensor, indices: Any, updates: Tensor, axis: int = -1) -> Tensor:
    """Add each of `updates` to x at the position that `indices` gives along `axis`, in order.

    An index outside the axis is an OpError in the step.

    Args:
        indices, updates: of x's shape, but for that axis.

    Raises:
        ShapeError, DTypeError: updates or indices do not fit.
    """
    x = as_tensor(x)
    result: Tensor = scatter_add_along_axis_op(
        x, as_tensor(indices), as_tensor(updates), axis=normalize_axis(axis, x.ndim)
    )
    return result
