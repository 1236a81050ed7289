"""Solvers for tables larger than memory, which read the rows chunk by chunk in each pass.

- "sdca": dual coordinate ascent; a few passes over the rows of each chunk while it is in memory.
- "cg": Newton's steps by conjugate gradients, two readings of the table for each.

The dual variables and the weights are whole in memory. A certificate takes one reading, which
computes predictions of the weights and Xᵀβ of the dual variables at once.

Source: Yu et al., KDD 2010 (block minimisation for data that does not fit into memory).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from graphflow.base.progress import show_progress
from graphflow.errors import LinearModelError
from graphflow.linear.fit_history import CertifiedModel, FitMonitor
from graphflow.linear.loops import row_passes
from graphflow.linear.losses import LOGISTIC, Floats
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.coordinate_descent.duhl import Duhl
from graphflow.linear.solvers.newton.newton import minimize_smooth
from graphflow.linear.tables.table_stream import RowChunk, TableStream
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

_REPEATS = 3
"""Passes over a chunk while it is in memory."""
_MOST = 8
"""Readings of the table between two certificates, at most."""


def choose_stream_solver(problem: LinearProblem) -> str:
    """Return the name of the solver for a table larger than memory.

    Raises:
        LinearModelError: there is none; says what to do.
    """
    if problem.l1 or problem.is_positive:
        raise LinearModelError(
            "an l1 penalty and coefficients that may not be negative need the table's columns, "
            f"and {problem.x.table.path} is larger than memory={problem.x.table.memory:,} bytes; "
            "raise memory=, or use an l2 penalty"
        )
    can_ascend = problem.l2 > 0.0 and not problem.has_intercept
    if problem.loss.slope is None or (can_ascend and problem.loss.name != "squared"):
        return "sdca"
    return "cg"


def solve_stream(
    problem: LinearProblem, solver: str | Duhl, monitor: FitMonitor, seed: int = 0,
    w: Floats | None = None, b: float = 0.0,
) -> CertifiedModel:  # fmt: skip
    """Solve a problem whose table is a `TableStream`.

    Raises:
        LinearModelError: the solver does not fit the problem, or needs the table in memory.
    """
    best = choose_stream_solver(problem)
    name = solver if isinstance(solver, str) else "duhl"
    chosen = {"auto": best, "newton": "cg"}.get(name, name)
    can_ascend = problem.l2 > 0.0 and not problem.has_intercept
    can_step = problem.loss.slope is not None
    if not {"sdca": can_ascend, "cg": can_step}.get(chosen, False):
        raise LinearModelError(
            f"solver={name!r} does not solve this problem chunk by chunk, and "
            f"{problem.x.table.path} is larger than memory={problem.x.table.memory:,} bytes; use "
            f"solver={best!r} or 'auto', or raise memory="
        )
    monitor.history.solver = chosen
    where = f"{problem.rows:,} x {problem.columns:,} by {chosen} in {problem.x.chunks} chunks"
    with show_progress("fitting", where=where):
        if chosen == "sdca":
            _StreamedAscent(problem, np.random.default_rng(seed)).run(monitor)
        else:
            if problem.bias:
                problem = replace(problem, x=problem.x.with_column(problem.bias), bias=0.0)
                monitor.problem = problem
            minimize_smooth(problem, monitor, method="cg", w=w, b=b)
    assert monitor.best is not None
    return monitor.best


class _StreamedAscent:
    """Dual coordinate ascent over chunks in random order.

    Attributes:
        w: the coefficients; always with one for a bias at the end.
    """

    def __init__(self, problem: LinearProblem, random: np.random.Generator) -> None:
        self.problem, self.random = problem, random
        self.stream: TableStream = problem.x
        self.beta = np.zeros(problem.rows)
        if problem.loss.code == LOGISTIC:
            self.beta[:] = problem.y * np.minimum(1e-3 * problem.c, 1e-8)
        self.w = np.zeros(problem.columns + 1)

    def run(self, monitor: FitMonitor) -> None:
        """Pass over the table until the monitor has what it wants."""
        wanted = 1.0
        while True:
            for _ in range(int(wanted)):
                for chunk in self.stream.visit(self.random):
                    self._visit(chunk)
                monitor.passes += 1.0
            if self._check_gap(monitor) or monitor.is_exhausted:
                return
            wanted = monitor.passes_left(_MOST)

    def _visit(self, chunk: RowChunk) -> None:
        problem, x, rows = self.problem, chunk.x, chunk.rows
        if isinstance(x, np.ndarray):
            loop = native(row_passes, "dense_rows")
            arrays: tuple[Any, ...] = (x.reshape(-1),)
            squares = np.einsum("ij,ij->i", x, x, dtype=np.float64)
        else:
            loop = native(row_passes, "sparse_rows")
            arrays = (x.data, x.indices, x.indptr)
            squares = np.asarray(x.multiply(x).sum(axis=1), np.float64).ravel()
        beta = self.beta[rows]
        for _ in range(_REPEATS):
            loop(
                self.random.permutation(len(squares)), *arrays, problem.columns,
                squares + problem.bias**2, problem.y[rows], problem.c[rows], problem.loss.code,
                problem.loss.parameter, 1.0 / problem.l2, float(problem.bias), beta, self.w,
            )  # fmt: skip
        self.beta[rows] = beta

    def _check_gap(self, monitor: FitMonitor) -> bool:
        """Certify the weights by the dual variables; then compute the weights from those again."""
        problem = self.problem
        f, v = self.stream.multiply_both(self.w[:-1], self.beta)
        f += problem.bias * self.w[-1]
        if problem.bias:
            v = np.append(v, problem.bias * self.beta.sum())
        monitor.passes += 1.0
        w = self.w if problem.bias else self.w[:-1]
        is_enough = monitor.accept(w, 0.0, self.beta, predictions=f, v=v)
        self.w = v / problem.l2 if problem.bias else np.append(v / problem.l2, 0.0)
        return is_enough


__all__ = ["choose_stream_solver", "solve_stream"]
