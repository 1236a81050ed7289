"""Fits on several threads are certified as others are, and repeat bit for bit."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from sklearn.utils import get_tags

import graphflow as gf
from graphflow.errors import LinearModelError
from graphflow.linear import fit_threads, losses, threaded_products
from graphflow.linear.fit_history import FitHistory, FitMonitor
from graphflow.linear.loops.thread_meetings import count_parts
from graphflow.linear.losses import Floats, Loss
from graphflow.linear.problem import LinearProblem, multiply
from graphflow.linear.solve import solve
from graphflow.linear.solvers.dual_ascent import threaded_ascent, wild_ascent
from graphflow.linear.solvers.newton.hessian import SparseHessian
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from tests.linear.problems import LOSSES, random_problem


@pytest.fixture(autouse=True)
def threads_work_on_small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fit_threads, "SHARE_NS", 1000.0)
    monkeypatch.setattr(threaded_ascent, "_MEETING_NS", 70.0)
    monkeypatch.setattr(threaded_ascent, "_WEIGHT_NS", 0.0)
    monkeypatch.setattr(threaded_ascent, "_SHRINKING_NS", 0.0)
    monkeypatch.setattr(threaded_products, "_FEW", 10)


class _Monitor(FitMonitor):
    """Notes the dual of each certificate's own variables, and how far its weights are from them."""

    def __init__(self, problem: LinearProblem, tol: float, max_passes: float) -> None:
        super().__init__(problem, tol, max_passes, FitHistory())
        self.duals: list[float] = []
        self.drifts: list[float] = []

    def accept(self, w: Floats, b: float, beta: Floats | None = None, **known: Any) -> bool:
        assert beta is not None
        v = self.problem.correlate(beta)
        self.duals.append(self.problem.dual(beta, v))
        self.drifts.append(float(np.abs(w - v / self.problem.l2).max()))
        return super().accept(w, b, beta, **known)


@pytest.mark.every(3)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
def test_each_loss_is_solved_on_threads_with_the_same_bits_again(loss: Loss) -> None:
    tol = 1e-6 if loss.slope is not None else 1e-4
    for threads, is_sparse in ((2, False), (2, True), (3, True)):
        problem = random_problem(
            1, loss, l2=10.0, rows=130, columns=8, bias=0.5, is_sparse=is_sparse
        )
        alone = solve(problem, "sdca", tol, 5000, FitHistory())
        found = [solve(problem, "sdca", tol, 5000, FitHistory(), threads=threads) for _ in range(2)]
        gap = found[0].certificate.relative_gap
        assert gap is not None and gap <= tol
        assert found[0].w.tobytes() == found[1].w.tobytes()
        assert found[0].w.tobytes() != alone.w.tobytes(), "one thread did all the work"
        assert found[0].certificate.passes == found[1].certificate.passes
        assert found[0].certificate.primal == pytest.approx(alone.certificate.primal, rel=2 * tol)


@pytest.mark.parametrize("loss", [losses.squared, losses.hinge], ids=lambda loss: loss.name)
def test_the_dual_never_falls_where_the_steps_of_threads_agree(loss: Loss) -> None:
    # All rows are nearly the same, so the steps of four threads together go four times too far.
    problem = random_problem(0, loss, l2=0.01, rows=400, columns=5)
    problem.x[:] = problem.x[0] + 1e-2 * problem.x
    monitor = _Monitor(problem, 0.0, 60.0)
    with closing(Pool(4)) as pool:
        threaded_ascent.ascend_on_threads(problem, monitor, pool)
    rises = np.diff(monitor.duals)
    assert len(rises) > 3 and (rises >= -1e-12 * np.abs(monitor.duals[1:])).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_on_threads_are_those_of_one(dtype: Any) -> None:
    random = np.random.default_rng(0)
    dense = random.normal(size=(37, 23)).astype(dtype)
    dense[random.random(dense.shape) < 0.5] = 0
    w, pool = random.normal(size=23), Pool(3)
    forms = [dense, np.asfortranarray(dense), sp.csr_matrix(dense), sp.csc_matrix(dense)]
    for x in [*forms, *(np.ascontiguousarray(form.T).T for form in forms[:2]),
              *(form.T.copy().T for form in forms[2:])]:  # fmt: skip
        wanted = dense.astype(np.float64) @ w
        with use_pool(pool):
            found, again = multiply(x, w), multiply(x, w)
        np.testing.assert_allclose(found, wanted, atol=1e-13)
        assert found.tobytes() == again.tobytes()
    pool.close()


