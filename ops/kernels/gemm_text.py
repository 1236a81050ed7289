"""Matrix products in LLVM's language.

    void kernel(ptr* {x, y, out, scratch}, i64* sizes, i64 start, i64 stop)
    void kernel(ptr* {x, y, addend, out, scratch}, …)    # with the flag APART

A product is cut into tiles of rows of x, and these into panels of columns of y; a tile of a panel
stays in registers while k runs. The rows of all matrices of a batch are tiles one after the other;
the kernel does those from `start` to `stop`. A chunk of k at a time, so that what is read again
stays close; sums go on from what is stored. So each element is one chain of fused multiply-adds in
order, which has the same bits however the product is cut.

A panel of y is used where it is, or packed so that its rows follow each other: copied, or with rows
and columns exchanged. Elements of x are read one at a time, so its strides may be any; where many
panels read them, the tiles of a block are packed as well. Panels that are not whole, products that
are added to something, and results that are stored with rows and columns exchanged, go by way of a
buffer. Packed things and the buffer are in the scratch memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, auto

from graphflow.ops.kernels.blocks import Function

_LINE = 64
"""Bytes that come closer at once."""


class Size(IntEnum):
    """Places in the table of sizes; strides are in bytes."""

    COLUMNS = 0
    K = auto()
    TILES = auto()  # of one matrix
    HEIGHT = auto()  # rows of a tile
    PANEL_COLUMNS = auto()
    TALL = auto()  # tiles of the full height; the others, which come last, have a row less
    BLOCK = auto()
    GROUP = auto()  # columns of the panels that take a chunk of terms before the next chunk comes
    CHUNK = auto()  # terms at a time
    X_ROW = auto()
    X_K = auto()
    X_LAYOUT = auto()
    Y_K = auto()
    Y_COLUMN = auto()
    Y_LAYOUT = auto()
    OUT_ROW = auto()
    OUT_COLUMN = auto()
    FLAGS = auto()
    INNER = auto()  # matrices along the last axis of the batch
    X_OUTER = auto()
    X_INNER = auto()
    Y_OUTER = auto()
    Y_INNER = auto()
    OUT_OUTER = auto()
    OUT_INNER = auto()
    PANEL = auto()  # where it begins in the scratch memory; packed tiles come first
    BUFFER = auto()


IN_PLACE, COPIED, EXCHANGED = range(3)
"""Layouts: how tiles of x and panels of y are read."""
_ROWS = 8
"""Rows of x that are copied to all tiles at a time."""
ACCUMULATE, TRANSPOSED, APART = 1, 2, 4
"""Flags: whether the product is added to what `out` holds; whether `out` is stored by columns;
whether it is added to something else, which is stored as `out` is (and may be it)."""


@dataclass(frozen=True)
class Form:
    """What a kernel is specialised for: equal forms share one.

    Attributes:
        element: "float" or "double"; `width`: of them in a register.
        height: rows of a tile.
        vectors: registers of a row of a tile.
    """

    element: str
    width: int
    height: int
    vectors: int

    @property
    def columns(self) -> int:
        """Of a panel."""
        return self.width * self.vectors

    @property
    def registers(self) -> int:
        """That hold a column of a tile."""
        return -(-self.height // self.width)

    def named(self, function: str) -> str:
        """A function's name, which tells what it is specialised for: kernels that stand together
        have most functions in common, and these once."""
        return f"gemm_{function}_{self.element}{self.width}"


def write(form: Form) -> tuple[str, str]:
    """The kernel's text after its name, and the declarations and functions that it needs."""
    heights = [form.height, *([form.height - 1] if form.height > 1 else [])]
    functions = [
        *(_tile(form, height) for height in heights),
        _copy(form, form.vectors), _copy(form, form.registers), _finish(form), _exchange(form),
        _walk(form),
    ]  # fmt: skip
    kernel = Function("kernel", _ARGUMENTS, form.element, form.width, inner=False)
    used = [f"tile{height}x{form.vectors}" for height in (heights[0], heights[-1])]
    used += [f"copy{form.vectors}", f"copy{form.registers}", f"finish{form.vectors}"]
    given = ", ".join(f"ptr @{form.named(name)}" for name in used)
    kernel.do(
        f"call void @{form.named('walk')}(ptr %ptrs, ptr %sizes, i64 %start, i64 %stop, {given})"
    )
    declared = dict.fromkeys(d for f in functions for d in f.declared)
    texts = dict.fromkeys(f.text() for f in functions)
    body = kernel.text().removeprefix("define void @kernel")
    return body, "\n".join([*declared, *texts])


