"""Sparse matrices in CSR form, public as `gf.sparse`: products with dense matrices, and their
gradients for the dense side and for the values.

The structure (columns and row offsets) is data like any other, so one graph serves matrices of
any pattern; it is checked whenever a kernel reads it. Two ops are each other's gradients:
`csr_matmul`, and `csr_sample`, which is a dense product at the places of the pattern only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names, checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
    Cost,
    Op,
    Tensor,
    as_tensor,
    error_location,
    register,
    sample,
    user_location,
)
from graphflow.ir.spec import (
    Shape,
    Size,
    TensorSpec,
    equate,
    is_inexact,
    kind,
    normalize_shape,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.kernels.sparse import csr as kernels
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.shape import matrix_transpose, reshape

I64 = np.dtype("int64")


# Ops ----------------------------------------------------------------------------------------------


def _require_structure(columns: TensorSpec, offsets: TensorSpec, shape: Shape) -> None:
    for what, given in (("columns", columns), ("row offsets", offsets)):
        if kind(given.dtype) != "int":
            raise DTypeError(f"{what} are ints, not {given.dtype}; convert with .astype('int64')")
        if given.rank != 1:
            raise ShapeError(f"{what} have one axis, not {given}")
    if len(shape) != 2:
        raise ShapeError(f"the matrix has shape {show_shape(shape)}: rows and columns are wanted")
    equate(
        offsets.shape[0], shape[0] + 1, f"row offsets {offsets}: one more than the {shape[0]} rows"
    )


def _require_values(values: TensorSpec, columns: TensorSpec) -> None:
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
    _require_structure(columns, offsets, shape)
    _require_values(values, columns)
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
    """Random inputs with offsets that are some; they follow the columns."""
    at = next(i for i, a in enumerate(arrays) if a.shape == (4,) and a.dtype == I64)
    arrays[at] = np.array([0, 3, 3, 7])  # the middle row is empty
    return arrays


# A @ dense, or A^T @ dense, of a CSR matrix A of `shape`.
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
    _require_structure(columns, offsets, shape)
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


# The entries of rows @ others^T at the places of a pattern.
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
    _require_structure(columns, offsets, shape)
    return columns.with_dtype(I64)


# Where each entry is in the flattened dense matrix.
csr_places: Op = register(
    Op(
        "csr_places",
        infer=_infer_places,
        kernel=kernels.flat_places,
        cost=lambda columns, offsets, shape: Cost(flops=columns.size * 3),
        samples=(sample(*_PATTERN, shape=_SHAPE, make=_set_offsets),),
    )
)


# Public -------------------------------------------------------------------------------------------


@checks_arguments(ArgumentError)
@dataclass(frozen=True, eq=False)
class CSR:
    """A sparse matrix: `values[row_offsets[i]:row_offsets[i + 1]]` are the entries of row i, in the
    `columns` of the same places. Entries of one place add up.

    Attributes:
        values: (entries,), a tensor that may be trained.
        columns: (entries,) ints.
        row_offsets: (rows + 1,) ints, from 0 to entries.
        shape: rows and columns.
    """

    values: Tensor
    columns: Tensor
    row_offsets: Tensor
    shape: Shape

    def __post_init__(self) -> None:
        parts = (self.values, self.columns, self.row_offsets)
        if not all(isinstance(part, Tensor) for part in parts):
            raise ArgumentError(
                f"CSR at {user_location()}: its parts are tensors; gf.sparse.csr(values, columns, "
                "row_offsets, shape) makes one of arrays"
            )
        if not isinstance(self.shape, tuple) or len(self.shape) != 2:
            raise ArgumentError(
                f"CSR at {user_location()}: shape is (rows, columns), not {self.shape!r}"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the values."""
        return self.values.dtype

    @property
    def entries(self) -> Size:
        """How many values are stored."""
        return self.values.shape[0]

    def with_values(self, values: Tensor) -> CSR:
        """The same pattern with other values."""
        return csr(values, self.columns, self.row_offsets, self.shape)

    def __matmul__(self, dense: Any) -> Tensor:
        dense = as_tensor(dense)
        return spmv(self, dense) if dense.ndim == 1 else spmm(self, dense)

    def __rmatmul__(self, dense: Any) -> Tensor:
        dense = as_tensor(dense)
        if dense.ndim == 1:
            return spmv(self, dense, transpose=True)
        return matrix_transpose(spmm(self, matrix_transpose(dense), transpose=True))


