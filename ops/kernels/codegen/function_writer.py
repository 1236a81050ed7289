"""Functions with loops and branches in LLVM IR, written as nested `with` blocks.

It writes the code around vector steps. Counters are phi nodes, so no LLVM pass has to promote
memory to registers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from graphflow.ops.kernels.codegen.vector_writer import TYPE_SUFFIX

_BYTES = {"i16": 2, "float": 4, "double": 8}


class FunctionWriter:
    """Writes the LLVM IR of one function; values are their names.

    Args:
        parameters: in LLVM's notation, such as "ptr %a".
        element: "float", "double" or "i16", the element of vectors.
        width: elements of a vector.
        inner: whether the function is internal to its module.
    """

    def __init__(
        self, name: str, parameters: Sequence[str], element: str, width: int, inner: bool = True
    ) -> None:
        self.element, self.width = element, width
        self.bytes = _BYTES[element]
        self.vector = f"<{width} x {element}>"
        self.mask = f"<{width} x i1>"
        self._suffix = TYPE_SUFFIX.get(element, element)
        self.declared: dict[str, None] = {}
        scope = "internal " if inner else ""
        self._opening = f"define {scope}void @{name}({', '.join(parameters)}) {{"
        self._lines: list[str] = []
        self._count = 0
        self._block = "entry"
        self._steps: dict[str, str | int] = {}

    def text(self) -> str:
        """Return the text of the function."""
        lines = [self._opening, "entry:", *self._lines, "  ret void", "}"]
        return "\n".join(lines)

    # Values -----------------------------------------------------------------------------------

    def name(self) -> str:
        self._count += 1
        return f"%v{self._count}"

    def write(self, text: str) -> str:
        """Write an instruction; returns the name of its value."""
        name = self.name()
        self._lines.append(f"  {name} = {text}")
        return name

    def write_effect(self, text: str) -> None:
        """Write an instruction without a value."""
        self._lines.append(f"  {text}")

    def add(self, a: str, b: str | int) -> str:
        return self.write(f"add i64 {a}, {b}")

    def sub(self, a: str, b: str) -> str:
        return self.write(f"sub i64 {a}, {b}")

    def mul(self, a: str, b: str | int) -> str:
        return self.write(f"mul i64 {a}, {b}")

    def minimum(self, a: str, b: str | int) -> str:
        return self.select(self.write(f"icmp slt i64 {a}, {b}"), "i64", a, str(b))

    def compare(self, how: str, a: str, b: str | int) -> str:
        return self.write(f"icmp {how} i64 {a}, {b}")

    def select(self, condition: str, kind: str, a: str, b: str) -> str:
        return self.write(f"select i1 {condition}, {kind} {a}, {kind} {b}")

    def gep(self, pointer: str, offset: str | int) -> str:
        """Write a pointer moved by `offset` bytes."""
        return self.write(f"getelementptr i8, ptr {pointer}, i64 {offset}")

    def argument(self, table: str, kind: str, number: int) -> str:
        """Load an entry of a table of pointers or sizes."""
        place = self.write(f"getelementptr {kind}, ptr {table}, i64 {number}")
        return self.write(f"load {kind}, ptr {place}, align 8")

    # Vectors ----------------------------------------------------------------------------------

    def load(self, pointer: str) -> str:
        return self.write(f"load {self.vector}, ptr {pointer}, align {self.bytes}")

    def store(self, value: str, pointer: str) -> None:
        self.write_effect(f"store {self.vector} {value}, ptr {pointer}, align {self.bytes}")

    def broadcast(self, pointer: str) -> str:
        """Write a vector with the element at a pointer in all lanes."""
        one = self.write(f"load {self.element}, ptr {pointer}, align {self.bytes}")
        first = self.write(f"insertelement {self.vector} poison, {self.element} {one}, i64 0")
        return self.shuffle(first, first, [0] * self.width)

    def shuffle(self, a: str, b: str, lanes: Sequence[int]) -> str:
        """Write selected lanes of two vectors; those of b are counted on."""
        picked = ", ".join(f"i32 {i}" for i in lanes)
        return self.write(
            f"shufflevector {self.vector} {a}, {self.vector} {b}, <{self.width} x i32> <{picked}>"
        )

    def fma(self, a: str, b: str, c: str) -> str:
        """Write a·b + c, rounded once."""
        full = f"@llvm.fma.v{self.width}{self._suffix}"
        kind = self.vector
        self.declared[f"declare {kind} {full}({kind}, {kind}, {kind})"] = None
        return self.write(f"call {kind} {full}({kind} {a}, {kind} {b}, {kind} {c})")

    def first_lanes(self, count: str, skip: int = 0) -> str:
        """Write a mask of the lanes whose number plus `skip` is below `count`."""
        kind = f"<{self.width} x i64>"
        one = self.write(f"insertelement {kind} poison, i64 {count}, i64 0")
        zeros = f"<{self.width} x i32> zeroinitializer"
        all_of = self.write(f"shufflevector {kind} {one}, {kind} poison, {zeros}")
        numbers = ", ".join(f"i64 {skip + i}" for i in range(self.width))
        return self.write(f"icmp slt {kind} <{numbers}>, {all_of}")

    def masked_load(self, pointer: str, mask: str) -> str:
        """Load a vector with zeros in masked-out lanes, whose memory is not touched."""
        full = f"@llvm.masked.load.v{self.width}{self._suffix}.p0"
        kind = self.vector
        self.declared[f"declare {kind} {full}(ptr, i32, {self.mask}, {kind})"] = None
        return self.write(
            f"call {kind} {full}(ptr {pointer}, i32 {self.bytes}, {self.mask} {mask}, "
            f"{kind} zeroinitializer)"
        )

    def masked_store(self, value: str, pointer: str, mask: str) -> None:
        full = f"@llvm.masked.store.v{self.width}{self._suffix}.p0"
        kind = self.vector
        self.declared[f"declare void {full}({kind}, ptr, i32, {self.mask})"] = None
        self.write_effect(
            f"call void {full}({kind} {value}, ptr {pointer}, i32 {self.bytes}, {self.mask} {mask})"
        )

    def store_lanes(self, value: str, pointer: str, mask: str, whole: str) -> None:
        """Store the lanes of a mask.

        Args:
            whole: whether the mask has all lanes. A plain store is then used, since without AVX-512
                a masked store costs as much as twenty others.
        """
        if self.width * self.bytes == 64:
            self.masked_store(value, pointer, mask)
            return
        with self.when(whole):
            self.store(value, pointer)
        with self.when(self.write(f"xor i1 {whole}, true")):
            self.masked_store(value, pointer, mask)

    def prefetch(self, pointer: str, write: bool = False, near: int = 3) -> None:
        """Prefetch the cache line of an address, which may be invalid."""
        self.declared["declare void @llvm.prefetch.p0(ptr, i32, i32, i32)"] = None
        self.write_effect(
            f"call void @llvm.prefetch.p0(ptr {pointer}, i32 {int(write)}, i32 {near}, i32 1)"
        )

    # Control flow -----------------------------------------------------------------------------

    def start_block(self, name: str) -> None:
        """Start a basic block; the block before must end in a branch."""
        self._lines.append(f"{name}:")
        self._block = name

    @contextmanager
    def loop(self, start: str | int, stop: str, step: str | int = 1) -> Iterator[str]:
        """Write a loop over a counter from `start` below `stop`, perhaps of no turn.

        `set_loop_step` in the body overrules the step.
        """
        counter = self.name()
        number = counter[1:]
        before = self._block
        self._steps[counter] = step
        self.write_effect(f"br label %{number}.head")
        self.start_block(f"{number}.head")
        opening = self.reserve_line()
        self.write_effect(f"{counter}.in = icmp slt i64 {counter}, {stop}")
        self.write_effect(f"br i1 {counter}.in, label {counter}.body, label {counter}.end")
        self.start_block(f"{number}.body")
        yield counter
        self.write_effect(f"{counter}.next = add i64 {counter}, {self._steps[counter]}")
        opening(f"{counter} = phi i64 [{start}, %{before}], [{counter}.next, %{self._block}]")
        self.write_effect(f"br label {counter}.head")
        self.start_block(f"{number}.end")

    def set_loop_step(self, counter: str, step: str | int) -> None:
        """Set how far the counter of the innermost loop advances; called in its body."""
        self._steps[counter] = step

    def reserve_line(self) -> Callable[[str], None]:
        """Reserve a line; returns a function that fills it once its text is known."""
        place = len(self._lines)
        self._lines.append("")

        def give(text: str) -> None:
            self._lines[place] = f"  {text}"

        return give

    @contextmanager
    def when(self, condition: str) -> Iterator[None]:
        """Write a block that runs if a condition holds."""
        number = self.name()[1:]
        self.write_effect(f"br i1 {condition}, label %{number}.then, label %{number}.end")
        self.start_block(f"{number}.then")
        yield
        self.write_effect(f"br label %{number}.end")
        self.start_block(f"{number}.end")
