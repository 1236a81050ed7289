"""Kkt: gradients of weights that an L1 penalty holds at 0 do not travel."""

from __future__ import annotations

from dataclasses import replace

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.ir.spec import TensorSpec
from graphflow.parallel.compression.filter import Parts, Reduction, State
from graphflow.parallel.compression.filters.selection import (
    Selection,
    check_number,
    check_share,
    place_marked,
    size_of,
    take_marked,
)
from graphflow.parallel.mesh.count_arguments import set_frozen_fields


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Kkt(Selection):
    """The gradients of weights that are not 0, or that the penalty does not hold at 0.

    With a penalty of λ·|w| on each weight, w = 0 is optimal if |g| ≤ λ for the gradient g of the
    loss without the penalty. So g does not travel if w is 0 and |g| < λ − delta. Nothing is kept:
    the condition is one on the present gradient. If each of K replicas has a part of the gradient,
    its bound is (λ − delta) / K, so the whole gradient holds a weight at 0 too that all of them
    skip.

    Args:
        penalty: λ, above 0.
        delta: how far below λ a gradient has to be, from 0 up to λ: more travels, and a gradient
            that is estimated from a few examples is less often left out by mistake.
        share: the share of the numbers that plans and reports expect to travel.

    Raises:
        ArgumentError: a number is out of its range.

    Source: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014,
        section 5.1.
    """

    penalty: float
    delta: float = 0.0
    share: float = 0.1
    reads_value = True
    only_gradients = True
    excludes_feedback = True
    others = 2

    def __post_init__(self) -> None:
        penalty = check_number("Kkt", "penalty", self.penalty)
        delta = check_number("Kkt", "delta", self.delta, 0.0, penalty)
        if not 0 < penalty < float("inf"):
            raise ArgumentError(
                f"Kkt at {user_location()}: penalty must be above 0 and finite, not {penalty!r}"
            )
        share = check_share("Kkt", "share", self.share)
        set_frozen_fields(self, penalty=penalty, delta=delta, share=share)

    def encode(self, tensor: Tensor, state: State) -> tuple[Parts, State]:
        """Return values and positions, of shape (n,) with as many rows in use as travel, and their
        number."""
        value, *rest = state
        small = abs(tensor) < self.penalty - self.delta  # not so for NaN
        held = FUNCTIONS["logical_and"](value == 0.0, small)
        return take_marked(tensor, FUNCTIONS["logical_not"](held), self.share), tuple(rest)

    def decode(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """Return the values at their positions, and zeros elsewhere."""
        return place_marked(parts, spec)

    def numbers_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of all numbers: any of them may travel."""
        return spec.with_shape((size_of(spec),))

    def reduce(self, tensor: Tensor, state: State, rank: int, count: int) -> Reduction:
        """Exchange the parts of a gradient that replicas have; see the class."""
        part = replace(self, penalty=self.penalty / count, delta=self.delta / count)
        return (yield from Selection.reduce(part, tensor, state, rank, count))


__all__ = ["Kkt"]
