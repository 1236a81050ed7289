"""Smooth activation functions of `gf.nn`: elementwise ops, each with its gradient as another op.

Where a factor of a product is exactly 0 for large |x|, the other factor is clipped: an infinite x
times 0 would be NaN.
"""

from __future__ import annotations

import math
from typing import Any

from graphflow.errors import ArgumentError, ShapeError
from graphflow.ir.op import FUNCTIONS, Op, Tensor, as_tensor, error_location, function, sample
from graphflow.ops.base.composite import composite
from graphflow.ops.base.shape_rules import normalize_axis, require_finite, same_float
from graphflow.ops.pointwise.arithmetic import divide, multiply, reciprocal, square
from graphflow.ops.pointwise.elementwise import SCALAR, F, elementwise
from graphflow.ops.pointwise.select import clip
from graphflow.ops.pointwise.transcendental import erf_of, exp, tanh

SIDES = (
    sample(F, low=0.2, high=3.0),
    sample(F, low=-3.0, high=-0.2),
    sample(SCALAR, low=0.2, high=3.0),
)
_SMOOTH = (sample(F), sample(SCALAR))
_PAIRS = (sample(F, F), sample(SCALAR, SCALAR))
SIDE_PAIRS = (sample(F, F, low=0.2, high=3.0), sample(F, F, low=-3.0, high=-0.2))


# Sigmoids -------------------------------------------------------------------------------------

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
    if hasattr(xp, "sigmoid"):  # in generated kernels
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
"""Beyond ±this, sigmoids and normal distributions are exactly 0 or 1. Products with them clip x to
these limits, since an infinite x times 0 would be NaN."""


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


# Other smooth activations ---------------------------------------------------------------------

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
    samples=SIDES,
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
    doc="x·tanh(softplus(x)).\n\nSource: Misra, BMVC 2020.",
)


@function
def swish(x: Any, beta: float = 1.0, name: str | None = None) -> Tensor:
    """Compute x·sigmoid(beta·x); `silu` is the case beta = 1.

    Raises:
        DTypeError: x is not float.
        ArgumentError: beta is not a finite number.
    """
    beta = require_finite("swish", "beta", beta)
    x = as_tensor(x)
    if beta == 1:
        plain: Tensor = silu(x, name=name)
        return plain
    if beta == 0:
        return multiply(x, 0.5, name=name)  # type: ignore[no-any-return]
    result: Tensor = divide(silu(x * beta), beta, name=name)
    return result


def _split_halves(x: Any, axis: int) -> list[Tensor]:
    """Split x into two halves along an axis."""
    x = as_tensor(x)
    same_float(x.spec)
    size = x.shape[normalize_axis(axis, x.ndim)]
    if not isinstance(size, int) or size % 2:
        raise ShapeError(f"the size of axis {axis} must be known and even, got {size}")
    halves: list[Tensor] = FUNCTIONS["split"](x, 2, axis)
    return halves


@composite("x")
@function
def glu(x: Any, axis: int = -1, name: str | None = None) -> Tensor:
    """Compute a·sigmoid(b), with a and b the halves of x along an axis.

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
    """Compute silu(a)·b, with a and b the halves of x along an axis; errors as for `glu`.

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
    """Compute x·Φ(x), with Φ the normal distribution function.

    Args:
        x: floats.
        approximate: None, or "tanh" for the approximation by a tanh.

    Raises:
        DTypeError: x is not float.
        ArgumentError: approximate is neither.

    Source: Hendrycks & Gimpel, arXiv:1606.08415.
    """
    with error_location("gelu"):
        if not isinstance(approximate, str | None) or approximate not in (None, "none", "tanh"):
            raise ArgumentError(f"approximate must be None or 'tanh', got {approximate!r}")
    x = as_tensor(x)
    if approximate != "tanh":
        result: Tensor = _gelu(x, name=name)
        return result
    result = gelu_tanh(x, name=name)
    return result
