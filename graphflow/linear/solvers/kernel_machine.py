"""Support vector machines with kernels: blocks of the worst pairs, each solved by pairs.

    all rows ─ the rows that violate most → a block: its rows of K ─ pairs → α ─┐
       └──────────────── the gradient of all rows, K[:, block] @ change ────────┘

A block's rows of K are computed at once, and kept as long as memory is given for them. The gradient
gives the certificate for nothing: f = y (Qα).

Source: Joachims, 1999 (SVM light); Fan, Chen and Lin, JMLR 2005.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.progress import show_progress, show_stage
from graphflow.linear.fit_history import FitHistory
from graphflow.linear.loops import pair_steps
from graphflow.linear.losses import Floats
from graphflow.linear.problem import Certificate
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

_BLOCK = 512
"""Rows that are solved at once."""
_WHOLE = 2000
"""Rows that are solved at once if all of K is in memory."""
_TINY = 100
"""Rows that are solved as far as rounding errors allow: it costs next to nothing, and rows with
weights then give the same model as repeated rows."""

KernelRows = Callable[[Any], Floats]
"""Row numbers to their rows of K, (rows asked for, rows)."""


@dataclass(frozen=True)
class KernelModel:
    """A solved machine.

    Attributes:
        alpha: (rows,) dual variables, between 0 and c.
        b: the intercept.
        steps: pairs that were optimised.
        certificate: of the model.
    """

    alpha: Floats
    b: float
    steps: int
    certificate: Certificate


class _RowCache:
    """Rows of K, of which those that were used last are kept.

    Args:
        compute: computes rows.
        count: the number of rows of K, and of columns.
        limit: the number of rows that are kept.
    """

    def __init__(self, compute: KernelRows, count: int, limit: int) -> None:
        self._compute = compute
        size = min(count, max(limit, _BLOCK))
        self._rows = np.empty((size, count))
        self._place = np.full(count, -1)
        self._owner = np.full(size, -1)
        self._used = np.zeros(size, np.int64)
        self._now = 0

    def fetch(self, numbers: Any) -> None:
        """Make sure that some rows are there."""
        self._now += 1
        there = self._place[numbers]
        self._used[there[there >= 0]] = self._now
        missing = numbers[there < 0]
        if len(missing):
            free = np.argsort(self._used, kind="stable")[: len(missing)]
            gone = self._owner[free]
            self._place[gone[gone >= 0]] = -1
            self._rows[free] = self._compute(missing)
            self._place[missing], self._owner[free] = free, missing
            self._used[free] = self._now

    def rows(self, numbers: Any, columns: Any = slice(None)) -> Floats:
        """Return some columns of rows that were fetched."""
        found = self._rows[self._place[numbers]]
        return np.asarray(found if isinstance(columns, slice) else found.take(columns, axis=1))


class _WholeMatrix:
    """All rows of K, computed at once."""

    def __init__(self, compute: KernelRows, count: int) -> None:
        self._all = compute(np.arange(count))

    def fetch(self, numbers: Any) -> None:
        """Do nothing: all rows are there."""

    def rows(self, numbers: Any, columns: Any = slice(None)) -> Floats:
        """Return some columns of some rows."""
        if len(numbers) == len(self._all):
            return np.asarray(self._all)
        found = self._all[numbers]
        return np.asarray(found if isinstance(columns, slice) else found.take(columns, axis=1))


def solve_kernel_machine(
    kernel_rows: KernelRows, y: Floats, c: Floats, tol: float, most_steps: int, cache_bytes: float,
    history: FitHistory, note: Callable[[KernelModel], None],
) -> None:  # fmt: skip
    """Solve the dual of a support vector machine with a kernel.

    Args:
        kernel_rows: gives rows of the kernel's matrix.
        y: (rows,) -1 and 1.
        c: (rows,) upper bounds of the dual variables.
        tol: the greatest violation of a pair that is enough.
        most_steps: pairs, at most; -1 for any number.
        cache_bytes: memory for rows of K.
        history: where certificates are noted.
        note: is given each certified model; the last one is the solution.
    """
    n = len(y)
    cache: _RowCache | _WholeMatrix
    if n <= _BLOCK or 8.0 * n * n <= cache_bytes:
        cache = _WholeMatrix(kernel_rows, n)
    else:
        cache = _RowCache(kernel_rows, n, int(cache_bytes / (8 * n)))
    work = np.empty(4 * n)
    is_whole = isinstance(cache, _WholeMatrix) and n <= max(_WHOLE, _BLOCK)
    alpha, gradient = np.zeros(n), np.full(n, -1.0)
    history.solver = "smo"
    start, steps, before = time.perf_counter(), 0, np.zeros(0, np.int64)
    left = most_steps if most_steps >= 0 else 1 << 62
    loop = native(pair_steps, "optimize_pairs")
    with show_progress("fitting", where=f"{n:,} rows by pairs"):
        while True:
            violation = _violation(y, c, alpha, gradient)
            certificate, b = _certify(y, c, alpha, gradient, steps / n, start)
            history.certificates.append(certificate)
            note(KernelModel(alpha.copy(), b, steps, certificate))
            show_stage(f"violation {violation:.1e}, pairs", steps)
            if violation < (tol if n > _TINY else min(tol, 1e-12)) or left <= 0:
                return
            everything = np.arange(n)
            block = everything if is_whole else _choose_block(y, c, alpha, gradient, before)
            cache.fetch(block)
            m = len(block)
            part, slopes = alpha[block], gradient[block]
            inner = max(0.1 * violation, 0.5 * tol) if m < n else 0.5 * tol
            inner = inner if n > _TINY else min(inner, 1e-13)
            kernel = cache.rows(block, block).reshape(-1)
            ends = (work, inner, min(left, 100 * m * m))
            done = loop(m, kernel, y[block], c[block], part, slopes, *ends)
            moved = part != alpha[block]
            change = (y[block] * (part - alpha[block]))[moved]
            alpha[block] = part
            gradient += y * (change @ cache.rows(block[moved]))
            steps, left, before = steps + done, left - done, block
            if not done:
                return


def _bounds(y: Floats, c: Floats, alpha: Floats) -> tuple[Any, Any]:
    """Return which y·α may grow, and which may shrink."""
    up = np.where(y > 0, alpha < c, alpha > 0)
    return up, np.where(y > 0, alpha > 0, alpha < c)


def _violation(y: Floats, c: Floats, alpha: Floats, gradient: Floats) -> float:
    """Return by how much the worst pair violates its condition."""
    up, down = _bounds(y, c, alpha)
    value = -y * gradient
    if not up.any() or not down.any():
        return 0.0
    return float(value[up].max() - value[down].min())


def _choose_block(y: Floats, c: Floats, alpha: Floats, gradient: Floats, before: Any) -> Any:
    """Return the rows that violate most, half of them, and the free ones of the last block."""
    if len(y) <= _BLOCK:
        return np.arange(len(y))
    up, down = _bounds(y, c, alpha)
    value = -y * gradient
    half = _BLOCK // 4 if len(before) else _BLOCK // 2
    rising = np.argsort(np.where(up, -value, np.inf), kind="stable")[:half]
    falling = np.argsort(np.where(down, value, np.inf), kind="stable")[:half]
    chosen = np.union1d(rising[up[rising]], falling[down[falling]])
    free = before[(alpha[before] > 0) & (alpha[before] < c[before])]
    rest = np.concatenate([free, before[~np.isin(before, free)]])
    rest = rest[~np.isin(rest, chosen)][: _BLOCK - len(chosen)]
    return np.sort(np.concatenate([chosen, rest]))


def _certify(
    y: Floats, c: Floats, alpha: Floats, gradient: Floats, passes: float, start: float
) -> tuple[Certificate, float]:
    """Return the certificate and the intercept."""
    f = y * (gradient + 1.0)
    free = (alpha > 0) & (alpha < c)
    if free.any():
        b = float((y[free] - f[free]).mean())
    else:
        up, down = _bounds(y, c, alpha)
        value = -y * gradient
        high = value[up].max() if up.any() else 0.0
        low = value[down].min() if down.any() else high
        b = float(0.5 * (high + low))
    square = float(alpha @ (gradient + 1.0))
    primal = 0.5 * square + float(c @ np.maximum(0.0, 1.0 - y * (f + b)))
    dual = float(alpha.sum()) - 0.5 * square
    seconds = time.perf_counter() - start
    return Certificate(primal, dual, max(primal - dual, 0.0), passes, seconds), b


__all__ = ["KernelModel", "solve_kernel_machine"]
