"""Sparse matrices in CSR form, public as `gf.sparse`: products with dense matrices and vectors.

The structure (columns and row offsets) is data like any other, so one graph serves matrices of any
pattern. It is checked whenever a kernel reads it. Products have gradients for the dense side and
for the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names, checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
    Tensor,
    as_tensor,
    error_location,
    user_location,
)
from graphflow.ir.spec import (
    Shape,
    Size,
    normalize_shape,
    show_shape,
)
from graphflow.ops.kernels.sparse import csr as kernels
from graphflow.ops.matrices.sparse.sparse_ops import (
    I64,
    csr_matmul,
    csr_places,
    require_structure,
    require_values,
)
from graphflow.ops.tensors.shape import matrix_transpose, reshape

# Public -------------------------------------------------------------------------------------------


@checks_arguments(ArgumentError)
@dataclass(frozen=True, eq=False)
class CSR:
    """A sparse matrix in compressed row form.

    Row i has the entries `values[row_offsets[i]:row_offsets[i + 1]]`, in the columns at the same
    positions of `columns`. Entries of one row and column add up.

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
                f"CSR at {user_location()}: shape must be (rows, columns), got {self.shape!r}"
            )

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the values."""
        return self.values.dtype

    @property
    def entries(self) -> Size:
        """Number of stored values."""
        return self.values.shape[0]

    def with_values(self, values: Tensor) -> CSR:
        """Return a matrix of the same pattern with other values."""
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
    """Make a sparse matrix of its parts, which are tensors or arrays; see `CSR`.

    A structure of constants is checked at once, any other in each step (OpError).

    Raises:
        DTypeError: columns or offsets are not ints, or values are not numbers.
        ShapeError: the parts do not fit each other.
        ArgumentError: a column lies outside the matrix, or offsets decrease or do not end at
            entries.
    """
    with error_location("sparse.csr"):
        sizes = normalize_shape(shape, "sparse.csr")
        parts = as_tensor(values), as_tensor(columns), as_tensor(row_offsets)
        require_structure(parts[1].spec, parts[2].spec, sizes)
        require_values(parts[0].spec, parts[1].spec)
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
    """Make a sparse matrix of an array's elements that are not 0, as constants.

    Raises:
        ArgumentError: array is a tensor, whose zeros are unknown.
        ShapeError: array is no matrix.
    """
    with error_location("sparse.from_dense"):
        if isinstance(array, Tensor):
            raise ArgumentError("the zeros of a tensor are known only when it runs; give an array")
        dense = as_tensor(array, dtype).node.attrs["value"]
        if dense.ndim != 2:
            raise ShapeError(f"expected a matrix, got {show_shape(dense.shape)}")
        rows, columns = np.nonzero(dense)
        offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=dense.shape[0]))])
        return csr(dense[rows, columns], columns, offsets.astype(I64), dense.shape)


@checks_argument_names(ArgumentError)
def from_scipy(matrix: Any) -> CSR:
    """Make a sparse matrix of a `scipy.sparse.csr_array`, as constants.

    Args:
        matrix: any object with the attributes data, indices, indptr and shape.

    Raises:
        ArgumentError: matrix lacks one of them, or is of another format.
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
    """Multiply a sparse matrix (transposed with `transpose`) by a dense one: (m, n) @ (n, k).

    Raises:
        ArgumentError: matrix is no CSR, or transpose is no bool.
        DTypeError, ShapeError: the dense matrix does not fit.
    """
    with error_location("sparse.spmm"):
        _require_csr(matrix)
        dense = as_tensor(dense)
        if not isinstance(transpose, bool):
            raise ArgumentError(f"transpose must be True or False, got {transpose!r}")
        result: Tensor = csr_matmul(
            matrix.values, matrix.columns, matrix.row_offsets, dense,
            shape=matrix.shape, transpose=transpose,
        )  # fmt: skip
        return result


@checks_argument_names(ArgumentError)
def spmv(matrix: CSR, vector: Any, transpose: bool = False) -> Tensor:
    """Multiply a sparse matrix (transposed with `transpose`) by a dense vector: (m, n) @ (n,).

    Raises:
        ArgumentError: matrix is no CSR, or transpose is no bool.
        DTypeError, ShapeError: the vector does not fit.
    """
    with error_location("sparse.spmv"):
        _require_csr(matrix)
        vector = as_tensor(vector)
        if vector.ndim != 1:
            raise ShapeError(f"expected a vector, got {vector.spec}; use spmm for matrices")
        product = spmm(matrix, reshape(vector, (vector.size, 1)), transpose)
        return reshape(product, (product.shape[0],))


@checks_argument_names(ArgumentError)
def to_dense(matrix: CSR) -> Tensor:
    """Return the matrix as a dense tensor, with its zeros.

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
        raise ArgumentError(f"expected a sparse matrix (see gf.sparse.csr), got {matrix!r}")


__all__ = ["CSR", "csr", "from_dense", "from_scipy", "spmm", "spmv", "to_dense"]
