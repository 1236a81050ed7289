"""The lines of an LLVM function, as `native_text` writes them: typed values, places, conversions.

Knows LLVM and what Python means by numbers, and no Python program.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.errors import CompileError

LLVM = {
    "i": "i64", "f": "double", "b": "i1", "v": "void",
    "I": "ptr", "F": "ptr", "J": "ptr", "G": "ptr", "U": "ptr",
}  # fmt: skip
"""Types by letter: int, float, bool, nothing; arrays of int64, float64, int32, float32, uint8."""
ITEM = {"I": "i", "F": "f", "J": "i", "G": "f", "U": "i"}
"""What an item of an array is once it is loaded."""
STORED = {"I": "i64", "F": "double", "J": "i32", "G": "float", "U": "i8"}
"""What an item of an array is in memory."""
_WIDEN = {
    "J": "sext i32 {} to i64",
    "G": "fpext float {} to double",
    "U": "zext i8 {} to i64",
}
_NARROW = {
    "J": "trunc i64 {} to i32",
    "G": "fptrunc double {} to float",
    "U": "trunc i64 {} to i8",
}


@dataclass(frozen=True)
class LlvmValue:
    """A typed LLVM value; arrays carry their length, too."""

    kind: str
    text: str
    length: str = ""


class Lines:
    """Instructions one after the other.

    Args:
        where: the function, for errors.

    Attributes:
        open: whether what is written next can be reached.
    """

    def __init__(self, where: str) -> None:
        self.where = where
        self.lines: list[str] = []
        self.open = True
        self._count = 0

    def emit(self, text: str, kind: str = "v") -> LlvmValue:
        """An instruction, and what it gives."""
        if kind == "v":
            self.lines.append(f"  {text}")
            return LlvmValue("v", "")
        self._count += 1
        self.lines.append(f"  %t{self._count} = {text}")
        return LlvmValue(kind, f"%t{self._count}")

    def label(self, word: str) -> str:
        """A name of its own for a place."""
        self._count += 1
        return f"{word}{self._count}"

    def jump(self, label: str) -> None:
        """Go on there, unless this place is not reached."""
        if self.open:
            self.emit(f"br label %{label}")
            self.open = False

    def start(self, label: str) -> None:
        """Start the basic block of that name."""
        self.lines.append(f"{label}:")
        self.open = True

    def convert(self, value: LlvmValue, kind: str, lines: list[str] | None = None) -> LlvmValue:
        """The value as one of another kind; by default at the end.

        Raises:
            CompileError: there is no way from the one to the other.
        """
        if value.kind == kind:
            return value
        how = {"bi": "zext i1 {} to i64", "if": "sitofp i64 {} to double",
               "bf": "uitofp i1 {} to double"}.get(value.kind + kind)  # fmt: skip
        if how is None:
            raise CompileError(f"{self.where}: {value.kind!r} as {kind!r} has no native form")
        self._count += 1
        (self.lines if lines is None else lines).append(
            f"  %t{self._count} = {how.format(value.text)}"
        )
        return LlvmValue(kind, f"%t{self._count}")

    def load(self, place: LlvmValue) -> LlvmValue:
        """The item of an array that lies at a place; shorter items become wider."""
        kind = place.kind
        item = self.emit(f"load {STORED[kind]}, ptr {place.text}", ITEM[kind])
        return self.emit(_WIDEN[kind].format(item.text), ITEM[kind]) if kind in _WIDEN else item

    def store(self, value: LlvmValue, place: LlvmValue) -> None:
        """Write an item of an array; shorter items are rounded, or cut."""
        item = self.convert(value, ITEM[place.kind])
        if place.kind in _NARROW:
            item = self.emit(_NARROW[place.kind].format(item.text), item.kind)
        self.emit(f"store {STORED[place.kind]} {item.text}, ptr {place.text}")

    def truth(self, value: LlvmValue) -> str:
        """Return True if a value is not zero."""
        if value.kind == "b":
            return value.text
        if value.kind == "f":
            return self.emit(f"fcmp une double {value.text}, 0.0", "b").text
        return self.emit(f"icmp ne i64 {value.text}, 0", "b").text

    def atomic(self, name: str, values: list[LlvmValue]) -> LlvmValue | None:
        """A step of `atomics` on an item of an array of 64 bits; None for other arguments."""
        if name == "yield_thread" and not values:
            self.emit("call i32 @sched_yield()", "i")
            return LlvmValue("v", "")
        if len(values) < 2 or values[0].kind not in ("I", "F") or values[1].kind != "i":
            return None
        kind = ITEM[values[0].kind]
        item = LLVM[kind]
        place = self.emit(
            f"getelementptr {item}, ptr {values[0].text}, i64 {values[1].text}", values[0].kind
        ).text
        if name == "atomic_load":
            return self.emit(f"load atomic {item}, ptr {place} seq_cst, align 8", kind)
        amount = self.convert(values[2], kind).text
        add = "fadd" if kind == "f" else "add"
        return self.emit(f"atomicrmw {add} ptr {place}, {item} {amount} seq_cst", kind)

    def prefetch(self, array: LlvmValue, index: LlvmValue) -> LlvmValue:
        """A hint to load an item of an array into all caches."""
        item = STORED[array.kind]
        place = self.emit(f"getelementptr {item}, ptr {array.text}, i64 {index.text}", array.kind)
        return self.emit(f"call void @llvm.prefetch.p0(ptr {place.text}, i32 0, i32 3, i32 1)")

    def whole(self, rest: bool, left: str, right: str) -> LlvmValue:
        """Division that rounds down, as Python's does."""
        remainder = self.emit(f"srem i64 {left}, {right}", "i").text
        sign = self.emit(f"xor i64 {remainder}, {right}", "i").text
        apart = self.emit(f"icmp slt i64 {sign}, 0", "b").text
        some = self.emit(f"icmp ne i64 {remainder}, 0", "b").text
        off = self.emit(f"and i1 {apart}, {some}", "b").text
        if rest:
            more = self.emit(f"add i64 {remainder}, {right}", "i").text
            return self.emit(f"select i1 {off}, i64 {more}, i64 {remainder}", "i")
        whole = self.emit(f"sdiv i64 {left}, {right}", "i").text
        less = self.emit(f"sub i64 {whole}, 1", "i").text
        return self.emit(f"select i1 {off}, i64 {less}, i64 {whole}", "i")

    def extreme(self, name: str, values: list[LlvmValue]) -> LlvmValue:
        """The first of the least or greatest, as Python's."""
        kind = "i"
        for value in values:
            kind = join_kinds(kind, value.kind)
        best, *rest = (self.convert(v, kind) for v in values)
        less = ("slt", "olt") if name == "min" else ("sgt", "ogt")
        for value in rest:
            word = f"fcmp {less[1]}" if kind == "f" else f"icmp {less[0]}"
            better = self.emit(f"{word} {LLVM[kind]} {value.text}, {best.text}", "b").text
            best = self.emit(
                f"select i1 {better}, {LLVM[kind]} {value.text}, {LLVM[kind]} {best.text}", kind
            )
        return best


def join_kinds(one: str, other: str) -> str:
    """The type of a name that holds both."""
    for kind in ("", "v"):
        if one == kind:
            return other
    return max(one, other, key="bif".index)


def zero(kind: str) -> str:
    """Return the initial value of a type."""
    return {"f": "0.0", "b": "false"}.get(kind, "0")


def constant(value: Any) -> LlvmValue:
    """A number of Python's, to the bit."""
    if isinstance(value, bool):
        return LlvmValue("b", str(value).lower())
    if isinstance(value, int):
        return LlvmValue("i", str(value))
    bits = np.float64(value).view(np.uint64)
    return LlvmValue("f", f"0x{int(bits):016X}")
