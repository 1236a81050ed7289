"""The table of convolution kernels, in order of preference.

    choose(shape, "y").forward(shape, y, x, w)             # y = convolution of x by w
    choose(shape, "x").back_to_input(shape, x, g, w)       # x = gradient in the input, from g
    choose(shape, "w").back_to_weight(shape, w, x, g)      # w = gradient in the weight, from g

A choice depends on `ConvShape` alone, never on values or threads, since bits follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.conv import (
    im2col,
    one_image,
    pointwise,
    strided_view,
    winograd,
    winograd_weight_gradient,
)
from graphflow.ops.kernels.conv.conv_shape import ConvShape, Target
from graphflow.ops.kernels.conv.direct import (
    direct,
    direct_weight_gradient,
    masked_input_gradient,
    phases,
)
from graphflow.ops.kernels.conv.direct.plane_copies import flip_weights
from graphflow.ops.kernels.conv.durations import (
    direct_nanoseconds,
    implicit_nanoseconds,
    phases_nanoseconds,
)
from graphflow.ops.kernels.conv.implicit import implicit_gemm
from graphflow.ops.kernels.conv.implicit.channel_rows import blocked_bytes, row_bytes
from graphflow.ops.kernels.conv.winograd_tiles import tile_count
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.gemm import gemm
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.jit.scratch_memory import scratch


class ConvKernel(NamedTuple):
    """A row of the table.

    Attributes:
        fits: whether the kernel may compute a target, and no kernel further down is faster.
        forward: (shape, y, x, w) writes y.
        back_to_input: (shape, x, g, w) writes x.
        back_to_weight: (shape, w, x, g) writes w.
        task: the forward kernel as a native call for x and w; None if it takes several calls.
        layout_bytes: bytes of the weights as the kernel reads them, if it takes the time to lay
            them out; else 0. `forward` and `back_to_input` then take a `KeptLayouts` as well.
    """

    name: str
    fits: Callable[[ConvShape, Target], bool]
    forward: Callable[..., None]
    back_to_input: Callable[..., None]
    back_to_weight: Callable[[ConvShape, Any, Any, Any], None]
    task: Callable[[ConvShape], KernelTask | None] = lambda s: None
    layout_bytes: Callable[[ConvShape, Target], int] = lambda s, target: 0


# One small image ----------------------------------------------------------------------------------


def _fits_one_image(s: ConvShape, target: Target) -> bool:
    w, positions = s.windows, math.prod(s.windows.out)
    one_tap = math.prod(w.kernel) == 1
    return (
        target == "y"
        and s.is_native
        and gemm.is_supported("float32")
        and s.images == s.groups == 1
        # `pointwise` reads contiguous images where they are.
        and not (one_tap and w.out == s.space)
        # From more positions on, repacking the weights of several taps pays.
        and positions <= (one_image.MOST_PIXELS if one_tap else one_image.MOST_POSITIONS)
    )


# Winograd -----------------------------------------------------------------------------------------


def _fits_winograd(s: ConvShape, target: Target) -> bool:
    read, written = (s.windows.out, s.space) if target == "x" else (s.space, s.windows.out)
    return (
        not s.exact
        and s.is_native
        and s.groups == 1
        # F(4×4, 3×3) is made for these windows.
        and s.windows.kernel == (3, 3)
        and s.windows.stride == s.windows.dilation == (1, 1)
        and not (_is_narrow(s) and target != "w")
        # Transforms cost as much as 16 channels of products save.
        and min(s.inputs, s.outputs) >= 16
        # Of a tile's 4×4 results at least one in four, on average, must be wanted.
        and 4 * tile_count(written[0]) * tile_count(written[1]) <= written[0] * written[1]
        # Tables address the pixels of a row by i32.
        and max(read[1], written[1]) <= 1 << 16
    )


_NARROW_CHANNELS, _NARROW_SUM, _PATCH_CHANNELS = 24, 56, 4


def _is_narrow(s: ConvShape) -> bool:
    """Return whether channels are so few that `direct` beats products of rows of channels."""
    few = min(s.inputs, s.outputs) <= _NARROW_CHANNELS
    return few and s.has_unit_stride and s.inputs + s.outputs <= _NARROW_SUM


# Direct -------------------------------------------------------------------------------------------


def _fits_direct(s: ConvShape, target: Target) -> bool:
    if not s.is_native or len(s.space) > 2 or math.prod(s.windows.kernel) == 1:
        return False
    if _are_patches(s):
        return False
    narrow = target != "w" and (s.groups > 1 or _is_narrow(s))
    if min(s.group_inputs, s.group_outputs) > direct.FEW_CHANNELS and not narrow:
        # From more channels on, products of matrices reuse what they load more often.
        return False
    if s.groups > 1 and target == "w" and s.group_inputs > 1:
        # The gradient in the weight reads one input.
        return False
    if target == "x" and not s.has_unit_stride and (s.groups == 1 or _fits_phases(s, target)):
        # The gradient in the input would read only some taps of each position of a strided window.
        return False
    return not _can_gather(s) or direct_nanoseconds(s, target) <= implicit_nanoseconds(s, target)


def _are_patches(s: ConvShape) -> bool:
    """Return whether windows of few channels overlap so little that columns pay.

    Columns are then not much larger than x, and high enough for products of matrices.
    """
    taps, apart = math.prod(s.windows.kernel), math.prod(s.windows.stride)
    return (
        s.groups == 1
        and s.inputs <= _PATCH_CHANNELS
        and s.outputs > direct.FEW_CHANNELS
        and s.inputs * taps >= 32
        and taps < 4 * apart
    )


def _direct_back_to_input(s: ConvShape, x: Any, g: Any, w: Any) -> None:
    if masked_input_gradient.write_input_gradient(x, g, w, s.windows, s.groups):
        return
    windows = s.transposed._replace(stride=(1,) * len(s.space))
    direct.convolve(x, g, flip_weights(w, s.groups), windows, s.groups, s.windows.stride)


# Phases of a stride -------------------------------------------------------------------------------

_PHASE_TAPS = 20
"""Taps of grouped windows from which phases save more than it takes to write their results apart.
"""


def _fits_phases(s: ConvShape, target: Target) -> bool:
    return (
        target == "x"
        and s.is_native
        and len(s.space) <= 2
        and not s.has_unit_stride
        and min(s.group_inputs, s.group_outputs) <= direct.FEW_CHANNELS
        and (s.groups == 1 or math.prod(s.windows.kernel) >= _PHASE_TAPS)
        and not _tiles_input(s)
        and phases.has_phases(s.windows)
        and not (_can_gather(s) and phases_nanoseconds(s) > implicit_nanoseconds(s, target))
    )


# A strided view -----------------------------------------------------------------------------------


def _fits_strided_view(s: ConvShape, target: Target) -> bool:
    w = s.windows
    return (
        target == "y"
        and s.xp is np
        and len(s.space) == s.inputs == 1
        # Windows of fewer taps are faster tap by tap.
        and w.kernel[0] >= 32
        and s.outputs > direct.FEW_CHANNELS
        # A view has no place for padding.
        and w.before == (0,)
        and w.dilation == (1,)
        and (w.out[0] - 1) * w.stride[0] + w.kernel[0] <= s.space[0]
        and _has_products(s)
    )


def _has_products(s: ConvShape) -> bool:
    """Return whether generated products of matrices take the dtype."""
    known = s.dtype in (np.float32, np.float64) and gemm.is_supported(s.dtype.name)
    return known and is_jit_enabled()


# Implicit GEMM ------------------------------------------------------------------------------------


_CACHED_ROWS = 2 << 20  # bytes
_COLUMN_INPUTS = 2
"""Inputs up to which columns are smaller than rows of channels, which are at least a vector."""


def _fits_implicit_gemm(s: ConvShape, target: Target) -> bool:
    # Windows of one element need no table.
    is_pointwise = math.prod(s.windows.kernel) == 1 and s.groups == 1
    if target == "w" and s.groups == 1 and s.inputs <= _COLUMN_INPUTS:
        return False
    return _can_gather(s) and not is_pointwise and not _are_patches(s)


def _can_gather(s: ConvShape) -> bool:
    """Return whether an image's rows, which each tap reads anew, stay in the second cache."""
    sides = (s.space, s.group_inputs), (s.windows.out, s.group_outputs)
    return s.is_native and all(
        math.prod(sizes) * row_bytes(channels) <= _CACHED_ROWS for sizes, channels in sides
    )


