"""Plan products of bfloat16 matrices by AMX tiles.

Operands are stored by rows or by columns. Where AMX may not be used, such a product is computed in
float32 like any other one, with other last bits. On one kind of processor an element's bits follow
from its row, its column and the number of terms alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from functools import cache, lru_cache

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ir.spec import broadcast_shapes
from graphflow.ops.kernels.gemm.amx_kernel import (
    AmxForm,
    AmxSize,
    write_amx_product,
)
from graphflow.ops.kernels.gemm.amx_squares import SQUARE
from graphflow.ops.kernels.gemm.amx_tiles import BLOCK, ITEM, PANEL
from graphflow.ops.kernels.gemm.gemm import effective_strides, join_batch_axes, swap_last_two
from graphflow.ops.kernels.gemm.native_product import NativeProduct
from graphflow.ops.kernels.jit.amx_permission import may_use_amx
from graphflow.ops.kernels.jit.compiler import TaskShare, cut_rows, name_module

_CHUNK = 1024
"""Terms that are packed together, at most."""
_PACKED_BYTES = 1 << 19
"""Bytes of packed rows, at most: a quarter of the second cache of server processors."""
_NEAR_BYTES, _NEAR_PANELS = 1 << 20, 8
"""Bytes of packed columns up to which the second cache holds all of them. Panels of rows, from so
many on, then come one by one, so that results are written page by page."""
_KEPT_BYTES = 1 << 24
"""Bytes of packed columns that are kept for all blocks of rows, at most."""
_MOST_WAITING_COLUMNS = 1 << 16
"""Columns whose sums wait for the next chunk, at most. They take 1 KiB or 2 each."""
_SQUARE_CYCLES = 64
"""Cycles of 32 rows, 32 columns and 32 terms."""
_PACK_CYCLES = 60, 140
"""Cycles for packing 32 lines of 32 terms as they are, and transposed."""
_ROUND_CYCLES = 120
"""Cycles for storing 32 rows and 32 columns of the result."""


@dataclass(frozen=True)
class AmxProduct(NativeProduct):
    """A product of bfloat16 matrices by AMX tiles; `AmxSize` names its sizes."""

    form: AmxForm = field(kw_only=True)

    @property
    def kernel(self) -> tuple[str, str]:
        """The kernel's name and the text of its module."""
        return _kernel(self.form)

    def cut(self, count: int) -> list[TaskShare]:
        """Cut the product into at most `count` shares: some rows, or some columns of one matrix if
        these are more, since each share packs the other operand as a whole."""
        sizes = self.sizes
        columns = sizes[AmxSize.COLUMNS]
        panels = -(-columns // PANEL)
        is_one = self.units == sizes[AmxSize.PANELS]
        if not is_one or panels <= self.units or count < 2:
            return cut_rows(self.units, 1, count)
        parts = min(count, panels)
        ends = [panels * i // parts * PANEL for i in range(parts)]
        steps = (0, sizes[AmxSize.B_COLUMN], ITEM)
        return self._cut_columns([*ends, columns], AmxSize.COLUMNS, steps)


@cache
def _kernel(form: AmxForm) -> tuple[str, str]:
    return name_module(*write_amx_product(form))


def plan_half_product(
    a: tuple[int, ...], b: tuple[int, ...], transpose_a: bool = False, transpose_b: bool = False
) -> AmxProduct | None:
    """Plan the product of contiguous bfloat16 arrays of these shapes.

    None if AMX may not be used, there are no terms, or the axes of the batch do not join to two.
    """
    return _plan(a, b, transpose_a, transpose_b) if may_use_amx() else None


@lru_cache(maxsize=4096)
def _plan(
    a: tuple[int, ...], b: tuple[int, ...], transpose_a: bool, transpose_b: bool
) -> AmxProduct | None:
    m, k = a[:-3:-1] if transpose_a else a[-2:]
    n = b[-2] if transpose_b else b[-1]
    batch: tuple[int, ...] = broadcast_shapes(a[:-2], b[:-2])  # type: ignore[assignment]
    strides = [
        _strides_of(shape, turned, len(batch) + 2)
        for shape, turned in ((a, transpose_a), (b, transpose_b), ((*batch, m, n), False))
    ]
    axes = join_batch_axes(batch, strides)
    if axes is None or not k:
        return None
    (inner, count), outer = axes
    form = AmxForm(transpose_a, transpose_b)
    blocks, scratch = _cut_blocks(m, k, n)
    sizes = {
        AmxSize.ROWS: m,
        AmxSize.COLUMNS: n,
        AmxSize.TERMS: k,
        AmxSize.A_LINE: strides[0][-1] if transpose_a else strides[0][-2],
        AmxSize.A_ROW: strides[0][-2],
        AmxSize.A_TERM: strides[0][-1],
        AmxSize.B_LINE: strides[1][-1] if transpose_b else strides[1][-2],
        AmxSize.B_TERM: strides[1][-2],
        AmxSize.B_COLUMN: strides[1][-1],
        AmxSize.OUT_ROW: strides[2][-2],
        AmxSize.INNER: inner,
        AmxSize.A_OUTER: outer[0][0],
        AmxSize.A_INNER: outer[0][1],
        AmxSize.B_OUTER: outer[1][0],
        AmxSize.B_INNER: outer[1][1],
        AmxSize.OUT_OUTER: outer[2][0],
        AmxSize.OUT_INNER: outer[2][1],
        **blocks,
    }
    units = count * sizes[AmxSize.PANELS] if m and n else 0
    time = count * _estimate_nanoseconds(m, k, n, form)
    return AmxProduct(tuple(sizes[s] for s in AmxSize), units, False, time, scratch, form=form)


def _strides_of(shape: Sequence[int], turned: bool, rank: int) -> tuple[int, ...]:
    """Return the strides of a contiguous array, as an operand or result of a product."""
    steps = [ITEM]
    for size in shape[:0:-1]:
        steps.insert(0, steps[0] * size)
    own = effective_strides(tuple(shape), tuple(steps), ITEM)
    return (0,) * (rank - len(shape)) + (swap_last_two(own) if turned else own)


def _cut_blocks(m: int, k: int, n: int) -> tuple[dict[AmxSize, int], int]:
    """Return the sizes of blocks and their places in scratch memory, and the bytes of that."""
    panels, column_panels = -(-m // PANEL), -(-n // PANEL)
    chunks = -(-k // _CHUNK) if n <= _MOST_WAITING_COLUMNS else 1
    chunk = -(-k // chunks // PANEL) * PANEL
    most = max(1, _PACKED_BYTES // (PANEL * ITEM * min(k, chunk)))
    if panels >= _NEAR_PANELS and k * n * ITEM <= _NEAR_BYTES:
        most = 1
    blocks = max(1, -(-panels // most))
    block = max(1, -(-panels // blocks))
    is_kept = blocks > 1 and k * n * ITEM <= _KEPT_BYTES
    packed = block * (chunk // PANEL) * BLOCK
    kept = -(-k // PANEL) * BLOCK if is_kept else 0
    sums = packed + (kept * column_panels if is_kept else chunk // PANEL * BLOCK)
    waits = chunks > 1
    sizes = {
        AmxSize.PANELS: panels,
        AmxSize.BLOCK: block,
        AmxSize.CHUNK: chunk,
        AmxSize.B_PANELS: packed,
        AmxSize.B_STEP: kept,
        AmxSize.SUMS: sums,
        AmxSize.SUMS_PANEL: SQUARE if waits else 0,
        AmxSize.SUMS_STEP: block * SQUARE if waits else 0,
    }
    return sizes, sums + SQUARE * (block * column_panels if waits else 1)


def _estimate_nanoseconds(m: int, k: int, n: int, form: AmxForm) -> float:
    """Estimate roughly one thread's time for one matrix."""
    rows, terms, columns = (max(1, -(-size // PANEL)) for size in (m, k, n))
    cycles = rows * columns * (terms * _SQUARE_CYCLES + _ROUND_CYCLES)
    cycles += rows * terms * _PACK_CYCLES[form.turned_a]
    cycles += columns * terms * _PACK_CYCLES[form.turned_b]
    return cycles / 2.8 + 100
