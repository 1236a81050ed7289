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

import numpy as np

from graphflow.linear import fit_threads
from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.loops import threaded_passes
from graphflow.linear.loops.thread_meetings import LINE
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.dual_ascent import SHRINKS, DualAscent, first_dual
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.ops.kernels.jit.thread_pool import Pool

_MEETING_NS = 2000.0
"""The time of the meetings of a turn, in nanoseconds; a turn's work is to be twenty times that."""
_WEIGHT_NS = 1.5
"""The time to copy a weight and to add its steps, in nanoseconds; to be a tenth of a turn."""


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
    beta = first_dual(problem)
    # Threads wait for each other inside of loops, so all of them have to come. Ctrl-C ends lines
    # of the main thread alone; so another thread calls the pool.
    with ThreadPoolExecutor(1, "graphflow-ascent") as caller:
        _ThreadedAscent(problem, beta, seed, pool, caller).run(monitor)
    return beta


def rows_for_a_thread(problem: LinearProblem, threads: int) -> int:
    """Return how many rows in a turn are worth a thread."""
    row_ns = fit_threads.pass_ns(problem.x) / max(problem.rows, 1)
    turn_ns = 20.0 * _MEETING_NS + 10.0 * _WEIGHT_NS * (problem.columns + 1)
    return max(threaded_passes.BUCKET, int(turn_ns / row_ns))


class _ThreadedAscent(DualAscent):
    """Visits rows on the threads of a pool.

    Args:
        problem: the problem.
        beta: the dual variables, which follow.
        seed: of the order of rows.
        pool: the threads.
        caller: one further thread.
    """

    def __init__(
        self, problem: LinearProblem, beta: Floats, seed: int, pool: Pool,
        caller: ThreadPoolExecutor,
    ) -> None:  # fmt: skip
        n, threads, size = problem.rows, pool.threads, (problem.columns // LINE + 2) * LINE
        self._pool, self._caller = pool, caller
        self._least = rows_for_a_thread(problem, threads)
        self._is_svm = problem.loss.code in SHRINKS
        self._width = 1.0
        self._plan = np.array([n, (seed * 2654435761 + 1) & 0x7FFFFFFF, 0])
        self._numbers = np.array([float(threads), np.inf])
        self._meeting = np.zeros(1, np.int64)
        self._bounds = np.zeros(threads * LINE)
        self._shared, self._size = np.zeros((threads + 1) * size), size
        self._order = np.arange(n)
        self._rooms = (
            np.zeros(n, np.int64), np.zeros(n // self._least + threads, np.int64),
            np.zeros(threads * LINE), np.zeros(problem.columns + 1), np.zeros(n),
            np.zeros(2 * threads * LINE),
        )  # fmt: skip
        super().__init__(problem, beta, np.random.default_rng(seed))
        self._activate()

    def _compute_weights(self) -> None:
        super()._compute_weights()
        self._shared[: len(self.w)] = self.w

    def _go(self, wanted: float) -> float:
        problem, loss, threads = self.problem, self.problem.loss, self._pool.threads
        spare, kept, ends, steps, old, sums = self._rooms
        none = np.zeros(1, np.int64)
        arrays = self._arrays if problem.is_sparse else (*self._arrays, none, none)
        self._meeting[:] = 0
        loop = native(threaded_passes, "threaded_rows")

        def part(k: int) -> None:
            loop(
                k, threads, self._least, int(wanted * problem.rows), self._width, self._is_svm,
                problem.is_sparse, self._plan, self._numbers, ends, self._meeting, self._order,
                spare, kept, self._shared, self._size, steps, old, sums, self._bounds, *arrays,
                problem.columns, self.squares, problem.y, problem.c, loss.code, loss.parameter,
                1.0 / problem.l2, float(problem.bias), self.beta,
            )  # fmt: skip

        self._caller.submit(self._pool.run, part, threads).result()
        return float(self._plan[2]) / problem.rows

    def _go_on(self) -> None:
        if self._is_svm and self._numbers[1] <= self._width:
            self._width *= 0.3
            self._activate()

    def _activate(self) -> None:
        """Let all rows be visited again."""
        self._plan[0] = self.problem.rows
        self._order[:] = np.arange(self.problem.rows)
        lines = self._bounds.reshape(-1, LINE)
        lines[:, 0], lines[:, 1] = -np.inf, np.inf


__all__ = ["ascend_on_threads", "rows_for_a_thread"]
