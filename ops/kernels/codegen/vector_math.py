"""Vectorised exp, logarithms, tanh, erf, sigmoid and arc functions, in float32 and float64.

Each is one expression with explicit fused multiply-adds, so any lane of any vector gives the same
bits. Results are within 2 ulp (float32) and 4 ulp (float64), and numpy's for NaN, infinities, zeros
and denormals. The polynomials are near-minimax fits (Chebyshev interpolation in 50 digits).

Source: the range reductions are those of Cody & Waite, "Software Manual for the Elementary
Functions", 1980.
"""

from __future__ import annotations

import math
import struct

from graphflow.ops.kernels.codegen.coefficients import (
    ASIN32,
    ASIN64,
    ATAN32,
    ATAN64,
    DOUBLE,
    ERF32,
    ERF64,
    LOG2E,
    LOG10_2,
    LOG10_2_32,
    LOG10E,
    LOG32,
    LOG64,
    PI_HALF_32,
    PI_HALF_REST,
    SINGLE,
    TANH32,
    Coefficients,
    FloatFormat,
)
from graphflow.ops.kernels.codegen.vector_writer import Floats
from graphflow.ops.pointwise.transcendental import ERFC_PARTS


def format_of(f: Floats) -> FloatFormat:
    return SINGLE if f.is_single else DOUBLE


def _power_of_two(f: Floats, exponent: str) -> str:
    """Return 2 to an integer power in the normal range."""
    form = format_of(f)
    biased = f.int_step("add", exponent, f.int_const(form.bias))
    return f.from_bits(f.int_step("shl", biased, f.int_const(form.mantissa)))


def scale_by_power_of_two(f: Floats, x: str, n: str) -> str:
    """Return x·2ⁿ for a whole float n.

    Without an instruction for it, two factors are used, so that a denormal result is rounded once.
    """
    found = f.lanes.scalef(f.element, x, n)
    if found is not None:
        return found
    form = format_of(f)
    shifted = f.bits(f.add(n, f.const(form.magic)))
    whole = f.int_step("sub", shifted, f.int_const(form.magic_bits))
    half = f.int_step("ashr", whole, f.int_const(1))
    y = f.mul(x, _power_of_two(f, half))
    return f.mul(y, _power_of_two(f, f.int_step("sub", whole, half)))


def clamp(f: Floats, x: str, low: float | None, high: float | None) -> str:
    """Return x within limits; NaN stays."""
    if high is not None:
        x = f.select(f.compare("ogt", x, f.const(high)), f.const(high), x)
    if low is not None:
        x = f.select(f.compare("olt", x, f.const(low)), f.const(low), x)
    return x


def _reduce_range(f: Floats, x: str) -> tuple[str, str, str]:
    """Return n, as a float and as a biased integer, and r = x - n·log 2 with |r| ≤ log(2)/2."""
    form = format_of(f)
    shifted = f.fma(x, f.const(LOG2E), f.const(form.magic))
    return _range_remainder(f, x, shifted)


def _range_remainder(f: Floats, x: str, shifted: str) -> tuple[str, str, str]:
    form = format_of(f)
    n = f.sub(shifted, f.const(form.magic))
    r = f.fma(n, f.const(-form.ln2[0]), x)
    return n, f.bits(shifted), f.fma(n, f.const(-form.ln2[1]), r)


def _expm1_reduced(f: Floats, r: str) -> str:
    """Return exp(r) - 1 for a reduced r."""
    return f.fma(f.mul(r, r), f.horner(format_of(f).exp, r), r)


def exp(f: Floats, x: str) -> str:
    """Return 2ⁿ·exp(r)."""
    form = format_of(f)
    n, _, r = _reduce_range(f, clamp(f, x, form.smallest, form.largest + 1))
    return scale_by_power_of_two(f, f.add(_expm1_reduced(f, r), f.const(1.0)), n)


def _expm1_scaled(f: Floats, e: str, biased: str) -> str:
    """Return 2ⁿ·e + (2ⁿ - 1), with 2ⁿ far from overflow and underflow."""
    form = format_of(f)
    exponent = f.int_step("shl", biased, f.int_const(form.mantissa))  # shifts the bias out
    scale = f.from_bits(f.int_step("add", exponent, f.int_const(form.bias << form.mantissa)))
    return f.fma(scale, e, f.sub(scale, f.const(1.0)))


