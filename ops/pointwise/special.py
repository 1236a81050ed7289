"""Special functions of floats: lgamma and its derivatives, erfc and erfinv.

Each is one expression for every backend: it computes all branches and selects one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from graphflow.base.initial_numbers import NEAR_ERFINV
from graphflow.errors import ArgumentError
from graphflow.ir.op import Op, Tensor, error_location, function, sample
from graphflow.ir.spec import TensorSpec
from graphflow.ops.base.shape_rules import require_int, same_float
from graphflow.ops.pointwise.arithmetic import square
from graphflow.ops.pointwise.elementwise import SCALAR, UNARY, F, elementwise
from graphflow.ops.pointwise.transcendental import ERFC_PARTS, erf_of, exp, horner

# The gamma function -------------------------------------------------------------------------------

# log Γ(2 + z) = z·(1 - γ + Σ (-1)ᵏ·(ζ(k) - 1)·zᵏ⁻¹/k), k from 2, for |z| up to ½.
NEAR_TWO = (
    1.330476437424449e-10, -2.7595228851242334e-10, 5.731367241678862e-10, -1.1921401405860912e-09,
    2.4836745438024785e-09, -5.183475041970047e-09, 1.0838659214896955e-08, -2.2711094608943164e-08,
    4.7698101693639804e-08, -1.0043224823968099e-07, 2.1207184805554665e-07, -4.492469198764566e-07,
    9.55141213040742e-07, -2.039215753801366e-06, 4.374866789907488e-06, -9.439488275268397e-06,
    2.050721277567069e-05, -4.492623673813314e-05, 9.945751278180853e-05, -0.00022315475845357939,
    0.0005096695247430425, -0.001192753911703261, 0.0028905103307415234, -0.007385551028673986,
    0.020580808427784546, -0.0673523010531981, 0.3224670334241132, 0.42278433509846713,
)  # fmt: skip
_SINGLE = 12
"""Number of its last coefficients that float32 needs."""
_BERNOULLI = (1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510)
"""B₂, B₄ … of the asymptotic series."""
_FAR = 8.0  # from here on the asymptotic series of log Γ is exact
_HALF_LOG_TAU = math.log(2 * math.pi) / 2
_STIRLING = [b / (2 * k * (2 * k - 1)) for k, b in enumerate(_BERNOULLI, 1)][::-1]
_SIDES = (
    sample(F, low=0.2, high=9.5),
    sample(F, low=-2.8, high=-2.2),
    sample(SCALAR, low=0.2, high=9.5),
)


def _offset_from_integer(xp: Any, x: Any) -> Any:
    """Return the signed distance of x from the nearest integer, from -½ to ½."""
    inside = xp.maximum(xp.minimum(x, 2.0**60), -(2.0**60))  # larger floats all are integers
    return inside - xp.rint(inside)


def lgamma_of(xp: Any, x: Any) -> Any:
    """Compute log |Γ(x)|.

    Below 8 a recurrence leads to the series at 2, from 8 on Stirling's series applies. From -½ down
    it uses Γ(x)·Γ(-x) = -π / (x·sin πx).
    """
    size = xp.abs(x)
    is_small, is_low, is_far = size < 0.5, size < 1.5, size >= _FAR
    y, factors = xp.minimum(size, _FAR), xp.where(is_low, size, 1.0)
    for _ in range(6):
        above = y > 2.5
        y = xp.where(above, y - 1, y)
        factors = xp.where(above, factors * y, factors)
    z = xp.where(is_small, x, xp.where(is_low, size - 1, y - 2))
    factors = xp.where(is_small, size * (1 + x), factors)
    log = xp.log(xp.where(is_far, size, factors))
    series = NEAR_TWO[-_SINGLE:] if x.dtype.itemsize == 4 else NEAR_TWO
    near = horner(series, z) * z + xp.where(is_low, -log, log)
    inverse = 1 / xp.maximum(size, _FAR)
    rest = horner(_STIRLING, inverse * inverse) * inverse + (_HALF_LOG_TAU - 0.5)
    found = xp.where(is_far, (size - 0.5) * (log - 1) + rest, near)
    sine = xp.sin(_offset_from_integer(xp, size) * math.pi)
    mirrored = xp.log(math.pi / (size * xp.abs(sine))) - found
    return xp.where(x <= -0.5, xp.where(sine == 0, math.inf, mirrored), found)


lgamma = elementwise(
    "lgamma",
    lgamma_of,
    lambda g, y, x: (g * digamma(x),),
    same_float,
    _SIDES,
    flops=180,
    doc="log |Γ(x)|, the logarithm of the gamma function; infinite at 0, -1, -2 …",
)


def _cotangent_derivative(n: int) -> list[float]:
    """Return the n-th derivative of π·cot πx as coefficients of a polynomial of cot πx.

    The highest comes first; the factor πⁿ⁺¹ is left out.
    """
    found = [0.0, 1.0]
    for _ in range(n):
        slope = [k * c for k, c in enumerate(found)][1:]
        found = [-(a + b) for a, b in zip([*slope, 0.0, 0.0], [0.0, 0.0, *slope], strict=True)]
    return found[::-1]


def _integer_power(x: Any, power: int) -> Any:
    """Return x to an integer power of at least 1, by multiplication."""
    if power == 1:
        return x
    half = _integer_power(x, power // 2)
    return half * half * x if power % 2 else half * half


def _polygamma(xp: Any, x: Any, n: int) -> Any:
    """Sum the first terms of Hurwitz's zeta function, and the rest by Euler and Maclaurin.

    Below ½ it uses the derivatives of ψ(1 - x) - ψ(x) = π·cot πx.
    """
    is_left = x < 0.5
    t = xp.where(is_left, 1 - x, x)
    terms = (5 if x.dtype.itemsize == 4 else 10) + n
    total = _integer_power(1 / t, n + 1)
    for k in range(1, terms):
        total = total + _integer_power(1 / (t + k), n + 1)
    y = t + terms
    inverse = 1 / y
    series = [
        b * math.factorial(n + 2 * k - 1) / math.factorial(2 * k) / math.factorial(n)
        for k, b in enumerate(_BERNOULLI, 1)
    ]
    squared = inverse * inverse
    rest = inverse * 0.5 + horner(series[::-1], squared) * squared
    if n == 0:
        found = xp.log(y) - rest - total
    else:
        tail = _integer_power(inverse, n) * (rest + 1 / n)
        found = (total + tail) * float((-1) ** (n + 1) * math.factorial(n))
    rest = _offset_from_integer(xp, x)
    sine = xp.sin(rest * math.pi)
    turned = xp.sin((0.5 - xp.abs(rest)) * math.pi) / sine  # as a sine, exactly 0 at ±½
    if n % 2 == 0:  # on both sides of a pole the signs differ
        turned = xp.where((sine == 0) & (x < 0), math.nan, turned)
    mirrored = horner(_cotangent_derivative(n), turned) * math.pi ** (n + 1)
    return xp.where(is_left, found * (-1.0) ** n - mirrored, found)


def _infer_polygamma(x: TensorSpec, n: int) -> TensorSpec:
    return same_float(x)


_MAX_ORDER = 20
polygamma_op: Op = elementwise(
    "polygamma",
    _polygamma,
    lambda g, y, x, n: (g * polygamma_op(x, n=n + 1),),
    _infer_polygamma,
    tuple(
        sample(*s.inputs, low=s.low, high=s.high, n=n)
        for s, n in zip(_SIDES, (0, 1, 2), strict=True)
    ),
    flops=250,
)


@function
def digamma(x: Any, name: str | None = None) -> Tensor:
    """Compute ψ(x), the derivative of log Γ(x).

    Raises:
        DTypeError: x is not float.
    """
    result: Tensor = polygamma_op(x, n=0, name=name)
    return result


@function
def polygamma(n: int, x: Any, name: str | None = None) -> Tensor:
    """Compute the n-th derivative of `digamma` at x.

    Raises:
        DTypeError: x is not float.
        ArgumentError: n is no int from 0 to 20.
    """
    with error_location("polygamma"):
        if not 0 <= require_int("n", n) <= _MAX_ORDER:
            raise ArgumentError(f"n must be an int from 0 to {_MAX_ORDER}, got {n}")
    result: Tensor = polygamma_op(x, n=int(n), name=name)
    return result


# The error function -------------------------------------------------------------------------------

_TWO_PER_ROOT_PI = 2 / math.sqrt(math.pi)
# erfc(x) = exp(-x²)/(x·√π)·(1 + w·P(w - w₀)) with w = 1/x², from 4 on.
_FAR_MIDDLE = 0.03190789473684211
_FAR_TAIL = (
    2573045.00132504, -360668.03964304127, 47154.58115965692, -7751.697630408684,
    1380.0241273215124, -266.49744951335884, 57.14170990536859, -13.90575042736135,
    3.9622343528844644, -1.3868008430805445, 0.6472293004123739, -0.4777909958454347,
)  # fmt: skip


def _erfc(xp: Any, x: Any) -> Any:
    """Compute 1 - erf(x) near 0, elsewhere exp(-x²) times a ratio.

    Since x² is rounded, x is split into sixteenths, whose squares are exact, and the rest.
    """
    size = xp.minimum(xp.abs(x), 28.0)  # erfc(28) rounds to 0
    small, large = xp.minimum(size, 4.0), xp.maximum(size, 4.0)
    middle = horner(ERFC_PARTS[0], small) / horner(ERFC_PARTS[1], small)
    w = 1 / (large * large)
    far = (horner(_FAR_TAIL, w - _FAR_MIDDLE) * w + 1) * (_TWO_PER_ROOT_PI / 2) / large
    sixteenths = xp.rint(size * 16) * 0.0625
    decay = xp.exp(-(sixteenths * sixteenths)) * xp.exp((sixteenths - size) * (sixteenths + size))
    tail = decay * xp.where(size < 4, middle, far)
    return xp.where(size < 0.5, 1 - erf_of(xp, x), xp.where(x < 0, 2 - tail, tail))


erfc = elementwise(
    "erfc",
    _erfc,
    lambda g, y, x: (g * (exp(-square(x)) * -_TWO_PER_ROOT_PI),),
    same_float,
    UNARY,
    flops=150,
    doc="1 - erf(x), to the last digits where it is small, too.",
)

# erf⁻¹(x) = x·P(w - w₀) with w = -log(1 - x²), or with its root; up to which w, and w₀.
_Pieces = Sequence[tuple[float, float, tuple[float, ...]]]
_SINGLE_PIECES: _Pieces = (
    (5.0, 2.5, (
         -8.739830973051999e-09, 2.3285844507874355e-08, 4.6542873048510424e-07,
         -3.46335616555326e-06, -4.959743495185408e-06, 0.0002183469146927874,
         -0.0012527484164558688, -0.0041773897590802805, 0.24664028938940982, 1.5014093598328822,
    )),
    (math.inf, 3.25, (
         8.394483729955515e-05, -7.771334691236685e-05, -0.0003646934751435735,
         0.0010379800911218817, -0.0016853362446651223, 0.0024616836815419085,
         -0.0037515972269902735, 0.005374631917242919, 1.005258982603214, 3.083885535555737,
    )),
)  # fmt: skip
_DOUBLE_PIECES: _Pieces = (
    (6.25, 3.125, NEAR_ERFINV),
    (16.0, 3.25, (
         6.854906430026906e-10, 9.069252863037179e-08, -2.7131624527580294e-07,
         1.8388706833090645e-08, 1.498682725581901e-06, -4.014010335785518e-06,
         2.925746394013068e-06, 1.2475377015983698e-05, -4.73189897999412e-05, 6.82848304945795e-05,
         2.403125811582288e-05, -0.00035503751692834046, 0.0009532893636238467,
         -0.001688275556321603, 0.0024914420969882754, -0.0037512085075576363, 0.005370914553571544,
         1.0052589676941592, 3.0838856104922208,
    )),
    (math.inf, 5.05, (
         2.8902020023840497e-11, 8.580576847640318e-13, -3.8680562558337986e-10,
         1.2066633472708142e-09, -2.631157962159926e-09, 5.629393958724164e-09,
         -1.1207416116229185e-08, 2.1936501784045913e-08, -5.493200339439863e-08,
         2.0157529894849283e-07, -9.070860156214201e-07, 4.193863133475133e-06,
         -1.83745361405635e-05, 7.124031441527878e-05, -0.00020031200668016376,
         -0.0001698580914517663, 1.010285017597772, 4.90042105144364,
    )),
)  # fmt: skip


def _erfinv(xp: Any, x: Any) -> Any:
    w = -xp.log((1 - x) * (1 + x))
    root = xp.sqrt(xp.maximum(w, 0.0))
    pieces = _SINGLE_PIECES if x.dtype.itemsize == 4 else _DOUBLE_PIECES
    *others, (_, middle, last) = pieces
    found = horner(last, root - middle)
    for number, (limit, middle, near) in list(enumerate(others))[::-1]:
        found = xp.where(w < limit, horner(near, (root if number else w) - middle), found)
    return xp.where(xp.abs(x) == 1, x * math.inf, found * x)


_INSIDE = (sample(F, low=-0.8, high=0.8), sample(SCALAR, low=-0.8, high=0.8))
erfinv = elementwise(
    "erfinv",
    _erfinv,
    lambda g, y, x: (g * (exp(square(y)) * (1 / _TWO_PER_ROOT_PI)),),
    same_float,
    _INSIDE,
    flops=80,
    doc="The x whose `erf` is given; infinite at -1 and 1, NaN beyond.",
)
