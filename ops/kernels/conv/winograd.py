"""Winograd's F(4×4, 3×3): convolutions by 3×3 windows of stride 1, in a quarter of the products.

Tiles of 6×6 pixels and the weights are transformed, multiplied as 36 matrix products, and
transformed back to tiles of 4×4; the gradient in the input is the same with the weights turned
round, and the gradient in the weights the same form the other way: cotangents and pixels are
transformed, multiplied over all tiles, and transformed back to weights. A chunk of tiles goes all
the way while it is in the cache. What is computed depends on the shapes alone, neither on chunks
nor on threads. float32 only; results are off by about 1e-6 of their scale, as sums of products in
another order are.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.weight_layout import pack_tap_rows
from graphflow.ops.kernels.conv.winograd_text import (
    PANEL,
    ROW,
    pack_pixels,
    product,
    register_block,
    transform,
    unpack_planes,
)
from graphflow.ops.kernels.conv.winograd_tiles import (
    MOST_TILES,
    NUMBERS,
    ConvGeometry,
    ScratchBytes,
    TileChunk,
    block_count,
    block_width,
    make_band,
    number_stride,
    plan_chunks,
    row_slots,
    tile_count,
)
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.windows.window_arguments import Ints, Windows

_FEW_ROWS = 36  # of a product, for which it pays to have no rest
_GATHERED = 24 << 20  # bytes of transformed tiles between two products of the weights' gradient


def _vector_count(channels: int) -> int:
    return -(-channels // vector_width())


# Steps ------------------------------------------------------------------------------------------


class ImagePlanes(NamedTuple):
    """Planes of pixels: (images, channels, height, width), by address."""

    place: int
    channels: int
    plane: int  # elements

    def sizes(self, count: int, number: int, slots: int) -> tuple[int, ...]:
        """Sizes for `pixels` and `planes`, for a block of channels."""
        width = block_width(self.channels, number)
        return count, width, self.plane * 4, self.channels * self.plane * 4, slots * ROW

    def pixel_address(self, image: int, number: int, first: int) -> int:
        return self.place + ((image * self.channels + number * PANEL) * self.plane + first) * 4


def _image_planes(array: Any) -> ImagePlanes:
    return ImagePlanes(address(array), array.shape[1], array.shape[2] * array.shape[3])


def _transform_tiles(
    kind: str, source: ImagePlanes, number: int, chunk: TileChunk, target: int, apart: int
) -> None:
    """Transform a block of channels of a chunk; numbers of a tile are `apart` bytes apart."""
    band = chunk.band
    reading = kind == "input"
    first, count, table = (
        (band.first, band.pixels, band.table)
        if reading
        else (band.first_out, band.pixels_out, band.table_out)
    )
    slots = row_slots(count)
    rows = ScratchBytes("pixels", chunk.images * slots * ROW)
    start = source.pixel_address(chunk.image, number, first)
    call_native(
        pack_pixels(), (start, rows.place), source.sizes(count, number, slots), 0, chunk.images
    )
    vectors = _vector_count(block_width(source.channels, number))
    sizes = (band.tiles, vectors, slots * ROW, band.tiles * ROW, 0, ROW, 0, apart)
    call_native(transform(kind), (rows.place, target, address(table)), sizes, 0, chunk.images)


def _inverse_transform_tiles(
    tiles: int, number: int, chunk: TileChunk, result: ImagePlanes
) -> None:
    """Transform products back, and put them where a block of channels of a chunk is."""
    band = chunk.band
    slots = row_slots(band.pixels_out)
    rows = ScratchBytes("pixels", chunk.images * slots * ROW)
    vectors = _vector_count(block_width(result.channels, number))
    apart = number_stride(chunk.tiles)
    sizes = (band.tiles, vectors, band.tiles * ROW, slots * ROW, ROW, 0, apart, 0)
    call_native(
        transform("output"), (tiles, rows.place, address(band.table_out)), sizes, 0, chunk.images
    )
    start = result.pixel_address(chunk.image, number, band.first_out)
    given = result.sizes(band.pixels_out, number, slots)
    call_native(unpack_planes(), (rows.place, start), given, 0, chunk.images)


def _multiply(
    places: Ints, counts: Ints, adds: bool, apart: Ints, numbers: range, transposed: bool = False
) -> None:
    """C (+)= A·B for some of the 36 numbers.

    Args:
        counts: rows of A and C, k, columns (at most `PANEL`).
    """
    rows, depth, columns = counts
    most, several = register_block()
    if rows <= _FEW_ROWS:
        most = next((high for high in (most, 5, 4) if rows % high == 0), most)
    across = 4 if transposed else ROW
    vectors = _vector_count(columns)
    for first in range(0, vectors, several):
        wide = min(several, vectors - first)
        moved = first * vector_width() * 4
        for start, high in ((0, most), (rows - rows % most, rows % most)):
            times = rows // most if high == most else 1
            if not high or not times or (high != most and start == rows):
                continue
            a, b, c = places
            call_native(
                product(high, wide, transposed),
                (a + start * across, b + moved, c + start * ROW + moved),
                (times, depth, int(adds), *apart),
                numbers.start, numbers.stop,
            )  # fmt: skip


# Weights ----------------------------------------------------------------------------------------


class WinogradWeights(NamedTuple):
    """Weights (outputs, inputs, 3, 3), by address, as a product wants them: `turned` ones map
    outputs to inputs."""

    place: int
    outputs: int
    inputs: int
    transposed: bool

    @property
    def depth(self) -> int:
        """Channels that are summed over."""
        return self.outputs if self.transposed else self.inputs

    @property
    def columns(self) -> int:
        return self.inputs if self.transposed else self.outputs

    def transform(self, column: int, row: int, target: int, apart: int) -> None:
        """Transform a block of columns of a block of rows."""
        count, wide = block_width(self.depth, row), block_width(self.columns, column)
        rows, tile = pack_tap_rows(
            self.place,
            self.inputs,
            9,
            (row * PANEL, count),
            (column * PANEL, wide),
            self.transposed,
        )
        begin, element = (rows.place + 8 * ROW, -ROW) if self.transposed else (rows.place, ROW)
        sizes = (count, _vector_count(wide), 0, 0, tile, ROW, element, apart)
        call_native(transform("filter"), (begin, target, 0), sizes, 0, 1)


_SEVERAL = 4  # blocks of channels that are worth sharing out

# Convolution ------------------------------------------------------------------------------------


def convolve(out: Any, x: Any, w: Any, windows: Windows, turned: bool = False) -> None:
    """out[n, o, p] = Σ w[o, c, k] · x[n, c, p - before + k]; `turned` sums over w's first axis, by
    its windows turned round."""
    weights = WinogradWeights(address(w), w.shape[0], w.shape[1], turned)
    where = ConvGeometry(x.shape[2], x.shape[3], windows.before, windows.out)
    source, result = _image_planes(x), _image_planes(out)
    images, rows = x.shape[0], tile_count(where.out[0])
    few = images * rows * tile_count(where.out[1]) <= MOST_TILES
    if few and block_count(weights.columns) >= _SEVERAL:
        chunk = TileChunk(0, images, make_band(where, 0, rows), 0)
        _convolve_columns(chunk, weights, source, result)
    else:
        chunks = plan_chunks(where, images, weights.depth + weights.columns)
        _convolve_chunks(chunks, weights, source, result)


def _convolve_chunks(
    chunks: tuple[TileChunk, ...],
    weights: WinogradWeights,
    source: ImagePlanes,
    result: ImagePlanes,
) -> None:
    """All weights first; then chunk for chunk all the way."""
    depths, columns = block_count(weights.depth), block_count(weights.columns)
    apart = number_stride(weights.depth)
    ready = ScratchBytes("weights", columns * NUMBERS * apart)

    def prepare(i: int) -> None:
        column, row = divmod(i, depths)
        place = ready.place + column * NUMBERS * apart + row * PANEL * ROW
        weights.transform(column, row, place, apart)

    run_parts(prepare, columns * depths)

    def part(i: int) -> None:
        chunk = chunks[i]
        size = number_stride(chunk.tiles)
        tiles = ScratchBytes("tiles", depths * NUMBERS * size)
        products = ScratchBytes("products", NUMBERS * size)
        for row in range(depths):
            _transform_tiles("input", source, row, chunk, tiles.place + row * NUMBERS * size, size)
        for column in range(columns):
            width = block_width(weights.columns, column)
            for row in range(depths):
                places = (
                    tiles.place + row * NUMBERS * size,
                    ready.place + column * NUMBERS * apart + row * PANEL * ROW,
                    products.place,
                )
                counts = (chunk.tiles, block_width(weights.depth, row), width)
                _multiply(places, counts, row > 0, (size, apart, size), range(NUMBERS))
            _inverse_transform_tiles(products.place, column, chunk, result)

    run_parts(part, len(chunks))


def _convolve_columns(
    chunk: TileChunk, weights: WinogradWeights, source: ImagePlanes, result: ImagePlanes
) -> None:
    """Few tiles: all of these first; then weights are used as soon as they are transformed."""
    depths, size, apart = (
        block_count(weights.depth),
        number_stride(chunk.tiles),
        number_stride(PANEL),
    )
    tiles = ScratchBytes("tiles", depths * NUMBERS * size)

    def prepare(row: int) -> None:
        _transform_tiles("input", source, row, chunk, tiles.place + row * NUMBERS * size, size)

    run_parts(prepare, depths)

    def part(column: int) -> None:
        products = ScratchBytes("products", NUMBERS * size)
        ready = ScratchBytes("panel", NUMBERS * apart)
        width = block_width(weights.columns, column)
        for row in range(depths):
            weights.transform(column, row, ready.place, apart)
            counts = (chunk.tiles, block_width(weights.depth, row), width)
            places = (tiles.place + row * NUMBERS * size, ready.place, products.place)
            _multiply(places, counts, row > 0, (size, apart, size), range(NUMBERS))
        _inverse_transform_tiles(products.place, column, chunk, result)

    run_parts(part, block_count(weights.columns))


# The gradient in the weights --------------------------------------------------------------------

_DEPTH = 128  # tiles of a product
_SHARES = 4  # that the 36 numbers are cut into, where there are few blocks of channels
_FEW_BLOCKS = 16
_BLOCK = NUMBERS * number_stride(PANEL)  # bytes of the sums of a pair of blocks of channels


def weight_gradient(out: Any, x: Any, g: Any, windows: Windows) -> None:
    """out[o, c, k] = Σ g[n, o, p] · x[n, c, p - before + k]."""
    x, g = np.ascontiguousarray(x), np.ascontiguousarray(g)
    where = ConvGeometry(x.shape[2], x.shape[3], windows.before, windows.out)
    chunks = plan_chunks(where, x.shape[0], x.shape[1] + g.shape[1])
    passes = _plan_passes(chunks, x.shape[1] + g.shape[1])
    gradient = _WeightGradient(_image_planes(x), _image_planes(g), len(passes) > 1, address(out))
    if gradient.pairs == 1 and len(chunks) > 1:
        gradient.accumulate_in_cache(chunks)
        return
    for number, some in enumerate(passes):
        gradient.add(some, number > 0)
    gradient.finish()


def _plan_passes(chunks: tuple[TileChunk, ...], channels: int) -> list[list[TileChunk]]:
    """Chunks whose transformed tiles are kept together."""
    most = max(1, _GATHERED // (4 * NUMBERS * channels))
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
        several: there is more than one pass, so sums stay in memory between them.
    """

    def __init__(self, x: ImagePlanes, g: ImagePlanes, several: bool, out: int) -> None:
        self.x, self.g, self.out = x, g, out
        self.inputs, self.outputs = block_count(x.channels), block_count(g.channels)
        self.pairs = self.inputs * self.outputs
        self.kept = several or self.pairs < _FEW_BLOCKS
        if self.kept:
            self.sums = ScratchBytes("sums", self.pairs * _BLOCK)

    def add(self, chunks: list[TileChunk], adds: bool) -> None:
        """Transform tiles of some chunks, and add their products."""
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
                _transform_tiles("input", self.x, number, chunk, target, size)
            else:
                number -= self.inputs
                target = spread.place + number * NUMBERS * size + at
                _transform_tiles("spread", self.g, number, chunk, target, size)

        run_parts(prepare, len(chunks) * each)
        shares = _SHARES if self.kept else 1

        def part(i: int) -> None:
            pair, share = divmod(i, shares)
            numbers = range(NUMBERS * share // shares, NUMBERS * (share + 1) // shares)
            row, column = divmod(pair, self.outputs)
            if self.kept:
                sums = self.sums.place + pair * _BLOCK
            else:
                sums = ScratchBytes("sums", _BLOCK).place
            counts = block_width(self.x.channels, row), block_width(self.g.channels, column)
            for first in range(0, total, _DEPTH):
                places = (
                    tiles.place + row * NUMBERS * size + first * ROW,
                    spread.place + column * NUMBERS * size + first * ROW,
                    sums,
                )
                depth = min(_DEPTH, total - first)
                _multiply(
                    places, (counts[0], depth, counts[1]), adds or first > 0,
                    (size, size, number_stride(PANEL)), numbers, transposed=True,
                )  # fmt: skip
            if not self.kept:
                self._store(pair, sums)

        run_parts(part, self.pairs * shares)

    def accumulate_in_cache(self, chunks: tuple[TileChunk, ...]) -> None:
        """All there is, where sums and a chunk's tiles are in the cache together: each share of the
        chunks has sums of its own, which are added in order."""
        shares = min(_SHARES, len(chunks))
        sums = ScratchBytes("sums", shares * _BLOCK)

        def part(share: int) -> None:
            mine = chunks[len(chunks) * share // shares : len(chunks) * (share + 1) // shares]
            for turn, chunk in enumerate(mine):
                size = number_stride(chunk.tiles)
                tiles = ScratchBytes("tiles", NUMBERS * size)
                spread = ScratchBytes("spread", NUMBERS * size)
                _transform_tiles("input", self.x, 0, chunk, tiles.place, size)
                _transform_tiles("spread", self.g, 0, chunk, spread.place, size)
                _multiply(
                    (tiles.place, spread.place, sums.place + share * _BLOCK),
                    (self.x.channels, chunk.tiles, self.g.channels),
                    turn > 0,
                    (size, size, number_stride(PANEL)),
                    range(NUMBERS),
                    transposed=True,
                )

        run_parts(part, shares)
        each = sums.floats(shares)
        with np.errstate(all="ignore"):  # there are gaps between the numbers
            for more in each[1:]:
                np.add(each[0], more, out=each[0])
        self._store(0, sums.place)

    def finish(self) -> None:
        if self.kept:
            run_parts(
                lambda pair: self._store(pair, self.sums.place + pair * _BLOCK),
                self.pairs,
            )

    def _store(self, pair: int, sums: int) -> None:
        """Transform a block back, and put it where it belongs."""
        row, column = divmod(pair, self.outputs)
        count, wide = block_width(self.x.channels, row), block_width(self.g.channels, column)
        rows = ScratchBytes("taps", row_slots(9 * count) * ROW)
        sizes = (count, _vector_count(wide), 0, 0, ROW, 9 * ROW, number_stride(PANEL), ROW)
        call_native(transform("gather"), (sums, rows.place, 0), sizes, 0, 1)
        inputs = self.x.channels
        place = self.out + (column * PANEL * inputs + row * PANEL) * 36
        call_native(
            unpack_planes(), (rows.place, place), (9 * count, wide, inputs * 36, 0, 0), 0, 1
        )
