"""Coordinate descent on working sets, for smooth losses with an l1 penalty.

    all columns ─ which could gain? → a working set ─ coordinate descent → coefficients ─┐
        └───────────────────────── certificate, larger set ──────────────────────────────┘

The loss is replaced by its parabola at the predictions (it is one already if it is squared). The
products of the set's columns with each other are computed once, so a step costs as many numbers as
the set has columns; a set too large for that is solved on the columns themselves. Every few passes
the last iterates are combined to one that is usually much better (Anderson's extrapolation).

Source: Massias et al., ICML 2018 (celer); Bertrand et al., NeurIPS 2022 (skglm).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.loops import column_passes
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem, multiply
from graphflow.linear.solvers.newton import best_intercept
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

_FIRST_SET = 100
"""Columns of the first set, at least."""
_PRODUCTS = 3000
"""Columns of a set up to which their products are computed."""
_PATIENCE = 5
"""Rounds in a row that may bring nothing."""
_KEPT = 5
"""Iterates that an extrapolation combines."""


def descend_columns(
    problem: LinearProblem, monitor: FitMonitor, *, w: Floats | None = None, b: float = 0.0
) -> None:
    """Solve a problem with a smooth loss; it may have an l1 penalty, and should.

    Args:
        problem: its dense matrix is Fortran-contiguous, its sparse one CSC.
        monitor: is given certified models.
        w, b: the model to begin with.
    """
    w = np.zeros(problem.columns) if w is None else w.copy()
    f = problem.predict(w, b)
    loss, c, y = problem.loss, problem.c, problem.y
    is_squared = loss.name == "squared"
    columns, parabola, stalled = np.flatnonzero(w), None, 0
    while True:
        if problem.has_intercept:
            moved = best_intercept(problem, f)
            b, f = b + moved, f + moved
        beta = -c * loss.slopes(f, y)
        v = problem.correlate(beta)
        known = {} if problem.has_intercept else {"v": v}
        if monitor.accept(w, b, beta, predictions=f, **known) or monitor.is_exhausted:
            return
        columns = np.append(columns, _columns_to_add(problem, w, v, columns))
        if parabola is None or not is_squared:
            h = c * loss.curvatures(f, y)
            parabola = _Parabola(problem, h)
        parabola.add(columns[parabola.size :])
        objective = monitor.history.certificates[-1].primal
        # The gap of an l1 penalty falls with the root of what a pass gains.
        goal = max(0.01 * monitor.tol**2, 1e-20) * abs(objective)
        change = parabola.solve(w[columns], v[columns], beta, goal)
        monitor.passes += 1 + parabola.passes
        along = multiply(parabola.x, change)
        beside = -float(parabola.means @ change)
        length = 1.0
        if not is_squared:
            length = _line_search(problem, w, f, columns, change, along + beside)
        stalled = stalled + 1 if monitor.is_stalled else 0
        if length == 0.0 or not change.any() or stalled > _PATIENCE:
            return
        w = w.copy()
        w[columns] += length * change
        b, f = b + length * beside, f + length * (along + beside)


def _columns_to_add(problem: LinearProblem, w: Floats, v: Floats, known: Any) -> Any:
    """Return the columns outside a set that could gain most: at most as many as are in use."""
    slope = problem.bound_sizes(v).copy()
    slope[known] = -np.inf
    size = min(max(_FIRST_SET, int(np.count_nonzero(w))), problem.columns)
    best = np.argpartition(-slope, size - 1)[:size]
    # A column that would stay at 0 now may be needed once others have moved.
    floor = 0.7 * problem.l1
    return np.sort(best[slope[best] > floor])


class _Parabola:
    """The parabola of a loss at the predictions, in the coefficients of some columns.

    Attributes:
        x: the columns so far.
        means: of the columns under the weights; 0 without an intercept.
        passes: over the data, as far as the last work needed them.
    """

    def __init__(self, problem: LinearProblem, h: Floats) -> None:
        self._problem, self._h = problem, h
        self._gram: Any = np.zeros((0, 0))
        self.x: Any = problem.x[:, :0]
        self.means = np.zeros(0)
        self.passes = 0.0

    @property
    def size(self) -> int:
        """The number of columns."""
        return len(self.means)

    def add(self, columns: Any) -> None:
        """Add columns of the matrix, and their products with all columns."""
        problem, h = self._problem, self._h
        self.passes = 0.0
        if not len(columns):
            return
        added = problem.x[:, columns]
        means = np.zeros(len(columns))
        if problem.has_intercept and h.any():
            means = multiply(added.T, h) / float(h.sum())
        if problem.is_sparse:
            from scipy.sparse import hstack

            self.x = hstack([self.x, added], format="csc")
        else:
            self.x = np.concatenate([self.x.T, added.T]).T
        before, self.means = self.size, np.append(self.means, means)
        if self.size > _PRODUCTS:
            return
        self.passes = len(columns) / problem.columns
        gram = np.empty((self.size, self.size))
        gram[:before, :before] = self._gram
        products = _products(self.x, added, h) - float(h.sum()) * np.outer(self.means, means)
        gram[:, before:], gram[before:, :before] = products, products[:before].T
        self._gram = gram

    def solve(self, old: Floats, v: Floats, beta: Floats, goal: float) -> Floats:
        """Return by how much the columns' coefficients change.

        Args:
            old: their coefficients.
            v: their products with `beta`.
            beta: the negative slopes of the rows' losses.
            goal: a pass that gains less ends the work.
        """
        if self.size <= _PRODUCTS:
            return self._solve_by_products(old, v, goal) - old
        return self._solve_by_columns(old, beta, goal) - old

    def _solve_by_products(self, old: Floats, v: Floats, goal: float) -> Floats:
        gram, m = self._gram, self.size
        loop, flat = native(column_passes, "gram_columns"), gram.reshape(-1)
        l1, l2 = float(self._problem.l1), float(self._problem.l2)
        start = v + gram @ old

        def objective(each: Floats) -> float:
            smooth = each @ (0.5 * (gram @ each) - start) + 0.5 * l2 * (each @ each)
            return float(smooth + l1 * np.abs(each).sum())

        w, slopes = old.copy(), v.copy()
        kept = [w.copy()]
        for _ in range(10_000):
            if loop(m, flat, slopes, w, l1, l2, self._problem.is_positive) <= goal:
                break
            kept.append(w.copy())
            if len(kept) > _KEPT:
                better = _extrapolate(kept)
                if self._problem.is_positive:
                    better = np.maximum(better, 0.0)
                if objective(better) < objective(w):
                    w, slopes = better, start - gram @ better
                kept = [w.copy()]
        return w

    def _solve_by_columns(self, old: Floats, beta: Floats, goal: float) -> Floats:
        problem, h, x = self._problem, self._h, self.x
        w, order = old.copy(), np.arange(self.size)
        residual = beta / np.maximum(h, 1e-300)
        l1, l2 = float(problem.l1), float(problem.l2)
        if problem.is_sparse:
            squares = np.asarray(x.multiply(x).T @ h).ravel()
        else:
            squares = np.einsum("ij,ij,i->j", x, x, h, optimize=True)
        curvatures = np.maximum(squares - float(h.sum()) * self.means**2, 0.0)
        rest = (curvatures, self.means, h, residual)
        ends = (w, l1, l2, self._problem.is_positive)
        arguments: tuple[Any, ...]
        if problem.is_sparse:
            loop, shift = native(column_passes, "sparse_columns"), np.zeros(1)
            arguments = (order, x.data, x.indices, x.indptr, *rest, shift, *ends)
        else:
            loop, flat = native(column_passes, "dense_columns"), x.reshape(-1, order="F")
            arguments = (order, flat, problem.rows, *rest, *ends)
        while loop(*arguments) > goal and self.passes < 1000:
            self.passes += 2 * self.size / problem.columns
        return w


def _products(x: Any, added: Any, h: Floats) -> Any:
    """Return Xᵀ H A."""
    if not isinstance(x, np.ndarray):
        return np.asarray((x.T @ added.multiply(h[:, None]).tocsc()).todense(), np.float64)
    if (h == h[0]).all():
        return h[0] * (x.astype(np.float64, copy=False).T @ added.astype(np.float64, copy=False))
    return x.astype(np.float64, copy=False).T @ (added * h[:, None])


def _extrapolate(kept: list[Floats]) -> Floats:
    """Return the combination of iterates whose differences cancel best.

    Source: Anderson, J. ACM 1965; as in Bertrand and Massias, AISTATS 2021.
    """
    steps = np.diff(np.stack(kept), axis=0)
    products = steps @ steps.T
    size = len(products)
    products += 1e-12 * np.trace(products) / size * np.eye(size)
    try:
        factors = np.linalg.solve(products, np.ones(size))
    except np.linalg.LinAlgError:
        return kept[-1]
    total = float(factors.sum())
    if total == 0.0 or not np.isfinite(factors).all():
        return kept[-1]
    return np.asarray((factors / total) @ np.stack(kept[1:]))


def _line_search(
    problem: LinearProblem, w: Floats, f: Floats, chosen: Any, change: Floats, along: Floats
) -> float:
    """Return the first of 1, 1/2, 1/4, … by which the objective does not rise; 0 if none does."""
    before, length = problem.primal(w, f), 1.0
    slack = 1e-15 * abs(before)  # rounding near the optimum, where the dual still improves
    for _ in range(30):
        new = w.copy()
        new[chosen] += length * change
        if problem.primal(new, f + length * along) <= before + slack:
            return length
        length *= 0.5
    return 0.0


__all__ = ["descend_columns"]
