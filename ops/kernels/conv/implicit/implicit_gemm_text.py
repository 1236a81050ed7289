"""The generated functions of implicit GEMM.

Pixels are rows of `PANEL` channels (`winograd_text.pack_pixels`). A table says which row each tap
of a window sees, so any stride, dilation and padding is a product without copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, Value
from graphflow.ops.kernels.conv.winograd_text import ROW
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, vector_width

BLOCK = 6
"""Positions that a product computes at once."""
DEEP = 4
"""Channels that the weights' gradient computes at once."""
_CACHED_POSITIONS = 64  # positions whose rows on both sides stay in the first cache


@cache
def pack_weights() -> NativeFunction:
    """Write the planes of some columns as rows of `PANEL` columns, at places from a table.

    Pointers: planes, rows, offsets (i32 bytes: element; to a whole vector by repeating the last).
    Sizes: elements of a plane, columns (up to `PANEL`), bytes between planes. The range is over
    vectors of columns.
    """
    width = vector_width()
    nest = LoopNestWriter(width, 3, 3)
    base, rows, offsets = nest.pointers
    count, columns, between = nest.sizes
    last = nest.sub(columns, 1)

    def strip(planes: list[str], goal: str, first: Value, mask: str | None) -> None:
        found = [nest.load(nest.gep(p, nest.mul(first, 4)), mask) for p in planes]
        table = nest.gep(offsets, nest.mul(first, 4))
        # In reverse: rows beyond the last element go to its place, and must be overwritten.
        for i, row in reversed(list(enumerate(nest.transpose(found)))):
            moved = nest.write(f"load i32, ptr {nest.gep(table, 4 * i)}, align 4")
            nest.store(row, nest.gep(goal, nest.write(f"sext i32 {moved} to i64")))

    def vector(v: str) -> None:
        first = nest.mul(v, width)
        each = [nest.minimum(nest.add(first, i), last) for i in range(width)]
        planes = [nest.gep(base, nest.mul(i, between)) for i in each]
        goal = nest.gep(rows, nest.mul(v, nest.nbytes))
        nest.loop_vectors(count, lambda first, mask: strip(planes, goal, first, mask))

    nest.loop("%start", "%stop", vector)
    return compiler().function(*nest.source())


@cache
def product(vectors: int, taps_inside: bool) -> NativeFunction:
    """Write y[row of p] (+)= Σ over taps and k of x[row that p's tap sees, k]·w[tap, k].

    Pointers: x, w, y, rows seen (i32 bytes: block, tap, position), results (i32 bytes: block,
    position), taps (i32), at least one. Sizes: taps, k, bytes of w between taps and between k,
    whether to add to y. The range is over blocks of `BLOCK` positions.

    Args:
        taps_inside: keep sums in registers from tap to tap. Otherwise the weights of a tap stay in
            the first cache while all blocks pass. The order of sums is the same.
    """
    nest = LoopNestWriter(vector_width(), 6, 5)
    f = nest.floats
    x, w, y, seen, results, taps = nest.pointers
    count, depth, apart, pitch, adds = nest.sizes
    adding = nest.write(f"icmp ne i64 {adds}, 0")
    kind, zero = nest.kind, f.const(0.0)

    def offset(table: str, *moves: str | int) -> str:
        found = nest.write(f"load i32, ptr {nest.gep(table, *moves)}, align 4")
        return nest.write(f"sext i32 {found} to i64")

    def term(_: str, moved: str, right: str, *rest: str) -> list[str]:
        rows, sums = rest[:BLOCK], rest[BLOCK:]
        given = [nest.load(nest.gep(right, v * nest.nbytes)) for v in range(vectors)]
        new = []
        for r, row in enumerate(rows):
            factor = nest.broadcast(nest.gep(row, moved))
            new += [f.fma(factor, given[v], sums[r * vectors + v]) for v in range(vectors)]
        return [str(nest.add(moved, 4)), str(nest.gep(right, pitch)), *rows, *new]

    def weights(t: str) -> str:
        return nest.gep(w, nest.mul(offset(taps, nest.mul(t, 4)), apart))

    def places(b: str) -> list[str]:
        return [
            nest.gep(y, offset(results, nest.mul(b, 4 * BLOCK), 4 * r), v * nest.nbytes)
            for r in range(BLOCK)
            for v in range(vectors)
        ]

    def begin(goals: list[str], add: str) -> list[str]:
        return [nest.write(f"select i1 {add}, {kind} {nest.load(p)}, {kind} {zero}") for p in goals]

    def tap_terms(t: str, b: str, right: str, sums: Sequence[str]) -> list[str]:
        mine = nest.gep(seen, nest.mul(nest.add(nest.mul(b, count), t), 4 * BLOCK))
        rows = [nest.gep(x, offset(mine, 4 * r)) for r in range(BLOCK)]
        carried = [
            ("i64", "0"), ("ptr", right), *(("ptr", r) for r in rows), *((kind, s) for s in sums),
        ]  # fmt: skip
        return nest.loop(0, depth, term, carried)[2 + BLOCK :]

    def finish(goals: list[str], sums: list[str]) -> None:
        for place, value in zip(goals, sums, strict=True):
            nest.store(value, place)

    def block(t: str, b: str, right: str, add: str) -> None:
        goals = places(b)
        finish(goals, tap_terms(t, b, right, begin(goals, add)))

    def tap(t: str) -> None:
        right = weights(t)
        later = nest.write(f"icmp sgt i64 {t}, 0")
        add = nest.write(f"or i1 {adding}, {later}")
        nest.loop("%start", "%stop", lambda b: block(t, b, right, add))

    def whole_block(b: str) -> None:
        goals = places(b)
        begun = [(kind, s) for s in begin(goals, adding)]
        finish(goals, nest.loop(0, count, lambda t, *s: tap_terms(t, b, weights(t), s), begun))

    if taps_inside:
        nest.loop("%start", "%stop", whole_block)
    else:
        nest.loop(0, count, tap)
    return compiler().function(*nest.source())


