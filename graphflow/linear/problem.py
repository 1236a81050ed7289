"""The problem that all linear estimators solve, and certificates of how well it is solved.

    minimise over w, b:   P(w, b) = Σ_i c_i ℓ(y_i, x_i·w + b) + l1 |w|₁ + l2/2 |w|²

Its dual has a variable β_i for each row, with v = Xᵀβ:

    l2 > 0:   D(β) = -Σ_i c_i ℓ*(y_i, -β_i/c_i) - |soft(v, l1)|² / (2 l2)
    l2 = 0:   D(β) = -Σ_i c_i ℓ*(y_i, -β_i/c_i),   with |v_j| ≤ l1 for all j

and Σ_i β_i = 0 if there is an intercept, which no penalty acts on. P - D is never less than what a
better model could gain, whatever β is: that is the certificate.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from graphflow.base.lazy_dataclass import dataclass
from graphflow.linear.loops import dot_products
from graphflow.linear.losses import Floats, Loss
from graphflow.linear.threaded_products import multiply_on_threads
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.ops.kernels.jit.thread_pool import current_pool

Matrix = Any
"""A dense array, a scipy CSR or CSC matrix, of float32 or float64, or a `TableStream`."""


@dataclass(frozen=True)
class LinearProblem:
    """A convex problem of a linear model.

    Attributes:
        x: (rows, columns) a dense array, or a CSR or CSC matrix.
        y: (rows,) targets; -1 and 1 for losses that classify.
        c: (rows,) positive weights of the rows' losses.
        loss: the loss.
        l1, l2: factors of the penalties; not negative.
        has_intercept: True if b is free; else it is 0.
        is_positive: True if no coefficient may be negative.
        bias: the value of a further column, whose coefficient comes last and is penalised as all
            others; 0 for none.
    """

    x: Matrix
    y: Floats
    c: Floats
    loss: Loss
    l1: float = 0.0
    l2: float = 0.0
    has_intercept: bool = False
    bias: float = 0.0
    is_positive: bool = False

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(self.x.shape[0])

    @property
    def columns(self) -> int:
        """The number of columns, without that of the bias."""
        return int(self.x.shape[1])

    @property
    def is_sparse(self) -> bool:
        """True if the matrix holds only its entries that are not 0."""
        return not isinstance(self.x, np.ndarray)

    @cached_property
    def has_dual(self) -> bool:
        """True if a penalty bounds every coefficient, so that a certificate exists."""
        return self.l1 > 0.0 or self.l2 > 0.0

    def predict(self, w: Floats, b: float) -> Floats:
        """Return x_i·w + b of each row."""
        if self.bias:
            return np.asarray(multiply(self.x, w[:-1]) + (self.bias * w[-1] + b))
        return np.asarray(multiply(self.x, w) + b)

    def correlate(self, beta: Floats) -> Floats:
        """Return Xᵀβ."""
        v = multiply(self.x.T, beta)
        return np.append(v, self.bias * beta.sum()) if self.bias else v

    def bound_sizes(self, v: Floats) -> Floats:
        """Return the sizes that l1 bounds, of v = Xᵀβ."""
        return v if self.is_positive else np.abs(v)

    def penalty(self, w: Floats) -> float:
        """Return the penalties of some coefficients."""
        return float(self.l1 * np.abs(w).sum() + 0.5 * self.l2 * (w @ w))

    def primal(self, w: Floats, predictions: Floats) -> float:
        """Return P of coefficients, given the predictions that they make."""
        return float(self.c @ self.loss.values(predictions, self.y)) + self.penalty(w)

    def dual(self, beta: Floats, v: Floats) -> float:
        """Return D of dual variables that satisfy all constraints, given v = Xᵀβ."""
        conjugates = float(self.loss.conjugates(beta, self.y, self.c).sum())
        if self.l2 == 0.0:
            return -conjugates
        soft = np.maximum(self.bound_sizes(v) - self.l1, 0.0)
        return -conjugates - float(soft @ soft) / (2.0 * self.l2)


@dataclass(frozen=True)
class Certificate:
    """Proof of how good a model is.

    Attributes:
        primal: the objective of the model.
        dual: a value that no model's objective is below; None if the problem has no dual.
        gap: what a better model could gain at most; None if the problem has no dual.
        passes: over the data, so far.
        seconds: since the start.
        bytes: that workers have sent each other, so far.
    """

    primal: float
    dual: float | None
    gap: float | None
    passes: float = 0.0
    seconds: float = 0.0
    bytes: int = 0

    @property
    def relative_gap(self) -> float | None:
        """The gap over the objective; 0 if both are 0."""
        if self.gap is None:
            return None
        return self.gap / abs(self.primal) if self.primal else (math.inf if self.gap else 0.0)


def multiply(x: Matrix, w: Floats) -> Floats:
    """Return X @ w in float64, of a matrix of any precision."""
    pool = current_pool()
    return _multiply(x, w) if pool is None else multiply_on_threads(x, w, pool, _multiply)


def _multiply(x: Matrix, w: Floats) -> Floats:
    if isinstance(x, np.ndarray) and x.dtype == np.float32:
        return _multiply_float32(x, w)
    return np.asarray(x @ w, np.float64)


def sum_squares(x: Matrix, h: Floats) -> Floats:
    """Return Σ_i h_i x_ij² of each column j."""
    if isinstance(x, np.ndarray):
        return np.asarray(np.einsum("ij,ij,i->j", x, x, h, optimize=True))
    if hasattr(x, "sum_squares"):
        return np.asarray(x.sum_squares(h))
    return np.asarray(x.multiply(x).T @ h).ravel()


def _multiply_float32(x: Any, w: Floats) -> Floats:
    """Return X @ w, with products and sums in float64: float32 would lose half the digits."""
    if not x.flags.forc:
        x = np.ascontiguousarray(x)
    w = np.ascontiguousarray(w, np.float64)
    out = np.zeros(x.shape[0])
    if x.flags.c_contiguous:
        native(dot_products, "multiply_rows")(*x.shape, x.reshape(-1), w, out)
    else:
        flat = x.reshape(-1, order="F")
        native(dot_products, "add_columns")(x.shape[1], x.shape[0], flat, w, out)
    return out


def certify(
    problem: LinearProblem, w: Floats, b: float, beta: Floats | None = None, *,
    predictions: Floats | None = None, v: Floats | None = None, passes: float = 0.0,
    seconds: float = 0.0,
) -> Certificate:  # fmt: skip
    """Return the certificate of a model.

    Args:
        problem: the problem.
        w, b: the model.
        beta: dual variables to prove it by; None: those of the slopes of the loss at the model.
        predictions: X @ w + b, if it is known.
        v: Xᵀβ computed from `beta` itself, if it is known; `beta` then meets the intercept's
            constraint (`meet_intercept`).
        passes, seconds: to be noted in the certificate.
    """
    f = problem.predict(w, b) if predictions is None else predictions
    primal = problem.primal(w, f)
    if not problem.has_dual:
        return Certificate(primal, None, None, passes, seconds)
    if beta is None:
        beta = -problem.c * problem.loss.slopes(f, problem.y)
    if v is None:
        beta = meet_intercept(problem, beta)
        v = problem.correlate(beta)
    dual = _best_dual(problem, beta, v)
    return Certificate(primal, dual, max(primal - dual, 0.0), passes, seconds)


def meet_intercept(problem: LinearProblem, beta: Floats) -> Floats:
    """Return dual variables that sum to 0, if there is an intercept.

    Positive and negative ones are scaled towards 0, which keeps any of them feasible: a feasible
    set contains 0 and is convex.
    """
    if not problem.has_intercept:
        return beta
    if problem.loss.name == "squared":
        return beta - problem.c * float(beta.sum() / problem.c.sum())
    up, down = float(beta[beta > 0].sum()), -float(beta[beta < 0].sum())
    if up == down:
        return beta
    scaled = beta * (min(up, down) / max(up, down))
    return np.where((beta > 0) == (up > down), scaled, beta)


def _best_dual(problem: LinearProblem, beta: Floats, v: Floats) -> float:
    """Return the dual of β, or of β scaled until the constraints on v = Xᵀβ hold."""
    most = float(problem.bound_sizes(v).max(initial=0.0))
    within = problem.l1 / most if most > problem.l1 else 1.0
    if problem.l2 > 0.0:
        found = problem.dual(beta, v)
        scaled = problem.l1 > 0.0 and within < 1.0
        return max(found, problem.dual(within * beta, within * v)) if scaled else found
    if problem.loss.name == "squared":
        # The dual is a parabola along β: its best point within the constraints.
        curved = float(beta @ (beta / problem.c))
        limit = problem.l1 / most if most else math.inf
        best = float(beta @ problem.y) / curved if curved else 1.0
        within = min(max(best, 0.0 if problem.is_positive else -limit), limit)
    return problem.dual(within * beta, within * v)


__all__ = [
    "Certificate", "LinearProblem", "Matrix", "certify", "meet_intercept", "multiply",
    "sum_squares",
]  # fmt: skip
