"""The generated functions of pooling's gradients, the transposes of `pooling_text`."""

from __future__ import annotations

from functools import cache

from graphflow.ops.kernels.images.pooling_text import WindowWriter, tap_number
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler


class _WindowCotangents:
    """Writes the cotangents of windows for a tap.

    They are the cotangents of the windows that chose the tap ("taps"), or of all windows, times
    their factors ("means"). Pointers: g, then chosen taps or factors, out.
    """

    def __init__(self, w: WindowWriter, kind: str) -> None:
        self.w = w
        self.g, self.other, _ = w.nest.pointers
        self.chooses = kind == "taps"

    def load(self, p: str, oy: str, ox: str, on: str | None) -> tuple[str, str]:
        """Load the cotangents of a vector of windows of a row, and the taps that they chose."""
        nest = self.w.nest
        position = nest.add(nest.mul(oy, self.w.columns), ox)
        here = nest.add(nest.mul(p, nest.mul(self.w.rows, self.w.columns)), position)
        given = nest.load(nest.gep(self.g, nest.mul(here, 4)), on)
        if self.chooses:
            return given, self.w.load_bytes(nest.gep(self.other, here), on)
        factor = nest.load(nest.gep(self.other, nest.mul(position, 4)), on)
        return nest.floats.mul(given, factor), ""

    def value_at_tap(self, value: str, chosen: str, ky: str, kx: str) -> str:
        if not self.chooses:
            return value
        nest = self.w.nest
        kind = nest.lanes.vector("i32")
        this = nest.write(f"icmp eq {kind} {chosen}, {tap_number(self.w, ky, kx)}")
        return nest.floats.select(this, value, nest.floats.const(0.0))


@cache
def window_scatter(kind: str, stride: int) -> NativeFunction:
    """Write the sum of windows' cotangents at each element: of chosen taps, or times their factors.

    Pointers: g, then the chosen taps ("taps") or the factors of the positions ("means"), out. Sizes
    as of `WindowWriter`; the range is over planes.
    """
    w = WindowWriter(3, stride)
    nest = w.nest
    given = _WindowCotangents(w, kind)
    size = nest.mul(w.height, w.width)

    def plane(p: str) -> None:
        start = nest.gep(nest.pointers[2], nest.mul(nest.mul(p, 4), size))
        if stride > 2:
            _write_scattering(w, given, p, start)
            return

        def row(y: str) -> None:
            def strip(x: str) -> None:
                _write_collecting(w, given, p, start, y, x)

            nest.loop_overlapping(w.width, nest.width * stride, strip)

        nest.loop(0, w.height, row)

    nest.loop("%start", "%stop", plane)
    return compiler().function(*nest.source())


def _write_collecting(
    w: WindowWriter, given: _WindowCotangents, p: str, plane: str, y: str, x: str
) -> None:
    """Write elements from x on: a vector for each remainder by the stride, from neighbouring
    windows."""
    nest, f = w.nest, w.nest.floats
    zero = nest.lanes.constant(0.0, "float")

    def taps(oy: str, ky: str, kx: str, sums: list[str]) -> list[str]:
        new = []
        for remainder, so_far in enumerate(sums):
            u = nest.sub(nest.add(nest.add(x, remainder), w.left), nest.mul(kx, w.apart_x))
            if w.stride == 1:
                new.append(add(oy, ky, kx, str(u), so_far))
                continue
            odd = nest.write(f"and i64 {u}, 1")
            ox = nest.write(f"ashr i64 {u}, 1")
            # A loop of one turn or none.

            def turn(_: str, v: str, ox: str = ox) -> list[str]:
                return [add(oy, ky, kx, ox, v)]

            new += nest.loop(odd, 1, turn, [(nest.kind, so_far)])
        return new

    def add(oy: str, ky: str, kx: str, ox: str, so_far: str) -> str:
        def one(inside: bool, so_far: str) -> str:
            on = None if inside else nest.in_range_mask(nest.indices(ox), w.columns)
            value, chosen = given.load(p, oy, ox, on)
            return f.add(so_far, given.value_at_tap(value, chosen, ky, kx))

        return w.branch_on_inside(w.is_inside(ox, nest.width, w.columns), one, (nest.kind, so_far))

    def row(ky: str, *sums: str) -> list[str]:
        t = nest.sub(nest.add(y, w.top), nest.mul(ky, w.apart_y))
        oy = nest.write(f"sdiv i64 {t}, {w.step_y}")
        exact = nest.write(f"icmp eq i64 {nest.mul(oy, w.step_y)}, {t}")
        inside = nest.write(f"icmp ult i64 {oy}, {w.rows}")
        there = nest.write(f"zext i1 {nest.write(f'and i1 {exact}, {inside}')} to i64")

        def turn(_: str, *sums: str) -> list[str]:
            carried = [(nest.kind, s) for s in sums]
            return nest.loop(0, w.wide, lambda kx, *v: taps(oy, ky, kx, list(v)), carried)

        return nest.loop(0, there, turn, [(nest.kind, s) for s in sums])

    found = nest.loop(0, w.tall, row, [(nest.kind, zero)] * w.stride)
    start, rest = w.element_address(plane, y, x), nest.sub(w.width, x)
    width = nest.width

    def store(masked: bool) -> None:
        for part in range(w.stride):
            value = found[0]
            if w.stride == 2:
                value = nest.interleave(found[0], found[1], part)
            mask = nest.first_lanes(nest.sub(rest, part * width)) if masked else None
            nest.store(value, nest.gep(start, part * nest.nbytes), mask)

    nest.if_else(
        w.fits_vector(w.width, width * w.stride), lambda: store(False), lambda: store(True)
    )


def _write_scattering(w: WindowWriter, given: _WindowCotangents, p: str, plane: str) -> None:
    """Write all elements of a plane, window by window; for strides above 2."""
    nest = w.nest
    zero = nest.floats.const(0.0)
    size = nest.mul(w.height, w.width)
    nest.loop_vectors(size, lambda i, mask: nest.store(zero, nest.gep(plane, nest.mul(i, 4)), mask))

    def strip(oy: str, ox: str) -> None:
        on = nest.first_lanes(nest.sub(w.columns, ox))
        value, chosen = given.load(p, oy, ox, on)

        def taps(ky: str) -> None:
            at = w.tap_row(oy, ky)

            def tap(kx: str) -> None:
                w.add_to_tap(
                    given.value_at_tap(value, chosen, ky, kx), plane, at, w.tap_column(ox, kx), on
                )

            nest.loop(0, w.is_row(at), lambda _: nest.loop(0, w.wide, tap))

        nest.loop(0, w.tall, taps)

    def row(oy: str) -> None:
        nest.loop(0, w.columns, lambda ox: strip(oy, ox), step=nest.width)

    nest.loop(0, w.rows, row)
