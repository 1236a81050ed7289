"""Singular values: svd, svdvals and matrix_rank. Public in `gf.linalg`.

Equal singular values have no unique vectors: see `confluent.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow.errors import ArgumentError, DifferentiationError
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
    Size,
    TensorSpec,
    maximum,
    minimum,
    real_dtype,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import is_zeros
from graphflow.ops.matrices.linalg import confluent
from graphflow.ops.matrices.linalg.matrix_rules import adjoint as adjoint_of
from graphflow.ops.matrices.linalg.matrix_rules import (
    call_lapack,
    cast_result,
    cubic_cost,
    identity,
    make_distinct_spectrum,
    match_kind,
    matrix_sizes,
    per_column,
    per_row,
    times,
)
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.shape import squeeze

M33, M42 = spec("float32", (3, 3)), spec("float32", (4, 2))
BATCH35 = spec("float32", (2, 3, 5))
C43 = spec("complex64", (4, 3))
# Without complex samples: LAPACK chooses the phase of complex vectors, and finite differences would
# see it change.
REAL = (M33, M42, BATCH35)
SHAPES = (*REAL, C43)
NO_SINGULAR_VALUES = "has no singular values that LAPACK could find; does it hold NaN or infinity?"


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
    u, s, vh = call_lapack(xp, lambda a: xp.linalg.svd(a, full_matrices), x, NO_SINGULAR_VALUES)
    return (
        cast_result(xp, u, x.dtype),
        cast_result(xp, s, real_dtype(x.dtype)),
        cast_result(xp, vh, x.dtype),
    )


def _svdvals_kernel(xp: Any, x: Any) -> Any:
    s = call_lapack(xp, lambda a: xp.linalg.svd(a, compute_uv=False), x, NO_SINGULAR_VALUES)
    return cast_result(xp, s, real_dtype(x.dtype))


def _svd_vjp(
    g: tuple[Tensor, Tensor, Tensor],
    y: tuple[Tensor, Tensor, Tensor],
    x: Tensor,
    full_matrices: bool,
) -> tuple[Tensor]:
    """Return U·((skew(Uᴴ·gU)∘E)·S + S·(skew(Vᴴ·gV)∘E) + diag(gS))·Vᴴ plus parts outside the spans.

    Eᵢⱼ is 1/(sⱼ² - sᵢ²). Half the sum of both skew parts is divided by sⱼ - sᵢ, half their
    difference by sⱼ + sᵢ.
    """
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
        """Return the divisor of each part; sums keep a diagonal if u has a phase against v."""
        is_complex = x.dtype.kind == "c"
        sums = per_column(s) + per_row(s) if is_complex else confluent.pairwise_differences(s, 1)
        return [confluent.pairwise_differences(s), sums, per_column(s), per_column(s)]

    size, error, bottoms = confluent.largest_magnitude(s), confluent.rounding_error(s), divisors(s)
    close = [confluent.is_close(b, size) for b in bottoms]
    steps = (per_column(confluent.separation_slopes(s, near)) for near in (None, close[0]))
    apart = squeeze(FUNCTIONS["where"](close[2], *steps), -2)  # apart from 0, or from each other
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
    """Return Uᴴ·gU, Vᴴ·gV, half the sum and half the difference of their skew parts, and two more.

    The last two are the parts of gU and gV outside the spans of U and V.
    """
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
    """Factor x into u·diag(s)·vh: u and vhᴴ have orthonormal columns, s >= 0 is descending.

    Args:
        x: matrices (…, m, n), float or complex; k is the smaller of m and n.
        full_matrices: True: u is (…, m, m) and vh (…, n, n), with a gradient only if m = n. False:
            u is (…, m, k) and vh (…, k, n).

    Returns:
        (u, s, vh); s is (…, k) and real. LAPACK chooses the sign (phase) of each pair of vectors,
        so functions of vectors should not depend on it.

    Raises:
        ShapeError: x has fewer than two axes.
        DTypeError: x is neither float nor complex.
        ArgumentError: full_matrices is not a bool.
        CheckError: from the step, if the iterations do not converge.

    Source: Townsend, "Differentiating the singular value decomposition", 2016; Seeger et al.,
    "Auto-differentiating linear algebra", arXiv:1710.08717.
    """
    if not isinstance(full_matrices, bool):
        raise ArgumentError(f"full_matrices must be True or False, got {full_matrices!r}")
    u, s, vh = svd_op(as_tensor(x), full_matrices=full_matrices)
    return u, s, vh


@composite("x", to="high")
@function
def svdvals(x: Any) -> Tensor:
    """Compute the singular values of matrices x (…, m, n), descending: (…, min(m, n)), real.

    Raises:
        ShapeError, DTypeError, CheckError: as `svd`.
    """
    result: Tensor = svdvals_op(as_tensor(x))
    return result


# Ranks ------------------------------------------------------------------------------------------


def require_tolerance(rtol: Any) -> float | None:
    if rtol is None:
        return None
    if isinstance(rtol, bool) or not isinstance(rtol, int | float) or not rtol >= 0:
        raise ArgumentError(f"rtol must be a number that is not negative, got {rtol!r}")
    return float(rtol)


def _infer_rank(s: TensorSpec, longer: Size, rtol: float | None) -> TensorSpec:
    return TensorSpec(s.shape[:-1], spec("int64").dtype)


def significant_values(xp: Any, s: Any, longer: int, rtol: float | None) -> Any:
    """Return which singular values exceed rtol times the largest.

    By default rtol is the rounding error of a matrix with `longer` rows or columns.
    """
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
            xp.count_nonzero(significant_values(xp, s, longer, rtol), axis=-1), "int64"
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
    """Count the singular values of each matrix of x (…, m, n) above rtol times the largest; int64.

    Args:
        rtol: default: the larger of m and n times the dtype's epsilon.

    Raises:
        ShapeError: x has fewer than two axes.
        DTypeError: x is neither float nor complex.
        ArgumentError: rtol is no number, or negative.
    """
    tensor = as_tensor(x)
    tolerance = require_tolerance(rtol)
    result: Tensor = _rank(svdvals_op(tensor), longer=_longer_side(tensor), rtol=tolerance)
    return result


def _longer_side(x: Tensor) -> Size:
    m, n = matrix_sizes(x.spec)
    return maximum(m, n)


__all__ = ["matrix_rank", "svd", "svdvals"]
