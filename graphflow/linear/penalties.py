"""Penalties on the weights of a linear model: values, proximal steps, and weights that stay at 0.

A penalty adds up over the rows of a weight matrix, or over the elements of a weight vector. So it
can be applied to some of them at a time.
"""

from __future__ import annotations

from math import inf, isfinite

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.argument_kinds import is_number
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, user_location

G = FUNCTIONS


class Penalty:
    """A function of weights that is added to a loss: the base of all penalties.

    A subclass has `value` and `prox`. With `can_skip` too, solvers leave out weights that are
    certain to stay at 0.
    """

    def value(self, weights: Tensor) -> Tensor:
        """Return the penalty of some weights, a scalar."""
        raise ArgumentError(f"{type(self).__name__} has no value; define value(weights)")

    def prox(self, weights: Tensor, step: Tensor) -> Tensor:
        """Return the v that minimise penalty(v) + ‖v − weights‖² / (2·step).

        Args:
            weights: (rows,) or (rows, outputs).
            step: a positive number for each row, (rows,) or (rows, 1).
        """
        raise ArgumentError(f"{type(self).__name__} has no prox; define prox(weights, step)")


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class L1(Penalty):
    """strength · Σ|w|, which makes many weights 0.

    Args:
        strength: a number from 0.

    Raises:
        ArgumentError: the strength is no finite number from 0.
    """

    strength: float

    def __post_init__(self) -> None:
        _set_strengths(self, "strength")

    def value(self, weights: Tensor) -> Tensor:
        """Return the penalty of some weights, a scalar."""
        total: Tensor = G["sum"](G["abs"](weights)) * self.strength
        return total

    def prox(self, weights: Tensor, step: Tensor) -> Tensor:
        """Return weights moved towards 0 by strength · step."""
        return _shrink(weights, step * self.strength)

    def can_skip(self, weights: Tensor, gradient: Tensor, margin: float) -> Tensor:
        """Return the rows, bool (rows,), that a step would leave at 0, by more than a margin.

        Args:
            weights: (rows,) or (rows, outputs).
            gradient: the gradient of the loss, of the same shape.
            margin: the distance of the gradient from the value at which a weight would move.
        """
        return _rests(weights, gradient, self.strength - margin)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class L2(Penalty):
    """strength / 2 · Σw², which keeps weights small.

    Args:
        strength: a number from 0.

    Raises:
        ArgumentError: the strength is no finite number from 0.
    """

    strength: float

    def __post_init__(self) -> None:
        _set_strengths(self, "strength")

    def value(self, weights: Tensor) -> Tensor:
        """Return the penalty of some weights, a scalar."""
        total: Tensor = G["sum"](G["square"](weights)) * (self.strength / 2)
        return total

    def prox(self, weights: Tensor, step: Tensor) -> Tensor:
        """Return weights divided by 1 + strength · step."""
        moved: Tensor = weights / (step * self.strength + 1.0)
        return moved


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class L1L2(Penalty):
    """l1 · Σ|w| + l2 / 2 · Σw²: the elastic net.

    Args:
        l1, l2: numbers from 0.

    Raises:
        ArgumentError: one is no finite number from 0.

    Source: Zou & Hastie, JRSS B 67(2), 2005.
    """

    l1: float
    l2: float

    def __post_init__(self) -> None:
        _set_strengths(self, "l1", "l2")

    def value(self, weights: Tensor) -> Tensor:
        """Return the penalty of some weights, a scalar."""
        total: Tensor = L1(self.l1).value(weights) + L2(self.l2).value(weights)
        return total

    def prox(self, weights: Tensor, step: Tensor) -> Tensor:
        """Return weights moved towards 0 by l1 · step, then divided by 1 + l2 · step."""
        return L2(self.l2).prox(L1(self.l1).prox(weights, step), step)

    def can_skip(self, weights: Tensor, gradient: Tensor, margin: float) -> Tensor:
        """Return the rows that a step would leave at 0, by more than a margin; see `L1`."""
        return _rests(weights, gradient, self.l1 - margin)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class GroupL1(Penalty):
    """strength · Σ‖row‖₂ over the rows of a weight matrix: a row is 0 for all outputs, or for none.

    Args:
        strength: a number from 0.

    Raises:
        ArgumentError: the strength is no finite number from 0.

    Source: Yuan & Lin, JRSS B 68(1), 2006.
    """

    strength: float

    def __post_init__(self) -> None:
        _set_strengths(self, "strength")

    def value(self, weights: Tensor) -> Tensor:
        """Return the penalty of some weights, a scalar."""
        total: Tensor = G["sum"](_row_norms(weights)) * self.strength
        return total

    def prox(self, weights: Tensor, step: Tensor) -> Tensor:
        """Return rows shortened by strength · step."""
        norms = _row_norms(weights)
        shorter = _shrink(norms, step * self.strength)
        factor: Tensor = G["where"](norms > 0, shorter / G["where"](norms > 0, norms, 1.0), 0.0)
        moved: Tensor = weights * factor
        return moved

    def can_skip(self, weights: Tensor, gradient: Tensor, margin: float) -> Tensor:
        """Return the rows that a step would leave at 0, by more than a margin; see `L1`."""
        return _rests(_row_norms(weights), _row_norms(gradient), self.strength - margin)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Bounds(Penalty):
    """Bounds on weights: 0 for weights from low to high, infinite for others.

    Args:
        low, high: the bounds; -inf and inf are none.

    Raises:
        ArgumentError: they are no numbers, or low is above high.
    """

    low: float = -inf
    high: float = inf

    def __post_init__(self) -> None:
        where = f"Bounds at {user_location()}"
        for name in ("low", "high"):
            given = getattr(self, name)
            if not is_number(given) or given != given:
                raise ArgumentError(f"{where}: {name} must be a number, not {given!r}")
            object.__setattr__(self, name, float(given))
        if self.low > self.high:
            raise ArgumentError(f"{where}: low={self.low} is above high={self.high}; swap them")

    def value(self, weights: Tensor) -> Tensor:
        """Return 0 if all weights are within the bounds, else inf."""
        outside = G["logical_or"](weights < self.low, weights > self.high)
        total: Tensor = G["sum"](G["where"](outside, G["full_like"](weights, inf), 0.0))
        return total

    def prox(self, weights: Tensor, step: Tensor) -> Tensor:
        """Return weights moved into the bounds."""
        moved: Tensor = G["clip"](weights, self.low, self.high)
        return moved


