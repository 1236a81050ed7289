"""The generated functions of direct convolutions.

Vectors lie along the rows of planes, and weights are broadcast. A plane that is read has its
padding around it. If windows have a stride, columns are sorted by their remainder, so that a tap
sees contiguous elements of a row. So a tap is an offset, from a table, and rows may be read beyond
their end.
"""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, Value
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, vector_width


def sum_registers() -> int:
    """Return how many of 32, or of 16, registers hold sums, at most."""
    return 24 if vector_width() == 16 else 12


@cache
def copy_rows(kind: str) -> NativeFunction:
    """Write the copy of rows of planes.

    Pointers: source, target, start of the target's planes. Sizes: planes, rows, elements of a row;
    bytes between rows, planes and images of the source, then of the target; bytes between elements
    if they are apart; elements of a target's plane that become zeros first.

    Args:
        kind: "rows", or "gather" or "scatter" if elements of source or target are apart.
    """
    nest = LoopNestWriter(vector_width(), 3, 11)
    source, target, begin = nest.pointers
    planes, rows, count, *strides, apart, cleared = nest.sizes
    (row_in, plane_in, image_in), (row_out, plane_out, image_out) = strides[:3], strides[3:]

    def row(here: str, there: str) -> None:
        def strip(first: Value, mask: str | None) -> None:
            near = nest.mul(first, 4)
            far = nest.mul(first, apart)
            if kind == "gather":
                value = nest.gather(nest.gep(here, far), apart, mask)
            else:
                value = nest.load(nest.gep(here, near), mask)
            if kind == "scatter":
                nest.scatter(value, nest.gep(there, far), apart, mask)
            else:
                nest.store(value, nest.gep(there, near), mask)

        # Masks are slow without AVX-512, so the last strip begins early and is whole.
        last = nest.sub(count, nest.width)
        nest.if_else(
            nest.write(f"icmp sge i64 {last}, 0"),
            lambda: nest.loop(
                0, count, lambda i: strip(nest.minimum(i, last), None), step=nest.width
            ),
            lambda: strip(0, nest.first_lanes(count)),
        )

    zero = nest.floats.const(0.0)

    def clear(start: str) -> None:
        def strip(first: Value, mask: str | None) -> None:
            nest.store(zero, nest.gep(start, nest.mul(first, 4)), mask)

        nest.loop_vectors(cleared, strip)

    def plane(here: str, there: str) -> None:
        def one(y: str) -> None:
            row(nest.gep(here, nest.mul(y, row_in)), nest.gep(there, nest.mul(y, row_out)))

        nest.loop(0, rows, one)

    def image(n: str) -> None:
        here = nest.gep(source, nest.mul(n, image_in))
        moved = nest.mul(n, image_out)
        there, start = nest.gep(target, moved), nest.gep(begin, moved)

        def one(p: str) -> None:
            clear(nest.gep(start, nest.mul(p, plane_out)))
            plane(nest.gep(here, nest.mul(p, plane_in)), nest.gep(there, nest.mul(p, plane_out)))

        nest.loop(0, planes, one)

    nest.loop("%start", "%stop", image)
    return compiler().function(*nest.source())


