"""Loss scaling: keeps small gradients from vanishing in float16, as a part of the graph.

`minimize(loss, scaling=LossScaling())` differentiates scale·loss. The scale is a variable that
adapts: it grows while all gradients are finite. When one is not, it shrinks, and the step changes
nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.argument_kinds import is_number
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import assign
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor, origin_scope, user_location
from graphflow.ir.spec import is_half
from graphflow.optim.state_variables import state_variable

LEAST, MOST = 2.0**-24, 2.0**120


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class LossScaling:
    """Differentiation of scale·loss, so that small gradients survive float16.

    If a gradient is infinite or NaN, the step changes no parameter and no slot, and the scale is
    multiplied by `backoff`. After `interval` finite steps in a row it is multiplied by `growth`.
    It stays between 2⁻²⁴ and 2¹²⁰.

    Args:
        initial: the first scale, or a float32 scalar variable that holds it, to fetch it or to
            save it under a name.
        growth: factor from 1.
        backoff: factor in (0, 1].
        interval: number of steps.

    Raises:
        ArgumentError: initial is out of range, growth below 1, backoff not in (0, 1], or interval
            no int from 1.

    Source: Micikevicius et al., ICLR 2018, with the numbers of torch.amp.GradScaler.
    """

    initial: float | Tensor = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        given = self.initial
        if isinstance(given, Tensor):
            if given.node.op is not REGISTRY["variable"] or repr(given.spec) != "float32()":
                self._refuse("initial must be a number or a float32 scalar variable", given)
        elif not is_number(given) or not LEAST <= given <= MOST:
            self._refuse("initial must be a number from 2**-24 to 2**120", given)
        if not is_number(self.growth) or not 1 <= self.growth < np.inf:
            self._refuse("growth must be a number from 1", self.growth)
        if not is_number(self.backoff) or not 0 < self.backoff <= 1:
            self._refuse("backoff must be a number above 0, up to 1", self.backoff)
        if type(self.interval) is not int or self.interval < 1:
            self._refuse("interval must be an int from 1", self.interval)

    def _refuse(self, what: str, given: Any) -> None:
        raise ArgumentError(f"LossScaling at {user_location()}: {what}, not {given!r}")

    def variable(self) -> Tensor:
        """Return the variable that holds the scale."""
        if isinstance(self.initial, Tensor):
            return self.initial
        return state_variable("loss_scale", init.full((), float(self.initial)))

    def unscale(self, grads: Sequence[Tensor], scale: Tensor) -> list[Tensor]:
        """Return gradients of the loss, given those of scale·loss; 16-bit ones become float32
        first."""
        unscaled = []
        for gradient in grads:
            with origin_scope(gradient.node, "train/"):
                wide = gradient
                if is_half(gradient.dtype):
                    wide = FUNCTIONS["astype"](gradient, "float32")
                unscaled.append(wide / FUNCTIONS["astype"](scale, wide.dtype))
        return unscaled

    def updates(self, scale: Tensor, finite: Tensor) -> list[Tensor]:
        """Return assignments of the scale and of the number of finite steps in a row."""
        where = FUNCTIONS["where"]
        with origin_scope(scale.node, "train/"):
            good = state_variable(f"{scale.node.name}/good_steps", init.zeros((), "int64"))
            grows = good >= self.interval - 1
            risen = FUNCTIONS["minimum"](scale * float(self.growth), MOST)
            fallen = FUNCTIONS["maximum"](scale * float(self.backoff), LEAST)
            kept = FUNCTIONS["logical_and"](finite, FUNCTIONS["logical_not"](grows))
            return [
                assign(scale, where(finite, where(grows, risen, scale), fallen)),
                assign(good, where(kept, good + 1, 0)),
            ]


def all_finite(grads: Sequence[Tensor]) -> Tensor:
    """Return a bool scalar: True if all elements of all gradients are finite."""
    total: Tensor | None = None
    for gradient in grads:
        with origin_scope(gradient.node, "train/"):
            finite = FUNCTIONS["all"](FUNCTIONS["isfinite"](gradient))
            total = finite if total is None else FUNCTIONS["logical_and"](total, finite)
    assert total is not None
    return total


def assign_if(finite: Tensor, update: Tensor) -> Tensor:
    """Return the assignment `update`, which keeps the variable's value unless `finite` is true."""
    variable, value = update.node.inputs
    with origin_scope(variable.node, "train/"):
        return assign(variable, FUNCTIONS["where"](finite, value, variable))
