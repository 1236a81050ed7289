"""Layers: frozen objects that hold variables and are called on tensors. Public in `gf.nn`.

Initial values are torch's defaults, drawn from random streams of their own (see `gf.random.seed`).
Names of variables consist of name scopes and the layer's name: `encoder/linear/weight`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names, format_value
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, ShapeError
from graphflow.frontend.builders import assign
from graphflow.ir.op import (
    Tensor,
    as_tensor,
    error_location,
    user_location,
)
from graphflow.ir.spec import show_shape
from graphflow.ops.matrices.matmul import add_bias, matmul
from graphflow.ops.networks.batch_norm import batch_norm
from graphflow.ops.networks.dropout import dropout
from graphflow.ops.networks.layers.layer_base import (
    Layer,
    inverse_root,
    parameter,
    require_sizes,
    set_attributes,
    uniform_parameter,
)
from graphflow.ops.networks.norm import group_norm, layer_norm, rms_norm
from graphflow.ops.networks.training_mode import current_updates
from graphflow.ops.tensors.take import take

Key = int | slice
SCALE_NAMES = {"scale": "weight"}
"""What torch calls the variables of norms."""


# Linear maps ------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, init=False)
class Linear(Layer):
    """A linear map x·weightᵀ + bias over the last axis: (…, inputs) to (…, outputs).

    Args:
        inputs, outputs: sizes of the last axis.
        bias: add a bias.

    Variables: `weight` (outputs, inputs) and `bias` (outputs,), uniform on ±1/√inputs.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(
        self, inputs: int, outputs: int, bias: bool = True, *, dtype: Any = "float32",
        name: str = "linear",
    ) -> None:  # fmt: skip
        require_sizes(self, inputs=inputs, outputs=outputs)
        bound = inverse_root(inputs)
        with self.scope(name):
            set_attributes(
                self,
                weight=uniform_parameter("weight", (outputs, inputs), bound, dtype),
                bias=uniform_parameter("bias", (outputs,), bound, dtype) if bias else None,
            )

    def __call__(self, x: Any) -> Tensor:
        x, inputs = as_tensor(x), self.weight.shape[1]
        if x.ndim and isinstance(x.shape[-1], int) and x.shape[-1] != inputs:
            raise ShapeError(
                f"Linear at {user_location()}: the last axis of x holds its {inputs} inputs, "
                f"x is {show_shape(x.shape)}"
            )
        return add_bias(matmul(x, self.weight, transpose_b=True), self.bias)


@dataclass(frozen=True, eq=False, init=False)
class Embedding(Layer):
    """A table whose rows are looked up by number: ints of shape s to floats (*s, size).

    Args:
        number: rows of the table.
        size: elements of a row.

    Variables: `weight` (number, size), standard normal. An int outside [-number, number) is an
    OpError in the step.
    """

    weight: Tensor

    def __init__(
        self, number: int, size: int, *, dtype: Any = "float32", name: str = "embedding"
    ) -> None:
        require_sizes(self, number=number, size=size)
        with self.scope(name):
            set_attributes(
                self, weight=parameter("weight", init.normal((number, size), 0.0, 1.0, dtype))
            )

    def __call__(self, indices: Any) -> Tensor:
        return take(self.weight, indices, 0)


# Normalisation ----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, init=False)
class LayerNorm(Layer):
    """Layer normalisation over the last axes, by `gf.nn.layer_norm`.

    Args:
        shape: sizes of the last axes; an int for the last axis alone.
        affine: scale and, with `bias`, shift the result.

    Variables, unless `affine` is False: `scale` (ones) and `bias` (zeros), of the given shape.
    """

    torch_names: ClassVar[Mapping[str, str]] = SCALE_NAMES
    scale: Tensor | None
    bias: Tensor | None
    shape: tuple[int, ...]
    epsilon: float

    def __init__(
        self, shape: int | tuple[int, ...], epsilon: float = 1e-5, affine: bool = True,
        bias: bool = True, *, dtype: Any = "float32", name: str = "layer_norm",
    ) -> None:  # fmt: skip
        set_attributes(self, shape=_normalized_shape(self, shape), epsilon=epsilon)
        with self.scope(name):
            _set_affine(self, self.shape, affine, affine and bias, dtype)

    def __call__(self, x: Any) -> Tensor:
        x, axes = _require_last_axes(self, x, self.shape)
        return layer_norm(x, self.scale, self.bias, axes, self.epsilon)


