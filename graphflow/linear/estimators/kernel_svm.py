"""Support vector classification with kernels."""

from __future__ import annotations

import warnings
from itertools import combinations
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.metrics.pairwise import pairwise_kernels
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.multiclass import _ovr_decision_function, check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from graphflow.base.argument_kinds import is_number
from graphflow.errors import LinearModelError
from graphflow.linear.fit_history import FitHistory
from graphflow.linear.problem import Certificate
from graphflow.linear.solvers.kernel_machine import KernelModel, KernelRows, solve_kernel_machine

_Fits = dict[tuple[int, int], tuple[Any, KernelModel]]
"""The rows and the machine of each pair of classes."""
_KERNELS = ("linear", "poly", "rbf", "sigmoid", "precomputed")


class SVC(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Support vector classification with kernels; each pair of classes has a machine.

    Args:
        C: the factor of the hinge losses.
        kernel: "rbf", "linear", "poly", "sigmoid", "precomputed", or a function of two tables.
        degree, coef0: of "poly" and "sigmoid".
        gamma: of "rbf", "poly", "sigmoid": a number, "scale" for 1 / (columns · variance of X), or
            "auto" for 1 / columns.
        tol: the violation of the worst pair that is enough.
        cache_size: MiB for rows of the kernel's matrix.
        class_weight: factors of classes by label, "balanced", or None.
        max_iter: pairs to optimise, at most; -1 for any number.
        decision_function_shape: "ovr" for a score for each class, "ovo" for one for each pair.
        break_ties: True to break ties of votes by scores.

    Attributes:
        classes_: the labels.
        support_, support_vectors_, n_support_: indices, rows and counts by class of the rows that
            carry the model.
        dual_coef_, intercept_: as scikit-learn's.
        dual_gap_, certificate_, history_: of the pair with the greatest relative gap.
        n_iter_: (pairs of classes,) pairs of rows that were optimised.
    """

    def __init__(
        self, *, C: float = 1.0, kernel: Any = "rbf", degree: int = 3, gamma: Any = "scale",
        coef0: float = 0.0, tol: float = 1e-3, cache_size: float = 200.0, class_weight: Any = None,
        max_iter: int = -1, decision_function_shape: str = "ovr", break_ties: bool = False,
    ) -> None:  # fmt: skip
        self.C = C
        self.kernel = kernel
        self.degree = degree
        self.gamma = gamma
        self.coef0 = coef0
        self.tol = tol
        self.cache_size = cache_size
        self.class_weight = class_weight
        self.max_iter = max_iter
        self.decision_function_shape = decision_function_shape
        self.break_ties = break_ties

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = self.kernel != "precomputed"
        tags.input_tags.pairwise = self.kernel == "precomputed"
        return tags

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit the model.

        Args:
            X: (rows, columns) numbers, dense or sparse; (rows, rows) of a kernel that is
                precomputed.
            y: (rows,) labels, of two classes at least.
            sample_weight: (rows,) not negative; or None.
        """
        self._check_parameters()
        x, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64)
        if self.kernel == "precomputed" and x.shape[0] != x.shape[1]:
            raise LinearModelError(
                f"a precomputed kernel is a square matrix: X has shape {x.shape}"
            )
        check_classification_targets(y)
        weights = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(np.unique(labels[weights > 0])) < 2 or len(self.classes_) < 2:
            raise LinearModelError(
                f"SVC needs at least two classes with rows of positive weight, and the data has "
                f"one class: {self.classes_!r}"
            )
        factors = compute_class_weight(self.class_weight, classes=self.classes_, y=y)
        self._gamma = self._find_gamma(x, weights)
        self._fit_pairs(x, labels, self.C * weights * factors[labels])
        return self

    def _check_parameters(self) -> None:
        if not callable(self.kernel) and self.kernel not in _KERNELS:
            raise LinearModelError(
                f"kernel is a function or one of {', '.join(_KERNELS)}, not {self.kernel!r}"
            )
        for name, low in (("C", 0.0), ("tol", 0.0), ("cache_size", 0.0)):
            value = getattr(self, name)
            if not is_number(value) or not value > low:
                raise LinearModelError(f"{name} must be a positive number, not {value!r}")
        if self.decision_function_shape not in ("ovr", "ovo"):
            raise LinearModelError(
                f"decision_function_shape is 'ovr' or 'ovo', not {self.decision_function_shape!r}"
            )

    def _find_gamma(self, x: Any, weights: Any) -> float:
        if self.gamma == "scale":
            # Weights count here, too, so that they mean the same as repeated rows.
            share = weights / (weights.sum() * x.shape[1])
            square = x.multiply(x) if not isinstance(x, np.ndarray) else x * x
            mean = float(share @ np.asarray(x.sum(axis=1)).ravel())
            variance = float(share @ np.asarray(square.sum(axis=1)).ravel()) - mean**2
            return 1.0 / (x.shape[1] * variance) if variance > 0 else 1.0
        if self.gamma == "auto":
            return 1.0 / float(x.shape[1])
        if isinstance(self.gamma, str) or not self.gamma >= 0:
            raise LinearModelError(
                f"gamma is 'scale', 'auto' or a number of at least 0, not {self.gamma!r}"
            )
        return float(self.gamma)

    def _kernel_of(self, a: Any, b: Any) -> Any:
        """Return the kernel of the rows of two tables."""
        if callable(self.kernel):
            return np.asarray(self.kernel(a, b), np.float64)
        if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
            return self._dense_kernel_of(a, b)
        known = {
            "linear": {},
            "rbf": {"gamma": self._gamma},
            "poly": {"gamma": self._gamma, "degree": self.degree, "coef0": self.coef0},
            "sigmoid": {"gamma": self._gamma, "coef0": self.coef0},
        }
        found = pairwise_kernels(a, b, metric=self.kernel, **known[self.kernel])
        return found.toarray() if not isinstance(found, np.ndarray) else found

    def _fit_pairs(self, x: Any, labels: Any, c: Any) -> None:
        """Fit a machine for each pair of classes, and gather the rows that carry them.

        If Ctrl-C ends the work, each pair keeps its last certified machine; one that was not begun
        has no rows.
        """
        rows = [np.flatnonzero((labels == k) & (c > 0)) for k in range(len(self.classes_))]
        fits: _Fits = {}
        histories: dict[tuple[int, int], FitHistory] = {}
        self._blocks: dict[tuple[int, int], Any] = {}
        self._room: Any = np.empty(0)
        pairs = list(combinations(range(len(rows)), 2))
        try:
            for pair in pairs:
                first, second = pair
                used = np.concatenate([rows[first], rows[second]])
                y = np.where(labels[used] == first, 1.0, -1.0)
                rows_of = self._rows_of_pair(x, rows, first, second)
                histories[pair] = FitHistory()

                def note(model: KernelModel, pair: Any = pair, used: Any = used) -> None:
                    fits[pair] = used, model

                solve_kernel_machine(
                    rows_of, y, c[used], float(self.tol), self.max_iter,
                    self.cache_size * 2.0**20, histories[pair], note,
                )  # fmt: skip
                self._warn_of_steps(fits[pair][1])
        except KeyboardInterrupt:
            if fits:
                for pair in pairs[len(fits) :]:
                    used = np.concatenate([rows[pair[0]], rows[pair[1]]])
                    proof = Certificate(float(c[used].sum()), 0.0, float(c[used].sum()))
                    histories[pair] = FitHistory("smo", [proof])
                    fits[pair] = used, KernelModel(np.zeros(len(used)), 0.0, 0, proof)
                self._gather(x, labels, rows, fits, list(histories.values()))
            raise
        self._gather(x, labels, rows, fits, list(histories.values()))

    def _gather(
        self, x: Any, labels: Any, rows: list[Any], fits: _Fits, histories: list[FitHistory]
    ) -> None:
        """Set the attributes of the model from the machines of all pairs of classes."""
        carries = np.zeros(len(labels), bool)
        for used, model in fits.values():
            carries[used[model.alpha > 0]] = True
        support = np.concatenate([each[carries[each]] for each in rows])
        self.support_ = support.astype(np.int32)
        empty = np.zeros((0, x.shape[1]))
        self.support_vectors_ = empty if self.kernel == "precomputed" else x[support]
        self.n_support_ = np.array([carries[each].sum() for each in rows], np.int32)
        place = np.zeros(len(labels), np.intp)
        place[support] = np.arange(len(support))
        dual = np.zeros((len(rows) - 1, len(support)))
        for (first, second), (used, model) in fits.items():
            mine = labels[used] == first
            kept = model.alpha > 0
            dual[second - 1, place[used[mine & kept]]] = model.alpha[mine & kept]
            dual[first, place[used[~mine & kept]]] = -model.alpha[~mine & kept]
        del self._blocks, self._room
        intercepts = np.array([model.b for _, model in fits.values()])
        self.n_iter_ = np.array([max(model.steps, 1) for _, model in fits.values()], np.int32)
        # Of two classes, a positive score means the second one.
        flip = -1.0 if len(rows) == 2 else 1.0
        self.dual_coef_, self.intercept_ = flip * dual, flip * intercepts
        self.history_ = max(histories, key=lambda h: h.certificates[-1].relative_gap or 0.0)
        self.certificate_ = self.history_.certificates[-1]
        self.dual_gap_ = self.certificate_.gap

    def _dense_kernel_of(self, a: Any, b: Any) -> Any:
        """Return the kernel of the rows of two dense tables."""
        found = a @ b.T
        if self.kernel == "linear":
            return found
        if self.kernel == "rbf":
            found *= 2.0 * self._gamma
            found -= self._gamma * np.einsum("ij,ij->i", a, a)[:, None]
            found -= self._gamma * np.einsum("ij,ij->i", b, b)
            return np.exp(np.minimum(found, 0.0, out=found), out=found)
        found *= self._gamma
        found += self.coef0
        if self.kernel == "sigmoid":
            return np.tanh(found, out=found)
        if self.degree not in (1, 2, 3, 4):
            return found**self.degree
        power = found
        for _ in range(self.degree - 1):
            power = power * found
        return power

    def _block(self, x: Any, rows: list[Any], first: int, second: int) -> Any:
        """Return the kernel of the rows of two classes, which further machines use again."""
        if (first, second) not in self._blocks:
            a, b = x[rows[first]], x[rows[second]]
            self._blocks[first, second] = self._kernel_of(a, a if first == second else b)
        return self._blocks[first, second]

    def _rows_of_pair(self, x: Any, rows: list[Any], first: int, second: int) -> KernelRows:
        """Return the function that gives rows of the kernel's matrix of two classes."""
        used = np.concatenate([rows[first], rows[second]])
        if self.kernel == "precomputed":
            return lambda numbers: x[used[numbers]].take(used, axis=1)
        if 8.0 * x.shape[0] ** 2 > self.cache_size * 2.0**20:
            part = x[used]
            return lambda numbers: self._kernel_of(part[numbers], part)
        m, n = len(rows[first]), len(used)
        if len(self._room) < n * n:
            self._room = np.empty(n * n)
        square = self._room[: n * n].reshape(n, n)
        square[:m, :m] = self._block(x, rows, first, first)
        square[m:, m:] = self._block(x, rows, second, second)
        square[:m, m:] = beside = self._block(x, rows, first, second)
        square[m:, :m] = beside.T
        return lambda numbers: square if len(numbers) == len(square) else square[numbers]

    def _warn_of_steps(self, model: KernelModel) -> None:
        """Warn if a machine has used up its pairs."""
        gap = model.certificate.relative_gap or 0.0
        if 0 <= self.max_iter <= model.steps:
            warnings.warn(
                f"the relative duality gap is {gap:.1e} after {model.steps} pairs; raise "
                f"max_iter={self.max_iter}, or scale the columns to similar sizes",
                ConvergenceWarning,
                stacklevel=4,
            )

    @property
    def coef_(self) -> Any:
        """The coefficients, with a linear kernel: (pairs of classes, columns)."""
        if self.kernel != "linear":
            raise AttributeError("coef_ exists with kernel='linear' only")
        check_is_fitted(self, "dual_coef_")
        vectors = self.support_vectors_
        return np.stack([
            weights[used] @ (vectors[used] if isinstance(vectors, np.ndarray)
                             else vectors[used].toarray())
            for used, weights in self._machines()
        ])  # fmt: skip

    def _machines(self) -> list[tuple[Any, Any]]:
        """Return, for each pair of classes, its support vectors and the weights of all."""
        ends = np.cumsum(self.n_support_)
        owned = [np.arange(end - n, end) for end, n in zip(ends, self.n_support_, strict=True)]
        found = []
        for first, second in combinations(range(len(owned)), 2):
            used = np.concatenate([owned[first], owned[second]])
            weights = np.zeros(self.dual_coef_.shape[1])
            weights[owned[first]] = self.dual_coef_[second - 1, owned[first]]
            weights[owned[second]] = self.dual_coef_[first, owned[second]]
            found.append((used, weights))
        return found

    def decision_function(self, X: Any) -> Any:
        """Return scores: (rows,) of two classes, else (rows, classes) or (rows, pairs)."""
        check_is_fitted(self, "dual_coef_")
        x = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        if self.kernel == "precomputed":
            kernel = x[:, self.support_]
        else:
            kernel = self._kernel_of(x, self.support_vectors_)
        scores = np.stack([kernel @ weights for _, weights in self._machines()], axis=1)
        scores = scores + self.intercept_
        if len(self.classes_) == 2:
            return scores.ravel()
        if self.decision_function_shape == "ovo":
            return scores
        return _ovr_decision_function(scores < 0, -scores, len(self.classes_))

    def predict(self, X: Any) -> Any:
        """Return the label of each row: of more than two classes, the one with most votes."""
        if self.break_ties and self.decision_function_shape == "ovo":
            raise LinearModelError("break_ties=True goes with decision_function_shape='ovr'")
        scores = self.decision_function(X)
        if scores.ndim == 1:
            return self.classes_[(scores > 0).astype(np.intp)]
        if self.break_ties or self.decision_function_shape == "ovr":
            return self.classes_[scores.argmax(axis=1)]
        votes = np.zeros((len(scores), len(self.classes_)))
        for at, (first, second) in enumerate(combinations(range(len(self.classes_)), 2)):
            votes[:, first] += scores[:, at] > 0
            votes[:, second] += scores[:, at] <= 0
        return self.classes_[votes.argmax(axis=1)]


__all__ = ["SVC"]
