"""Pseudo-inverses and least squares by singular values: pinv and lstsq. Public in `gf.linalg`."""

from __future__ import annotations

from typing import Any

from graphflow.errors import ShapeError
from graphflow.ir.op import (
    Cost,
    Op,
    Tensor,
    as_tensor,
    function,
    promote_inputs,
    register,
    sample,
)
from graphflow.ir.spec import (
    TensorSpec,
    broadcast_shapes,
    equate,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import unbroadcast
from graphflow.ops.matrices.linalg.matrix_rules import adjoint as adjoint_of
from graphflow.ops.matrices.linalg.matrix_rules import (
    array_adjoint,
    call_lapack,
    cast_result,
    cubic_cost,
    make_well_conditioned,
    matrix_sizes,
    times,
)
from graphflow.ops.matrices.linalg.svd import (
    BATCH35,
    C43,
    M42,
    NO_SINGULAR_VALUES,
    SHAPES,
    require_tolerance,
    significant_values,
)
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.shape import expand_dims, squeeze


def _inverse_parts(xp: Any, x: Any, rtol: float | None) -> tuple[Any, Any, Any]:
    """Return u, the reciprocals of the significant singular values (else 0), and vh."""
    u, s, vh = call_lapack(xp, lambda a: xp.linalg.svd(a, False), x, NO_SINGULAR_VALUES)
    kept = significant_values(xp, s, max(x.shape[-2:]), rtol)
    return u, xp.where(kept, 1 / xp.where(kept, s, 1), s.dtype.type(0)), vh


def _infer_pinv(x: TensorSpec, rtol: float | None) -> TensorSpec:
    m, n = matrix_sizes(x)
    return x.with_shape((*x.shape[:-2], n, m))


def _pinv_kernel(xp: Any, x: Any, rtol: float | None) -> Any:
    u, inverse, vh = _inverse_parts(xp, x, rtol)
    result = xp.matmul(array_adjoint(vh) * inverse[..., None, :], array_adjoint(u))
    return cast_result(xp, result, x.dtype)


def _pinv_vjp(g: Tensor, y: Tensor, x: Tensor, rtol: float | None) -> tuple[Tensor]:
    """Apply dP = -P·dx·P + P·Pᴴ·dxᴴ·(1 - xP) + (1 - Px)·dxᴴ·Pᴴ·P, among matrices of one rank."""
    gp = times(g, y, adjoint_a=True)  # gᴴP
    pg = times(y, g, adjoint_b=True)  # Pgᴴ
    result = -times(times(y, g, adjoint_a=True), y, adjoint_b=True)
    left = times(gp, y, adjoint_b=True)
    right = times(y, pg, adjoint_a=True)
    result = result + left - times(x, times(y, left))
    return (result + right - times(times(right, y), x),)


pinv_op = register(
    Op(
        "pinv",
        infer=_infer_pinv,
        kernel=_pinv_kernel,
        vjp=_pinv_vjp,
        batch=batching.rows,
        sharding=sharding.matrix_rule(2),
        cost=cubic_cost(16),
        autocast="high",
        samples=tuple(sample(s, make=make_well_conditioned, rtol=None) for s in SHAPES),
    )
)


@composite("x", to="high")
@function
def pinv(x: Any, *, rtol: float | None = None) -> Tensor:
    """Compute the Moore-Penrose inverse (…, n, m) of each matrix of x (…, m, n).

    Args:
        x: floats or complex numbers.
        rtol: singular values up to rtol times the largest count as 0; default: the larger of m and
            n times the dtype's epsilon. The gradient takes the rank as fixed.

    Raises:
        ShapeError: x has fewer than two axes.
        DTypeError: x is neither float nor complex.
        ArgumentError: rtol is no number, or negative.

    Source: Golub & Pereyra, SIAM J. Numer. Anal. 10(2), 1973.
    """
    result: Tensor = pinv_op(as_tensor(x), rtol=require_tolerance(rtol))
    return result


def _infer_lstsq(a: TensorSpec, b: TensorSpec, adjoint: bool, rtol: float | None) -> TensorSpec:
    m, n = matrix_sizes(a) if not adjoint else matrix_sizes(a)[::-1]
    what = f"systems {show_shape(a.shape)} with right sides {show_shape(b.shape)}"
    if b.rank < 2:
        raise ShapeError(f"{what}: the right side is a matrix")
    equate(m, b.shape[-2], f"{what}: rows differ")
    return b.with_shape((*broadcast_shapes(a.shape[:-2], b.shape[:-2]), n, b.shape[-1]))


def _lstsq_kernel(xp: Any, a: Any, b: Any, adjoint: bool, rtol: float | None) -> Any:
    u, inverse, vh = _inverse_parts(xp, a, rtol)
    left, right = (vh, u) if adjoint else (array_adjoint(u), array_adjoint(vh))
    result = xp.matmul(right, inverse[..., None] * xp.matmul(left, b))
    return cast_result(xp, result, b.dtype)


def _lstsq_vjp(
    g: Tensor, y: Tensor, a: Tensor, b: Tensor, adjoint: bool, rtol: float | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients that follow from the differential of the pseudo-inverse P.

    With z = Pᴴg and the residual r = b - a·y: ga = -z·yᴴ + r·(P·z)ᴴ + (Pᴴy)·(g - aᴴz)ᴴ.
    """

    def solve_least_squares(right: Tensor, of_adjoint: bool) -> Tensor:
        result: Tensor = lstsq_op(a, right, adjoint=of_adjoint, rtol=rtol)
        return result

    z = solve_least_squares(g, not adjoint)
    residual = b - times(a, y, adjoint_a=adjoint)
    beyond = g - times(a, z, adjoint_a=not adjoint)
    ga = times(residual, solve_least_squares(z, adjoint), adjoint_b=True)
    ga = (
        ga
        + times(solve_least_squares(y, not adjoint), beyond, adjoint_b=True)
        - times(z, y, adjoint_b=True)
    )
    if adjoint:
        ga = adjoint_of(ga)
    return unbroadcast(ga, a.shape), unbroadcast(z, b.shape)


def _cost_lstsq(a: TensorSpec, b: TensorSpec, adjoint: bool, rtol: float | None) -> Cost:
    return Cost(flops=a.size * a.shape[-1] * 14 + a.size * b.shape[-1] * 4)


M43 = spec("float32", (4, 3))


lstsq_op: Op = register(
    Op(
        "lstsq",
        infer=_infer_lstsq,
        kernel=_lstsq_kernel,
        vjp=_lstsq_vjp,
        batch=batching.elementwise,
        sharding=sharding.matrix_rule(2, 2),
        cost=_cost_lstsq,
        autocast="high",
        samples=(
            sample(M43, M42, make=make_well_conditioned, adjoint=False, rtol=None),
            sample(
                M43, spec("float32", (3, 2)), make=make_well_conditioned, adjoint=True, rtol=None
            ),
            sample(
                BATCH35,
                spec("float32", (3, 1)),
                make=make_well_conditioned,
                adjoint=False,
                rtol=None,
            ),
            sample(
                C43, spec("complex64", (4, 2)), make=make_well_conditioned, adjoint=False, rtol=None
            ),
        ),
        promotes=True,
    )
)


@composite("a", "b", to="high")
@function
def lstsq(a: Any, b: Any, *, rtol: float | None = None) -> Tensor:
    """Return the x of least norm that minimises the norm of a @ x - b.

    Args:
        a: matrices (…, m, n) of any rank, float or complex; leading axes broadcast with b's.
        b: right sides (…, m, k), or one vector (m,).
        rtol: as for `pinv`.

    Raises:
        ShapeError: the rows of a and b differ.
        DTypeError: a or b is neither float nor complex.
        ArgumentError: rtol is no number, or negative.

    Source: Golub & Pereyra, SIAM J. Numer. Anal. 10(2), 1973.
    """
    a, b = promote_inputs("lstsq", (a, b))
    attrs: dict[str, Any] = {"adjoint": False, "rtol": require_tolerance(rtol)}
    if b.ndim == 1:
        return squeeze(lstsq_op(a, expand_dims(b, 1), **attrs), -1)
    result: Tensor = lstsq_op(a, b, **attrs)
    return result


__all__ = ["lstsq", "pinv"]
