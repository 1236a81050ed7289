"""Products of a matrix and a vector: one pass over the matrix, at the speed of memory.

Each element is summed in an order that follows from the sizes alone: along a row by vectors; over
rows by blocks, whose sums are added in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.codegen.control_flow import BYTES, KernelWriter, element_of, lanes_of
from graphflow.ops.kernels.codegen.vector_writer import Floats
from graphflow.ops.kernels.fusion.parallel_call import call_parallel, native_function
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.jit.scratch_memory import scratch

_LEAST = 4096
"""Elements of a matrix below which other kernels are as fast."""
_FAR = 1 << 14
"""Bytes of a row from which four rows are read at a time, each a prefetch stream of its own.
Shorter rows form one stream, which comes from memory at up to five times the speed."""
_STRIP = 8  # vectors of a row whose sums are kept in registers
_PAGE, _ROWS = 4096, 8
"""Bytes of a row from which `_ROWS` rows are added to sums in memory at once; shorter rows come one
at a time, as one stream."""
_TILE = 1 << 14  # bytes of sums that the first cache holds
_BLOCK, _BLOCKS = 512, 64  # rows of a block, at least, and blocks, at most
_LINE = 64


# Along rows -----------------------------------------------------------------------------------


def rows_dot(element: str, together: int) -> tuple[str, str]:
    """Write out[r] = Σ a[r, j]·x[j] for rows start to stop.

    Pointers: a, x, out. Size: elements of a row.

    Args:
        together: rows that are read at once, a power of two.
    """
    flow = KernelWriter()
    a, x, out = (flow.pointer(i) for i in range(3))
    count = flow.size(0)
    lanes, item = lanes_of(element), BYTES[element]
    f, kind = flow.floats(lanes, element), f"<{lanes} x {element}>"
    whole = flow.step("and", count, -lanes)
    left = flow.step("sub", count, whole)
    some, mask = flow.step("icmp sgt", left, 0), flow.first_lanes(lanes, left)

    def rows(r: str, many: int) -> None:
        lines = [flow.gep(a, element, flow.mul(flow.add(r, i), count)) for i in range(many)]

        def vector(j: str, *totals: str, mask: str | None = None) -> list[str]:
            given = flow.load_vector(lanes, element, flow.gep(x, element, j), mask)
            return [
                f.fma(
                    flow.load_vector(lanes, element, flow.gep(line, element, j), mask), given, total
                )
                for line, total in zip(lines, totals, strict=True)
            ]

        totals = flow.loop(0, whole, [(kind, "zeroinitializer")] * many, vector, lanes)
        totals = flow.when(
            some, [(kind, t) for t in totals], lambda: vector(whole, *totals, mask=mask)
        )
        for i, total in enumerate(totals):
            one = flow.reduce_lanes(lanes, element, total, Floats.add)
            flow.store(element, one, flow.gep(out, element, flow.add(r, i)), item)

    _loop_rows(flow, "%start", "%stop", together, rows)
    return flow.finish()


def _loop_rows(
    flow: KernelWriter, start: str, stop: str, together: int, rows: Callable[[str, int], None]
) -> None:
    """Write loops over `together` rows at once, and over the rest."""
    if together > 1:
        left = flow.step("and", flow.step("sub", stop, start), together - 1)
        last = flow.step("sub", stop, left)
        flow.loop(start, last, (), lambda r: rows(r, together), together)
        start = last
    flow.loop(start, stop, (), lambda r: rows(r, 1))


# Over rows ------------------------------------------------------------------------------------


def rows_sum(element: str, count: int, begin: bool, end: bool) -> tuple[str, str]:
    """Write out[j] = Σ a[r, j]·x[r]: sums of blocks of rows (`begin`), and the sum of these
    (`end`).

    Pointers: a, x, out, and memory for a row of each block. Sizes: rows, blocks.

    Args:
        count: elements of a row.
    """
    flow = KernelWriter()
    a, x, out, memory = (flow.pointer(i) for i in range(4))
    rows, blocks = (flow.size(i) for i in range(2))
    lanes = lanes_of(element)
    f, kind = flow.floats(lanes, element), f"<{lanes} x {element}>"
    strip = _STRIP * lanes
    whole = count - count % strip
    tile = _TILE // BYTES[element] // strip * strip
    tiled = max(0, whole - 1) // tile * tile
    vectors = -(-(count - whole) // lanes)
    bits = ", ".join(f"i1 {'true' if i < count % lanes else 'false'}" for i in range(lanes))
    edge = f"<{bits}>" if count % lanes else None

    def columns(
        body: Callable[[str, int, str | None], None], start: str = "0", stop: str | None = None
    ) -> None:
        """Write body for the strips from `start` to `stop`, or to the end of the row."""
        flow.loop(start, stop or str(whole), (), lambda j: body(j, _STRIP, None), strip)
        if stop is None and vectors:
            body(str(whole), vectors, edge)

    def mask_of(v: int, many: int, mask: str | None) -> str | None:
        """Return the mask of a strip's vector: only the last one has one."""
        return mask if v == many - 1 else None

    def block(b: str) -> None:
        first, last = (flow.step("udiv", flow.mul(rows, i), blocks) for i in (b, flow.add(b, 1)))
        target = flow.gep(memory, element, flow.mul(b, count))
        if count <= strip:
            columns(partial(sum_in_registers, first, last, target))
        else:
            flow.loop(
                "0",
                tiled,
                (),
                lambda j: sum_in_memory(first, last, target, j, flow.add(j, tile)),
                tile,
            )
            sum_in_memory(first, last, target, str(tiled), None)

    def sum_in_registers(
        first: str, last: str, target: str, j: str, many: int, mask: str | None
    ) -> None:
        """Sum a strip in registers, row by row."""

        def row(r: str, *totals: str) -> list[str]:
            line = flow.gep(a, element, flow.add(flow.mul(r, count), j))
            return accumulate(scale_of(r), line, many, mask, totals)

        totals = flow.loop(first, last, [(kind, "zeroinitializer")] * many, row)
        store(flow.gep(target, element, j), many, mask, totals)

    def sum_in_memory(first: str, last: str, target: str, start: str, stop: str | None) -> None:
        """Sum a tile in memory, some rows at a time."""

        def clear_tile(j: str, many: int, mask: str | None) -> None:
            store(flow.gep(target, element, j), many, mask, ["zeroinitializer"] * many)

        def some(r: str, together: int) -> None:
            scales = [scale_of(flow.add(r, i)) for i in range(together)]
            lines = [flow.gep(a, element, flow.mul(flow.add(r, i), count)) for i in range(together)]

            def strip_of(j: str, many: int, mask: str | None) -> None:
                place = flow.gep(target, element, j)
                totals = load(place, many, mask)
                for scale, line in zip(scales, lines, strict=True):
                    totals = accumulate(scale, flow.gep(line, element, j), many, mask, totals)
                store(place, many, mask, totals)

            columns(strip_of, start, stop)

        columns(clear_tile, start, stop)
        _loop_rows(flow, first, last, _ROWS if count * BYTES[element] >= _PAGE else 1, some)

    def scale_of(r: str) -> str:
        return flow.broadcast(
            lanes, element, flow.load(element, flow.gep(x, element, r), BYTES[element])
        )

    def load(line: str, many: int, mask: str | None) -> list[str]:
        return [
            flow.load_vector(
                lanes, element, flow.gep(line, element, v * lanes), mask_of(v, many, mask)
            )
            for v in range(many)
        ]

    def accumulate(
        scale: str, line: str, many: int, mask: str | None, totals: Sequence[str]
    ) -> list[str]:
        given = load(line, many, mask)
        return [f.fma(x, scale, total) for x, total in zip(given, totals, strict=True)]

    def store(place: str, many: int, mask: str | None, totals: Sequence[str]) -> None:
        for v, total in enumerate(totals):
            to = flow.gep(place, element, v * lanes)
            flow.store_vector(lanes, element, total, to, mask_of(v, many, mask))

    def sum_blocks(j: str, many: int, mask: str | None) -> None:
        def add(b: str, *sums: str) -> list[str]:
            line = flow.gep(memory, element, flow.add(flow.mul(b, count), j))
            return [f.add(s, part) for s, part in zip(sums, load(line, many, mask), strict=True)]

        sums = flow.loop("0", blocks, [(kind, "zeroinitializer")] * many, add)
        store(flow.gep(out, element, j), many, mask, sums)

    if begin:
        flow.loop("%start", "%stop", (), block)
    if end:
        columns(sum_blocks)
    return flow.finish()


