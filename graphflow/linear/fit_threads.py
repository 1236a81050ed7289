"""The threads of a fit: how many there are, the pool that they stand in, and what BLAS may use.

A fit takes as many threads as it was given, or as this process has cores. Loops and products of
sparse tables run on a pool; BLAS has one thread meanwhile, since its threads spin for a while after
each call. Newton's method on dense tables is products of matrices, which BLAS itself splits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import numpy as np

from graphflow.base.process.blas_threads import one_blas_thread
from graphflow.errors import LinearModelError
from graphflow.linear.losses import LOGISTIC, Loss
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from graphflow.placement.clusters.machine.host_facts import default_threads

ROW_NS, LOGISTIC_NS = 30.0, 220.0
"""The time of a step beside its numbers, and what a logistic one takes more, in nanoseconds."""
SPARSE_NS, DENSE_NS = 1.4, 0.6
"""The time that a step takes for each number of its row or column, in nanoseconds."""
SHARE_NS = 200_000.0
"""The least work of a thread between two meetings, in nanoseconds: a meeting takes some 20,000."""

_BLAS_THREADS = ContextVar("blas_threads", default=1)


def blas_threads() -> int:
    """Return how many threads BLAS has for the fit that is under way."""
    return _BLAS_THREADS.get()


def count_threads(threads: int | None) -> int:
    """Return how many threads a fit may use: `threads`, by default as many as a CPU device has.

    Raises:
        LinearModelError: it is no whole number of at least 1.
    """
    if threads is None:
        return default_threads()
    if not isinstance(threads, int | np.integer) or isinstance(threads, bool) or threads < 1:
        raise LinearModelError(
            f"threads must be a whole number of at least 1, or None for {default_threads()} on "
            f"this machine, not {threads!r}"
        )
    return int(threads)


def pass_ns(x: Any, loss: Loss | None = None) -> float:
    """Return about how long one thread takes for a pass over a table, in nanoseconds.

    Args:
        loss: whose steps are made; None for products alone.
    """
    numbers = DENSE_NS * x.size if isinstance(x, np.ndarray) else SPARSE_NS * x.nnz
    step = LOGISTIC_NS if loss is not None and loss.code == LOGISTIC else 0.0
    return (ROW_NS + step) * float(x.shape[0]) + numbers


@contextmanager
def use_threads(x: Any, solver: str, threads: int) -> Iterator[None]:
    """Let the fit of a table use a pool of so many threads, or BLAS, while the block runs."""
    if solver in ("newton", "cholesky", "cg", "interior") and isinstance(x, np.ndarray):
        token = _BLAS_THREADS.set(threads)
        try:
            with _blas().limit(limits=threads, user_api="blas"):
                yield
        finally:
            _BLAS_THREADS.reset(token)
        return
    with one_blas_thread():
        is_in_memory = isinstance(x, np.ndarray) or hasattr(x, "indptr")
        if threads == 1 or not is_in_memory or pass_ns(x) < 2 * SHARE_NS:
            with use_pool(None):
                yield
            return
        with closing(Pool(threads)) as pool, use_pool(pool):
            yield


@cache
def _blas() -> Any:
    from threadpoolctl import ThreadpoolController  # scans all loaded libraries, so only once

    return ThreadpoolController()


__all__ = ["blas_threads", "count_threads", "pass_ns", "use_threads"]
