"""Steps on vectors in LLVM IR, as text.

Writing text takes a tenth of the time of building a library's objects; a kernel is a few hundred
lines. Floating-point steps have no fast-math flags, so each rounds as IEEE 754 says and none is
contracted with another; `fma` is explicit.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

ELEMENTS = {
    "bool": "i1", "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "i8",
    "uint16": "i16", "uint32": "i32", "uint64": "i64", "float32": "float", "float64": "double",
    "float16": "i16", "bfloat16": "i16",
}  # fmt: skip
_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "float": 32, "double": 64}
TYPE_SUFFIX = {"float": "f32", "double": "f64"}


class Module:
    """Fresh names, and the declarations and functions that kernels of one module share.

    Args:
        wide: whether the processor has AVX-512, some of whose instructions replace several steps.
    """

    def __init__(self, wide: bool = False) -> None:
        self.wide = wide
        self.declared: dict[str, str] = {}
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def for_function(self) -> Module:
        """Return a module with the same declarations, and fresh names of its own.

        A shared function then has the same text in all modules, so that they compile as one.
        """
        own = Module(self.wide)
        own.declared = self.declared
        return own


class VectorWriter:
    """Writes steps on vectors of `width` elements to `lines`; values are their names."""

    def __init__(self, module: Module, width: int, lines: list[str]) -> None:
        self.module = module
        self.width = width
        self.lines = lines

    def vector(self, element: str) -> str:
        return f"<{self.width} x {element}>"

    def write(self, text: str) -> str:
        """Write an instruction; returns the name of its value."""
        name = self.module.name()
        self.lines.append(f"  {name} = {text}")
        return name

    def reduce(self, element: str, value: str, step: Callable[[Floats, str, str], str]) -> str:
        """Reduce the lanes of a vector to one number, by halves.

        The order depends on the width alone.
        """
        width = self.width
        while width > 1:
            half = width // 2
            kind = f"<{width} x {element}>"
            parts = []
            for first in (0, half):
                lanes = ", ".join(f"i32 {first + i}" for i in range(half))
                parts.append(
                    self.write(
                        f"shufflevector {kind} {value}, {kind} poison, <{half} x i32> <{lanes}>"
                    )
                )
            halves = VectorWriter(self.module, half, self.lines)
            value = step(Floats(halves, element), *parts)
            width = half
        return self.write(f"extractelement <1 x {element}> {value}, i64 0")

    def binary(self, instruction: str, element: str, a: str, b: str) -> str:
        """Write an instruction of two vectors."""
        return self.write(f"{instruction} {self.vector(element)} {a}, {b}")

    def negate(self, element: str, a: str) -> str:
        """Write a float vector with its signs flipped."""
        return self.write(f"fneg {self.vector(element)} {a}")

    def call_guarded(
        self, name: str, element: str, args: tuple[str, ...], fast: Callable[[], tuple[str, str]]
    ) -> str | None:
        """Write a function with a fast path inline; None: it is called as a function of the module.

        Args:
            fast: writes the fast path; gives its value and a mask of the lanes for the C library.
        """
        return None

    def convert(self, instruction: str, x: str, source: str, target: str) -> str:
        return self.write(f"{instruction} {self.vector(source)} {x} to {self.vector(target)}")

    def select(self, condition: str, element: str, a: str, b: str) -> str:
        kind = self.vector(element)
        return self.write(f"select {self.vector('i1')} {condition}, {kind} {a}, {kind} {b}")

    def intrinsic(self, name: str, element: str, *args: str) -> str:
        """Call an LLVM intrinsic on vectors of one element type."""
        full = f"@llvm.{name}.v{self.width}{TYPE_SUFFIX.get(element, element)}"
        kind = self.vector(element)
        given = ", ".join(f"{kind} {a}" for a in args)
        if (
            name == "abs"
        ):  # takes a flag, whether the absolute value of the least integer is undefined
            self.module.declared[full] = f"declare {kind} {full}({kind}, i1)"
            given += ", i1 false"
        else:
            kinds = ", ".join([kind] * len(args))
            self.module.declared[full] = f"declare {kind} {full}({kinds})"
        return self.write(f"call {kind} {full}({given})")

    def scalef(self, element: str, x: str, power: str) -> str | None:
        """Write x·2ⁿ, rounded once, for whole floats n; None without AVX-512's instruction."""
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
        """Write `count` neighbouring lanes, from `first` on."""
        if count == self.width:
            return x
        kind = self.vector(element)
        index = ", ".join(f"i32 {first + i}" for i in range(count))
        return self.write(f"shufflevector {kind} {x}, {kind} poison, <{count} x i32> <{index}>")

    def _concatenate(self, element: str, a: str, b: str, count: int) -> str:
        kind = f"<{count // 2} x {element}>"
        index = ", ".join(f"i32 {i}" for i in range(count))
        return self.write(f"shufflevector {kind} {a}, {kind} {b}, <{count} x i32> <{index}>")

    def broadcast(self, element: str, scalar: str) -> str:
        """Write a vector with a scalar in all lanes."""
        kind = self.vector(element)
        first = self.write(f"insertelement {kind} poison, {element} {scalar}, i64 0")
        zeros = f"<{self.width} x i32> zeroinitializer"
        return self.write(f"shufflevector {kind} {first}, {kind} poison, {zeros}")

    def masked_load(self, element: str, pointer: str, align: int, mask: str) -> str:
        """Load a vector with zeros in masked-out lanes, whose memory is not touched."""
        kind, ones = self.vector(element), self.vector("i1")
        name = f"@llvm.masked.load.v{self.width}{TYPE_SUFFIX.get(element, element)}.p0"
        self.module.declared[name] = f"declare {kind} {name}(ptr, i32, {ones}, {kind})"
        return self.write(
            f"call {kind} {name}(ptr {pointer}, i32 {align}, {ones} {mask}, {kind} zeroinitializer)"
        )

    def masked_store(self, element: str, value: str, pointer: str, align: int, mask: str) -> None:
        """Store the lanes that a mask selects."""
        kind, ones = self.vector(element), self.vector("i1")
        name = f"@llvm.masked.store.v{self.width}{TYPE_SUFFIX.get(element, element)}.p0"
        self.module.declared[name] = f"declare void {name}({kind}, ptr, i32, {ones})"
        self.lines.append(
            f"  call void {name}({kind} {value}, ptr {pointer}, i32 {align}, {ones} {mask})"
        )

    def constant(self, value: float | int | bool, element: str) -> str:
        """Return a vector with the same number in all lanes."""
        return f"splat ({element} {literal(value, element)})"