@cache
def correlation(outputs: int, rows: int, vectors: int) -> NativeFunction:
    """Write out[o, y, x] = Σ w[c, tap, o] · x[c, y, x + offset of the tap].

    Pointers: x, w, out, offsets (i64 bytes). Sizes: blocks of rows, columns, channels of x, taps;
    bytes of x between images, units, channels, rows; of w between units; of out between images,
    units, channels, rows; units. A unit is a block of outputs, or a group of channels.

    Args:
        outputs, rows, vectors: of a tile that is computed in registers.
    """
    nest = LoopNestWriter(vector_width(), 4, 14)
    f = nest.floats
    x, w, out, offsets = nest.pointers
    (
        blocks, columns, channels, taps, x_image, x_unit, x_channel, x_row, w_unit,
        out_image, out_unit, out_channel, out_row, units,
    ) = nest.sizes  # fmt: skip
    sums = outputs * rows * vectors

    def tap(t: str, here: str, weights: str, *so_far: str) -> list[str]:
        offset = nest.write(f"load i64, ptr {nest.gep(offsets, nest.mul(t, 8))}, align 8")
        place = nest.gep(here, offset)
        seen = [
            nest.load(nest.gep(nest.gep(place, nest.mul(x_row, r)), v * nest.nbytes))
            for r in range(rows)
            for v in range(vectors)
        ]
        new = []
        for o in range(outputs):
            factor = nest.broadcast(nest.gep(weights, 4 * o))
            new += [f.fma(factor, s, so_far[o * len(seen) + i]) for i, s in enumerate(seen)]
        return [nest.gep(weights, 4 * outputs), *new]

    def strip(first: str, here: str, weights: str, goal: str) -> None:
        moved = nest.mul(first, 4)
        begin = nest.gep(here, moved)

        def channel(c: str, weights: str, *so_far: str) -> list[str]:
            start = nest.gep(begin, nest.mul(c, x_channel))
            carried = [("ptr", weights), *((nest.kind, s) for s in so_far)]
            return nest.loop(0, taps, lambda t, *v: tap(t, start, *v), carried)

        zero = f.const(0.0)
        found = nest.loop(0, channels, channel, [("ptr", weights), *[(nest.kind, zero)] * sums])
        rest = nest.sub(columns, first)
        end = nest.gep(goal, moved)
        for v in range(vectors):
            there = nest.sub(rest, v * nest.width)
            values = {i: x for i, x in enumerate(found[1:]) if i % vectors == v}

            def store(masked: bool, values: Any = values, there: Value = there) -> None:
                mask = nest.first_lanes(there) if masked else None
                for i, value in values.items():
                    o, r, v = i // (rows * vectors), i // vectors % rows, i % vectors
                    moves = (nest.mul(out_channel, o), nest.mul(out_row, r), v * nest.nbytes)
                    nest.store(value, nest.gep(end, *moves), mask)

            # Without AVX-512, a masked store costs as much as twenty plain ones.
            is_whole = nest.write(f"icmp sge i64 {there}, {nest.width}")
            nest.if_else(is_whole, partial(store, False), partial(store, True))

    def block(b: str, here: str, weights: str, goal: str) -> None:
        start = nest.gep(here, nest.mul(nest.mul(b, rows), x_row))
        end = nest.gep(goal, nest.mul(nest.mul(b, rows), out_row))
        step = vectors * nest.width
        nest.loop_overlapping(columns, step, lambda i: strip(i, start, weights, end))

    def unit(u: str, here: str, goal: str) -> None:
        start, end = nest.gep(here, nest.mul(u, x_unit)), nest.gep(goal, nest.mul(u, out_unit))
        weights = nest.gep(w, nest.mul(u, w_unit))
        nest.loop(0, blocks, lambda b: block(b, start, weights, end))

    def image(n: str) -> None:
        here, goal = nest.gep(x, nest.mul(n, x_image)), nest.gep(out, nest.mul(n, out_image))
        nest.loop(0, units, lambda u: unit(u, here, goal))

    nest.loop("%start", "%stop", image)
    return compiler().function(*nest.source())


@cache
def weight_sums(outputs: int, taps: int) -> NativeFunction:
    """Write sums[unit, o, tap] = Σ g[image, o, y, x] · x[image, y, x + offset of the tap].

    Sums of some rows are added to those before, so that all taps read these rows while they are in
    the cache. Pointers: x, g, sums, offsets (i64 bytes, as many as all pieces have taps), memory
    for outputs·taps vectors of each piece. Sizes: images, rows, rows at a time, columns; bytes of x
    between images, units, rows; of g between images, units, channels, rows; of sums between units,
    outputs; blocks of outputs; pieces of `taps` taps, and taps of all pieces.
    """
    return compiler().function(*_WeightSums(outputs, taps).source())


