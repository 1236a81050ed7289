"""Pixels and weights as rows of channels, which the products of implicit GEMM read.

A row holds up to `PANEL` channels of one group. If a group has fewer, rows are shorter, so that
more of them stay in a cache.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.conv.direct.direct_text import copy_rows
from graphflow.ops.kernels.conv.implicit.implicit_gemm_text import pack_weights
from graphflow.ops.kernels.conv.weight_layout import pack_tap_rows
from graphflow.ops.kernels.conv.winograd_text import PANEL, ROW, pack_pixels, unpack_planes
from graphflow.ops.kernels.conv.winograd_tiles import (
    ScratchBytes,
    block_count,
    block_width,
    row_slots,
)
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.kept_layouts import KeptLayouts, lay_out
from graphflow.ops.kernels.jit.kernel_recording import operand_place
from graphflow.ops.kernels.jit.thread_pool import run_native_parts

_LINE_CHANNELS = 16  # channels of a cache line


def row_bytes(channels: int) -> int:
    """Return the bytes of a row: cache lines, as few as the channels take."""
    return min(ROW, -(-channels // _LINE_CHANNELS) * _LINE_CHANNELS * 4)


class ChannelRows:
    """Rows of channels, in blocks of `PANEL`, of some images of an array.

    Args:
        slot: name of the scratch memory.
        array: (images, channels, *space).
        images: the images whose rows are in memory.
        groups: of the channels. Each has blocks of its own.
    """

    def __init__(self, slot: str, array: Any, images: range, groups: int = 1) -> None:
        self.array, self.images = array, images
        self.count = math.prod(array.shape[2:])
        self.channels = array.shape[1] // groups
        self.pitch = row_bytes(self.channels)
        self.slots = row_slots(self.count)
        self.blocks = block_count(self.channels)
        nbytes = groups * self.blocks * len(images) * self.slots * self.pitch
        self.memory = ScratchBytes(slot, nbytes)

    @property
    def block_bytes(self) -> int:
        """Bytes between blocks of channels."""
        return len(self.images) * self.slots * self.pitch

    def place(self, group: int, block: int, image: int) -> int:
        """Return the address of an image's rows of a block; `image` counts within `images`."""
        moved = image * self.slots * self.pitch
        return self.memory.place + (group * self.blocks + block) * self.block_bytes + moved

    def read(self, group: int, block: int, image: int, images: int) -> None:
        """Fill the rows of a block of some images."""
        places = (
            plane_place(self.array, self.images.start + image, group * self.channels, block),
            self.place(group, block, image),
        )
        sizes = plane_sizes(self.array, self.channels, block, self.slots * self.pitch)
        call_native(pack_pixels(self.pitch), places, sizes, 0, images)


def plane_place(array: Any, image: int, first: int, block: int) -> int:
    """Return the address of an image's planes of a block of the channels from `first` on."""
    number: int = image * int(array.shape[1]) + first + block * PANEL
    place: int = operand_place(array)
    plane: int = math.prod(array.shape[2:]) * 4
    return place + number * plane


def plane_sizes(array: Any, channels: int, block: int, rows: int) -> tuple[int, ...]:
    """Return the sizes that `pack_pixels` and `unpack_planes` take.

    Args:
        channels: of a group.
        rows: bytes between the rows of images.
    """
    count: int = math.prod(array.shape[2:])
    return count, block_width(channels, block), count * 4, int(array.shape[1]) * count * 4, rows


def write_planes(
    array: Any, rows: int, image: int, images: int, group: tuple[int, int], block: int
) -> None:
    """Write rows of some images back to planes.

    Args:
        rows: address of the rows of a block of channels.
        group: number and channels of the group.
    """
    number, channels = group
    pitch = row_bytes(channels)
    slots = row_slots(math.prod(array.shape[2:]))
    call_native(
        unpack_planes(pitch),
        (rows, plane_place(array, image, number * channels, block)),
        plane_sizes(array, channels, block, slots * pitch),
        0,
        images,
    )


# Weights ------------------------------------------------------------------------------------------


