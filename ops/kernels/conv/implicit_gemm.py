"""Implicit GEMM: convolutions of any stride, dilation and padding as products of gathered rows.

No tap is copied. Pixels become rows of channels once, and a table says which row each tap of each
window sees; padding is a row of zeros. The gradient in the input is computed for each remainder by
the stride, whose elements share their taps. Sums always run over blocks of channels, taps, and the
channels of a block, so chunks and threads do not change bits. float32, on CPUs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import product as pairs_of
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.direct_text import copy_rows
from graphflow.ops.kernels.conv.implicit_gemm_text import BLOCK, DEEP, product, weight_sums
from graphflow.ops.kernels.conv.weight_layout import pack_tap_rows
from graphflow.ops.kernels.conv.winograd_text import PANEL, ROW, pack_pixels, unpack_planes
from graphflow.ops.kernels.conv.winograd_tiles import (
    ScratchBytes,
    block_count,
    block_width,
    row_slots,
)
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.windows.window_arguments import Ints, Windows

_CHUNK_POSITIONS = 1024  # positions of a chunk
_ROW_BYTES_AT_ONCE = 32 << 20  # bytes of rows at once


# Tables -----------------------------------------------------------------------------------------


class TapTable(NamedTuple):
    """Positions that share their taps: the rows that they see, their own rows, and the taps.

    Offsets are bytes from the first row of an image, as i32: `sources` (positions, taps), `targets`
    (positions,).
    """

    sources: np.ndarray[Any, Any]
    targets: np.ndarray[Any, Any]
    taps: np.ndarray[Any, Any]

    @property
    def addresses(self) -> Ints:
        return address(self.sources), address(self.targets), address(self.taps)


class WindowMap(NamedTuple):
    """Which pixels each position sees.

    Attributes:
        sizes: the spatial axes of the convolution's input.
        transposed: False: positions are windows over the input. True: positions are elements of the
            input, and pixels the windows' results.
    """

    sizes: Ints
    windows: Windows
    transposed: bool

    @property
    def positions(self) -> Ints:
        return self.sizes if self.transposed else self.windows.out

    @property
    def pixels(self) -> Ints:
        return self.windows.out if self.transposed else self.sizes


@lru_cache(maxsize=64)
def _tap_tables(window_map: WindowMap, images: int) -> tuple[TapTable, ...]:
    """Return the tables of all positions of some contiguous images."""
    kernel, stride = window_map.windows.kernel, window_map.windows.stride
    remainders = pairs_of(*(range(s if window_map.transposed else 1) for s in stride))
    tables = []
    for remainder in remainders:
        axes = [_axis_table(window_map, axis, r) for axis, r in enumerate(remainder)]
        positions = _flatten_indices([a[0] for a in axes], window_map.positions)
        taps = _flatten_indices([a[1] for a in axes], kernel)
        place, inside = np.zeros((1, 1), np.int64), np.ones((1, 1), bool)
        for n, (_, _, index, valid) in zip(window_map.pixels, axes, strict=True):
            place = _combine_axes(place * n, index, np.add)
            inside = _combine_axes(inside, valid, np.logical_and)
        tables.append(_repeat_for_images(window_map, images, positions, taps, place, inside))
    return tuple(tables)


def _axis_table(window_map: WindowMap, axis: int, remainder: int) -> tuple[Any, Any, Any, Any]:
    """Return an axis' positions, taps, the pixel that each position sees by each tap, and whether
    it is inside."""
    kernel, stride, before, dilation, _ = (entry[axis] for entry in window_map.windows)
    pixel_count = window_map.pixels[axis]
    if not window_map.transposed:
        positions, taps = np.arange(window_map.positions[axis]), np.arange(kernel)
        index = positions[:, None] * stride - before + taps * dilation
    else:
        positions = np.arange(remainder, window_map.positions[axis], stride)
        taps = np.arange(kernel)
        taps = taps[(remainder + before - taps * dilation) % stride == 0]
        index = (positions[:, None] + before - taps * dilation) // stride
    return positions, taps, index, (index >= 0) & (index < pixel_count)


def _flatten_indices(each: list[Any], sizes: Ints) -> Any:
    """Return the flat indices of all combinations."""
    flat = np.zeros(1, np.int64)
    for n, some in zip(sizes, each, strict=True):
        flat = (flat[:, None] * n + some).reshape(-1)
    return flat


def _combine_axes(a: Any, b: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """Combine all pairs of rows, and of columns, of two matrices."""
    both = combine(a[:, None, :, None], b[None, :, None, :])
    return both.reshape(a.shape[0] * b.shape[0], a.shape[1] * b.shape[1])


def _repeat_for_images(
    window_map: WindowMap, images: int, positions: Any, taps: Any, place: Any, inside: Any
) -> TapTable:
    """Return the table of several images, from that of one."""
    slots, slots_out = (row_slots(math.prod(n)) for n in (window_map.pixels, window_map.positions))
    number = np.arange(images)
    seen = np.where(inside, place, slots - 1) + number[:, None, None] * slots
    places = positions + number[:, None] * slots_out
    return TapTable(
        np.ascontiguousarray(seen.reshape(places.size, len(taps)) * ROW, np.int32),
        np.ascontiguousarray(places.reshape(-1) * ROW, np.int32),
        np.ascontiguousarray(taps, np.int32),
    )


@lru_cache(maxsize=64)
def _block_tables(window_map: WindowMap, images: int) -> tuple[tuple[int, TapTable, Ints], ...]:
    """Return tables cut into blocks of positions: number of blocks, table, addresses.

    The last position is repeated to fill the last block.
    """
    result = []
    for table in _tap_tables(window_map, images):
        count = len(table.targets)
        if not count:
            continue
        blocks = -(-count // BLOCK)
        chosen = np.minimum(np.arange(blocks * BLOCK), count - 1)
        seen = table.sources[chosen].reshape(blocks, BLOCK, -1).swapaxes(1, 2)
        both = np.ascontiguousarray(seen), np.ascontiguousarray(table.targets[chosen])
        blocked = TapTable(*both, table.taps)
        result.append((blocks, blocked, blocked.addresses))
    return tuple(result)


@lru_cache(maxsize=64)
def _tap_major_table(window_map: WindowMap, images: int) -> TapTable:
    """Return the table of windows with `sources` by tap."""
    (table,) = _tap_tables(window_map, images)
    return table._replace(sources=np.ascontiguousarray(table.sources.T))


# Rows -------------------------------------------------------------------------------------------


class _ChannelRows:
    """Rows of channels, in blocks of `PANEL`, of some images of an array."""

    def __init__(self, slot: str, array: Any, images: range) -> None:
        self.array, self.images = array, images
        self.count = math.prod(array.shape[2:])
        self.slots = row_slots(self.count)
        self.blocks = block_count(array.shape[1])
        self.memory = ScratchBytes(slot, self.blocks * len(images) * self.slots * ROW)

    def place(self, block: int, image: int) -> int:
        """Return the address of an image's rows of a block; `image` counts within `images`."""
        return self.memory.place + (block * len(self.images) + image) * self.slots * ROW

    def sizes(self, block: int) -> tuple[int, ...]:
        channels = self.array.shape[1]
        return (
            self.count, block_width(channels, block), self.count * 4, channels * self.count * 4,
            self.slots * ROW,
        )  # fmt: skip

    def planes(self, block: int, image: int) -> int:
        channels: int = self.array.shape[1]
        first = (self.images.start + image) * channels + block * PANEL
        place: int = address(self.array) + first * self.count * 4
        return place

    def read(self, block: int, image: int, images: int) -> None:
        places = self.planes(block, image), self.place(block, image)
        call_native(pack_pixels(), places, self.sizes(block), 0, images)

    def write(self, block: int, image: int, images: int, rows: int) -> None:
        """Write rows of some images back to planes."""
        call_native(
            unpack_planes(), (rows, self.planes(block, image)), self.sizes(block), 0, images
        )


