"""How a product of matrices is cut into tiles and panels: the cheapest way, by its sizes alone.

The kernel (`macrokernel.py`) gives an element the same bits however it is cut, so that what is
chosen here is a matter of time only.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.gemm.kernel_form import COPIED, EXCHANGED, IN_PLACE, GemmForm
from graphflow.ops.kernels.jit.compiler import vector_width

ELEMENTS = {"float32": "float", "float64": "double"}
_REUSED = 4
"""Tiles that use a panel, or panels that use a tile, from which it pays to pack it."""
LONG = 256
"""Terms from which columns of a transposed operand are packed, whose rows are far from each
other."""
_LONG_NARROW = 63
"""The same for rows that begin a page or more from each other, with registers of 32 bytes: more
tiles read the same lines, of which the near cache keeps few that are so far apart."""
_NEAR = 64 << 10
"""Bytes of y up to which its panels are used where they are."""
_WIDE, _NARROW = (256, 1100 << 10, 24 << 10), (1024, 4 << 20, 64 << 10)
"""At most, with registers of 64 bytes and of 32: rows of a block, for each of which a panel is
packed anew; bytes of its packed tiles; bytes of a panel of packed tiles at a time, which want the
near cache, too. Narrow registers make panels of so few columns that packing them once more, and
going on from sums that were stored, cost more than tiles and panels from afar do."""
_PANEL, _PANEL_FAR = 48 << 10, 96 << 10
"""Bytes of a panel at a time, at most, where several tiles use it: of rows of x where they are; of
such that begin a page or more from each other, since each time costs a page of each."""
_PAGE = 4096
_TURNED = 64
"""Terms from which rows of a panel that begin at the same place of a page each push each other out
of the near cache, so that all tiles find them far, with registers of 32 bytes; `_AGAIN`: cycles
that a register of such a row takes each time."""
_AGAIN = 2.5
_PAGES = 256
"""Pages that a panel lies in from which several panels take turns, chunk by chunk: the processor
knows the places of some hundred pages at a time."""
_PANEL_GROUPED = 32 << 10
"""Bytes of a panel at a time, at most, where it takes turns."""
_GROUP = 256 << 10
"""Bytes of the result, at most, that panels that take turns go on from."""
_FAR = 12
"""Cycles for what is read of a line, or of some lines of a page, where those read after it are on
others, so many that it is far again when its turn comes."""


@dataclass(frozen=True)
class GemmTiling:
    """How a product is cut into tiles and panels, by its sizes alone.

    Attributes:
        tall: tiles of the full height.
        group: columns of the panels that take turns.
        x, y: layouts.
        cycles: a rough guess of one thread's time.
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
    """The cheapest cut of m rows of length k times n columns.

    Args:
        x, y: how tiles and panels are packed, if they are; x may be IN_PLACE: they cannot be.
        buffered: `out` is stored by columns or added to.
    """
    # Of 16 registers two rows of four are left, each of which waits for its last term.
    most = 4 if vector_width() == 16 else 3
    cuts = [_tiling_with(m, k, n, dtype, x, y, buffered, vectors) for vectors in range(1, most + 1)]
    return min(cuts, key=lambda cut: cut.cycles)


def _tiling_with(
    m: int, k: int, n: int, dtype: str, x: int, y: int, buffered: bool, vectors: int
) -> GemmTiling:
    lanes = vector_width()
    registers, (rows, packed, near) = (32, _WIDE) if lanes == 16 else (16, _NARROW)
    item = np.dtype(dtype).itemsize
    width = lanes * 4 // item
    most = min(14, (registers - 1 - vectors) // vectors)
    tiles = max(1, -(-m // most))
    height = max(1, -(-m // tiles))
    if height == most - 1 and height * tiles == m:
        height = most  # of which all tiles have a row less: one form fewer
    form = GemmForm(ELEMENTS[dtype], width, height, vectors)
    panels = -(-n // form.columns)
    block = -(-rows // height)
    square = 5 / width  # cycles for an element of an exchange
    cycles = 0.0
    distant = k > (_LONG_NARROW if lanes < 16 and m * item >= _PAGE else LONG)
    if x == COPIED and distant and panels >= _REUSED:
        block = max(1, min(block, packed // (height * max(k, 1) * item)))
        cycles += tiles * k * 2
    elif x == COPIED and (distant or height > 8):  # each tile reads a part of many lines
        cycles += tiles * panels * k * (_FAR if distant and tiles > 1 else 1)
        x = IN_PLACE
    else:
        x = IN_PLACE
    blocks = -(-tiles // block)
    block = -(-tiles // blocks)
    paged = lanes < 16 and n * item % _PAGE == 0 and k >= _TURNED
    wide = y != EXCHANGED and k * min(n * item, _PAGE) > _PAGES * _PAGE
    if y == EXCHANGED:
        cycles += blocks * k * panels * form.columns * square
    elif min(tiles, block) >= (2 if wide or paged else _REUSED) and k * n * item > _NEAR:
        lines = 2 if paged and form.columns * item % 64 else 0  # of which two panels have a part
        cycles += blocks * k * panels * (vectors + 2 + lines)
        cycles += 0.05 * m * k * panels * (vectors == 4)
    else:
        cycles += 0 if n % form.columns == 0 else k * (vectors + 2)
        cycles += m * k * panels * (0.5, 0.08, 0.0, 0.0)[vectors - 1]
        if paged and (tiles > 1 or vectors == 1):
            cycles += tiles * k * panels * max(2, vectors) * _AGAIN
        y = IN_PLACE
    if buffered:
        cycles += m * n * square
    # Two multiply-adds and two loads a cycle; a chain waits four cycles for each term.
    term = max(m * vectors / 2, tiles * max((height + vectors + 1) / 2, 4))
    if vectors < 4 and m * k * item > packed:  # the fewer rows from afar at a time the better
        term *= 1.05
    cycles += panels * (k * term + tiles * (20 + 2 * height * vectors))
    usual = 4 if registers == 32 else 2
    if (vectors, height) != (usual, 6):  # the form that most products have is compiled already
        cycles *= 1.03
    far = k * item >= _PAGE
    panel = near if x else _PANEL_FAR if far else _PANEL
    group = form.columns
    if wide and not buffered:
        panel = panel if far and not x and m > rows else _PANEL_GROUPED
        group *= max(1, _GROUP // (min(m, block * height) * group * item))
    chunks = -(-k // max(1, panel // (form.columns * item))) if tiles > 1 else 1
    chunk = max(1, -(-k // max(1, chunks)))
    return GemmTiling(form, tiles, m - tiles * (height - 1), block, group, chunk, x, y, cycles)
