"""Dual coordinate ascent by rows on several threads, with the same bits in each run.

    all threads:  copy w → visit own rows, whose steps the copy takes σ' times ─┐
                  └──────────── add the copies' steps to w, in order ───────────┘

Rows are dealt to threads anew in each pass, in buckets of neighbours. With σ' as large as the
number of threads, the sum of the threads' steps raises the dual by no less than each thread
believes. That is for threads whose steps all point the same way, and makes steps small. So σ'
follows the overlap that was found, |Σ Δ|² / Σ |Δ|². Steps that overlap more than σ' foresaw are
shortened until the same bound holds: the dual never falls.

Source: Ma et al., ICML 2015 (CoCoA+, σ'); Ioannou, Mendler-Dünner and Parnell, NeurIPS 2019
(SySCD, buckets dealt anew).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from graphflow.linear import fit_threads
from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.loops import threaded_passes
from graphflow.linear.loops.thread_meetings import BUCKET, LINE, count_parts
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.dual_ascent.sequential_ascent import (
    SHRINKS,
    DualAscent,
    ShrinkingAscent,
    ascend_dual,
    first_dual,
)
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.ops.kernels.jit.thread_pool import Pool

_MEETING_NS = 3000.0
"""The time of the meetings of a turn, in nanoseconds."""
_WEIGHT_NS = 2.0
"""The time to copy a weight and to add its steps, in nanoseconds."""
_TURN = 8
"""A turn's work is to take so many times as long as both, if there are rows for it."""
_SHRINKING_NS = 20e6
"""The least time of a pass of losses that leave out rows at a bound: soon few rows are left, and
threads gain nothing by passes over few rows."""


def ascend_on_threads(
    problem: LinearProblem, monitor: FitMonitor, pool: Pool, *, seed: int = 0
) -> Floats:
    """Solve a problem with an l2 penalty alone and no free intercept on the threads of a pool.

    Args:
        problem: its dense matrix is C-contiguous, its sparse one CSR.
        monitor: is given certified models.
        pool: the threads; the result depends on their number, and on nothing else.
        seed: of the order of rows.

    Returns:
        the dual variables.
    """
    whole_ns = fit_threads.pass_ns(problem.x, problem.loss)
    is_short = problem.loss.code in SHRINKS and whole_ns < _SHRINKING_NS
    if is_short or count_parts(problem.rows, end_rows(problem), 1.0, pool.threads) == 1:
        return ascend_dual(problem, monitor, seed=seed)
    beta, random = first_dual(problem), np.random.default_rng(seed)
    # Threads wait for each other inside of loops, so all of them have to come. Ctrl-C ends lines
    # of the main thread alone; so another thread calls the pool.
    with ThreadPoolExecutor(1, "graphflow-ascent") as caller:
        team = _Team(problem, pool, caller, int(random.integers(1 << 31)))
        if problem.loss.code in SHRINKS:
            _ThreadedShrinkingAscent(problem, beta, random, team).run(monitor)
        else:
            _ThreadedAscent(problem, beta, random, team).run(monitor)
    return beta


def end_rows(problem: LinearProblem) -> float:
    """Return how many rows a thread visits in the time that the end of a turn takes."""
    end_ns = _MEETING_NS + _WEIGHT_NS * (problem.columns + 1)
    return end_ns * max(problem.rows, 1) / fit_threads.pass_ns(problem.x, problem.loss)


