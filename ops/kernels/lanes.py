"""Vectors of LLVM's language: a short way to write what a generated loop does to some elements.

Text, not a library's objects: a kernel is a few hundred lines, and writing them so takes a tenth of
the time. Floating-point steps carry no fast-math flags, so each rounds as IEEE 754 says and none is
contracted with another, wherever it stands; `fma` is explicit.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

ELEMENTS = {
    "bool": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "i8",
    "uint16": "i16", "uint32": "i32", "uint64": "i64", "float32": "float", "float64": "double",
}  # fmt: skip
_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "float": 32, "double": 64}
SHORT = {"float": "f32", "double": "f64"}


class Module:
    """Names, and what several kernels of one module need once: declarations and functions."""

    def __init__(self) -> None:
        self.declared: dict[str, str] = {}
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"%v{self._count}"


class Lanes:
    """Writes steps on vectors of `width` elements to `lines`; values are their names."""

    def __init__(self, module: Module, width: int, lines: list[str]) -> None:
        self.module = module
        self.width = width
        self.lines = lines

    def vector(self, element: str) -> str:
        return f"<{self.width} x {element}>"

    def write(self, text: str) -> str:
        name = self.module.name()
        self.lines.append(f"  {name} = {text}")
        return name

    def two(self, instruction: str, element: str, a: str, b: str) -> str:
        """A step of two vectors."""
        return self.write(f"{instruction} {self.vector(element)} {a}, {b}")

    def convert(self, instruction: str, x: str, source: str, target: str) -> str:
        return self.write(f"{instruction} {self.vector(source)} {x} to {self.vector(target)}")

    def select(self, condition: str, element: str, a: str, b: str) -> str:
        kind = self.vector(element)
        return self.write(f"select {self.vector('i1')} {condition}, {kind} {a}, {kind} {b}")

    def intrinsic(self, name: str, element: str, *args: str) -> str:
        """A function of LLVM's own, on vectors of one element type."""
        full = f"@llvm.{name}.v{self.width}{SHORT.get(element, element)}"
        kind = self.vector(element)
        given = ", ".join(f"{kind} {a}" for a in args)
        if name == "abs":  # whether the least integer has no absolute value
            self.module.declared[full] = f"declare {kind} {full}({kind}, i1)"
            given += ", i1 false"
        else:
            kinds = ", ".join([kind] * len(args))
            self.module.declared[full] = f"declare {kind} {full}({kinds})"
        return self.write(f"call {kind} {full}({given})")

    def constant(self, value: float | int | bool, element: str) -> str:
        """The same number in all lanes."""
        return f"splat ({element} {literal(value, element)})"


class Floats:
    """Steps on vectors of float or double."""

    def __init__(self, lanes: Lanes, element: str) -> None:
        self.lanes = lanes
        self.element = element
        self.is_single = element == "float"
        self.integer = "i32" if self.is_single else "i64"

    def const(self, value: float) -> str:
        return self.lanes.constant(value, self.element)

    def add(self, a: str, b: str) -> str:
        return self.lanes.two("fadd", self.element, a, b)

    def sub(self, a: str, b: str) -> str:
        return self.lanes.two("fsub", self.element, a, b)

    def mul(self, a: str, b: str) -> str:
        return self.lanes.two("fmul", self.element, a, b)

    def div(self, a: str, b: str) -> str:
        return self.lanes.two("fdiv", self.element, a, b)

    def neg(self, a: str) -> str:
        return self.lanes.write(f"fneg {self.lanes.vector(self.element)} {a}")

    def fma(self, a: str, b: str, c: str) -> str:
        """a·b + c, rounded once."""
        return self.lanes.intrinsic("fma", self.element, a, b, c)

    def abs(self, a: str) -> str:
        return self.lanes.intrinsic("fabs", self.element, a)

    def copysign(self, a: str, b: str) -> str:
        return self.lanes.intrinsic("copysign", self.element, a, b)

    def compare(self, how: str, a: str, b: str) -> str:
        return self.lanes.two(f"fcmp {how}", self.element, a, b)

    def select(self, condition: str, a: str, b: str) -> str:
        return self.lanes.select(condition, self.element, a, b)

    def horner(self, coefficients: Sequence[float], x: str) -> str:
        """A polynomial, highest power first."""
        total = self.const(coefficients[0])
        for coefficient in coefficients[1:]:
            total = self.fma(total, x, self.const(coefficient))
        return total

    def bits(self, x: str) -> str:
        return self.lanes.convert("bitcast", x, self.element, self.integer)

    def of_bits(self, x: str) -> str:
        return self.lanes.convert("bitcast", x, self.integer, self.element)

    def int_const(self, value: int) -> str:
        return self.lanes.constant(value, self.integer)

    def int_step(self, instruction: str, a: str, b: str) -> str:
        return self.lanes.two(instruction, self.integer, a, b)


def literal(value: float | int | bool, element: str) -> str:
    """A number in LLVM's notation; floats by their bits."""
    if element == "i1":
        return "true" if value else "false"
    if element == "float":  # written as the double of the same value
        value = struct.unpack("f", struct.pack("f", float_limited(value)))[0]
    if element in ("float", "double"):
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    bits = _BITS[element]  # as a signed number
    whole = int(value) & (1 << bits) - 1
    return str(whole - (1 << bits) if whole >> bits - 1 else whole)


def float_limited(value: float) -> float:
    """A number beyond float32 as infinity, which `struct` refuses to make."""
    limit = 3.4028235677973366e38  # half way from the largest float32 to the next that would be
    return value if not abs(value) >= limit else float("inf") * (1 if value > 0 else -1)
