"""Products with second derivatives, XᵀHX, for Newton's method by conjugate gradients.

Columns count less their means under H if there is an intercept. A product reads each row once, in
float64. After some products, or for several threads, dense tables are copied to float32, in which
products take less time: a step need not be exact, since the next one starts from a slope in
float64. Tables of which float32 would lose too much stay in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cached_property
from typing import Any

import numpy as np

from graphflow.linear.fit_threads import blas_threads
from graphflow.linear.loops import hessian_rows
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem, multiply, sum_squares
from graphflow.linear.threaded_products import TwofoldProduct
from graphflow.ops.kernels.compiled_loops.loop_compiler import native
from graphflow.ops.kernels.jit.thread_pool import current_pool

Solve = Callable[[Floats], Floats]
"""A slope to a step."""

MANY = 2000
"""Columns, or rows, up to which a matrix of their products may be factorised."""
_COPY_BYTES = 1 << 30
"""Size of a table up to which a copy in float32 is made."""
_BLOCK = 1 << 17
"""Numbers of a block of rows that is converted at once: they stay in the second cache."""
_FIRST = 12
"""Products in float64 that take as much longer than those in float32 as a copy costs."""
_ENTRY_NS = {"sparse": 2.0, "float32": 0.4, "float64": 0.5}
"""What an entry costs in a product with XᵀHX."""
_SYRK_NS = {"float32": 0.016, "float64": 0.027}
"""What a product of two entries costs in a matrix of the columns' products."""
_PAIR_NS = 6.0
"""The same of a sparse table."""
_JITTER = 1e-6
"""Share that is added to the diagonal of a matrix in float32 before it is factorised."""


class Hessian:
    """XᵀHX + l2 I of a problem, as an operator; of any table that can be multiplied.

    Attributes:
        is_exact: True if products are of float64.
        product_ns: estimate of the time of a product, in nanoseconds.
        factor_ns: that of a factorisation; infinite if there is none.
    """

    is_exact = True
    product_ns = math.inf
    factor_ns = math.inf

    def __init__(self, problem: LinearProblem) -> None:
        self.problem = problem
        self.h = self.means = np.zeros(0)

    def set_weights(self, h: Floats) -> None:
        """Set the second derivatives of the rows' losses."""
        self.h, total = h, float(h.sum())
        self.means = np.zeros(self.problem.columns)
        if self.problem.has_intercept and total > 0.0:
            is_uniform = bool((h == h[0]).all())
            self.means = self._column_means if is_uniform else multiply(self.problem.x.T, h) / total

    def apply(self, p: Floats) -> Floats:
        """Return the product with a vector."""
        along = self.h * (multiply(self.problem.x, p) - float(self.means @ p))
        return multiply(self.problem.x.T, along) + self.problem.l2 * p

    def factorize(self) -> Solve:
        """Return the solution of a system with this matrix, or nearly this matrix."""
        raise NotImplementedError

    def diagonal(self) -> Floats:
        """Return about the diagonal."""
        return float(self.h.mean()) * self._squares + self.problem.l2

    @cached_property
    def _squares(self) -> Floats:
        """Squared norms of the columns, less their means with an intercept."""
        problem = self.problem
        squares = self._square_columns()
        if problem.has_intercept:
            squares = np.maximum(squares - problem.rows * self._column_means**2, 0.0)
        return squares

    @cached_property
    def _column_means(self) -> Floats:
        return multiply(self.problem.x.T, np.ones(self.problem.rows)) / self.problem.rows

    def _square_columns(self) -> Floats:
        return sum_squares(self.problem.x, np.ones(self.problem.rows))

    def _invert(self, products: Any, is_double: bool = True) -> Solve:
        """Return the solution of systems of a matrix, of which the upper half counts, plus l2."""
        from scipy.linalg import cho_factor, cho_solve

        diagonal, more = np.einsum("ii->i", products), _JITTER
        diagonal += self.problem.l2 + (0.0 if is_double else more) * diagonal
        while True:
            try:
                factor = cho_factor(products, lower=False, check_finite=False)
            except np.linalg.LinAlgError:  # rounding errors are larger than the least eigenvalue
                diagonal += more * max(float(diagonal.mean()), 1e-300)
                more *= 100.0
                continue
            return lambda slope: np.asarray(cho_solve(factor, slope, check_finite=False))


