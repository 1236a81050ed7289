"""Logistic regression of several classes with an l1 penalty: against saga, and its certificates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn import datasets, linear_model

import graphflow as gf
from graphflow.linear.solvers.newton.softmax import SoftmaxProblem
from graphflow.linear.solvers.newton.sparse_softmax import _certify


def several_classes(seed: int, rows: int = 150, columns: int = 20) -> tuple[Any, Any]:
    """Return a table and labels of four classes; few columns matter."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(rows, columns)) * (random.random((rows, columns)) < 0.6)
    w = random.normal(size=(columns, 4)) * (random.random((columns, 4)) < 0.3)
    return x, (x @ w + random.gumbel(size=(rows, 4)) + [1.0, 0.0, 0.0, -1.0]).argmax(axis=1)


def objective(model: Any, x: Any, y: Any) -> float:
    """Return what a model minimises, computed apart from it."""
    f = x @ model.coef_.T + model.intercept_
    loss = np.log(np.exp(f).sum(axis=1)) - f[np.arange(len(y)), y]
    w, share = model.coef_, model.l1_ratio
    penalty = share * np.abs(w).sum() + 0.5 * (1.0 - share) * (w * w).sum()
    return float(model.C * loss.sum() + penalty)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix])
@pytest.mark.parametrize("l1_ratio", [1.0, 0.4])
@pytest.mark.parametrize("has_intercept", [True, False])
def test_the_objective_is_sagas(form: Any, l1_ratio: float, has_intercept: bool) -> None:
    for seed, factor in [(0, 0.05), (1, 0.2), (2, 0.8)]:
        x, y = several_classes(seed)
        more: dict[str, Any] = {"C": factor, "l1_ratio": l1_ratio, "fit_intercept": has_intercept}
        ours = gf.linear.LogisticRegression(tol=1e-7, **more).fit(form(x), y)
        theirs = linear_model.LogisticRegression(
            solver="saga", tol=1e-6, max_iter=20_000, random_state=0, **more
        ).fit(x, y)
        found = objective(ours, x, y)
        assert found == pytest.approx(objective(theirs, x, y), rel=1e-4)
        assert ours.certificate_.primal == pytest.approx(found, rel=1e-12)
        assert ours.certificate_.relative_gap <= 1e-7
        assert has_intercept or not ours.intercept_.any()
        np.testing.assert_allclose(ours.predict_proba(x), theirs.predict_proba(x), atol=2e-3)


@pytest.mark.parametrize("has_intercept", [True, False])
@pytest.mark.parametrize(("l1", "l2"), [(1.0, 0.0), (0.6, 0.4)])
def test_no_dual_is_above_the_best_objective(l1: float, l2: float, has_intercept: bool) -> None:
    x, y = several_classes(3, rows=60, columns=6)
    best = gf.linear.LogisticRegression(l1_ratio=l1, fit_intercept=has_intercept, tol=1e-11)
    least = best.fit(x, y).certificate_.primal
    problem = SoftmaxProblem(x, y, 4, np.ones(len(y)), l2, has_intercept, l1)
    random = np.random.default_rng(0)
    for size in (0.0, 0.01, 0.1, 1.0, 10.0):
        w = best.coef_.T + size * random.normal(size=(6, 4))
        _, found, _ = _certify(problem, w, best.intercept_ + 0.0)
        assert found.dual is not None and found.dual <= least * (1.0 + 1e-12)
        assert found.gap is not None and found.gap >= found.primal - least - 1e-12


def test_a_strong_penalty_leaves_the_shares_of_the_classes() -> None:
    x, y = several_classes(4)
    model = gf.linear.LogisticRegression(C=1e-4, l1_ratio=1.0).fit(x, y)
    assert not model.coef_.any() and model.certificate_.relative_gap <= 1e-6
    np.testing.assert_allclose(model.predict_proba(x)[0], np.bincount(y) / len(y), rtol=1e-9)


def test_columns_that_say_nothing_and_rows_that_repeat() -> None:
    x, y = several_classes(5)
    times = np.random.default_rng(5).integers(0, 3, size=len(y))
    wide = np.column_stack([np.zeros(len(y)), np.full(len(y), 7.0), x, x[:, 0], x + 50.0])
    more: dict[str, Any] = {"l1_ratio": 1.0, "tol": 1e-8}
    weighted = gf.linear.LogisticRegression(**more).fit(wide, y, times)
    repeated = gf.linear.LogisticRegression(**more).fit(wide.repeat(times, 0), y.repeat(times))
    assert not weighted.coef_[:, :2].any()
    primal = weighted.certificate_.primal
    assert primal == pytest.approx(repeated.certificate_.primal, rel=2e-8)
    assert max(weighted.certificate_.relative_gap, repeated.certificate_.relative_gap) <= 1e-8


@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix])
@pytest.mark.parametrize("l1_ratio", [1.0, 0.5])
def test_columns_far_from_0_do_not_slow_a_fit(form: Any, l1_ratio: float) -> None:
    x, y = several_classes(8)
    near = gf.linear.LogisticRegression(l1_ratio=l1_ratio).fit(form(x), y).certificate_
    far = gf.linear.LogisticRegression(l1_ratio=l1_ratio).fit(form(x + 10.0), y).certificate_
    assert far.relative_gap <= 1e-6 and far.passes < 3.0 * near.passes
    assert far.primal == pytest.approx(near.primal, rel=3e-6)


@pytest.mark.parametrize("l1_ratio", [1.0, 0.5])
def test_columns_of_very_different_sizes(l1_ratio: float) -> None:
    x, y = datasets.load_wine(return_X_y=True)  # from 0.13 to 1,680
    model = gf.linear.LogisticRegression(l1_ratio=l1_ratio).fit(x, y)
    assert model.certificate_.relative_gap <= 1e-6
    assert objective(model, x, y) == pytest.approx(model.certificate_.primal, rel=1e-9)


def test_float32_and_a_warm_start() -> None:
    x, y = several_classes(6)
    model = gf.linear.LogisticRegression(l1_ratio=1.0, tol=1e-9, warm_start=True)
    model.fit(x.astype(np.float32), y)
    assert model.certificate_.relative_gap <= 1e-9
    passes = model.certificate_.passes
    assert model.fit(x.astype(np.float32), y).certificate_.passes < 0.2 * passes


def test_a_solver_for_two_classes_is_refused() -> None:
    x, y = several_classes(7)
    with pytest.raises(ValueError, match=r"4 classes; use solver='newton' or 'auto'"):
        gf.linear.LogisticRegression(l1_ratio=0.5, solver="cd").fit(x, y)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix])
def test_small_tables_with_weights_give_the_model_of_repeated_rows(form: Any) -> None:
    x, y = several_classes(3, rows=40, columns=10)
    weights = np.random.default_rng(3).integers(1, 4, size=40)
    again = np.repeat(np.arange(40), weights)
    weighted, repeated = (gf.linear.LogisticRegression(l1_ratio=0.5) for _ in range(2))
    weighted.fit(form(x), y, sample_weight=weights)
    repeated.fit(form(x[again]), y[again])
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-10)
