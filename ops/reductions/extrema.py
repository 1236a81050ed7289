"""Largest and smallest elements over axes, their indices, and logsumexp."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from graphflow.ir.op import Op, Tensor, error_location, function, register, sample
from graphflow.ir.spec import TensorSpec
from graphflow.ops.base import batching_rules as batching
from graphflow.ops.base.shape_rules import (
    normalize_axes,
    normalize_axis,
    reduced_shape,
    require_kind,
    restore_reduced_axes,
)
from graphflow.ops.kernels.fusion.row_ops import over_axes, row_kernel
from graphflow.ops.kernels.moves.arg_extrema import position_task
from graphflow.ops.pointwise.comparison import equal, isinf
from graphflow.ops.pointwise.convert import astype
from graphflow.ops.pointwise.select import minimum, where
from graphflow.ops.pointwise.transcendental import exp
from graphflow.ops.reductions.reduce import (
    CUBE,
    FLOAT_SAMPLES,
    INT,
    Axes,
    F,
    infer_reduction,
    normalize_arguments,
    per_element,
    require_elements,
    sum,
)
from graphflow.ops.sharding import row_ops as row_sharding
from graphflow.ops.sharding import rules as sharding


def _extremum_vjp(g: Tensor, y: Tensor, x: Tensor, axis: Axes, keepdims: bool) -> tuple[Tensor]:
    """Share the cotangent equally among all elements that attain the extremum."""
    g, y = (restore_reduced_axes(t, x.shape, axis, keepdims) for t in (g, y))
    attained = equal(x, y)
    ties = sum(astype(attained, x.dtype), axis, keepdims=True)
    return (where(attained, g / ties, 0),)


def _extremum_into(name: str, xp: Any, out: Any, x: Any, axis: Axes, keepdims: bool) -> None:
    if xp is np:
        getattr(np, name)(x, axis=axis, keepdims=keepdims, out=out)
    else:  # CuPy 14's min takes `out` for a dtype where it calls CUB
        xp.copyto(out, getattr(xp, name)(x, axis=axis, keepdims=keepdims))


def _extremum(name: str) -> Op:
    return register(
        Op(
            name,
            infer=infer_reduction("int", "float"),
            kernel=lambda xp, x, axis, keepdims: getattr(xp, name)(x, axis=axis, keepdims=keepdims),
            into=partial(_extremum_into, name),
            expr=lambda xp, x, axis, keepdims: getattr(xp, name)(x),
            rows=over_axes,
            vjp=_extremum_vjp,
            batch=batching.along("axis"),
            sharding=sharding.reduction_rule(name),
            cost=per_element(1),
            samples=(*FLOAT_SAMPLES, sample(INT, axis=(0,), keepdims=False)),
        )
    )


_max, _min = _extremum("max"), _extremum("min")


@function
def max(x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """Return the largest element over axes (None: all), or NaN if there is one.

    Equal elements share the gradient equally.

    Raises:
        DTypeError: x is bool or complex.
        ShapeError: an axis is outside x, or there are no elements.
        ArgumentError: an axis is given twice.
    """
    x, axes = normalize_arguments("max", x, axis, keepdims)
    result: Tensor = _max(x, axis=axes, keepdims=keepdims, name=name)
    return result


@function
def min(x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """Return the smallest element over axes (None: all), or NaN if there is one.

    Equal elements share the gradient equally.

    Raises:
        DTypeError: x is bool or complex.
        ShapeError: an axis is outside x, or there are no elements.
        ArgumentError: an axis is given twice.
    """
    x, axes = normalize_arguments("min", x, axis, keepdims)
    result: Tensor = _min(x, axis=axes, keepdims=keepdims, name=name)
    return result


def _infer_arg(x: TensorSpec, axis: int | None, keepdims: bool) -> TensorSpec:
    require_kind(x, "int", "float")
    axes = normalize_axes(axis, x.rank)
    require_elements(x, axes)
    return TensorSpec(reduced_shape(x.shape, axes, keepdims), np.dtype("int64"))


def _arg(name: str) -> Op:
    return register(
        Op(
            name,
            infer=_infer_arg,
            kernel=lambda xp, x, axis, keepdims: getattr(xp, name)(x, axis=axis, keepdims=keepdims),
            into=partial(_extremum_into, name),
            native=partial(position_task, largest=name == "argmax"),
            batch=batching.first_index,
            sharding=row_sharding.arg_extremum_rule(name.removeprefix("arg")),
            cost=per_element(1),
            samples=(
                sample(F, axis=1, keepdims=False),
                sample(F, axis=None, keepdims=True),
                sample(CUBE, axis=0, keepdims=True),
                sample(INT, axis=0, keepdims=False),
            ),
        )
    )


_argmax, _argmin = _arg("argmax"), _arg("argmin")


@function
def argmax(
    x: Any, axis: int | None = None, keepdims: bool = False, name: str | None = None
) -> Tensor:
    """Return the int64 index of the first largest element along an axis.

    Args:
        axis: None: the index in the flattened x.

    Raises:
        DTypeError: x is bool or complex.
        ShapeError: axis is outside x, or there are no elements.
    """
    return _first_index("argmax", _argmax, x, axis, keepdims, name)


@function
def argmin(
    x: Any, axis: int | None = None, keepdims: bool = False, name: str | None = None
) -> Tensor:
    """Return the int64 index of the first smallest element along an axis.

    Args:
        axis: None: the index in the flattened x.

    Raises:
        DTypeError: x is bool or complex.
        ShapeError: axis is outside x, or there are no elements.
    """
    return _first_index("argmin", _argmin, x, axis, keepdims, name)


def _first_index(
    op_name: str, op: Op, x: Any, axis: int | None, keepdims: bool, name: str | None
) -> Tensor:
    x, _ = normalize_arguments(op_name, x, axis, keepdims)
    if axis is not None:
        with error_location(op_name):
            axis = normalize_axis(axis, x.ndim)
    result: Tensor = op(x, axis=axis, keepdims=keepdims, name=name)
    return result


def _logsumexp_of(xp: Any, x: Any, axis: Axes, keepdims: bool) -> Any:
    top = xp.max(x)
    # Shift rows whose maximum is infinite by 0 instead: inf - inf would be NaN.
    top = xp.where(xp.isfinite(top), top, 0.0)
    return xp.log(xp.sum(xp.exp(x - top))) + top


def _logsumexp_vjp(g: Tensor, y: Tensor, x: Tensor, axis: Axes, keepdims: bool) -> tuple[Tensor]:
    g, y = (restore_reduced_axes(t, x.shape, axis, keepdims) for t in (g, y))
    # An infinite element is the whole sum (inf) or adds nothing (-inf); x - y could be NaN there.
    gap = where(isinf(x), minimum(x, 0), x - y)
    return (g * exp(gap),)


_logsumexp = register(
    Op(
        "logsumexp",
        infer=infer_reduction("float"),
        kernel=row_kernel(_logsumexp_of, over_axes),
        expr=_logsumexp_of,
        rows=over_axes,
        vjp=_logsumexp_vjp,
        batch=batching.along("axis"),
        sharding=row_sharding.reduction_rule(row_sharding.log_sum_exp),
        cost=per_element(12),
        autocast="high",
        samples=FLOAT_SAMPLES,
    )
)


@function
def logsumexp(x: Any, axis: Any = None, keepdims: bool = False, name: str | None = None) -> Tensor:
    """Compute log Σ exp(x) over axes (None: all), without overflow.

    Raises:
        DTypeError: x is not float.
        ShapeError: an axis is outside x, or there are no elements.
        ArgumentError: an axis is given twice.
    """
    x, axes = normalize_arguments("logsumexp", x, axis, keepdims)
    result: Tensor = _logsumexp(x, axis=axes, keepdims=keepdims, name=name)
    return result
