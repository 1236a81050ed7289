"""Newton's steps in float32, with factors, and on tables of which float32 would lose too much."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from graphflow.linear import losses
from graphflow.linear.fit_history import FitHistory, FitMonitor
from graphflow.linear.losses import Loss
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solvers.newton.conjugate_gradients import StepFinder
from graphflow.linear.solvers.newton.hessian import DenseHessian, SparseHessian
from graphflow.linear.solvers.newton.newton import minimize_smooth


def hard_table(seed: int, n: int, d: int, kind: str) -> Any:
    """Return a table of correlated columns, far from 0, of all sizes, or of few entries."""
    random = np.random.default_rng(seed)
    x: Any = random.normal(size=(n, d))
    if kind == "correlated":
        x = x * (1.0 + np.arange(d)) ** -1.5 @ np.linalg.qr(random.normal(size=(d, d)))[0]
    if kind == "far":
        x += 1e5 * random.normal(size=d)
    if kind == "sizes":
        x *= 10.0 ** random.uniform(-3, 3, size=d)
    if kind == "extreme":
        x *= 10.0 ** random.uniform(-25, 25, size=d)
    if kind == "float32":
        x = x.astype(np.float32) + np.float32(3.0)
    if kind == "sparse":
        x[random.random((n, d)) < 0.9] = 0.0
        x = sp.csr_matrix(x * (1.0 + np.arange(d)) ** -1.0)
    return x


def hard_problem(seed: int, kind: str, loss: Loss, n: int, d: int) -> LinearProblem:
    random = np.random.default_rng(seed + 100)
    x = hard_table(seed, n, d, kind)
    y: Any = random.normal(size=n)
    y = np.sign(y) if loss.classifies else y + 3.0
    c = random.uniform(0.5, 2.0, size=n)
    return LinearProblem(x, y, c, loss, 0.0, 0.01, has_intercept=seed % 2 == 0)


KINDS = ["correlated", "far", "sizes", "float32", "sparse"]


@pytest.mark.parametrize("kind", [*KINDS, "extreme"])
@pytest.mark.parametrize("shape", [(300, 40), (60, 150)], ids=["tall", "wide"])
@pytest.mark.parametrize("seed", [0, 1])
def test_products_and_factors_are_those_of_the_matrix(
    kind: str, shape: tuple[int, int], seed: int
) -> None:
    problem = hard_problem(seed, kind, losses.logistic, *shape)
    random = np.random.default_rng(1)
    h, p = random.uniform(size=shape[0]), random.normal(size=shape[1])
    dense: Any = problem.x.toarray() if problem.is_sparse else problem.x.astype(np.float64)
    if kind in ("sizes", "extreme"):
        p = p / np.linalg.norm(dense, axis=0)
    if problem.has_intercept:
        dense = dense - h @ dense / h.sum()
    wanted = dense.T @ (h * (dense @ p)) + problem.l2 * p
    for hessian in [SparseHessian(problem)] if problem.is_sparse else [
        DenseHessian(problem), DenseHessian(problem, is_exact=True)
    ]:  # fmt: skip
        hessian.set_weights(h)
        for _ in range(15):  # in float64, and in float32 from a copy on
            found = hessian.apply(p)
        far = hessian.is_exact and kind != "far"
        scale = np.linalg.norm(dense, axis=0) * np.linalg.norm(np.sqrt(h) * (dense @ p)) + 1e-300
        assert (np.abs(found - wanted) / scale).max() < (1e-9 if far else 1e-4)
        if kind in ("far", "extreme"):
            assert hessian.is_exact or kind == "far"
            continue
        solved = hessian.factorize()(wanted)
        back = dense.T @ (h * (dense @ solved)) + problem.l2 * solved
        assert np.linalg.norm(back - wanted) < 0.02 * np.linalg.norm(wanted)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", [losses.squared, losses.logistic], ids=lambda loss: loss.name)
@pytest.mark.parametrize("seed", [0, 1])
def test_hard_tables_are_solved_to_the_last_digits(kind: str, loss: Loss, seed: int) -> None:
    problem = hard_problem(seed, kind, loss, 400, 60)
    history = FitHistory()
    minimize_smooth(problem, FitMonitor(problem, 1e-10, 3000, history), method="newton")
    gap = history.certificates[-1].relative_gap
    assert gap is not None and gap <= 1e-10


def test_a_factor_takes_over_where_conjugate_gradients_are_slow() -> None:
    problem = hard_problem(1, "correlated", losses.squared, 4000, 250)
    beta = problem.correlate(problem.c * problem.y)
    passes = {}
    for may_factorize in (True, False):
        finder = StepFinder(problem, may_factorize)
        finder.find(beta, problem.c, lambda gained: 1e-4 * float(np.linalg.norm(beta)))
        passes[may_factorize] = finder.passes
    assert passes[True] < 30 < passes[False]


def test_a_step_is_no_more_exact_than_the_gap_demands() -> None:
    problem = hard_problem(1, "correlated", losses.squared, 500, 60)
    used = []
    for tol in (1e-2, 1e-5, 1e-9):
        history = FitHistory()
        minimize_smooth(problem, FitMonitor(problem, tol, 3000, history), method="cg")
        used.append(history.certificates[-1].passes)
        assert (history.certificates[-1].relative_gap or 0.0) <= tol
    assert used[0] < used[1] < used[2]
