"""Losses of linear models: values, slopes, conjugates, and steps of the dual coordinates.

A loss φ(z; y) compares a prediction z with a target y. Its conjugate φ*(u) = max_z (u·z − φ(z))
gives the dual objective. Everything here is numpy in float64: it certifies results, and is the
reference of the kernels.
"""

from __future__ import annotations

from math import isfinite
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import user_location

Array = np.ndarray[Any, Any]


class Loss:
    """A convex function of a prediction and a target: the base of all losses.

    Attributes:
        is_classifier: whether targets are −1 and 1.
    """

    is_classifier: bool = False

    def value(self, predictions: Array, targets: Array) -> Array:
        """Return the loss of each prediction."""
        raise NotImplementedError

    def slope(self, predictions: Array, targets: Array) -> Array:
        """Return the derivative by each prediction; where there are several, one of them."""
        raise NotImplementedError

    def conjugate(self, duals: Array, targets: Array) -> Array:
        """Return φ*(u) for each dual u; inf outside of its domain."""
        raise NotImplementedError

    def nearest_feasible(self, duals: Array, targets: Array) -> Array:
        """Return the nearest duals in the domain of φ*. It contains 0."""
        raise NotImplementedError


@dataclass(frozen=True)
class Squared(Loss):
    """½(z − y)²."""

    def value(self, predictions: Array, targets: Array) -> Array:
        """Return the loss of each prediction."""
        value: Array = 0.5 * (predictions - targets) ** 2
        return value

    def slope(self, predictions: Array, targets: Array) -> Array:
        """Return z − y."""
        slope: Array = predictions - targets
        return slope

    def conjugate(self, duals: Array, targets: Array) -> Array:
        """Return ½u² + u·y."""
        value: Array = duals * (0.5 * duals + targets)
        return value

    def nearest_feasible(self, duals: Array, targets: Array) -> Array:
        """Return the duals: all are feasible."""
        return duals


@dataclass(frozen=True)
class Logistic(Loss):
    """log(1 + exp(−y·z)), for y of −1 and 1."""

    is_classifier = True

    def value(self, predictions: Array, targets: Array) -> Array:
        """Return the loss of each prediction."""
        value: Array = np.logaddexp(0.0, -targets * predictions)
        return value

    def slope(self, predictions: Array, targets: Array) -> Array:
        """Return −y / (1 + exp(y·z))."""
        slope: Array = -targets * np.exp(-np.logaddexp(0.0, targets * predictions))
        return slope

    def conjugate(self, duals: Array, targets: Array) -> Array:
        """Return a·log a + (1 − a)·log(1 − a), with a = −u·y from 0 to 1."""
        share = -duals * targets
        inside = (share >= 0) & (share <= 1)
        return np.where(inside, -_entropy(np.clip(share, 0.0, 1.0)), np.inf)

    def nearest_feasible(self, duals: Array, targets: Array) -> Array:
        """Return the duals with −u·y moved into [0, 1]."""
        return -targets * np.clip(-duals * targets, 0.0, 1.0)


@dataclass(frozen=True)
class Hinge(Loss):
    """max(0, 1 − y·z), for y of −1 and 1."""

    is_classifier = True

    def value(self, predictions: Array, targets: Array) -> Array:
        """Return the loss of each prediction."""
        value: Array = np.maximum(0.0, 1.0 - targets * predictions)
        return value

    def slope(self, predictions: Array, targets: Array) -> Array:
        """Return −y where the margin is less than 1, else 0."""
        return np.where(targets * predictions < 1.0, -targets, 0.0)

    def conjugate(self, duals: Array, targets: Array) -> Array:
        """Return u·y, with −u·y from 0 to 1."""
        share = -duals * targets
        return np.where((share >= 0) & (share <= 1), -share, np.inf)

    def nearest_feasible(self, duals: Array, targets: Array) -> Array:
        """Return the duals with −u·y moved into [0, 1]."""
        return -targets * np.clip(-duals * targets, 0.0, 1.0)


