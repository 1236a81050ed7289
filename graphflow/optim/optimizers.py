"""Optimisers: a loss -> one node that updates the variables at the end of a step.

Each optimiser is a frozen value; `minimize` builds gradients, slots (variables that hold its
memory) and assignments. Rates may be tensors, so a schedule is just part of the graph.

A gradient that is rows of a table (of lookups only, see `gf.nn.embedding`) is not spread over the
table where that changes nothing, or where `sparse=True` asks for it: an update then reads and
writes the rows that occur, and takes memory for no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names, did_you_mean, format_value
from graphflow.base.argument_names import explain_repeated
from graphflow.base.gc_pause import without_collection
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, DifferentiationError, VariableError
from graphflow.frontend.builders import assign
from graphflow.ir.graph import Graph
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor, name_scope, origin_scope, user_location
from graphflow.ir.spec import Size, is_inexact, kind, promote, real_dtype
from graphflow.ops.base.composite import widen
from graphflow.optim.loss_scaling import LossScaling, all_finite, assign_if
from graphflow.optim.update_copies import UpdateCopies, VariableUpdate
from graphflow.optim.update_targets import (
    Rate,
    Target,
    descend,
    in_dtype_of,
    lookups_of,
    rate_for,
    row_target,
    sqrt,
    state_variable,
    wide_dtype,
)
from graphflow.strategy import Strategy, check_strategy
from graphflow.transforms.reverse_mode import gradients


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimisers.

    Args:
        sparse: update only those rows of a table, and of its slots, that were looked up in a step:
            elsewhere moments do not decay, and weights neither ("lazy" updates). What is always
            zero where the gradient is (SGD without momentum, Adagrad) is updated so anyway.
    """

    sparse: bool = field(default=False, kw_only=True)

    if not TYPE_CHECKING:  # it would have every attribute

        def __getattr__(self, name: str) -> NoReturn:
            told = f"{type(self).__name__} has no attribute {name!r}"
            if name in ("step", "zero_grad", "apply_gradients", "update", "compute_gradients"):
                told += "; train = optimiser.minimize(loss), and s.run(train, feeds) takes a step"
            elif name[0] != "_" and (hint := did_you_mean(name, dir(type(self)))):
                told += f"; {hint}"
            raise AttributeError(told, name=name, obj=self)

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
        """A node that moves variables against the gradient of the loss; fetching it gives None.

        Args:
            loss: a float scalar.
            variables: default: all trainable variables that the loss depends on.
            strategy: how the step is divided over devices: `gf.parallel.Data(replicas=2)`,
                `gf.parallel.Shard(…)`. The numbers are those of one device, but for the order of
                sums.
            transform: changes the gradients first, e.g. `lambda g: clip_by_global_norm(g, 1.0)[0]`.
            scaling: differentiate a multiple of the loss, for gradients that float16 would lose.

        Raises:
            DifferentiationError: the loss is no float scalar, or an op on the way has no gradient.
            VariableError: nothing to train.
        """
        if strategy is not None:
            check_strategy(strategy)
        if variables is not None and not isinstance(variables, list | tuple):
            raise VariableError(
                f"minimize at {user_location()}: variables are a list, as [w] or "
                f"[*model.parameters().values()], not {format_value(variables)}"
            )
        if transform is not None and not callable(transform):
            raise ArgumentError(
                f"minimize at {user_location()}: transform is a function of the list of gradients, "
                f"not {transform!r}"
            )
        if not isinstance(loss, Tensor) or loss.ndim or kind(loss.dtype) != "float":
            raise DifferentiationError(
                f"minimize at {user_location()}: the loss is a float scalar, not {loss!r}; "
                "reduce it with gf.mean"
            )
        chosen = _trainable(loss) if variables is None else list(variables)
        if not chosen:
            raise VariableError(
                f"minimize at {user_location()}: the loss depends on no trainable variable; make "
                "weights by gf.variable(initial) or layers of gf.nn, and the loss of them"
            )
        if scaling is None:
            grads = gradients(loss, chosen)
            grads = grads if transform is None else transform(grads)
            return self._apply(grads, chosen, strategy=strategy, loss=loss)
        if not isinstance(scaling, LossScaling):
            raise ArgumentError(
                f"minimize at {user_location()}: scaling is a gf.optim.LossScaling, not {scaling!r}"
            )
        scale = scaling.variable()
        grads = scaling.unscale(gradients(loss, chosen, [in_dtype_of(scale, loss)]), scale)
        finite = all_finite(grads)
        grads = grads if transform is None else transform(grads)
        return self._apply(grads, chosen, finite, scaling.updates(scale, finite), strategy, loss)

    def apply(self, grads: Sequence[Tensor], variables: Sequence[Tensor]) -> Tensor:
        """A node that updates variables by given gradients; fetching it gives None.

        A variable of 16 bits is updated, and its slots are kept, in float32: squares and small
        rates are below what float16 holds.

        Raises:
            VariableError: not variables, one twice, or another number of them than of gradients.
            ArgumentError: a gradient is no tensor.
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
        """As `apply`, but if not `finite`, all keeps its value. `more`: updates in any case."""
        for what, given in (("gradients", grads), ("variables", variables)):
            if not isinstance(given, list | tuple):
                raise ArgumentError(
                    f"apply at {user_location()}: {what} are a list of tensors, not {given!r}; "
                    "does transform return one?"
                )
        if len(grads) != len(variables):
            raise VariableError(
                f"apply at {user_location()}: {len(grads)} gradients for {len(variables)} variables"
            )
        seen: set[Tensor] = set()
        for variable in variables:
            if not isinstance(variable, Tensor) or variable.node.op is not REGISTRY["variable"]:
                raise VariableError(f"apply at {user_location()}: {variable!r} is no variable")
            if kind(variable.dtype) == "complex" and not isinstance(self, SGD):
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
                    f"apply at {user_location()}: a gradient is a tensor, not {gradient!r}; does "
                    "transform return a list of gradients?"
                )
        with name_scope("train"):
            shared, updates = self._begin(grads)
            build = partial(self._build_update, shared)
            alike = UpdateCopies(build, "train/").update
            for gradient, variable in zip(grads, variables, strict=True):
                plain = self._is_determined_by_specs(variable, gradient)
                updates += alike(variable, gradient) if plain else build(variable, gradient).updates
            if finite is not None:
                updates = [assign_if(finite, update) for update in updates]
            how = {} if strategy is None else {"strategy": strategy, "loss": loss}
            group: Tensor = REGISTRY["group"](*updates, *more, name="step", **how)
        return group

    def _build_update(self, shared: Any, variable: Tensor, gradient: Tensor) -> VariableUpdate:
        """The assignments of a variable and of its slots."""
        with origin_scope(variable.node, "train/"):
            target, gradient = self._choose_target(variable, gradient)
            value = widen(target.part(variable))
            new = self._update(value, in_dtype_of(gradient, value), target, shared)
            last = target.assign_part(variable, in_dtype_of(new, variable))
        return VariableUpdate([*target.updates, last], target.slots)

    def _is_determined_by_specs(self, variable: Tensor, gradient: Tensor) -> bool:
        """Whether another variable and gradient of these specs have the same update: a user's own
        optimiser may look at more, and so do the rows of a lookup."""
        if type(self) not in (SGD, Adam, AdamW, RMSProp, Adagrad):
            return False
        rate = vars(self)["lr"]  # it may be what is trained
        return rate is not variable and rate is not gradient and not lookups_of(gradient, variable)

    def _begin(self, grads: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """What all variables share in a step, and the updates of that."""
        return None, []

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        """The next value of a variable, or of those of its rows that have a gradient.

        Args:
            value, gradient: the variable's, in the dtype to compute in.
            target: reads and writes the slots, of the same part.
        """
        raise NotImplementedError

    def _rests_at_zero(self) -> bool:
        """Whether a gradient of zero changes nothing, the slots included."""
        return False

    def _choose_target(self, variable: Tensor, gradient: Tensor) -> tuple[Target, Tensor]:
        """What to update, and the gradient of that: the rows with a gradient, if they are enough
        (and fewer), else all."""
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


def _trainable(loss: Tensor) -> list[Tensor]:
    return [
        node.outputs[0]
        for node in Graph(loss).variables
        if node.attrs["trainable"] and is_inexact(node.specs[0].dtype)
    ]


def _magnitude(x: Tensor) -> Tensor:
    """x itself, or how large its complex numbers are."""
    size: Tensor = FUNCTIONS["abs"](x) if kind(x.dtype) == "complex" else x
    return size


def _check_numbers(optimizer: Optimizer, **values: Any) -> None:
    """Check an optimiser's numbers, and keep them as Python floats: numpy's would set the dtype."""
    if not isinstance(optimizer.sparse, bool):
        raise ArgumentError(
            f"optimiser at {user_location()}: sparse is True or False, not {optimizer.sparse!r}"
        )
    for name, value in values.items():
        if name == "lr" and isinstance(value, Tensor):
            if value.ndim or kind(value.dtype) == "bool":
                raise ArgumentError(
                    f"optimiser at {user_location()}: lr is a scalar number, not {value!r}"
                )
            continue
        share = name in ("momentum", "beta1", "beta2", "decay")
        number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
        number = number and bool(0 <= value < np.inf)
        if not number or (share and value > 1) or (name.startswith("beta") and value == 1):
            bound = "from 0 to 1" if share else "from 0"
            bound += ", 1 left out" if name.startswith("beta") else ""
            listed = name == "lr" and isinstance(value, list | tuple)
            hint = "; " + explain_repeated("lr") if listed else ""
            raise ArgumentError(
                f"optimiser at {user_location()}: {name} is a number {bound}, not {value!r}{hint}"
            )
        object.__setattr__(optimizer, name, float(value))


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
        _check_numbers(self, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)
        if not isinstance(self.nesterov, bool):
            raise ArgumentError(
                f"SGD at {user_location()}: nesterov is True or False, not {self.nesterov!r}"
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
        _check_numbers(self, lr=self.lr, beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon)

    def _begin(self, grads: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """1 − β₁ᵗ and √(1 − β₂ᵗ) of the step, from the powers that are carried along."""
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
        _check_numbers(self, weight_decay=self.weight_decay)

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
        _check_numbers(
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
        _check_numbers(self, lr=self.lr, initial=self.initial, epsilon=self.epsilon)

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        new = target.read("adagrad_sum", self.initial) + gradient * gradient
        target.write("adagrad_sum", new)
        direction = gradient / (sqrt(new) + self.epsilon)
        return descend(value, self.lr, direction)

    def _rests_at_zero(self) -> bool:
        return bool(np.float32(self.epsilon) > 0)  # else a rest of 0 / 0


@checks_argument_names(ArgumentError)
def clip_by_global_norm(grads: Sequence[Tensor], max_norm: Rate) -> tuple[list[Tensor], Tensor]:
    """Gradients scaled down together so that their joint 2-norm is at most `max_norm`, and that
    norm (at least float32).

    Source: Pascanu, Mikolov & Bengio, ICML 2013.

    Raises:
        ArgumentError: no gradients, or a norm that is not a number above 0.
    """
    at = f"clip_by_global_norm at {user_location()}"
    listed = isinstance(grads, list | tuple) and bool(grads)
    if not listed or not all(isinstance(g, Tensor) for g in grads):
        raise ArgumentError(f"{at}: give a list of gradients, not {grads!r}")
    if not isinstance(max_norm, Tensor) and (
        isinstance(max_norm, bool)
        or not (isinstance(max_norm, int | float | np.number) and max_norm > 0)
    ):
        raise ArgumentError(f"{at}: max_norm is a number above 0, not {max_norm!r}")
    widest = real_dtype(reduce(promote, (wide_dtype(g.dtype) for g in grads)))
    wide = (FUNCTIONS["astype"](_magnitude(g), widest) for g in grads)
    total, *rest = (FUNCTIONS["sum"](g * g) for g in wide)
    for square in rest:
        total = total + square
    norm: Tensor = FUNCTIONS["sqrt"](total)
    limit = rate_for(max_norm, norm)
    scale = limit / FUNCTIONS["maximum"](norm, limit)
    pairs = [(g, widen(g)) for g in grads]
    return [in_dtype_of(w * in_dtype_of(scale, w), g) for g, w in pairs], norm


__all__ = [
    "SGD", "Adagrad", "Adam", "AdamW", "LossScaling", "Optimizer", "RMSProp", "Rate", "Target",
    "clip_by_global_norm",
]  # fmt: skip
