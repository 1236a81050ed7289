"""Products of tables and vectors on the threads of a pool.

A thread computes a range of the result, or adds the rows of a range to sums of its own; the sums
are then added in order. So the bits depend on the number of threads alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.linear.loops import sparse_products
from graphflow.linear.losses import Floats
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.ops.kernels.jit.thread_pool import Pool

_FEW = 200_000
"""Numbers of a table that one thread multiplies faster than two."""


def multiply_on_threads(
    x: Any, w: Floats, pool: Pool, multiply: Callable[[Any, Floats], Floats]
) -> Floats:
    """Return X @ w in float64.

    Args:
        x: a dense array, or a CSR or CSC matrix.
        w: the vector.
        pool: the threads.
        multiply: the product on one thread.
    """
    if isinstance(x, np.ndarray):
        if x.size < _FEW:
            return multiply(x, w)
        edges = np.linspace(0, len(x), pool.threads + 1).astype(np.int64)
        out = np.empty(len(x))

        def part(k: int) -> None:
            rows = slice(edges[k], edges[k + 1])
            out[rows] = multiply(x[rows], w)

        pool.run(part, pool.threads)
        return out
    return multiply(x, w) if x.nnz < _FEW else _multiply_sparse(x, w, pool)


def _multiply_sparse(x: Any, w: Floats, pool: Pool) -> Floats:
    lines = len(x.indptr) - 1
    aims = np.linspace(0, x.nnz, pool.threads + 1)
    edges = np.searchsorted(x.indptr, aims).tolist()
    edges[0], edges[-1] = 0, lines
    arrays = (x.data, x.indices, x.indptr, np.ascontiguousarray(w, np.float64))
    if x.format == "csr":
        out = np.empty(lines)
        multiply = native(sparse_products, "multiply_rows")
        pool.run(lambda k: multiply(edges[k], edges[k + 1], *arrays, out), pool.threads)
        return out
    sums = np.zeros((pool.threads, x.shape[0]))
    add = native(sparse_products, "add_rows")
    pool.run(lambda k: add(edges[k], edges[k + 1], *arrays, sums[k]), pool.threads)
    return np.asarray(sums.sum(axis=0))


__all__ = ["multiply_on_threads"]
