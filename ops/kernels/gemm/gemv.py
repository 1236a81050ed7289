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
from graphflow.ops.kernels.jit.compiler import KernelTask, cut_rows
from graphflow.ops.kernels.jit.scratch_memory import scratch

_LEAST_ELEMENTS = 4096
"""Elements of a matrix below which other kernels are as fast."""
_STREAM_ROW_BYTES = 1 << 14
"""Bytes of a row from which four rows are read at a time, each a prefetch stream of its own.
Shorter rows form one stream, which comes from memory at up to five times the speed."""
_STRIP_VECTORS = 8  # vectors of a row whose sums are kept in registers
_BATCHED_ROW_BYTES, _BATCHED_ROWS = 4096, 8
"""Bytes of a row from which `_BATCHED_ROWS` rows are added to sums in memory at once. Shorter rows
come one at a time, as one stream."""
_TILE_BYTES = 1 << 14  # bytes of sums that the first cache holds
_BLOCK_ROWS, _MOST_BLOCKS = 512, 64  # rows of a block, at least, and blocks, at most
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
    """Write out[j] = Σ a[r, j]·x[r]: block sums (`begin`), and the sum of these (`end`).

    Pointers: a, x, out, and memory for a row of each block. Sizes: rows, blocks.

    Args:
        count: elements of a row.
    """
    flow = KernelWriter()
    sums = _RowsSum(flow, element, count)
    if begin:
        flow.loop("%start", "%stop", (), sums.sum_block)
    if end:
        sums.columns(sums.add_blocks)
    return flow.finish()


