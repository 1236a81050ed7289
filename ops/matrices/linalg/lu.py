"""LU decomposition with partial pivoting. Public in `gf.linalg`.

Its gradient is made of products and triangular solves, so it can be differentiated again.
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import DifferentiationError
from graphflow.ir.op import FUNCTIONS, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import TensorSpec, minimum, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.matrices.linalg.matrix_rules import (
    adjoint,
    cubic_cost,
    make_distinct_spectrum,
    matrix_sizes,
    per_column,
    per_row,
    times,
)
from graphflow.ops.matrices.linalg.solve import solve_triangle, triangular_solve_op
from graphflow.ops.matrices.triangles import tril, triu
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.slicing import concat, window
from graphflow.ops.tensors.take_along_axis import take_along_axis

_PANEL = 32
"""Columns up to which products of matrices would be too small to gain anything."""


def _infer_lu(x: TensorSpec) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    m, n = matrix_sizes(x)
    k = minimum(m, n)
    return (
        x.with_shape(x.shape[:-1]).with_dtype("int64"),
        x.with_shape((*x.shape[:-1], k)),
        x.with_shape((*x.shape[:-2], k, n)),
    )


def _lu_kernel(xp: Any, x: Any) -> tuple[Any, Any, Any]:
    m, n = x.shape[-2:]
    k = min(m, n)
    rest = x.copy()
    order = _factor_columns(xp, rest[..., :k])
    if n > k:
        right = _take_rows(xp, rest[..., k:], order)
        rest[..., k:] = solve_triangle(
            xp, rest[..., :k], right, lower=True, adjoint=False, unit_diagonal=True
        )
    lower = xp.tril(rest[..., :k], -1)
    diagonal = xp.arange(k)
    lower[..., diagonal, diagonal] = 1
    return order, lower, xp.triu(rest[..., :k, :])


def _factor_columns(xp: Any, a: Any) -> Any:
    """Replace the columns of a (…, m, n), m >= n, by both triangles; return the order of the rows.

    The left half of the columns is factored first, then what it leaves of the right half. So most
    of the work is products of matrices.

    Source: Toledo, "Locality of reference in LU decomposition with partial pivoting", SIMAX 18(4),
    1997.
    """
    n = a.shape[-1]
    if n <= _PANEL:
        return _factor_panel(xp, a)
    half = n // 2
    left, right = a[..., :half], a[..., half:]
    order = _factor_columns(xp, left)
    right[...] = _take_rows(xp, right, order)
    top = solve_triangle(
        xp, left[..., :half, :], right[..., :half, :], lower=True, adjoint=False, unit_diagonal=True
    )
    right[..., :half, :] = top
    right[..., half:, :] -= xp.matmul(left[..., half:, :], top)
    below = _factor_columns(xp, right[..., half:, :])
    left[..., half:, :] = _take_rows(xp, left[..., half:, :], below)
    order[..., half:] = xp.take_along_axis(order[..., half:], below, -1)
    return order


def _factor_panel(xp: Any, a: Any) -> Any:
    """Factor a few columns, one by one."""
    order = xp.broadcast_to(xp.arange(a.shape[-2]), a.shape[:-1])[..., None].copy()
    for j in range(a.shape[-1]):
        pivot = xp.abs(a[..., j:, j]).argmax(-1)[..., None, None]
        places = xp.arange(a.shape[-2] - j)[:, None]
        exchanged = xp.where(places == 0, pivot, xp.where(places == pivot, 0, places))
        for rows in (order[..., j:, :], a[..., j:, :]):
            rows[...] = xp.take_along_axis(rows, exchanged, -2)
        top = a[..., j : j + 1, j : j + 1]
        a[..., j + 1 :, j : j + 1] /= xp.where(top == 0, 1, top)
        a[..., j + 1 :, j + 1 :] -= a[..., j + 1 :, j : j + 1] * a[..., j : j + 1, j + 1 :]
    return order[..., 0]


def _take_rows(xp: Any, x: Any, order: Any) -> Any:
    return xp.take_along_axis(x, order[..., None], -2)


def _lu_vjp(g: tuple[Tensor, ...], y: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor]:
    """Return Pᵀ·L⁻ᴴ·(Λ(Lᴴ·gL) + Υ(gU·Uᴴ))·U⁻ᴴ for square x.

    Λ takes the triangle below the diagonal, Υ the rest. The rows below a square part have
    L₂ = X₂·U⁻¹, and the columns beside it U₂ = L⁻¹·X₂.
    """
    m, n = x.shape[-2:]
    _, g_lower, g_upper = g
    order, lower, upper = y
    if m != n and not (isinstance(m, int) and isinstance(n, int)):
        raise DifferentiationError(
            f"which side of {x.spec} is longer is not known while the graph is built; give known "
            "sizes to the matrices whose lu is differentiated"
        )
    k, rows, columns = minimum(m, n), x.ndim - 2, x.ndim - 1
    inner = tril(times(lower, g_lower, adjoint_a=True), k=-1)  # later less gU₂·U₂ᴴ
    outer = triu(times(g_upper, upper, adjoint_b=True))
    square_lower, square_upper = lower, upper
    if m != k:
        square_lower, below = window(lower, rows, 0, k), window(lower, rows, k, m - k)
        g_below = window(g_lower, rows, k, m - k)
        inner = tril(times(square_lower, window(g_lower, rows, 0, k), adjoint_a=True), k=-1)
        outer = outer - triu(times(below, g_below, adjoint_a=True))
    if n != k:
        square_upper, beside = window(upper, columns, 0, k), window(upper, columns, k, n - k)
        g_beside = window(g_upper, columns, k, n - k)
        inner = inner - tril(times(g_beside, beside, adjoint_b=True), k=-1)
        outer = triu(times(window(g_upper, columns, 0, k), square_upper, adjoint_b=True))
    solved = _over_lower(square_lower, _over_upper(square_upper, inner + outer))
    if m != k:
        solved = concat([solved, _over_upper(square_upper, g_below)], rows)
    if n != k:
        solved = concat([solved, _over_lower(square_lower, g_beside)], columns)
    back = FUNCTIONS["argsort"](order, axis=-1)
    return (take_along_axis(solved, FUNCTIONS["broadcast_to"](per_row(back), x.shape), axis=-2),)


def _over_lower(lower: Tensor, b: Tensor) -> Tensor:
    """Return L⁻ᴴ·b."""
    solved: Tensor = triangular_solve_op(lower, b, lower=True, adjoint=True, unit_diagonal=True)
    return solved


def _over_upper(upper: Tensor, b: Tensor) -> Tensor:
    """Return b·U⁻ᴴ."""
    return adjoint(
        triangular_solve_op(upper, adjoint(b), lower=False, adjoint=False, unit_diagonal=False)
    )


# The order of x's rows, and the triangles with x[order] = lower @ upper.
lu_op = register(
    Op(
        "lu",
        infer=_infer_lu,
        kernel=_lu_kernel,
        vjp=_lu_vjp,
        batch=batching.rows,
        sharding=sharding.matrix_rule(2, outputs=(1, 2, 2)),
        cost=cubic_cost(1),
        autocast="high",
        samples=tuple(
            sample(spec(dtype, shape), make=make_distinct_spectrum)
            for dtype, shape in (
                ("float32", (3, 3)), ("float32", (2, 4, 2)), ("float32", (2, 3)),
                ("complex64", (3, 3)),
            )
        ),
    )
)  # fmt: skip


@composite("x", to="high")
@function
def lu(x: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Factor x into p @ l @ u: a permutation, and a lower and an upper triangle.

    The rows are ordered by partial pivoting. To solve a system, `solve` is shorter: it factors a
    matrix once for all columns of its right side.

    Args:
        x: matrices (…, m, n), float or complex, also singular ones. For k the smaller of m and n,
            the gradient needs the first k columns to be linearly independent. It holds as long as
            the order of the rows stays.

    Returns:
        p (…, m, m) of the dtype of x, l (…, m, k) with ones on its diagonal, and u (…, k, n). p has
        no gradient.

    Raises:
        ShapeError: x has fewer than two axes.
        DTypeError: x is neither float nor complex.
        DifferentiationError: a gradient is built for sizes of which the smaller is not known.
        CheckError: from a step that takes the gradient, if the diagonal of u holds a 0.

    Source of the gradient: Seeger et al., "Auto-differentiating linear algebra", arXiv:1710.08717.
    """
    tensor = as_tensor(x)
    order, lower, upper = lu_op(tensor)
    m = tensor.shape[-2]
    chosen = FUNCTIONS["equal"](per_row(FUNCTIONS["arange"](m)), per_column(order))
    return FUNCTIONS["astype"](chosen, lower.dtype), lower, upper


__all__ = ["lu"]
