"""Activation functions of `gf.nn`: elementwise ops, each with its gradient as one more.

Gradients select with `where` and do not multiply by 0 or 1: an infinite cotangent on the flat side
of an activation gives 0, not NaN.
"""

from __future__ import annotations

import math
from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import FUNCTIONS, Op, Tensor, as_tensor, error_location, function, sample
from graphflow.ir.spec import TensorSpec
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import normalize_axis, same_float, zeros_like
from graphflow.ops.pointwise.arithmetic import (
    SCALAR,
    F,
    divide,
    elementwise,
    greater,
    multiply,
    reciprocal,
    square,
)
from graphflow.ops.pointwise.select import clip, where
from graphflow.ops.pointwise.transcendental import erf_of, exp, tanh

_SIDES = (
    sample(F, low=0.2, high=3.0),
    sample(F, low=-3.0, high=-0.2),
    sample(SCALAR, low=0.2, high=3.0),
)
_SMOOTH = (sample(F), sample(SCALAR))
_PAIRS = (sample(F, F), sample(SCALAR, SCALAR))
_SIDE_PAIRS = (sample(F, F, low=0.2, high=3.0), sample(F, F, low=-3.0, high=-0.2))


# Sigmoid and its kin --------------------------------------------------------------------------

sigmoid_grad: Op = elementwise(
    "sigmoid_grad",
    lambda xp, g, y: g * (y * (1 - y)),
    vjp=lambda h, _, g, y: (sigmoid_grad(h, y), h * g * (1 - y * 2)),
    infer=same_float,
    samples=_PAIRS,
    flops=3,
    into=lambda xp, out, g, y: xp.multiply(g, y * (1 - y), out=out),
)


def _sigmoid(xp: Any, x: Any) -> Any:
    if hasattr(xp, "sigmoid"):  # where kernels are generated
        return xp.sigmoid(x)
    # exp(-x) may overflow to infinity: the quotient is then 0, as it should be.
    return xp.reciprocal(1 + xp.exp(-x))


sigmoid = elementwise(
    "sigmoid",
    _sigmoid,
    vjp=lambda g, y, x: (sigmoid_grad(g, y),),
    infer=same_float,
    samples=_SMOOTH,
    flops=12,
    into=lambda xp, out, x: xp.reciprocal(1 + xp.exp(-x), out=out),
    doc="1 / (1 + exp(-x)), without overflow.",
)


_SATURATED = 1000.0
"""Beyond it sigmoids and normal distributions are exactly 0 and 1. Products with them are taken of
x within these limits, since an infinite x times 0 would be NaN."""


def _silu_grad_vjp(h: Tensor, y: Tensor, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    s, inner = sigmoid(x), clip(x, -_SATURATED, _SATURATED)
    return silu_grad(h, x), h * g * (s * (1 - s) * (inner * (1 - s * 2) + 2))


def _silu_slope(xp: Any, x: Any) -> Any:
    s = _sigmoid(xp, x)
    return s * (1 + xp.clip(x, -_SATURATED, _SATURATED) * (1 - s))


silu_grad = elementwise(
    "silu_grad",
    lambda xp, g, x: g * _silu_slope(xp, x),
    _silu_grad_vjp,
    same_float,
    samples=_PAIRS,
    flops=16,
    into=lambda xp, out, g, x: xp.multiply(g, _silu_slope(xp, x), out=out),
)
silu = elementwise(
    "silu",
    lambda xp, x: xp.maximum(x, -_SATURATED) * _sigmoid(xp, x),
    vjp=lambda g, y, x: (silu_grad(g, x),),
    infer=same_float,
    samples=_SMOOTH,
    flops=13,
    into=lambda xp, out, x: xp.multiply(xp.maximum(x, -_SATURATED), _sigmoid(xp, x), out=out),
    doc="x·sigmoid(x), also called swish.",
)


def _softplus(xp: Any, x: Any) -> Any:
    return xp.log1p(xp.exp(-xp.abs(x)))


softplus = elementwise(
    "softplus",
    lambda xp, x: _softplus(xp, x) + xp.maximum(x, 0),
    vjp=lambda g, y, x: (g * sigmoid(x),),
    infer=same_float,
    samples=_SMOOTH,
    flops=20,
    into=lambda xp, out, x: xp.add(_softplus(xp, x), xp.maximum(x, 0), out=out),
    doc="log(1 + exp(x)), without overflow.",
)


# Rectifiers -----------------------------------------------------------------------------------

relu_grad: Op = elementwise(
    "relu_grad",
    lambda xp, g, y: xp.where(y > 0, g, 0),
    vjp=lambda h, _, g, y: (relu_grad(h, y), None),
    infer=same_float,
    samples=_SIDE_PAIRS,
    flops=2,
    into=lambda xp, out, g, y: xp.copyto(out, xp.where(y > 0, g, 0)),
)
# The gradient reads the output, so that the input's buffer is free.
relu = elementwise(
    "relu",
    lambda xp, x: xp.maximum(x, 0),
    vjp=lambda g, y, x: (relu_grad(g, y),),
    infer=same_float,
    samples=_SIDES,
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
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, slope=0.2) for s in _SIDE_PAIRS),
    flops=5,
    into=lambda xp, out, g, x, slope: xp.copyto(out, _leaky_of(xp, g, x, slope)),
)
_leaky_relu = elementwise(
    "leaky_relu",
    lambda xp, x, slope: xp.maximum(x, 0) + xp.minimum(x, 0) * slope,
    vjp=lambda g, y, x, slope: (leaky_relu_grad(g, x, slope=slope),),
    infer=_with_slope,
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, slope=0.2) for s in _SIDES),
    flops=4,
    into=lambda xp, out, x, slope: xp.add(xp.maximum(x, 0), xp.minimum(x, 0) * slope, out=out),
)


