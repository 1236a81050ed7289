"""Coordinate descent on working sets, for smooth losses with an l1 penalty.

    two passes over all columns → columns in use, or close to it: a set → descent on the set ─┐
                        └──────────────── certificate, larger set ────────────────────────────┘

The loss is replaced by its parabola at the predictions (it is one already if it is squared).

Source: Massias et al., ICML 2018 (celer); Bertrand et al., NeurIPS 2022 (skglm).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem, multiply
from graphflow.linear.solvers.line_search import search_line
from graphflow.linear.solvers.newton import best_intercept
from graphflow.linear.solvers.parabola import Parabola

_FIRST_PASSES = 2
"""Passes over all columns before the first set."""
_CLOSE = 0.9
"""Share of the l1 penalty from which a slope puts its column into the set."""
_PATIENCE = 5
"""Rounds in a row that may bring nothing."""


def descend_columns(
    problem: LinearProblem, monitor: FitMonitor, *, w: Floats | None = None, b: float = 0.0
) -> None:
    """Solve a problem with a smooth loss; it may have an l1 penalty, and should.

    Args:
        problem: its dense matrix is Fortran-contiguous, its sparse one CSC.
        monitor: is given certified models.
        w, b: the model to begin with.
    """
    is_new = w is None
    w = np.zeros(problem.columns) if w is None else w.copy()
    f = problem.predict(w, b)
    loss, c, y = problem.loss, problem.c, problem.y
    is_squared = loss.name == "squared"
    columns = np.zeros(0, np.int64)
    parabola: Parabola | None = None
    stalled = 0
    while True:
        if problem.has_intercept:
            moved = best_intercept(problem, f)
            b, f = b + moved, f + moved
        beta = -c * loss.slopes(f, y)
        v = problem.correlate(beta)
        known = {} if problem.has_intercept else {"v": v}
        if monitor.accept(w, b, beta, predictions=f, **known) or monitor.is_exhausted:
            return
        goal = _least_gain(monitor)
        h = c * loss.curvatures(f, y)
        if is_new:
            is_new, chosen = False, np.arange(problem.columns)
            used = Parabola(problem, h, problem.x)
            change = used.descend(w, beta, goal, _FIRST_PASSES)
        else:
            columns = np.append(columns, _columns_to_add(problem, w, v, columns))
            if parabola is None or not is_squared:
                parabola = Parabola(problem, h, problem.x[:, columns])
            else:
                parabola.add(problem.x[:, columns[parabola.size :]])
            used, chosen = parabola, columns
            change = used.solve(w[chosen], v[chosen], beta, goal)
        monitor.passes += 1 + used.passes
        moves = np.flatnonzero(change)
        along = multiply(used.x[:, moves], change[moves])
        beside = -float(used.means @ change)
        length = 1.0
        if not is_squared:
            length = search_line(
                partial(_primal_along, problem, w, f, chosen, change, along + beside),
                problem.primal(w, f),
                halvings=30,
            )
        stalled = stalled + 1 if monitor.is_stalled else 0
        if length == 0.0 or not len(moves) or stalled > _PATIENCE:
            return
        w = w.copy()
        w[chosen] += length * change
        b, f = b + length * beside, f + length * (along + beside)


def _least_gain(monitor: FitMonitor) -> float:
    """Return what a pass has to gain to go on with a set.

    The gap of an l1 penalty falls with the root of what passes gain.
    """
    last = monitor.history.certificates[-1]
    wanted = max(monitor.tol, 0.02 * min(last.relative_gap or 0.0, 1.0), 1e-9)
    return 0.01 * wanted**2 * abs(last.primal)


def _columns_to_add(problem: LinearProblem, w: Floats, v: Floats, known: Any) -> Any:
    """Return the columns outside a set that are in use, or whose slopes are close to that."""
    slope = problem.bound_sizes(v - problem.l2 * w)
    wanted = (w != 0.0) | (slope >= _CLOSE * problem.l1)
    wanted[known] = False
    return np.flatnonzero(wanted)


def _primal_along(
    problem: LinearProblem, w: Floats, f: Floats, chosen: Any, change: Floats, along: Floats,
    length: float,
) -> float:  # fmt: skip
    new = w.copy()
    new[chosen] += length * change
    return problem.primal(new, f + length * along)


__all__ = ["descend_columns"]
