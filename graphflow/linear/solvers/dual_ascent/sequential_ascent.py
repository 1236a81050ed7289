"""Dual coordinate ascent: one row at a time, for any loss with an l2 penalty.

    w = Xᵀβ / l2 at all times; a row's step costs the entries of that row.

Hinge losses leave out rows whose dual variable lies at a bound that nothing moves it from
(shrinking). The weights are computed again from β for each certificate, so rounding errors of
updates do not add up.

Source: Shalev-Shwartz and Zhang, JMLR 2013; Hsieh et al., ICML 2008; Yu, Huang and Lin, 2011.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.loops import row_passes
from graphflow.linear.losses import HINGE, LOGISTIC, SQUARED_HINGE, Floats
from graphflow.linear.problem import LinearProblem
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

SHRINKS = (HINGE, SQUARED_HINGE)
"""Losses whose rows are left out while their dual variables lie at a bound."""
_FIRST = 3
"""Passes before the first certificate."""
_MOST = 8
"""Passes between two certificates, at most."""
_SELDOM = 8
"""The same for losses whose passes know about the gap."""
_GROWTH = 3.0
"""How much the dual may have grown, at most, when passes look whether the gap is small enough."""
_TRUST = 1.5
"""How much larger than the gap of the rows that are left one of all rows may be, until rows return.
"""
_TINY, _TINY_PASSES = 1000, 1000
"""Numbers of a table that is solved as far as rounding errors allow, and the passes for that."""


def ascend_dual(
    problem: LinearProblem, monitor: FitMonitor, *, seed: int = 0, start: Floats | None = None
) -> Floats:
    """Solve a problem with an l2 penalty alone and no free intercept.

    Args:
        problem: its dense matrix is C-contiguous, its sparse one CSR.
        monitor: is given certified models.
        seed: of the order of rows.
        start: dual variables to begin with; changed in place.

    Returns:
        the dual variables.
    """
    beta = first_dual(problem) if start is None else start
    kind = ShrinkingAscent if problem.loss.code in SHRINKS else DualAscent
    kind(problem, beta, np.random.default_rng(seed)).run(monitor)
    return beta


def first_dual(problem: LinearProblem) -> Floats:
    """Return dual variables to begin with."""
    if problem.loss.code == LOGISTIC:  # at 0 the dual's slope is infinite
        return problem.y * np.minimum(1e-3 * problem.c, 1e-8)
    return np.zeros(problem.rows)


class DualAscent:
    """Visits all rows in each pass.

    Attributes:
        w: the coefficients; always with one for a bias at the end.
    """

    _rounding = 0.0
    """The relative gap from which one that does not fall is due to rounding errors."""

    def __init__(self, problem: LinearProblem, beta: Floats, random: np.random.Generator) -> None:
        self.problem, self.beta, self.random = problem, beta, random
        x = problem.x
        if problem.is_sparse:
            self._kind = "sparse"
            self._arrays: tuple[Any, ...] = (x.data, x.indices, x.indptr)
            squares = np.empty(problem.rows)
            native(row_passes, "sparse_squares")(x.data, x.indptr, squares)
        else:
            self._kind = "dense"
            self._arrays = (x.reshape(-1),)
            squares = np.einsum("ij,ij->i", x, x, dtype=np.float64)
        self.squares = squares + problem.bias**2
        self._compute_weights()

    def run(self, monitor: FitMonitor) -> None:
        """Pass over the rows until the monitor has what it wants."""
        wanted = float(_FIRST)
        while True:
            monitor.passes += self._go(wanted)
            if self._finish_passes(monitor):
                return
            wanted = monitor.passes_left(_MOST)
            self._go_on()

    def _finish_passes(self, monitor: FitMonitor) -> bool:
        """Certify the model; return True if the work ends with it."""
        self._compute_weights()
        w = self.w if self.problem.bias else self.w[:-1]
        is_enough = monitor.accept(w, 0.0, self.beta, v=w * self.problem.l2)
        return (is_enough and not self._goes_further(monitor)) or monitor.is_exhausted

    def _go(self, wanted: float) -> float:
        """Make so many passes; return how many."""
        passes = 0.0
        while passes < wanted:
            passes += self._pass() / self.problem.rows
        return passes

    def _goes_further(self, monitor: FitMonitor) -> bool:
        """Return True if the table is so small that the gap may as well fall to rounding errors.

        Then rows with weights give the same model as repeated rows.
        """
        gap = monitor.history.certificates[-1].relative_gap or 0.0
        is_tiny = self.problem.rows * self.problem.columns <= _TINY
        is_rounding = gap <= self._rounding and monitor.is_stalled
        return is_tiny and gap > 1e-15 and not is_rounding and monitor.passes < _TINY_PASSES

    def _compute_weights(self) -> None:
        """Compute the coefficients again from the dual variables."""
        problem = self.problem
        v = problem.correlate(self.beta) / problem.l2
        self.w = v if problem.bias else np.append(v, 0.0)

    def _visit(self, loop: str, before: tuple[Any, ...], after: tuple[Any, ...]) -> Any:
        """Run a loop of `row_passes` on the matrix."""
        problem = self.problem
        return native(row_passes, f"{self._kind}_{loop}")(
            *before, *self._arrays, problem.columns, self.squares, problem.y, problem.c, *after,
            1.0 / problem.l2, float(problem.bias), self.beta, self.w,
        )  # fmt: skip

    def _pass(self) -> int:
        """Visit rows; return how many."""
        loss = self.problem.loss
        order = self.random.permutation(self.problem.rows)
        self._visit("rows", (order,), (loss.code, loss.parameter))
        return self.problem.rows

    def _go_on(self) -> None:
        """Prepare for further passes after a certificate."""


class ShrinkingAscent(DualAscent):
    """Leaves out rows at a bound, until the gap of the other ones is small enough.

    Each visit knows the gap of its row, so passes know about when a certificate is worth its time.
    """

    _rounding = 1e-11

    def __init__(self, problem: LinearProblem, beta: Floats, random: np.random.Generator) -> None:
        super().__init__(problem, beta, random)
        self._order = np.arange(problem.rows)
        self._state = np.array([problem.rows, random.integers(1 << 31)])
        self._bounds = np.array([-np.inf, np.inf, 0.0, 0.0, np.inf])

    def run(self, monitor: FitMonitor) -> None:
        """Pass over the rows until the monitor has what it wants."""
        is_tiny = self.problem.rows * self.problem.columns <= _TINY
        goal = 1e-15 if is_tiny else monitor.tol
        dual, care, growth = 0.0, 1.0, _GROWTH
        while True:
            left, is_ready = min(_SELDOM, monitor.most_passes - monitor.passes), False
            while left > 0.0 and not is_ready:
                # The dual grows: where its last value lets passes go on, the newest one does.
                passes = self._pass_until(growth * care * goal * dual, left if dual else _FIRST)
                left -= passes
                monitor.passes += passes
                before, dual = dual, self._dual()
                growth = min(dual / before, _GROWTH) if before else _GROWTH
                is_ready = bool(self._bounds[4] <= care * goal * dual)
            if self._finish_passes(monitor):
                return
            if (monitor.history.certificates[-1].gap or 0.0) > _TRUST * self._bounds[4]:
                self._state[0] = self.problem.rows
                self._bounds[:2] = -np.inf, np.inf
            elif is_ready:
                care *= 0.7

    def _pass_until(self, gap: float, passes: float) -> float:
        """Pass over the active rows until their gap is that small; return the passes over all."""
        problem = self.problem
        is_squared = problem.loss.code == SQUARED_HINGE
        visits = max(1, round(passes * problem.rows))
        before = (visits, max(gap, 0.0), self._state, self._order, self._bounds)
        return float(self._visit("svm_passes", before, (is_squared,))) / problem.rows

    def _dual(self) -> float:
        w = self.w if self.problem.bias else self.w[:-1]
        return max(self.problem.dual(self.beta, w * self.problem.l2), 0.0)


__all__ = ["SHRINKS", "DualAscent", "ShrinkingAscent", "ascend_dual", "first_dual"]
