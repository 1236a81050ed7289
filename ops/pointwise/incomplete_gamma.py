"""The regularized incomplete gamma functions, with gradients by both arguments.

Kernels compute in float64 and round once. From a = 12 on the density is a bell in log t, and one
Gauss-Legendre quadrature from x to where it ends gives the smaller of both functions. Smaller a are
raised by 12, by the recurrence P(a, x) = P(a + 1, x) + xᵃ·e⁻ˣ / Γ(a + 1), which adds positive terms
only. Beyond a + 1, the upper function of a small a is a continued fraction.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from graphflow.ir.op import FUNCTIONS, Op, Tensor, function, register, sample
from graphflow.ir.spec import TensorSpec, broadcast_shapes
from graphflow.ops.base.shape_rules import require_kind
from graphflow.ops.pointwise.arithmetic import negative
from graphflow.ops.pointwise.elementwise import SCALAR, F, per_element
from graphflow.ops.pointwise.special import NEAR_TWO, digamma, lgamma, lgamma_of
from graphflow.ops.pointwise.transcendental import exp, horner, log

_LEAST = 12
"""From here on the quadrature and the asymptotic series are exact to float64."""
_NODES = 32
_SPAN = 42.0
"""The density is cut where it is exp(-42) of its value at x."""
_FRACTION_TERMS = 100
_SERIES_TERMS = 25
_DIGAMMA = (-1 / 12, 1 / 120, -1 / 252, 1 / 240, -1 / 132)
"""Of ψ(a) = log a - 1 / 2a + Σ cₖ·a⁻²ᵏ."""
_STIRLING = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188)
"""Of log Γ(a) = (a - ½)·log a - a + ½·log 2π + Σ cₖ·a¹⁻²ᵏ."""
_EXPONENTIAL = [1 / math.factorial(k) for k in range(14, 1, -1)]


@functools.cache
def _quadrature() -> tuple[Any, Any]:
    """Return nodes and weights on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    return (nodes + 1) / 2, weights / 2


def _exponential_rest(xp: Any, s: Any) -> Any:
    """Return eˢ - 1 - s, exact near 0."""
    near = xp.abs(s) < 0.3
    z = xp.where(near, s, 0.0)
    return xp.where(near, horner(_EXPONENTIAL, z) * z * z, xp.expm1(s) - s)


def _inverse_series(a: Any, coefficients: tuple[float, ...]) -> Any:
    """Return Σ cₖ·a⁻²ᵏ, k from 0."""
    squared = 1 / (a * a)
    return horner(coefficients[::-1], squared)


def _from_twelve(xp: Any, a: Any, x: Any) -> tuple[Any, Any, Any]:
    """Return P, Q and ∂P/∂a for a >= 12.

    With t = a·eˢ the density is C·exp(-a·(eˢ - 1 - s)). Its derivative by a has the factor
    s + log a - ψ(a), whose integral over all s is 0. So that of P, too, is an integral of a tail.
    """
    ratio = x / a
    near = (ratio > 0.5) & (ratio < 2)
    s0 = xp.where(near, xp.log1p((x - a) / a), xp.log(ratio))
    left, gap, k = s0 <= 0, xp.abs(1 - ratio), _SPAN / a
    below = 4 * k / (xp.sqrt((k - 2 * gap) ** 2 + 8 * k) + 2 * gap - k)
    above = 2 * k / (gap + xp.sqrt(gap * gap + 2 * ratio * k))
    length = xp.where(left, -below, above)
    shift = 0.5 / a - _inverse_series(a, _DIGAMMA) / (a * a)
    tail, moment = xp.zeros_like(a), xp.zeros_like(a)
    for node, weight in zip(*_quadrature(), strict=True):
        s = s0 + length * node
        density = xp.exp(-a * _exponential_rest(xp, s)) * weight
        tail = tail + density
        moment = moment + density * (s + shift)
    scale = xp.sqrt(a / (2 * math.pi)) * xp.exp(-_inverse_series(a, _STIRLING) / a)
    factor = xp.abs(length) * scale
    tail, moment = tail * factor, moment * factor
    lower, upper = xp.where(left, tail, 1 - tail), xp.where(left, 1 - tail, tail)
    return lower, upper, xp.where(left, moment, -moment)


def _below_twelve(xp: Any, a: Any, x: Any) -> tuple[Any, Any, Any]:
    """Return P, Q and ∂P/∂a for 0 < a < 12 and x > 0."""
    log_x = xp.log(x)
    lower, _, slope = _from_twelve(xp, a + _LEAST, x)
    raised = a + _LEAST
    psi = xp.log(raised) - 0.5 / raised + _inverse_series(raised, _DIGAMMA) / (raised * raised)
    for k in range(1, _LEAST):
        psi = psi - 1 / (a + k)
    log_gamma = _log_gamma_above_one(xp, a)
    first = term = xp.exp(a * log_x - x - log_gamma)
    for k in range(1, _LEAST + 1):
        lower, slope = lower + term, slope + term * (log_x - psi)
        psi, term = psi + 1 / (a + k), term * x / (a + k)
    fraction = xp.zeros_like(a)
    for n in range(_FRACTION_TERMS, 0, -1):
        fraction = n * (n - a) / (x + 2 * n + 1 - a - fraction)
    beyond = first * a / (x + 1 - a - fraction)
    is_far, is_near = x > a + 1, (a < 1) & (x < 1.5)
    upper = xp.where(is_far, beyond, xp.where(is_near, _near_zero(xp, a, x, log_gamma), 1 - lower))
    return xp.where(is_far, 1 - beyond, lower), upper, slope


