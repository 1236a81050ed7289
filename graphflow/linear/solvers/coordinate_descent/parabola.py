"""Coordinate descent on the parabola of a loss, in the coefficients of a set of columns.

A step costs the entries of its column. Once steps have cost as much as the products of the columns
with each other that are not known yet, these are computed: a step then costs as many numbers as
there are columns. Every few passes the last iterates are combined to one that is usually much
better. Where that is slow, Newton's method finds the best coefficients of the columns in use.

Source: Bertrand and Massias, AISTATS 2021 (Anderson's extrapolation).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.linear.loops import column_cycles
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.coordinate_descent.column_sets import ColumnSet
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

_PASSES = 5
"""Passes of a cycle, whose iterates an extrapolation combines."""
_CYCLES = 400
"""Cycles in a row, at most."""
_PATIENCE = 12
"""Columns in use for each pass before a step of Newton's method, which costs about as much."""
_HALVINGS = 6
"""Lengths of such a step that are tried."""


class Parabola:
    """The parabola of a loss at some predictions.

    Args:
        problem: the problem.
        columns: the set of columns.

    Attributes:
        passes: over all columns of the problem, as far as the last work needed them.
    """

    def __init__(self, problem: LinearProblem, columns: ColumnSet) -> None:
        self._problem, self._set = problem, columns
        self._penalty = (problem.l1 / columns.factor, problem.l2 / columns.factor)
        self._spent = 0.0
        self.passes = 0.0

    def descend(
        self, old: Floats, v: Floats, beta: Floats, goal: float, *, is_careful: bool
    ) -> Floats:
        """Return better coefficients of the columns.

        Args:
            old: their coefficients.
            v: their products with `beta`.
            beta: the negative slopes of the rows' losses.
            goal: the gap that is small enough.
            is_careful: True to compute the gap at the end; else the last pass tells about it.
        """
        columns, w = self._set, old.copy()
        columns.start(beta)
        self._square = max(float(columns.residual @ columns.residual), 1e-300)
        gram_cost, spent = columns.gram_cost, 0.0
        steps: ColumnSet | _ProductSteps = columns
        kept = np.zeros((_PASSES + 1, len(w)))
        since, leaps, care = 0, 1, 1.0
        for cycle in range(_CYCLES):
            if steps is columns and self._spent >= gram_cost:
                self._spent = 0.0
                slopes = columns.slopes() if cycle else v / columns.factor
                steps = _ProductSteps(columns.extend_gram(), slopes)
            kept[0] = w
            done = steps.cycle(
                _PASSES, w, kept[1:].reshape(-1), *self._penalty, self._problem.is_positive,
                care * self._limit(w, goal),
            )  # fmt: skip
            visited = 1.0 + max(done - 1, 0) * np.count_nonzero(w) / len(w)
            spent += 2.0 * visited * steps.entries
            self._spent += 2.0 * visited * steps.entries
            since += done
            if done == 0:
                is_known = isinstance(steps, _ProductSteps) or is_careful
                if not is_known or self._gap(w, steps.slopes()) <= goal:
                    break
                care *= 0.3
                continue
            if isinstance(steps, _ProductSteps) and _PATIENCE * since > np.count_nonzero(w):
                self._run_newton(steps, w, leaps)
                since, leaps = 0, 2 * leaps
            elif done == _PASSES:
                self._try_coefficients(steps, w, extrapolate(kept))
                spent += steps.entries
        self.passes = spent / max(columns.matrix_entries, 1)
        return w

    def _run_newton(self, steps: _ProductSteps, w: Floats, most: int) -> None:
        """Take steps of Newton's method until no coefficient becomes 0."""
        for _ in range(most):
            better, is_shorter = steps.newton_step(w, *self._penalty)
            if not self._try_coefficients(steps, w, better) or not is_shorter:
                break

    def _try_coefficients(
        self, steps: ColumnSet | _ProductSteps, w: Floats, better: Floats
    ) -> bool:
        """Go to other coefficients if they are better; return True if so."""
        if self._problem.is_positive:
            better = np.maximum(better, 0.0)
        if steps.try_change(better - w, self._penalties(better) - self._penalties(w)):
            w[:] = better
            return True
        return False

    def _limit(self, w: Floats, goal: float) -> float:
        """Return the violations at which the gap is about the goal; see `_gap`."""
        l1, l2 = self._penalty
        goal /= self._set.factor
        if l2 > 0.0:
            return float(np.sqrt(2.0 * l2 * goal / len(w)))
        size = float(np.abs(w).sum())
        by_size = goal / size if size else np.inf
        return min(by_size, l1 * float(np.sqrt(2.0 * goal / self._square))) if l1 else by_size

    def _gap(self, w: Floats, slopes: Floats) -> float:
        """Return about the gap of the problem of these columns alone.

        Without l2, the dual variables are scaled until no slope is beyond l1; that costs the
        product of slopes and coefficients, and half the square of the residual that is cut off.
        """
        l1, l2 = self._penalty
        sizes = self._problem.bound_sizes(slopes)
        if l2 > 0.0:
            soft = np.maximum(sizes - l1, 0.0)
            gap = self._penalties(w) + float(soft @ soft) / (2.0 * l2) - float(w @ slopes)
        else:
            most = max(l1, float(sizes.max()))
            shortened = 1.0 - l1 / most if most else 0.0
            gap = most * float(np.abs(w).sum()) - float(w @ slopes)
            gap += 0.5 * shortened**2 * self._square
        return gap * self._set.factor

    def _penalties(self, w: Floats) -> float:
        l1, l2 = self._penalty
        return float(l1 * np.abs(w).sum() + 0.5 * l2 * (w @ w))


