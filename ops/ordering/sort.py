"""Sorting along an axis: sort, argsort, the k largest, running extrema.

All sorts are stable: equal elements keep their order, in either direction and on any device. NaN
counts as larger than every number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import Cost, Op, Tensor, as_tensor, function, register, sample
from graphflow.ir.spec import Dim, Size, TensorSpec, is_inexact, spec
from graphflow.ops.base.batching_rules import along
from graphflow.ops.base.shape_rules import normalize_axis, require_kind
from graphflow.ops.sharding import along_axis as axis_sharding
from graphflow.ops.sharding import rules as sharding
from graphflow.ops.tensors.creation import zeros
from graphflow.ops.tensors.take_along_axis import scatter_add_along_axis

F = spec("float32", (3, 4))
CUBE = spec("float32", (3, 2, 4))
INT = spec("int32", (3, 4))
I64 = np.dtype("int64")


def _sort_cost(x: TensorSpec, **attrs: Any) -> Cost:
    """Estimate 12 flops an element: log2 of typical sizes, since the size is not always known."""
    return Cost(flops=x.size * 12)


def _scatter_cotangent(g: Tensor, x: Tensor, places: Tensor, axis: int) -> Tensor:
    """Put the cotangent of selected elements at their positions in x."""
    return scatter_add_along_axis(zeros(x.shape, x.dtype), places, g, axis)


# sort and argsort ---------------------------------------------------------------------------------


def _infer_sort(x: TensorSpec, axis: int, descending: bool) -> TensorSpec:
    require_kind(x, "bool", "int", "float")
    return x


def _sort_into(xp: Any, out: Any, x: Any, axis: int, descending: bool) -> None:
    if descending:
        xp.copyto(out, xp.flip(xp.sort(x, axis=axis), axis))
    else:
        xp.copyto(out, x)
        out.sort(axis=axis)


def _sort_kernel(xp: Any, x: Any, axis: int, descending: bool) -> Any:
    out = xp.empty(x.shape, x.dtype)
    _sort_into(xp, out, x, axis, descending)
    return out


def _argsort_kernel(xp: Any, x: Any, axis: int, descending: bool) -> Any:
    if not descending:
        return xp.argsort(x, axis=axis, kind="stable")
    # Sort from the back: equal elements come in reverse order, which flipping the result undoes.
    backwards = xp.argsort(xp.flip(x, axis), axis=axis, kind="stable")
    return xp.ascontiguousarray(x.shape[axis] - 1 - xp.flip(backwards, axis))


_ORDER_SAMPLES = (
    sample(F, axis=1, descending=False),
    sample(CUBE, axis=0, descending=True),
    sample(INT, axis=0, descending=True),
    sample(spec("bool", (4,)), axis=0, descending=False),
    sample(spec("float32", (3, 0)), axis=1, descending=True),
)
argsort_op = register(
    Op(
        "argsort",
        infer=lambda x, axis, descending: _infer_sort(x, axis, descending).with_dtype(I64),
        kernel=_argsort_kernel,
        into=lambda xp, out, x, axis, descending: xp.copyto(
            out, _argsort_kernel(xp, x, axis, descending)
        ),
        batch=along("axis"),
        sharding=sharding.row_rule("axis"),
        cost=_sort_cost,
        samples=_ORDER_SAMPLES,
    )
)
sort_op = register(
    Op(
        "sort",
        infer=_infer_sort,
        kernel=_sort_kernel,
        into=_sort_into,
        vjp=lambda g, y, x, axis, descending: (
            _scatter_cotangent(g, x, argsort_op(x, axis=axis, descending=descending), axis)
            if is_inexact(x.dtype)
            else None,
        ),
        batch=along("axis"),
        sharding=sharding.row_rule("axis"),
        cost=_sort_cost,
        samples=_ORDER_SAMPLES,
    )
)


@function
def sort(x: Any, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Sort x along an axis, always stably; NaN counts as the largest.

    Args:
        x: bools, ints or floats.
        descending: the largest first.
        stable: either value gives a stable sort.

    Raises:
        DTypeError: x is complex.
        ShapeError: axis is outside x.
        ArgumentError: axis is no int, or a flag no bool.
    """
    x, axis = _arguments(x, axis, descending=descending, stable=stable)
    result: Tensor = sort_op(x, axis=axis, descending=descending)
    return result


