"""Convolutional layers. Public in `gf.nn`."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Tensor, as_tensor, user_location
from graphflow.ir.spec import show_shape
from graphflow.ops.networks.layers.layer_base import (
    Layer,
    inverse_root,
    require_sizes,
    set_attributes,
    uniform_parameter,
)
from graphflow.ops.windows.conv import conv, conv_transpose
from graphflow.ops.windows.window_arguments import per_axis


def _kernel_sizes(layer: Layer, kernel: Any, rank: int) -> tuple[int, ...]:
    """Return the kernel's size on each spatial axis."""
    sizes = tuple(kernel) if isinstance(kernel, tuple | list) else (kernel,) * rank
    for size in sizes:
        require_sizes(layer, kernel=size)
    if len(sizes) != rank:
        raise ArgumentError(
            f"{type(layer).__name__} at {user_location()}: kernel must have {rank} sizes, "
            f"got {kernel!r}"
        )
    return tuple(map(int, sizes))


def _require_rank(layer: Layer, x: Any, rank: int) -> Tensor:
    tensor: Tensor = as_tensor(x)
    if tensor.ndim != rank + 2:
        raise ShapeError(
            f"{type(layer).__name__} at {user_location()}: x must have a batch, channels and "
            f"{rank} spatial ax{'es' if rank > 1 else 'is'}, got shape {show_shape(tensor.shape)}"
        )
    return tensor


@dataclass(frozen=True, eq=False, init=False)
class _Conv(Layer):
    """A convolution of some rank, by `gf.nn.conv`.

    Args:
        inputs, outputs: channels, multiples of `groups`.
        kernel, stride, dilation: an int, or one for each spatial axis.
        padding, exact: as for `gf.nn.conv`.
        bias: add a bias.

    Variables: `weight` (outputs, inputs / groups, *kernel) and `bias` (outputs,), uniform on ±1/√n
    for the n products that are summed in an output.
    """

    weight: Tensor
    bias: Tensor | None
    stride: Any
    padding: Any
    dilation: Any
    groups: int
    channels_last: bool
    exact: bool | None

    _rank: ClassVar[int] = 0

    def __init__(
        self, inputs: int, outputs: int, kernel: Any, stride: Any = 1, padding: Any = 0,
        dilation: Any = 1, groups: int = 1, bias: bool = True, *, channels_last: bool = False,
        dtype: Any = "float32", name: str | None = None, exact: bool | None = None,
    ) -> None:  # fmt: skip
        require_sizes(self, inputs=inputs, outputs=outputs, groups=groups)
        _require_groups(self, inputs, outputs, groups)
        shape = (outputs, inputs // groups, *_kernel_sizes(self, kernel, self._rank))
        set_attributes(
            self, stride=per_axis("stride", stride, self._rank), padding=padding,
            dilation=per_axis("dilation", dilation, self._rank), groups=groups,
            channels_last=channels_last, exact=exact,
        )  # fmt: skip
        _set_weights(self, shape, outputs, bias, dtype, name)

    def __call__(self, x: Any) -> Tensor:
        x = _require_rank(self, x, self._rank)
        return conv(
            x, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups,
            self.channels_last, exact=self.exact,
        )  # fmt: skip


@dataclass(frozen=True, eq=False, init=False)
class _ConvTranspose(Layer):
    """A transposed convolution of some rank, by `gf.nn.conv_transpose`.

    Args:
        inputs, outputs: channels, multiples of `groups`.
        kernel, stride, dilation, output_padding: an int, or one for each spatial axis.
        padding, exact: as for `gf.nn.conv`.
        bias: add a bias.

    Variables: `weight` (inputs, outputs / groups, *kernel) and `bias` (outputs,), uniform on ±1/√n
    for n = outputs / groups times the kernel's elements.
    """

    weight: Tensor
    bias: Tensor | None
    stride: Any
    padding: Any
    output_padding: Any
    groups: int
    dilation: Any
    channels_last: bool
    exact: bool | None

    _rank: ClassVar[int] = 0

    def __init__(
        self, inputs: int, outputs: int, kernel: Any, stride: Any = 1, padding: Any = 0,
        output_padding: Any = 0, groups: int = 1, bias: bool = True, dilation: Any = 1, *,
        channels_last: bool = False, dtype: Any = "float32", name: str | None = None,
        exact: bool | None = None,
    ) -> None:  # fmt: skip
        require_sizes(self, inputs=inputs, outputs=outputs, groups=groups)
        _require_groups(self, inputs, outputs, groups)
        shape = (inputs, outputs // groups, *_kernel_sizes(self, kernel, self._rank))
        set_attributes(
            self, stride=per_axis("stride", stride, self._rank), padding=padding,
            output_padding=per_axis("output_padding", output_padding, self._rank, least=0),
            groups=groups, dilation=per_axis("dilation", dilation, self._rank),
            channels_last=channels_last, exact=exact,
        )  # fmt: skip
        _set_weights(self, shape, outputs, bias, dtype, name)

    def __call__(self, x: Any) -> Tensor:
        x = _require_rank(self, x, self._rank)
        return conv_transpose(
            x, self.weight, self.bias, self.stride, self.padding, self.output_padding,
            self.dilation, self.groups, self.channels_last, exact=self.exact,
        )  # fmt: skip


def _require_groups(layer: Layer, inputs: int, outputs: int, groups: int) -> None:
    if inputs % groups or outputs % groups:
        raise ArgumentError(
            f"{type(layer).__name__} at {user_location()}: {groups} groups do not divide "
            f"{inputs} inputs and {outputs} outputs"
        )


def _set_weights(
    layer: Layer, shape: tuple[int, ...], outputs: int, bias: bool, dtype: Any, name: str | None
) -> None:
    bound = inverse_root(math.prod(shape[1:]))
    with layer.scope(name or type(layer).__name__.lower()):
        set_attributes(
            layer,
            weight=uniform_parameter("weight", shape, bound, dtype),
            bias=uniform_parameter("bias", (outputs,), bound, dtype) if bias else None,
        )


class Conv1d(_Conv):
    __doc__ = (_Conv.__doc__ or "").replace("of some rank", "of (N, C, L)")
    _rank = 1


class Conv2d(_Conv):
    __doc__ = (_Conv.__doc__ or "").replace("of some rank", "of (N, C, H, W)")
    _rank = 2


class Conv3d(_Conv):
    __doc__ = (_Conv.__doc__ or "").replace("of some rank", "of (N, C, D, H, W)")
    _rank = 3


class ConvTranspose1d(_ConvTranspose):
    __doc__ = (_ConvTranspose.__doc__ or "").replace("of some rank", "of (N, C, L)")
    _rank = 1


class ConvTranspose2d(_ConvTranspose):
    __doc__ = (_ConvTranspose.__doc__ or "").replace("of some rank", "of (N, C, H, W)")
    _rank = 2


class ConvTranspose3d(_ConvTranspose):
    __doc__ = (_ConvTranspose.__doc__ or "").replace("of some rank", "of (N, C, D, H, W)")
    _rank = 3
