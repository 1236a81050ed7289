"""Logistic regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from sklearn.utils.validation import check_is_fitted

from graphflow.errors import LinearModelError
from graphflow.linear import losses
from graphflow.linear.estimators.base import LinearClassifier
from graphflow.linear.fit_history import CertifiedModel, FitHistory
from graphflow.linear.fit_threads import count_threads, use_threads
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.coordinate_descent.duhl import Duhl
from graphflow.linear.solvers.newton.softmax import SoftmaxProblem, solve_softmax
from graphflow.linear.solvers.newton.sparse_softmax import solve_sparse_softmax
from graphflow.linear.tables.table_stream import TableStream


class LogisticRegression(LinearClassifier):
    """Logistic regression; with more than two classes, of the softmax of their predictions.

        C Σ_i loss_i + (1 - l1_ratio)/2 |w|² + l1_ratio |w|₁

    Args:
        C: the factor of the losses; infinite for no penalty, and then without a certificate.
        l1_ratio: the share of the l1 penalty, between 0 and 1.
        fit_intercept: True for an intercept, on which no penalty acts.
        class_weight: factors of classes by label, "balanced", or None.
        tol: the relative duality gap that is enough.
        max_iter: passes over the data, at most.
        warm_start: True to begin with the coefficients of the last fit.
        solver: "auto", "newton", "cholesky", "cg", "cd" with an l1 penalty; or without an intercept
            "sdca", "wild" or "tpa" as of `LinearSVC`. More than two classes take "newton".
        threads: that the fit may use; None: as many as this process has cores.
        random_state: seed of the order of rows for "sdca"; None is 0.
        cluster, local_steps: as of `LinearSVC`.
    """

    def __init__(
        self, *, C: float = 1.0, l1_ratio: float = 0.0, fit_intercept: bool = True,
        class_weight: Any = None, tol: float = 1e-6, max_iter: int = 10_000,
        warm_start: bool = False, solver: str | Duhl = "auto", threads: int | None = None,
        random_state: int | None = None, cluster: Any = None, local_steps: int | str = "auto",
    ) -> None:  # fmt: skip
        self.C = C
        self.l1_ratio = l1_ratio
        self.fit_intercept = fit_intercept
        self.class_weight = class_weight
        self.tol = tol
        self.max_iter = max_iter
        self.warm_start = warm_start
        self.solver = solver
        self.threads = threads
        self.random_state = random_state
        self.cluster = cluster
        self.local_steps = local_steps

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model.

        Args:
            X: (rows, columns) numbers; dense, sparse, or a table by `gf.linear.open`.
            y: (rows,) labels, of two classes at least; None: those in the file of `gf.linear.open`.
            sample_weight: (rows,) not negative; or None.
        """
        self._check_parameters(C=(self.C, 1e-300), l1_ratio=(self.l1_ratio, 0.0))
        if self.l1_ratio > 1:
            raise LinearModelError(f"l1_ratio must be between 0 and 1, not {self.l1_ratio!r}")
        before = getattr(self, "coef_", None) if self.warm_start else None
        intercepts = getattr(self, "intercept_", None) if before is not None else None
        self._forget()
        x, labels, weights = self._check_labels(X, y, sample_weight)
        classes = len(self.classes_)
        rows_of_coef = 1 if classes == 2 else classes
        if before is not None and before.shape != (rows_of_coef, x.shape[1]):
            before = intercepts = None
        # Without a bound on C, the losses are minimised as they are.
        scale, penalty = (self.C, 1.0) if np.isfinite(self.C) else (1.0, 0.0)
        if classes > 2:
            with self._end_workers_on_error():
                return self._fit_classes(x, labels, scale * weights, penalty, before, intercepts)
        problem = LinearProblem(
            x, np.where(labels == 1, 1.0, -1.0), scale * weights, losses.logistic,
            penalty * float(self.l1_ratio), penalty * (1.0 - float(self.l1_ratio)),
            bool(self.fit_intercept),
        )  # fmt: skip
        self._fit_problems(
            [problem],
            self._keep,
            seed=self.random_state or 0,
            w=None if before is None else before[0],
            b=0.0 if intercepts is None else float(intercepts[0]),
        )
        return self

    def _keep(self, models: Sequence[CertifiedModel]) -> None:
        self.coef_, self.intercept_ = models[0].w[None, :], np.array([models[0].b])

    def _fit_classes(
        self, x: Any, labels: Any, c: Any, penalty: float, before: Any, intercepts: Any
    ) -> Self:
        if self.l1_ratio and self.solver not in ("auto", "newton"):
            raise LinearModelError(
                f"solver={self.solver!r} does not solve an l1 penalty with {len(self.classes_)} "
                "classes; use solver='newton' or 'auto'"
            )
        if isinstance(x, TableStream):
            raise LinearModelError(
                f"{x.table.path} has {len(self.classes_)} classes and is larger than memory="
                f"{x.table.memory:,}; raise memory=, or use LinearSVC, which fits each class "
                "against the others"
            )
        if self.cluster is not None:
            raise LinearModelError(
                f"cluster= with {len(self.classes_)} classes: workers fit two classes; fit a "
                "model for each class against the others (sklearn.multiclass.OneVsRestClassifier)"
            )
        problem = SoftmaxProblem(
            x if isinstance(x, np.ndarray) else x.tocsr(), labels, len(self.classes_), c,
            penalty * (1.0 - float(self.l1_ratio)), bool(self.fit_intercept),
            penalty * float(self.l1_ratio),
        )  # fmt: skip
        solve = solve_sparse_softmax if problem.l1 else solve_softmax
        w = None if before is None else before.T

        def run(problem: SoftmaxProblem, history: FitHistory) -> CertifiedModel:
            with use_threads(problem.x, "newton", count_threads(self.threads)):
                return solve(problem, self.tol, self.max_iter, history, w=w, b=intercepts)

        self._run_all(run, [problem], self._keep_classes)
        return self

    def _keep_classes(self, models: Sequence[CertifiedModel]) -> None:
        w, b = models[0].w, models[0].b
        self.coef_, self.intercept_ = np.ascontiguousarray(w.T), b - b.mean()

    def predict_proba(self, X: Any) -> Any:
        """Return the probability of each class, (rows, classes)."""
        check_is_fitted(self, "coef_")
        scores = self.decision_function(X)
        if scores.ndim == 1:
            second = losses.sigmoid(scores)
            return np.stack([1.0 - second, second], axis=1)
        grown = np.exp(scores - scores.max(axis=1, keepdims=True))
        return grown / grown.sum(axis=1, keepdims=True)

    def predict_log_proba(self, X: Any) -> Any:
        """Return the logarithm of the probability of each class, (rows, classes)."""
        return np.log(self.predict_proba(X))


__all__ = ["LogisticRegression"]
