"""Sums, means, any and all over axes; and parts that other reductions share.

The ops take normalised axes (a sorted tuple); the public functions of the same names normalise the
user's arguments. Gradients spread a cotangent back over the reduced axes. Factors that depend on a
count read it from the spec if it is known, otherwise from `size_of` when the step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import (
    FUNCTIONS,
    Cost,
    Op,
    Tensor,
    as_tensor,
    error_location,
    function,
    register,
    sample,
)
from graphflow.ir.spec import (
    Shape,
    Size,
    TensorSpec,
    as_dtype,
    is_inexact,
    kind,
    product,
    spec,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import (
    normalize_axes,
    reduced_shape,
    require_kind,
    restore_reduced_axes,
)
from graphflow.ops.kernels.conv import batch_norm as channels
from graphflow.ops.kernels.fusion.row_ops import over_axes
from graphflow.ops.pointwise.convert import astype, size_of
from graphflow.ops.sharding import rules as sharding

Axes = tuple[int, ...]

F = spec("float32", (3, 4))
CUBE = spec("float32", (2, 3, 2))
THIN = spec("float32", (1, 3))
SCALAR = spec("float32", ())
INT = spec("int32", (3, 4))
BOOL = spec("bool", (3, 4))
COMPLEX = spec("complex64", (3, 4))

FLOAT_SAMPLES = (
    sample(F, axis=(0,), keepdims=False),
    sample(F, axis=(1,), keepdims=True),
    sample(CUBE, axis=(0, 2), keepdims=False),
    sample(THIN, axis=(0, 1), keepdims=False),
    sample(SCALAR, axis=(), keepdims=False),
)


def normalize_arguments(op_name: str, x: Any, axis: Any, keepdims: Any) -> tuple[Tensor, Axes]:
    """Return x as a tensor and its normalised axes; errors name the op and the user's line."""
    x = as_tensor(x)
    with error_location(op_name):
        if not isinstance(keepdims, bool):
            raise ArgumentError(f"keepdims must be True or False, got {keepdims!r}")
        return x, normalize_axes(axis, x.ndim)


def element_count(shape: Shape, axes: Axes) -> Size:
    """Return the number of elements that a reduction over axes combines."""
    return product(shape[a] for a in axes)


def broadcast_cotangent(g: Tensor, x: Tensor, axes: Axes, keepdims: bool) -> Tensor:
    """Repeat the cotangent of a reduction's result over the axes of its input."""
    g = restore_reduced_axes(g, x.shape, axes, keepdims)
    result: Tensor = FUNCTIONS["broadcast_to"](g, x.shape)
    return result


def divide_by_count(g: Tensor, size: Size, correction: float = 0.0) -> Tensor:
    """Return g / (size - correction), for known and unknown sizes."""
    if isinstance(size, int):
        known: Tensor = g / float(size - correction)
        return known
    number: Tensor = size_of(size=size, dtype=g.dtype.name)
    result: Tensor = g / (number - correction if correction else number)
    return result


def per_element(flops: int) -> Callable[..., Cost]:
    """Return a cost rule of `flops` for each element of the first input."""
    return lambda x, *others, **attrs: Cost(flops=x.size * flops)


def infer_reduction(
    *kinds: str, dtype: Any = None, empty: bool = False
) -> Callable[..., TensorSpec]:
    """Return a shape rule for (x, axis, keepdims), for x of some kinds.

    Args:
        dtype: dtype of the result; default: that of x.
        empty: allow reductions over no elements.
    """

    def infer(x: TensorSpec, axis: Axes, keepdims: bool) -> TensorSpec:
        require_kind(x, *kinds)
        if not empty:
            require_elements(x, axis)
        return TensorSpec(reduced_shape(x.shape, axis, keepdims), np.dtype(dtype or x.dtype))

    return infer


def require_elements(x: TensorSpec, axes: Axes) -> None:
    """Refuse a reduction over no elements if it has no value for none."""
    if element_count(x.shape, axes) == 0:
        raise ShapeError(f"there are no elements to reduce in {x} over axes {axes}")


def sum_dtype(x: TensorSpec, dtype: str | None) -> np.dtype[Any]:
    """Return the dtype of a sum: 64 bits for bools and ints (array API), else that of x."""
    if dtype is not None:
        return as_dtype(dtype)
    if is_inexact(x.dtype):
        return x.dtype
    return np.dtype("uint64" if x.dtype.kind == "u" else "int64")


# Sums -----------------------------------------------------------------------------------------


def infer_sum(x: TensorSpec, axis: Axes, keepdims: bool, dtype: str | None = None) -> TensorSpec:
    return TensorSpec(reduced_shape(x.shape, axis, keepdims), sum_dtype(x, dtype))


def _sum_kernel(xp: Any, x: Any, axis: Axes, keepdims: bool, dtype: str | None = None) -> Any:
    channel, wanted = _summed_channel(xp, x, axis), sum_dtype(x, dtype)
    if channel is None or wanted != x.dtype:
        return xp.sum(x, axis=axis, keepdims=keepdims, dtype=wanted)
    out = xp.empty(reduced_shape(x.shape, axis, keepdims), wanted)
    channels.sum_channels(out, x, channel)
    return out


def _sum_into(
    xp: Any, out: Any, x: Any, axis: Axes, keepdims: bool, dtype: str | None = None
) -> None:
    channel = _summed_channel(xp, x, axis)
    if channel is None or out.dtype != x.dtype:
        xp.sum(x, axis=axis, keepdims=keepdims, dtype=out.dtype, out=out)
    else:
        channels.sum_channels(out, x, channel)


