"""A window of block proximal gradient: turns that each move one block of columns, with a delay.

The order of blocks is drawn anew for each pass. With a filter, a column whose weight is 0, and
whose gradient says that it stays so, is neither exchanged nor moved. After quiet passes all columns
are active once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from graphflow import init
from graphflow.ir.op import FUNCTIONS, RandomStreams, Tensor
from graphflow.ops.randomness.random import permutation
from graphflow.optim.state_variables import state_variables
from graphflow.parallel.blocks.block_window import (
    APPLIES,
    COMPUTES,
    BlockWindow,
    Slopes,
    set_rows,
)
from graphflow.parallel.blocks.curvature import measure_blocks, measure_norms, measure_total
from graphflow.parallel.blocks.linear_model import LinearModel
from graphflow.parallel.compression.exchange import draw_from

G = FUNCTIONS
LEVEL_STEP = 1e-3
"""All columns are active once more when no weight moves by more than this of the largest one, then
by more than this squared, and so on, down to the level that counts as rest."""
ROUNDING = 8
"""Moves of so many units in the last place of the largest weight count as rest in any case."""


class ProximalSettings(NamedTuple):
    """The settings of a window: see `BlockProximal`.

    Attributes:
        blocks, delay, kkt, tol: see `BlockProximal`.
        turns: the number of turns in a window.
        is_random: whether blocks come in random order.
        seed: the seed of that order.
    """

    blocks: int
    delay: int
    turns: int
    kkt: float | None
    tol: float
    is_random: bool
    seed: int


def block_columns(columns: int, blocks: int) -> np.ndarray:
    """Return the numbers of the columns of each block, int64 (blocks, width).

    Blocks have one width. If it does not divide the columns, neighbours overlap.
    """
    width = -(-columns // blocks)
    starts = np.arange(blocks) * (columns - width) // max(blocks - 1, 1)
    numbers: np.ndarray = starts[:, None] + np.arange(width)
    return numbers


def make_proximal_state(weights: Tensor, settings: ProximalSettings) -> dict[str, Tensor]:
    """Make the variables of the method, beside the weights."""
    columns = int(weights.shape[0])
    kind = weights.dtype.name
    initial = {
        "turns": init.zeros((), "int64"),
        "bounds": init.zeros((columns,), kind),
        "total": init.zeros((), kind),
        "largest_move": init.zeros((), kind),
        "converged": init.zeros((), "bool"),
    }
    if settings.turns < settings.blocks:
        initial["order"] = init.zeros((settings.blocks,), "int64")
    if settings.kkt is not None:
        initial |= {
            "active": init.ones((columns,), "bool"),
            "had_all": init.ones((), "bool"),
            "sent": init.zeros((), "int64"),
            "level": init.full((), LEVEL_STEP, kind),
        }
    return state_variables(weights, initial)


class ProximalWindow(BlockWindow):
    """Writes a window of block proximal gradient.

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
        settings: ProximalSettings,
        is_first: bool,
    ) -> None:
        super().__init__(model, state, penalty)
        self._settings = settings
        self._is_first = is_first
        self._columns = block_columns(model.columns, settings.blocks)
        self._active = state.get("active")
        self._sent = state.get("sent")
        self._largest_move = state["largest_move"]

    def write(self) -> dict[Tensor, Tensor]:
        """Return the new values of the weights and of the state."""
        settings, state = self._settings, self.state
        after: dict[Tensor, Tensor] = {state["turns"]: state["turns"] + settings.turns}
        with self.enter(0, COMPUTES), draw_from(RandomStreams(settings.seed)):
            bounds, total = self._bounds()
            order = self._order(after)
        waiting: list[Slopes] = []
        for turn in range(settings.turns + settings.delay):
            if turn < settings.turns:
                with self.enter(turn, COMPUTES):
                    waiting.append(self._begin(order[turn]))
            if turn >= settings.delay:
                with self.enter(turn, APPLIES):
                    self._apply(waiting.pop(0), bounds)
        with self.enter(settings.turns + settings.delay - 1, APPLIES):
            after |= {self.model.weights: self.weights}
            after |= {state["bounds"]: bounds, state["total"]: total}
            after |= self._end(after[state["turns"]])
        return after

    def _bounds(self) -> tuple[Tensor, Tensor]:
        """Return the curvature along each column, and its sum over columns that move alone."""
        if not self._is_first:
            return self.state["bounds"], self.state["total"]
        norms = measure_norms(self.model)
        return measure_blocks(self.model, norms, self._columns), measure_total(self.model)

    def _order(self, after: dict[Tensor, Tensor]) -> Tensor:
        """Return the block of each turn, int64 (turns,)."""
        blocks, turns = self._settings.blocks, self._settings.turns
        if turns % blocks == 0:
            passes = [self._draw_pass() for _ in range(turns // blocks)]
            order: Tensor = passes[0] if len(passes) == 1 else G["concat"](passes)
            return order
        kept = self.state["order"]
        place = self.state["turns"] % blocks
        after[kept] = G["where"](G["equal"](place, 0), self._draw_pass(), kept)
        chosen: Tensor = G["take"](after[kept], place + np.arange(turns), axis=0)
        return chosen

    def _draw_pass(self) -> Tensor:
        """Return an order of all blocks."""
        blocks = self._settings.blocks
        if self._settings.is_random:
            return permutation(blocks)
        order: Tensor = G["arange"](blocks)
        return order

    def _begin(self, block: Tensor) -> Slopes:
        """Return the gradient along the columns of a block, of the predictions as they are."""
        columns = G["take"](self._columns, block, axis=0)
        active = None if self._active is None else G["take"](self._active, columns, axis=0)
        return self.slopes(columns, self._features(block, columns), active)

    def _features(self, block: Tensor, columns: Tensor) -> Tensor:
        """Return the columns of a block of the features: in one piece a row, if blocks do not
        overlap."""
        features, (blocks, width) = self.model.features, self._columns.shape
        if blocks * width != self.model.columns:
            chosen: Tensor = G["take"](features, columns, axis=1)
            return chosen
        every = G["reshape"](features, (features.shape[0], blocks, width))
        chosen = G["take"](every, block, axis=1)
        return chosen

    def _apply(self, slopes: Slopes, bounds: Tensor) -> None:
        """Apply the step along a block, and note which of its columns can be left out."""
        if slopes.active is not None:
            slopes = self.exchange(slopes)
        old, new = self.step(slopes, G["take"](bounds, slopes.columns, axis=0))
        self.move(slopes, old, new)
        moved = G["max"](G["abs"](new - old))
        self._largest_move = G["maximum"](self._largest_move, moved)
        if slopes.active is None or self._active is None or self._settings.kkt is None:
            return
        assert self._sent is not None
        self._sent = self._sent + G["sum"](G["astype"](slopes.active, "int64"))
        skipped = self.penalty.can_skip(new, slopes.gradient, self._settings.kkt)
        stays = G["logical_or"](
            G["logical_not"](skipped), G["logical_not"](slopes.active)
        )  # a column that was not exchanged has no gradient to judge by
        now = G["take"](self._active, slopes.columns, axis=0)
        self._active = set_rows(self._active, slopes.columns, G["logical_and"](now, stays))

    def _end(self, turns: Tensor) -> dict[Tensor, Tensor]:
        """Return the state after the window; at the end of a pass, whether all is at rest.

        Args:
            turns: the number of turns after the window.
        """
        state, settings = self.state, self._settings
        ends = G["equal"](turns % settings.blocks, 0)
        most = G["max"](G["abs"](self.weights))
        tol = max(settings.tol, ROUNDING * float(np.finfo(self.weights.dtype).eps))
        quiet = G["logical_and"](ends, self._largest_move <= most * tol)
        zero = G["zeros_like"](self._largest_move)
        after = {state["largest_move"]: G["where"](ends, zero, self._largest_move)}
        if self._active is None or self._sent is None:
            after[state["converged"]] = G["where"](ends, quiet, state["converged"])
            return after
        had_all = state["had_all"]
        known = G["logical_or"](had_all, state["converged"])
        calm = G["logical_and"](ends, self._largest_move <= most * state["level"])
        again = G["logical_and"](calm, G["logical_not"](known))  # all columns, once more
        settled = G["logical_and"](quiet, known)
        lower = G["maximum"](state["level"] * LEVEL_STEP, tol)
        after[state["level"]] = G["where"](again, lower, state["level"])
        after[state["converged"]] = G["where"](ends, settled, state["converged"])
        after[had_all] = G["where"](ends, again, had_all)
        after[state["active"]] = G["logical_or"](self._active, again)
        after[state["sent"]] = self._sent
        return after


__all__ = ["ProximalSettings", "ProximalWindow", "block_columns", "make_proximal_state"]
