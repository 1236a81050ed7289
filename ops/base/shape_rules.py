"""Shape rules, argument checks and parts of gradients that several op families share."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor, error_location
from graphflow.ir.spec import Shape, TensorSpec, broadcast_shapes, kind, show_shape


def same(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """Infer the broadcast shape of the inputs and the dtype of the first."""
    return TensorSpec(broadcast_shapes(x.shape, *(o.shape for o in others)), x.dtype)


def same_float(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """Infer as `same`, for floats only."""
    require_kind(x, "float")
    return same(x, *others)


def same_inexact(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """Infer as `same`, for floats and complex numbers."""
    require_kind(x, "float", "complex")
    return same(x, *others)


def same_numeric(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """Infer as `same`, for ints and floats: the numbers that have an order."""
    require_kind(x, "int", "float")
    return same(x, *others)


def same_number(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """Infer as `same`, for ints, floats and complex numbers."""
    require_kind(x, "int", "float", "complex")
    return same(x, *others)


def bool_result(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    """Infer as `same`, with a bool result."""
    return same(x, *others).with_dtype(bool)


def require_kind(x: TensorSpec, *kinds: str) -> None:
    """Refuse dtypes that are of none of the kinds "bool", "int", "float", "complex".

    Raises:
        DTypeError: x is of another kind.
    """
    if kind(x.dtype) not in kinds:
        remedy = "convert with .astype"
        if kind(x.dtype) == "complex":
            remedy = "take gf.real, gf.imag or gf.abs (complex numbers have no order)"
        raise DTypeError(f"expected {' or '.join(kinds)} tensors, got {x.dtype}; {remedy}")


def normalize_axis(axis: Any, rank: int) -> int:
    """Return an axis as counted from the front.

    Raises:
        ArgumentError: axis is no int.
        ShapeError: axis is outside [-rank, rank).
    """
    if isinstance(axis, bool) or not isinstance(axis, int | np.integer):
        raise ArgumentError(f"an axis must be an int, got {axis!r}")
    if not -rank <= axis < rank:
        raise ShapeError(f"axis {axis} is outside a tensor of rank {rank}")
    return int(axis) % rank


def normalize_axes(axis: Any, rank: int) -> tuple[int, ...]:
    """Return axes as counted from the front, sorted; None means all axes.

    Raises:
        ArgumentError: an axis is no int, or is given twice.
        ShapeError: an axis is outside [-rank, rank).
    """
    if axis is None:
        return tuple(range(rank))
    given = tuple(axis) if isinstance(axis, tuple | list) else (axis,)
    axes = tuple(sorted(normalize_axis(a, rank) for a in given))
    if len(set(axes)) != len(axes):
        raise ArgumentError(f"axes {given} name an axis twice")
    return axes


def require_int(what: str, value: Any) -> int:
    """Return a user's argument as an int.

    Raises:
        ArgumentError: the value is no int.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentError(f"{what} must be an int, got {value!r}")
    return int(value)


def require_list(what: str, value: Any) -> list[Any]:
    """Return a user's argument as a list.

    Raises:
        ArgumentError: the value is neither a list nor a tuple.
    """
    if not isinstance(value, list | tuple):
        raise ArgumentError(f"{what} must be a list or tuple, got {value!r}")
    return list(value)


