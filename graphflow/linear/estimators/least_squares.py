"""Least squares with penalties: Ridge, Lasso, ElasticNet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from sklearn.base import MultiOutputMixin

from graphflow.errors import LinearModelError
from graphflow.linear import losses
from graphflow.linear.estimators.base import LinearRegressor
from graphflow.linear.fit_history import CertifiedModel
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.coordinate_descent.duhl import Duhl


class Ridge(MultiOutputMixin, LinearRegressor):  # type: ignore[misc]
    """Least squares with an l2 penalty: |y - Xw - b|² + alpha |w|².

    Args:
        alpha: the penalty; a number, or one for each target. Without one (0) there is no dual: the
            shortest least-squares solution is returned.
        fit_intercept: True for an intercept, on which no penalty acts.
        tol: the relative duality gap that is enough.
        max_iter: passes over the data, at most.
        solver: "auto", "cholesky", "cg", or without an intercept "sdca", "wild" or "tpa" as of
            `LinearSVC`.
        threads: that the fit may use; None: as many as this process has cores.
        cluster, local_steps: as of `LinearSVC`.
    """

    def __init__(
        self, alpha: Any = 1.0, *, fit_intercept: bool = True, tol: float = 1e-8,
        max_iter: int = 10_000, solver: str | Duhl = "auto", threads: int | None = None,
        cluster: Any = None, local_steps: int | str = "auto",
    ) -> None:  # fmt: skip
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter
        self.solver = solver
        self.threads = threads
        self.cluster = cluster
        self.local_steps = local_steps

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model.

        Args:
            X: (rows, columns) numbers; dense, sparse, or a table by `gf.linear.open`.
            y: (rows,) or (rows, targets); None: those in the file of `gf.linear.open`.
            sample_weight: (rows,) not negative; or None.
        """
        self._forget()
        x, y, weights = self._check_table(X, y, sample_weight, multi_output=True, y_numeric=True)
        targets = np.asarray(y, np.float64).reshape(len(y), -1)
        with self._end_workers_on_error():
            alphas = np.broadcast_to(np.asarray(self.alpha, np.float64), (targets.shape[1],))
            for alpha in alphas:
                self._check_parameters(alpha=(float(alpha), 0.0))
        problems = [
            LinearProblem(
                x, column, weights, losses.squared, 0.0, float(alpha), bool(self.fit_intercept)
            )
            for column, alpha in zip(targets.T, alphas, strict=True)
        ]

        def keep(models: Sequence[CertifiedModel]) -> None:
            coef = np.stack([model.w for model in models])
            intercept = np.array([model.b for model in models])
            self.coef_ = coef if np.ndim(y) > 1 else coef[0]
            self.intercept_ = intercept if np.ndim(y) > 1 else float(intercept[0])

        self._fit_problems(problems, keep)
        return self


class ElasticNet(LinearRegressor):
    """Least squares with l1 and l2 penalties.

        |y - Xw - b|² / (2 rows) + alpha (l1_ratio |w|₁ + (1 - l1_ratio)/2 |w|²)

    Args:
        alpha: the penalties' factor.
        l1_ratio: the share of the l1 penalty, between 0 and 1.
        fit_intercept: True for an intercept, on which no penalty acts.
        tol: the relative duality gap that is enough.
        max_iter: passes over the data, at most.
        positive: True if no coefficient may be negative.
        warm_start: True to begin with the coefficients of the last fit.
        solver: "auto" or "cd".
        threads: that the fit may use; None: as many as this process has cores.
        cluster, local_steps: as of `LinearSVC`.
    """

    def __init__(
        self, alpha: float = 1.0, *, l1_ratio: float = 0.5, fit_intercept: bool = True,
        tol: float = 1e-6, max_iter: int = 10_000, positive: bool = False,
        warm_start: bool = False, solver: str | Duhl = "auto", threads: int | None = None,
        cluster: Any = None, local_steps: int | str = "auto",
    ) -> None:  # fmt: skip
        self.alpha = alpha
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter
        self.positive = positive
        self.warm_start = warm_start
        self.solver = solver
        self.threads = threads
        self.cluster = cluster
        self.local_steps = local_steps

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model.

        Args:
            X: (rows, columns) numbers; dense, sparse, or a table by `gf.linear.open`.
            y: (rows,) numbers; None: those in the file of `gf.linear.open`.
            sample_weight: (rows,) not negative; or None.
        """
        self._check_parameters(alpha=(self.alpha, 0.0), l1_ratio=(self.l1_ratio, 0.0))
        if self.l1_ratio > 1:
            raise LinearModelError(f"l1_ratio must be between 0 and 1, not {self.l1_ratio!r}")
        before = getattr(self, "coef_", None) if self.warm_start else None
        start = float(getattr(self, "intercept_", 0.0)) if before is not None else 0.0
        self._forget()
        x, y, weights = self._check_table(X, y, sample_weight, y_numeric=True)
        l1, l2 = self.alpha * self.l1_ratio, self.alpha * (1.0 - self.l1_ratio)
        problem = LinearProblem(
            x, np.asarray(y, np.float64), weights / weights.sum(), losses.squared,
            float(l1), float(l2), bool(self.fit_intercept), is_positive=bool(self.positive),
        )  # fmt: skip
        if before is not None and before.shape != (problem.columns,):
            before = None
        self._fit_problems([problem], self._keep, w=before, b=start)
        return self

    def _keep(self, models: Sequence[CertifiedModel]) -> None:
        self.coef_, self.intercept_ = models[0].w, models[0].b

    @property
    def sparse_coef_(self) -> Any:
        """The coefficients as a sparse matrix of one row."""
        from scipy.sparse import csr_matrix

        return csr_matrix(self.coef_)


class Lasso(ElasticNet):
    """Least squares with an l1 penalty: |y - Xw - b|² / (2 rows) + alpha |w|₁.

    Args:
        alpha: the penalty.
        fit_intercept, tol, max_iter, positive, warm_start, solver, threads, cluster, local_steps:
            as of `ElasticNet`.
    """

    l1_ratio = 1.0

    def __init__(
        self, alpha: float = 1.0, *, fit_intercept: bool = True, tol: float = 1e-6,
        max_iter: int = 10_000, positive: bool = False, warm_start: bool = False,
        solver: str | Duhl = "auto", threads: int | None = None, cluster: Any = None,
        local_steps: int | str = "auto",
    ) -> None:  # fmt: skip
        self.alpha = alpha
        self.fit_intercept = fit_intercept
        self.tol = tol
        self.max_iter = max_iter
        self.positive = positive
        self.warm_start = warm_start
        self.solver = solver
        self.threads = threads
        self.cluster = cluster
        self.local_steps = local_steps


__all__ = ["ElasticNet", "Lasso", "Ridge"]