class _RowsSum:
    """Writes sums over the rows of a matrix, in strips of columns.

    A strip is `many` vectors from column j on; a mask leaves out columns beyond the last.
    """

    def __init__(self, flow: KernelWriter, element: str, count: int) -> None:
        self.flow, self.element, self.count = flow, element, count
        self.a, self.x, self.out, self.memory = (flow.pointer(i) for i in range(4))
        self.rows, self.blocks = (flow.size(i) for i in range(2))
        self.lanes = lanes_of(element)
        self.floats: Floats = flow.floats(self.lanes, element)
        self.zero = (f"<{self.lanes} x {element}>", "zeroinitializer")
        self.strip = _STRIP_VECTORS * self.lanes
        self.whole = count - count % self.strip

    def columns(
        self,
        body: Callable[[str, int, str | None], None],
        start: str = "0",
        stop: str | None = None,
    ) -> None:
        """Write body for the strips from `start` to `stop`, or to the end of the row."""
        self.flow.loop(
            start, stop or str(self.whole), (), lambda j: body(j, _STRIP_VECTORS, None), self.strip
        )
        left = self.count - self.whole
        if stop is None and left:
            used = self.count % self.lanes
            bits = ", ".join(f"i1 {'true' if i < used else 'false'}" for i in range(self.lanes))
            body(str(self.whole), -(-left // self.lanes), f"<{bits}>" if used else None)

    def sum_block(self, b: str) -> None:
        """Write the sums of a block of rows."""
        flow = self.flow
        first, last = (
            flow.step("udiv", flow.mul(self.rows, i), self.blocks) for i in (b, flow.add(b, 1))
        )
        target = flow.gep(self.memory, self.element, flow.mul(b, self.count))
        if self.count <= self.strip:
            self.columns(partial(self._sum_in_registers, first, last, target))
            return
        tile = _TILE_BYTES // BYTES[self.element] // self.strip * self.strip
        tiled = max(0, self.whole - 1) // tile * tile

        def sum_tile(j: str) -> None:
            self._sum_in_memory(first, last, target, j, flow.add(j, tile))

        flow.loop("0", tiled, (), sum_tile, tile)
        self._sum_in_memory(first, last, target, str(tiled), None)

    def _sum_in_registers(
        self, first: str, last: str, target: str, j: str, many: int, mask: str | None
    ) -> None:
        """Sum a strip in registers, row by row."""
        flow = self.flow

        def row(r: str, *totals: str) -> list[str]:
            line = flow.gep(self.a, self.element, flow.add(flow.mul(r, self.count), j))
            return self._accumulate(self._scale(r), line, many, mask, totals)

        totals = flow.loop(first, last, [self.zero] * many, row)
        self._store(flow.gep(target, self.element, j), many, mask, totals)

    def _sum_in_memory(
        self, first: str, last: str, target: str, start: str, stop: str | None
    ) -> None:
        """Sum a tile in memory, some rows at a time."""
        flow, element = self.flow, self.element

        def clear(j: str, many: int, mask: str | None) -> None:
            self._store(flow.gep(target, element, j), many, mask, ["zeroinitializer"] * many)

        def some(r: str, together: int) -> None:
            scales = [self._scale(flow.add(r, i)) for i in range(together)]
            lines = [
                flow.gep(self.a, element, flow.mul(flow.add(r, i), self.count))
                for i in range(together)
            ]

            def strip(j: str, many: int, mask: str | None) -> None:
                place = flow.gep(target, element, j)
                totals = self._load(place, many, mask)
                for scale, line in zip(scales, lines, strict=True):
                    totals = self._accumulate(scale, flow.gep(line, element, j), many, mask, totals)
                self._store(place, many, mask, totals)

            self.columns(strip, start, stop)

        self.columns(clear, start, stop)
        _loop_rows(
            flow,
            first,
            last,
            _BATCHED_ROWS if self.count * BYTES[element] >= _BATCHED_ROW_BYTES else 1,
            some,
        )

    def add_blocks(self, j: str, many: int, mask: str | None) -> None:
        """Write the sum of all blocks for a strip."""
        flow = self.flow

        def add(b: str, *sums: str) -> list[str]:
            place = flow.add(flow.mul(b, self.count), j)
            parts = self._load(flow.gep(self.memory, self.element, place), many, mask)
            return [self.floats.add(s, part) for s, part in zip(sums, parts, strict=True)]

        sums = flow.loop("0", self.blocks, [self.zero] * many, add)
        self._store(flow.gep(self.out, self.element, j), many, mask, sums)

    def _scale(self, r: str) -> str:
        """Load the vector's element of a row into all lanes."""
        place = self.flow.gep(self.x, self.element, r)
        scale = self.flow.load(self.element, place, BYTES[self.element])
        return self.flow.broadcast(self.lanes, self.element, scale)

    def _load(self, line: str, many: int, mask: str | None) -> list[str]:
        flow, element = self.flow, self.element
        return [
            flow.load_vector(
                self.lanes, element, flow.gep(line, element, v * self.lanes),
                mask if v == many - 1 else None,
            )
            for v in range(many)
        ]  # fmt: skip

    def _accumulate(
        self, scale: str, line: str, many: int, mask: str | None, totals: Sequence[str]
    ) -> list[str]:
        given = self._load(line, many, mask)
        return [self.floats.fma(x, scale, total) for x, total in zip(given, totals, strict=True)]

    def _store(self, place: str, many: int, mask: str | None, totals: Sequence[str]) -> None:
        for v, total in enumerate(totals):
            to = self.flow.gep(place, self.element, v * self.lanes)
            last = mask if v == many - 1 else None
            self.flow.store_vector(self.lanes, self.element, total, to, last)


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
        return min(_MOST_BLOCKS, -(-self.rows // _BLOCK_ROWS))

    @property
    def _rows_at_once(self) -> int:
        """Rows that are read at once."""
        return 4 if self.columns * np.dtype(self.dtype).itemsize >= _STREAM_ROW_BYTES else 1

    @property
    def nanoseconds(self) -> float:
        return self.rows * (self.columns * np.dtype(self.dtype).itemsize * 0.06 + 4)

    @property
    def task(self) -> KernelTask:
        """The product as an entry of a table of native calls."""
        element, order = element_of(self.dtype), (1, 0) if self.swapped else ()
        if not self.sums_rows:
            name, text = _write_cached(rows_dot, element, self._rows_at_once)
            return KernelTask(
                name, text, (self.columns,), self.rows, self.nanoseconds, 0, order,
                cut=partial(cut_rows, self.rows, _LINE // 4),
            )  # fmt: skip
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
    if n == 1 and a[0] * a[1] > _LEAST_ELEMENTS:
        return made(*a, sums_rows=transpose_a, swapped=False)
    if m == 1 and b[0] * b[1] > _LEAST_ELEMENTS:
        return made(*b, sums_rows=not transpose_b, swapped=True)
    return None