@dataclass(frozen=True)
class SquaredHinge(Loss):
    """max(0, 1 − y·z)², for y of −1 and 1."""

    is_classifier = True

    def value(self, predictions: Array, targets: Array) -> Array:
        """Return the loss of each prediction."""
        value: Array = np.maximum(0.0, 1.0 - targets * predictions) ** 2
        return value

    def slope(self, predictions: Array, targets: Array) -> Array:
        """Return −2y·max(0, 1 − y·z)."""
        slope: Array = -2.0 * targets * np.maximum(0.0, 1.0 - targets * predictions)
        return slope

    def conjugate(self, duals: Array, targets: Array) -> Array:
        """Return a²/4 − a, with a = −u·y from 0."""
        share = -duals * targets
        return np.where(share >= 0, share * (0.25 * share - 1.0), np.inf)

    def nearest_feasible(self, duals: Array, targets: Array) -> Array:
        """Return the duals with −u·y no less than 0."""
        return -targets * np.maximum(-duals * targets, 0.0)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Huber(Loss):
    """½r² for |r| up to `delta`, and delta·(|r| − delta/2) beyond, with r = z − y.

    Args:
        delta: a positive number.

    Raises:
        ArgumentError: delta is none.
    """

    delta: float = 1.35

    def __post_init__(self) -> None:
        _set_number(self, "delta", above=True)

    def value(self, predictions: Array, targets: Array) -> Array:
        """Return the loss of each prediction."""
        size = abs(predictions - targets)
        return np.where(size <= self.delta, 0.5 * size**2, self.delta * (size - 0.5 * self.delta))

    def slope(self, predictions: Array, targets: Array) -> Array:
        """Return r, from −delta to delta."""
        return np.clip(predictions - targets, -self.delta, self.delta)

    def conjugate(self, duals: Array, targets: Array) -> Array:
        """Return ½u² + u·y, with |u| up to delta."""
        return np.where(abs(duals) <= self.delta, duals * (0.5 * duals + targets), np.inf)

    def nearest_feasible(self, duals: Array, targets: Array) -> Array:
        """Return the duals, from −delta to delta."""
        return np.clip(duals, -self.delta, self.delta)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class EpsilonInsensitive(Loss):
    """max(0, |z − y| − epsilon).

    Args:
        epsilon: a number from 0.

    Raises:
        ArgumentError: epsilon is none.
    """

    epsilon: float = 0.1

    def __post_init__(self) -> None:
        _set_number(self, "epsilon", above=False)

    def value(self, predictions: Array, targets: Array) -> Array:
        """Return the loss of each prediction."""
        value: Array = np.maximum(0.0, abs(predictions - targets) - self.epsilon)
        return value

    def slope(self, predictions: Array, targets: Array) -> Array:
        """Return the sign of z − y where it is beyond epsilon, else 0."""
        error = predictions - targets
        return np.where(abs(error) > self.epsilon, np.sign(error), 0.0)

    def conjugate(self, duals: Array, targets: Array) -> Array:
        """Return u·y + epsilon·|u|, with |u| up to 1."""
        return np.where(abs(duals) <= 1, duals * targets + self.epsilon * abs(duals), np.inf)

    def nearest_feasible(self, duals: Array, targets: Array) -> Array:
        """Return the duals, from −1 to 1."""
        return np.clip(duals, -1.0, 1.0)


def _entropy(share: Array) -> Array:
    """Return −a·log a − (1 − a)·log(1 − a); 0 at 0 and 1."""
    with np.errstate(divide="ignore", invalid="ignore"):
        value = -share * np.log(share) - (1.0 - share) * np.log1p(-share)
    return np.where((share > 0) & (share < 1), value, 0.0)


def _set_number(loss: Loss, name: str, above: bool) -> None:
    """Check a number of a loss, and store it as a float.

    Raises:
        ArgumentError: it is no finite number from 0, or above 0.
    """
    given = getattr(loss, name)
    number = isinstance(given, int | float | np.number) and not isinstance(given, bool)
    if not number or not isfinite(given) or given < 0 or (above and not given):
        bound = "above 0" if above else "from 0"
        raise ArgumentError(
            f"{type(loss).__name__} at {user_location()}: {name} must be a number {bound}, not "
            f"{given!r}"
        )
    object.__setattr__(loss, name, float(given))


__all__ = [
    "EpsilonInsensitive", "Hinge", "Huber", "Logistic", "Loss", "Squared", "SquaredHinge",
]  # fmt: skip
