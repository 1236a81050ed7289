"""Elementwise arithmetic, comparison, logic and rounding; `elementwise` declares such ops.

Each op gives `expr`, the value of one element. It serves numpy, CuPy and the kernel generators
alike. An op that is a single ufunc also gets `into`, so that it writes straight to its buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from graphflow.errors import ArgumentError
from graphflow.ir.op import (
    FUNCTIONS,
    Cost,
    Op,
    Sample,
    Sharding,
    Tensor,
    function,
    promote_inputs,
    register,
    sample,
    user_location,
)
from graphflow.ir.spec import (
    TensorSpec,
    broadcast_shapes,
    is_inexact,
    kind,
    product,
    real_dtype,
    spec,
)
from graphflow.ops.base.roots import divide_out, one_where_masked, zero_at_root
from graphflow.ops.base.shape_rules import (
    bool_result,
    conj,
    constant_value,
    jvp_from_slopes,
    require_kind,
    same_float,
    same_inexact,
    same_number,
    same_numeric,
    zero_where_zero,
)
from graphflow.ops.sharding.rules import linear_rule

F = spec("float32", (3, 4))
ROW = spec("float32", (4,))
COLUMN = spec("float32", (3, 1))
SCALAR = spec("float32", ())
INT = spec("int32", (3, 4))
BOOL = spec("bool", (3, 4))
COMPLEX = spec("complex64", (3, 4))
COMPLEX_ROW = spec("complex64", (4,))

UNARY = (sample(F), sample(SCALAR))
UNARY_INT = (*UNARY, sample(INT))
POSITIVE = (sample(F, low=0.3, high=3.0), sample(SCALAR, low=0.3, high=3.0))
BINARY = (sample(F, F), sample(F, ROW), sample(COLUMN, ROW), sample(SCALAR, F))
BINARY_INT = (*BINARY, sample(INT, INT))
NUMBER = (*UNARY_INT, sample(COMPLEX))
BINARY_NUMBER = (
    *BINARY_INT,
    sample(COMPLEX, COMPLEX_ROW),
    sample(SCALAR.with_dtype("complex64"), COMPLEX),
)
# Both inputs positive: away from poles and branch points.
RATIO = tuple(sample(*s.inputs, low=0.4, high=3.0) for s in BINARY)


def per_element(flops: int) -> Callable[..., Cost]:
    """Return a cost rule of `flops` for each element of the broadcast inputs."""

    def cost(*specs: TensorSpec, **attrs: Any) -> Cost:
        return Cost(flops=product(broadcast_shapes(*(s.shape for s in specs))) * flops)

    return cost


def elementwise(
    name: str,
    expr: str | Callable[..., Any],
    vjp: Callable[..., Sequence[Tensor | None]] | None,
    infer: Callable[..., TensorSpec] = same_numeric,
    samples: Sequence[Sample] = (),
    flops: int = 1,
    into: Callable[..., None] | None = None,
    promotes: bool = True,
    halves: bool = False,
    doc: str = "",
    sharding: Callable[..., Sharding] | None = None,
    jvp: Callable[..., Tensor | None] | None = None,
) -> Op:
    """Register an elementwise op.

    Args:
        expr: the name of a ufunc, or a function (xp, *scalars, **attrs).
        into: (xp, out, *arrays, **attrs). `out` may share the buffer of an input, so it is written
            last.
        vjp: gives cotangents of the result's shape, whatever was broadcast to it; reverse mode
            reduces them to the inputs' shapes.
    """
    ufunc = None
    if isinstance(expr, str):
        ufunc = expr

        def expr(xp: Any, *arrays: Any) -> Any:
            return getattr(xp, ufunc)(*arrays)

        def into(xp: Any, out: Any, *arrays: Any) -> None:
            getattr(xp, ufunc)(*arrays, out=out)

    return register(
        Op(
            name,
            infer=infer,
            expr=expr,
            ufunc=ufunc,
            into=into,
            vjp=vjp,
            jvp=jvp,
            cost=per_element(flops),
            samples=samples,
            promotes=promotes,
            elementwise=True,
            halves=halves,
            doc=doc,
            sharding=sharding,
        )
    )


def no_gradient(g: Tensor, y: Tensor, *inputs: Tensor, **attrs: Any) -> tuple[None, ...]:
    """Return no cotangents: the vjp of functions that are flat almost everywhere."""
    return (None,) * len(inputs)


_COMPLEX_RATIO = sample(COMPLEX, COMPLEX_ROW, low=0.4, high=3.0)

# Arithmetic -----------------------------------------------------------------------------------

add = elementwise(
    "add",
    "add",
    lambda g, y, a, b: (g, g),
    same_number,
    BINARY_NUMBER,
    sharding=linear_rule,
)
subtract = elementwise(
    "subtract",
    "subtract",
    lambda g, y, a, b: (g, -g),
    same_number,
    BINARY_NUMBER,
    sharding=linear_rule,
)
multiply = elementwise(
    "multiply",
    "multiply",
    lambda g, y, a, b: (g * conj(b), g * conj(a)),
    same_number,
    BINARY_NUMBER,
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


negative = elementwise("negative", "negative", lambda g, y, x: (-g,), same_number, NUMBER)
positive = elementwise("positive", "positive", lambda g, y, x: (g,), same_number, NUMBER)


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


square = elementwise("square", "square", lambda g, y, x: (g * (conj(x) * 2),), same_number, NUMBER)
reciprocal = elementwise(
    "reciprocal",
    "reciprocal",
    lambda g, y, x: (-(g * conj(square(y))),),
    same_inexact,
    (*POSITIVE, sample(COMPLEX, low=0.3, high=3.0)),
    flops=4,
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


# Comparison and logic ---------------------------------------------------------------------------


def _orderable(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    require_kind(x, "int", "float")
    return bool_result(x, *others)


def _numbers(x: TensorSpec) -> TensorSpec:
    return same_number(x).with_dtype(bool)


def _logical(x: TensorSpec, *others: TensorSpec) -> TensorSpec:
    require_kind(x, "bool")
    return bool_result(x, *others)


def _comparison(
    name: str, infer: Callable[..., TensorSpec] = _orderable, samples: Any = BINARY_INT
) -> Op:
    return elementwise(name, name, None, infer, samples)


equal = _comparison("equal", bool_result, BINARY_NUMBER)
not_equal = _comparison("not_equal", bool_result, BINARY_NUMBER)
less = _comparison("less")
less_equal = _comparison("less_equal")
greater = _comparison("greater")
greater_equal = _comparison("greater_equal")

_BOOLS = (sample(BOOL, BOOL), sample(spec("bool"), BOOL))
logical_and = elementwise("logical_and", "logical_and", None, _logical, _BOOLS)
logical_or = elementwise("logical_or", "logical_or", None, _logical, _BOOLS)
logical_xor = elementwise("logical_xor", "logical_xor", None, _logical, _BOOLS)
logical_not = elementwise("logical_not", "logical_not", None, _logical, (sample(BOOL),))

_TESTED = (*UNARY, sample(COMPLEX))
isnan = elementwise("isnan", "isnan", None, _numbers, _TESTED)
isinf = elementwise("isinf", "isinf", None, _numbers, _TESTED)
isfinite = elementwise("isfinite", "isfinite", None, _numbers, _TESTED)
