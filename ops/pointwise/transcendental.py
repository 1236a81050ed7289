"""Roots, exponentials, logarithms, trigonometry and the error function: elementwise, of floats.

All but `atan2`, `hypot`, `logaddexp` and `erf` take complex numbers, too: principal values, with
numpy's branch cuts. None takes ints, since `astype` says better which float type is meant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from graphflow.ir.op import FUNCTIONS, Op, Sample, Tensor, sample
from graphflow.ir.spec import TensorSpec, kind, limits
from graphflow.ops.base.roots import divide_out, one_where_masked, zero_at_root
from graphflow.ops.base.shape_rules import conj, jvp_from_slopes, same_float, same_inexact
from graphflow.ops.pointwise.arithmetic import square
from graphflow.ops.pointwise.comparison import equal, isinf, logical_and
from graphflow.ops.pointwise.elementwise import (
    BINARY,
    COMPLEX,
    POSITIVE,
    RATIO,
    SCALAR,
    UNARY,
    F,
    elementwise,
)


def _function(
    name: str,
    vjp: Callable[..., Sequence[Tensor | None]],
    ufunc: str | Callable[..., Any] = "",
    samples: Sequence[Sample] = UNARY,
    flops: int = 10,
    infer: Callable[..., TensorSpec] = same_inexact,
    **rest: Any,
) -> Op:
    if infer is same_inexact:
        low, high = (-0.9, 1.2) if samples is UNARY else (samples[0].low, samples[0].high)
        samples = (*samples, sample(COMPLEX, low=low, high=high))
    return elementwise(name, ufunc or name, vjp, infer, samples, flops, **rest)


_INSIDE = (sample(F, low=-0.8, high=0.8), sample(SCALAR, low=-0.8, high=0.8))
_ABOVE_ONE = (sample(F, low=1.3, high=3.0), sample(SCALAR, low=1.3, high=3.0))


def _sqrt_vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    quotient = divide_out(g, y) if kind(y.dtype) == "float" else None
    return (g * 0.5 / conj(y) if quotient is None else quotient * 0.5,)


sqrt = _function(
    "sqrt", _sqrt_vjp, samples=POSITIVE, flops=4, doc="√x; NaN where x is real and negative."
)
rsqrt = _function(
    "rsqrt",
    lambda g, y, x: (g * conj(y * y * y * -0.5),),
    lambda xp, x: xp.reciprocal(xp.sqrt(x)),
    samples=POSITIVE,
    flops=8,
    into=lambda xp, out, x: xp.reciprocal(xp.sqrt(x), out=out),
    doc="1 / √x.",
)

exp = _function("exp", lambda g, y, x: (g * conj(y),), doc="eˣ.")
expm1 = _function(
    "expm1",
    lambda g, y, x: (g * conj(exp(x)),),
    doc="eˣ - 1, to the last digits where x is small, too.",
)
log = _function(
    "log",
    lambda g, y, x: (g / conj(x),),
    samples=POSITIVE,
    doc="The natural logarithm; -inf at 0, NaN where x is real and negative.",
)
log1p = _function(
    "log1p",
    lambda g, y, x: (g / (conj(x) + 1),),
    samples=POSITIVE,
    doc="log(1 + x), to the last digits where x is small, too.",
)
log2 = _function(
    "log2",
    lambda g, y, x: (g / (conj(x) * math.log(2)),),
    samples=POSITIVE,
    doc="The logarithm to base 2; otherwise as `log`.",
)
log10 = _function(
    "log10",
    lambda g, y, x: (g / (conj(x) * math.log(10)),),
    samples=POSITIVE,
    doc="The logarithm to base 10; otherwise as `log`.",
)


def _logaddexp(xp: Any, a: Any, b: Any) -> Any:
    gap = xp.where(a == b, 0, a - b)  # inf - inf would be NaN
    return xp.maximum(a, b) + xp.log1p(xp.exp(-xp.abs(gap)))


def _logaddexp_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    gap = FUNCTIONS["where"](logical_and(isinf(a), equal(a, b)), 0, a - b)
    sigmoid = FUNCTIONS["sigmoid"]
    return g * sigmoid(gap), g * sigmoid(-gap)


logaddexp = _function(
    "logaddexp", _logaddexp_vjp, _logaddexp, BINARY, 30, same_float,
    into=lambda xp, out, a, b: xp.copyto(out, _logaddexp(xp, a, b)),
    doc="log(exp(a) + exp(b)), for any a and b; `logsumexp` goes along an axis.",
)  # fmt: skip

sin = _function("sin", lambda g, y, x: (g * conj(cos(x)),), doc="The sine of an angle in radians.")
cos: Op = _function(
    "cos", lambda g, y, x: (-(g * conj(sin(x))),), doc="The cosine of an angle in radians."
)
tan = _function(
    "tan",
    lambda g, y, x: (g * conj(square(y) + 1),),
    samples=_INSIDE,
    flops=20,
    doc="The tangent of an angle in radians.",
)


def _one_less_square(x: Tensor) -> Tensor:
    """Return 1 - x²; for real x as (1 - x)·(1 + x), which keeps its digits near 1."""
    result: Tensor = 1 - square(x) if kind(x.dtype) == "complex" else (1 - x) * (1 + x)
    return result


asin = _function(
    "asin",
    lambda g, y, x: (g * conj(rsqrt(_one_less_square(x))),),
    "arcsin",
    _INSIDE,
    flops=20,
    doc="The angle in [-π/2, π/2] whose sine is x; NaN where x is real and outside [-1, 1].",
)
acos = _function(
    "acos",
    lambda g, y, x: (-(g * conj(rsqrt(_one_less_square(x)))),),
    "arccos",
    _INSIDE,
    flops=20,
    doc="The angle in [0, π] whose cosine is x; NaN where x is real and outside [-1, 1].",
)
atan = _function(
    "atan",
    lambda g, y, x: (g / conj(square(x) + 1),),
    "arctan",
    flops=20,
    doc="The angle in [-π/2, π/2] whose tangent is x.",
)


def _atan2_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    size = hypot(a, b)
    up, along, length, scale = _direction(size, a, b)
    size, length = one_where_masked(g, size), one_where_masked(g, length)
    part = g * scale / length
    slopes = part * (along / length), -(part * (up / length))
    first, second = (zero_at_root(size, t, slope) for t, slope in zip((b, a), slopes, strict=True))
    return first, second


def _direction(y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a·s, b·s, y·s and s for the hypotenuse y of a and b; s keeps y·s finite."""
    largest = float(limits(a.dtype)[1])
    scale = 1.0 - 0.75 * FUNCTIONS["astype"](isinf(y), y.dtype)
    a, b = (FUNCTIONS["clip"](t, -largest, largest) * scale for t in (a, b))
    return a, b, hypot(a, b), scale


