"""Cycles of coordinate descent on a squared loss with l1 and l2 penalties, column by column.

    minimise over w, b:   ½ Σ_i (z_i - x_i·w - b s_i)² + l1 |w|₁ + l2/2 |w|²

The first pass of a cycle visits all columns; further passes visit those in use, whose coefficients
are not 0. The coefficients after each pass are kept, for extrapolation. A column violates its
condition by the change of its coefficient times its curvature. A pass in which no column violates
it by more than a limit ends the cycle.

All functions return the number of passes, or 0 if the first one kept to the limit.
"""

from __future__ import annotations

from typing import Any

from graphflow.linear.loops.column_passes import shrink
from graphflow.linear.loops.dot_products import dense_add, dense_dot, sparse_add, sparse_dot


def cycle_products(
    most: int, gram: Any, slopes: Any, w: Any, kept: Any, l1: float, l2: float, is_positive: bool,
    limit: float,
) -> int:  # fmt: skip
    """Run a cycle on columns whose products with each other are known.

    Args:
        most: the number of passes, at most.
        gram: (m * m,) XᵀX of the columns.
        slopes: (m,) Xᵀ residual; follows.
        w: (m,) coefficients; follow.
        kept: (most * m,) receives the coefficients after each pass.
        limit: of violations.
    """
    m = len(w)
    for turn in range(most):
        worst = 0.0
        for j in range(m):
            old = w[j]
            curvature = gram[j * m + j] + l2
            if curvature > 0.0 and (turn == 0 or old != 0.0):
                new = shrink(slopes[j] + gram[j * m + j] * old, l1, curvature, is_positive)
                if new != old:
                    w[j] = new
                    dense_add(gram, j * m, old - new, slopes, m)
                    worst = max(worst, curvature * (new - old), curvature * (old - new))
            kept[turn * m + j] = w[j]
        if worst <= limit:
            return 0 if turn == 0 else turn + 1
    return most


def cycle_dense(
    most: int, places: Any, x: Any, n: int, squares: Any, residual: Any, w: Any, kept: Any,
    l1: float, l2: float, is_positive: bool, limit: float,
) -> int:  # fmt: skip
    """Run a cycle on dense columns; without b, since the caller centres them.

    Args:
        most, w, kept, limit: as of `cycle_products`.
        places: (m,) where the columns stand in the matrix.
        x: (columns * n,) the matrix, column by column.
        squares: (m,) squared norms of the columns.
        residual: (n,) follows.
    """
    m = len(w)
    for turn in range(most):
        worst = 0.0
        for j in range(m):
            old = w[j]
            curvature = squares[j] + l2
            if curvature > 0.0 and (turn == 0 or old != 0.0):
                slope = dense_dot(x, places[j] * n, residual, n)
                new = shrink(slope + squares[j] * old, l1, curvature, is_positive)
                if new != old:
                    w[j] = new
                    dense_add(x, places[j] * n, old - new, residual, n)
                    worst = max(worst, curvature * (new - old), curvature * (old - new))
            kept[turn * m + j] = w[j]
        if worst <= limit:
            return 0 if turn == 0 else turn + 1
    return most


def cycle_sparse(
    most: int, values: Any, rows: Any, offsets: Any, squares: Any, sums: Any, total: float,
    residual: Any, shift: Any, w: Any, kept: Any, l1: float, l2: float, is_positive: bool,
    limit: float,
) -> int:  # fmt: skip
    """Run a cycle on sparse columns in CSC form; b follows each step.

    Args:
        most, w, kept, limit: as of `cycle_products`.
        squares: (m,) squared norms of the columns, after the best b for each.
        sums: (m,) products of the columns and s; 0 without b.
        total: the squared norm of s.
        residual: (n,) the residual is `residual + shift * s`; both follow.
        shift: (1,).
    """
    m = len(w)
    beside = shift[0]
    for turn in range(most):
        worst = 0.0
        for j in range(m):
            old = w[j]
            curvature = squares[j] + l2
            if curvature > 0.0 and (turn == 0 or old != 0.0):
                first, stop = int(offsets[j]), int(offsets[j + 1])
                slope = sparse_dot(values, rows, first, stop, residual) + beside * sums[j]
                new = shrink(slope + squares[j] * old, l1, curvature, is_positive)
                if new != old:
                    w[j] = new
                    sparse_add(values, rows, first, stop, old - new, residual)
                    beside += (new - old) * sums[j] / total
                    worst = max(worst, curvature * (new - old), curvature * (old - new))
            kept[turn * m + j] = w[j]
        if worst <= limit:
            shift[0] = beside
            return 0 if turn == 0 else turn + 1
    shift[0] = beside
    return most


def add_columns(places: Any, x: Any, n: int, w: Any, out: Any) -> None:
    """Add the products of dense columns and their coefficients to an array; see `cycle_dense`."""
    for j in range(len(places)):
        if w[j] != 0.0:
            dense_add(x, places[j] * n, w[j], out, n)


def multiply_columns(places: Any, x: Any, n: int, residual: Any, out: Any) -> None:
    """Write the product of each dense column and the residual; see `cycle_dense`."""
    for j in range(len(places)):
        out[j] = dense_dot(x, places[j] * n, residual, n)


def square_columns(places: Any, x: Any, n: int, out: Any) -> None:
    """Write the squared norm of each dense column; see `cycle_dense`."""
    for j in range(len(places)):
        s0 = s1 = s2 = s3 = 0.0
        p, stop = places[j] * n, places[j] * n + n
        while p + 4 <= stop:
            s0 += float(x[p]) * float(x[p])
            s1 += float(x[p + 1]) * float(x[p + 1])
            s2 += float(x[p + 2]) * float(x[p + 2])
            s3 += float(x[p + 3]) * float(x[p + 3])
            p += 4
        while p < stop:
            s0 += float(x[p]) * float(x[p])
            p += 1
        out[j] = (s0 + s2) + (s1 + s3)