def test_products_with_second_derivatives_are_those_of_one_thread() -> None:
    problem = random_problem(4, losses.logistic, l2=0.3, rows=50, columns=9, is_sparse=True)
    h = np.random.default_rng(0).uniform(size=50)
    alone, shared = SparseHessian(problem), SparseHessian(problem)
    alone.set_weights(h)
    shared.set_weights(h)
    with closing(Pool(3)) as pool, use_pool(pool):
        for seed in range(2):
            p = np.random.default_rng(seed).normal(size=9)
            found = shared.apply(p)
            with use_pool(None):
                np.testing.assert_allclose(found, alone.apply(p), atol=1e-13)


def test_threads_work_where_they_gain_more_than_they_wait() -> None:
    """A pass over 1,000 rows, by four threads whose turns end within the time of 50 rows."""
    assert count_parts(1000, 50.0, 0.0, 4) == count_parts(1000, 50.0, 2.0, 4) == 4
    assert count_parts(1000, 50.0, 3.0, 4) == 1, "steps that overlap so much go no further"
    assert count_parts(1000, 800.0, 0.0, 4) == 1, "their turns end too late"
    assert count_parts(20, 0.0, 0.0, 4) == 1, "there is no bucket for each"


def test_estimators_take_threads_and_say_what_they_cannot_be() -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(120, 4)), np.arange(120) % 3
    for y_of_fit in (y, y > 0):
        for name in ("LogisticRegression", "LinearSVC"):
            one = getattr(gf.linear, name)(threads=1, tol=1e-8).fit(x, y_of_fit)
            two = getattr(gf.linear, name)(threads=2, tol=1e-8).fit(x, y_of_fit)
            np.testing.assert_allclose(one.coef_, two.coef_, atol=1e-3)
    for wrong in (0, 1.5, True, "2"):
        with pytest.raises(LinearModelError, match="threads must be a whole number"):
            gf.linear.Ridge(threads=wrong).fit(x, y)


@pytest.mark.parametrize(
    "loss", [losses.hinge, losses.logistic, losses.huber(0.7)], ids=lambda loss: loss.name
)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_racing_threads_are_certified_from_weights_computed_again(
    loss: Loss, is_sparse: bool
) -> None:
    problem = random_problem(2, loss, l2=10.0, rows=200, columns=8, bias=0.5, is_sparse=is_sparse)
    monitor = _Monitor(problem, 1e-5, 5000.0)
    with closing(Pool(3)) as pool:
        wild_ascent.ascend_wildly(problem, monitor, pool)
    assert monitor.best is not None
    gap = monitor.best.certificate.relative_gap
    assert gap is not None and gap <= 1e-5
    assert max(monitor.drifts) < 1e-12
    # The certificate holds against a model of one thread, too.
    best = solve(problem, "sdca", 1e-7, 5000, FitHistory()).certificate.primal
    assert monitor.best.certificate.dual is not None and monitor.best.certificate.dual <= best


def test_estimators_say_which_solvers_do_not_repeat() -> None:
    assert get_tags(gf.linear.LinearSVC(solver="wild")).non_deterministic
    assert not get_tags(gf.linear.LinearSVC()).non_deterministic
    x, y = random_table(3)
    model = gf.linear.LinearSVC(solver="wild", threads=2, tol=1e-4).fit(x, y)
    assert model.solver_ == "wild" and model.certificate_.relative_gap <= 1e-4


def random_table(seed: int) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(300, 6))
    return x, x @ random.normal(size=6) + random.normal(size=300) > 0
