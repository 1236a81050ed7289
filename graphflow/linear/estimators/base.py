"""The base of linear estimators: checks of data, the fit of a problem, predictions."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_sample_weight,
    _check_y,
    check_is_fitted,
    validate_data,
)

from graphflow.base.argument_kinds import is_number
from graphflow.errors import LinearModelError
from graphflow.linear.cocoa.local_steps import check_local_steps
from graphflow.linear.fit_history import CertifiedModel, FitHistory, zero_model
from graphflow.linear.fit_threads import count_threads
from graphflow.linear.losses import Floats
from graphflow.linear.problem import Certificate, LinearProblem
from graphflow.linear.solve import SOLVERS, solve
from graphflow.linear.solvers.coordinate_descent.duhl import Duhl
from graphflow.linear.tables.disk_table import DiskTable
from graphflow.linear.tables.sparse_table import SvmlightTable
from graphflow.linear.tables.table_input import (
    as_disk_table,
    fits_memory,
    multiply_table,
    table_targets,
)
from graphflow.linear.tables.table_stream import TableStream

_ROUNDING = 1e-12
"""Relative gaps that sums in float64, of tables of any precision, may hide."""
_FORMATS = ("csr", "csc")
KeepModels = Callable[[Sequence[CertifiedModel]], None]
"""Sets an estimator's coefficients from a model for each of its problems."""


