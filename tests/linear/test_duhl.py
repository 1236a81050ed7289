"""DuHL: an accelerator that holds a part of the table finds the model with few loads."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import graphflow as gf
from graphflow.errors import LinearModelError
from graphflow.linear import losses
from graphflow.linear.fit_history import FitHistory
from graphflow.linear.losses import Loss
from graphflow.linear.problem import LinearProblem, certify
from graphflow.linear.solve import solve
from graphflow.linear.solvers.coordinate_descent.coordinate_sides import (
    ColumnSide,
    CoordinatePart,
    RowSide,
)
from tests.linear.problems import LOSSES, random_problem


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("is_sparse", [False, True])
def test_gaps_of_rows_add_up_to_the_gap(loss: Loss, is_sparse: bool) -> None:
    problem = random_problem(1, loss, l2=0.7, bias=0.5, is_sparse=is_sparse)
    side = RowSide(problem)
    side.pick(np.arange(problem.rows)).visit(np.arange(problem.rows), side.own, side.shared)
    found = side.pick(np.arange(problem.rows)).gaps(side.own, side.shared)
    gap = certify(problem, side.shared, 0.0, side.own).gap
    assert found.sum() == pytest.approx(gap, rel=1e-9) and gap > 0


@pytest.mark.parametrize("has_intercept", [False, True])
@pytest.mark.parametrize("is_sparse", [False, True])
def test_gaps_of_columns_add_up_to_the_gap(has_intercept: bool, is_sparse: bool) -> None:
    problem = random_problem(
        2, losses.squared, l1=0.4, l2=0.7, has_intercept=has_intercept, is_sparse=is_sparse
    )
    problem = LinearProblem(
        problem.x.tocsc() if is_sparse else problem.x, problem.y, problem.c, problem.loss, 0.4,
        0.7, has_intercept,
    )  # fmt: skip
    side = ColumnSide(problem)
    everything = np.arange(problem.columns)
    side.pick(everything).visit(everything, side.own, side.shared)
    found = side.pick(everything).gaps(side.own, side.shared)
    beta = problem.c * side.shared
    primal = problem.primal(side.own, problem.y - side.shared)
    gap = primal - problem.dual(beta, problem.correlate(beta))
    assert found.sum() == pytest.approx(gap, rel=1e-9) and gap > 0


ESTIMATORS = [
    lambda **s: gf.linear.LinearSVC(loss="hinge", tol=1e-5, **s),
    lambda **s: gf.linear.LogisticRegression(fit_intercept=False, **s),
    lambda **s: gf.linear.LinearSVR(C=0.01, epsilon=0.3, tol=1e-4, **s),
    lambda **s: gf.linear.Lasso(0.2, **s),
    lambda **s: gf.linear.Lasso(0.2, positive=True, fit_intercept=False, **s),
    lambda **s: gf.linear.ElasticNet(0.2, **s),
    lambda **s: gf.linear.Ridge(5.0, **s),
]


@pytest.mark.parametrize("case", range(len(ESTIMATORS)))
@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix])
def test_models_are_those_of_other_solvers(case: int, form: Any) -> None:
    random = np.random.default_rng(case)
    x = random.normal(size=(300, 60)) * (random.random((300, 60)) < 0.3)
    y = x[:, :8] @ random.normal(size=8) + 0.5 * random.normal(size=300) + 0.2
    y = np.sign(y) if case < 2 else y
    wanted = ESTIMATORS[case]().fit(form(x), y)
    model = ESTIMATORS[case](solver=gf.linear.Duhl(0.4)).fit(form(x), y)
    assert model.solver_ == "duhl" and model.certificate_.relative_gap <= model.tol
    primal = wanted.certificate_.primal
    assert model.certificate_.primal == pytest.approx(primal, rel=2 * model.tol)
    history = model.history_
    assert len(history.loads) == len(history.certificates) and sorted(history.loads)


def lasso(seed: int = 0) -> LinearProblem:
    random = np.random.default_rng(seed)
    x = np.asfortranarray(random.normal(size=(200, 800)))
    y = x[:, 7::40] @ random.normal(size=20) + 0.1 * random.normal(size=200)
    c = np.full(200, 1 / 200)
    return LinearProblem(x, y, c, losses.squared, 0.1 * float(np.abs(x.T @ (c * y)).max()))


def run(problem: LinearProblem, choice: Any) -> FitHistory:
    history = FitHistory()
    solve(problem, gf.linear.Duhl(0.2, choice), 1e-6, 10_000, history)
    return history


def test_loads_are_a_fifth_of_those_of_cyclic_and_random_choices() -> None:
    problem = lasso()
    gap, cyclic, random = (run(problem, each) for each in ("gap", "cyclic", "random"))
    assert min(cyclic.loads[-1], random.loads[-1]) > 5 * gap.loads[-1]
    assert len(gap.certificates) <= 10 < len(cyclic.certificates)
    assert gap.loads == run(problem, "gap").loads  # repeatable


def test_a_device_of_little_memory_plays_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds no more than its memory, and the host certifies while it works."""
    problem = lasso()
    table = problem.x.nbytes
    devices = [
        gf.Device(f"/worker:0/cpu:{k}", "cpu", memory=memory)
        for k, memory in enumerate((64 << 30, table // 4))
    ]
    held: list[int] = []
    meanwhile: list[bool] = []
    check_began = threading.Event()
    pick, check = ColumnSide.pick, ColumnSide.check_gap

    def pick_some(self: ColumnSide, chosen: Any) -> CoordinatePart:
        held.append(len(chosen) * problem.rows * 8)
        part = pick(self, chosen)
        visit = part.visit

        def visit_late(order: Any, own: Any, shared: Any) -> None:
            if len(held) == 2:
                meanwhile.append(check_began.wait(20))
            visit(order, own, shared)

        part.visit = visit_late  # type: ignore[method-assign]
        return part

    def note_check(self: ColumnSide, monitor: Any) -> Any:
        if len(held) == 2:
            check_began.set()
        return check(self, monitor)

    monkeypatch.setattr(ColumnSide, "pick", pick_some)
    monkeypatch.setattr(ColumnSide, "check_gap", note_check)
    history = FitHistory()
    solve(problem, gf.linear.Duhl(devices[1], passes=5), 1e-6, 10_000, history)
    assert max(held) <= devices[1].memory < table
    assert history.gaps[-1] <= 1e-6 and meanwhile == [True] * 5


def test_what_does_not_suit_is_refused() -> None:
    problem = lasso()
    for wrong in ({"capacity": 0}, {"capacity": "half"}, {"choice": "gaps"}, {"passes": 0}):
        with pytest.raises(LinearModelError, match=next(iter(wrong))):
            gf.linear.Duhl(**wrong)  # type: ignore[arg-type]
    with pytest.raises(LinearModelError, match=r"100 bytes, and the largest column takes 1,640"):
        solve(problem, gf.linear.Duhl(100), 1e-6, 10, FitHistory())
    with pytest.raises(LinearModelError, match="the logistic loss with an intercept"):
        gf.linear.LogisticRegression(solver="duhl").fit(np.eye(4), [0, 1, 0, 1])
    with pytest.raises(LinearModelError, match=r"must be one of auto, .* or a gf\.linear\.Duhl"):
        gf.linear.Lasso(solver="dual").fit(np.eye(4), [0, 1, 0, 1])