@function
def argsort(x: Any, axis: int = -1, descending: bool = False, stable: bool = True) -> Tensor:
    """Return the int64 positions along an axis that sort x; equal elements stay in order.

    Arguments as for `sort`.

    Raises:
        DTypeError: x is complex.
        ShapeError: axis is outside x.
        ArgumentError: axis is no int, or a flag no bool.
    """
    x, axis = _arguments(x, axis, descending=descending, stable=stable)
    result: Tensor = argsort_op(x, axis=axis, descending=descending)
    return result


def _arguments(x: Any, axis: Any, **flags: Any) -> tuple[Tensor, int]:
    x = as_tensor(x)
    for name, flag in flags.items():
        if not isinstance(flag, bool):
            raise ArgumentError(f"{name} must be True or False, got {flag!r}")
    return x, normalize_axis(axis, x.ndim)


# top_k --------------------------------------------------------------------------------------------


def _infer_top_k(
    x: TensorSpec, k: Size, axis: int, largest: bool, sorted: bool
) -> tuple[TensorSpec, TensorSpec]:
    require_kind(x, "int", "float")
    n = x.shape[axis]
    if isinstance(k, int) and isinstance(n, int) and k > n:
        raise ShapeError(f"k is {k}, but {x} has {n} elements along axis {axis}")
    shape = (*x.shape[:axis], k, *x.shape[axis + 1 :])
    return x.with_shape(shape), TensorSpec(shape, I64)


def _top_k_kernel(
    xp: Any, x: Any, k: int, axis: int, largest: bool, sorted: bool
) -> tuple[Any, Any]:
    if k > x.shape[axis]:
        raise IndexError(f"k is {k}, but there are {x.shape[axis]} elements along axis {axis}")
    rows = xp.moveaxis(x, axis, -1)
    places = _partition_top_k(xp, rows, k, largest)
    if places is None:  # k is a large part of the axis, or there are NaN: sort everything
        places = _argsort_kernel(xp, rows, rows.ndim - 1, largest)[..., :k]
        if not sorted:
            places = xp.sort(places, axis=-1)
    elif sorted:
        values = xp.take_along_axis(rows, places, -1)
        order = _argsort_kernel(xp, values, rows.ndim - 1, largest)
        places = xp.take_along_axis(places, order, -1)
    values = xp.take_along_axis(rows, places, -1)
    return tuple(xp.ascontiguousarray(xp.moveaxis(a, -1, axis)) for a in (values, places))


