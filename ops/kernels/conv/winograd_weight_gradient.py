"""The gradient of a Winograd convolution in its weights.

Cotangents and pixels are transformed, multiplied over all tiles, and transformed back to weights:
the same scheme in the other direction.
"""

from __future__ import annotations

from typing import Any

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.direct.float_loops import add_floats
from graphflow.ops.kernels.conv.winograd import (
    ImagePlanes,
    image_planes,
    multiply_tiles,
    transform_tiles,
    vector_count,
)
from graphflow.ops.kernels.conv.winograd_text import (
    PANEL,
    ROW,
    transform,
    unpack_planes,
)
from graphflow.ops.kernels.conv.winograd_tiles import (
    NUMBERS,
    ConvGeometry,
    ScratchBytes,
    TileChunk,
    block_count,
    block_width,
    number_stride,
    plan_chunks,
    row_slots,
)
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.thread_pool import run_native_parts
from graphflow.ops.windows.window_arguments import Windows

_TILE_BYTES_AT_ONCE = 24 << 20  # bytes of transformed tiles that are kept for a product
_PRODUCT_TILES = 128  # tiles of a product
_SHARES = 4  # parts into which the 36 numbers are split if there are few blocks of channels
_FEW_BLOCKS = 16
_SUM_BYTES = NUMBERS * number_stride(PANEL)  # bytes of the sums of a pair of blocks of channels


def weight_gradient(out: Any, x: Any, g: Any, windows: Windows) -> None:
    """Write out[o, c, k] = Σ g[n, o, p] · x[n, c, p - before + k]."""
    x, g = as_contiguous(x), as_contiguous(g)
    where = ConvGeometry(x.shape[2], x.shape[3], windows.before, windows.out)
    chunks = plan_chunks(where, x.shape[0], x.shape[1] + g.shape[1])
    passes = _plan_passes(chunks, x.shape[1] + g.shape[1])
    gradient = _WeightGradient(
        image_planes(x), image_planes(g), len(passes) > 1, operand_place(out)
    )
    if gradient.pairs == 1 and len(chunks) > 1:
        gradient.accumulate_in_cache(chunks)
        return
    for number, some in enumerate(passes):
        gradient.add(some, number > 0)
    gradient.finish()


def _plan_passes(chunks: tuple[TileChunk, ...], channels: int) -> list[list[TileChunk]]:
    """Group chunks whose transformed tiles are kept together."""
    most = max(1, _TILE_BYTES_AT_ONCE // (4 * NUMBERS * channels))
    result: list[list[TileChunk]] = [[]]
    held = 0
    for chunk in chunks:
        if held and held + chunk.tiles > most:
            result.append([])
            held = 0
        result[-1].append(chunk)
        held += chunk.tiles
    return result


class _WeightGradient:
    """Products over the tiles, summed over passes, by blocks of channels.

    Args:
        several: whether there is more than one pass, so that sums stay in memory between them.
    """

    def __init__(self, x: ImagePlanes, g: ImagePlanes, several: bool, out: int) -> None:
        self.x, self.g, self.out = x, g, out
        self.inputs, self.outputs = block_count(x.channels), block_count(g.channels)
        self.pairs = self.inputs * self.outputs
        self.kept = several or self.pairs < _FEW_BLOCKS
        if self.kept:
            self.sums = ScratchBytes("sums", self.pairs * _SUM_BYTES)

    def add(self, chunks: list[TileChunk], adds: bool) -> None:
        """Transform the tiles of some chunks, and add their products."""
        total = 0
        for chunk in chunks:
            total += chunk.tiles
        size = number_stride(total)
        tiles = ScratchBytes("tiles", self.inputs * NUMBERS * size)
        spread = ScratchBytes("spread", self.outputs * NUMBERS * size)
        each = self.inputs + self.outputs

        def prepare(i: int) -> None:
            chunk, number = chunks[i // each], i % each
            at = (chunk.first_tile - chunks[0].first_tile) * ROW
            if number < self.inputs:
                target = tiles.place + number * NUMBERS * size + at
                transform_tiles("input", self.x, number, chunk, target, size)
            else:
                number -= self.inputs
                target = spread.place + number * NUMBERS * size + at
                transform_tiles("spread", self.g, number, chunk, target, size)

        run_native_parts(prepare, len(chunks) * each)
        shares = _SHARES if self.kept else 1

        def part(i: int) -> None:
            pair, share = divmod(i, shares)
            numbers = range(NUMBERS * share // shares, NUMBERS * (share + 1) // shares)
            row, column = divmod(pair, self.outputs)
            if self.kept:
                sums = self.sums.place + pair * _SUM_BYTES
            else:
                sums = ScratchBytes("sums", _SUM_BYTES).place
            counts = block_width(self.x.channels, row), block_width(self.g.channels, column)
            for first in range(0, total, _PRODUCT_TILES):
                places = (
                    tiles.place + row * NUMBERS * size + first * ROW,
                    spread.place + column * NUMBERS * size + first * ROW,
                    sums,
                )
                depth = min(_PRODUCT_TILES, total - first)
                multiply_tiles(
                    places, (counts[0], depth, counts[1]), adds or first > 0,
                    (size, size, number_stride(PANEL)), numbers, transposed=True,
                )  # fmt: skip
            if not self.kept:
                self._store(pair, sums)

        run_native_parts(part, self.pairs * shares)

    def accumulate_in_cache(self, chunks: tuple[TileChunk, ...]) -> None:
        """Compute all while the sums and a chunk's tiles are in the cache together.

        Each share of the chunks has sums of its own, which are added in order.
        """
        shares = min(_SHARES, len(chunks))
        sums = ScratchBytes("sums", shares * _SUM_BYTES)

        def part(share: int) -> None:
            mine = chunks[len(chunks) * share // shares : len(chunks) * (share + 1) // shares]
            for turn, chunk in enumerate(mine):
                size = number_stride(chunk.tiles)
                tiles = ScratchBytes("tiles", NUMBERS * size)
                spread = ScratchBytes("spread", NUMBERS * size)
                transform_tiles("input", self.x, 0, chunk, tiles.place, size)
                transform_tiles("spread", self.g, 0, chunk, spread.place, size)
                multiply_tiles(
                    (tiles.place, spread.place, sums.place + share * _SUM_BYTES),
                    (self.x.channels, chunk.tiles, self.g.channels),
                    turn > 0,
                    (size, size, number_stride(PANEL)),
                    range(NUMBERS),
                    transposed=True,
                )

        run_native_parts(part, shares)
        for share in range(1, shares):
            add_floats(sums.place, sums.place + share * _SUM_BYTES, _SUM_BYTES // 4)
        self._store(0, sums.place)

    def finish(self) -> None:
        if self.kept:
            run_native_parts(
                lambda pair: self._store(pair, self.sums.place + pair * _SUM_BYTES),
                self.pairs,
            )

    def _store(self, pair: int, sums: int) -> None:
        """Transform a block back to weights, and write it."""
        row, column = divmod(pair, self.outputs)
        count, wide = block_width(self.x.channels, row), block_width(self.g.channels, column)
        rows = ScratchBytes("taps", row_slots(9 * count) * ROW)
        sizes = (count, vector_count(wide), 0, 0, ROW, 9 * ROW, number_stride(PANEL), ROW)
        call_native(transform("gather"), (sums, rows.place, 0), sizes, 0, 1)
        inputs = self.x.channels
        place = self.out + (column * PANEL * inputs + row * PANEL) * 36
        call_native(
            unpack_planes(), (rows.place, place), (9 * count, wide, inputs * 36, 0, 0), 0, 1
        )
