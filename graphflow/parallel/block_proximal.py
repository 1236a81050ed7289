"""BlockProximal: delayed block proximal gradient for linear models of very many columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, NamedTuple

import numpy as np

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.formatting import show_count
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.op import Location, Node, Tensor, next_stream, user_location
from graphflow.parallel.blocks.block_strategy import BlockState, BlockStrategy
from graphflow.parallel.blocks.linear_model import LinearModel
from graphflow.parallel.blocks.proximal_window import (
    ProximalSettings,
    ProximalWindow,
    make_proximal_state,
)
from graphflow.parallel.compression.exchange import seed_of
from graphflow.parallel.mesh.count_arguments import as_count, set_frozen_fields


class BlockProgress(NamedTuple):
    """The progress of a block method.

    Attributes:
        turns: the turns so far.
        passes: the passes over all blocks so far.
        active: the columns that are exchanged.
        sent: the share of gradients that were exchanged so far.
        converged: whether no weight moved by more than `tol` of the largest one, in a pass that
            began with all columns active.
    """

    turns: int
    passes: float
    active: int
    sent: float
    converged: bool


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class BlockProximal(BlockStrategy):
    """Delayed block proximal gradient, for a loss of `features @ weights` plus a penalty.

    In turn t, one block b of columns moves: w_b ← prox(w_b − γ/U_b · g_b), with step γ/U_b. γ is
    the rate of the `gf.optim.SGD`; 1 fits most problems. U are bounds on the curvature along each
    column, which the first run measures from the features. A run is a window of turns, and begins
    with the predictions of the weights as they are. Fetches are from before the window.

    On one device by itself. As a product with `gf.parallel.Data(n)`, or a Shard, each of n workers
    has a part of the examples, and in each turn they exchange the gradient along a block.

    Args:
        blocks: the number of blocks.
        delay: τ, the number of turns between computing a gradient and applying its step. The
            exchange of a turn then hides behind the next τ turns.
        penalty: the penalty of the weights, such as `gf.linear.L1(0.1)`, or any value with a
            method `prox(weights, step)`; None: no penalty.
        kkt: leave out columns whose weight is 0 and whose gradient is this far from moving it; 0
            leaves out most. After quiet passes all columns are active once more. None: no filter.
            The penalty needs `can_skip`.
        order: "random": a new order in each pass, drawn by the seed and the step's number; or
            "cyclic".
        window: the number of turns in a run, a multiple or a divisor of `blocks`; default: a pass.
        tol: the largest move in a pass, relative to the largest weight, that counts as rest; no
            less than rounding.
        curvature: a bound on the second derivative of the loss by each prediction; None: derived,
            if it does not depend on the predictions.
        beside: the strategy that divides the examples, as a product sets it.

    Raises:
        ShardingError: an argument is invalid, the delay does not fit in a window; in `minimize`:
            there are more blocks than columns, or more variables than one; when a graph is
            partitioned: the model is not linear, or the optimiser no plain SGD.
        CheckError: in a run: the features that are fed are others than those of the first run.

    Source: Li, Smola & Andersen, "Communication Efficient Distributed Machine Learning with the
        Parameter Server", NIPS 2014.
    """

    blocks: int
    delay: int = 0
    penalty: Any = None
    kkt: float | None = None
    order: str = "random"
    window: int | None = None
    tol: float = 1e-9
    curvature: float | None = None
    beside: Any = None
    line: Location = field(default_factory=user_location, init=False, repr=False)
    _states: dict[Node, BlockState] = field(default_factory=dict, init=False, repr=False)
    _stream: tuple[int, int] = field(default_factory=next_stream, init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_count("blocks")
        self._check_count("delay", least=0)
        self._check_common()
        turns = self.blocks if self.window is None else as_count(self.window)
        if turns is None or (turns % self.blocks and self.blocks % turns):
            raise ShardingError(
                f"{self._where}: window must be a number of turns that divides the {self.blocks} "
                f"blocks, or a multiple of them, not {self.window!r}"
            )
        set_frozen_fields(self, window=turns)
        if self.delay >= turns:
            raise ShardingError(
                f"{self._where}: delay={self.delay} has to be less than the {turns} turns of a run "
                "(window=), which ends with all steps applied"
            )
        if self.order not in ("random", "cyclic"):
            raise ShardingError(
                f'{self._where}: order must be "random" or "cyclic", not {self.order!r}'
            )
        self._check_number("tol")
        if self.kkt is not None:
            self._check_number("kkt")
            if not callable(getattr(self.penalty, "can_skip", None)):
                raise ShardingError(
                    f"{self._where}: kkt={self.kkt} needs a penalty that keeps weights at 0, with "
                    "a method can_skip(weights, gradient, margin), such as gf.linear.L1(0.1), not "
                    f"{self.penalty!r}"
                )

    @property
    def turns(self) -> int:
        """The number of turns in a run."""
        assert self.window is not None
        return self.window

    @property
    def _settings(self) -> ProximalSettings:
        return ProximalSettings(
            self.blocks, self.delay, self.turns, self.kkt, self.tol, self.order == "random",
            seed_of(self._stream, 0, 0),
        )  # fmt: skip

    def make_state(self, weights: Tensor) -> dict[str, Tensor]:
        """Make the method's variables for some weights.

        Raises:
            ShardingError: there are more blocks than columns.
        """
        columns = int(weights.shape[0])
        if self.blocks > columns:
            raise ShardingError(
                f"{self._where}: blocks={self.blocks}, but {weights.name!r} (made at "
                f"{weights.node.location}) has only {columns} columns, and each block is one at "
                "least"
            )
        return make_proximal_state(weights, self._settings)

    def write_window(
        self, model: LinearModel, state: Mapping[str, Tensor], is_first: bool
    ) -> dict[Tensor, Tensor]:
        """Return the values of the weights and of the state after a window of turns."""
        return ProximalWindow(model, state, self.penalty, self._settings, is_first).write()

    def describe(self) -> str:
        """Return a sentence for plans and reports."""
        late = f", each applied {show_count(self.delay, 'turn')} later" if self.delay else ""
        return f"BlockProximal: {self.turns} turns a run, one of {self.blocks} blocks each{late}"

    def progress(self, session: Any, weights: Tensor) -> BlockProgress:
        """Return the progress of some weights in a session.

        Args:
            session: the session that trains them.
            weights: the variable.

        Raises:
            ShardingError: the strategy does not train the variable.
        """
        state = self._states.get(weights.node)
        if state is None:
            raise ShardingError(
                f"{self._where}: it does not train {weights.name!r} (made at "
                f"{weights.node.location})"
            )
        known = state.variables
        turns = int(session.get(known["turns"]))
        width = -(-int(weights.shape[0]) // self.blocks)
        active, sent = int(weights.shape[0]), 1.0
        if self.kkt is not None:
            active = int(np.sum(session.get(known["active"])))
            sent = int(session.get(known["sent"])) / max(turns * width, 1)
        done = bool(session.get(known["converged"]))
        return BlockProgress(turns, turns / self.blocks, active, sent, done)


__all__ = ["BlockProgress", "BlockProximal"]
