"""Pooling to a given size: one element (global) or any (adaptive); and back (max_unpool)."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ShapeError
from graphflow.ir.op import FUNCTIONS, Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import Shape, TensorSpec, equate, product, show_shape, spec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import require_buildable, require_kind
from graphflow.ops.images.resize import resize
from graphflow.ops.kernels.sparse.scatter_rows import normalize_indices
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.shape import moveaxis, reshape
from graphflow.ops.tensors.take import take, take_along_axis
from graphflow.ops.windows.pool import avg_pool, lp_power, lp_root, max_pool, restore_channels
from graphflow.ops.windows.window_arguments import per_axis, require_known


def _image(x: Any, channels_last: bool) -> Tensor:
    """(batch, channels, *space)."""
    x = as_tensor(x)
    if x.ndim < 3:
        raise ShapeError(f"takes (batch, channels, *space), not {show_shape(x.shape)}")
    return moveaxis(x, -1, 1) if channels_last else x


def _spatial_axes(x: Tensor, channels_last: bool) -> tuple[int, ...]:
    return tuple(range(1, x.ndim - 1)) if channels_last else tuple(range(2, x.ndim))


@function
def global_avg_pool(x: Any, channels_last: bool = False) -> Tensor:
    """The mean over all spatial axes, which stay with size 1.

    Raises:
        ShapeError, DTypeError: no spatial axes, or not floats.
    """
    x = as_tensor(x)
    _image(x, False)
    result: Tensor = FUNCTIONS["mean"](x, axis=_spatial_axes(x, channels_last), keepdims=True)
    return result


@function
def global_max_pool(x: Any, channels_last: bool = False) -> Tensor:
    """The largest element over all spatial axes, which stay with size 1; the first of equals has
    the gradient.

    Raises:
        ShapeError: no spatial axes.
    """
    x = _image(x, channels_last)
    flat = reshape(x, (*x.shape[:2], product(x.shape[2:])))
    where = FUNCTIONS["argmax"](flat, axis=2, keepdims=True)
    picked = take_along_axis(flat, where, 2)
    return restore_channels(reshape(picked, (*x.shape[:2], *(1,) * (x.ndim - 2))), channels_last)


@composite("x")
@function
def global_lp_pool(x: Any, p: float = 2.0, channels_last: bool = False) -> Tensor:
    """(Σ |x|^p)^(1/p) over all spatial axes, which stay with size 1; gradient 0 where all is 0.

    Raises:
        ShapeError, DTypeError, ArgumentError: no spatial axes, not floats, or p not positive.
    """
    x = as_tensor(x)
    _image(x, False)
    sums = FUNCTIONS["sum"](lp_power(x, p), axis=_spatial_axes(x, channels_last), keepdims=True)
    return lp_root(sums, p)


def _output_sizes(x: Tensor, size: Any) -> Shape:
    """The wanted size of each spatial axis; None leaves one as it is."""
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
    """Means over windows chosen so that `size` of them cover each spatial axis.

    Window i of m over n elements is floor(i·n/m) to ceil((i + 1)·n/m).

    Args:
        size: an int, or an int or None (keep the size) for each spatial axis.

    Raises:
        ShapeError, DTypeError, ArgumentError: no such axes, not floats, or sizes of another form.
    """
    x = _image(x, channels_last)
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
    """The largest elements of the windows of `adaptive_avg_pool`; the first of equals has the
    gradient.

    Raises:
        As `adaptive_avg_pool`; ShapeError: spatial sizes are not known and do not all become 1.
    """
    x = _image(x, channels_last)
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
    """The windows' sizes where they are all equal and do not overlap."""
    result = []
    for n, m in zip(x.shape[2:], sizes, strict=True):
        if not isinstance(n, int) or not isinstance(m, int) or n % m or not n:
            return None
        result.append(n // m)
    return tuple(result)


def _window_indices(n: int, m: int) -> Any:
    """Elements of each of m windows over n, the last one repeated where a window is shorter."""
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
    """Zeros, with x where `max_pool(return_indices=True)` found it.

    An index that occurs twice in a plane must have equal values, as overlapping windows give; each
    of them then has the gradient of the element.

    Args:
        indices: positions in the flattened spatial axes of the output, of the shape of x.
        kernel, stride, padding: of the pooling; they make the size (n - 1)·stride - 2·padding +
            kernel unless `output_size` gives the spatial sizes.

    Raises:
        ShapeError, DTypeError, ArgumentError: the arguments do not fit.
    """
    x, places = _image(x, channels_last), _image(indices, channels_last)
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
