"""Linear algebra, public as `gf.linalg`: the array API's names and some more of numpy's.

Matrices are the last two axes of a tensor; the axes before them are batches. Unless a docstring
says otherwise, functions take floats and complex numbers and have gradients of any order.
"""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

from graphflow.base.argument_checks import checks_argument_names
from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, error_location, function, promote_inputs
from graphflow.ir.spec import equate, show_shape
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import normalize_axis, require_int, require_kind, require_list
from graphflow.ops.matrices.einsum import einsum, tensordot
from graphflow.ops.matrices.linalg.decompositions import cholesky, qr
from graphflow.ops.matrices.linalg.determinant import det, logdet, slogdet
from graphflow.ops.matrices.linalg.eigen import eig, eigh, eigvals, eigvalsh
from graphflow.ops.matrices.linalg.exponential import matrix_exp
from graphflow.ops.matrices.linalg.least_squares import lstsq, pinv
from graphflow.ops.matrices.linalg.lu import lu
from graphflow.ops.matrices.linalg.norms import cond, matrix_norm, norm, vector_norm
from graphflow.ops.matrices.linalg.solve import inv, matrix_power, solve, triangular_solve
from graphflow.ops.matrices.linalg.svd import matrix_rank, svd, svdvals
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.matrices.triangles import crop_to_diagonal
from graphflow.ops.matrices.triangles import diagonal as _main_diagonal
from graphflow.ops.matrices.vector_products import outer, vecdot
from graphflow.ops.tensors.padding import pad
from graphflow.ops.tensors.shape import matrix_transpose
from graphflow.ops.tensors.slicing import roll


@checks_argument_names(ArgumentError)
def diagonal(x: Any, *, offset: int = 0) -> Tensor:
    """Return the diagonal of each matrix of x (…, m, n), `offset` columns above the main one.

    Raises:
        ShapeError: x has fewer than two axes.
        ArgumentError: offset is no int.
    """
    with error_location("diagonal"):
        tensor = as_tensor(x)
        offset = require_int("offset", offset)
        if tensor.ndim < 2:
            raise ShapeError(f"expected matrices, got {show_shape(tensor.shape)}")
        m, n = tensor.shape[-2:]
        if offset or m != n:
            tensor = crop_to_diagonal(tensor, int(offset), tensor.ndim - 2, tensor.ndim - 1)
    return _main_diagonal(tensor)


@function
def diag(x: Any, offset: int = 0) -> Tensor:
    """Return the square matrix with a vector on its diagonal, or the diagonal of a matrix.

    Args:
        x: a vector (n,) or a matrix (m, n).
        offset: the diagonal, as a number of columns above the main one.

    Returns:
        For a vector (n + |offset|, n + |offset|), 0 elsewhere; for a matrix as `diagonal`.

    Raises:
        ShapeError: x has neither one axis nor two.
        ArgumentError: offset is no int.
    """
    tensor = as_tensor(x)
    offset = int(require_int("offset", offset))
    if tensor.ndim == 2:
        return diagonal(tensor, offset=offset)
    if tensor.ndim != 1:
        raise ShapeError(f"expected a vector or a matrix, got {show_shape(tensor.shape)}")
    return diag_embed(tensor, offset)


@function
def diag_embed(x: Any, offset: int = 0) -> Tensor:
    """Return square matrices with the vectors of x (…, n) on a diagonal, and 0 elsewhere.

    Args:
        offset: the diagonal, as a number of columns above the main one.

    Returns:
        A tensor (…, n + |offset|, n + |offset|) of the dtype of x.

    Raises:
        ShapeError: x is one number.
        ArgumentError: offset is no int.
    """
    tensor = as_tensor(x)
    offset = int(require_int("offset", offset))
    if not tensor.ndim:
        raise ShapeError(f"expected vectors, got {show_shape(tensor.shape)}")
    here = FUNCTIONS["eye"](tensor.shape[-1], dtype="bool")
    row = FUNCTIONS["expand_dims"](tensor, -2)
    rows = FUNCTIONS["where"](here, row, FUNCTIONS["zeros_like"](row))
    down, right = max(-offset, 0), max(offset, 0)
    widths = (*((0, 0),) * (tensor.ndim - 1), (down, right), (right, down))
    result: Tensor = pad(rows, widths)
    return result


