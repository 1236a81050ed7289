"""Turns that take longer at random, in simulated windows. Public as `gf.parallel.Jitter`."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from graphflow.base.argument_checks import checks_arguments
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ops.control_flow.turn_rules import TurnRules
from graphflow.placement.problems.arrays import Floats


@checks_arguments(ArgumentError)
@dataclass(frozen=True)
class Jitter:
    """Turns of workers that take longer at random, for predictions.

    A plan with a jitter tells the median and the 90 % value of its window over all draws.

    Args:
        share: of turns that take longer, from 0 to 1.
        factor: how many times longer.
        draws: windows that are simulated.
        seed: of the random numbers.

    Raises:
        ArgumentError: a number is out of range.
    """

    share: float = 0.1
    factor: float = 5.0
    draws: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ArgumentError(f"share is from 0 to 1, got {self.share!r}")
        if not 0 < self.factor < math.inf or self.draws < 1 or self.seed < 0:
            raise ArgumentError(
                "factor and draws are positive, and the seed is not negative; got "
                f"{self.factor!r}, {self.draws!r} and {self.seed!r}"
            )

    def scales(self, rules: TurnRules) -> Iterator[Floats]:
        """Return for each draw the factors of a window's turns, as `simulate_window` takes them."""
        return self.factors(rules.turn_shape)

    def factors(self, shape: tuple[int, ...]) -> Iterator[Floats]:
        """Yield for each draw the factors of turns, in an array of this shape."""
        rng = np.random.default_rng(self.seed)
        for _ in range(self.draws):
            yield np.where(rng.random(shape) < self.share, self.factor, 1.0)
