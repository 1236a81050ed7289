"""The estimators of `gf.linear`: scikit-learn's own checks, its results, its mistakes avoided."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn import datasets, decomposition, linear_model, svm
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import check_estimator

import graphflow as gf

ALL = (
    "Ridge", "Lasso", "ElasticNet", "LogisticRegression", "LinearSVC", "LinearSVR", "SVC", "PCA",
    "Glm",
)  # fmt: skip


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_checks_pass_without_exclusions(name: str) -> None:
    results = check_estimator(getattr(gf.linear, name)(), on_fail=None, on_skip=None)
    failed = {r["check_name"]: r["exception"] for r in results if r["status"] == "failed"}
    assert not failed
    assert sum(r["status"] == "passed" for r in results) > 40


def regression(seed: int, n: int = 80, d: int = 12) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(n, d)) + random.normal(size=d)
    x[random.random((n, d)) < 0.4] = 0.0
    return x, x @ random.normal(size=d) * (random.random() + 0.5) + random.normal(size=n) + 5.0


def labels(seed: int, classes: int) -> tuple[Any, Any]:
    x, y = regression(seed, 120)
    return x, np.digitize(y, np.quantile(y, np.arange(1, classes) / classes))


@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix, sp.csc_matrix])
@pytest.mark.parametrize("has_intercept", [True, False])
def test_regressions_are_scikit_learns(form: Any, has_intercept: bool) -> None:
    for seed in range(3):
        x, y = regression(seed)
        weights = np.random.default_rng(seed).uniform(0.1, 3.0, size=len(y))
        more = {"fit_intercept": has_intercept}
        pairs = [
            (gf.linear.Ridge(2.0, **more), linear_model.Ridge(2.0, tol=1e-12, **more)),
            (gf.linear.Lasso(0.1, tol=1e-10, **more),
             linear_model.Lasso(0.1, tol=1e-12, max_iter=100_000, **more)),
            (gf.linear.ElasticNet(0.3, l1_ratio=0.4, tol=1e-10, **more),
             linear_model.ElasticNet(0.3, l1_ratio=0.4, tol=1e-12, max_iter=100_000, **more)),
            (gf.linear.Lasso(0.1, positive=True, tol=1e-10, **more),
             linear_model.Lasso(0.1, positive=True, tol=1e-12, max_iter=100_000, **more)),
        ]  # fmt: skip
        for ours, theirs in pairs:
            ours.fit(form(x), y, sample_weight=weights)
            theirs.fit(x, y, sample_weight=weights)
            np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=2e-5)
            np.testing.assert_allclose(ours.predict(form(x)), theirs.predict(x), atol=1e-4)


@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix])
@pytest.mark.parametrize("classes", [2, 3])
def test_classifications_are_scikit_learns(form: Any, classes: int) -> None:
    x, y = labels(classes, classes)
    names = np.array(["low", "middle", "high"])[y]
    more: dict[str, Any] = {"class_weight": "balanced"}
    pairs = [
        (gf.linear.LogisticRegression(C=0.5, tol=1e-12, **more),
         linear_model.LogisticRegression(C=0.5, tol=1e-10, max_iter=10_000, **more)),
        (gf.linear.LinearSVC(C=0.3, tol=1e-10, **more),
         svm.LinearSVC(C=0.3, tol=1e-10, max_iter=200_000, **more)),
        (gf.linear.LinearSVC(C=0.3, loss="hinge", tol=1e-9, **more),
         svm.LinearSVC(C=0.3, loss="hinge", tol=1e-9, max_iter=500_000, **more)),
    ]  # fmt: skip
    if classes == 2:
        l1 = {"l1_ratio": 1.0, "C": 0.2}
        pairs += [
            (gf.linear.LogisticRegression(tol=1e-9, **l1),
             linear_model.LogisticRegression(solver="saga", tol=1e-10, max_iter=50_000, **l1)),
            (gf.linear.LinearSVC("l1", C=0.1, tol=1e-9),
             svm.LinearSVC("l1", C=0.1, tol=1e-9, max_iter=500_000, dual=False)),
        ]  # fmt: skip
    for ours, theirs in pairs:
        ours.fit(form(x), names)
        theirs.fit(x, names)
        np.testing.assert_allclose(
            ours.decision_function(form(x)), theirs.decision_function(x), atol=5e-4
        )
        assert (ours.predict(form(x)) == theirs.predict(x)).all()
        if hasattr(theirs, "predict_proba"):
            wanted = theirs.predict_proba(x)
            np.testing.assert_allclose(ours.predict_proba(form(x)), wanted, atol=2e-4)


@pytest.mark.parametrize("loss", ["epsilon_insensitive", "squared_epsilon_insensitive"])
def test_support_vector_regression_is_scikit_learns(loss: str) -> None:
    x, y = regression(4)
    more: dict[str, Any] = {"loss": loss, "C": 0.4, "epsilon": 0.2}
    ours = gf.linear.LinearSVR(tol=1e-9, **more).fit(x, y)
    theirs = svm.LinearSVR(tol=1e-9, max_iter=500_000, **more).fit(x, y)
    np.testing.assert_allclose(ours.predict(x), theirs.predict(x), atol=5e-3)


def test_digits_by_a_kernel_machine() -> None:
    """3 against 8: the dual, the support vectors and those at the bound."""
    x, y = datasets.load_digits(return_X_y=True)
    x, chosen = x / 16, (y == 3) | (y == 8)
    model = gf.linear.SVC(gamma=0.05, C=1.0, tol=1e-5).fit(x[chosen], y[chosen])
    assert model.certificate_.dual == pytest.approx(50.923515, abs=1e-4)
    assert model.n_support_.sum() == 90 and (np.abs(model.dual_coef_) >= 1.0).sum() == 69
    assert 0 <= model.dual_gap_ < 1e-3


@pytest.mark.parametrize("kernel", ["linear", "rbf", "poly"])
def test_kernel_machines_of_several_classes_are_scikit_learns(kernel: str) -> None:
    x, y = datasets.load_iris(return_X_y=True)
    ours = gf.linear.SVC(kernel=kernel, tol=1e-7, decision_function_shape="ovo").fit(x, y)
    theirs = svm.SVC(kernel=kernel, tol=1e-7, decision_function_shape="ovo").fit(x, y)
    np.testing.assert_allclose(
        ours.decision_function(x), theirs.decision_function(x), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_array_equal(ours.support_, theirs.support_)
    np.testing.assert_allclose(ours.dual_coef_, theirs.dual_coef_, atol=1e-3)
    if kernel == "linear":
        np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-4)


def test_a_kernel_machine_larger_than_its_memory_for_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphflow.linear.solvers import kernel_machine

    random = np.random.default_rng(0)
    x = random.normal(size=(400, 3))
    y = np.sign(np.sin(2 * x[:, 0]) + x[:, 1] + 0.2 * random.normal(size=400))
    whole = gf.linear.SVC(tol=1e-6).fit(x, y)
    monkeypatch.setattr(kernel_machine, "_BLOCK", 40)
    parts = gf.linear.SVC(tol=1e-6, cache_size=0.2).fit(x, y)
    np.testing.assert_allclose(parts.decision_function(x), whole.decision_function(x), atol=1e-4)


@pytest.mark.parametrize("solver", ["full", "covariance", "randomized"])
def test_principal_components_are_scikit_learns(solver: str) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 30)) * 0.7 ** np.arange(30) + random.normal(size=30)
    theirs = decomposition.PCA(5, svd_solver="full").fit(x)
    ours = gf.linear.PCA(5, svd_solver=solver).fit(x)
    for name in ("components_", "explained_variance_", "explained_variance_ratio_", "mean_",
                 "singular_values_", "noise_variance_"):  # fmt: skip
        np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-8)
    np.testing.assert_allclose(ours.transform(x), theirs.transform(x), atol=1e-8)
    np.testing.assert_allclose(
        ours.inverse_transform(ours.transform(x)), theirs.inverse_transform(theirs.transform(x)),
        atol=1e-8,
    )  # fmt: skip
    assert gf.linear.PCA(0.9).fit(x).n_components_ == decomposition.PCA(0.9).fit(x).n_components_


def test_tables_as_they_come_from_disk(tmp_path: Path) -> None:
    """Read-only float32 memmaps; matrices with unsorted, doubled entries and 64-bit indices."""
    x, y = regression(1)
    np.save(tmp_path / "x.npy", x.astype(np.float32))
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    wanted = gf.linear.Lasso(0.1, tol=1e-10).fit(np.array(mapped, np.float64), y)
    found = gf.linear.Lasso(0.1, tol=1e-10).fit(mapped, y)
    np.testing.assert_allclose(found.coef_, wanted.coef_, atol=1e-6)
    rows, columns = np.nonzero(x)
    order = np.random.default_rng(0).permutation(2 * len(rows))
    values = np.concatenate([0.25 * x[rows, columns], 0.75 * x[rows, columns]])[order]
    places = np.tile(columns, 2)[order], np.tile(rows, 2)[order]
    by_row = np.argsort(places[1], kind="stable")
    doubled = sp.csr_matrix(
        (values[by_row], places[0][by_row].astype(np.int64),
         np.concatenate([[0], np.cumsum(np.bincount(places[1], minlength=len(x)))])), x.shape,
    )  # fmt: skip
    for name in ("Ridge", "Lasso", "LinearSVR"):
        kind = getattr(gf.linear, name)
        a, b = kind().fit(doubled, y), kind().fit(x, y)
        np.testing.assert_allclose(a.coef_, b.coef_, atol=1e-5)
    assert not doubled.has_canonical_format, "the user's matrix stays as it was"


def test_columns_and_rows_that_say_nothing() -> None:
    x, y = regression(2, 30, 5)
    padded = np.concatenate([x, np.zeros((30, 1)), np.full((30, 1), 7.0), x[:, :1]], axis=1)
    for name in ("Ridge", "Lasso", "ElasticNet", "LinearSVR"):
        model = getattr(gf.linear, name)().fit(padded, y)
        assert np.isfinite(model.coef_).all() and model.coef_[5] == 0.0
        assert np.isfinite(model.predict(padded)).all()
    wide = np.random.default_rng(0).normal(size=(6, 40))
    for name in ("Ridge", "Lasso", "LogisticRegression", "LinearSVC", "SVC"):
        target = np.arange(6) % 2 if "S" in name or "Log" in name else np.arange(6.0)
        model = getattr(gf.linear, name)().fit(wide, target)
        assert model.score(wide, target) > 0.5


def test_without_a_penalty_the_answer_is_least_squares_and_has_no_certificate() -> None:
    x, y = regression(3)
    ours = gf.linear.Ridge(0.0).fit(x, y)
    theirs = linear_model.LinearRegression().fit(x, y)
    np.testing.assert_allclose(ours.coef_, theirs.coef_, atol=1e-8)
    assert ours.dual_gap_ is None and ours.certificate_.relative_gap is None
    free = gf.linear.LogisticRegression(C=np.inf).fit(x, y > y.mean())
    assert free.dual_gap_ is None and np.isfinite(free.coef_).all()


def test_one_class_names_itself() -> None:
    x, _ = regression(0)
    for name in ("LogisticRegression", "LinearSVC", "SVC"):
        with pytest.raises(ValueError, match=r"one class: (1\.0|array\(\[1\.\]\))$"):
            getattr(gf.linear, name)().fit(x, np.ones(len(x)))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("name", ALL)
def test_numbers_that_are_none_are_refused(name: str, bad: float) -> None:
    x, y = regression(0)
    x[3, 2] = bad
    with pytest.raises(ValueError, match=r"(?i)nan|infinity"):
        getattr(gf.linear, name)().fit(x, (y > 5).astype(float))


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("Ridge", {"alpha": -1.0}, "alpha must be a number of at least 0"),
        ("Lasso", {"tol": -1.0}, "tol"),
        ("Lasso", {"max_iter": 0}, "max_iter"),
        ("ElasticNet", {"l1_ratio": 2.0}, "between 0 and 1"),
        ("Ridge", {"solver": "lbfgs"}, "solver must be one of"),
        ("Lasso", {"solver": "sdca"}, "use solver='cd'"),
        ("LogisticRegression", {"C": 0}, "C must be"),
        ("LinearSVC", {"penalty": "l1", "loss": "hinge"}, "goes with loss='squared_hinge'"),
        ("LinearSVC", {"loss": "log"}, "'hinge' or 'squared_hinge'"),
        ("LinearSVR", {"epsilon": -1}, "epsilon"),
        ("SVC", {"kernel": "rbv"}, "kernel is a function or one of"),
        ("SVC", {"gamma": "much"}, "gamma is 'scale'"),
        ("PCA", {"n_components": 500}, r"between 0 and min\(rows, columns\)=12"),
        ("Glm", {"loss": "cubic"}, "loss must be a Loss or one of"),
        ("Glm", {"penalty": "l2"}, "gf.linear.L1, L2 or L1L2"),
        ("Glm", {"loss": "hinge", "fit_intercept": True}, "fit_intercept=False"),
        ("Glm", {"loss": "hinge", "penalty": gf.linear.L2(0.0)}, "goes with an l2 penalty"),
    ],
)
def test_errors_say_what_would_do(name: str, arguments: dict[str, Any], match: str) -> None:
    x, y = regression(0)
    with pytest.raises(ValueError, match=match):
        getattr(gf.linear, name)(**arguments).fit(x, np.sign(y - y.mean()))


def test_a_gap_that_is_not_reached_is_a_warning_with_both_numbers() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 40)) * 10.0 ** random.uniform(-2, 2, size=40)
    y = np.sign(random.normal(size=300))
    with pytest.warns(ConvergenceWarning, match=r"gap is \d.*tol=1e-06 was wanted; raise max_iter"):
        model = gf.linear.LinearSVC(loss="hinge", C=10.0, max_iter=3).fit(x, y)
    assert model.certificate_.relative_gap > 1e-6


def test_a_history_is_drawn(tmp_path: Path) -> None:
    x, y = labels(0, 2)
    first = gf.linear.LinearSVC(loss="hinge").fit(x, y)
    second = gf.linear.LogisticRegression().fit(x, y)
    picture = first.history_.plot(str(tmp_path / "gap.svg"), [second.history_])
    root = ElementTree.fromstring(picture)
    curves = [e for e in root.iter() if e.tag.endswith("polyline")]
    assert len(curves) == 2 and (tmp_path / "gap.svg").read_text() == picture
    assert "sdca" in picture and "newton" in picture
    gaps = first.history_.gaps
    assert len(gaps) == len(first.history_.seconds) and gaps[-1] <= 1e-6


def test_any_loss_with_any_penalty() -> None:
    x, y = regression(6)
    huber = gf.linear.Glm(gf.linear.losses.huber(0.5), gf.linear.L1L2(0.3, 0.2)).fit(x, y)
    assert huber.certificate_.relative_gap <= 1e-6
    plain = gf.linear.Glm("squared", gf.linear.L2(2.0), fit_intercept=True, tol=1e-10).fit(x, y)
    np.testing.assert_allclose(plain.coef_, linear_model.Ridge(2.0).fit(x, y).coef_, atol=1e-8)


def test_a_warm_start_needs_fewer_passes() -> None:
    x, y = regression(7, 300, 60)
    model = gf.linear.Lasso(0.01, warm_start=True).fit(x, y)
    model.fit(x, y)
    assert len(model.history_.certificates) == 1
