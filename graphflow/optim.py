"""Optimisers: a loss -> one node that updates the variables at the end of a step.

Each optimiser is a frozen value; `minimize` builds gradients, slots (variables that hold its
memory) and assignments. Rates may be tensors, so a schedule is just part of the graph.

A gradient that is rows of a table (of lookups only, see `gf.nn.embedding`) is not spread over the
table where that changes nothing, or where `sparse=True` asks for it: an update then reads and
writes the rows that occur, and takes memory for no others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np

from graphflow import init
from graphflow.autodiff import gradients
from graphflow.build import assign
from graphflow.errors import ArgumentError, DifferentiationError, VariableError
from graphflow.graph import Graph
from graphflow.loss_scaling import LossScaling, all_finite, only_if
from graphflow.op import FUNCTIONS, REGISTRY, Tensor, made_by, name_scope, user_location
from graphflow.spec import Size, is_half, is_inexact, kind, minimum, promote, real_dtype
from graphflow.strategy import check_strategy

Rate = float | Tensor


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimisers.

    Args:
        sparse: update only those rows of a table, and of its slots, that were looked up in a step:
            elsewhere moments do not decay, and weights neither ("lazy" updates). What is always
            zero where the gradient is (SGD without momentum, Adagrad) is updated so anyway.
    """

    sparse: bool = field(default=False, kw_only=True)

    def minimize(
        self,
        loss: Tensor,
        variables: Sequence[Tensor] | None = None,
        *,
        transform: Callable[[list[Tensor]], list[Tensor]] | None = None,
        strategy: Any = None,
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
                f"minimize at {user_location()}: variables are a list, [w], not {variables!r}"
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
                f"minimize at {user_location()}: the loss depends on no trainable variable"
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
        grads = scaling.unscaled(gradients(loss, chosen, [_as(scale, loss)]), scale)
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

    def _apply(
        self,
        grads: Sequence[Tensor],
        variables: Sequence[Tensor],
        finite: Tensor | None = None,
        more: Sequence[Tensor] = (),
        strategy: Any = None,
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
            for gradient, variable in zip(grads, variables, strict=True):
                with made_by(variable.node, "train/"):
                    target, gradient = self._target(variable, gradient)
                    value = _wide(target.part(variable))
                    new = self._update(value, _as(gradient, value), target, shared)
                    updates += [*target.updates, target.assigned(variable, _as(new, variable))]
            if finite is not None:
                updates = [only_if(finite, update) for update in updates]
            how = {} if strategy is None else {"strategy": strategy, "loss": loss}
            group: Tensor = REGISTRY["group"](*updates, *more, name="step", **how)
        return group

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

    def _target(self, variable: Tensor, gradient: Tensor) -> tuple[Target, Tensor]:
        """What to update, and the gradient of that: the rows with a gradient, if they are enough
        (and fewer), else all."""
        lookups = _lookups(gradient, variable)
        if not lookups or not (self.sparse or self._rests_at_zero()):
            return Target(variable), gradient
        count: Size = 0
        for _, ids in lookups:
            count = count + ids.size
        rows = variable.shape[0]
        if not self.sparse and isinstance(count, int) and isinstance(rows, int) and count >= rows:
            return Target(variable), gradient
        return _row_target(variable, lookups)


class Target:
    """What an update reads and writes: a variable and its slots, whole or in some rows.

    Args:
        rows: which, int64 (k,), different ones; None means all.
        number: how many of these are in use.
    """

    def __init__(
        self, variable: Tensor, rows: Tensor | None = None, number: Tensor | None = None
    ) -> None:
        self.variable = variable
        self.rows = rows
        self.number = number
        self.updates: list[Tensor] = []
        self._slots: dict[str, Tensor] = {}

    def part(self, state: Tensor) -> Tensor:
        """The part of a variable or slot."""
        chosen: Tensor = state if self.rows is None else FUNCTIONS["take"](state, self.rows, 0)
        return chosen

    def read(self, name: str, initial: float = 0.0) -> Tensor:
        """The part of a slot, a variable like the one to update that lives with it."""
        self._slots[name] = _slot(self.variable, name, initial)
        return self.part(self._slots[name])

    def write(self, name: str, value: Tensor) -> None:
        """Update a slot that was read."""
        self.updates.append(self.assigned(self._slots[name], value))

    def assigned(self, state: Tensor, value: Tensor) -> Tensor:
        """An assignment of the part."""
        if self.rows is not None:
            value = REGISTRY["update_rows"](state, self.rows, value, self.number)
        return assign(state, value)


_Lookup = tuple[Tensor, Tensor]  # rows of a gradient, and their numbers


def _lookups(gradient: Tensor, variable: Tensor) -> list[_Lookup]:
    """The rows of which a gradient is the sum, in its order; empty if it is made of anything else.

    Gradients of several lookups are added from the left.
    """
    found: list[_Lookup] = []
    while True:
        node = gradient.node
        last = node.inputs[1].node if node.op is REGISTRY["add"] else node
        whole = last.specs[0] == variable.spec and gradient.spec == variable.spec
        if last.op is not REGISTRY["take_grad"] or last.attrs["axis"] or not whole:
            return []
        found.append((last.inputs[0], last.inputs[1]))
        if last is node:
            return found[::-1]
        gradient = node.inputs[0]


def _row_target(variable: Tensor, lookups: Sequence[_Lookup]) -> tuple[Target, Tensor]:
    """The different rows that occur, and the gradient of these: the same sums, in the same order,
    that the whole table would have."""
    n, rest = variable.shape[0], variable.shape[1:]
    ravel, reshape = FUNCTIONS["ravel_multi_index"], FUNCTIONS["reshape"]
    ids = [ravel([reshape(t, (t.size,))], (n,)) for _, t in lookups]  # checked, from the front
    every = ids[0] if len(ids) == 1 else FUNCTIONS["concat"](ids)
    size = minimum(every.shape[0], n)
    found = FUNCTIONS["unique_all"](every, size)
    gradient: Tensor | None = None
    start: Size = 0
    for (rows, _), own in zip(lookups, ids, strict=True):
        places = found.inverse if len(ids) == 1 else found.inverse[start : start + own.shape[0]]
        start = start + own.shape[0]
        part = REGISTRY["take_grad"](
            reshape(rows, (own.shape[0], *rest)), places, shape=(size, *rest), axis=0
        )
        gradient = part if gradient is None else gradient + part
    assert gradient is not None
    return Target(variable, found.values, found.number), gradient


def _trainable(loss: Tensor) -> list[Tensor]:
    return [
        node.outputs[0]
        for node in Graph(loss).variables
        if node.attrs["trainable"] and is_inexact(node.specs[0].dtype)
    ]


def _slot(variable: Tensor, name: str, value: float = 0.0) -> Tensor:
    """A variable like another, that lives with it."""
    shape = tuple(int(s) for s in variable.shape)  # type: ignore[arg-type]
    initial = init.full(shape, value, _wide_dtype(variable.dtype))
    return _state(f"{variable.node.name}/{name}", initial)


def _state(name: str, initial: init.Initializer) -> Tensor:
    tensor: Tensor = REGISTRY["variable"](
        initial=initial, trainable=False, shape=initial.shape, dtype=initial.dtype, named=False,
        name=name,
    )  # fmt: skip
    return tensor


def _rate(rate: Rate, like: Tensor) -> Any:
    """A rate as it mixes with a variable: Python numbers are weak, tensors are converted."""
    return _as(rate, like) if isinstance(rate, Tensor) else float(rate)


def _moved(value: Tensor, rate: Rate, direction: Tensor) -> Tensor:
    moved: Tensor = value - _rate(rate, value) * direction
    return moved


def _as(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of another tensor."""
    same: Tensor = x if x.dtype == like.dtype else FUNCTIONS["astype"](x, like.dtype)
    return same


def _wide(x: Tensor) -> Tensor:
    """x in the dtype to compute in: at least float32."""
    wide: Tensor = x if not is_half(x.dtype) else FUNCTIONS["astype"](x, _wide_dtype(x.dtype))
    return wide


def _wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return promote(dtype, np.dtype("float32"))


def _real(x: Tensor) -> Tensor:
    """x itself, or how large its complex numbers are."""
    size: Tensor = FUNCTIONS["abs"](x) if kind(x.dtype) == "complex" else x
    return size


def _sqrt(x: Tensor) -> Tensor:
    root: Tensor = FUNCTIONS["sqrt"](x)
    return root


def _numbers(optimizer: Optimizer, **values: Any) -> None:
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
            raise ArgumentError(
                f"optimiser at {user_location()}: {name} is a number {bound}, not {value!r}"
            )
        object.__setattr__(optimizer, name, float(value))


@dataclass(frozen=True)
class SGD(Optimizer):
    """Gradient descent: v ← momentum·v + g; w ← w − lr·v, or w − lr·(g + momentum·v) with
    `nesterov`.

    Source: Sutskever et al., ICML 2013, in the form that torch.optim.SGD uses.
    """

    lr: Rate
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _numbers(self, lr=self.lr, momentum=self.momentum)
        if not isinstance(self.nesterov, bool):
            raise ArgumentError(
                f"SGD at {user_location()}: nesterov is True or False, not {self.nesterov!r}"
            )
        if self.nesterov and not self.momentum:
            raise ArgumentError(f"SGD at {user_location()}: nesterov needs a momentum above 0")

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        direction = gradient
        if self.momentum:
            new = target.read("momentum") * self.momentum + gradient
            target.write("momentum", new)
            direction = gradient + new * self.momentum if self.nesterov else new
        return _moved(value, self.lr, direction)

    def _rests_at_zero(self) -> bool:
        return not self.momentum


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
        _numbers(self, lr=self.lr, beta1=self.beta1, beta2=self.beta2, epsilon=self.epsilon)

    def _begin(self, grads: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """1 − β₁ᵗ and √(1 − β₂ᵗ) of the step, from the powers that are carried along."""
        power1 = _state("adam/beta1_power", init.ones((), "float64"))
        power2 = _state("adam/beta2_power", init.ones((), "float64"))
        new1, new2 = power1 * self.beta1, power2 * self.beta2
        return (1.0 - new1, _sqrt(1.0 - new2)), [assign(power1, new1), assign(power2, new2)]

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        correction1, root2 = (_as(x, value) for x in shared)
        mean, square = target.read("adam_mean"), target.read("adam_square")
        new_mean = mean * self.beta1 + gradient * (1 - self.beta1)
        new_square = square * self.beta2 + (gradient * gradient) * (1 - self.beta2)
        step = _rate(self.lr, value) / correction1
        direction = new_mean / (_sqrt(new_square) / root2 + self.epsilon)
        target.write("adam_mean", new_mean)
        target.write("adam_square", new_square)
        moved: Tensor = self._decayed(value) - step * direction
        return moved

    def _decayed(self, value: Tensor) -> Tensor:
        return value


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay apart from the gradient: w ← (1 − lr·weight_decay)·w − ….

    Source: Loshchilov & Hutter, ICLR 2019.
    """

    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        super().__post_init__()
        _numbers(self, weight_decay=self.weight_decay)

    def _decayed(self, value: Tensor) -> Tensor:
        decayed: Tensor = value * (1.0 - _rate(self.lr, value) * self.weight_decay)
        return decayed


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
        _numbers(self, lr=self.lr, decay=self.decay, momentum=self.momentum, epsilon=self.epsilon)

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        square = target.read("rms_square")
        new_square = square * self.decay + (gradient * gradient) * (1 - self.decay)
        target.write("rms_square", new_square)
        direction = gradient / (_sqrt(new_square) + self.epsilon)
        if self.momentum:
            direction = target.read("momentum") * self.momentum + direction
            target.write("momentum", direction)
        return _moved(value, self.lr, direction)


@dataclass(frozen=True)
class Adagrad(Optimizer):
    """s ← s + g²; w ← w − lr·g / (√s + ε).

    Source: Duchi, Hazan & Singer, JMLR 12, 2011.
    """

    lr: Rate = 1e-2
    initial: float = 0.0
    epsilon: float = 1e-10

    def __post_init__(self) -> None:
        _numbers(self, lr=self.lr, initial=self.initial, epsilon=self.epsilon)

    def _update(self, value: Tensor, gradient: Tensor, target: Target, shared: Any) -> Tensor:
        new = target.read("adagrad_sum", self.initial) + gradient * gradient
        target.write("adagrad_sum", new)
        direction = gradient / (_sqrt(new) + self.epsilon)
        return _moved(value, self.lr, direction)

    def _rests_at_zero(self) -> bool:
        return bool(np.float32(self.epsilon) > 0)  # else a rest of 0 / 0


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
    if not isinstance(max_norm, Tensor) and not (
        isinstance(max_norm, int | float | np.number) and max_norm > 0
    ):
        raise ArgumentError(f"{at}: max_norm is a number above 0, not {max_norm!r}")
    widest = real_dtype(reduce(promote, (_wide_dtype(g.dtype) for g in grads)))
    wide = (FUNCTIONS["astype"](_real(g), widest) for g in grads)
    total, *rest = (FUNCTIONS["sum"](g * g) for g in wide)
    for square in rest:
        total = total + square
    norm: Tensor = FUNCTIONS["sqrt"](total)
    limit = _rate(max_norm, norm)
    scale = limit / FUNCTIONS["maximum"](norm, limit)
    return [gradient * _as(scale, gradient) for gradient in grads], norm


__all__ = [
    "SGD", "Adagrad", "Adam", "AdamW", "LossScaling", "Optimizer", "RMSProp", "Rate", "Target",
    "clip_by_global_norm",
]  # fmt: skip
