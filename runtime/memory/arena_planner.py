"""Memory plan: lifetimes of a program's buffers -> offsets in one arena, before anything runs.

`memory_layout.py` decides which tensors share a buffer (aliases, in-place updates). Here each
buffer, in order of birth, gets the lowest offset that is free for its whole life.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.jit.array_address import align_up


@dataclass(frozen=True)
class BufferLifetime:
    """A buffer that is needed from position `birth` to `death`, both included, of a program."""

    birth: int
    death: int
    nbytes: int


@dataclass(frozen=True)
class ArenaPlan:
    """The offset of each buffer, and the size of the arena, in bytes."""

    offsets: tuple[int, ...]
    nbytes: int


def plan_arena(blocks: Sequence[BufferLifetime]) -> ArenaPlan:
    """Choose offsets so that buffers alive at the same time never overlap.

    First fit in order of birth, in O(b · (gaps + log b)) for b buffers. Adjacent gaps are joined,
    so the time for a long chain with its gradients stays proportional to its length.

    Source: the greedy of interval-graph colouring, weighted by size; cf. Pisarchyk & Lee,
    "Efficient memory management for deep neural net inference", 2020.
    """
    offsets = [0] * len(blocks)
    gaps: list[tuple[int, float]] = [(0, inf)]  # (offset, end), sorted, none touches the next
    live: list[tuple[int, int, int]] = []  # a heap of (death, offset, end)
    total = 0
    for i in sorted(range(len(blocks)), key=lambda i: (blocks[i].birth, -blocks[i].nbytes)):
        block = blocks[i]
        while live and live[0][0] < block.birth:
            _, start, end = heappop(live)
            _add_gap(gaps, start, end)
        size = align_up(max(block.nbytes, 1))
        at = next(k for k, (start, end) in enumerate(gaps) if end - start >= size)
        offset, limit = gaps[at]
        gaps[at : at + 1] = [(offset + size, limit)] if offset + size < limit else []
        heappush(live, (block.death, offset, offset + size))
        offsets[i] = offset
        total = max(total, offset + size)
    return ArenaPlan(tuple(offsets), total)


def _add_gap(gaps: list[tuple[int, float]], start: int, end: float) -> None:
    """Add a gap and join it to the gaps that it touches."""
    at = bisect(gaps, (start, end))
    first, last = at, at
    if at and gaps[at - 1][1] == start:
        first, start = at - 1, gaps[at - 1][0]
    if gaps[at][0] == end:  # the last gap has no end, so one always follows
        last, end = at + 1, gaps[at][1]
    gaps[first:last] = [(start, end)]
