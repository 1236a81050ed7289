"""Products of tables and vectors on the threads of a pool.

A thread computes a range of the result, or adds the rows of a range to sums of its own; the sums
are then added in order. So the bits depend on the number of threads alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.linear.loops import hessian_rows, sparse_products
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
        # A thread reads memory that lies together: rows, or columns of a transposed table.
        is_transposed = x.flags.f_contiguous and not x.flags.c_contiguous
        edges = np.linspace(0, x.shape[is_transposed], pool.threads + 1).astype(np.int64)
        out = np.empty((pool.threads, len(x)) if is_transposed else len(x))

        def part(k: int) -> None:
            own = slice(edges[k], edges[k + 1])
            if is_transposed:
                out[k] = multiply(x[:, own], w[own])
            else:
                out[own] = multiply(x[own], w)

        pool.run(part, pool.threads)
        return np.asarray(out.sum(axis=0)) if is_transposed else out
    return multiply(x, w) if x.nnz < _FEW else _multiply_sparse(x, w, pool)


def _multiply_sparse(x: Any, w: Floats, pool: Pool) -> Floats:
    lines, edges = len(x.indptr) - 1, _share_entries(x, pool)
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


class TwofoldProduct:
    """Xᵀ H (X p - beside) of a CSR matrix, whose rows each thread of a pool reads once.

    Args:
        x: the matrix.
        pool: the threads.
    """

    def __init__(self, x: Any, pool: Pool) -> None:
        self._x, self._pool = x, pool
        self._edges = _share_entries(x, pool)
        self._images = np.empty((pool.threads, x.shape[1]))  # fresh pages would cost as much
        self._loop = native(hessian_rows, "sparse_products")

    def __call__(self, h: Floats, p: Floats, beside: float) -> Floats:
        """Return the product.

        Args:
            h: (rows,) weights.
            p: (columns,) the vector.
            beside: what is taken from each row's product.
        """
        x, edges, images = self._x, self._edges, self._images

        def part(k: int) -> None:
            first, last = edges[k], edges[k + 1]
            offsets = x.indptr[first : last + 1]
            images[k] = 0.0
            more = (x.data, x.indices, offsets, h[first:last], p, beside, images[k])
            self._loop(last - first, *more)

        self._pool.run(part, self._pool.threads)
        return np.asarray(images.sum(axis=0))


def _share_entries(x: Any, pool: Pool) -> list[int]:
    """Return the edges between the lines of a CSR or CSC matrix that threads take."""
    edges: list[int] = np.searchsorted(x.indptr, np.linspace(0, x.nnz, pool.threads + 1)).tolist()
    edges[0], edges[-1] = 0, len(x.indptr) - 1
    return edges


__all__ = ["TwofoldProduct", "multiply_on_threads"]
