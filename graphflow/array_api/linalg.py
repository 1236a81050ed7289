"""The extension `linalg` of the array API standard: the functions of `gf.linalg`.

Decompositions return named tuples here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from graphflow.base.argument_checks import checks_argument_names
from graphflow.errors import ArgumentError
from graphflow.ir.op import Tensor
from graphflow.ops.matrices.linalg import linalg_namespace as ours
from graphflow.ops.matrices.linalg.linalg_namespace import (
    cholesky,
    cross,
    det,
    diagonal,
    eigvalsh,
    inv,
    matmul,
    matrix_norm,
    matrix_power,
    matrix_rank,
    matrix_transpose,
    outer,
    pinv,
    solve,
    svdvals,
    tensordot,
    trace,
    vecdot,
    vector_norm,
)


class EigenPairs(NamedTuple):
    """Eigenvalues (…, n), and eigenvectors as columns (…, n, n)."""

    eigenvalues: Tensor
    eigenvectors: Tensor


class OrthogonalFactors(NamedTuple):
    """Factors of Q @ R with orthonormal columns of Q."""

    Q: Tensor
    R: Tensor


class LogDeterminant(NamedTuple):
    """Sign of a determinant, and the logarithm of its absolute value."""

    sign: Tensor
    logabsdet: Tensor


class SingularFactors(NamedTuple):
    """Factors of U * S @ Vh with orthonormal columns of U and rows of Vh."""

    U: Tensor
    S: Tensor
    Vh: Tensor


@checks_argument_names(ArgumentError)
def eigh(x: Any, /) -> EigenPairs:
    """Decompose Hermitian matrices, as `gf.linalg.eigh`."""
    return EigenPairs(*ours.eigh(x))


@checks_argument_names(ArgumentError)
def qr(x: Any, /, *, mode: str = "reduced") -> OrthogonalFactors:
    """Factor matrices into Q @ R, as `gf.linalg.qr`."""
    return OrthogonalFactors(*ours.qr(x, mode=mode))


@checks_argument_names(ArgumentError)
def slogdet(x: Any, /) -> LogDeterminant:
    """Return sign and logarithm of determinants, as `gf.linalg.slogdet`."""
    return LogDeterminant(*ours.slogdet(x))


@checks_argument_names(ArgumentError)
def svd(x: Any, /, *, full_matrices: Any = True) -> SingularFactors:
    """Decompose matrices by singular values, as `gf.linalg.svd`."""
    return SingularFactors(*ours.svd(x, full_matrices=full_matrices))


__all__ = [
    "cholesky", "cross", "det", "diagonal", "eigh", "eigvalsh", "inv", "matmul", "matrix_norm",
    "matrix_power", "matrix_rank", "matrix_transpose", "outer", "pinv", "qr", "slogdet", "solve",
    "svd", "svdvals", "tensordot", "trace", "vecdot", "vector_norm",
]  # fmt: skip
