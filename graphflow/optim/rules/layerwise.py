"""Rules for large batches: the length of each variable's step follows the length of its weights."""

from __future__ import annotations

from typing import Any

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.optim.optimizer_base import SPEC_ONLY, Optimizer
from graphflow.optim.optimizer_checks import check_numbers, refuse_sparse
from graphflow.optim.rules.adam import Adam
from graphflow.optim.update_targets import Rate, Target, descend, in_dtype_of, norm, rate_for


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class LARS(Optimizer):
    """d = g + weight_decay·w; v ← momentum·v + lr·trust·‖w‖/(‖g‖ + weight_decay·‖w‖)·d; w ← w − v.

    Where a norm is 0, v grows by lr·d. Biases and scales of norms are best left to another rule
    (`gf.optim.Groups`).

    Source: You, Gitman & Ginsburg, "Large batch training of convolutional networks", 2017.
    """

    lr: Rate
    momentum: float = 0.9
    weight_decay: float = 0.0
    trust: float = 1e-3

    def __post_init__(self) -> None:
        check_numbers(
            self, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay,
            trust=self.trust,
        )  # fmt: skip
        refuse_sparse(self)

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        weights, slope = norm(value), norm(gradient)
        ratio = _ratio(weights * self.trust, slope + weights * self.weight_decay, slope)
        step = ratio * rate_for(self.lr, value) * (gradient + value * self.weight_decay)
        velocity = target.read("momentum") * self.momentum + step
        target.write("momentum", velocity)
        moved: Tensor = value - velocity
        return moved


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class LAMB(Adam):
    """r = m̂ / (√v̂ + ε) + weight_decay·w; w ← w − lr·‖w‖/‖r‖·r, or w − lr·r where a norm is 0.

    Source: You et al., "Large batch optimization for deep learning", ICLR 2020.
    """

    epsilon: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse_sparse(self)

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        correction, root = (in_dtype_of(x, value) for x in shared)
        direction = self._direction(gradient, target, root) / correction
        direction = direction + value * self.weight_decay
        length = norm(direction)
        return descend(value, self.lr, _ratio(norm(value), length, length) * direction)


def _ratio(weights: Tensor, slope: Tensor, length: Tensor) -> Tensor:
    """Return weights/slope; 1 where the weights or the length are 0."""
    counts = FUNCTIONS["logical_and"](weights > 0.0, length > 0.0)
    where = FUNCTIONS["where"]
    ratio: Tensor = where(counts, weights / where(counts, slope, 1.0), 1.0)
    return ratio


SPEC_ONLY.update((LARS, LAMB))
