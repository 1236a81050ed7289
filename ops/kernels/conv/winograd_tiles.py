"""The tiles of a Winograd convolution: their pixels, and which are computed together."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.conv.direct.float_loops import clear_floats
from graphflow.ops.kernels.conv.winograd_text import PANEL, ROW
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.kernel_recording import operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.windows.window_arguments import Ints

NUMBERS = 36
"""Numbers of a transformed tile."""
MOST_TILES = 192
"""Tiles that are computed together, at most."""
_FEWEST_TILES = 24
_CHUNK_BYTES = 3 << 20  # bytes of a chunk's transformed tiles


def tile_count(size: int) -> int:
    return -(-size // 4)


def block_count(channels: int) -> int:
    return -(-channels // PANEL)


def block_width(channels: int, number: int) -> int:
    """Return the channels of a block of `PANEL`."""
    return min(PANEL, channels - number * PANEL)


class ConvGeometry(NamedTuple):
    """Spatial sizes of images and results, and the padding before images."""

    height: int
    width: int
    before: Ints
    out: Ints


class TileBand(NamedTuple):
    """Some rows of tiles of an image, or all: the pixels that they read and write.

    Pixels outside the image are read from, or written to, a row beyond the last vector of pixels.

    Attributes:
        first, first_out: the first pixel that is read, and written.
        pixels, pixels_out: how many pixels.
        table, table_out: byte offsets of each tile's pixels, (tiles, 36) and (tiles, 16).
    """

    first: int
    pixels: int
    first_out: int
    pixels_out: int
    tiles: int
    table: np.ndarray[Any, Any]
    table_out: np.ndarray[Any, Any]


@lru_cache(maxsize=256)
def make_band(where: ConvGeometry, begin: int, end: int) -> TileBand:
    """Return the band of the rows of tiles from `begin` to `end`."""
    height, width = where.out
    low = min(max(4 * begin - where.before[0], 0), where.height)
    high = max(low, min(4 * end + 2 - where.before[0], where.height))
    bottom = min(4 * end, height)
    inputs = _table(
        where.width, (low, high), 6, (4 * begin - where.before[0], -where.before[1]),
        (end - begin, tile_count(width)),
    )  # fmt: skip
    outputs = _table(
        width, (4 * begin, bottom), 4, (4 * begin, 0), (end - begin, tile_count(width))
    )  # fmt: skip
    return TileBand(
        low * where.width, (high - low) * where.width,
        4 * begin * width, (bottom - 4 * begin) * width,
        len(inputs), inputs, outputs,
    )  # fmt: skip


def _table(width: int, rows: Ints, size: int, corner: Ints, tiles: Ints) -> Any:
    """Return the byte offsets of the pixels of tiles of `size`, the first one at `corner`."""
    y = corner[0] + 4 * np.arange(tiles[0])[:, None] + np.arange(size)
    x = corner[1] + 4 * np.arange(tiles[1])[:, None] + np.arange(size)
    place = (y[:, None, :, None] - rows[0]) * width + x[None, :, None, :]
    inside = ((y >= rows[0]) & (y < rows[1]))[:, None, :, None] & ((x >= 0) & (x < width))[
        None, :, None, :
    ]
    beyond = row_slots((rows[1] - rows[0]) * width) - 1
    table = np.where(inside, place, beyond).reshape(tiles[0] * tiles[1], size * size)
    return np.ascontiguousarray(table * ROW, np.int32)


def row_slots(count: int) -> int:
    """Return the rows that `count` pixels take: whole vectors, and one of zeros."""
    width = vector_width()
    return -(-count // width) * width + 1


class TileChunk(NamedTuple):
    """Images and a band of each that are computed together; `first_tile` counts over all chunks."""

    image: int
    images: int
    band: TileBand
    first_tile: int

    @property
    def tiles(self) -> int:
        return self.images * self.band.tiles


@lru_cache(maxsize=256)
def plan_chunks(where: ConvGeometry, images: int, channels: int) -> tuple[TileChunk, ...]:
    """Cut all images into chunks; `channels` counts both sides."""
    most = _CHUNK_BYTES // (4 * NUMBERS * channels)
    most = min(max(most, _FEWEST_TILES), MOST_TILES)
    rows, columns = map(tile_count, where.out)
    if rows * columns <= most:
        parts = -(-images * rows * columns // most)
        parts = min(images, parts)
        edges = [images * i // parts for i in range(parts + 1)]
        band = make_band(where, 0, rows)
        return tuple(TileChunk(a, b - a, band, a * band.tiles) for a, b in pairwise(edges))
    parts = -(-rows // max(1, most // columns))
    edges = [rows * i // parts for i in range(parts + 1)]
    return tuple(
        TileChunk(n, 1, make_band(where, a, b), (n * rows + a) * columns)
        for n in range(images)
        for a, b in pairwise(edges)
    )


def number_stride(rows: int) -> int:
    """Return the bytes between the 36 numbers, for `rows` rows of each.

    It is an odd number of cache lines, so that a tile's numbers do not evict each other.
    """
    return rows * ROW + 64


class ScratchBytes:
    """Bytes of this thread's scratch memory, kept while the object lives."""

    def __init__(self, slot: str, nbytes: int) -> None:
        self._array = scratch(np, f"winograd {slot}", (nbytes,), np.uint8)
        self.place: int = operand_place(self._array)

    def clear(self) -> None:
        """Fill with zeros."""
        clear_floats(self.place, self._array.nbytes // 4)
