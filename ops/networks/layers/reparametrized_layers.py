"""Layers whose weight is computed from other variables: weight and spectral norm. In `gf.nn`."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, ShapeError
from graphflow.frontend.builders import assign, make_variable
from graphflow.init import Initializer
from graphflow.ir.op import FUNCTIONS, REGISTRY, Tensor, function, prefix_scope
from graphflow.ir.spec import show_shape
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import normalize_axis, require_finite, require_int
from graphflow.ops.matrices.linalg.norms import vector_norm
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.networks.layers.layer_base import Layer, set_attributes
from graphflow.ops.networks.layers.layers_conv import _ConvTranspose
from graphflow.ops.networks.losses.distances import normalize
from graphflow.ops.networks.recurrence.recurrent_cells import RecurrentWeights
from graphflow.ops.networks.training_mode import current_updates
from graphflow.ops.pointwise.convert import stop_gradient
from graphflow.ops.tensors.shape import moveaxis, reshape

_FIRST_ITERATIONS = 15
"""Steps of the power method before training, as in torch."""


class _Reparametrized(Layer):
    """A layer that is called with another tensor in place of one of its variables."""

    layer: Layer
    variable: str

    def _own(self, layer: Any, variable: str) -> Tensor:
        """Take over a layer and its name scope; return the variable."""
        weight = vars(layer).get(variable) if isinstance(layer, Layer) else None
        if not isinstance(weight, Tensor) or weight.node.op is not REGISTRY["variable"]:
            raise ArgumentError(f"{layer!r} is no layer with a variable {variable!r}")
        set_attributes(self, layer=layer, variable=variable)
        set_attributes(self, _scope=layer._scope, _outer_scope=layer._outer_scope)
        return weight

    def _name_in_torch(self, names: Mapping[str, str]) -> None:
        """Note what torch.nn.utils.parametrizations calls attributes here and in the layer."""
        start = f"parametrizations.{self.variable}."
        words = {own: start + name for own, name in names.items()}
        set_attributes(self, torch_names={"layer": "", **words})

    def _weight(self) -> Tensor:
        raise NotImplementedError

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        used, old, new = copy(self.layer), getattr(self.layer, self.variable), self._weight()
        set_attributes(used, **{k: _replace_tensor(v, old, new) for k, v in vars(used).items()})
        return used(*args, **kwargs)  # type: ignore[operator]


def _replace_tensor(value: Any, old: Tensor, new: Tensor) -> Any:
    """Return a value with another tensor in place of one, also in the weights of cells."""
    if value is old:
        return new
    if isinstance(value, tuple | list):
        return type(value)(_replace_tensor(item, old, new) for item in value)
    if isinstance(value, RecurrentWeights):
        return replace(value, **{k: _replace_tensor(v, old, new) for k, v in vars(value).items()})
    return value


def _initial_value(weight: Tensor) -> np.ndarray[Any, Any]:
    initial = weight.node.attrs["initial"]
    return initial() if isinstance(initial, Initializer) else np.asarray(initial)


# Weight norm ------------------------------------------------------------------------------------


@composite("v", "g")
def _scaled_directions(v: Tensor, g: Tensor, axes: tuple[int, ...]) -> Tensor:
    result: Tensor = v * (g / vector_norm(v, axis=axes, keepdims=True))
    return result


@dataclass(frozen=True, eq=False, init=False)
class WeightNorm(_Reparametrized):
    """The result of `gf.nn.weight_norm`."""

    axes: tuple[int, ...]

    def __init__(self, layer: Any, variable: str, axis: int | None) -> None:
        v = self._own(layer, variable)
        kept = None if axis is None else normalize_axis(axis, v.ndim)
        axes = tuple(a for a in range(v.ndim) if a != kept)
        first = _initial_value(v)
        norms = np.sqrt(np.sum(np.square(first, dtype="float64"), axes, keepdims=True))
        with prefix_scope(self._scope):
            g = make_variable(norms.astype(first.dtype), f"{variable}_g", True)
        set_attributes(self, axes=axes, **{f"{variable}_g": g})
        self._name_in_torch({f"layer.{variable}": "original1", f"{variable}_g": "original0"})

    def _weight(self) -> Tensor:
        v = getattr(self.layer, self.variable)
        return _scaled_directions(v, getattr(self, f"{self.variable}_g"), self.axes)


@function
def weight_norm(layer: Any, variable: str = "weight", axis: int | None = 0) -> Any:
    """Return a layer whose weight is g·v/‖v‖, so that its length and direction are trained apart.

    v is the variable of the given layer, and g a new variable `weight_g`, initially ‖v‖. So the
    layer first computes what it did before.

    Args:
        layer: any layer of `gf.nn` that holds the variable itself.
        variable: its name in the layer, such as "weight_hh_l0" of an LSTM.
        axis: the axis along which each slice has a norm of its own; None: one norm for all.

    Raises:
        ArgumentError: the layer has no such variable.
        ShapeError: the axis is outside the variable.

    Source: Salimans & Kingma, NeurIPS 2016.
    """
    return WeightNorm(layer, variable, axis)


# Spectral norm ----------------------------------------------------------------------------------


@composite("matrix", "v")
def _power_steps(
    matrix: Tensor, v: Tensor, iterations: int, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return u and v after some steps of the power method, which have no gradient."""
    matrix = stop_gradient(matrix)
    for _ in range(iterations):
        u = normalize(matmul(matrix, v), -1, 2, epsilon)
        v = normalize(matmul(u, matrix), -1, 2, epsilon)
    return stop_gradient(u), stop_gradient(v)


