"""Loop nests over memory in LLVM IR, for kernels that are not elementwise regions.

A kernel has the signature of all generated code (`compiler.py`): pointers, sizes, and the range of
its outer loop. Values are names in the text; sizes and offsets, in bytes, may also be Python
numbers, which are folded. Carried values are phi nodes from the start, since no LLVM pass would put
them in registers later.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from graphflow.ops.kernels.codegen.vector_writer import (
    TYPE_SUFFIX,
    Floats,
    Module,
    VectorWriter,
    transpose_registers,
)
from graphflow.ops.kernels.jit.call_recorder import RecordedCall, current_recorder
from graphflow.ops.kernels.jit.compiler import NativeFunction, name_module

Value = int | str
"""An i64: a number, or the name of one."""
Typed = tuple[str, str]
"""An LLVM type and the name of a value."""


class LoopNestWriter:
    """Writes one function, whose loops nest as Python functions do.

    Args:
        width: elements of a vector.
        pointers, sizes: how many of each the kernel is given.
        element: "float" or "double".
    """

    def __init__(self, width: int, pointers: int, sizes: int, element: str = "float") -> None:
        self.module = Module()
        self.lines: list[str] = []
        self.lanes = VectorWriter(self.module, width, self.lines)
        self.floats = Floats(self.lanes, element)
        self.width = width
        self.element = element
        self.itemsize = 4 if element == "float" else 8
        self.nbytes = width * self.itemsize
        self.kind = self.lanes.vector(element)
        self._block = "entry"
        self._blocks = 0
        self.pointers = [self._argument("operands", "ptr", i) for i in range(pointers)]
        self.sizes = [self._argument("sizes", "i64", i) for i in range(sizes)]

    def _argument(self, table: str, kind: str, i: int) -> str:
        place = self.write(f"getelementptr i64, ptr %{table}, i64 {i}")
        return self.write(f"load {kind}, ptr {place}, align 8")

    def write(self, text: str) -> str:
        """Write an instruction; returns the name of its value."""
        return self.lanes.write(text)

    def source(self) -> tuple[str, str]:
        """Return the kernel's name, and the module that defines it."""
        body = "\n".join(self.lines)
        text = (
            "(ptr noalias %operands, ptr noalias %sizes, i64 %start, i64 %stop) {\n"
            f"entry:\n{body}\n  ret void\n}}"
        )
        return name_module(text, "\n".join(self.module.declared.values()))

    # Numbers ------------------------------------------------------------------------------------

    def add(self, a: Value, b: Value) -> Value:
        if isinstance(a, int) and isinstance(b, int):
            return a + b
        if a == 0 or b == 0:
            return b if a == 0 else a
        return self.write(f"add i64 {a}, {b}")

    def sub(self, a: Value, b: Value) -> Value:
        if isinstance(a, int) and isinstance(b, int):
            return a - b
        return a if b == 0 else self.write(f"sub i64 {a}, {b}")

    def mul(self, a: Value, b: Value) -> Value:
        if isinstance(a, int) and isinstance(b, int):
            return a * b
        if 0 in (a, b):
            return 0
        if 1 in (a, b):
            return b if a == 1 else a
        return self.write(f"mul i64 {a}, {b}")

    def minimum(self, a: Value, b: Value) -> Value:
        self.module.declared["smin"] = "declare i64 @llvm.smin.i64(i64, i64)"
        return self.write(f"call i64 @llvm.smin.i64(i64 {a}, i64 {b})")

    def vector_count(self, count: Value) -> Value:
        """Write how many vectors hold `count` elements, counting a partial one."""
        return self.write(f"sdiv i64 {self.add(count, self.width - 1)}, {self.width}")

    # Memory -------------------------------------------------------------------------------------

    def gep(self, pointer: str, *offsets: Value) -> str:
        """Write a pointer moved by the sum of some offsets in bytes."""
        total: Value = 0
        for offset in offsets:
            total = self.add(total, offset)
        return (
            pointer if total == 0 else self.write(f"getelementptr i8, ptr {pointer}, i64 {total}")
        )

    def load(self, pointer: str, mask: str | None = None) -> str:
        """Load a vector, with zeros in the lanes that a mask leaves out."""
        if mask is None:
            return self.write(f"load {self.kind}, ptr {pointer}, align {self.itemsize}")
        return self.lanes.masked_load(self.element, pointer, self.itemsize, mask)

    def store(self, value: str, pointer: str, mask: str | None = None) -> None:
        """Store a vector, or the lanes that a mask selects."""
        if mask is None:
            self.lines.append(f"  store {self.kind} {value}, ptr {pointer}, align {self.itemsize}")
            return
        self.lanes.masked_store(self.element, value, pointer, self.itemsize, mask)

    def gather(self, pointer: str, apart: Value, mask: str | None) -> str:
        """Gather a vector of elements that are `apart` bytes apart."""
        return self._gather(self._spaced_pointers(pointer, apart), mask)

    def gather_at(self, pointer: str, offsets: str, mask: str | None) -> str:
        """Gather a vector of elements at offsets in bytes, a vector of i32."""
        kind = self.lanes.vector("i32")
        return self._gather(self.write(f"getelementptr i8, ptr {pointer}, {kind} {offsets}"), mask)

    def _gather(self, places: str, mask: str | None) -> str:
        ones, kinds = self.lanes.vector("i1"), f"<{self.width} x ptr>"
        call = f"@llvm.masked.gather.v{self.width}{TYPE_SUFFIX[self.element]}.v{self.width}p0"
        self.module.declared[call] = (
            f"declare {self.kind} {call}({kinds}, i32, {ones}, {self.kind})"
        )
        given = mask or "splat (i1 true)"
        return self.write(
            f"call {self.kind} {call}({kinds} {places}, i32 {self.itemsize}, {ones} {given}, "
            f"{self.kind} zeroinitializer)"
        )

    def scatter(self, value: str, pointer: str, apart: Value, mask: str | None) -> None:
        """Scatter a vector to elements that are `apart` bytes apart."""
        places, ones = self._spaced_pointers(pointer, apart), self.lanes.vector("i1")
        kinds = f"<{self.width} x ptr>"
        call = f"@llvm.masked.scatter.v{self.width}{TYPE_SUFFIX[self.element]}.v{self.width}p0"
        self.module.declared[call] = f"declare void {call}({self.kind}, {kinds}, i32, {ones})"
        given = mask or "splat (i1 true)"
        self.lines.append(
            f"  call void {call}({self.kind} {value}, {kinds} {places}, i32 {self.itemsize}, "
            f"{ones} {given})"
        )

    def _spaced_pointers(self, pointer: str, apart: Value) -> str:
        lanes = ", ".join(f"i64 {i}" for i in range(self.width))
        kind = f"<{self.width} x i64>"
        steps = self.splat(str(apart), "i64") if isinstance(apart, str) else f"splat (i64 {apart})"
        moved = self.write(f"mul {kind} <{lanes}>, {steps}")
        return self.write(f"getelementptr i8, ptr {pointer}, {kind} {moved}")

    def reduce_sum(self, vector: str) -> str:
        """Write the sum of a vector's elements, in order."""
        scalar = self.element
        name = f"@llvm.vector.reduce.fadd.v{self.width}{TYPE_SUFFIX[scalar]}"
        self.module.declared[name] = f"declare {scalar} {name}({scalar}, {self.kind})"
        return self.write(f"call {scalar} {name}({scalar} 0.0, {self.kind} {vector})")

    def broadcast(self, pointer: str) -> str:
        """Load one element into all lanes."""
        return self.splat(self.write(f"load {self.element}, ptr {pointer}, align {self.itemsize}"))

    def splat(self, scalar: str, element: str | None = None) -> str:
        """Write a vector with a scalar in all lanes."""
        return self.lanes.broadcast(element or self.element, scalar)

    def first_lanes(self, count: Value) -> str:
        """Write a mask of the first `count` lanes."""
        every = self.splat(str(count), "i64") if isinstance(count, str) else f"splat (i64 {count})"
        lanes = ", ".join(f"i64 {i}" for i in range(self.width))
        return self.write(f"icmp slt <{self.width} x i64> <{lanes}>, {every}")

    def indices(self, first: Value, step: int = 1) -> str:
        """Write first, first + step, … as a vector of i32."""
        lanes = ", ".join(f"i32 {i * step}" for i in range(self.width))
        return self.write(f"add {self.lanes.vector('i32')} {self.splat_i32(first)}, <{lanes}>")

    def splat_i32(self, size: Value) -> str:
        """Write a size in all lanes, as i32."""
        return self.splat(self.write(f"trunc i64 {size} to i32"), "i32")

    def in_range_mask(self, indices: str, end: Value) -> str:
        """Write a mask of the lanes with 0 ≤ index < end; the end is not negative."""
        kind = self.lanes.vector("i32")
        return self.write(f"icmp ult {kind} {indices}, {self.splat_i32(end)}")

    def even_elements(self, a: str, b: str) -> str:
        """Write every second element of two vectors, from the first one on."""
        return self.shuffle(a, b, range(0, 2 * self.width, 2))

    def interleave(self, a: str, b: str, half: int) -> str:
        """Write the elements of a and b by turns: the first vector of them, or the second."""
        start = half * self.width // 2
        return self.shuffle(a, b, [start + i // 2 + i % 2 * self.width for i in range(self.width)])

    def shuffle(self, a: str, b: str, order: Sequence[int]) -> str:
        """Write selected elements of two vectors; those of b are counted on."""
        mask = ", ".join(f"i32 {i}" for i in order)
        return self.write(
            f"shufflevector {self.kind} {a}, {self.kind} {b}, <{len(order)} x i32> <{mask}>"
        )

    def transpose(self, rows: Sequence[str]) -> list[str]:
        """Transpose a square of vectors."""
        return transpose_registers(rows, self.shuffle)

    # Loops --------------------------------------------------------------------------------------

    def loop(
        self,
        start: Value,
        stop: Value,
        body: Callable[..., Sequence[str] | None],
        carried: Sequence[Typed] = (),
        step: int = 1,
    ) -> list[str]:
        """Write `for i in range(start, stop, step): values = body(i, *values)`.

        Returns:
            The names of the final values.
        """
        head, inside, after = (f"{part}{self._blocks}" for part in ("head", "body", "after"))
        self._blocks += 1
        before = self._block
        self.lines += [f"  br label %{head}", f"{head}:"]
        i = self.module.name()
        names = [self.module.name() for _ in carried]
        place = len(self.lines)
        on = self.module.name()
        self.lines += [
            f"  {on} = icmp slt i64 {i}, {stop}",
            f"  br i1 {on}, label %{inside}, label %{after}",
            f"{inside}:",
        ]
        self._block = inside
        following = body(i, *names) or ()
        further = self.write(f"add i64 {i}, {step}")
        last = self._block
        self.lines += [f"  br label %{head}", f"{after}:"]
        self._block = after
        merged = [f"  {i} = phi i64 [ {start}, %{before} ], [ {further}, %{last} ]"]
        for name, (kind, first), value in zip(names, carried, following, strict=True):
            merged.append(f"  {name} = phi {kind} [ {first}, %{before} ], [ {value}, %{last} ]")
        self.lines[place:place] = merged
        return names

    def if_else(
        self, condition: str, then: Callable[[], object], otherwise: Callable[[], object]
    ) -> None:
        """Write two branches."""
        blocks = [f"{part}{self._blocks}" for part in ("then", "else", "joined")]
        self._blocks += 1
        self.lines.append(f"  br i1 {condition}, label %{blocks[0]}, label %{blocks[1]}")
        for block, text in zip(blocks, (then, otherwise), strict=False):
            self.lines.append(f"{block}:")
            self._block = block
            text()
            self.lines.append(f"  br label %{blocks[2]}")
        self.lines.append(f"{blocks[2]}:")
        self._block = blocks[2]

    def loop_vectors(self, count: Value, body: Callable[[Value, str | None], None]) -> None:
        """Write body(first element, mask) for each vector of `count` elements.

        The mask is None, except for a last, partial vector.
        """
        rest = self.write(f"srem i64 {count}, {self.width}")
        whole = self.sub(count, rest)
        self.loop(0, whole, lambda i: body(i, None), step=self.width)
        self.loop(whole, count, lambda i: body(i, self.first_lanes(rest)), step=self.width)

    def loop_overlapping(self, count: Value, size: int, body: Callable[[str], None]) -> None:
        """Write body(first) for strips of `size` elements, all whole if `count` is at least that.

        The last strip begins early instead of being masked, so it overlaps the one before: both
        must write the same there.
        """
        last = self.sub(count, size)
        last = self.write(f"select i1 {self.write(f'icmp sgt i64 {last}, 0')}, i64 {last}, i64 0")
        self.loop(0, count, lambda i: body(str(self.minimum(i, last))), step=size)

    def loop_vectors_carrying(
        self, count: Value, body: Callable[..., Sequence[str]], begun: Sequence[str]
    ) -> list[str]:
        """Write a loop like `loop_vectors` with carried vectors: body(first, mask, *values)."""
        rest = self.write(f"srem i64 {count}, {self.width}")
        whole = self.sub(count, rest)
        values: Sequence[str] = begun
        for start, stop, partly in ((0, whole, False), (whole, count, True)):

            def strip(i: str, *so_far: str, partly: bool = partly) -> Sequence[str]:
                return body(i, self.first_lanes(rest) if partly else None, *so_far)

            values = self.loop(start, stop, strip, [(self.kind, v) for v in values], self.width)
        return list(values)


def call_native(
    function: NativeFunction, pointers: Sequence[int], sizes: Sequence[int], start: int, stop: int
) -> None:
    """Run a native function without the GIL, or add it to the current recorder."""
    recorder = current_recorder()
    if recorder is not None and not recorder.keeps_calls:
        return
    table = array("q", (*pointers, *sizes))
    if recorder is None:
        place = table.buffer_info()[0]
        function.releasing_gil(place, place + 8 * len(pointers), start, stop)
    else:
        recorder.calls.append(RecordedCall(function.address, table, len(pointers), start, stop))
