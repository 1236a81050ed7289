"""The steps of scalar expressions in CUDA C++, one element a thread.

`CudaScalarWriter` has the interface of `VectorWriter`. So the functions (`functions.py`) and rules
(`scalar_steps.py`) that write LLVM IR write CUDA, too, and an element gets the same bits on a GPU
as on a CPU. Nothing is contracted: each rounding step is an intrinsic that names its rounding, and
the compiler gets `--fmad=false`. Integers are unsigned words, since LLVM's have no sign; signed
operations cast.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from graphflow.ops.kernels.codegen.vector_writer import Module, VectorWriter, literal

C_TYPES = {
    "i1": "bool", "i8": "u8", "i16": "u16", "i32": "u32", "i64": "u64",
    "float": "float", "double": "double", "half": "u16", "bfloat": "u16",
}  # fmt: skip
_SIGNED = {"i8": "s8", "i16": "s16", "i32": "s32", "i64": "s64"}
_ARITHMETIC = {"fadd": "add", "fsub": "sub", "fmul": "mul", "fdiv": "div"}
_INTEGER = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<",
            "lshr": ">>"}  # fmt: skip
_ORDERED = {"eq": "==", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "ne": "!="}
_ROUNDED = {"floor": "floor", "ceil": "ceil", "trunc": "trunc", "rint": "rint", "fabs": "fabs"}


class CudaScalarWriter(VectorWriter):
    """Writes steps on single elements as C statements; values are variables or literals."""

    def __init__(self, module: Module, lines: list[str]) -> None:
        super().__init__(module, 1, lines)

    def define(self, element: str, expression: str) -> str:
        """Define a variable; returns its name."""
        name = self.module.name().removeprefix("%")
        self.lines.append(f"  const {C_TYPES[element]} {name} = {expression};")
        return name

    def binary(self, instruction: str, element: str, a: str, b: str) -> str:
        kind, _, how = instruction.partition(" ")
        if kind == "icmp":
            return self.define("i1", _compared_integers(how, element, a, b))
        if kind == "fcmp":
            return self.define("i1", _compared_floats(how, a, b))
        if kind in _ARITHMETIC:
            return self.define(element, f"{_float_call(_ARITHMETIC[kind], element)}({a}, {b})")
        if kind == "ashr":
            return self.define(element, f"({C_TYPES[element]})(({_SIGNED[element]}){a} >> {b})")
        kept = C_TYPES[element]
        wide = "(u32)" if element in ("i8", "i16") else ""  # C would promote them to signed ints
        return self.define(element, f"({kept})({wide}{a} {_INTEGER[kind]} {wide}{b})")

    def negate(self, element: str, a: str) -> str:
        return self.define(element, f"-{a}" if a[0] != "-" else f"-({a})")

    def convert(self, instruction: str, x: str, source: str, target: str) -> str:
        wanted = C_TYPES[target]
        match instruction:
            case "bitcast":
                return self.define(target, f"{_BITCASTS[source, target]}({x})")
            case "fptrunc":
                return self.define(target, f"__double2float_rn({x})")
            case "sitofp":
                return self.define(target, f"({wanted})({_SIGNED[source]}){x}")
            case "sext":
                signed = f"({_SIGNED[target]})({_SIGNED[source]}){x}"
                return self.define(target, f"({wanted}){signed}")
        return self.define(target, f"({wanted}){x}")  # zext, trunc, fpext, uitofp

    def select(self, condition: str, element: str, a: str, b: str) -> str:
        return self.define(element, f"{condition} ? {a} : {b}")

    def intrinsic(self, name: str, element: str, *args: str) -> str:
        given = ", ".join(args)
        if name in ("fma", "sqrt"):
            return self.define(element, f"{_float_call(name, element)}({given})")
        if name in _ROUNDED or name == "copysign":
            suffix = "f" if element == "float" else ""
            return self.define(element, f"{_ROUNDED.get(name, name)}{suffix}({given})")
        kind = C_TYPES[element]
        if name == "abs":
            return self.define(
                element,
                f"(({_SIGNED[element]}){args[0]} < 0) ? ({kind})(0u - {args[0]}) : {args[0]}",
            )
        signed = f"({_SIGNED[element]})" if name[0] == "s" else ""
        how = ">" if name.endswith("max") else "<"
        return self.define(
            element, f"({signed}{args[0]} {how} {signed}{args[1]}) ? {args[0]} : {args[1]}"
        )

    def constant(self, value: float | int | bool, element: str) -> str:
        if element == "i1":
            return "true" if value else "false"
        if element in ("float", "double"):
            return _float_literal(float(value), element)
        bits = int(literal(value, element)) & (1 << int(element[1:])) - 1
        return f"(({C_TYPES[element]}){bits}{'ull' if element == 'i64' else 'u'})"

    def call_guarded(
        self, name: str, element: str, args: tuple[str, ...], fast: Callable[[], tuple[str, str]]
    ) -> str:
        """Write the fast path, or CUDA's function in float64 where that fails."""
        easy, hard = fast()
        by_library = f"{name}({', '.join(f'(double){a}' for a in args)})"
        if element == "float":
            by_library = f"__double2float_rn({by_library})"
        return self.define(element, f"{hard} ? {by_library} : {easy}")


def _float_call(name: str, element: str) -> str:
    if element == "float":
        return f"__f{name}_rn" if name != "fma" else "__fmaf_rn"
    return f"__d{name}_rn" if name != "fma" else "__fma_rn"


_BITCASTS = {
    ("float", "i32"): "__float_as_uint", ("i32", "float"): "__uint_as_float",
    ("double", "i64"): "gf_bits_of", ("i64", "double"): "gf_double_of",
}  # fmt: skip


def _compared_integers(how: str, element: str, a: str, b: str) -> str:
    if how in ("eq", "ne"):
        return f"{a} {_ORDERED[how]} {b}"
    cast = f"({_SIGNED[element]})" if how[0] == "s" else ""
    return f"{cast}{a} {_ORDERED[how[1:]]} {cast}{b}"


def _compared_floats(how: str, a: str, b: str) -> str:
    """Return a comparison of floats.

    C compares as the ordered predicates do; an unordered one is the negation of its opposite.
    """
    if how == "uno":
        return f"{a} != {a}" if a == b else f"({a} != {a}) || ({b} != {b})"
    if how == "une" or how[0] == "o":
        return f"{a} {_ORDERED[how[1:]]} {b}"
    opposite = {"gt": "<=", "ge": "<", "lt": ">=", "le": ">"}[how[1:]]
    return f"!({a} {opposite} {b})"


def _float_literal(value: float, element: str) -> str:
    """Return a literal that reads back as exactly the number."""
    bits = int(literal(value, element), 16)  # the bits of a double of that value
    exact = math.nan if value != value else _double(bits)
    if math.isfinite(exact):
        return f"{exact!r}f" if element == "float" else repr(exact)
    if element == "double":
        return f"gf_double_of(0x{bits:016X}ull)"
    word = 0x7FC00000 if exact != exact else 0x7F800000 if exact > 0 else 0xFF800000
    return f"__uint_as_float(0x{word:08X}u)"


def _double(bits: int) -> float:
    value: float = struct.unpack("<d", struct.pack("<Q", bits))[0]
    return value
