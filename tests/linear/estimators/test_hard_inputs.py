"""Columns of very different sizes, penalties of 0, labels of no class, and float32: hard inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning

import graphflow as gf
from graphflow.linear.problem import Certificate


def badly_scaled(seed: int) -> tuple[Any, Any]:
    """Return a table whose columns differ in size by a factor of a million, and targets."""
    random = np.random.default_rng(seed)
    x = random.normal(size=(400, 20)) * 10.0 ** random.uniform(-3, 3, size=20)
    y = (x / np.linalg.norm(x, axis=0)) @ random.normal(size=20)
    return x, y / y.std() + 0.3 * random.normal(size=400)


@pytest.mark.parametrize("has_intercept", [True, False])
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("Ridge", {}),
        ("LogisticRegression", {}),
        ("LinearSVC", {"loss": "squared_hinge"}),
        ("LinearSVC", {"loss": "hinge"}),
        ("LinearSVR", {"loss": "squared_epsilon_insensitive"}),
        ("LinearSVR", {"epsilon": 0.1}),
    ],
)
def test_no_fit_gets_stuck_on_badly_scaled_columns(
    name: str, more: dict[str, Any], has_intercept: bool
) -> None:
    for seed in range(3):
        x, y = badly_scaled(seed)
        target = y > 0 if name in ("LogisticRegression", "LinearSVC") else y
        model = getattr(gf.linear, name)(tol=1e-8, fit_intercept=has_intercept, **more)
        certificate = model.fit(x, target).certificate_
        assert certificate.relative_gap <= 1e-8 and certificate.passes < 1000


def test_without_a_penalty_another_solver_is_named() -> None:
    x, y = badly_scaled(0)
    model = gf.linear.Ridge(0.0).fit(x, y)
    assert model.solver_ == "newton" and model.dual_gap_ is None
    with pytest.raises(ValueError, match="there is no l2 penalty; use solver='newton'"):
        gf.linear.Ridge(0.0, solver="sdca", fit_intercept=False).fit(x, y)


def test_labels_of_no_class_are_refused() -> None:
    x, y = badly_scaled(1)
    with pytest.raises(ValueError, match=r"targets of loss='logistic' are -1 and 1; y has"):
        gf.linear.Glm("logistic").fit(x, np.where(y > 0, 2.0, 1.0))
    with pytest.raises(ValueError, match="Unknown label type"):
        gf.linear.LogisticRegression().fit(x, y)


def test_a_gap_that_float32_hides_is_reached_by_sums_in_float64() -> None:
    x, y = badly_scaled(2)
    narrow = (1000.0 * np.sign(x[:, :1]) + x).astype(np.float32)
    model = gf.linear.Ridge(1e-3, tol=1e-9).fit(narrow, y)
    assert model.certificate_.relative_gap <= 1e-9


def test_a_tol_below_the_rounding_of_sums_is_said() -> None:
    model = gf.linear.Lasso(tol=1e-17)
    with pytest.warns(ConvergenceWarning, match=r"gap is 3.00e-14 .* float64 limits it; accept"):
        model._warn(Certificate(1.0, 1.0, 3e-14, 9.0))
    with pytest.warns(ConvergenceWarning, match="gap is 1.00e-09 .* raise max_iter"):
        model._warn(Certificate(1.0, 1.0, 1e-9, 9.0))