# Products -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VectorProduct:
    """A product of a matrix (rows, columns) and a vector.

    Attributes:
        sums_rows: whether the vector has an element for each row; False: for each column.
        swapped: whether the vector is the first operand.
    """

    rows: int
    columns: int
    sums_rows: bool
    swapped: bool
    dtype: str

    @property
    def blocks(self) -> int:
        return min(_BLOCKS, -(-self.rows // _BLOCK))

    @property
    def _rows_at_once(self) -> int:
        """Rows that are read at once."""
        return 4 if self.columns * np.dtype(self.dtype).itemsize >= _FAR else 1

    @property
    def nanoseconds(self) -> float:
        return self.rows * (self.columns * np.dtype(self.dtype).itemsize * 0.06 + 4)

    @property
    def task(self) -> KernelTask:
        """The product as an entry of a table of native calls."""
        element, order = element_of(self.dtype), (1, 0) if self.swapped else ()
        if not self.sums_rows:
            name, text = _write_cached(rows_dot, element, self._rows_at_once)
            return KernelTask(name, text, (self.columns,), self.rows, self.nanoseconds, 0, order)
        name, text = _write_cached(rows_sum, element, self.columns, True, True)
        sizes = (self.rows, self.blocks)
        memory = self.blocks * self.columns * np.dtype(self.dtype).itemsize + _LINE
        return KernelTask(name, text, sizes, self.blocks, self.nanoseconds, memory, order)

    def run(self, out: Any, a: Any, b: Any) -> None:
        """Run the product for contiguous operands, on the threads of the current pool."""
        matrix, vector = (b, a) if self.swapped else (a, b)
        element = element_of(self.dtype)
        if not self.sums_rows:
            given = [matrix, vector, out]
            call_parallel(
                native_function(rows_dot, element, self._rows_at_once),
                given,
                [self.columns],
                self.rows,
                self.nanoseconds,
            )
            return
        memory = scratch(np, "vectors", (self.blocks, self.columns), out.dtype)
        given = [matrix, vector, out, memory]
        sizes = [self.rows, self.blocks]
        first = native_function(rows_sum, element, self.columns, True, False)
        call_parallel(first, given, sizes, self.blocks, self.nanoseconds)
        call_parallel(
            native_function(rows_sum, element, self.columns, False, True), given, sizes, 1, 0
        )


@lru_cache(maxsize=256)
def _write_cached(write: Callable[..., tuple[str, str]], *args: Any) -> tuple[str, str]:
    return write(*args)


def plan_vector_product(
    a: tuple[int, ...], b: tuple[int, ...], dtype: str, transpose_a: bool, transpose_b: bool
) -> VectorProduct | None:
    """Plan the product of a matrix and a vector, contiguous.

    None if neither operand is a vector, or the matrix is small.
    """
    if len(a) != 2 or len(b) != 2 or dtype not in ("float32", "float64"):
        return None
    m = a[1] if transpose_a else a[0]
    n = b[0] if transpose_b else b[1]
    made = partial(VectorProduct, dtype=dtype)
    if n == 1 and a[0] * a[1] > _LEAST:
        return made(*a, sums_rows=transpose_a, swapped=False)
    if m == 1 and b[0] * b[1] > _LEAST:
        return made(*b, sums_rows=not transpose_b, swapped=True)
    return None
