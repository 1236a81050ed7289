"""Optimisers: a loss -> one node that updates the variables at the end of a step.

Each optimiser is a frozen value; `minimize` builds gradients, slots (variables that hold its
memory) and assignments. Rates may be tensors, so a schedule is just part of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphflow import init
from graphflow.autodiff import gradients
from graphflow.build import assign
from graphflow.errors import ArgumentError, DifferentiationError, VariableError
from graphflow.graph import Graph
from graphflow.op import FUNCTIONS, REGISTRY, Tensor, made_by, name_scope, user_location
from graphflow.spec import kind

Rate = float | Tensor


@dataclass(frozen=True)
class Optimizer:
    """Base of all optimisers."""

    def minimize(
        self,
        loss: Tensor,
        variables: Sequence[Tensor] | None = None,
        *,
        transform: Callable[[list[Tensor]], list[Tensor]] | None = None,
        strategy: Any = None,
    ) -> Tensor:
        """A node that moves variables against the gradient of the loss; fetching it gives None.

        Args:
            loss: a float scalar.
            variables: default: all trainable variables that the loss depends on.
            transform: changes the gradients first, e.g. `lambda g: clip_by_global_norm(g, 1.0)[0]`.

        Raises:
            DifferentiationError: the loss is no float scalar, or an op on the way has no gradient.
            VariableError: nothing to train.
        """
        if strategy is not None:
            raise ArgumentError(
                f"minimize at {user_location()}: strategy {strategy!r} is unknown; leave it out"
            )
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
        grads = gradients(loss, chosen)
        if transform is not None:
            grads = transform(grads)
        return self.apply(grads, chosen)

    def apply(self, grads: Sequence[Tensor], variables: Sequence[Tensor]) -> Tensor:
        """A node that updates variables by given gradients; fetching it gives None.

        A float16 variable is updated, and its slots are kept, in float32: squares and small rates
        are below what float16 holds.

        Raises:
            VariableError: not variables, one twice, or another number of them than of gradients.
            ArgumentError: a gradient is no tensor.
        """
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
        for variable in variables:
            if not isinstance(variable, Tensor) or variable.node.op is not REGISTRY["variable"]:
                raise VariableError(f"apply at {user_location()}: {variable!r} is no variable")
            if sum(variable is other for other in variables) > 1:
                raise VariableError(f"apply at {user_location()}: {variable!r} is given twice")
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
                    value = _wide(variable)
                    step, slots = self._update(variable, value, _as(gradient, value), shared)
                    updates += [*slots, assign(variable, _as(step, variable))]
            group: Tensor = REGISTRY["group"](*updates, name="step")
        return group

    def _begin(self, grads: Sequence[Tensor]) -> tuple[Any, list[Tensor]]:
        """What all variables share in a step, and the updates of that."""
        return None, []

    def _update(
        self, variable: Tensor, value: Tensor, gradient: Tensor, shared: Any
    ) -> tuple[Tensor, list[Tensor]]:
        """The next value of a variable, and assignments of its slots.

        Args:
            value, gradient: the variable's, in the dtype to compute in.
        """
        raise NotImplementedError


def _trainable(loss: Tensor) -> list[Tensor]:
    return [
        node.outputs[0]
        for node in Graph(loss).variables
        if node.attrs["trainable"] and kind(node.specs[0].dtype) == "float"
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


def _as(x: Tensor, like: Tensor) -> Tensor:
    """x in the dtype of another tensor."""
    same: Tensor = x if x.dtype == like.dtype else FUNCTIONS["astype"](x, like.dtype)
    return same


def _wide(x: Tensor) -> Tensor:
    """x in the dtype to compute in: at least float32."""
    wide: Tensor = x if x.dtype != np.float16 else FUNCTIONS["astype"](x, _wide_dtype(x.dtype))
    return wide


def _wide_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    return np.promote_types(dtype, np.float32)


def _sqrt(x: Tensor) -> Tensor:
    root: Tensor = FUNCTIONS["sqrt"](x)
    return root


def _numbers(optimizer: Optimizer, **values: Any) -> None:
    """Check an optimiser's numbers, and keep them as Python floats: numpy's would set the dtype."""
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

    def _update(
        self, variable: Tensor, value: Tensor, gradient: Tensor, shared: Any
    ) -> tuple[Tensor, list[Tensor]]:
        rate = _rate(self.lr, value)
        if not self.momentum:
            return value - rate * gradient, []
        velocity = _slot(variable, "momentum")
        new = velocity * self.momentum + gradient
        direction = gradient + new * self.momentum if self.nesterov else new
        return value - rate * direction, [assign(velocity, new)]


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

    def _update(
        self, variable: Tensor, value: Tensor, gradient: Tensor, shared: Any
    ) -> tuple[Tensor, list[Tensor]]:
        correction1, root2 = (_as(x, value) for x in shared)
        mean, square = _slot(variable, "adam_mean"), _slot(variable, "adam_square")
        new_mean = mean * self.beta1 + gradient * (1 - self.beta1)
        new_square = square * self.beta2 + (gradient * gradient) * (1 - self.beta2)
        step = _rate(self.lr, value) / correction1
        direction = new_mean / (_sqrt(new_square) / root2 + self.epsilon)
        slots = [assign(mean, new_mean), assign(square, new_square)]
        return self._decayed(value) - step * direction, slots

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

    def _update(
        self, variable: Tensor, value: Tensor, gradient: Tensor, shared: Any
    ) -> tuple[Tensor, list[Tensor]]:
        square = _slot(variable, "rms_square")
        new_square = square * self.decay + (gradient * gradient) * (1 - self.decay)
        direction = gradient / (_sqrt(new_square) + self.epsilon)
        slots = [assign(square, new_square)]
        if self.momentum:
            velocity = _slot(variable, "momentum")
            direction = velocity * self.momentum + direction
            slots.append(assign(velocity, direction))
        return value - _rate(self.lr, value) * direction, slots


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

    def _update(
        self, variable: Tensor, value: Tensor, gradient: Tensor, shared: Any
    ) -> tuple[Tensor, list[Tensor]]:
        total = _slot(variable, "adagrad_sum", self.initial)
        new = total + gradient * gradient
        direction = gradient / (_sqrt(new) + self.epsilon)
        return value - _rate(self.lr, value) * direction, [assign(total, new)]


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
    widest = _wide_dtype(np.result_type(*(g.dtype for g in grads)))
    wide = (FUNCTIONS["astype"](g, widest) for g in grads)
    total, *rest = (FUNCTIONS["sum"](g * g) for g in wide)
    for square in rest:
        total = total + square
    norm: Tensor = FUNCTIONS["sqrt"](total)
    limit = _rate(max_norm, norm)
    scale = limit / FUNCTIONS["maximum"](norm, limit)
    return [gradient * _as(scale, gradient) for gradient in grads], norm
