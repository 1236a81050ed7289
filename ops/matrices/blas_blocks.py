"""Products by BLAS on blocks of rows, columns or terms, one thread each.

How a product is split depends on its shape only, so results have the same bits for any number of
threads.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_parts

# (least flops, blocks). A block on another thread costs about 50 µs, and on one thread alone blocks
# make the product 4 to 8 % slower (measured at MLP sizes). So products of less than about 0.3 ms
# stay whole.
_BLOCKS = ((8e9, 16), (2e9, 8), (4e8, 4), (4e7, 2))
_SMALLEST_BLOCK = 32  # rows or columns


def choose_blocks(batch: tuple[int, ...], m: int, k: int, n: int) -> tuple[int, int]:
    """Return (axis, blocks) of a split, which depends on the shapes only.

    The axis is one of the product's, or the one after them: the axis that is summed over.
    """
    flops = 2.0 * math.prod(batch) * m * k * n
    wanted = next((blocks for least, blocks in _BLOCKS if flops >= least), 1)
    if wanted == 1:
        return 0, 1
    longest = max(range(len(batch)), key=batch.__getitem__) if batch else 0
    if batch and batch[longest] > 1:
        return longest, min(wanted, batch[longest])
    if not batch and k >= wanted * max(m, n):
        return 2, wanted  # each block of rows or columns would read all of the other operand
    # the longer side: a block of rows reads all of b, a block of columns all of a
    size, axis = (m, len(batch)) if m >= n else (n, len(batch) + 1)
    return axis, max(1, min(wanted, size // _SMALLEST_BLOCK))


def sum_of_products(out: Any, a: Any, b: Any, blocks: int) -> None:
    """Multiply blocks of the summed axis one by one, and add their products in order."""
    count = a.shape[1]
    edges = [count * i // blocks for i in range(blocks + 1)]
    products = scratch(np, "products", (blocks, *out.shape), out.dtype)

    def part(i: int) -> None:
        some = slice(edges[i], edges[i + 1])
        np.matmul(a[:, some], b[some], out=products[i])

    run_parts(part, blocks)
    np.add(products[0], products[1], out=out)
    for more in products[2:]:
        np.add(out, more, out=out)


def multiply_blocks(out: Any, a: Any, b: Any, axis: int, blocks: int) -> None:
    """Write a @ b to `out`, in blocks along an axis of the product."""
    size, rank = out.shape[axis], out.ndim
    edges = [size * i // blocks for i in range(blocks + 1)]

    def rows(x: Any, skip: int, block: slice) -> Any:
        """Return the block of an operand, which lacks axis `skip` of the product."""
        own = axis - (rank - x.ndim)
        if axis == skip or own < 0 or (axis < rank - 2 and x.shape[own] == 1):
            return x
        return x[(slice(None),) * own + (block,)]

    def part(i: int) -> None:
        block = slice(edges[i], edges[i + 1])
        target = out[(slice(None),) * axis + (block,)]
        np.matmul(rows(a, rank - 1, block), rows(b, rank - 2, block), out=target)

    run_parts(part, blocks)
