"""Variance and standard deviation over axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from graphflow.errors import ArgumentError
from graphflow.ir.op import (
    FUNCTIONS,
    Op,
    Tensor,
    error_location,
    function,
    register,
    sample,
)
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.roots import divide_by_root
from graphflow.ops.base.shape_rules import (
    apply_slope,
    restore_reduced_axes,
)
from graphflow.ops.kernels.fusion.row_ops import over_axes, row_kernel
from graphflow.ops.reductions.reduce import (
    CUBE,
    Axes,
    F,
    as_float,
    divide_by_count,
    element_count,
    infer_reduction,
    mean,
    normalize_arguments,
    per_element,
    sum,
)
from graphflow.ops.sharding import row_ops as row_sharding


def _variance(xp: Any, x: Any, axis: Axes, keepdims: bool, correction: float) -> Any:
    centred = x - xp.mean(x)
    return xp.sum(centred * centred) / (xp.count(x) - correction)


def _deviation(xp: Any, x: Any, axis: Axes, keepdims: bool, correction: float) -> Any:
    return xp.sqrt(_variance(xp, x, axis, keepdims, correction))


def _var_vjp(
    g: Tensor, y: Tensor, x: Tensor, axis: Axes, keepdims: bool, correction: float
) -> tuple[Tensor]:
    g = restore_reduced_axes(g, x.shape, axis, keepdims)
    return (
        divide_by_count(g * 2, element_count(x.shape, axis), correction)
        * (x - mean(x, axis, True)),
    )


_var = register(
    Op(
        "var",
        infer=lambda x, axis, keepdims, correction: infer_reduction("float", empty=True)(
            x, axis, keepdims
        ),
        kernel=row_kernel(_variance, over_axes),
        expr=_variance,
        rows=over_axes,
        vjp=_var_vjp,
        batch=batching.along("axis"),
        sharding=row_sharding.reduction_rule(row_sharding.variance),
        cost=per_element(4),
        autocast="high",
        samples=(
            sample(F, axis=(0,), keepdims=False, correction=0.0),
            sample(F, axis=(1,), keepdims=True, correction=1.0),
            sample(CUBE, axis=(0, 2), keepdims=False, correction=1.0),
        ),
    )
)


def reduction_jvp_from_slope(
    vjp: Callable[..., Sequence[Tensor | None]],
) -> Callable[..., Tensor | None]:
    """Return the jvp of a reduction to real numbers, made of its slope (see `jvp_from_slopes`)."""

    def jvp(
        tangents: Sequence[Tensor], y: Tensor, x: Tensor, axis: Axes, keepdims: bool, **attrs: Any
    ) -> Tensor | None:
        ones = FUNCTIONS["full_like"](y, 1)
        (slope,) = vjp(ones, y, x, axis=axis, keepdims=keepdims, **attrs)
        if slope is None:
            return None
        return sum(apply_slope(slope, tangents[0]), axis, keepdims)

    return jvp


def _std_vjp(
    g: Tensor, y: Tensor, x: Tensor, axis: Axes, keepdims: bool, correction: float
) -> tuple[Tensor]:
    shared = divide_by_count(g, element_count(x.shape, axis), correction)
    widen = partial(restore_reduced_axes, shape=x.shape, axes=axis, keepdims=keepdims)
    return (divide_by_root(shared, y, x - mean(x, axis, True), widen),)


_std = register(
    Op(
        "std",
        infer=_var.infer,
        kernel=row_kernel(_deviation, over_axes),
        expr=_deviation,
        rows=over_axes,
        vjp=_std_vjp,
        jvp=reduction_jvp_from_slope(_std_vjp),
        batch=_var.batch,
        sharding=row_sharding.reduction_rule(row_sharding.deviation),
        cost=per_element(4),
        autocast=_var.autocast,
        samples=_var.samples,
    )
)


def _require_correction(correction: Any) -> None:
    if isinstance(correction, bool) or not isinstance(correction, int | float):
        raise ArgumentError(f"correction must be a number, got {correction!r}")


@function
def var(
    x: Any,
    axis: Any = None,
    keepdims: bool = False,
    correction: float = 0.0,
    name: str | None = None,
) -> Tensor:
    """Compute the variance over axes (None: all): Σ (x - mean)² / (count - correction).

    Args:
        x: floats; ints and bools count as float64.
        correction: 0 for the population's variance, 1 for the unbiased one.

    Raises:
        ShapeError: an axis is outside x.
        ArgumentError: an axis is given twice, or correction is no number.
    """
    x, axes = normalize_arguments("var", x, axis, keepdims)
    with error_location("var"):
        _require_correction(correction)
    result: Tensor = _var(
        as_float(x), axis=axes, keepdims=keepdims, correction=float(correction), name=name
    )
    return result


@function
def std(
    x: Any,
    axis: Any = None,
    keepdims: bool = False,
    correction: float = 0.0,
    name: str | None = None,
) -> Tensor:
    """Compute the standard deviation over axes (None: all), the root of `var`.

    Where it is 0, its gradient is 0, as in torch. Arguments as for `var`.

    Raises:
        ShapeError: an axis is outside x.
        ArgumentError: an axis is given twice, or correction is no number.
    """
    x, axes = normalize_arguments("std", x, axis, keepdims)
    with error_location("std"):
        _require_correction(correction)
    result: Tensor = _std(
        as_float(x), axis=axes, keepdims=keepdims, correction=float(correction), name=name
    )
    return result
