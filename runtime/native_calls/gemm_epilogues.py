"""Epilogues: what reads a product row by row runs on each block of rows as soon as that is there,
while it is in the cache.

Bias, activation, scale and residual are such, and so are norms. A product says at which of its
units whole blocks of its result are done, and a region of rows how long a row is; both may run in
parts without changing a bit. So a product and the region that follows it become a few calls, by
turns: a block of the product, and the region's rows on it. Only where nothing that the region
writes is still wanted by the product.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from graphflow.ops.kernels.jit.compiler import KernelTask


class MemoryRange(NamedTuple):
    """A place in memory that a call reads or writes, and its bytes; None: what is fed."""

    start: int | None
    nbytes: int

    def overlaps(self, other: MemoryRange) -> bool:
        if self.start is None or other.start is None:
            return False
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes


class KernelAccess(NamedTuple):
    """A kernel and what it works on: of what it writes, the first is its (first) result, and the
    last may be scratch memory."""

    task: KernelTask
    reads: tuple[MemoryRange, ...]
    writes: tuple[MemoryRange, ...]


class BlockCall(NamedTuple):
    """A part of one of some calls: its number, and its units from start to stop."""

    call: int
    start: int
    stop: int


def interleave_epilogues(works: Sequence[KernelAccess]) -> list[BlockCall]:
    """The calls in order, each as a whole or by turns with the one that follows it."""
    found: list[BlockCall] = []
    i = 0
    while i < len(works):
        turns = _interleave(works[i], works[i + 1], i) if i + 1 < len(works) else []
        found += turns or [BlockCall(i, 0, works[i].task.rows)]
        i += 2 if turns else 1
    return found


def _interleave(product: KernelAccess, region: KernelAccess, number: int) -> list[BlockCall]:
    """A product and a region block by block; nothing where that cannot be."""
    blocks, row = product.task.blocks, region.task.row
    if not blocks or not row or not _can_interleave(product, region):
        return []
    rows = [done // row for _, done in blocks]
    if any(done % row for _, done in blocks) or rows[-1] != region.task.rows:
        return []  # of another size, or blocks end within a row
    turns = []
    units = [0, *(unit for unit, _ in blocks)]
    for (start, stop), (first, last) in zip(pairwise(units), pairwise([0, *rows]), strict=True):
        turns += [BlockCall(number, start, stop), BlockCall(number + 1, first, last)]
    return turns


def _can_interleave(product: KernelAccess, region: KernelAccess) -> bool:
    """Whether the region reads the product's result, element by element, and writes nothing that
    the product still needs."""
    if not product.writes or product.writes[0].start is None:
        return False
    made, *scratch = product.writes
    if made not in region.reads:
        return False
    touching = [used for used in (*region.reads, *region.writes) if used.overlaps(made)]
    needed = (*product.reads, *scratch)
    return all(used == made for used in touching) and not any(
        written.overlaps(used) for written in region.writes for used in needed
    )
