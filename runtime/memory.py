"""Memory plan: liveness of a program's tensors -> offsets in one arena, known before anything runs.

Tensors that share memory (aliases, in-place updates) form one block. Blocks get the lowest gap
that is free for their whole life, in order of birth; an elementwise result takes over the block of
an input that dies there.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Bytes; every buffer starts at a multiple, so that alignment never changes a kernel's path."""


@dataclass(frozen=True)
class Block:
    """Memory needed from position `birth` to `death`, both included, in a straight-line program."""

    birth: int
    death: int
    nbytes: int


@dataclass(frozen=True)
class Arena:
    """Byte offset of each block, and the arena's size in bytes."""

    offsets: tuple[int, ...]
    nbytes: int


def plan_arena(blocks: Sequence[Block]) -> Arena:
    """Offsets such that blocks alive at the same time never overlap.

    First fit in order of birth: O(b · live). Source: the greedy of interval-graph colouring,
        weighted by size;
    cf. Pisarchyk & Lee, "Efficient memory management for deep neural net inference", 2020.
    """
    offsets = [0] * len(blocks)
    live: list[tuple[int, int, int]] = []  # (offset, end, death), sorted by offset
    total = 0
    for i in sorted(range(len(blocks)), key=lambda i: (blocks[i].birth, -blocks[i].nbytes)):
        block = blocks[i]
        live = [entry for entry in live if entry[2] >= block.birth]
        size = _aligned(max(block.nbytes, 1))
        offset = 0
        for start, end, _ in live:
            if start - offset >= size:
                break
            offset = max(offset, end)
        offsets[i] = offset
        insort(live, (offset, offset + size, block.death))
        total = max(total, offset + size)
    return Arena(tuple(offsets), total)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
