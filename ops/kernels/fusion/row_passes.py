"""Passes over a row: which steps of a region with reductions run in which pass, and their code.

A pass leads up to each reduction that needs the one before (the maximum, then the sum of
exponentials, then the quotients). An expensive value that a later pass needs waits in scratch
memory; others are computed again. `reductions.py` writes the loops around them.
"""

from __future__ import annotations

from dataclasses import field

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.codegen.elementwise_emitter import (
    FLOPS,
    reachable_steps,
    storage_type,
    trace_region,
)
from graphflow.ops.kernels.codegen.expression_trace import ScalarStep
from graphflow.ops.kernels.codegen.region import Region
from graphflow.ops.kernels.codegen.scalar_steps import write_step
from graphflow.ops.kernels.codegen.vector_writer import ELEMENTS, TYPE_SUFFIX, Module, VectorWriter

LANES = 32
_KEEP_COST = 4
"""Operations above which a value is kept for a later pass instead of computed again."""
COMBINING_STEPS = {
    "row_sum": "add",
    "row_prod": "multiply",
    "row_max": "maximum",
    "row_min": "minimum",
    "row_any": "or",
    "row_all": "and",
}


def neutral_element(step: ScalarStep) -> float | int | bool:
    """Return the neutral element of a reduction."""
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
class RowStream:
    """An operand or result: its number among the arguments, and along which axes it moves."""

    number: int
    stored: str
    name: str
    itemsize: int
    axes: tuple[bool, ...]


@dataclass
class RowPass:
    """One pass over the elements of a row: its steps, and the code of its loop."""

    steps: set[ScalarStep] = field(default_factory=set)
    lines: list[str] = field(default_factory=list)
    reads: list[RowStream] = field(default_factory=list)
    writes: list[RowStream] = field(default_factory=list)
    sums: list[ScalarStep] = field(default_factory=list)


