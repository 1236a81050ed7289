"""The functions of matrix products in LLVM IR: register tiles, packing, and partial results.

`macrokernel.py` calls them.
"""

from __future__ import annotations

from collections.abc import Iterator

from graphflow.ops.kernels.codegen.function_writer import FunctionWriter
from graphflow.ops.kernels.codegen.vector_writer import transpose_registers
from graphflow.ops.kernels.gemm.kernel_form import GemmForm

LINE = 64
"""Bytes of a cache line."""
_NARROW, _TERMS = 32, 4
"""Registers of up to this many bytes take `_TERMS` terms in a loop turn. The twelve multiply-adds
of a term, as many as 16 such registers allow, end before the loop's own instructions do."""


def write_tile(form: GemmForm, height: int) -> FunctionWriter:
    """Write the product of rows of x by a panel of y, in registers.

    It continues from `out`, or from zero. For each term a line of the next data is prefetched, and
    now and then a line of the next tile's result. Prefetching all lines at the start of a tile
    would delay its loads.
    """
    f = FunctionWriter(
        form.function_name(f"tile{height}x{form.vectors}"),
        ["ptr %x", "i64 %row", "i64 %step", "ptr %y", "i64 %next", "ptr %out", "i64 %width",
         "i64 %k", "i1 %more", "ptr %ahead", "i64 %far"],
        form.element, form.width,
    )  # fmt: skip
    begun = _load_sums(f, form, height)
    # Three rows share a pointer, since an address is a sum of two registers.
    three = f.mul("%row", 3)
    rows = f.mul("%width", height)
    below = f.gep("%out", rows)
    end = f.gep(below, rows)
    starts = ["%x"]
    for _ in range(1, -(-height // 3)):
        starts.append(_hide_pointer(f, f.gep(starts[-1], three)))
    state = ["%k", "0", below, "%y", "%ahead", *starts, *begun]
    before = "ready"
    for terms in (_TERMS, 1) if form.width * f.bytes <= _NARROW else (1,):
        state = _write_terms(f, form, height, state, before, end, terms)
        before = f"after{terms}"
    for value, place in zip(state[-len(begun) :], _out_addresses(f, form, height), strict=True):
        f.store(value, place)
    return f


def _hide_pointer(f: FunctionWriter, pointer: str) -> str:
    """Hide a pointer's origin from LLVM.

    LLVM would otherwise derive pointers from each other, in a chain of additions or in more
    registers than there are.
    """
    return f.write(f'call ptr asm "", "=r,0"(ptr {pointer})')


def _write_terms(
    f: FunctionWriter,
    form: GemmForm,
    height: int,
    state: list[str],
    before: str,
    end: str,
    terms: int,
) -> list[str]:
    """Write a loop over `terms` terms a turn, as long as that many are left.

    Args:
        state: terms left, prefetched bytes of a row of the next tile, that row, a row of y, the
            address to prefetch, a column of x for every three rows, and the sums.
        before: the block that comes before.
        end: address where the next tile ends.

    Returns:
        The state afterwards, in the block `after…`.
    """
    pointers = 3 + -(-height // 3)
    kinds = ["i64", "i64", *["ptr"] * pointers, *[f.vector] * (len(state) - 2 - pointers)]
    enough = f.compare("sge", state[0], terms)
    f.write_effect(f"br i1 {enough}, label %chain{terms}, label %after{terms}")
    f.start_block(f"chain{terms}")
    names = [f.name() for _ in state]
    opening = [f.reserve_line() for _ in state]
    left, line, below, y, ahead, *places = names[: 2 + pointers]
    totals = names[2 + pointers :]
    f.prefetch(f.gep(below, line), write=True)
    for _ in range(terms):
        f.prefetch(ahead, near=2)
        right = [f.load(f.gep(y, v * f.width * f.bytes)) for v in range(form.vectors)]
        sums = iter(totals)
        totals = []
        for r in range(height):
            place = places[r // 3]
            if r % 3:
                place = f.gep(place, "%row" if r % 3 == 1 else f.write("shl i64 %row, 1"))
            element = f.broadcast(place)
            totals += [f.fma(element, each, next(sums)) for each in right]
        ahead, y = f.gep(ahead, "%far"), f.gep(y, "%next")
        places = [f.gep(place, "%step") for place in places]
        if terms > 1:  # else LLVM would hoist the loads of all terms, with an address each
            f.write_effect('call void asm sideeffect "", "~{memory}"()')
            y, *places = (_hide_pointer(f, pointer) for pointer in (y, *places))
    after = f.add(line, LINE)
    over = f.compare("sge", after, form.columns * f.bytes)
    line = f.select(over, "i64", "0", after)
    row = f.select(over, "ptr", f.gep(below, "%width"), below)
    last = f.write(f"icmp eq ptr {row}, {end}")
    below = f.select(last, "ptr", below, row)
    left = f.sub(left, str(terms))
    latest = [left, line, below, y, ahead, *places, *totals]
    again = f.compare("sge", left, terms)
    f.write_effect(f"br i1 {again}, label %chain{terms}, label %after{terms}")
    for give, name, kind, first, value in zip(opening, names, kinds, state, latest, strict=True):
        give(f"{name} = phi {kind} [{first}, %{before}], [{value}, %chain{terms}]")
    f.start_block(f"after{terms}")
    return [
        f.write(f"phi {kind} [{first}, %{before}], [{value}, %chain{terms}]")
        for kind, first, value in zip(kinds, state, latest, strict=True)
    ]


def _out_addresses(f: FunctionWriter, form: GemmForm, height: int) -> Iterator[str]:
    """Yield the addresses in `out` of a tile's registers."""
    row = "%out"
    for r in range(height):
        row = f.gep(row, "%width") if r else row
        yield from (f.gep(row, v * f.width * f.bytes) for v in range(form.vectors))


def _load_sums(f: FunctionWriter, form: GemmForm, height: int) -> list[str]:
    """Load the sums to continue from, in a block named `ready`."""
    f.write_effect("br i1 %more, label %resumed, label %fresh")
    f.start_block("resumed")
    held = [f.load(place) for place in _out_addresses(f, form, height)]
    f.write_effect("br label %ready")
    f.start_block("fresh")
    f.write_effect("br label %ready")
    f.start_block("ready")
    return [f.write(f"phi {f.vector} [{x}, %resumed], [zeroinitializer, %fresh]") for x in held]


# Panels ---------------------------------------------------------------------------------------


def write_copy(form: GemmForm, vectors: int) -> FunctionWriter:
    """Write a copy of rows of `vectors` vectors, with zeros beyond the columns.

    Rows may overlap in the target: they are written in order.
    """
    f = FunctionWriter(
        form.function_name(f"copy{vectors}"),
        ["ptr %from", "i64 %next", "ptr %to", "i64 %width", "i64 %k", "i64 %columns"],
        form.element, form.width,
    )  # fmt: skip
    masks = [f.first_lanes("%columns", v * f.width) for v in range(vectors)]
    with f.loop(0, "%k") as p:
        source = f.gep("%from", f.mul(p, "%next"))
        target = f.gep("%to", f.mul(p, "%width"))
        for v, mask in enumerate(masks):
            place = v * f.width * f.bytes
            f.store(f.masked_load(f.gep(source, place), mask), f.gep(target, place))
    return f


def write_strip(form: GemmForm, vectors: int, rows: int) -> FunctionWriter:
    """Write a copy of `rows` rows of whole vectors, and prefetch as many further down.

    Later rows overwrite the excess of earlier ones.
    """
    f = FunctionWriter(
        form.function_name(f"strip{vectors}"), ["ptr %from", "i64 %next", "ptr %to", "i64 %width"],
        form.element, form.width,
    )  # fmt: skip
    source, target = "%from", "%to"
    below = f.mul("%next", rows)
    for _ in range(rows):
        f.prefetch(f.gep(source, below))
        for v in range(vectors):
            place = v * form.width * f.bytes
            f.store(f.load(f.gep(source, place)), f.gep(target, place))
        source, target = f.gep(source, "%next"), f.gep(target, "%width")
    return f


def write_finish(form: GemmForm) -> FunctionWriter:
    """Write a buffer's rows to `out`, or add them to it, without columns that do not exist."""
    f = FunctionWriter(
        form.function_name(f"finish{form.vectors}"),
        ["ptr %from", "ptr %to", "i64 %next", "i64 %rows", "i64 %columns", "i1 %add",
         "i64 %apart"],
        form.element, form.width,
    )  # fmt: skip
    masks = [f.first_lanes("%columns", v * f.width) for v in range(form.vectors)]
    wholes = [f.compare("sge", "%columns", (v + 1) * f.width) for v in range(form.vectors)]
    with f.loop(0, "%rows") as r:
        source = f.gep("%from", f.mul(r, form.columns * f.bytes))
        target = f.gep("%to", f.mul(r, "%next"))
        for v, (mask, whole) in enumerate(zip(masks, wholes, strict=True)):
            place = v * f.width * f.bytes
            value = f.load(f.gep(source, place))
            to = f.gep(target, place)
            with f.when("%add"):
                total = f.write(
                    f"fadd {f.vector} {f.masked_load(f.gep(to, '%apart'), mask)}, {value}"
                )
                f.store_lanes(total, to, mask, whole)
            store = f.write("xor i1 %add, true")
            with f.when(store):
                f.store_lanes(value, to, mask, whole)
    return f


def write_exchange(form: GemmForm) -> FunctionWriter:
    """Write to[j, i] = from[i, j], or its sum, by squares of registers."""
    f = FunctionWriter(
        form.function_name("exchange"),
        ["ptr %from", "i64 %row", "ptr %to", "i64 %next", "i64 %rows", "i64 %columns", "i1 %add",
         "i64 %apart"],
        form.element, form.width,
    )  # fmt: skip
    last = f.sub("%rows", "1")
    with f.loop(0, "%rows", f.width) as i:
        below = f.sub("%rows", i)
        here, whole = f.first_lanes(below), f.compare("sge", below, f.width)
        old = f.write(f"select i1 %add, {f.mask} {here}, {f.mask} zeroinitializer")
        with f.loop(0, "%columns", f.width) as j:
            left = f.sub("%columns", j)
            seen = f.first_lanes(left)
            rows = []
            for lane in range(f.width):
                row = f.minimum(f.add(i, lane), last)  # rows beyond the last are not stored
                place = f.gep(f.gep("%from", f.mul(row, "%row")), f.mul(j, f.bytes))
                rows.append(f.masked_load(place, seen))
            target = f.gep(f.gep("%to", f.mul(i, f.bytes)), f.mul(j, "%next"))
            for lane, value in enumerate(transpose_registers(rows, f.shuffle)):
                with f.when(f.compare("sgt", left, lane)):
                    to = f.gep(target, f.mul("%next", lane))
                    held = f.masked_load(f.gep(to, "%apart"), old)
                    total = f.write(f"fadd {f.vector} {held}, {value}")
                    f.store_lanes(f.select("%add", f.vector, total, value), to, here, whole)
    return f
