"""L-BFGS: steps by the curvature that the last steps showed."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from functools import reduce

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError
from graphflow.frontend.builders import assign
from graphflow.ir.op import FUNCTIONS, Tensor, origin_scope, user_location
from graphflow.ops.base.composite import widen
from graphflow.optim.optimizer_base import Optimizer
from graphflow.optim.optimizer_checks import check_numbers, refuse_sparse
from graphflow.optim.state_variables import state_variable
from graphflow.optim.update_targets import (
    ProximalTerm,
    Rate,
    Target,
    in_dtype_of,
    rate_for,
)

_LEAST_CURVATURE = 1e-10
"""Least product of a step and the change of its gradient for the pair to be kept."""

Vector = list[Tensor]  # one tensor for each variable


@checks_argument_names(ArgumentError)
@dataclass(frozen=True)
class LBFGS(Optimizer):
    """w ← w − lr·Hg, where H approximates the inverse Hessian from the last `history` steps.

    For losses over the whole data, since the change of a gradient between batches is no curvature.
    There is no line search. The first step is −g·lr·min(1, 1/‖g‖₁).

    Args:
        history: number of steps that are kept, from 1. Each takes two copies of the variables.

    Source: Liu & Nocedal, "On the limited memory BFGS method", Math. Programming 45, 1989, in the
        form that torch.optim.LBFGS(max_iter=1) uses.
    """

    lr: Rate = 1.0
    history: int = 10

    def __post_init__(self) -> None:
        check_numbers(self, lr=self.lr)
        refuse_sparse(self)
        if isinstance(self.history, bool) or not isinstance(self.history, int) or self.history < 1:
            raise ArgumentError(
                f"LBFGS at {user_location()}: history must be an int from 1, not {self.history!r}"
            )

    def _build_updates(
        self, grads: Sequence[Tensor], variables: Sequence[Tensor], term: ProximalTerm | None = None
    ) -> list[Tensor]:
        rule, counting = self._with_rate()
        where, stack, largest = (FUNCTIONS[name] for name in ("where", "concat", "maximum"))
        targets = [Target(variable) for variable in variables]
        values = [widen(variable) for variable in variables]
        slopes = [in_dtype_of(g, v) for g, v in zip(grads, values, strict=True)]
        if term is not None:
            slopes = [term.add_to(g, v) for g, v in zip(slopes, values, strict=True)]
        taken = state_variable("lbfgs/steps_taken", init.zeros((), "int64"))
        inverse = state_variable("lbfgs/inverse_products", init.zeros((self.history,), "float64"))
        scale = state_variable("lbfgs/scale", init.ones((), "float64"))

        moved = _read(targets, "lbfgs_step")
        changed = _minus(slopes, _read(targets, "lbfgs_gradient"))
        product = _dot(changed, moved)
        counts = product > _LEAST_CURVATURE
        safe = where(counts, product, 1.0)

        def push(kept: Tensor, new: Tensor) -> Tensor:
            """Return a history with a new entry at its end, if the last step counts."""
            longer: Tensor = where(counts, stack([kept[1:], new[None]]), kept)
            return longer

        inverses = push(inverse, 1.0 / safe)
        steps = [*map(push, _read(targets, "lbfgs_steps", self.history), moved)]
        changes = [*map(push, _read(targets, "lbfgs_changes", self.history), changed)]
        new_scale = where(counts, safe / largest(_dot(changed, changed), 1e-300), scale)
        direction = _two_loops(slopes, steps, changes, inverses, new_scale, self.history)

        length = _sum([FUNCTIONS["sum"](FUNCTIONS["abs"](g)) for g in slopes])
        cut = where(taken < 1, FUNCTIONS["minimum"](1.0, 1.0 / largest(length, 1e-300)), 1.0)
        taking = _times(cut * rate_for(vars(rule)["lr"], cut), direction)
        states = {
            "lbfgs_step": taking, "lbfgs_gradient": slopes, "lbfgs_steps": steps,
            "lbfgs_changes": changes,
        }  # fmt: skip
        updates = [assign(taken, taken + 1), assign(inverse, inverses), assign(scale, new_scale)]
        for i, (target, value) in enumerate(zip(targets, values, strict=True)):
            with origin_scope(target.variable.node, "train/"):
                for name, state in states.items():
                    target.write(name, state[i])
                new = in_dtype_of(value + taking[i], target.variable)
                updates += [*target.updates, assign(target.variable, new)]
        return [*updates, *counting]


def _two_loops(
    slopes: Vector, steps: Vector, changes: Vector, inverses: Tensor, scale: Tensor, history: int
) -> Vector:
    """Return −H·slopes. Entries of the history that are not in use are 0 and change nothing."""
    at = [([s[i] for s in steps], [y[i] for y in changes], inverses[i]) for i in range(history)]
    along = [-slope for slope in slopes]
    shares = []
    for step, change, inverse in reversed(at):
        shares.append(inverse * _dot(step, along))
        along = _minus(along, _times(shares[-1], change))
    along = _times(scale, along)
    for (step, change, inverse), share in zip(at, reversed(shares), strict=True):
        along = _minus(along, _times(inverse * _dot(change, along) - share, step))
    return along


def _read(targets: Sequence[Target], name: str, entries: int | None = None) -> Vector:
    """Return a slot of each variable, with an axis of entries in front if it is a history."""
    found = []
    for target in targets:
        with origin_scope(target.variable.node, "train/"):
            shape = target.variable.shape
            found.append(target.read(name, shape=shape if entries is None else (entries, *shape)))
    return found


def _dot(a: Vector, b: Vector) -> Tensor:
    """Return the scalar product over all variables, in float64."""
    return _sum([FUNCTIONS["sum"](x * y) for x, y in zip(a, b, strict=True)])


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total: Tensor = reduce(operator.add, [FUNCTIONS["astype"](part, "float64") for part in parts])
    return total


def _minus(a: Vector, b: Vector) -> Vector:
    return [x - y for x, y in zip(a, b, strict=True)]


def _times(factor: Tensor, vector: Vector) -> Vector:
    return [in_dtype_of(factor, x) * x for x in vector]
