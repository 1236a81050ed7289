"""The loop that couples probabilities of pairs: plain Python that `native` compiles."""

from __future__ import annotations

from typing import Any


def couple(
    start: int, stop: int, chance: Any, classes: int, limit: float, most: int, q: Any, qp: Any,
    p: Any,
) -> None:  # fmt: skip
    """Write the probabilities of classes of the rows `start` to `stop`.

    Args:
        chance: (rows, pairs), the probability of the first class of each pair.
        limit: the largest residual of a row that has converged.
        most: iterations, at most.
        q, qp: memory for (classes, classes) and (classes,) numbers.
        p: (rows, classes), the result.
    """
    for row in range(start, stop):
        pair = row * (classes * (classes - 1) // 2)
        for i in range(classes * classes):
            q[i] = 0.0
        for i in range(classes):
            for j in range(i + 1, classes):
                first = chance[pair]
                second = 1.0 - first
                q[i * classes + i] += second * second
                q[j * classes + j] += first * first
                q[i * classes + j] = -first * second
                q[j * classes + i] = -first * second
                pair += 1
        here = row * classes
        for i in range(classes):
            p[here + i] = 1.0 / classes
        left = most
        while left > 0:
            total = multiply(q, p, here, classes, qp)
            if largest_residual(qp, total, classes) < limit:
                left = 0
            else:
                sweep(q, p, here, classes, qp, total)
                left -= 1


def multiply(q: Any, p: Any, here: int, classes: int, qp: Any) -> float:
    """Write Q·p, and return p·Q·p."""
    total = 0.0
    for i in range(classes):
        part = 0.0
        for j in range(classes):
            part += q[i * classes + j] * p[here + j]
        qp[i] = part
        total += p[here + i] * part
    return total


def largest_residual(qp: Any, total: float, classes: int) -> float:
    """Return max |Q·p - p·Q·p|."""
    most = 0.0
    for i in range(classes):
        apart = qp[i] - total
        if apart < 0.0:
            apart = -apart
        if apart > most:
            most = apart
    return most


def sweep(q: Any, p: Any, here: int, classes: int, qp: Any, total: float) -> None:
    """Minimise p·Q·p along one class after the other; p stays a distribution."""
    for t in range(classes):
        own = q[t * classes + t]
        change = (total - qp[t]) / own
        grown = change + 1.0
        total = (total + change * (change * own + qp[t] * 2.0)) / (grown * grown)
        p[here + t] += change
        for j in range(classes):
            qp[j] = (qp[j] + change * q[t * classes + j]) / grown
            p[here + j] /= grown