class SparseHessian(Hessian):
    """XᵀHX + l2 I of a table in CSR form; each product reads the table once."""

    def __init__(self, problem: LinearProblem) -> None:
        super().__init__(problem)
        x = problem.x
        self._parts = (x.data, x.indices, x.indptr)
        self._loop = native(hessian_rows, "sparse_products")
        self._twofold: TwofoldProduct | None = None
        self.product_ns = _ENTRY_NS["sparse"] * x.nnz
        if problem.columns <= MANY:
            lengths = np.diff(x.indptr).astype(np.float64)
            self.factor_ns = _PAIR_NS * float(lengths @ lengths) + problem.columns**3 / 60.0

    def _square_columns(self) -> Floats:
        values, places, _ = self._parts
        squares = np.zeros(self.problem.columns)
        native(hessian_rows, "column_squares")(len(values), values, places, squares)
        return squares

    def factorize(self) -> Solve:
        """Return the solution of a system with this matrix."""
        x: Any = self.problem.x
        products = (x.T @ x.multiply(self.h[:, None]).tocsr()).toarray(order="F")
        products = np.asarray(products, np.float64)
        if self.problem.has_intercept:
            products -= float(self.h.sum()) * np.outer(self.means, self.means)
        return self._invert(products)

    def apply(self, p: Floats) -> Floats:
        """Return the product with a vector."""
        image, pool = self.problem.l2 * p, current_pool()
        if pool is not None:
            if self._twofold is None:
                self._twofold = TwofoldProduct(self.problem.x, pool)
            return np.asarray(image + self._twofold(self.h, p, float(self.means @ p)))
        self._loop(self.problem.rows, *self._parts, self.h, p, float(self.means @ p), image)
        return image


class DenseHessian(Hessian):
    """XᵀHX + l2 I of a dense table.

    Args:
        problem: the problem.
        is_exact: True for products of float64.
    """

    def __init__(self, problem: LinearProblem, is_exact: bool = False) -> None:
        super().__init__(problem)
        x, n, d = problem.x, problem.rows, problem.columns
        self._has_doubles = x.dtype == np.float64
        self._is_double = is_exact or (self._has_doubles and x.nbytes > _COPY_BYTES)
        self._reads_rows_once = x.flags.c_contiguous and blas_threads() == 1
        self._loop = native(hessian_rows, "dense_products")
        self._left, self._copy, self._kernel = 0, None, np.zeros((0, 0))
        if self._reads_rows_once:
            # Conjugate gradients would begin anew where float32 ends.
            is_exact = not self._has_doubles or problem.loss.name == "squared"
            self.is_exact, self._left = self._is_double or is_exact, _FIRST
        else:
            self.is_exact = self._is_double or self._is_far
        kind = "float64" if self.is_exact and self._has_doubles else "float32"
        self.product_ns = _ENTRY_NS[kind] * n * d
        small = min(n, d)
        if small <= MANY:
            kind = "float64" if self._is_double or small < d else "float32"
            self.factor_ns = _SYRK_NS[kind] * small * (float(n) * d + small * small)

    @cached_property
    def _is_far(self) -> bool:
        """True if means of columns in float32, which is not copied, hide what is beside them."""
        if self._has_doubles or not self.problem.has_intercept:
            return False
        return bool((self._square_columns() > 1e4 * self._squares).any())

    @property
    def _center(self) -> Floats:
        """What is taken from columns of float64 before they are rounded to float32."""
        is_moved = self.problem.has_intercept and self._has_doubles
        return self._column_means if is_moved else np.zeros(self.problem.columns)

    def _square_columns(self) -> Floats:
        return _square_columns(self.problem.x)

    def _convert(self) -> None:
        """Make the copy in float32, if there is to be one."""
        if self._has_doubles:
            self._copy, self._squares = _convert(self.problem.x, self._center)
        if not _is_tame(self._squares):
            self._make_exact()

    def _make_exact(self) -> None:
        """Go over to float64, since squares of columns are close to the limits of float32."""
        self._copy, self._is_double, self.is_exact = None, True, True

    def apply(self, p: Floats) -> Floats:
        """Return the product with a vector."""
        self._left -= 1
        if self._left < 0 and not self.is_exact and self._copy is None:
            self._convert()
        if self.is_exact and not self._reads_rows_once:
            return super().apply(p)
        beside, x = float(self.means @ p), self.problem.x
        if self._copy is not None:
            beside, x = beside - float(self._center @ p), self._copy
        if self._reads_rows_once:
            image = np.zeros(len(p))
            self._loop(*x.shape, x.reshape(-1), self.h, p, beside, image)
            return image + self.problem.l2 * p
        part = x @ p.astype(np.float32)
        part -= np.float32(beside)
        part *= self.h.astype(np.float32)
        return np.asarray(part @ x + self.problem.l2 * p, np.float64)

    def factorize(self) -> Solve:
        """Return the solution of a system with this matrix, or nearly this matrix."""
        if self.problem.rows < self.problem.columns and self.problem.l2 > 0.0:
            return self._factorize_rows()
        is_double = self._is_double or self._is_far
        x = self.problem.x if self._copy is None else self._copy
        center = np.zeros(self.problem.columns) if is_double else self._center
        products = _products(x, np.sqrt(self.h), np.float64 if is_double else np.float32, center)
        if not is_double and not _is_tame(np.diag(products)):
            self._make_exact()
            return self.factorize()
        if self.problem.has_intercept:
            means = self.means - center
            products -= float(self.h.sum()) * np.outer(means, means)
        return self._invert(products, is_double)

    def _factorize_rows(self) -> Solve:
        """Factorise the matrix of the rows' products, by Woodbury's identity; all in float64."""
        h, l2, x, d = self.h, self.problem.l2, self.problem.x, self.problem.columns
        if not len(self._kernel):
            upper = _products(x.T, np.ones(d), np.float64)
            self._kernel = np.triu(upper) + np.triu(upper, 1).T
        root, products, means = np.sqrt(h), self._kernel, np.zeros(d)
        if self.problem.has_intercept and h.any():
            share = h / h.sum()
            means, beside = multiply(x.T, share), products @ share
            products = products - (beside + beside[:, None]) + float(share @ beside)
        inner = self._invert(products * root * root[:, None])

        def solve(slope: Floats) -> Floats:
            along = root * inner(root * (multiply(x, slope) - float(means @ slope)))
            taken = multiply(x.T, along) - means * float(along.sum())
            return np.asarray((slope - taken) / l2)

        return solve


