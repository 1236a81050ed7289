"""The parts of matrix products in LLVM's language: a tile that stays in registers while k runs, and
what packs panels and stores what is no whole tile; `gemm_text` calls them."""

from __future__ import annotations

from collections.abc import Iterator

from graphflow.ops.kernels.blocks import Function
from graphflow.ops.kernels.gemm_form import Form

LINE = 64
"""Bytes that come closer at once."""


def tile(form: Form, height: int) -> Function:
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
    after = f.add("%line", LINE)
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


def copy(form: Form, vectors: int) -> Function:
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


def finish(form: Form) -> Function:
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


def exchange(form: Form) -> Function:
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