def _partition_top_k(xp: Any, rows: Any, k: int, largest: bool) -> Any:
    """Return the positions of the k largest (or smallest) on the last axis, in order of position.

    Ties at the k-th value go to the lowest positions. None if partitioning would not be faster than
    sorting, or if NaN make comparisons unreliable.
    """
    n = rows.shape[-1]
    if not 0 < k <= n // 4 or not rows.size:
        return None
    if xp is not np and rows.dtype.kind == "f" and bool(xp.isnan(rows).any()):
        return None  # CuPy's partition does not put NaN last
    edge = n - k if largest else k - 1
    kth = xp.partition(rows, edge, axis=-1)[..., edge : edge + 1]
    inside = rows >= kth if largest else rows <= kth
    beyond = rows > kth if largest else rows < kth
    if int(xp.count_nonzero(inside)) != k * (rows.size // n):
        equals = inside & ~beyond
        missing = k - xp.count_nonzero(beyond, axis=-1)[..., None]
        inside = beyond | (equals & (xp.cumsum(equals, axis=-1) <= missing))
        if int(xp.count_nonzero(inside)) != k * (rows.size // n):
            return None  # comparisons with NaN are false
    return xp.nonzero(inside)[-1].reshape(*rows.shape[:-1], k)


_top_k = register(
    Op(
        "top_k",
        infer=_infer_top_k,
        kernel=_top_k_kernel,
        vjp=lambda gs, ys, x, k, axis, largest, sorted: (
            _scatter_cotangent(gs[0], x, ys[1], axis) if is_inexact(x.dtype) else None,
        ),
        batch=along("axis"),
        sharding=axis_sharding.top_k_rule,
        cost=_sort_cost,
        samples=(
            sample(F, k=2, axis=1, largest=True, sorted=True),
            sample(CUBE, k=1, axis=2, largest=False, sorted=True),
            sample(CUBE, k=3, axis=0, largest=True, sorted=False),
            sample(INT, k=0, axis=0, largest=True, sorted=True),
        ),
    )
)


@function
def top_k(
    x: Any, k: Size, axis: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the k largest (or smallest) elements along an axis, and their int64 positions.

    Of equal elements the first come first. NaN counts as the largest.

    Args:
        x: ints or floats.
        k: an int, or the size of another tensor.
        largest: False for the smallest.
        sorted: order by value, the extreme one first; otherwise by position.

    Raises:
        DTypeError: x is bool or complex.
        ShapeError: axis is outside x, or k exceeds its size.
        ArgumentError: k is no int >= 0.
    """
    x, axis = _arguments(x, axis, largest=largest, sorted=sorted)
    k = int(k) if isinstance(k, np.integer) else k
    if isinstance(k, bool) or not isinstance(k, int | Dim) or (isinstance(k, int) and k < 0):
        raise ArgumentError(f"k must be an int from 0 to the size of the axis, got {k!r}")
    values, places = _top_k(x, k=k, axis=axis, largest=largest, sorted=sorted)
    return values, places


# Running extrema ----------------------------------------------------------------------------------


def _running_places(xp: Any, y: Any, x: Any, axis: int) -> Any:
    """Return the position at which each running extremum was last attained."""
    shape = [1] * x.ndim
    shape[axis] = x.shape[axis]
    here = xp.arange(x.shape[axis]).reshape(shape)
    attained = (x == y) | (x != x)
    return xp.maximum.accumulate(xp.where(attained, here, 0), axis=axis)


_running_extremum_places = register(
    Op(
        "running_extremum_places",
        infer=lambda y, x, axis: x.with_dtype(I64),
        kernel=_running_places,
        batch=along("axis"),
        sharding=sharding.row_rule("axis"),
        cost=lambda y, x, axis: Cost(flops=x.size * 4),
        samples=(sample(F, F, axis=1), sample(CUBE, CUBE, axis=0)),
        device_kinds=("cpu",),  # cupy's ufuncs do not accumulate extrema
    )
)


def _infer_running(x: TensorSpec, axis: int) -> TensorSpec:
    require_kind(x, "int", "float")
    return x


def _running_extremum(name: str, ufunc: str, combined: str) -> Op:
    return register(
        Op(
            name,
            infer=_infer_running,
            kernel=lambda xp, x, axis: getattr(xp, ufunc).accumulate(x, axis=axis),
            into=lambda xp, out, x, axis: getattr(xp, ufunc).accumulate(x, axis=axis, out=out),
            vjp=lambda g, y, x, axis: (
                _scatter_cotangent(g, x, _running_extremum_places(y, x, axis=axis), axis)
                if is_inexact(x.dtype)
                else None,
            ),
            batch=along("axis"),
            sharding=axis_sharding.cumulative_rule(combined),
            cost=lambda x, axis: Cost(flops=x.size),
            samples=(sample(F, axis=1), sample(CUBE, axis=0), sample(INT, axis=0)),
            device_kinds=("cpu",),
        )
    )


_cummax = _running_extremum("cummax", "maximum", "maximum")
_cummin = _running_extremum("cummin", "minimum", "minimum")


@function
def cummax(x: Any, axis: int = -1) -> Tensor:
    """Return the largest of each element and those before it along an axis.

    Of equal elements the last one has the gradient.

    Raises:
        DTypeError: x is bool or complex.
        ShapeError: axis is outside x.
    """
    x, axis = _arguments(x, axis)
    result: Tensor = _cummax(x, axis=axis)
    return result


@function
def cummin(x: Any, axis: int = -1) -> Tensor:
    """Return the smallest of each element and those before it along an axis.

    Of equal elements the last one has the gradient.

    Raises:
        DTypeError: x is bool or complex.
        ShapeError: axis is outside x.
    """
    x, axis = _arguments(x, axis)
    result: Tensor = _cummin(x, axis=axis)
    return result
