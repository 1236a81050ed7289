"""CUDA kernels of regions, from the same steps as LLVM's, and their launches.

    void kernel(pointers of operands and results…, u64 sizes…)

An elementwise region is a grid-stride loop over vectors of 16 bytes, and over single elements if
rows or addresses are unaligned; both call the same function. A region with reductions gives each
row a group of threads (`lanes`). They go over the row once for each reduction that needs another,
and once to store; their partial results are combined in a tree. The number of lanes depends on
sizes only, so bits do not change from run to run, nor with what else is in the region.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from functools import cache
from math import prod

from graphflow.base.lazy_dataclass import dataclass
from graphflow.ops.kernels.codegen.elementwise_emitter import reachable_steps, trace_region
from graphflow.ops.kernels.codegen.region import Region
from graphflow.ops.kernels.cuda.module_prelude import PRELUDE
from graphflow.ops.kernels.cuda.region_writer import (
    COLUMN_THREADS,
    THREADS,
    CudaRegionWriter,
)

_SHORT_ROW = 1024
"""Elements of a row up to which 32 threads share it; above, a whole block does."""
_MANY_COLUMNS = 4096
_BLOCKS_EACH = 16
"""Blocks of a grid for each multiprocessor, at most; each goes on in strides."""
_WIDE = 1 << 31
"""Elements from which indices take 64 bits."""


@dataclass(frozen=True)
class Grid:
    """The launch of a kernel: blocks, threads of each, and the numbers after the pointers."""

    blocks: int
    threads: int
    numbers: tuple[int, ...]


class CudaKernel:
    """The CUDA function of a region.

    Args:
        wide: whether indices have 64 bits.

    Raises:
        Untraceable: an op of the region has no trace.
    """

    def __init__(self, region: Region, wide: bool = False) -> None:
        self.region = region
        trace, _, results = trace_region(region)
        writer = CudaRegionWriter(region, wide)
        for step in reachable_steps(trace, results):
            writer.add(step)
        writer.results = list(results)
        self.dtypes = tuple(step.dtype for step in results)
        self.vector = writer.vector
        text = writer.text()
        self.name = f"graphflow_{hashlib.sha256(text.encode()).hexdigest()[:32]}"
        self.text = text.replace("@NAME@", self.name)
        self.needs: tuple[tuple[str, str], ...] = tuple(writer.needs.items())

    def grid(self, sizes: Sequence[int], aligned: bool, processors: int) -> Grid:
        """Return the launch for sizes of the collapsed axes.

        Args:
            aligned: whether all arrays begin at multiples of 16 bytes.
            processors: multiprocessors of the device; changes no bits.
        """
        most = processors * _BLOCKS_EACH
        size = prod(sizes)
        if not self.region.over:
            fits = aligned and (len(sizes) == 1 or sizes[-1] % self.vector == 0)
            vectors = size // self.vector if fits else 0
            blocks = -(-max(vectors, size - vectors * self.vector) // THREADS)
            return Grid(min(max(blocks, 1), most), THREADS, (size, vectors, *sizes))
        if self.region.over == "rows":
            rows = prod(sizes[:-1])
            lanes = 32 if sizes[-1] <= _SHORT_ROW else THREADS
            blocks = -(-rows * lanes // THREADS)
            return Grid(min(max(blocks, 1), most), THREADS, (rows, lanes, *sizes))
        width = 32 if sizes[-1] >= _MANY_COLUMNS else 8
        tiles = -(-sizes[-1] // width)
        blocks = prod(sizes[:-2]) * tiles
        return Grid(min(max(blocks, 1), most), COLUMN_THREADS, (prod(sizes[:-2]), width, *sizes))


@cache
def cuda_kernel(region: Region, wide: bool = False) -> CudaKernel:
    """Return the kernel of a region; equal regions share one.

    Raises:
        Untraceable: an op has no trace.
    """
    return CudaKernel(region, wide)


def is_wide(sizes: Sequence[int]) -> bool:
    """Return whether a kernel over these sizes needs 64-bit indices."""
    return prod(sizes) >= _WIDE


def module_text(kernels: Iterable[CudaKernel]) -> str:
    """Return one translation unit of several kernels."""
    kernels = list(kernels)
    needs = dict(need for kernel in kernels for need in kernel.needs)
    return "\n".join([PRELUDE, *needs.values(), *dict.fromkeys(k.text for k in kernels)])
