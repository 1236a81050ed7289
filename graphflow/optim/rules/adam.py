"""Adam and its kin: steps by running means of gradients and of their squares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import assign
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.optim.optimizer_base import SPEC_ONLY, Optimizer
from graphflow.optim.optimizer_checks import check_numbers
from graphflow.optim.state_variables import state_variable
from graphflow.optim.update_targets import (
    Rate,
    Target,
    descend,
    in_dtype_of,
    rate_for,
    shrink,
    sqrt,
)

Updates = list[Tensor]


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Adam(Optimizer):
    """m ← β₁m + (1−β₁)g; v ← β₂v + (1−β₂)g²; w ← w − lr·m̂ / (√v̂ + ε), bias-corrected.

    Args:
        weight_decay: added to the gradient, times w. `AdamW` decays apart from it.
        amsgrad: divide by the root of the largest v̂ so far.

    Source: Kingma & Ba, ICLR 2015, algorithm 1; AMSGrad: Reddi, Kale & Kumar, ICLR 2018, in the
        form that torch.optim.Adam uses.
    """

    lr: Rate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    amsgrad: bool = False

    def __post_init__(self) -> None:
        _check_moments(self)
        if not isinstance(self.amsgrad, bool):
            raise ArgumentError(
                f"{type(self).__name__} at {user_location()}: amsgrad must be True or False, not "
                f"{self.amsgrad!r}"
            )

    def _begin(self, grads: Sequence[Tensor]) -> tuple[Any, Updates]:
        """Return 1 − β₁ᵗ and √(1 − β₂ᵗ) of step t; two variables carry the powers."""
        power1 = state_variable("adam/beta1_power", init.ones((), "float64"))
        power2 = state_variable("adam/beta2_power", init.ones((), "float64"))
        new1, new2 = power1 * self.beta1, power2 * self.beta2
        return (1.0 - new1, sqrt(1.0 - new2)), [assign(power1, new1), assign(power2, new2)]

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        correction, root = (in_dtype_of(x, value) for x in shared)
        value, gradient = self._decay(value, gradient)
        step = rate_for(self.lr, value) / correction
        moved: Tensor = value - step * self._direction(gradient, target, root)
        return moved

    def _direction(self, gradient: Tensor, target: Target, root: Tensor) -> Tensor:
        """Return m / (√v̂ + ε), and store the moments."""
        mean, square = _moments(self, gradient, target)
        if self.amsgrad:
            square = FUNCTIONS["maximum"](target.read("adam_largest"), square)
            target.write("adam_largest", square)
        direction: Tensor = mean / (sqrt(square) / root + self.epsilon)
        return direction

    def _decay(self, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Return a value and its gradient with the decay of weights."""
        return value, _add_decay(gradient, value, self.weight_decay)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay apart from the gradient: w ← (1 − lr·weight_decay)·w − ….

    Source: Loshchilov & Hutter, ICLR 2019.
    """

    weight_decay: float = 1e-2

    def _decay(self, value: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return shrink(value, self.lr, self.weight_decay), gradient


class _NAdamStep(NamedTuple):
    """Factors of a step of NAdam, float64 scalars.

    Attributes:
        gradient: of the gradient; `mean`: of the mean of gradients; `root`: √(1 − β₂ᵗ).
    """

    gradient: Tensor
    mean: Tensor
    root: Tensor


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class NAdam(Optimizer):
    """Adam with Nesterov's momentum, whose factor grows from β₁/2 to β₁ over the steps.

    Source: Dozat, "Incorporating Nesterov momentum into Adam", ICLR workshop 2016, in the form that
        torch.optim.NAdam uses.
    """

    lr: Rate = 2e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    momentum_decay: float = 4e-3

    def __post_init__(self) -> None:
        _check_moments(self)
        check_numbers(self, momentum_decay=self.momentum_decay)

    def _begin(self, grads: Sequence[Tensor]) -> tuple[Any, Updates]:
        t, updates = _count_steps()
        product = state_variable("adam/momentum_product", init.ones((), "float64"))
        now, after = self._momentum(t), self._momentum(t + 1.0)
        so_far = product * now
        factors = _NAdamStep(
            (1.0 - now) / (1.0 - so_far), after / (1.0 - so_far * after), sqrt(1.0 - self.beta2**t)
        )
        return factors, [*updates, assign(product, so_far)]

    def _momentum(self, t: Tensor) -> Tensor:
        """Return the momentum of step t."""
        momentum: Tensor = self.beta1 * (1.0 - 0.5 * 0.96 ** (t * self.momentum_decay))
        return momentum

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        factors = _NAdamStep(*(in_dtype_of(x, value) for x in shared))
        gradient = _add_decay(gradient, value, self.weight_decay)
        mean, square = _moments(self, gradient, target)
        direction = factors.gradient * gradient + factors.mean * mean
        return descend(value, self.lr, direction / (sqrt(square) / factors.root + self.epsilon))


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class RAdam(Optimizer):
    """Adam whose first steps, while the variance of v is unknown, go along the mean gradient alone.

    Source: Liu et al., "On the variance of the adaptive learning rate and beyond", ICLR 2020, in
        the form that torch.optim.RAdam uses.
    """

    lr: Rate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check_moments(self)

    def _begin(self, grads: Sequence[Tensor]) -> tuple[Any, Updates]:
        """Return 1 − β₁ᵗ, the factor of 1/(√v + ε), and whether v is to be used."""
        t, updates = _count_steps()
        power = self.beta2**t
        most = 2.0 / (1.0 - self.beta2) - 1.0
        length = most - 2.0 * t * power / (1.0 - power)
        known = length > 5.0
        safe = FUNCTIONS["where"](known, length, 6.0)
        ratio = (safe - 4.0) * (safe - 2.0) * most / ((most - 4.0) * (most - 2.0) * safe)
        return (1.0 - self.beta1**t, sqrt(ratio * (1.0 - power)), known), updates

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        correction, factor = (in_dtype_of(x, value) for x in shared[:2])
        gradient = _add_decay(gradient, value, self.weight_decay)
        mean, square = _moments(self, gradient, target)
        factors = FUNCTIONS["where"](shared[2], factor / (sqrt(square) + self.epsilon), 1.0)
        return descend(value, self.lr, mean / correction * factors)


def _check_moments(rule: Any) -> None:
    """Check the numbers that all rules of this file have."""
    check_numbers(
        rule, lr=rule.lr, beta1=rule.beta1, beta2=rule.beta2, epsilon=rule.epsilon,
        weight_decay=rule.weight_decay,
    )  # fmt: skip


def _count_steps() -> tuple[Tensor, Updates]:
    """Return the number of this step, a float64 scalar from 1, and the update of its variable."""
    last = state_variable("adam/steps", init.zeros((), "float64"))
    number = last + 1.0
    return number, [assign(last, number)]


def _add_decay(gradient: Tensor, value: Tensor, decay: float) -> Tensor:
    total: Tensor = gradient + value * decay if decay else gradient
    return total


def _moments(rule: Any, gradient: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    """Return the running means of gradients and of their squares, and store them."""
    mean, square = target.read("adam_mean"), target.read("adam_square")
    new_mean = mean * rule.beta1 + gradient * (1 - rule.beta1)
    new_square = square * rule.beta2 + (gradient * gradient) * (1 - rule.beta2)
    target.write("adam_mean", new_mean)
    target.write("adam_square", new_square)
    return new_mean, new_square


SPEC_ONLY.update((Adam, AdamW, NAdam, RAdam))