@function
def leaky_relu(x: Any, slope: float = 0.01, name: str | None = None) -> Tensor:
    """x where it is positive, else slope·x; the gradient at 0 is slope.

    Raises:
        DTypeError: x is not float.
        ArgumentError: slope is not a number.
    """
    result: Tensor = _leaky_relu(x, slope=finite_number("leaky_relu", "slope", slope), name=name)
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
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, alpha=0.7) for s in _SIDE_PAIRS),
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
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, alpha=0.7) for s in _SIDES),
    flops=12,
    into=lambda xp, out, x, alpha: xp.add(xp.maximum(x, 0), _elu_negative(xp, x, alpha), out=out),
)


@function
def elu(x: Any, alpha: float = 1.0, name: str | None = None) -> Tensor:
    """x where it is positive, else alpha·(exp(x) - 1).

    Raises:
        DTypeError: x is not float.
        ArgumentError: alpha is not a number.

    Source: Clevert, Unterthiner & Hochreiter, ICLR 2016.
    """
    result: Tensor = _elu(x, alpha=finite_number("elu", "alpha", alpha), name=name)
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
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, alpha=1.6, scale=1.1) for s in _SIDES),
    flops=13,
    into=lambda xp, out, x, **attrs: xp.copyto(out, _selu_of(xp, x, **attrs)),
)


@function
def selu(
    x: Any, alpha: float = _SELU_ALPHA, scale: float = _SELU_SCALE, name: str | None = None
) -> Tensor:
    """scale·elu(x, alpha), by default with the constants that keep mean 0 and variance 1.

    Raises:
        DTypeError: x is not float.
        ArgumentError: alpha or scale is not a number.

    Source: Klambauer et al., NeurIPS 2017.
    """
    alpha = finite_number("selu", "alpha", alpha)
    result: Tensor = _selu(x, alpha=alpha, scale=finite_number("selu", "scale", scale), name=name)
    return result


def _celu_of(xp: Any, x: Any, alpha: float) -> Any:
    return xp.maximum(x, 0) + _elu_negative(xp, x / alpha, alpha)


_celu = elementwise(
    "celu",
    _celu_of,
    vjp=lambda g, y, x, alpha: (elu_grad(g, x / alpha, alpha=1.0),),
    infer=_with_alpha,
    samples=tuple(sample(*s.inputs, low=s.low, high=s.high, alpha=0.7) for s in _SIDES),
    flops=16,
    into=lambda xp, out, x, alpha: xp.copyto(out, _celu_of(xp, x, alpha)),
)


