"""Layouts of attention: heads, mask and band, from which lists of native calls are planned."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.sequence.call_list import THREAD_MEMORY, Place

QUERIES, KEYS = 64, 512
"""Rows and columns of a block of scores."""
_FEW_KEYS = 256
"""Keys up to which a block has half the rows if some pairs are hidden.

The pairs that are computed for nothing at the band's edge then cost more than smaller products.
"""
_UNLIMITED = 1 << 30


@dataclass(frozen=True)
class HeadsLayout:
    """Shape (lead, heads, T, d) and strides in bytes of an array of heads.

    `lead` joins all axes before the heads, which must be evenly spaced.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def head_offsets(self, group: int = 1) -> Any:
        """Return the bytes at which each head begins, each repeated `group` times."""
        lead, heads = (np.arange(n) * s for n, s in zip(self.shape[:2], self.strides, strict=False))
        return np.repeat((lead[:, None] + heads).reshape(-1), group)


@dataclass(frozen=True)
class BandPattern:
    """The keys that a query may see, and the scale of scores.

    A query sees keys from `left` before its own place (its index + offset) to `right` after it;
    None for any number.
    """

    scale: float
    left: int | None
    right: int | None
    offset: int

    def visible_keys(self, first: int, last: int, number: int) -> tuple[int, int]:
        """Return the range of keys that some query in [first, last) sees."""
        start = 0 if self.left is None else first + self.offset - self.left
        stop = number if self.right is None else last + self.offset + self.right
        return max(0, start), max(0, min(number, stop))

    def query_block(self, number: int) -> int:
        """Return the rows of a block of scores with this many keys."""
        return QUERIES // 2 if self.right is not None and number <= _FEW_KEYS else QUERIES

    def row_limits(self, query: int, key: int) -> tuple[int, int]:
        """Return the range of keys that row 0 of a block sees, counted from its first key."""
        shift = query + self.offset - key
        first = -_UNLIMITED if self.left is None else shift - self.left
        end = _UNLIMITED if self.right is None else shift + self.right + 1
        return first, end


@dataclass(frozen=True)
class MaskLayout:
    """A mask over (lead, heads, T, S).

    Attributes:
        kind: as `flash_attention_loops` names it.
        heads: bytes at which each head's part begins.
        row, column: strides in bytes, 0 along axes that it is broadcast along.
    """

    kind: str = "none"
    heads: tuple[int, ...] = ()
    row: int = 0
    column: int = 0

    def place(self, number: int, row: int, key: int) -> Place:
        return (
            (THREAD_MEMORY, 0)
            if self.kind == "none"
            else (number, row * self.row + key * self.column)
        )


def mask_layout(mask: Any, lead: Sequence[int], scores: Sequence[int]) -> MaskLayout:
    """Describe a contiguous mask that broadcasts to (*lead, *scores), for scores (heads, T, S)."""
    rank = len(lead) + 3
    strides = [0] * (rank - mask.ndim) + [
        0 if size == 1 else step for size, step in zip(mask.shape, mask.strides, strict=True)
    ]
    *outer, row, column = strides
    ahead = np.zeros((), np.int64)
    for size, step in zip((*lead, scores[0]), outer, strict=True):
        ahead = ahead[..., None] + np.arange(size) * step
    kind = "bool" if mask.dtype == bool else "float"
    shared = "" if column or scores[-1] == 1 else "1"
    return MaskLayout(kind + shared, tuple(ahead.reshape(-1).tolist()), row, column)


def heads_layout(x: Any) -> HeadsLayout:
    """Describe an array (…, heads, T, d) with a contiguous last axis and evenly spaced leading
    axes."""
    lead = math.prod(x.shape[:-3])
    joined = [
        (size, step) for size, step in zip(x.shape[:-3], x.strides[:-3], strict=True) if size > 1
    ]
    step = joined[-1][1] if joined else 0
    return HeadsLayout((lead, *x.shape[-3:]), (step, *x.strides[-3:]))


def optional_mask_layout(mask: Sequence[Any], q: Any, k: Any) -> MaskLayout:
    if not mask:
        return MaskLayout()
    return mask_layout(mask[0], q.shape[:-3], (*q.shape[-3:-1], k.shape[-2]))
