"""Gradient descent, with momentum or by signs."""

from __future__ import annotations

from typing import Any

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.optim.optimizer_base import SPEC_ONLY, Optimizer
from graphflow.optim.optimizer_checks import check_numbers
from graphflow.optim.update_targets import (
    Rate,
    Target,
    descend,
    shrink,
)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent: g ← g + weight_decay·w; v ← momentum·v + g; w ← w − lr·v, or
    w − lr·(g + momentum·v) with `nesterov`.

    Source: Sutskever et al., ICML 2013, in the form that torch.optim.SGD uses.
    """

    lr: Rate
    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if not isinstance(self.nesterov, bool):
            raise ArgumentError(
                f"SGD at {user_location()}: nesterov must be True or False, not {self.nesterov!r}"
            )
        if self.nesterov and not self.momentum:
            raise ArgumentError(f"SGD at {user_location()}: nesterov needs a momentum above 0")

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        if self.weight_decay:
            gradient = gradient + value * self.weight_decay
        direction = gradient
        if self.momentum:
            new = target.read("momentum") * self.momentum + gradient
            target.write("momentum", new)
            direction = gradient + new * self.momentum if self.nesterov else new
        return descend(value, self.lr, direction)

    def _rests_at_zero(self) -> bool:
        return not self.momentum and not self.weight_decay

    def _trains_complex(self) -> bool:
        return True


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Lion(Optimizer):
    """w ← (1 − lr·weight_decay)·w − lr·sign(β₁m + (1−β₁)g); then m ← β₂m + (1−β₂)g.

    Every element moves by lr, so rates are 3 to 10 times smaller than Adam's.

    Source: Chen et al., "Symbolic discovery of optimization algorithms", NeurIPS 2023.
    """

    lr: Rate = 1e-4
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(
            self, lr=self.lr, beta1=self.beta1, beta2=self.beta2, weight_decay=self.weight_decay
        )

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        mean = target.read("momentum")
        direction = FUNCTIONS["sign"](mean * self.beta1 + gradient * (1 - self.beta1))
        target.write("momentum", mean * self.beta2 + gradient * (1 - self.beta2))
        return descend(shrink(value, self.lr, self.weight_decay), self.lr, direction)


SPEC_ONLY.update((SGD, Lion))
