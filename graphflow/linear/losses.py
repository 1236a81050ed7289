"""Losses of linear models: values, slopes, curvatures, and conjugates for certificates.

A loss is a function of a prediction f and a target y. Targets of classification are -1 and 1. The
conjugate is given as a model's dual needs it, for a dual variable β of a row with weight c:

    c · ℓ*(y, -β / c)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass

Floats = np.ndarray[Any, np.dtype[np.float64]]
Pointwise = Callable[[Floats, Floats, float], Floats]
"""A function of predictions, targets and the loss's parameter, by row."""


@dataclass(frozen=True)
class Loss:
    """A loss.

    Attributes:
        name: its name.
        code: its number in the loops, see `loops/dual_steps.py`.
        value: the loss.
        slope: its derivative in the prediction; None where it has kinks.
        curvature: its second derivative; None where it has kinks.
        conjugate: c · ℓ*(y, -β/c) of (β, targets, weights, parameter), by row; infinite where β is
            not feasible.
        parameter: ε of the insensitive losses, the threshold of Huber's.
        classifies: True if targets are -1 and 1.
    """

    name: str
    code: int
    value: Pointwise
    slope: Pointwise | None
    curvature: Pointwise | None
    conjugate: Callable[[Floats, Floats, Floats, float], Floats]
    parameter: float = 0.0
    classifies: bool = False

    def values(self, f: Floats, y: Floats) -> Floats:
        """Return the loss of each row."""
        return self.value(f, y, self.parameter)

    def slopes(self, f: Floats, y: Floats) -> Floats:
        """Return the derivative of each row's loss."""
        assert self.slope is not None
        return self.slope(f, y, self.parameter)

    def curvatures(self, f: Floats, y: Floats) -> Floats:
        """Return the second derivative of each row's loss."""
        assert self.curvature is not None
        return self.curvature(f, y, self.parameter)

    def conjugates(self, beta: Floats, y: Floats, c: Floats) -> Floats:
        """Return c · ℓ*(y, -β/c) of each row."""
        return self.conjugate(beta, y, c, self.parameter)


SQUARED, LOGISTIC, HINGE, SQUARED_HINGE, HUBER, INSENSITIVE, SQUARED_INSENSITIVE = range(7)


def sigmoid(z: Floats) -> Floats:
    """Return 1 / (1 + exp(-z)) without overflow."""
    small = np.exp(-np.abs(z))
    return np.where(z >= 0, 1.0, small) / (1.0 + small)


def _log_loss(z: Floats) -> Floats:
    """Return log(1 + exp(-z)) without overflow, in a fifth of the time of `logaddexp`."""
    return np.maximum(-z, 0.0) + np.log1p(np.exp(-np.abs(z)))


def _logistic_curvature(f: Floats) -> Floats:
    small = np.exp(-np.abs(f))
    return small / (1.0 + small) ** 2


def _entropy(a: Floats) -> Floats:
    """Return a·log(a), 0 at 0."""
    return a * np.log(np.where(a > 0, a, 1.0))


def _feasible(value: Floats, is_feasible: Any) -> Floats:
    return np.where(is_feasible, value, np.inf)


def _margin(f: Floats, y: Floats) -> Floats:
    return np.maximum(0.0, 1.0 - y * f)


def _excess(f: Floats, y: Floats, epsilon: float) -> Floats:
    """Return by how much a prediction is off beyond ε, with its sign."""
    off = f - y
    return np.sign(off) * np.maximum(0.0, np.abs(off) - epsilon)


def _logistic_conjugate(beta: Floats, y: Floats, c: Floats, _: float) -> Floats:
    a = beta * y / c
    inside = np.clip(a, 0.0, 1.0)
    return _feasible(c * (_entropy(inside) + _entropy(1.0 - inside)), inside == a)


def _hinge_conjugate(beta: Floats, y: Floats, c: Floats, _: float) -> Floats:
    a = beta * y
    return _feasible(-a, (a >= 0.0) & (a <= c))


def _squared_hinge_conjugate(beta: Floats, y: Floats, c: Floats, _: float) -> Floats:
    a = beta * y
    return _feasible(a * a / (4.0 * c) - a, a >= 0.0)


def _huber_value(f: Floats, y: Floats, threshold: float) -> Floats:
    off = np.abs(f - y)
    return np.where(off <= threshold, 0.5 * off * off, threshold * (off - 0.5 * threshold))


squared = Loss(
    "squared",
    SQUARED,
    value=lambda f, y, _: 0.5 * (f - y) ** 2,
    slope=lambda f, y, _: f - y,
    curvature=lambda f, y, _: np.ones_like(f),
    conjugate=lambda beta, y, c, _: beta * (0.5 * beta / c - y),
)
logistic = Loss(
    "logistic",
    LOGISTIC,
    value=lambda f, y, _: _log_loss(y * f),
    slope=lambda f, y, _: -y * sigmoid(-y * f),
    curvature=lambda f, y, _: _logistic_curvature(f),
    conjugate=_logistic_conjugate,
    classifies=True,
)
hinge = Loss(
    "hinge",
    HINGE,
    value=lambda f, y, _: _margin(f, y),
    slope=None,
    curvature=None,
    conjugate=_hinge_conjugate,
    classifies=True,
)
squared_hinge = Loss(
    "squared_hinge",
    SQUARED_HINGE,
    value=lambda f, y, _: _margin(f, y) ** 2,
    slope=lambda f, y, _: -2.0 * y * _margin(f, y),
    curvature=lambda f, y, _: np.where(y * f < 1.0, 2.0, 0.0),
    conjugate=_squared_hinge_conjugate,
    classifies=True,
)


def huber(threshold: float = 1.35) -> Loss:
    """Return Huber's loss: squared up to a threshold, linear beyond."""
    return Loss(
        "huber",
        HUBER,
        value=_huber_value,
        slope=lambda f, y, limit: np.clip(f - y, -limit, limit),
        curvature=lambda f, y, limit: (np.abs(f - y) <= limit).astype(np.float64),
        conjugate=lambda beta, y, c, limit: _feasible(
            beta * (0.5 * beta / c - y), np.abs(beta) <= c * limit
        ),
        parameter=float(threshold),
    )


def epsilon_insensitive(epsilon: float = 0.0) -> Loss:
    """Return the loss max(0, |f - y| - ε)."""
    return Loss(
        "epsilon_insensitive",
        INSENSITIVE,
        value=lambda f, y, e: np.abs(_excess(f, y, e)),
        slope=None,
        curvature=None,
        conjugate=lambda beta, y, c, e: _feasible(e * np.abs(beta) - beta * y, np.abs(beta) <= c),
        parameter=float(epsilon),
    )


def squared_epsilon_insensitive(epsilon: float = 0.0) -> Loss:
    """Return the loss max(0, |f - y| - ε)²."""
    return Loss(
        "squared_epsilon_insensitive",
        SQUARED_INSENSITIVE,
        value=lambda f, y, e: _excess(f, y, e) ** 2,
        slope=lambda f, y, e: 2.0 * _excess(f, y, e),
        curvature=lambda f, y, e: np.where(np.abs(f - y) > e, 2.0, 0.0),
        conjugate=lambda beta, y, c, e: e * np.abs(beta) - beta * y + beta * beta / (4.0 * c),
        parameter=float(epsilon),
    )


__all__ = [
    "Floats", "Loss", "epsilon_insensitive", "hinge", "huber", "logistic", "sigmoid",
    "squared", "squared_epsilon_insensitive", "squared_hinge",
]  # fmt: skip
