"""Loop nests with reductions: a region over rows or columns becomes one function.

    void kernel(ptr* operands, results and scratch, i64* sizes, i64 start, i64 stop)

It goes over each row (`row_frame.py`) in passes (`row_passes.py`). The last pass writes the
results, so that they may overwrite operands.

A row is summed in LANES running sums, element i in sum i % LANES. Sums of CHUNK vectors are added
up, sums of BLOCK such chunks again, and at the end the lanes are added pairwise. This order depends
on the length of the row only: not on the processor's vectors, on threads, or on what else the
kernel does. Its error grows as slowly as that of pairwise summation for up to millions of elements.
Columns (the reduced axis is not the last one) have a lane each, and the same chunks.
"""

from __future__ import annotations

from graphflow.ops.kernels.codegen.elementwise_emitter import FLOPS
from graphflow.ops.kernels.codegen.expression_trace import ScalarStep
from graphflow.ops.kernels.codegen.region import KernelSource
from graphflow.ops.kernels.codegen.scalar_steps import write_step
from graphflow.ops.kernels.codegen.vector_writer import ELEMENTS, VectorWriter
from graphflow.ops.kernels.fusion.row_frame import RowFrame
from graphflow.ops.kernels.fusion.row_passes import (
    COMBINING_STEPS,
    LANES,
    RowStream,
    neutral_element,
)

CHUNK = 32
BLOCK = 32


