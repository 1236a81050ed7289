"""Tables of implicit GEMM: which row of pixels each tap of each position sees.

Positions that see the same taps share a table. Padding is a row of zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import product as pairs_of
from typing import Any, NamedTuple

import numpy as np

from graphflow.ops.kernels.conv.implicit.implicit_gemm_text import BLOCK
from graphflow.ops.kernels.conv.winograd_text import ROW
from graphflow.ops.kernels.conv.winograd_tiles import row_slots
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.windows.window_arguments import Ints, Windows


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
    """The pixels that each position sees.

    Attributes:
        sizes: the spatial axes of the convolution's input.
        transposed: False: positions are windows over the input. True: positions are elements of the
            input, and pixels the windows' results.
        pitch, pitch_out: bytes of a row of a pixel, and of a position.
    """

    sizes: Ints
    windows: Windows
    transposed: bool
    pitch: int = ROW
    pitch_out: int = ROW

    @property
    def positions(self) -> Ints:
        return self.sizes if self.transposed else self.windows.out

    @property
    def pixels(self) -> Ints:
        return self.windows.out if self.transposed else self.sizes


@lru_cache(maxsize=64)
def _tap_tables(window_map: WindowMap, images: int, split: bool) -> tuple[TapTable, ...]:
    """Return the tables of all positions of some contiguous images.

    Args:
        split: give positions near an edge tables of their own, without the taps that see padding
            only, if this saves products.
    """
    kernel, stride = window_map.windows.kernel, window_map.windows.stride
    remainders = pairs_of(*(range(s if window_map.transposed else 1) for s in stride))
    tables = []
    for remainder in remainders:
        axes = [_axis_table(window_map, axis, r) for axis, r in enumerate(remainder)]
        positions = _flatten_indices([a[0] for a in axes], window_map.positions)
        taps = _flatten_indices([a[1] for a in axes], kernel)
        place, inside = _combine_pixels(window_map, axes)
        valid = [a[3] for a in axes]
        for some, seen in _split_positions(inside, valid) if split else _all_of(inside):
            tables.append(
                _repeat_for_images(
                    window_map, images, positions[some], taps[seen],
                    place[some][:, seen], inside[some][:, seen],
                )
            )  # fmt: skip
    return tuple(tables)


def seen_pixels(window_map: WindowMap) -> tuple[Any, Any]:
    """Return the pixel that each position of an image sees by each tap, and whether it is inside.

    Both are (positions, taps), for windows over the input.
    """
    return _combine_pixels(
        window_map, [_axis_table(window_map, axis, 0) for axis in range(len(window_map.sizes))]
    )


def _combine_pixels(
    window_map: WindowMap, axes: list[tuple[Any, Any, Any, Any]]
) -> tuple[Any, Any]:
    place, inside = np.zeros((1, 1), np.int64), np.ones((1, 1), bool)
    for n, (_, _, index, valid) in zip(window_map.pixels, axes, strict=True):
        place = _combine_axes(place * n, index, np.add)
        inside = _combine_axes(inside, valid, np.logical_and)
    return place, inside


_SPLIT_GAIN = 0.8
"""Part of the time that a split of the positions may leave, at most."""
_LOAD_BLOCKS = 1
"""Blocks of positions in whose time a tap's weights come to the first cache."""


def _block_taps(positions: int, taps: int) -> int:
    """Return the time of some positions, in that of a block's products by one tap."""
    return (-(-positions // BLOCK) + _LOAD_BLOCKS) * taps


def _all_of(inside: Any) -> list[tuple[Any, Any]]:
    positions, taps = inside.shape
    return [(np.arange(positions), np.arange(taps))]


def _split_positions(inside: Any, valid: list[Any]) -> list[tuple[Any, Any]]:
    """Return positions that see nearly the same taps, and these taps; or all in one, if that is
    faster.

    It depends on one image alone, since an infinite weight times padding is NaN. Positions are
    split along all axes near whose edges taps see padding only, or along some of these axes.

    Args:
        inside: whether each tap of each position sees a pixel, (positions, taps).
        valid: the same along each axis.
    """
    kinds = [np.unique(axis, axis=0, return_inverse=True)[1].reshape(-1) for axis in valid]
    best = _all_of(inside)
    least = _SPLIT_GAIN * _block_taps(*inside.shape)
    for chosen in pairs_of((False, True), repeat=len(kinds)):
        number = np.zeros(1, np.int64)
        for kind, is_split in zip(kinds, chosen, strict=True):
            mine = kind if is_split else 0 * kind
            number = (number[:, None] * len(kind) + mine).reshape(-1)
        groups = [np.flatnonzero(number == n) for n in np.unique(number)]
        cuts = [(some, np.flatnonzero(inside[some].any(0))) for some in groups]
        time = sum(_block_taps(len(some), len(seen)) for some, seen in cuts)
        if time <= least:
            best, least = cuts, time
    return best


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
        np.ascontiguousarray(seen.reshape(places.size, len(taps)) * window_map.pitch, np.int32),
        np.ascontiguousarray(places.reshape(-1) * window_map.pitch_out, np.int32),
        np.ascontiguousarray(taps, np.int32),
    )


@lru_cache(maxsize=64)
def block_tables(window_map: WindowMap, images: int) -> tuple[tuple[int, TapTable, Ints], ...]:
    """Return tables cut into blocks of positions: number of blocks, table, addresses.

    The last position is repeated to fill the last block.
    """
    result = []
    for table in _tap_tables(window_map, images, True):
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
def tap_major_table(window_map: WindowMap, images: int) -> TapTable:
    """Return the table of windows with `sources` by tap."""
    (table,) = _tap_tables(window_map, images, False)
    return table._replace(sources=np.ascontiguousarray(table.sources.T))
