"""Products of bfloat16 matrices by AMX tiles, in LLVM IR.

    void kernel(ptr* {a, b, out, scratch}, i64* sizes, i64 start, i64 stop)

The result is cut into squares of 32 rows and 32 columns, which four tiles hold in float32 while the
terms of a slice run. Panels of 32 rows of all matrices of a batch are numbered in a row; the kernel
computes those from `start` to `stop`. Loops nest in this order: blocks of panels, chunks of terms,
32 columns, slices of a chunk, panels of the block. So the packed rows of a block stay in the second
cache, and a slice of 32 packed columns in the first.

Each element is one chain over blocks of 32 terms in order, whatever the blocks, chunks, slices and
threads are. It is rounded to bfloat16 once, at the end.
"""

from __future__ import annotations

from enum import IntEnum, auto

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.codegen.function_writer import FunctionWriter
from graphflow.ops.kernels.gemm.amx_tiles import (
    BLOCK,
    LINE,
    PANEL,
    SIDE,
    TILE,
    write_pack_columns,
    write_pack_pairs,
    write_pack_rows,
    write_pack_turned_rows,
    write_round,
)

SQUARE = 4 * TILE
"""Bytes of the sums of 32 rows and 32 columns."""
SLICE = 512
"""Terms of a slice: 32 columns of it take 32 KiB, which the first cache holds."""


class AmxSize(IntEnum):
    """Indices into the table of sizes; strides are in bytes."""

    ROWS = 0
    COLUMNS = auto()
    TERMS = auto()
    PANELS = auto()  # of one matrix
    BLOCK = auto()  # panels that are packed together
    CHUNK = auto()  # terms that are packed together, a multiple of a slice
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
    SUMS_PANEL = auto()  # bytes between sums of panels that wait for the next slice, or 0
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
    functions = [pack_a, pack_b, write_round(), _write_square(1), _write_square(2)]
    kernel = _ProductWriter(form)
    kernel.write_product()
    functions.append(kernel.f)
    declared = dict.fromkeys(d for f in functions for d in f.declared)
    *inner, body = (f.text() for f in functions)
    return body.removeprefix("define void @kernel"), "\n".join([*declared, _CONFIGURATION, *inner])


# Eight tiles of 16 rows and 64 bytes: palette, then bytes of rows from byte 16, rows from byte 48.
_CONFIGURATION = "@amx_configuration = internal constant [64 x i8] [" + ", ".join(
    f"i8 {value}"
    for value in (1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8)
) + "], align 64"  # fmt: skip


def _write_square(rows: int) -> FunctionWriter:
    """Write the sums of a square over some blocks of terms; it may lack the lower tiles.

    They continue from stored sums, or from zero.
    """
    f = FunctionWriter(
        f"amx_square{rows}",
        ["ptr %a", "ptr %b", "i64 %bytes", "ptr %sums", "i1 %more"], "float", SIDE,
    )  # fmt: skip
    tiles = [(row, column) for row in range(rows) for column in range(2)]
    with f.when("%more"):
        for row, column in tiles:
            number = 2 * row + column
            _call_tile(f, "tileloadd64", number, f.gep("%sums", number * TILE))
    with f.when(f.write("xor i1 %more, true")):
        for row, column in tiles:
            f.declared["declare void @llvm.x86.tilezero(i8)"] = None
            f.write_effect(f"call void @llvm.x86.tilezero(i8 {2 * row + column})")
    with f.loop(0, "%bytes", BLOCK) as k:
        a, b = f.gep("%a", k), f.gep("%b", k)
        for i in range(2):
            _call_tile(f, "tileloadd64", 6 + i, f.gep(b, i * TILE))
        for row in range(rows):
            _call_tile(f, "tileloadd64", 4 + row, f.gep(a, row * TILE))
            for column in range(2):
                f.declared["declare void @llvm.x86.tdpbf16ps(i8, i8, i8)"] = None
                f.write_effect(
                    f"call void @llvm.x86.tdpbf16ps(i8 {2 * row + column}, i8 {4 + row}, "
                    f"i8 {6 + column})"
                )
    for row, column in tiles:
        number = 2 * row + column
        _call_tile(f, "tilestored64", number, f.gep("%sums", number * TILE))
    return f


def _call_tile(f: FunctionWriter, name: str, tile: int, pointer: str) -> None:
    f.declared[f"declare void @llvm.x86.{name}(i8, ptr, i64)"] = None
    f.write_effect(f"call void @llvm.x86.{name}(i8 {tile}, ptr {pointer}, i64 {LINE})")


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

    def _block(self, a: str, b: str, out: str, rows: str, count: str, packs: str) -> None:
        """Write the product of some panels of rows.

        Args:
            rows: from the first of them to the matrix's last.
            packs: whether columns are not packed yet.
        """
        f, size = self.f, self.size
        terms = size[AmxSize.TERMS]
        some = f.compare("sgt", terms, 0)
        end = f.select(some, "i64", terms, "1")  # without terms, zeros are stored
        with f.loop(0, end, size[AmxSize.CHUNK]) as k:
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
        k, left, length, done = chunk
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
        target = f.gep(out, f.mul(j, 2))
        begun = f.compare("sgt", k, 0)
        end = f.select(f.compare("sgt", length, 0), "i64", length, "1")
        step = SLICE // PANEL * BLOCK
        with f.loop(0, end, step) as s:
            some = f.minimum(f.sub(length, s), step)
            more = f.write(f"or i1 {begun}, {f.compare('sgt', s, 0)}")
            whole = f.compare("sge", f.add(s, step), length)
            ends = f.write(f"and i1 {done}, {whole}")
            with f.loop(0, count) as panel:
                left_rows = f.sub(rows, f.mul(panel, PANEL))
                own = f.gep(sums, f.mul(panel, size[AmxSize.SUMS_PANEL]))
                given = (
                    ("ptr", f.gep(f.gep(self.scratch, f.mul(panel, length)), s)),
                    ("ptr", f.gep(place, s)), ("i64", some), ("ptr", own), ("i1", more),
                )  # fmt: skip
                tall = f.compare("sgt", left_rows, SIDE)
                with f.when(tall):
                    self._call("@amx_square2", *given)
                with f.when(f.write(f"xor i1 {tall}, true")):
                    self._call("@amx_square1", *given)
                with f.when(ends):
                    to = f.gep(target, f.mul(f.mul(panel, PANEL), size[AmxSize.OUT_ROW]))
                    self._call(
                        "@amx_round", ("ptr", own), ("ptr", to), ("i64", size[AmxSize.OUT_ROW]),
                        ("i64", f.minimum(left_rows, PANEL)), ("i64", columns),
                    )  # fmt: skip