@dataclass(frozen=True, eq=False, init=False)
class RMSNorm(Layer):
    """Normalisation by the root mean square over the last axes, by `gf.nn.rms_norm`.

    Args:
        shape: sizes of the last axes; an int for the last axis alone.
        affine: scale the result.

    Variables, unless `affine` is False: `scale` (ones), of the given shape.
    """

    torch_names: ClassVar[Mapping[str, str]] = SCALE_NAMES
    scale: Tensor | None
    shape: tuple[int, ...]
    epsilon: float

    def __init__(
        self, shape: int | tuple[int, ...], epsilon: float = 1e-5, affine: bool = True, *,
        dtype: Any = "float32", name: str = "rms_norm",
    ) -> None:  # fmt: skip
        set_attributes(self, shape=_normalized_shape(self, shape), epsilon=epsilon)
        with self.scope(name):
            _set_affine(self, self.shape, affine, None, dtype)

    def __call__(self, x: Any) -> Tensor:
        x, axes = _require_last_axes(self, x, self.shape)
        return rms_norm(x, self.scale, axes, self.epsilon)


def _set_affine(
    layer: Layer, shape: tuple[int, ...], scale: bool, bias: bool | None, dtype: Any
) -> None:
    """Make the variables of a norm, ones and zeros; None where they are unwanted.

    Args:
        bias: None for norms without a bias attribute.
    """
    set_attributes(layer, scale=parameter("scale", init.ones(shape, dtype)) if scale else None)
    if bias is not None:
        set_attributes(layer, bias=parameter("bias", init.zeros(shape, dtype)) if bias else None)


def _normalized_shape(layer: Layer, shape: Any) -> tuple[int, ...]:
    sizes = tuple(shape) if isinstance(shape, tuple | list) else (shape,)
    for size in sizes or (shape,):
        require_sizes(layer, shape=size)
    return tuple(map(int, sizes))


def _require_last_axes(
    layer: Layer, x: Any, shape: tuple[int, ...]
) -> tuple[Tensor, tuple[int, ...]]:
    """Return x and the axes that a norm is over; refuse other sizes."""
    x = as_tensor(x)
    if x.shape[-len(shape) :] != shape:
        raise ShapeError(
            f"{type(layer).__name__} at {user_location()}: the last axes of x are {shape}, "
            f"not those of {show_shape(x.shape)}"
        )
    return x, tuple(range(-len(shape), 0))


@dataclass(frozen=True, eq=False, init=False)
class GroupNorm(Layer):
    """Group normalisation by `gf.nn.group_norm`.

    Args:
        groups: number of groups, a divisor of `channels`.
        affine: scale and shift each channel.

    Variables, unless `affine` is False: `scale` (ones) and `bias` (zeros), (channels,).
    """

    torch_names: ClassVar[Mapping[str, str]] = SCALE_NAMES
    scale: Tensor | None
    bias: Tensor | None
    groups: int
    epsilon: float
    channels_last: bool

    def __init__(
        self, groups: int, channels: int, epsilon: float = 1e-5, affine: bool = True, *,
        channels_last: bool = False, dtype: Any = "float32", name: str = "group_norm",
    ) -> None:  # fmt: skip
        require_sizes(self, groups=groups, channels=channels)
        set_attributes(self, groups=groups, epsilon=epsilon, channels_last=channels_last)
        with self.scope(name):
            _set_affine(self, (channels,), affine, affine, dtype)

    def __call__(self, x: Any) -> Tensor:
        return group_norm(x, self.groups, self.scale, self.bias, self.epsilon, self.channels_last)


