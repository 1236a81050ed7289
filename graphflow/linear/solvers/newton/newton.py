"""Newton's method on the coefficients, for smooth losses without an l1 penalty.

With the second derivatives h of the rows' losses, and columns less their means under h if there is
an intercept, a step solves (XᵀHX + l2 I) p = -slope:

- "cholesky": by factorising the matrix of the products of the columns, or of the rows;
- "cg": by conjugate gradients, which only multiply by X and Xᵀ;
- "newton": by conjugate gradients, with a factor as preconditioner where they are slow.

A step is as exact as the gap demands: with an l2 penalty alone the gap is |slope|² / (2 l2).
Without any penalty a step is the shortest least-squares solution.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.linear import losses
from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.fit_threads import blas_threads
from graphflow.linear.loops import hessian_rows
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem, meet_intercept, multiply
from graphflow.linear.solvers.newton.conjugate_gradients import Goal, StepFinder
from graphflow.linear.solvers.newton.hessian import DenseHessian, Solve
from graphflow.linear.solvers.newton.line_search import search_line
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

_SMALL, _SMALL_SQUARED = 1_000_000, 30_000_000
"""Operations up to which a factorisation costs less than the overhead of anything else."""
_TINY = 100_000
"""Numbers of a sparse table that are made dense for a factorisation in any case."""


def minimize_smooth(
    problem: LinearProblem, monitor: FitMonitor, *, method: str = "auto", w: Floats | None = None,
    b: float = 0.0,
) -> None:  # fmt: skip
    """Solve a problem with a smooth loss and no l1 penalty.

    Args:
        problem: the problem.
        monitor: is given certified models.
        method: "newton", "cholesky", "cg", "lstsq", or "auto" for the fastest.
        w, b: the model to begin with.
    """
    f = np.full(problem.rows, b) if w is None else problem.predict(w, b)
    w = np.zeros(problem.columns) if w is None else w.copy()
    loss, c, y = problem.loss, problem.c, problem.y
    steps = _Steps(problem, choose_method(problem) if method == "auto" else method, monitor)
    first: float | None = None
    known: _Slopes | None = None
    while True:
        if problem.has_intercept:
            moved = best_intercept(problem, f)
            b, f = b + moved, f + moved
        if known is None:
            beta = meet_intercept(problem, -c * loss.slopes(f, y))
            v = problem.correlate(beta)
        else:
            beta, v = known.beta, known.v
        done = monitor.accept(w, b, beta, predictions=f, v=v)
        slope = v - problem.l2 * w
        size = float(np.linalg.norm(slope))
        first = size if first is None else first
        if done or monitor.is_exhausted or size <= 1e-15 * first:
            return
        h = c * loss.curvatures(f, y)
        primal = problem.primal(w, f)
        p = steps.find(slope, h, primal)
        known = _take_step(problem, f, p)
        along = multiply(problem.x, p) if known is None else known.f - f
        beside = -float(h @ along) / max(float(h.sum()), 1e-300) if problem.has_intercept else 0.0
        moves = along + beside
        length = search_line(
            partial(_primal_along, problem, w, f, p, moves), primal, float(slope @ p)
        )
        if length == 0.0 and not steps.try_exact():
            return
        known = known if length == 1.0 else None
        w, b, f = w + length * p, b + length * beside, f + length * moves


@dataclass(frozen=True)
class _Slopes:
    """Predictions after a step, the negative slopes of the losses there, and Xᵀ times these."""

    f: Floats
    beta: Floats
    v: Floats


def _take_step(problem: LinearProblem, f: Floats, p: Floats) -> _Slopes | None:
    """Return what a whole step leads to, in one pass over the rows; None where that does not pay.

    Args:
        problem: the problem.
        f: (rows,) predictions before the step.
        p: (columns,) the step.
    """
    x = problem.x
    is_known = problem.loss in (losses.squared, losses.logistic) and not problem.has_intercept
    if not is_known or problem.is_sparse or not x.flags.c_contiguous or blas_threads() > 1:
        return None
    found = _Slopes(f.copy(), np.empty(problem.rows), np.zeros(problem.columns))
    native(hessian_rows, "dense_slopes")(
        *x.shape, x.reshape(-1), problem.y, problem.c, problem.loss is losses.squared, p,
        found.f, found.beta, found.v,
    )  # fmt: skip
    return found


class _Steps:
    """Steps by a method, and how exact they have to be.

    Args:
        problem: the problem.
        method: as of `minimize_smooth`.
        monitor: counts passes.
    """

    def __init__(self, problem: LinearProblem, method: str, monitor: FitMonitor) -> None:
        self._method, self._monitor = method, monitor
        self._is_squared = problem.loss.name == "squared"
        if problem.is_sparse and method == "cholesky":
            problem = replace(problem, x=problem.x.toarray())
        self._problem = problem
        self._finder: StepFinder | None = None
        self._solve: Solve | None = None
        self._sizes: list[float] = []

    def find(self, slope: Floats, h: Floats, primal: float) -> Floats:
        """Return a step from a slope, the rows' second derivatives and the objective."""
        monitor = self._monitor
        if self._method == "lstsq":
            monitor.passes += 2.0
            return _least_squares_step(self._problem, slope, h)
        if self._method == "cholesky":
            monitor.passes += 2.0
            if self._solve is None or not self._is_squared:
                hessian = DenseHessian(self._problem, is_exact=True)
                hessian.set_weights(h)
                self._solve = hessian.factorize()
            return self._solve(slope)
        size = float(np.linalg.norm(slope))
        self._sizes.append(size)
        last = self._sizes[-3:]
        if len(last) == 3 and last[2] > 0.7 * last[1] > 0.49 * last[0]:
            self.try_exact()
        if self._finder is None:
            self._finder = StepFinder(self._problem, self._method == "newton")
        finder = self._finder
        before = finder.passes
        p = finder.find(slope, h, self._goal(size, primal, finder.hessian.is_exact))
        monitor.passes += 1.0 + finder.passes - before
        return p

    def try_exact(self) -> bool:
        """Go over to products of float64; return False if there is nothing to go over from."""
        if self._finder is None or self._finder.hessian.is_exact:
            return False
        self._finder = StepFinder(self._problem, self._method == "newton", is_exact=True)
        self._sizes = []
        return True

    def _goal(self, size: float, primal: float, is_exact: bool) -> Goal:
        """Return how small a slope has to become."""
        l2, tol = self._problem.l2, self._monitor.tol
        if self._is_squared:
            least = (1e-10 if is_exact else 1e-5) * size
        else:
            fall = size / self._sizes[-2] if len(self._sizes) > 1 else 1.0
            least = max(min(0.3, 0.5 * fall), 1e-3) * size

        def goal(gained: float) -> float:
            enough = 0.5 * math.sqrt(2.0 * l2 * tol * max(primal - gained, 0.0))
            return max(enough, least)

        return goal


