"""The order of rows in an epoch, as a function of (seed, epoch, index)."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.data.permutation import permute
from graphflow.data.sources.source import Array, Source

_OF_BLOCKS, _WITHIN_WINDOWS = 1, 2
"""Parts of the key of permutations, so that those of blocks and of rows differ."""


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The order of rows.

    Args:
        seed: None: as the source has them.
        blocks: blocks of a source whose rows are mixed with each other.
        chosen: the numbers of the rows in use, ascending; None: all.
        splits: how they were chosen, in turn: (share, seed, 0 or 1 for the first or second part).
    """

    seed: int | None = None
    blocks: int = 16
    chosen: Array | None = None
    splits: tuple[tuple[float, int, int], ...] = ()


def rows_in_order(source: Source, order: RowOrder, epoch: int, start: int, end: int) -> Array:
    """Return the numbers of the rows from place `start` to `end` of an epoch's order, int64."""
    places = np.arange(start, end, dtype=np.int64)
    size = len(source) if order.chosen is None else len(order.chosen)
    if order.seed is not None:
        starts = getattr(source, "starts", None)
        if starts is None or len(starts) < 2:
            places = permute(places, size, (order.seed, epoch))
        else:
            places = _mix_blocks(places, size, _bounds(starts, order.chosen, size), order, epoch)
    return places if order.chosen is None else order.chosen[places]


def _bounds(starts: Array, chosen: Array | None, size: int) -> Array:
    """Return where blocks begin among the rows in use, and the end."""
    begins = starts if chosen is None else np.searchsorted(chosen, starts)
    return np.unique(np.concatenate([begins, [size]])).astype(np.int64)


def _mix_blocks(places: Array, size: int, bounds: Array, order: RowOrder, epoch: int) -> Array:
    """Return rows whose blocks come in random order, mixed within windows of some blocks."""
    assert order.seed is not None
    windows = _windows(bounds.tobytes(), order.blocks, order.seed, epoch)
    found = np.empty_like(places)
    which = np.searchsorted(windows.ends, places, "right")
    for number in np.unique(which):
        mine = which == number
        first = int(windows.ends[number - 1]) if number else 0
        length = int(windows.ends[number]) - first
        key = (order.seed, epoch, _WITHIN_WINDOWS, int(number))
        inner = permute(places[mine] - first, length, key)
        blocks = windows.members[number]
        sizes = bounds[blocks + 1] - bounds[blocks]
        ends = np.cumsum(sizes)
        block = np.searchsorted(ends, inner, "right")
        found[mine] = bounds[blocks[block]] + inner - (ends[block] - sizes[block])
    return found


class _Windows:
    """Blocks of an epoch in random order, some to a window.

    Attributes:
        members: numbers of the blocks of each window.
        ends: the number of rows up to the end of each window.
    """

    def __init__(self, bounds: Array, blocks: int, seed: int, epoch: int) -> None:
        count = len(bounds) - 1
        mixed = permute(np.arange(count, dtype=np.int64), count, (seed, epoch, _OF_BLOCKS))
        self.members = [mixed[i : i + blocks] for i in range(0, count, blocks)]
        sizes = np.diff(bounds)
        self.ends: Any = np.cumsum([sizes[each].sum() for each in self.members])


@lru_cache(maxsize=8)
def _windows(bounds: bytes, blocks: int, seed: int, epoch: int) -> _Windows:
    return _Windows(np.frombuffer(bounds, np.int64), blocks, seed, epoch)
