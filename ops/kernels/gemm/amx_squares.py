"""Squares of a product by AMX tiles, in LLVM IR: sums of 32 rows and 32 columns, and rounding.

A square's sums are four tiles of 1 KiB in memory, the upper two first. While tiles multiply, the
vector units round the square before, some rows for each block of terms, since a processor does not
look far enough ahead to overlap the two by itself.
"""

from __future__ import annotations

from graphflow.ops.kernels.gemm.amx_tiles import BLOCK, HALVES, LINE, PANEL, SIDE, TILE, TileWriter

SQUARE = 4 * TILE
"""Bytes of the sums of a square."""
_ROUNDING = ("ptr %before", "ptr %to", "i64 %next", "i64 %rows", "i64 %columns")
CONFIGURATION = (
    "@amx_configuration = internal constant [64 x i8] ["
    + ", ".join(
        f"i8 {value}" for value in (1, *[0] * 15, *[LINE, 0] * 8, *[0] * 16, *[SIDE] * 8, *[0] * 8)
    )
    + "], align 64"
)
"""Eight tiles of 16 rows and 64 bytes: a palette, bytes of rows from byte 16, rows from byte 48."""


def write_square(rows: int) -> TileWriter:
    """Write the sums of a square over some blocks of terms, and the rounding of another square.

    Sums continue from stored ones, or from zero. `%step` rows of the other square are rounded for
    each block of terms.

    Args:
        rows: tiles above each other, 1 or 2.
    """
    f = TileWriter(
        f"square{rows}",
        ["ptr %a", "ptr %b", "i64 %bytes", "ptr %sums", "i1 %more", "i64 %step", *_ROUNDING],
    )
    mask = f.first_lanes("%columns")
    tiles = [2 * row + column for row in range(rows) for column in range(2)]
    with f.when("%more"):
        for number in tiles:
            _call_tile(f, "tileloadd64", number, f.gep("%sums", number * TILE))
    with f.when(f.write("xor i1 %more, true")):
        for number in tiles:
            f.declared["declare void @llvm.x86.tilezero(i8)"] = None
            f.write_effect(f"call void @llvm.x86.tilezero(i8 {number})")
    with f.loop(0, "%bytes", BLOCK) as k:
        _write_block(f, rows, k)
        first = f.mul(f.write(f"lshr i64 {k}, {BLOCK.bit_length() - 1}"), "%step")
        with f.loop(first, f.minimum(f.add(first, "%step"), "%rows")) as row:
            _round_row(f, row, mask)
    for number in tiles:
        _call_tile(f, "tilestored64", number, f.gep("%sums", number * TILE))
    return f


def _write_block(f: TileWriter, rows: int, k: str) -> None:
    """Write the products of a block of terms; tiles 4 and 5 hold rows, 6 and 7 columns."""
    f.declared["declare void @llvm.x86.tdpbf16ps(i8, i8, i8)"] = None
    for i in range(2):
        _call_tile(f, "tileloadd64", 6 + i, f.gep(f.gep("%b", k), i * TILE))
    for row in range(rows):
        _call_tile(f, "tileloadd64", 4 + row, f.gep(f.gep("%a", k), row * TILE))
        for column in range(2):
            f.write_effect(
                f"call void @llvm.x86.tdpbf16ps(i8 {2 * row + column}, i8 {4 + row}, "
                f"i8 {6 + column})"
            )


def _call_tile(f: TileWriter, name: str, tile: int, pointer: str) -> None:
    f.declared[f"declare void @llvm.x86.{name}(i8, ptr, i64)"] = None
    f.write_effect(f"call void @llvm.x86.{name}(i8 {tile}, ptr {pointer}, i64 {LINE})")


def write_round() -> TileWriter:
    """Write the rounding of a square to bfloat16 rows of the result."""
    f = TileWriter("round", _ROUNDING)
    mask = f.first_lanes("%columns")
    with f.loop(0, "%rows") as row:
        _round_row(f, row, mask)
    return f


_UNDEALT = [SIDE * (c // 4 % 2) + 4 * (c // 8) + c % 4 for c in range(PANEL)]
"""The lane of two tiles' lines in which each column is."""


def _round_row(f: TileWriter, row: str, mask: str) -> None:
    """Write the rounding of a row, and its columns in order."""
    sums, halves = f"<{SIDE} x float>", f"<{PANEL} x bfloat>"
    name = "@llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    f.declared[f"declare {halves} {name}({sums}, {sums})"] = None
    # The lower tiles begin a tile later than their rows alone would.
    lower = f.mul(f.write(f"and i64 {row}, {SIDE}"), TILE // SIDE)
    line = f.gep("%before", f.add(f.mul(row, LINE), lower))
    first, second = (
        f.write(f"load {sums}, ptr {f.gep(line, tile * TILE)}, align {LINE}") for tile in range(2)
    )
    rounded = f.write(f"call {halves} {name}({sums} {second}, {sums} {first})")
    bits = f.write(f"bitcast {halves} {rounded} to {HALVES}")
    value = f.shuffle(bits, "poison", _UNDEALT)
    f.masked_store(value, f.gep("%to", f.mul(row, "%next")), mask)