@composite("weight", "matrix", "u", "v")
def _divided_by_norm(weight: Tensor, matrix: Tensor, u: Tensor, v: Tensor) -> Tensor:
    result: Tensor = weight / FUNCTIONS["vecdot"](u, matmul(matrix, v))
    return result


@dataclass(frozen=True, eq=False, init=False)
class SpectralNorm(_Reparametrized):
    """The result of `gf.nn.spectral_norm`."""

    iterations: int
    epsilon: float
    axis: int
    _trained: list[Any]  # the last training block's list, and the weight that was computed in it

    def __init__(
        self, layer: Any, variable: str, iterations: int, epsilon: float, axis: int | None
    ) -> None:
        weight = self._own(layer, variable)
        if weight.ndim < 2:
            raise ShapeError(f"{variable} is a matrix or more, got {show_shape(weight.shape)}")
        if axis is None:
            axis = 1 if isinstance(layer, _ConvTranspose) else 0
        axis = normalize_axis(axis, weight.ndim)
        set_attributes(self, iterations=iterations, epsilon=epsilon, axis=axis, _trained=[])
        first = np.moveaxis(_initial_value(weight).astype("float64"), axis, 0)
        first = first.reshape(len(first), -1)
        u, v = np.zeros(len(first)), np.ones(first.shape[1])
        for _ in range(_FIRST_ITERATIONS):
            u = first @ v / max(float(np.linalg.norm(first @ v)), epsilon)
            v = u @ first / max(float(np.linalg.norm(u @ first)), epsilon)
        with prefix_scope(self._scope):
            for name, x in (("u", u), ("v", v)):
                x = x.astype(weight.dtype)
                made = make_variable(x, f"{variable}_{name}", False)
                set_attributes(self, **{f"{variable}_{name}": made})
        own = {f"layer.{variable}": "original", f"{variable}_u": "0._u", f"{variable}_v": "0._v"}
        self._name_in_torch(own)

    def _weight(self) -> Tensor:
        weight = getattr(self.layer, self.variable)
        u, v = (getattr(self, f"{self.variable}_{name}") for name in "uv")
        matrix = moveaxis(weight, self.axis, 0)
        matrix = reshape(matrix, (matrix.shape[0], -1))
        updates = current_updates()
        if updates is None:
            return _divided_by_norm(weight, matrix, u, v)
        if not self._trained or self._trained[0] is not updates:  # once in a block
            new = _power_steps(matrix, v, self.iterations, self.epsilon)
            updates += [assign(u, new[0]), assign(v, new[1])]
            self._trained[:] = updates, _divided_by_norm(weight, matrix, *new)
        known: Tensor = self._trained[1]
        return known


@function
def spectral_norm(
    layer: Any, variable: str = "weight", iterations: int = 1, epsilon: float = 1e-12,
    axis: int | None = None,
) -> Any:  # fmt: skip
    """Return a layer whose weight is divided by its largest singular value.

    The value is estimated by the power method, whose vectors are buffers, `weight_u` and
    `weight_v`. A `gf.nn.training` block makes a few steps and adds the new vectors to its updates.

    Args:
        layer: any layer of `gf.nn` that holds the variable itself.
        variable: its name in the layer.
        iterations: steps of the power method in a training step.
        epsilon: the least norm by which a vector is divided.
        axis: the axis of the variable that gives the rows of its matrix. Default: that of outputs.

    Raises:
        ArgumentError: the layer has no such variable, or iterations is not a positive int.
        ShapeError: the variable has one axis, or the axis is outside of it.

    Source: Miyato et al., ICLR 2018.
    """
    if require_int("iterations", iterations) < 1:
        raise ArgumentError(f"iterations must be at least 1, got {iterations}")
    return SpectralNorm(
        layer, variable, iterations, require_finite("spectral_norm", "epsilon", epsilon), axis
    )