@function
def celu(x: Any, alpha: float = 1.0, name: str | None = None) -> Tensor:
    """x where it is positive, else alpha·(exp(x/alpha) - 1).

    Raises:
        DTypeError: x is not float.
        ArgumentError: alpha is not a number, or 0.

    Source: Barron, arXiv:1704.07483.
    """
    alpha = finite_number("celu", "alpha", alpha)
    if alpha == 0:
        raise ArgumentError("alpha is 0, by which x is divided")
    result: Tensor = _celu(x, alpha=alpha, name=name)
    return result


# Other smooth ones ----------------------------------------------------------------------------

log_sigmoid = elementwise(
    "log_sigmoid",
    lambda xp, x: xp.minimum(x, 0) - _softplus(xp, x),
    vjp=lambda g, y, x: (g * sigmoid(-x),),
    infer=same_float,
    samples=_SMOOTH,
    flops=20,
    into=lambda xp, out, x: xp.subtract(xp.minimum(x, 0), _softplus(xp, x), out=out),
    doc="log(sigmoid(x)), without overflow.",
)


def _softsign_of(xp: Any, x: Any) -> Any:
    inside = xp.clip(x, -1e30, 1e30)  # beyond it is ±1, and inf / inf would be NaN
    return inside / (1 + xp.abs(inside))


softsign = elementwise(
    "softsign",
    _softsign_of,
    vjp=lambda g, y, x: (g * square(reciprocal(FUNCTIONS["abs"](x) + 1)),),
    infer=same_float,
    samples=_SIDES,
    flops=6,
    into=lambda xp, out, x: xp.copyto(out, _softsign_of(xp, x)),
    doc="x / (1 + |x|).",
)


def _mish_of(xp: Any, x: Any) -> Any:
    return xp.maximum(x, -_SATURATED) * xp.tanh(_softplus(xp, x) + xp.maximum(x, 0))


def _mish_vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    t = tanh(softplus(x))
    return (g * (t + clip(x, -_SATURATED, _SATURATED) * (1 - square(t)) * sigmoid(x)),)


mish = elementwise(
    "mish",
    _mish_of,
    _mish_vjp,
    same_float,
    samples=_SMOOTH,
    flops=38,
    into=lambda xp, out, x: xp.copyto(out, _mish_of(xp, x)),
    doc="x·tanh(softplus(x)). Source: Misra, BMVC 2020.",
)


@function
def swish(x: Any, beta: float = 1.0, name: str | None = None) -> Tensor:
    """x·sigmoid(beta·x); `silu` is that of beta 1.

    Raises:
        DTypeError: x is not float.
        ArgumentError: beta is not a number.
    """
    beta = finite_number("swish", "beta", beta)
    x = as_tensor(x)
    if beta == 1:
        plain: Tensor = silu(x, name=name)
        return plain
    if beta == 0:
        return multiply(x, 0.5, name=name)  # type: ignore[no-any-return]
    result: Tensor = divide(silu(x * beta), beta, name=name)
    return result


def _split_halves(x: Any, axis: int) -> list[Tensor]:
    """x in two halves along an axis."""
    x = as_tensor(x)
    same_float(x.spec)
    size = x.shape[normalize_axis(axis, x.ndim)]
    if not isinstance(size, int) or size % 2:
        raise ShapeError(f"axis {axis} is halved, but has size {size}")
    halves: list[Tensor] = FUNCTIONS["split"](x, 2, axis)
    return halves