def expm1(f: Floats, x: str) -> str:
    """Return 2ⁿ·e + (2ⁿ - 1), computed at half scale so that 2ⁿ stays finite."""
    form = format_of(f)
    _, biased, r = _reduce_range(f, x)
    e = _expm1_reduced(f, r)
    n = f.int_step("sub", biased, f.int_const(form.magic_bits))
    scale = _power_of_two(f, f.int_step("sub", n, f.int_const(1)))
    y = f.fma(scale, e, f.sub(scale, f.const(0.5)))
    y = f.add(y, y)
    y = f.select(f.compare("ogt", x, f.const(form.largest)), f.const(float("inf")), y)
    y = f.select(f.compare("olt", x, f.const(-45.0)), f.const(-1.0), y)
    return f.select(f.compare("olt", f.abs(x), f.const(2.0**-54)), x, y)


def split_exponent(f: Floats, x: str) -> tuple[str, str]:
    """Return r and k with x = 2ᵏ·(1 + r) and 1 + r from √½ to √2, for a positive x."""
    form = format_of(f)
    tiny = f.compare("olt", x, f.const(2.0 ** (1 - form.bias)))
    normal = f.select(tiny, f.mul(x, f.const(2.0 ** (form.mantissa + 2))), x)
    root = 0x3F3504F3 if f.is_single else 0x3FE6A09E667F3BCD  # bits of √½
    one = form.bias << form.mantissa
    shifted = f.int_step("add", f.bits(normal), f.int_const(one - root))
    k = f.int_step("lshr", shifted, f.int_const(form.mantissa))
    below = f.int_step("and", shifted, f.int_const((1 << form.mantissa) - 1))
    m = f.from_bits(f.int_step("add", below, f.int_const(root)))
    exponent = f.lanes.convert("sitofp", k, f.integer, f.element)
    shift = f.select(tiny, f.const(-form.bias - form.mantissa - 2.0), f.const(-float(form.bias)))
    return f.sub(m, f.const(1.0)), f.add(exponent, shift)


def log(f: Floats, x: str) -> str:
    """Return k·log 2 + log(1 + r)."""
    return _select_log_edges(f, x, _log_from_parts(f, *split_exponent(f, x)))


def _select_log_edges(f: Floats, x: str, y: str) -> str:
    y = f.select(f.compare("oeq", x, f.const(float("inf"))), x, y)
    y = f.select(f.compare("oeq", x, f.const(0.0)), f.const(float("-inf")), y)
    return f.select(f.compare("ult", x, f.const(0.0)), f.const(float("nan")), y)


def _log_from_parts(f: Floats, r: str, k: str) -> str:
    """Return k·log 2 + log(1 + r), without special cases."""
    high, low = (f.const(part) for part in format_of(f).ln2)
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
    """Return log(u) of the rounded u = 1 + x, plus the rounding error over u."""
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
    """Return k + log(1 + r)/log 2, which is whole for a power of two."""
    r, k = split_exponent(f, x)
    return _select_log_edges(f, x, f.fma(_log_from_parts(f, r, f.const(0.0)), f.const(LOG2E), k))


def log10(f: Floats, x: str) -> str:
    """Return k·log₁₀ 2 + log(1 + r)/log 10."""
    r, k = split_exponent(f, x)
    high, low = (f.const(part) for part in (LOG10_2_32 if f.is_single else LOG10_2))
    y = f.fma(_log_from_parts(f, r, f.const(0.0)), f.const(LOG10E), f.mul(k, low))
    return _select_log_edges(f, x, f.fma(k, high, y))


def tanh(f: Floats, x: str) -> str:
    """Return e / (2 + e) with e = exp(2|x|) - 1 and the sign of x.

    For float32, r is reduced to -0.1 … 0.59, so that e is accurate for small x. The rounding error
    of 2 + e is added back, by 1 / (2 + e) = (1 - y) / 2.
    """
    form, two = format_of(f), f.const(2.0)
    size = clamp(f, f.abs(x), None, 20.0)  # tanh(20) rounds to 1
    double = f.add(size, size)
    if not f.is_single:
        _, biased, r = _reduce_range(f, double)
        e = _expm1_scaled(f, _expm1_reduced(f, r), biased)
        return f.copysign(f.div(e, f.add(e, two)), x)
    turns = f.fma(double, f.const(LOG2E), f.const(-0.35))
    _, biased, r = _range_remainder(f, double, f.add(turns, f.const(form.magic)))
    e = _expm1_scaled(f, f.fma(f.mul(r, r), f.horner(TANH32, r), r), biased)
    total = f.add(e, two)
    is_large = f.compare("ogt", e, two)
    large, small = f.select(is_large, e, two), f.select(is_large, two, e)
    lost = f.sub(small, f.sub(total, large))
    y = f.div(e, total)
    half = f.const(0.5)
    y = f.fma(f.mul(y, lost), f.fma(y, half, f.neg(half)), y)
    return f.copysign(y, x)


