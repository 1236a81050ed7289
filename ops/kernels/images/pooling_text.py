"""The generated functions of pooling: vectors lie along the windows of a row.

A tap of a vector of windows sees elements of a row that are a stride apart: contiguous loads for
strides of 1 and 2, gathers otherwise. Masks leave out elements outside the plane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from graphflow.ops.kernels.codegen.memory_loops import LoopNestWriter, Typed, Value
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, vector_width
from graphflow.ops.windows.window_arguments import Ints


class WindowWriter:
    """Writes loops over planes, rows of windows, vectors of windows and taps.

    Sizes: height and width; rows and columns of windows; rows and columns of a window; stride,
    padding before and dilation of rows, then of columns.

    Args:
        kernel: rows and columns of a window if they are known, so that its taps are unrolled.
    """

    def __init__(self, pointers: int, stride: int, kernel: Ints | None = None) -> None:
        self.nest = LoopNestWriter(vector_width(), pointers, 12)
        self.stride = stride
        sizes = self.nest.sizes
        self.height, self.width, self.rows, self.columns = sizes[:4]
        self.tall: Value
        self.wide: Value
        self.tall, self.wide = kernel or sizes[4:6]
        (self.step_y, self.top, self.apart_y), (self.step_x, self.left, self.apart_x) = (
            sizes[6:9], sizes[9:],
        )  # fmt: skip

    def and_masks(self, a: str, b: str) -> str:
        return self.nest.write(f"and {self.nest.lanes.vector('i1')} {a}, {b}")

    def is_row(self, y: str) -> str:
        """Write 1 if y is a row of the plane, else 0: the turns of a loop."""
        inside = self.nest.write(f"icmp ult i64 {y}, {self.height}")
        return self.nest.write(f"zext i1 {inside} to i64")

    def repeat(self, count: Value, body: Callable[..., Sequence[str]], given: Typed) -> str:
        """Write body(i, value) for i from 0 to a count, each with the value of the one before."""
        value = given[1]
        if not isinstance(count, int):
            (value,) = self.nest.loop(0, count, body, [given])
            return value
        for i in range(count):
            (value,) = body(i, value)
        return value

    def tap_row(self, oy: str, ky: Value) -> str:
        """Write the row that a tap sees."""
        nest = self.nest
        y = nest.add(nest.mul(oy, self.step_y), nest.mul(ky, self.apart_y))
        return str(nest.sub(y, self.top))

    def tap_column(self, ox: str, kx: Value) -> str:
        """Write the column that a tap sees in the first lane."""
        nest = self.nest
        x = nest.add(nest.mul(ox, self.step_x), nest.mul(kx, self.apart_x))
        return str(nest.sub(x, self.left))

    def element_address(self, plane: str, y: str, x: str) -> str:
        nest = self.nest
        return nest.gep(plane, nest.mul(nest.add(nest.mul(y, self.width), x), 4))

    def is_inside(self, first: Value, count: Value, size: str) -> str:
        """Write 1 if `count` indices from `first` on are all below a size, else 0: the turns of a
        loop."""
        nest = self.nest
        below = nest.write(f"icmp sle i64 {nest.add(first, count)}, {size}")
        after = nest.write(f"icmp sge i64 {first}, 0")
        return nest.write(f"zext i1 {nest.write(f'and i1 {below}, {after}')} to i64")

    def branch_on_inside(self, inside: str, body: Callable[[bool, str], str], given: Typed) -> str:
        """Write body(inside, value) twice, so that windows inside the plane need no masks."""
        nest, (kind, value) = self.nest, given
        (value,) = nest.loop(0, inside, lambda _, v: [body(True, v)], [(kind, value)])
        (value,) = nest.loop(inside, 1, lambda _, v: [body(False, v)], [(kind, value)])
        return value

    def load_tap_inside(self, plane: str, y: str, x: str) -> str:
        """Load a tap's elements, all of them inside."""
        nest = self.nest
        start = self.element_address(plane, y, x)
        if self.stride == 1:
            return nest.load(start)
        if self.stride != 2:
            return nest.gather(start, nest.mul(self.step_x, 4), None)
        first, last = nest.load(start), nest.load(nest.gep(start, nest.nbytes - 4))
        half = nest.width // 2
        order = [2 * i if i < half else nest.width + 2 * (i - half) + 1 for i in range(nest.width)]
        return nest.shuffle(first, last, order)

    def fits_vector(self, size: str, count: int) -> str:
        """Write whether a row of some size has a whole strip of `count` elements."""
        return self.nest.write(f"icmp sge i64 {size}, {count}")

    def tap_span(self) -> Value:
        """Write the elements of a row that a tap spans, from the first lane's to the last one's."""
        nest = self.nest
        return nest.add(nest.mul(self.step_x, nest.width - 1), 1)

    def window_span(self) -> Value:
        """Write the elements of a row that all taps of a vector of windows span."""
        nest = self.nest
        return nest.add(self.tap_span(), nest.mul(nest.sub(self.wide, 1), self.apart_x))

    def load_tap(self, plane: str, y: str, x: str, on: str) -> tuple[str, str]:
        """Load a tap's elements, and a mask of those inside."""
        nest = self.nest
        start = self.element_address(plane, y, x)
        if self.stride == 1:
            mask = self.and_masks(nest.in_range_mask(nest.indices(x), self.width), on)
            return nest.load(start, mask), mask
        if self.stride != 2:
            kind = nest.lanes.vector("i32")
            steps = nest.write(f"mul {kind} {nest.indices(0)}, {nest.splat_i32(self.step_x)}")
            places = nest.write(f"add {kind} {steps}, {nest.splat_i32(x)}")
            mask = self.and_masks(nest.in_range_mask(places, self.width), on)
            return nest.gather(start, nest.mul(self.step_x, 4), mask), mask
        mask = self.and_masks(nest.in_range_mask(nest.indices(x, 2), self.width), on)
        halves = [
            nest.load(nest.gep(start, h * nest.nbytes), m)
            for h, m in enumerate(self.interleaved_masks(mask))
        ]
        return nest.even_elements(*halves), mask

    def interleaved_masks(self, mask: str) -> list[str]:
        """Write masks of two vectors whose even lanes, together, are the lanes of one mask."""
        nest = self.nest
        kind, width = nest.lanes.vector("i1"), nest.width
        return [
            nest.write(
                f"shufflevector {kind} {mask}, {kind} zeroinitializer, <{width} x i32> <"
                + ", ".join(
                    f"i32 {h * width // 2 + i // 2 if i % 2 == 0 else width}" for i in range(width)
                )
                + ">"
            )
            for h in range(2)
        ]

    def add_to_tap(self, value: str, plane: str, y: str, x: str, on: str) -> None:
        """Add a vector to a tap's elements."""
        nest = self.nest
        old, mask = self.load_tap(plane, y, x, on)
        start = self.element_address(plane, y, x)
        nest.scatter(nest.floats.add(old, value), start, nest.mul(self.step_x, 4), mask)

    def load_bytes(self, pointer: str, mask: str | None) -> str:
        """Load a vector of bytes as i32."""
        nest = self.nest
        if mask is None:
            found = nest.write(f"load {nest.lanes.vector('i8')}, ptr {pointer}, align 1")
        else:
            found = nest.lanes.masked_load("i8", pointer, 1, mask)
        return nest.lanes.convert("zext", found, "i8", "i32")

    def store_bytes(self, value: str, pointer: str, mask: str | None) -> None:
        """Store the low bytes of a vector of i32."""
        nest = self.nest
        small = nest.lanes.convert("trunc", value, "i32", "i8")
        if mask is None:
            nest.lines.append(f"  store {nest.lanes.vector('i8')} {small}, ptr {pointer}, align 1")
        else:
            nest.lanes.masked_store("i8", small, pointer, 1, mask)


