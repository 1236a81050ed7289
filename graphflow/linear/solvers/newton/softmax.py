"""Logistic regression with more than two classes, by Newton's method with conjugate gradients.

    minimise over W, b:   P = Σ_i c_i (log Σ_k exp(f_ik) - f_iy) + l2/2 |W|²,   f_i = x_i W + b

The dual variables of a row are β_i = c_i (e_y - softmax(f_i)), and with v = Xᵀβ

    D = -Σ_i c_i Σ_k q_ik log q_ik - |v|² / (2 l2),   q = e_y - β/c,

where Σ_i β_i = 0 if there is an intercept.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.base.progress import show_progress
from graphflow.linear.fit_history import CertifiedModel, FitHistory
from graphflow.linear.losses import Floats
from graphflow.linear.problem import Certificate, Matrix, multiply
from graphflow.linear.solvers.newton.line_search import search_line


@dataclass(frozen=True)
class SoftmaxProblem:
    """A problem of several classes.

    Attributes:
        x: (rows, columns) dense, or CSR.
        labels: (rows,) the index of each row's class.
        classes: their number.
        c: (rows,) positive weights.
        l2: factor of the penalty; 0 for none.
        has_intercept: True if b is free.
        l1: factor of |W|₁; `sparse_softmax.py` solves problems that have it.
    """

    x: Matrix
    labels: Any
    classes: int
    c: Floats
    l2: float
    has_intercept: bool
    l1: float = 0.0

    def loss(self, f: Floats) -> float:
        """Return the loss of (rows, classes) predictions."""
        most = f.max(axis=1)
        sums = most + np.log(np.exp(f - most[:, None]).sum(axis=1))
        own = f[np.arange(len(f)), self.labels]
        return float(self.c @ (sums - own))

    def primal(self, w: Floats, f: Floats) -> float:
        """Return P of (columns, classes) coefficients and their (rows, classes) predictions."""
        penalty = 0.5 * self.l2 * float((w * w).sum())
        if self.l1:
            penalty += self.l1 * float(np.abs(w).sum())
        return self.loss(f) + penalty

    def probabilities(self, f: Floats) -> Floats:
        """Return the softmax of each row."""
        grown = np.exp(f - f.max(axis=1, keepdims=True))
        return np.asarray(grown / grown.sum(axis=1, keepdims=True))

    def dual_variables(self, p: Floats) -> Floats:
        """Return β of (rows, classes) probabilities."""
        beta = -self.c[:, None] * p
        beta[np.arange(len(p)), self.labels] += self.c
        return beta

    def begin(self, w: Floats | None, b: Floats | None) -> tuple[Floats, Floats]:
        """Return copies of the coefficients and intercepts to begin with; zeros for None."""
        w = np.zeros((self.x.shape[1], self.classes)) if w is None else w.copy()
        return w, np.zeros(self.classes) if b is None else b.copy()


def solve_softmax(
    problem: SoftmaxProblem, tol: float, max_passes: float, history: FitHistory, *,
    w: Floats | None = None, b: Floats | None = None,
) -> CertifiedModel:  # fmt: skip
    """Solve a problem of several classes; return (columns, classes) coefficients, certified.

    Args:
        problem: the problem.
        tol: the relative gap that is enough.
        max_passes: passes over the data, at most.
        history: where certificates are noted.
        w, b: the model to begin with.
    """
    w, b = problem.begin(w, b)
    history.solver = "newton"
    start, passes = time.perf_counter(), 0.0
    first: float | None = None
    f = multiply_classes(problem.x, w) + b
    with show_progress("fitting", where=f"{len(f):,} x {len(w):,}, {problem.classes} classes"):
        while True:
            if problem.has_intercept:
                moved = best_intercepts(problem, f)
                b, f = b + moved, f + moved
            p = problem.probabilities(f)
            beta = problem.dual_variables(p)
            v = multiply_classes(problem.x.T, beta)
            slope = v - problem.l2 * w
            found = _certificate(problem, w, b, f, p, beta, v, passes, time.perf_counter() - start)
            history.certificates.append(found)
            history.best = best = CertifiedModel(w, b, found)
            size = float(np.linalg.norm(slope))
            first = size if first is None else first
            gap = found.relative_gap
            is_done = gap is not None and gap <= tol
            if is_done or passes >= max_passes or size <= 1e-14 * first:
                return best
            accuracy = min(0.1, (size / first) ** 0.5)
            step, beside, used = newton_step(problem, p, slope, accuracy)
            passes += used + 1.0
            along = multiply_classes(problem.x, step) + beside
            length = search_line(
                partial(_primal_along, problem, w, f, step, along),
                problem.primal(w, f),
                float((slope * step).sum()),
            )
            if length == 0.0:
                return best
            w, b, f = w + length * step, b + length * beside, f + length * along


def _primal_along(
    problem: SoftmaxProblem, w: Floats, f: Floats, step: Floats, along: Floats, length: float
) -> float:
    return problem.primal(w + length * step, f + length * along)


def multiply_classes(x: Matrix, w: Floats) -> Floats:
    """Return X @ W in float64."""
    if isinstance(x, np.ndarray) and x.dtype == np.float32:
        return np.stack([multiply(x, column) for column in w.T], axis=1)
    return np.asarray(x @ w, np.float64)


def _certificate(
    problem: SoftmaxProblem, w: Floats, b: Floats, f: Floats, p: Floats, beta: Floats, v: Floats,
    passes: float, seconds: float,
) -> Certificate:  # fmt: skip
    primal = problem.primal(w, f)
    if not problem.l2:
        return Certificate(primal, None, None, passes, seconds)
    entropy = p * np.log(np.where(p > 0, p, 1.0))
    dual = -float(problem.c @ entropy.sum(axis=1)) - float((v * v).sum()) / (2 * problem.l2)
    if problem.has_intercept:  # what is left of the constraint, at the price of the intercepts
        dual -= float(np.abs(beta.sum(axis=0)) @ (1.0 + np.abs(b)))
    return Certificate(primal, dual, max(primal - dual, 0.0), passes, seconds)


def best_intercepts(problem: SoftmaxProblem, f: Floats) -> Floats:
    """Return what to add to the predictions of each class to make the loss least."""
    at = np.zeros(problem.classes)
    counts = np.bincount(problem.labels, problem.c, problem.classes)
    total = float(problem.c.sum())
    for _ in range(50):
        p = problem.probabilities(f + at)
        slope = counts - problem.c @ p
        if np.abs(slope).max() <= 1e-14 * total:
            break
        curvature = np.diag(problem.c @ p) - (p * problem.c[:, None]).T @ p
        step = np.linalg.lstsq(curvature, slope, rcond=1e-12)[0]
        before, length = problem.primal(np.zeros(0), f + at), 1.0
        while problem.primal(np.zeros(0), f + at + length * step) > before and length > 1e-6:
            length *= 0.5
        if length <= 1e-6:
            break
        at = at + length * step
    return at


def newton_step(
    problem: SoftmaxProblem, p: Floats, slope: Floats, accuracy: float, free: Any = 1.0
) -> tuple[Floats, Floats, float]:
    """Return steps of the coefficients and intercepts, and the passes over the data they took.

    Args:
        problem: the problem.
        p: (rows, classes) probabilities at the model.
        slope: (columns, classes) negative slopes of the coefficients.
        accuracy: of the steps, relative.
        free: 1 for coefficients that may change, 0 for others, whose slopes are 0.
    """
    x, c = problem.x, problem.c[:, None]
    center = 1.0 if problem.has_intercept else 0.0

    def apply(step: Floats, beside: Floats) -> tuple[Floats, Floats]:
        along = multiply_classes(x, step) + beside
        turned = c * (p * along - p * (p * along).sum(axis=1, keepdims=True))
        image = free * multiply_classes(x.T, turned) + problem.l2 * step
        return image, center * turned.sum(axis=0)

    h = c * p * (1.0 - p)
    squares = x.multiply(x) if not isinstance(x, np.ndarray) else x.astype(np.float64) ** 2
    diagonal = np.maximum(np.asarray(squares.T @ h), 1e-12 * float(h.sum())) + problem.l2
    below = np.maximum(h.sum(axis=0), 1e-12 * float(h.sum()) + 1e-300)
    step, beside = np.zeros_like(slope), np.zeros(problem.classes)
    rest, rest_b = slope.copy(), np.zeros(problem.classes)
    way, way_b = rest / diagonal, center * rest_b / below
    rho = float((rest * way).sum() + rest_b @ way_b)
    goal, passes = accuracy**2 * rho, 1.0
    for _ in range(500):
        if rho <= goal or rho <= 0.0:
            break
        image, image_b = apply(way, way_b)
        passes += 2.0
        curved = float((way * image).sum() + way_b @ image_b)
        if curved <= 1e-14 * float((way * way * diagonal).sum()):
            break
        length = rho / curved
        step, beside = step + length * way, beside + length * way_b
        rest, rest_b = rest - length * image, rest_b - length * image_b
        scaled, scaled_b = rest / diagonal, center * rest_b / below
        rho, before = float((rest * scaled).sum() + rest_b @ scaled_b), rho
        way, way_b = scaled + (rho / before) * way, scaled_b + (rho / before) * way_b
    return step, beside, passes


__all__ = [
    "SoftmaxProblem", "best_intercepts", "multiply_classes", "newton_step", "solve_softmax",
]  # fmt: skip
