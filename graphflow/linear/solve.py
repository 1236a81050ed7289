"""From a linear problem to a certified model: the choice of a solver, and the run of it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import isfinite
from typing import Any

import numpy as np

from graphflow.base.progress import show_progress
from graphflow.errors import LinearModelError
from graphflow.linear.fit_history import CertifiedModel, FitHistory, FitMonitor
from graphflow.linear.fit_threads import pass_ns, use_threads
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.coordinate_descent.duhl import Duhl, solve_on_accelerator
from graphflow.linear.solvers.coordinate_descent.working_sets import descend_columns
from graphflow.linear.solvers.dual_ascent.gpu_ascent import ascend_on_gpu
from graphflow.linear.solvers.dual_ascent.sequential_ascent import ascend_dual
from graphflow.linear.solvers.dual_ascent.threaded_ascent import ascend_on_threads
from graphflow.linear.solvers.dual_ascent.wild_ascent import ascend_wildly
from graphflow.linear.solvers.newton import interior_points
from graphflow.linear.solvers.newton.hessian import MANY
from graphflow.linear.solvers.newton.newton import choose_method, minimize_smooth
from graphflow.linear.solvers.streamed import solve_stream
from graphflow.linear.tables.table_stream import TableStream
from graphflow.ops.kernels.jit.thread_pool import current_pool

SOLVERS = ("auto", "sdca", "cd", "newton", "cholesky", "cg", "interior", "wild", "tpa", "duhl")
BY_ROWS = ("sdca", "wild", "tpa")
"""Solvers that visit rows, one dual variable at a time."""


def choose_solver(problem: LinearProblem) -> str:
    """Return the name of the solver that is likely to be the fastest.

    | problem | solver |
    |---|---|
    | l1 penalty, or coefficients that may not be negative | "cd": working sets of columns |
    | hinge and insensitive losses | "sdca": dual ascent by rows; "interior" goes on if it is slow |
    | squared loss, a small dense table | "cholesky" |
    | squared loss, a sparse table with many columns | "cg" |
    | other smooth problems | "newton" |
    """
    if problem.l1 or problem.is_positive:
        return "cd"
    if problem.loss.slope is None:
        return "sdca"
    if problem.loss.name == "squared" and problem.l2:
        is_wide = problem.is_sparse and problem.columns > MANY
        return "cg" if is_wide else choose_method(problem)
    return "newton"


def solve(
    problem: LinearProblem, solver: str | Duhl, tol: float, max_passes: float,
    history: FitHistory, *, seed: int = 0, w: Floats | None = None, b: float = 0.0,
    threads: int = 1,
) -> CertifiedModel:  # fmt: skip
    """Solve a problem; Ctrl-C ends the work with the best model so far in `history.best`.

    Args:
        solver: one of `SOLVERS`, or a `Duhl`.
        tol: the relative gap that is enough.
        max_passes: passes over the data, at most.
        history: where certificates are noted.
        seed: of the order of rows.
        w, b: the model to begin with, for solvers that do not work on the dual.
        threads: that the fit may use; a stream from disk uses one.

    Raises:
        LinearModelError: the solver does not fit the problem; names one that does.
    """
    monitor = FitMonitor(problem, tol, max_passes, history)
    if isinstance(problem.x, TableStream):
        return solve_stream(problem, solver, monitor, seed, w, b)
    if isinstance(solver, Duhl) or solver == "duhl":
        options = solver if isinstance(solver, Duhl) else Duhl()
        return solve_on_accelerator(problem, monitor, options, seed)
    chosen = choose_solver(problem) if solver == "auto" else solver
    _check_solver(problem, chosen)
    history.solver = chosen
    problem = replace(problem, x=_order_entries(problem.x, chosen))
    run = partial(_run, problem, monitor, seed=seed, w=w, b=b, threads=threads)
    if solver != "auto" or chosen != "sdca":
        run(chosen, is_given=solver != "auto")
    else:
        # Passes that take longer than interior points do are a sign that many more would follow.
        patience = interior_points.fit_ns(problem) / pass_ns(problem.x)
        monitor.most_passes = min(max_passes, patience)
        is_enough = run(chosen)
        monitor.most_passes = max_passes
        if not is_enough and not monitor.is_exhausted:
            history.solver = "interior"
            run("interior")
    assert monitor.best is not None
    return monitor.best


def _run(
    problem: LinearProblem, monitor: FitMonitor, solver: str, *, seed: int, w: Floats | None,
    b: float, threads: int, is_given: bool = False,
) -> bool:  # fmt: skip
    """Run a solver; return True if the monitor has what it wants."""
    given = _with_bias_column(problem) if problem.bias and solver not in BY_ROWS else problem
    given = replace(given, x=_order_entries(given.x, solver))
    monitor.problem = given
    where = f"{given.rows:,} x {given.columns:,} by {solver}"
    with use_threads(given.x, solver, threads), show_progress("fitting", where=where):
        pool = current_pool()
        if solver == "tpa":
            ascend_on_gpu(given, monitor, seed=seed)
        elif solver in BY_ROWS and pool is None:
            ascend_dual(given, monitor, seed=seed)
        elif pool is not None and solver in BY_ROWS:
            ascend = ascend_on_threads if solver == "sdca" else ascend_wildly
            ascend(given, monitor, pool, seed=seed)
        elif solver == "cd":
            descend_columns(given, monitor, w=w, b=b)
        elif solver == "interior":
            interior_points.follow_barrier(given, monitor)
        else:
            method = solver if is_given and given.l2 else "auto"
            minimize_smooth(given, monitor, method=method, w=w, b=b)
    return monitor.is_satisfied


def _check_solver(problem: LinearProblem, solver: str) -> None:
    if solver not in SOLVERS:
        raise LinearModelError(f"solver is one of {', '.join(SOLVERS)}, not {solver!r}")
    reason = ""
    if solver == "cd":
        reason = "its slope has jumps" if problem.loss.slope is None else ""
    elif problem.l1 or problem.is_positive:
        reason = "of an l1 penalty or of coefficients that may not be negative"
    elif solver in (*BY_ROWS, "interior") and problem.has_intercept:
        reason = "of an intercept without penalty"
    elif solver in (*BY_ROWS, "interior") and not problem.l2:
        reason = "there is no l2 penalty"
    elif solver == "interior" and problem.loss.slope is not None:
        reason = "the loss has no kinks"
    elif solver not in (*BY_ROWS, "interior") and problem.loss.slope is None:
        reason = "the loss has kinks"
    elif _is_too_large(problem, solver):
        reason = f"of {problem.rows:,} rows and {problem.columns:,} columns"
    if reason:
        better = choose_solver(problem)
        remedy = f"use solver={better!r} or 'auto'"
        if better == solver:  # no solver is for losses with kinks and no l2 penalty
            remedy = f"loss {problem.loss.name!r} goes with an l2 penalty and no free intercept"
        raise LinearModelError(
            f"solver={solver!r} does not solve this problem, because {reason}; {remedy}"
        )


def _is_too_large(problem: LinearProblem, solver: str) -> bool:
    """Return True if a solver would need factors of a matrix that is too large."""
    if solver == "interior":
        return not isfinite(interior_points.fit_ns(problem))
    return solver == "cholesky" and min(problem.rows, problem.columns) > 20 * MANY


def _with_bias_column(problem: LinearProblem) -> LinearProblem:
    """Return the problem with the bias as a column of the matrix."""
    column = np.full((problem.rows, 1), problem.bias)
    if problem.is_sparse:
        from scipy.sparse import csr_matrix, hstack

        x = hstack([problem.x, csr_matrix(column)], format="csr")
    else:
        x = np.concatenate([np.asarray(problem.x, np.float64), column], axis=1)
    return replace(problem, x=x, bias=0.0)


def _order_entries(x: Any, solver: str) -> Any:
    """Return the matrix in the order in which a solver reads it."""
    if not isinstance(x, np.ndarray):
        return x.tocsc() if solver == "cd" else x.tocsr()
    return np.ascontiguousarray(x) if solver in BY_ROWS else x


__all__ = ["BY_ROWS", "SOLVERS", "choose_solver", "solve"]
