"""Rules that divide gradients by the root of their summed or averaged squares."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.optim.optimizer_base import SPEC_ONLY, Optimizer
from graphflow.optim.optimizer_checks import check_numbers
from graphflow.optim.update_targets import (
    Rate,
    Target,
    descend,
    sqrt,
)


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
        new = target.read("rowwise_sum", self.initial, target.variable.shape[:1]) + square
        target.write("rowwise_sum", new)
        spread = FUNCTIONS["reshape"](new, (*new.shape, *(1,) * len(within)))
        return descend(value, self.lr, gradient / (sqrt(spread) + self.epsilon))

    def _rests_at_zero(self) -> bool:
        return bool(np.float32(self.epsilon) > 0)  # otherwise it would compute 0 / 0


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
class Adadelta(Optimizer):
    """v ← decay·v + (1−decay)·g²; d = √(u + ε)/√(v + ε)·g; w ← w − lr·d, where u is
    the running mean of d².

    Source: Zeiler, "ADADELTA: an adaptive learning rate method", arXiv 1212.5701.
    """

    lr: Rate = 1.0
    decay: float = 0.9
    epsilon: float = 1e-6
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(
            self, lr=self.lr, decay=self.decay, epsilon=self.epsilon,
            weight_decay=self.weight_decay,
        )  # fmt: skip

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        if self.weight_decay:
            gradient = gradient + value * self.weight_decay
        square, moved = target.read("adadelta_square"), target.read("adadelta_moved")
        new_square = square * self.decay + (gradient * gradient) * (1 - self.decay)
        move = sqrt(moved + self.epsilon) / sqrt(new_square + self.epsilon) * gradient
        target.write("adadelta_square", new_square)
        target.write("adadelta_moved", moved * self.decay + (move * move) * (1 - self.decay))
        return descend(value, self.lr, move)


SPEC_ONLY.update((Adagrad, RowwiseAdagrad, RMSProp, Adadelta))
