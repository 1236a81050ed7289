"""Implicit GEMM: convolutions of any stride, dilation and padding as products of gathered rows.

No tap is copied. Pixels become rows of channels once, and a table says which row each tap of each
window sees; padding is a row of zeros. The gradient in the input is computed for each remainder by
the stride, whose elements share their taps. Sums always run over blocks of channels, taps, and the
channels of a block, so chunks and threads do not change bits. float32, on CPUs.
"""

from __future__ import annotations

import math
from array import array
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.direct.direct_text import copy_rows
from graphflow.ops.kernels.conv.implicit_gemm_text import (
    DEEP,
    pack_weights,
    product,
    weight_sums,
)
from graphflow.ops.kernels.conv.tap_tables import (
    TapTable,
    WindowMap,
    block_tables,
    tap_major_table,
)
from graphflow.ops.kernels.conv.weight_layout import pack_tap_rows
from graphflow.ops.kernels.conv.winograd_text import PANEL, ROW, pack_pixels, unpack_planes
from graphflow.ops.kernels.conv.winograd_tiles import (
    ScratchBytes,
    block_count,
    block_width,
    row_slots,
)
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.call_recorder import (
    CallRecorder,
    RecordedCall,
    current_recorder,
)
from graphflow.ops.kernels.jit.call_table_driver import driver
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.kept_layouts import KeptLayouts, lay_out
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.thread_pool import run_native_parts
from graphflow.ops.windows.window_arguments import Ints, Windows

_CHUNK_POSITIONS = 1024  # positions of a chunk
_ROW_BYTES_AT_ONCE = 32 << 20  # bytes of rows at once


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
        place: int = operand_place(self.array) + first * self.count * 4
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


def _tap_bytes(rows: int) -> int:
    """Return the bytes between taps of a block of weights."""
    return (rows + 1) * ROW


