"""Vectors of LLVM's language: a short way to write what a generated loop does to some elements.

Text, not a library's objects: a kernel is a few hundred lines, and writing them so takes a tenth of
the time. Floating-point steps carry no fast-math flags, so each rounds as IEEE 754 says and none is
contracted with another, wherever it stands; `fma` is explicit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

ELEMENTS = {
    "bool": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "i8",
    "uint16": "i16", "uint32": "i32", "uint64": "i64", "float32": "float", "float64": "double",
}  # fmt: skip
_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "float": 32, "double": 64}
TYPE_SUFFIX = {"float": "f32", "double": "f64"}


class Module:
    """Names, and what several kernels of one module need once: declarations and functions.

    Args:
        wide: the processor has AVX-512, some of whose instructions do what takes several steps.
    """

    def __init__(self, wide: bool = False) -> None:
        self.wide = wide
        self.declared: dict[str, str] = {}
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"%v{self._count}"


class VectorWriter:
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

    def binary(self, instruction: str, element: str, a: str, b: str) -> str:
        """A step of two vectors."""
        return self.write(f"{instruction} {self.vector(element)} {a}, {b}")

    def negate(self, element: str, a: str) -> str:
        """A float vector with its signs changed."""
        return self.write(f"fneg {self.vector(element)} {a}")

    def call_guarded(
        self, name: str, element: str, args: tuple[str, ...], fast: Callable[[], tuple[str, str]]
    ) -> str | None:
        """A function of floats of which `fast` gives the value, and where the C library has to
        give it; None: it is called as a function of the module."""
        return None

    def convert(self, instruction: str, x: str, source: str, target: str) -> str:
        return self.write(f"{instruction} {self.vector(source)} {x} to {self.vector(target)}")

    def select(self, condition: str, element: str, a: str, b: str) -> str:
        kind = self.vector(element)
        return self.write(f"select {self.vector('i1')} {condition}, {kind} {a}, {kind} {b}")

    def intrinsic(self, name: str, element: str, *args: str) -> str:
        """A function of LLVM's own, on vectors of one element type."""
        full = f"@llvm.{name}.v{self.width}{TYPE_SUFFIX.get(element, element)}"
        kind = self.vector(element)
        given = ", ".join(f"{kind} {a}" for a in args)
        if name == "abs":  # whether the least integer has no absolute value
            self.module.declared[full] = f"declare {kind} {full}({kind}, i1)"
            given += ", i1 false"
        else:
            kinds = ", ".join([kind] * len(args))
            self.module.declared[full] = f"declare {kind} {full}({kinds})"
        return self.write(f"call {kind} {full}({given})")

    def scalef(self, element: str, x: str, power: str) -> str | None:
        """x·2ⁿ, rounded once, for whole numbers n given as floats; None where there is no
        instruction for it."""
        lanes = 16 if element == "float" else 8
        if not self.module.wide or self.width % lanes:
            return None
        kind, mask = f"<{lanes} x {element}>", f"i{lanes}"
        name = f"@llvm.x86.avx512.mask.scalef.{'ps' if element == 'float' else 'pd'}.512"
        self.module.declared[name] = f"declare {kind} {name}({kind}, {kind}, {kind}, {mask}, i32)"
        parts = []
        for first in range(0, self.width, lanes):
            a, n = (self.select_lanes(element, v, first, lanes) for v in (x, power))
            call = f"call {kind} {name}({kind} {a}, {kind} {n}, {kind} {a}, {mask} -1, i32 4)"
            parts.append(self.write(call))
        while len(parts) > 1:
            lanes *= 2
            parts = [
                self._concatenate(element, a, b, lanes)
                for a, b in zip(parts[::2], parts[1::2], strict=True)
            ]
        return parts[0]

    def select_lanes(self, element: str, x: str, first: int, count: int) -> str:
        """Some neighbouring lanes."""
        if count == self.width:
            return x
        kind = self.vector(element)
        index = ", ".join(f"i32 {first + i}" for i in range(count))
        return self.write(f"shufflevector {kind} {x}, {kind} poison, <{count} x i32> <{index}>")

    def _concatenate(self, element: str, a: str, b: str, count: int) -> str:
        kind = f"<{count // 2} x {element}>"
        index = ", ".join(f"i32 {i}" for i in range(count))
        return self.write(f"shufflevector {kind} {a}, {kind} {b}, <{count} x i32> <{index}>")

    def constant(self, value: float | int | bool, element: str) -> str:
        """The same number in all lanes."""
        return f"splat ({element} {literal(value, element)})"


class Floats:
    """Steps on vectors of float or double."""

    def __init__(self, lanes: VectorWriter, element: str) -> None:
        self.lanes = lanes
        self.element = element
        self.is_single = element == "float"
        self.integer = "i32" if self.is_single else "i64"

    def const(self, value: float) -> str:
        return self.lanes.constant(value, self.element)

    def add(self, a: str, b: str) -> str:
        return self.lanes.binary("fadd", self.element, a, b)

    def sub(self, a: str, b: str) -> str:
        return self.lanes.binary("fsub", self.element, a, b)

    def mul(self, a: str, b: str) -> str:
        return self.lanes.binary("fmul", self.element, a, b)

    def div(self, a: str, b: str) -> str:
        return self.lanes.binary("fdiv", self.element, a, b)

    def neg(self, a: str) -> str:
        return self.lanes.negate(self.element, a)

    def fma(self, a: str, b: str, c: str) -> str:
        """a·b + c, rounded once."""
        return self.lanes.intrinsic("fma", self.element, a, b, c)

    def abs(self, a: str) -> str:
        return self.lanes.intrinsic("fabs", self.element, a)

    def copysign(self, a: str, b: str) -> str:
        return self.lanes.intrinsic("copysign", self.element, a, b)

    def compare(self, how: str, a: str, b: str) -> str:
        return self.lanes.binary(f"fcmp {how}", self.element, a, b)

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

    def from_bits(self, x: str) -> str:
        return self.lanes.convert("bitcast", x, self.integer, self.element)

    def int_const(self, value: int) -> str:
        return self.lanes.constant(value, self.integer)

    def int_step(self, instruction: str, a: str, b: str) -> str:
        return self.lanes.binary(instruction, self.integer, a, b)


def literal(value: float | int | bool, element: str) -> str:
    """A number in LLVM's notation; floats by their bits."""
    if element == "i1":
        return "true" if value else "false"
    if element == "float":  # written as the double of the same value
        value = struct.unpack("f", struct.pack("f", overflow_to_infinity(value)))[0]
    if element in ("float", "double"):
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    bits = _BITS[element]  # as a signed number
    whole = int(value) & (1 << bits) - 1
    return str(whole - (1 << bits) if whole >> bits - 1 else whole)


def overflow_to_infinity(value: float) -> float:
    """A number beyond float32 as infinity, which `struct` refuses to make."""
    limit = 3.4028235677973366e38  # half way from the largest float32 to the next that would be
    return value if not abs(value) >= limit else float("inf") * (1 if value > 0 else -1)
