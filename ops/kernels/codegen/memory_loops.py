"""Loops over memory in LLVM's language, for kernels that are no elementwise regions.

A kernel has the signature of all generated code (`compiler.py`): pointers, sizes, and the range of
its outer loop. Values are names in the text; sizes and offsets, in bytes, may be numbers as well.
Loops are written with their carried values in registers from the start, since no pass over the text
would put them there later.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from graphflow.ops.kernels.codegen.vector_writer import TYPE_SUFFIX, Floats, Module, VectorWriter
from graphflow.ops.kernels.jit.compiler import NativeFunction, name_module

Value = int | str
"""An i64: a number, or the name of one."""
Typed = tuple[str, str]
"""A type and the name of a value."""


class LoopNestWriter:
    """Writes one function: `pointers` and `sizes` are its arguments, loops nest by functions.

    Args:
        width: elements in a vector.
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
        return self.lanes.write(text)

    def source(self) -> tuple[str, str]:
        """The kernel's name, and the module that defines it."""
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
        """How many vectors hold so many elements, the last one perhaps in part."""
        return self.write(f"sdiv i64 {self.add(count, self.width - 1)}, {self.width}")

    # Memory -------------------------------------------------------------------------------------

    def gep(self, pointer: str, *offsets: Value) -> str:
        """A pointer moved by bytes."""
        total: Value = 0
        for offset in offsets:
            total = self.add(total, offset)
        return (
            pointer if total == 0 else self.write(f"getelementptr i8, ptr {pointer}, i64 {total}")
        )

    def load(self, pointer: str, mask: str | None = None) -> str:
        """A vector; zeros where there is a mask that does not hold."""
        if mask is None:
            return self.write(f"load {self.kind}, ptr {pointer}, align {self.itemsize}")
        call = f"@llvm.masked.load.v{self.width}{TYPE_SUFFIX[self.element]}.p0"
        ones = self.lanes.vector("i1")
        self.module.declared[call] = f"declare {self.kind} {call}(ptr, i32, {ones}, {self.kind})"
        return self.write(
            f"call {self.kind} {call}(ptr {pointer}, i32 {self.itemsize}, {ones} {mask}, "
            f"{self.kind} zeroinitializer)"
        )

    def store(self, value: str, pointer: str, mask: str | None = None) -> None:
        if mask is None:
            self.lines.append(f"  store {self.kind} {value}, ptr {pointer}, align {self.itemsize}")
            return
        call = f"@llvm.masked.store.v{self.width}{TYPE_SUFFIX[self.element]}.p0"
        ones = self.lanes.vector("i1")
        self.module.declared[call] = f"declare void {call}({self.kind}, ptr, i32, {ones})"
        self.lines.append(
            f"  call void {call}({self.kind} {value}, ptr {pointer}, i32 {self.itemsize}, "
            f"{ones} {mask})"
        )

    def gather(self, pointer: str, apart: Value, mask: str | None) -> str:
        """A vector of elements that are so many bytes apart."""
        places, ones = self._spaced_pointers(pointer, apart), self.lanes.vector("i1")
        kinds = f"<{self.width} x ptr>"
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
        """Store a vector to elements that are so many bytes apart."""
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
        """The sum of a vector's elements, from the first."""
        scalar = self.element
        name = f"@llvm.vector.reduce.fadd.v{self.width}{TYPE_SUFFIX[scalar]}"
        self.module.declared[name] = f"declare {scalar} {name}({scalar}, {self.kind})"
        return self.write(f"call {scalar} {name}({scalar} 0.0, {self.kind} {vector})")

    def broadcast(self, pointer: str) -> str:
        """One element of memory in all lanes."""
        return self.splat(self.write(f"load {self.element}, ptr {pointer}, align {self.itemsize}"))

    def splat(self, scalar: str, element: str | None = None) -> str:
        kind = self.lanes.vector(element or self.element)
        first = self.write(
            f"insertelement {kind} poison, {element or self.element} {scalar}, i64 0"
        )
        zeros = f"<{self.width} x i32> zeroinitializer"
        return self.write(f"shufflevector {kind} {first}, {kind} poison, {zeros}")

    def first_lanes(self, count: Value) -> str:
        """A mask of the first lanes."""
        every = self.splat(str(count), "i64") if isinstance(count, str) else f"splat (i64 {count})"
        lanes = ", ".join(f"i64 {i}" for i in range(self.width))
        return self.write(f"icmp slt <{self.width} x i64> <{lanes}>, {every}")

    def shuffle(self, a: str, b: str, order: Sequence[int]) -> str:
        """Elements of two vectors, those of b by numbers from the width on."""
        mask = ", ".join(f"i32 {i}" for i in order)
        return self.write(
            f"shufflevector {self.kind} {a}, {self.kind} {b}, <{len(order)} x i32> <{mask}>"
        )

    def transpose(self, rows: Sequence[str]) -> list[str]:
        """As many vectors as a vector has elements, as columns: halves change places, then halves
        of these (Eklundh)."""
        width, vectors = self.width, list(rows)
        half = width // 2
        while half:
            for i in range(width):
                if i & half:
                    continue
                a, b = vectors[i], vectors[i + half]
                low = [j if not j & half else j - half + width for j in range(width)]
                high = [j + half if not j & half else j + width for j in range(width)]
                vectors[i], vectors[i + half] = self.shuffle(a, b, low), self.shuffle(a, b, high)
            half //= 2
        return vectors

    # Loops --------------------------------------------------------------------------------------

    def loop(
        self,
        start: Value,
        stop: Value,
        body: Callable[..., Sequence[str] | None],
        carried: Sequence[Typed] = (),
        step: int = 1,
    ) -> list[str]:
        """body(i, *values) for i from start below stop, giving the next values; the last ones."""
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
        """One of two texts."""
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
        """body(first element, mask) for each vector of so many elements; the last one's mask says
        which of it there are, the others have none."""
        rest = self.write(f"srem i64 {count}, {self.width}")
        whole = self.sub(count, rest)
        self.loop(0, whole, lambda i: body(i, None), step=self.width)
        self.loop(whole, count, lambda i: body(i, self.first_lanes(rest)), step=self.width)

    def loop_overlapping(self, count: Value, size: int, body: Callable[[str], None]) -> None:
        """body(first) for strips of so many elements. The last one begins so early that it is
        whole, if there are as many; what two of them write is the same."""
        last = self.sub(count, size)
        last = self.write(f"select i1 {self.write(f'icmp sgt i64 {last}, 0')}, i64 {last}, i64 0")
        self.loop(0, count, lambda i: body(str(self.minimum(i, last))), step=size)

    def loop_vectors_carrying(
        self, count: Value, body: Callable[..., Sequence[str]], begun: Sequence[str]
    ) -> list[str]:
        """As `loop_vectors`, of vectors that are carried along: body(first, mask, *values)."""
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
    """Run a native function, letting other threads run Python meanwhile."""
    table = array("q", (*pointers, *sizes))
    place = table.buffer_info()[0]
    function.releasing_gil(place, place + 8 * len(pointers), start, stop)