class _Team:
    """Threads that make passes over rows together.

    Args:
        problem: the problem.
        pool: the threads.
        caller: one further thread.
        seed: of the order of rows, 31 bits.

    Attributes:
        order: the rows, the active ones first.
        bounds: (threads, LINE) five numbers of each thread as in `dense_svm_rows`.
        w: the weights that all share.
    """

    def __init__(
        self, problem: LinearProblem, pool: Pool, caller: ThreadPoolExecutor, seed: int
    ) -> None:
        n, threads, size = problem.rows, pool.threads, (problem.columns // LINE + 2) * LINE
        self._problem, self._pool, self._caller = problem, pool, caller
        self._end = end_rows(problem)
        self._long = max(BUCKET, int(_TURN * self._end))
        self._plan, self._numbers = np.array([n, seed, 0]), np.array([float(threads), 1.0])
        self._meeting = np.zeros(1, np.int64)
        self._shared, self._size = np.zeros((threads + 1) * size), size
        self._rooms = (
            np.zeros(n, np.int64), np.zeros(n // self._long + 2 * threads, np.int64),
            np.zeros(threads * LINE), np.zeros(problem.columns + 1), np.zeros(n),
            np.zeros(2 * threads * LINE),
        )  # fmt: skip
        self.order, self.bounds = np.arange(n), np.zeros((threads, LINE))
        self.w = self._shared[: problem.columns + 1]

    def is_worth(self, active: int) -> bool:
        """Return True if several threads pass over so many rows faster than one."""
        return count_parts(active, self._end, float(self._numbers[1]), self._pool.threads) > 1

    def pass_until(
        self, active: int, visits: int, enough: float, arrays: tuple[Any, ...], squares: Floats,
        beta: Floats,
    ) -> tuple[int, int]:  # fmt: skip
        """Pass over the active rows until there were enough visits, or their gaps are small enough.

        Args:
            active: how many rows are active.
            visits: the number of visits after which no pass begins.
            enough: the sum of gaps of an SVM's rows that ends the work.
            arrays: the matrix, as the loops take it.
            squares, beta: of the rows: squared norms and dual variables, which follow.

        Returns:
            how many rows are active then, and the number of visits.
        """
        problem, loss, threads = self._problem, self._problem.loss, self._pool.threads
        spare, kept, ends, steps, old, sums = self._rooms
        if not problem.is_sparse:
            none = np.zeros(1, np.int64)
            arrays = (*arrays, none, none)
        self._meeting[0], self._plan[0] = 0, active
        loop = native(threaded_passes, "threaded_rows")

        def part(k: int) -> None:
            loop(
                k, threads, self._end, self._long, visits, enough, loss.code in SHRINKS,
                problem.is_sparse, self._plan, self._numbers, ends, self._meeting, self.order,
                spare, kept, self._shared, self._size, steps, old, sums, self.bounds.reshape(-1),
                *arrays, problem.columns, squares, problem.y, problem.c, loss.code,
                loss.parameter, 1.0 / problem.l2, float(problem.bias), beta,
            )  # fmt: skip

        self._caller.submit(self._pool.run, part, threads).result()
        return int(self._plan[0]), int(self._plan[2])


class _ThreadedAscent(DualAscent):
    """Visits all rows in each pass, on the threads of a team."""

    def __init__(
        self, problem: LinearProblem, beta: Floats, random: np.random.Generator, team: _Team
    ) -> None:
        self._team = team
        super().__init__(problem, beta, random)

    def _compute_weights(self) -> None:
        super()._compute_weights()
        self._team.w[:] = self.w

    def _go(self, wanted: float) -> float:
        n = self.problem.rows
        visits = max(1, round(wanted * n))
        more = (self._arrays, self.squares, self.beta)
        return self._team.pass_until(n, visits, 0.0, *more)[1] / n


class _ThreadedShrinkingAscent(ShrinkingAscent):
    """Leaves out rows at a bound, on the threads of a team."""

    def __init__(
        self, problem: LinearProblem, beta: Floats, random: np.random.Generator, team: _Team
    ) -> None:
        self._team = team
        super().__init__(problem, beta, random)
        self._order = team.order

    def _compute_weights(self) -> None:
        super()._compute_weights()
        self._team.w[:] = self.w
        self.w = self._team.w  # follows the passes

    def _pass_until(self, gap: float, passes: float) -> float:
        n, team = self.problem.rows, self._team
        if not team.is_worth(int(self._state[0])):
            return super()._pass_until(gap, passes)
        if self._state[0] == n:  # neighbours stand beside each other again
            team.order[:] = np.arange(n)
        team.bounds[:, :5] = self._bounds
        more = (self._arrays, self.squares, self.beta)
        visits = max(1, round(passes * n))
        found = team.pass_until(int(self._state[0]), visits, max(gap, 0.0), *more)
        self._bounds[:] = team.bounds[0, :5]
        self._state[0] = found[0]
        return found[1] / n


__all__ = ["ascend_on_threads", "end_rows"]
