"""Piecewise linear activations and gates made of them. Public in `gf.nn`.

At a kink the gradient is that of one side, as in torch: of the flat side if there is one.
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError
from graphflow.ir.op import (
    FUNCTIONS,
    Op,
    Sample,
    Tensor,
    as_tensor,
    error_location,
    function,
    sample,
)
from graphflow.ir.spec import TensorSpec
from graphflow.ops.base.shape_rules import normalize_axis, require_finite, same_float
from graphflow.ops.pointwise.comparison import greater
from graphflow.ops.pointwise.elementwise import ROW, SCALAR, F, elementwise
from graphflow.ops.pointwise.select import clip_grad, clip_op, where
from graphflow.ops.reductions.extrema import argmax

_INNER, _LEFT, _RIGHT = (-0.4, 0.4), (-3.9, -1.1), (1.1, 3.9)


def _samples_around_kinks(*inputs: TensorSpec, **attrs: Any) -> tuple[Sample, ...]:
    """Return samples left of, between and right of kinks at ±0.5 to ±1."""
    return tuple(sample(*inputs, low=a, high=b, **attrs) for a, b in (_INNER, _LEFT, _RIGHT))


def _with_attrs(*specs: TensorSpec, **attrs: float) -> TensorSpec:
    return same_float(*specs)


# Clipped ----------------------------------------------------------------------------------------


@function
def relu6(x: Any, name: str | None = None) -> Tensor:
    """Clip x to [0, 6]; the gradient at both limits is 0.

    Raises:
        DTypeError: x is not float.

    Source: Howard et al., arXiv:1704.04861.
    """
    return hard_tanh(x, 0.0, 6.0, name=name)


@function
def hard_tanh(x: Any, low: float = -1.0, high: float = 1.0, name: str | None = None) -> Tensor:
    """Clip x to [low, high]; the gradient at both limits is 0 (that of `gf.clip` is 1).

    Raises:
        DTypeError: x is not float.
        ArgumentError: low and high are not finite numbers, or low > high.
    """
    low, high = require_finite("hard_tanh", "low", low), require_finite("hard_tanh", "high", high)
    if low > high:
        raise ArgumentError(f"low {low} is above high {high}")
    result: Tensor = clip_op(x, min=low, max=high, ends=False, name=name)
    return result


_SIXTH: dict[str, Any] = {"slope": 1 / 6, "offset": 0.5}


def _ramp(xp: Any, x: Any, slope: float, offset: float) -> Any:
    return xp.clip(x * slope + offset, 0, 1)


def _ramp_slope(g: Tensor, x: Tensor, slope: float, offset: float) -> Tensor:
    inside: Tensor = clip_grad(g * slope, x * slope + offset, min=0.0, max=1.0, ends=False)
    return inside


_hard_sigmoid: Op = elementwise(
    "hard_sigmoid",
    _ramp,
    vjp=lambda g, y, x, **attrs: (_ramp_slope(g, x, **attrs),),
    infer=_with_attrs,
    samples=(
        *_samples_around_kinks(F, slope=1 / 3, offset=0.5)[:2],
        sample(SCALAR, low=3.5, high=4.0, **_SIXTH),
    ),
    flops=4,
    into=lambda xp, out, x, slope, offset: xp.clip(x * slope + offset, 0, 1, out=out),
)


@function
def hard_sigmoid(
    x: Any, slope: float = 1 / 6, offset: float = 0.5, name: str | None = None
) -> Tensor:
    """Clip slope·x + offset to [0, 1]; the defaults are torch's (ONNX: slope 0.2).

    Raises:
        DTypeError: x is not float.
        ArgumentError: slope or offset is not a finite number.
    """
    slope = require_finite("hard_sigmoid", "slope", slope)
    offset = require_finite("hard_sigmoid", "offset", offset)
    result: Tensor = _hard_sigmoid(x, slope=slope, offset=offset, name=name)
    return result


def _hard_swish_of(xp: Any, x: Any) -> Any:
    return xp.maximum(x, -4) * _ramp(xp, x, **_SIXTH)  # -inf·0 would be NaN


def _hard_swish_grad(g: Tensor, x: Tensor) -> Tensor:
    """Return 0 where hard_swish is 0, and elsewhere apply the product rule."""
    inside = clip_grad(g, x, min=-3.0, max=None, ends=False)
    slope = _hard_sigmoid(x, **_SIXTH) + _ramp_slope(x, x, **_SIXTH)
    result: Tensor = inside * slope
    return result


hard_swish: Op = elementwise(
    "hard_swish",
    _hard_swish_of,
    vjp=lambda g, y, x: (_hard_swish_grad(g, x),),
    infer=same_float,
    samples=(sample(F), sample(F, low=3.2, high=5.0), sample(SCALAR, low=-5.0, high=-3.2)),
    flops=5,
    into=lambda xp, out, x: xp.copyto(out, _hard_swish_of(xp, x)),
    doc="x·hard_sigmoid(x).\n\nSource: Howard et al., ICCV 2019.",
)


# Around a threshold -----------------------------------------------------------------------------


def _shrink_of(xp: Any, x: Any, threshold: float, bias: float) -> Any:
    outside = xp.abs(x) > threshold
    return (x - xp.sign(x) * bias) * outside if bias else x * outside


def _past_threshold_of(xp: Any, g: Any, x: Any, threshold: float, symmetric: bool) -> Any:
    return xp.where((xp.abs(x) if symmetric else x) > threshold, g, 0)


_past_threshold: Op = elementwise(
    "past_threshold",
    _past_threshold_of,
    vjp=lambda h, y, g, x, **attrs: (_past_threshold(h, x, **attrs), None),
    infer=_with_attrs,
    samples=(
        *_samples_around_kinks(F, F, threshold=0.7, symmetric=True),
        sample(F, F, low=-3.0, high=0.6, threshold=0.7, symmetric=False),
    ),
    flops=3,
    into=lambda xp, out, g, x, **attrs: xp.copyto(out, _past_threshold_of(xp, g, x, **attrs)),
)
_shrink: Op = elementwise(
    "shrink",
    _shrink_of,
    vjp=lambda g, y, x, threshold, bias: (
        _past_threshold(g, x, threshold=threshold, symmetric=True),
    ),
    infer=_with_attrs,
    samples=(
        *_samples_around_kinks(F, threshold=0.7, bias=0.3),
        *_samples_around_kinks(SCALAR, threshold=0.7, bias=0.0),
    ),
    flops=5,
    into=lambda xp, out, x, **attrs: xp.copyto(out, _shrink_of(xp, x, **attrs)),
)


@function
def shrink(x: Any, threshold: float = 0.5, bias: float = 0.0, name: str | None = None) -> Tensor:
    """Return 0 where |x| <= threshold; elsewhere x, moved towards 0 by bias.

    Raises:
        DTypeError: x is not float.
        ArgumentError: threshold or bias is not a finite number, or the threshold is negative.
    """
    threshold = require_finite("shrink", "threshold", threshold)
    if threshold < 0:
        raise ArgumentError(f"threshold must be a number >= 0, got {threshold}")
    bias = require_finite("shrink", "bias", bias)
    result: Tensor = _shrink(x, threshold=threshold, bias=bias, name=name)
    return result


@function
def hard_shrink(x: Any, threshold: float = 0.5, name: str | None = None) -> Tensor:
    """Return x where |x| > threshold, else 0; errors as for `shrink`."""
    return shrink(x, threshold, name=name)


@function
def soft_shrink(x: Any, threshold: float = 0.5, name: str | None = None) -> Tensor:
    """Move x towards 0 by the threshold; 0 where |x| is no larger. Errors as for `shrink`."""
    return shrink(x, threshold, threshold, name=name)


_thresholded_relu: Op = elementwise(
    "thresholded_relu",
    lambda xp, x, threshold: xp.where(x > threshold, x, 0),  # -inf·0 would be NaN
    vjp=lambda g, y, x, threshold: (_past_threshold(g, x, threshold=threshold, symmetric=False),),
    infer=_with_attrs,
    samples=(
        *_samples_around_kinks(F, threshold=0.7),
        *_samples_around_kinks(SCALAR, threshold=-0.7),
    ),
    flops=2,
    into=lambda xp, out, x, threshold: xp.copyto(out, xp.where(x > threshold, x, 0)),
)


@function
def thresholded_relu(x: Any, threshold: float = 1.0, name: str | None = None) -> Tensor:
    """Return x where it is above the threshold, else 0.

    Raises:
        DTypeError: x is not float.
        ArgumentError: the threshold is not a finite number.
    """
    threshold = require_finite("thresholded_relu", "threshold", threshold)
    result: Tensor = _thresholded_relu(x, threshold=threshold, name=name)
    return result


# With slopes that are learnt --------------------------------------------------------------------


def _prelu_vjp(g: Tensor, y: Tensor, x: Tensor, slope: Tensor) -> tuple[Tensor, Tensor]:
    is_right = greater(x, 0)
    return where(is_right, g, g * slope), where(is_right, 0, g * x)


def _prelu_of(xp: Any, x: Any, slope: Any) -> Any:
    return xp.maximum(x, 0) + xp.minimum(x, 0) * slope


prelu: Op = elementwise(
    "prelu",
    _prelu_of,
    _prelu_vjp,
    same_float,
    samples=(
        sample(F, ROW, low=0.2, high=3.0),
        sample(F, ROW, low=-3.0, high=-0.2),
        sample(F, SCALAR, low=-3.0, high=-0.2),
    ),
    flops=4,
    into=lambda xp, out, x, slope: xp.copyto(out, _prelu_of(xp, x, slope)),
    doc="x where it is positive, else slope·x: `prelu(x, slope)`, a tensor of slopes.",
)


@function
def hardmax(x: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """Return 1 at the (first) largest element along an axis, else 0; the gradient is 0.

    Raises:
        DTypeError: x is not float.
        ShapeError: axis is outside x, or x has no elements along it.
        ArgumentError: axis is no int.
    """
    x = as_tensor(x)
    with error_location("hardmax"):
        axis = normalize_axis(axis, x.ndim)
        same_float(x.spec)
    hot = FUNCTIONS["one_hot"](argmax(x, axis), x.shape[axis], x.dtype)
    result: Tensor = FUNCTIONS["moveaxis"](hot, -1, axis)
    return result
