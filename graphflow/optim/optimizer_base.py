"""The base of optimisers: from a loss to one node that updates variables at the end of a step.

Each optimiser is a frozen value. `minimize` builds gradients, slots (variables for its state, such
as a momentum) and assignments. A rate may be a tensor, so a schedule is a part of the graph.

The gradient of a table that is used by lookups alone (`gf.nn.embedding`) consists of rows. It stays
sparse if that changes no value, or if `sparse=True` allows it: the update then reads and writes
only those rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

from graphflow.base.argument_checks import checks_argument_names, did_you_mean
from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.process.gc_pause import without_collection
from graphflow.errors import (
    ArgumentError,
    ShardingError,
    VariableError,
)
from graphflow.ir.graph import Graph
from graphflow.ir.op import REGISTRY, Tensor, name_scope, origin_scope, user_location
from graphflow.ir.spec import Size, is_inexact, kind
from graphflow.ops.base.composite import widen
from graphflow.optim.loss_scaling import LossScaling, all_finite, assign_if
from graphflow.optim.optimizer_checks import check_minimize
from graphflow.optim.schedules import RateSchedule
from graphflow.optim.update_copies import UpdateCopies, VariableUpdate
from graphflow.optim.update_targets import (
    ProximalTerm,
    Target,
    hashed_target,
    in_dtype_of,
    lookups_of,
    row_target,
)
from graphflow.strategy import Strategy, filtered_gradients
from graphflow.transforms.reverse_mode import gradients

SPEC_ONLY: set[type] = set()
"""Optimisers whose update follows from the specs of variable and gradient alone."""
_OF_OTHERS = ("init", "step", "zero_grad", "apply_gradients", "update", "compute_gradients")
"""Methods of optimisers in other libraries."""


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimisers.

    Args:
        sparse: update only the rows of a table, and of its slots, that a step looked up ("lazy"
            updates): elsewhere neither moments nor weights decay. Optimisers for which a zero
            gradient changes nothing (SGD without momentum, Adagrad, RowwiseAdagrad) update so in
            any case.
    """

    sparse: bool = field(default=False, kw_only=True)
    _refuses_scaling: ClassVar[str] = ""
    """Why gradients of a multiple of the loss are none that it can take."""

    if not TYPE_CHECKING:  # type checkers would allow every attribute

        def __getattr__(self, name: str) -> NoReturn:
            text = f"{type(self).__name__} has no attribute {name!r}"
            if name in _OF_OTHERS:
                text += "; train = optimiser.minimize(loss), and s.run(train, feeds) takes a step"
            elif name[0] != "_" and (hint := did_you_mean(name, dir(type(self)))):
                text += f"; {hint}"
            raise AttributeError(text, name=name, obj=self)

    @checks_argument_names(ArgumentError)
    def minimize(
        self,
        loss: Tensor,
        variables: Sequence[Tensor] | None = None,
        *,
        transform: Callable[[list[Tensor]], list[Tensor]] | None = None,
        strategy: Strategy | None = None,
        scaling: LossScaling | None = None,
    ) -> Tensor:
        """Return a node that moves variables against the gradient of the loss; fetching it gives
        None.

        Args:
            loss: a float scalar.
            variables: default: all trainable variables that the loss depends on.
            transform: changes the list of gradients first, e.g. `lambda g:
                clip_by_global_norm(g, 1.0)[0]`.
            strategy: how to partition the step over devices: `gf.parallel.Data(replicas=2)`,
                `gf.parallel.Shard(…)`. Results are those of one device, except for the order of
                sums.
            scaling: differentiate a multiple of the loss, for gradients that float16 would
                lose.

        Raises:
            DifferentiationError: the loss is not a float scalar, or it depends on a variable
                through an op without a gradient.
            VariableError: there is nothing to train.
        """
        check_minimize(loss, variables, transform, strategy, scaling)
        if scaling is not None and self._refuses_scaling:
            self._refuse(f"scaling must be None, since {self._refuses_scaling}", scaling)
        every = trainable_variables(loss) if variables is None else variables
        chosen = self._select(every)
        if not chosen:
            raise VariableError(
                f"minimize at {user_location()}: the loss depends on no trainable variable; make "
                "weights with gf.variable(initial) or layers of gf.nn, and compute the loss from "
                "them"
            )
        if scaling is None:
            grads, kept = self._exchange(strategy, gradients(loss, chosen), chosen)
            grads = grads if transform is None else transform(grads)
            return self._apply(grads, chosen, None, kept, strategy, loss)
        scale = scaling.variable()
        grads = gradients(loss, chosen, [in_dtype_of(scale, loss)])
        grads, kept = self._exchange(strategy, grads, chosen, scale)
        grads = scaling.unscale(grads, scale)
        finite = all_finite(grads)
        grads = grads if transform is None else transform(grads)
        kept = [assign_if(finite, update) for update in kept]
        more = [*kept, *scaling.updates(scale, finite)]
        return self._apply(grads, chosen, finite, more, strategy, loss)

    def apply(self, grads: Sequence[Tensor], variables: Sequence[Tensor]) -> Tensor:
        """Return a node that updates variables by given gradients; fetching it gives None.

        A 16-bit variable and its slots are updated in float32: float16 cannot hold squares and
        small rates.

        Raises:
            VariableError: not variables, one of them twice, or not as many as gradients.
            ArgumentError: a gradient is not a tensor.
        """
        return self._apply(grads, variables)

    @without_collection
    def _apply(
        self,
        grads: Sequence[Tensor],
        variables: Sequence[Tensor],
        finite: Tensor | None = None,
        more: Sequence[Tensor] = (),
        strategy: Strategy | None = None,
        loss: Tensor | None = None,
    ) -> Tensor:
        """As `apply`; unless `finite` is true, variables and slots keep their values.

        Args:
            more: updates that happen in any case.
        """
        self._check_pairs(grads, variables)
        with name_scope("train"):
            updates = self._build_updates(grads, variables)
            if finite is not None:
                updates = [assign_if(finite, update) for update in updates]
            how = {} if strategy is None else {"strategy": strategy, "loss": loss}
            group: Tensor = REGISTRY["group"](*updates, *more, name="step", **how)
        return group

    def _build_updates(
        self, grads: Sequence[Tensor], variables: Sequence[Tensor], term: ProximalTerm | None = None
    ) -> list[Tensor]:
        """Return the assignments of variables and slots.

        Args:
            term: what is added to the gradients.
        """
        rule, counting = self._with_rate()
        shared, updates = rule._begin(grads)
        build = partial(rule._build_update, shared, term)
        alike = UpdateCopies(build, "train/").update
        for gradient, variable in zip(grads, variables, strict=True):
            plain = term is None and rule._is_determined_by_specs(variable, gradient)
            updates += alike(variable, gradient) if plain else build(variable, gradient).updates
        return [*updates, *counting]

    def _with_rate(self) -> tuple[Optimizer, list[Tensor]]:
        """Return this optimiser with the rate of the step in place of a schedule, and the updates
        of the schedule's state."""
        rate = vars(self).get("lr")
        if not isinstance(rate, RateSchedule):
            return self, []
        now, updates = rate.begin()
        changed: Any = replace
        bound: Optimizer = changed(self, lr=now)
        return bound, updates

    def _select(self, variables: Sequence[Tensor]) -> list[Tensor]:
        """Return those of the given variables that are trained."""
        return list(variables)

    def _rule_of(self, variable: Tensor) -> Optimizer:
        """Return the optimiser that updates a variable."""
        return self

    def _exchange(
        self,
        strategy: Strategy | None,
        grads: Sequence[Tensor],
        variables: Sequence[Tensor],
        scale: Tensor | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return gradients as the strategy exchanges them, and updates of the state of that.

        Gradients of which the update reads rows only are left to the exchange of rows, unless the
        strategy exchanges them whole.

        Raises:
            ShardingError: it does, and the update needs to know the rows.
        """
        leaves_rows = getattr(strategy, "leaves_rows", lambda variable: True)
        dense = []
        for i, (g, v) in enumerate(zip(grads, variables, strict=True)):
            rule = self._rule_of(v)
            by_rows = rule.sparse or rule._rests_at_zero() or _is_hashed(v)
            if not (by_rows and lookups_of(g, v)):
                dense.append(i)
            elif not leaves_rows(v):
                if rule.sparse or _is_hashed(v):
                    raise _whole_rows_error(strategy, v)
                dense.append(i)
        found = [*grads]
        sums, updates = filtered_gradients(
            strategy, [grads[i] for i in dense], [variables[i] for i in dense], scale
        )
        for i, total in zip(dense, sums, strict=True):
            found[i] = total
        return found, updates

    def _check_pairs(self, grads: Sequence[Tensor], variables: Sequence[Tensor]) -> None:
        """Check gradients and variables; raises as `apply`."""
        for what, given in (("gradients", grads), ("variables", variables)):
            if not isinstance(given, list | tuple):
                raise ArgumentError(
                    f"apply at {user_location()}: {what} must be a list of tensors, not {given!r}; "
                    "does transform return one?"
                )
        if len(grads) != len(variables):
            raise VariableError(
                f"apply at {user_location()}: expected a gradient for each variable, got "
                f"{len(grads)} gradients for {len(variables)} variables"
            )
        seen: set[Tensor] = set()
        for variable in variables:
            if not isinstance(variable, Tensor) or variable.node.op is not REGISTRY["variable"]:
                raise VariableError(f"apply at {user_location()}: {variable!r} is not a variable")
            rule = self._rule_of(variable)
            if kind(variable.dtype) == "complex" and not rule._trains_complex():
                raise VariableError(
                    f"apply at {user_location()}: {variable!r} is complex, which only SGD trains; "
                    "use two variables, its real and its imaginary part"
                )
            if variable in seen:
                raise VariableError(f"apply at {user_location()}: {variable!r} is given twice")
            seen.add(variable)
        for gradient in grads:
            if not isinstance(gradient, Tensor):
                raise ArgumentError(
                    f"apply at {user_location()}: a gradient must be a tensor, not {gradient!r}; "
                    "does transform return a list of gradients?"
                )

    def _build_update(
        self, shared: Any, term: ProximalTerm | None, variable: Tensor, gradient: Tensor
    ) -> VariableUpdate:
        """Return the assignments of a variable and of its slots."""
        with origin_scope(variable.node, "train/"):
            target, gradient = self._choose_target(variable, gradient)
            value = widen(target.part(variable))
            gradient = in_dtype_of(gradient, value)
            if term is not None:
                gradient = term.add_to(gradient, value)
            new = self._update(value, gradient, target, shared)
            last = target.assign_part(variable, in_dtype_of(new, variable))
        return VariableUpdate([*target.updates, last], target.slots)

    def _is_determined_by_specs(self, variable: Tensor, gradient: Tensor) -> bool:
        """Return True if all variables and gradients of these specs have the same update.

        A user's own optimiser may look at more, and so do updates of looked-up rows.
        """
        if type(self) not in SPEC_ONLY:
            return False
        if _is_hashed(variable):
            return False
        rate = vars(self)["lr"]  # the rate may itself be trained
        return rate is not variable and rate is not gradient and not lookups_of(gradient, variable)

    def _refuse(self, what: str, given: object) -> None:
        """Raise the error of an argument that must be something else."""
        name = type(self).__name__
        raise ArgumentError(f"{name} at {user_location()}: {what}, not {given!r}")

    def _begin(self, grads: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """Return what all variables share in a step, and assignments for it."""
        return None, []

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        """Return the next value of a variable, or of its rows that have a gradient.

        Args:
            value: the variable's value, in the dtype to compute in.
            gradient: its gradient, in that dtype.
            target: reads and writes the slots, for the same rows.
            shared: the result of `_begin`.
        """
        raise NotImplementedError

    def _rests_at_zero(self) -> bool:
        """Return True if a zero gradient changes nothing, slots included."""
        return False

    def _trains_complex(self) -> bool:
        """Return True if complex variables can be trained."""
        return False

    def _choose_target(self, variable: Tensor, gradient: Tensor) -> tuple[Target, Tensor]:
        """Return the part of a variable to update, and its gradient.

        The part is the looked-up rows if updating these suffices and they are fewer than all, and
        for hash tables in any case.
        """
        if _is_hashed(variable):
            return hashed_target(variable, gradient)
        lookups = lookups_of(gradient, variable)
        if not lookups or not (self.sparse or self._rests_at_zero()):
            return Target(variable), gradient
        count: Size = 0
        for _, ids in lookups:
            count = count + ids.size
        rows = variable.shape[0]
        if not self.sparse and isinstance(count, int) and isinstance(rows, int) and count >= rows:
            return Target(variable), gradient
        return row_target(variable, lookups)


def _is_hashed(variable: Tensor) -> bool:
    """Return True if a variable holds the rows of a `gf.nn.HashTable`."""
    return getattr(variable.node.attrs["initial"], "kind", None) == "hashed"


def _whole_rows_error(strategy: object, variable: Tensor) -> ShardingError:
    """Return the error of a strategy that exchanges the whole gradient of a table, which is to be
    updated by rows."""
    remedy = f"give it tables=[{variable.name!r}]"
    if _is_hashed(variable):
        remedy = f"train a HashTable by gf.parallel.Data(…, tables=[{variable.name!r}])"
    return ShardingError(
        f"minimize at {user_location()}: the looked-up rows of {variable.name!r} are to be updated "
        f"alone, and {type(strategy).__name__} at {getattr(strategy, 'line', '')} pushes whole "
        f"gradients; {remedy}"
    )


def trainable_variables(loss: Tensor) -> list[Tensor]:
    """Return the variables that a loss depends on and that may be trained."""
    return [
        node.outputs[0]
        for node in Graph(loss).variables
        if node.attrs["trainable"] and is_inexact(node.specs[0].dtype)
    ]
