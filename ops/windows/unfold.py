"""Windows as columns (unfold) and columns added to an image (fold), each the other's gradient."""

from __future__ import annotations

import math
from typing import Any

from graphflow.errors import ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import Shape, TensorSpec, equate, floordiv, product, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.kernels.conv.im2col import ColumnBlock, add_windows, gather_columns
from graphflow.ops.windows import sharding_rules as window_sharding
from graphflow.ops.windows.window_arguments import (
    Ints,
    Pairs,
    Windows,
    padding_pairs,
    per_axis,
    positions_shape,
    require_image,
)


def _infer_unfold(
    x: TensorSpec, kernel: Ints, stride: Ints, padding: Pairs, dilation: Ints
) -> TensorSpec:
    require_kind(x, "int", "float")
    if x.rank != len(kernel) + 2:
        raise ShapeError(f"expected x of (batch, channels, *space), got {show_shape(x.shape)}")
    out = positions_shape(x.shape[2:], kernel, stride, padding, dilation)
    return x.with_shape((x.shape[0], x.shape[1] * math.prod(kernel), product(out)))


def _infer_fold(g: TensorSpec, sizes: Shape, **attrs: Any) -> TensorSpec:
    require_kind(g, "int", "float")
    kernel = attrs["kernel"]
    out = positions_shape(sizes, **attrs)
    what = f"columns {show_shape(g.shape)}, windows {show_shape(out)} of {show_shape(kernel)}"
    if g.rank != 3:
        raise ShapeError(f"expected columns of (batch, channels·taps, positions), got {what}")
    equate(g.shape[2], product(out), what)
    taps = math.prod(kernel)
    channels = floordiv(g.shape[1], taps)
    equate(channels * taps, g.shape[1], what)
    return g.with_shape((g.shape[0], channels, *sizes))


def _windows(sizes: Ints, kernel: Ints, stride: Ints, padding: Any, dilation: Ints) -> Windows:
    out = positions_shape(sizes, kernel, stride, padding, dilation)
    return Windows.from_attributes(kernel, stride, padding, dilation, out)  # type: ignore[arg-type]


def _unfold_into(xp: Any, out: Any, x: Any, **attrs: Any) -> None:
    windows = _windows(x.shape[2:], **attrs)
    for n in range(x.shape[0]):
        block = ColumnBlock(slice(n, n + 1), slice(0, windows.out[0]))
        xp.copyto(out[n], gather_columns(xp, x, windows, block))


def _unfold_kernel(xp: Any, x: Any, **attrs: Any) -> Any:
    windows = _windows(x.shape[2:], **attrs)
    rows = x.shape[1] * math.prod(windows.kernel)
    out = xp.empty((x.shape[0], rows, math.prod(windows.out)), x.dtype)
    _unfold_into(xp, out, x, **attrs)
    return out


def _fold_into(xp: Any, out: Any, g: Any, sizes: Ints, **attrs: Any) -> None:
    windows = _windows(sizes, **attrs)
    stacked = g.reshape(*out.shape[:2], math.prod(windows.kernel), *windows.out)
    for n in range(out.shape[0]):
        add_windows(xp, out[n], stacked[n], windows)


def _fold_kernel(xp: Any, g: Any, sizes: Ints, **attrs: Any) -> Any:
    channels = g.shape[1] // math.prod(attrs["kernel"])
    out = xp.empty((g.shape[0], channels, *sizes), g.dtype)
    _fold_into(xp, out, g, sizes, **attrs)
    return out


_PLANE: dict[str, Any] = {
    "kernel": (2, 3), "stride": (2, 1), "padding": ((1, 0), (0, 1)), "dilation": (1, 2),
}  # fmt: skip
_LINE: dict[str, Any] = {
    "kernel": (3,), "stride": (1,), "padding": ((0, 0),), "dilation": (1,),
}  # fmt: skip

unfold_op: Op = register(
    Op(
        "unfold",
        infer=_infer_unfold,
        kernel=_unfold_kernel,
        into=_unfold_into,
        vjp=lambda g, y, x, **attrs: (fold_op(g, sizes=x.shape[2:], **attrs),),
        batch=batching.merge_batches,
        sharding=window_sharding.unfold,
        cost=lambda x, **attrs: Cost(flops=0, bytes=_infer_unfold(x, **attrs).nbytes * 2),
        samples=(
            sample(spec("float32", (2, 3, 4, 6)), **_PLANE),
            sample(spec("float32", (3, 2, 5)), **_LINE),
        ),
    )
)
fold_op: Op = register(
    Op(
        "fold",
        infer=_infer_fold,
        kernel=_fold_kernel,
        into=_fold_into,
        vjp=lambda h, y, g, sizes, **attrs: (unfold_op(h, **attrs),),
        batch=batching.merge_batches,
        sharding=window_sharding.fold,
        cost=lambda g, **attrs: Cost(flops=g.size),
        samples=(
            sample(spec("float32", (2, 18, 6)), sizes=(4, 6), **_PLANE),
            sample(spec("float32", (3, 6, 3)), sizes=(5,), **_LINE),
        ),
    )
)


def _attrs(sizes: Shape, kernel: Any, stride: Any, padding: Any, dilation: Any) -> dict[str, Any]:
    rank = len(sizes)
    kernels = per_axis("kernel", kernel, rank)
    strides, dilations = per_axis("stride", stride, rank), per_axis("dilation", dilation, rank)
    return {
        "kernel": kernels,
        "stride": strides,
        "padding": padding_pairs(padding, sizes, kernels, strides, dilations),
        "dilation": dilations,
    }


@function
def unfold(x: Any, kernel: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1) -> Tensor:
    """Return the windows of x as columns, also known as im2col.

    Args:
        x: ints or floats (batch, channels, *space).
        kernel, stride, padding, dilation: as for `conv`.

    Returns:
        (batch, channels·taps, positions).

    Raises:
        ShapeError: x has no spatial axes, or no window fits.
        DTypeError, ArgumentError: x is bool or complex, or arguments have another form.
    """
    x = require_image(x)
    result: Tensor = unfold_op(x, **_attrs(x.shape[2:], kernel, stride, padding, dilation))
    return result


@function
def fold(
    columns: Any,
    output_size: Any,
    kernel: Any,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
) -> Tensor:
    """Add columns to an image at the positions of their windows, the transpose of `unfold`.

    Also known as col2im.

    Args:
        columns: ints or floats (batch, channels·taps, positions).
        output_size: spatial sizes of the result, an int or one for each axis.
        kernel, stride, padding, dilation: as for `conv`.

    Returns:
        (batch, channels, *output_size).

    Raises:
        ShapeError: the number of columns does not fit the windows.
        DTypeError, ArgumentError: columns are bool or complex, or arguments have another form.
    """
    x = as_tensor(columns)
    if not isinstance(output_size, tuple | list):
        output_size = (output_size,)
    sizes = per_axis("output_size", output_size, len(output_size))
    result: Tensor = fold_op(x, sizes=sizes, **_attrs(sizes, kernel, stride, padding, dilation))
    return result
