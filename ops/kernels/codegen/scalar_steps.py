"""Primitive steps on vectors, each with numpy's result for one element, special values included."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.ir.spec import is_half
from graphflow.ops.kernels.codegen.expression_trace import ScalarStep
from graphflow.ops.kernels.codegen.functions import FUNCTIONS
from graphflow.ops.kernels.codegen.vector_writer import ELEMENTS, Floats, VectorWriter

_FLOAT = {"add": "fadd", "subtract": "fsub", "multiply": "fmul", "divide": "fdiv"}
_INTEGER = {"add": "add", "subtract": "sub", "multiply": "mul", "and": "and", "or": "or",
            "xor": "xor"}  # fmt: skip
_UNARY = {"sqrt": "sqrt", "floor": "floor", "ceil": "ceil", "trunc": "trunc", "rint": "rint",
          "copysign": "copysign"}  # fmt: skip
_COMPARED = {"equal": "oeq", "not_equal": "une", "less": "olt", "less_equal": "ole",
             "greater": "ogt", "greater_equal": "oge"}  # fmt: skip


def write_step(lanes: VectorWriter, step: ScalarStep, args: list[str]) -> str:
    """Write a step on vectors; returns the name of its value."""
    dtype = step.args[0].dtype
    element = ELEMENTS[dtype.name]
    if step.kind == "where":
        return lanes.select(args[0], ELEMENTS[step.dtype.name], args[1], args[2])
    if step.kind == "convert":
        return _convert(lanes, args[0], dtype, step.dtype)
    if step.kind == "bits":
        target = ELEMENTS[step.dtype.name]
        return args[0] if target == element else lanes.convert("bitcast", args[0], element, target)
    if dtype.kind == "f":
        return _write_float_step(Floats(lanes, element), step.kind, args)
    return _write_integer_step(lanes, step.kind, dtype, args)


def _write_float_step(f: Floats, kind: str, args: list[str]) -> str:
    if kind in _FLOAT:
        return f.lanes.binary(_FLOAT[kind], f.element, *args)
    if kind in FUNCTIONS:
        return FUNCTIONS[kind](f, *args)
    if kind in _UNARY:
        return f.lanes.intrinsic(_UNARY[kind], f.element, *args)
    if kind in _COMPARED:
        return f.compare(_COMPARED[kind], *args)
    infinity = f.const(float("inf"))
    match kind:
        case "negative":
            return f.neg(args[0])
        case "abs":
            return f.abs(args[0])
        case "maximum" | "minimum":  # equal values give the second, as in numpy; NaN wins
            how = "ogt" if kind == "maximum" else "olt"
            chosen = f.select(f.compare(how, *args), *args)
            return f.select(f.compare("uno", args[0], args[0]), args[0], chosen)
        case "clip_low":
            return f.select(f.compare("ugt", *args), *args)
        case "clip_high":
            return f.select(f.compare("ult", *args), *args)
        case "isnan":
            return f.compare("uno", args[0], args[0])
        case "isinf":
            return f.compare("oeq", f.abs(args[0]), infinity)
        case "isfinite":
            return f.compare("olt", f.abs(args[0]), infinity)
    assert kind == "sign", kind
    zero = f.const(0.0)
    y = f.select(f.compare("oeq", args[0], zero), zero, args[0])
    y = f.select(f.compare("olt", args[0], zero), f.const(-1.0), y)
    return f.select(f.compare("ogt", args[0], zero), f.const(1.0), y)


def _write_integer_step(
    lanes: VectorWriter, kind: str, dtype: np.dtype[Any], args: list[str]
) -> str:
    element = ELEMENTS[dtype.name]
    sign = "s" if dtype.kind == "i" else "u"
    if kind in _INTEGER:
        return lanes.binary(_INTEGER[kind], element, *args)
    if kind in _COMPARED:
        how = _COMPARED[kind][1:]
        return lanes.binary(f"icmp {how if how in ('eq', 'ne') else sign + how}", element, *args)
    match kind:
        case "negative":
            return lanes.binary("sub", element, lanes.constant(0, element), args[0])
        case "abs":
            return args[0] if sign == "u" else lanes.intrinsic("abs", element, args[0])
        case "invert":
            ones = lanes.constant(True if element == "i1" else -1, element)
            return lanes.binary("xor", element, args[0], ones)
        case "maximum" | "clip_low":
            return lanes.intrinsic(f"{sign}max", element, *args)
        case "minimum" | "clip_high":
            return lanes.intrinsic(f"{sign}min", element, *args)
    assert kind in ("left_shift", "right_shift"), kind
    bits = dtype.itemsize * 8
    fits = lanes.binary("icmp ult", element, args[1], lanes.constant(bits, element))
    by = lanes.select(fits, element, args[1], lanes.constant(0, element))
    if kind == "left_shift":
        moved, gone = lanes.binary("shl", element, args[0], by), lanes.constant(0, element)
    elif sign == "u":
        moved, gone = lanes.binary("lshr", element, args[0], by), lanes.constant(0, element)
    else:
        moved = lanes.binary("ashr", element, args[0], by)
        gone = lanes.binary("ashr", element, args[0], lanes.constant(bits - 1, element))
    return lanes.select(fits, element, moved, gone)


def _convert(lanes: VectorWriter, x: str, source: np.dtype[Any], target: np.dtype[Any]) -> str:
    if is_half(source):
        return _widen_half(lanes, x, source)
    if is_half(target):
        return _round_to_half(lanes, x, target)
    have, want = ELEMENTS[source.name], ELEMENTS[target.name]
    if target.kind == "b":
        zero = lanes.constant(0, have)
        return lanes.binary("fcmp une" if source.kind == "f" else "icmp ne", have, x, zero)
    if source.kind == "f":
        wider = target.itemsize > source.itemsize
        return lanes.convert("fpext" if wider else "fptrunc", x, have, want)
    if target.kind == "f":
        return lanes.convert("sitofp" if source.kind == "i" else "uitofp", x, have, want)
    if have == want:
        return x
    if source.kind != "b" and target.itemsize < source.itemsize:
        return lanes.convert("trunc", x, have, want)
    return lanes.convert("sext" if source.kind == "i" else "zext", x, have, want)


def _widen_half(lanes: VectorWriter, x: str, source: np.dtype[Any]) -> str:
    """Write 16-bit floats, which are the bits of integers, as float32."""
    if source.name == "float16":
        return lanes.convert("fpext", lanes.convert("bitcast", x, "i16", "half"), "half", "float")
    wide = lanes.convert("zext", x, "i16", "i32")
    wide = lanes.binary("shl", "i32", wide, lanes.constant(16, "i32"))
    return lanes.convert("bitcast", wide, "i32", "float")


def _round_to_half(lanes: VectorWriter, x: str, target: np.dtype[Any]) -> str:
    """Write float32 rounded to the nearest 16-bit floats, of two equally near ones the even one.

    Integer steps round to bfloat16, since AVX-512's instruction takes denormal numbers for zero.
    """
    if target.name == "float16":
        return lanes.convert("bitcast", lanes.convert("fptrunc", x, "float", "half"), "half", "i16")

    def step(instruction: str, a: str, b: str | int) -> str:
        other = lanes.constant(b, "i32") if isinstance(b, int) else b
        return lanes.binary(instruction, "i32", a, other)

    bits = lanes.convert("bitcast", x, "float", "i32")
    odd = step("and", step("lshr", bits, 16), 1)
    rounded = step("lshr", step("add", bits, step("add", odd, 0x7FFF)), 16)
    sign = step("and", step("lshr", bits, 16), 0x8000)
    nan = lanes.binary("fcmp uno", "float", x, x)
    chosen = lanes.select(nan, "i32", step("or", sign, 0x7FC0), rounded)
    return lanes.convert("trunc", chosen, "i32", "i16")