def _log_gamma_above_one(xp: Any, a: Any) -> Any:
    """Return log Γ(1 + a), exact for small a."""
    small = xp.minimum(a, 0.5)
    return xp.where(
        a < 0.5, horner(NEAR_TWO, small) * small - xp.log1p(small), lgamma_of(xp, 1 + a)
    )


def _near_zero(xp: Any, a: Any, x: Any, log_gamma: Any) -> Any:
    """Return Q by the series of P, without the cancellation in 1 - P for small a."""
    total, term = xp.zeros_like(a), xp.ones_like(a)
    for n in range(1, _SERIES_TERMS):
        term = -term * x / n
        total = total + term / (a + n)
    power = a * xp.log(x) - log_gamma
    return -xp.expm1(power) - xp.exp(power) * a * total


def _evaluate(xp: Any, a: Any, x: Any) -> tuple[Any, Any, Any]:
    """Return P, Q and ∂P/∂a in float64, also at the ends of both arguments."""
    a, x = (xp.asarray(v, "float64") for v in (a, x))
    a, x = xp.broadcast_arrays(a, x)
    found = tuple(xp.full(a.shape, math.nan) for _ in range(3))
    inside = (a > 0) & (x > 0) & xp.isfinite(a) & xp.isfinite(x)
    with np.errstate(all="ignore"):
        for part, compute in ((a < _LEAST, _below_twelve), (a >= _LEAST, _from_twelve)):
            chosen = inside & part
            if chosen.any():
                for whole, values in zip(found, compute(xp, a[chosen], x[chosen]), strict=True):
                    whole[chosen] = values
    unknown = (
        xp.isnan(a + x) | (a < 0) | (x < 0) | ((a == 0) & (x == 0)) | (xp.isinf(a) & xp.isinf(x))
    )
    one = ((a == 0) | xp.isinf(x)) & ~unknown
    zero = ((x == 0) | xp.isinf(a)) & ~unknown
    for whole, at_one, at_zero in zip(found, (1.0, 0.0, 0.0), (0.0, 1.0, 0.0), strict=True):
        whole[one], whole[zero] = at_one, at_zero
    return found[0], found[1], found[2]


def _round(found: Any, a: Any, x: Any) -> Any:
    return found.astype(np.result_type(a.dtype, x.dtype))


def _infer(a: TensorSpec, x: TensorSpec, **attrs: Any) -> TensorSpec:
    require_kind(a, "float")
    return a.with_shape(broadcast_shapes(a.shape, x.shape))


def _density(a: Tensor, x: Tensor) -> Tensor:
    """Return xᵃ⁻¹·e⁻ˣ / Γ(a), the derivative of P by x."""
    at_end = FUNCTIONS["logical_and"](FUNCTIONS["equal"](a, 1), FUNCTIONS["equal"](x, 0))
    power = (a - 1) * log(FUNCTIONS["where"](at_end, 1.0, x))  # 0⁰ is 1
    result: Tensor = exp(power - x - lgamma(a))
    return result


def _gammainc_vjp(
    g: Tensor, y: Tensor, a: Tensor, x: Tensor, upper: bool
) -> tuple[Tensor | None, ...]:
    g = negative(g) if upper else g
    return g * gammainc_slope_op(a, x), g * _density(a, x)


def _slope_vjp(g: Tensor, y: Tensor, a: Tensor, x: Tensor) -> tuple[Tensor | None, ...]:
    unknown: Tensor = FUNCTIONS["full_like"](y, math.nan)
    return g * unknown, g * (_density(a, x) * (log(x) - digamma(a)))


_SAMPLES = tuple(
    sample(*specs, low=0.3, high=high, fixed=(0,))
    for specs in ((F, F), (SCALAR, F))
    for high in (3.0, 30.0)
)
# P(a, x), or Q(a, x) = 1 - P(a, x) for `upper`.
gammainc_op: Op = register(
    Op(
        "gammainc",
        infer=_infer,
        kernel=lambda xp, a, x, upper: _round(_evaluate(xp, a, x)[upper], a, x),
        vjp=_gammainc_vjp,
        cost=per_element(2500),
        samples=tuple(
            sample(*s.inputs, low=s.low, high=s.high, fixed=s.fixed, upper=upper)
            for s, upper in zip(_SAMPLES, (False, True, True, False), strict=True)
        ),
        promotes=True,
        elementwise=True,
    )
)
# ∂P/∂a.
gammainc_slope_op: Op = register(
    Op(
        "gammainc_slope",
        infer=_infer,
        kernel=lambda xp, a, x: _round(_evaluate(xp, a, x)[2], a, x),
        vjp=_slope_vjp,
        cost=per_element(2500),
        samples=_SAMPLES,
        promotes=True,
        elementwise=True,
    )
)


@function
def gammainc(a: Any, x: Any, name: str | None = None) -> Tensor:
    """Compute the regularized lower incomplete gamma function P(a, x).

    It is the integral of tᵃ⁻¹·e⁻ᵗ / Γ(a) from 0 to x: the distribution function of gamma numbers.
    Gradients flow to both arguments. The second derivative by a is NaN; that by a and x, and those
    by x, are right.

    Args:
        a, x: floats from 0 on whose shapes broadcast, arguments in the order of scipy and torch.
            Below 0 the result is NaN.

    Raises:
        DTypeError: a or x is not float.
        ShapeError: the shapes do not broadcast.
    """
    result: Tensor = gammainc_op(a, x, upper=False, name=name)
    return result


@function
def gammaincc(a: Any, x: Any, name: str | None = None) -> Tensor:
    """Compute the regularized upper incomplete gamma function Q(a, x) = 1 - P(a, x).

    It keeps its digits where it is small. Arguments, gradients and errors are those of `gammainc`.
    """
    result: Tensor = gammainc_op(a, x, upper=True, name=name)
    return result


__all__ = ["gammainc", "gammaincc"]
