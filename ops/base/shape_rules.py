"""Shape rules and gradient pieces that several families share."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.ir.spec import Shape, TensorSpec, broadcast_shapes, kind, show_shape


def same(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """Elementwise over broadcast inputs of one dtype."""
    return TensorSpec(broadcast_shapes(x.shape, *(o.shape for o in others)), x.dtype)


def same_float(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """As `same`, for floats only."""
    require_kind(x, "float")
    return same(x, *others)


def same_inexact(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """As `same`, for floats and complex numbers."""
    require_kind(x, "float", "complex")
    return same(x, *others)


def same_numeric(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """As `same`, for ints and floats: numbers that have an order."""
    require_kind(x, "int", "float")
    return same(x, *others)


def same_number(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """As `same`, for numbers of any kind."""
    require_kind(x, "int", "float", "complex")
    return same(x, *others)


def bool_result(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """As `same`, with a bool result."""
    return same(x, *others).with_dtype(bool)


def require_kind(x: TensorSpec, *kinds: str) -> None:
    """Refuse dtypes of other kinds ("bool", "int", "float", "complex")."""
    if kind(x.dtype) not in kinds:
        remedy = "convert with .astype"
        if kind(x.dtype) == "complex":
            remedy = "take gf.real, gf.imag or gf.abs (complex numbers have no order)"
        raise DTypeError(f"takes {' or '.join(kinds)} tensors, not {x.dtype}; {remedy}")


def normalize_axis(axis: Any, rank: int) -> int:
    """An axis counted from the front.

    Raises:
        ArgumentError: no int, or outside [-rank, rank).
    """
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise ArgumentError(f"an axis is an int, not {axis!r}")
    if not -rank <= axis < rank:
        raise ShapeError(f"axis {axis} is outside a tensor of rank {rank}")
    return int(axis) % rank


def normalize_axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Axes counted from the front, sorted; None means all.

    Raises:
        ArgumentError, ShapeError: not axes of the tensor, or one given twice.
    """
    if axis is None:
        return tuple(range(rank))
    given = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    axes = tuple(sorted(normalize_axis(a, rank) for a in given))
    if len(set(axes)) != len(axes):
        raise ArgumentError(f"axes {given} name an axis twice")
    return axes


