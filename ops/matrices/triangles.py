"""Diagonals, traces and triangles of matrices."""

from __future__ import annotations

from graphflow.errors import ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
    Cost,
    Op,
    Tensor,
    as_tensor,
    function,
    register,
    sample,
)
from graphflow.ir.spec import (
    TensorSpec,
    equate,
    maximum,
    minimum,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import (
    normalize_axis,
    require_int,
)
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.shape import (
    permute_dims,
    reshape,
)
from graphflow.ops.tensors.slicing import slice_op, window


def crop_to_diagonal(x: Tensor, offset: int, i: int, j: int) -> Tensor:
    """Return the part of x in which a diagonal is the main one of two axes, i and j."""
    down, right = max(-offset, 0), max(offset, 0)
    size = minimum(x.shape[i] - down, x.shape[j] - right)
    size = size if down + right == 0 else maximum(size, 0)
    down, right = (0 if size == 0 else start for start in (down, right))
    return window(window(x, i, down, size), j, right, size)


@function
def diagonal(x: Tensor, offset: int = 0, *, axis1: int = -2, axis2: int = -1) -> Tensor:
    """Return the elements whose indices on two axes of equal size are equal, as a new last axis.

    Args:
        offset: how much larger the index on `axis2` is; the sizes may then differ.

    Raises:
        ShapeError: the sizes differ.
        ArgumentError: offset is no int.
    """
    x, offset = as_tensor(x), int(require_int("offset", offset))
    i, j = normalize_axis(axis1, x.ndim), normalize_axis(axis2, x.ndim)
    if offset:
        x = crop_to_diagonal(x, offset, i, j)
    n = equate(x.shape[i], x.shape[j], f"diagonal of axes {i} and {j} of {show_shape(x.shape)}")
    others = [axis for axis in range(x.ndim) if axis not in (i, j)]
    flat = permute_dims(x, [*others, i, j])
    flat = reshape(flat, (*flat.shape[:-2], n * n))
    result: Tensor = slice_op(
        flat,
        start=(0,) * flat.ndim,
        size=(*flat.shape[:-1], n),
        step=(*(1,) * (flat.ndim - 1), n + 1),
    )
    return result


@function
def trace(x: Tensor) -> Tensor:
    """Sum the diagonal of the last two axes.

    Raises:
        ShapeError: the sizes differ, or x has fewer than two axes.
    """
    result: Tensor = FUNCTIONS["sum"](diagonal(x), axis=-1)
    return result


def _infer_matrix(x: TensorSpec, k: int) -> TensorSpec:
    if x.rank < 2:
        raise ShapeError(f"expected matrices, got {show_shape(x.shape)}")
    return x


def _triangle(name: str) -> Op:
    return register(
        Op(
            name,
            infer=_infer_matrix,
            kernel=lambda xp, x, k: getattr(xp, name)(x, k),
            vjp=lambda g, y, x, k: (FUNCTIONS[name](g, k=k),),
            batch=batching.rows,
            sharding=sharding.triangle_rule,
            cost=lambda x, k: Cost(flops=0),
            halves=True,
            samples=(
                sample(spec("float32", (3, 4)), k=0),
                sample(spec("float32", (2, 3, 3)), k=-1),
            ),
        )
    )


tril_op, triu_op = _triangle("tril"), _triangle("triu")


@function
def tril(x: Tensor, *, k: int = 0) -> Tensor:
    """Return x (…, m, n) with zeros above diagonal number k of each matrix (0 is the main one).

    Raises:
        ShapeError: x has fewer than two axes.
        ArgumentError: k is no int.
    """
    result: Tensor = tril_op(as_tensor(x), k=require_int("k", k))
    return result


@function
def triu(x: Tensor, *, k: int = 0) -> Tensor:
    """Return x (…, m, n) with zeros below diagonal number k of each matrix (0 is the main one).

    Raises:
        ShapeError: x has fewer than two axes.
        ArgumentError: k is no int.
    """
    result: Tensor = triu_op(as_tensor(x), k=require_int("k", k))
    return result