def _primal_along(
    problem: LinearProblem, w: Floats, f: Floats, p: Floats, along: Floats, length: float
) -> float:
    return problem.primal(w + length * p, f + length * along)


def best_intercept(problem: LinearProblem, f: Floats) -> float:
    """Return what to add to all predictions to make the loss least.

    Newton's steps within a bracket; for a smooth loss.
    """
    loss, c, y = problem.loss, problem.c, problem.y
    if loss.name == "squared":
        return float(c @ (y - f) / c.sum())
    low, high, at = -np.inf, np.inf, 0.0
    scale = float(np.abs(c).sum())
    for _ in range(60):
        slope = float(c @ loss.slopes(f + at, y))
        if abs(slope) <= 1e-15 * scale:
            break
        low, high = (low, at) if slope > 0 else (at, high)
        curvature = float(c @ loss.curvatures(f + at, y))
        step = -slope / curvature if curvature > 0 else -np.sign(slope)
        step = float(np.clip(step, -10.0, 10.0))
        new = at + step
        if not low < new < high and np.isfinite(low + high):
            new = 0.5 * (low + high)
        if new == at:
            break
        at = new
    return float(at)


def choose_method(problem: LinearProblem) -> str:
    """Return the method that is likely to be the fastest."""
    n, d = problem.rows, problem.columns
    if not problem.l2:
        return "lstsq"
    if problem.is_sparse and n * d > 10 * problem.x.nnz + _TINY:
        return "newton"
    most = _SMALL_SQUARED if problem.loss.name == "squared" else _SMALL
    return "cholesky" if float(n) * d * min(n, d) <= most else "newton"


def _least_squares_step(problem: LinearProblem, slope: Floats, h: Floats) -> Floats:
    from scipy.linalg import lstsq

    x: Any = problem.x.toarray() if problem.is_sparse else problem.x
    means, total = np.zeros(problem.columns), float(h.sum())
    if problem.has_intercept and total > 0.0:
        means = multiply(problem.x.T, h) / total
    rows = (np.asarray(x, np.float64) - means) * np.sqrt(h)[:, None]
    # The shortest p with rowsᵀ rows p = slope; the slope lies in the span of the rows.
    target = lstsq(rows.T, slope, lapack_driver="gelsy")[0]
    return np.asarray(lstsq(rows, target, lapack_driver="gelsy")[0])


__all__ = ["best_intercept", "choose_method", "minimize_smooth"]
