"""Searching: nonzero elements, distinct elements, positions in a sorted tensor, counts.

The number of results depends on values, but shapes may not. So such functions take a `size`, the
most results that there may be. They pad the rest, and return the number of results, too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from graphflow.errors import ArgumentError, CheckError, DTypeError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, promote_inputs, register, sample
from graphflow.ir.spec import Dim, Size, TensorSpec, kind, spec
from graphflow.ops.base.shape_rules import normalize_axis, require_kind
from graphflow.ops.pointwise.comparison import less, not_equal
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.pointwise.select import where
from graphflow.ops.reductions.reduce import sum
from graphflow.ops.sharding import gather_scatter as gather_sharding
from graphflow.ops.tensors.creation import arange, full, zeros
from graphflow.ops.tensors.padding import pad
from graphflow.ops.tensors.repetition import broadcast_to
from graphflow.ops.tensors.shape import reshape
from graphflow.ops.tensors.take import scatter_add, take

F = spec("float32", (3, 4))
I64 = np.dtype("int64")


def _require_size(size: Any) -> Size:
    if (
        isinstance(size, bool)
        or not isinstance(size, int | np.integer | Dim)
        or (not isinstance(size, Dim) and size < 0)
    ):
        raise ArgumentError(
            f"size must be the most results, an int or the size of a tensor, got {size!r}"
        )
    return size if isinstance(size, Dim) else int(size)


def _require_room(count: int, size: int, what: str) -> None:
    if count > size:
        raise CheckError(f"{count} {what}, but size is {size}; give a larger size")


def _take_padded(x: Tensor, places: Tensor, count: Tensor, axis: int, fill: Any) -> Tensor:
    """Return the slices of x at `places` along an axis; after the first `count` they are filled."""
    size = places.shape[0]
    padding = astype(full((), fill), x.dtype)
    if x.shape[axis] == 0:  # no index is valid, not even that of padding
        return broadcast_to(padding, (*x.shape[:axis], size, *x.shape[axis + 1 :]))
    if isinstance(x.shape[axis], Dim):  # the axis may turn out empty
        x = pad(x, tuple((0, int(i == axis)) for i in range(x.ndim)))
    used = reshape(less(arange(size), count), (size, *(1,) * (x.ndim - axis - 1)))
    return where(used, take(x, places, axis), padding)


# nonzero and compress -----------------------------------------------------------------------------


def _nonzero_kernel(xp: Any, x: Any, size: int, fill: int) -> tuple[Any, Any]:
    found = xp.nonzero(x)
    count = int(found[0].size) if found else 0
    _require_room(count, size, "elements are not zero")
    places = xp.full((x.ndim, size), fill, I64)
    for row, axis in zip(places, found, strict=True):
        row[:count] = axis
    return places, xp.asarray(count, I64)


# Indices (rank, size) in row-major order, and their number.
_nonzero = register(
    Op(
        "nonzero",
        infer=lambda x, size, fill: (TensorSpec((x.rank, size), I64), TensorSpec((), I64)),
        kernel=_nonzero_kernel,
        cost=lambda x, size, fill: Cost(
            flops=x.size * 2, bytes=x.nbytes * 2 + size * (x.rank * 16)
        ),
        samples=(
            sample(spec("bool", (3, 4)), size=12, fill=0),
            sample(spec("int32", (5,)), size=7, fill=-1),
        ),
    )
)


@function
def nonzero(x: Any, size: Size, fill: int = 0) -> tuple[tuple[Tensor, ...], Tensor]:
    """Find the nonzero elements of x: int64 positions (size,) for each axis, and their number.

    Positions are in row-major order; those after the number are `fill`.

    Args:
        size: most nonzero elements; more are a CheckError in the step.

    Raises:
        ArgumentError: size or fill is no int.
        ShapeError: x has no axes.
    """
    places, count = nonzero_places(x, size, fill)
    rows = [take(places, axis, 0) for axis in range(as_tensor(x).ndim)]
    return tuple(rows), count


def nonzero_places(x: Any, size: Size, fill: int = 0) -> tuple[Tensor, Tensor]:
    """Find nonzero elements as `nonzero` does, with positions as one tensor (rank, size)."""
    x = as_tensor(x)
    if not x.ndim:
        raise ShapeError("x has no axis along which there are positions")
    if isinstance(fill, bool) or not isinstance(fill, int | np.integer):
        raise ArgumentError(f"fill must be an int, got {fill!r}")
    places, count = _nonzero(x, size=_require_size(size), fill=int(fill))
    return places, count


@function
def count_nonzero(x: Any, axis: Any = None, keepdims: bool = False) -> Tensor:
    """Count the elements over axes (None: all) that are not 0, as int64.

    Raises:
        ShapeError: an axis is outside x.
        ArgumentError: an axis is given twice.
    """
    x = as_tensor(x)
    marks = x if kind(x.dtype) == "bool" else not_equal(x, x.dtype.type(0).item())
    return sum(astype(marks, "int64"), axis, keepdims)


@function
def compress(
    condition: Any, x: Any, size: Size, axis: int | None = None, fill: Any = 0
) -> tuple[Tensor, Tensor]:
    """Return the slices of x where a condition holds, and their number.

    Args:
        condition: bool, one axis, no longer than that of x.
        size: most slices; more are a CheckError in the step.
        axis: the axis of the slices; None: the elements of the flattened x.
        fill: value of the slices after the last.

    Raises:
        DTypeError: the condition is not bool.
        ShapeError: the condition has another rank or is too long.
        ArgumentError: size is no int.
    """
    x, condition = as_tensor(x), as_tensor(condition)
    if condition.dtype != np.bool_:
        raise DTypeError(f"the condition must be bool, got {condition.dtype}; compare it with 0")
    if axis is None:
        x = reshape(x, (x.size,))
    axis = normalize_axis(axis or 0, x.ndim)
    have, limit = condition.shape[0] if condition.ndim else None, x.shape[axis]
    if condition.ndim != 1 or (isinstance(have, int) and isinstance(limit, int) and have > limit):
        raise ShapeError(
            f"the condition must have one axis of {limit} or fewer, got {condition.spec}"
        )
    places, count = nonzero_places(condition, size)
    rows = reshape(places, (places.shape[1],))
    return _take_padded(x, rows, count, axis, fill), count


# unique -------------------------------------------------------------------------------------------


def _rows_to_compare(x: TensorSpec, axis: int | None) -> Size:
    return x.size if axis is None else x.shape[axis]


def _infer_unique(
    x: TensorSpec, size: Size, axis: int | None, sorted: bool
) -> tuple[TensorSpec, ...]:
    require_kind(x, "bool", "int", "float")
    n = _rows_to_compare(x, axis)
    chosen = TensorSpec((size,), I64)
    return chosen, TensorSpec((n,), I64), chosen, TensorSpec((), I64)


def _unique_kernel(
    xp: Any, x: Any, size: int, axis: int | None, sorted: bool
) -> tuple[Any, Any, Any, Any]:
    """Return first positions, inverse, counts and number of the distinct rows.

    A stable sort puts equal rows together, the first of them in front.
    """
    n = x.size if axis is None else x.shape[axis]
    width = 1 if axis is None else math.prod(x.shape) // n if n else 0
    rows = (x if axis is None else xp.moveaxis(x, axis, 0)).reshape(n, width)
    first, counts = xp.zeros(size, I64), xp.zeros(size, I64)
    if n == 0:
        return first, xp.zeros(0, I64), counts, xp.asarray(0, I64)
    if width == 1:
        order = xp.argsort(rows[:, 0], kind="stable")
    else:
        keys = xp.ascontiguousarray(rows.T[::-1])
        order = xp.lexsort(keys) if width else xp.arange(n)
    ordered = rows[order]
    new = xp.ones(n, bool)
    new[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    starts = xp.nonzero(new)[0]
    count = int(starts.size)
    _require_room(count, size, "elements differ")
    heads, group = order[starts], xp.cumsum(new) - 1
    lengths = xp.diff(starts, append=xp.asarray([n]))
    if not sorted:  # order by first occurrence
        rank = xp.argsort(heads)
        heads, lengths = heads[rank], lengths[rank]
        group = xp.argsort(rank)[group]
    first[:count], counts[:count] = heads, lengths
    inverse = xp.empty(n, I64)
    inverse[order] = group
    return first, inverse, counts, xp.asarray(count, I64)


_unique = register(
    Op(
        "unique",
        infer=_infer_unique,
        kernel=_unique_kernel,
        cost=lambda x, size, axis, sorted: Cost(
            flops=x.size * 16, bytes=x.nbytes * 4 + x.size * 32 + size * 16
        ),
        samples=(
            sample(spec("int32", (3, 4)), size=5, axis=None, sorted=True),
            sample(spec("int32", (6, 2)), size=6, axis=0, sorted=False),
            sample(spec("int64", (2, 7)), size=9, axis=1, sorted=True),
            sample(spec("float32", (5,)), size=5, axis=None, sorted=True),
        ),
    )
)


class Unique(NamedTuple):
    """The distinct elements of a tensor, padded to `size`.

    Attributes:
        values: (size,), or slices of x along an axis of that size.
        indices: (size,) int64, the first occurrence of each (0 in the padding).
        inverse: int64, of the shape of x (or its axis): the position of each element in `values`.
        counts: (size,) int64, the number of occurrences of each (0 in the padding).
        number: int64 scalar, the number of distinct elements.
    """

    values: Tensor
    indices: Tensor
    inverse: Tensor
    counts: Tensor
    number: Tensor


@function
def unique_all(
    x: Any, size: Size, fill: Any = 0, sorted: bool = True, axis: int | None = None
) -> Unique:
    """Find the distinct elements of x, or its distinct slices along an axis.

    Args:
        x: bools, ints or floats. Each NaN counts as distinct.
        size: most distinct elements; more are a CheckError in the step.
        fill: the value in the padding.
        sorted: in ascending order (slices by their first element, then the second …); otherwise in
            order of first occurrence.

    Returns:
        A `Unique` of values, indices, inverse, counts and number.

    Raises:
        DTypeError: x is complex.
        ShapeError: axis is outside x.
        ArgumentError: size or axis is no int.
    """
    x = as_tensor(x)
    if not isinstance(sorted, bool):
        raise ArgumentError(f"sorted must be True or False, got {sorted!r}")
    if axis is not None:
        axis = normalize_axis(axis, x.ndim)
    first, inverse, counts, number = _unique(x, size=_require_size(size), axis=axis, sorted=sorted)
    if axis is None:
        inverse = reshape(inverse, x.shape)
        x = reshape(x, (x.size,))
    return Unique(_take_padded(x, first, number, axis or 0, fill), first, inverse, counts, number)


@function
def unique_values(
    x: Any, size: Size, fill: Any = 0, sorted: bool = True, axis: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return `values` and `number` of `unique_all`; arguments and errors as there."""
    found = unique_all(x, size, fill, sorted, axis)
    return found.values, found.number


