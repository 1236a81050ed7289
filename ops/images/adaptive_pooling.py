"""Pooling to a given output size: one element (global) or any size (adaptive); and max_unpool."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.op import FUNCTIONS, Cost, Op, Tensor, function, register, sample
from graphflow.ir.spec import Shape, TensorSpec, equate, product, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import require_buildable, require_kind
from graphflow.ops.images.resize import resize
from graphflow.ops.kernels.sparse.scatter_rows import normalize_indices
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.shape import reshape
from graphflow.ops.tensors.take import take
from graphflow.ops.tensors.take_along_axis import take_along_axis
from graphflow.ops.windows.pool import avg_pool, lp_power, lp_root, max_pool
from graphflow.ops.windows.window_arguments import (
    move_channels_first,
    per_axis,
    require_image,
    require_known,
    restore_channels,
    spatial_axes,
)


@function
def global_avg_pool(x: Any, channels_last: bool = False) -> Tensor:
    """Average x over all spatial axes, which stay with size 1.

    Args:
        x: floats or complex numbers (batch, channels, *space), or (batch, *space, channels) with
            `channels_last`.

    Raises:
        ShapeError: x has no spatial axes.
        DTypeError: x is neither float nor complex.
    """
    x = require_image(x)
    result: Tensor = FUNCTIONS["mean"](x, axis=spatial_axes(x.ndim, channels_last), keepdims=True)
    return result


@function
def global_max_pool(x: Any, channels_last: bool = False) -> Tensor:
    """Return the largest element over all spatial axes, which stay with size 1.

    The gradient goes to the first of equal elements.

    Args:
        x: ints or floats (batch, channels, *space), or (batch, *space, channels) with
            `channels_last`.

    Raises:
        ShapeError: x has no spatial axes.
    """
    x = move_channels_first(x, channels_last)
    flat = reshape(x, (*x.shape[:2], product(x.shape[2:])))
    where = FUNCTIONS["argmax"](flat, axis=2, keepdims=True)
    picked = take_along_axis(flat, where, 2)
    return restore_channels(reshape(picked, (*x.shape[:2], *(1,) * (x.ndim - 2))), channels_last)


@composite("x")
@function
def global_lp_pool(x: Any, p: float = 2.0, channels_last: bool = False) -> Tensor:
    """Compute (Σ |x|^p)^(1/p) over all spatial axes, which stay with size 1.

    The gradient is 0 where all elements are 0.

    Args:
        x: floats (batch, channels, *space), or (batch, *space, channels) with `channels_last`.
        p: a positive number.

    Raises:
        ShapeError, DTypeError, ArgumentError: no spatial axes, not floats, or p not positive.
    """
    x = require_image(x)
    sums = FUNCTIONS["sum"](lp_power(x, p), axis=spatial_axes(x.ndim, channels_last), keepdims=True)
    return lp_root(sums, p)


def _output_sizes(x: Tensor, size: Any) -> Shape:
    """Return the wanted size of each spatial axis; None keeps the size of x."""
    rank = x.ndim - 2
    given = list(size) if isinstance(size, tuple | list) else [size] * rank
    if len(given) != rank:
        raise ShapeError(f"size {size!r} has {len(given)} entries for {rank} spatial axes")
    return tuple(
        n if wanted is None else per_axis("size", wanted, 1)[0]
        for wanted, n in zip(given, x.shape[2:], strict=True)
    )


@function
def adaptive_avg_pool(x: Any, size: Any, channels_last: bool = False) -> Tensor:
    """Average x over windows chosen so that `size` of them cover each spatial axis.

    Window i of m over n elements is floor(i·n/m) to ceil((i + 1)·n/m).

    Args:
        x: floats (batch, channels, *space), or (batch, *space, channels) with `channels_last`.
        size: an int, or an int or None (keep the size) for each spatial axis.

    Raises:
        ShapeError: x has no spatial axes, or size has another number of entries.
        DTypeError, ArgumentError: x is not float, or size is not made of positive ints and None.
    """
    x = move_channels_first(x, channels_last)
    require_kind(x.spec, "float")
    sizes = _output_sizes(x, size)
    if all(m == 1 for m in sizes):
        return restore_channels(global_avg_pool(x), channels_last)
    whole = _equal_windows(x, sizes)
    if whole is not None:
        return restore_channels(avg_pool(x, whole), channels_last)
    result: Tensor = resize(x, sizes, mode="area")
    return restore_channels(result, channels_last)


@function
def adaptive_max_pool(x: Any, size: Any, channels_last: bool = False) -> Tensor:
    """Return the largest element of each window of `adaptive_avg_pool`.

    The gradient goes to the first of equal elements.

    Args:
        x: ints or floats (batch, channels, *space), or (batch, *space, channels) with
            `channels_last`.
        size: an int, or an int or None (keep the size) for each spatial axis.

    Raises:
        ShapeError: as `adaptive_avg_pool`, or spatial sizes are unknown and do not all become 1.
        ArgumentError: size is not made of positive ints and None.
    """
    x = move_channels_first(x, channels_last)
    sizes = _output_sizes(x, size)
    if all(m == 1 for m in sizes):
        return restore_channels(global_max_pool(x), channels_last)
    whole = _equal_windows(x, sizes)
    if whole is None:
        widths = []
        for axis, m in enumerate(require_known("sizes", sizes), start=2):
            (n,) = require_known("spatial sizes", x.shape[axis : axis + 1])
            places = _window_indices(n, m)
            widths.append(places.shape[1])
            if (places.reshape(-1) != np.arange(places.size)).any() or places.size != n:
                x = take(x, places.reshape(-1), axis)
        whole = tuple(widths)
    return restore_channels(max_pool(x, whole), channels_last)


def _equal_windows(x: Tensor, sizes: Shape) -> tuple[int, ...] | None:
    """Return the windows' sizes if they all are equal and do not overlap, else None."""
    result = []
    for n, m in zip(x.shape[2:], sizes, strict=True):
        if not isinstance(n, int) or not isinstance(m, int) or n % m or not n:
            return None
        result.append(n // m)
    return tuple(result)


def _window_indices(n: int, m: int) -> Any:
    """Return the elements of m windows over n, (m, widest); shorter ones repeat their last."""
    require_buildable(m)
    out = np.arange(m)
    begin, end = out * n // m, -(-(out + 1) * n // m)
    return np.minimum(begin[:, None] + np.arange((end - begin).max()), end[:, None] - 1)


# Unpooling --------------------------------------------------------------------------------------


def _infer_unpool(x: TensorSpec, indices: TensorSpec, sizes: Shape) -> TensorSpec:
    require_kind(x, "int", "float")
    require_kind(indices, "int")
    what = f"x {show_shape(x.shape)}, indices {show_shape(indices.shape)}"
    if x.rank != indices.rank or x.rank != len(sizes) + 2:
        raise ShapeError(f"{what}, sizes {show_shape(sizes)}: ranks do not fit")
    for have, want in zip(indices.shape, x.shape, strict=True):
        equate(have, want, what)
    return x.with_shape((*x.shape[:2], *sizes))


def _unpool_into(xp: Any, out: Any, x: Any, indices: Any, sizes: Any) -> None:
    planes = x.shape[0] * x.shape[1]
    out[...] = 0
    if x.size:
        rows = out.reshape(planes, -1)
        where = normalize_indices(xp, indices, rows.shape[1]).reshape(planes, -1)
        rows[xp.arange(planes)[:, None], where] = x.reshape(planes, -1)


def _unpool_kernel(xp: Any, x: Any, indices: Any, sizes: Any) -> Any:
    out = xp.empty((*x.shape[:2], *sizes), x.dtype)
    _unpool_into(xp, out, x, indices, sizes)
    return out


def _unpool_vjp(
    g: Tensor, y: Tensor, x: Tensor, indices: Tensor, sizes: Shape
) -> tuple[Tensor, None]:
    lead = x.shape[:2]
    flat = reshape(g, (*lead, product(sizes)))
    places = reshape(indices, (*lead, product(indices.shape[2:])))
    return reshape(take_along_axis(flat, places, 2), x.shape), None


max_unpool_op: Op = register(
    Op(
        "max_unpool",
        infer=_infer_unpool,
        kernel=_unpool_kernel,
        into=_unpool_into,
        vjp=_unpool_vjp,
        batch=batching.merge_batches,
        sharding=sharding.leading_axes_rule(2),
        cost=lambda x, indices, sizes: Cost(flops=x.size),
        samples=(
            sample(spec("float32", (3, 2, 1, 1)), spec("int64", (3, 2, 1, 1)), sizes=(2, 3)),
            sample(spec("float32", (2, 1, 1)), spec("int64", (2, 1, 1)), sizes=(4,)),
        ),
    )
)


@function
def max_unpool(
    x: Any,
    indices: Any,
    kernel: Any,
    stride: Any = None,
    padding: Any = 0,
    output_size: Any = None,
    channels_last: bool = False,
) -> Tensor:
    """Return zeros with x at the positions that `max_pool(return_indices=True)` found.

    If an index occurs twice in a plane, as overlapping windows give, its values must be equal; each
    of them then gets the gradient of the element.

    Args:
        x: ints or floats (batch, channels, *positions), channels last with `channels_last`.
        indices: ints of the shape of x: positions in the flattened spatial axes of the output.
        kernel, stride, padding: those of the pooling. They give the spatial sizes
            (n - 1)·stride - 2·padding + kernel unless `output_size` is given.
        output_size: spatial sizes of the result, an int or one for each axis.

    Raises:
        ShapeError, DTypeError, ArgumentError: the arguments do not fit each other.
    """
    x, places = move_channels_first(x, channels_last), move_channels_first(indices, channels_last)
    rank = x.ndim - 2
    kernels, pads = per_axis("kernel", kernel, rank), per_axis("padding", padding, rank, 0)
    strides = kernels if stride is None else per_axis("stride", stride, rank)
    sizes: Shape = tuple(
        (n - 1) * s - 2 * p + k
        for n, s, p, k in zip(x.shape[2:], strides, pads, kernels, strict=True)
    )
    if output_size is not None:
        sizes = per_axis("output_size", output_size, rank)
    y: Tensor = max_unpool_op(x, places, sizes=sizes)
    return restore_channels(y, channels_last)
