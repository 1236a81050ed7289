"""Significant: a number travels once its changes have added up to something."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, user_location
from graphflow.ir.spec import TensorSpec
from graphflow.optim.update_targets import in_dtype_of
from graphflow.parallel.compression.filter import Array, Parts, State
from graphflow.parallel.compression.filters.selection import (
    Selection,
    check_number,
    check_share,
    place_marked,
    size_of,
    take_marked,
)
from graphflow.parallel.mesh.count_arguments import set_frozen_fields

Limit = float | Callable[[Tensor], Any]


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Significant(Selection):
    """The numbers whose changes, added up since they last travelled, reach delta times the scale of
    their variable.

    The scale is the root mean square of the variable. What does not travel is kept and added to the
    next tensor. A message holds as many numbers as reach the limit, so its size follows from the
    data. Gradients count as they are: for steps of rate η, changes of the variable by delta times
    its scale are `Significant(delta / η)`.

    Args:
        delta: a number from 0, or a function of t, the number of the exchange from 1 as a float
            tensor of shape (): `lambda t: 0.5 / t`. A constant keeps training from getting nearer
            to the optimum than delta.
        share: the share of the numbers that plans and reports expect to travel.

    Raises:
        ArgumentError: delta is neither, share is outside of (0, 1]; in `minimize`: the function
            returns no scalar.

    Source: Hsieh et al., "Gaia", NSDI 2017, section 4.2.
    """

    delta: Limit
    share: float = 0.1
    feedback = True
    reads_value = True
    others = 2

    def __post_init__(self) -> None:
        delta = self.delta
        if isinstance(delta, Tensor):
            raise ArgumentError(
                f"Significant at {user_location()}: delta must be a number or a function of the "
                f"exchange's number, such as lambda t: 0.5 / t, not {delta!r}"
            )
        if not callable(delta):
            delta = check_number("Significant", "delta", delta)
        set_frozen_fields(self, delta=delta, share=check_share("Significant", "share", self.share))

    def initial(self, spec: TensorSpec) -> Sequence[Array]:
        """Return the number of exchanges so far, if delta is a function of it."""
        return (np.zeros((), "int64"),) if callable(self.delta) else ()

    def encode(self, tensor: Tensor, state: State) -> tuple[Parts, State]:
        """Return values and positions, of shape (n,) with as many rows in use as travel, and their
        number."""
        value, *count = state
        after = tuple(one + 1 for one in count)
        limit = self._limit(tensor, *after) * FUNCTIONS["sqrt"](FUNCTIONS["mean"](value * value))
        rests = FUNCTIONS["logical_or"](abs(tensor) < limit, tensor == 0.0)  # not so for NaN
        marks = FUNCTIONS["logical_not"](rests)
        return take_marked(tensor, marks, self.share), after

    def _limit(self, like: Tensor, *number: Tensor) -> Tensor:
        """Return delta in the dtype of a tensor."""
        if not callable(self.delta):
            return as_tensor(self.delta, like.dtype)
        found = as_tensor(self.delta(in_dtype_of(number[0], like)))
        if found.ndim:
            raise ArgumentError(f"{self!r}: delta must return a scalar, not {found!r}")
        return in_dtype_of(found, like)

    def numbers_spec(self, spec: TensorSpec) -> TensorSpec:
        """Return the spec of all numbers: any of them may travel."""
        return spec.with_shape((size_of(spec),))

    def decode(self, parts: Parts, spec: TensorSpec) -> Tensor:
        """Return the values at their positions, and zeros elsewhere."""
        return place_marked(parts, spec)


__all__ = ["Significant"]