class PassPlanner:
    """The steps of a region along each row, pass by pass."""

    def __init__(self, region: Region, wide: bool) -> None:
        self.region = region
        self.down = region.over == "columns"
        self.outer = region.rank - (2 if self.down else 1)
        self.moves = region.rank - 1  # strides of each stream, among the sizes
        self.module = Module(wide)
        self.trace, _, self.results = trace_region(region)
        self.used = reachable_steps(self.trace, self.results)
        self.levels: dict[ScalarStep, int] = {}
        self.ready: dict[ScalarStep, int] = {}  # the first pass in which a step can be computed
        for step in self.used:
            self._classify(step)
        self.whole = [
            region.ops[i].whole or self.levels[s] == 2
            for i, s in zip(region.results, self.results, strict=True)
        ]
        self.values: dict[tuple[ScalarStep, int], str] = {}  # by pass; -1 for values of a row
        self.entry: list[str] = []
        self.between: list[list[str]] = [[]]
        self.kept: dict[ScalarStep, int] = {}
        self.passes: list[RowPass] = []
        self.streams: dict[int, RowStream] = {}

    # What is computed when ----------------------------------------------------------------------

    def _classify(self, step: ScalarStep) -> None:
        """Find whether a step has one value (0), one a row (1) or one an element (2), and its first
        pass."""
        ready = max((self.ready[a] for a in step.args), default=0)
        if step.kind == "input":
            axes = self.region.operands[step.value].axes
            reduced = axes[self.outer]
            level = 2 if reduced else 1 if any(axes) else 0
        elif step.kind in COMBINING_STEPS:
            level, ready = 1, ready + 1
        elif step.kind == "place":
            level = 2
        else:
            level = max((self.levels[a] for a in step.args), default=0)
        self.levels[step], self.ready[step] = level, ready

    def _plan(self) -> None:
        """Plan the passes, and which values wait for a later one."""
        reductions = [s for s in self.used if s.kind in COMBINING_STEPS]
        wanted = [s for s, whole in zip(self.results, self.whole, strict=True) if whole]
        count = max([self.ready[s] for s in reductions] + [self.ready[s] + 1 for s in wanted])
        self.passes = [RowPass() for _ in range(count)]
        self.between += [[] for _ in range(count)]
        self.costs = self._costs()
        self.first: dict[ScalarStep, int] = {}
        for k, each in enumerate(self.passes):
            each.sums = [s for s in reductions if self.ready[s] == k + 1]
            targets = [a for s in each.sums for a in s.args]
            targets += wanted if k == count - 1 else []
            self._add_needed(k, [s for s in targets if self.levels[s] == 2])

    def _costs(self) -> dict[ScalarStep, int]:
        """Return the operations of each elementwise step, with those that it depends on."""
        costs: dict[ScalarStep, int] = {}
        for step in self.used:
            if self.levels[step] == 2:
                inner = (costs[a] for a in step.args if self.levels[a] == 2)
                costs[step] = FLOPS.get(step.kind, 1) + sum(inner)
        return costs

    def _add_needed(self, k: int, stack: list[ScalarStep]) -> None:
        """Add steps, and those that they need, to a pass.

        An expensive step that an earlier pass computed is kept for this one.
        """
        steps = self.passes[k].steps
        while stack:
            step = stack.pop()
            if step in steps:
                continue
            steps.add(step)
            is_dear = (
                self.costs[step] > _KEEP_COST and not self.down
            )  # kept columns would be too large
            if self.first.setdefault(step, k) < k and is_dear:
                self.kept.setdefault(step, len(self.kept))
            else:
                stack += [a for a in step.args if self.levels[a] == 2]

    # Steps --------------------------------------------------------------------------------------

    def _value(self, step: ScalarStep, k: int) -> str:
        return self.values[step, k if self.levels[step] == 2 else -1]

    def _write_row_step(self, step: ScalarStep, lanes: VectorWriter) -> str:
        """Write a step with one value for the row, or for all rows."""
        if step.kind == "constant":
            return lanes.constant(step.value, ELEMENTS[step.dtype.name])
        if step.kind == "count":
            element = ELEMENTS[step.dtype.name]
            return lanes.broadcast(element, f"%count.{element}")
        if step.kind == "input":
            return self._row_input(step, lanes)
        return write_step(lanes, step, [self._row_value(a) for a in step.args])

    def _row_value(self, step: ScalarStep) -> str:
        """Return the name of a row's value; a reduction's follows from its number."""
        return self._reduction_name(step) if step.kind in COMBINING_STEPS else self.values[step, -1]

    def _reduction_name(self, step: ScalarStep) -> str:
        return f"%red{self.used.index(step)}"

    def _stream(
        self, number: int, step: ScalarStep, name: str, axes: tuple[bool, ...]
    ) -> RowStream:
        if number not in self.streams:
            self.streams[number] = RowStream(
                number, storage_type(step.dtype), name, step.dtype.itemsize, axes
            )
        return self.streams[number]

    def _row_input(self, step: ScalarStep, lanes: VectorWriter) -> str:
        axes = self.region.operands[step.value].axes
        stored, size = storage_type(step.dtype), step.dtype.itemsize
        pointer = f"%p{step.value}"
        if any(axes):
            stream = self._stream(step.value, step, f"in{step.value}", axes)
            pointer = f"%b.{stream.name}"
        if self.down and axes[-1]:
            name = self._masked_load(lanes, pointer, stored, size)
        else:
            one = lanes.write(f"load {stored}, ptr {pointer}, align {size}")
            name = lanes.broadcast(stored, one)
        return self._to_bool(lanes, step, name)

    def _to_bool(self, lanes: VectorWriter, step: ScalarStep, name: str) -> str:
        if step.dtype.kind != "b":
            return name
        return lanes.binary("icmp ne", "i8", name, lanes.constant(0, "i8"))

    def _masked_load(self, lanes: VectorWriter, pointer: str, stored: str, size: int) -> str:
        kind, mask = lanes.vector(stored), lanes.vector("i1")
        call = f"{self._declare_masked('load', stored)}(ptr {pointer}, i32 {size}, {mask} %lanes, "
        return self._write_maybe_masked(
            lanes, "%full", f"load {kind}, ptr {pointer}, align {size}",
            f"call {kind} {call}{kind} zeroinitializer)", kind,
        )  # fmt: skip

    def _write_maybe_masked(
        self, lanes: VectorWriter, full: str, plain: str, masked: str, kind: str | None = None
    ) -> str:
        """Write a masked instruction, or a branch to the plain one for full vectors.

        Without AVX-512 a mask takes a dozen instructions for each vector.
        """
        n = self.module.name()
        if self.module.wide:
            lanes.lines.append(f"  {n} = {masked}" if kind else f"  {masked}")
            return n
        names = [f"{n}.{part}" for part in ("full", "rest", "end")]
        first, last, end = (name.removeprefix("%") for name in names)
        given = [f"{name}.value = " if kind else "" for name in names]
        lanes.lines += [
            f"  br i1 {full}, label %{first}, label %{last}",
            f"{first}:", f"  {given[0]}{plain}", f"  br label %{end}",
            f"{last}:", f"  {given[1]}{masked}", f"  br label %{end}",
            f"{end}:",
        ]  # fmt: skip
        if kind:
            values = f"[%{first}.value, %{first}], [%{last}.value, %{last}]"
            lanes.lines.append(f"  {n} = phi {kind} {values}")
        return n

    def _declare_masked(self, what: str, stored: str) -> str:
        kind, mask = f"<{LANES} x {stored}>", f"<{LANES} x i1>"
        call = f"@llvm.masked.{what}.v{LANES}{TYPE_SUFFIX.get(stored, stored)}.p0"
        self.module.declared[call] = (
            f"declare {kind} {call}(ptr, i32, {mask}, {kind})"
            if what == "load"
            else f"declare void {call}({kind}, ptr, i32, {mask})"
        )
        return call

    # The body of a pass -------------------------------------------------------------------------

    def _write_body(self, k: int) -> None:
        each = self.passes[k]
        lanes = VectorWriter(self.module, LANES, each.lines)
        for step in self.used:
            if step in each.steps:
                self.values[step, k] = self._write_element_step(step, lanes, k)
        if k < len(self.passes) - 1:
            return
        for i, (step, whole) in enumerate(zip(self.results, self.whole, strict=True)):
            if whole:
                self._store(i, step, lanes, k)

    def _write_element_step(self, step: ScalarStep, lanes: VectorWriter, k: int) -> str:
        if step in self.kept and self.first[step] < k:
            return self._load_kept(step, lanes, k)
        if step.kind == "input":
            name = self._load_element(step, lanes, k)
        elif step.kind == "place":
            name = self._element_number(lanes, k)
        else:
            args = [
                self._value(a, k) if self.levels[a] == 2 else self._row_value(a) for a in step.args
            ]
            name = write_step(lanes, step, args)
        if step in self.kept:
            self._store_kept(step, name, lanes, k)
        return name

    def _load_element(self, step: ScalarStep, lanes: VectorWriter, k: int) -> str:
        axes = self.region.operands[step.value].axes
        stream = self._stream(step.value, step, f"in{step.value}", axes)
        kind = lanes.vector(stream.stored)
        if not self.down:
            self.passes[k].reads.append(stream)
            place = lanes.write(f"getelementptr {kind}, ptr %q{k}.{stream.name}, i64 %i{k}")
            name = lanes.write(f"load {kind}, ptr {place}, align {stream.itemsize}")
            return self._to_bool(lanes, step, name)
        place = self._column_address(stream, lanes, k)
        if axes[-1]:
            name = self._masked_load(lanes, place, stream.stored, stream.itemsize)
        else:
            one = lanes.write(f"load {stream.stored}, ptr {place}, align {stream.itemsize}")
            name = lanes.broadcast(stream.stored, one)
        return self._to_bool(lanes, step, name)

    def _column_address(self, stream: RowStream, lanes: VectorWriter, k: int) -> str:
        """Write the address of a stream at this element of its column."""
        move = lanes.write(f"mul i64 %i{k}, %s.{stream.name}.{self.outer}")
        return lanes.write(f"getelementptr i8, ptr %b.{stream.name}, i64 {move}")

    def _element_number(self, lanes: VectorWriter, k: int) -> str:
        if self.down:
            one = lanes.write(f"trunc i64 %i{k} to i32")
            return lanes.broadcast("i32", one)
        number = lanes.write(f"add i64 %i{k}, %first{k}")
        start = lanes.write(f"shl i64 {number}, {LANES.bit_length() - 1}")
        one = lanes.write(f"trunc i64 {start} to i32")
        iota = ", ".join(f"i32 {i}" for i in range(LANES))
        return lanes.binary("add", "i32", lanes.broadcast("i32", one), f"<{iota}>")

    def _kept_address(self, step: ScalarStep, lanes: VectorWriter, k: int) -> tuple[str, str]:
        kind = lanes.vector(storage_type(step.dtype))
        number = f"%i{k}" if self.down else lanes.write(f"add i64 %i{k}, %first{k}")
        place = lanes.write(f"getelementptr {kind}, ptr %z{self.kept[step]}, i64 {number}")
        return kind, place

    def _load_kept(self, step: ScalarStep, lanes: VectorWriter, k: int) -> str:
        kind, place = self._kept_address(step, lanes, k)
        align = step.dtype.itemsize
        return self._to_bool(lanes, step, lanes.write(f"load {kind}, ptr {place}, align {align}"))

    def _store_kept(self, step: ScalarStep, name: str, lanes: VectorWriter, k: int) -> None:
        if step.dtype.kind == "b":
            name = lanes.convert("zext", name, "i1", "i8")
        kind, place = self._kept_address(step, lanes, k)
        lanes.lines.append(f"  store {kind} {name}, ptr {place}, align {step.dtype.itemsize}")

    def _store(self, i: int, step: ScalarStep, lanes: VectorWriter, k: int) -> None:
        stream = self._stream(
            len(self.region.operands) + i, step, f"out{i}", (True,) * self.region.rank
        )
        kind = lanes.vector(stream.stored)
        value = self._value(step, k) if self.levels[step] == 2 else self._row_value(step)
        if step.dtype.kind == "b":
            value = lanes.convert("zext", value, "i1", "i8")
        if self.down:
            place = self._column_address(stream, lanes, k)
            plain = f"store {kind} {value}, ptr {place}, align {stream.itemsize}"
            self._write_maybe_masked(
                lanes, "%full", plain, self._masked_store(stream, value, place)
            )
            return
        self.passes[k].writes.append(stream)
        place = lanes.write(f"getelementptr {kind}, ptr %q{k}.{stream.name}, i64 %i{k}")
        self.passes[k].lines.append(f"  store {kind} {value}, ptr {place}, align {stream.itemsize}")

    def _masked_store(self, stream: RowStream, value: str, place: str) -> str:
        kind, mask = f"<{LANES} x {stream.stored}>", f"<{LANES} x i1>"
        call = self._declare_masked("store", stream.stored)
        return (
            f"call void {call}({kind} {value}, ptr {place}, i32 {stream.itemsize}, {mask} %lanes)"
        )
