"""Principal components."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted, validate_data

from graphflow.base.argument_kinds import is_number
from graphflow.errors import LinearModelError

_SOLVERS = ("auto", "full", "covariance", "randomized")
_OVERSAMPLES, _ROUNDS = 10, 7
_MANY = 1000
"""Columns up to which the matrix of their products is decomposed, if there are ten times as many
rows."""


class PCA(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Principal components of a dense table.

    Args:
        n_components: their number; a share of the variance between 0 and 1; or None for all.
        whiten: True for components of variance 1.
        svd_solver: "full", "covariance" (many rows, few columns), "randomized" (few components of a
            large table: subspace iterations with QR), or "auto".
        random_state: seed of "randomized"; None is 0.

    Attributes:
        components_: (components, columns) rows of length 1; the entry of each that is largest in
            size is positive.
        explained_variance_, explained_variance_ratio_, singular_values_: by component.
        mean_: (columns,).
        noise_variance_: the mean variance of the components that were left out.
        n_components_, n_samples_: their numbers.
    """

    def __init__(
        self, n_components: Any = None, *, whiten: bool = False, svd_solver: str = "auto",
        random_state: int | None = None,
    ) -> None:  # fmt: skip
        self.n_components = n_components
        self.whiten = whiten
        self.svd_solver = svd_solver
        self.random_state = random_state

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Fit the components of a (rows, columns) table."""
        x = validate_data(self, X, dtype=[np.float64, np.float32], ensure_min_samples=2)
        n, d = x.shape
        least = min(n, d)
        wanted = least if self.n_components is None else self.n_components
        if not is_number(wanted):
            raise LinearModelError(f"n_components is a number or None, not {wanted!r}")
        is_share = isinstance(wanted, float) and 0 < wanted < 1
        if not is_share and (wanted != int(wanted) or not 0 <= wanted <= least):
            raise LinearModelError(
                f"n_components={wanted!r} must be between 0 and min(rows, columns)={least}, or a "
                "share of the variance between 0 and 1"
            )
        solver = self._choose_solver(n, d, least if is_share else int(wanted))
        self.mean_ = x.mean(axis=0, dtype=np.float64).astype(x.dtype)
        centred = x.astype(np.float64) - self.mean_
        total = float((centred**2).sum()) / (n - 1)
        if solver == "randomized" and not is_share:
            values, vectors = _decompose_randomly(centred, int(wanted), self.random_state or 0)
        elif solver == "covariance":
            values, vectors = _decompose_products(centred)
        else:
            _, values, vectors = np.linalg.svd(centred, full_matrices=False)
        self._keep(x.dtype, n, d, values, vectors, total, wanted, is_share)
        return self

    def _choose_solver(self, n: int, d: int, count: int) -> str:
        if self.svd_solver not in _SOLVERS:
            raise LinearModelError(
                f"svd_solver must be one of {', '.join(_SOLVERS)}, not {self.svd_solver!r}"
            )
        if self.svd_solver != "auto":
            return str(self.svd_solver)
        if d <= _MANY and n >= 10 * d:
            return "covariance"
        is_few = 1 <= count < 0.8 * min(n, d) and max(n, d) > 500
        return "randomized" if is_few else "full"

    def _keep(
        self, dtype: Any, n: int, d: int, values: Any, vectors: Any, total: float, wanted: Any,
        is_share: bool,
    ) -> None:  # fmt: skip
        variances = values**2 / (n - 1)
        ratios = variances / total if total > 0 else np.zeros_like(variances)
        count = int(wanted)
        if is_share:
            count = int(np.searchsorted(np.cumsum(ratios), wanted, side="right")) + 1
            count = min(count, len(values))
        signs = np.sign(vectors[np.arange(len(vectors)), np.abs(vectors).argmax(axis=1)])
        vectors = vectors * np.where(signs == 0, 1.0, signs)[:, None]
        left = min(n, d) - count
        rest = max(total - float(variances[:count].sum()), 0.0)
        self.components_ = vectors[:count].astype(dtype)
        self.explained_variance_ = variances[:count].astype(dtype)
        self.explained_variance_ratio_ = ratios[:count].astype(dtype)
        self.singular_values_ = values[:count].astype(dtype)
        self.noise_variance_ = rest / left if left else 0.0
        self.n_components_, self.n_samples_ = count, n

    @property
    def _n_features_out(self) -> int:
        return int(self.n_components_)

    def transform(self, X: Any) -> Any:
        """Return the (rows, components) scores of a table."""
        check_is_fitted(self, "components_")
        x = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        scores = (x - self.mean_) @ self.components_.T
        return scores / self._deviations() if self.whiten else scores

    def inverse_transform(self, X: Any) -> Any:
        """Return the table that scores stand for."""
        check_is_fitted(self, "components_")
        scores = np.asarray(X)
        if self.whiten:
            scores = scores * self._deviations()
        return scores @ self.components_ + self.mean_

    def _deviations(self) -> Any:
        found = np.sqrt(self.explained_variance_)
        return np.where(found > np.finfo(found.dtype).eps, found, np.finfo(found.dtype).eps)


def _decompose_products(centred: Any) -> tuple[Any, Any]:
    """Return singular values and vectors from the products of the columns."""
    values, vectors = np.linalg.eigh(centred.T @ centred)
    values = np.sqrt(np.maximum(values[::-1], 0.0))
    count = min(centred.shape)
    return values[:count], vectors[:, ::-1].T[:count]


def _decompose_randomly(centred: Any, count: int, seed: int) -> tuple[Any, Any]:
    """Return the largest singular values and their vectors.

    Source: Halko, Martinsson and Tropp, SIAM Review 2011, algorithm 4.4.
    """
    random = np.random.default_rng(seed)
    size = min(count + _OVERSAMPLES, *centred.shape)
    basis = centred @ random.normal(size=(centred.shape[1], size))
    for _ in range(_ROUNDS):
        basis, _ = np.linalg.qr(basis)
        inner, _ = np.linalg.qr(centred.T @ basis)
        basis = centred @ inner
    basis, _ = np.linalg.qr(basis)
    _, values, vectors = np.linalg.svd(basis.T @ centred, full_matrices=False)
    return values[:count], vectors[:count]


__all__ = ["PCA"]
