"""Implicit GEMM: convolutions of any stride, dilation and padding as products of gathered rows.

No tap is copied. Pixels become rows of channels once, and a table says which row each tap of each
window sees; padding is a row of zeros. The gradient in the input is computed for each remainder by
the stride, whose elements share their taps. Sums always run over blocks of channels, taps, and the
channels of a block, so chunks and threads do not change bits. float32, on CPUs.
"""

from __future__ import annotations

import math
from array import array
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.implicit.channel_rows import (
    BlockedWeights,
    ChannelRows,
    row_bytes,
    tap_bytes,
    write_planes,
)
from graphflow.ops.kernels.conv.implicit.implicit_gemm_text import DEEP, product, weight_sums
from graphflow.ops.kernels.conv.implicit.tap_tables import (
    TapTable,
    WindowMap,
    block_tables,
    tap_major_table,
)
from graphflow.ops.kernels.conv.winograd_text import PANEL, ROW, unpack_planes
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
from graphflow.ops.kernels.jit.compiler import NativeFunction, vector_width
from graphflow.ops.kernels.jit.kept_layouts import KeptLayouts
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.thread_pool import run_native_parts
from graphflow.ops.windows.window_arguments import Ints, Windows

_CHUNK_POSITIONS = 1024  # positions of a chunk
_ROW_BYTES_AT_ONCE = 1 << 20  # bytes of rows at once, which stay in the second cache


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


# Convolution ------------------------------------------------------------------------------------


def convolve(
    out: Any,
    x: Any,
    w: Any,
    windows: Windows,
    groups: int = 1,
    transposed: bool = False,
    kept: KeptLayouts | None = None,
) -> None:
    """Write out[n, o, p] = Σ w[o, c, k] · x[n, c, p·stride - before + k·dilation].

    Args:
        kept: where the blocks of weights stay for later calls.
        transposed: compute the adjoint, from x[n, o, p] to out[n, c, …].
    """
    x, w = as_contiguous(x), as_contiguous(w)
    weights = BlockedWeights(w, transposed, kept, groups)
    columns = block_count(weights.columns)
    window_map = WindowMap(
        out.shape[2:] if transposed else x.shape[2:],
        windows,
        transposed,
        row_bytes(weights.depth),
        weights.pitch,
    )
    nbytes = row_slots(math.prod(x.shape[2:])) * window_map.pitch * weights.rows * groups
    passes, each = _plan_passes(x.shape[0], nbytes, math.prod(window_map.positions))
    for images in passes:
        source = ChannelRows("gathered", x, images, groups)
        cuts = _split_range(len(images), each)

        def read(i: int, source: ChannelRows = source, cuts: list[range] = cuts) -> None:
            number, row = divmod(i, weights.rows)
            cut, group = divmod(number, groups)
            source.read(group, row, cuts[cut].start, len(cuts[cut]))

        def part(i: int, source: ChannelRows = source, cuts: list[range] = cuts) -> None:
            number, column = divmod(i, columns)
            cut, group = divmod(number, groups)
            _multiply(out, source, weights, window_map, cuts[cut], group, column)

        run_native_parts(read, len(cuts) * groups * weights.rows)
        run_native_parts(part, len(cuts) * groups * columns)


@dataclass(frozen=True)
class _ProductCalls:
    """All products of a block of columns as a table of native calls.

    Attributes:
        functions: of each call, with its last row.
        pointers: of each call, from the first rows of x, weights and results.
        sizes: of each call.
        tables: what the pointers refer to, kept alive.
    """

    functions: tuple[tuple[NativeFunction, int], ...]
    pointers: np.ndarray[Any, Any]
    sizes: np.ndarray[Any, Any]
    tables: tuple[Any, ...]

    @cached_property
    def entries(self) -> np.ndarray[Any, Any]:
        """The calls as (function, unused, unused, 0, stop), int64."""
        return np.array([(f.address, 0, 0, 0, stop) for f, stop in self.functions], np.int64)

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
        if not recorder.keeps_calls:
            return
        for _, table, _ in self.tables:
            for part in (table.sources, table.targets, table.taps):
                recorder.keep(part)
        rows = np.concatenate([pointers, self.sizes], axis=1)
        for entry, row in zip(self.entries.tolist(), rows.tolist(), strict=True):
            call = RecordedCall(entry[0], array("q", row), pointers.shape[1], 0, entry[4])
            recorder.calls.append(call)


_SHALLOW = 32
"""Channels up to which loading and storing sums for each tap takes longer than reading weights."""


