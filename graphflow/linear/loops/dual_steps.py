"""One dual variable at a time: the best value of β_i while all others stay.

It maximises -q/2 (β - old)² - u (β - old) - c ℓ*(y, -β/c), where u is the row's prediction and q
its squared norm over l2.
"""

from __future__ import annotations

from math import exp, log


def best_dual(
    loss: int, old: float, u: float, q: float, y: float, c: float, parameter: float
) -> float:
    """Return the best dual variable of a row.

    Args:
        loss: the code of the loss, see `graphflow.linear.losses`.
        old: the variable.
        u: the prediction of the row.
        q: the squared norm of the row over l2.
        y, c: target and weight of the row.
        parameter: the loss's parameter.
    """
    if loss == 0:  # squared
        return old + (y - u - old / c) / (q + 1.0 / c)
    if loss == 1:
        return y * best_logistic(y * old, y * u, q, c)
    if loss == 2:  # hinge
        if q <= 0.0:
            return y * c
        return y * min(max(y * old + (1.0 - y * u) / q, 0.0), c)
    if loss == 3:  # squared hinge
        a = y * old
        return y * max(a + (1.0 - y * u - a / (2.0 * c)) / (q + 0.5 / c), 0.0)
    if loss == 4:  # Huber
        free = old + (y - u - old / c) / (q + 1.0 / c)
        return min(max(free, -c * parameter), c * parameter)
    if loss == 5:  # insensitive
        off = y - u + q * old
        if q <= 0.0:
            return c if off > parameter else (-c if off < -parameter else 0.0)
        return min(max(soft(off, parameter) / q, -c), c)
    off = y - u + q * old  # squared insensitive
    return soft(off, parameter) / (q + 0.5 / c)


def soft(x: float, threshold: float) -> float:
    """Return x moved towards 0 by a threshold, and not beyond 0."""
    if x > threshold:
        return x - threshold
    if x < -threshold:
        return x + threshold
    return 0.0


def best_logistic(old: float, margin: float, q: float, c: float) -> float:
    """Return the a in (0, c) at which q (a - old) + margin + log(a / (c - a)) is 0.

    Newton's steps in t, where a = c / (1 + exp(-t)): the function of t is nearly a line far from 0.
    A step that leaves the bracket is replaced by its middle.
    """
    start = min(max(old, 1e-12 * c), (1.0 - 1e-12) * c)
    t = log(start / (c - start))
    low = -margin - q * (c - old)
    high = -margin + q * old
    t = min(max(t, low), high)
    a = c / (1.0 + exp(-t))
    for _turn in range(30):
        slope = q * (a - old) + margin + t
        if slope > 0.0:
            high = t
        else:
            low = t
        step = slope / (1.0 + q * a * (1.0 - a / c))
        t = t - step
        if t < low or t > high:
            t = 0.5 * (low + high)
        a = c / (1.0 + exp(-t))
        if abs_(step) < 1e-14 * (1.0 + abs_(t)):
            break
    return a


def abs_(x: float) -> float:
    """Return the absolute value."""
    return max(x, -x)
