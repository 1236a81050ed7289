"""Windows of tensors, and joining tensors: slice, flip, roll, concat, stack, split.

Two linear ops are each other's gradient: `slice` takes a window out of a tensor, `pad` puts one
into a filled tensor. With them flip, roll, split and indexing need no ops of their own. Conditions
on symbolic sizes are checked when the sizes are fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import (
    Shape,
    Size,
    TensorSpec,
    equate,
    floordiv,
    maximum,
    normalize_shape,
    product,
    require_nonnegative,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import normalize_axes, normalize_axis, require_list
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.moves.strided_copies import (
    join_task,
    row_major_strides,
    strided_task,
)
from graphflow.ops.sharding import slicing as slice_sharding
from graphflow.ops.tensors.shape import expand_dims, reshape, squeeze

F = spec("float32", (3, 4))
CUBE = spec("float32", (2, 3, 4))
_MAX_DIFFERENCES = 1000

# Windows: slice and pad -------------------------------------------------------------------------


def _check_window(shape: Shape, start: Shape, size: Shape, step: Shape) -> None:
    for axis, (n, first, count, stride) in enumerate(zip(shape, start, size, step, strict=True)):
        what = f"window [{first} + i*{stride}, i < {count}] leaves axis {axis} of size {n}"
        require_nonnegative(count, what)
        if count == 0 or not isinstance(stride, int):
            continue
        if abs(stride) == 1 or all(isinstance(s, int) for s in (n, first, count)):
            last = first + (count - 1) * stride
            low, high = (first, last) if stride > 0 else (last, first)
            require_nonnegative(low, what)
            require_nonnegative(n - 1 - high, what)


def _windows(start: Sequence[int], size: Sequence[int], step: Sequence[int]) -> tuple[Any, ...]:
    """Return Python slices of the indices start + i*step, i < size, on each axis."""
    result = []
    for first, count, stride in zip(start, size, step, strict=True):
        stop: int | None = first + count * stride
        if stop is not None and stop < 0:
            stop = None  # runs down to index 0
        result.append(slice(first, stop, stride) if count else slice(0, 0))
    return tuple(result)


def _infer_slice(x: TensorSpec, start: Shape, size: Shape, step: Shape) -> TensorSpec:
    _check_window(x.shape, start, size, step)
    return x.with_shape(size)


def _into_slice(xp: Any, out: Any, x: Any, start: Any, size: Any, step: Any) -> None:
    xp.copyto(out, x[(*_windows(start, size, step), ...)])


def _native_slice(x: TensorSpec, start: Any, size: Any, step: Any) -> KernelTask | None:
    strides = row_major_strides(x.shape)
    first = int(sum(at * n for at, n in zip(start, strides, strict=True)))
    return strided_task(x, first, size, [s * n for s, n in zip(step, strides, strict=True)])


# The elements at the indices start + i*step, i < size, of each axis.
slice_op: Op = register(
    Op(
        "slice",
        infer=_infer_slice,
        kernel=lambda xp, x, start, size, step: x[(*_windows(start, size, step), ...)].copy(
            order="C"
        ),
        into=_into_slice,
        vjp=lambda g, y, x, start, size, step: (
            pad_op(g, shape=x.shape, start=start, step=step, value=0),
        ),
        batch=batching.slice_window,
        sharding=slice_sharding.slice_rule,
        cost=lambda x, start, size, step: Cost(flops=0, bytes=product(size) * 2 * x.dtype.itemsize),
        native=_native_slice,
        halves=True,
        samples=(
            sample(F, start=(1, 0), size=(2, 2), step=(1, 2)),
            sample(F, start=(2, 3), size=(3, 2), step=(-1, -3)),
            sample(F, start=(0, 0), size=(0, 4), step=(1, 1)),
        ),
    )
)


def _infer_pad(x: TensorSpec, shape: Shape, start: Shape, step: Shape, value: Any) -> TensorSpec:
    _check_window(shape, start, x.shape, step)
    return x.with_shape(shape)


def _into_pad(xp: Any, out: Any, x: Any, shape: Any, start: Any, step: Any, value: Any) -> None:
    out[...] = value
    out[_windows(start, x.shape, step)] = x


def _pad_kernel(xp: Any, x: Any, shape: Any, start: Any, step: Any, value: Any) -> Any:
    out = xp.empty(shape, x.dtype)
    _into_pad(xp, out, x, shape, start, step, value)
    return out


# A tensor filled with `value`, with x at the indices start + i*step of each axis.
pad_op: Op = register(
    Op(
        "pad",
        infer=_infer_pad,
        kernel=_pad_kernel,
        into=_into_pad,
        vjp=lambda g, y, x, shape, start, step, value: (
            slice_op(g, start=start, size=x.shape, step=step),
        ),
        batch=batching.pad,
        sharding=slice_sharding.pad_rule,
        cost=lambda x, shape, **attrs: Cost(
            flops=0, bytes=(product(shape) + x.size) * x.dtype.itemsize
        ),
        halves=True,
        samples=(
            sample(F, shape=(5, 6), start=(1, 2), step=(1, 1), value=1.5),
            sample(F, shape=(3, 9), start=(2, 0), step=(-1, 2), value=0),
        ),
    )
)


@function
def flip(x: Tensor, axis: int | Sequence[int] | None = None) -> Tensor:
    """Reverse the order of elements along `axis` (default: every axis).

    Raises:
        ShapeError: an axis is outside x.
    """
    x = as_tensor(x)
    axes = normalize_axes(axis, x.ndim)
    if not axes:
        return x
    result: Tensor = slice_op(
        x,
        start=tuple(n - 1 if i in axes else 0 for i, n in enumerate(x.shape)),
        size=x.shape,
        step=tuple(-1 if i in axes else 1 for i in range(x.ndim)),
    )
    return result


def window(x: Tensor, axis: int, start: Size, size: Size) -> Tensor:
    """Return `size` elements of one axis, from `start` on."""
    if start == 0 and size == x.shape[axis]:
        return x
    result: Tensor = slice_op(
        x,
        start=tuple(start if i == axis else 0 for i in range(x.ndim)),
        size=tuple(size if i == axis else n for i, n in enumerate(x.shape)),
        step=(1,) * x.ndim,
    )
    return result


@function
def roll(x: Tensor, shift: int | Sequence[int], axis: int | Sequence[int] | None = None) -> Tensor:
    """Move elements by `shift` along `axis`; those that leave come in at the other end.

    Args:
        shift: an int, or one for each axis.
        axis: None: roll x as if it were flat.

    Raises:
        ArgumentError: shifts are no ints, or not as many as axes.
        ShapeError: an axis is outside x.
    """
    x = as_tensor(x)
    if axis is None:
        return reshape(roll(reshape(x, (-1,)), shift, 0), x.shape)
    axes = list(axis) if isinstance(axis, tuple | list) else [axis]
    shifts: list[Any] = list(shift) if isinstance(shift, tuple | list) else [shift] * len(axes)
    if not all(isinstance(s, int | np.integer) for s in shifts):
        raise ArgumentError(f"shifts must be ints, got {shift!r}")
    if len(shifts) != len(axes):
        raise ArgumentError(
            f"shift has {len(shifts)} entries for {len(axes)} axes; give one for each"
        )
    for a, s in zip((normalize_axis(a, x.ndim) for a in axes), shifts, strict=True):
        n = x.shape[a]
        at_least_one = maximum(n, 1)
        moved = int(s) - at_least_one * floordiv(int(s), at_least_one)  # s modulo n
        if moved != 0:
            x = concat([window(x, a, n - moved, moved), window(x, a, 0, n - moved)], a)
    return x


@function
def diff(x: Tensor, n: int = 1, axis: int = -1) -> Tensor:
    """Take differences of neighbours along an axis, n times; each time removes one element.

    Raises:
        ArgumentError: n is negative, or above 1000 (each time adds three nodes).
        DTypeError: x is bool.
        ShapeError: axis is outside x.
    """
    x = as_tensor(x)
    at = normalize_axis(axis, x.ndim)
    if not 0 <= n <= _MAX_DIFFERENCES:
        raise ArgumentError(f"n must be from 0 to {_MAX_DIFFERENCES}, got {n}")
    before = (slice(None),) * at
    for _ in range(n):
        x = x[(*before, slice(1, None))] - x[(*before, slice(None, -1))]
    return x


# Joining and splitting --------------------------------------------------------------------------


def _infer_concat(*specs: TensorSpec, axis: int) -> TensorSpec:
    first, *others = specs
    shape = list(first.shape)
    for other in others:
        what = f"concat along axis {axis}: {show_shape(first.shape)} and {show_shape(other.shape)}"
        if other.rank != first.rank:
            raise ShapeError(f"{what}: ranks differ")
        for i, n in enumerate(other.shape):
            shape[i] = shape[i] + n if i == axis else equate(shape[i], n, what)
    return first.with_shape(shape)


def _concat_vjp(g: Tensor, y: Tensor, *inputs: Tensor, axis: int) -> list[Tensor]:
    parts, start = [], 0
    for x in inputs:
        parts.append(window(g, axis, start, x.shape[axis]))
        start = start + x.shape[axis]  # type: ignore[assignment]
    return parts


concat_op = register(
    Op(
        "concat",
        infer=_infer_concat,
        kernel=lambda xp, *arrays, axis: xp.concatenate(arrays, axis),
        into=lambda xp, out, *arrays, axis: xp.concatenate(arrays, axis, out=out),
        native=join_task,
        vjp=_concat_vjp,
        batch=batching.along("axis"),
        sharding=slice_sharding.concat_rule,
        cost=lambda *specs, axis: Cost(flops=0),
        halves=True,
        samples=(
            sample(F, F, axis=0),
            sample(F, spec("float32", (3, 2)), spec("float32", (3, 0)), axis=1),
            sample(CUBE, axis=2),
        ),
        promotes=True,
    )
)


@function
def concat(arrays: Sequence[Tensor], axis: int | None = 0) -> Tensor:
    """Join tensors along an axis.

    Args:
        arrays: a list of tensors of one rank.
        axis: None: flatten them first.

    Raises:
        ArgumentError: arrays is empty.
        ShapeError: ranks or sizes of other axes differ.
    """
    tensors = require_list("arrays", arrays)
    if not tensors:
        raise ArgumentError("give at least one tensor")
    if axis is None:
        return concat([reshape(as_tensor(t), (-1,)) for t in tensors], 0)
    first = next((t for t in tensors if isinstance(t, Tensor)), None)
    rank = first.ndim if first is not None else as_tensor(tensors[0]).ndim
    result: Tensor = concat_op(*tensors, axis=normalize_axis(axis, rank))
    return result


@function
def stack(arrays: Sequence[Tensor], axis: int = 0) -> Tensor:
    """Join tensors of one shape along a new axis.

    Raises:
        ArgumentError: arrays is empty.
        ShapeError: shapes differ.
    """
    tensors = [as_tensor(t) for t in require_list("arrays", arrays)]
    if not tensors:
        raise ArgumentError("give at least one tensor")
    at = normalize_axis(axis, tensors[0].ndim + 1)
    for other in tensors[1:]:
        sizes = zip(other.shape, tensors[0].shape, strict=False)
        known = [pair for pair in sizes if all(isinstance(size, int) for size in pair)]
        if other.ndim != tensors[0].ndim or any(a != b for a, b in known):
            raise ShapeError(
                f"shapes {show_shape(tensors[0].shape)} and {show_shape(other.shape)} differ"
            )
    return concat([expand_dims(t, at) for t in tensors], at)


@function
def split(x: Tensor, parts: int | Sequence[Any], axis: int = 0) -> list[Tensor]:
    """Split a tensor along an axis into equal parts, or into parts of given sizes.

    Args:
        parts: the number of equal parts, or a list of sizes.

    Raises:
        ShapeError: the sizes do not add up to that of the axis (FeedError for a symbolic size).
    """
    x = as_tensor(x)
    at = normalize_axis(axis, x.ndim)
    n = x.shape[at]
    if isinstance(parts, int | np.integer):
        if parts < 1 or (isinstance(n, int) and n % parts):
            raise ShapeError(f"axis {at} of size {n} has no {parts} equal parts")
        sizes: Shape = (floordiv(n, int(parts)),) * int(parts)
    else:
        sizes = normalize_shape(require_list("parts", parts), "split")
    total: Size = 0
    for size in sizes:
        total = total + size
    if isinstance(n, int) and isinstance(total, int) and n != total:
        raise ShapeError(f"sizes {show_shape(sizes)} add up to {total}, axis {at} has {n}")
    if total != n:  # that they are equal is checked when a size is fed
        x = reshape(x, (*x.shape[:at], total, *x.shape[at + 1 :]))
    results, start = [], 0
    for size in sizes:
        results.append(window(x, at, start, size))
        start = start + size  # type: ignore[assignment]
    return results


@function
def unstack(x: Tensor, axis: int = 0) -> list[Tensor]:
    """Return the slices along an axis as tensors without that axis.

    Raises:
        ShapeError: the size of the axis is unknown.
    """
    x = as_tensor(x)
    at = normalize_axis(axis, x.ndim)
    n = x.shape[at]
    if not isinstance(n, int):
        raise ShapeError(f"the size {n} of axis {at} is not known while the graph is built")
    return [squeeze(window(x, at, i, 1), at) for i in range(n)]
