"""The base of windows of block methods: gradients along some columns, steps, and turns.

turn 0: T0                  T: gradients along some columns, of the predictions as they are
turn 1: T1  A0              A: the step along these columns, applied `delay` turns later
turn 2:     T2  A1
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from graphflow.ir.graph import substitute_tensors
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor, origin_scope
from graphflow.parallel.blocks.curvature import inverse_or_zero
from graphflow.parallel.blocks.linear_model import LinearModel

G = FUNCTIONS
COMPUTES, APPLIES = PHASES = range(2)
"""What happens in a turn: gradients are computed, then steps are applied."""
LETTERS = {COMPUTES: "T", APPLIES: "A"}
"""The letters of phases in drawings: turn, apply."""


class Slopes(NamedTuple):
    """The gradient along some columns, and what its step needs.

    Attributes:
        columns: the numbers of the columns, int64 (width,).
        features: these columns of the features, (examples, width).
        gradient: (width,) or (width, outputs). It is exchanged when a step reads it.
        active: bool (width,): the columns whose gradients were exchanged; None: all.
    """

    columns: Tensor
    features: Tensor
    gradient: Tensor
    active: Tensor | None = None


class BlockWindow:
    """Writes turns of a block method, on whole tensors.

    Args:
        model: the linear model.
        state: the method's variables, by name.
        penalty: the penalty of the weights; None for none.

    Attributes:
        weights: the weights by now.
        predictions: the predictions by now.
    """

    def __init__(self, model: LinearModel, state: Mapping[str, Tensor], penalty: Any) -> None:
        self.model = model
        self.state = state
        self.penalty = penalty
        self.weights = model.weights
        self.predictions = model.predictions

    def enter(self, turn: int, phase: int) -> origin_scope:
        """Return a scope for the nodes of a phase of a turn."""
        node = self.model.predictions.node
        return origin_scope(node, f"turn{turn}/", turn=turn * len(PHASES) + phase)

    def slopes(self, columns: Tensor, features: Tensor, active: Tensor | None = None) -> Slopes:
        """Return the gradient along some columns.

        Args:
            columns: their numbers, int64 (width,).
            features: these columns of the features, (examples, width).
            active: bool (width,): the columns whose gradients are exchanged; None: all.
        """
        model = self.model
        (slopes,) = substitute_tensors([model.slopes], {model.predictions: self.predictions})
        gradient = slopes @ features if slopes.ndim < 2 else features.mT @ slopes
        return Slopes(columns, features, gradient, active)

    def exchange(self, slopes: Slopes) -> Slopes:
        """Return slopes of which the active columns are summed over places, and others are 0."""
        assert slopes.active is not None
        return slopes._replace(gradient=REGISTRY["active_sum"](slopes.gradient, slopes.active))

    def step(self, slopes: Slopes, bounds: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weights of some columns before and after a step.

        Args:
            slopes: the gradient along these columns.
            bounds: the curvature along each of them, (width,).
        """
        old: Tensor = G["take"](self.weights, slopes.columns, axis=0)
        step = inverse_or_zero(bounds) * self.model.rate
        if old.ndim > 1:
            step = G["expand_dims"](step, (1,))
        new = old - step * slopes.gradient
        if self.penalty is not None:
            new = self.penalty.prox(new, step)
        if slopes.active is not None:
            new = G["where"](self.by_row(slopes.active, old), new, old)
        return old, new

    def move(self, slopes: Slopes, old: Tensor, new: Tensor) -> None:
        """Take the new weights of some columns into the weights and the predictions."""
        self.weights = set_rows(self.weights, slopes.columns, new)
        self.predictions = self.predictions + slopes.features @ (new - old)

    def by_row(self, flags: Tensor, like: Tensor) -> Tensor:
        """Return a flag for each row in a shape that broadcasts to a tensor's."""
        spread: Tensor = flags if like.ndim < 2 else G["expand_dims"](flags, (1,))
        return spread


def set_rows(x: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """Return x with new values of some rows."""
    made: Tensor = REGISTRY["scatter_rows"](x, rows, values, reduction="none")
    return made


__all__ = ["LETTERS", "PHASES", "APPLIES", "COMPUTES", "Slopes", "BlockWindow", "set_rows"]