atan2 = _function(
    "atan2",
    _atan2_vjp,
    "arctan2",
    RATIO,
    24,
    same_float,
    jvp=jvp_from_slopes(_atan2_vjp),
    doc="The angle of the point (b, a) of the plane, in [-π, π] radians.",
)


def _hypot_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    quotient = divide_out(g, y)
    if quotient is not None:  # g comes from y², which is smooth at 0, unlike y
        return a * quotient, b * quotient
    up, along, length, _ = _direction(y, a, b)
    y, length = one_where_masked(g, y), one_where_masked(g, length)
    first, second = (zero_at_root(y, t, g * (side / length)) for t, side in ((a, up), (b, along)))
    return first, second


hypot: Op = _function(
    "hypot", _hypot_vjp, "hypot", RATIO, 10, same_float, jvp=jvp_from_slopes(_hypot_vjp),
    doc="√(a² + b²), where the squares are too large or small, too; the gradient at 0 is 0.",
)  # fmt: skip

sinh = _function(
    "sinh",
    lambda g, y, x: (g * conj(cosh(x)),),
    flops=20,
    doc="The hyperbolic sine, (exp(x) - exp(-x)) / 2.",
)
cosh: Op = _function(
    "cosh",
    lambda g, y, x: (g * conj(sinh(x)),),
    flops=20,
    doc="The hyperbolic cosine, (exp(x) + exp(-x)) / 2.",
)


def _asinh_vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    if kind(x.dtype) == "complex":
        return (g * conj(rsqrt(square(x) + 1)),)
    return (g / hypot(x, 1.0),)


asinh = _function("asinh", _asinh_vjp, "arcsinh", flops=20, doc="The number whose `sinh` is x.")


def _acosh_vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    """Divide by two roots: x² - 1 may overflow, and its root has another sign if Re x < 0."""
    return (g * conj(rsqrt(x - 1) * rsqrt(x + 1)),)


acosh = _function(
    "acosh",
    _acosh_vjp,
    "arccosh",
    _ABOVE_ONE,
    flops=20,
    doc="The number, 0 or above, whose `cosh` is x; NaN where x is real and below 1.",
)
atanh = _function(
    "atanh",
    lambda g, y, x: (g / conj(_one_less_square(x)),),
    "arctanh",
    _INSIDE,
    flops=20,
    doc="The number whose `tanh` is x; infinite at -1 and 1, NaN where x is real and beyond.",
)


