"""BlockScheduled: parallel coordinate descent on columns that moved lately and hardly interact."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ShardingError
from graphflow.ir.op import Location, Node, Tensor, next_stream, user_location
from graphflow.parallel.blocks.block_strategy import BlockState, BlockStrategy
from graphflow.parallel.blocks.linear_model import LinearModel
from graphflow.parallel.blocks.scheduled_window import (
    ScheduledSettings,
    ScheduledWindow,
    make_scheduled_state,
)
from graphflow.parallel.compression.exchange import seed_of


@checks_arguments(ShardingError)
@dataclass(frozen=True, eq=False)
class BlockScheduled(BlockStrategy):
    """Coordinate descent on up to `parallel` columns at once, for a loss of `features @ weights`
    plus a penalty.

    In each turn, columns are drawn with odds |Δw_j| + `floor`, Δw_j being their last move. Of two
    drawn columns with |cos(x_j, x_k)| of at least `correlation`, the later one does not move. Each
    other column moves as if alone: w_j ← prox(w_j − γ/U_j · g_j), with the curvature U_j along it.
    γ is the rate of the `gf.optim.SGD`; at 1 a column moves to its optimum. A run is a window of
    turns, and begins with the predictions of the weights as they are. Fetches are from before it.

    On one device by itself; as a product with `gf.parallel.Data(n)`, or a Shard, each of n workers
    has a part of the examples. A turn exchanges the gradient along the drawn columns, and their
    products with each other: twice `parallel` numbers, and the square of that.

    Args:
        parallel: the most columns that move at once. Twice as many are drawn.
        correlation: the least |cos| of two columns that do not move at once; above 1, all may.
        floor: added to moves, so that columns at rest are drawn, too. Huge: all alike.
        penalty: the penalty of the weights, such as `gf.linear.L1(0.1)`; None: no penalty.
        window: the number of turns in a run.
        curvature: a bound on the second derivative of the loss by each prediction; None: derived,
            if it does not depend on the predictions.
        beside: the strategy that divides the examples, as a product sets it.

    Raises:
        ShardingError: an argument is invalid; in `minimize`: more columns at once than there are,
            or more variables than one; when a graph is partitioned: the model is not linear, or the
            optimiser no plain SGD.
        CheckError: in a run: the features that are fed are others than those of the first run.

    Source: Lee et al., "On Model Parallelization and Scheduling Strategies for Distributed Machine
        Learning", NIPS 2014.
    """

    parallel: int
    correlation: float = 0.1
    floor: float = 1e-6
    penalty: Any = None
    window: int = 8
    curvature: float | None = None
    beside: Any = None
    line: Location = field(default_factory=user_location, init=False, repr=False)
    _states: dict[Node, BlockState] = field(default_factory=dict, init=False, repr=False)
    _stream: tuple[int, int] = field(default_factory=next_stream, init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_count("parallel")
        self._check_count("window")
        self._check_number("correlation")
        self._check_number("floor")
        self._check_common()
        if not self.correlation or not self.floor:
            raise ShardingError(
                f"{self._where}: correlation={self.correlation} and floor={self.floor} must be "
                "above 0, or no column could move beside another one, or once it is at rest"
            )

    @property
    def turns(self) -> int:
        """The number of turns in a run."""
        return self.window

    @property
    def delay(self) -> int:
        """The number of turns after which a step is applied: 0."""
        return 0

    @property
    def _settings(self) -> ScheduledSettings:
        seed = seed_of(self._stream, 0, 0)
        return ScheduledSettings(self.parallel, self.correlation, self.floor, self.window, seed)

    def make_state(self, weights: Tensor) -> dict[str, Tensor]:
        """Make the method's variables for some weights.

        Raises:
            ShardingError: more columns would move at once than there are.
        """
        columns = int(weights.shape[0])
        if self.parallel > columns:
            raise ShardingError(
                f"{self._where}: parallel={self.parallel}, but {weights.name!r} (made at "
                f"{weights.node.location}) has only {columns} columns"
            )
        return make_scheduled_state(weights, self._settings)

    def write_window(
        self, model: LinearModel, state: Mapping[str, Tensor], is_first: bool
    ) -> dict[Tensor, Tensor]:
        """Return the values of the weights and of the state after a window of turns."""
        return ScheduledWindow(model, state, self.penalty, self._settings, is_first).write()

    def describe(self) -> str:
        """Return a sentence for plans and reports."""
        return (
            f"BlockScheduled: {self.window} turns a run, each of up to {self.parallel} columns "
            f"with |cos| below {self.correlation:g}"
        )


__all__ = ["BlockScheduled"]