@lru_cache(maxsize=256)
def _product_calls(
    window_map: WindowMap, images: int, depth: int, wide: int, block: int, weight_block: int
) -> _ProductCalls:
    """Return the products of `wide` columns.

    Args:
        images: of the chunk.
        depth: channels that are summed over.
        block, weight_block: bytes between blocks of channels, of pixels and of weights.
    """
    functions, pointers, sizes = [], [], []
    tables, pitch = block_tables(window_map, images), window_map.pitch_out
    for row in range(block_count(depth)):
        count = block_width(depth, row)
        for blocks, table, addresses in tables:
            for first, vectors in _vector_blocks(wide):
                moved = first * vector_width() * 4
                function = product(vectors, count <= _SHALLOW)
                functions.append((function, blocks))
                pointers.append((row * block, row * weight_block + moved, moved, *addresses))
                sizes.append((len(table.taps), count, tap_bytes(count, pitch), pitch, int(row > 0)))
    arrays = [np.array(a, np.int64) for a in (pointers, sizes)]
    return _ProductCalls(tuple(functions), arrays[0], arrays[1], tables)


def _multiply(
    out: Any,
    source: ChannelRows,
    weights: BlockedWeights,
    window_map: WindowMap,
    cut: range,
    group: int,
    column: int,
) -> None:
    """Compute a block of columns of some images."""
    slots = row_slots(math.prod(window_map.positions))
    rows = ScratchBytes("products", len(cut) * slots * window_map.pitch_out)
    tables = block_tables(window_map, len(cut))
    if not all(len(table.taps) for _, table, _ in tables):
        rows.clear()  # some positions are seen by no tap
    wide = block_width(weights.columns, column)
    calls = _product_calls(
        window_map, len(cut), weights.depth, wide, source.block_bytes, weights.block_bytes
    )
    base = (
        source.place(group, 0, cut.start), weights.place(group, column), rows.place, 0, 0, 0,
    )  # fmt: skip
    calls.run(np.array(base, np.int64))
    first_image = source.images.start + cut.start
    write_planes(out, rows.place, first_image, len(cut), (group, weights.columns), column)


# Its adjoint in w -------------------------------------------------------------------------------

_FEW_PAIRS = 8
_SHARES = 3  # parts into which taps are split if there are few pairs of blocks


def weight_gradient(out: Any, x: Any, g: Any, windows: Windows, groups: int = 1) -> None:
    """Write out[o, c, k] = Σ g[n, o, p] · x[n, c, p·stride - before + k·dilation]."""
    x, g = as_contiguous(x), as_contiguous(g)
    taps, outputs, inputs = math.prod(windows.kernel), out.shape[0] // groups, out.shape[1]
    rows, columns = block_count(inputs), block_count(outputs)
    window_map = WindowMap(x.shape[2:], windows, False, row_bytes(inputs), row_bytes(outputs))
    both = sum(
        row_slots(math.prod(sizes)) * pitch * blocks * groups
        for sizes, pitch, blocks in (
            (x.shape[2:], window_map.pitch, rows), (windows.out, window_map.pitch_out, columns),
        )
    )  # fmt: skip
    passes, each = _plan_passes(x.shape[0], both, math.prod(windows.out))
    block, pairs = row_slots(PANEL * taps) * ROW, groups * rows * columns
    totals = ScratchBytes("sums", pairs * block)
    shares = min(taps, _SHARES) if pairs < _FEW_PAIRS else 1

    def unravel(pair: int) -> tuple[int, int, int]:
        rest, column = divmod(pair, columns)
        return (*divmod(rest, rows), column)

    for number, images in enumerate(passes):
        seen = ChannelRows("gathered", x, images, groups)
        given = ChannelRows("gathered cotangents", g, images, groups)
        cuts = _split_range(len(images), each)

        def prepare(i: int, pair: Any = (seen, given), cuts: list[range] = cuts) -> None:
            rest, which = divmod(i, rows + columns)
            cut, group = divmod(rest, groups)
            source = pair[which >= rows]
            block = which - rows if which >= rows else which
            source.read(group, block, cuts[cut].start, len(cuts[cut]))

        def part(
            i: int, pair: Any = (seen, given), cuts: list[range] = cuts, number: int = number
        ) -> None:
            which, share = divmod(i, shares)
            group, row, column = unravel(which)
            some = range(taps * share // shares, taps * (share + 1) // shares)
            for turn, cut in enumerate(cuts):
                places = (
                    pair[0].place(group, row, cut.start), pair[1].place(group, column, cut.start),
                    totals.place + which * block,
                )  # fmt: skip
                counts = block_width(inputs, row), block_width(outputs, column)
                _accumulate_weights(
                    places, counts, tap_major_table(window_map, len(cut)), some, number + turn > 0
                )

        run_native_parts(prepare, len(cuts) * groups * (rows + columns))
        run_native_parts(part, pairs * shares)

    def finish(which: int) -> None:
        group, row, column = unravel(which)
        count, wide = block_width(inputs, row), block_width(outputs, column)
        first = (group * outputs + column * PANEL) * inputs + row * PANEL
        goal = operand_place(out) + first * taps * 4
        sizes = (taps * count, wide, inputs * taps * 4, 0, 0)
        call_native(unpack_planes(), (totals.place + which * block, goal), sizes, 0, 1)

    run_native_parts(finish, pairs)


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
