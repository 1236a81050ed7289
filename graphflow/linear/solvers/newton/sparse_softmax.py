"""Logistic regression with more than two classes and an l1 penalty.

    columns whose slopes are largest: a set → proximal steps, Newton's steps on the set ─┐
                    └─────────────────── certificate, larger set ────────────────────────┘

Accelerated proximal steps find which coefficients are 0; Newton's steps solve for the others.

The dual is that of `softmax.py` with |soft(v, l1)|² in place of |v|². Without an l2 penalty it has
the constraint |v_jk| ≤ l1 instead, which a scaled β meets: q then goes to e_y, within the simplex.

Sources: Beck and Teboulle, 2009 (FISTA); O'Donoghue and Candès, 2015 (restarts).
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import numpy as np

from graphflow.base.progress import show_progress
from graphflow.linear.fit_history import CertifiedModel, FitHistory
from graphflow.linear.losses import Floats
from graphflow.linear.problem import Certificate
from graphflow.linear.solvers.newton.line_search import search_line
from graphflow.linear.solvers.newton.softmax import (
    SoftmaxProblem,
    best_intercepts,
    multiply_classes,
    newton_step,
)

_CLOSE, _FEW, _GROWTH = 0.9, 100, 3
"""As of `working_sets.py`: of the penalty, columns, and columns for each in use."""
_STEPS = 20
"""Proximal steps of a round."""
_NEWTON = 5
"""Newton's steps in a row, while they set coefficients to 0."""
_TINY, _EXACT = 2000, 1e-15
"""Numbers of a table that is solved to a gap of rounding errors: that costs next to nothing, and
rows with weights then give the same model as repeated rows."""
_PATIENCE = 5
"""Rounds in a row that may bring nothing."""


def solve_sparse_softmax(
    problem: SoftmaxProblem, tol: float, max_passes: float, history: FitHistory, *,
    w: Floats | None = None, b: Floats | None = None,
) -> CertifiedModel:  # fmt: skip
    """Solve a problem with an l1 penalty; arguments and result are those of `solve_softmax`."""
    columns = problem.x.shape[1]
    w, b = problem.begin(w, b)
    history.solver = "newton"
    start, passes, highest, stalled = time.perf_counter(), 0.0, -math.inf, 0
    known = np.zeros(0, np.int64)
    where = f"{problem.x.shape[0]:,} x {columns:,}, {problem.classes} classes"
    with show_progress("fitting", where=where):
        while True:
            b, found, v = _certify(problem, w, b)
            highest, gap_before = max(highest, found.dual or 0.0), history.gaps[-1:]
            gap = max(found.primal - highest, 0.0)
            seconds = time.perf_counter() - start
            found = Certificate(found.primal, highest, gap, passes, seconds)
            history.certificates.append(found)
            history.best = best = CertifiedModel(w, b, found)
            relative = found.relative_gap or 0.0
            stalled = stalled + 1 if gap_before and relative >= gap_before[0] else 0
            if relative <= tol or passes >= max_passes or stalled > _PATIENCE:
                return best
            known = _grow_set(problem, w, v, known)
            if not len(known):
                return best
            inner, means = _take_columns(problem, known)
            goal = max(0.3 * tol, 0.1 * min(relative, 1.0) * 0.1**stalled)
            goal = _EXACT if problem.x.shape[0] * columns <= _TINY else goal
            share = len(known) / columns
            most = (max_passes - passes) / share
            new, beside, used = _solve_set(inner, w[known], b + means @ w[known], goal, most)
            w = np.zeros_like(w)
            w[known], b = new, beside - means @ new
            passes += 1.0 + share * used


