"""Pooling: the largest element, the mean or the p-norm of sliding windows. Public in `gf.nn`."""

from __future__ import annotations

import math
from typing import Any

from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Tensor, function
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.windows.conv import for_rank
from graphflow.ops.windows.pool_max import max_pool_op, max_pool_taps_op, tap_positions_op
from graphflow.ops.windows.pool_mean import avg_pool_op
from graphflow.ops.windows.window_arguments import (
    move_channels_first,
    padding_pairs,
    per_axis,
    require_image,
    restore_channels,
)


def pool_arguments(
    x: Any,
    kernel: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil_mode: bool,
    channels_last: bool,
) -> tuple[Tensor, dict[str, Any]]:
    """Return x as (batch, channels, *space), and the attributes of a pooling op."""
    x = require_image(x)
    require_kind(x.spec, "int", "float")
    if not isinstance(ceil_mode, bool):
        raise ArgumentError(f"ceil_mode must be True or False, got {ceil_mode!r}")
    x = move_channels_first(x, channels_last)
    rank = x.ndim - 2
    kernels = per_axis("kernel", kernel, rank)
    strides = kernels if stride is None else per_axis("stride", stride, rank)
    dilations = per_axis("dilation", dilation, rank)
    return x, {
        "kernel": kernels,
        "stride": strides,
        "padding": padding_pairs(padding, x.shape[2:], kernels, strides, dilations),
        "dilation": dilations,
        "ceil_mode": ceil_mode,
    }


@function
def max_pool(
    x: Any,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
    channels_last: bool = False,
    name: str | None = None,
) -> Any:
    """Return the largest element of each window over all axes of x but the first two.

    Padding never wins; NaN does. The gradient goes to the first of equal elements in row-major
    order.

    Args:
        x: ints or floats (batch, channels, *space), or (batch, *space, channels) with
            `channels_last`.
        kernel: size of the windows, an int or one for each spatial axis.
        stride, dilation: an int or one for each spatial axis; stride defaults to the kernel.
        padding: as for `conv`.
        ceil_mode: keep the window that hangs over the end of an axis.
        return_indices: also return the elements' positions: int64, in the flattened spatial axes of
            x.

    Returns:
        (batch, channels, *positions), channels last if x's are; a pair with `return_indices`.

    Raises:
        ShapeError: x has no spatial axes, or no window fits.
        DTypeError, ArgumentError: x is bool or complex, or arguments have another form.
    """
    x, attrs = pool_arguments(x, kernel, stride, padding, dilation, ceil_mode, channels_last)
    y: Tensor = max_pool_op(x, name=name, **attrs)
    if not return_indices:
        return restore_channels(y, channels_last)
    chosen = max_pool_taps_op(x, y, **attrs)
    indices = tap_positions_op(chosen, sizes=x.shape[2:], **attrs)
    return restore_channels(y, channels_last), restore_channels(indices, channels_last)


@function
def avg_pool(
    x: Any,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: float | None = None,
    channels_last: bool = False,
    name: str | None = None,
) -> Tensor:
    """Return the mean of each window over all axes of x but the first two.

    Args:
        x: floats (batch, channels, *space), or (batch, *space, channels) with `channels_last`.
        kernel, stride, padding, dilation, ceil_mode: as for `max_pool`.
        count_include_pad: count zeros of the padding, but never elements beyond it.
        divisor: divide the sums by this number instead.

    Raises:
        ShapeError, DTypeError, ArgumentError: as `max_pool`; or divisor is no number other than 0.
    """
    x, attrs = pool_arguments(x, kernel, stride, padding, dilation, ceil_mode, channels_last)
    wanted: Any = "padded" if count_include_pad else "inside"
    if divisor is not None:
        if isinstance(divisor, bool) or not isinstance(divisor, int | float) or divisor == 0:
            raise ArgumentError(f"the divisor must be a number other than 0, got {divisor!r}")
        wanted = divisor
    y: Tensor = avg_pool_op(x, **attrs, divisor=wanted, name=name)
    return restore_channels(y, channels_last)


@composite("x")
@function
def lp_pool(
    x: Any,
    kernel: Any,
    p: float = 2.0,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    channels_last: bool = False,
) -> Tensor:
    """Compute (Σ |x|^p)^(1/p) over each window; the gradient of a window of zeros is 0.

    Args:
        x: floats (batch, channels, *space), or (batch, *space, channels) with `channels_last`.
        p: a positive number.
        kernel, stride, padding, dilation, ceil_mode: as for `max_pool`.

    Raises:
        ShapeError, DTypeError, ArgumentError: as `max_pool`; or p is not positive.
    """
    x, attrs = pool_arguments(x, kernel, stride, padding, dilation, ceil_mode, channels_last)
    sums = avg_pool_op(lp_power(x, p), **attrs, divisor=1)
    return restore_channels(lp_root(sums, p), channels_last)


def lp_power(x: Tensor, p: float) -> Tensor:
    """Return |x|^p; refuse a p that is not positive."""
    if isinstance(p, bool) or not isinstance(p, int | float) or not 0 < p < math.inf:
        raise ArgumentError(f"p must be a positive number, got {p!r}")
    require_kind(x.spec, "float")
    if p == 2:
        return x * x  # type: ignore[no-any-return]
    return abs(x) ** float(p)  # type: ignore[no-any-return]


def lp_root(sums: Tensor, p: float) -> Tensor:
    """Return sums^(1/p), with gradient 0 at 0."""
    empty = FUNCTIONS["equal"](sums, 0)
    safe = FUNCTIONS["where"](empty, 1.0, sums)
    result: Tensor = FUNCTIONS["where"](empty, 0.0, safe ** (1.0 / p))
    return result


max_pool1d, max_pool2d, max_pool3d = (for_rank(max_pool, rank) for rank in (1, 2, 3))
avg_pool1d, avg_pool2d, avg_pool3d = (for_rank(avg_pool, rank) for rank in (1, 2, 3))
lp_pool1d, lp_pool2d, lp_pool3d = (for_rank(lp_pool, rank) for rank in (1, 2, 3))