def require_int(what: str, value: Any) -> int:
    """What the user gave as an int.

    Raises:
        ArgumentError: something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentError(f"{what} is an int, not {value!r}")
    return int(value)


def require_list(what: str, value: Any) -> list[Any]:
    """What the user gave as a list or tuple.

    Raises:
        ArgumentError: something else.
    """
    if not isinstance(value, list | tuple):
        raise ArgumentError(f"{what} are a list or tuple, not {value!r}")
    return list(value)


def reduced_shape(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Shape:
    """The shape after a reduction over normalised axes."""
    if keepdims:
        return tuple(1 if i in axes else s for i, s in enumerate(shape))
    return tuple(s for i, s in enumerate(shape) if i not in axes)


def unbroadcast(g: Tensor, shape: Shape) -> Tensor:
    """Sum a cotangent over the axes along which an input of `shape` was broadcast to it."""
    if g.shape == shape:
        return g
    extra = g.ndim - len(shape)
    if extra < 0:
        raise ShapeError(f"{show_shape(g.shape)} does not reduce to {show_shape(shape)}")
    axes = tuple(range(extra)) + tuple(
        i + extra for i, s in enumerate(shape) if s == 1 and g.shape[i + extra] != 1
    )
    if axes:
        g = FUNCTIONS["sum"](g, axis=axes, keepdims=True)
    return FUNCTIONS["reshape"](g, shape) if extra else g


def conj(x: Tensor) -> Tensor:
    """The complex conjugate; a real tensor itself, so that real gradients cost nothing more."""
    return FUNCTIONS["conj"](x) if kind(x.dtype) == "complex" else x


def zeros_like(x: Tensor) -> Tensor:
    """A cotangent of zeros, for an input that does not matter; x may be of any dtype."""
    return FUNCTIONS["full_like"](x, x.dtype.type(0).item())  # type: ignore[no-any-return]


def is_zeros(g: Tensor) -> bool:
    """Whether a cotangent is one of zeros by construction: what depends on it may be left out."""
    return g.node.op.name == "fill" and not g.node.attrs["value"]


def reciprocal_or_zero(x: Tensor) -> Tensor:
    """1 / x, and 0 where x is 0; its gradient is finite there, too."""
    zero = x == 0
    result: Tensor = FUNCTIONS["where"](zero, 0.0, 1.0 / FUNCTIONS["where"](zero, 1.0, x))
    return result


def product_or_zero(factor: Tensor, x: Tensor) -> Tensor:
    """factor·x, and 0 where the factor is 0 and x infinite or NaN."""
    counts = FUNCTIONS["logical_or"](factor != 0, FUNCTIONS["isfinite"](x))
    result: Tensor = factor * FUNCTIONS["where"](counts, x, 0)
    return result


def constant_value(x: Tensor) -> Any:
    """The number that all elements of x are by construction, or None."""
    name, value = x.node.op.name, x.node.attrs.get("value")
    if name == "fill":
        return value
    return value.item() if name == "constant" and value is not None and value.size == 1 else None


def apply_slope(slope: Tensor, tangent: Tensor) -> Tensor:
    """Return the real tangent of what has a slope: 0 where that is 0, of infinite tangents, too."""
    moved = product_or_zero(conj(slope), tangent)
    result: Tensor = FUNCTIONS["real"](moved) if kind(moved.dtype) == "complex" else moved
    return result


def jvp_from_slopes(vjp: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Tensor | None]:
    """The jvp of an elementwise op to real numbers, by its slopes, which are its vjp of ones.

    The transpose of a vjp would divide 0 by 0 where the vjp selects the slope 0.
    """

    def jvp(tangents: Sequence[Tensor | None], y: Tensor, *inputs: Tensor) -> Tensor | None:
        slopes = vjp(FUNCTIONS["full_like"](y, 1), y, *inputs)
        pairs = zip(slopes, tangents, strict=True)
        parts = [apply_slope(s, t) for s, t in pairs if s is not None and t is not None]
        return functools.reduce(operator.add, parts) if parts else None

    return jvp


MAX_BUILD_BYTES = 1 << 31
"""Bytes that a function may take while the graph is built, for numbers that it puts into it."""


def require_buildable(*sizes: int) -> None:
    """Refuse an array of float64 that is made while the graph is built and is too large for that.

    Raises:
        ArgumentError: it is.
    """
    need = 8 * math.prod(map(int, sizes))
    if need > MAX_BUILD_BYTES:
        raise ArgumentError(
            f"{show_shape(sizes)} takes {need / 2**30:.4g} GiB while the graph is built, which has "
            f"{MAX_BUILD_BYTES / 2**30:.4g} GiB for this; give a smaller size, or compute the "
            "numbers from gf.arange, which runs with the step"
        )


def keepdims_shape(shape: Shape, axes: tuple[int, ...]) -> Shape:
    """The shape after a reduction that keeps its axes, with size 1."""
    return reduced_shape(shape, axes, keepdims=True)


def restore_reduced_axes(g: Tensor, shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """What a reduction of `shape` gave (or its cotangent) with the reduced axes as size 1."""
    if keepdims or not axes:
        return g
    return FUNCTIONS["reshape"](g, keepdims_shape(shape, axes))  # type: ignore[no-any-return]


def kernel_like_first(into: Callable[..., None]) -> Callable[..., Any]:
    """The kernel of an op whose output has the spec of its first input, from its `into`."""

    def kernel(xp: Any, x: Any, *others: Any, **attrs: Any) -> Any:
        out = xp.empty(x.shape, x.dtype)
        into(xp, out, x, *others, **attrs)
        return out

    return kernel
