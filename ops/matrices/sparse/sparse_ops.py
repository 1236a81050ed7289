"""Ops on sparse matrices in CSR form.

Two ops are each other's gradients: `csr_matmul`, and `csr_sample`, which computes a dense product
at the positions of the pattern only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import DTypeError, ShapeError
from graphflow.ir.op import (
    Cost,
    Op,
    Tensor,
    register,
    sample,
)
from graphflow.ir.spec import (
    Shape,
    TensorSpec,
    equate,
    is_inexact,
    kind,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.kernels.sparse import csr as kernels
from graphflow.ops.sharding import rules as sharding

I64 = np.dtype("int64")


def require_structure(columns: TensorSpec, offsets: TensorSpec, shape: Shape) -> None:
    for what, given in (("columns", columns), ("row offsets", offsets)):
        if kind(given.dtype) != "int":
            raise DTypeError(
                f"{what} must be ints, got {given.dtype}; convert with .astype('int64')"
            )
        if given.rank != 1:
            raise ShapeError(f"{what} must have one axis, got {given}")
    if len(shape) != 2:
        raise ShapeError(f"the matrix has shape {show_shape(shape)}: rows and columns are wanted")
    equate(
        offsets.shape[0], shape[0] + 1, f"row offsets {offsets}: one more than the {shape[0]} rows"
    )


def require_values(values: TensorSpec, columns: TensorSpec) -> None:
    require_kind(values, "int", "float")
    what = f"values are {values}, columns {columns}: one of each for every entry"
    if values.rank != 1:
        raise ShapeError(what)
    equate(values.shape[0], columns.shape[0], what)


def _infer_matmul(
    values: TensorSpec,
    columns: TensorSpec,
    offsets: TensorSpec,
    dense: TensorSpec,
    shape: Shape,
    transpose: bool,
) -> TensorSpec:
    require_structure(columns, offsets, shape)
    require_values(values, columns)
    if dense.dtype != values.dtype:
        raise DTypeError(f"values are {values.dtype}, the dense side is {dense.dtype}")
    inner, outer = shape if transpose else shape[::-1]
    what = f"{show_shape(shape)}{' transposed' if transpose else ''} @ {show_shape(dense.shape)}"
    if dense.rank != 2:
        raise ShapeError(f"{what}: the dense side is a matrix")
    equate(inner, dense.shape[0], f"{what}: inner sizes differ")
    return dense.with_shape((outer, dense.shape[1]))


def _matmul_kernel(
    xp: Any,
    values: Any,
    columns: Any,
    offsets: Any,
    dense: Any,
    shape: tuple[int, int],
    transpose: bool,
) -> Any:
    out = xp.empty((shape[1 if transpose else 0], dense.shape[1]), dense.dtype)
    kernels.matmul(xp, out, values, columns, offsets, dense, shape, transpose)
    return out


def _matmul_vjp(
    g: Tensor,
    y: Tensor,
    values: Tensor,
    columns: Tensor,
    offsets: Tensor,
    dense: Tensor,
    shape: Shape,
    transpose: bool,
) -> tuple[Tensor | None, None, None, Tensor | None]:
    if not is_inexact(values.dtype):
        return None, None, None, None
    rows, others = (dense, g) if transpose else (g, dense)
    by_values = csr_sample(columns, offsets, rows, others, shape=shape)
    by_dense = csr_matmul(values, columns, offsets, g, shape=shape, transpose=not transpose)
    return by_values, None, None, by_dense


_PATTERN = (spec("int64", (7,)), spec("int64", (4,)))  # columns and offsets, 3 rows


_SHAPE = (3, 4)


def _set_offsets(arrays: list[Any]) -> list[Any]:
    """Replace the row offsets of random inputs by valid ones; they follow the columns."""
    at = next(i for i, a in enumerate(arrays) if a.shape == (4,) and a.dtype == I64)
    arrays[at] = np.array([0, 3, 3, 7])  # the middle row is empty
    return arrays


# A @ dense, or Aᵀ @ dense, of a CSR matrix A of `shape`.
csr_matmul: Op = register(
    Op(
        "csr_matmul",
        infer=_infer_matmul,
        kernel=_matmul_kernel,
        into=kernels.matmul,
        vjp=_matmul_vjp,
        batch=batching.columns(3),
        sharding=sharding.equation_rule(".,.,.,.c->.c", (3,)),
        cost=lambda values, columns, offsets, dense, shape, transpose: Cost(
            flops=values.size * dense.shape[1] * 2,
            bytes=values.size * dense.shape[1] * (3 * dense.dtype.itemsize)
            + values.nbytes
            + columns.nbytes
            + offsets.nbytes,
        ),
        samples=tuple(
            sample(
                spec("float32", (7,)), *_PATTERN, spec("float32", (n, k)),
                shape=_SHAPE, transpose=transpose, make=_set_offsets,
            )
            for n, k, transpose in ((4, 2, False), (3, 2, True), (4, 1, False), (3, 1, True))
        ),
    )
)  # fmt: skip


def _infer_sample(
    columns: TensorSpec, offsets: TensorSpec, rows: TensorSpec, others: TensorSpec, shape: Shape
) -> TensorSpec:
    require_structure(columns, offsets, shape)
    if rows.dtype != others.dtype:
        raise DTypeError(f"{rows.dtype} and {others.dtype} do not mix; convert one with .astype")
    require_kind(rows, "int", "float")
    what = f"rows {show_shape(rows.shape)}, columns {show_shape(others.shape)} of {shape}"
    if rows.rank != 2 or others.rank != 2:
        raise ShapeError(f"{what}: both are matrices")
    equate(rows.shape[1], others.shape[1], what)
    equate(rows.shape[0], shape[0], what)
    equate(others.shape[0], shape[1], what)
    return TensorSpec(columns.shape, rows.dtype)


def _sample_kernel(
    xp: Any, columns: Any, offsets: Any, rows: Any, others: Any, shape: tuple[int, int]
) -> Any:
    out = xp.empty(columns.shape, rows.dtype)
    kernels.sample(xp, out, columns, offsets, rows, others, shape)
    return out


def _sample_vjp(
    h: Tensor, y: Tensor, columns: Tensor, offsets: Tensor, rows: Tensor, others: Tensor,
    shape: Shape,
) -> tuple[None, None, Tensor | None, Tensor | None]:  # fmt: skip
    if not is_inexact(rows.dtype):
        return None, None, None, None
    return (
        None,
        None,
        csr_matmul(h, columns, offsets, others, shape=shape, transpose=False),
        csr_matmul(h, columns, offsets, rows, shape=shape, transpose=True),
    )


# The entries of rows @ othersᵀ at the positions of a pattern.
csr_sample: Op = register(
    Op(
        "csr_sample",
        infer=_infer_sample,
        kernel=_sample_kernel,
        into=kernels.sample,
        vjp=_sample_vjp,
        sharding=sharding.equation_rule(".,.,.c,.c->."),
        cost=lambda columns, offsets, rows, others, shape: Cost(
            flops=columns.size * rows.shape[1] * 2,
            bytes=columns.size * rows.shape[1] * (4 * rows.dtype.itemsize) + columns.nbytes,
        ),
        samples=(
            sample(
                *_PATTERN, spec("float32", (3, 2)), spec("float32", (4, 2)), shape=_SHAPE,
                make=_set_offsets,
            ),
        ),
    )
)  # fmt: skip


def _infer_places(columns: TensorSpec, offsets: TensorSpec, shape: Shape) -> TensorSpec:
    require_structure(columns, offsets, shape)
    return columns.with_dtype(I64)


# The index of each entry in the flattened dense matrix.
csr_places: Op = register(
    Op(
        "csr_places",
        infer=_infer_places,
        kernel=kernels.flat_places,
        cost=lambda columns, offsets, shape: Cost(flops=columns.size * 3),
        samples=(sample(*_PATTERN, shape=_SHAPE, make=_set_offsets),),
    )
)
