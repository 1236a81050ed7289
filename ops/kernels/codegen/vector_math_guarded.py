"""Vectorised sin, cos and pow with a fast path for most arguments.

Elements outside of it (sin and cos beyond 10⁵, powers of zero and infinity) are computed one by one
by the C library.
"""

from __future__ import annotations

from collections.abc import Callable

from graphflow.ops.kernels.codegen.coefficients import (
    DOUBLE,
    EXP2_32,
    LOG2_32,
    LOG_DOUBLE_DOUBLE,
    PI_HALF,
    PI_HALF_32,
    TRIG_LIMIT,
    TWO_OVER_PI,
    TWO_THIRDS_REST,
)
from graphflow.ops.kernels.codegen.vector_math import (
    clamp,
    exp,
    format_of,
    scale_by_power_of_two,
    split_exponent,
)
from graphflow.ops.kernels.codegen.vector_writer import Floats, VectorWriter


def sin(f: Floats, x: str) -> str:
    return _call_guarded(f, "sin", x)


def cos(f: Floats, x: str) -> str:
    return _call_guarded(f, "cos", x)


def power(f: Floats, x: str, y: str) -> str:
    return _call_guarded(f, "pow", x, y)


def _call_guarded(f: Floats, name: str, *args: str) -> str:
    """Call a function of the module, which is written at its first call."""
    own = f.lanes.call_guarded(name, f.element, args, lambda: _FAST[name](f, *args))
    if own is not None:
        return own
    full = f"@{name}_{f.element}_{f.lanes.width}"  # modules of several widths compile as one
    kind = f.lanes.vector(f.element)
    if full not in f.lanes.module.declared:
        f.lanes.module.declared[full] = ""
        f.lanes.module.declared[full] = _write_guarded_function(f, full, name, len(args))
    return f.lanes.write(f"call {kind} {full}({', '.join(f'{kind} {a}' for a in args)})")


def _write_guarded_function(f: Floats, full: str, name: str, count: int) -> str:
    """Write a function that takes the fast path, and the C library for lanes where that fails."""
    lines: list[str] = []
    lanes = VectorWriter(f.lanes.module.for_function(), f.lanes.width, lines)
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
    """Return n, an integer plus a multiple of 4, and x - n·π/2."""
    form = format_of(f)
    shifted = f.fma(x, f.const(TWO_OVER_PI), f.const(form.magic))
    n = f.sub(shifted, f.const(form.magic))
    r = x
    for part in PI_HALF_32 if f.is_single else PI_HALF:
        r = f.fma(n, f.const(-part), r)
    return f.bits(shifted), r


def _sin_shifted(f: Floats, x: str, ahead: int) -> tuple[str, str]:
    """Return sin(x + ahead·π/2), and a mask of the lanes where x is too large."""
    form = format_of(f)
    turns, r = _quarter_turns(f, x)
    quadrant = f.int_step("add", turns, f.int_const(ahead)) if ahead else turns
    z = f.mul(r, r)
    sine = f.fma(f.mul(r, z), f.horner(form.sin, z), r)
    rest = f.fma(f.mul(z, z), f.horner(form.cos, z), f.mul(z, f.const(-0.5)))
    cosine = f.add(rest, f.const(1.0))
    y = f.select(_has_bit(f, quadrant, 1), cosine, sine)
    sign = f.int_step("and", quadrant, f.int_const(2))
    sign = f.int_step("shl", sign, f.int_const(form.mantissa + 7 if f.is_single else 62))
    y = f.from_bits(f.int_step("xor", f.bits(y), sign))
    if not ahead:  # keeps the sign of zero
        y = f.select(f.compare("oeq", x, f.const(0.0)), x, y)
    return y, f.compare("uge", f.abs(x), f.const(TRIG_LIMIT))


def _has_bit(f: Floats, x: str, bit: int) -> str:
    kept = f.int_step("and", x, f.int_const(bit))
    return f.lanes.binary("icmp ne", f.integer, kept, f.int_const(0))


def _pow_fast(f: Floats, x: str, y: str) -> tuple[str, str]:
    """Return exp(y·log|x|), with a sign or NaN for negative x, and a mask of the hard lanes."""
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
    inside = lanes.binary("and", "i1", above, below)
    finite = f.compare("olt", f.abs(y), infinity)
    easy = lanes.binary("and", "i1", inside, finite)
    return result, lanes.binary("xor", "i1", easy, lanes.constant(True, "i1"))


