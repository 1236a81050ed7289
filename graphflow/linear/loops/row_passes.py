"""Passes over rows: dual coordinate ascent on dense and sparse matrices.

A pass visits the rows that `order` names. Each visit sets the row's dual variable to its best value
and updates the weights, which are w = Xᵀβ / l2. With a bias, w has one more element, the weight of
a column of that constant.
"""

from __future__ import annotations

from typing import Any

from graphflow.linear.loops.coordinate_orders import shuffle
from graphflow.linear.loops.dot_products import dense_add, dense_dot, sparse_add, sparse_dot
from graphflow.linear.loops.dual_steps import best_dual
from graphflow.ops.kernels.compiled_loops.memory_hints import prefetch

INF = float("inf")
AHEAD = 4
"""Rows between the one that is visited and the one whose entries are fetched."""


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


def gap_of(a: float, c: float, slope: float, is_squared: bool) -> float:
    """Return the gap of a row: its loss and its conjugate, and a times its margin.

    Args:
        a: its dual variable times its target.
        c: its weight.
        slope: its margin less 1.
    """
    loss = max(0.0, -slope)
    if is_squared:
        return c * loss * loss + a * (a / (4.0 * c) + slope)
    return c * loss + a * slope


def dense_svm_rows(
    order: Any, active: int, bounds: Any, x: Any, d: int, squares: Any, y: Any, c: Any,
    is_squared: bool, inverse: float, bias: float, beta: Any, w: Any,
) -> int:  # fmt: skip
    """Visit the first `active` rows of `order` for a (squared) hinge loss.

    Rows at a bound that nothing moves go behind the active ones.

    Args:
        bounds: (5,) the least and greatest projected slope that keep a row active; those of this
            pass, which are written; and the sum of the gaps of the rows, as they were visited.

    Returns:
        how many rows stay active.
    """
    least, most, gap = INF, -INF, 0.0
    k = 0
    while k < active:
        i = order[k]
        top = INF if is_squared else c[i]
        a = y[i] * beta[i]
        slope = y[i] * (dense_dot(x, i * d, w, d) + bias * w[d]) - 1.0
        gap += gap_of(a, c[i], slope, is_squared)
        slope += a / (2.0 * c[i]) if is_squared else 0.0
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
    bounds[4] = gap
    return active


def sparse_svm_rows(
    order: Any, active: int, bounds: Any, values: Any, places: Any, offsets: Any, d: int,
    squares: Any, y: Any, c: Any, is_squared: bool, inverse: float, bias: float, beta: Any, w: Any,
) -> int:  # fmt: skip
    """Visit rows of a sparse matrix in CSR form; otherwise as `dense_svm_rows`."""
    least, most, gap = INF, -INF, 0.0
    k = 0
    while k < active:
        i = order[k]
        if k + 2 * AHEAD < active:
            far, near = order[k + 2 * AHEAD], int(offsets[order[k + AHEAD]])
            prefetch(offsets, far)
            prefetch(y, far)
            prefetch(c, far)
            prefetch(beta, far)
            prefetch(squares, far)
            prefetch(values, near)
            prefetch(values, near + 8)
            prefetch(values, near + 16)
            prefetch(places, near)
            prefetch(places, near + 16)
        first, stop = int(offsets[i]), int(offsets[i + 1])
        top = INF if is_squared else c[i]
        a = y[i] * beta[i]
        slope = y[i] * (sparse_dot(values, places, first, stop, w) + bias * w[d]) - 1.0
        gap += gap_of(a, c[i], slope, is_squared)
        slope += a / (2.0 * c[i]) if is_squared else 0.0
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
    bounds[4] = gap
    return active


def dense_svm_passes(
    visits: int, enough: float, state: Any, order: Any, bounds: Any, x: Any, d: int, squares: Any,
    y: Any, c: Any, is_squared: bool, inverse: float, bias: float, beta: Any, w: Any,
) -> int:  # fmt: skip
    """Pass over the active rows until their gaps add up to little, or there were enough visits.

    Args:
        visits: the number of visits after which no pass begins.
        enough: the sum of gaps that ends the work.
        state: (2,) the number of active rows, and the seed of their order; both follow.
        order, bounds: as of `dense_svm_rows`.

    Returns:
        the number of visits.
    """
    visited, gap = 0, INF
    while visited < visits and gap > enough:
        state[1] = shuffle(order, state[0], state[1])
        visited += state[0]
        state[0] = dense_svm_rows(
            order, state[0], bounds, x, d, squares, y, c, is_squared, inverse, bias, beta, w
        )
        gap = widen_bounds(bounds)
    return visited


def sparse_svm_passes(
    visits: int, enough: float, state: Any, order: Any, bounds: Any, values: Any, places: Any,
    offsets: Any, d: int, squares: Any, y: Any, c: Any, is_squared: bool, inverse: float,
    bias: float, beta: Any, w: Any,
) -> int:  # fmt: skip
    """Pass over rows of a sparse matrix in CSR form; otherwise as `dense_svm_passes`."""
    visited, gap = 0, INF
    while visited < visits and gap > enough:
        state[1] = shuffle(order, state[0], state[1])
        visited += state[0]
        state[0] = sparse_svm_rows(
            order, state[0], bounds, values, places, offsets, d, squares, y, c, is_squared,
            inverse, bias, beta, w,
        )  # fmt: skip
        gap = widen_bounds(bounds)
    return visited


def widen_bounds(bounds: Any) -> float:
    """Let the next pass keep the rows whose slopes are within those of the last; return its gap."""
    bounds[0] = bounds[2] if bounds[2] < 0.0 else -INF
    bounds[1] = bounds[3] if bounds[3] > 0.0 else INF
    return float(bounds[4])


def sparse_squares(values: Any, offsets: Any, squares: Any) -> None:
    """Write the squared norm of each row of a sparse matrix in CSR form."""
    for i in range(len(squares)):
        total = 0.0
        for p in range(int(offsets[i]), int(offsets[i + 1])):
            total += float(values[p]) * float(values[p])
        squares[i] = total
