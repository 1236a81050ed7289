"""Coordinate descent on the parabola of a loss, in the coefficients of some columns.

The products of the columns with each other are computed once if there are few columns: a step then
costs as many numbers as there are columns. Otherwise a step costs the entries of its column. Every
few passes the last iterates are combined to one that is usually much better.

Source: Bertrand and Massias, AISTATS 2021 (Anderson's extrapolation).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from graphflow.linear.loops import column_passes
from graphflow.linear.losses import Floats
from graphflow.linear.problem import LinearProblem, multiply
from graphflow.ops.kernels.compiled_loops.loop_compiler import native

_PRODUCTS = 200
"""Columns up to which their products are computed: more cost more than some twenty passes."""
_KEPT = 5
"""Iterates that an extrapolation combines."""
_MOST = 10_000
"""Passes, at most."""


class Parabola:
    """The parabola of a loss at some predictions.

    Args:
        problem: the problem.
        h: the second derivatives of the rows' losses.
        x: columns of the problem's matrix, in the form that it has.

    Attributes:
        x: the columns.
        means: their means under `h`; 0 without an intercept.
        passes: over all columns of the problem, as far as the last work needed them.
    """

    def __init__(self, problem: LinearProblem, h: Floats, x: Any) -> None:
        self._problem, self._h = problem, h
        self._gram: Any = np.zeros((0, 0))
        self.x, self.means = x, self._means_of(x)
        self.passes = 0.0

    @property
    def size(self) -> int:
        """The number of columns."""
        return len(self.means)

    def add(self, added: Any) -> None:
        """Add columns."""
        if not added.shape[1]:
            return
        if self._problem.is_sparse:
            from scipy.sparse import hstack

            self.x = hstack([self.x, added], format="csc")
        else:
            self.x = np.concatenate([self.x.T, added.T]).T
        self.means = np.append(self.means, self._means_of(added))

    def solve(self, old: Floats, v: Floats, beta: Floats, goal: float) -> Floats:
        """Return by how much the columns' coefficients change.

        Args:
            old: their coefficients.
            v: their products with `beta`.
            beta: the negative slopes of the rows' losses.
            goal: a pass that gains less ends the work.
        """
        entries = self.x.nnz / max(self.size, 1) if self._problem.is_sparse else len(self._h)
        if self.size > min(_PRODUCTS, 2 * entries):
            return self.descend(old, beta, goal)
        self.passes = 0.0
        self._compute_products()
        gram, flat = self._gram, self._gram.reshape(-1)
        start, slopes = v + gram @ old, v.copy()
        loop = native(column_passes, "gram_columns")
        l1, l2, is_positive = self._penalty()

        def visit(w: Floats) -> float:
            return float(loop(len(w), flat, slopes, w, l1, l2, is_positive))

        def replace(w: Floats, better: Floats) -> bool:
            both = np.stack([w, better], axis=1)
            smooth = (both * (0.5 * (gram @ both) - start[:, None])).sum(axis=0)
            if not np.diff(smooth + self._penalties(both))[0] < 0.0:
                return False
            w[:] = better
            slopes[:] = start - gram @ better
            return True

        return self._run(old.copy(), visit, replace, goal, _MOST) - old

    def descend(self, old: Floats, beta: Floats, goal: float, most: int = _MOST) -> Floats:
        """Return by how much the coefficients change, by passes over the columns themselves.

        Args:
            old, beta, goal: as of `solve`.
            most: passes, at most.
        """
        problem, h, x = self._problem, self._h, self.x
        if problem.is_sparse:
            squares = np.asarray(x.multiply(x).T @ h).ravel()
        else:
            squares = np.einsum("ij,ij,i->j", x, x, h, optimize=True)
        curvatures = np.maximum(squares - float(h.sum()) * self.means**2, 0.0)
        residual = beta / np.maximum(h, 1e-300)
        shift, share = np.zeros(1), self.size / max(problem.columns, 1)
        rest = (curvatures, self.means, h, residual)
        self.passes = share
        if problem.is_sparse:
            loop = native(column_passes, "sparse_columns")
            before: tuple[Any, ...] = (x.data, x.indices, x.indptr, *rest, shift)
        else:
            loop = native(column_passes, "dense_columns")
            before = (x.reshape(-1, order="F"), problem.rows, *rest)
        order = np.arange(self.size)

        def visit(w: Floats) -> float:
            self.passes += 2 * share
            return float(loop(order, *before, w, *self._penalty()))

        def replace(w: Floats, better: Floats) -> bool:
            self.passes += share
            change = better - w
            new = residual + shift[0] - multiply(x, change) + float(self.means @ change)
            now = residual + shift[0]
            gained = 0.5 * float(h @ (new * new - now * now))
            if not gained + np.diff(self._penalties(np.stack([w, better], axis=1)))[0] < 0.0:
                return False
            w[:], residual[:], shift[0] = better, new, 0.0
            return True

        return self._run(old.copy(), visit, replace, goal, most) - old

    def _run(
        self, w: Floats, visit: Callable[[Floats], float],
        replace: Callable[[Floats, Floats], bool], goal: float, most: int,
    ) -> Floats:  # fmt: skip
        """Pass over the columns, and extrapolate now and then, until a pass gains too little."""
        kept = [w.copy()]
        for _ in range(most):
            if visit(w) <= goal:
                break
            kept.append(w.copy())
            if len(kept) > _KEPT:
                better = extrapolate(kept)
                replace(w, np.maximum(better, 0.0) if self._problem.is_positive else better)
                kept = [w.copy()]
        return w

    def _penalty(self) -> tuple[float, float, bool]:
        problem = self._problem
        return float(problem.l1), float(problem.l2), problem.is_positive

    def _penalties(self, w: Floats) -> Floats:
        """Return the penalties of each column of coefficients."""
        problem = self._problem
        sizes = problem.l1 * np.abs(w).sum(axis=0) + 0.5 * problem.l2 * (w * w).sum(axis=0)
        return np.asarray(sizes)

    def _means_of(self, x: Any) -> Floats:
        """Return the means of columns under the weights; 0 without an intercept."""
        total = float(self._h.sum())
        if not self._problem.has_intercept or total <= 0.0:
            return np.zeros(x.shape[1])
        return multiply(x.T, self._h) / total

    def _compute_products(self) -> None:
        """Compute the products that are not known yet: XᵀHX of the columns less their means."""
        before, h = len(self._gram), self._h
        if before == self.size:
            return
        self.passes = (self.size - before) / self._problem.columns
        added = self.x[:, before:]
        products = _products(self.x, added, h)
        products -= float(h.sum()) * np.outer(self.means, self.means[before:])
        gram = np.empty((self.size, self.size))
        gram[:before, :before] = self._gram
        gram[:, before:], gram[before:, :before] = products, products[:before].T
        self._gram = gram


def _products(x: Any, added: Any, h: Floats) -> Any:
    """Return Xᵀ H A."""
    if not isinstance(x, np.ndarray):
        return np.asarray((x.T @ added.multiply(h[:, None]).tocsc()).todense(), np.float64)
    x, added = x.astype(np.float64, copy=False), added.astype(np.float64, copy=False)
    return h[0] * (x.T @ added) if (h == h[0]).all() else x.T @ (added * h[:, None])


def extrapolate(kept: list[Floats]) -> Floats:
    """Return the combination of iterates whose differences cancel best.

    Source: Anderson, J. ACM 1965.
    """
    steps = np.diff(np.stack(kept), axis=0)
    products = steps @ steps.T
    size = len(products)
    products += 1e-12 * np.trace(products) / size * np.eye(size)
    try:
        factors = np.linalg.solve(products, np.ones(size))
    except np.linalg.LinAlgError:
        return kept[-1]
    total = float(factors.sum())
    if total == 0.0 or not np.isfinite(factors).all():
        return kept[-1]
    return np.asarray((factors / total) @ np.stack(kept[1:]))


__all__ = ["Parabola", "extrapolate"]
