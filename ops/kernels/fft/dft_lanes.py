"""As many transforms at once as a vector has lanes: arithmetic and memory.

Real and imaginary parts are vectors of their own, in registers and in scratch memory
(`WorkBuffers`). Arrays hold complex numbers interleaved (`ArrayElements`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.codegen.control_flow import BYTES, KernelWriter, lanes_of
from graphflow.ops.kernels.codegen.vector_writer import Floats, transpose_registers

Pair = tuple[str, str]
"""Real and imaginary parts."""


@dataclass
class ComplexVectors:
    """Steps on vectors of complex numbers."""

    f: Floats

    def add(self, a: Pair, b: Pair) -> Pair:
        return self.f.add(a[0], b[0]), self.f.add(a[1], b[1])

    def sub(self, a: Pair, b: Pair) -> Pair:
        return self.f.sub(a[0], b[0]), self.f.sub(a[1], b[1])

    def mul(self, a: Pair, w: Pair) -> Pair:
        f = self.f
        real = f.fma(a[0], w[0], f.neg(f.mul(a[1], w[1])))
        return real, f.fma(a[0], w[1], f.mul(a[1], w[0]))

    def scale(self, a: Pair, x: str) -> Pair:
        return self.f.mul(a[0], x), self.f.mul(a[1], x)

    def add_scaled(self, a: Pair, b: Pair, x: float) -> Pair:
        """Write a + x·b."""
        number = self.f.const(x)
        return self.f.fma(b[0], number, a[0]), self.f.fma(b[1], number, a[1])

    def times_minus_i(self, a: Pair) -> Pair:
        """Write -i·a."""
        return a[1], self.f.neg(a[0])

    def butterfly(self, a: list[Pair]) -> list[Pair]:
        """Write the transform of 2, 3, 4 or 5 numbers."""
        return {2: self._two, 3: self._three, 4: self._four, 5: self._five}[len(a)](a)

    def _two(self, a: list[Pair]) -> list[Pair]:
        return [self.add(a[0], a[1]), self.sub(a[0], a[1])]

    def _three(self, a: list[Pair]) -> list[Pair]:
        total, apart = self.add(a[1], a[2]), self.times_minus_i(self.sub(a[1], a[2]))
        middle = self.add_scaled(a[0], total, -0.5)
        sine = math.sqrt(0.75)
        ends = self.add_scaled(middle, apart, sine), self.add_scaled(middle, apart, -sine)
        return [self.add(a[0], total), *ends]

    def _four(self, a: list[Pair]) -> list[Pair]:
        even, odd = self._two([a[0], a[2]]), self._two([a[1], a[3]])
        turned = self.times_minus_i(odd[1])
        return [
            self.add(even[0], odd[0]), self.add(even[1], turned),
            self.sub(even[0], odd[0]), self.sub(even[1], turned),
        ]  # fmt: skip

    def _five(self, a: list[Pair]) -> list[Pair]:
        sums = self.add(a[1], a[4]), self.add(a[2], a[3])
        apart = self.times_minus_i(self.sub(a[1], a[4])), self.times_minus_i(self.sub(a[2], a[3]))
        found = [self.add(a[0], self.add(*sums))]
        ends = []
        for k in (1, 2):
            cosines = [math.cos(2 * math.pi * k * j / 5) for j in (1, 2)]
            sines = [math.sin(2 * math.pi * k * j / 5) for j in (1, 2)]
            middle = self.add_scaled(
                self.add_scaled(a[0], sums[0], cosines[0]), sums[1], cosines[1]
            )
            zero = self.f.const(0.0)
            side = self.add_scaled(
                self.add_scaled((zero, zero), apart[0], sines[0]), apart[1], sines[1]
            )
            ends.append((self.add(middle, side), self.sub(middle, side)))
        return [*found, ends[0][0], ends[1][0], ends[1][1], ends[0][1]]


class WorkBuffers:
    """Scratch memory for two sets of transforms, one a lane, of n + 1 elements."""

    def __init__(self, flow: KernelWriter, element: str, base: str, n: int) -> None:
        self.flow, self.element, self.lanes = flow, element, lanes_of(element)
        self.buffers = [base, flow.gep(base, element, 2 * self.lanes * (n + 1))]

    def load(self, buffer: str, at: str) -> Pair:
        place, kind, item = self._place(buffer, at)
        real = self.flow.load(kind, place, item)
        return real, self.flow.load(kind, self.flow.gep(place, self.element, self.lanes), item)

    def store(self, buffer: str, value: Pair, at: str) -> None:
        place, kind, item = self._place(buffer, at)
        self.flow.store(kind, value[0], place, item)
        self.flow.store(kind, value[1], self.flow.gep(place, self.element, self.lanes), item)

    def _place(self, buffer: str, at: str) -> tuple[str, str, int]:
        place = self.flow.gep(buffer, self.element, self.flow.mul(at, 2 * self.lanes))
        return place, f"<{self.lanes} x {self.element}>", BYTES[self.element]


CLOSE, ROWS, APART = "close", "rows", "apart"
"""Layouts of transforms: side by side; each a row of whole registers; any other."""


class ArrayElements:
    """Elements, in an array, of as many transforms as there are lanes.

    Args:
        inverse: whether real and imaginary parts swap, which turns a transform into its inverse.
    """

    def __init__(
        self, flow: KernelWriter, element: str, base: str, layout: str, inverse: bool
    ) -> None:
        self.flow, self.element, self.base = flow, element, base
        self.lanes = lanes_of(element)
        self.close, self.rows, self.inverse = layout == CLOSE, layout == ROWS, inverse
        self.first, self.offsets, self.mask = "", "", ""
        self.starts: list[str] = []
        self.left = ""

    def select_group(self, offsets: str, mask: str, left: str) -> None:
        """Go to the transforms that begin at these byte offsets.

        Args:
            left: how many of them are stored; `mask` says the same by lanes.
        """
        flow = self.flow
        self.left = left
        if self.rows:
            self.starts = [
                flow.gep(self.base, "i8", flow.load("i64", flow.gep(offsets, "i64", lane), 8))
                for lane in range(self.lanes)
            ]
            self.mask = mask
            return
        if self.close:
            self.first = flow.gep(self.base, "i8", flow.load("i64", offsets, 8))
        else:
            self.offsets = flow.load(f"<{self.lanes} x i64>", offsets, 8)
        self.mask = mask

    def load_rows(self, buffer: str, n: int) -> None:
        """Load all elements of the transforms into a work buffer, by registers of each row."""
        flow, lanes, element = self.flow, self.lanes, self.element
        kind, each = f"<{lanes} x {element}>", lanes // 2

        def some(j: str) -> None:
            given = [
                flow.load(kind, flow.gep(start, element, flow.mul(j, 2)), BYTES[element])
                for start in self.starts
            ]
            place = flow.gep(buffer, element, flow.mul(j, 2 * lanes))
            for i, value in enumerate(transpose_registers(given, self._shuffle_registers)):
                to = flow.gep(place, element, (i ^ int(self.inverse)) * lanes)
                flow.store(kind, value, to, BYTES[element])

        flow.loop("0", n, (), some, each)

    def store_rows(self, buffer: str, n: int) -> None:
        """Store a work buffer to the rows."""
        flow, lanes, element = self.flow, self.lanes, self.element
        kind, each = f"<{lanes} x {element}>", lanes // 2

        def some(j: str) -> None:
            place = flow.gep(buffer, element, flow.mul(j, 2 * lanes))
            given = [
                flow.load(
                    kind, flow.gep(place, element, (i ^ int(self.inverse)) * lanes), BYTES[element]
                )
                for i in range(lanes)
            ]
            for lane, value in enumerate(transpose_registers(given, self._shuffle_registers)):
                self._store_row(kind, value, lane, j)

        flow.loop("0", n, (), some, each)

    def load_last(self, buffer: str, n: int) -> None:
        """Load element n of the transforms."""
        flow, lanes, element = self.flow, self.lanes, self.element
        kind, item = f"<{lanes} x {element}>", BYTES[element]
        for part in range(2):
            value = "poison"
            for lane, start in enumerate(self.starts):
                one = flow.load(element, flow.gep(start, element, 2 * n + part), item)
                value = flow.write(f"insertelement {kind} {value}, {element} {one}, i64 {lane}")
            flow.store(kind, value, flow.gep(buffer, element, (2 * n + part) * lanes), item)

    def store_last(self, buffer: str, n: int) -> None:
        """Store element n of the transforms."""
        flow, lanes, element = self.flow, self.lanes, self.element
        kind, item = f"<{lanes} x {element}>", BYTES[element]
        values = [
            flow.load(kind, flow.gep(buffer, element, (2 * n + part) * lanes), item)
            for part in range(2)
        ]

        def one(lane: int) -> None:
            for part, value in enumerate(values):
                number = flow.write(f"extractelement {kind} {value}, i64 {lane}")
                flow.store(
                    element, number, flow.gep(self.starts[lane], element, 2 * n + part), item
                )

        for lane in range(lanes):
            flow.when(flow.step("icmp sgt", self.left, lane), (), partial(one, lane))

    def _store_row(self, kind: str, value: str, lane: int, j: str) -> None:
        flow, item = self.flow, BYTES[self.element]
        there = flow.step("icmp sgt", self.left, lane)
        to = flow.gep(self.starts[lane], self.element, flow.mul(j, 2))
        flow.when(there, (), lambda: flow.store(kind, value, to, item))

    def _shuffle_registers(self, a: str, b: str, order: Sequence[int]) -> str:
        return self._shuffle(a, b, order, self.lanes)

    def _shuffle(self, value: str, other: str, order: Sequence[int], width: int) -> str:
        kind = f"<{width} x {self.element}>"
        places = ", ".join(f"i32 {i}" for i in order)
        return self.flow.write(
            f"shufflevector {kind} {value}, {kind} {other}, <{len(order)} x i32> <{places}>"
        )

    def load(self, ahead: str) -> Pair:
        """Load the elements that are `ahead` bytes from the first ones."""
        flow, lanes = self.flow, self.lanes
        twice = f"<{2 * lanes} x {self.element}>"
        if self.close:
            whole = flow.load(twice, flow.gep(self.first, "i8", ahead), BYTES[self.element])
        elif self.element == "float":
            wide = self._gather("double", flow.gep(self.base, "i8", ahead))
            whole = flow.write(f"bitcast <{lanes} x double> {wide} to {twice}")
        else:
            place = flow.gep(self.base, "i8", ahead)
            parts = [self._gather("double", p) for p in (place, flow.gep(place, "i8", 8))]
            return (parts[1], parts[0]) if self.inverse else (parts[0], parts[1])
        real, imaginary = (
            self._shuffle(whole, "poison", list(range(i, 2 * lanes, 2)), 2 * lanes)
            for i in range(2)
        )
        return (imaginary, real) if self.inverse else (real, imaginary)

    def _pointers(self, place: str) -> str:
        kind = f"<{self.lanes} x i64>"
        return self.flow.write(f"getelementptr i8, ptr {place}, {kind} {self.offsets}")

    def _gather(self, element: str, place: str) -> str:
        flow, lanes = self.flow, self.lanes
        kind, name = f"<{lanes} x {element}>", f"@llvm.masked.gather.v{lanes}f64.v{lanes}p0"
        flow.declare(name, f"declare {kind} {name}(<{lanes} x ptr>, i32, <{lanes} x i1>, {kind})")
        return flow.write(
            f"call {kind} {name}(<{lanes} x ptr> {self._pointers(place)}, i32 4, "
            f"<{lanes} x i1> splat (i1 true), {kind} poison)"
        )

    def _scatter(self, value: str, place: str) -> None:
        flow, lanes = self.flow, self.lanes
        kind, name = f"<{lanes} x double>", f"@llvm.masked.scatter.v{lanes}f64.v{lanes}p0"
        flow.declare(name, f"declare void {name}({kind}, <{lanes} x ptr>, i32, <{lanes} x i1>)")
        flow.lines.append(
            f"  call void {name}({kind} {value}, <{lanes} x ptr> {self._pointers(place)}, i32 4, "
            f"<{lanes} x i1> {self.mask})"
        )

    def store(self, value: Pair, ahead: str) -> None:
        flow, lanes = self.flow, self.lanes
        real, imaginary = (value[1], value[0]) if self.inverse else value
        if not self.close and self.element == "double":
            place = flow.gep(self.base, "i8", ahead)
            self._scatter(real, place)
            self._scatter(imaginary, flow.gep(place, "i8", 8))
            return
        order = [i // 2 + lanes * (i % 2) for i in range(2 * lanes)]
        whole = self._shuffle(real, imaginary, order, lanes)
        twice = f"<{2 * lanes} x {self.element}>"
        if self.close:
            flow.store(twice, whole, flow.gep(self.first, "i8", ahead), BYTES[self.element])
        else:
            wide = flow.write(f"bitcast {twice} {whole} to <{lanes} x double>")
            self._scatter(wide, flow.gep(self.base, "i8", ahead))