def _blocked_bytes(s: ConvShape, target: Target) -> int:
    depth, columns = s.group_inputs, s.group_outputs
    if target == "x":
        depth, columns = columns, depth
    return blocked_bytes(depth, columns, math.prod(s.windows.kernel), s.groups)


# Pointwise ----------------------------------------------------------------------------------------


def _fits_pointwise(s: ConvShape, target: Target) -> bool:
    w = s.windows
    axes = zip(w.before, w.out, w.stride, s.space, strict=True)
    return (
        s.xp is np
        and s.groups == 1
        and (math.prod(w.kernel) == 1 or (target == "x" and _tiles_input(s)))
        # Padding would need rows of zeros.
        and all(before == 0 and (out - 1) * stride < n for before, out, stride, n in axes)
        and _has_products(s)
    )


def _tiles_input(s: ConvShape) -> bool:
    """Return whether windows cover the input side by side."""
    w = s.windows
    sizes = tuple(out * stride for out, stride in zip(w.out, w.stride, strict=True))
    return w.kernel == w.stride and set(w.dilation) == {1} and sizes == s.space


# im2col -------------------------------------------------------------------------------------------


def _im2col_back_to_input(s: ConvShape, x: Any, g: Any, w: Any) -> None:
    if s.has_unit_stride and _should_flip(s):
        im2col.convolve(s.xp, x, g, _flip(s, w), s.transposed, s.groups)
    else:
        im2col.input_gradient(s.xp, x, g, w, s.windows, s.groups)


