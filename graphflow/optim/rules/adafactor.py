"""Adafactor: the means of squared gradients of a matrix, kept as one row and one column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import assign
from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.ir.spec import Size
from graphflow.optim.optimizer_base import SPEC_ONLY, Optimizer
from graphflow.optim.optimizer_checks import check_numbers, refuse_sparse
from graphflow.optim.state_variables import state_variable
from graphflow.optim.update_targets import (
    Rate,
    Target,
    in_dtype_of,
    norm,
    rate_for,
    shrink,
    sqrt,
)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Steps relative to the size of the weights, with state of n + m numbers for n × m weights.

    A variable of two or more axes keeps means of g² over its last and over its last but one axis;
    their outer product stands for the means of g². Step t counts the new ones with t^(−decay). The
    step is at most min(lr, 1/√t) of the root mean square of the weights, and is cut at `clip`.

    Args:
        decay: how fast the share of new gradients falls.
        epsilon: least root mean square of weights for the step.
        clip: largest root mean square of a step before its rate.

    Source: Shazeer & Stern, "Adafactor", ICML 2018, in the form that torch.optim.Adafactor uses.
    """

    lr: Rate = 1e-2
    decay: float = 0.8
    epsilon: float = 1e-3
    clip: float = 1.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(
            self, lr=self.lr, decay=self.decay, epsilon=self.epsilon, clip=self.clip,
            weight_decay=self.weight_decay,
        )  # fmt: skip
        refuse_sparse(self)

    def _begin(self, grads: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return t^(−decay) and 1/√t of step t."""
        last = state_variable("adafactor/steps", init.zeros((), "float64"))
        number = last + 1.0
        return (number**-self.decay, number**-0.5), [assign(last, number)]

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        share, most = (in_dtype_of(x, value) for x in shared)
        tiny = float(np.finfo(value.dtype).eps)
        size = FUNCTIONS["maximum"](_root_mean_square(value), self.epsilon)
        rate = size * FUNCTIONS["minimum"](rate_for(self.lr, value), most)
        squares = self._squares(gradient, target, share, tiny)
        direction = gradient / sqrt(FUNCTIONS["maximum"](squares, tiny * tiny))
        excess = FUNCTIONS["maximum"](_root_mean_square(direction) / self.clip, 1.0)
        moved: Tensor = shrink(value, self.lr, self.weight_decay) - rate / excess * direction
        return moved

    def _squares(self, gradient: Tensor, target: Target, share: Tensor, tiny: float) -> Tensor:
        """Return the running means of g², from rows and columns where there are two axes."""
        squared = gradient * gradient
        if gradient.ndim < 2:
            return _mix(target, "adafactor_squares", squared, share)
        means = FUNCTIONS["mean"]
        rows = _mix(target, "adafactor_rows", means(squared, -1, keepdims=True), share)
        columns = _mix(target, "adafactor_columns", means(squared, -2, keepdims=True), share)
        whole = FUNCTIONS["maximum"](means(rows, -2, keepdims=True), tiny)
        product: Tensor = rows * columns / whole
        return product


def _mix(target: Target, name: str, new: Tensor, share: Tensor) -> Tensor:
    """Return the running mean of a slot with a share of new values, and store it."""
    shape: tuple[Size, ...] = new.shape
    old = target.read(name, shape=shape)
    mean: Tensor = old + (new - old) * share
    target.write(name, mean)
    return mean


def _root_mean_square(x: Tensor) -> Tensor:
    size: Tensor = norm(x) / float(np.sqrt(int(x.size)))
    return size


SPEC_ONLY.add(Adafactor)
