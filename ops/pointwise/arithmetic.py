"""Elementwise arithmetic, and rounding."""

from __future__ import annotations

from typing import Any

from graphflow.errors import ArgumentError
from graphflow.ir.op import FUNCTIONS, Op, Tensor, function, promote_inputs, sample, user_location
from graphflow.ir.spec import is_inexact, kind, real_dtype
from graphflow.ops.base.roots import divide_out, one_where_masked, zero_at_root
from graphflow.ops.base.shape_rules import (
    conj,
    constant_value,
    jvp_from_slopes,
    same_float,
    same_inexact,
    same_number,
    zero_where_zero,
)
from graphflow.ops.pointwise.comparison import equal, greater, less, logical_and, not_equal
from graphflow.ops.pointwise.elementwise import (
    BINARY_NUMBER,
    COLUMN,
    COMPLEX,
    COMPLEX_ROW,
    INT,
    NUMBER,
    POSITIVE,
    RATIO,
    ROW,
    SCALAR,
    F,
    elementwise,
    no_gradient,
)
from graphflow.ops.sharding.rules import linear_rule

_COMPLEX_RATIO = sample(COMPLEX, COMPLEX_ROW, low=0.4, high=3.0)

# Arithmetic -----------------------------------------------------------------------------------

add = elementwise(
    "add",
    "add",
    lambda g, y, a, b: (g, g),
    same_number,
    BINARY_NUMBER,
    sharding=linear_rule,
    doc="a + b.",
)
subtract = elementwise(
    "subtract",
    "subtract",
    lambda g, y, a, b: (g, -g),
    same_number,
    BINARY_NUMBER,
    sharding=linear_rule,
    doc="a - b.",
)
multiply = elementwise(
    "multiply",
    "multiply",
    lambda g, y, a, b: (g * conj(b), g * conj(a)),
    same_number,
    BINARY_NUMBER,
    doc="a·b.",
)


def _divide_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    quotient = g / conj(b)
    return quotient, -(quotient * conj(y))


_divide = elementwise(
    "divide", "divide", _divide_vjp, same_inexact, (*RATIO, _COMPLEX_RATIO), flops=4
)


@function
def divide(a: Any, b: Any, name: str | None = None) -> Tensor:
    """Compute a / b over broadcast shapes; ints and bools give float64, as in numpy.

    Raises:
        DTypeError: the kinds of the dtypes mix.
        ShapeError: the shapes do not broadcast.
    """
    a, b = promote_inputs("divide", (a, b))
    if not is_inexact(a.dtype):
        a, b = (FUNCTIONS["astype"](t, "float64") for t in (a, b))
    result: Tensor = _divide(a, b, name=name)
    return result


floor_divide = elementwise(
    "floor_divide",
    "floor_divide",
    no_gradient,
    samples=(sample(F, F, low=0.4, high=0.9), sample(COLUMN, ROW, low=0.4, high=0.9)),
    flops=6,
    doc="The largest integer not above a / b, in the common dtype.",
)


def divisor_cotangent(g: Tensor, quotient: Tensor) -> Tensor:
    """Return the cotangent of b in a - quotient·b: 0 where the quotient is 0, as b is unused."""
    return zero_where_zero(quotient, -(g * quotient))


remainder = elementwise(
    "remainder",
    "remainder",
    doc="a - floor(a / b)·b, with the sign of b.",
    vjp=lambda g, y, a, b: (g, divisor_cotangent(g, floor_divide(a, b))),
    samples=(sample(F, ROW, low=1.1, high=1.9), sample(SCALAR, F, low=1.1, high=1.9)),
    flops=6,
)


