"""Eigenvalues and eigenvectors: eigh, eigvalsh, eig and eigvals. Public in `gf.linalg`.

Equal eigenvalues have no unique vectors: see `confluent.py`.
"""

from __future__ import annotations

from typing import Any

from graphflow.ir.op import FUNCTIONS, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import TensorSpec, complex_dtype, real_dtype
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import is_zeros
from graphflow.ops.matrices.linalg import confluent
from graphflow.ops.matrices.linalg.decompositions import BATCH33, C33, M33, REAL, symmetrize
from graphflow.ops.matrices.linalg.matrix_rules import (
    adjoint,
    call_lapack,
    cast_result,
    cubic_cost,
    identity,
    make_distinct_spectrum,
    match_kind,
    per_column,
    square_size,
    symmetric_part,
    times,
)
from graphflow.ops.matrices.linalg.solve import solve_op
from graphflow.ops.sharding import rules as sharding

_NO_VALUES = "has no eigenvalues that LAPACK could find; does it hold NaN or infinity?"


def _infer_eigh(x: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    return _infer_eigvalsh(x), x


def _infer_eigvalsh(x: TensorSpec) -> TensorSpec:
    square_size(x)
    return TensorSpec(x.shape[:-1], real_dtype(x.dtype))


def _eigh_kernel(xp: Any, x: Any) -> tuple[Any, Any]:
    values, vectors = call_lapack(xp, xp.linalg.eigh, symmetrize(x), _NO_VALUES)
    return cast_result(xp, values, real_dtype(x.dtype)), cast_result(xp, vectors, x.dtype)


def _eigvalsh_kernel(xp: Any, x: Any) -> Any:
    values = call_lapack(xp, xp.linalg.eigvalsh, symmetrize(x), _NO_VALUES)
    return cast_result(xp, values, real_dtype(x.dtype))


def _from_eigenpairs(values: Tensor, vectors: Tensor) -> Tensor:
    """Return V·diag(values)·Vᴴ."""
    return times(vectors * per_column(values), vectors, adjoint_b=True)


def _eigh_vjp(g: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor]:
    """Return V·(diag(gw) + F∘skew(Vᴴ·gV))·Vᴴ with Fᵢⱼ = 1/(wⱼ - wᵢ)."""
    (g_values, g_vectors), (values, vectors) = g, y
    result = _from_eigenpairs(g_values, vectors)
    if not is_zeros(g_vectors):

        def skew(g: Tensor) -> Tensor:
            turned = times(vectors, g, adjoint_a=True)
            half: Tensor = (turned - adjoint(turned)) * 0.5
            return half

        turned = confluent.divide_by_gaps(x, values, vectors, g_vectors, skew)
        result = result + times(times(vectors, turned), vectors, adjoint_b=True)
    return (match_kind(symmetric_part(result), x),)


eigh_op = register(
    Op(
        "eigh",
        infer=_infer_eigh,
        kernel=_eigh_kernel,
        vjp=_eigh_vjp,
        batch=batching.rows,
        sharding=sharding.matrix_rule(2, outputs=(1, 2)),
        cost=cubic_cost(9),
        autocast="high",
        samples=tuple(sample(s, make=make_distinct_spectrum) for s in REAL),
    )
)


eigvalsh_op = register(
    Op(
        "eigvalsh",
        infer=_infer_eigvalsh,
        kernel=_eigvalsh_kernel,
        vjp=lambda g, y, x: (match_kind(symmetric_part(_from_eigenpairs(g, eigh_op(x)[1])), x),),
        batch=batching.rows,
        sharding=sharding.matrix_rule(2, outputs=(1,)),
        cost=cubic_cost(4),
        autocast="high",
        samples=tuple(sample(s, make=make_distinct_spectrum) for s in (M33, BATCH33, C33)),
    )
)


@composite("x", to="high")
@function
def eigh(x: Any) -> tuple[Tensor, Tensor]:
    """Compute eigenvalues w and eigenvectors v of symmetric (Hermitian) matrices: x @ v = v·w.

    Args:
        x: (…, n, n), float or complex; of matrices that are not symmetric the symmetric part
            counts.

    Returns:
        Real eigenvalues (…, n), ascending, and orthonormal eigenvectors (…, n, n), the columns.
        LAPACK chooses each vector's sign (phase), so functions of vectors should not depend on it.

    Raises:
        ShapeError: x is not square.
        DTypeError: x is neither float nor complex.
        CheckError: from the step, if the iterations do not converge.

    Source: Giles, "An extended collection of matrix derivative results", 2008.
    """
    values, vectors = eigh_op(as_tensor(x))
    return values, vectors


@composite("x", to="high")
@function
def eigvalsh(x: Any) -> Tensor:
    """Compute the eigenvalues of `eigh` without the vectors.

    Raises:
        ShapeError, DTypeError, CheckError: as `eigh`.
    """
    result: Tensor = eigvalsh_op(as_tensor(x))
    return result


def _infer_eig(x: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    square_size(x)
    wanted = complex_dtype(x.dtype)
    return TensorSpec(x.shape[:-1], wanted), TensorSpec(x.shape, wanted)


def _eig_kernel(xp: Any, x: Any) -> tuple[Any, Any]:
    values, vectors = call_lapack(xp, xp.linalg.eig, x, _NO_VALUES)
    wanted = complex_dtype(x.dtype)
    return cast_result(xp, values, wanted), cast_result(xp, vectors, wanted)


def _frobenius_norm(x: Tensor) -> Tensor:
    """Return the Frobenius norms of matrices, (…, 1, 1)."""
    squares = FUNCTIONS["square"](FUNCTIONS["abs"](x))
    return FUNCTIONS["sqrt"](FUNCTIONS["sum"](squares, axis=(-2, -1), keepdims=True))  # type: ignore[no-any-return]


def _eig_vjp(g: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor]:
    """Return V⁻ᴴ·(diag(gw) + (Vᴴ·gV - VᴴV·diag(Re diag(Vᴴ·gV))) ∘ F*)·Vᴴ with Fᵢⱼ = 1/(wⱼ - wᵢ).

    The second term keeps the vectors' length of 1.
    """
    (g_values, g_vectors), (values, vectors) = g, y
    eye = identity(x.shape[-1], FUNCTIONS["real"](values))
    inner = eye * per_column(g_values)
    if not is_zeros(g_vectors):
        gram = times(vectors, vectors, adjoint_a=True)

        def across(g: Tensor) -> Tensor:
            turned = times(vectors, g, adjoint_a=True)
            lengths = FUNCTIONS["sum"](FUNCTIONS["real"](turned) * eye, axis=-2)
            rest: Tensor = turned - gram * per_column(lengths)
            return rest

        whole = identity(x.shape[-1], vectors)
        condition = _frobenius_norm(vectors) * _frobenius_norm(
            solve_op(vectors, whole, adjoint=False)
        )
        inner = inner + confluent.divide_by_gaps(x, values, vectors, g_vectors, across, condition)
    solved: Tensor = solve_op(vectors, times(inner, vectors, adjoint_b=True), adjoint=True)
    return (match_kind(solved, x),)


eig_op = register(
    Op(
        "eig",
        infer=_infer_eig,
        kernel=_eig_kernel,
        vjp=_eig_vjp,
        batch=batching.rows,
        sharding=sharding.matrix_rule(2, outputs=(1, 2)),
        cost=cubic_cost(25),
        samples=tuple(sample(s, make=make_distinct_spectrum) for s in REAL),
        device_kinds=("cpu",),
    )
)


@composite("x", to="high")
@function
def eig(x: Any) -> tuple[Tensor, Tensor]:
    """Compute complex eigenvalues w and eigenvectors v of square matrices: x @ v = v·w.

    Args:
        x: (…, n, n), float or complex; diagonalisable for the gradient.

    Returns:
        Eigenvalues (…, n) in no order, and eigenvectors (…, n, n) of length 1, the columns.
        Functions of the vectors should not depend on their phase.

    Raises:
        ShapeError: x is not square.
        DTypeError: x is neither float nor complex.
        CheckError: from the step, if the iterations do not converge.

    Source: Boeddeker et al., "On the computation of complex-valued gradients", arXiv:1701.00392.
    """
    values, vectors = eig_op(as_tensor(x))
    return values, vectors


@composite("x", to="high")
@function
def eigvals(x: Any) -> Tensor:
    """Compute the eigenvalues of `eig`.

    Raises:
        ShapeError, DTypeError, CheckError: as `eig`.
    """
    return eig(x)[0]


__all__ = ["eig", "eigh", "eigvals", "eigvalsh"]
