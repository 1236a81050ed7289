"""Sequential minimal optimisation: two dual variables at a time, whose sum of y·α stays.

    minimise over α:   ½ αᵀQα - Σ α,   Q_ij = y_i y_j K_ij,   0 ≤ α_i ≤ c_i,   Σ y_i α_i = 0

Loops run over whole arrays without branches, so that they become vectors: variables that may not
rise count with a slope of -∞, those that may not fall with ∞.

Source: Fan, Chen and Lin, JMLR 2005 (working pairs by second-order information).
"""

from __future__ import annotations

from typing import Any

INF = float("inf")


def can_rise(y: float, a: float, c: float) -> bool:
    """Return True if y·α may grow."""
    return a < c if y > 0.0 else a > 0.0


def can_fall(y: float, a: float, c: float) -> bool:
    """Return True if y·α may shrink."""
    return a > 0.0 if y > 0.0 else a < c


def largest(x: Any, m: int) -> float:
    """Return the largest of m numbers."""
    m0 = m1 = m2 = m3 = m4 = m5 = m6 = m7 = -INF
    t = 0
    while t + 8 <= m:
        m0 = max(m0, x[t])
        m1 = max(m1, x[t + 1])
        m2 = max(m2, x[t + 2])
        m3 = max(m3, x[t + 3])
        m4 = max(m4, x[t + 4])
        m5 = max(m5, x[t + 5])
        m6 = max(m6, x[t + 6])
        m7 = max(m7, x[t + 7])
        t += 8
    while t < m:
        m0 = max(m0, x[t])
        t += 1
    return max(m0, m1, m2, m3, m4, m5, m6, m7)


def find(x: Any, m: int, value: float) -> int:
    """Return the first place of a number, or m."""
    t = 0
    while t < m and x[t] != value:
        t += 1
    return t


def score_partners(
    m: int, row: Any, diagonal: Any, own: float, highest: float, fall: Any, scores: Any
) -> None:
    """Write what a step with each partner gains, twice; 0 for those that gain nothing."""
    for t in range(m):
        gain = max(highest + fall[t], 0.0)
        scores[t] = gain * gain / max(own + diagonal[t] - 2.0 * row[t], 1e-12)


def move(m: int, step: float, first: Any, second: Any, rise: Any, fall: Any) -> None:
    """Change the slopes by a step of two rows."""
    for t in range(m):
        change = step * (first[t] - second[t])
        rise[t] -= change
        fall[t] += change


def optimize_pairs(
    m: int, kernel: Any, y: Any, c: Any, alpha: Any, gradient: Any, work: Any, tol: float,
    most: int,
) -> int:  # fmt: skip
    """Take steps until no pair violates its condition by more than `tol`; return their number.

    Args:
        m: the number of variables.
        kernel: (m * m,) K of their rows.
        y, c: (m,) labels -1 and 1, and upper bounds.
        alpha: (m,) the variables; follow.
        gradient: (m,) Qα - 1; follows.
        work: (4 * m,) room.
        most: steps, at most.
    """
    rise, fall = work[0:m], work[m : 2 * m]
    scores, diagonal = work[2 * m : 3 * m], work[3 * m : 4 * m]
    for t in range(m):
        up = -y[t] * gradient[t]
        rise[t] = up if can_rise(y[t], alpha[t], c[t]) else -INF
        fall[t] = -up if can_fall(y[t], alpha[t], c[t]) else -INF
        diagonal[t] = kernel[t * m + t]
    steps = 0
    while steps < most:
        highest, lowest = largest(rise, m), -largest(fall, m)
        if highest == -INF or lowest == INF or highest - lowest < tol:
            break
        i = find(rise, m, highest)
        first = kernel[i * m : i * m + m]
        score_partners(m, first, diagonal, diagonal[i], highest, fall, scores)
        j = find(scores, m, largest(scores, m))
        curved = diagonal[i] + diagonal[j] - 2.0 * first[j]
        step = (highest + fall[j]) / max(curved, 1e-12)
        room_i = c[i] - alpha[i] if y[i] > 0.0 else alpha[i]
        room_j = alpha[j] if y[j] > 0.0 else c[j] - alpha[j]
        step = min(step, room_i, room_j)
        ends_i, ends_j = step >= room_i, step >= room_j
        alpha[i] += y[i] * step
        alpha[j] -= y[j] * step
        if ends_i:
            alpha[i] = c[i] if y[i] > 0.0 else 0.0
        if ends_j:
            alpha[j] = 0.0 if y[j] > 0.0 else c[j]
        second = kernel[j * m : j * m + m]
        move(m, step, first, second, rise, fall)
        up_i, up_j = rise[i], -fall[j]
        rise[i] = up_i if can_rise(y[i], alpha[i], c[i]) else -INF
        fall[i] = -up_i if can_fall(y[i], alpha[i], c[i]) else -INF
        rise[j] = up_j if can_rise(y[j], alpha[j], c[j]) else -INF
        fall[j] = -up_j if can_fall(y[j], alpha[j], c[j]) else -INF
        steps += 1
    for t in range(m):
        gradient[t] = -y[t] * rise[t] if rise[t] > -INF else y[t] * fall[t]
    return steps
