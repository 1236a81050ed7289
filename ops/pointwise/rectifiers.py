"""Activations that return positive numbers as they are: relu, leaky_relu, elu, selu and celu.

Gradients select with `where` instead of multiplying by 0 or 1: an infinite cotangent on the flat
side of an activation gives 0, not NaN.
"""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError
from graphflow.ir.op import Op, Tensor, function, sample
from graphflow.ir.spec import TensorSpec
from graphflow.ops.base.shape_rules import require_finite, same_float, zeros_like
from graphflow.ops.pointwise.activations import SIDE_PAIRS, SIDES
from graphflow.ops.pointwise.comparison import greater
from graphflow.ops.pointwise.elementwise import elementwise
from graphflow.ops.pointwise.select import where
from graphflow.ops.pointwise.transcendental import exp

relu_grad: Op = elementwise(
    "relu_grad",
    lambda xp, g, y: xp.where(y > 0, g, 0),
    vjp=lambda h, _, g, y: (relu_grad(h, y), None),
    infer=same_float,
    samples=SIDE_PAIRS,
    flops=2,
    into=lambda xp, out, g, y: xp.copyto(out, xp.where(y > 0, g, 0)),
)


# The gradient reads the output, so the input's buffer is free for reuse.
relu = elementwise(
    "relu",
    lambda xp, x: xp.maximum(x, 0),
    vjp=lambda g, y, x: (relu_grad(g, y),),
    infer=same_float,
    samples=SIDES,
    into=lambda xp, out, x: xp.maximum(x, 0, out=out),
    doc="max(x, 0); the gradient at 0 is 0.",
)


def _with_slope(*specs: TensorSpec, slope: float) -> TensorSpec:
    return same_float(*specs)


def _with_alpha(*specs: TensorSpec, alpha: float) -> TensorSpec:
    return same_float(*specs)


def _leaky_of(xp: Any, g: Any, x: Any, slope: float) -> Any:
    return xp.where(x > 0, g, g * slope if slope else 0)


leaky_relu_grad: Op = elementwise(
    "leaky_relu_grad",
    _leaky_of,
    vjp=lambda h, y, g, x, slope: (leaky_relu_grad(h, x, slope=slope), None),
    infer=_with_slope,
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, slope=0.2) for s in SIDE_PAIRS),
    flops=5,
    into=lambda xp, out, g, x, slope: xp.copyto(out, _leaky_of(xp, g, x, slope)),
)


_leaky_relu = elementwise(
    "leaky_relu",
    lambda xp, x, slope: xp.maximum(x, 0) + xp.minimum(x, 0) * slope,
    vjp=lambda g, y, x, slope: (leaky_relu_grad(g, x, slope=slope),),
    infer=_with_slope,
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, slope=0.2) for s in SIDES),
    flops=4,
    into=lambda xp, out, x, slope: xp.add(xp.maximum(x, 0), xp.minimum(x, 0) * slope, out=out),
)


@function
def leaky_relu(x: Any, slope: float = 0.01, name: str | None = None) -> Tensor:
    """Return x where it is positive, else slope·x; the gradient at 0 is slope.

    Raises:
        DTypeError: x is not float.
        ArgumentError: slope is not a finite number.
    """
    result: Tensor = _leaky_relu(x, slope=require_finite("leaky_relu", "slope", slope), name=name)
    return result


def _elu_grad_of(xp: Any, g: Any, x: Any, alpha: float) -> Any:
    return xp.where(x > 0, g, g * (xp.exp(xp.minimum(x, 0)) * alpha) if alpha else 0)


def _elu_grad_vjp(
    h: Tensor, y: Tensor, g: Tensor, x: Tensor, alpha: float
) -> tuple[Tensor, Tensor]:
    right = greater(x, 0)
    curved = h * g * (exp(where(right, 0, x)) * alpha) if alpha else 0
    return elu_grad(h, x, alpha=alpha), where(right, zeros_like(x), curved)