def _split_range(count: int, size: int) -> list[range]:
    return [range(i, min(i + size, count)) for i in range(0, count, size)]


def _plan_passes(images: int, nbytes: int, positions: int) -> tuple[list[range], int]:
    """Return the images whose rows are in memory together, and the images of a chunk."""
    most = max(1, _ROW_BYTES_AT_ONCE // max(1, nbytes))
    return _split_range(images, most), max(1, _CHUNK_POSITIONS // max(1, positions))


def _vector_blocks(columns: int) -> list[tuple[int, int]]:
    """Return (first vector, vectors) of the blocks that a kernel keeps in registers."""
    most = 4 if vector_width() == 16 else 2
    count = -(-columns // vector_width())
    return [(i, min(most, count - i)) for i in range(0, count, most)]


# Weights ----------------------------------------------------------------------------------------


class _BlockedWeights:
    """Weights in blocks of columns and of rows, which are summed over.

    A block is (taps, rows of the block, `PANEL` columns).
    """

    def __init__(self, w: Any, transposed: bool) -> None:
        self.w, self.transposed = w, transposed
        self.depth: int
        self.columns: int
        self.taps = math.prod(w.shape[2:])
        self.depth, self.columns = w.shape[:2] if transposed else w.shape[1::-1]
        self.rows = block_count(self.depth)
        self.apart = self.taps * PANEL * ROW
        self._memory = ScratchBytes(
            "gathered weights", block_count(self.columns) * self.rows * self.apart
        )

    def place(self, column: int, row: int) -> int:
        place: int = self._memory.place + (column * self.rows + row) * self.apart
        return place

    def prepare(self, column: int, row: int) -> None:
        count, wide = block_width(self.depth, row), block_width(self.columns, column)
        rows, between = pack_tap_rows(
            address(self.w), self.w.shape[1], self.taps,
            (row * PANEL, count), (column * PANEL, wide), self.transposed,
        )  # fmt: skip
        goal = self.place(column, row)
        moves = (between, ROW, 0, ROW, count * ROW, 0)
        call_native(
            copy_rows("rows"),
            (rows.place, goal, goal),
            (self.taps, count, PANEL, *moves, 4, 0),
            0,
            1,
        )


# Convolution ------------------------------------------------------------------------------------


def convolve(out: Any, x: Any, w: Any, windows: Windows, transposed: bool = False) -> None:
    """Write out[n, o, p] = Σ w[o, c, k] · x[n, c, p·stride - before + k·dilation].

    Args:
        transposed: compute the adjoint, from x[n, o, p] to out[n, c, …].
    """
    x, w = np.ascontiguousarray(x), np.ascontiguousarray(w)
    weights = _BlockedWeights(w, transposed)
    columns = block_count(weights.columns)
    run_parts(lambda i: weights.prepare(*divmod(i, weights.rows)), columns * weights.rows)
    window_map = WindowMap(out.shape[2:] if transposed else x.shape[2:], windows, transposed)
    nbytes = row_slots(math.prod(x.shape[2:])) * ROW * weights.rows
    passes, each = _plan_passes(x.shape[0], nbytes, math.prod(window_map.positions))
    for images in passes:
        source = _ChannelRows("gathered", x, images)
        cuts = _split_range(len(images), each)
        run_parts(
            lambda i, source=source, cuts=cuts: source.read(  # type: ignore[misc]
                i % weights.rows, cuts[i // weights.rows].start, len(cuts[i // weights.rows])
            ),
            len(cuts) * weights.rows,
        )

        def part(i: int, source: _ChannelRows = source, cuts: list[range] = cuts) -> None:
            cut, column = cuts[i // columns], i % columns
            _multiply(out, source, weights, window_map, cut, column)

        run_parts(part, len(cuts) * columns)


def _multiply(
    out: Any,
    source: _ChannelRows,
    weights: _BlockedWeights,
    window_map: WindowMap,
    cut: range,
    column: int,
) -> None:
    """Compute a block of columns of some images."""
    slots = row_slots(math.prod(window_map.positions))
    rows = ScratchBytes("products", len(cut) * slots * ROW)
    tables = _block_tables(window_map, len(cut))
    if not all(len(table.taps) for _, table, _ in tables):
        rows.clear()  # some positions are seen by no tap
    for row in range(weights.rows):
        count = block_width(weights.depth, row)
        here, right = source.place(row, cut.start), weights.place(column, row)
        for blocks, table, addresses in tables:
            for first, vectors in _vector_blocks(block_width(weights.columns, column)):
                moved = first * vector_width() * 4
                pointers = (here, right + moved, rows.place + moved, *addresses)
                sizes = (len(table.taps), count, count * ROW, int(row > 0))
                call_native(product(vectors), pointers, sizes, 0, blocks)
    first_image = source.images.start + cut.start
    result = out[first_image : first_image + len(cut)]
    channels, plane = result.shape[1], math.prod(result.shape[2:])
    wide = block_width(channels, column)
    goal = address(result) + column * PANEL * plane * 4
    given = (plane, wide, plane * 4, channels * plane * 4, slots * ROW)
    call_native(unpack_planes(), (rows.place, goal), given, 0, len(cut))


# Its adjoint in w -------------------------------------------------------------------------------

_FEW_PAIRS = 8
_SHARES = 3  # parts into which taps are split if there are few pairs of blocks


def weight_gradient(out: Any, x: Any, g: Any, windows: Windows) -> None:
    """Write out[o, c, k] = Σ g[n, o, p] · x[n, c, p·stride - before + k·dilation]."""
    x, g = np.ascontiguousarray(x), np.ascontiguousarray(g)
    taps, (outputs, inputs) = math.prod(windows.kernel), out.shape[:2]
    rows, columns = block_count(inputs), block_count(outputs)
    window_map = WindowMap(x.shape[2:], windows, False)
    both = row_slots(math.prod(x.shape[2:])) * rows + row_slots(math.prod(windows.out)) * columns
    passes, each = _plan_passes(x.shape[0], both * ROW, math.prod(windows.out))
    block = row_slots(PANEL * taps) * ROW
    totals = ScratchBytes("sums", rows * columns * block)
    shares = min(taps, _SHARES) if rows * columns < _FEW_PAIRS else 1

    for number, images in enumerate(passes):
        seen, given = (
            _ChannelRows("gathered", x, images),
            _ChannelRows("gathered cotangents", g, images),
        )
        cuts = _split_range(len(images), each)

        def prepare(i: int, pair: Any = (seen, given), cuts: list[range] = cuts) -> None:
            cut, which = cuts[i // (rows + columns)], i % (rows + columns)
            source = pair[which >= rows]
            source.read(which - rows if which >= rows else which, cut.start, len(cut))

        run_parts(prepare, len(cuts) * (rows + columns))

        def part(
            i: int, pair: Any = (seen, given), cuts: list[range] = cuts, number: int = number
        ) -> None:
            which, share = divmod(i, shares)
            row, column = divmod(which, columns)
            some = range(taps * share // shares, taps * (share + 1) // shares)
            for turn, cut in enumerate(cuts):
                places = (
                    pair[0].place(row, cut.start), pair[1].place(column, cut.start),
                    totals.place + which * block,
                )  # fmt: skip
                counts = block_width(inputs, row), block_width(outputs, column)
                _accumulate_weights(
                    places, counts, _tap_major_table(window_map, len(cut)), some, number + turn > 0
                )

        run_parts(part, rows * columns * shares)

    def finish(which: int) -> None:
        row, column = divmod(which, columns)
        count, wide = block_width(inputs, row), block_width(outputs, column)
        goal = address(out) + (column * PANEL * inputs + row * PANEL) * taps * 4
        sizes = (taps * count, wide, inputs * taps * 4, 0, 0)
        call_native(unpack_planes(), (totals.place + which * block, goal), sizes, 0, 1)

    run_parts(finish, rows * columns)


def _accumulate_weights(
    places: Ints, counts: Ints, table: TapTable, taps: range, adds: bool
) -> None:
    """Sum over the positions of a chunk, for some taps of a pair of blocks of channels."""
    x, g, totals = places
    apart = len(table.taps) * ROW
    for first, vectors in _vector_blocks(counts[1]):
        moved = first * vector_width() * 4
        pointers = (
            x, g + moved, totals + moved, address(table.sources), address(table.targets),
        )  # fmt: skip
        sizes = (-(-counts[0] // DEEP), len(table.targets), apart, int(adds))
        call_native(weight_sums(vectors), pointers, sizes, taps.start, taps.stop)
