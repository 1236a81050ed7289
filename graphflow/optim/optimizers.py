"""The optimisers of this package; each is a frozen value with one update rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import assign
from graphflow.ir.op import FUNCTIONS, Tensor, user_location
from graphflow.optim.optimizer_base import SPEC_ONLY, Optimizer, check_numbers
from graphflow.optim.update_targets import (
    Rate,
    Target,
    descend,
    in_dtype_of,
    rate_for,
    sqrt,
    state_variable,
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
class Adam(Optimizer):
    """m ← β₁m + (1−β₁)g; v ← β₂v + (1−β₂)g²; w ← w − lr·m̂ / (√v̂ + ε), bias-corrected.

    Source: Kingma & Ba, ICLR 2015, algorithm 1.
    """

    lr: Rate = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check_numbers(self, lr=self.lr, beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon)

    def _begin(self, grads: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return 1 − β₁ᵗ and √(1 − β₂ᵗ) of step t; two variables carry the powers."""
        power1 = state_variable("adam/beta1_power", init.ones((), "float64"))
        power2 = state_variable("adam/beta2_power", init.ones((), "float64"))
        new1, new2 = power1 * self.beta1, power2 * self.beta2
        return (1.0 - new1, sqrt(1.0 - new2)), [assign(power1, new1), assign(power2, new2)]

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        correction1, root2 = (in_dtype_of(x, value) for x in shared)
        mean, square = target.read("adam_mean"), target.read("adam_square")
        new_mean = mean * self.beta1 + gradient * (1 - self.beta1)
        new_square = square * self.beta2 + (gradient * gradient) * (1 - self.beta2)
        step = rate_for(self.lr, value) / correction1
        direction = new_mean / (sqrt(new_square) / root2 + self.epsilon)
        target.write("adam_mean", new_mean)
        target.write("adam_square", new_square)
        moved: Tensor = self._decay(value) - step * direction
        return moved

    def _decay(self, value: Tensor) -> Tensor:
        return value


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay apart from the gradient: w ← (1 − lr·weight_decay)·w − ….

    Source: Loshchilov & Hutter, ICLR 2019.
    """

    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, weight_decay=self.weight_decay)

    def _decay(self, value: Tensor) -> Tensor:
        decayed: Tensor = value * (1.0 - rate_for(self.lr, value) * self.weight_decay)
        return decayed


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class RMSProp(Optimizer):
    """v ← decay·v + (1−decay)·g²; w ← w − lr·g / (√v + ε), with optional momentum on the
    quotient.

    Source: Tieleman & Hinton, Coursera lecture 6.5, 2012, in the form that torch.optim.RMSprop
    uses.
    """

    lr: Rate = 1e-2
    decay: float = 0.99
    momentum: float = 0.0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check_numbers(
            self, lr=self.lr, decay=self.decay, momentum=self.momentum, epsilon=self.epsilon
        )

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        square = target.read("rms_square")
        new_square = square * self.decay + (gradient * gradient) * (1 - self.decay)
        target.write("rms_square", new_square)
        direction = gradient / (sqrt(new_square) + self.epsilon)
        if self.momentum:
            direction = target.read("momentum") * self.momentum + direction
            target.write("momentum", direction)
        return descend(value, self.lr, direction)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Adagrad(Optimizer):
    """s ← s + g²; w ← w − lr·g / (√s + ε).

    Source: Duchi, Hazan & Singer, JMLR 12, 2011.
    """

    lr: Rate = 1e-2
    initial: float = 0.0
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        check_numbers(self, lr=self.lr, initial=self.initial, epsilon=self.epsilon)

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        new = target.read("adagrad_sum", self.initial) + gradient * gradient
        target.write("adagrad_sum", new)
        direction = gradient / (sqrt(new) + self.epsilon)
        return descend(value, self.lr, direction)

    def _rests_at_zero(self) -> bool:
        return bool(np.float32(self.epsilon) > 0)  # otherwise it would compute 0 / 0


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class RowwiseAdagrad(Optimizer):
    """Adagrad with one number a row: s ← s + mean(g²) over a row; w ← w − lr·g / (√s + ε).

    A row is a slice along the first axis. The slot s has the shape (rows,), so the state of a table
    of rows of 64 is 1/64 of Adagrad's. Gradients of ids that a step looks up twice are added first.

    Source: "exact row-wise Adagrad" of FBGEMM (Khudia et al., 2021), used in DLRM.
    """

    lr: Rate = 1e-2
    initial: float = 0.0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        check_numbers(self, lr=self.lr, initial=self.initial, epsilon=self.epsilon)

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        within = tuple(range(1, gradient.ndim))
        square = FUNCTIONS["mean"](gradient * gradient, within)
        new = target.read("rowwise_sum", self.initial, axes=1) + square
        target.write("rowwise_sum", new)
        spread = FUNCTIONS["reshape"](new, (*new.shape, *(1,) * len(within)))
        return descend(value, self.lr, gradient / (sqrt(spread) + self.epsilon))

    def _rests_at_zero(self) -> bool:
        return bool(np.float32(self.epsilon) > 0)  # otherwise it would compute 0 / 0


SPEC_ONLY.update((SGD, Adam, AdamW, RMSProp, Adagrad, RowwiseAdagrad))
