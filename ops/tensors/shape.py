"""Ops that rearrange the axes of tensors: reshape, expand, squeeze, permute.

Every tensor is C-contiguous, so only `reshape`, `expand_dims` and `squeeze` share their input's
memory; the others copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import (
    Shape,
    TensorSpec,
    equate,
    floordiv,
    normalize_shape,
    product,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import normalize_axes, normalize_axis, require_list
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.moves.strided_copies import row_major_strides, strided_task
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.sharding.reshapes import reshape_rule

F = spec("float32", (3, 4))
CUBE = spec("float32", (2, 3, 4))


def _no_cost(*specs: TensorSpec, **attrs: Any) -> Cost:
    return Cost(flops=0, bytes=0)


def _copy_cost(*specs: TensorSpec, **attrs: Any) -> Cost:
    return Cost(flops=0)


# Aliases of the input's memory ------------------------------------------------------------------


def _infer_reshape(x: TensorSpec, shape: Shape) -> TensorSpec:
    before, after = x.size, product(shape)
    if before != after:
        equate(before, after, f"reshape of {show_shape(x.shape)} to {show_shape(shape)}")
    return x.with_shape(shape)


reshape_op = register(
    Op(
        "reshape",
        infer=_infer_reshape,
        kernel=lambda xp, x, shape: xp.reshape(x, shape),
        vjp=lambda g, y, x, shape: (reshape(g, x.shape),),
        batch=batching.leading_size("shape"),
        sharding=reshape_rule,
        cost=_no_cost,
        samples=(
            sample(F, shape=(2, 6)),
            sample(F, shape=(12,)),
            sample(spec("int64", (1,)), shape=()),
        ),
        alias=True,
    )
)


@function
def reshape(x: Tensor, shape: Any) -> Tensor:
    """Return the elements of x, in C order, in another shape.

    Args:
        shape: ints, or sizes of other tensors. One may be -1: the size that remains.

    Raises:
        ShapeError: the number of elements differs, or more than one size is -1.
    """
    x = as_tensor(x)
    entries = list(shape) if isinstance(shape, tuple | list) else [shape]
    unknown = [i for i, s in enumerate(entries) if isinstance(s, int | np.integer) and s == -1]
    if any(s is None for s in entries):
        raise ShapeError("a size of the new shape is None; give -1 for the size that remains")
    if len(unknown) > 1:
        raise ShapeError(f"reshape to {tuple(entries)}: only one size may be -1")
    if not unknown:
        return _reshape(x, normalize_shape(entries, "reshape"))
    (at,) = unknown
    before, after = (normalize_shape(part, "reshape") for part in (entries[:at], entries[at + 1 :]))
    rest = product(before + after)
    if rest == 0 or (isinstance(rest, int) and isinstance(x.size, int) and x.size % rest):
        raise ShapeError(
            f"reshape of {show_shape(x.shape)} to {tuple(entries)}: {x.size} elements "
            f"are no multiple of {rest}"
        )
    return _reshape(x, (*before, floordiv(x.size, rest), *after))


def _reshape(x: Tensor, shape: Shape) -> Tensor:
    if x.shape == shape:
        return x
    result: Tensor = reshape_op(x, shape=shape)
    return result


def _infer_expand_dims(x: TensorSpec, axes: tuple[int, ...]) -> TensorSpec:
    sizes = iter(x.shape)
    rank = x.rank + len(axes)
    return x.with_shape(1 if i in axes else next(sizes) for i in range(rank))


expand_dims_op = register(
    Op(
        "expand_dims",
        infer=_infer_expand_dims,
        kernel=lambda xp, x, axes: xp.expand_dims(x, axes),
        vjp=lambda g, y, x, axes: (squeeze(g, axes),),
        batch=batching.along("axes"),
        sharding=sharding.expand_dims_rule,
        cost=_no_cost,
        samples=(sample(F, axes=(0,)), sample(F, axes=(1, 3))),
        alias=True,
    )
)


@function
def expand_dims(x: Tensor, axis: int | Sequence[int] = 0) -> Tensor:
    """Insert axes of size 1 that stand at `axis` in the result.

    Args:
        axis: an int or several.

    Raises:
        ShapeError: an axis is outside the result's rank.
    """
    x = as_tensor(x)
    count = len(axis) if isinstance(axis, tuple | list) else 1
    axes = normalize_axes(axis, x.ndim + count)
    if not axes:
        return x
    result: Tensor = expand_dims_op(x, axes=axes)
    return result


def _infer_squeeze(x: TensorSpec, axes: tuple[int, ...]) -> TensorSpec:
    for i in axes:
        equate(x.shape[i], 1, f"axis {i} of {show_shape(x.shape)} is not of size 1")
    return x.with_shape(s for i, s in enumerate(x.shape) if i not in axes)


squeeze_op = register(
    Op(
        "squeeze",
        infer=_infer_squeeze,
        kernel=lambda xp, x, axes: xp.reshape(
            x, tuple(s for i, s in enumerate(x.shape) if i not in axes)
        ),
        vjp=lambda g, y, x, axes: (expand_dims(g, axes),),
        batch=batching.along("axes"),
        sharding=sharding.squeeze_rule,
        cost=_no_cost,
        samples=(
            sample(spec("float32", (3, 1)), axes=(1,)),
            sample(spec("float32", (1, 2, 1)), axes=(0, 2)),
        ),
        alias=True,
    )
)


@function
def squeeze(x: Tensor, axis: int | Sequence[int] | None = None) -> Tensor:
    """Remove axes of size 1.

    Args:
        axis: an int or several; None: all axes whose size is known to be 1.

    Raises:
        ShapeError: an axis is not of size 1, or outside x.
    """
    x = as_tensor(x)
    ones = tuple(i for i, s in enumerate(x.shape) if s == 1)
    axes = ones if axis is None else normalize_axes(axis, x.ndim)
    if not axes:
        return x
    result: Tensor = squeeze_op(x, axes=axes)
    return result


# Permutations -----------------------------------------------------------------------------------


def _inverse(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def _native_permute(x: TensorSpec, axes: Sequence[int]) -> KernelTask | None:
    strides = row_major_strides(x.shape)
    return strided_task(x, 0, tuple(x.shape[i] for i in axes), [strides[i] for i in axes])


permute_dims_op = register(
    Op(
        "permute_dims",
        infer=lambda x, axes: x.with_shape(x.shape[i] for i in axes),
        kernel=lambda xp, x, axes: xp.transpose(x, axes).copy(order="C"),
        into=lambda xp, out, x, axes: xp.copyto(out, xp.transpose(x, axes)),
        native=_native_permute,
        vjp=lambda g, y, x, axes: (permute_dims(g, _inverse(axes)),),
        batch=batching.permute_dims,
        sharding=sharding.permute_rule,
        cost=_copy_cost,
        halves=True,
        samples=(sample(F, axes=(1, 0)), sample(CUBE, axes=(2, 0, 1))),
    )
)


@function
def permute_dims(x: Tensor, axes: Sequence[int]) -> Tensor:
    """Permute the axes of x: axis i of the result is axis `axes[i]` of x.

    Raises:
        ArgumentError, ShapeError: axes is no permutation of x's axes.
    """
    x = as_tensor(x)
    order = tuple(normalize_axis(a, x.ndim) for a in require_list("axes", axes))
    if sorted(order) != list(range(x.ndim)):
        raise ArgumentError(f"{tuple(axes)} is no permutation of {x.ndim} axes")
    if order == tuple(range(x.ndim)):
        return x
    if x.node.op is permute_dims_op and tuple(x.node.attrs["axes"]) == _inverse(order):
        return x.node.inputs[0]  # this permutation undoes the one before
    result: Tensor = permute_dims_op(x, axes=order)
    return result


@function
def matrix_transpose(x: Tensor) -> Tensor:
    """Exchange the last two axes of x.

    Raises:
        ShapeError: x has fewer than two axes.
    """
    return swapaxes(x, -1, -2)


@function
def swapaxes(x: Tensor, axis1: int, axis2: int) -> Tensor:
    """Exchange two axes of x.

    Raises:
        ShapeError: an axis is outside x.
    """
    x = as_tensor(x)
    order = list(range(x.ndim))
    a, b = normalize_axis(axis1, x.ndim), normalize_axis(axis2, x.ndim)
    order[a], order[b] = b, a
    return permute_dims(x, order)


@function
def moveaxis(x: Tensor, source: int | Sequence[int], destination: int | Sequence[int]) -> Tensor:
    """Move the axes `source` to the positions `destination`; the others keep their order.

    Raises:
        ArgumentError: the two differ in length, or name an axis twice.
        ShapeError: an axis is outside x.
    """
    x = as_tensor(x)
    sources, targets = (
        [
            normalize_axis(a, x.ndim)
            for a in (given if isinstance(given, tuple | list) else (given,))
        ]
        for given in (source, destination)
    )
    if len(sources) != len(targets) or len({*sources}) + len({*targets}) != 2 * len(sources):
        raise ArgumentError(
            f"source and destination must name equally many distinct axes, "
            f"got {source} and {destination}"
        )
    order = [i for i in range(x.ndim) if i not in sources]
    for target, origin in sorted(zip(targets, sources, strict=True)):
        order.insert(target, origin)
    return permute_dims(x, order)
