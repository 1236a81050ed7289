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

from graphflow.ops.kernels.codegen.memory_loops import call
from graphflow.ops.kernels.conv.weight_layout import tap_rows
from graphflow.ops.kernels.conv.winograd_text import (
    PANEL,
    ROW,
    block,
    pixels,
    planes,
    product,
    transform,
)
from graphflow.ops.kernels.conv.winograd_tiles import (
    MANY,
    NUMBERS,
    Chunk,
    Geometry,
    Memory,
    apart_of,
    band_of,
    blocks_of,
    chunks_of,
    slots_of,
    tiles_of,
    width_of,
)
from graphflow.ops.kernels.fusion.region_kernels import enabled
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.windows.window_arguments import Ints, Windows

_FEWEST = 16  # channels on both sides, below which there is too little to multiply
_FEW_ROWS = 36  # of a product, for which it pays to have no rest
_WIDEST = 1 << 16  # pixels of a row, whose places are told by i32
_GATHERED = 24 << 20  # bytes of transformed tiles between two products of the weights' gradient


def fits(xp: Any, x: Any, outputs: int, windows: Windows, groups: int) -> bool:
    """Whether to compute a convolution of x, or its gradient in the weight, in this way."""
    height, width = windows.out if len(windows.out) == 2 else (0, 0)
    return (
        xp is np
        and groups == 1
        and x.dtype == np.float32
        and windows.kernel == (3, 3)
        and windows.stride == windows.dilation == (1, 1)
        and min(x.shape[1], outputs) >= _FEWEST
        and 4 * tiles_of(height) * tiles_of(width) <= height * width
        and max(width, x.shape[3]) <= _WIDEST
        and enabled()
    )