@cache
def weight_sums(vectors: int) -> NativeFunction:
    """Write d[c, tap] (+)= Σ over positions p of x[row that p's tap sees, c]·g[p], in rows of
    `PANEL`.

    Pointers: x, g, d, rows seen (i32 bytes: tap, position), rows of g (i32 bytes: position). Sizes:
    blocks of `DEEP` channels, positions, bytes of d between channels, whether to add to d. The
    range is over taps.
    """
    nest = LoopNestWriter(vector_width(), 5, 4)
    f = nest.floats
    x, g, d, seen, given = nest.pointers
    blocks, count, apart, adds = nest.sizes
    adding = nest.write(f"icmp ne i64 {adds}, 0")
    kind, zero = nest.kind, f.const(0.0)

    def offset(table: str, p: str) -> str:
        found = nest.write(f"load i32, ptr {nest.gep(table, nest.mul(p, 4))}, align 4")
        return nest.write(f"sext i32 {found} to i64")

    def block(b: str, tap: str, table: str, start: str, stop: str, add: str) -> None:
        first = nest.mul(b, DEEP)
        left = nest.gep(x, nest.mul(first, 4))
        goal = nest.gep(d, nest.mul(first, apart), nest.mul(tap, ROW))
        places = [
            nest.gep(goal, nest.mul(apart, r), v * nest.nbytes)
            for r in range(DEEP)
            for v in range(vectors)
        ]
        begun = [
            nest.write(f"select i1 {add}, {kind} {nest.load(p)}, {kind} {zero}") for p in places
        ]

        def position(p: str, *so_far: str) -> list[str]:
            row, right = nest.gep(left, offset(table, p)), nest.gep(g, offset(given, p))
            wide = [nest.load(nest.gep(right, v * nest.nbytes)) for v in range(vectors)]
            new = []
            for r in range(DEEP):
                factor = nest.broadcast(nest.gep(row, 4 * r))
                new += [f.fma(factor, wide[v], so_far[r * vectors + v]) for v in range(vectors)]
            return new

        found = nest.loop(start, stop, position, [(kind, s) for s in begun])
        for place, value in zip(places, found, strict=True):
            nest.store(value, place)

    def one(tap: str) -> None:
        table = nest.gep(seen, nest.mul(nest.mul(tap, count), 4))

        def some(start: str) -> None:
            # The rows of some positions stay in the first cache for all channels.
            stop = str(nest.minimum(nest.add(start, _CACHED_POSITIONS), count))
            later = nest.write(f"icmp sgt i64 {start}, 0")
            add = nest.write(f"or i1 {adding}, {later}")
            nest.loop(0, blocks, lambda b: block(b, tap, table, start, stop, add))

        nest.loop(0, count, some, step=_CACHED_POSITIONS)

    nest.loop("%start", "%stop", one)
    return compiler().function(*nest.source())