def _should_flip(s: ConvShape) -> bool:
    """Return whether turning the weight round costs less than adding windows to each other."""
    return s.images * math.prod(s.windows.out) >= 2 * s.outputs


def _flip(s: ConvShape, w: Any) -> Any:
    """Return the weight with its windows turned round, and inputs for outputs.

    A convolution of stride 1 by it gives the gradient in the input.
    """
    outputs, inputs, *kernel = w.shape
    flipped = w[(slice(None), slice(None), *(slice(None, None, -1) for _ in kernel))]
    flipped = flipped.reshape(s.groups, outputs // s.groups, inputs, *kernel).swapaxes(1, 2)
    result = scratch(s.xp, "flipped", flipped.shape, w.dtype)
    s.xp.copyto(result, flipped)
    return result.reshape(s.groups * inputs, outputs // s.groups, *kernel)


# The table ----------------------------------------------------------------------------------------

TABLE = (
    # Weights are read in place. Gradients follow with the rows further down.
    ConvKernel(
        "one_image",
        _fits_one_image,
        lambda s, y, x, w: one_image.convolve(y, x, w, s.windows),
        _im2col_back_to_input,
        lambda s, w, x, g: im2col.weight_gradient(s.xp, w, x, g, s.windows, s.groups),
        lambda s: one_image.plan(s.inputs, s.outputs, s.space, s.windows).task,
    ),
    # A quarter of the products.
    ConvKernel(
        "winograd",
        _fits_winograd,
        lambda s, y, x, w: winograd.convolve(y, x, w, s.windows),
        lambda s, x, g, w: winograd.convolve(x, g, w, s.transposed, transposed=True),
        lambda s, w, x, g: winograd_weight_gradient.weight_gradient(w, x, g, s.windows),
    ),
    # No copies: windows overlap in memory. Gradients follow with the rows further down.
    ConvKernel(
        "strided_view",
        _fits_strided_view,
        lambda s, y, x, w: strided_view.convolve(y, x, w, s.windows),
        _im2col_back_to_input,
        lambda s, w, x, g: im2col.weight_gradient(s.xp, w, x, g, s.windows, s.groups),
        lambda s: strided_view.task(s.images, s.outputs, s.space[0], s.windows, s.dtype.name),
    ),
    # Windows of one element: products of matrices where they are.
    ConvKernel(
        "pointwise",
        _fits_pointwise,
        lambda s, y, x, w: pointwise.convolve(y, x, w, s.windows),
        lambda s, x, g, w: pointwise.input_gradient(x, g, w, s.windows),
        lambda s, w, x, g: pointwise.weight_gradient(w, x, g, s.windows),
        lambda s: pointwise.task(s.images, s.inputs, s.outputs, s.space, s.windows, s.dtype.name),
    ),
    # No copies for each tap: planes are read in vectors along their rows. For few channels.
    ConvKernel(
        "direct",
        _fits_direct,
        lambda s, y, x, w: direct.convolve(y, x, w, s.windows, s.groups),
        _direct_back_to_input,
        lambda s, w, x, g: direct_weight_gradient.weight_gradient(w, x, g, s.windows, s.groups),
        lambda s: direct.task(s.images, s.inputs, s.outputs, s.space, s.windows, s.groups),
    ),
    # A direct convolution for each remainder by the stride. Other targets: the rows further down.
    ConvKernel(
        "phases",
        _fits_phases,
        lambda s, y, x, w: im2col.convolve(s.xp, y, x, w, s.windows, s.groups),
        lambda s, x, g, w: phases.input_gradient(x, g, w, s.windows, s.groups),
        lambda s, w, x, g: im2col.weight_gradient(s.xp, w, x, g, s.windows, s.groups),
    ),
    # No copies for each tap: products of rows whose addresses a table gives. For many channels.
    ConvKernel(
        "implicit_gemm",
        _fits_implicit_gemm,
        lambda s, y, x, w, kept=None: implicit_gemm.convolve(
            y, x, w, s.windows, s.groups, kept=kept
        ),
        lambda s, x, g, w, kept=None: implicit_gemm.convolve(
            x, g, w, s.windows, s.groups, True, kept
        ),
        lambda s, w, x, g: implicit_gemm.weight_gradient(w, x, g, s.windows, s.groups),
        layout_bytes=_blocked_bytes,
    ),
    # Anything, by products of columns.
    ConvKernel(
        "im2col",
        lambda s, target: True,
        lambda s, y, x, w: im2col.convolve(s.xp, y, x, w, s.windows, s.groups),
        _im2col_back_to_input,
        lambda s, w, x, g: im2col.weight_gradient(s.xp, w, x, g, s.windows, s.groups),
    ),
)


def choose(shape: ConvShape, target: Target) -> ConvKernel:
    """Return the first kernel of the table that fits."""
    return next(kernel for kernel in TABLE if kernel.fits(shape, target))
