"""Tiles for AMX in LLVM IR: how operands of bfloat16 are packed into them.

A panel is 32 rows of the left operand, or 32 columns of the right one, along a chunk of terms. It
is a row of blocks of 32 terms. A block holds two tiles of 1 KiB, each 16 lines of 64 bytes:

    left     a line is 32 terms of a row; tiles hold rows 0 to 15 and 16 to 31
    right    a line is two terms of 16 columns, pair by pair; the columns are dealt to both tiles
             in fours: 0 to 3 to the first, 4 to 7 to the second, 8 to 11 to the first, …

Interleaving two rows within 16 bytes, which processors do in one step, deals columns so. Terms,
rows and columns that do not exist are zeros. All functions that pack take the same arguments:
where an operand begins, the bytes from line to line, where the panel begins, and the numbers of
terms and lines, 32 lines at most.
"""

from __future__ import annotations

from collections.abc import Sequence

from graphflow.ops.kernels.codegen.function_writer import FunctionWriter
from graphflow.ops.kernels.codegen.vector_writer import transpose_registers

SIDE = 16
"""Rows of a tile, and columns of a tile of the result."""
PANEL = 2 * SIDE
"""Rows or columns of a panel, and terms of a block."""
LINE = 64
TILE = SIDE * LINE
BLOCK = 2 * TILE
"""Bytes of a tile's line, of a tile, and of a block of a panel."""
ITEM = 2
_ARGUMENTS = ("ptr %from", "i64 %next", "ptr %to", "i64 %terms", "i64 %lines")
HALVES, _WORDS = f"<{PANEL} x i16>", f"<{SIDE} x i32>"


class TileWriter(FunctionWriter):
    """Writes a function over vectors of 32 elements of 16 bits."""

    def __init__(self, name: str, parameters: Sequence[str] = _ARGUMENTS) -> None:
        super().__init__(f"amx_{name}", parameters, "i16", PANEL)
        self.zero = "zeroinitializer"

    def keep_if(self, condition: str, mask: str) -> str:
        """Write a mask, or one without lanes if a condition does not hold."""
        return self.write(f"select i1 {condition}, {self.mask} {mask}, {self.mask} zeroinitializer")

    def transpose_words(self, rows: Sequence[str]) -> list[str]:
        """Write the transpose of a square of pairs of elements, as vectors of these pairs."""
        words = [self.write(f"bitcast {HALVES} {row} to {_WORDS}") for row in rows]
        return transpose_registers(words, self._shuffle_words)

    def _shuffle_words(self, a: str, b: str, lanes: Sequence[int]) -> str:
        picked = ", ".join(f"i32 {i}" for i in lanes)
        return self.write(f"shufflevector {_WORDS} {a}, {_WORDS} {b}, <{SIDE} x i32> <{picked}>")

    def store_words(self, value: str, pointer: str) -> None:
        self.write_effect(f"store {_WORDS} {value}, ptr {pointer}, align {LINE}")