def tap_number(w: WindowWriter, ky: Value, kx: Value) -> str:
    nest = w.nest
    number = nest.add(nest.mul(ky, w.wide), kx)
    return nest.splat_i32(number)


@cache
def window_reduction(kind: str, stride: int, kernel: Ints | None = None) -> NativeFunction:
    """Write out[window] from the elements of its taps: "max", "mean", or "taps" (first maximum).

    Pointers: x, then the factors of the positions ("mean") or the maxima ("taps"), out. Sizes as of
    `WindowWriter`; the range is over planes.
    """
    w = WindowWriter(3, stride, kernel)
    nest, reduction = w.nest, _WindowReduction(w, kind)

    def plane_loop(p: str) -> None:
        start = nest.mul(nest.mul(p, 4), nest.mul(w.height, w.width))
        plane = nest.gep(nest.pointers[0], start)

        def row(oy: str) -> None:
            nest.loop_overlapping(
                w.columns, nest.width, lambda ox: reduction.write_strip(p, plane, oy, ox)
            )

        nest.loop(0, w.rows, row)

    nest.loop("%start", "%stop", plane_loop)
    return compiler().function(*nest.source())


class _WindowReduction:
    """Writes the reduction of a vector of windows; `kind` as of `window_reduction`."""

    def __init__(self, w: WindowWriter, kind: str) -> None:
        self.w, self.kind = w, kind
        nest = w.nest
        self.unset = nest.lanes.constant(-1, "i32")  # no tap chosen yet
        start = nest.floats.const(float("-inf") if kind == "max" else 0.0)
        self.begun = (nest.kind, start)
        if kind == "taps":
            self.begun = (nest.lanes.vector("i32"), self.unset)
        self.span = w.window_span()

    def write_strip(self, p: str, plane: str, oy: str, ox: str) -> None:
        """Write the results of the windows from ox on, in row oy of plane p."""
        w, nest, by_taps = self.w, self.w.nest, self.kind == "taps"
        _, other, out = nest.pointers
        on = nest.first_lanes(nest.sub(w.columns, ox))
        position = nest.add(nest.mul(oy, w.columns), ox)
        here = nest.add(nest.mul(p, nest.mul(w.rows, w.columns)), position)
        y = nest.load(nest.gep(other, nest.mul(here, 4)), on) if by_taps else ""
        carried = self.begun[0]

        def reduce(inside: bool, so_far: str) -> str:
            def row(ky: Value, so_far: str) -> list[str]:
                at = w.tap_row(oy, ky)

                def add_tap(kx: Value, v: str) -> list[str]:
                    return [self._add_tap(inside, plane, at, w.tap_column(ox, kx), on, v, y,
                                          (ky, kx))]  # fmt: skip

                def turn(_: str, so_far: str) -> list[str]:
                    return [w.repeat(w.wide, add_tap, (carried, so_far))]

                return nest.loop(0, w.is_row(at), turn, [(carried, so_far)])

            return w.repeat(w.tall, row, (carried, so_far))

        is_inside = w.is_inside(w.tap_column(ox, 0), self.span, w.width)
        found = w.branch_on_inside(is_inside, reduce, self.begun)
        if by_taps:
            none = nest.write(f"icmp eq {carried} {found}, {self.unset}")
            found = nest.lanes.select(none, "i32", nest.lanes.constant(0, "i32"), found)
        if self.kind == "mean":
            found = nest.floats.mul(found, nest.load(nest.gep(other, nest.mul(position, 4)), on))

        def store(mask: str | None) -> None:
            if by_taps:
                w.store_bytes(found, nest.gep(out, here), mask)
            else:
                nest.store(found, nest.gep(out, nest.mul(here, 4)), mask)

        nest.if_else(w.fits_vector(w.columns, nest.width), lambda: store(None), lambda: store(on))

    def _add_tap(
        self, inside: bool, plane: str, at: str, column: str, on: str, so_far: str, y: str,
        tap: tuple[Value, Value],
    ) -> str:  # fmt: skip
        """Reduce the elements that a tap sees in row `at`, from a column on.

        Args:
            inside: whether all of them are inside the row; otherwise masks leave some out.
        """
        w, nest, f = self.w, self.w.nest, self.w.nest.floats
        ones, numbers = nest.lanes.vector("i1"), nest.lanes.vector("i32")

        value, mask = (
            (w.load_tap_inside(plane, at, column), None)
            if inside
            else w.load_tap(plane, at, column, on)
        )
        if self.kind == "mean":
            return f.add(so_far, value)  # elements outside are zeros
        is_nan = f.compare("uno", value, value)
        if self.kind == "max":
            chosen = nest.write(f"or {ones} {f.compare('ogt', value, so_far)}, {is_nan}")
        else:
            same = nest.write(f"or {ones} {f.compare('oeq', value, y)}, {is_nan}")
            none = nest.write(f"icmp eq {numbers} {so_far}, {self.unset}")
            chosen = w.and_masks(same, none)
        if mask is not None:
            chosen = w.and_masks(mask, chosen)
        if self.kind == "max":
            return f.select(chosen, value, so_far)
        return nest.lanes.select(chosen, "i32", tap_number(w, *tap), so_far)