def _summed_channel(xp: Any, x: Any, axis: Axes) -> int | None:
    """Return the one axis that a sum keeps, between others, if there is a kernel for it."""
    kept = [i for i in range(x.ndim) if i not in axis]
    if len(kept) != 1 or not 0 < kept[0] < x.ndim - 1 or not x.size:
        return None
    return kept[0] if channels.is_supported(xp, x, kept[0]) else None


def _sum_vjp(
    g: Tensor, y: Tensor, x: Tensor, axis: Axes, keepdims: bool, dtype: str | None = None
) -> tuple[Tensor | None]:
    if not is_inexact(x.dtype):
        return (None,)
    return (broadcast_cotangent(astype(g, x.dtype), x, axis, keepdims),)


_sum = register(
    Op(
        "sum",
        infer=infer_sum,
        kernel=_sum_kernel,
        into=_sum_into,
        records=True,
        expr=lambda xp, x, axis, keepdims, dtype=None: xp.sum(x.astype(sum_dtype(x, dtype))),
        rows=over_axes,
        vjp=_sum_vjp,
        batch=batching.along("axis"),
        sharding=sharding.sum_rule,
        cost=per_element(1),
        autocast="high",
        samples=(
            *FLOAT_SAMPLES,
            sample(INT, axis=(1,), keepdims=False),
            sample(BOOL, axis=(0, 1), keepdims=False),
            sample(COMPLEX, axis=(0,), keepdims=True),
            sample(spec("float32", (0, 2)), axis=(0,), keepdims=False),
        ),
    )
)


@function
def sum(
    x: Any, axis: Any = None, keepdims: bool = False, dtype: Any = None, name: str | None = None
) -> Tensor:
    """Sum x over axes (None: all).

    Args:
        x: bools, ints, floats or complex numbers.
        dtype: dtype of the result; default: int64 for bools and ints, uint64 for unsigned ints,
            else that of x.

    Raises:
        ShapeError: an axis is outside x.
        ArgumentError: an axis is given twice.
    """
    x, axes = normalize_arguments("sum", x, axis, keepdims)
    if dtype is not None:
        x = astype(x, dtype)
        dtype = x.dtype.name if kind(x.dtype) == "int" else None
    wanted = {} if dtype is None else {"dtype": dtype}
    result: Tensor = _sum(x, axis=axes, keepdims=keepdims, name=name, **wanted)
    return result


def _mean_kernel(xp: Any, x: Any, axis: Axes, keepdims: bool) -> Any:
    total = xp.sum(x, axis=axis, keepdims=keepdims)
    return (total / element_count(x.shape, axis)).astype(x.dtype)


def _mean_into(xp: Any, out: Any, x: Any, axis: Axes, keepdims: bool) -> None:
    xp.sum(x, axis=axis, keepdims=keepdims, out=out)
    xp.divide(out, element_count(x.shape, axis), out=out)


_mean = register(
    Op(
        "mean",
        infer=infer_reduction("float", "complex", empty=True),
        kernel=_mean_kernel,
        into=_mean_into,
        expr=lambda xp, x, axis, keepdims: xp.mean(x),
        rows=over_axes,
        vjp=lambda g, y, x, axis, keepdims: (
            broadcast_cotangent(
                divide_by_count(g, element_count(x.shape, axis)), x, axis, keepdims
            ),
        ),
        batch=batching.along("axis"),
        sharding=sharding.mean_rule,
        cost=per_element(1),
        autocast="high",
        samples=(*FLOAT_SAMPLES, sample(COMPLEX, axis=(1,), keepdims=False)),
    )
)


@function
def mean(x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """Average x over axes (None: all); NaN for no elements.

    Args:
        x: floats or complex numbers; ints and bools are averaged as float64.

    Raises:
        ShapeError: an axis is outside x.
        ArgumentError: an axis is given twice.
    """
    x, axes = normalize_arguments("mean", x, axis, keepdims)
    result: Tensor = _mean(as_float(x), axis=axes, keepdims=keepdims, name=name)
    return result


def as_float(x: Tensor) -> Tensor:
    return x if is_inexact(x.dtype) else astype(x, "float64")


# Truth ----------------------------------------------------------------------------------------


def _truth(name: str) -> Op:
    return register(
        Op(
            name,
            infer=infer_reduction("bool", "int", "float", "complex", dtype=bool, empty=True),
            kernel=lambda xp, x, axis, keepdims: getattr(xp, name)(x, axis=axis, keepdims=keepdims),
            into=lambda xp, out, x, axis, keepdims: getattr(xp, name)(
                x, axis=axis, keepdims=keepdims, out=out
            ),
            expr=lambda xp, x, axis, keepdims: getattr(xp, name)(x.astype(bool)),
            rows=over_axes,
            batch=batching.along("axis"),
            sharding=sharding.reduction_rule(name),
            cost=per_element(1),
            samples=(
                sample(BOOL, axis=(0,), keepdims=False),
                sample(INT, axis=(0, 1), keepdims=True),
                sample(F, axis=(), keepdims=False),
                sample(COMPLEX, axis=(0,), keepdims=False),
            ),
        )
    )


_any, _all = _truth("any"), _truth("all")


@function
def any(x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """Return True where some element over axes (None: all) is not 0; False for no elements.

    Raises:
        ShapeError: an axis is outside x.
        ArgumentError: an axis is given twice.
    """
    x, axes = normalize_arguments("any", x, axis, keepdims)
    result: Tensor = _any(x, axis=axes, keepdims=keepdims, name=name)
    return result


@function
def all(x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """Return True where each element over axes (None: all) is not 0; True for no elements.

    Raises:
        ShapeError: an axis is outside x.
        ArgumentError: an axis is given twice.
    """
    x, axes = normalize_arguments("all", x, axis, keepdims)
    result: Tensor = _all(x, axis=axes, keepdims=keepdims, name=name)
    return result