@composite("x")
@function
def glu(x: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """a·sigmoid(b), with a and b the halves of x along an axis.

    Raises:
        DTypeError: x is not float.
        ShapeError: the size of the axis is unknown or odd.

    Source: Dauphin et al., ICML 2017.
    """
    a, b = _split_halves(x, axis)
    result: Tensor = multiply(a, sigmoid(b), name=name)
    return result


@composite("x")
@function
def swiglu(x: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """silu(a)·b, with a and b the halves of x along an axis; errors as for `glu`.

    Source: Shazeer, arXiv:2002.05202.
    """
    a, b = _split_halves(x, axis)
    result: Tensor = multiply(silu(a), b, name=name)
    return result


# GELU -----------------------------------------------------------------------------------------

_PER_ROOT_2 = 1 / math.sqrt(2)
_PER_ROOT_2_PI = 1 / math.sqrt(2 * math.pi)


def _normal_cdf(xp: Any, x: Any) -> Any:
    return (erf_of(xp, x * _PER_ROOT_2) + 1) * 0.5


def _gelu_slope(xp: Any, x: Any) -> Any:
    x = xp.clip(x, -_SATURATED, _SATURATED)
    return _normal_cdf(xp, x) + x * (xp.exp(x * x * -0.5) * _PER_ROOT_2_PI)


def _gelu_grad_vjp(h: Tensor, y: Tensor, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    squared = square(clip(x, -_SATURATED, _SATURATED))
    curvature = exp(squared * -0.5) * _PER_ROOT_2_PI * (2 - squared)
    return gelu_grad(h, x), h * g * curvature


gelu_grad = elementwise(
    "gelu_grad",
    lambda xp, g, x: g * _gelu_slope(xp, x),
    _gelu_grad_vjp,
    same_float,
    samples=_PAIRS,
    flops=58,
    into=lambda xp, out, g, x: xp.multiply(g, _gelu_slope(xp, x), out=out),
)
_gelu: Op = elementwise(
    "gelu",
    lambda xp, x: xp.maximum(x, -_SATURATED) * _normal_cdf(xp, x),
    vjp=lambda g, y, x: (gelu_grad(g, x),),
    infer=same_float,
    samples=_SMOOTH,
    flops=44,
    into=lambda xp, out, x: xp.multiply(xp.maximum(x, -_SATURATED), _normal_cdf(xp, x), out=out),
)


_ROOT = math.sqrt(2 / math.pi)
_CUBIC = 0.044715 * _ROOT


def _gelu_tanh_of(xp: Any, x: Any) -> Any:
    inner = x * (x * x * _CUBIC + _ROOT)
    return xp.maximum(x, -_SATURATED) * 0.5 * (xp.tanh(inner) + 1)


def _gelu_tanh_slope(xp: Any, x: Any) -> Any:
    x = xp.clip(x, -_SATURATED, _SATURATED)
    squared = x * x
    t = xp.tanh(x * (squared * _CUBIC + _ROOT))
    return (t + 1) * 0.5 + x * 0.5 * (1 - t * t) * (squared * (3 * _CUBIC) + _ROOT)


def _gelu_tanh_grad_vjp(h: Tensor, y: Tensor, g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    near = clip(x, -_SATURATED, _SATURATED)
    squared = square(near)
    t, slope = tanh(near * (squared * _CUBIC + _ROOT)), squared * (3 * _CUBIC) + _ROOT
    curvature = slope + near * (near * (3 * _CUBIC) - t * square(slope))
    return gelu_tanh_grad(h, x), h * g * ((1 - square(t)) * curvature)


gelu_tanh_grad = elementwise(
    "gelu_tanh_grad",
    lambda xp, g, x: g * _gelu_tanh_slope(xp, x),
    _gelu_tanh_grad_vjp,
    same_float,
    samples=_PAIRS,
    flops=32,
    into=lambda xp, out, g, x: xp.multiply(g, _gelu_tanh_slope(xp, x), out=out),
)
gelu_tanh: Op = elementwise(
    "gelu_tanh",
    _gelu_tanh_of,
    vjp=lambda g, y, x: (gelu_tanh_grad(g, x),),
    infer=same_float,
    samples=_SMOOTH,
    flops=24,
    into=lambda xp, out, x: xp.copyto(out, _gelu_tanh_of(xp, x)),
)


@function
def gelu(x: Any, approximate: str | None = None, name: str | None = None) -> Tensor:
    """x·Φ(x), with Φ the normal distribution function; approximate="tanh" for the tanh form.

    Raises:
        DTypeError: x is not float.
        ArgumentError: another approximation is asked for.

    Source: Hendrycks & Gimpel, arXiv:1606.08415.
    """
    with error_location("gelu"):
        if not isinstance(approximate, str | None) or approximate not in (None, "none", "tanh"):
            raise ArgumentError(f"approximate is None or 'tanh', not {approximate!r}")
    x = as_tensor(x)
    if approximate != "tanh":
        result: Tensor = _gelu(x, name=name)
        return result
    result = gelu_tanh(x, name=name)
    return result


def finite_number(op_name: str, what: str, value: Any) -> float:
    """A parameter as a float.

    Raises:
        ArgumentError: not a finite number; names the op and the user's line.
    """
    with error_location(op_name):
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise ArgumentError(f"{what} is a finite number, not {value!r}")
    return float(value)