def _certify(problem: SoftmaxProblem, w: Floats, b: Floats) -> tuple[Floats, Certificate, Floats]:
    """Return the best intercepts, the certificate with them, and v = Xᵀβ."""
    f = multiply_classes(problem.x, w) + b
    if problem.has_intercept:
        moved = best_intercepts(problem, f)
        b, f = b + moved, f + moved
    q = problem.probabilities(f)
    if problem.has_intercept:
        q = _meet_counts(problem, q)
    v = multiply_classes(problem.x.T, problem.dual_variables(q))
    most = float(np.abs(v).max(initial=0.0))
    scales = {min(1.0, problem.l1 / most) if most else 1.0} | ({1.0} if problem.l2 else set())
    primal = problem.primal(w, f)
    dual = max(_dual(problem, q, v, scale) for scale in scales)
    return b, Certificate(primal, dual, max(primal - dual, 0.0)), v


def _meet_counts(problem: SoftmaxProblem, p: Floats) -> Floats:
    """Return probabilities so close to others that β sums to 0 in each class.

    Those of all rows are mixed with one distribution, which makes up for what the sums lack.
    """
    counts = np.bincount(problem.labels, problem.c, problem.classes)
    missing = counts - problem.c @ p
    mixed = 2.0 * float((-missing / counts).max(initial=0.0))
    if mixed <= 0.0:
        return p
    other = counts + missing / mixed  # at least half the counts
    return np.asarray((p + mixed * (other / other.sum())) / (1.0 + mixed))


def _dual(problem: SoftmaxProblem, q: Floats, v: Floats, scale: float) -> float:
    """Return the dual of β times a scale of at most 1."""
    q = scale * q
    q[np.arange(len(q)), problem.labels] += 1.0 - scale
    dual = -float(problem.c @ (q * np.log(np.where(q > 0, q, 1.0))).sum(axis=1))
    if not problem.l2:
        return dual
    over = np.maximum(np.abs(scale * v) - problem.l1, 0.0)
    return dual - float((over * over).sum()) / (2.0 * problem.l2)


def _grow_set(problem: SoftmaxProblem, w: Floats, v: Floats, known: Any) -> Any:
    """Return the known columns, those in use, and those with the largest slopes."""
    slopes = np.abs(v - problem.l2 * w).max(axis=1)
    used = w.any(axis=1)
    slopes[used], slopes[known] = np.inf, -np.inf
    found = np.flatnonzero(slopes >= _CLOSE * problem.l1)
    most = max(_FEW, _GROWTH * int(used.sum()) - len(known), int(np.isposinf(slopes).sum()))
    if len(found) > most:
        found = found[np.argpartition(-slopes[found], most)[:most]]
    return np.sort(np.append(known, found))


def _take_columns(problem: SoftmaxProblem, columns: Any) -> tuple[SoftmaxProblem, Floats]:
    """Return the problem of some columns in float64, and what dense ones were centred by."""
    means = np.zeros(len(columns))
    if not isinstance(problem.x, np.ndarray):
        x = problem.x[:, columns].astype(np.float64)
        return replace(problem, x=x), means
    x = problem.x[:, columns].astype(np.float64)
    if problem.has_intercept:
        means = problem.c @ x / problem.c.sum()
        x -= means
    return replace(problem, x=x), means