@function
def unique_inverse(
    x: Any, size: Size, fill: Any = 0, sorted: bool = True, axis: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `values`, `inverse` and `number` of `unique_all`; arguments and errors as there."""
    found = unique_all(x, size, fill, sorted, axis)
    return found.values, found.inverse, found.number


@function
def unique_counts(
    x: Any, size: Size, fill: Any = 0, sorted: bool = True, axis: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `values`, `counts` and `number` of `unique_all`; arguments and errors as there."""
    found = unique_all(x, size, fill, sorted, axis)
    return found.values, found.counts, found.number


# searchsorted and bincount ------------------------------------------------------------------------


def _infer_searchsorted(sorted: TensorSpec, values: TensorSpec, side: str) -> TensorSpec:
    require_kind(sorted, "int", "float")
    if sorted.rank != 1:
        raise ShapeError(f"the sorted tensor must have one axis, got {sorted}")
    return values.with_dtype(I64)


_searchsorted = register(
    Op(
        "searchsorted",
        infer=_infer_searchsorted,
        kernel=lambda xp, sorted, values, side: xp.asarray(
            xp.searchsorted(sorted, values, side=side)
        ),
        sharding=gather_sharding.searchsorted_rule,
        cost=lambda sorted, values, side: Cost(flops=values.size * 20),
        samples=(
            sample(spec("float32", (5,)), F, side="left"),
            sample(spec("int32", (4,)), spec("int32"), side="right"),
        ),
        promotes=True,
    )
)


@function
def searchsorted(sorted: Any, values: Any, side: str = "left", sorter: Any = None) -> Tensor:
    """Find the int64 positions in an ascending tensor before which values keep it sorted.

    Args:
        sorted: one axis of ints or floats.
        values: of any shape.
        side: "left": before equal elements; "right": after them.
        sorter: int positions that sort `sorted`, if it is not.

    Raises:
        ArgumentError: the side is unknown.
        ShapeError: `sorted` has several axes.
        DTypeError: the kinds mix.
    """
    if side not in ("left", "right"):
        raise ArgumentError(f"side must be 'left' or 'right', got {side!r}")
    line, values = promote_inputs("searchsorted", (sorted, values))
    if sorter is not None:
        line = take(line, sorter, 0)
    result: Tensor = _searchsorted(line, values, side=side)
    return result


def _infer_bincount(x: TensorSpec, size: Size) -> TensorSpec:
    require_kind(x, "int")
    return TensorSpec((size,), I64)


def _bincount_kernel(xp: Any, x: Any, size: int) -> Any:
    if x.size and not 0 <= int(x.min()) <= int(x.max()) < size:
        wrong = x.min() if int(x.min()) < 0 else x.max()
        raise IndexError(f"{int(wrong)} is outside [0, {size})")
    return xp.bincount(x.reshape(-1).astype(I64), minlength=size)[:size].astype(I64, copy=False)


_bincount = register(
    Op(
        "bincount",
        infer=_infer_bincount,
        kernel=_bincount_kernel,
        sharding=gather_sharding.bincount_rule,
        cost=lambda x, size: Cost(flops=x.size * 3, bytes=x.nbytes + size * 8),
        samples=(sample(spec("int64", (3, 4)), size=3), sample(spec("uint8", (5,)), size=4)),
    )
)


@function
def bincount(x: Any, size: Size, weights: Any = None) -> Tensor:
    """Count each int in [0, size) in x, as int64; with weights of x's shape, sum them instead.

    An int outside is an OpError in the step.

    Raises:
        DTypeError: x is not int.
        ShapeError: the weights have another shape.
    """
    x = as_tensor(x)
    if weights is None:
        result: Tensor = _bincount(x, size=_require_size(size))
        return result
    require_kind(x.spec, "int")
    weights = as_tensor(weights)
    return scatter_add(zeros((_require_size(size),), weights.dtype), x, weights, 0)
