"""Passes over rows: dual coordinate ascent on dense and sparse matrices.

A pass visits the rows that `order` names. Each visit sets the row's dual variable to its best value
and updates the weights, which are w = Xᵀβ / l2. With a bias, w has one more element, the weight of
a column of that constant.
"""

from __future__ import annotations

from typing import Any

from graphflow.linear.loops.dot_products import dense_add, dense_dot, sparse_add, sparse_dot
from graphflow.linear.loops.dual_steps import best_dual

INF = float("inf")


def dense_rows(
    order: Any, x: Any, d: int, squares: Any, y: Any, c: Any, loss: int, parameter: float,
    inverse: float, bias: float, beta: Any, w: Any,
) -> float:  # fmt: skip
    """Visit rows of a dense matrix; return the sum of |new - old| over c.

    Args:
        order: the rows to visit.
        x: (rows * d,) the matrix, row by row.
        squares: (rows,) squared norms of the rows, with the bias.
        inverse: 1 / l2.
    """
    moved = 0.0
    for k in range(len(order)):
        i = order[k]
        u = dense_dot(x, i * d, w, d) + bias * w[d]
        new = best_dual(loss, beta[i], u, squares[i] * inverse, y[i], c[i], parameter)
        change = new - beta[i]
        if change != 0.0:
            beta[i] = new
            dense_add(x, i * d, change * inverse, w, d)
            w[d] += change * inverse * bias
            moved += max(change, -change) / c[i]
    return moved


def sparse_rows(
    order: Any, values: Any, places: Any, offsets: Any, d: int, squares: Any, y: Any, c: Any,
    loss: int, parameter: float, inverse: float, bias: float, beta: Any, w: Any,
) -> float:  # fmt: skip
    """Visit rows of a sparse matrix in CSR form; otherwise as `dense_rows`."""
    moved = 0.0
    for k in range(len(order)):
        i = order[k]
        first, stop = int(offsets[i]), int(offsets[i + 1])
        u = sparse_dot(values, places, first, stop, w) + bias * w[d]
        new = best_dual(loss, beta[i], u, squares[i] * inverse, y[i], c[i], parameter)
        change = new - beta[i]
        if change != 0.0:
            beta[i] = new
            sparse_add(values, places, first, stop, change * inverse, w)
            w[d] += change * inverse * bias
            moved += max(change, -change) / c[i]
    return moved


def is_idle(a: float, top: float, slope: float, low: float, high: float) -> bool:
    """Return True if a variable lies at a bound, and the slope holds it there by a margin.

    Source: Hsieh et al., ICML 2008, section 3.3 (shrinking).
    """
    if a <= 0.0:
        return slope > high
    return a >= top and slope < low


def project(a: float, top: float, slope: float) -> float:
    """Return the slope within the bounds."""
    if a <= 0.0:
        return min(slope, 0.0)
    if a >= top:
        return max(slope, 0.0)
    return slope


def dense_svm_rows(
    order: Any, active: int, bounds: Any, x: Any, d: int, squares: Any, y: Any, c: Any,
    is_squared: bool, inverse: float, bias: float, beta: Any, w: Any,
) -> int:  # fmt: skip
    """Visit the first `active` rows of `order` for a (squared) hinge loss.

    Rows at a bound that nothing moves go behind the active ones.

    Args:
        bounds: (4,) the least and greatest projected slope that keep a row active; and those of
            this pass, which are written.

    Returns:
        how many rows stay active.
    """
    least, most = INF, -INF
    k = 0
    while k < active:
        i = order[k]
        top = INF if is_squared else c[i]
        a = y[i] * beta[i]
        u = dense_dot(x, i * d, w, d) + bias * w[d]
        slope = y[i] * u - 1.0 + (a / (2.0 * c[i]) if is_squared else 0.0)
        if is_idle(a, top, slope, bounds[0], bounds[1]):
            active -= 1
            order[k] = order[active]
            order[active] = i
            continue
        k += 1
        held = project(a, top, slope)
        least, most = min(least, held), max(most, held)
        if held > 1e-12 or held < -1e-12:
            q = squares[i] * inverse + (0.5 / c[i] if is_squared else 0.0)
            new = min(max(a - slope / q, 0.0), top) if q > 0.0 else top
            change = y[i] * (new - a)
            beta[i] = y[i] * new
            dense_add(x, i * d, change * inverse, w, d)
            w[d] += change * inverse * bias
    bounds[2] = least
    bounds[3] = most
    return active


def sparse_svm_rows(
    order: Any, active: int, bounds: Any, values: Any, places: Any, offsets: Any, d: int,
    squares: Any, y: Any, c: Any, is_squared: bool, inverse: float, bias: float, beta: Any, w: Any,
) -> int:  # fmt: skip
    """Visit rows of a sparse matrix in CSR form; otherwise as `dense_svm_rows`."""
    least, most = INF, -INF
    k = 0
    while k < active:
        i = order[k]
        first, stop = int(offsets[i]), int(offsets[i + 1])
        top = INF if is_squared else c[i]
        a = y[i] * beta[i]
        u = sparse_dot(values, places, first, stop, w) + bias * w[d]
        slope = y[i] * u - 1.0 + (a / (2.0 * c[i]) if is_squared else 0.0)
        if is_idle(a, top, slope, bounds[0], bounds[1]):
            active -= 1
            order[k] = order[active]
            order[active] = i
            continue
        k += 1
        held = project(a, top, slope)
        least, most = min(least, held), max(most, held)
        if held > 1e-12 or held < -1e-12:
            q = squares[i] * inverse + (0.5 / c[i] if is_squared else 0.0)
            new = min(max(a - slope / q, 0.0), top) if q > 0.0 else top
            change = y[i] * (new - a)
            beta[i] = y[i] * new
            sparse_add(values, places, first, stop, change * inverse, w)
            w[d] += change * inverse * bias
    bounds[2] = least
    bounds[3] = most
    return active
