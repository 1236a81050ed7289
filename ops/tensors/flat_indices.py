"""Indices of several axes as row or element numbers of a flattened tensor.

Each op checks its indices. `take` and the scatter ops take its numbers, so reads and writes along
several axes use the ops along one.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import (
    Shape,
    TensorSpec,
    broadcast_shapes,
    equate,
    normalize_shape,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import require_kind, require_list
from graphflow.ops.kernels.sparse.scatter_rows import normalize_indices
from graphflow.ops.sharding import gather_scatter as gather_sharding
from graphflow.ops.sharding import rules as sharding

I64 = np.dtype("int64")


# Rows: an index is a vector along the last axis ---------------------------------------------------


def _infer_rows(indices: TensorSpec, sizes: Shape, batch_dims: int) -> TensorSpec:
    require_kind(indices, "int")
    what = f"indices are {show_shape(indices.shape)}, {batch_dims} batch axes"
    if indices.rank <= batch_dims or indices.shape[-1] != len(sizes) - batch_dims:
        raise ShapeError(f"{what}: the last axis, of known size, holds one number for each axis")
    for have, want in zip(indices.shape[:batch_dims], sizes, strict=False):
        equate(have, want, what)
    return TensorSpec(indices.shape[:-1], I64)


def _rows_into(xp: Any, out: Any, indices: Any, sizes: tuple[int, ...], batch_dims: int) -> None:
    batch = sizes[:batch_dims]
    base = xp.arange(math.prod(batch)).reshape(batch + (1,) * (out.ndim - batch_dims))
    out[...] = base
    for i, n in enumerate(sizes[batch_dims:]):
        xp.multiply(out, n, out=out)
        xp.add(out, normalize_indices(xp, indices[..., i], n, batch_dims + i), out=out)


def _rows_kernel(xp: Any, indices: Any, sizes: tuple[int, ...], batch_dims: int) -> Any:
    out = xp.empty(indices.shape[:-1], I64)
    _rows_into(xp, out, indices, sizes, batch_dims)
    return out


# The row numbers that vectors of indices select in a tensor whose first axes have `sizes`.
flat_rows = register(
    Op(
        "flat_rows",
        infer=_infer_rows,
        kernel=_rows_kernel,
        into=_rows_into,
        batch=batching.flat_rows,
        sharding=gather_sharding.flat_rows_rule,
        cost=lambda indices, sizes, batch_dims: Cost(flops=indices.size * 4),
        samples=(
            sample(spec("int64", (5, 2)), sizes=(3, 4), batch_dims=0),
            sample(spec("int32", (2, 5, 1)), sizes=(2, 3), batch_dims=1),
            sample(spec("int64", (2, 3, 0)), sizes=(), batch_dims=0),
        ),
    )
)


# Elements: an index replaces the position along one axis ------------------------------------------


def element_places(xp: Any, indices: Any, shape: tuple[int, ...], axis: int) -> Any:
    """Return the position of each index's element in the flattened tensor of `shape`.

    Raises:
        IndexError: an index is outside the axis, or there are more than the tensor has positions.
    """
    places = normalize_indices(xp, indices, shape[axis], axis) * math.prod(shape[axis + 1 :])
    for i, n in enumerate(shape):
        if i == axis:
            continue
        if indices.shape[i] > n:
            raise IndexError(f"{indices.shape[i]} indices along axis {i} of size {n}")
        along = [1] * len(shape)
        along[i] = indices.shape[i]
        steps = xp.arange(indices.shape[i]) * math.prod(shape[i + 1 :])
        places = places + steps.reshape(along)
    return places


def _infer_elements(indices: TensorSpec, shape: Shape, axis: int) -> TensorSpec:
    require_kind(indices, "int")
    what = f"x is {show_shape(shape)}, indices are {show_shape(indices.shape)}, axis {axis}"
    if len(shape) != indices.rank:
        raise ShapeError(f"{what}: ranks differ")
    for i, (have, limit) in enumerate(zip(indices.shape, shape, strict=True)):
        if i != axis and isinstance(have, int) and isinstance(limit, int) and have > limit:
            raise ShapeError(f"{what}: more indices than positions along axis {i}")
    return indices.with_dtype(I64)


# The numbers of the elements of a tensor of `shape` whose positions along `axis` are the indices.
flat_elements = register(
    Op(
        "flat_elements",
        infer=_infer_elements,
        kernel=element_places,
        into=lambda xp, out, indices, shape, axis: xp.copyto(
            out, element_places(xp, indices, shape, axis)
        ),
        batch=batching.flat_elements,
        cost=lambda indices, shape, axis: Cost(flops=indices.size * (2 + len(shape))),
        samples=(
            sample(spec("int64", (3, 1)), shape=(3, 4), axis=1),
            sample(spec("int32", (5, 2, 3)), shape=(3, 2, 4), axis=0),
        ),
    )
)


# Separate indices for each axis -------------------------------------------------------------------


def _infer_ravel(*indices: TensorSpec, sizes: Shape) -> TensorSpec:
    for each in indices:
        require_kind(each, "int")
    if len(indices) != len(sizes) or not sizes:
        raise ShapeError(f"{len(indices)} tensors of indices for {len(sizes)} axes")
    return TensorSpec(broadcast_shapes(*(i.shape for i in indices)), I64)


def _ravel_into(xp: Any, out: Any, *indices: Any, sizes: tuple[int, ...]) -> None:
    out[...] = 0
    for axis, (index, n) in enumerate(zip(indices, sizes, strict=True)):
        xp.multiply(out, n, out=out)
        xp.add(out, normalize_indices(xp, index, n, axis), out=out)


def _ravel_kernel(xp: Any, *indices: Any, sizes: tuple[int, ...]) -> Any:
    out = xp.empty(np.broadcast_shapes(*(i.shape for i in indices)), I64)
    _ravel_into(xp, out, *indices, sizes=sizes)
    return out


ravel_op = register(
    Op(
        "ravel_multi_index",
        infer=_infer_ravel,
        kernel=_ravel_kernel,
        into=_ravel_into,
        batch=batching.elementwise,
        sharding=sharding.elementwise_rule,
        cost=lambda *indices, sizes: Cost(
            flops=_infer_ravel(*indices, sizes=sizes).size * 4 * len(sizes)
        ),
        samples=(
            sample(spec("int64", (5,)), spec("int32", (2, 1)), sizes=(3, 4)),
            sample(spec("int64", (2,)), sizes=(3,)),
        ),
    )
)


@function
def ravel_multi_index(indices: Any, shape: Any) -> Tensor:
    """Convert an index for each axis to int64 positions in a flattened tensor of `shape`.

    An index outside its axis is an OpError in the step.

    Args:
        indices: a list of int tensors, one for each axis, which broadcast; negative ones count from
            the end.
        shape: ints, or sizes of other tensors.

    Raises:
        DTypeError: the indices are not ints.
        ShapeError: there is not one tensor for each axis, or they do not broadcast.
    """
    sizes = normalize_shape(shape, "ravel_multi_index")
    if not sizes:
        raise ArgumentError("a tensor of rank 0 has no axis to index")
    result: Tensor = ravel_op(*map(as_tensor, require_list("indices", indices)), sizes=sizes)
    return result