def dealt_line(tile: int, number: int) -> int:
    """Return the line of a panel that is dealt to a tile as its line of some number."""
    return 8 * (number // 4) + 4 * tile + number % 4


def write_pack_rows() -> FunctionWriter:
    """Write the packing of rows of a left operand whose terms are neighbours."""
    f = TileWriter("pack_rows")
    rest = f.write(f"and i64 %terms, {PANEL - 1}")
    whole = f.sub("%terms", rest)
    mask, some = f.first_lanes(rest), f.compare("sgt", rest, 0)
    end = f.add("%terms", PANEL - 1)
    with f.loop(0, "%lines") as row:
        source, target = f.gep("%from", f.mul(row, "%next")), _row_target(f, row)
        with f.loop(0, whole, PANEL) as k:
            f.store(f.load(f.gep(source, f.mul(k, ITEM))), f.gep(target, f.mul(k, LINE)))
        with f.when(some):
            last = f.masked_load(f.gep(source, f.mul(whole, ITEM)), mask)
            f.store(last, f.gep(target, f.mul(whole, LINE)))
    filled = f.select(f.compare("sgt", "%lines", SIDE), "i64", str(PANEL), str(SIDE))
    with f.loop("%lines", filled) as row:
        target = _row_target(f, row)
        with f.loop(PANEL - 1, end, PANEL) as k:
            f.store(f.zero, f.gep(target, f.mul(f.sub(k, str(PANEL - 1)), LINE)))
    return f


def _row_target(f: FunctionWriter, row: str) -> str:
    """Write where a row of a left panel goes in its first block."""
    tile = f.mul(f.write(f"lshr i64 {row}, {SIDE.bit_length() - 1}"), TILE)
    return f.gep(f.gep("%to", tile), f.mul(f.write(f"and i64 {row}, {SIDE - 1}"), LINE))


def write_pack_pairs() -> FunctionWriter:
    """Write the packing of columns of a right operand whose columns are neighbours."""
    f = TileWriter("pack_pairs")
    mask = f.first_lanes("%lines")
    end = f.write(f"and i64 {f.add('%terms', PANEL - 1)}, {-PANEL}")
    even = f.write(f"and i64 %terms, {-2}")

    def pack(k: str, is_whole: bool) -> None:
        low, high = _interleave(f, k, mask, is_whole)
        block = f.mul(f.write(f"lshr i64 {k}, {PANEL.bit_length() - 1}"), BLOCK)
        line = f.mul(f.write(f"and i64 {k}, {PANEL - 1}"), LINE // 2)
        target = f.gep(f.gep("%to", block), line)
        f.store(low, target)
        f.store(high, f.gep(target, TILE))

    with f.loop(0, even, 2) as k:
        pack(k, True)
    with f.loop(even, end, 2) as k:
        pack(k, False)
    return f


def _interleave(f: TileWriter, k: str, mask: str, is_whole: bool = False) -> tuple[str, str]:
    """Write two terms of 32 lines, pair by pair: of the first and of the second tile's lines.

    Args:
        is_whole: whether both terms exist.
    """
    rows = []
    for i in range(2):
        term = f.add(k, i)
        exists = mask if is_whole else f.keep_if(f.compare("slt", term, "%terms"), mask)
        rows.append(f.masked_load(f.gep("%from", f.mul(term, "%next")), exists))
    low, high = (
        f.shuffle(
            rows[0],
            rows[1],
            [dealt_line(tile, number) + PANEL * row for number in range(SIDE) for row in range(2)],
        )
        for tile in range(2)
    )
    return low, high


def write_pack_columns() -> FunctionWriter:
    """Write the packing of columns of a right operand whose terms are neighbours."""
    f = TileWriter("pack_columns")
    there = [f.compare("sgt", "%lines", c) for c in range(PANEL)]
    with f.loop(0, "%terms", PANEL) as k:
        mask = f.first_lanes(f.sub("%terms", k))
        source, target = f.gep("%from", f.mul(k, ITEM)), f.gep("%to", f.mul(k, LINE))
        for tile in range(2):
            rows = []
            for number in range(SIDE):
                line = dealt_line(tile, number)
                place = f.gep(source, f.mul("%next", line))
                rows.append(f.masked_load(place, f.keep_if(there[line], mask)))
            for number, words in enumerate(f.transpose_words(rows)):
                f.store_words(words, f.gep(target, tile * TILE + number * LINE))
    return f


def write_pack_turned_rows() -> FunctionWriter:
    """Write the packing of rows of a left operand whose rows are neighbours."""
    f = TileWriter("pack_turned_rows")
    mask = f.first_lanes("%lines")
    with f.loop(0, "%terms", PANEL) as k:
        target = f.gep("%to", f.mul(k, LINE))
        for tile in range(2):
            pairs = [_interleave(f, f.add(k, 2 * i), mask)[tile] for i in range(SIDE)]
            for number, words in enumerate(f.transpose_words(pairs)):
                f.store_words(words, f.gep(target, dealt_line(tile, number) * LINE))
    return f
