"""Functions of `gf.nn` as layers, for `Sequential`: activations, pooling, reshaping.

Public in `gf.nn`. Each calls the function of that name with its fields as arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import reduce
from operator import mul
from typing import Any, ClassVar

from graphflow import init
from graphflow.base.argument_checks import checks_argument_names
from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, as_tensor, user_location
from graphflow.ir.spec import show_shape
from graphflow.ops.images.adaptive_pooling import adaptive_avg_pool, adaptive_max_pool
from graphflow.ops.images.resize import interpolate
from graphflow.ops.networks.dropout import dropout
from graphflow.ops.networks.layers.basic_layers import SCALE_NAMES
from graphflow.ops.networks.layers.layer_base import Layer, parameter, require_sizes, set_attributes
from graphflow.ops.networks.norm import instance_norm
from graphflow.ops.networks.training_mode import current_updates


class _Function(Layer):
    """A layer that calls a function with its fields."""

    _function: ClassVar[str]

    def __call__(self, x: Any) -> Any:
        given = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return FUNCTIONS[self._function](x, **given)


# Activations ------------------------------------------------------------------------------------


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class ReLU(_Function):
    """The function `gf.nn.relu` as a layer."""

    _function = "relu"


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class ReLU6(_Function):
    """The function `gf.nn.relu6` as a layer."""

    _function = "relu6"


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class GELU(_Function):
    """The function `gf.nn.gelu` as a layer."""

    _function = "gelu"
    approximate: str | None = None


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class SiLU(_Function):
    """The function `gf.nn.silu` as a layer."""

    _function = "silu"


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Mish(_Function):
    """The function `gf.nn.mish` as a layer."""

    _function = "mish"


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Sigmoid(_Function):
    """The function `gf.nn.sigmoid` as a layer."""

    _function = "sigmoid"


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Tanh(_Function):
    """The function `gf.nn.tanh` as a layer."""

    _function = "tanh"


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Softmax(_Function):
    """The function `gf.nn.softmax` as a layer."""

    _function = "softmax"
    axis: int = -1


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class LogSoftmax(_Function):
    """The function `gf.nn.log_softmax` as a layer."""

    _function = "log_softmax"
    axis: int = -1


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class LeakyReLU(_Function):
    """The function `gf.nn.leaky_relu` as a layer."""

    _function = "leaky_relu"
    slope: float = 0.01


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class ELU(_Function):
    """The function `gf.nn.elu` as a layer."""

    _function = "elu"
    alpha: float = 1.0


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class SELU(_Function):
    """The function `gf.nn.selu` as a layer."""

    _function = "selu"


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Softplus(_Function):
    """The function `gf.nn.softplus` as a layer."""

    _function = "softplus"


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Hardswish(_Function):
    """The function `gf.nn.hard_swish` as a layer."""

    _function = "hard_swish"


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class GLU(_Function):
    """The function `gf.nn.glu` as a layer."""

    _function = "glu"
    axis: int = -1


@dataclass(frozen=True, eq=False, init=False)
class PReLU(Layer):
    """max(x, 0) + weight·min(x, 0), with one slope for all channels or one for each.

    Args:
        channels: 1, or the number of channels, which are axis 1.
        initial: first value of the slopes.

    Variables: `weight` (channels,).

    Source: He et al., "Delving deep into rectifiers", ICCV 2015.
    """

    weight: Tensor

    def __init__(
        self, channels: int = 1, initial: float = 0.25, *, dtype: Any = "float32",
        name: str = "prelu",
    ) -> None:  # fmt: skip
        require_sizes(self, channels=channels)
        with self.scope(name):
            set_attributes(
                self, weight=parameter("weight", init.full((int(channels),), initial, dtype))
            )

    def __call__(self, x: Any) -> Tensor:
        x = as_tensor(x)
        slopes = self.weight
        if int(slopes.shape[0]) > 1:
            slopes = FUNCTIONS["reshape"](slopes, (-1, *(1,) * max(x.ndim - 2, 0)))
        found: Tensor = FUNCTIONS["prelu"](x, slopes)
        return found


# Pooling ----------------------------------------------------------------------------------------


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class MaxPool1d(_Function):
    """The largest value of each window, by `gf.nn.max_pool1d`."""

    _function = "max_pool1d"
    kernel: Any
    stride: Any = None
    padding: Any = 0
    dilation: Any = 1
    ceil_mode: bool = False
    channels_last: bool = False


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class MaxPool2d(_Function):
    """The largest value of each window, by `gf.nn.max_pool2d`."""

    _function = "max_pool2d"
    kernel: Any
    stride: Any = None
    padding: Any = 0
    dilation: Any = 1
    ceil_mode: bool = False
    channels_last: bool = False


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class MaxPool3d(_Function):
    """The largest value of each window, by `gf.nn.max_pool3d`."""

    _function = "max_pool3d"
    kernel: Any
    stride: Any = None
    padding: Any = 0
    dilation: Any = 1
    ceil_mode: bool = False
    channels_last: bool = False


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class AvgPool1d(_Function):
    """The mean of each window, by `gf.nn.avg_pool1d`."""

    _function = "avg_pool1d"
    kernel: Any
    stride: Any = None
    padding: Any = 0
    dilation: Any = 1
    ceil_mode: bool = False
    count_include_pad: bool = True
    channels_last: bool = False


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class AvgPool2d(_Function):
    """The mean of each window, by `gf.nn.avg_pool2d`."""

    _function = "avg_pool2d"
    kernel: Any
    stride: Any = None
    padding: Any = 0
    dilation: Any = 1
    ceil_mode: bool = False
    count_include_pad: bool = True
    channels_last: bool = False


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class AvgPool3d(_Function):
    """The mean of each window, by `gf.nn.avg_pool3d`."""

    _function = "avg_pool3d"
    kernel: Any
    stride: Any = None
    padding: Any = 0
    dilation: Any = 1
    ceil_mode: bool = False
    count_include_pad: bool = True
    channels_last: bool = False


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class AdaptiveAvgPool(Layer):
    """Means over windows that give places of a fixed size, by `gf.nn.adaptive_avg_pool`."""

    size: Any
    channels_last: bool = False

    def __call__(self, x: Any) -> Tensor:
        return adaptive_avg_pool(x, self.size, self.channels_last)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class AdaptiveMaxPool(Layer):
    """The largest values of windows that give places of a fixed size, by
    `gf.nn.adaptive_max_pool`."""

    size: Any
    channels_last: bool = False

    def __call__(self, x: Any) -> Any:
        return adaptive_max_pool(x, self.size, channels_last=self.channels_last)


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Upsample(Layer):
    """Images of another size, by `gf.nn.interpolate`: give `size` or `scale`."""

    size: Any = None
    scale: Any = None
    mode: str = "nearest"
    align_corners: bool = False

    def __call__(self, x: Any) -> Tensor:
        return interpolate(x, self.size, self.scale, self.mode, self.align_corners)


# Shapes and channels ----------------------------------------------------------------------------


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Identity(Layer):
    """Return x as it is."""

    def __call__(self, x: Any) -> Any:
        return x


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Flatten(Layer):
    """Join all axes from `start` on: (N, C, H, W) to (N, C·H·W)."""

    start: int = 1

    def __call__(self, x: Any) -> Tensor:
        x = as_tensor(x)
        if not 0 <= self.start <= x.ndim:
            raise ShapeError(
                f"Flatten at {user_location()}: start is {self.start}, and x {show_shape(x.shape)} "
                f"has {x.ndim} axes"
            )
        kept = x.shape[: self.start]
        joined: Tensor = FUNCTIONS["reshape"](x, (*kept, reduce(mul, x.shape[self.start :], 1)))
        return joined


@checks_argument_names(ArgumentError)
@dataclass(frozen=True, eq=False)
class Dropout2d(Layer):
    """Dropout of whole channels (N, C, …) in a `gf.nn.training` block; otherwise x as it is.

    Source: Tompson et al., "Efficient object localization using convolutional networks", 2015.
    """

    rate: float = 0.5

    def __post_init__(self) -> None:
        number = isinstance(self.rate, int | float) and not isinstance(self.rate, bool)
        if not number or not 0 <= self.rate < 1:
            raise ArgumentError(
                f"Dropout2d at {user_location()}: rate must be a number in [0, 1), got "
                f"{self.rate!r}"
            )

    def __call__(self, x: Any) -> Tensor:
        x = as_tensor(x)
        if x.ndim < 3:
            raise ShapeError(
                f"Dropout2d at {user_location()}: x must be (N, C, …), not {show_shape(x.shape)}"
            )
        if current_updates() is None:
            return as_tensor(x)
        shape = (*x.shape[:2], *(1,) * (x.ndim - 2))
        dropped: Tensor = x * dropout(FUNCTIONS["ones"](shape, x.dtype), self.rate)
        return dropped


@dataclass(frozen=True, eq=False, init=False)
class InstanceNorm(Layer):
    """Normalisation of each channel of each example by `gf.nn.instance_norm`.

    Args:
        channels: size of axis 1.
        affine: scale and shift each channel.

    Variables, if `affine`: `scale` (ones) and `bias` (zeros), (channels,).
    """

    torch_names: ClassVar[Mapping[str, str]] = SCALE_NAMES
    scale: Tensor | None
    bias: Tensor | None
    epsilon: float
    channels_last: bool

    def __init__(
        self, channels: int, epsilon: float = 1e-5, affine: bool = False, *,
        channels_last: bool = False, dtype: Any = "float32", name: str = "instance_norm",
    ) -> None:  # fmt: skip
        require_sizes(self, channels=channels)
        set_attributes(self, epsilon=epsilon, channels_last=channels_last, scale=None, bias=None)
        with self.scope(name):
            if affine:
                shape = (int(channels),)
                set_attributes(
                    self, scale=parameter("scale", init.ones(shape, dtype)),
                    bias=parameter("bias", init.zeros(shape, dtype)),
                )  # fmt: skip

    def __call__(self, x: Any) -> Tensor:
        normed: Tensor = instance_norm(x, self.scale, self.bias, self.epsilon, self.channels_last)
        return normed
