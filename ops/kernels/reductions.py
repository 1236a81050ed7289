"""Loop nests with reductions: a region over rows (or columns) becomes one function, as in `emit`.

    void kernel(ptr* operands, results and scratch, i64* sizes, i64 start, i64 stop)

It goes over each row in passes: one up to each reduction that needs the one before (the largest
element, then the sum of exponentials, then the quotients). Values that are dear and wanted again
wait in scratch memory, others are computed anew; results are written in the last pass, so that they
may take the memory of operands.

A row is summed by LANES running sums, element i to sum i % LANES; a sum of the sums of CHUNK
vectors is kept, and one of BLOCK such chunks, and at the end the lanes are added pairwise. This
order depends on the length of the row only: not on the processor's vectors, threads, or on what
else the kernel does; and its error grows as slowly as that of pairwise summation for up to millions
of elements. Columns (the reduced axis is not the last one) have a lane each, and the same chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from graphflow.ops.kernels.emit import FLOPS, Region, Source, in_memory, reachable, trace_of
from graphflow.ops.kernels.lanes import ELEMENTS, SHORT, Lanes, Module
from graphflow.ops.kernels.steps import write_step
from graphflow.ops.kernels.trace import Step

LANES = 32
CHUNK = 32
BLOCK = 32
_DEAR = 4
"""Steps beyond which a value is kept for a later pass rather than computed anew."""
COMBINED = {"row_sum": "add", "row_prod": "multiply", "row_max": "maximum", "row_min": "minimum",
             "row_any": "or", "row_all": "and"}  # fmt: skip


def write(region: Region, wide: bool = False) -> Source:
    """The kernel of a region with reductions.

    Args:
        wide: as of `Module`.
    """
    return _Nest(region, wide).source()


def neutral(step: Step) -> float | int | bool:
    """What changes nothing."""
    is_float = step.dtype.kind == "f"
    if step.kind in ("row_max", "row_min"):
        least = step.kind == "row_max"
        if is_float:
            return float("-inf") if least else float("inf")
        bits = step.dtype.itemsize * 8 - (step.dtype.kind == "i")
        low = -(1 << bits) if step.dtype.kind == "i" else 0
        return low if least else (1 << bits) - 1
    if step.kind == "row_sum":
        return 0.0 if is_float else 0
    return {"row_prod": 1.0 if is_float else 1, "row_any": False, "row_all": True}[step.kind]


@dataclass
class _Stream:
    """Where an operand or result lies: its number among the arguments, and how it moves."""

    number: int
    stored: str
    name: str
    itemsize: int
    axes: tuple[bool, ...]


@dataclass
class _Pass:
    """One pass over the elements of a row: what it needs, and the text of its loop."""

    steps: set[Step] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    reads: list[_Stream] = field(default_factory=list)
    writes: list[_Stream] = field(default_factory=list)
    sums: list[Step] = field(default_factory=list)


class _Nest:
    def __init__(self, region: Region, wide: bool) -> None:
        self.region = region
        self.down = region.over == "columns"
        self.outer = region.rank - (2 if self.down else 1)
        self.moves = region.rank - 1  # strides of a stream among the sizes
        self.module = Module(wide)
        self.trace, _, self.results = trace_of(region)
        self.used = reachable(self.trace, self.results)
        self.levels: dict[Step, int] = {}
        self.ready: dict[Step, int] = {}  # the pass in which it can be had first
        for step in self.used:
            self._place(step)
        self.whole = [
            region.ops[i].whole or self.levels[s] == 2
            for i, s in zip(region.results, self.results, strict=True)
        ]
        self.values: dict[tuple[Step, int], str] = {}  # by the pass, of elements; else -1
        self.entry: list[str] = []
        self.between: list[list[str]] = [[]]
        self.kept: dict[Step, int] = {}
        self.passes: list[_Pass] = []
        self.streams: dict[int, _Stream] = {}

    # What is computed when ----------------------------------------------------------------------

    def _place(self, step: Step) -> None:
        """Whether a step has one value (0), one a row (1) or one an element (2), and from where
        on it is known."""
        ready = max((self.ready[a] for a in step.args), default=0)
        if step.kind == "input":
            axes = self.region.operands[step.value].axes
            reduced = axes[self.outer]
            level = 2 if reduced else 1 if any(axes) else 0
        elif step.kind in COMBINED:
            level, ready = 1, ready + 1
        elif step.kind == "place":
            level = 2
        else:
            level = max((self.levels[a] for a in step.args), default=0)
        self.levels[step], self.ready[step] = level, ready

    def _plan(self) -> None:
        """The passes, and which values wait for a later one."""
        reductions = [s for s in self.used if s.kind in COMBINED]
        wanted = [s for s, whole in zip(self.results, self.whole, strict=True) if whole]
        count = max([self.ready[s] for s in reductions] + [self.ready[s] + 1 for s in wanted])
        self.passes = [_Pass() for _ in range(count)]
        self.between += [[] for _ in range(count)]
        self.costs: dict[Step, int] = {}
        for step in self.used:
            if self.levels[step] == 2:
                inner = (self.costs[a] for a in step.args if self.levels[a] == 2)
                self.costs[step] = FLOPS.get(step.kind, 1) + sum(inner)
        first: dict[Step, int] = {}
        for k, each in enumerate(self.passes):
            each.sums = [s for s in reductions if self.ready[s] == k + 1]
            targets = [a for s in each.sums for a in s.args]
            targets += wanted if k == count - 1 else []
            stack = [s for s in targets if self.levels[s] == 2]
            while stack:
                step = stack.pop()
                if step in each.steps:
                    continue
                each.steps.add(step)
                if first.setdefault(step, k) < k and self.costs[step] > _DEAR:
                    self.kept.setdefault(step, len(self.kept))
                else:
                    stack += [a for a in step.args if self.levels[a] == 2]
        self.first = first

    # Steps --------------------------------------------------------------------------------------

    def _value(self, step: Step, k: int) -> str:
        return self.values[step, k if self.levels[step] == 2 else -1]

    def source(self) -> Source:
        self._plan()
        lanes = [Lanes(self.module, LANES, lines) for lines in (self.entry, *self.between)]
        for step in self.used:
            level = self.levels[step]
            if level == 2 or step.kind in COMBINED:
                continue
            self.values[step, -1] = self._single(
                step, lanes[0 if level == 0 else 1 + self.ready[step]]
            )
        return self._finished()

    def _single(self, step: Step, lanes: Lanes) -> str:
        """A step with one value for the row, or for all."""
        if step.kind == "constant":
            return lanes.constant(step.value, ELEMENTS[step.dtype.name])
        if step.kind == "count":
            element = ELEMENTS[step.dtype.name]
            return self._splat(lanes, element, f"%count.{element}")
        if step.kind == "input":
            return self._row_input(step, lanes)
        return write_step(lanes, step, [self._of_row(a) for a in step.args])

    def _of_row(self, step: Step) -> str:
        """The name of a value of a row; that of a reduction follows from its number."""
        return self._reduced(step) if step.kind in COMBINED else self.values[step, -1]

    def _reduced(self, step: Step) -> str:
        return f"%red{self.used.index(step)}"

    def _splat(self, lanes: Lanes, element: str, one: str) -> str:
        kind = lanes.vector(element)
        first = lanes.write(f"insertelement {kind} poison, {element} {one}, i64 0")
        return lanes.write(
            f"shufflevector {kind} {first}, {kind} poison, <{LANES} x i32> zeroinitializer"
        )

    def _stream(self, number: int, step: Step, name: str, axes: tuple[bool, ...]) -> _Stream:
        if number not in self.streams:
            self.streams[number] = _Stream(
                number, in_memory(step.dtype), name, step.dtype.itemsize, axes
            )
        return self.streams[number]

    def _row_input(self, step: Step, lanes: Lanes) -> str:
        axes = self.region.operands[step.value].axes
        stored, size = in_memory(step.dtype), step.dtype.itemsize
        pointer = f"%p{step.value}"
        if any(axes):
            stream = self._stream(step.value, step, f"in{step.value}", axes)
            pointer = f"%b.{stream.name}"
        if self.down and axes[-1]:
            name = self._masked_load(lanes, pointer, stored, size)
        else:
            one = lanes.write(f"load {stored}, ptr {pointer}, align {size}")
            name = self._splat(lanes, stored, one)
        return self._truth(lanes, step, name)

    def _truth(self, lanes: Lanes, step: Step, name: str) -> str:
        if step.dtype.kind != "b":
            return name
        return lanes.two("icmp ne", "i8", name, lanes.constant(0, "i8"))

    def _masked_load(self, lanes: Lanes, pointer: str, stored: str, size: int) -> str:
        kind, mask = lanes.vector(stored), lanes.vector("i1")
        call = self._declared("load", stored)
        return lanes.write(
            f"call {kind} {call}(ptr {pointer}, i32 {size}, {mask} %lanes, {kind} zeroinitializer)"
        )

    def _declared(self, what: str, stored: str) -> str:
        kind, mask = f"<{LANES} x {stored}>", f"<{LANES} x i1>"
        call = f"@llvm.masked.{what}.v{LANES}{SHORT.get(stored, stored)}.p0"
        self.module.declared[call] = (
            f"declare {kind} {call}(ptr, i32, {mask}, {kind})"
            if what == "load"
            else f"declare void {call}({kind}, ptr, i32, {mask})"
        )
        return call

    # The body of a pass -------------------------------------------------------------------------

    def _body(self, k: int) -> None:
        each = self.passes[k]
        lanes = Lanes(self.module, LANES, each.lines)
        for step in self.used:
            if step in each.steps:
                self.values[step, k] = self._element(step, lanes, k)
        if k < len(self.passes) - 1:
            return
        for i, (step, whole) in enumerate(zip(self.results, self.whole, strict=True)):
            if whole:
                self._store(i, step, lanes, k)

    def _element(self, step: Step, lanes: Lanes, k: int) -> str:
        if step in self.kept and self.first[step] < k:
            return self._waiting(step, lanes, k)
        if step.kind == "input":
            name = self._read(step, lanes, k)
        elif step.kind == "place":
            name = self._place_of(lanes, k)
        else:
            args = [
                self._value(a, k) if self.levels[a] == 2 else self._of_row(a) for a in step.args
            ]
            name = write_step(lanes, step, args)
        if step in self.kept:
            self._keep(step, name, lanes, k)
        return name

    def _read(self, step: Step, lanes: Lanes, k: int) -> str:
        axes = self.region.operands[step.value].axes
        stream = self._stream(step.value, step, f"in{step.value}", axes)
        kind = lanes.vector(stream.stored)
        if not self.down:
            self.passes[k].reads.append(stream)
            place = lanes.write(f"getelementptr {kind}, ptr %q{k}.{stream.name}, i64 %i{k}")
            name = lanes.write(f"load {kind}, ptr {place}, align {stream.itemsize}")
            return self._truth(lanes, step, name)
        place = self._down(stream, lanes, k)
        if axes[-1]:
            name = self._masked_load(lanes, place, stream.stored, stream.itemsize)
        else:
            one = lanes.write(f"load {stream.stored}, ptr {place}, align {stream.itemsize}")
            name = self._splat(lanes, stream.stored, one)
        return self._truth(lanes, step, name)

    def _down(self, stream: _Stream, lanes: Lanes, k: int) -> str:
        """Where a stream is in this element of its column."""
        move = lanes.write(f"mul i64 %i{k}, %s.{stream.name}.{self.outer}")
        return lanes.write(f"getelementptr i8, ptr %b.{stream.name}, i64 {move}")

    def _place_of(self, lanes: Lanes, k: int) -> str:
        if self.down:
            one = lanes.write(f"trunc i64 %i{k} to i32")
            return self._splat(lanes, "i32", one)
        number = lanes.write(f"add i64 %i{k}, %first{k}")
        start = lanes.write(f"shl i64 {number}, {LANES.bit_length() - 1}")
        one = lanes.write(f"trunc i64 {start} to i32")
        iota = ", ".join(f"i32 {i}" for i in range(LANES))
        return lanes.two("add", "i32", self._splat(lanes, "i32", one), f"<{iota}>")

    def _scratch(self, step: Step, lanes: Lanes, k: int) -> tuple[str, str]:
        kind = lanes.vector(in_memory(step.dtype))
        number = f"%i{k}" if self.down else lanes.write(f"add i64 %i{k}, %first{k}")
        place = lanes.write(f"getelementptr {kind}, ptr %z{self.kept[step]}, i64 {number}")
        return kind, place

    def _waiting(self, step: Step, lanes: Lanes, k: int) -> str:
        kind, place = self._scratch(step, lanes, k)
        align = step.dtype.itemsize
        return self._truth(lanes, step, lanes.write(f"load {kind}, ptr {place}, align {align}"))

    def _keep(self, step: Step, name: str, lanes: Lanes, k: int) -> None:
        if step.dtype.kind == "b":
            name = lanes.convert("zext", name, "i1", "i8")
        kind, place = self._scratch(step, lanes, k)
        lanes.lines.append(f"  store {kind} {name}, ptr {place}, align {step.dtype.itemsize}")

    def _store(self, i: int, step: Step, lanes: Lanes, k: int) -> None:
        stream = self._stream(
            len(self.region.operands) + i, step, f"out{i}", (True,) * self.region.rank
        )
        kind = lanes.vector(stream.stored)
        value = self._value(step, k) if self.levels[step] == 2 else self._of_row(step)
        if step.dtype.kind == "b":
            value = lanes.convert("zext", value, "i1", "i8")
        if self.down:
            place = self._down(stream, lanes, k)
            lanes.lines.append(self._masked_store(stream, value, place))
            return
        self.passes[k].writes.append(stream)
        place = lanes.write(f"getelementptr {kind}, ptr %q{k}.{stream.name}, i64 %i{k}")
        self.passes[k].lines.append(f"  store {kind} {value}, ptr {place}, align {stream.itemsize}")

    def _masked_store(self, stream: _Stream, value: str, place: str) -> str:
        kind, mask = f"<{LANES} x {stream.stored}>", f"<{LANES} x i1>"
        call = self._declared("store", stream.stored)
        return (
            f"  call void {call}({kind} {value}, ptr {place}, i32 {stream.itemsize}, {mask} %lanes)"
        )

    # The loops of a pass ------------------------------------------------------------------------

    def _loops(self, k: int) -> list[str]:
        each = self.passes[k]
        self._body(k)
        before = f"k{k - 1}.done" if k else "unit"
        moving = [] if self.down else _distinct([*each.reads, *each.writes])
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
                    f"  %g{k}.{self._number(step)} = phi {self._kind(step)} "
                    f"[{self._start(step)}, {here}], [%h{k}.{self._number(step)}, {back}]"
                )
            lines += [f"  %none{k} = icmp eq i64 %stop{k}, 0"]
            stop = f"%stop{k}"
        lines += self._levels(k, stop)
        lines += self._end(k, moving)
        return lines

    def _number(self, step: Step) -> int:
        return self.used.index(step)

    def _kind(self, step: Step) -> str:
        return f"<{LANES} x {ELEMENTS[step.dtype.name]}>"

    def _start(self, step: Step) -> str:
        return Lanes(self.module, LANES, []).constant(neutral(step), ELEMENTS[step.dtype.name])

    def _levels(self, k: int, stop: str) -> list[str]:
        """The loop over vectors, in chunks and blocks where there is something to sum; leaves the
        lanes of reductions in %h."""
        each = self.passes[k]
        deep = any(s.kind in ("row_sum", "row_prod") and s.dtype.kind == "f" for s in each.sums)
        sums, kinds = each.sums, {s: self._kind(s) for s in each.sums}
        number = self._number
        start = {s: self._start(s) if self.down else f"%g{k}.{number(s)}" for s in sums}
        name = "block" if deep else "vec"
        lines = [f"  br i1 %none{k}, label %k{k}.after, label %k{k}.{name}"]
        if deep:
            lines += [
                f"k{k}.block:",
                f"  %ib{k} = phi i64 [0, %k{k}.begin], [%next{k}, %k{k}.block.end]",
                *(f"  %u2{k}.{number(s)} = phi {kinds[s]} [{start[s]}, %k{k}.begin], "
                  f"[%w2{k}.{number(s)}, %k{k}.block.end]" for s in sums),
                *_limited(f"%to2{k}", f"%ib{k}", CHUNK * BLOCK, stop),
                f"  br label %k{k}.chunk",
                f"k{k}.chunk:",
                f"  %ic{k} = phi i64 [%ib{k}, %k{k}.block], [%next{k}, %k{k}.chunk.end]",
                *(f"  %u1{k}.{number(s)} = phi {kinds[s]} [{self._start(s)}, %k{k}.block], "
                  f"[%w1{k}.{number(s)}, %k{k}.chunk.end]" for s in sums),
                *_limited(f"%to1{k}", f"%ic{k}", CHUNK, f"%to2{k}"),
                f"  br label %k{k}.vec",
            ]  # fmt: skip
        origin = f"%k{k}.chunk" if deep else f"%k{k}.begin"
        inner = {s: self._start(s) if deep else start[s] for s in sums}
        lines += [
            f"k{k}.vec:",
            f"  %i{k} = phi i64 [{f'%ic{k}' if deep else '0'}, {origin}], [%next{k}, %k{k}.vec]",
            *(f"  %u0{k}.{number(s)} = phi {kinds[s]} [{inner[s]}, {origin}], "
              f"[%w0{k}.{number(s)}, %k{k}.vec]" for s in sums),
            *each.lines,
        ]  # fmt: skip
        for s in sums:
            lines += self._taken(k, s)
        lines.append(f"  %next{k} = add i64 %i{k}, 1")
        end = f"%to1{k}" if deep else stop
        lines += [
            f"  %more{k} = icmp ult i64 %next{k}, {end}",
            f"  br i1 %more{k}, label %k{k}.vec, label %k{k}.{'chunk.end' if deep else 'after'}",
        ]
        if deep:
            lines.append(f"k{k}.chunk.end:")
            for s in sums:
                lines += self._joined(s, f"%w1{k}.{number(s)}", f"%u1{k}.{number(s)}",
                                      f"%w0{k}.{number(s)}")  # fmt: skip
            lines += [
                f"  %more1{k} = icmp ult i64 %next{k}, %to2{k}",
                f"  br i1 %more1{k}, label %k{k}.chunk, label %k{k}.block.end",
                f"k{k}.block.end:",
            ]
            for s in sums:
                lines += self._joined(s, f"%w2{k}.{number(s)}", f"%u2{k}.{number(s)}",
                                      f"%w1{k}.{number(s)}")  # fmt: skip
            lines += [
                f"  %more2{k} = icmp ult i64 %next{k}, {stop}",
                f"  br i1 %more2{k}, label %k{k}.block, label %k{k}.after",
            ]
        lines.append(f"k{k}.after:")
        last, done = (2, f"%k{k}.block.end") if deep else (0, f"%k{k}.vec")
        for s in sums:
            lines.append(
                f"  %h{k}.{number(s)} = phi {kinds[s]} [{start[s]}, %k{k}.begin], "
                f"[%w{last}{k}.{number(s)}, {done}]"
            )
        return lines

    def _taken(self, k: int, step: Step) -> list[str]:
        """An element's value into the lanes of its reduction."""
        (arg,) = step.args
        value = self._value(arg, k) if self.levels[arg] == 2 else self._of_row(arg)
        lines: list[str] = []
        if not self.down:
            lanes = Lanes(self.module, LANES, lines)
            element = ELEMENTS[step.dtype.name]
            value = lanes.select(f"%mask{k}", element, value, self._start(step))
        n = self._number(step)
        return [*lines, *self._joined(step, f"%w0{k}.{n}", f"%u0{k}.{n}", value)]

    def _joined(self, step: Step, name: str, a: str, b: str, width: int = LANES) -> list[str]:
        """Two halves of a reduction as one, under a given name."""
        lines: list[str] = []
        lanes = Lanes(self.module, width, lines)
        result = write_step(lanes, Step(COMBINED[step.kind], (step, step), step.dtype), [a, b])
        lines[-1] = lines[-1].replace(f"  {result} =", f"  {name} =", 1)
        return lines

    def _end(self, k: int, moving: list[_Stream]) -> list[str]:
        """What is left of a row, the fold of its reductions, and what follows from them."""
        each = self.passes[k]
        lines: list[str] = []
        if not self.down:
            lines += [
                f"  br i1 %last{k}, label %k{k}.flush, label %k{k}.check",
                f"k{k}.check:",
                f"  br i1 %even, label %k{k}.done, label %k{k}.tail",
                f"k{k}.tail:",
            ]
            for s in _distinct(each.reads):
                lines += self._copied_in(k, s)
            lines += [f"  br label %k{k}.begin", f"k{k}.flush:"]
            for s in each.writes:
                lines += self._copied_out(k, s)
        lines += [f"  br label %k{k}.done", f"k{k}.done:"]
        for step in each.sums:
            lines += self._folded(k, step)
        return lines + self.between[k + 1]

    def _copied_in(self, k: int, s: _Stream) -> list[str]:
        kind, mask = f"<{LANES} x {s.stored}>", f"<{LANES} x i1>"
        return [
            f"  %e{k}.{s.name} = getelementptr {kind}, ptr %b.{s.name}, i64 %vectors",
            f"  %c{k}.{s.name} = call {kind} {self._declared('load', s.stored)}"
            f"(ptr %e{k}.{s.name}, i32 {s.itemsize}, {mask} %lanes, {kind} zeroinitializer)",
            f"  store {kind} %c{k}.{s.name}, ptr %t.{s.name}, align 64",
        ]

    def _copied_out(self, k: int, s: _Stream) -> list[str]:
        kind = f"<{LANES} x {s.stored}>"
        return [
            f"  %e{k}.{s.name} = getelementptr {kind}, ptr %b.{s.name}, i64 %vectors",
            f"  %c{k}.{s.name} = load {kind}, ptr %t.{s.name}, align 64",
            self._masked_store(s, f"%c{k}.{s.name}", f"%e{k}.{s.name}"),
        ]

    def _folded(self, k: int, step: Step) -> list[str]:
        """The lanes of a reduction as one value, in all lanes."""
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
                lines += self._joined(
                    step, f"%f{half}.{n}", f"%fl{half}.{n}", f"%fr{half}.{n}", half
                )
                value, width = f"%f{half}.{n}", half
            lines.append(f"  %one{n} = extractelement <1 x {element}> {value}, i64 0")
        name = self._reduced(step)
        lanes = Lanes(self.module, LANES, lines)
        if not self.down:
            value = self._splat(lanes, element, f"%one{n}")
        kind = self._kind(step)
        return [*lines, f"  {name} = select i1 true, {kind} {value}, {kind} {value}"]

    # The frame ----------------------------------------------------------------------------------

    def _finished(self) -> Source:
        region = self.region
        loops = [line for k in range(len(self.passes)) for line in self._loops(k)]
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
        return Source(
            body,
            "\n".join(self.module.declared.values()),
            flops,
            tuple(s.dtype for s in self.results),
            tuple((True,) * region.rank if whole else row for whole in self.whole),
            len(self.kept),
            len(self.passes),
        )

    def _row_result(self, i: int, step: Step) -> list[str]:
        axes = tuple(j != self.outer for j in range(self.region.rank))
        stream = self._stream(len(self.region.operands) + i, step, f"out{i}", axes)
        lines: list[str] = []
        lanes = Lanes(self.module, LANES, lines)
        value = self._of_row(step)
        if step.dtype.kind == "b":
            value = lanes.convert("zext", value, "i1", "i8")
        if self.down:
            return [*lines, self._masked_store(stream, value, f"%b.{stream.name}")]
        one = lanes.write(f"extractelement {lanes.vector(stream.stored)} {value}, i64 0")
        return [
            *lines, f"  store {stream.stored} {one}, ptr %b.{stream.name}, align {stream.itemsize}"
        ]  # fmt: skip

    def _head(self) -> list[str]:
        count = len(self.region.operands) + len(self.region.results)
        lines = ["(ptr %ptrs, ptr %sizes, i64 %start, i64 %stop) {", "entry:"]
        for i in range(count + bool(self.kept)):
            lines += [
                f"  %pp{i} = getelementptr ptr, ptr %ptrs, i64 {i}",
                f"  %p{i} = load ptr, ptr %pp{i}, align 8",
            ]
        lines.append("  %n = load i64, ptr %sizes, align 8")
        lines += self._sizes()
        moving = {s.number: s for each in self.passes for s in (*each.reads, *each.writes)}
        if not self.down:
            lines += [
                f"  %t.{s.name} = alloca <{LANES} x {s.stored}>, align 64" for s in moving.values()
            ]
        lines += self._mask() if not self.down else []
        slots = "%n" if self.down else "%slots"
        lines += ["  %slots = add i64 %vectors, 1"] if not self.down else []
        if self.kept:
            lines.append(f"  %zsize = mul i64 {slots}, {LANES * 8}")
            for i in range(len(self.kept)):
                lines += [
                    f"  %zo{i} = mul i64 %zsize, {i}",
                    f"  %z{i} = getelementptr i8, ptr %p{count}, i64 %zo{i}",
                ]
        kinds = {s.dtype.name for s in self.used if s.kind == "count"}
        for name in sorted(kinds):
            lines.append(f"  %count.{ELEMENTS[name]} = uitofp i64 %n to {ELEMENTS[name]}")
        lines += self.entry
        lines += [
            "  br label %unit",
            "unit:",
            "  %u = phi i64 [%start, %entry], [%u.next, %unit.end]",
        ]
        return [*lines, *self._places(), *self.between[0]]

    def _sizes(self) -> list[str]:
        """Sizes of axes, and strides of streams, in bytes."""
        lines, at = [], 1
        if self.down:
            lines += [
                "  %widthp = getelementptr i64, ptr %sizes, i64 1",
                "  %width = load i64, ptr %widthp, align 8",
                f"  %width.up = add i64 %width, {LANES - 1}",
                f"  %blocks = lshr i64 %width.up, {LANES.bit_length() - 1}",
            ]
            at = 2
        for axis in range(1, self.outer):
            lines += [
                f"  %dp{axis} = getelementptr i64, ptr %sizes, i64 {at}",
                f"  %d{axis} = load i64, ptr %dp{axis}, align 8",
            ]
            at += 1
        for s in self.streams.values():
            for axis in range(self.moves):
                place = at + s.number * self.moves + axis
                name = f"{s.name}.{axis}"
                lines += [
                    f"  %sp.{name} = getelementptr i64, ptr %sizes, i64 {place}",
                    f"  %s.{name} = load i64, ptr %sp.{name}, align 8",
                ]
        return lines

    def _mask(self) -> list[str]:
        """How many vectors a row has, and which lanes of the last one."""
        index = ", ".join(f"i32 {i}" for i in range(LANES))
        kind = f"<{LANES} x i32>"
        return [
            f"  %vectors = lshr i64 %n, {LANES.bit_length() - 1}",
            f"  %rest = and i64 %n, {LANES - 1}",
            "  %even = icmp eq i64 %rest, 0",
            "  %rest32 = trunc i64 %rest to i32",
            f"  %rest.1 = insertelement {kind} poison, i32 %rest32, i64 0",
            f"  %rests = shufflevector {kind} %rest.1, {kind} poison, "
            f"<{LANES} x i32> zeroinitializer",
            f"  %lanes = icmp ult {kind} <{index}>, %rests",
        ]

    def _places(self) -> list[str]:
        """Where the unit is along each outer axis, and where its streams begin."""
        lines = []
        left = "%u"
        if self.down:
            index = ", ".join(f"i64 {i}" for i in range(LANES))
            kind = f"<{LANES} x i64>"
            lines += [
                "  %block = urem i64 %u, %blocks",
                "  %row = udiv i64 %u, %blocks",
                f"  %column = shl i64 %block, {LANES.bit_length() - 1}",
                "  %there = sub i64 %width, %column",
                f"  %there.1 = insertelement {kind} poison, i64 %there, i64 0",
                f"  %theres = shufflevector {kind} %there.1, {kind} poison, "
                f"<{LANES} x i32> zeroinitializer",
                f"  %lanes = icmp ult {kind} <{index}>, %theres",
            ]
            left = "%row"
        for axis in range(self.outer - 1, 0, -1):
            lines += [
                f"  %at{axis} = urem i64 {left}, %d{axis}",
                f"  %left{axis} = udiv i64 {left}, %d{axis}",
            ]
            left = f"%left{axis}"
        lines.append(f"  %at0 = add i64 {left}, 0")
        for s in self.streams.values():
            lines += self._base(s)
        return lines

    def _base(self, s: _Stream) -> list[str]:
        lines, total = [], "0"
        for axis in range(self.outer):
            name = f"{s.name}.{axis}"
            lines += [
                f"  %m.{name} = mul i64 %at{axis}, %s.{name}",
                f"  %o.{name} = add i64 {total}, %m.{name}",
            ]
            total = f"%o.{name}"
        if self.down and s.axes[-1]:
            lines += [
                f"  %cb.{s.name} = mul i64 %column, {s.itemsize}",
                f"  %co.{s.name} = add i64 {total}, %cb.{s.name}",
            ]
            total = f"%co.{s.name}"
        return [*lines, f"  %b.{s.name} = getelementptr i8, ptr %p{s.number}, i64 {total}"]

    def _foot(self) -> list[str]:
        return [
            "  br label %unit.end",
            "unit.end:",
            "  %u.next = add i64 %u, 1",
            "  %units = icmp ult i64 %u.next, %stop",
            "  br i1 %units, label %unit, label %done",
            "done:",
            "  ret void",
            "}",
        ]


def _limited(name: str, start: str, count: int, stop: str) -> list[str]:
    """start + count, or `stop` where that comes first."""
    bare = name.removeprefix("%")
    return [
        f"  %{bare}.full = add i64 {start}, {count}",
        f"  %{bare}.less = icmp ult i64 %{bare}.full, {stop}",
        f"  {name} = select i1 %{bare}.less, i64 %{bare}.full, i64 {stop}",
    ]


def _distinct(streams: list[_Stream]) -> list[_Stream]:
    return list({s.number: s for s in streams}.values())
