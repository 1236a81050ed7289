"""Deformable convolution: sample x at shifted taps, then multiply by the weight."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.op import Tensor, function, promote_inputs
from graphflow.ir.spec import Shape, equate, product, show_shape
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.images.grid_sample import sample_points
from graphflow.ops.matrices.matmul import matmul
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.tensors.creation import arange
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.shape import expand_dims, permute_dims, reshape
from graphflow.ops.windows.window_arguments import (
    Ints,
    padding_pairs,
    per_axis,
    positions_shape,
    require_known,
)


@composite("x", "weight", "offset", "bias", "mask")
@function
def deform_conv(
    x: Any,
    weight: Any,
    offset: Any,
    bias: Any = None,
    mask: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    offset_groups: int = 1,
) -> Tensor:
    """Convolve x with taps that are shifted by `offset`, in elements, and weighted by `mask`.

    Args:
        x: floats (batch, channels, *space), with r spatial axes.
        weight: (outputs, channels / groups, *kernel) with k taps.
        offset: (batch, offset_groups·k·r, *positions): one number for each tap and axis.
        bias: (outputs,), or None.
        mask: (batch, offset_groups·k, *positions), or None for ones.
        stride, padding, dilation, groups: as for `conv`.
        offset_groups: number of groups of channels, each with offsets of its own.

    Returns:
        (batch, outputs, *positions). Taps beyond the edges of x read zeros.

    Raises:
        ShapeError, DTypeError, ArgumentError: the arguments do not fit each other.

    Source: Zhu, Hu, Lin & Dai, Deformable ConvNets v2, CVPR 2019.
    """
    given = [x, weight, offset, *(t for t in (bias, mask) if t is not None)]
    x, w, shifts, *others = promote_inputs("deform_conv", given)
    b = others.pop(0) if bias is not None else None
    m = others.pop(0) if mask is not None else None
    require_kind(x.spec, "float")
    rank = x.ndim - 2
    shapes = f"x {show_shape(x.shape)}, weight {show_shape(w.shape)}"
    if rank < 1 or w.ndim != x.ndim or shifts.ndim != x.ndim:
        raise ShapeError(
            f"expected x of (batch, channels, *space), weight and offset of one rank, got {shapes}"
        )
    (count,), (parts,) = per_axis("groups", groups, 1), per_axis("offset_groups", offset_groups, 1)
    strides, dilations = per_axis("stride", stride, rank), per_axis("dilation", dilation, rank)
    kernel = require_known("sizes of the kernel", w.shape[2:])
    channels, outputs = require_known("channels", (x.shape[1], w.shape[0]))
    if channels % count or outputs % count or w.shape[1] * count != channels or channels % parts:
        raise ShapeError(
            f"{shapes}: {channels} channels and {outputs} outputs do not divide into {count} "
            f"groups and {parts} offset groups"
        )
    pairs = padding_pairs(padding, x.shape[2:], kernel, strides, dilations)
    out = positions_shape(x.shape[2:], kernel, strides, pairs, dilations)
    taps = math.prod(kernel)
    rows = _sample_taps(x, shifts, parts, kernel, strides, pairs, dilations, out)
    if m is not None:
        _require_shape(m, (x.shape[0], parts * taps, *out), "mask")
        factors = reshape(m, (x.shape[0], parts, taps, product(out)))
        rows = rows * expand_dims(permute_dims(factors, (1, 0, 3, 2)), -1)
    y = _grouped_product(rows, w, count)
    y = reshape(y, (x.shape[0], outputs, *out))
    if b is None:
        return y
    if b.shape != (outputs,):
        raise ShapeError(f"the bias must be one number for each output, got {show_shape(b.shape)}")
    return y + reshape(b, (outputs, *(1,) * rank))  # type: ignore[no-any-return]


def _sample_taps(
    x: Tensor, shifts: Tensor, parts: int, kernel: Ints, stride: Ints, padding: Any,
    dilation: Ints, out: Shape,
) -> Tensor:  # fmt: skip
    """Return x at the shifted taps: rows (parts, images, positions, taps, channels of a part)."""
    rank, taps = len(kernel), math.prod(kernel)
    _require_shape(shifts, (x.shape[0], parts * taps * rank, *out), "offset")
    moved = reshape(shifts, (x.shape[0], parts, taps, rank, product(out)))
    moved = permute_dims(moved, (3, 1, 0, 4, 2))  # (axis, part, image, position, tap)
    points = []
    for axis in range(rank):
        home = _undeformed_taps(axis, out, kernel, stride, dilation, padding)
        points.append(reshape(moved[axis] + astype(home, x.dtype), (-1,)))
    each = x.shape[1] // parts
    images = permute_dims(
        reshape(x, (x.shape[0], parts, each, *x.shape[2:])),
        (1, 0, 2, *range(3, 3 + rank)),
    )
    images = reshape(images, (parts * x.shape[0], each, *x.shape[2:]))
    rows = sample_points(images, points, product(out) * taps, "linear", "zeros", True)
    return reshape(rows, (parts, x.shape[0], product(out), taps, each))


def _require_shape(t: Tensor, wanted: Shape, what: str) -> None:
    text = f"expected {what} of shape {show_shape(wanted)}, got {show_shape(t.shape)}"
    if t.ndim != len(wanted):
        raise ShapeError(text)
    for have, want in zip(t.shape, wanted, strict=True):
        equate(have, want, text)


def _undeformed_taps(
    axis: int, out: Shape, kernel: Ints, stride: Ints, dilation: Ints, padding: Any
) -> Tensor:
    """Return where the taps lie on an axis without offsets: (positions, taps), int64."""
    rank = len(kernel)
    first = arange(out[axis]) * stride[axis] - padding[axis][0]
    shape = tuple(out[axis] if i == axis else 1 for i in range(rank))
    starts = reshape(broadcast_to(reshape(first, shape), out), (product(out), 1))
    taps = np.indices(kernel)[axis].reshape(1, -1) * dilation[axis]
    return starts + taps  # type: ignore[no-any-return]


def _grouped_product(rows: Tensor, w: Tensor, groups: int) -> Tensor:
    """Multiply rows (parts, images, positions, taps, channels) by w, by groups of channels.

    Returns:
        (images, outputs, positions).
    """
    _, images, positions, taps, _ = rows.shape
    outputs, inputs = w.shape[:2]
    # channels together, in order: (images, parts·each = channels, taps, positions)
    columns = permute_dims(rows, (1, 0, 4, 3, 2))
    columns = reshape(columns, (images, groups, inputs * taps, positions))
    matrix = reshape(w, (groups, outputs // groups, inputs * taps))
    return matmul(matrix, columns)
