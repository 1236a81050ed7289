"""Newton's method on the coefficients, for smooth losses without an l1 penalty.

With the second derivatives h of the rows' losses, and columns less their means under h if there is
an intercept, a step solves (XᵀHX + l2 I) p = -slope, in one of three ways:

- "cholesky": factorises the matrix of the columns' products (few columns);
- "kernel": factorises that of the rows' products, by Woodbury's identity (few rows);
- "cg": conjugate gradients, which only multiply by X and Xᵀ.

Without any penalty a step is the shortest least-squares solution.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem, multiply, sum_squares
from graphflow.linear.solvers.line_search import search_line

MANY = 2000
"""Columns, or rows, up to which a step factorises a matrix of their products."""
_LARGE = 100_000
"""Numbers of a table from which conjugate gradients are tried before a matrix is factorised."""
FEW = 4_000_000
"""Numbers of a sparse table up to which it is made dense for that."""


def minimize_smooth(
    problem: LinearProblem, monitor: FitMonitor, *, method: str = "auto", w: Floats | None = None,
    b: float = 0.0,
) -> None:  # fmt: skip
    """Solve a problem with a smooth loss and no l1 penalty.

    Args:
        problem: the problem.
        monitor: is given certified models.
        method: "cholesky", "kernel", "cg", or "auto" for the fastest.
        w, b: the model to begin with.
    """
    w = np.zeros(problem.columns) if w is None else w.copy()
    f = problem.predict(w, b)
    loss, c, y = problem.loss, problem.c, problem.y
    chosen = _choose(problem) if method == "auto" else method
    # On a well-conditioned table a few products are enough, and cost less than a matrix.
    tries_cg = method == "auto" and chosen == "cholesky" and loss.name == "squared"
    tries_cg = tries_cg and problem.rows * problem.columns > _LARGE
    first: float | None = None
    while True:
        if problem.has_intercept:
            moved = best_intercept(problem, f)
            b, f = b + moved, f + moved
        beta = -c * loss.slopes(f, y)
        v = problem.correlate(beta)
        known = {} if problem.has_intercept else {"v": v}
        done = monitor.accept(w, b, beta, predictions=f, **known)
        slope = v - problem.l2 * w
        size = float(np.linalg.norm(slope))
        first = size if first is None else first
        if done or monitor.is_exhausted or size <= 1e-15 * first:
            return
        h = c * loss.curvatures(f, y)
        accuracy = min(0.1, (size / first) ** 0.5) if loss.name != "squared" else 1e-4
        if tries_cg:
            p, passes = _cg_step(problem, slope, h, accuracy, problem.columns // 16)
            tries_cg = False
        else:
            p, passes = _STEPS[chosen](problem, slope, h, accuracy)
        monitor.passes += 1 + passes
        along = multiply(problem.x, p)
        beside = -float(h @ along) / max(float(h.sum()), 1e-300) if problem.has_intercept else 0.0
        moves = along + beside
        size = search_line(
            partial(_primal_along, problem, w, f, p, moves),
            problem.primal(w, f),
            float(slope @ p),
        )
        if size == 0.0:
            return
        w, b, f = w + size * p, b + size * beside, f + size * moves


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


def _choose(problem: LinearProblem) -> str:
    """Return the method that is likely to be the fastest."""
    if not problem.l2:
        return "lstsq"
    if problem.is_sparse and problem.rows * problem.columns > FEW:
        return "cg"
    if problem.columns <= min(MANY, problem.rows):
        return "cholesky"
    return "kernel" if problem.rows <= min(MANY, problem.columns) else "cg"


def _means(problem: LinearProblem, h: Floats) -> Floats:
    """Return the columns' means under weights; 0 without an intercept."""
    total = float(h.sum())
    if not problem.has_intercept or total <= 0.0:
        return np.zeros(problem.columns)
    return multiply(problem.x.T, h) / total


def _to_dense(problem: LinearProblem) -> Any:
    x = problem.x.toarray() if problem.is_sparse else problem.x
    return np.asarray(x, np.float64)


def _cholesky_step(
    problem: LinearProblem, slope: Floats, h: Floats, accuracy: float
) -> tuple[Floats, float]:
    from scipy.linalg import cho_factor, cho_solve

    x, means = _to_dense(problem), _means(problem, h)
    scaled = x if (h == 1.0).all() else x * np.sqrt(h)[:, None]
    products = scaled.T @ scaled
    if problem.has_intercept:
        products -= float(h.sum()) * np.outer(means, means)
    products[np.diag_indices_from(products)] += problem.l2
    return cho_solve(cho_factor(products), slope), 1.0


def _kernel_step(
    problem: LinearProblem, slope: Floats, h: Floats, accuracy: float
) -> tuple[Floats, float]:
    from scipy.linalg import cho_factor, cho_solve

    used = h > 0.0
    rows = (_to_dense(problem) - _means(problem, h))[used]
    products = rows @ rows.T
    products[np.diag_indices_from(products)] += problem.l2 / h[used]
    inner = cho_solve(cho_factor(products), rows @ slope)
    return (slope - rows.T @ inner) / problem.l2, 1.0


def _least_squares_step(
    problem: LinearProblem, slope: Floats, h: Floats, accuracy: float
) -> tuple[Floats, float]:
    from scipy.linalg import lstsq

    root = np.sqrt(h)
    rows = (_to_dense(problem) - _means(problem, h)) * root[:, None]
    # The shortest p with rowsᵀ rows p = slope; the slope lies in the span of the rows.
    target = lstsq(rows.T, slope, lapack_driver="gelsy")[0]
    return np.asarray(lstsq(rows, target, lapack_driver="gelsy")[0]), 1.0


def _cg_step(
    problem: LinearProblem, slope: Floats, h: Floats, accuracy: float, most: int = 1000
) -> tuple[Floats, float]:
    """Solve by conjugate gradients, preconditioned by the diagonal; `most` steps at most."""
    means = _means(problem, h)

    def apply(p: Floats) -> Floats:
        along = h * (multiply(problem.x, p) - float(means @ p))
        return multiply(problem.x.T, along) - means * float(along.sum()) + problem.l2 * p

    squares = sum_squares(problem.x, h)
    diagonal = np.maximum(squares - float(h.sum()) * means**2, 0.0) + problem.l2
    p, rest = np.zeros_like(slope), slope.copy()
    preconditioned = rest / diagonal
    direction, rho = preconditioned.copy(), float(rest @ preconditioned)
    goal, passes = accuracy**2 * rho, 1.0
    for _ in range(min(10 * problem.columns, most)):
        if rho <= goal or rho == 0.0:
            break
        image = apply(direction)
        passes += 2.0
        length = rho / float(direction @ image)
        p += length * direction
        rest -= length * image
        preconditioned = rest / diagonal
        rho, before = float(rest @ preconditioned), rho
        direction = preconditioned + (rho / before) * direction
    return p, passes


_Step = Callable[[LinearProblem, Floats, Floats, float], tuple[Floats, float]]
"""(problem, slope, h, accuracy) to a step and the passes over the data that it took."""
_STEPS: dict[str, _Step] = {
    "cholesky": _cholesky_step,
    "kernel": _kernel_step,
    "cg": _cg_step,
    "lstsq": _least_squares_step,
}


__all__ = ["best_intercept", "minimize_smooth"]
