"""Growing sets of columns, scaled for coordinate descent on the parabola of a loss.

    ½ Σ_i h_i (z_i - x_i·w - b)²  =  factor · ½ |r|²

The rows of a set's columns are scaled by the roots of h. If all h are the same, they are the factor
instead, and the columns stay as they are. An intercept follows each step: dense columns are centred
for that; sparse ones keep r as `residual + shift · s`, where s are the rows' scales.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.linear.loops import column_cycles, row_passes
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem, multiply
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

_BLOCK = 64
"""Rows that are transposed at a time, so that they stay in the cache."""


class ColumnSet:
    """Columns of a problem's matrix: the base of the two forms.

    Args:
        problem: the problem.
        h: (rows,) second derivatives of the rows' losses; positive.

    Attributes:
        columns: the columns, by number.
        factor: of the squared residual.
        means: the columns' means under h; 0 without an intercept.
        squares: the squared norms of the scaled columns less their means.
        matrix_entries: how many numbers the problem's matrix has.
    """

    def __init__(self, problem: LinearProblem, h: Floats) -> None:
        is_uniform = bool((h == h[0]).all())
        self.problem, self._h = problem, h
        self.factor = float(h[0]) if is_uniform else 1.0
        self._scales: Floats | None = None if is_uniform else np.sqrt(h)
        self._total = float(h.sum()) / self.factor
        self.columns = np.zeros(0, np.int64)
        self.means, self.squares = np.zeros(0), np.zeros(0)
        self._gram: Any = np.zeros((0, 0))
        x = problem.x
        self.matrix_entries = int(x.nnz if problem.is_sparse else x.size)

    def start(self, beta: Floats) -> None:
        """Compute the residual from the negative slopes of the rows' losses."""
        self.residual = beta / (self.factor if self._scales is None else self._scales)

    def add(self, columns: Any) -> None:
        """Add columns of the matrix."""
        self.columns = np.append(self.columns, columns)

    def predict(self, w: Floats) -> Floats:
        """Return the products of the matrix's own columns with coefficients, for each row."""
        used = np.flatnonzero(w)
        return multiply(self.problem.x[:, self.columns[used]], w[used])

    def extend_gram(self) -> Any:
        """Return the products of all columns with each other; compute those not known yet."""
        before, size = len(self._gram), len(self.columns)
        if before == size:
            return self._gram
        products = self._multiply_from(before)
        gram = np.empty((size, size))
        gram[:before, :before] = self._gram
        gram[:, before:], gram[before:, :before] = products, products[:before].T
        self._gram = gram
        return gram

    @property
    def entries(self) -> int:
        """How many numbers a pass over the columns reads."""
        raise NotImplementedError

    @property
    def gram_cost(self) -> float:
        """What the products not known yet cost, as the numbers that passes read in that time."""
        raise NotImplementedError

    def cycle(self, passes: int, w: Floats, *rest: Any) -> int:
        """Run a cycle of passes; see `loops/column_cycles.py`."""
        raise NotImplementedError

    def slopes(self) -> Floats:
        """Return the products of the scaled columns with the residual."""
        raise NotImplementedError

    def try_change(self, change: Floats, penalty: float) -> bool:
        """Change coefficients if that and the change of the penalty make the objective smaller."""
        raise NotImplementedError

    def _multiply_from(self, before: int) -> Any:
        """Return the products of all scaled columns with those from a number on."""
        raise NotImplementedError


class DenseColumns(ColumnSet):
    """Columns of a dense matrix.

    They are used where they are if their entries lie beside each other and need no change; else
    they are copied, to the rows of `_x`.
    """

    def __init__(self, problem: LinearProblem, h: Floats) -> None:
        super().__init__(problem, h)
        x = problem.x
        is_raw = self._scales is None and not problem.has_intercept
        self._is_in_place = is_raw and x.flags.f_contiguous
        self._x: Any = np.zeros((0, problem.rows), x.dtype if is_raw else np.float64)
        self._flat: Any = x.reshape(-1, order="F") if self._is_in_place else self._x.reshape(-1)
        self._places = self.columns

    def add(self, columns: Any) -> None:
        """Add columns of the matrix."""
        before = len(self.columns)
        super().add(columns)
        if self._is_in_place:
            self._places = self.columns
            self.means = np.zeros(len(self.columns))
        else:
            self._copy(columns)
            self._flat, self._places = self._x.reshape(-1), np.arange(len(self.columns))
        squares = np.empty(len(columns))
        native(column_cycles, "square_columns")(
            self._places[before:], self._flat, self.problem.rows, squares
        )
        self.squares = np.append(self.squares, squares)

    def _copy(self, columns: Any) -> None:
        """Copy columns; centre and scale them."""
        added = _transpose_columns(self.problem.x, columns).astype(self._x.dtype, copy=False)
        means = np.zeros(len(columns))
        if self.problem.has_intercept:
            means = (added @ self._h) / (self._total * self.factor)
            added -= means[:, None]
        if self._scales is not None:
            added *= self._scales
        self.means = np.append(self.means, means)
        self._x = np.concatenate([self._x, added]) if len(self._x) else added

    def predict(self, w: Floats) -> Floats:
        """Return the products of the matrix's own columns with coefficients, for each row."""
        if self._scales is not None:
            return super().predict(w)
        return self._combine(w, np.full(self.problem.rows, float(self.means @ w)))

    def _combine(self, w: Floats, out: Floats) -> Floats:
        """Add the products of the scaled columns and coefficients to an array; return it."""
        loop = native(column_cycles, "add_columns")
        loop(self._places, self._flat, self.problem.rows, w, out)
        return out

    @property
    def entries(self) -> int:
        """How many numbers a pass over the columns reads."""
        return len(self.columns) * self.problem.rows

    @property
    def gram_cost(self) -> float:
        """What the products not known yet cost, as the numbers that passes read in that time."""
        missing = len(self.columns) ** 2 - len(self._gram) ** 2
        return 0.1 * missing * self.problem.rows

    def cycle(self, passes: int, w: Floats, *rest: Any) -> int:
        """Run a cycle of passes; see `loops/column_cycles.py`."""
        loop = native(column_cycles, "cycle_dense")
        return int(loop(
            passes, self._places, self._flat, self.problem.rows, self.squares, self.residual, w,
            *rest,
        ))  # fmt: skip

    def slopes(self) -> Floats:
        """Return the products of the scaled columns with the residual."""
        out = np.empty(len(self.columns))
        native(column_cycles, "multiply_columns")(
            self._places, self._flat, self.problem.rows, self.residual, out
        )
        return out

    def try_change(self, change: Floats, penalty: float) -> bool:
        """Change coefficients if that and the change of the penalty make the objective smaller."""
        new = self._combine(-change, self.residual.copy())
        gained = 0.5 * float(new @ new - self.residual @ self.residual)
        if not gained + penalty < 0.0:
            return False
        self.residual = new
        return True

    def _multiply_from(self, before: int) -> Any:
        """Return the products of all scaled columns with those from a number on."""
        if self._is_in_place:
            copied = _transpose_columns(self.problem.x, self.columns[len(self._x) :])
            self._x = np.concatenate([self._x, copied]) if len(self._x) else copied
        x = self._x.astype(np.float64, copy=False)
        added = x[before:]
        among = added @ added.T  # a product with its own transpose costs half
        return np.concatenate([x[:before] @ added.T, among]) if before else among


