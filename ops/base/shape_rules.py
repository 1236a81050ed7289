"""Shape rules and gradient pieces that several families share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.ir.op import FUNCTIONS, Tensor
from graphflow.ir.spec import Shape, TensorSpec, broadcast_shapes, is_half, kind, show_shape


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


def truth(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
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


def whole(what: str, value: Any) -> int:
    """What the user gave as an int.

    Raises:
        ArgumentError: something else.
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ArgumentError(f"{what} is an int, not {value!r}")
    return int(value)


def listed(what: str, value: Any) -> list[Any]:
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


_DEEP = 8
"""Nested products in which `divided_out` looks for a factor."""


def divided_out(g: Tensor, y: Tensor, deep: int = _DEEP) -> Tensor | None:
    """Return g / y without a division where g is a product that has y as a factor, else None."""
    g = _unrounded(g)
    if _is_same(g, y):
        return FUNCTIONS["full_like"](y, 1)  # type: ignore[no-any-return]
    name, inputs = g.node.op.name, g.node.inputs
    if not deep or (g.node.serial <= y.node.serial and not _is_of_halves(y)):
        return None
    if name == "square" and _is_same(_unrounded(inputs[0]), y):
        return y
    if name in ("multiply", "divide", "negative"):
        for i in range(1 if name == "divide" else len(inputs)):
            part = divided_out(inputs[i], y, deep - 1)
            if part is not None:
                return FUNCTIONS[name](*inputs[:i], part, *inputs[i + 1 :])  # type: ignore[no-any-return]
    elif name in ("add", "subtract") and all(t.shape == y.shape for t in inputs):
        parts = [divided_out(t, y, deep - 1) for t in inputs]
        if all(part is not None for part in parts):
            return FUNCTIONS[name](*parts)  # type: ignore[no-any-return]
    return None


def _unrounded(x: Tensor) -> Tensor:
    """What a tensor was before conversions from and to 16-bit floats."""
    while x.node.op.name == "astype" and any(is_half(t.dtype) for t in (x, x.node.inputs[0])):
        x = x.node.inputs[0]
    return x


def _is_of_halves(y: Tensor) -> bool:
    """Return True if y is computed in float32 from 16-bit floats, perhaps for the second time."""
    return any(_unrounded(x) is not x for x in y.node.inputs)


def _is_same(x: Tensor, y: Tensor) -> bool:
    """Return True if x is y, or what was stored of it in 16 bits."""
    a, b = x.node, y.node
    return x is y or (
        is_half(x.dtype)
        and (a.op, a.attrs) == (b.op, b.attrs)
        and all(_unrounded(s) is _unrounded(t) for s, t in zip(a.inputs, b.inputs, strict=True))
    )


def over_root(
    g: Tensor, y: Tensor, x: Tensor, widen: Callable[[Tensor], Tensor] = lambda t: t
) -> Tensor:
    """Return x·g/y for the cotangent g of y, a root of a sum of squares of x: 0 where y is 0.

    At 0 a root has no second derivative, and that of this result is NaN. The square of a root has
    one: where g has y as a factor, as that of y² has, the factor is left out.

    Args:
        widen: gives g and y the axes of x.
    """
    quotient = divided_out(g, y)
    if quotient is not None:
        product: Tensor = x * widen(quotient)
        return product
    g, y = widen(g), widen(y)
    result: Tensor = FUNCTIONS["where"](y == 0, 0, x * (g / y))
    return result


BUILT = 1 << 31
"""Bytes that a function may take while the graph is built, for numbers that it puts into it."""


def require_buildable(*sizes: int) -> None:
    """Refuse an array of float64 that is made while the graph is built and is too large for that.

    Raises:
        ArgumentError: it is.
    """
    need = 8 * math.prod(map(int, sizes))
    if need > BUILT:
        raise ArgumentError(
            f"{show_shape(sizes)} takes {need / 2**30:.4g} GiB while the graph is built, which has "
            f"{BUILT / 2**30:.4g} GiB for this; give a smaller size, or compute the numbers from "
            "gf.arange, which runs with the step"
        )


def kept_shape(shape: Shape, axes: tuple[int, ...]) -> Shape:
    """The shape after a reduction that keeps its axes, with size 1."""
    return reduced_shape(shape, axes, keepdims=True)


def keep_axes(g: Tensor, shape: Shape, axes: tuple[int, ...], keepdims: bool) -> Tensor:
    """What a reduction of `shape` gave (or its cotangent) with the reduced axes as size 1."""
    if keepdims or not axes:
        return g
    return FUNCTIONS["reshape"](g, kept_shape(shape, axes))  # type: ignore[no-any-return]


def like_first(into: Callable[..., None]) -> Callable[..., Any]:
    """The kernel of an op whose output has the spec of its first input, from its `into`."""

    def kernel(xp: Any, x: Any, *others: Any, **attrs: Any) -> Any:
        out = xp.empty(x.shape, x.dtype)
        into(xp, out, x, *others, **attrs)
        return out

    return kernel
