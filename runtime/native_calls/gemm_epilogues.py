"""Epilogues of matrix products: a region runs on each block of rows while the block is in cache.

A region that reads a product row by row can be an epilogue: bias, activation, scale, residual,
norms. The product knows after which of its units whole blocks of its result are done, and the
region knows the length of a row. Both may run in parts without changing a bit. So the two become
alternating calls: a block of the product, then the region's rows of this block. This is done only
if the region writes nothing that the product still reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from graphflow.ops.kernels.jit.compiler import KernelTask


class MemoryRange(NamedTuple):
    """Memory that a call reads or writes; `start` is None for feeds and received tensors."""

    start: int | None
    nbytes: int

    def overlaps(self, other: MemoryRange) -> bool:
        """Return True if two ranges share memory; feeds share none with buffers."""
        if self.start is None or other.start is None:
            return False
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes


class KernelAccess(NamedTuple):
    """A kernel and the memory that it uses.

    Its first result comes first among `writes`, its scratch memory, if any, last.
    """

    task: KernelTask
    reads: tuple[MemoryRange, ...]
    writes: tuple[MemoryRange, ...]


class BlockCall(NamedTuple):
    """Units `start` to `stop` of call number `call`."""

    call: int
    start: int
    stop: int


def interleave_epilogues(works: Sequence[KernelAccess]) -> list[BlockCall]:
    """Return the calls in order, each as a whole or interleaved with the call that follows it."""
    found: list[BlockCall] = []
    i = 0
    while i < len(works):
        turns = _interleave(works[i], works[i + 1], i) if i + 1 < len(works) else []
        found += turns or [BlockCall(i, 0, works[i].task.rows)]
        i += 2 if turns else 1
    return found


def _interleave(product: KernelAccess, region: KernelAccess, number: int) -> list[BlockCall]:
    """Interleave a product with the region that follows it; return [] if that is impossible."""
    blocks, row = product.task.blocks, region.task.row
    if not blocks or not row or not _can_interleave(product, region):
        return []
    rows = [done // row for _, done in blocks]
    if any(done % row for _, done in blocks) or rows[-1] != region.task.rows:
        return []  # another size, or a block ends within a row
    turns = []
    units = [0, *(unit for unit, _ in blocks)]
    for (start, stop), (first, last) in zip(pairwise(units), pairwise([0, *rows]), strict=True):
        turns += [BlockCall(number, start, stop), BlockCall(number + 1, first, last)]
    return turns


def _can_interleave(product: KernelAccess, region: KernelAccess) -> bool:
    """Return True if a region may run on finished blocks of a product.

    It must use the product's result only as a whole, and write nothing that the product still
    reads.
    """
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
