"""Ops that change the shape of tensors: reshape, permute, broadcast, tile, repeat.

Every tensor is C-contiguous, so only `reshape`, `expand_dims` and `squeeze` share their input's
memory; the others copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import REGISTRY, Cost, Op, Rows, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import (
    Dim,
    Shape,
    Size,
    TensorSpec,
    broadcast_shapes,
    equate,
    floordiv,
    normalize_shape,
    product,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import normalize_axes, normalize_axis, require_list, unbroadcast
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


permute_dims_op = register(
    Op(
        "permute_dims",
        infer=lambda x, axes: x.with_shape(x.shape[i] for i in axes),
        kernel=lambda xp, x, axes: xp.transpose(x, axes).copy(order="C"),
        into=lambda xp, out, x, axes: xp.copyto(out, xp.transpose(x, axes)),
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


# Repetition -------------------------------------------------------------------------------------


def _infer_broadcast_to(x: TensorSpec, shape: Shape) -> TensorSpec:
    what = f"{show_shape(x.shape)} does not broadcast to {show_shape(shape)}"
    if x.rank > len(shape):
        raise ShapeError(what)
    for have, want in zip(x.shape, shape[len(shape) - x.rank :], strict=True):
        if have != 1:
            equate(want, have, what)
    return x.with_shape(shape)


broadcast_to_op = register(
    Op(
        "broadcast_to",
        infer=_infer_broadcast_to,
        kernel=lambda xp, x, shape: xp.broadcast_to(x, shape).copy(order="C"),
        into=lambda xp, out, x, shape: xp.copyto(out, x),
        expr=lambda xp, x, shape: x,
        rows=lambda x, shape: Rows(None, (x,), shape),
        vjp=lambda g, y, x, shape: (unbroadcast(g, x.shape),),
        batch=batching.broadcast_to,
        sharding=sharding.broadcast_rule,
        cost=_copy_cost,
        halves=True,
        samples=(
            sample(spec("float32", (4,)), shape=(3, 4)),
            sample(spec("float32", (3, 1)), shape=(2, 3, 4)),
            sample(spec("float32", ()), shape=(2,)),
        ),
    )
)


@function
def broadcast_to(x: Tensor, shape: Any) -> Tensor:
    """Repeat x along axes of size 1 and along new leading axes.

    Raises:
        ShapeError: a size of x is neither 1 nor the wanted one.
    """
    x = as_tensor(x)
    wanted = normalize_shape(shape, "broadcast_to")
    if wanted == x.shape:
        return x
    result: Tensor = broadcast_to_op(x, shape=wanted)
    return result


@function
def broadcast_arrays(*arrays: Tensor) -> list[Tensor]:
    """Broadcast tensors to their common shape.

    Raises:
        ShapeError: they have none.
    """
    tensors = [as_tensor(x) for x in arrays]
    shape = broadcast_shapes(*(x.shape for x in tensors))
    return [broadcast_to(x, shape) for x in tensors]


@function
def meshgrid(*arrays: Tensor, indexing: Literal["xy", "ij"] = "xy") -> list[Tensor]:
    """Return coordinates of a grid: n vectors, each repeated along the axes of the others.

    Args:
        arrays: vectors or scalars.
        indexing: "ij": vector i varies along axis i; "xy": the first two axes are exchanged, as in
            pictures.

    Raises:
        ShapeError: an array is neither vector nor scalar.
    """
    vectors = [as_tensor(x) for x in arrays]
    if any(x.ndim > 1 for x in vectors):
        shapes = ", ".join(show_shape(x.shape) for x in vectors)
        raise ShapeError(f"a grid is made of vectors, not of shapes {shapes}")
    axes = list(range(len(vectors)))
    if indexing == "xy":
        axes[:2] = axes[:2][::-1]
    along = [
        reshape(x, (1,) * axis + (x.size,) + (1,) * (len(axes) - 1 - axis))
        for x, axis in zip(vectors, axes, strict=True)
    ]
    return broadcast_arrays(*along)


@function
def tile(x: Tensor, repetitions: int | Sequence[Any]) -> Tensor:
    """Lay out x `repetitions` times along each axis.

    Args:
        repetitions: counts for the last axes; other axes have one copy.

    Raises:
        ShapeError: a count is negative.
    """
    x = as_tensor(x)
    times = normalize_shape(repetitions, "tile")
    x = reshape(x, (1,) * (len(times) - x.ndim) + x.shape)
    times = (1,) * (x.ndim - len(times)) + times
    final = tuple(r * n for r, n in zip(times, x.shape, strict=True))
    repeated = [i for i, r in enumerate(times) if r != 1]
    for shift, i in enumerate(repeated):
        x = expand_dims(x, i + shift)
    shape = list(x.shape)
    for shift, i in enumerate(repeated):
        shape[i + shift] = times[i]
    return reshape(broadcast_to(x, tuple(shape)), final)


@function
def repeat(x: Tensor, repeats: Size | Sequence[int], axis: int | None = None) -> Tensor:
    """Repeat each element of x `repeats` times in a row.

    Args:
        repeats: one count, or one for each element of an axis of known size.
        axis: None: of the flattened x.

    Raises:
        ArgumentError: the counts do not fit the axis.
    """
    x = as_tensor(x)
    if axis is None:
        return repeat(reshape(x, (-1,)), repeats, 0)
    at = normalize_axis(axis, x.ndim)
    if not isinstance(repeats, int | np.integer | Dim):
        try:
            counts = np.asarray(repeats)
        except ValueError:  # lists of different lengths
            counts = np.empty(0)
        if counts.dtype.kind not in "iu" or counts.shape != (x.shape[at],) or (counts < 0).any():
            raise ArgumentError(
                f"repeats must be one count >= 0, or one for each of the {x.shape[at]} elements of "
                f"axis {at}, got {repeats!r}"
            )
        taken: Tensor = REGISTRY["take"](x, np.repeat(np.arange(len(counts)), counts), axis=at)
        return taken
    (times,) = normalize_shape(repeats, "repeat")
    shape = (*x.shape[: at + 1], times, *x.shape[at + 1 :])
    final = (*x.shape[:at], x.shape[at] * times, *x.shape[at + 1 :])
    return reshape(broadcast_to(expand_dims(x, at + 1), shape), final)