def reduced_shape(shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Shape:
    """Return the shape that a reduction over normalised axes gives."""
    if keepdims:
        return tuple(1 if i in axes else s for i, s in enumerate(shape))
    return tuple(s for i, s in enumerate(shape) if i not in axes)


def unbroadcast(g: Tensor, shape: Shape) -> Tensor:
    """Sum a cotangent over the axes along which an input of the given shape was broadcast."""
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
    """Return the complex conjugate of x; a real tensor is returned as it is, at no cost."""
    return FUNCTIONS["conj"](x) if kind(x.dtype) == "complex" else x


def zeros_like(x: Tensor) -> Tensor:
    """Return a cotangent of zeros of the shape and dtype of x, for an input without influence."""
    return FUNCTIONS["full_like"](x, x.dtype.type(0).item())  # type: ignore[no-any-return]


def is_zeros(g: Tensor) -> bool:
    """Return True if a cotangent is zero by construction, so that a vjp may skip its part."""
    return g.node.op.name == "fill" and not g.node.attrs["value"]


def reciprocal_or_zero(x: Tensor) -> Tensor:
    """Return 1 / x, and 0 where x is 0, with a finite gradient there."""
    zero = x == 0
    result: Tensor = FUNCTIONS["where"](zero, 0.0, 1.0 / FUNCTIONS["where"](zero, 1.0, x))
    return result


def product_or_zero(factor: Tensor, x: Tensor) -> Tensor:
    """Return factor·x, and 0 where the factor is 0, even if x is infinite or NaN there."""
    counts = FUNCTIONS["logical_or"](factor != 0, FUNCTIONS["isfinite"](x))
    result: Tensor = factor * FUNCTIONS["where"](counts, x, 0)
    return result


def zero_where_zero(x: Tensor, value: Tensor) -> Tensor:
    """Return a value, and 0 where x is 0, even if the value is infinite or NaN there."""
    where, equal = FUNCTIONS["where"], FUNCTIONS["equal"]
    return where(equal(x, 0), 0, value)  # type: ignore[no-any-return]


def constant_value(x: Tensor) -> Any:
    """Return the number that all elements of x have by construction, or None."""
    name, value = x.node.op.name, x.node.attrs.get("value")
    if name == "fill":
        return value
    return value.item() if name == "constant" and value is not None and value.size == 1 else None


def apply_slope(slope: Tensor, tangent: Tensor) -> Tensor:
    """Return the real tangent slope·tangent; 0 where the slope is 0, even of infinite tangents."""
    moved = product_or_zero(conj(slope), tangent)
    result: Tensor = FUNCTIONS["real"](moved) if kind(moved.dtype) == "complex" else moved
    return result


def jvp_from_slopes(vjp: Callable[..., Sequence[Tensor | None]]) -> Callable[..., Tensor | None]:
    """Return the jvp of an elementwise op with real results, made of its slopes: its vjp of ones.

    The transposed vjp would divide 0 by 0 where the vjp selects the slope 0.
    """

    def jvp(tangents: Sequence[Tensor | None], y: Tensor, *inputs: Tensor) -> Tensor | None:
        slopes = vjp(FUNCTIONS["full_like"](y, 1), y, *inputs)
        pairs = zip(slopes, tangents, strict=True)
        parts = [apply_slope(s, t) for s, t in pairs if s is not None and t is not None]
        return functools.reduce(operator.add, parts) if parts else None

    return jvp


def require_finite(op_name: str, what: str, value: Any) -> float:
    """Return a number that a user gave to an op as a float.

    Raises:
        ArgumentError: not a finite number; the message names the op and the user's line.
    """
    with error_location(op_name):
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ArgumentError(f"{what} must be a finite number, got {value!r}")
    return float(value)


MAX_BUILD_BYTES = 1 << 31
"""Most bytes of a constant that a function computes while the graph is built."""


def require_buildable(*sizes: int) -> None:
    """Refuse a float64 array that is too large to make while the graph is built.

    Raises:
        ArgumentError: the array has more than MAX_BUILD_BYTES.
    """
    need = 8 * math.prod(map(int, sizes))
    if need > MAX_BUILD_BYTES:
        raise ArgumentError(
            f"{show_shape(sizes)} takes {need / 2**30:.4g} GiB while the graph is built, which has "
            f"{MAX_BUILD_BYTES / 2**30:.4g} GiB for this; give a smaller size, or compute the "
            "numbers from gf.arange, which runs with the step"
        )


def keepdims_shape(shape: Shape, axes: tuple[int, ...]) -> Shape:
    """Return the shape that a reduction gives if its axes stay with size 1."""
    return reduced_shape(shape, axes, keepdims=True)


def restore_reduced_axes(g: Tensor, shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """Give the result of a reduction of `shape`, or its cotangent, the reduced axes with size 1."""
    if keepdims or not axes:
        return g
    return FUNCTIONS["reshape"](g, keepdims_shape(shape, axes))  # type: ignore[no-any-return]


def kernel_like_first(into: Callable[..., None]) -> Callable[..., Any]:
    """Return the kernel of an op whose output has the first input's spec, made of its `into`."""

    def kernel(xp: Any, x: Any, *others: Any, **attrs: Any) -> Any:
        out = xp.empty(x.shape, x.dtype)
        into(xp, out, x, *others, **attrs)
        return out

    return kernel


def kernel_from_into(
    infer: Callable[..., TensorSpec], into: Callable[..., None]
) -> Callable[..., Any]:
    """Return the kernel of an op, made of its shape rule and its `into`."""

    def kernel(xp: Any, *arrays: Any, **attrs: Any) -> Any:
        result = infer(*(TensorSpec(a.shape, np.dtype(a.dtype)) for a in arrays), **attrs)
        out = xp.empty(result.shape, result.dtype)
        into(xp, out, *arrays, **attrs)
        return out

    return kernel