class LinearEstimator(BaseEstimator):  # type: ignore[misc]
    """Base of the estimators: one table in, coefficients with a certificate out.

    Attributes:
        coef_, intercept_: the model.
        n_iter_: passes over the data.
        dual_gap_: what a better model could gain at most, in units of the objective; None if the
            problem has no dual.
        certificate_: the proof of that (`Certificate`), of several problems the one with the
            greatest relative gap.
        history_: the certificates over time (`FitHistory`), of the same problem.
        solver_: the name of the solver.
    """

    max_iter: int
    tol: float
    solver: str | Duhl
    threads: int | None = None
    cluster: Any = None
    local_steps: int | str = "auto"

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        tags.non_deterministic = getattr(self, "solver", "") in ("wild", "tpa")
        return tags

    def _check_parameters(self, **least: tuple[Any, float]) -> None:
        """Check parameters that all estimators have, and numbers with the least that they may be.

        Raises:
            LinearModelError: one is no such number.
        """
        numbers = {"tol": (self.tol, 0.0), "max_iter": (self.max_iter, 1), **least}
        for name, (value, low) in numbers.items():
            if not is_number(value) or not value >= low:
                raise LinearModelError(f"{name} must be a number of at least {low}, not {value!r}")
        if not isinstance(self.solver, Duhl) and self.solver not in SOLVERS:
            raise LinearModelError(
                f"solver must be one of {', '.join(SOLVERS)}, or a gf.linear.Duhl, not "
                f"{self.solver!r}"
            )
        if self.cluster is not None and self.solver not in ("auto", "sdca", "cd"):
            raise LinearModelError(
                f"solver={self.solver!r} runs on one machine; with cluster=, use solver='auto'"
            )
        check_local_steps(self.local_steps)
        count_threads(self.threads)

    def _check_table(self, x: Any, y: Any, sample_weight: Any, **more: Any) -> Any:
        """Return a checked table, targets and weights; rows of weight 0 are left out.

        A table on disk that does not fit into memory becomes a `TableStream`.
        """
        table = as_disk_table(x)
        if table is not None and self.cluster is not None and isinstance(table, SvmlightTable):
            return self._check_parts(table, y, sample_weight, **more)
        if table is not None:
            y = table_targets(table, y)
            if not fits_memory(table):
                return self._check_stream(table, y, sample_weight, **more)
            x = table.load()
        x, y = validate_data(
            self, x, y, accept_sparse=_FORMATS, dtype=[np.float64, np.float32], **more
        )
        if not isinstance(x, np.ndarray) and not x.has_canonical_format:
            x = x.copy()
            x.sum_duplicates()
        weights = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        used = weights > 0
        if not used.all():
            if not used.any():
                raise LinearModelError("all sample weights are 0, so no row counts")
            x = (x if isinstance(x, np.ndarray) else x.tocsr())[used]
            y, weights = y[used], weights[used]
        return x, y, weights

    def _check_stream(self, table: DiskTable, y: Any, sample_weight: Any, **more: Any) -> Any:
        """Return a stream of a table's rows, targets and weights; rows of weight 0 are left out."""
        y = _check_y(y, estimator=self, **more)
        if len(y) != table.rows:
            raise LinearModelError(f"{table.path} has {table.rows:,} rows, and y has {len(y):,}")
        weights = _check_sample_weight(
            sample_weight, y.reshape(len(y), -1), dtype=np.float64, ensure_non_negative=True
        )
        used = weights > 0
        self.n_features_in_ = table.columns
        self.__dict__.pop("feature_names_in_", None)
        return (
            TableStream(table, table.memory, None if used.all() else used),
            y[used],
            weights[used],
        )

    def _check_parts(self, table: SvmlightTable, y: Any, sample_weight: Any, **more: Any) -> Any:
        """Let workers read a file, each its part; return the table there, targets and weights."""
        from graphflow.linear.cocoa.cluster_fit import ClusterFit  # loads sessions

        workers = ClusterFit(self.cluster)
        try:
            x = workers.read(table)
        except BaseException:
            workers.close()
            raise
        self._workers = workers
        with self._end_workers_on_error():
            return self._check_targets(x, table.path, y, sample_weight, **more)

    def _check_targets(self, x: Any, path: Any, y: Any, sample_weight: Any, **more: Any) -> Any:
        """Return a table that workers have read, with targets and weights."""
        y = _check_y(x.targets if y is None else y, estimator=self, **more)
        if len(y) != x.shape[0]:
            raise LinearModelError(f"{path} has {x.shape[0]:,} rows, and y has {len(y):,}")
        weights = _check_sample_weight(
            sample_weight, y.reshape(len(y), -1), dtype=np.float64, ensure_non_negative=True
        )
        if not (weights > 0).all():
            raise LinearModelError(
                f"sample_weight is 0 for {np.count_nonzero(weights == 0):,} rows of {path}, "
                "which workers read; leave these rows out of the file"
            )
        self.n_features_in_ = x.shape[1]
        self.__dict__.pop("feature_names_in_", None)
        return x, y, weights

    def _fit_problems(
        self, problems: Sequence[LinearProblem], keep: KeepModels, *, seed: int = 0,
        w: Floats | None = None, b: float = 0.0,
    ) -> None:  # fmt: skip
        """Solve problems that share a table, keep their models, and note the worst certificate.

        Args:
            problems: the problems.
            keep: sets the estimator's coefficients from a model for each problem.
            seed: of the order of coordinates.
            w, b: the model to begin with, for solvers that do not work on the dual.
        """
        most = self.max_iter
        if self.cluster is not None and isinstance(problems[0].x, TableStream):
            table = problems[0].x.table
            raise LinearModelError(
                f"cluster= takes tables that fit into memory, and {table.path} is larger than "
                f"memory={table.memory:,} bytes; raise memory=, or leave out cluster="
            )
        if self.cluster is None:

            def run(problem: LinearProblem, history: FitHistory) -> CertifiedModel:
                threads = count_threads(self.threads)
                more: dict[str, Any] = {"seed": seed, "w": w, "b": b, "threads": threads}
                return solve(problem, self.solver, self.tol, most, history, **more)

            self._run_all(run, problems, keep)
            return
        from graphflow.linear.cocoa.cluster_fit import ClusterFit  # loads sessions

        with self.__dict__.pop("_workers", None) or ClusterFit(self.cluster) as fit:

            def run_on_workers(problem: LinearProblem, history: FitHistory) -> CertifiedModel:
                more: dict[str, Any] = {"local_steps": self.local_steps, "seed": seed, "w": w}
                found: CertifiedModel = fit.solve(problem, self.tol, most, history, **more)
                return found

            self._run_all(run_on_workers, problems, keep)

    def _run_all(
        self, run: Callable[[Any, FitHistory], CertifiedModel], problems: Sequence[Any],
        keep: KeepModels,
    ) -> None:  # fmt: skip
        """Run a solver for each problem, keep the models, and note the worst certificate.

        If Ctrl-C ends the work, the model of a problem is the last certified one. A problem that
        was not begun has coefficients of 0, which are certified, too.
        """
        models: list[CertifiedModel] = []
        for problem in problems:
            history = FitHistory()
            try:
                models.append(run(problem, history))
            except KeyboardInterrupt:
                if models or history.best is not None:
                    models.append(history.best or zero_model(problem, history))
                    self._note(history, models[-1].certificate)
                    for other in problems[len(models) :]:
                        unused = FitHistory(history.solver)
                        models.append(zero_model(other, unused))
                        self._note(unused, models[-1].certificate)
                    keep(models)
                raise
            self._note(history, models[-1].certificate)
            self._warn(models[-1].certificate)
        keep(models)

    def _note(self, history: FitHistory, certificate: Certificate) -> None:
        known = getattr(self, "certificate_", None)
        self.n_iter_ = max(getattr(self, "n_iter_", 1), int(np.ceil(certificate.passes)), 1)
        if known is None or (certificate.relative_gap or 0.0) >= (known.relative_gap or 0.0):
            self.certificate_, self.history_ = certificate, history
            self.dual_gap_, self.solver_ = certificate.gap, history.solver

    def _forget(self) -> None:
        """Drop what an earlier fit left."""
        self._end_workers()
        for name in ("certificate_", "history_", "dual_gap_", "solver_", "n_iter_"):
            self.__dict__.pop(name, None)

    def _end_workers(self) -> None:
        """End workers that have read a file, if a fit has not begun on them."""
        workers = self.__dict__.pop("_workers", None)
        if workers is not None:
            workers.close()

    @contextmanager
    def _end_workers_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._end_workers()
            raise

    def _warn(self, certificate: Certificate) -> None:
        gap = certificate.relative_gap
        if gap is not None and gap > self.tol:
            remedy = (
                f"raise max_iter={self.max_iter}, scale the columns to similar sizes, or accept a "
                "larger tol"
            )
            if gap <= _ROUNDING:
                remedy = "the rounding of sums in float64 limits it; accept a larger tol"
            warnings.warn(
                f"the relative duality gap is {gap:.2e} after {certificate.passes:.0f} passes over "
                f"the data, and tol={self.tol:g} was wanted; {remedy}",
                ConvergenceWarning,
                stacklevel=5,
            )

    def _decision(self, x: Any) -> Any:
        """Return X @ coefᵀ + intercept of a table that is checked here."""
        check_is_fitted(self, "coef_")
        table = as_disk_table(x)
        if table is not None:
            return multiply_table(table, self.coef_.T) + self.intercept_
        x = validate_data(self, x, accept_sparse=_FORMATS, reset=False)
        return safe_sparse_dot(x, self.coef_.T, dense_output=True) + self.intercept_


