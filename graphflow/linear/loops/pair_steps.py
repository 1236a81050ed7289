"""Sequential minimal optimisation: two dual variables at a time, whose sum of y·α stays.

    minimise over α:   ½ αᵀQα - Σ α,   Q_ij = y_i y_j K_ij,   0 ≤ α_i ≤ c_i,   Σ y_i α_i = 0

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


def optimize_pairs(
    m: int, kernel: Any, y: Any, c: Any, alpha: Any, gradient: Any, tol: float, most: int
) -> int:
    """Take steps until no pair violates its condition by more than `tol`; return their number.

    Args:
        m: the number of variables.
        kernel: (m * m,) K of their rows.
        y, c: (m,) labels -1 and 1, and upper bounds.
        alpha: (m,) the variables; follow.
        gradient: (m,) Qα - 1; follows.
        most: steps, at most.
    """
    steps = 0
    while steps < most:
        i, highest = -1, -INF
        for t in range(m):
            up = -y[t] * gradient[t]
            if up > highest and can_rise(y[t], alpha[t], c[t]):
                i, highest = t, up
        if i < 0:
            break
        j, lowest, best = -1, INF, -INF
        for t in range(m):
            if can_fall(y[t], alpha[t], c[t]):
                up = -y[t] * gradient[t]
                lowest = min(lowest, up)
                gain = highest - up
                if gain > 0.0:
                    curved = kernel[i * m + i] + kernel[t * m + t] - 2.0 * kernel[i * m + t]
                    curved = max(curved, 1e-12)
                    if gain * gain / curved > best:
                        j, best = t, gain * gain / curved
        if j < 0 or highest - lowest < tol:
            break
        curved = kernel[i * m + i] + kernel[j * m + j] - 2.0 * kernel[i * m + j]
        step = (highest + y[j] * gradient[j]) / max(curved, 1e-12)
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
        for t in range(m):
            gradient[t] += y[t] * step * (kernel[i * m + t] - kernel[j * m + t])
        steps += 1
    return steps
