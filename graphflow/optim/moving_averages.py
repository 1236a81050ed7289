"""Moving averages of weights, which often predict better than the last weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import assign
from graphflow.ir.graph import substitute_tensors
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor, origin_scope, user_location
from graphflow.optim.optimizer_base import Optimizer
from graphflow.optim.optimizer_checks import check_numbers
from graphflow.optim.state_variables import state_variable
from graphflow.optim.update_targets import ProximalTerm, Target, in_dtype_of

_SLOT = "average"


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class MovingAverage(Optimizer):
    """Keep a moving average of each trained variable: a ← decay·a + (1−decay)·w after each step.

    The first step sets a to w. `gf.optim.apply_averages(y, train)` computes y from the averages:

        train = gf.optim.MovingAverage(gf.optim.Adam(1e-3), 0.999).minimize(loss)
        predicted = gf.optim.apply_averages(model(x), train)

    Args:
        inner: the optimiser that trains.
        decay: from 0, below 1.

    Source: Polyak & Juditsky, 1992; with torch's AveragedModel and get_ema_multi_avg_fn as form.
    """

    inner: Optimizer
    decay: float = 0.999

    def __post_init__(self) -> None:
        check_numbers(self, decay=self.decay)
        if not isinstance(self.inner, Optimizer) or isinstance(self.inner, MovingAverage):
            self._refuse("inner must be another optimiser, such as gf.optim.SGD(0.1)", self.inner)
        if self.sparse:
            self._refuse("sparse is for the inner optimiser, inner=…(sparse=True)", self.sparse)

    def _rule_of(self, variable: Tensor) -> Optimizer:
        return self.inner._rule_of(variable)

    def _build_updates(
        self, grads: Sequence[Tensor], variables: Sequence[Tensor], term: ProximalTerm | None = None
    ) -> list[Tensor]:
        updates = self.inner._build_updates(grads, variables, term)
        new = {update.node.inputs[0]: update.node.inputs[1] for update in updates}
        taken = state_variable("average/steps", init.zeros((), "int64"))
        share = FUNCTIONS["where"](taken < 1, 1.0, 1.0 - self.decay)
        updates.append(assign(taken, taken + 1))
        for variable in variables:
            with origin_scope(variable.node, "train/"):
                target = Target(variable)
                average = target.read(_SLOT)
                step = in_dtype_of(new[variable], average) - average
                target.write(_SLOT, average + in_dtype_of(share, average) * step)
                updates += target.updates
        return updates


@checks_argument_names(ArgumentError)
def apply_averages(outputs: Any, train: Tensor) -> Any:
    """Return tensors computed from moving averages in place of the variables.

    Args:
        outputs: a tensor, or a list of tensors.
        train: the result of `MovingAverage(…).minimize`.

    Raises:
        ArgumentError: train keeps no averages, or outputs are no tensors.
    """
    at = f"apply_averages at {user_location()}"
    many = isinstance(outputs, list | tuple)
    given = list(outputs) if many else [outputs]
    if not all(isinstance(tensor, Tensor) for tensor in given):
        raise ArgumentError(f"{at}: outputs must be a tensor or a list of tensors, not {outputs!r}")
    averages = _averages(train) if isinstance(train, Tensor) else {}
    if not averages:
        raise ArgumentError(
            f"{at}: train keeps no averages; make it by gf.optim.MovingAverage(…).minimize(loss)"
        )
    found = substitute_tensors(given, averages)
    return found if many else found[0]


def _averages(train: Tensor) -> dict[Tensor, Tensor]:
    """Return the average of each variable that a step trains, in the variable's dtype."""
    found = {}
    for update in train.node.inputs:
        if update.node.op is not REGISTRY["assign"]:
            continue
        state = update.node.inputs[0]
        owner = state.node.origin
        if owner is not None and state.node.name.endswith(f"/{_SLOT}"):
            variable = owner.outputs[0]
            found[variable] = in_dtype_of(state, variable)
    return found
