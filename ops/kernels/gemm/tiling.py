"""The tiling of matrix products: the cheapest one by a cost model, from the sizes alone.

The kernel (`macrokernel.py`) gives the same bits for every tiling, so this is a matter of time
only.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.gemm.kernel_form import COPIED, EXCHANGED, IN_PLACE, GemmForm
from graphflow.ops.kernels.jit.compiler import vector_width

ELEMENTS = {"float32": "float", "float64": "double"}
_PACKING_USES = 4
"""Tiles that use a panel, or panels that use a tile, from which packing it pays."""
LONG_K = 256
"""Terms from which a transposed operand, whose rows lie far apart, is packed."""
_LONG_K_NARROW = 63
"""The same for rows a page or more apart with registers of 32 bytes. More tiles then read the same
lines, of which the first cache keeps few that are so far apart."""
_IN_PLACE_BYTES = 64 << 10
"""Bytes of y up to which its panels are used in place."""
_LIMITS_64, _LIMITS_32 = (256, 1100 << 10, 24 << 10), (1024, 4 << 20, 64 << 10)
"""With registers of 64 and of 32 bytes, at most: rows of a block, for each of which a panel is
packed again; bytes of its packed tiles; bytes of a panel of packed tiles at a time, which must
share the first cache. Narrow registers make panels of few columns, so that packing again and
continuing stored sums cost more than reading from the second cache."""
_PANEL_BYTES, _PANEL_BYTES_FAR = 48 << 10, 96 << 10
"""Bytes of a panel at a time, at most, if several tiles use it: with rows of x in place, and with
such rows a page or more apart, since each turn costs a page of each."""
_PAGE = 4096
_ALIASED_K = 64
"""Terms from which rows of a panel that start at the same place of a page evict each other, with
registers of 32 bytes. `_ALIASED_CYCLES`: cycles that a register of such a row then takes each time.
"""
_ALIASED_CYCLES = 2.5
_TLB_PAGES = 256
"""Pages of a panel from which several panels take turns chunk by chunk: the TLB holds some hundred.
"""
_GROUPED_PANEL_BYTES = 32 << 10
"""Bytes of a panel at a time, at most, if panels take turns."""
_GROUP_BYTES = 256 << 10
"""Bytes of the result that panels that take turns continue from, at most."""
_FAR_ROW_BYTES, _FAR_BYTES = 2048, 3 << 19
"""Bytes between rows, and of an operand, from which no prefetcher follows tiles that read parts of
many rows, and lines come from afar."""
_FAR_CYCLES = 50
"""Cycles for such a line."""
_EVICTED_CYCLES = 12
"""Cycles for reading part of a line, or of a page, that is evicted before its next part is read."""


@dataclass(frozen=True)
class GemmTiling:
    """A tiling of a product.

    Attributes:
        tall: tiles of the full height.
        block: tiles that are packed together.
        group: columns of the panels that take turns.
        chunk: terms at a time.
        x, y: layouts.
        cycles: a rough estimate of one thread's time.
    """

    form: GemmForm
    tiles: int
    tall: int
    block: int
    group: int
    chunk: int
    x: int
    y: int
    cycles: float


@cache
def choose_tiling(m: int, k: int, n: int, dtype: str, x: int, y: int, buffered: bool) -> GemmTiling:
    """Return the cheapest tiling of m rows of length k times n columns.

    Args:
        x, y: layouts of tiles and panels if they are packed; x may be IN_PLACE if it cannot be
            packed.
        buffered: whether `out` is stored by columns or added to.
    """
    # 16 registers leave two rows of four vectors, too few chains to hide the latency.
    most = 4 if vector_width() == 16 else 3
    cuts = [_tiling_with(m, k, n, dtype, x, y, buffered, vectors) for vectors in range(1, most + 1)]
    return min(cuts, key=lambda cut: cut.cycles)


def _tiling_with(
    m: int, k: int, n: int, dtype: str, x: int, y: int, buffered: bool, vectors: int
) -> GemmTiling:
    lanes = vector_width()
    registers, (rows, packed, near) = (32, _LIMITS_64) if lanes == 16 else (16, _LIMITS_32)
    item = np.dtype(dtype).itemsize
    width = lanes * 4 // item
    most = min(14, (registers - 1 - vectors) // vectors)
    tiles = max(1, -(-m // most))
    height = max(1, -(-m // tiles))
    if height == most - 1 and height * tiles == m:
        height = most  # all tiles then have a row less, which saves a form
    form = GemmForm(ELEMENTS[dtype], width, height, vectors)
    panels = -(-n // form.columns)
    block = -(-rows // height)
    square = 5 / width  # cycles for an element of a transpose
    cycles = 0.0
    distant = k > (_LONG_K_NARROW if lanes < 16 and m * item >= _PAGE else LONG_K)
    if x == COPIED and distant and panels >= _PACKING_USES:
        block = max(1, min(block, packed // (height * max(k, 1) * item)))
        cycles += tiles * k * 2
    elif x == COPIED and (distant or height > 8):  # each tile reads parts of many lines
        cycles += tiles * panels * k * (_EVICTED_CYCLES if distant and tiles > 1 else 1)
        x = IN_PLACE
    else:
        x = IN_PLACE
    blocks = -(-tiles // block)
    block = -(-tiles // blocks)
    paged = lanes < 16 and n * item % _PAGE == 0 and k >= _ALIASED_K
    wide = y != EXCHANGED and k * min(n * item, _PAGE) > _TLB_PAGES * _PAGE
    if y == EXCHANGED:
        cycles += blocks * k * panels * form.columns * square
    elif (
        min(tiles, block) >= (2 if wide or paged else _PACKING_USES)
        and k * n * item > _IN_PLACE_BYTES
    ):
        lines = 2 if paged and form.columns * item % 64 else 0  # lines that two panels share
        cycles += blocks * k * panels * (vectors + 2 + lines)
        cycles += 0.05 * m * k * panels * (vectors == 4)
    else:
        cycles += 0 if n % form.columns == 0 else k * (vectors + 2)
        cycles += m * k * panels * (0.5, 0.08, 0.0, 0.0)[vectors - 1]
        if paged and (tiles > 1 or vectors == 1):
            cycles += tiles * k * panels * max(2, vectors) * _ALIASED_CYCLES
        y = IN_PLACE
    if buffered:
        cycles += m * n * square
    # Two multiply-adds and two loads a cycle; a chain waits four cycles for each term.
    term = max(m * vectors / 2, tiles * max((height + vectors + 1) / 2, 4))
    if vectors < 4 and m * k * item > packed:  # fewer distant rows at a time are better
        term *= 1.05
    cycles += panels * (k * term + tiles * (20 + 2 * height * vectors))
    usual = 4 if registers == 32 else 2
    if (vectors, height) != (usual, 6):  # the most common form is compiled already
        cycles *= 1.03
    far = k * item >= _PAGE
    panel = near if x else _PANEL_BYTES_FAR if far else _PANEL_BYTES
    group = form.columns
    if wide and not buffered:
        panel = panel if far and not x and m > rows else _GROUPED_PANEL_BYTES
        group *= max(1, _GROUP_BYTES // (min(m, block * height) * group * item))
    chunks = -(-k // max(1, panel // (form.columns * item))) if tiles > 1 else 1
    chunk = max(1, -(-k // max(1, chunks)))
    return GemmTiling(form, tiles, m - tiles * (height - 1), block, group, chunk, x, y, cycles)


def far_cycles(row_bytes: int, matrix_bytes: int, matrices: int) -> float:
    """Return what it takes, beyond a tiling's cycles, to read x in place across its rows.

    Args:
        row_bytes: from one row of memory to the next.
        matrices: matrices of x in the batch.
    """
    if row_bytes < _FAR_ROW_BYTES or matrix_bytes * matrices < _FAR_BYTES:
        return 0.0
    return matrix_bytes / 64 * _FAR_CYCLES