@checks_argument_names(ArgumentError)
def csr(values: Any, columns: Any, row_offsets: Any, shape: Any) -> CSR:
    """A sparse matrix of its parts, tensors or arrays; see `CSR`.

    A structure that is known is checked at once, any other in each step (OpError).

    Raises:
        DTypeError: columns or offsets are not ints, or values not numbers.
        ShapeError: the parts do not fit each other.
        ArgumentError: a column outside the matrix, or offsets that fall or end elsewhere.
    """
    with error_location("sparse.csr"):
        sizes = normalize_shape(shape, "sparse.csr")
        parts = as_tensor(values), as_tensor(columns), as_tensor(row_offsets)
        _require_structure(parts[1].spec, parts[2].spec, sizes)
        _require_values(parts[0].spec, parts[1].spec)
        structure = [part.node for part in parts[1:]]
        if all(node.op.name == "constant" for node in structure) and all(
            isinstance(size, int) for size in sizes
        ):
            columns, row_offsets = (node.attrs["value"] for node in structure)
            try:
                kernels.require_structure(columns, row_offsets, sizes)
            except IndexError as error:
                raise ArgumentError(str(error)) from None
        return CSR(*parts, sizes)


@checks_argument_names(ArgumentError)
def from_dense(array: Any, dtype: Any = None) -> CSR:
    """The entries of an array that are not 0, as constants.

    Raises:
        ArgumentError: a tensor, whose zeros are not known.
        ShapeError: no matrix.
    """
    with error_location("sparse.from_dense"):
        if isinstance(array, Tensor):
            raise ArgumentError("the zeros of a tensor are known only when it runs; give an array")
        dense = as_tensor(array, dtype).node.attrs["value"]
        if dense.ndim != 2:
            raise ShapeError(f"a matrix is wanted, not {show_shape(dense.shape)}")
        rows, columns = np.nonzero(dense)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=dense.shape[0]))])
        return csr(dense[rows, columns], columns, offsets.astype(I64), dense.shape)


@checks_argument_names(ArgumentError)
def from_scipy(matrix: Any) -> CSR:
    """A matrix with the attributes of `scipy.sparse.csr_array` (data, indices, indptr, shape), as
    constants.

    Raises:
        ArgumentError: it has them not.
    """
    with error_location("sparse.from_scipy"):
        wanted = ("data", "indices", "indptr", "shape")
        missing = [name for name in wanted if not hasattr(matrix, name)]
        if missing or getattr(matrix, "format", "csr") != "csr":
            lacks = f"has no {', '.join(missing)}" if missing else f"is {matrix.format}"
            raise ArgumentError(f"{type(matrix).__name__} {lacks}; convert it with .tocsr() first")
        return csr(matrix.data, matrix.indices, matrix.indptr, matrix.shape)


@checks_argument_names(ArgumentError)
def spmm(matrix: CSR, dense: Any, transpose: bool = False) -> Tensor:
    """matrix @ dense for a dense matrix, or the transposed sparse matrix @ dense.

    Raises:
        ArgumentError: matrix is no CSR.
        DTypeError, ShapeError: the dense side does not fit.
    """
    with error_location("sparse.spmm"):
        _require_csr(matrix)
        dense = as_tensor(dense)
        if not isinstance(transpose, bool):
            raise ArgumentError(f"transpose is True or False, not {transpose!r}")
        result: Tensor = csr_matmul(
            matrix.values, matrix.columns, matrix.row_offsets, dense,
            shape=matrix.shape, transpose=transpose,
        )  # fmt: skip
        return result


@checks_argument_names(ArgumentError)
def spmv(matrix: CSR, vector: Any, transpose: bool = False) -> Tensor:
    """As `spmm`, for a dense vector.

    Raises:
        ArgumentError: matrix is no CSR.
        DTypeError, ShapeError: the vector does not fit.
    """
    with error_location("sparse.spmv"):
        _require_csr(matrix)
        vector = as_tensor(vector)
        if vector.ndim != 1:
            raise ShapeError(f"a vector is wanted, not {vector.spec}; use spmm")
        product = spmm(matrix, reshape(vector, (vector.size, 1)), transpose)
        return reshape(product, (product.shape[0],))


@checks_argument_names(ArgumentError)
def to_dense(matrix: CSR) -> Tensor:
    """The matrix with its zeros.

    Raises:
        ArgumentError: matrix is no CSR.
    """
    with error_location("sparse.to_dense"):
        _require_csr(matrix)
        rows, columns = matrix.shape
        places = csr_places(matrix.columns, matrix.row_offsets, shape=matrix.shape)
        flat = FUNCTIONS["zeros"]((rows * columns,), matrix.dtype)
        return reshape(FUNCTIONS["scatter_add"](flat, places, matrix.values), matrix.shape)


def _require_csr(matrix: Any) -> None:
    if not isinstance(matrix, CSR):
        raise ArgumentError(f"a sparse matrix is wanted, see sparse.csr; not {matrix!r}")


__all__ = ["CSR", "csr", "from_dense", "from_scipy", "spmm", "spmv", "to_dense"]