elu_grad = elementwise(
    "elu_grad",
    _elu_grad_of,
    _elu_grad_vjp,
    infer=_with_alpha,
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, alpha=0.7) for s in SIDE_PAIRS),
    flops=14,
    into=lambda xp, out, g, x, alpha: xp.copyto(out, _elu_grad_of(xp, g, x, alpha)),
)


def _elu_negative(xp: Any, x: Any, alpha: float) -> Any:
    return xp.expm1(xp.minimum(x, 0)) * alpha


_elu = elementwise(
    "elu",
    lambda xp, x, alpha: xp.maximum(x, 0) + _elu_negative(xp, x, alpha),
    vjp=lambda g, y, x, alpha: (elu_grad(g, x, alpha=alpha),),
    infer=_with_alpha,
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, alpha=0.7) for s in SIDES),
    flops=12,
    into=lambda xp, out, x, alpha: xp.add(xp.maximum(x, 0), _elu_negative(xp, x, alpha), out=out),
)


@function
def elu(x: Any, alpha: float = 1.0, name: str | None = None) -> Tensor:
    """Return x where it is positive, else alpha·(exp(x) - 1).

    Raises:
        DTypeError: x is not float.
        ArgumentError: alpha is not a finite number.

    Source: Clevert, Unterthiner & Hochreiter, ICLR 2016.
    """
    result: Tensor = _elu(x, alpha=require_finite("elu", "alpha", alpha), name=name)
    return result


_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


def _with_scale(*specs: TensorSpec, alpha: float, scale: float) -> TensorSpec:
    return same_float(*specs)


def _selu_of(xp: Any, x: Any, alpha: float, scale: float) -> Any:
    return xp.maximum(x, 0) * scale + _elu_negative(xp, x, alpha * scale)


_selu = elementwise(
    "selu",
    _selu_of,
    vjp=lambda g, y, x, alpha, scale: (elu_grad(g, x, alpha=alpha) * scale,),
    infer=_with_scale,
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, alpha=1.6, scale=1.1) for s in SIDES),
    flops=13,
    into=lambda xp, out, x, **attrs: xp.copyto(out, _selu_of(xp, x, **attrs)),
)


@function
def selu(
    x: Any, alpha: float = _SELU_ALPHA, scale: float = _SELU_SCALE, name: str | None = None
) -> Tensor:
    """Compute scale·elu(x, alpha); the default constants keep mean 0 and variance 1.

    Raises:
        DTypeError: x is not float.
        ArgumentError: alpha or scale is not a finite number.

    Source: Klambauer et al., NeurIPS 2017.
    """
    alpha = require_finite("selu", "alpha", alpha)
    result: Tensor = _selu(x, alpha=alpha, scale=require_finite("selu", "scale", scale), name=name)
    return result


def _celu_of(xp: Any, x: Any, alpha: float) -> Any:
    return xp.maximum(x, 0) + _elu_negative(xp, x / alpha, alpha)


_celu = elementwise(
    "celu",
    _celu_of,
    vjp=lambda g, y, x, alpha: (elu_grad(g, x / alpha, alpha=1.0),),
    infer=_with_alpha,
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, alpha=0.7) for s in SIDES),
    flops=16,
    into=lambda xp, out, x, alpha: xp.copyto(out, _celu_of(xp, x, alpha)),
)


@function
def celu(x: Any, alpha: float = 1.0, name: str | None = None) -> Tensor:
    """Return x where it is positive, else alpha·(exp(x/alpha) - 1).

    Raises:
        DTypeError: x is not float.
        ArgumentError: alpha is not a finite number, or is 0.

    Source: Barron, arXiv:1704.07483.
    """
    alpha = require_finite("celu", "alpha", alpha)
    if alpha == 0:
        raise ArgumentError("alpha must be a number other than 0, since x is divided by it")
    result: Tensor = _celu(x, alpha=alpha, name=name)
    return result