class _BlockedWeights:
    """Weights in blocks of columns and of rows, which are summed over.

    A block is (taps, rows of the block and one more, `PANEL` columns). Without the additional row,
    all taps would compete for the same lines of the cache.
    """

    def __init__(self, w: Any, transposed: bool, kept: KeptLayouts | None = None) -> None:
        self.w, self.transposed = w, transposed
        self.depth: int
        self.columns: int
        self.taps = math.prod(w.shape[2:])
        self.depth, self.columns = w.shape[:2] if transposed else w.shape[1::-1]
        self.rows = block_count(self.depth)
        self.apart = self.taps * _tap_bytes(PANEL)
        nbytes = block_count(self.columns) * self.rows * self.apart
        key = w.shape, transposed
        self._memory = lay_out(kept, "gathered weights", key, nbytes, self._write)

    def place(self, column: int, row: int) -> int:
        return self._place_in(self._memory, column, row)

    def _place_in(self, memory: Any, column: int, row: int) -> int:
        place: int = operand_place(memory) + (column * self.rows + row) * self.apart
        return place

    def _write(self, memory: Any) -> None:
        def part(i: int) -> None:
            column, row = divmod(i, self.rows)
            self._write_block(column, row, self._place_in(memory, column, row))

        run_native_parts(part, block_count(self.columns) * self.rows)

    def _write_block(self, column: int, row: int, goal: int) -> None:
        count, wide = block_width(self.depth, row), block_width(self.columns, column)
        if not self.transposed:
            plane = self.depth * self.taps * 4
            source = operand_place(self.w) + column * PANEL * plane + row * PANEL * self.taps * 4
            places = (
                source,
                goal,
                operand_place(_weight_offsets(self.taps, count)),
            )
            sizes = (self.taps * count, wide, plane)
            call_native(pack_weights(), places, sizes, 0, -(-wide // vector_width()))
            return
        rows, between = pack_tap_rows(
            operand_place(self.w), self.w.shape[1], self.taps,
            (row * PANEL, count), (column * PANEL, wide), self.transposed,
        )  # fmt: skip
        moves = (between, ROW, 0, ROW, _tap_bytes(count), 0)
        call_native(
            copy_rows("rows"),
            (rows.place, goal, goal),
            (self.taps, count, PANEL, *moves, 4, 0),
            0,
            1,
        )


@lru_cache(maxsize=64)
def _weight_offsets(taps: int, count: int) -> Any:
    """Return the offset, in a block of weights, of the row of each (row, tap), in bytes."""
    row, tap = np.divmod(np.arange(taps * count), taps)
    offsets = tap * _tap_bytes(count) + row * ROW
    rest = -len(offsets) % vector_width()
    return np.concatenate([offsets, np.repeat(offsets[-1], rest)]).astype(np.int32)


# Convolution ------------------------------------------------------------------------------------


def blocked_bytes(outputs: int, inputs: int, taps: int) -> int:
    """Return the bytes of all blocks of weights."""
    return block_count(outputs) * block_count(inputs) * taps * _tap_bytes(PANEL)


def convolve(
    out: Any,
    x: Any,
    w: Any,
    windows: Windows,
    transposed: bool = False,
    kept: KeptLayouts | None = None,
) -> None:
    """Write out[n, o, p] = Σ w[o, c, k] · x[n, c, p·stride - before + k·dilation].

    Args:
        kept: where the blocks of weights stay for later calls.
        transposed: compute the adjoint, from x[n, o, p] to out[n, c, …].
    """
    x, w = as_contiguous(x), as_contiguous(w)
    weights = _BlockedWeights(w, transposed, kept)
    columns = block_count(weights.columns)
    window_map = WindowMap(out.shape[2:] if transposed else x.shape[2:], windows, transposed)
    nbytes = row_slots(math.prod(x.shape[2:])) * ROW * weights.rows
    passes, each = _plan_passes(x.shape[0], nbytes, math.prod(window_map.positions))
    for images in passes:
        source = _ChannelRows("gathered", x, images)
        cuts = _split_range(len(images), each)
        run_native_parts(
            lambda i, source=source, cuts=cuts: source.read(  # type: ignore[misc]
                i % weights.rows, cuts[i // weights.rows].start, len(cuts[i // weights.rows])
            ),
            len(cuts) * weights.rows,
        )

        def part(i: int, source: _ChannelRows = source, cuts: list[range] = cuts) -> None:
            cut, column = cuts[i // columns], i % columns
            _multiply(out, source, weights, window_map, cut, column)

        run_native_parts(part, len(cuts) * columns)


class _ProductCalls(NamedTuple):
    """All products of a block of columns as a table of native calls.

    Attributes:
        entries: (function, unused, unused, 0, stop), int64.
        pointers: of each call, from the first rows of x, weights and results.
        sizes: of each call.
        tables: what the pointers refer to, kept alive.
    """

    entries: np.ndarray[Any, Any]
    pointers: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]
    tables: tuple[Any, ...]

    def run(self, base: np.ndarray[Any, Any]) -> None:
        """Run the calls for the addresses from which pointers are counted."""
        pointers, recorder = self.pointers + base, current_recorder()
        if recorder is not None:
            self._record(recorder, pointers)
            return
        entries = self.entries.copy()
        number = np.arange(len(entries))
        entries[:, 1] = address(pointers) + number * pointers.strides[0]
        entries[:, 2] = address(self.sizes) + number * self.sizes.strides[0]
        driver().walk.releasing_gil(address(entries), None, 0, len(entries))

    def _record(self, recorder: CallRecorder, pointers: np.ndarray[Any, Any]) -> None:
        for _, table, _ in self.tables:
            for part in (table.sources, table.targets, table.taps):
                recorder.keep(part)
        rows = np.concatenate([pointers, self.sizes], axis=1)
        for entry, row in zip(self.entries.tolist(), rows.tolist(), strict=True):
            call = RecordedCall(entry[0], array("q", row), pointers.shape[1], 0, entry[4])
            recorder.calls.append(call)


@lru_cache(maxsize=256)
def _product_calls(
    window_map: WindowMap, images: int, depth: int, wide: int, together: int
) -> _ProductCalls:
    """Return the products of `wide` columns.

    Args:
        images: of the chunk.
        depth: channels that are summed over.
        together: images whose rows are in memory together.
    """
    entries, pointers, sizes = [], [], []
    taps = math.prod(window_map.windows.kernel)
    tables = block_tables(window_map, images)
    block = together * row_slots(math.prod(window_map.pixels)) * ROW
    for row in range(block_count(depth)):
        count = block_width(depth, row)
        for blocks, table, addresses in tables:
            for first, vectors in _vector_blocks(wide):
                moved = first * vector_width() * 4
                right = row * taps * _tap_bytes(PANEL) + moved
                entries.append((product(vectors).address, 0, 0, 0, blocks))
                pointers.append((row * block, right, moved, *addresses))
                sizes.append((len(table.taps), count, _tap_bytes(count), int(row > 0)))
    arrays = [np.array(a, np.int64) for a in (entries, pointers, sizes)]
    return _ProductCalls(arrays[0], arrays[1], arrays[2], tables)


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
    tables = block_tables(window_map, len(cut))
    if not all(len(table.taps) for _, table, _ in tables):
        rows.clear()  # some positions are seen by no tap
    wide = block_width(weights.columns, column)
    calls = _product_calls(window_map, len(cut), weights.depth, wide, len(source.images))
    base = source.place(0, cut.start), weights.place(column, 0), rows.place, 0, 0, 0
    calls.run(np.array(base, np.int64))
    first_image = source.images.start + cut.start
    result = out[first_image : first_image + len(cut)]
    channels, plane = result.shape[1], math.prod(result.shape[2:])
    goal = operand_place(result) + column * PANEL * plane * 4
    given = (plane, wide, plane * 4, channels * plane * 4, slots * ROW)
    call_native(unpack_planes(), (rows.place, goal), given, 0, len(cut))


# Its adjoint in w -------------------------------------------------------------------------------

_FEW_PAIRS = 8
_SHARES = 3  # parts into which taps are split if there are few pairs of blocks


def weight_gradient(out: Any, x: Any, g: Any, windows: Windows) -> None:
    """Write out[o, c, k] = Σ g[n, o, p] · x[n, c, p·stride - before + k·dilation]."""
    x, g = as_contiguous(x), as_contiguous(g)
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

        run_native_parts(prepare, len(cuts) * (rows + columns))

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
                    places, counts, tap_major_table(window_map, len(cut)), some, number + turn > 0
                )

        run_native_parts(part, rows * columns * shares)

    def finish(which: int) -> None:
        row, column = divmod(which, columns)
        count, wide = block_width(inputs, row), block_width(outputs, column)
        goal = operand_place(out) + (column * PANEL * inputs + row * PANEL) * taps * 4
        sizes = (taps * count, wide, inputs * taps * 4, 0, 0)
        call_native(unpack_planes(), (totals.place + which * block, goal), sizes, 0, 1)

    run_native_parts(finish, rows * columns)


def _accumulate_weights(
    places: Ints, counts: Ints, table: TapTable, taps: range, adds: bool
) -> None:
    """Sum over the positions of a chunk, for some taps of a pair of blocks of channels."""
    x, g, totals = places
    apart = len(table.taps) * ROW
    for first, vectors in _vector_blocks(counts[1]):
        moved = first * vector_width() * 4
        pointers = (
            x, g + moved, totals + moved,
            operand_place(table.sources), operand_place(table.targets),
        )  # fmt: skip
        sizes = (-(-counts[0] // DEEP), len(table.targets), apart, int(adds))
        call_native(weight_sums(vectors), pointers, sizes, taps.start, taps.stop)