def _pow_vjp(g: Tensor, y: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return g·∂/∂a and g·∂/∂b; the first is 0 where b is 0.

    The second is 0 where a or the result is 0, or a is negative: there it has no real value.
    """
    number = constant_value(b)
    if number is None:
        less = FUNCTIONS["where"](equal(b, 0), 0, b - 1)  # 0·a⁰ is 0 for an infinite a, too
    else:
        less = number and number - 1
    has_log = not_equal(a, 0) if kind(a.dtype) == "complex" else greater(a, 0)
    matters = logical_and(has_log, not_equal(y, 0))
    logarithm = FUNCTIONS["log"](FUNCTIONS["where"](matters, a, 1))
    slopes = conj(b * pow(a, less)), conj(y * logarithm)
    return g * slopes[0], g * slopes[1]


_pow = elementwise(
    "pow", "power", _pow_vjp, same_number, (*RATIO, sample(INT, INT), _COMPLEX_RATIO), flops=20
)


@function
def pow(x: Any, exponent: Any, name: str | None = None) -> Tensor:
    """Compute x ** exponent; Python numbers 1, 2, 0.5 and -1 as exponents become cheaper ops.

    Raises:
        DTypeError: the kinds of the dtypes mix.
        ArgumentError: x is int and the exponent negative.
    """
    if isinstance(x, Tensor) and type(exponent) in (int, float):
        if kind(x.dtype) == "int" and exponent < 0:
            raise ArgumentError(
                f"pow at {user_location()}: ints cannot be raised to a negative power, {exponent}; "
                "convert them with .astype"
            )
        cheaper: dict[float, Any] = {1: positive, 2: square}
        if is_inexact(x.dtype):
            cheaper |= {0.5: FUNCTIONS["sqrt"], -1: reciprocal}
        elif type(exponent) is float:
            cheaper = {}
        if exponent in cheaper:
            result: Tensor = cheaper[exponent](x, name=name)
            return result
    result = _pow(x, exponent, name=name)
    return result


negative = elementwise(
    "negative", "negative", lambda g, y, x: (-g,), same_number, NUMBER, doc="-x."
)
positive = elementwise(
    "positive",
    "positive",
    lambda g, y, x: (g,),
    same_number,
    NUMBER,
    doc="+x: the values of x as they are.",
)


def _sign(xp: Any, x: Any) -> Any:
    if x.dtype.kind != "c":
        return xp.sign(x)
    size = xp.abs(x)
    return x / xp.where(size == 0, xp.ones_like(size), size)


def _sign_vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor | None]:
    """Return the part of g across the direction of a complex number, over its size; 0 at 0."""
    if kind(x.dtype) != "complex":
        return (None,)
    size = abs(x)
    across = g - y * FUNCTIONS["real"](g * conj(y))
    return (zero_where_zero(x, across / FUNCTIONS["where"](equal(size, 0), 1, size)),)


sign = elementwise(
    "sign", _sign, _sign_vjp, same_number, (*POSITIVE, sample(INT), sample(COMPLEX)),
    into=lambda xp, out, x: xp.sign(x, out=out) if x.dtype.kind != "c" else xp.copyto(
        out, _sign(xp, x)
    ),
    doc="x / |x|, and 0 where x is 0.",
)  # fmt: skip


def _abs_vjp(g: Tensor, y: Tensor, x: Tensor) -> tuple[Tensor]:
    quotient = divide_out(g, y)
    if quotient is not None:
        return (x * quotient,)
    if kind(x.dtype) == "complex":
        y = one_where_masked(g, y)
        return (zero_at_root(y, x, g * (x / y)),)
    return (zero_where_zero(x, g * sign(x)),)


abs = elementwise(
    "abs",
    "abs",
    _abs_vjp,
    lambda x: same_number(x).with_dtype(real_dtype(x.dtype)),
    (*POSITIVE, sample(F, low=-3, high=-0.3), sample(COMPLEX)),
    doc="|x|, of a complex number its size; the gradient at 0 is 0.",
    jvp=jvp_from_slopes(_abs_vjp),
)
copysign = elementwise(
    "copysign",
    "copysign",
    lambda g, y, a, b: (zero_where_zero(a, g * (sign(a) * sign(y))), None),
    same_float,
    (*RATIO, sample(F, F, low=-3, high=-0.3)),
    doc="|a| with the sign of b, of zeros and NaN, too.",
)


@function
def signbit(x: Any, name: str | None = None) -> Tensor:
    """Return True where x has a negative sign, as -0.0 and some NaN have, too.

    Raises:
        DTypeError: x is not float.
    """
    result: Tensor = less(copysign(1.0, x), 0.0, name=name)
    return result


square = elementwise(
    "square", "square", lambda g, y, x: (g * (conj(x) * 2),), same_number, NUMBER, doc="x²."
)
reciprocal = elementwise(
    "reciprocal",
    "reciprocal",
    lambda g, y, x: (-(g * conj(square(y))),),
    same_inexact,
    (*POSITIVE, sample(COMPLEX, low=0.3, high=3.0)),
    flops=4,
    doc="1 / x.",
)


# Rounding: flat almost everywhere; ints stay as they are ----------------------------------------


def _rounding(name: str, ufunc: str, doc: str) -> Op:
    def expr(xp: Any, x: Any) -> Any:
        return getattr(xp, ufunc)(x) if x.dtype.kind == "f" else x

    def round_into(xp: Any, out: Any, x: Any) -> None:
        if x.dtype.kind == "f":
            getattr(xp, ufunc)(x, out=out)
        else:
            xp.copyto(out, x)

    samples = (sample(F, low=0.1, high=0.4), sample(SCALAR, low=1.6, high=1.9), sample(INT))
    return elementwise(name, expr, no_gradient, samples=samples, into=round_into, doc=doc)


floor = _rounding("floor", "floor", "The largest integer not above x, in its dtype.")
ceil = _rounding("ceil", "ceil", "The smallest integer not below x, in its dtype.")
trunc = _rounding("trunc", "trunc", "x without its fraction, in its dtype.")
round = _rounding("round", "rint", "The nearest integer, in the dtype of x; halves go to the even.")
