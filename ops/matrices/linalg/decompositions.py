"""Cholesky and QR decompositions. Public in `gf.linalg`.

Their gradients are made of products and triangular solves, so they can be differentiated again.
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError, DifferentiationError
from graphflow.ir.op import FUNCTIONS, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import TensorSpec, minimum, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.matrices.linalg import confluent
from graphflow.ops.matrices.linalg.matrix_rules import (
    adjoint,
    array_adjoint,
    call_lapack,
    cast_result,
    cubic_cost,
    identity,
    make_distinct_spectrum,
    make_positive_definite,
    matrix_sizes,
    per_column,
    square_size,
    symmetric_part,
    times,
)
from graphflow.ops.matrices.linalg.solve import triangular_solve_op
from graphflow.ops.matrices.triangles import tril, triu
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.slicing import concat, window

M33, BATCH33 = spec("float32", (3, 3)), spec("float32", (2, 3, 3))
# Without complex samples: LAPACK chooses the phase of complex vectors, and finite differences would
# see it change.
REAL = (M33, BATCH33)
C33 = spec("complex64", (3, 3))


def _infer_square(x: TensorSpec) -> TensorSpec:
    square_size(x)
    return x


def symmetrize(x: Any) -> Any:
    """Return the symmetric part of an array; a symmetric array comes back bit by bit."""
    return (x + array_adjoint(x)) * x.dtype.type(0.5)


# Cholesky ---------------------------------------------------------------------------------------

_INDEFINITE = (
    "is not positive definite (in its symmetric part); add a multiple of the identity, "
    "or use gf.linalg.eigh"
)


def _cholesky_kernel(xp: Any, x: Any) -> Any:
    return cast_result(xp, call_lapack(xp, xp.linalg.cholesky, symmetrize(x), _INDEFINITE), x.dtype)


def _cholesky_vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    """Return L⁻ᴴ·Φ(Lᴴg)·L⁻¹, symmetrised; Φ takes the lower triangle with its diagonal halved."""
    inner = times(y, g, adjoint_a=True)
    halved = (tril(inner) + tril(inner, k=-1)) * 0.5

    def from_left(b: Tensor) -> Tensor:
        solved: Tensor = triangular_solve_op(y, b, lower=True, adjoint=True, unit_diagonal=False)
        return solved

    return (symmetric_part(from_left(adjoint(from_left(halved)))),)


cholesky_op = register(
    Op(
        "cholesky",
        infer=_infer_square,
        kernel=_cholesky_kernel,
        vjp=_cholesky_vjp,
        batch=batching.rows,
        sharding=sharding.matrix_rule(2),
        cost=cubic_cost(1),
        autocast="high",
        samples=tuple(sample(s, make=make_positive_definite) for s in (M33, BATCH33, C33)),
    )
)


@composite("x", to="high")
@function
def cholesky(x: Any, *, upper: bool = False) -> Tensor:
    """Factor x into L @ Lᴴ, with L lower triangular and its diagonal positive.

    Args:
        x: symmetric (Hermitian) positive definite matrices (…, n, n), float or complex. Of others
            the symmetric part counts, and its gradient is symmetric.
        upper: return Lᴴ instead of L.

    Raises:
        ShapeError: x is not square.
        DTypeError: x is neither float nor complex.
        ArgumentError: upper is not a bool.
        CheckError: from the step, if a matrix is not positive definite.

    Source: Murray, "Differentiation of the Cholesky decomposition", arXiv:1602.07527.
    """
    if not isinstance(upper, bool):
        raise ArgumentError(f"upper must be True or False, got {upper!r}")
    lower: Tensor = cholesky_op(as_tensor(x))
    return adjoint(lower) if upper else lower


# QR ---------------------------------------------------------------------------------------------


def _infer_qr(x: TensorSpec, mode: str) -> tuple[TensorSpec, TensorSpec]:
    m, n = matrix_sizes(x)
    k = m if mode == "complete" else minimum(m, n)
    return x.with_shape((*x.shape[:-1], k)), x.with_shape((*x.shape[:-2], k, n))


def _qr_kernel(xp: Any, x: Any, mode: str) -> tuple[Any, Any]:
    q, r = call_lapack(xp, lambda a: tuple(xp.linalg.qr(a, mode)), x, "has no QR decomposition")
    return cast_result(xp, q, x.dtype), cast_result(xp, r, x.dtype)


def _qr_vjp(
    g: tuple[Tensor, Tensor], y: tuple[Tensor, Tensor], x: Tensor, mode: str
) -> tuple[Tensor]:
    """Return the gradient of QR; a wide x = [X, Y] has the q of X, and r = [U, QᴴY]."""
    m, n = x.shape[-2:]
    (gq, gr), (q, r) = g, y
    if m == n:
        return (_tall_qr_grad(gq, gr, q, r),)
    if not (isinstance(m, int) and isinstance(n, int)):
        raise DifferentiationError(
            f"which side of {x.spec} is longer is not known while the graph is built; give known "
            "sizes to the matrices whose qr is differentiated"
        )
    if m > n:
        if mode == "complete":
            raise DifferentiationError(
                f"the columns beyond {n} of the complete q of {x.spec} are not unique and have no "
                "gradient; use mode='reduced'"
            )
        return (_tall_qr_grad(gq, gr, q, r),)
    last = x.ndim - 1
    rest = window(x, last, m, n - m)
    g_rest = window(gr, last, m, n - m)
    gq = gq + times(rest, g_rest, adjoint_b=True)
    gx = _tall_qr_grad(gq, window(gr, last, 0, m), q, window(r, last, 0, m))
    return (concat([gx, times(q, g_rest)], last),)


def _tall_qr_grad(gq: Tensor, gr: Tensor, q: Tensor, r: Tensor) -> Tensor:
    """Return (gQ + Q·sym(M))·R⁻ᴴ, M being the upper triangle of gR·Rᴴ - Qᴴ·gQ, its diagonal halved.

    NaN if columns are linearly dependent, since the last of them then has no unique direction.
    """
    where = FUNCTIONS["where"]
    diagonal = FUNCTIONS["abs"](FUNCTIONS["diagonal"](r))
    least = confluent.matrix_scale(r) * confluent.rounding_error(diagonal)
    dependent = FUNCTIONS["any"](per_column(diagonal) <= least, axis=-1, keepdims=True)
    r = where(dependent, identity(r.shape[-1], r), r)
    inner = times(gr, r, adjoint_b=True) - times(q, gq, adjoint_a=True)
    halved = (triu(inner) + triu(inner, k=1)) * 0.5
    whole = gq + times(q, halved + adjoint(halved))
    solved: Tensor = triangular_solve_op(
        r, adjoint(whole), lower=False, adjoint=False, unit_diagonal=False
    )
    return where(dependent, float("nan"), adjoint(solved))  # type: ignore[no-any-return]


qr_op = register(
    Op(
        "qr",
        infer=_infer_qr,
        kernel=_qr_kernel,
        vjp=_qr_vjp,
        batch=batching.rows,
        sharding=sharding.matrix_rule(2, outputs=(2, 2)),
        cost=cubic_cost(2),
        autocast="high",
        samples=(
            sample(M33, make=make_distinct_spectrum, mode="reduced"),
            sample(spec("float32", (4, 2)), make=make_distinct_spectrum, mode="reduced"),
            sample(spec("float32", (2, 3, 5)), make=make_distinct_spectrum, mode="complete"),
            sample(spec("complex64", (4, 3)), make=make_distinct_spectrum, mode="reduced"),
        ),
    )
)


@composite("x", to="high")
@function
def qr(x: Any, *, mode: str = "reduced") -> tuple[Tensor, Tensor]:
    """Factor x into q @ r, the columns of q orthonormal, r upper triangular.

    Args:
        x: matrices (…, m, n), float or complex. The gradient is NaN if their columns (the first m
            of them, if m < n) are linearly dependent.
        mode: "reduced": q (…, m, k) and r (…, k, n), k the smaller of m and n. "complete": q is
            square, and has a gradient only if m <= n.

    Raises:
        ShapeError: x has fewer than two axes.
        DTypeError: x is neither float nor complex.
        ArgumentError: the mode is unknown.

    Source: Walter & Lehmann, "Algorithmic differentiation of linear algebra functions",
    arXiv:1001.1654; Seeger et al., "Auto-differentiating linear algebra", arXiv:1710.08717.
    """
    if mode not in ("reduced", "complete"):
        raise ArgumentError(f"mode must be 'reduced' or 'complete', got {mode!r}")
    q, r = qr_op(as_tensor(x), mode=mode)
    return q, r


__all__ = ["cholesky", "qr"]
