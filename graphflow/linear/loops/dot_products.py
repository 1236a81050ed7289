"""Products of one row with the weights, and the weights' updates: the innermost loops.

Several sums stand beside each other. They become one vector, in an order that is the same on every
machine.
"""

from __future__ import annotations

from typing import Any


def dense_dot(x: Any, start: int, w: Any, n: int) -> float:
    """Return the product of `x[start : start + n]` and `w[:n]`."""
    s0 = s1 = s2 = s3 = s4 = s5 = s6 = s7 = 0.0
    j = 0
    while j + 8 <= n:
        p = start + j
        s0 += float(x[p]) * w[j]
        s1 += float(x[p + 1]) * w[j + 1]
        s2 += float(x[p + 2]) * w[j + 2]
        s3 += float(x[p + 3]) * w[j + 3]
        s4 += float(x[p + 4]) * w[j + 4]
        s5 += float(x[p + 5]) * w[j + 5]
        s6 += float(x[p + 6]) * w[j + 6]
        s7 += float(x[p + 7]) * w[j + 7]
        j += 8
    while j < n:
        s0 += float(x[start + j]) * w[j]
        j += 1
    return ((s0 + s4) + (s1 + s5)) + ((s2 + s6) + (s3 + s7))


def dense_add(x: Any, start: int, factor: float, w: Any, n: int) -> None:
    """Add `factor * x[start : start + n]` to `w[:n]`."""
    for j in range(n):
        w[j] += factor * float(x[start + j])


def sparse_dot(values: Any, places: Any, start: int, stop: int, w: Any) -> float:
    """Return the sum of `values[p] * w[places[p]]` for p from start to stop."""
    s0 = s1 = s2 = s3 = 0.0
    p = start
    while p + 4 <= stop:
        s0 += float(values[p]) * w[places[p]]
        s1 += float(values[p + 1]) * w[places[p + 1]]
        s2 += float(values[p + 2]) * w[places[p + 2]]
        s3 += float(values[p + 3]) * w[places[p + 3]]
        p += 4
    while p < stop:
        s0 += float(values[p]) * w[places[p]]
        p += 1
    return (s0 + s2) + (s1 + s3)


def sparse_add(values: Any, places: Any, start: int, stop: int, factor: float, w: Any) -> None:
    """Add `factor * values[p]` to `w[places[p]]` for p from start to stop."""
    for p in range(start, stop):
        w[places[p]] += factor * float(values[p])
