"""A linear model of any of the losses and penalties."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from graphflow.errors import LinearModelError
from graphflow.linear import losses
from graphflow.linear.estimators.base import LinearRegressor
from graphflow.linear.fit_history import CertifiedModel
from graphflow.linear.losses import Loss
from graphflow.linear.penalties import L1, L1L2, L2
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.coordinate_descent.duhl import Duhl

_LOSSES = {
    "squared": losses.squared,
    "logistic": losses.logistic,
    "hinge": losses.hinge,
    "squared_hinge": losses.squared_hinge,
    "huber": losses.huber(),
    "epsilon_insensitive": losses.epsilon_insensitive(),
    "squared_epsilon_insensitive": losses.squared_epsilon_insensitive(),
}


class Glm(LinearRegressor):
    """A linear model: Σ_i loss_i + penalty(w). `predict` returns X @ w + b.

    Args:
        loss: a name, or one of `graphflow.linear.losses` such as `huber(1.0)`. Targets of
            "logistic", "hinge" and "squared_hinge" are -1 and 1.
        penalty: `gf.linear.L1`, `L2` or `L1L2`.
        fit_intercept: True for an intercept, on which no penalty acts; losses with kinks ("hinge",
            "epsilon_insensitive") have none.
        tol: the relative duality gap that is enough.
        max_iter: passes over the data, at most.
        solver: one of `graphflow.linear.solve.SOLVERS`.
        threads: that the fit may use; None: as many as this process has cores.
        random_state: seed of the order of rows for "sdca"; None is 0.
        cluster, local_steps: as of `LinearSVC`.
    """

    def __init__(
        self, loss: str | Loss = "squared", penalty: Any = None, *, fit_intercept: bool = False,
        tol: float = 1e-6, max_iter: int = 10_000, solver: str | Duhl = "auto",
        threads: int | None = None, random_state: int | None = None, cluster: Any = None,
        local_steps: int | str = "auto",
    ) -> None:  # fmt: skip
        self.loss = loss
        self.penalty = penalty
        self.fit_intercept = fit_intercept
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
            y: (rows,) targets; None: those in the file of `gf.linear.open`.
            sample_weight: (rows,) not negative; or None.
        """
        self._check_parameters()
        loss = _LOSSES.get(self.loss) if isinstance(self.loss, str) else self.loss
        if not isinstance(loss, Loss):
            raise LinearModelError(
                f"loss must be a Loss or one of {', '.join(_LOSSES)}, not {self.loss!r}"
            )
        if self.fit_intercept and loss.slope is None:
            raise LinearModelError(
                f"loss={loss.name!r} goes with fit_intercept=False; add a column of ones"
            )
        self._forget()
        x, y, weights = self._check_table(X, y, sample_weight, y_numeric=True)
        targets = np.asarray(y, np.float64)
        if loss.classifies and not np.isin(targets, (-1.0, 1.0)).all():
            self._end_workers()
            raise LinearModelError(
                f"targets of loss={loss.name!r} are -1 and 1; y has {np.unique(targets)[:5]}"
            )
        l1, l2 = _strengths(self.penalty)
        problem = LinearProblem(x, targets, weights, loss, l1, l2, bool(self.fit_intercept))
        self._fit_problems([problem], self._keep, seed=self.random_state or 0)
        return self

    def _keep(self, models: Sequence[CertifiedModel]) -> None:
        self.coef_, self.intercept_ = models[0].w, models[0].b


def _strengths(penalty: Any) -> tuple[float, float]:
    """Return the factors of |w|₁ and of |w|²/2.

    Raises:
        LinearModelError: the penalty is another one.
    """
    if penalty is None:
        return 0.0, 1.0
    if isinstance(penalty, L1):
        return penalty.strength, 0.0
    if isinstance(penalty, L2):
        return 0.0, penalty.strength
    if isinstance(penalty, L1L2):
        return penalty.l1, penalty.l2
    raise LinearModelError(f"penalty must be gf.linear.L1, L2 or L1L2, not {penalty!r}")


__all__ = ["Glm"]