class LinearRegressor(RegressorMixin, LinearEstimator):  # type: ignore[misc]
    """Base of regressions."""

    def predict(self, X: Any) -> Any:
        """Return predictions, (rows,) or (rows, targets)."""
        return self._decision(X)


class LinearClassifier(ClassifierMixin, LinearEstimator):  # type: ignore[misc]
    """Base of classifications.

    Attributes:
        classes_: the labels.
    """

    class_weight: Any
    coef_: Any

    def decision_function(self, X: Any) -> Any:
        """Return confidences: (rows,) of the second class of two, else (rows, classes)."""
        scores = self._decision(X)
        return scores.ravel() if scores.ndim > 1 and scores.shape[1] == 1 else scores

    def predict(self, X: Any) -> Any:
        """Return the label of each row."""
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return self.classes_[(scores > 0).astype(np.intp)]
        return self.classes_[scores.argmax(axis=1)]

    def _check_labels(self, x: Any, y: Any, sample_weight: Any) -> Any:
        """Return a checked table, the index of each row's label, and weights with those of classes.

        Raises:
            LinearModelError: targets are no labels, or there is one class only.
        """
        x, y, weights = self._check_table(x, y, sample_weight)
        with self._end_workers_on_error():
            return x, *self._number_classes(y, weights)

    def _number_classes(self, y: Any, weights: Floats) -> tuple[Any, Floats]:
        """Return the index of each row's label, and weights with those of classes."""
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise LinearModelError(
                f"{type(self).__name__} needs at least two classes, and the data has one class: "
                f"{self.classes_.tolist()[0]!r}"
            )
        if self.class_weight is not None:
            factors = compute_class_weight(
                self.class_weight, classes=self.classes_, y=y,
                **({"sample_weight": weights} if self.class_weight == "balanced" else {}),
            )  # fmt: skip
            weights = weights * factors[labels]
        return labels, weights

    def sparsify(self) -> Self:
        """Keep the coefficients as a sparse matrix."""
        from scipy.sparse import csr_matrix

        check_is_fitted(self, "coef_")
        self.coef_ = csr_matrix(self.coef_)
        return self

    def densify(self) -> Self:
        """Keep the coefficients as an array again."""
        check_is_fitted(self, "coef_")
        if not isinstance(self.coef_, np.ndarray):
            self.coef_ = self.coef_.toarray()
        return self


__all__ = ["KeepModels", "LinearClassifier", "LinearEstimator", "LinearRegressor"]