class Floats:
    """Writes steps on vectors of float or double."""

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
        """Write a·b + c, rounded once."""
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
        """Write a polynomial by Horner's rule, highest power first."""
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


def transpose_registers(
    rows: Sequence[str], shuffle: Callable[[str, str, Sequence[int]], str]
) -> list[str]:
    """Transpose a square of vectors, as many as a vector has lanes.

    Off-diagonal blocks change places: those of one lane first, then of two, and so on.

    Args:
        shuffle: (a, b, lanes) -> a vector of these lanes; those of b are counted on.

    Source: Eklundh, IEEE Transactions on Computers C-21(7), 1972.
    """
    rows, width, side = list(rows), len(rows), 1
    lanes = range(width)
    while side < width:
        for i in lanes:
            if not i & side:
                a, b = rows[i], rows[i + side]
                low = [width + n - side if n & side else n for n in lanes]
                high = [width + n if n & side else n + side for n in lanes]
                rows[i], rows[i + side] = shuffle(a, b, low), shuffle(a, b, high)
        side *= 2
    return rows


def literal(value: float | int | bool, element: str) -> str:
    """Return a number in LLVM's notation; floats by their bits."""
    if element == "i1":
        return "true" if value else "false"
    if element == "float":  # LLVM writes it as the double of the same value
        value = struct.unpack("f", struct.pack("f", overflow_to_infinity(value)))[0]
    if element in ("float", "double"):
        return f"0x{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
    bits = _BITS[element]  # LLVM writes it as a signed number
    whole = int(value) & (1 << bits) - 1
    return str(whole - (1 << bits) if whole >> bits - 1 else whole)


def overflow_to_infinity(value: float) -> float:
    """Return a number beyond float32 as infinity, which `struct` refuses to do."""
    limit = 3.4028235677973366e38  # half way from the largest float32 to the next power of two
    return value if not abs(value) >= limit else float("inf") * (1 if value > 0 else -1)
