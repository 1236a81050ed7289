"""Passes over columns: coordinate descent on a weighted squared loss with l1 and l2 penalties.

    minimise over w:   ½ Σ_i h_i (z_i - x_i·w - b)² + l1 |w|₁ + l2/2 |w|²

The residual is z - Xw - b. With an intercept, b follows each step, so that the weighted residuals
always sum to 0. For a sparse matrix it is kept as `residual + shift`, and a step costs no more than
the column's entries.
"""

from __future__ import annotations

from typing import Any

from graphflow.linear.loops.dual_steps import soft


def shrink(z: float, l1: float, curvature: float, is_positive: bool) -> float:
    """Return the best coefficient of a column."""
    found = soft(z, l1) / curvature
    return max(found, 0.0) if is_positive else found


def dense_columns(
    order: Any, x: Any, n: int, curvatures: Any, means: Any, h: Any, residual: Any, w: Any,
    l1: float, l2: float, is_positive: bool,
) -> float:  # fmt: skip
    """Visit columns of a dense matrix; return the decrease.

    Args:
        order: the columns to visit.
        x: (columns * n,) the matrix, column by column.
        curvatures: (columns,) weighted squared norms of the columns less their means.
        means: (columns,) weighted means of the columns; 0 without an intercept.
        h: (n,) weights.
        residual: (n,) follows.
    """
    gained = 0.0
    for k in range(len(order)):
        j = order[k]
        curvature = curvatures[j] + l2
        if curvature <= 0.0:
            continue
        s0 = s1 = s2 = s3 = 0.0
        start, i = j * n, 0
        while i + 4 <= n:
            p = start + i
            s0 += float(x[p]) * (h[i] * residual[i])
            s1 += float(x[p + 1]) * (h[i + 1] * residual[i + 1])
            s2 += float(x[p + 2]) * (h[i + 2] * residual[i + 2])
            s3 += float(x[p + 3]) * (h[i + 3] * residual[i + 3])
            i += 4
        while i < n:
            s0 += float(x[start + i]) * (h[i] * residual[i])
            i += 1
        slope = (s0 + s2) + (s1 + s3)
        old = w[j]
        new = shrink(slope + curvatures[j] * old, l1, curvature, is_positive)
        change = new - old
        if change != 0.0:
            w[j] = new
            mean = means[j]
            for i in range(n):
                residual[i] -= change * (float(x[start + i]) - mean)
            gained += 0.5 * curvature * change * change
    return gained


def sparse_columns(
    order: Any, values: Any, rows: Any, offsets: Any, curvatures: Any, means: Any, h: Any,
    residual: Any, shift: Any, w: Any, l1: float, l2: float, is_positive: bool,
) -> float:  # fmt: skip
    """Visit columns of a sparse matrix in CSC form; otherwise as `dense_columns`.

    Args:
        shift: (1,) what every residual has beside its element of `residual`; follows.
    """
    gained, beside = 0.0, shift[0]
    for k in range(len(order)):
        j = order[k]
        curvature = curvatures[j] + l2
        if curvature <= 0.0:
            continue
        first, stop = int(offsets[j]), int(offsets[j + 1])
        s0 = s1 = 0.0
        p = first
        while p + 2 <= stop:
            a, b = int(rows[p]), int(rows[p + 1])
            s0 += float(values[p]) * (h[a] * (residual[a] + beside))
            s1 += float(values[p + 1]) * (h[b] * (residual[b] + beside))
            p += 2
        if p < stop:
            a = int(rows[p])
            s0 += float(values[p]) * (h[a] * (residual[a] + beside))
        slope = s0 + s1
        old = w[j]
        new = shrink(slope + curvatures[j] * old, l1, curvature, is_positive)
        change = new - old
        if change != 0.0:
            w[j] = new
            for p in range(first, stop):
                residual[rows[p]] -= change * float(values[p])
            beside += change * means[j]
            gained += 0.5 * curvature * change * change
    shift[0] = beside
    return gained
