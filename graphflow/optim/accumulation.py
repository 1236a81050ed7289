"""Accumulation: add up the gradients of several steps before one update."""

from __future__ import annotations

from collections.abc import Sequence

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import assign
from graphflow.ir.op import FUNCTIONS, Tensor, origin_scope
from graphflow.optim.loss_scaling import assign_if
from graphflow.optim.optimizer_checks import check_numbers
from graphflow.optim.state_variables import state_variable
from graphflow.optim.update_targets import ProximalTerm, Target, in_dtype_of
from graphflow.optim.wrapping_optimizer import WrappingOptimizer


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class Accumulate(WrappingOptimizer):
    """Update by the mean gradient of each `steps` steps; in between, variables stay as they are.

    For a batch larger than fits in memory at once. `gf.parallel.Data(1, accumulate=n)` divides a
    batch that is fed whole. Rates, schedules and moments count updates.

    Args:
        inner: the optimiser that updates.
        steps: an int from 1.
    """

    steps: int

    def __post_init__(self) -> None:
        check_numbers(self)
        self._check_inner()
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            self._refuse("steps must be an int from 1", self.steps)
        if self.sparse or self.inner.sparse:
            self._refuse("sparse must be False, since sums of gradients are whole", True)

    def _build_updates(
        self, grads: Sequence[Tensor], variables: Sequence[Tensor], term: ProximalTerm | None = None
    ) -> list[Tensor]:
        where = FUNCTIONS["where"]
        seen = state_variable("accumulate/steps", init.zeros((), "int64"))
        last = seen + 1 >= self.steps
        updates = [assign(seen, where(last, 0, seen + 1))]
        means = []
        for gradient, variable in zip(grads, variables, strict=True):
            with origin_scope(variable.node, "train/"):
                target = Target(variable)
                before = target.read("accumulated")
                total = before + in_dtype_of(gradient, before)
                target.write("accumulated", where(last, 0.0, total))
                means.append(total / float(self.steps))
                updates += target.updates
        inner = super()._build_updates(means, variables, term)
        return [*updates, *(assign_if(last, update) for update in inner)]
