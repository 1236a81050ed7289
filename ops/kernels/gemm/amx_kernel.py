"""Products of bfloat16 matrices by AMX tiles, in LLVM IR.

    void kernel(ptr* {a, b, out, scratch}, i64* sizes, i64 start, i64 stop)

The result is cut into squares of 32 rows and 32 columns, which four tiles hold in float32 while the
terms of a chunk run. Panels of 32 rows of all matrices of a batch are numbered in a row; the kernel
computes those from `start` to `stop`. Loops nest in this order: blocks of panels, chunks of terms,
32 columns, panels of the block. So the packed rows of a block stay in the second cache, and 32
packed columns near the first; or, in blocks of one panel, the other way round. There is at least
one term.

Each element is one chain over blocks of 32 terms in order, whatever the blocks, chunks and threads
are. It is rounded to bfloat16 once, at the end.
"""

from __future__ import annotations

from enum import IntEnum, auto

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.codegen.function_writer import FunctionWriter
from graphflow.ops.kernels.gemm.amx_squares import (
    CONFIGURATION,
    write_round,
    write_square,
)
from graphflow.ops.kernels.gemm.amx_tiles import (
    BLOCK,
    ITEM,
    PANEL,
    SIDE,
    write_pack_columns,
    write_pack_pairs,
    write_pack_rows,
    write_pack_turned_rows,
)


class AmxSize(IntEnum):
    """Indices into the table of sizes; strides are in bytes."""

    ROWS = 0
    COLUMNS = auto()
    TERMS = auto()
    PANELS = auto()  # of one matrix
    BLOCK = auto()  # panels that are packed together
    CHUNK = auto()  # terms that are packed together, whole blocks
    A_LINE = auto()  # from row to row, or from term to term of a transposed operand
    A_ROW = auto()
    A_TERM = auto()
    B_LINE = auto()
    B_TERM = auto()
    B_COLUMN = auto()
    OUT_ROW = auto()
    INNER = auto()  # matrices along the last axis of the batch
    A_OUTER = auto()
    A_INNER = auto()
    B_OUTER = auto()
    B_INNER = auto()
    OUT_OUTER = auto()
    OUT_INNER = auto()
    B_PANELS = auto()  # where packed columns begin in scratch memory
    B_STEP = auto()  # bytes between panels of columns that are kept for all blocks, or 0
    SUMS = auto()  # where sums begin
    SUMS_PANEL = auto()  # bytes between sums of panels that wait for the next chunk, or 0
    SUMS_STEP = auto()  # bytes between sums of 32 columns that wait for the next chunk, or 0


@dataclass(frozen=True)
class AmxForm:
    """The specialisation of a kernel: which operands are transposed.

    Attributes:
        turned_a: whether rows of the left operand are neighbours, not its terms.
        turned_b: whether terms of the right operand are neighbours, not its columns.
    """

    turned_a: bool
    turned_b: bool


def write_amx_product(form: AmxForm) -> tuple[str, str]:
    """Write a kernel; returns its text after its name, and the functions that it needs."""
    pack_a = write_pack_turned_rows() if form.turned_a else write_pack_rows()
    pack_b = write_pack_columns() if form.turned_b else write_pack_pairs()
    functions = [pack_a, pack_b, write_round(), write_square(1), write_square(2)]
    kernel = _ProductWriter(form)
    kernel.write_product()
    functions.append(kernel.f)
    declared = dict.fromkeys(d for f in functions for d in f.declared)
    *inner, body = (f.text() for f in functions)
    return body.removeprefix("define void @kernel"), "\n".join([*declared, CONFIGURATION, *inner])