def _solve_set(
    problem: SoftmaxProblem, w: Floats, b: Floats, goal: float, most: float
) -> tuple[Floats, Floats, float]:
    """Return coefficients and intercepts with a small relative gap, and the passes they took."""
    x, passes, steepness, before = problem.x, 0.0, 0.5, math.inf
    squares = x.multiply(x) if not isinstance(x, np.ndarray) else x * x
    sizes, total = np.asarray(squares.T @ problem.c), float(problem.c.sum())
    means = np.asarray(x.T @ problem.c) / total * float(problem.has_intercept)
    sizes = np.maximum(sizes - total * means * means, 1e-10 * sizes)
    sizes = sizes[:, None] + (problem.l2 + 1e-300)
    stalled = 0
    while True:
        w, b, steepness, used = _step_proximally(problem, sizes, means, w, b, steepness)
        if not problem.l2:  # the loss stays, and |W|₁ becomes least
            w = w - np.sort(w, axis=1)[:, [(problem.classes - 1) // 2]]
        for _ in range(_NEWTON):
            old = w
            w, b, more = _step_by_newton(problem, w, b)
            used += more
            if ((w != 0.0) == (old != 0.0)).all():
                break
        b, found, _ = _certify(problem, w, b)
        passes += used + 2.0
        stalled = stalled + 1 if found.primal >= before * (1.0 - 1e-15) else 0
        before = found.primal
        is_done = (found.relative_gap or 0.0) <= goal
        if is_done or passes >= most or stalled > _PATIENCE:
            return w, b, passes


def _step_proximally(
    problem: SoftmaxProblem, sizes: Floats, means: Floats, w: Floats, b: Floats, steepness: float
) -> tuple[Floats, Floats, float, float]:
    """Return a model after some accelerated steps, the steepness found, and the passes.

    Args:
        problem: the problem.
        sizes: (columns, 1) second derivatives of the coefficients, up to a factor.
        means: of the columns; the steps take the intercepts where columns are less their means.
        w, b: the model to begin with.
        steepness: that factor, which grows until the parabola is above the loss.
    """
    x, l2, total = problem.x, problem.l2, float(problem.c.sum())
    b = b + means @ w
    z, z_b, speed, passes = w, b, 1.0, 0.0
    for _ in range(_STEPS):
        f = multiply_classes(x, z) + (z_b - means @ z)
        beta = problem.dual_variables(problem.probabilities(f))
        slope = multiply_classes(x.T, beta) - np.outer(means, beta.sum(axis=0)) - l2 * z
        slope_b = beta.sum(axis=0) * float(problem.has_intercept)
        smooth = problem.loss(f) + 0.5 * l2 * float((z * z).sum())
        passes += 2.0
        while True:
            reach = 1.0 / (steepness * sizes)
            new = z + slope * reach
            new = np.sign(new) * np.maximum(np.abs(new) - problem.l1 * reach, 0.0)
            new_b = z_b + slope_b / (steepness * total)
            d, d_b = new - z, new_b - z_b
            rise = 0.5 * steepness * float((sizes * d * d).sum() + total * (d_b @ d_b))
            bound = smooth - float((slope * d).sum() + slope_b @ d_b) + rise
            new_loss = problem.loss(multiply_classes(x, new) + (new_b - means @ new))
            passes += 1.0
            if new_loss + 0.5 * l2 * float((new * new).sum()) <= bound + 1e-14 * abs(smooth):
                break
            steepness *= 2.0
        against = float((sizes * d * (new - w)).sum() + total * (d_b @ (new_b - b)))
        faster = 0.5 * (1.0 + math.sqrt(1.0 + 4.0 * speed * speed))
        carry = (speed - 1.0) / faster if against >= 0.0 else 0.0
        speed = faster if against >= 0.0 else 1.0
        z, z_b = new + carry * (new - w), new_b + carry * (new_b - b)
        w, b, steepness = new, new_b, 0.95 * steepness
    return w, b - means @ w, steepness, passes


def _step_by_newton(
    problem: SoftmaxProblem, w: Floats, b: Floats
) -> tuple[Floats, Floats, float]:  # fmt: skip
    """Return a model after a step of the coefficients that are not 0, and the passes it took.

    Coefficients that would change their sign become 0.
    """
    signs = np.sign(w)
    if not signs.any():
        return w, b, 0.0
    f = multiply_classes(problem.x, w) + b
    p = problem.probabilities(f)
    beta = problem.dual_variables(p)
    slope = multiply_classes(problem.x.T, beta) - problem.l2 * w - problem.l1 * signs
    free = np.abs(signs)
    step, beside, passes = newton_step(problem, p, slope * free, 1e-3, free)

    def move(length: float) -> Floats:
        new = w + length * step
        return np.where(new * signs > 0.0, new, 0.0)

    def objective(length: float) -> float:
        new = move(length)
        predictions = multiply_classes(problem.x, new) + (b + length * beside)
        return problem.primal(new, predictions)

    length = search_line(objective, problem.primal(w, f), halvings=10)
    return (move(length), b + length * beside, passes + 3.0) if length else (w, b, passes + 12.0)


__all__ = ["solve_sparse_softmax"]
