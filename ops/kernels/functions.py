"""Vectorised exp, logarithms, tanh, erf, sigmoid, sin, cos and pow of our own, in float32 and
float64.

Each is one expression, with explicit fused multiply-adds, that gives the same bits in any lane of
any vector; within 2 ulp (float32) and 4 ulp (float64) over the whole range, and numpy's results for
NaN, infinities, zeros and denormals. The polynomials are near-minimax fits (Chebyshev
interpolation in 50 digits); the range reductions are those of Cody & Waite, "Software Manual for
the Elementary Functions", 1980. Where a fast way ends (sin and cos beyond 10⁵, powers of zero and
infinity) an element goes to the C library by itself.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from graphflow.ops.kernels.coefficients import (
    ASIN32,
    ASIN64,
    ATAN32,
    ATAN64,
    DOUBLE,
    ERF32,
    ERF64,
    EXP2_32,
    FAR,
    LOG2_32,
    LOG2E,
    LOG10_2,
    LOG10_2_32,
    LOG10E,
    LOG32,
    LOG64,
    LONG_LOG,
    PER_PI_HALF,
    PI_HALF,
    PI_HALF_32,
    PI_HALF_REST,
    SINGLE,
    TANH32,
    TWO_THIRDS_REST,
    Coefficients,
    Format,
)
from graphflow.ops.kernels.lanes import Floats, Lanes
from graphflow.ops.transcendental import ERFC_PARTS


def _format(f: Floats) -> Format:
    return SINGLE if f.is_single else DOUBLE


def _power_of_two(f: Floats, exponent: str) -> str:
    """2 to an integer power in the normal range."""
    form = _format(f)
    biased = f.int_step("add", exponent, f.int_const(form.bias))
    return f.of_bits(f.int_step("shl", biased, f.int_const(form.mantissa)))


def _scaled(f: Floats, x: str, n: str) -> str:
    """x·2ⁿ of a float n, by two factors where there is no instruction: a denormal result is rounded
    once."""
    found = f.lanes.scaled(f.element, x, n)
    if found is not None:
        return found
    form = _format(f)
    shifted = f.bits(f.add(n, f.const(form.magic)))
    whole = f.int_step("sub", shifted, f.int_const(form.magic_bits))
    half = f.int_step("ashr", whole, f.int_const(1))
    y = f.mul(x, _power_of_two(f, half))
    return f.mul(y, _power_of_two(f, f.int_step("sub", whole, half)))


def _limited(f: Floats, x: str, low: float | None, high: float | None) -> str:
    """x within limits; NaN as it is."""
    if high is not None:
        x = f.select(f.compare("ogt", x, f.const(high)), f.const(high), x)
    if low is not None:
        x = f.select(f.compare("olt", x, f.const(low)), f.const(low), x)
    return x


def _reduced(f: Floats, x: str) -> tuple[str, str, str]:
    """n, as a float and, with a bias, as an integer, and r, with x = n·log 2 + r and
    |r| <= log(2)/2."""
    form = _format(f)
    shifted = f.fma(x, f.const(LOG2E), f.const(form.magic))
    return _remainder(f, x, shifted)


def _remainder(f: Floats, x: str, shifted: str) -> tuple[str, str, str]:
    form = _format(f)
    n = f.sub(shifted, f.const(form.magic))
    r = f.fma(n, f.const(-form.ln2[0]), x)
    return n, f.bits(shifted), f.fma(n, f.const(-form.ln2[1]), r)


def _less_one(f: Floats, r: str) -> str:
    """exp(r) - 1 of a small r."""
    return f.fma(f.mul(r, r), f.horner(_format(f).exp, r), r)


def exp(f: Floats, x: str) -> str:
    """2ⁿ·exp(r)."""
    form = _format(f)
    n, _, r = _reduced(f, _limited(f, x, form.smallest, form.largest + 1))
    return _scaled(f, f.add(_less_one(f, r), f.const(1.0)), n)


def _times_power(f: Floats, e: str, biased: str) -> str:
    """2ⁿ·e + (2ⁿ - 1), where 2ⁿ is far from overflow and underflow."""
    form = _format(f)
    exponent = f.int_step("shl", biased, f.int_const(form.mantissa))  # the bias goes away
    scale = f.of_bits(f.int_step("add", exponent, f.int_const(form.bias << form.mantissa)))
    return f.fma(scale, e, f.sub(scale, f.const(1.0)))


def expm1(f: Floats, x: str) -> str:
    """2ⁿ·e + (2ⁿ - 1), all halved so that 2ⁿ stays finite."""
    form = _format(f)
    _, biased, r = _reduced(f, x)
    e = _less_one(f, r)
    n = f.int_step("sub", biased, f.int_const(form.magic_bits))
    scale = _power_of_two(f, f.int_step("sub", n, f.int_const(1)))
    y = f.fma(scale, e, f.sub(scale, f.const(0.5)))
    y = f.add(y, y)
    y = f.select(f.compare("ogt", x, f.const(form.largest)), f.const(float("inf")), y)
    y = f.select(f.compare("olt", x, f.const(-45.0)), f.const(-1.0), y)
    return f.select(f.compare("olt", f.abs(x), f.const(2.0**-54)), x, y)


def _split(f: Floats, x: str) -> tuple[str, str]:
    """r and k, with x = 2ᵏ·(1 + r) and 1 + r from √½ to √2, of a positive number."""
    form = _format(f)
    tiny = f.compare("olt", x, f.const(2.0 ** (1 - form.bias)))
    normal = f.select(tiny, f.mul(x, f.const(2.0 ** (form.mantissa + 2))), x)
    root = 0x3F3504F3 if f.is_single else 0x3FE6A09E667F3BCD  # bits of √½
    one = form.bias << form.mantissa
    shifted = f.int_step("add", f.bits(normal), f.int_const(one - root))
    k = f.int_step("lshr", shifted, f.int_const(form.mantissa))
    below = f.int_step("and", shifted, f.int_const((1 << form.mantissa) - 1))
    m = f.of_bits(f.int_step("add", below, f.int_const(root)))
    exponent = f.lanes.convert("sitofp", k, f.integer, f.element)
    shift = f.select(tiny, f.const(-form.bias - form.mantissa - 2.0), f.const(-float(form.bias)))
    return f.sub(m, f.const(1.0)), f.add(exponent, shift)


def log(f: Floats, x: str) -> str:
    """k·log 2 + log(1 + r)."""
    return _edges_of_log(f, x, _log_of(f, *_split(f, x)))


def _edges_of_log(f: Floats, x: str, y: str) -> str:
    y = f.select(f.compare("oeq", x, f.const(float("inf"))), x, y)
    y = f.select(f.compare("oeq", x, f.const(0.0)), f.const(float("-inf")), y)
    return f.select(f.compare("ult", x, f.const(0.0)), f.const(float("nan")), y)


def _log_of(f: Floats, r: str, k: str) -> str:
    """k·log 2 + log(1 + r)."""
    high, low = (f.const(part) for part in _format(f).ln2)
    square = f.mul(r, r)
    if f.is_single:
        y = f.mul(f.mul(square, r), f.horner(LOG32, r))
        y = f.fma(k, low, y)
        y = f.add(f.fma(square, f.const(-0.5), y), r)
        return f.fma(k, high, y)
    s = f.div(r, f.add(r, f.const(2.0)))
    z = f.mul(s, s)
    half = f.mul(square, f.const(0.5))
    rest = f.fma(z, f.horner(LOG64, z), half)
    y = f.sub(half, f.fma(s, rest, f.mul(k, low)))
    return f.fma(k, high, f.sub(r, y))


def log1p(f: Floats, x: str) -> str:
    """log(u) of u = 1 + x as rounded, and what the rounding left out over u."""
    one = f.const(1.0)
    u = f.add(x, one)
    large = f.compare("ogt", x, one)
    lost = f.select(large, f.sub(one, f.sub(u, x)), f.sub(x, f.sub(u, one)))
    y = log(f, u)
    corrected = f.add(y, f.div(lost, u))
    finite = f.compare("olt", f.abs(y), f.const(float("inf")))
    y = f.select(finite, corrected, y)
    return f.select(f.compare("olt", f.abs(x), f.const(2.0**-54)), x, y)


def log2(f: Floats, x: str) -> str:
    """k + log(1 + r)/log 2: whole for a power of two."""
    r, k = _split(f, x)
    return _edges_of_log(f, x, f.fma(_log_of(f, r, f.const(0.0)), f.const(LOG2E), k))


def log10(f: Floats, x: str) -> str:
    """k·log₁₀ 2 + log(1 + r)/log 10."""
    r, k = _split(f, x)
    high, low = (f.const(part) for part in (LOG10_2_32 if f.is_single else LOG10_2))
    y = f.fma(_log_of(f, r, f.const(0.0)), f.const(LOG10E), f.mul(k, low))
    return _edges_of_log(f, x, f.fma(k, high, y))


def tanh(f: Floats, x: str) -> str:
    """y = e / (2 + e), with e = exp(2|x|) - 1. For float32, r is from -0.1 to 0.59, so that e is
    accurate where x is small; and what the rounding of 2 + e left out is put back, by way of
    1 / (2 + e) = (1 - y) / 2."""
    form, two = _format(f), f.const(2.0)
    size = _limited(f, f.abs(x), None, 20.0)  # here it is 1
    double = f.add(size, size)
    if not f.is_single:
        _, biased, r = _reduced(f, double)
        e = _times_power(f, _less_one(f, r), biased)
        return f.copysign(f.div(e, f.add(e, two)), x)
    turns = f.fma(double, f.const(LOG2E), f.const(-0.35))
    _, biased, r = _remainder(f, double, f.add(turns, f.const(form.magic)))
    e = _times_power(f, f.fma(f.mul(r, r), f.horner(TANH32, r), r), biased)
    total = f.add(e, two)
    is_large = f.compare("ogt", e, two)
    large, small = f.select(is_large, e, two), f.select(is_large, two, e)
    lost = f.sub(small, f.sub(total, large))
    y = f.div(e, total)
    half = f.const(0.5)
    y = f.fma(f.mul(y, lost), f.fma(y, half, f.neg(half)), y)
    return f.copysign(y, x)


def sigmoid(f: Floats, x: str) -> str:
    """1 / (1 + e), or e / (1 + e) where x is negative, with e = exp(-|x|); what the rounding of
    1 + e left out is put back."""
    one = f.const(1.0)
    small = exp(f, f.neg(f.abs(x)))
    total = f.add(small, one)
    lost = f.sub(small, f.sub(total, one))
    negative = f.compare("olt", x, f.const(0.0))
    y = f.div(f.select(negative, small, one), total)
    inverse = f.select(negative, f.sub(one, y), y)
    return f.fma(f.neg(f.mul(y, lost)), inverse, y)


def erf(f: Floats, x: str) -> str:
    return _erf_single(f, x) if f.is_single else _erf_double(f, x)


def _erf_single(f: Floats, x: str) -> str:
    """1 - exp(-w), with w = |x|·Q(|x|) as a sum of two numbers: good near 0, too."""
    t = _limited(f, f.abs(x), None, 4.0)  # here it is 1
    *high, first = (-c for c in ERF32)
    near = struct.unpack("f", struct.pack("f", first))[0]
    main = f.mul(t, f.const(near))
    lost = f.fma(t, f.const(near), f.neg(main))
    more = f.fma(t, f.fma(t, f.horner(high, t), f.const(first - near)), lost)
    w = f.add(main, more)
    rest = f.add(f.sub(main, w), more)
    _, biased, r = _reduced(f, w)
    square = f.mul(r, r)
    e = f.add(r, f.fma(square, f.horner(_format(f).exp, r), rest))
    return f.copysign(_times_power(f, e, biased), x)


def _erf_double(f: Floats, x: str) -> str:
    """x + x·P(x²) up to 1, then 1 - erfc(x)."""
    size = f.abs(x)
    small = f.fma(size, f.horner(ERF64, f.mul(size, size)), size)
    t = _limited(f, size, None, 6.0)  # here it is 1
    numerator, denominator = (f.horner(part, t) for part in ERFC_PARTS)
    rest = f.div(f.mul(exp(f, f.neg(f.mul(t, t))), numerator), denominator)
    large = f.sub(f.const(1.0), rest)
    return f.copysign(f.select(f.compare("olt", size, f.const(1.0)), small, large), x)


def arctan(f: Floats, x: str) -> str:
    """t + t³·P(t²), with t = |x| up to 1, and π/2 - atan(1/|x|) beyond."""
    size, one = f.abs(x), f.const(1.0)
    far = f.compare("ogt", size, one)
    t = f.select(far, f.div(one, size), size)
    near = _odd(f, t, ATAN32 if f.is_single else ATAN64)
    high, low = (f.const(part) for part in _quarter(f))
    rest = f.add(f.sub(high, near), low)
    return f.copysign(f.select(far, rest, near), x)


def arcsin(f: Floats, x: str) -> str:
    """π/2 - 2·asin(√((1 - |x|)/2)) beyond ½."""
    near, twice = _arcsin_parts(f, x)
    high, low = (f.const(part) for part in _quarter(f))
    rest = f.add(f.sub(high, twice), low)
    return f.copysign(f.select(_beyond_half(f, x), rest, near), x)


def arccos(f: Floats, x: str) -> str:
    """π/2 - asin(x), but 2·asin(√((1 - x)/2)) above ½, and π less that of -x below -½."""
    near, twice = _arcsin_parts(f, x)
    high, low = (f.const(part) for part in _quarter(f))
    middle = f.add(f.sub(high, f.copysign(near, x)), low)
    below = f.add(f.sub(f.add(high, high), twice), f.add(low, low))
    far = f.select(f.compare("olt", x, f.const(0.0)), below, twice)
    return f.select(_beyond_half(f, x), far, middle)


def _arcsin_parts(f: Floats, x: str) -> tuple[str, str]:
    """asin(|x|) up to ½, and 2·asin(√((1 - |x|)/2)) beyond, by one polynomial."""
    size, half = f.abs(x), f.const(0.5)
    root = f.lanes.intrinsic("sqrt", f.element, f.fma(f.neg(size), half, half))
    t = f.select(_beyond_half(f, x), root, size)
    y = _odd(f, t, ASIN32 if f.is_single else ASIN64)
    return y, f.add(y, y)


def _beyond_half(f: Floats, x: str) -> str:
    return f.compare("ogt", f.abs(x), f.const(0.5))


def _odd(f: Floats, t: str, coefficients: Coefficients) -> str:
    """t + t³·P(t²)."""
    z = f.mul(t, t)
    return f.fma(f.mul(t, z), f.horner(coefficients, z), t)


def _quarter(f: Floats) -> tuple[float, float]:
    """π/2 in two parts."""
    return (PI_HALF_32[0], PI_HALF_32[1]) if f.is_single else (math.pi / 2, PI_HALF_REST)


# With calls of the C library for some elements --------------------------------------------------


def sin(f: Floats, x: str) -> str:
    return _call(f, "sin", x)


def cos(f: Floats, x: str) -> str:
    return _call(f, "cos", x)


def power(f: Floats, x: str, y: str) -> str:
    return _call(f, "pow", x, y)


def _call(f: Floats, name: str, *args: str) -> str:
    """A call of a function of the module, which is written where it is first called."""
    own = f.lanes.guarded(name, f.element, args, lambda: _FAST[name](f, *args))
    if own is not None:
        return own
    full = f"@{name}_{f.element}"
    kind = f.lanes.vector(f.element)
    if full not in f.lanes.module.declared:
        f.lanes.module.declared[full] = ""
        f.lanes.module.declared[full] = _guarded(f, full, name, len(args))
    return f.lanes.write(f"call {kind} {full}({', '.join(f'{kind} {a}' for a in args)})")


def _guarded(f: Floats, full: str, name: str, count: int) -> str:
    """The fast way for all lanes, and the C library for those lanes where that is no good."""
    lines: list[str] = []
    lanes = Lanes(f.lanes.module, f.lanes.width, lines)
    inner = Floats(lanes, f.element)
    args = ["%x", "%y"][:count]
    fast, hard = _FAST[name](inner, *args)
    width, kind = lanes.width, lanes.vector(f.element)
    single = f.is_single
    taken = "\n".join(
        f"  %{a}{'s' if single else ''} = extractelement {kind} {arg}, i32 %i"
        + (f"\n  %{a} = fpext float %{a}s to double" if single else "")
        for a, arg in zip("ab", args, strict=False)
    )
    back = "\n  %rs = fptrunc double %r to float" if single else ""
    lanes.module.declared[f"@{name}"] = f"declare double @{name}({', '.join(['double'] * count)})"
    return f"""define internal {kind} {full}({", ".join(f"{kind} {a}" for a in args)}) noinline {{
entry:
{chr(10).join(lines)}
  %mask = bitcast <{width} x i1> {hard} to i{width}
  %any = icmp ne i{width} %mask, 0
  br i1 %any, label %loop, label %done
loop:
  %i = phi i32 [0, %entry], [%j, %next]
  %now = phi {kind} [{fast}, %entry], [%then, %next]
  %is = extractelement <{width} x i1> {hard}, i32 %i
  br i1 %is, label %one, label %next
one:
{taken}
  %r = call double @{name}({", ".join(f"double %{a}" for a in "ab"[:count])}){back}
  %put = insertelement {kind} %now, {f.element} {"%rs" if single else "%r"}, i32 %i
  br label %next
next:
  %then = phi {kind} [%now, %loop], [%put, %one]
  %j = add i32 %i, 1
  %more = icmp ult i32 %j, {width}
  br i1 %more, label %loop, label %done
done:
  %result = phi {kind} [{fast}, %entry], [%then, %next]
  ret {kind} %result
}}"""


def _quarter_turns(f: Floats, x: str) -> tuple[str, str]:
    """n, an integer with a bias that is a multiple of 4, and x - n·π/2."""
    form = _format(f)
    shifted = f.fma(x, f.const(PER_PI_HALF), f.const(form.magic))
    n = f.sub(shifted, f.const(form.magic))
    r = x
    for part in PI_HALF_32 if f.is_single else PI_HALF:
        r = f.fma(n, f.const(-part), r)
    return f.bits(shifted), r


def _wave(f: Floats, x: str, ahead: int) -> tuple[str, str]:
    """sin(x + ahead·π/2), and where x is too far out."""
    form = _format(f)
    turns, r = _quarter_turns(f, x)
    quadrant = f.int_step("add", turns, f.int_const(ahead)) if ahead else turns
    z = f.mul(r, r)
    sine = f.fma(f.mul(r, z), f.horner(form.sin, z), r)
    rest = f.fma(f.mul(z, z), f.horner(form.cos, z), f.mul(z, f.const(-0.5)))
    cosine = f.add(rest, f.const(1.0))
    y = f.select(_has_bit(f, quadrant, 1), cosine, sine)
    sign = f.int_step("and", quadrant, f.int_const(2))
    sign = f.int_step("shl", sign, f.int_const(form.mantissa + 7 if f.is_single else 62))
    y = f.of_bits(f.int_step("xor", f.bits(y), sign))
    if not ahead:  # the sign of a zero
        y = f.select(f.compare("oeq", x, f.const(0.0)), x, y)
    return y, f.compare("uge", f.abs(x), f.const(FAR))


def _has_bit(f: Floats, x: str, bit: int) -> str:
    kept = f.int_step("and", x, f.int_const(bit))
    return f.lanes.two("icmp ne", f.integer, kept, f.int_const(0))


def _pow(f: Floats, x: str, y: str) -> tuple[str, str]:
    """exp(y·log|x|), with the sign, or NaN, where x is negative."""
    raised = _pow_single(f, x, y) if f.is_single else _pow_double(f, f.abs(x), y)
    lanes, size = f.lanes, f.abs(x)
    halved = f.mul(y, f.const(0.5))
    whole = f.compare("oeq", lanes.intrinsic("rint", f.element, y), y)
    even = f.compare("oeq", lanes.intrinsic("rint", f.element, halved), halved)
    signed = f.select(even, raised, f.neg(raised))
    of_negative = f.select(whole, signed, f.const(float("nan")))
    result = f.select(f.compare("olt", x, f.const(0.0)), of_negative, raised)
    infinity = f.const(float("inf"))
    above, below = f.compare("ogt", size, f.const(0.0)), f.compare("olt", size, infinity)
    inside = lanes.two("and", "i1", above, below)
    finite = f.compare("olt", f.abs(y), infinity)
    easy = lanes.two("and", "i1", inside, finite)
    return result, lanes.two("xor", "i1", easy, lanes.constant(True, "i1"))


def _pow_single(f: Floats, x: str, y: str) -> str:
    """2 to y·log₂|x|, which is a float64; what follows of it is a float32 again."""
    wide = Floats(f.lanes, "double")
    r, k, exponent = (
        f.lanes.convert("fpext", a, "float", "double") for a in (*_split(f, f.abs(x)), y)
    )
    power = wide.mul(exponent, wide.fma(r, wide.horner(LOG2_32, r), k))
    power = _limited(wide, power, -200.0, 200.0)  # here it is 0, and infinite
    n = wide.sub(wide.add(power, wide.const(DOUBLE.magic)), wide.const(DOUBLE.magic))
    rest, whole = (
        f.lanes.convert("fptrunc", a, "double", "float") for a in (wide.sub(power, n), n)
    )
    return _scaled(f, f.fma(rest, f.horner(EXP2_32, rest), f.const(1.0)), whole)


def _pow_double(f: Floats, x: str, y: str) -> str:
    """By a logarithm in two parts, good to 2⁻⁶³: an exponent multiplies its error."""
    high, low = _long_log(f, x)
    product = f.mul(y, high)
    rest = f.fma(y, low, f.fma(y, high, f.neg(product)))
    power = exp(f, product)
    better = f.fma(power, rest, power)
    better = f.select(f.compare("olt", power, f.const(float("inf"))), better, power)
    inside = f.compare("olt", f.abs(product), f.const(750.0))  # beyond, it is 0 or infinite
    return f.select(inside, better, power)


def _long_log(f: Floats, x: str) -> tuple[str, str]:
    """log x as a sum of two numbers: k·log 2 + 2s + s·z·(⅔ + z·P(z)), s = r / (2 + r), z = s²."""
    r, k = _split(f, x)
    two = f.const(2.0)
    total = f.add(r, two)
    lost = f.sub(r, f.sub(total, two))
    s = f.div(r, total)
    s_low = f.div(f.fma(f.neg(s), lost, f.fma(f.neg(s), total, r)), total)
    z = f.mul(s, s)
    z_low = f.fma(f.add(s, s), s_low, f.fma(s, s, f.neg(z)))
    tail = f.mul(z, f.horner(LONG_LOG, z))
    third = f.const(2 / 3)
    p = f.add(third, tail)
    p_low = f.add(f.add(f.sub(third, p), tail), f.const(TWO_THIRDS_REST))
    w, w_low = _product(f, (z, z_low), (p, p_low))
    v, v_low = _product(f, (s, s_low), (w, w_low))
    high, low = (f.const(part) for part in DOUBLE.ln2)
    whole, twice = f.mul(k, high), f.add(s, s)  # exact
    first, rest = _sum(f, whole, twice)
    second, more = _sum(f, first, v)
    small = f.add(f.add(rest, more), f.fma(k, low, f.add(f.add(s_low, s_low), v_low)))
    return _sum(f, second, small)


def _sum(f: Floats, a: str, b: str) -> tuple[str, str]:
    """a + b rounded, and what the rounding left out (Knuth)."""
    total = f.add(a, b)
    back = f.sub(total, a)
    return total, f.add(f.sub(a, f.sub(total, back)), f.sub(b, back))


def _product(f: Floats, a: tuple[str, str], b: tuple[str, str]) -> tuple[str, str]:
    """The product of two numbers in two parts each."""
    high = f.mul(a[0], b[0])
    exact = f.fma(a[0], b[0], f.neg(high))
    return high, f.fma(a[1], b[0], f.fma(a[0], b[1], exact))


_FAST: dict[str, Callable[..., tuple[str, str]]] = {
    "sin": lambda f, x: _wave(f, x, 0),
    "cos": lambda f, x: _wave(f, x, 1),
    "pow": _pow,
}
FUNCTIONS: dict[str, Callable[..., str]] = {
    "exp": exp, "expm1": expm1, "log": log, "log1p": log1p, "log2": log2, "log10": log10,
    "tanh": tanh, "erf": erf, "arctan": arctan, "arcsin": arcsin, "arccos": arccos,
    "sigmoid": sigmoid, "sin": sin, "cos": cos, "power": power,
}  # fmt: skip
