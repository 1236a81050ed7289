"""The two sides from which coordinate methods look at a problem: by rows and by columns.

A side has a variable for each coordinate, and a vector that all of them share:

    by rows:      β_i, and w = Xᵀβ / l2        (an l2 penalty, no intercept)
    by columns:   w_j, and z = y - X w - b     (squared loss)

The duality gap is a sum over coordinates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from graphflow.linear.fit_history import FitMonitor
from graphflow.linear.loops import column_passes, row_passes
from graphflow.linear.losses import LOGISTIC, Floats
from graphflow.linear.problem import LinearProblem, multiply
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

_ENTRY, _STATE = 12, 40
"""Bytes of an entry of a sparse matrix, and of a coordinate's variables."""


class CoordinatePart(ABC):
    """Some coordinates of a side, copied.

    Attributes:
        squares: the (weighted) squared norm of each.
    """

    squares: Floats

    @abstractmethod
    def visit(self, order: Any, own: Floats, shared: Floats) -> None:
        """Set the variables to their best values, one after the other; the vectors follow."""

    @abstractmethod
    def gaps(self, own: Floats, shared: Floats) -> Floats:
        """Return what each coordinate adds to the duality gap."""


class CoordinateSide(ABC):
    """All coordinates.

    Attributes:
        name: "row" or "column".
        count: their number.
        own: (count,) their variables.
        shared: the vector that they share.
    """

    name: str
    count: int
    own: Floats
    shared: Floats

    def __init__(self, problem: LinearProblem) -> None:
        self.problem = problem

    @abstractmethod
    def pick(self, chosen: Any) -> CoordinatePart:
        """Return some coordinates."""

    @abstractmethod
    def check_gap(self, monitor: FitMonitor) -> tuple[Floats, bool]:
        """Certify the model; return the gap of each coordinate, and True if it is good enough."""

    def sizes(self) -> Any:
        """Return the bytes of each coordinate."""
        x = self.problem.x
        if isinstance(x, np.ndarray):
            return np.full(self.count, x.nbytes // self.count + _STATE, np.int64)
        return np.diff(x.indptr).astype(np.int64) * _ENTRY + _STATE


class RowSide(CoordinateSide):
    """Rows, with their dual variables; `shared` has one more element, the weight of a bias."""

    name = "row"

    def __init__(self, problem: LinearProblem) -> None:
        super().__init__(problem)
        self.count, self.own = problem.rows, np.zeros(problem.rows)
        if problem.loss.code == LOGISTIC:
            self.own[:] = problem.y * np.minimum(1e-3 * problem.c, 1e-8)
        self.shared = self._weights()

    def pick(self, chosen: Any) -> CoordinatePart:
        return _SomeRows(self.problem, chosen)

    def check_gap(self, monitor: FitMonitor) -> tuple[Floats, bool]:
        problem, own = self.problem, self.own
        exact = self._weights()
        w = exact if problem.bias else exact[:-1]
        f = problem.predict(w, 0.0)
        is_enough = monitor.accept(w, 0.0, own, predictions=f, v=w * problem.l2)
        return _row_gaps(problem, own, f, slice(None)), is_enough

    def _weights(self) -> Floats:
        w: Floats = np.asarray(self.problem.correlate(self.own) / self.problem.l2)
        return w if self.problem.bias else np.append(w, 0.0)


class _SomeRows(CoordinatePart):
    def __init__(self, problem: LinearProblem, chosen: Any) -> None:
        self._problem, self._chosen, self._x = problem, chosen, problem.x[chosen]
        self._y, self._c = problem.y[chosen], problem.c[chosen]
        if problem.is_sparse:
            squares = np.asarray(self._x.multiply(self._x).sum(axis=1), np.float64).ravel()
            self._loop = native(row_passes, "sparse_rows")
            self._arrays: tuple[Any, ...] = (self._x.data, self._x.indices, self._x.indptr)
        else:
            squares = np.einsum("ij,ij->i", self._x, self._x, dtype=np.float64)
            self._loop, self._arrays = native(row_passes, "dense_rows"), (self._x.reshape(-1),)
        self.squares = squares + problem.bias**2

    def visit(self, order: Any, own: Floats, shared: Floats) -> None:
        problem = self._problem
        self._loop(
            order, *self._arrays, problem.columns, self.squares, self._y, self._c,
            problem.loss.code, problem.loss.parameter, 1.0 / problem.l2, float(problem.bias), own,
            shared,
        )  # fmt: skip

    def gaps(self, own: Floats, shared: Floats) -> Floats:
        f = multiply(self._x, shared[:-1]) + self._problem.bias * shared[-1]
        return _row_gaps(self._problem, own, f, self._chosen)


def _row_gaps(problem: LinearProblem, beta: Floats, f: Floats, rows: Any) -> Floats:
    """Return c ℓ(y, f) + c ℓ*(y, -β/c) + β f of some rows, which is never negative."""
    y, c, loss = problem.y[rows], problem.c[rows], problem.loss
    found: Floats = c * loss.values(f, y) + loss.conjugates(beta, y, c) + beta * f
    return np.maximum(found, 0.0)


class ColumnSide(CoordinateSide):
    """Columns, with their coefficients, for the squared loss."""

    name = "column"

    def __init__(self, problem: LinearProblem) -> None:
        super().__init__(problem)
        self.count, self.own = problem.columns, np.zeros(problem.columns)
        total = float(problem.c.sum())
        self._means = np.zeros(self.count)
        if problem.has_intercept:
            self._means = multiply(problem.x.T, problem.c) / total
        self._most = 0.0
        self.shared = problem.y - self._intercept(np.zeros(problem.rows))

    def pick(self, chosen: Any) -> CoordinatePart:
        return _SomeColumns(self.problem, chosen, self._means[chosen], self._most)

    def check_gap(self, monitor: FitMonitor) -> tuple[Floats, bool]:
        problem, w = self.problem, self.own
        f = problem.predict(w, 0.0)
        b = self._intercept(f)
        f += b
        beta = problem.c * (problem.y - f)
        v = problem.correlate(beta)
        known = {} if problem.has_intercept else {"v": v}
        is_enough = monitor.accept(w, b, beta, predictions=f, **known)
        # No better model has a coefficient larger than that.
        self._most = problem.primal(w, f) / problem.l1 if problem.l1 else np.inf
        return _column_gaps(problem, w, v, self._most), is_enough

    def _intercept(self, f: Floats) -> float:
        problem = self.problem
        if not problem.has_intercept:
            return 0.0
        return float(problem.c @ (problem.y - f) / problem.c.sum())


class _SomeColumns(CoordinatePart):
    def __init__(self, problem: LinearProblem, chosen: Any, means: Floats, most: float) -> None:
        self._problem, self._means, self._most = problem, means, most
        self._x, c = problem.x[:, chosen], problem.c
        if problem.is_sparse:
            squares = np.asarray(self._x.multiply(self._x).T @ c).ravel()
            self._loop = native(column_passes, "sparse_columns")
            self._arrays: tuple[Any, ...] = (self._x.data, self._x.indices, self._x.indptr)
        else:
            self._x = np.asfortranarray(self._x)
            squares = np.einsum("ij,ij,i->j", self._x, self._x, c, dtype=np.float64)
            self._loop = native(column_passes, "dense_columns")
            self._arrays = (self._x.reshape(-1, order="F"), problem.rows)
        self.squares = np.maximum(squares - float(c.sum()) * means**2, 0.0)

    def visit(self, order: Any, own: Floats, shared: Floats) -> None:
        problem, shift = self._problem, np.zeros(1)
        self._loop(
            order, *self._arrays, self.squares, self._means, problem.c, shared,
            *((shift,) if problem.is_sparse else ()), own, float(problem.l1), float(problem.l2),
            problem.is_positive,
        )  # fmt: skip
        shared += shift[0]

    def gaps(self, own: Floats, shared: Floats) -> Floats:
        v = multiply(self._x.T, self._problem.c * shared)
        return _column_gaps(self._problem, own, v, self._most)


def _column_gaps(problem: LinearProblem, w: Floats, v: Floats, most: float) -> Floats:
    """Return penalty(w) + penalty*(v) - w v of some columns, which is never negative.

    Args:
        most: without an l2 penalty, the largest size that a coefficient may have; then the
            conjugate is finite (Dünner et al., ICML 2016).
    """
    beyond = np.maximum(problem.bound_sizes(v) - problem.l1, 0.0)
    conjugate = beyond * beyond / (2.0 * problem.l2) if problem.l2 else most * beyond
    return np.maximum(problem.l1 * np.abs(w) + 0.5 * problem.l2 * w * w + conjugate - w * v, 0.0)


__all__ = ["ColumnSide", "CoordinatePart", "CoordinateSide", "RowSide"]