class SparseColumns(ColumnSet):
    """Columns of a sparse matrix in CSC form."""

    def __init__(self, problem: LinearProblem, h: Floats) -> None:
        super().__init__(problem, h)
        self._sums, self._shift = np.zeros(0), np.zeros(1)
        self._x: Any = problem.x[:, :0]

    def start(self, beta: Floats) -> None:
        """Compute the residual from the negative slopes of the rows' losses."""
        super().start(beta)
        self._shift[0] = 0.0

    def add(self, columns: Any) -> None:
        """Add columns of the matrix."""
        from scipy.sparse import csc_matrix

        super().add(columns)
        x = self.problem.x[:, columns]
        means = np.zeros(len(columns))
        if self.problem.has_intercept:
            means = multiply(x.T, self._h) / (self._total * self.factor)
        if self._scales is not None:
            x.data = x.data * self._scales[x.indices]
        squares = np.empty(len(columns))
        native(row_passes, "sparse_squares")(x.data, x.indptr, squares)
        squares = np.maximum(squares - self._total * means**2, 0.0)
        self.squares = np.append(self.squares, squares)
        self.means = np.append(self.means, means)
        self._sums = self._total * self.means
        old = self._x
        parts = (
            np.concatenate([old.data, x.data]),
            np.concatenate([old.indices, x.indices]),
            np.concatenate([old.indptr, x.indptr[1:] + old.indptr[-1]]),
        )
        self._x = csc_matrix(parts, shape=(self.problem.rows, len(self.columns)))

    def predict(self, w: Floats) -> Floats:
        """Return the products of the matrix's own columns with coefficients, for each row."""
        return super().predict(w) if self._scales is not None else multiply(self._x, w)

    @property
    def entries(self) -> int:
        """How many numbers a pass over the columns reads."""
        return int(self._x.nnz)

    @property
    def gram_cost(self) -> float:
        """What the products not known yet cost, as the numbers that passes read in that time."""
        size = len(self.columns)
        if size == len(self._gram):
            return 0.0
        if size * size > 4 * self._x.nnz:
            return np.inf
        counts = np.bincount(self._x.indices, minlength=1).astype(np.float64)
        return 3.0 * float(counts @ counts)

    def cycle(self, passes: int, w: Floats, *rest: Any) -> int:
        """Run a cycle of passes; see `loops/column_cycles.py`."""
        x, loop = self._x, native(column_cycles, "cycle_sparse")
        return int(loop(
            passes, x.data, x.indices, x.indptr, self.squares, self._sums, self._total,
            self.residual, self._shift, w, *rest,
        ))  # fmt: skip

    def slopes(self) -> Floats:
        """Return the products of the scaled columns with the residual."""
        return np.asarray(multiply(self._x.T, self.residual) + self._shift[0] * self._sums)

    def try_change(self, change: Floats, penalty: float) -> bool:
        """Change coefficients if that and the change of the penalty make the objective smaller."""
        scales = 1.0 if self._scales is None else self._scales
        old = self.residual + self._shift[0] * scales
        new = old - multiply(self._x, change) + float(self.means @ change) * scales
        if not 0.5 * float(new @ new - old @ old) + penalty < 0.0:
            return False
        self.residual, self._shift[0] = new, 0.0
        return True

    def _multiply_from(self, before: int) -> Any:
        """Return the products of all scaled columns with those from a number on."""
        products = np.asarray((self._x.T @ self._x[:, before:]).todense(), np.float64)
        return products - self._total * np.outer(self.means, self.means[before:])


def _transpose_columns(x: Any, columns: Any) -> Any:
    """Return some columns of a matrix as the rows of another one."""
    if x.flags.f_contiguous:
        return x.T.take(columns, axis=0)
    out = np.empty((len(columns), len(x)), x.dtype)
    for i in range(0, len(x), _BLOCK):
        out[:, i : i + _BLOCK] = x[i : i + _BLOCK].take(columns, axis=1).T
    return out


__all__ = ["ColumnSet", "DenseColumns", "SparseColumns"]