def _pow_single(f: Floats, x: str, y: str) -> str:
    """Return |x|ʸ as 2 to y·log₂|x| in float64, since float32 would lose the fraction's bits."""
    wide = Floats(f.lanes, "double")
    r, k, exponent = (
        f.lanes.convert("fpext", a, "float", "double") for a in (*split_exponent(f, f.abs(x)), y)
    )
    power = wide.mul(exponent, wide.fma(r, wide.horner(LOG2_32, r), k))
    power = clamp(wide, power, -200.0, 200.0)  # beyond, the result is 0 or infinite
    n = wide.sub(wide.add(power, wide.const(DOUBLE.magic)), wide.const(DOUBLE.magic))
    rest, whole = (
        f.lanes.convert("fptrunc", a, "double", "float") for a in (wide.sub(power, n), n)
    )
    return scale_by_power_of_two(f, f.fma(rest, f.horner(EXP2_32, rest), f.const(1.0)), whole)


def _pow_double(f: Floats, x: str, y: str) -> str:
    """Return xʸ by a double-double logarithm, good to 2⁻⁶³, since the exponent multiplies its
    error."""
    high, low = _double_double_log(f, x)
    product = f.mul(y, high)
    rest = f.fma(y, low, f.fma(y, high, f.neg(product)))
    power = exp(f, product)
    better = f.fma(power, rest, power)
    better = f.select(f.compare("olt", power, f.const(float("inf"))), better, power)
    inside = f.compare("olt", f.abs(product), f.const(750.0))  # beyond, the power is 0 or infinite
    return f.select(inside, better, power)


def _double_double_log(f: Floats, x: str) -> tuple[str, str]:
    """Return log x as a sum of two numbers.

    It is k·log 2 + 2s + s·z·(⅔ + z·P(z)), with s = r / (2 + r) and z = s².
    """
    r, k = split_exponent(f, x)
    two = f.const(2.0)
    total = f.add(r, two)
    lost = f.sub(r, f.sub(total, two))
    s = f.div(r, total)
    s_low = f.div(f.fma(f.neg(s), lost, f.fma(f.neg(s), total, r)), total)
    z = f.mul(s, s)
    z_low = f.fma(f.add(s, s), s_low, f.fma(s, s, f.neg(z)))
    tail = f.mul(z, f.horner(LOG_DOUBLE_DOUBLE, z))
    third = f.const(2 / 3)
    p = f.add(third, tail)
    p_low = f.add(f.add(f.sub(third, p), tail), f.const(TWO_THIRDS_REST))
    w, w_low = _two_product(f, (z, z_low), (p, p_low))
    v, v_low = _two_product(f, (s, s_low), (w, w_low))
    high, low = (f.const(part) for part in DOUBLE.ln2)
    whole, twice = f.mul(k, high), f.add(s, s)  # exact
    first, rest = _two_sum(f, whole, twice)
    second, more = _two_sum(f, first, v)
    small = f.add(f.add(rest, more), f.fma(k, low, f.add(f.add(s_low, s_low), v_low)))
    return _two_sum(f, second, small)


def _two_sum(f: Floats, a: str, b: str) -> tuple[str, str]:
    """Return a + b rounded, and the rounding error (Knuth's two-sum)."""
    total = f.add(a, b)
    back = f.sub(total, a)
    return total, f.add(f.sub(a, f.sub(total, back)), f.sub(b, back))


def _two_product(f: Floats, a: tuple[str, str], b: tuple[str, str]) -> tuple[str, str]:
    """Return the product of two double-double numbers as a double-double."""
    high = f.mul(a[0], b[0])
    exact = f.fma(a[0], b[0], f.neg(high))
    return high, f.fma(a[1], b[0], f.fma(a[0], b[1], exact))


_FAST: dict[str, Callable[..., tuple[str, str]]] = {
    "sin": lambda f, x: _sin_shifted(f, x, 0),
    "cos": lambda f, x: _sin_shifted(f, x, 1),
    "pow": _pow_fast,
}