def _set_strengths(penalty: Penalty, *names: str) -> None:
    """Check strengths, and store them as Python floats.

    Raises:
        ArgumentError: one is no finite number from 0.
    """
    for name in names:
        given = getattr(penalty, name)
        if not is_number(given) or not isfinite(given) or given < 0:
            raise ArgumentError(
                f"{type(penalty).__name__} at {user_location()}: {name} must be a finite number "
                f"from 0, not {given!r}"
            )
        object.__setattr__(penalty, name, float(given))


def _shrink(weights: Tensor, amount: Tensor) -> Tensor:
    """Return weights moved towards 0 by an amount, and not beyond it."""
    moved: Tensor = G["sign"](weights) * G["maximum"](G["abs"](weights) - amount, 0.0)
    return moved


def _rests(weights: Tensor, gradient: Tensor, limit: float) -> Tensor:
    """Return the rows that are 0 and whose gradients are all below a limit."""
    rests = G["logical_and"](G["equal"](weights, 0.0), G["abs"](gradient) < limit)
    every: Tensor = rests if rests.ndim < 2 else G["all"](rests, axis=-1)
    return every


def _row_norms(weights: Tensor) -> Tensor:
    """Return the norm of each row, (rows, 1); of a vector, the absolute values."""
    if weights.ndim < 2:
        norms: Tensor = G["abs"](weights)
        return norms
    norms = G["sqrt"](G["sum"](G["square"](weights), axis=-1, keepdims=True))
    return norms


__all__ = ["L1", "L1L2", "L2", "Bounds", "GroupL1", "Penalty"]
