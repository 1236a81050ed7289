"""Winograd's F(4×4, 3×3): 3×3 convolutions of stride 1, in a quarter of the products.

Tiles of 6×6 pixels and the weights are transformed, multiplied as 36 matrix products, and
transformed back to tiles of 4×4. The gradient in the input is the same with the weights turned
round. A chunk of tiles goes through all stages while it is in the cache. Sums depend on the shapes
alone, neither on chunks nor on threads. float32 only; the error is about 1e-6 of the results'
scale, like that of sums in another order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

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
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.kernel_recording import operand_place
from graphflow.ops.kernels.jit.thread_pool import run_native_parts
from graphflow.ops.windows.window_arguments import Ints, Windows

_FEW_ROWS = 36  # rows of a product up to which a height without a remainder pays


def vector_count(channels: int) -> int:
    return -(-channels // vector_width())


# Steps ------------------------------------------------------------------------------------------


class ImagePlanes(NamedTuple):
    """Planes of pixels (images, channels, height, width), by address; `plane` counts elements."""

    place: int
    channels: int
    plane: int  # elements

    def sizes(self, count: int, number: int, slots: int) -> tuple[int, ...]:
        """Return the sizes that `pack_pixels` and `unpack_planes` take, for a block of channels."""
        width = block_width(self.channels, number)
        return count, width, self.plane * 4, self.channels * self.plane * 4, slots * ROW

    def pixel_address(self, image: int, number: int, first: int) -> int:
        return self.place + ((image * self.channels + number * PANEL) * self.plane + first) * 4


def image_planes(array: Any) -> ImagePlanes:
    return ImagePlanes(operand_place(array), array.shape[1], array.shape[2] * array.shape[3])


def transform_tiles(
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
    vectors = vector_count(block_width(source.channels, number))
    sizes = (band.tiles, vectors, slots * ROW, band.tiles * ROW, 0, ROW, 0, apart)
    call_native(transform(kind), (rows.place, target, operand_place(table)), sizes, 0, chunk.images)


def inverse_transform_tiles(tiles: int, number: int, chunk: TileChunk, result: ImagePlanes) -> None:
    """Transform products back, and write them to a block of channels of a chunk."""
    band = chunk.band
    slots = row_slots(band.pixels_out)
    rows = ScratchBytes("pixels", chunk.images * slots * ROW)
    vectors = vector_count(block_width(result.channels, number))
    apart = number_stride(chunk.tiles)
    sizes = (band.tiles, vectors, band.tiles * ROW, slots * ROW, ROW, 0, apart, 0)
    call_native(
        transform("output"),
        (tiles, rows.place, operand_place(band.table_out)),
        sizes,
        0,
        chunk.images,
    )
    start = result.pixel_address(chunk.image, number, band.first_out)
    given = result.sizes(band.pixels_out, number, slots)
    call_native(unpack_planes(), (rows.place, start), given, 0, chunk.images)


def multiply_tiles(
    places: Ints, counts: Ints, adds: bool, apart: Ints, numbers: range, transposed: bool = False
) -> None:
    """Write C (+)= A·B for some of the 36 numbers.

    Args:
        places, apart: addresses of A, B and C, and bytes between their numbers.
        counts: rows of A and C, k, columns (at most `PANEL`).
    """
    rows, depth, columns = counts
    most, several = register_block()
    if rows <= _FEW_ROWS:
        most = next((high for high in (most, 5, 4) if rows % high == 0), most)
    across = 4 if transposed else ROW
    vectors = vector_count(columns)
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
    """Weights (outputs, inputs, 3, 3), by address; `transposed` ones map outputs to inputs."""

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
        sizes = (count, vector_count(wide), 0, 0, tile, ROW, element, apart)
        call_native(transform("filter"), (begin, target, 0), sizes, 0, 1)


_SHARED_BLOCKS = 4  # blocks of channels from which threads share them

# Convolution ------------------------------------------------------------------------------------


def convolve(out: Any, x: Any, w: Any, windows: Windows, transposed: bool = False) -> None:
    """Write out[n, o, p] = Σ w[o, c, k] · x[n, c, p - before + k].

    Args:
        transposed: sum over w's first axis, with its windows turned round: the gradient in the
            input.
    """
    weights = WinogradWeights(operand_place(w), w.shape[0], w.shape[1], transposed)
    where = ConvGeometry(x.shape[2], x.shape[3], windows.before, windows.out)
    source, result = image_planes(x), image_planes(out)
    images, rows = x.shape[0], tile_count(where.out[0])
    few = images * rows * tile_count(where.out[1]) <= MOST_TILES
    if few and block_count(weights.columns) >= _SHARED_BLOCKS:
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
    """Transform all weights first; then take each chunk through all stages."""
    depths, columns = block_count(weights.depth), block_count(weights.columns)
    apart = number_stride(weights.depth)
    ready = ScratchBytes("weights", columns * NUMBERS * apart)

    def prepare(i: int) -> None:
        column, row = divmod(i, depths)
        place = ready.place + column * NUMBERS * apart + row * PANEL * ROW
        weights.transform(column, row, place, apart)

    run_native_parts(prepare, columns * depths)

    def part(i: int) -> None:
        chunk = chunks[i]
        size = number_stride(chunk.tiles)
        tiles = ScratchBytes("tiles", depths * NUMBERS * size)
        products = ScratchBytes("products", NUMBERS * size)
        for row in range(depths):
            transform_tiles("input", source, row, chunk, tiles.place + row * NUMBERS * size, size)
        for column in range(columns):
            width = block_width(weights.columns, column)
            for row in range(depths):
                places = (
                    tiles.place + row * NUMBERS * size,
                    ready.place + column * NUMBERS * apart + row * PANEL * ROW,
                    products.place,
                )
                counts = (chunk.tiles, block_width(weights.depth, row), width)
                multiply_tiles(places, counts, row > 0, (size, apart, size), range(NUMBERS))
            inverse_transform_tiles(products.place, column, chunk, result)

    run_native_parts(part, len(chunks))


def _convolve_columns(
    chunk: TileChunk, weights: WinogradWeights, source: ImagePlanes, result: ImagePlanes
) -> None:
    """Transform the few tiles first; then use each block of weights once it is transformed."""
    depths, size, apart = (
        block_count(weights.depth),
        number_stride(chunk.tiles),
        number_stride(PANEL),
    )
    tiles = ScratchBytes("tiles", depths * NUMBERS * size)

    def prepare(row: int) -> None:
        transform_tiles("input", source, row, chunk, tiles.place + row * NUMBERS * size, size)

    run_native_parts(prepare, depths)

    def part(column: int) -> None:
        products = ScratchBytes("products", NUMBERS * size)
        ready = ScratchBytes("panel", NUMBERS * apart)
        width = block_width(weights.columns, column)
        for row in range(depths):
            weights.transform(column, row, ready.place, apart)
            counts = (chunk.tiles, block_width(weights.depth, row), width)
            places = (tiles.place + row * NUMBERS * size, ready.place, products.place)
            multiply_tiles(places, counts, row > 0, (size, apart, size), range(NUMBERS))
        inverse_transform_tiles(products.place, column, chunk, result)

    run_native_parts(part, block_count(weights.columns))
