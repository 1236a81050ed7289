"""Dual coordinate ascent by rows on threads that race: "wild".

Each thread visits rows of its own and changes the weights that all share, without any lock. Writes
of two threads to one weight at the same time lose one of them, so the weights drift away from those
that the dual variables mean. They are computed again from the dual variables once a pass. Which
writes are lost differs from run to run, and so do the bits of the model; its certificate does not
depend on that.

Source: Hsieh, Yu and Dhillon, ICML 2015 (PASSCoDe).
"""

from __future__ import annotations

import numpy as np

from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.loops.thread_meetings import LINE
from graphflow.linear.losses import SQUARED_HINGE, Floats
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.dual_ascent import SHRINKS, DualAscent, first_dual
from graphflow.ops.kernels.jit.thread_pool import Pool


def ascend_wildly(
    problem: LinearProblem, monitor: FitMonitor, pool: Pool, *, seed: int = 0
) -> Floats:
    """Solve a problem with an l2 penalty alone and no free intercept on threads that race.

    Args:
        problem: its dense matrix is C-contiguous, its sparse one CSR.
        monitor: is given certified models.
        pool: the threads.
        seed: of the rows of each thread and their order; the result depends on more than that.

    Returns:
        the dual variables.
    """
    beta = first_dual(problem)
    _WildAscent(problem, beta, seed, pool).run(monitor)
    return beta


class _WildAscent(DualAscent):
    """Lets each thread of a pool visit its own rows.

    Args:
        problem: the problem.
        beta: the dual variables, which follow.
        seed: of the rows of each thread and their order.
        pool: the threads.
    """

    def __init__(self, problem: LinearProblem, beta: Floats, seed: int, pool: Pool) -> None:
        super().__init__(problem, beta, np.random.default_rng(seed))
        self._pool = pool
        self._randoms = [np.random.default_rng((seed, k)) for k in range(pool.threads)]
        self._orders = np.array_split(self.random.permutation(problem.rows), pool.threads)
        self._is_svm = problem.loss.code in SHRINKS
        self._bounds = np.zeros((pool.threads, LINE))
        self._width = 1.0
        self._activate()

    def _go(self, wanted: float) -> float:
        passes = since = 0.0
        while passes < wanted and not self._is_ready():
            visited = sum(self._active)
            self._pool.run(self._visit_own, self._pool.threads)
            passes += visited / self.problem.rows
            since += visited / self.problem.rows
            if since >= 1.0:
                self._compute_weights()
                since = 0.0
        return passes

    def _visit_own(self, k: int) -> None:
        order, loss = self._orders[k], self.problem.loss
        self._randoms[k].shuffle(order[: self._active[k]])
        if not self._is_svm:
            self._visit("rows", (order,), (loss.code, loss.parameter))
            return
        bounds = self._bounds[k]
        before = (order, self._active[k], bounds)
        self._active[k] = self._visit("svm_rows", before, (loss.code == SQUARED_HINGE,))
        bounds[0] = bounds[2] if bounds[2] < 0.0 else -np.inf
        bounds[1] = bounds[3] if bounds[3] > 0.0 else np.inf

    def _is_ready(self) -> bool:
        least, most = self._bounds[:, 2].min(), self._bounds[:, 3].max()
        return self._is_svm and bool(most - least <= self._width)

    def _go_on(self) -> None:
        if self._is_ready():
            self._width *= 0.3
            self._activate()

    def _activate(self) -> None:
        """Let all rows be visited again."""
        self._active = [len(order) for order in self._orders]
        self._bounds[:, :4] = [-np.inf, np.inf, -np.inf, np.inf]


__all__ = ["ascend_wildly"]