def _tanh_grad_into(xp: Any, out: Any, g: Any, y: Any) -> None:
    xp.multiply(g, 1 - y * y, out=out)


tanh_grad: Op = elementwise(
    "tanh_grad",
    lambda xp, g, y: g * (1 - y * y),
    vjp=lambda h, _, g, y: (tanh_grad(h, y), h * g * (y * -2)),
    infer=same_float,
    samples=(sample(F, F), sample(SCALAR, SCALAR)),
    flops=3,
    into=_tanh_grad_into,
)


def _tanh_vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    return (g * conj(1 - square(y)) if kind(x.dtype) == "complex" else tanh_grad(g, y),)


tanh = _function("tanh", _tanh_vjp, flops=16, doc="The hyperbolic tangent, from -1 to 1.")


# The error function -----------------------------------------------------------------------------

# float64: erf(x) = x·A(x²)/B(x²) up to 0.46875, then 1 - exp(-x²)·C(x)/D(x); within 6 ulp.
# Source: W. J. Cody, "Rational Chebyshev approximations for the error function", Math. Comp. 23
# (1969), with the coefficients of his CALERF (SPECFUN). His third range is left out:
# beyond 4 the second one is good to 1e-8 of erfc(x) < 1.6e-8.
_A = (1.85777706184603153e-1, 3.16112374387056560e0, 1.13864154151050156e2,
      3.77485237685302021e2, 3.20937758913846947e3)  # fmt: skip
_B = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3,
      2.84423683343917062e3)  # fmt: skip
_C = (2.15311535474403846e-8, 5.64188496988670089e-1, 8.88314979438837594e0,
      6.61191906371416295e1, 2.98635138197400131e2, 8.81952221241769090e2,
      1.71204761263407058e3, 2.05107837782607147e3, 1.23033935479799725e3)  # fmt: skip
_D = (1.0, 1.57449261107098347e1, 1.17693950891312499e2, 5.37181101862009858e2,
      1.62138957456669019e3, 3.29079923573345963e3, 4.36261909014324716e3,
      3.43936767414372164e3, 1.23033935480374942e3)  # fmt: skip
ERFC_PARTS = (_C, _D)
"""Numerator and denominator of exp(x²)·(1 - erf(x))."""
# float32: erf(x) = x + x·P(x²) up to 1, then 1 - exp(-x·Q(x)), minimax fits of
# our own; within 1.5 ulp.
_P = (7.889119528392122e-05, -0.0008020841278904964, 0.005189535339262635,
      -0.026854444591877462, 0.1128360017625689, -0.37612627135965837,
      0.12837916591375143)  # fmt: skip
_Q = (1.3541983617394452e-05, -0.00034620312169174783, 0.003738810919811754,
      -0.023968653579861207, 0.10648028303670536, 0.6350017926414929,
      1.1286859367757203)  # fmt: skip


def horner(coefficients: Sequence[float], x: Any) -> Any:
    """Evaluate a polynomial, highest power first, in the dtype of x.

    It works in place, since fresh memory costs more time.
    """
    total = x * coefficients[0]
    total += coefficients[1]
    for coefficient in coefficients[2:]:
        total *= x
        total += coefficient
    return total


def erf_of(xp: Any, x: Any) -> Any:
    """Compute erf of each element of x, float32 or float64, by one expression for every backend."""
    if hasattr(xp, "erf"):  # in generated kernels
        return xp.erf(x)
    if x.dtype.itemsize == 4:
        t = xp.minimum(xp.abs(x), 4.0)  # erf(4) rounds to 1
        is_small = t < 1.0
        small = horner(_P, t * t)
        small *= t
        small += t
        large = horner(_Q, t)
        large *= -t
        large = 1 - xp.exp(large)
    else:
        t = xp.minimum(xp.abs(x), 6.0)
        is_small = t < 0.46875
        s = t * t
        small = t * horner(_A, s) / horner(_B, s)
        large = 1 - xp.exp(-s) * horner(_C, t) / horner(_D, t)
    # Both are finite, so multiplying by truth values selects exactly, and much faster than `where`.
    small *= is_small
    large *= ~is_small
    small += large
    return xp.copysign(small, x)


_PER_ROOT_PI = 2 / math.sqrt(math.pi)
erf = _function(
    "erf",
    lambda g, y, x: (g * (exp(-square(x)) * _PER_ROOT_PI),),
    erf_of,
    UNARY,
    40,
    same_float,
    doc="2/√π · the integral of exp(-t²) for t from 0 to x: the error function.",
)