@dataclass(frozen=True, eq=False, init=False)
class BatchNorm(Layer):
    """Batch normalisation by `gf.nn.batch_norm`.

    In a `gf.nn.training` block it uses the moments of the batch, else running moments. The block's
    list collects the assignments of new running moments; fetch them in a step that trains.
    Optimisers leave the moments alone, since they are not trainable.

    Variables: `scale` (ones) and `bias` (zeros) unless `affine` is False; buffers `mean` (zeros)
    and `variance` (ones); all (channels,).
    """

    torch_names: ClassVar[Mapping[str, str]] = {
        "scale": "weight",
        "mean": "running_mean",
        "variance": "running_var",
    }
    torch_counts: ClassVar[tuple[str, ...]] = ("num_batches_tracked",)
    scale: Tensor | None
    bias: Tensor | None
    mean: Tensor
    variance: Tensor
    epsilon: float
    momentum: float
    channels_last: bool

    _ranks: ClassVar[tuple[int, ...]] = ()  # of x; () is any

    def __init__(
        self, channels: int, epsilon: float = 1e-5, momentum: float = 0.1, affine: bool = True, *,
        channels_last: bool = False, dtype: Any = "float32", name: str = "batch_norm",
    ) -> None:  # fmt: skip
        require_sizes(self, channels=channels)
        set_attributes(self, epsilon=epsilon, momentum=momentum, channels_last=channels_last)
        with self.scope(name):
            _set_affine(self, (channels,), affine, affine, dtype)
            set_attributes(
                self,
                mean=parameter("mean", init.zeros((channels,), dtype), trainable=False),
                variance=parameter("variance", init.ones((channels,), dtype), trainable=False),
            )

    def __call__(self, x: Any) -> Tensor:
        x, updates = as_tensor(x), current_updates()
        if self._ranks and x.ndim not in self._ranks:
            raise ShapeError(
                f"{type(self).__name__} at {user_location()}: x must have rank "
                f"{' or '.join(map(str, self._ranks))}, got shape {show_shape(x.shape)}"
            )
        given = (x, self.scale, self.bias, self.mean, self.variance)
        attrs: dict[str, Any] = {"epsilon": self.epsilon, "channels_last": self.channels_last}
        if updates is None:
            result: Tensor = batch_norm(*given, **attrs)
            return result
        y, mean, variance = batch_norm(*given, training=True, momentum=self.momentum, **attrs)
        updates += [assign(self.mean, mean), assign(self.variance, variance)]
        trained: Tensor = y
        return trained


class BatchNorm1d(BatchNorm):
    """`BatchNorm` of (N, C) or (N, C, L)."""

    _ranks = (2, 3)


class BatchNorm2d(BatchNorm):
    """`BatchNorm` of (N, C, H, W)."""

    _ranks = (4,)


class BatchNorm3d(BatchNorm):
    """`BatchNorm` of (N, C, D, H, W)."""

    _ranks = (5,)


# Others -----------------------------------------------------------------------------------------


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Dropout(Layer):
    """Dropout by `gf.nn.dropout` in a `gf.nn.training` block; otherwise x is returned as it is."""

    rate: float = 0.5

    def __post_init__(self) -> None:
        number = isinstance(self.rate, int | float) and not isinstance(self.rate, bool)
        if not number or not 0 <= self.rate < 1:
            raise ArgumentError(
                f"Dropout at {user_location()}: rate must be a number in [0, 1), got {self.rate!r}"
            )

    def __call__(self, x: Any) -> Tensor:
        return as_tensor(x) if current_updates() is None else dropout(x, self.rate)


class Sequential(Layer):
    """Layers and functions, applied one after the other: `Sequential(Linear(4, 8), gf.nn.relu)`."""

    torch_names: ClassVar[Mapping[str, str]] = {"layers": ""}

    def __init__(self, *layers: Callable[[Any], Any]) -> None:
        with error_location("Sequential"):
            for layer in layers:
                if not callable(layer):
                    several = isinstance(layer, list | tuple)
                    raise ArgumentError(
                        f"layers are callable, {format_value(layer)} is not"
                        + "; give the layers of a list one by one, Sequential(*layers)" * several
                    )
        self.layers = tuple(layers)

    def __call__(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x

    def __len__(self) -> int:
        return len(self.layers)

    def __getitem__(self, index: Key) -> Any:
        """Return a layer, or a Sequential for a slice."""
        chosen = self.layers[index]
        return Sequential(*chosen) if isinstance(chosen, tuple) else chosen

    def __repr__(self) -> str:
        return f"Sequential({', '.join(map(repr, self.layers))})"
