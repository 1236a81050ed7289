"""Linear support vector machines: classification and regression."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from graphflow.errors import LinearModelError
from graphflow.linear import losses
from graphflow.linear.estimators.base import LinearClassifier, LinearRegressor
from graphflow.linear.fit_history import CertifiedModel
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.coordinate_descent.duhl import Duhl


def _bias_of(estimator: Any) -> float:
    """Return the value of the column whose coefficient makes the intercept."""
    scaling = estimator.intercept_scaling
    if not estimator.fit_intercept:
        return 0.0
    if not scaling > 0:
        raise LinearModelError(f"intercept_scaling must be positive, not {scaling!r}")
    return float(scaling)


def _split(model: CertifiedModel, bias: float) -> tuple[Any, float]:
    """Return coefficients and intercept of a model with a bias column."""
    return (model.w[:-1], bias * float(model.w[-1])) if bias else (model.w, 0.0)


class LinearSVC(LinearClassifier):
    """Linear support vector classification; with more than two classes, each against the others.

        C Σ_i loss_i + |w|²/2    (or |w|₁, with penalty="l1")

    The intercept is the coefficient of a column of `intercept_scaling`, and is penalised.

    Args:
        penalty: "l2" or "l1"; "l1" goes with the squared hinge.
        loss: "squared_hinge" or "hinge".
        C: the factor of the losses.
        fit_intercept: True for an intercept.
        intercept_scaling: the value of the intercept's column.
        class_weight: factors of classes by label, "balanced", or None.
        tol: the relative duality gap that is enough.
        max_iter: passes over the data, at most.
        solver: "auto", "sdca", "interior" (hinge), "newton", "cholesky" or "cg" (squared hinge), or
            "cd" with an l1 penalty. "wild" and "tpa" are "sdca" with threads that race, and on a
            GPU; neither repeats bit for bit.
        threads: that the fit may use; None: as many as this process has cores. The same bits come
            of the same number of threads.
        random_state: seed of the order of rows; None is 0.
        cluster: a `gf.Cluster` (or the path of its file) whose workers fit the model together, each
            with a part of the table; or a `gf.Session` on one, which stays open. None: this
            process.
        local_steps: steps of a worker between two exchanges; "auto" measures what is fastest.
    """

    def __init__(
        self, penalty: str = "l2", loss: str = "squared_hinge", *, C: float = 1.0,
        fit_intercept: bool = True, intercept_scaling: float = 1.0, class_weight: Any = None,
        tol: float = 1e-6, max_iter: int = 10_000, solver: str | Duhl = "auto",
        threads: int | None = None, random_state: int | None = None, cluster: Any = None,
        local_steps: int | str = "auto",
    ) -> None:  # fmt: skip
        self.penalty = penalty
        self.loss = loss
        self.C = C
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.class_weight = class_weight
        self.tol = tol
        self.max_iter = max_iter
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
        self._check_parameters(C=(self.C, 1e-300))
        known = {"hinge": losses.hinge, "squared_hinge": losses.squared_hinge}
        if self.loss not in known or self.penalty not in ("l1", "l2"):
            raise LinearModelError(
                f"loss is 'hinge' or 'squared_hinge', and penalty 'l1' or 'l2', not {self.loss!r} "
                f"and {self.penalty!r}"
            )
        if self.penalty == "l1" and self.loss == "hinge":
            raise LinearModelError("penalty='l1' goes with loss='squared_hinge'")
        bias = _bias_of(self)
        self._forget()
        x, labels, weights = self._check_labels(X, y, sample_weight)
        positives = [1] if len(self.classes_) == 2 else range(len(self.classes_))
        l1, l2 = (1.0, 0.0) if self.penalty == "l1" else (0.0, 1.0)
        problems = [
            LinearProblem(
                x,
                np.where(labels == positive, 1.0, -1.0),
                self.C * weights,
                known[self.loss],
                l1,
                l2,
                bias=bias,
            )
            for positive in positives
        ]

        def keep(models: Sequence[CertifiedModel]) -> None:
            found = [_split(model, bias) for model in models]
            self.coef_ = np.stack([w for w, _ in found])
            self.intercept_ = np.array([b for _, b in found])

        self._fit_problems(problems, keep, seed=self.random_state or 0)
        return self


class LinearSVR(LinearRegressor):
    """Linear support vector regression: C Σ_i loss_i + |w|²/2.

    The intercept is the coefficient of a column of `intercept_scaling`, and is penalised.

    Args:
        epsilon: errors up to this cost nothing.
        C: the factor of the losses.
        loss: "epsilon_insensitive" or "squared_epsilon_insensitive".
        fit_intercept, intercept_scaling, tol, max_iter: as of `LinearSVC`.
        threads, random_state, cluster, local_steps: as of `LinearSVC`.
        solver: "auto", "sdca", "interior", "wild" or "tpa" as of `LinearSVC`; with the squared
            loss, "newton", "cholesky" or "cg" in place of "interior".
    """

    def __init__(
        self, *, epsilon: float = 0.0, C: float = 1.0, loss: str = "epsilon_insensitive",
        fit_intercept: bool = True, intercept_scaling: float = 1.0, tol: float = 1e-6,
        max_iter: int = 10_000, solver: str | Duhl = "auto", threads: int | None = None,
        random_state: int | None = None, cluster: Any = None, local_steps: int | str = "auto",
    ) -> None:  # fmt: skip
        self.epsilon = epsilon
        self.C = C
        self.loss = loss
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.tol = tol
        self.max_iter = max_iter
        self.solver = solver
        self.threads = threads
        self.random_state = random_state
        self.cluster = cluster
        self.local_steps = local_steps

    def fit(self, X: Any, y: Any = None, sample_weight: Any = None) -> Self:
        """Fit the model.

        Args:
            X: (rows, columns) numbers; dense, sparse, or a table by `gf.linear.open`.
            y: (rows,) numbers; None: those in the file of `gf.linear.open`.
            sample_weight: (rows,) not negative; or None.
        """
        self._check_parameters(C=(self.C, 1e-300), epsilon=(self.epsilon, 0.0))
        known = {
            "epsilon_insensitive": losses.epsilon_insensitive,
            "squared_epsilon_insensitive": losses.squared_epsilon_insensitive,
        }
        if self.loss not in known:
            raise LinearModelError(f"loss must be one of {', '.join(known)}, not {self.loss!r}")
        bias = _bias_of(self)
        self._forget()
        x, y, weights = self._check_table(X, y, sample_weight, y_numeric=True)
        problem = LinearProblem(
            x, np.asarray(y, np.float64), self.C * weights, known[self.loss](self.epsilon),
            0.0, 1.0, bias=bias,
        )  # fmt: skip
        self._fit_problems([problem], self._keep, seed=self.random_state or 0)
        return self

    def _keep(self, models: Sequence[CertifiedModel]) -> None:
        self.coef_, self.intercept_ = _split(models[0], _bias_of(self))


__all__ = ["LinearSVC", "LinearSVR"]
