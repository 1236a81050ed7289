"""Singular values and what is made of them: svd, svdvals, pinv, lstsq, matrix_rank. Public in
`gf.linalg`.

Where singular values are equal their vectors are not unique: see `confluent.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.errors import ArgumentError, DifferentiationError, ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
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
    Size,
    TensorSpec,
    broadcast_shapes,
    equate,
    maximum,
    minimum,
    real_dtype,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import is_zeros, unbroadcast
from graphflow.ops.matrices import confluent
from graphflow.ops.matrices.matrix_rules import adjoint as adjoint_of
from graphflow.ops.matrices.matrix_rules import (
    array_adjoint,
    call_lapack,
    cast_result,
    cubic_cost,
    identity,
    make_distinct_spectrum,
    make_well_conditioned,
    match_kind,
    matrix_sizes,
    per_column,
    per_row,
    times,
)
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.shape import expand_dims, squeeze

M33, M42 = spec("float32", (3, 3)), spec("float32", (4, 2))
BATCH35 = spec("float32", (2, 3, 5))
C43 = spec("complex64", (4, 3))
# The phase of complex vectors is LAPACK's choice: finite differences would see it change.
REAL = (M33, M42, BATCH35)
SHAPES = (*REAL, C43)
_NO_VALUES = "has no singular values that LAPACK could find; does it hold NaN or infinity?"


# The decomposition ------------------------------------------------------------------------------


def _infer_svd(x: TensorSpec, full_matrices: bool) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    m, n = matrix_sizes(x)
    k = minimum(m, n)
    left, right = (m, n) if full_matrices else (k, k)
    front = x.shape[:-2]
    return x.with_shape((*front, m, left)), _infer_svdvals(x), x.with_shape((*front, right, n))


def _infer_svdvals(x: TensorSpec) -> TensorSpec:
    m, n = matrix_sizes(x)
    return TensorSpec((*x.shape[:-2], minimum(m, n)), real_dtype(x.dtype))


def _svd_kernel(xp: Any, x: Any, full_matrices: bool) -> tuple[Any, Any, Any]:
    u, s, vh = call_lapack(xp, lambda a: xp.linalg.svd(a, full_matrices), x, _NO_VALUES)
    return (
        cast_result(xp, u, x.dtype),
        cast_result(xp, s, real_dtype(x.dtype)),
        cast_result(xp, vh, x.dtype),
    )


def _svdvals_kernel(xp: Any, x: Any) -> Any:
    s = call_lapack(xp, lambda a: xp.linalg.svd(a, compute_uv=False), x, _NO_VALUES)
    return cast_result(xp, s, real_dtype(x.dtype))


def _svd_vjp(
    g: tuple[Tensor, Tensor, Tensor],
    y: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    full_matrices: bool,
) -> tuple[Tensor]:
    """U·((skew(Uᴴ·gU)∘E)·S + S·(skew(Vᴴ·gV)∘E) + diag(gS))·Vᴴ, Eᵢⱼ = 1/(sⱼ² - sᵢ²), and what
    leaves the spans of U and V. Half the sum of both parts is divided by sⱼ - sᵢ, half their
    difference by sⱼ + sᵢ."""
    m, n = x.shape[-2:]
    if full_matrices and m != n:
        raise DifferentiationError(
            f"the singular vectors beyond the smaller side of {x.spec} are not unique and have no "
            "gradient; use full_matrices=False, or svdvals"
        )
    (gu, gs, gvh), (u, s, vh) = g, y
    inner = identity(s.shape[-1], s) * per_column(gs)
    if is_zeros(gu) and is_zeros(gvh):
        return (match_kind(times(times(u, inner), vh), x),)

    def divisors(s: Tensor) -> list[Tensor]:
        """What each part is divided by; sums have a diagonal where u has a phase against v."""
        is_complex = x.dtype.kind == "c"
        sums = per_column(s) + per_row(s) if is_complex else confluent.pairwise_differences(s, 1)
        return [confluent.pairwise_differences(s), sums, per_column(s), per_column(s)]

    size, error, bottoms = confluent.largest_magnitude(s), confluent.rounding_error(s), divisors(s)
    close = [confluent.is_close(b, size) for b in bottoms]
    steps = (per_column(confluent.separation_slopes(s, near)) for near in (None, close[0]))
    apart = squeeze(FUNCTIONS["where"](close[2], *steps), -2)  # from 0, or from each other
    slopes = confluent.cotangent_slopes(x, [gu, gvh], close, apart)
    now, later = (
        _rotate_cotangents(u, vh, gu, gvh),
        _rotate_cotangents(u, vh, *slopes) if slopes else None,
    )
    scale = confluent.matrix_scale(*now[:2])
    aparts = divisors(apart)

    def divide_part(i: int) -> Tensor:
        moved = later[i + 2] if later else None
        return confluent.confluent_quotient(
            now[i + 2], bottoms[i], moved, aparts[i], scale, size, error
        )

    inner = inner + divide_part(0) + divide_part(1)
    result = times(times(u, inner), vh)
    if m != n:
        result = result + times(divide_part(2), vh) + times(u, divide_part(3), adjoint_b=True)
    return (match_kind(result, x),)


def _rotate_cotangents(u: Tensor, vh: Tensor, gu: Tensor, gvh: Tensor) -> Sequence[Tensor]:
    """Uᴴ·gU, Vᴴ·gV, half of the sum and of the difference of their skew parts, and what of gU and
    gV leaves the spans of U and V."""
    of_u, of_v = times(u, gu, adjoint_a=True), times(vh, gvh, adjoint_b=True)
    left, right = of_u - adjoint_of(of_u), of_v - adjoint_of(of_v)
    return (
        of_u,
        of_v,
        (left + right) * 0.5,
        (left - right) * 0.5,
        gu - times(u, of_u),
        adjoint_of(gvh) - times(vh, of_v, adjoint_a=True),
    )


def _svdvals_vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    u, _, vh = svd_op(x, full_matrices=False)
    return (times(u * per_column(g), vh),)


svd_op = register(
    Op(
        "svd",
        infer=_infer_svd,
        kernel=_svd_kernel,
        vjp=_svd_vjp,
        batch=batching.rows,
        sharding=sharding.matrix_rule(2, outputs=(2, 1, 2)),
        cost=cubic_cost(14),
        autocast="high",
        samples=(
            *(sample(s, make=make_distinct_spectrum, full_matrices=False) for s in REAL),
            sample(M33, make=make_distinct_spectrum, full_matrices=True),
        ),
    )
)
svdvals_op = register(
    Op(
        "svdvals",
        infer=_infer_svdvals,
        kernel=_svdvals_kernel,
        vjp=_svdvals_vjp,
        batch=batching.rows,
        sharding=sharding.matrix_rule(2, outputs=(1,)),
        cost=cubic_cost(4),
        autocast="high",
        samples=tuple(sample(s, make=make_distinct_spectrum) for s in SHAPES),
    )
)


@composite("x", to="high")
@function
def svd(x: Any, *, full_matrices: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    """(u, s, vh) with x = u·diag(s)·vh, u and vhᴴ with orthonormal columns, s >= 0 descending.

    Args:
        x: matrices (…, m, n); k is the smaller of m and n.
        full_matrices: u (…, m, m) and vh (…, n, n), which have a gradient only where m = n; else u
            (…, m, k) and vh (…, k, n). s is (…, k) and real.

    A pair of vectors' sign (phase) is LAPACK's choice, and functions of vectors should not depend
    on it.

    Raises:
        ShapeError: x has no two axes.
        DTypeError: not float or complex.
        ArgumentError: full_matrices is not a bool.
        CheckError: from the step, where the iterations do not converge.

    Source: Townsend, "Differentiating the singular value decomposition", 2016; Seeger et al.,
    "Auto-differentiating linear algebra", arXiv:1710.08717.
    """
    if not isinstance(full_matrices, bool):
        raise ArgumentError(f"full_matrices is True or False, not {full_matrices!r}")
    u, s, vh = svd_op(as_tensor(x), full_matrices=full_matrices)
    return u, s, vh


@composite("x", to="high")
@function
def svdvals(x: Any) -> Tensor:
    """The singular values of matrices (…, m, n), descending.

    Raises:
        ShapeError, DTypeError, CheckError: as `svd`.
    """
    result: Tensor = svdvals_op(as_tensor(x))
    return result


# Ranks ------------------------------------------------------------------------------------------


def _tolerance(rtol: Any) -> float | None:
    if rtol is None:
        return None
    if isinstance(rtol, bool) or not isinstance(rtol, int | float) or not rtol >= 0:
        raise ArgumentError(f"rtol is a number that is not negative, not {rtol!r}")
    return float(rtol)


def _infer_rank(s: TensorSpec, longer: Size, rtol: float | None) -> TensorSpec:
    return TensorSpec(s.shape[:-1], spec("int64").dtype)


def _significant_values(xp: Any, s: Any, longer: int, rtol: float | None) -> Any:
    """Which singular values count; by default those above the rounding of a matrix that long."""
    if rtol is None:
        rtol = longer * float(xp.finfo(s.dtype).eps)
    if not s.shape[-1]:
        return s > 0
    return s > s.max(-1, keepdims=True) * s.dtype.type(rtol)


_rank = register(
    Op(
        "count_above",
        infer=_infer_rank,
        kernel=lambda xp, s, longer, rtol: xp.asarray(
            xp.count_nonzero(_significant_values(xp, s, longer, rtol), axis=-1), "int64"
        ),
        batch=batching.rows,
        sharding=sharding.matrix_rule(1, outputs=(0,)),
        cost=lambda s, longer, rtol: Cost(flops=s.size * 2),
        samples=(
            sample(spec("float32", (3, 4)), low=0.1, longer=4, rtol=None),
            sample(spec("float32", (3,)), low=0.1, longer=3, rtol=0.5),
        ),
    )
)


@composite("x", to="high")
@function
def matrix_rank(x: Any, *, rtol: float | None = None) -> Tensor:
    """How many singular values of each matrix (…, m, n) exceed rtol times the largest; int64.

    Args:
        rtol: by default the larger of m and n times the dtype's epsilon.

    Raises:
        ShapeError: x has no two axes.
        DTypeError: not float or complex.
        ArgumentError: rtol is no number, or negative.
    """
    tensor = as_tensor(x)
    tolerance = _tolerance(rtol)
    result: Tensor = _rank(svdvals_op(tensor), longer=_longer_side(tensor), rtol=tolerance)
    return result


def _longer_side(x: Tensor) -> Size:
    m, n = matrix_sizes(x.spec)
    return maximum(m, n)


# Pseudo-inverses and least squares --------------------------------------------------------------


def _inverse_parts(xp: Any, x: Any, rtol: float | None) -> tuple[Any, Any, Any]:
    """u, the reciprocals of the singular values that count (else 0), and vh."""
    u, s, vh = call_lapack(xp, lambda a: xp.linalg.svd(a, False), x, _NO_VALUES)
    kept = _significant_values(xp, s, max(x.shape[-2:]), rtol)
    return u, xp.where(kept, 1 / xp.where(kept, s, 1), s.dtype.type(0)), vh


def _infer_pinv(x: TensorSpec, rtol: float | None) -> TensorSpec:
    m, n = matrix_sizes(x)
    return x.with_shape((*x.shape[:-2], n, m))


def _pinv_kernel(xp: Any, x: Any, rtol: float | None) -> Any:
    u, inverse, vh = _inverse_parts(xp, x, rtol)
    result = xp.matmul(array_adjoint(vh) * inverse[..., None, :], array_adjoint(u))
    return cast_result(xp, result, x.dtype)


def _pinv_vjp(g: Tensor, y: Tensor, x: Tensor, rtol: float | None) -> tuple[Tensor]:
    """dP = -P·dx·P + P·Pᴴ·dxᴴ·(1 - xP) + (1 - Px)·dxᴴ·Pᴴ·P, among matrices of one rank."""
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
    """The Moore-Penrose inverse (…, n, m) of each matrix (…, m, n).

    Args:
        rtol: singular values up to rtol times the largest count as 0; by default the larger of m
            and n times the dtype's epsilon. The gradient takes the rank as fixed.

    Raises:
        ShapeError: x has no two axes.
        DTypeError: not float or complex.
        ArgumentError: rtol is no number, or negative.

    Source: Golub & Pereyra, SIAM J. Numer. Anal. 10(2), 1973.
    """
    result: Tensor = pinv_op(as_tensor(x), rtol=_tolerance(rtol))
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
    """From the differential of the pseudo-inverse P: with z = Pᴴg and the residual r = b - a·y,
    ga = -z·yᴴ + r·(P·z)ᴴ + (Pᴴy)·(g - aᴴz)ᴴ."""

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
    """The x of least norm that minimises the norm of a @ x - b, by singular values.

    Args:
        a: matrices (…, m, n) of any rank; leading axes broadcast with b's.
        b: right sides (…, m, k), or one vector (m,).
        rtol: see `pinv`.

    Raises:
        ShapeError: the rows differ.
        DTypeError: not float or complex.
        ArgumentError: rtol is no number, or negative.

    Source: Golub & Pereyra, SIAM J. Numer. Anal. 10(2), 1973.
    """
    a, b = promote_inputs("lstsq", (a, b))
    attrs: dict[str, Any] = {"adjoint": False, "rtol": _tolerance(rtol)}
    if b.ndim == 1:
        return squeeze(lstsq_op(a, expand_dims(b, 1), **attrs), -1)
    result: Tensor = lstsq_op(a, b, **attrs)
    return result


__all__ = ["lstsq", "matrix_rank", "pinv", "svd", "svdvals"]