def _products(x: Any, root: Floats, dtype: Any, center: Floats | None = None) -> Any:
    """Return the upper half of XᵀHX, h = root², in float64, of sums in `dtype`.

    The table's center counts only where the table is in a higher precision.
    """
    from scipy.linalg import blas

    syrk = blas.ssyrk if dtype == np.float32 else blas.dsyrk
    n, d = x.shape
    total = np.zeros((d, d), dtype, order="F")
    is_uniform, is_ready = bool((root == root[0]).all()), x.dtype == dtype
    if is_uniform and is_ready and x.flags.c_contiguous:
        total = syrk(root[0] ** 2, x.T, 0.0, total, overwrite_c=1)
        return np.asarray(total, np.float64, order="F")
    rows = max(4 * _BLOCK // d, 64)
    block = np.empty((min(rows, n), d), dtype)
    if center is None or is_ready:
        center = np.zeros(d)
    is_moved = bool(center.any())
    factors = root.astype(dtype)[:, None]
    for i in range(0, n, rows):
        part = block[: min(rows, n - i)]
        if is_moved:
            np.subtract(x[i : i + rows], center, out=part, casting="same_kind")
        else:
            np.copyto(part, x[i : i + rows], casting="same_kind")
        if not is_uniform:
            part *= factors[i : i + rows]
        factor = float(root[0]) ** 2 if is_uniform else 1.0
        total = syrk(factor, part.T, 1.0, total, overwrite_c=1)
    return np.asarray(total, np.float64, order="F")


def _convert(x: Any, center: Floats) -> tuple[Any, Floats]:
    """Return a table less its center in float32, and the squared norms of its columns."""
    n, d = x.shape
    is_moved = bool(center.any())
    rows = max(_BLOCK // d, 16)
    z = np.empty((n, d), np.float32)
    squares, block = np.zeros(d), np.empty((min(rows, n), d), np.float32)
    with np.errstate(over="ignore", under="ignore"):
        for i in range(0, n, rows):
            part = z[i : i + rows]
            if is_moved:
                np.subtract(x[i : i + rows], center, out=part, casting="same_kind")
            else:
                np.copyto(part, x[i : i + rows], casting="same_kind")
            square = np.multiply(part, part, out=block[: len(part)])
            squares += np.ones(len(part), np.float32) @ square
    return z, squares


def _square_columns(x: Any) -> Floats:
    """Return the squared norms of columns."""
    if not x.flags.c_contiguous:
        return np.asarray(np.einsum("ij,ij->j", x, x, dtype=np.float64))
    squares = np.zeros(x.shape[1])
    native(hessian_rows, "row_squares")(*x.shape, x.reshape(-1), squares)
    return squares


def _is_tame(squares: Floats) -> bool:
    """Return True if squares of columns are far from the limits of float32."""
    used = squares[squares != 0.0]
    return bool(np.isfinite(used).all() and ((used > 1e-24) & (used < 1e24)).all())


__all__ = ["MANY", "DenseHessian", "Hessian", "Solve", "SparseHessian"]