_ARGUMENTS = ("ptr %ptrs", "ptr %sizes", "i64 %start", "i64 %stop")


# A tile ---------------------------------------------------------------------------------------


def _tile(form: Form, height: int) -> Function:
    """Rows of x times a panel of y, in registers, going on from what is in `out` or from zero. For
    each term, a line of what is needed next is brought closer, and one of where the next tile
    goes: all lines at once, when a tile begins, would keep its loads waiting."""
    f = Function(
        form.named(f"tile{height}x{form.vectors}"),
        ["ptr %x", "i64 %row", "i64 %step", "ptr %y", "i64 %next", "ptr %out", "i64 %width",
         "i64 %k", "i1 %more", "ptr %ahead", "i64 %far"],
        form.element, form.width,
    )  # fmt: skip
    begun = _begun(f, form, height)
    # Rows are addressed in threes from one pointer, since an address is a sum of two registers.
    three = f.mul("%row", 3)
    rows = f.mul("%width", height)
    below = f.at("%out", rows)
    end = f.at(below, rows)
    # LLVM would make one chain of additions of them, if it saw how they are related.
    starts = ["%x"]
    for _ in range(1, -(-height // 3)):
        starts.append(f.write(f'call ptr asm "", "=r,0"(ptr {f.at(starts[-1], three)})'))
    f.do(f"br i1 {f.compare('sgt', '%k', 0)}, label %chain, label %done")
    f.label("chain")
    f.do(f"%below0 = phi ptr [{below}, %ready], [%below0.next, %chain]")
    f.do("%line = phi i64 [0, %ready], [%line.next, %chain]")
    pointers = [f"%x{i}" for i in range(len(starts))]
    f.do("%left = phi i64 [%k, %ready], [%left.next, %chain]")
    f.do("%y0 = phi ptr [%y, %ready], [%y0.next, %chain]")
    f.do("%ahead0 = phi ptr [%ahead, %ready], [%ahead0.next, %chain]")
    for pointer, start in zip(pointers, starts, strict=True):
        f.do(f"{pointer} = phi ptr [{start}, %ready], [{pointer}.next, %chain]")
    sums = [f.later() for _ in begun]
    f.prefetch("%ahead0", near=2)
    f.prefetch(f.at("%below0", "%line"), write=True)
    right = [f.load(f.at("%y0", v * f.width * f.bytes)) for v in range(form.vectors)]
    totals: list[str] = []
    for r in range(height):
        place = pointers[r // 3]
        if r % 3:
            place = f.at(place, "%row" if r % 3 == 1 else f.write("shl i64 %row, 1"))
        left = f.spread(place)
        totals += [f.fma(left, y, f"%s{len(totals) + v}") for v, y in enumerate(right)]
    for i, (give, first, total) in enumerate(zip(sums, begun, totals, strict=True)):
        give(f"%s{i} = phi {f.vector} [{first}, %ready], [{total}, %chain]")
    f.do("%ahead0.next = getelementptr i8, ptr %ahead0, i64 %far")
    after = f.add("%line", _LINE)
    over = f.compare("sge", after, form.columns * f.bytes)
    f.do(f"%line.next = select i1 {over}, i64 0, i64 {after}")
    row = f.select(over, "ptr", f.at("%below0", "%width"), "%below0")
    last = f.write(f"icmp eq ptr {row}, {end}")
    f.do(f"%below0.next = select i1 {last}, ptr %below0, ptr {row}")
    f.do("%y0.next = getelementptr i8, ptr %y0, i64 %next")
    for pointer in pointers:
        f.do(f"{pointer}.next = getelementptr i8, ptr {pointer}, i64 %step")
    f.do("%left.next = sub i64 %left, 1")
    f.do(f"br i1 {f.compare('ne', '%left.next', 0)}, label %chain, label %done")
    f.label("done")
    done = [
        f.write(f"phi {f.vector} [{first}, %ready], [{total}, %chain]")
        for first, total in zip(begun, totals, strict=True)
    ]
    for value, place in zip(done, _places(f, form, height), strict=True):
        f.store(value, place)
    return f


def _places(f: Function, form: Form, height: int) -> Iterator[str]:
    """Where the registers of a tile go in `out`."""
    row = "%out"
    for r in range(height):
        row = f.at(row, "%width") if r else row
        yield from (f.at(row, v * f.width * f.bytes) for v in range(form.vectors))


def _begun(f: Function, form: Form, height: int) -> list[str]:
    """The sums to go on from, in a block named `ready`."""
    f.do("br i1 %more, label %resumed, label %fresh")
    f.label("resumed")
    held = [f.load(place) for place in _places(f, form, height)]
    f.do("br label %ready")
    f.label("fresh")
    f.do("br label %ready")
    f.label("ready")
    return [f.write(f"phi {f.vector} [{x}, %resumed], [zeroinitializer, %fresh]") for x in held]


# Panels ---------------------------------------------------------------------------------------


def _copy(form: Form, vectors: int) -> Function:
    """Rows of so many vectors, of which there are some columns, in another place; beyond them there
    are zeros. Rows may overlap there: they are written in order."""
    f = Function(
        form.named(f"copy{vectors}"),
        ["ptr %from", "i64 %next", "ptr %to", "i64 %width", "i64 %k", "i64 %columns"],
        form.element, form.width,
    )  # fmt: skip
    masks = [f.first_lanes("%columns", v * f.width) for v in range(vectors)]
    with f.loop(0, "%k") as p:
        source = f.at("%from", f.mul(p, "%next"))
        target = f.at("%to", f.mul(p, "%width"))
        for v, mask in enumerate(masks):
            place = v * f.width * f.bytes
            f.store(f.masked_load(f.at(source, place), mask), f.at(target, place))
    return f


def _finish(form: Form) -> Function:
    """The columns that there are of a buffer's rows into `out`, or added to it."""
    f = Function(
        form.named(f"finish{form.vectors}"),
        ["ptr %from", "ptr %to", "i64 %next", "i64 %rows", "i64 %columns", "i1 %add",
         "i64 %apart"],
        form.element, form.width,
    )  # fmt: skip
    masks = [f.first_lanes("%columns", v * f.width) for v in range(form.vectors)]
    with f.loop(0, "%rows") as r:
        source = f.at("%from", f.mul(r, form.columns * f.bytes))
        target = f.at("%to", f.mul(r, "%next"))
        for v, mask in enumerate(masks):
            place = v * f.width * f.bytes
            value = f.load(f.at(source, place))
            to = f.at(target, place)
            with f.when("%add"):
                total = f.write(
                    f"fadd {f.vector} {f.masked_load(f.at(to, '%apart'), mask)}, {value}"
                )
                f.masked_store(total, to, mask)
            store = f.write("xor i1 %add, true")
            with f.when(store):
                f.masked_store(value, to, mask)
    return f


def _exchange(form: Form) -> Function:
    """to[j, i] = from[i, j], or added to it: squares of a register's width go through registers."""
    f = Function(
        form.named("exchange"),
        ["ptr %from", "i64 %row", "ptr %to", "i64 %next", "i64 %rows", "i64 %columns", "i1 %add",
         "i64 %apart"],
        form.element, form.width,
    )  # fmt: skip
    last = f.sub("%rows", "1")
    with f.loop(0, "%rows", f.width) as i:
        here = f.first_lanes(f.sub("%rows", i))
        old = f.write(f"select i1 %add, {f.mask} {here}, {f.mask} zeroinitializer")
        with f.loop(0, "%columns", f.width) as j:
            left = f.sub("%columns", j)
            seen = f.first_lanes(left)
            rows = []
            for lane in range(f.width):
                row = f.least(f.add(i, lane), last)  # what is beyond is not stored
                place = f.at(f.at("%from", f.mul(row, "%row")), f.mul(j, f.bytes))
                rows.append(f.masked_load(place, seen))
            target = f.at(f.at("%to", f.mul(i, f.bytes)), f.mul(j, "%next"))
            for lane, value in enumerate(_exchanged(f, rows)):
                with f.when(f.compare("sgt", left, lane)):
                    to = f.at(target, f.mul("%next", lane))
                    held = f.masked_load(f.at(to, "%apart"), old)
                    total = f.write(f"fadd {f.vector} {held}, {value}")
                    f.masked_store(f.select("%add", f.vector, total, value), to, here)
    return f


def _exchanged(f: Function, rows: list[str]) -> list[str]:
    """A square of registers with rows and columns exchanged: squares within squares change
    places."""
    rows, lanes, side = list(rows), range(f.width), 1
    while side < f.width:
        for i in lanes:
            if not i & side:
                a, b = rows[i], rows[i + side]
                low = [f.width + n - side if n & side else n for n in lanes]
                high = [f.width + n if n & side else n + side for n in lanes]
                rows[i], rows[i + side] = f.shuffle(a, b, low), f.shuffle(a, b, high)
        side *= 2
    return rows


# The whole ------------------------------------------------------------------------------------


def _walk(form: Form) -> Function:
    """The kernel of any form, whose functions it is given."""
    functions = ("tall", "short", "copy", "copy_x", "finish")
    f = Function(
        form.named("walk"), [*_ARGUMENTS, *(f"ptr %{name}" for name in functions)],
        form.element, form.width,
    )  # fmt: skip
    size = {s: f.argument("%sizes", "i64", s) for s in Size}
    x, y, addend = (f.argument("%ptrs", "ptr", i) for i in range(3))
    more = f.write(f"and i64 {size[Size.FLAGS]}, {APART}")
    rest = f.at("%ptrs", f.mul(more, 8 // APART))
    out, scratch = (f.argument(rest, "ptr", i) for i in (2, 3))
    apart = f.sub(*(f.write(f"ptrtoint ptr {pointer} to i64") for pointer in (addend, out)))
    tiles = size[Size.TILES]
    with f.loop("%start", "%stop") as unit:
        matrix = f.write(f"udiv i64 {unit}, {tiles}")
        first = f.sub(unit, f.mul(matrix, tiles))
        some = f.least(f.sub("%stop", unit), size[Size.BLOCK])
        last = f.least(f.add(first, some), tiles)
        outer = f.write(f"udiv i64 {matrix}, {size[Size.INNER]}")
        inner = f.sub(matrix, f.mul(outer, size[Size.INNER]))
        bases = []
        for pointer, big, small in (
            (x, Size.X_OUTER, Size.X_INNER),
            (y, Size.Y_OUTER, Size.Y_INNER),
            (out, Size.OUT_OUTER, Size.OUT_INNER),
        ):
            place = f.at(pointer, f.mul(outer, size[big]))
            bases.append(f.at(place, f.mul(inner, size[small])))
        _Block(f, f"@{form.named('exchange')}", size, first, last, scratch, apart).write(*bases)
        f.advance(unit, f.sub(last, first))
    return f


@dataclass(frozen=True)
class _Panel:
    """Some columns of the result: where they belong, how many there are, whether as many as a panel
    has, whether tiles are stored there at once, or else where, and how far rows are apart there."""

    out: str
    columns: str
    whole: str
    direct: str
    target: str
    width: str


class _Block:
    """Writes what computes some tiles of one matrix: group of panels after group, of a group chunk
    after chunk, of a chunk panel after panel, of these tile after tile.

    Args:
        exchange: the function of that name.
        size: of the product, by place in the table.
        first, last: the tiles, the last excluded.
        scratch: memory.
        apart: bytes from `out` to what is added.
    """

    def __init__(
        self, f: Function, exchange: str, size: dict[Size, str], first: str, last: str,
        scratch: str, apart: str,
    ) -> None:  # fmt: skip
        self.f, self.size = f, size
        self.exchange = exchange
        self.apart = apart
        self.first, self.last = first, last
        self.start = self._row(first)
        self.wide = f.mul(size[Size.PANEL_COLUMNS], f.bytes)
        self.step = f.mul(size[Size.HEIGHT], f.bytes)
        self.packed = scratch
        self.panel = f.at(scratch, size[Size.PANEL])
        self.buffer = f.at(scratch, size[Size.BUFFER])
        self.is_packed = f.compare("ne", size[Size.X_LAYOUT], IN_PLACE)
        # A vector more, for the last row of a tile is copied in whole vectors.
        self.tile_bytes = f.add(f.mul(size[Size.K], self.step), f.width * f.bytes)

    def _row(self, tile: str) -> str:
        """The first row of a tile."""
        tall = self.f.least(tile, self.size[Size.TALL])
        height = self.size[Size.HEIGHT]
        return self.f.sub(self.f.mul(tile, height), self.f.sub(tile, tall))

    def _call(self, function: str, *arguments: tuple[str, str | int]) -> None:
        given = ", ".join(f"{kind} {value}" for kind, value in arguments)
        self.f.do(f"call void {function}({given})")

    def _not(self, condition: str) -> str:
        return self.f.write(f"xor i1 {condition}, true")

    def write(self, x: str, y: str, out: str) -> None:
        f, size = self.f, self.size
        accumulate, transposed = (
            f.write(f"trunc i64 {f.write(f'lshr i64 {size[Size.FLAGS]}, {bit}')} to i1")
            for bit in range(2)
        )
        straight = self._not(f.write(f"or i1 {accumulate}, {transposed}"))
        x = f.at(x, f.mul(self.start, size[Size.X_ROW]))
        with f.when(self.is_packed):
            self._pack(x)
        out = f.at(out, f.mul(self.start, size[Size.OUT_ROW]))
        most = size[Size.PANEL_COLUMNS]
        some = f.compare("sgt", size[Size.K], 0)
        end = f.select(some, "i64", size[Size.K], "1")  # sums of nothing are stored as well
        with f.loop(0, size[Size.COLUMNS], size[Size.GROUP]) as start:
            stop = f.least(f.add(start, size[Size.GROUP]), size[Size.COLUMNS])
            with f.loop(0, end, size[Size.CHUNK]) as k, f.loop(start, stop, most) as j:
                panel = self._panel(out, j, stop, straight)
                terms = f.least(f.sub(size[Size.K], k), size[Size.CHUNK])
                self._chunk(x, y, k, terms, j, panel, self._next(y, k, terms, end, j, start, stop))
            before = f.mul(f.write(f"udiv i64 {f.sub(f.sub(stop, start), '1')}, {most}"), most)
            panel = self._panel(out, f.add(start, before), stop, straight)
            with f.when(self._not(panel.direct)):
                self._flush(panel.out, panel.columns, accumulate, transposed)

    def _panel(self, out: str, j: str, stop: str, straight: str) -> _Panel:
        """Where the panel that begins at a column goes. Of the panels of a group, the last one
        alone may go by way of the buffer."""
        f, size = self.f, self.size
        columns = f.least(f.sub(stop, j), size[Size.PANEL_COLUMNS])
        whole = f.compare("eq", columns, size[Size.PANEL_COLUMNS])
        here = f.at(out, f.mul(j, size[Size.OUT_COLUMN]))
        direct = f.write(f"and i1 {whole}, {straight}")
        target = f.select(direct, "ptr", here, self.buffer)
        width = f.select(direct, "i64", size[Size.OUT_ROW], self.wide)
        return _Panel(here, columns, whole, direct, target, width)

    def _pack(self, x: str) -> None:
        """The tiles' rows of x, each tile's columns one after the other."""
        f, size, step = self.f, self.size, self.step
        by_columns = f.compare("eq", size[Size.X_LAYOUT], COPIED)
        # Some rows of x at a time, whose elements for all tiles are next to each other.
        some = f.select(by_columns, "i64", str(_ROWS), size[Size.K])
        with f.loop(0, size[Size.K], some) as k, f.loop(self.first, self.last) as tile:
            row = f.sub(self._row(tile), self.start)
            rows = f.sub(f.sub(self._row(f.add(tile, 1)), self.start), row)
            terms = f.least(f.sub(size[Size.K], k), some)
            source = f.at(f.at(x, f.mul(row, size[Size.X_ROW])), f.mul(k, size[Size.X_K]))
            target = f.at(self.packed, f.mul(f.sub(tile, self.first), self.tile_bytes))
            target = f.at(target, f.mul(k, step))
            with f.when(by_columns):
                self._call(
                    "%copy_x", ("ptr", source), ("i64", size[Size.X_K]), ("ptr", target),
                    ("i64", step), ("i64", terms), ("i64", rows),
                )  # fmt: skip
            with f.when(self._not(by_columns)):
                self._call(
                    self.exchange, ("ptr", source), ("i64", size[Size.X_ROW]), ("ptr", target),
                    ("i64", step), ("i64", rows), ("i64", terms), ("i1", "false"), ("i64", 0),
                )  # fmt: skip

    def _next(
        self, y: str, k: str, terms: str, end: str, j: str, start: str, stop: str
    ) -> str:  # fmt: skip
        """What is read after a chunk of a panel: that of the next panel, the next chunk of the
        group's first one, or the next group."""
        f, size = self.f, self.size
        after = f.add(k, terms)
        beside = f.add(j, size[Size.PANEL_COLUMNS])
        inside = f.compare("slt", beside, stop)
        last = f.compare("sge", after, end)
        row = f.select(inside, "i64", k, f.select(last, "i64", "0", after))
        column = f.select(inside, "i64", beside, f.select(last, "i64", stop, start))
        return f.at(f.at(y, f.mul(row, size[Size.Y_K])), f.mul(column, size[Size.Y_COLUMN]))

    def _chunk(self, x: str, y: str, k: str, terms: str, j: str, panel: _Panel, after: str) -> None:
        f, size = self.f, self.size
        y = f.at(y, f.mul(j, size[Size.Y_COLUMN]))
        exchanged = f.compare("eq", size[Size.Y_LAYOUT], EXCHANGED)
        copied = f.compare("eq", size[Size.Y_LAYOUT], COPIED)
        either = f.write(f"or i1 {copied}, {self._not(panel.whole)}")
        moved = f.write(f"or i1 {exchanged}, {either}")
        here = f.at(y, f.mul(k, size[Size.Y_K]))
        with f.when(exchanged):
            self._call(
                self.exchange, ("ptr", here), ("i64", size[Size.Y_COLUMN]),
                ("ptr", self.panel), ("i64", self.wide), ("i64", panel.columns), ("i64", terms),
                ("i1", "false"), ("i64", 0),
            )  # fmt: skip
        with f.when(f.write(f"xor i1 {moved}, {exchanged}")):
            self._call(
                "%copy", ("ptr", here), ("i64", size[Size.Y_K]),
                ("ptr", self.panel), ("i64", self.wide), ("i64", terms), ("i64", panel.columns),
            )  # fmt: skip
        source = f.select(moved, "ptr", self.panel, here)
        step = f.select(moved, "i64", self.wide, size[Size.Y_K])
        # What comes next is brought closer meanwhile, a line for each term and tile.
        beside = f.at(y, f.mul(size[Size.Y_COLUMN], size[Size.PANEL_COLUMNS]))
        ahead = f.select(exchanged, "ptr", f.at(beside, f.mul(k, _LINE)), after)
        far = f.select(exchanged, "i64", str(_LINE), size[Size.Y_K])
        more = f.select(exchanged, "i64", f.mul(size[Size.K], _LINE), str(_LINE))
        self._tiles(x, k, source, step, panel.target, panel.width, terms, (ahead, far, more))

    def _tiles(
        self, x: str, k: str, y: str, step: str, target: str, width: str, terms: str,
        ahead: tuple[str, str, str],
    ) -> None:  # fmt: skip
        f, size = self.f, self.size
        step_x = f.select(self.is_packed, "i64", self.step, size[Size.X_K])
        row_x = f.select(self.is_packed, "i64", str(f.bytes), size[Size.X_ROW])
        base = f.at(f.select(self.is_packed, "ptr", self.packed, x), f.mul(k, step_x))
        later = f.compare("ne", k, 0)
        with f.loop(self.first, self.last) as tile:
            row = f.sub(self._row(tile), self.start)
            packed = f.mul(f.sub(tile, self.first), self.tile_bytes)
            place = f.select(self.is_packed, "i64", packed, f.mul(row, row_x))
            number = f.sub(tile, self.first)
            wanted = f.compare("slt", f.mul(number, _LINE), self.wide)
            line = f.at(ahead[0], f.mul(number, ahead[2]))
            given: list[tuple[str, str | int]] = [
                ("ptr", f.at(base, place)), ("i64", row_x), ("i64", step_x), ("ptr", y),
                ("i64", step), ("ptr", f.at(target, f.mul(row, width))), ("i64", width),
                ("i64", terms), ("i1", later), ("ptr", f.select(wanted, "ptr", line, y)),
                ("i64", f.select(wanted, "i64", ahead[1], "0")),
            ]  # fmt: skip
            tall = f.compare("slt", tile, size[Size.TALL])
            self._call(f.select(tall, "ptr", "%tall", "%short"), *given)

    def _flush(self, out: str, columns: str, accumulate: str, transposed: str) -> None:
        """What the buffer holds, to where it belongs."""
        f, size = self.f, self.size
        rows = f.sub(self._row(self.last), self.start)
        with f.when(transposed):
            self._call(
                self.exchange, ("ptr", self.buffer), ("i64", self.wide), ("ptr", out),
                ("i64", size[Size.OUT_COLUMN]), ("i64", rows), ("i64", columns), ("i1", accumulate),
                ("i64", self.apart),
            )  # fmt: skip
        with f.when(self._not(transposed)):
            self._call(
                "%finish", ("ptr", self.buffer), ("ptr", out), ("i64", size[Size.OUT_ROW]),
                ("i64", rows), ("i64", columns), ("i1", accumulate),
                ("i64", self.apart),
            )  # fmt: skip
