"""Matrix products in LLVM IR.

    void kernel(ptr* {x, y, out, scratch}, i64* sizes, i64 start, i64 stop)
    void kernel(ptr* {x, y, addend, out, scratch}, …)    # with the flag APART

A product is cut into tiles of rows of x and panels of columns of y. A tile of a panel stays in
registers while k runs. The tiles of all matrices of a batch are numbered in a row; the kernel
computes those from `start` to `stop`. k runs in chunks, so that panels and tiles stay in the cache;
sums continue from stored values. So each element is one chain of fused multiply-adds in order, with
the same bits for every tiling.

A panel of y is used in place, or packed so that its rows follow each other: copied, or transposed.
Elements of x are read one at a time, so its strides may be any; if many panels read them, the tiles
of a block are packed, too. Partial panels, products that are added to something, and transposed
results go through a buffer. Packed tiles, panels and the buffer are in scratch memory.
"""

from __future__ import annotations

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.codegen.function_writer import FunctionWriter
from graphflow.ops.kernels.gemm.kernel_form import (
    APART,
    COPIED,
    EXCHANGED,
    IN_PLACE,
    GemmForm,
    GemmSize,
)
from graphflow.ops.kernels.gemm.microkernel import (
    LINE,
    write_copy,
    write_exchange,
    write_finish,
    write_strip,
    write_tile,
)

_ROWS = 8
"""Rows of x that are copied to all tiles at a time."""
_APART = 64
"""Bytes between rows of x from which whole vectors of it may be read; no tile lacks so many
elements."""


def write_gemm(form: GemmForm) -> tuple[str, str]:
    """Write a kernel; returns its text after its name, and the functions that it needs."""
    heights = [form.height, *([form.height - 1] if form.height > 1 else [])]
    functions = [
        *(write_tile(form, height) for height in heights),
        write_copy(form, form.vectors),
        write_copy(form, form.registers),
        write_strip(form, form.registers, _ROWS),
        write_finish(form),
        write_exchange(form),
        _write_walk(form),
    ]
    kernel = FunctionWriter("kernel", _ARGUMENTS, form.element, form.width, inner=False)
    used = [f"tile{height}x{form.vectors}" for height in (heights[0], heights[-1])]
    used += [f"copy{form.vectors}", f"copy{form.registers}", f"strip{form.registers}"]
    used.append(f"finish{form.vectors}")
    given = ", ".join(f"ptr @{form.function_name(name)}" for name in used)
    kernel.write_effect(
        f"call void @{form.function_name('walk')}"
        f"(ptr %ptrs, ptr %sizes, i64 %start, i64 %stop, {given})"
    )
    declared = dict.fromkeys(d for f in functions for d in f.declared)
    texts = dict.fromkeys(f.text() for f in functions)
    body = kernel.text().removeprefix("define void @kernel")
    return body, "\n".join([*declared, *texts])


_ARGUMENTS = ("ptr %ptrs", "ptr %sizes", "i64 %start", "i64 %stop")


