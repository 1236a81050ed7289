"""Blocks of attention, queries by keys: which there are, and the scores of each.

Blocks depend on shapes alone and each is computed by one thread, so threads do not change bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.kernels.sequence.attention_layouts import BandPattern

# Queries and keys of a block: its scores and probabilities stay in a core's cache.
_QUERIES, _KEYS = 128, 512
# Scores of a task at most; a task takes several heads if these are small.
_SCORES = 1 << 17
# Flops of a task from which handing it to another thread pays.
_WORTH_A_THREAD = 2e7


@dataclass(frozen=True)
class AttentionPattern(BandPattern):
    """A band of visible keys, the scale of scores, and their soft cap."""

    softcap: float | None

    def hidden_pairs(self, xp: Any, t: slice, s: slice) -> Any:
        """Return a mask of the pairs of a block that are hidden; None if all are seen."""
        ahead = None if self.right is None else self.right + self.offset
        behind = None if self.left is None else self.left - self.offset
        cut = ahead is not None and s.stop - 1 - t.start > ahead
        if not cut and (behind is None or t.stop - 1 - s.start <= behind):
            return None
        distance = xp.arange(s.start, s.stop) - xp.arange(t.start, t.stop)[:, None]
        hidden = xp.zeros(distance.shape, bool)
        if ahead is not None:
            hidden |= distance > ahead
        if behind is not None:
            hidden |= -distance > behind
        return hidden


@dataclass(frozen=True)
class GroupedHeads:
    """q, k and v as (n, g, T, d) and (n, S, d): g heads of queries share one head of keys."""

    xp: Any
    q: Any
    k: Any
    v: Any
    mask: Any  # a view (batch…, shared heads, g, T, S), or None
    pattern: AttentionPattern

    @classmethod
    def from_arrays(
        cls, xp: Any, q: Any, k: Any, v: Any, mask: Sequence[Any], pattern: AttentionPattern
    ) -> GroupedHeads:
        """Group heads of arrays (…, heads, T, d)."""
        shared, group = k.shape[-3], q.shape[-3] // k.shape[-3]
        view = None
        if mask:
            m = mask[0].reshape((1,) * (q.ndim - mask[0].ndim) + mask[0].shape)
            parts = (shared, group) if m.shape[-3] != 1 else (1, 1)
            m = m.reshape((*m.shape[:-3], *parts, *m.shape[-2:]))
            scores = (*q.shape[:-3], shared, group, q.shape[-2], k.shape[-2])
            view = m if all(n == 1 for n in m.shape[:-3]) else xp.broadcast_to(m, scores)
        grouped = split_heads(q, shared)
        n = math.prod(k.shape[:-2])  # not -1: there may be no keys
        k, v = (x.reshape(n, *x.shape[-2:]) for x in (k, v))
        return cls(xp, grouped, k, v, view, pattern)

    def tasks(self) -> list[tuple[slice, slice]]:
        """Return ranges of (shared heads, queries), each the rows of one block.

        On a GPU all heads go together, since a launch costs more than a block.
        """
        n, group, rows, _ = self.q.shape
        queries = max(1, min(rows, _QUERIES))
        keys = max(1, min(self.k.shape[1], _KEYS))
        together = n if self.xp is not np else max(1, _SCORES // max(1, group * queries * keys))
        return [
            (slice(i, min(n, i + together)), slice(t, min(rows, t + queries)))
            for i in range(0, n, max(1, together))
            for t in range(0, rows, queries)
        ]

    def query_blocks(self) -> Iterator[slice]:
        """Yield blocks of all queries."""
        rows = self.q.shape[2]
        for first in range(0, rows, _QUERIES):
            yield slice(first, min(rows, first + _QUERIES))

    def key_blocks(self, t: slice) -> Iterator[slice]:
        """Yield blocks of the keys that some of these queries see."""
        start, stop = self.pattern.visible_keys(t.start, t.stop, self.k.shape[1])
        for s in range(start - start % _KEYS, stop, _KEYS):
            yield slice(max(s, start), min(stop, s + _KEYS))

    def mask_block(self, n: slice, t: slice, s: slice) -> Any:
        """Return the mask of a block, (n or 1, g, t, s) or an array that broadcasts to it."""
        mask = self.mask
        mine = tuple(slice(None) if have == 1 else want
                     for have, want in zip(mask.shape[-2:], (t, s), strict=True))  # fmt: skip
        lead = mask.shape[:-3]
        if all(size == 1 for size in lead):
            block = mask[(0,) * len(lead)][(slice(None), *mine)]
            return block[None]
        places = (np.unravel_index(i, lead) for i in range(n.start, n.stop))
        return self.xp.stack([mask[place][(slice(None), *mine)] for place in places])

    def scores(self, qs: Any, n: slice, t: slice, s: slice) -> tuple[Any, Any]:
        """Return a block's masked scores, from scaled queries, and the slope of the soft cap or
        None."""
        xp, cap = self.xp, self.pattern.softcap
        z = xp.matmul(qs, upcast_half(self.k[n, None, s]).swapaxes(-1, -2))
        slope = None
        if cap is not None:
            z /= cap
            xp.tanh(z, out=z)
            slope = 1 - z * z
            z *= cap
        if self.mask is not None:
            block = self.mask_block(n, t, s)
            z = xp.where(block, z, -xp.inf) if block.dtype == bool else xp.add(z, block, out=z)
            z = z.astype(qs.dtype, copy=False)
        hidden = self.pattern.hidden_pairs(xp, t, s)
        if hidden is not None:
            xp.copyto(z, z.dtype.type(-np.inf), where=hidden)
        return z, slope

    def run_tasks(self, tasks: Sequence[Any], work: Callable[[Any], None], flops: float) -> None:
        """Run work(task) for all tasks, on threads if there is enough to do."""
        if self.xp is not np or len(tasks) < 2 or flops < 2 * _WORTH_A_THREAD:
            for task in tasks:
                work(task)
        else:
            run_parts(lambda i: work(tasks[i]), len(tasks))

    def flops(self, products: int) -> float:
        return float(2 * products * self.q.size * self.k.shape[1])


def split_heads(x: Any, shared: int) -> Any:
    """Return (…, heads, T, d) as (n, g, T, d)."""
    return x.reshape(math.prod(x.shape[:-3]) * shared, x.shape[-3] // shared, *x.shape[-2:])


def upcast_half(x: Any) -> Any:
    """Return 16-bit floats as float32, in which scores are computed."""
    return x.astype("float32") if x.dtype.itemsize == 2 else x