class ReductionWriter(RowFrame):
    """Writes the loops of the passes, in the frame that goes over rows."""

    def source(self) -> KernelSource:
        self._plan()
        lanes = [VectorWriter(self.module, LANES, lines) for lines in (self.entry, *self.between)]
        for step in self.used:
            level = self.levels[step]
            if level == 2 or step.kind in COMBINING_STEPS:
                continue
            self.values[step, -1] = self._write_row_step(
                step, lanes[0 if level == 0 else 1 + self.ready[step]]
            )
        return self._assemble()

    # The loops of a pass ------------------------------------------------------------------------

    def _pass_loops(self, k: int) -> list[str]:
        each = self.passes[k]
        self._write_body(k)
        before = f"k{k - 1}.done" if k else "unit"
        moving = [] if self.down else _distinct_streams([*each.reads, *each.writes])
        lines = [f"  br label %k{k}.begin", f"k{k}.begin:"]
        if self.down:
            lines += [f"  %none{k} = icmp eq i64 %n, 0"]
            stop = "%n"
        else:
            here, back = f"%{before}", f"%k{k}.tail"
            for s in moving:
                lines.append(
                    f"  %q{k}.{s.name} = phi ptr [%b.{s.name}, {here}], [%t.{s.name}, {back}]"
                )
            lines += [
                f"  %stop{k} = phi i64 [%vectors, {here}], [1, {back}]",
                f"  %first{k} = phi i64 [0, {here}], [%vectors, {back}]",
                f"  %last{k} = phi i1 [false, {here}], [true, {back}]",
                f"  %mask{k} = phi <{LANES} x i1> [splat (i1 true), {here}], [%lanes, {back}]",
            ]
            for step in each.sums:
                lines.append(
                    f"  %g{k}.{self._number(step)} = phi {self._vector_type(step)} "
                    f"[{self._neutral(step)}, {here}], [%h{k}.{self._number(step)}, {back}]"
                )
            lines += [
                f"  %none{k} = icmp eq i64 %stop{k}, 0",
                f"  %full{k} = xor i1 %last{k}, true",
            ]
            stop = f"%stop{k}"
        lines += self._chunked_loops(k, stop)
        lines += self._pass_end(k, moving)
        return lines

    def _is_deep(self, k: int) -> bool:
        """Return whether a pass sums by chunks and blocks."""
        sums = self.passes[k].sums
        return any(s.kind in ("row_sum", "row_prod") and s.dtype.kind == "f" for s in sums)

    def _number(self, step: ScalarStep) -> int:
        return self.used.index(step)

    def _vector_type(self, step: ScalarStep) -> str:
        return f"<{LANES} x {ELEMENTS[step.dtype.name]}>"

    def _neutral(self, step: ScalarStep) -> str:
        return VectorWriter(self.module, LANES, []).constant(
            neutral_element(step), ELEMENTS[step.dtype.name]
        )

    def _chunked_loops(self, k: int, stop: str) -> list[str]:
        """Write the loop over vectors, nested in chunks and blocks if it sums.

        The lanes of reductions end in %h.
        """
        each = self.passes[k]
        deep = self._is_deep(k)
        sums, kinds = each.sums, {s: self._vector_type(s) for s in each.sums}
        number = self._number
        start = {s: self._neutral(s) if self.down else f"%g{k}.{number(s)}" for s in sums}
        name = "block" if deep else "vec"
        lines = [f"  br i1 %none{k}, label %k{k}.after, label %k{k}.{name}"]
        if deep:
            lines += [
                f"k{k}.block:",
                f"  %ib{k} = phi i64 [0, %k{k}.begin], [%next{k}, %k{k}.block.end]",
                *(
                    f"  %u2{k}.{number(s)} = phi {kinds[s]} [{start[s]}, %k{k}.begin], "
                    f"[%w2{k}.{number(s)}, %k{k}.block.end]"
                    for s in sums
                ),
                *_bounded_end(f"%to2{k}", f"%ib{k}", CHUNK * BLOCK, stop),
                f"  br label %k{k}.chunk",
                f"k{k}.chunk:",
                f"  %ic{k} = phi i64 [%ib{k}, %k{k}.block], [%next{k}, %k{k}.chunk.end]",
                *(
                    f"  %u1{k}.{number(s)} = phi {kinds[s]} [{self._neutral(s)}, %k{k}.block], "
                    f"[%w1{k}.{number(s)}, %k{k}.chunk.end]"
                    for s in sums
                ),
                *_bounded_end(f"%to1{k}", f"%ic{k}", CHUNK, f"%to2{k}"),
                f"  br label %k{k}.vec",
            ]
        origin = f"%k{k}.chunk" if deep else f"%k{k}.begin"
        first = f"%ic{k}" if deep else "0"
        inner = {s: self._neutral(s) if deep else start[s] for s in sums}
        lines += [
            f"k{k}.vec:",
            f"  %i{k} = phi i64 [{first}, {origin}], [%next{k}, %k{k}.vec.end]",
            *(f"  %u0{k}.{number(s)} = phi {kinds[s]} [{inner[s]}, {origin}], "
              f"[%w0{k}.{number(s)}, %k{k}.vec.end]" for s in sums),
            *each.lines,
        ]  # fmt: skip
        for s in sums:
            lines += self._accumulate(k, s)
        lines += [f"  br label %k{k}.vec.end", f"k{k}.vec.end:", f"  %next{k} = add i64 %i{k}, 1"]
        end = f"%to1{k}" if deep else stop
        lines += [
            f"  %more{k} = icmp ult i64 %next{k}, {end}",
            f"  br i1 %more{k}, label %k{k}.vec, label %k{k}.{'chunk.end' if deep else 'after'}",
        ]
        if deep:
            lines.append(f"k{k}.chunk.end:")
            for s in sums:
                lines += self._combine(s, f"%w1{k}.{number(s)}", f"%u1{k}.{number(s)}",
                                      f"%w0{k}.{number(s)}")  # fmt: skip
            lines += [
                f"  %more.chunk{k} = icmp ult i64 %next{k}, %to2{k}",
                f"  br i1 %more.chunk{k}, label %k{k}.chunk, label %k{k}.block.end",
                f"k{k}.block.end:",
            ]
            for s in sums:
                lines += self._combine(s, f"%w2{k}.{number(s)}", f"%u2{k}.{number(s)}",
                                      f"%w1{k}.{number(s)}")  # fmt: skip
            lines += [
                f"  %more.block{k} = icmp ult i64 %next{k}, {stop}",
                f"  br i1 %more.block{k}, label %k{k}.block, label %k{k}.after",
            ]
        lines.append(f"k{k}.after:")
        last, done = (2, f"%k{k}.block.end") if deep else (0, f"%k{k}.vec.end")
        for s in sums:
            lines.append(
                f"  %h{k}.{number(s)} = phi {kinds[s]} [{start[s]}, %k{k}.begin], "
                f"[%w{last}{k}.{number(s)}, {done}]"
            )
        return lines

    def _accumulate(self, k: int, step: ScalarStep) -> list[str]:
        """Combine an element's value with the lanes of its reduction."""
        (arg,) = step.args
        value = self._value(arg, k) if self.levels[arg] == 2 else self._row_value(arg)
        lines: list[str] = []
        if not self.down:
            lanes = VectorWriter(self.module, LANES, lines)
            kind = self._vector_type(step)
            value = self._write_maybe_masked(
                lanes,
                f"%full{k}",
                f"select i1 true, {kind} {value}, {kind} {value}",
                f"select <{LANES} x i1> %mask{k}, {kind} {value}, {kind} {self._neutral(step)}",
                kind,
            )
        n = self._number(step)
        return [*lines, *self._combine(step, f"%w0{k}.{n}", f"%u0{k}.{n}", value)]

    def _combine(
        self, step: ScalarStep, name: str, a: str, b: str, width: int = LANES
    ) -> list[str]:
        """Combine two parts of a reduction under a given name."""
        lines: list[str] = []
        lanes = VectorWriter(self.module, width, lines)
        result = write_step(
            lanes, ScalarStep(COMBINING_STEPS[step.kind], (step, step), step.dtype), [a, b]
        )
        lines[-1] = lines[-1].replace(f"  {result} =", f"  {name} =", 1)
        return lines

    def _pass_end(self, k: int, moving: list[RowStream]) -> list[str]:
        """Write the rest of a row, the fold of its reductions, and the steps that need them."""
        each = self.passes[k]
        lines: list[str] = []
        if not self.down:
            lines += [
                f"  br i1 %last{k}, label %k{k}.flush, label %k{k}.check",
                f"k{k}.check:",
                f"  br i1 %even, label %k{k}.done, label %k{k}.tail",
                f"k{k}.tail:",
            ]
            for s in _distinct_streams(each.reads):
                lines += self._copy_tail_in(k, s)
            lines += [f"  br label %k{k}.begin", f"k{k}.flush:"]
            for s in each.writes:
                lines += self._copy_tail_out(k, s)
        lines += [f"  br label %k{k}.done", f"k{k}.done:"]
        for step in each.sums:
            lines += self._fold_lanes(k, step)
        return lines + self.between[k + 1]

    def _copy_tail_in(self, k: int, s: RowStream) -> list[str]:
        kind, mask = f"<{LANES} x {s.stored}>", f"<{LANES} x i1>"
        return [
            f"  %e{k}.{s.name} = getelementptr {kind}, ptr %b.{s.name}, i64 %vectors",
            f"  %c{k}.{s.name} = call {kind} {self._declare_masked('load', s.stored)}"
            f"(ptr %e{k}.{s.name}, i32 {s.itemsize}, {mask} %lanes, {kind} zeroinitializer)",
            f"  store {kind} %c{k}.{s.name}, ptr %t.{s.name}, align 64",
        ]

    def _copy_tail_out(self, k: int, s: RowStream) -> list[str]:
        kind = f"<{LANES} x {s.stored}>"
        return [
            f"  %e{k}.{s.name} = getelementptr {kind}, ptr %b.{s.name}, i64 %vectors",
            f"  %c{k}.{s.name} = load {kind}, ptr %t.{s.name}, align 64",
            f"  {self._masked_store(s, f'%c{k}.{s.name}', f'%e{k}.{s.name}')}",
        ]

    def _fold_lanes(self, k: int, step: ScalarStep) -> list[str]:
        """Fold the lanes of a reduction into one value, in all lanes."""
        n, element = self._number(step), ELEMENTS[step.dtype.name]
        lines: list[str] = []
        value, width = f"%h{k}.{n}", LANES
        if not self.down and element == "i1":
            bits = f"%bits{n}"
            how = f"icmp ne i{LANES} {bits}, 0" if step.kind == "row_any" else (
                f"icmp eq i{LANES} {bits}, -1")  # fmt: skip
            lines += [f"  {bits} = bitcast <{LANES} x i1> {value} to i{LANES}",
                      f"  %one{n} = {how}"]  # fmt: skip
        elif not self.down:
            while width > 1:
                half, kind = width // 2, f"<{width} x {element}>"
                low, high = (
                    ", ".join(f"i32 {i + first}" for i in range(half)) for first in (0, half)
                )
                for part, index in (("l", low), ("r", high)):
                    lines.append(
                        f"  %f{part}{half}.{n} = shufflevector {kind} {value}, {kind} poison, "
                        f"<{half} x i32> <{index}>"
                    )
                lines += self._combine(
                    step, f"%f{half}.{n}", f"%fl{half}.{n}", f"%fr{half}.{n}", half
                )
                value, width = f"%f{half}.{n}", half
            lines.append(f"  %one{n} = extractelement <1 x {element}> {value}, i64 0")
        name = self._reduction_name(step)
        lanes = VectorWriter(self.module, LANES, lines)
        if not self.down:
            value = lanes.broadcast(element, f"%one{n}")
        kind = self._vector_type(step)
        return [*lines, f"  {name} = select i1 true, {kind} {value}, {kind} {value}"]

    # The function -------------------------------------------------------------------------------

    def _assemble(self) -> KernelSource:
        region = self.region
        loops = [line for k in range(len(self.passes)) for line in self._pass_loops(k)]
        ends = [
            line
            for i, step in enumerate(self.results)
            if not self.whole[i]
            for line in self._row_result(i, step)
        ]
        flops = sum(
            FLOPS.get(s.kind, 1)
            for k, each in enumerate(self.passes)
            for s in each.steps
            if s not in self.kept or self.first[s] == k
        )
        flops += sum(len(each.sums) for each in self.passes)
        row = tuple(i != self.outer for i in range(region.rank))
        body = "\n".join([*self._head(), *loops, *ends, *self._foot()])
        return KernelSource(
            body,
            "\n".join(self.module.declared.values()),
            flops,
            tuple(s.dtype for s in self.results),
            tuple((True,) * region.rank if whole else row for whole in self.whole),
            len(self.kept),
            len(self.passes),
        )

    def _row_result(self, i: int, step: ScalarStep) -> list[str]:
        axes = tuple(j != self.outer for j in range(self.region.rank))
        stream = self._stream(len(self.region.operands) + i, step, f"out{i}", axes)
        lines: list[str] = []
        lanes = VectorWriter(self.module, LANES, lines)
        value = self._row_value(step)
        if step.dtype.kind == "b":
            value = lanes.convert("zext", value, "i1", "i8")
        if self.down:
            return [*lines, f"  {self._masked_store(stream, value, f'%b.{stream.name}')}"]
        one = lanes.write(f"extractelement {lanes.vector(stream.stored)} {value}, i64 0")
        return [
            *lines, f"  store {stream.stored} {one}, ptr %b.{stream.name}, align {stream.itemsize}"
        ]  # fmt: skip


def _bounded_end(name: str, start: str, count: int, stop: str) -> list[str]:
    """Write start + count, or `stop` if that is smaller."""
    return [
        f"  {name}.full = add i64 {start}, {count}",
        *unsigned_minimum(name, f"{name}.full", stop),
    ]


def unsigned_minimum(name: str, a: str, b: str) -> list[str]:
    """Write the smaller of two sizes."""
    return [
        f"  {name}.less = icmp ult i64 {a}, {b}",
        f"  {name} = select i1 {name}.less, i64 {a}, i64 {b}",
    ]


def _distinct_streams(streams: list[RowStream]) -> list[RowStream]:
    return list({s.number: s for s in streams}.values())