def tap_bytes(rows: int, pitch: int) -> int:
    """Return the bytes between taps of a block of weights."""
    return (rows + 1) * pitch


def _block_bytes(depth: int, columns: int, taps: int) -> int:
    """Return the bytes of a block of weights."""
    return taps * tap_bytes(min(PANEL, depth), row_bytes(columns))


def blocked_bytes(depth: int, columns: int, taps: int, groups: int) -> int:
    """Return the bytes of all blocks of weights.

    Args:
        depth, columns: channels of a group that are summed over, and that are computed.
    """
    blocks = groups * block_count(depth) * block_count(columns)
    return blocks * _block_bytes(depth, columns, taps)


class BlockedWeights:
    """Weights in blocks of columns and of rows, which are summed over.

    A block is (taps, rows of the block and one more, columns). Without the additional row, all taps
    could compete for the same lines of the cache.

    Args:
        w: (outputs of all groups, inputs of a group, *kernel).
        transposed: sum over outputs, for inputs.
        kept: where the blocks stay for later calls.
    """

    def __init__(
        self, w: Any, transposed: bool, kept: KeptLayouts | None = None, groups: int = 1
    ) -> None:
        self.w, self.transposed, self.groups = w, transposed, groups
        outputs, inputs = w.shape[0] // groups, w.shape[1]
        self.taps = math.prod(w.shape[2:])
        self.depth, self.columns = (outputs, inputs) if transposed else (inputs, outputs)
        self.rows = block_count(self.depth)
        self.pitch = row_bytes(self.columns)
        self.block_bytes = _block_bytes(self.depth, self.columns, self.taps)
        nbytes = blocked_bytes(self.depth, self.columns, self.taps, groups)
        self._memory = lay_out(
            kept, "gathered weights", (w.shape, transposed, groups), nbytes, self._write
        )

    def place(self, group: int, column: int) -> int:
        """Return the address of the first block of rows of a block of columns."""
        return self._place_in(self._memory, group, column, 0)

    def _place_in(self, memory: Any, group: int, column: int, row: int) -> int:
        place: int = operand_place(memory)
        number = (group * block_count(self.columns) + column) * self.rows + row
        return place + number * self.block_bytes

    def _write(self, memory: Any) -> None:
        columns = block_count(self.columns)

        def part(i: int) -> None:
            number, row = divmod(i, self.rows)
            group, column = divmod(number, columns)
            self._write_block(group, column, row, self._place_in(memory, group, column, row))

        run_native_parts(part, self.groups * columns * self.rows)

    def _write_block(self, group: int, column: int, row: int, goal: int) -> None:
        count, wide = block_width(self.depth, row), block_width(self.columns, column)
        start = operand_place(self.w) + group * (self.w.nbytes // self.groups)
        if not self.transposed:
            plane = self.depth * self.taps * 4
            places = (
                start + column * PANEL * plane + row * PANEL * self.taps * 4,
                goal,
                operand_place(_weight_offsets(self.taps, count, self.pitch)),
            )
            sizes = (self.taps * count, wide, plane)
            call_native(pack_weights(), places, sizes, 0, -(-wide // vector_width()))
            return
        rows, between = pack_tap_rows(
            start, self.w.shape[1], self.taps, (row * PANEL, count), (column * PANEL, wide), True
        )
        moves = (between, ROW, 0, self.pitch, tap_bytes(count, self.pitch), 0)
        call_native(
            copy_rows("rows"),
            (rows.place, goal, goal),
            (self.taps, count, self.pitch // 4, *moves, 4, 0),
            0,
            1,
        )


@lru_cache(maxsize=64)
def _weight_offsets(taps: int, count: int, pitch: int) -> Any:
    """Return the offset, in a block of weights, of the row of each (row, tap), in bytes."""
    row, tap = np.divmod(np.arange(taps * count), taps)
    offsets = tap * tap_bytes(count, pitch) + row * pitch
    rest = -len(offsets) % vector_width()
    return np.concatenate([offsets, np.repeat(offsets[-1], rest)]).astype(np.int32)
