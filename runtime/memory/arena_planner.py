"""Memory plan: liveness of a program's tensors -> offsets in one arena, known before anything runs.

Tensors that share memory (aliases, in-place updates) form one block. Blocks get the lowest gap
that is free for their whole life, in order of birth; an elementwise result takes over the block of
an input that dies there.
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
    """Memory needed from position `birth` to `death`, both included, in a straight-line program."""

    birth: int
    death: int
    nbytes: int


@dataclass(frozen=True)
class ArenaPlan:
    """Byte offset of each block, and the arena's size in bytes."""

    offsets: tuple[int, ...]
    nbytes: int


def plan_arena(blocks: Sequence[BufferLifetime]) -> ArenaPlan:
    """Offsets such that blocks alive at the same time never overlap.

    First fit in order of birth: O(b · (gaps + log b)), and gaps that touch become one, so that a
    long chain and its gradients take a time that grows with their length. Source: the greedy of
    interval-graph colouring, weighted by size; cf. Pisarchyk & Lee, "Efficient memory management
    for deep neural net inference", 2020.
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
    """Add a gap, and join it to those it touches."""
    at = bisect(gaps, (start, end))
    first, last = at, at
    if at and gaps[at - 1][1] == start:
        first, start = at - 1, gaps[at - 1][0]
    if gaps[at][0] == end:  # the last gap has no end, so one always follows
        last, end = at + 1, gaps[at][1]
    gaps[first:last] = [(start, end)]