def _vectors(channels: int) -> int:
    return -(-channels // vector_width())


# Steps ------------------------------------------------------------------------------------------


class Images(NamedTuple):
    """Planes of pixels: (images, channels, height, width), by address."""

    place: int
    channels: int
    plane: int  # elements

    def sizes(self, count: int, number: int, slots: int) -> tuple[int, ...]:
        """Sizes for `pixels` and `planes`, for a block of channels."""
        width = width_of(self.channels, number)
        return count, width, self.plane * 4, self.channels * self.plane * 4, slots * ROW

    def at(self, image: int, number: int, first: int) -> int:
        return self.place + ((image * self.channels + number * PANEL) * self.plane + first) * 4


def _images(array: Any) -> Images:
    return Images(address(array), array.shape[1], array.shape[2] * array.shape[3])


def _into_tiles(
    kind: str, source: Images, number: int, chunk: Chunk, target: int, apart: int
) -> None:
    """Transform a block of channels of a chunk; numbers of a tile are `apart` bytes apart."""
    band = chunk.band
    reading = kind == "input"
    first, count, table = (
        (band.first, band.pixels, band.table)
        if reading
        else (band.first_out, band.pixels_out, band.table_out)
    )
    slots = slots_of(count)
    rows = Memory("pixels", chunk.images * slots * ROW)
    start = source.at(chunk.image, number, first)
    call(pixels(), (start, rows.place), source.sizes(count, number, slots), 0, chunk.images)
    vectors = _vectors(width_of(source.channels, number))
    sizes = (band.tiles, vectors, slots * ROW, band.tiles * ROW, 0, ROW, 0, apart)
    call(transform(kind), (rows.place, target, address(table)), sizes, 0, chunk.images)


def _out_of_tiles(tiles: int, number: int, chunk: Chunk, result: Images) -> None:
    """Transform products back, and put them where a block of channels of a chunk is."""
    band = chunk.band
    slots = slots_of(band.pixels_out)
    rows = Memory("pixels", chunk.images * slots * ROW)
    vectors = _vectors(width_of(result.channels, number))
    apart = apart_of(chunk.tiles)
    sizes = (band.tiles, vectors, band.tiles * ROW, slots * ROW, ROW, 0, apart, 0)
    call(transform("output"), (tiles, rows.place, address(band.table_out)), sizes, 0, chunk.images)
    start = result.at(chunk.image, number, band.first_out)
    given = result.sizes(band.pixels_out, number, slots)
    call(planes(), (rows.place, start), given, 0, chunk.images)


def _multiply(
    places: Ints, counts: Ints, adds: bool, apart: Ints, numbers: range, transposed: bool = False
) -> None:
    """C (+)= A·B for some of the 36 numbers.

    Args:
        counts: rows of A and C, k, columns (at most `PANEL`).
    """
    rows, depth, columns = counts
    most, several = block()
    if rows <= _FEW_ROWS:
        most = next((high for high in (most, 5, 4) if rows % high == 0), most)
    across = 4 if transposed else ROW
    vectors = _vectors(columns)
    for first in range(0, vectors, several):
        wide = min(several, vectors - first)
        moved = first * vector_width() * 4
        for start, high in ((0, most), (rows - rows % most, rows % most)):
            times = rows // most if high == most else 1
            if not high or not times or (high != most and start == rows):
                continue
            a, b, c = places
            call(
                product(high, wide, transposed),
                (a + start * across, b + moved, c + start * ROW + moved),
                (times, depth, int(adds), *apart),
                numbers.start, numbers.stop,
            )  # fmt: skip


# Weights ----------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """Weights (outputs, inputs, 3, 3), by address, as a product wants them: `turned` ones map
    outputs to inputs."""

    place: int
    outputs: int
    inputs: int
    turned: bool

    @property
    def depth(self) -> int:
        """Channels that are summed over."""
        return self.outputs if self.turned else self.inputs

    @property
    def columns(self) -> int:
        return self.inputs if self.turned else self.outputs

    def transform(self, column: int, row: int, target: int, apart: int) -> None:
        """Transform a block of columns of a block of rows."""
        count, wide = width_of(self.depth, row), width_of(self.columns, column)
        rows, tile = tap_rows(
            self.place, self.inputs, 9, (row * PANEL, count), (column * PANEL, wide), self.turned
        )
        begin, element = (rows.place + 8 * ROW, -ROW) if self.turned else (rows.place, ROW)
        sizes = (count, _vectors(wide), 0, 0, tile, ROW, element, apart)
        call(transform("filter"), (begin, target, 0), sizes, 0, 1)


_SEVERAL = 4  # blocks of channels that are worth sharing out

# Convolution ------------------------------------------------------------------------------------


def convolve(out: Any, x: Any, w: Any, windows: Windows, turned: bool = False) -> None:
    """out[n, o, p] = Σ w[o, c, k] · x[n, c, p - before + k]; `turned` sums over w's first axis, by
    its windows turned round."""
    weights = Weights(address(w), w.shape[0], w.shape[1], turned)
    where = Geometry(x.shape[2], x.shape[3], windows.before, windows.out)
    source, result = _images(x), _images(out)
    images, rows = x.shape[0], tiles_of(where.out[0])
    few = images * rows * tiles_of(where.out[1]) <= MANY
    if few and blocks_of(weights.columns) >= _SEVERAL:
        chunk = Chunk(0, images, band_of(where, 0, rows), 0)
        _convolve_columns(chunk, weights, source, result)
    else:
        chunks = chunks_of(where, images, weights.depth + weights.columns)
        _convolve_chunks(chunks, weights, source, result)


def _convolve_chunks(
    chunks: tuple[Chunk, ...], weights: Weights, source: Images, result: Images
) -> None:
    """All weights first; then chunk for chunk all the way."""
    depths, columns = blocks_of(weights.depth), blocks_of(weights.columns)
    apart = apart_of(weights.depth)
    ready = Memory("weights", columns * NUMBERS * apart)

    def prepare(i: int) -> None:
        column, row = divmod(i, depths)
        place = ready.place + column * NUMBERS * apart + row * PANEL * ROW
        weights.transform(column, row, place, apart)

    run_parts(prepare, columns * depths)

    def part(i: int) -> None:
        chunk = chunks[i]
        size = apart_of(chunk.tiles)
        tiles = Memory("tiles", depths * NUMBERS * size)
        products = Memory("products", NUMBERS * size)
        for row in range(depths):
            _into_tiles("input", source, row, chunk, tiles.place + row * NUMBERS * size, size)
        for column in range(columns):
            width = width_of(weights.columns, column)
            for row in range(depths):
                places = (
                    tiles.place + row * NUMBERS * size,
                    ready.place + column * NUMBERS * apart + row * PANEL * ROW,
                    products.place,
                )
                counts = (chunk.tiles, width_of(weights.depth, row), width)
                _multiply(places, counts, row > 0, (size, apart, size), range(NUMBERS))
            _out_of_tiles(products.place, column, chunk, result)

    run_parts(part, len(chunks))


def _convolve_columns(chunk: Chunk, weights: Weights, source: Images, result: Images) -> None:
    """Few tiles: all of these first; then weights are used as soon as they are transformed."""
    depths, size, apart = blocks_of(weights.depth), apart_of(chunk.tiles), apart_of(PANEL)
    tiles = Memory("tiles", depths * NUMBERS * size)

    def prepare(row: int) -> None:
        _into_tiles("input", source, row, chunk, tiles.place + row * NUMBERS * size, size)

    run_parts(prepare, depths)

    def part(column: int) -> None:
        products = Memory("products", NUMBERS * size)
        ready = Memory("panel", NUMBERS * apart)
        width = width_of(weights.columns, column)
        for row in range(depths):
            weights.transform(column, row, ready.place, apart)
            counts = (chunk.tiles, width_of(weights.depth, row), width)
            places = (tiles.place + row * NUMBERS * size, ready.place, products.place)
            _multiply(places, counts, row > 0, (size, apart, size), range(NUMBERS))
        _out_of_tiles(products.place, column, chunk, result)

    run_parts(part, blocks_of(weights.columns))


# The gradient in the weights --------------------------------------------------------------------

_DEPTH = 128  # tiles of a product
_SHARES = 4  # that the 36 numbers are cut into, where there are few blocks of channels
_FEW_BLOCKS = 16
_BLOCK = NUMBERS * apart_of(PANEL)  # bytes of the sums of a pair of blocks of channels


def convolve_weights(out: Any, x: Any, g: Any, windows: Windows) -> None:
    """out[o, c, k] = Σ g[n, o, p] · x[n, c, p - before + k]."""
    x, g = np.ascontiguousarray(x), np.ascontiguousarray(g)
    where = Geometry(x.shape[2], x.shape[3], windows.before, windows.out)
    chunks = chunks_of(where, x.shape[0], x.shape[1] + g.shape[1])
    passes = _passes(chunks, x.shape[1] + g.shape[1])
    gradient = _Gradient(_images(x), _images(g), len(passes) > 1, address(out))
    if gradient.pairs == 1 and len(chunks) > 1:
        gradient.add_in_turn(chunks)
        return
    for number, some in enumerate(passes):
        gradient.add(some, number > 0)
    gradient.finish()


def _passes(chunks: tuple[Chunk, ...], channels: int) -> list[list[Chunk]]:
    """Chunks whose transformed tiles are kept together."""
    most = max(1, _GATHERED // (4 * NUMBERS * channels))
    result: list[list[Chunk]] = [[]]
    held = 0
    for chunk in chunks:
        if held and held + chunk.tiles > most:
            result.append([])
            held = 0
        result[-1].append(chunk)
        held += chunk.tiles
    return result


class _Gradient:
    """Products over the tiles, summed over passes, by blocks of channels.

    Args:
        several: there is more than one pass, so sums stay in memory between them.
    """

    def __init__(self, x: Images, g: Images, several: bool, out: int) -> None:
        self.x, self.g, self.out = x, g, out
        self.inputs, self.outputs = blocks_of(x.channels), blocks_of(g.channels)
        self.pairs = self.inputs * self.outputs
        self.kept = several or self.pairs < _FEW_BLOCKS
        if self.kept:
            self.sums = Memory("sums", self.pairs * _BLOCK)

    def add(self, chunks: list[Chunk], adds: bool) -> None:
        """Transform tiles of some chunks, and add their products."""
        total = 0
        for chunk in chunks:
            total += chunk.tiles
        size = apart_of(total)
        tiles = Memory("tiles", self.inputs * NUMBERS * size)
        spread = Memory("spread", self.outputs * NUMBERS * size)
        each = self.inputs + self.outputs

        def prepare(i: int) -> None:
            chunk, number = chunks[i // each], i % each
            at = (chunk.at - chunks[0].at) * ROW
            if number < self.inputs:
                target = tiles.place + number * NUMBERS * size + at
                _into_tiles("input", self.x, number, chunk, target, size)
            else:
                number -= self.inputs
                target = spread.place + number * NUMBERS * size + at
                _into_tiles("spread", self.g, number, chunk, target, size)

        run_parts(prepare, len(chunks) * each)
        shares = _SHARES if self.kept else 1

        def part(i: int) -> None:
            pair, share = divmod(i, shares)
            numbers = range(NUMBERS * share // shares, NUMBERS * (share + 1) // shares)
            row, column = divmod(pair, self.outputs)
            if self.kept:
                sums = self.sums.place + pair * _BLOCK
            else:
                sums = Memory("sums", _BLOCK).place
            counts = width_of(self.x.channels, row), width_of(self.g.channels, column)
            for first in range(0, total, _DEPTH):
                places = (
                    tiles.place + row * NUMBERS * size + first * ROW,
                    spread.place + column * NUMBERS * size + first * ROW,
                    sums,
                )
                depth = min(_DEPTH, total - first)
                _multiply(
                    places, (counts[0], depth, counts[1]), adds or first > 0,
                    (size, size, apart_of(PANEL)), numbers, transposed=True,
                )  # fmt: skip
            if not self.kept:
                self._store(pair, sums)

        run_parts(part, self.pairs * shares)

    def add_in_turn(self, chunks: tuple[Chunk, ...]) -> None:
        """All there is, where sums and a chunk's tiles are in the cache together: each share of the
        chunks has sums of its own, which are added in order."""
        shares = min(_SHARES, len(chunks))
        sums = Memory("sums", shares * _BLOCK)

        def part(share: int) -> None:
            mine = chunks[len(chunks) * share // shares : len(chunks) * (share + 1) // shares]
            for turn, chunk in enumerate(mine):
                size = apart_of(chunk.tiles)
                tiles = Memory("tiles", NUMBERS * size)
                spread = Memory("spread", NUMBERS * size)
                _into_tiles("input", self.x, 0, chunk, tiles.place, size)
                _into_tiles("spread", self.g, 0, chunk, spread.place, size)
                _multiply(
                    (tiles.place, spread.place, sums.place + share * _BLOCK),
                    (self.x.channels, chunk.tiles, self.g.channels),
                    turn > 0,
                    (size, size, apart_of(PANEL)),
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
        count, wide = width_of(self.x.channels, row), width_of(self.g.channels, column)
        rows = Memory("taps", slots_of(9 * count) * ROW)
        sizes = (count, _vectors(wide), 0, 0, ROW, 9 * ROW, apart_of(PANEL), ROW)
        call(transform("gather"), (sums, rows.place, 0), sizes, 0, 1)
        inputs = self.x.channels
        place = self.out + (column * PANEL * inputs + row * PANEL) * 36
        call(planes(), (rows.place, place), (9 * count, wide, inputs * 36, 0, 0), 0, 1)
