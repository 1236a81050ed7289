"""Certificates: the gap is never less than what a better model gains, whatever proves it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphflow.linear import losses
from graphflow.linear.fit_history import FitHistory
from graphflow.linear.losses import Loss
from graphflow.linear.problem import Certificate, LinearProblem, certify, multiply
from graphflow.linear.solve import solve
from tests.linear.problems import LOSSES, SMOOTH, random_problem


def find_least_objective(problem: LinearProblem) -> float:
    """Return the least objective that is known."""
    return solve(problem, "auto", 1e-12, 2_000, FitHistory()).certificate.primal


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("seed", range(4))
def test_no_gap_is_less_than_what_is_left_to_gain(loss: Loss, seed: int) -> None:
    random = np.random.default_rng(seed)
    l1 = 0.0 if loss.slope is None or seed % 2 else float(random.uniform(0.1, 2.0))
    l2 = float(random.uniform(1.0, 3.0)) if not l1 or seed == 2 else 0.0
    has_intercept = loss.slope is not None and seed > 1
    problem = random_problem(
        seed, loss, l1=l1, l2=l2, has_intercept=has_intercept, is_sparse=seed == 3
    )
    best = find_least_objective(problem)
    for scale in (0.0, 0.01, 0.3, 3.0):
        w, b = scale * random.normal(size=problem.columns), scale * float(has_intercept)
        beta = random.normal(size=problem.rows) * problem.c * scale
        for proof in [beta] if loss.slope is None else [beta, None]:
            found = certify(problem, w, b, proof)
            assert found.gap is not None and found.dual is not None
            assert found.gap >= found.primal - best - 1e-9 * abs(best)
            assert found.dual <= best + 1e-9 * abs(best)


@pytest.mark.parametrize("loss", SMOOTH, ids=lambda loss: loss.name)
def test_a_vector_that_lost_writes_does_not_make_the_gap_small(loss: Loss) -> None:
    """The dual is computed from β itself: w that drifted away from Xᵀβ is seen."""
    problem = random_problem(5, loss, l2=0.5)
    model = solve(problem, "auto", 1e-12, 20_000, FitHistory())
    drifted = model.w * 0.99
    found = certify(problem, drifted, 0.0)
    assert found.gap is not None
    assert found.gap >= found.primal - model.certificate.primal > 0.0


def test_a_gap_of_nothing_of_nothing_is_0_and_stops() -> None:
    assert Certificate(0.0, 0.0, 0.0).relative_gap == 0.0
    problem = LinearProblem(np.ones((3, 1)), np.zeros(3), np.ones(3), losses.squared, 0.1)
    found = solve(problem, "auto", 0.0, 100, FitHistory())
    assert found.certificate.primal == found.certificate.gap == 0.0


def test_without_a_penalty_there_is_no_dual() -> None:
    problem = random_problem(1, losses.squared)
    model = solve(problem, "auto", 1e-6, 100, FitHistory())
    assert model.certificate.gap is None and model.certificate.relative_gap is None
    root = np.sqrt(problem.c)
    wanted = np.linalg.lstsq(problem.x * root[:, None], problem.y * root)[0]
    np.testing.assert_allclose(problem.x @ model.w, problem.x @ wanted, atol=1e-8)


@pytest.mark.parametrize("order", ["C", "F"])
def test_float32_is_multiplied_in_float64(order: Any) -> None:
    random = np.random.default_rng(0)
    x = np.asarray(1e4 + random.normal(size=(50, 300)), np.float32, order=order)
    w = random.normal(size=300)
    np.testing.assert_allclose(multiply(x, w), x.astype(np.float64) @ w, rtol=1e-12)
    np.testing.assert_allclose(multiply(x.T, w[:50]), x.T.astype(np.float64) @ w[:50], rtol=1e-12)