def sigmoid(f: Floats, x: str) -> str:
    """Return 1 / (1 + e), or e / (1 + e) for negative x, with e = exp(-|x|).

    The rounding error of 1 + e is added back.
    """
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
    """Return 1 - exp(-w), with w = |x|·Q(|x|) as a sum of two numbers, accurate near 0."""
    t = clamp(f, f.abs(x), None, 4.0)  # erf(4) rounds to 1
    *high, first = (-c for c in ERF32)
    near = struct.unpack("f", struct.pack("f", first))[0]
    main = f.mul(t, f.const(near))
    lost = f.fma(t, f.const(near), f.neg(main))
    more = f.fma(t, f.fma(t, f.horner(high, t), f.const(first - near)), lost)
    w = f.add(main, more)
    rest = f.add(f.sub(main, w), more)
    _, biased, r = _reduce_range(f, w)
    square = f.mul(r, r)
    e = f.add(r, f.fma(square, f.horner(format_of(f).exp, r), rest))
    return f.copysign(_expm1_scaled(f, e, biased), x)


def _erf_double(f: Floats, x: str) -> str:
    """Return x + x·P(x²) up to 1, and 1 - erfc(x) beyond."""
    size = f.abs(x)
    small = f.fma(size, f.horner(ERF64, f.mul(size, size)), size)
    t = clamp(f, size, None, 6.0)  # erf(6) rounds to 1
    numerator, denominator = (f.horner(part, t) for part in ERFC_PARTS)
    rest = f.div(f.mul(exp(f, f.neg(f.mul(t, t))), numerator), denominator)
    large = f.sub(f.const(1.0), rest)
    return f.copysign(f.select(f.compare("olt", size, f.const(1.0)), small, large), x)


def arctan(f: Floats, x: str) -> str:
    """Return t + t³·P(t²) with t = |x| up to 1, and π/2 - atan(1/|x|) beyond."""
    size, one = f.abs(x), f.const(1.0)
    far = f.compare("ogt", size, one)
    t = f.select(far, f.div(one, size), size)
    near = _odd_polynomial(f, t, ATAN32 if f.is_single else ATAN64)
    high, low = (f.const(part) for part in _half_pi(f))
    rest = f.add(f.sub(high, near), low)
    return f.copysign(f.select(far, rest, near), x)


def arcsin(f: Floats, x: str) -> str:
    """Return the odd polynomial up to ½, and π/2 - 2·asin(√((1 - |x|)/2)) beyond."""
    near, twice = _arcsin_parts(f, x)
    high, low = (f.const(part) for part in _half_pi(f))
    rest = f.add(f.sub(high, twice), low)
    return f.copysign(f.select(_beyond_half(f, x), rest, near), x)


def arccos(f: Floats, x: str) -> str:
    """Return π/2 - asin(x), but 2·asin(√((1 - x)/2)) above ½, and π minus that of -x below -½."""
    near, twice = _arcsin_parts(f, x)
    high, low = (f.const(part) for part in _half_pi(f))
    middle = f.add(f.sub(high, f.copysign(near, x)), low)
    below = f.add(f.sub(f.add(high, high), twice), f.add(low, low))
    far = f.select(f.compare("olt", x, f.const(0.0)), below, twice)
    return f.select(_beyond_half(f, x), far, middle)


def _arcsin_parts(f: Floats, x: str) -> tuple[str, str]:
    """Return asin(|x|) up to ½, and 2·asin(√((1 - |x|)/2)) beyond, by one polynomial."""
    size, half = f.abs(x), f.const(0.5)
    root = f.lanes.intrinsic("sqrt", f.element, f.fma(f.neg(size), half, half))
    t = f.select(_beyond_half(f, x), root, size)
    y = _odd_polynomial(f, t, ASIN32 if f.is_single else ASIN64)
    return y, f.add(y, y)


def _beyond_half(f: Floats, x: str) -> str:
    return f.compare("ogt", f.abs(x), f.const(0.5))


def _odd_polynomial(f: Floats, t: str, coefficients: Coefficients) -> str:
    """Return t + t³·P(t²)."""
    z = f.mul(t, t)
    return f.fma(f.mul(t, z), f.horner(coefficients, z), t)


def _half_pi(f: Floats) -> tuple[float, float]:
    """Return π/2 in two parts."""
    return (PI_HALF_32[0], PI_HALF_32[1]) if f.is_single else (math.pi / 2, PI_HALF_REST)
