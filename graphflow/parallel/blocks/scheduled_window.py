"""A window of scheduled coordinate descent: turns that each move some columns that hardly interact.

Columns whose weights moved lately are drawn more often, and of two drawn columns that are alike
only one moves: two would both correct the same error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from graphflow import init
from graphflow.ir.graph import substitute_tensors
from graphflow.ir.op import FUNCTIONS, RandomStreams, Tensor
from graphflow.ops.randomness.random import uniform
from graphflow.optim.state_variables import state_variables
from graphflow.parallel.blocks.block_window import (
    COMPUTES,
    BlockWindow,
    Slopes,
    set_rows,
)
from graphflow.parallel.blocks.curvature import inverse_or_zero, measure_norms, measure_total
from graphflow.parallel.blocks.linear_model import LinearModel
from graphflow.parallel.compression.exchange import draw_from

G = FUNCTIONS
NEVER_MOVED = 1e30
"""The move that counts for columns that were not drawn yet, so that they come first."""
DRAWN_PER_MOVED = 2
"""How many columns are drawn for each that may move."""
ROUNDS = 5
"""Rounds in which conflicts between drawn columns are resolved. After an odd number, no two of the
chosen columns conflict."""


class ScheduledSettings(NamedTuple):
    """The settings of a window: see `BlockScheduled`."""

    parallel: int
    correlation: float
    floor: float
    turns: int
    seed: int


def make_scheduled_state(weights: Tensor, settings: ScheduledSettings) -> dict[str, Tensor]:
    """Make the variables of the method, beside the weights."""
    columns, kind = (int(weights.shape[0]),), weights.dtype.name
    initial = {
        "turns": init.zeros((), "int64"),
        "bounds": init.zeros(columns, kind),
        "total": init.zeros((), kind),
        "moves": init.full(columns, NEVER_MOVED, kind),
        "moved": init.zeros((), "int64"),
    }
    return state_variables(weights, initial)


class ScheduledWindow(BlockWindow):
    """Writes a window of scheduled coordinate descent.

    Args:
        model, state, penalty: see `BlockWindow`.
        settings: the settings of the window.
        is_first: whether the window measures the curvature.
    """

    def __init__(
        self,
        model: LinearModel,
        state: Mapping[str, Tensor],
        penalty: object,
        settings: ScheduledSettings,
        is_first: bool,
    ) -> None:
        super().__init__(model, state, penalty)
        self._settings = settings
        self._is_first = is_first
        self._moves = state["moves"]
        self._moved = state["moved"]
        self._drawn = min(DRAWN_PER_MOVED * settings.parallel, model.columns)

    def write(self) -> dict[Tensor, Tensor]:
        """Return the new values of the weights and of the state."""
        settings, state = self._settings, self.state
        bounds, total = state["bounds"], state["total"]
        if self._is_first:
            with self.enter(0, COMPUTES):
                bounds = measure_norms(self.model)
                total = measure_total(self.model)
        with draw_from(RandomStreams(settings.seed)):
            for turn in range(settings.turns):
                with self.enter(turn, COMPUTES):
                    self._turn(self._draw(), bounds)
        with self.enter(settings.turns - 1, COMPUTES):
            turns = state["turns"] + settings.turns
        return {
            self.model.weights: self.weights,
            state["turns"]: turns,
            state["bounds"]: bounds,
            state["total"]: total,
            state["moves"]: self._moves,
            state["moved"]: self._moved,
        }

    def _draw(self) -> Tensor:
        """Return different columns, int64 (drawn,), with odds of their last move plus the floor."""
        odds = G["log"](self._moves + self._settings.floor)
        noise = uniform((self.model.columns,), dtype="float64")
        keys = G["astype"](odds, "float64") - G["log"](-G["log"](noise))
        drawn: Tensor = G["argsort"](keys, descending=True)[: self._drawn]
        return drawn

    def _turn(self, columns: Tensor, bounds: Tensor) -> None:
        """Move those of some drawn columns that may move at once, and note how far each moved."""
        slopes, alike = self._products(columns)
        old, new = self.step(slopes, G["take"](bounds, columns, axis=0))
        moves = G["abs"](new - old)
        moves = moves if moves.ndim < 2 else G["max"](moves, axis=1)
        moving = moves > 0
        chosen = self._choose(alike, moving)
        stays = G["logical_and"](moving, G["logical_not"](chosen))
        self.move(slopes, old, G["where"](self.by_row(stays, old), old, new))
        kept = G["take"](self._moves, columns, axis=0)  # a column that was held back comes again
        self._moves = set_rows(self._moves, columns, G["where"](stays, kept, moves))
        self._moved = self._moved + G["sum"](G["astype"](chosen, "int64"))

    def _products(self, columns: Tensor) -> tuple[Slopes, Tensor]:
        """Return the gradient along columns, and |cos| of the columns with each other.

        One exchange has both.
        """
        model, drawn = self.model, self._drawn
        features: Tensor = G["take"](model.features, columns, axis=1)
        (slopes,) = substitute_tensors([model.slopes], {model.predictions: self.predictions})
        wide = G["expand_dims"](slopes, (1,)) if slopes.ndim < 2 else slopes
        products = features.mT @ G["concat"]([features, wide], axis=1)
        gradient = products[:, drawn] if slopes.ndim < 2 else products[:, drawn:]
        lengths = inverse_or_zero(G["sqrt"](G["diagonal"](products[:, :drawn])))
        alike: Tensor = G["abs"](products[:, :drawn]) * lengths * G["expand_dims"](lengths, (1,))
        return Slopes(columns, features, gradient), alike

    def _choose(self, alike: Tensor, moving: Tensor) -> Tensor:
        """Return which drawn columns move, bool (drawn,): those that conflict with no chosen
        earlier one, and no more than may move at once."""
        earlier = np.tri(self._drawn, k=-1, dtype=bool)
        conflicts = G["logical_and"](alike >= self._settings.correlation, earlier)
        chosen = moving
        for _ in range(ROUNDS):
            hindered = G["any"](G["logical_and"](conflicts, chosen), axis=1)
            chosen = G["logical_and"](moving, G["logical_not"](hindered))
        count = G["cumsum"](G["astype"](chosen, "int64"))
        allowed: Tensor = G["logical_and"](chosen, count <= self._settings.parallel)
        return allowed


__all__ = ["ScheduledSettings", "ScheduledWindow", "make_scheduled_state"]