class _ProductWriter:
    """Writes the loops of a kernel."""

    def __init__(self, form: AmxForm) -> None:
        arguments = ["ptr %ptrs", "ptr %sizes", "i64 %start", "i64 %stop"]
        self.f = f = FunctionWriter("kernel", arguments, "float", SIDE, inner=False)
        self.pack_a = "@amx_pack_turned_rows" if form.turned_a else "@amx_pack_rows"
        self.pack_b = "@amx_pack_columns" if form.turned_b else "@amx_pack_pairs"
        self.size = {s: f.argument("%sizes", "i64", s) for s in AmxSize}
        self.a, self.b, self.out, self.scratch = (f.argument("%ptrs", "ptr", i) for i in range(4))
        self.b_panels = f.gep(self.scratch, self.size[AmxSize.B_PANELS])
        self.sums = f.gep(self.scratch, self.size[AmxSize.SUMS])
        # The square that waits for its rounding: sums, target, rows (0 if none waits) and columns.
        self.waiting = f.write("alloca [4 x i64], align 8")
        self._set_waiting(2, "i64", "0")

    def _call(self, function: str, *arguments: tuple[str, str]) -> None:
        given = ", ".join(f"{kind} {value}" for kind, value in arguments)
        self.f.write_effect(f"call void {function}({given})")

    def write_product(self) -> None:
        f, size = self.f, self.size
        f.declared["declare void @llvm.x86.ldtilecfg(ptr)"] = None
        f.declared["declare void @llvm.x86.tilerelease()"] = None
        f.write_effect("call void @llvm.x86.ldtilecfg(ptr @amx_configuration)")
        panels = size[AmxSize.PANELS]
        with f.loop("%start", "%stop") as unit:
            matrix = f.write(f"udiv i64 {unit}, {panels}")
            first = f.sub(unit, f.mul(matrix, panels))
            some = f.minimum(f.sub("%stop", unit), size[AmxSize.BLOCK])
            count = f.minimum(some, f.sub(panels, first))
            outer = f.write(f"udiv i64 {matrix}, {size[AmxSize.INNER]}")
            inner = f.sub(matrix, f.mul(outer, size[AmxSize.INNER]))
            a, b, out = (
                f.gep(f.gep(base, f.mul(outer, size[big])), f.mul(inner, size[small]))
                for base, big, small in (
                    (self.a, AmxSize.A_OUTER, AmxSize.A_INNER),
                    (self.b, AmxSize.B_OUTER, AmxSize.B_INNER),
                    (self.out, AmxSize.OUT_OUTER, AmxSize.OUT_INNER),
                )
            )
            row = f.mul(first, PANEL)
            a = f.gep(a, f.mul(row, size[AmxSize.A_ROW]))
            out = f.gep(out, f.mul(row, size[AmxSize.OUT_ROW]))
            begun = f.compare("eq", unit, "%start")
            fresh = f.write(f"or i1 {begun}, {f.compare('eq', first, 0)}")
            kept = f.compare("ne", size[AmxSize.B_STEP], 0)
            packs = f.write(f"or i1 {fresh}, {f.write(f'xor i1 {kept}, true')}")
            self._block(a, b, out, f.sub(size[AmxSize.ROWS], row), count, packs)
            f.set_loop_step(unit, count)
        f.write_effect("call void @llvm.x86.tilerelease()")
        self._call("@amx_round", *self._waiting_square())

    def _block(self, a: str, b: str, out: str, rows: str, count: str, packs: str) -> None:
        """Write the product of some panels of rows.

        Args:
            rows: from the first of them to the matrix's last.
            packs: whether columns are not packed yet.
        """
        f, size = self.f, self.size
        terms = size[AmxSize.TERMS]
        with f.loop(0, terms, size[AmxSize.CHUNK]) as k:
            left = f.minimum(f.sub(terms, k), size[AmxSize.CHUNK])
            last = f.write(f"lshr i64 {f.add(left, PANEL - 1)}, {PANEL.bit_length() - 1}")
            length = f.mul(last, BLOCK)
            done = f.compare("sge", f.add(k, size[AmxSize.CHUNK]), terms)
            with f.loop(0, count) as panel:
                row = f.mul(panel, PANEL)
                source = f.gep(a, f.mul(row, size[AmxSize.A_ROW]))
                source = f.gep(source, f.mul(k, size[AmxSize.A_TERM]))
                self._call(
                    self.pack_a, ("ptr", source), ("i64", size[AmxSize.A_LINE]),
                    ("ptr", f.gep(self.scratch, f.mul(panel, length))), ("i64", left),
                    ("i64", f.minimum(f.sub(rows, row), PANEL)),
                )  # fmt: skip
            with f.loop(0, size[AmxSize.COLUMNS], PANEL) as j:
                self._columns(b, out, rows, count, packs, (k, left, length, done), j)

    def _columns(
        self, b: str, out: str, rows: str, count: str, packs: str,
        chunk: tuple[str, str, str, str], j: str,
    ) -> None:  # fmt: skip
        """Write the product of a block of panels and 32 columns over a chunk."""
        f, size = self.f, self.size
        k, left, *_ = chunk
        number = f.write(f"lshr i64 {j}, {PANEL.bit_length() - 1}")
        columns = f.minimum(f.sub(size[AmxSize.COLUMNS], j), PANEL)
        place = f.gep(self.b_panels, f.mul(number, size[AmxSize.B_STEP]))
        kept = f.compare("ne", size[AmxSize.B_STEP], 0)
        place = f.gep(place, f.select(kept, "i64", f.mul(k, BLOCK // PANEL), "0"))
        with f.when(packs):
            source = f.gep(b, f.mul(j, size[AmxSize.B_COLUMN]))
            source = f.gep(source, f.mul(k, size[AmxSize.B_TERM]))
            self._call(
                self.pack_b, ("ptr", source), ("i64", size[AmxSize.B_LINE]), ("ptr", place),
                ("i64", left), ("i64", columns),
            )  # fmt: skip
        sums = f.gep(self.sums, f.mul(number, size[AmxSize.SUMS_STEP]))
        target = f.gep(out, f.mul(j, ITEM))
        with f.loop(0, count) as panel:
            self._square(panel, rows, columns, place, sums, target, chunk)

    def _square(
        self, panel: str, rows: str, columns: str, place: str, sums: str, target: str,
        chunk: tuple[str, str, str, str],
    ) -> None:  # fmt: skip
        """Write the sums of a panel of rows and 32 columns, and the rounding of the square that
        waits; then this one waits, if its sums are complete."""
        f, size = self.f, self.size
        k, _, length, done = chunk
        blocks = f.write(f"lshr i64 {length}, {BLOCK.bit_length() - 1}")
        step = f.write(f"udiv i64 {f.add(blocks, PANEL - 1)}, {blocks}")
        first = f.mul(panel, PANEL)
        left = f.sub(rows, first)
        own = f.gep(sums, f.mul(panel, size[AmxSize.SUMS_PANEL]))
        given = (
            ("ptr", f.gep(self.scratch, f.mul(panel, length))), ("ptr", place), ("i64", length),
            ("ptr", own), ("i1", f.compare("sgt", k, 0)), ("i64", step), *self._waiting_square(),
        )  # fmt: skip
        tall = f.compare("sgt", left, SIDE)
        with f.when(tall):
            self._call("@amx_square2", *given)
        with f.when(f.write(f"xor i1 {tall}, true")):
            self._call("@amx_square1", *given)
        to = f.gep(target, f.mul(first, size[AmxSize.OUT_ROW]))
        count = f.select(done, "i64", f.minimum(left, PANEL), "0")
        for number, (kind, value) in enumerate(
            (("ptr", own), ("ptr", to), ("i64", count), ("i64", columns))
        ):
            self._set_waiting(number, kind, value)

    def _set_waiting(self, number: int, kind: str, value: str) -> None:
        place = self.f.gep(self.waiting, 8 * number)
        self.f.write_effect(f"store {kind} {value}, ptr {place}, align 8")

    def _waiting_square(self) -> tuple[tuple[str, str], ...]:
        """Return the arguments that round the square that waits."""
        kinds = ("ptr", "ptr", "i64", "i64")
        before, to, rows, columns = (
            (kind, self.f.argument(self.waiting, kind, i)) for i, kind in enumerate(kinds)
        )
        return before, to, ("i64", self.size[AmxSize.OUT_ROW]), rows, columns
