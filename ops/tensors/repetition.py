"""Ops that repeat the elements of tensors: broadcast, mesh grids, tile, repeat."""

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
    normalize_shape,
    show_shape,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import normalize_axis, unbroadcast
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.shape import expand_dims, reshape


def _copy_cost(*specs: TensorSpec, **attrs: Any) -> Cost:
    return Cost(flops=0)


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