class _WeightSums:
    """Writes the kernel of `weight_sums`."""

    def __init__(self, outputs: int, taps: int) -> None:
        self.outputs, self.taps = outputs, taps
        self.nest = nest = LoopNestWriter(vector_width(), 5, 16)
        self.x, self.g, self.sums, self.offsets, self.room = nest.pointers
        (
            self.images, self.rows, self.some, self.columns, self.x_image, self.x_unit, self.x_row,
            self.g_image, self.g_unit, self.g_channel, self.g_row, self.sums_unit,
            self.sums_output, self.blocks, self.pieces, self.every,
        ) = nest.sizes  # fmt: skip
        self.count = outputs * taps

    def source(self) -> tuple[str, str]:
        self.nest.loop("%start", "%stop", self._unit)
        return self.nest.source()

    def _unit(self, u: str) -> None:
        nest = self.nest
        here = nest.gep(self.x, nest.mul(u, self.x_unit))
        given = nest.gep(self.g, nest.mul(u, self.g_unit))
        goal = nest.gep(self.sums, nest.mul(u, self.sums_unit))
        nest.loop(0, self.blocks, lambda b: self._block(b, here, given, goal))

    def _block(self, b: str, here: str, cotangents: str, target: str) -> None:
        """Write the taps of a block of outputs."""
        nest = self.nest
        zero = nest.floats.const(0.0)

        def clear(i: Value) -> None:
            nest.store(zero, nest.gep(self.room, nest.mul(i, nest.nbytes)))

        nest.loop(0, nest.mul(self.pieces, self.count), clear)
        first = nest.mul(b, self.outputs)
        given = nest.gep(cotangents, nest.mul(first, self.g_channel))
        nest.loop(0, self.images, lambda n: self._image(n, here, given))
        goal = nest.gep(target, nest.mul(first, self.sums_output))
        nest.loop(0, self.pieces, lambda p: self._store(p, goal))

    def _image(self, n: str, here: str, cotangents: str) -> None:
        """Write the sums of an image, some rows at a time."""
        nest = self.nest
        start = nest.gep(here, nest.mul(n, self.x_image))
        given = nest.gep(cotangents, nest.mul(n, self.g_image))

        def band(i: str) -> None:
            first = nest.mul(i, self.some)
            last = nest.minimum(nest.add(first, self.some), self.rows)
            nest.loop(0, self.pieces, lambda p: self._piece(p, first, last, start, given))

        bands = nest.add(self.rows, nest.sub(self.some, 1))
        nest.loop(0, nest.write(f"sdiv i64 {bands}, {self.some}"), band)

    def _piece(self, p: str, first: Value, last: Value, here: str, cotangents: str) -> None:
        """Write what some rows add to the sums of a piece."""
        nest, f = self.nest, self.nest.floats
        offsets = nest.gep(self.offsets, nest.mul(p, 8 * self.taps))
        moves = [
            nest.write(f"load i64, ptr {nest.gep(offsets, 8 * t)}, align 8")
            for t in range(self.taps)
        ]

        def row(y: str, *so_far: str) -> list[str]:
            start = nest.gep(here, nest.mul(y, self.x_row))
            given = nest.gep(cotangents, nest.mul(y, self.g_row))
            places = [nest.gep(start, m) for m in moves]

            def strip(first: Value, mask: str | None, *so_far: str) -> list[str]:
                moved = nest.mul(first, 4)
                factors = [
                    nest.load(nest.gep(given, nest.mul(self.g_channel, o), moved), mask)
                    for o in range(self.outputs)
                ]
                seen = [nest.load(nest.gep(p, moved), mask) for p in places]
                return [
                    f.fma(factors[i // self.taps], seen[i % self.taps], so_far[i])
                    for i in range(self.count)
                ]

            return nest.loop_vectors_carrying(self.columns, strip, so_far)

        carried = [(nest.kind, f.const(0.0))] * self.count
        found = nest.loop(first, last, row, carried)
        room = nest.gep(self.room, nest.mul(p, self.count * nest.nbytes))
        for i, value in enumerate(found):
            place = nest.gep(room, i * nest.nbytes)
            nest.store(f.add(nest.load(place), value), place)

    def _store(self, p: str, goal: str) -> None:
        """Write the totals of a piece's taps; the last piece may have fewer."""
        nest = self.nest
        first = nest.mul(p, self.taps)
        room = nest.gep(self.room, nest.mul(p, self.count * nest.nbytes))

        def store(tap: int, number: Value) -> None:
            for o in range(self.outputs):
                i = o * self.taps + tap
                total = nest.reduce_sum(nest.load(nest.gep(room, i * nest.nbytes)))
                place = nest.gep(goal, nest.mul(self.sums_output, o), nest.mul(number, 4))
                nest.lines.append(f"  store float {total}, ptr {place}, align 4")

        for tap in range(self.taps):
            number = nest.add(first, tap)
            inside = nest.write(f"icmp slt i64 {number}, {self.every}")
            nest.if_else(inside, partial(store, tap, number), lambda: None)
