"""Certificates: never above the truth, tight at the optimum, independent of the solver."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn import linear_model, svm

from graphflow.errors import ArgumentError
from graphflow.linear.certificate import certify, multiply, multiply_transposed
from graphflow.linear.losses import (
    EpsilonInsensitive,
    Hinge,
    Huber,
    Logistic,
    Loss,
    Squared,
    SquaredHinge,
)
from graphflow.linear.penalties import L1, L1L2, L2, Bounds, Penalty

LOSSES = [Squared(), Logistic(), Hinge(), SquaredHinge(), Huber(0.7), EpsilonInsensitive(0.2)]
PENALTIES = [L1(0.8), L2(0.5), L1L2(0.3, 0.4), Bounds(-1.0, 0.5)]
Array = np.ndarray[Any, Any]


def targets_of(loss: Loss, random: np.random.Generator, count: int) -> Array:
    drawn = random.normal(size=count)
    return np.sign(drawn) if loss.is_classifier else drawn


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_conjugates_are_the_largest_differences(loss: Loss) -> None:
    random = np.random.default_rng(0)
    y = targets_of(loss, random, 9)
    u = loss.nearest_feasible(random.normal(size=9), y)
    z = np.linspace(-60, 60, 240_001)[:, None]
    found = (u * z - loss.value(z, y)).max(0)
    np.testing.assert_allclose(loss.conjugate(u, y), found, atol=3e-4)


@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_slopes_are_derivatives_and_their_conjugates_are_tight(loss: Loss) -> None:
    """φ(z) + φ*(u) = u·z holds for slopes u, and for no other duals."""
    random = np.random.default_rng(1)
    y, z = targets_of(loss, random, 200), 2 * random.normal(size=200)
    u = loss.slope(z, y)
    h = 1e-6
    numeric = (loss.value(z + h, y) - loss.value(z - h, y)) / (2 * h)
    assert np.mean(abs(u - numeric) < 1e-5) > 0.98  # but for kinks
    np.testing.assert_allclose(loss.value(z, y) + loss.conjugate(u, y), u * z, atol=1e-12)
    other = loss.nearest_feasible(u + 0.1 * random.normal(size=200), y)
    slack = loss.value(z, y) + loss.conjugate(other, y) - other * z
    assert np.all(slack > -1e-12) and slack.max() > 1e-4


@pytest.mark.parametrize("penalty", PENALTIES, ids=repr)
@pytest.mark.parametrize("loss", LOSSES, ids=repr)
def test_no_gap_is_negative_and_all_bound_the_distance(loss: Loss, penalty: Penalty) -> None:
    """Random weights and duals, feasible or not, sparse and dense, with weights of examples."""
    random = np.random.default_rng(2)
    features = random.normal(size=(30, 12)) * (random.random((30, 12)) < 0.6)
    y, s = targets_of(loss, random, 30), random.uniform(0, 2, size=30)
    primals, duals = [], []
    for scale in (0.0, 1e-3, 0.1, 1.0, 50.0):
        w = scale * random.normal(size=12)
        w = np.clip(w, -1.0, 0.5) if isinstance(penalty, Bounds) else w
        for u in (None, scale * random.normal(size=30)):
            for x in (features, sp.csr_matrix(features), sp.csc_matrix(features)):
                found = certify(loss, penalty, x, y, w, u, s)
                primals.append(found.primal)
                duals.append(found.dual)
                assert found.gap >= -1e-12 * abs(found.primal)
    assert min(primals) >= max(duals) - 1e-12  # every dual bounds every primal


def problem() -> tuple[Array, Array]:
    random = np.random.default_rng(3)
    features = random.normal(size=(80, 25))
    return features, features[:, :4] @ random.normal(size=4) + 0.3 * random.normal(size=80)


def test_the_gap_closes_at_the_optima_of_scikit_learn() -> None:
    x, y = problem()
    signs = np.sign(y)
    lasso = linear_model.Lasso(0.1, fit_intercept=False, tol=1e-15, max_iter=100_000).fit(x, y)
    assert certify(Squared(), L1(8.0), x, y, lasso.coef_).relative < 1e-12
    net = linear_model.ElasticNet(
        0.1, l1_ratio=0.3, fit_intercept=False, tol=1e-15, max_iter=100_000
    ).fit(x, y)
    assert certify(Squared(), L1L2(2.4, 5.6), x, y, net.coef_).relative < 1e-12
    ridge = linear_model.Ridge(3.0, fit_intercept=False).fit(x, y)
    assert certify(Squared(), L2(3.0), x, y, ridge.coef_).relative < 1e-12
    logistic = linear_model.LogisticRegression(
        C=2.0, fit_intercept=False, solver="newton-cholesky", tol=1e-12
    ).fit(x, signs)
    found = certify(Logistic(), L2(1.0), x, signs, logistic.coef_[0], None, 2.0)
    assert found.relative < 1e-10
    smooth = svm.LinearSVC(
        C=2.0, loss="squared_hinge", fit_intercept=False, tol=1e-12, max_iter=1_000_000
    ).fit(x, signs)
    found = certify(SquaredHinge(), L2(1.0), x, signs, smooth.coef_[0], None, 2.0)
    assert 0 <= found.relative < 1e-6


def test_duals_of_a_solver_certify_a_hinge() -> None:
    """Slopes alone prove little where the loss has a kink at the optimum."""
    x, y = problem()
    signs = np.sign(y)
    duals, w = np.zeros(80), np.zeros(25)
    squares = (x**2).sum(1)
    for _ in range(800):
        for i in range(80):
            a = -signs[i] * duals[i]
            a = np.clip(a + (1 - signs[i] * (x[i] @ w)) / (0.5 * squares[i]), 0, 1)
            w += 0.5 * (-signs[i] * a - duals[i]) * -x[i]
            duals[i] = -signs[i] * a
    found = certify(Hinge(), L2(1.0), x, signs, w, duals, 0.5)
    assert 0 <= found.relative < 1e-6
    assert certify(Hinge(), L2(1.0), x, signs, w, None, 0.5).relative > 1e-3


def test_what_a_solver_keeps_beside_cannot_make_a_gap_smaller() -> None:
    """A shared vector with lost writes claims more than its duals prove."""
    x, y = problem()
    duals = 0.1 * np.random.default_rng(4).normal(size=80)
    honest = -(x.T @ duals) / 3.0
    lost = 0.9 * honest
    for w in (honest, lost):
        found = certify(Squared(), L2(3.0), x, y, w, duals)
        best = linear_model.Ridge(3.0, fit_intercept=False).fit(x, y).coef_
        least = certify(Squared(), L2(3.0), x, y, best).primal
        assert found.dual <= least <= found.primal


def test_large_values_do_not_cancel_in_float32() -> None:
    x, y = problem()
    narrow = (1e4 + x).astype("float32")
    ridge = linear_model.Ridge(3.0, fit_intercept=False, solver="svd").fit(narrow.astype(float), y)
    found = certify(Squared(), L2(3.0), narrow, y.astype("float32"), ridge.coef_)
    assert abs(found.relative) < 1e-3


def test_read_only_maps_are_read_in_chunks(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = problem()
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    monkeypatch.setattr("graphflow.linear.certificate.CHUNK", 100)
    np.testing.assert_allclose(multiply(mapped, np.ones(25)), x.sum(1))
    np.testing.assert_allclose(multiply_transposed(mapped, y), x.T @ y)
    fortran = np.asfortranarray(x)
    np.testing.assert_allclose(multiply_transposed(fortran, y), x.T @ y)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"penalty": L2(0.0)}, "has no dual, since nothing bounds the weights"),
        ({"penalty": Bounds(low=0.0)}, "has no dual"),
        ({"targets": np.ones(79)}, r"not \(80, 25\), \(79,\) and \(25,\)"),
        ({"weights": np.full(25, np.nan)}, r"weights\[0\] is nan"),
        ({"duals": np.ones(3)}, r"duals must have the shape \(80,\), not \(3,\)"),
        ({"sample_weights": -1.0}, "no less than 0, and the least is -1"),
        ({"penalty": Penalty()}, "the conjugate of .* is not known"),
    ],
)
def test_bad_input_is_refused(change: dict[str, Any], words: str) -> None:
    x, y = problem()
    given: dict[str, Any] = {
        "loss": Squared(), "penalty": L2(1.0), "features": x, "targets": y, "weights": np.zeros(25),
    }  # fmt: skip
    with pytest.raises(ArgumentError, match=words):
        certify(**given | change)


def test_features_that_are_not_finite_are_refused() -> None:
    x, y = problem()
    x[3, 4] = np.inf
    with pytest.raises(ArgumentError, match="there is no gap; features"):
        certify(Squared(), L2(1.0), x, y, np.ones(25))
