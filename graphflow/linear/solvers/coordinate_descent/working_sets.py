"""Coordinate descent on working sets, for smooth losses with an l1 penalty.

    columns whose slopes are largest: a set → descent on the set ─┐
                    └─────── certificate, larger set ─────────────┘

The loss is replaced by its parabola at the predictions (it is one already if it is squared).

Source: Massias et al., ICML 2018 (celer); Bertrand et al., NeurIPS 2022 (skglm).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.coordinate_descent.column_sets import (
    ColumnSet,
    DenseColumns,
    SparseColumns,
)
from graphflow.linear.solvers.coordinate_descent.parabola import Parabola
from graphflow.linear.solvers.newton.line_search import search_line
from graphflow.linear.solvers.newton.newton import best_intercept

_CLOSE = 0.9
"""Share of the l1 penalty from which a slope puts its column into the set."""
_FEW, _SHARE, _SHARE_OF_DENSE = 100, 0.05, 0.25
"""Columns by which a set may grow in any case: a number, and a share of all columns, of which a
certificate of a dense table reads each entry twice."""
_GROWTH = 3
"""Columns of a set for each column in use, at most."""
_CARE = 0.5
"""Share of the gap that is left on a set."""
_CARE_AT_END = 0.01
"""The same of a set of dense columns that has not grown, and so is likely to be the last one."""
_PATIENCE = 5
"""Rounds in a row that may bring nothing."""


def descend_columns(
    problem: LinearProblem, monitor: FitMonitor, *, w: Floats | None = None, b: float = 0.0
) -> None:
    """Solve a problem with a smooth loss; it may have an l1 penalty, and should.

    Args:
        problem: its sparse matrix is CSC.
        monitor: is given certified models.
        w, b: the model to begin with.
    """
    w = np.zeros(problem.columns) if w is None else w.copy()
    f = problem.predict(w, b) if w.any() else np.full(problem.rows, b)
    loss, c, y = problem.loss, problem.c, problem.y
    is_squared = loss.name == "squared"
    kind = SparseColumns if problem.is_sparse else DenseColumns
    columns: ColumnSet | None = None
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
        before = np.zeros(0, np.int64) if columns is None else columns.columns
        added = _columns_to_add(problem, w, v, before)
        if columns is None or not is_squared:
            columns = kind(problem, _curvatures(problem, f))
            parabola = Parabola(problem, columns)
            added = np.append(before, added)
        if len(added):
            columns.add(added)
        chosen = columns.columns
        care = _CARE if len(added) or problem.is_sparse else _CARE_AT_END
        goal = _goal(monitor, care) * 0.1**stalled
        new = parabola.descend(
            w[chosen], v[chosen], beta, goal, is_careful=len(before) == len(chosen)
        )
        monitor.passes += 1 + parabola.passes
        change, length = new - w[chosen], 1.0
        if is_squared:
            b, f = 0.0, columns.predict(new)
        else:
            beside = -float(columns.means @ change)
            along = columns.predict(change) + beside
            length = search_line(
                partial(_primal_along, problem, w, f, chosen, change, along),
                problem.primal(w, f),
                halvings=30,
            )
            b, f = b + length * beside, f + length * along
        w = w.copy()
        w[chosen] += length * change
        is_stalled = monitor.is_stalled or length == 0.0 or not change.any()
        stalled = stalled + 1 if is_stalled else 0
        if stalled > _PATIENCE:
            return


def _curvatures(problem: LinearProblem, f: Floats) -> Floats:
    """Return positive second derivatives of the rows' losses, for losses that have linear parts."""
    h = problem.c * problem.loss.curvatures(f, problem.y)
    most = float(h.max())
    return np.maximum(h, 1e-6 * most) if most > 0.0 else problem.c


def _goal(monitor: FitMonitor, care: float) -> float:
    """Return the gap at which work on a set ends: `care` of the last one, or what is wanted."""
    last = monitor.history.certificates[-1]
    gap = min(last.relative_gap or 0.0, 1.0)
    return max(0.3 * monitor.tol, care * gap, 1e-12) * abs(last.primal)


def _columns_to_add(problem: LinearProblem, w: Floats, v: Floats, known: Any) -> Any:
    """Return the columns outside a set that are in use, and those with the largest slopes."""
    slopes = problem.bound_sizes(v - problem.l2 * w)
    slopes[w != 0.0] = np.inf
    slopes[known] = -np.inf
    found = np.flatnonzero(slopes >= _CLOSE * problem.l1)
    share = _SHARE if problem.is_sparse else _SHARE_OF_DENSE
    most = max(_FEW, int(share * problem.columns), _GROWTH * int(np.count_nonzero(w)) - len(known))
    if problem.l1 and len(found) > most:
        found = np.sort(found[np.argpartition(-slopes[found], most)[:most]])
    return found


def _primal_along(
    problem: LinearProblem, w: Floats, f: Floats, chosen: Any, change: Floats, along: Floats,
    length: float,
) -> float:  # fmt: skip
    new = w.copy()
    new[chosen] += length * change
    return problem.primal(new, f + length * along)


__all__ = ["descend_columns"]
