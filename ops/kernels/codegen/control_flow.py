"""Functions with loops in LLVM IR, for kernels that are not elementwise regions.

    void kernel(ptr* operands and results, i64* sizes, i64 start, i64 stop)

A loop passes its body the counter and the carried values, as names, and carries on what the body
returns. So values stay in registers, and no LLVM pass has to move them there. Floating-point steps
are neither contracted nor reordered (see `vector_writer.py`): the text determines the bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.vector_writer import TYPE_SUFFIX, Floats, Module, VectorWriter
from graphflow.ops.kernels.jit.compiler import name_module, vector_width

Values = Sequence[str]
BYTES = {"i8": 1, "i16": 2, "i32": 4, "i64": 8, "float": 4, "double": 8}


class KernelWriter:
    """Writes the LLVM IR of one kernel."""

    def __init__(self) -> None:
        self.module = Module()
        self.lines: list[str] = []
        self._here = "entry"
        self._labels = 0

    # Steps ------------------------------------------------------------------------------------

    def write(self, text: str) -> str:
        """Write an instruction; returns the name of its value."""
        name = self.module.name()
        self.lines.append(f"  {name} = {text}")
        return name

    def step(self, instruction: str, a: str | int, b: str | int, kind: str = "i64") -> str:
        """Write an instruction of two integers, such as "add"."""
        return self.write(f"{instruction} {kind} {a}, {b}")

    def add(self, a: str | int, b: str | int) -> str:
        return self.step("add", a, b)

    def mul(self, a: str | int, b: str | int) -> str:
        return self.step("mul", a, b)

    def minimum(self, a: str | int, b: str | int) -> str:
        """Write the smaller of two signed integers."""
        return self.write(f"select i1 {self.step('icmp slt', a, b)}, i64 {a}, i64 {b}")

    def maximum(self, a: str | int, b: str | int) -> str:
        """Write the larger of two signed integers."""
        return self.write(f"select i1 {self.step('icmp sgt', a, b)}, i64 {a}, i64 {b}")

    def lanes(self, width: int) -> VectorWriter:
        return VectorWriter(self.module, width, self.lines)

    def floats(self, width: int, element: str) -> Floats:
        return Floats(self.lanes(width), element)

    # Memory -----------------------------------------------------------------------------------

    def pointer(self, number: int | str) -> str:
        """Load the pointer to an operand or result."""
        return self.write(f"load ptr, ptr {self.gep('%ptrs', 'ptr', number)}, align 8")

    def size(self, number: int | str) -> str:
        """Load an entry of the table of sizes."""
        return self.write(f"load i64, ptr {self.gep('%sizes', 'i64', number)}, align 8")

    def gep(self, base: str, element: str, index: str | int) -> str:
        """Write the address of an element: `index` elements from `base`."""
        return self.write(f"getelementptr {element}, ptr {base}, i64 {index}")

    def load(self, kind: str, pointer: str, align: int) -> str:
        return self.write(f"load {kind}, ptr {pointer}, align {align}")

    def store(self, kind: str, value: str, pointer: str, align: int) -> None:
        self.lines.append(f"  store {kind} {value}, ptr {pointer}, align {align}")

    def load_index(self, base: str, element: str, at: str | int) -> str:
        """Load an integer of an array as an i64."""
        value = self.load(element, self.gep(base, element, at), BYTES[element])
        return value if element == "i64" else self.write(f"sext {element} {value} to i64")

    def load_vector(self, width: int, element: str, pointer: str, mask: str | None = None) -> str:
        """Load a vector, with zeros in the lanes that a mask leaves out."""
        kind = f"<{width} x {element}>"
        if mask is None:
            return self.load(kind, pointer, BYTES[element])
        return self.lanes(width).masked_load(element, pointer, BYTES[element], mask)

    def store_vector(
        self, width: int, element: str, value: str, pointer: str, mask: str | None = None
    ) -> None:
        """Store a vector, or the lanes that a mask selects."""
        kind = f"<{width} x {element}>"
        if mask is None:
            self.store(kind, value, pointer, BYTES[element])
            return
        self.lanes(width).masked_store(element, value, pointer, BYTES[element], mask)

    def gather(self, width: int, element: str, base: str, places: str, mask: str | None) -> str:
        """Gather the elements at a vector of i32 indices, with zeros in lanes that a mask leaves
        out."""
        kind = f"<{width} x {element}>"
        name = f"@llvm.masked.gather.v{width}{TYPE_SUFFIX.get(element, element)}.v{width}p0"
        self.declare(name, f"declare {kind} {name}(<{width} x ptr>, i32, <{width} x i1>, {kind})")
        pointers = self.write(f"getelementptr {element}, ptr {base}, <{width} x i32> {places}")
        return self.write(
            f"call {kind} {name}(<{width} x ptr> {pointers}, i32 {BYTES[element]}, "
            f"<{width} x i1> {mask or 'splat (i1 true)'}, {kind} zeroinitializer)"
        )

    def declare(self, name: str, text: str) -> None:
        self.module.declared[name] = text

    # Vectors ----------------------------------------------------------------------------------

    def broadcast(self, width: int, element: str, value: str) -> str:
        """Write a vector with a scalar in all lanes."""
        return self.lanes(width).broadcast(element, value)

    def first_lanes(self, width: int, count: str) -> str:
        """Write a mask of the first `count` lanes."""
        index = ", ".join(f"i64 {i}" for i in range(width))
        counts = self.broadcast(width, "i64", count)
        return self.write(f"icmp ult <{width} x i64> <{index}>, {counts}")

    def reduce_lanes(
        self, width: int, element: str, value: str, step: Callable[[Floats, str, str], str]
    ) -> str:
        """Reduce the lanes of a vector to one number, by halves.

        The order depends on the width alone.
        """
        return self.lanes(width).reduce(element, value, step)

    # Control flow -----------------------------------------------------------------------------

    def loop(
        self,
        start: str | int,
        stop: str | int,
        carried: Sequence[tuple[str, str]],
        body: Callable[..., Values | None],
        step: str | int = 1,
    ) -> list[str]:
        """Write `for i in range(start, stop, step): values = body(i, *values)`.

        Args:
            carried: type and first value of each carried value.

        Returns:
            The names of the final values.
        """
        before, (inside, after) = self._here, self._new_labels("in", "out")
        counter = self.module.name()
        names = [self.module.name() for _ in carried]
        some = self.step("icmp slt", start, stop)
        self.lines += [f"  br i1 {some}, label %{inside}, label %{after}", f"{inside}:"]
        head = len(self.lines)
        self._here = inside
        given = list(body(counter, *names) or ())
        last = self._here
        following = self.add(counter, step)
        more = self.step("icmp slt", following, stop)
        self.lines += [f"  br i1 {more}, label %{inside}, label %{after}", f"{after}:"]
        entries = [("i64", counter, str(start), following)]
        entries += [
            (kind, name, first, then)
            for (kind, first), name, then in zip(carried, names, given, strict=True)
        ]
        self.lines[head:head] = [
            f"  {name} = phi {kind} [{first}, %{before}], [{then}, %{last}]"
            for kind, name, first, then in entries
        ]
        self._here = after
        return [
            self.write(f"phi {kind} [{first}, %{before}], [{then}, %{last}]")
            for kind, _, first, then in entries[1:]
        ]

    def when(
        self,
        condition: str,
        otherwise: Sequence[tuple[str, str]],
        body: Callable[[], Values | None],
    ) -> list[str]:
        """Write `if condition: values = body()`; returns the values, those of `otherwise` if it is
        false."""
        before, (inside, after) = self._here, self._new_labels("then", "on")
        self.lines += [f"  br i1 {condition}, label %{inside}, label %{after}", f"{inside}:"]
        self._here = inside
        given = list(body() or ())
        last = self._here
        self.lines += [f"  br label %{after}", f"{after}:"]
        self._here = after
        return [
            self.write(f"phi {kind} [{value}, %{before}], [{then}, %{last}]")
            for (kind, value), then in zip(otherwise, given, strict=True)
        ]

    def _new_labels(self, *names: str) -> list[str]:
        self._labels += 1
        return [f"{name}{self._labels}" for name in names]

    # The end ----------------------------------------------------------------------------------

    def finish(self) -> tuple[str, str]:
        """Return the function's name, and the text of the module that defines it."""
        lines = ["(ptr %ptrs, ptr %sizes, i64 %start, i64 %stop) {", "entry:"]
        body = "\n".join([*lines, *self.lines, "  ret void", "}"])
        return name_module(body, "\n".join(self.module.declared.values()))


def lanes_of(element: str) -> int:
    """Return how many elements a register holds."""
    return vector_width() * 4 // BYTES[element]


def element_of(dtype: Any) -> str:
    """Return the LLVM type of a dtype's elements in memory."""
    return _ELEMENTS[np.dtype(dtype).name]


_ELEMENTS = {
    "float32": "float", "float64": "double", "bool": "i8", "int8": "i8", "uint8": "i8",
    "int16": "i16", "uint16": "i16", "int32": "i32", "uint32": "i32", "int64": "i64",
    "uint64": "i64",
}  # fmt: skip
