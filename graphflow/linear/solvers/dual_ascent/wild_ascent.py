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
from graphflow.linear.solvers.dual_ascent.sequential_ascent import (
    SHRINKS,
    DualAscent,
    ShrinkingAscent,
    first_dual,
)
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
    beta, random = first_dual(problem), np.random.default_rng(seed)
    kind = _WildShrinkingAscent if problem.loss.code in SHRINKS else _WildAscent
    kind(problem, beta, random, pool).run(monitor)
    return beta


class _WildAscent(DualAscent):
    """Lets each thread of a pool visit some of all rows in each pass."""

    def __init__(
        self, problem: LinearProblem, beta: Floats, random: np.random.Generator, pool: Pool
    ) -> None:
        super().__init__(problem, beta, random)
        self._pool = pool

    def _pass(self) -> int:
        self._compute_weights()
        loss = self.problem.loss
        orders = np.array_split(self.random.permutation(self.problem.rows), self._pool.threads)
        self._pool.run(
            lambda k: self._visit("rows", (orders[k],), (loss.code, loss.parameter)), len(orders)
        )
        return self.problem.rows


class _WildShrinkingAscent(ShrinkingAscent):
    """Lets each thread of a pool visit its own rows, and leave out those at a bound."""

    def __init__(
        self, problem: LinearProblem, beta: Floats, random: np.random.Generator, pool: Pool
    ) -> None:
        super().__init__(problem, beta, random)
        self._pool = pool
        self._orders = np.array_split(random.permutation(problem.rows), pool.threads)
        self._states = np.zeros((pool.threads, LINE), np.int64)
        self._states[:, 1] = random.integers(1 << 31, size=pool.threads)
        self._own_bounds = np.zeros((pool.threads, LINE))

    def _pass_until(self, gap: float, passes: float) -> float:
        n, threads = self.problem.rows, self._pool.threads
        if np.isinf(self._bounds[:2]).all():  # all rows come back
            self._states[:, 0] = [len(order) for order in self._orders]
            self._own_bounds[:, :2] = -np.inf, np.inf
        is_squared = self.problem.loss.code == SQUARED_HINGE
        # In a pass at most: then the weights are computed again.
        visits, enough = max(1, round(min(passes, 1.0) * n / threads)), max(gap, 0.0) / threads
        visited = [0] * threads

        def part(k: int) -> None:
            before = (visits, enough, self._states[k], self._orders[k], self._own_bounds[k])
            visited[k] = self._visit("svm_passes", before, (is_squared,))

        self._pool.run(part, threads)
        self._state[0] = self._states[:, 0].sum()
        self._bounds[:2], self._bounds[4] = 0.0, self._own_bounds[:, 4].sum()
        self._compute_weights()
        return sum(visited) / n


__all__ = ["ascend_wildly"]
