"""Elementwise loops in LLVM IR: a region of ops becomes one function over its operands.

    void kernel(ptr* operands and results, i64* sizes, i64 start, i64 stop)

A region runs over the elements of one shape, whose axes are collapsed as far as the operands'
broadcasting allows. The last axis is the inner loop, in vectors. `start` and `stop` count rows of
the other axes, or elements if there is one axis. Elements beyond the last whole vector go through
the same code by way of small buffers, so neither their number nor the cut into rows changes a bit.
Values that are constant along a row, or everywhere, are computed outside the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.spec import as_dtype
from graphflow.ops.kernels.codegen.expression_trace import (
    ExpressionTrace,
    ScalarStep,
    Symbol,
)
from graphflow.ops.kernels.codegen.half_trace import record_op
from graphflow.ops.kernels.codegen.region import (
    KernelSource,
    Region,
)
from graphflow.ops.kernels.codegen.scalar_steps import write_step
from graphflow.ops.kernels.codegen.vector_writer import ELEMENTS, TYPE_SUFFIX, Module, VectorWriter


def trace_region(region: Region) -> tuple[ExpressionTrace, list[ScalarStep], list[ScalarStep]]:
    """Record the steps of a region; returns the trace and the steps of operands and results.

    Raises:
        Untraceable: an op has no trace.
    """
    trace = ExpressionTrace()
    inputs = [trace.input(i, as_dtype(o.dtype)) for i, o in enumerate(region.operands)]
    values: list[Symbol] = []
    for applied in region.ops:
        given = [values[i] if inner else inputs[i] for inner, i in applied.inputs]
        attrs = {k: v for k, v, _ in applied.attrs}
        values.append(record_op(trace, applied.op, given, attrs))
    return trace, [s.step for s in inputs], [values[i].step for i in region.results]


def write_elementwise(
    region: Region,
    width: int,
    wide: bool = False,
    short: bool = False,
    streamed: bool = False,
) -> KernelSource:
    """Write the kernel of a region without reductions.

    Args:
        width: elements of 4 bytes in a register, a power of two.
        wide: whether the processor has AVX-512.
        short: whether rows are shorter than `LONG_ROW`.
        streamed: whether stores bypass the caches; of a region of one axis whose results are
            aligned to 64 bytes.
    """
    trace, _, results = trace_region(region)
    used = reachable_steps(trace, results)
    lanes = width if wide or short else _vector_elements(used, width)
    writer = _ElementwiseWriter(region, lanes, Module(wide), streamed)
    for step in used:
        writer.add_step(step)
    for i, step in enumerate(results):
        writer.add_result(i, step)
    body = writer.text()
    needs = "\n".join(writer.module.declared.values())
    flops = sum(FLOPS.get(s.kind, 1) for s in used if writer.levels[s] == 2)
    full = ((True,) * region.rank,) * len(results)
    return KernelSource(body, needs, flops, tuple(s.dtype for s in results), full)


FLOPS = {
    "input": 0, "constant": 0, "exp": 20, "expm1": 22, "log": 24, "log1p": 32, "tanh": 26,
    "log2": 26, "log10": 28, "erf": 34, "sigmoid": 28, "sin": 34, "cos": 34, "power": 70,
    "divide": 6, "sqrt": 8, "arcsin": 30, "arccos": 32, "arctan": 30,
}  # fmt: skip


LONG_ROW = 64
"""Elements of a row from which computing several registers of them at a time pays."""
_LONG_CHAIN = 20  # dependent steps of an element from which latency dominates
_REGISTERS_AT_ONCE = 4  # of 16: registers of elements that are computed side by side


def _vector_elements(used: Sequence[ScalarStep], width: int) -> int:
    """Return the elements of a vector of the inner loop.

    The steps of a polynomial depend on each other. A processor without AVX-512 looks too few steps
    ahead to overlap them with the next elements' (on a Zen 3, half the time was latency). So some
    registers of elements are computed side by side.
    """
    if all(FLOPS.get(step.kind, 1) < _LONG_CHAIN for step in used):
        return width
    return max(width, width * 4 * _REGISTERS_AT_ONCE // max(step.dtype.itemsize for step in used))


def reachable_steps(trace: ExpressionTrace, results: Sequence[ScalarStep]) -> list[ScalarStep]:
    """Return the steps that results depend on, in order."""
    wanted = set(results)
    for step in reversed(trace.steps):
        if step in wanted:
            wanted.update(step.args)
    return [s for s in trace.steps if s in wanted]


@dataclass
class _Stream:
    """A pointer that moves with the loop.

    Attributes:
        number: among the arguments.
        stored: LLVM type of an element in memory.
        offset: index of its row strides among the sizes.
    """

    number: int
    stored: str
    offset: int
    name: str


@dataclass
class _ElementwiseWriter:
    """Writes a kernel in three blocks: code before all rows, once a row, and in the inner loop."""

    region: Region
    width: int
    module: Module
    streamed: bool

    def __post_init__(self) -> None:
        self.blocks: tuple[list[str], list[str], list[str]] = ([], [], [])
        self.lanes = [VectorWriter(self.module, self.width, lines) for lines in self.blocks]
        self.levels: dict[ScalarStep, int] = {}
        self.values: dict[ScalarStep, str] = {}
        self.reads: list[_Stream] = []
        self.rows: list[_Stream] = []  # operands that have one element a row
        self.writes: list[_Stream] = []
        self.stores: list[str] = []
        self.outer = self.region.rank - 1

    # Steps ------------------------------------------------------------------------------------

    def add_step(self, step: ScalarStep) -> None:
        if step.kind == "input":
            self._input(step)
            return
        level = max((self.levels[a] for a in step.args), default=0)
        self.levels[step] = level
        if step.kind == "constant":
            self.values[step] = self.lanes[0].constant(step.value, ELEMENTS[step.dtype.name])
        else:
            args = [self.values[a] for a in step.args]
            self.values[step] = write_step(self.lanes[level], step, args)

    def _input(self, step: ScalarStep) -> None:
        number = step.value
        axes = self.region.operands[number].axes
        stored = storage_type(step.dtype)
        stream = _Stream(number, stored, self._strides(number), f"in{number}")
        kind = f"<{self.width} x {stored}>"
        if axes[-1]:
            level = 2
            self.reads.append(stream)
            place = self.lanes[2].write(f"getelementptr {kind}, ptr %q.{stream.name}, i64 %i")
            name = self.lanes[2].write(f"load {kind}, ptr {place}, align {step.dtype.itemsize}")
        else:
            level = 1 if any(axes) else 0
            if level:
                self.rows.append(stream)
            pointer = f"%b.{stream.name}" if level else f"%p{number}"
            lanes = self.lanes[level]
            one = lanes.write(f"load {stored}, ptr {pointer}, align {step.dtype.itemsize}")
            name = lanes.broadcast(stored, one)
        if step.dtype.kind == "b":
            zero = self.lanes[level].constant(0, "i8")
            name = self.lanes[level].binary("icmp ne", "i8", name, zero)
        self.levels[step], self.values[step] = level, name

    def add_result(self, i: int, step: ScalarStep) -> None:
        number = len(self.region.operands) + i
        stream = _Stream(number, storage_type(step.dtype), self._strides(number), f"out{i}")
        kind = f"<{self.width} x {stream.stored}>"
        value = self.values[step]
        if step.dtype.kind == "b":
            value = self.lanes[2].convert("zext", value, "i1", "i8")
        place = self.lanes[2].write(f"getelementptr {kind}, ptr %q.{stream.name}, i64 %i")
        where = f"align {step.dtype.itemsize}"
        if self.streamed:
            where = f"align {min(64, self.width * step.dtype.itemsize)}, !nontemporal !{{i32 1}}"
        self.stores.append(f"  store {kind} {value}, ptr {place}, {where}")
        self.writes.append(stream)

    def _strides(self, number: int) -> int:
        return 1 + max(0, self.outer - 1) + number * self.outer

    # The frame --------------------------------------------------------------------------------

    def text(self) -> str:
        """Return the function's text after its name."""
        moving = [*self.reads, *self.writes]
        count = len(self.region.operands) + len(self.region.results)
        lines = ["(ptr %ptrs, ptr %sizes, i64 %start, i64 %stop) {", "entry:"]
        for i in range(count):
            lines += [
                f"  %pp{i} = getelementptr ptr, ptr %ptrs, i64 {i}",
                f"  %p{i} = load ptr, ptr %pp{i}, align 8",
            ]
        lines += [f"  %t.{s.name} = alloca <{self.width} x {s.stored}>, align 64" for s in moving]
        lines += self.blocks[0]
        lines += self._row_start(moving) + self.blocks[1]
        lines += self._vector_loop(moving)
        lines += self._partial_vector(moving)
        # The fence orders streamed stores before the one that announces them.
        end = ["  fence seq_cst"] if self.streamed else []
        return "\n".join([*lines, *end, "  ret void", "}"])

    def _row_start(self, moving: list[_Stream]) -> list[str]:
        """Write the beginning of a row: its addresses and number of vectors."""
        if not self.outer:
            lines = ["  br label %row", "row:", "  %n = sub i64 %stop, %start"]
            for s in moving:
                lines.append(
                    f"  %b.{s.name} = getelementptr {s.stored}, ptr %p{s.number}, i64 %start"
                )
        else:
            lines = ["  %n = load i64, ptr %sizes, align 8"]
            lines += self._load_sizes(moving)
            lines += [
                "  br label %row", "row:",
                "  %r = phi i64 [%start, %entry], [%r.next, %row.end]",
            ]  # fmt: skip
            lines += self._row_coordinates()
            for s in (*moving, *self.rows):
                lines += self._row_address(s)
        return [
            *lines,
            f"  %whole = lshr i64 %n, {self.width.bit_length() - 1}",
            f"  %rest = and i64 %n, {self.width - 1}",
            "  %even = icmp eq i64 %rest, 0",
        ]

    def _load_sizes(self, moving: list[_Stream]) -> list[str]:
        """Load the sizes of the axes between first and last, and all row strides in bytes."""
        lines = []
        for axis in range(1, self.outer):
            lines += [
                f"  %dp{axis} = getelementptr i64, ptr %sizes, i64 {axis}",
                f"  %d{axis} = load i64, ptr %dp{axis}, align 8",
            ]
        for s in (*moving, *self.rows):
            for axis in range(self.outer):
                name = f"{s.name}.{axis}"
                lines += [
                    f"  %sp.{name} = getelementptr i64, ptr %sizes, i64 {s.offset + axis}",
                    f"  %s.{name} = load i64, ptr %sp.{name}, align 8",
                ]
        return lines

    def _row_coordinates(self) -> list[str]:
        """Compute the row's index along each axis but the last."""
        lines = []
        left = "%r"
        for axis in range(self.outer - 1, 0, -1):
            lines += [
                f"  %at{axis} = urem i64 {left}, %d{axis}",
                f"  %left{axis} = udiv i64 {left}, %d{axis}",
            ]
            left = f"%left{axis}"
        return [*lines, f"  %at0 = add i64 {left}, 0"]

    def _row_address(self, s: _Stream) -> list[str]:
        lines, total = [], "0"
        for axis in range(self.outer):
            lines += [
                f"  %m.{s.name}.{axis} = mul i64 %at{axis}, %s.{s.name}.{axis}",
                f"  %o.{s.name}.{axis} = add i64 {total}, %m.{s.name}.{axis}",
            ]
            total = f"%o.{s.name}.{axis}"
        return [*lines, f"  %b.{s.name} = getelementptr i8, ptr %p{s.number}, i64 {total}"]

    def _vector_loop(self, moving: list[_Stream]) -> list[str]:
        """Write the loop over vectors, entered for whole ones and again for the rest of a row."""
        lines = ["  br label %pass", "pass:"]
        for s in moving:
            lines.append(f"  %q.{s.name} = phi ptr [%b.{s.name}, %row], [%t.{s.name}, %tail]")
        return [
            *lines,
            "  %count = phi i64 [%whole, %row], [1, %tail]",
            "  %last = phi i1 [false, %row], [true, %tail]",
            "  %none = icmp eq i64 %count, 0",
            "  br i1 %none, label %after, label %vector",
            "vector:",
            "  %i = phi i64 [0, %pass], [%i.next, %vector]",
            *self.blocks[2],
            *self.stores,
            "  %i.next = add i64 %i, 1",
            "  %more = icmp ult i64 %i.next, %count",
            "  br i1 %more, label %vector, label %after",
            "after:",
            "  br i1 %last, label %flush, label %check",
            "check:",
            "  br i1 %even, label %row.end, label %tail",
        ]

    def _partial_vector(self, moving: list[_Stream]) -> list[str]:
        """Copy the rest of a row to buffers of a whole vector, and its results back."""
        lines = ["tail:", *self._lane_mask("in")]
        for s in self.reads:
            lines += self._copy_tail_in(s)
        lines += ["  br label %pass", "flush:", *self._lane_mask("out")]
        for s in self.writes:
            lines += self._copy_tail_out(s)
        lines += ["  br label %row.end", "row.end:"]
        if self.outer:
            lines += [
                "  %r.next = add i64 %r, 1",
                "  %rows = icmp ult i64 %r.next, %stop",
                "  br i1 %rows, label %row, label %done",
                "done:",
            ]
        return lines

    def _lane_mask(self, way: str) -> list[str]:
        """Write a mask of the lanes of the last, partial vector."""
        index = ", ".join(f"i64 {i}" for i in range(self.width))
        kind = f"<{self.width} x i64>"
        return [
            f"  %rest.{way} = insertelement {kind} poison, i64 %rest, i64 0",
            f"  %rests.{way} = shufflevector {kind} %rest.{way}, {kind} poison, "
            f"<{self.width} x i32> zeroinitializer",
            f"  %mask.{way} = icmp ult {kind} <{index}>, %rests.{way}",
        ]

    def _copy_tail_in(self, s: _Stream) -> list[str]:
        kind, mask = f"<{self.width} x {s.stored}>", f"<{self.width} x i1>"
        call = f"@llvm.masked.load.v{self.width}{TYPE_SUFFIX.get(s.stored, s.stored)}.p0"
        self.module.declared[call] = f"declare {kind} {call}(ptr, i32, {mask}, {kind})"
        return [
            f"  %e.{s.name} = getelementptr {kind}, ptr %b.{s.name}, i64 %whole",
            f"  %w.{s.name} = call {kind} {call}(ptr %e.{s.name}, i32 1, {mask} %mask.in, "
            f"{kind} zeroinitializer)",
            f"  store {kind} %w.{s.name}, ptr %t.{s.name}, align 64",
        ]

    def _copy_tail_out(self, s: _Stream) -> list[str]:
        kind, mask = f"<{self.width} x {s.stored}>", f"<{self.width} x i1>"
        call = f"@llvm.masked.store.v{self.width}{TYPE_SUFFIX.get(s.stored, s.stored)}.p0"
        self.module.declared[call] = f"declare void {call}({kind}, ptr, i32, {mask})"
        return [
            f"  %e.{s.name} = getelementptr {kind}, ptr %b.{s.name}, i64 %whole",
            f"  %w.{s.name} = load {kind}, ptr %t.{s.name}, align 64",
            f"  call void {call}({kind} %w.{s.name}, ptr %e.{s.name}, i32 1, {mask} %mask.out)",
        ]


def storage_type(dtype: np.dtype[Any]) -> str:
    """Return the LLVM type of an element in memory."""
    return "i8" if dtype.kind == "b" else ELEMENTS[dtype.name]