class _ProductSteps:
    """Steps on columns whose products with each other are known.

    Args:
        gram: (columns, columns) the products.
        slopes: (columns,) products of the columns with the residual.
    """

    def __init__(self, gram: Any, slopes: Floats) -> None:
        self._gram, self._slopes = gram, slopes
        self.entries = gram.size

    def slopes(self) -> Floats:
        """Return the products of the columns with the residual."""
        return self._slopes

    def cycle(self, passes: int, w: Floats, *rest: Any) -> int:
        """Run a cycle of passes; see `loops/column_cycles.py`."""
        loop = native(column_cycles, "cycle_products")
        return int(loop(passes, self._gram.reshape(-1), self._slopes, w, *rest))

    def try_change(self, change: Floats, penalty: float) -> bool:
        """Change coefficients if that and the change of the penalty make the objective smaller."""
        moved = self._gram @ change
        if not float(change @ (0.5 * moved - self._slopes)) + penalty < 0.0:
            return False
        self._slopes -= moved
        return True

    def newton_step(self, w: Floats, l1: float, l2: float) -> tuple[Floats, bool]:
        """Return coefficients that are better by Newton's method, with the signs that they have.

        A coefficient that would change its sign becomes 0. The step is as long as is best, of those
        that are shorter by factors of 2, and of that at whose end the first one becomes 0.

        Returns:
            the coefficients, and True if some of them became 0.
        """
        used = np.flatnonzero(w)
        old = w[used]
        down = self._slopes[used] - l1 * np.sign(old) - l2 * old
        inner = self._gram[np.ix_(used, used)]
        diagonal = np.diag_indices(len(used))
        inner[diagonal] += 1e-13 * float(inner.trace()) + l2
        step = np.linalg.solve(inner, down)
        flips = old * (old + step) < 0.0
        lengths = 0.5 ** np.arange(_HALVINGS)
        first = np.inf
        if flips.any():
            first = float((-old[flips] / step[flips]).min())
            lengths = np.append(lengths, first)
        new = old[:, None] + lengths * step[:, None]
        new[(old[:, None] * new < 0.0)] = 0.0
        if first < 1.0:
            new[-old == first * step, -1] = 0.0
        change = new - old[:, None]
        gains = (change * (0.5 * (inner @ change) - down[:, None])).sum(axis=0)
        best = int(gains.argmin())
        better = w.copy()
        if gains[best] < 0.0:
            better[used] = new[:, best]
        return better, bool((better[used] == 0.0).any())


def extrapolate(kept: Any) -> Floats:
    """Return the combination of iterates, one a row, whose differences cancel best.

    Source: Anderson, J. ACM 1965.
    """
    steps = np.diff(kept, axis=0)
    products = steps @ steps.T
    size = len(products)
    products += 1e-12 * np.trace(products) / size * np.eye(size)
    try:
        factors = np.linalg.solve(products, np.ones(size))
    except np.linalg.LinAlgError:
        return np.asarray(kept[-1])
    total = float(factors.sum())
    if total == 0.0 or not np.isfinite(factors).all():
        return np.asarray(kept[-1])
    return np.asarray((factors / total) @ kept[1:])


__all__ = ["Parabola", "extrapolate"]