def _write_walk(form: GemmForm) -> FunctionWriter:
    """Write the kernel of any form, whose functions are its arguments."""
    functions = ("tall", "short", "copy", "copy_x", "strip", "finish")
    f = FunctionWriter(
        form.function_name("walk"), [*_ARGUMENTS, *(f"ptr %{name}" for name in functions)],
        form.element, form.width,
    )  # fmt: skip
    size = {s: f.argument("%sizes", "i64", s) for s in GemmSize}
    x, y, addend = (f.argument("%ptrs", "ptr", i) for i in range(3))
    more = f.write(f"and i64 {size[GemmSize.FLAGS]}, {APART}")
    rest = f.gep("%ptrs", f.mul(more, 8 // APART))
    out, scratch = (f.argument(rest, "ptr", i) for i in (2, 3))
    apart = f.sub(*(f.write(f"ptrtoint ptr {pointer} to i64") for pointer in (addend, out)))
    tiles = size[GemmSize.TILES]
    with f.loop("%start", "%stop") as unit:
        matrix = f.write(f"udiv i64 {unit}, {tiles}")
        first = f.sub(unit, f.mul(matrix, tiles))
        some = f.minimum(f.sub("%stop", unit), size[GemmSize.BLOCK])
        last = f.minimum(f.add(first, some), tiles)
        outer = f.write(f"udiv i64 {matrix}, {size[GemmSize.INNER]}")
        inner = f.sub(matrix, f.mul(outer, size[GemmSize.INNER]))
        bases = []
        for pointer, big, small in (
            (x, GemmSize.X_OUTER, GemmSize.X_INNER),
            (y, GemmSize.Y_OUTER, GemmSize.Y_INNER),
            (out, GemmSize.OUT_OUTER, GemmSize.OUT_INNER),
        ):
            place = f.gep(pointer, f.mul(outer, size[big]))
            bases.append(f.gep(place, f.mul(inner, size[small])))
        _BlockWriter(
            f, f"@{form.function_name('exchange')}", size, first, last, scratch, apart
        ).write(*bases)
        f.set_loop_step(unit, f.sub(last, first))
    return f


@dataclass(frozen=True)
class _Panel:
    """Some columns of the result.

    Attributes:
        out: address of the columns.
        columns: how many there are.
        whole: whether they fill a panel.
        direct: whether tiles are stored there at once.
        target, width: address, and bytes between rows, where tiles are stored.
    """

    out: str
    columns: str
    whole: str
    direct: str
    target: str
    width: str


class _BlockWriter:
    """Writes the computation of some tiles of one matrix.

    Loops nest in this order: groups of panels, chunks of k, panels of a group, tiles.

    Args:
        exchange: name of the function that transposes.
        size: of the product, by index in the table.
        first, last: the tiles, the last one excluded.
        scratch: scratch memory.
        apart: bytes from `out` to the addend.
    """

    def __init__(
        self, f: FunctionWriter, exchange: str, size: dict[GemmSize, str], first: str, last: str,
        scratch: str, apart: str,
    ) -> None:  # fmt: skip
        self.f, self.size = f, size
        self.exchange = exchange
        self.apart = apart
        self.first, self.last = first, last
        self.start = self._first_row(first)
        self.wide = f.mul(size[GemmSize.PANEL_COLUMNS], f.bytes)
        self.step = f.mul(size[GemmSize.HEIGHT], f.bytes)
        self.packed = scratch
        self.panel = f.gep(scratch, size[GemmSize.PANEL])
        self.buffer = f.gep(scratch, size[GemmSize.BUFFER])
        self.is_packed = f.compare("ne", size[GemmSize.X_LAYOUT], IN_PLACE)
        # A vector more, since the last row of a tile is copied in whole vectors.
        self.tile_bytes = f.add(f.mul(size[GemmSize.K], self.step), f.width * f.bytes)

    def _first_row(self, tile: str) -> str:
        """Return the first row of a tile."""
        tall = self.f.minimum(tile, self.size[GemmSize.TALL])
        height = self.size[GemmSize.HEIGHT]
        return self.f.sub(self.f.mul(tile, height), self.f.sub(tile, tall))

    def _call(self, function: str, *arguments: tuple[str, str | int]) -> None:
        given = ", ".join(f"{kind} {value}" for kind, value in arguments)
        self.f.write_effect(f"call void {function}({given})")

    def _not(self, condition: str) -> str:
        return self.f.write(f"xor i1 {condition}, true")

    def write(self, x: str, y: str, out: str) -> None:
        f, size = self.f, self.size
        accumulate, transposed = (
            f.write(f"trunc i64 {f.write(f'lshr i64 {size[GemmSize.FLAGS]}, {bit}')} to i1")
            for bit in range(2)
        )
        straight = self._not(f.write(f"or i1 {accumulate}, {transposed}"))
        x = f.gep(x, f.mul(self.start, size[GemmSize.X_ROW]))
        with f.when(self.is_packed):
            self._pack(x)
        out = f.gep(out, f.mul(self.start, size[GemmSize.OUT_ROW]))
        most = size[GemmSize.PANEL_COLUMNS]
        some = f.compare("sgt", size[GemmSize.K], 0)
        end = f.select(some, "i64", size[GemmSize.K], "1")  # for k = 0, zeros are stored
        with f.loop(0, size[GemmSize.COLUMNS], size[GemmSize.GROUP]) as start:
            stop = f.minimum(f.add(start, size[GemmSize.GROUP]), size[GemmSize.COLUMNS])
            with f.loop(0, end, size[GemmSize.CHUNK]) as k, f.loop(start, stop, most) as j:
                panel = self._panel(out, j, stop, straight)
                terms = f.minimum(f.sub(size[GemmSize.K], k), size[GemmSize.CHUNK])
                self._chunk(
                    x, y, k, terms, j, panel, self._next_panel(y, k, terms, end, j, start, stop)
                )
            before = f.mul(f.write(f"udiv i64 {f.sub(f.sub(stop, start), '1')}, {most}"), most)
            panel = self._panel(out, f.add(start, before), stop, straight)
            with f.when(self._not(panel.direct)):
                self._flush(panel.out, panel.columns, accumulate, transposed)

    def _panel(self, out: str, j: str, stop: str, straight: str) -> _Panel:
        """Return where the panel that begins at column j goes.

        Only the last panel of a group may go through the buffer.
        """
        f, size = self.f, self.size
        columns = f.minimum(f.sub(stop, j), size[GemmSize.PANEL_COLUMNS])
        whole = f.compare("eq", columns, size[GemmSize.PANEL_COLUMNS])
        here = f.gep(out, f.mul(j, size[GemmSize.OUT_COLUMN]))
        direct = f.write(f"and i1 {whole}, {straight}")
        target = f.select(direct, "ptr", here, self.buffer)
        width = f.select(direct, "i64", size[GemmSize.OUT_ROW], self.wide)
        return _Panel(here, columns, whole, direct, target, width)

    def _pack(self, x: str) -> None:
        """Pack the tiles' rows of x, each tile column by column."""
        f, size, step = self.f, self.size, self.step
        by_columns = f.compare("eq", size[GemmSize.X_LAYOUT], COPIED)
        # Some rows of x at a time, whose elements for all tiles are neighbours. Elements behind
        # a tile are of its row or the next one, except behind the last row.
        apart = f.compare("sge", size[GemmSize.X_K], _APART)
        quick = f.select(f.write(f"and i1 {by_columns}, {apart}"), "i64", str(-_ROWS), "0")
        quick = f.write(f"and i64 {f.sub(size[GemmSize.K], '1')}, {quick}")
        with f.loop(0, quick, _ROWS) as k, f.loop(self.first, self.last) as tile:
            source, target = self._packing_addresses(x, k, tile)
            self._call(
                "%strip",
                ("ptr", source),
                ("i64", size[GemmSize.X_K]),
                ("ptr", target),
                ("i64", step),
            )
        some = f.select(by_columns, "i64", str(_ROWS), size[GemmSize.K])
        with f.loop(quick, size[GemmSize.K], some) as k, f.loop(self.first, self.last) as tile:
            row = f.sub(self._first_row(tile), self.start)
            rows = f.sub(f.sub(self._first_row(f.add(tile, 1)), self.start), row)
            terms = f.minimum(f.sub(size[GemmSize.K], k), some)
            source, target = self._packing_addresses(x, k, tile)
            with f.when(by_columns):
                self._call(
                    "%copy_x", ("ptr", source), ("i64", size[GemmSize.X_K]), ("ptr", target),
                    ("i64", step), ("i64", terms), ("i64", rows),
                )  # fmt: skip
            with f.when(self._not(by_columns)):
                self._call(
                    self.exchange, ("ptr", source), ("i64", size[GemmSize.X_ROW]), ("ptr", target),
                    ("i64", step), ("i64", rows), ("i64", terms), ("i1", "false"), ("i64", 0),
                )  # fmt: skip

    def _packing_addresses(self, x: str, k: str, tile: str) -> tuple[str, str]:
        """Return where a tile's terms from k on are, and where they are packed."""
        f, size = self.f, self.size
        row = f.sub(self._first_row(tile), self.start)
        source = f.gep(f.gep(x, f.mul(row, size[GemmSize.X_ROW])), f.mul(k, size[GemmSize.X_K]))
        target = f.gep(self.packed, f.mul(f.sub(tile, self.first), self.tile_bytes))
        return source, f.gep(target, f.mul(k, self.step))

    def _next_panel(
        self, y: str, k: str, terms: str, end: str, j: str, start: str, stop: str
    ) -> str:  # fmt: skip
        """Return the address that is read after this chunk of a panel.

        It is the next panel's, the next chunk of the group's first panel, or the next group's.
        """
        f, size = self.f, self.size
        after = f.add(k, terms)
        beside = f.add(j, size[GemmSize.PANEL_COLUMNS])
        inside = f.compare("slt", beside, stop)
        last = f.compare("sge", after, end)
        row = f.select(inside, "i64", k, f.select(last, "i64", "0", after))
        column = f.select(inside, "i64", beside, f.select(last, "i64", stop, start))
        return f.gep(
            f.gep(y, f.mul(row, size[GemmSize.Y_K])), f.mul(column, size[GemmSize.Y_COLUMN])
        )

    def _chunk(self, x: str, y: str, k: str, terms: str, j: str, panel: _Panel, after: str) -> None:
        f, size = self.f, self.size
        y = f.gep(y, f.mul(j, size[GemmSize.Y_COLUMN]))
        exchanged = f.compare("eq", size[GemmSize.Y_LAYOUT], EXCHANGED)
        copied = f.compare("eq", size[GemmSize.Y_LAYOUT], COPIED)
        either = f.write(f"or i1 {copied}, {self._not(panel.whole)}")
        moved = f.write(f"or i1 {exchanged}, {either}")
        here = f.gep(y, f.mul(k, size[GemmSize.Y_K]))
        # Transposing writes only the columns that exist. Zeros come before it: what was left in the
        # other lanes might be denormal, and would make each of their products slow.
        with f.when(either):
            self._call(
                "%copy", ("ptr", here), ("i64", size[GemmSize.Y_K]),
                ("ptr", self.panel), ("i64", self.wide), ("i64", terms),
                ("i64", f.select(exchanged, "i64", "0", panel.columns)),
            )  # fmt: skip
        with f.when(exchanged):
            self._call(
                self.exchange, ("ptr", here), ("i64", size[GemmSize.Y_COLUMN]),
                ("ptr", self.panel), ("i64", self.wide), ("i64", panel.columns), ("i64", terms),
                ("i1", "false"), ("i64", 0),
            )  # fmt: skip
        source = f.select(moved, "ptr", self.panel, here)
        step = f.select(moved, "i64", self.wide, size[GemmSize.Y_K])
        # Prefetch the next panel meanwhile, a line for each term and tile, with as many tiles as a
        # row of the panel has lines; the other tiles prefetch what the next tile reads.
        beside = f.gep(y, f.mul(size[GemmSize.Y_COLUMN], size[GemmSize.PANEL_COLUMNS]))
        ahead = f.select(exchanged, "ptr", f.gep(beside, f.mul(k, LINE)), after)
        far = f.select(exchanged, "i64", str(LINE), size[GemmSize.Y_K])
        more = f.select(exchanged, "i64", f.mul(size[GemmSize.K], LINE), str(LINE))
        self._tiles(x, k, source, step, panel.target, panel.width, terms, (ahead, far, more))

    def _tiles(
        self, x: str, k: str, y: str, step: str, target: str, width: str, terms: str,
        ahead: tuple[str, str, str],
    ) -> None:  # fmt: skip
        f, size = self.f, self.size
        step_x = f.select(self.is_packed, "i64", self.step, size[GemmSize.X_K])
        row_x = f.select(self.is_packed, "i64", str(f.bytes), size[GemmSize.X_ROW])
        base = f.gep(f.select(self.is_packed, "ptr", self.packed, x), f.mul(k, step_x))
        later = f.compare("ne", k, 0)
        # Tiles prefetch at the pace at which the data will be read.
        by_rows = f.compare("eq", step_x, f.bytes)
        pace = f.select(by_rows, "i64", self.step, step_x)
        with f.loop(self.first, self.last) as tile:
            number = f.sub(tile, self.first)
            row = f.sub(self._first_row(tile), self.start)
            place, beside = (self._tile_offset(each, row_x) for each in (tile, f.add(tile, 1)))
            wanted = f.compare("slt", f.mul(number, LINE), self.wide)
            line = f.gep(ahead[0], f.mul(number, ahead[2]))
            given: list[tuple[str, str | int]] = [
                ("ptr", f.gep(base, place)), ("i64", row_x), ("i64", step_x), ("ptr", y),
                ("i64", step), ("ptr", f.gep(target, f.mul(row, width))), ("i64", width),
                ("i64", terms), ("i1", later),
                ("ptr", f.select(wanted, "ptr", line, f.gep(base, beside))),
                ("i64", f.select(wanted, "i64", ahead[1], pace)),
            ]  # fmt: skip
            tall = f.compare("slt", tile, size[GemmSize.TALL])
            self._call(f.select(tall, "ptr", "%tall", "%short"), *given)

    def _tile_offset(self, tile: str, row_x: str) -> str:
        """Return the bytes from the first tile's x to that of another, packed or in place."""
        f = self.f
        packed = f.mul(f.sub(tile, self.first), self.tile_bytes)
        here = f.mul(f.sub(self._first_row(tile), self.start), row_x)
        return f.select(self.is_packed, "i64", packed, here)

    def _flush(self, out: str, columns: str, accumulate: str, transposed: str) -> None:
        """Move the buffer to the result."""
        f, size = self.f, self.size
        rows = f.sub(self._first_row(self.last), self.start)
        with f.when(transposed):
            self._call(
                self.exchange,
                ("ptr", self.buffer),
                ("i64", self.wide),
                ("ptr", out),
                ("i64", size[GemmSize.OUT_COLUMN]),
                ("i64", rows),
                ("i64", columns),
                ("i1", accumulate),
                ("i64", self.apart),
            )
        with f.when(self._not(transposed)):
            self._call(
                "%finish", ("ptr", self.buffer), ("ptr", out), ("i64", size[GemmSize.OUT_ROW]),
                ("i64", rows), ("i64", columns), ("i1", accumulate),
                ("i64", self.apart),
            )  # fmt: skip