@composite("b", "factor", to="high")
@function
def cholesky_solve(b: Any, factor: Any, *, upper: bool = False) -> Tensor:
    """Solve a @ x = b, given the Cholesky factor of a; arguments in torch's order.

    Args:
        b: right sides (…, n, k), or one vector (n,).
        factor: lower triangles l with a = l·lᴴ, (…, n, n); with `upper`, u with a = uᴴ·u.

    Raises:
        ShapeError, DTypeError, ArgumentError, CheckError: as `triangular_solve`.
    """
    given = {"lower": not upper} if isinstance(upper, bool) else {"lower": upper}
    inner = triangular_solve(factor, b, adjoint=upper, **given)
    return triangular_solve(factor, inner, adjoint=not upper, **given)


@checks_argument_names(ArgumentError)
def trace(x: Any, *, offset: int = 0, dtype: Any = None) -> Tensor:
    """Sum a diagonal of each matrix of x (…, m, n); arguments as for `diagonal` and `gf.sum`.

    Raises:
        ShapeError, ArgumentError: as `diagonal`.
    """
    result: Tensor = FUNCTIONS["sum"](diagonal(x, offset=offset), axis=-1, dtype=dtype)
    return result


@composite("a", "b")
@function
def cross(a: Any, b: Any, *, axis: int = -1) -> Tensor:
    """Compute the cross product of vectors of three elements along an axis.

    Args:
        a, b: tensors of ints, floats or complex numbers, whose other axes broadcast.
        axis: the axis of size 3 in both.

    Raises:
        ShapeError: the axis is not of size 3 in both, or the other axes do not broadcast.
        DTypeError: a or b is bool, or kinds mix.
    """
    a, b = promote_inputs("cross", (a, b))
    require_kind(a.spec, "int", "float", "complex")
    for x in (a, b):
        size = x.shape[normalize_axis(axis, x.ndim)]
        equate(size, 3, f"axis {axis} of {show_shape(x.shape)} is not of size 3")
    if axis >= 0 and a.ndim != b.ndim:
        raise ShapeError(
            f"ranks of {show_shape(a.shape)} and {show_shape(b.shape)} differ; count the axis "
            f"from the end, as {axis - max(a.ndim, b.ndim)}"
        )
    turned = a * roll(b, -1, axis) - roll(a, -1, axis) * b
    return roll(turned, -1, axis)


@composite("arrays", to="low")
@function
def multi_dot(arrays: Sequence[Any]) -> Tensor:
    """Multiply several matrices in the order that costs least.

    Args:
        arrays: two or more matrices; the first and the last may be vectors.

    Raises:
        ArgumentError: arrays is no list, or holds fewer than two.
        ShapeError: an array has another rank, or sizes do not fit.
    """
    given = require_list("arrays", arrays)
    if not 2 <= len(given) < len(string.ascii_letters):
        raise ArgumentError(
            f"expected 2 to {len(string.ascii_letters) - 1} matrices, got {len(given)}"
        )
    tensors = promote_inputs("multi_dot", given)
    for i, x in enumerate(tensors):
        if x.ndim != 2 and not (x.ndim == 1 and i in (0, len(tensors) - 1)):
            raise ShapeError(
                f"number {i} is {show_shape(x.shape)}; all are matrices, but the first and last "
                "may be vectors"
            )
    terms = [string.ascii_letters[i : i + 2] for i in range(len(tensors))]
    terms[0] = terms[0][2 - tensors[0].ndim :]
    terms[-1] = terms[-1][: tensors[-1].ndim]
    ends = terms[0][: tensors[0].ndim - 1] + terms[-1][1:]
    return einsum(f"{','.join(terms)}->{ends}", *tensors)


__all__ = [
    "cholesky", "cholesky_solve", "cond", "cross", "det", "diag", "diagonal", "eig", "eigh",
    "eigvals", "eigvalsh",
    "inv", "logdet", "lstsq", "lu", "matmul", "matrix_exp", "matrix_norm", "matrix_power",
    "matrix_rank", "matrix_transpose", "multi_dot", "norm", "outer", "pinv", "qr", "slogdet",
    "solve", "svd", "svdvals", "tensordot", "trace", "triangular_solve", "vecdot", "vector_norm",
]  # fmt: skip
