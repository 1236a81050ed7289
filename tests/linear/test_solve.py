"""Solvers reach the same model, on dense and sparse tables, and say what does not suit them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy.sparse import csr_matrix

from graphflow.errors import LinearModelError
from graphflow.linear import losses
from graphflow.linear.fit_history import FitHistory
from graphflow.linear.losses import Loss
from graphflow.linear.problem import LinearProblem
from graphflow.linear.solve import choose_solver, solve
from graphflow.linear.solvers.coordinate_descent.column_sets import DenseColumns, SparseColumns
from tests.linear.problems import LOSSES, SMOOTH, random_problem


def objective(problem: LinearProblem, solver: str) -> float:
    """Return the objective of a solver; losses with kinks take long to the last digits."""
    tol = 1e-9 if problem.loss.slope is not None else 1e-6
    model = solve(problem, solver, tol, 20_000, FitHistory())
    gap = model.certificate.relative_gap
    assert gap is not None and gap <= tol
    return model.certificate.primal


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.name)
@pytest.mark.parametrize("seed", range(3))
def test_solvers_of_an_l2_penalty_agree(loss: Loss, seed: int) -> None:
    found = []
    for is_sparse in (False, True):
        problem = random_problem(seed, loss, l2=1.0 + seed, is_sparse=is_sparse, bias=0.5 * seed)
        fits = ["sdca"] + (["interior"] if loss.slope is None else ["newton", "cholesky", "cg"])
        found += [objective(problem, solver) for solver in fits]
    np.testing.assert_allclose(found, found[0], rtol=1e-8 if loss.slope else 1e-6)


@pytest.mark.parametrize("loss", SMOOTH, ids=lambda loss: loss.name)
@pytest.mark.parametrize("seed", range(3))
def test_working_sets_agree_with_newtons_method_and_on_both_forms(loss: Loss, seed: int) -> None:
    found = [
        objective(
            random_problem(seed, loss, l2=0.4, has_intercept=seed > 0, is_sparse=is_sparse), solver
        )
        for is_sparse in (False, True)
        for solver in ("cd", "newton")
    ]
    np.testing.assert_allclose(found, found[0], rtol=1e-8)
    found = [
        objective(
            random_problem(
                seed, loss, l1=0.5, l2=0.1 * seed, has_intercept=seed > 0, is_sparse=is_sparse
            ),
            "cd",
        )
        for is_sparse in (False, True)
    ]
    np.testing.assert_allclose(found, found[0], rtol=1e-8)


@pytest.mark.parametrize("cost", [0.0, np.inf])
@pytest.mark.parametrize("is_positive", [False, True])
def test_sets_are_solved_on_the_columns_and_on_their_products(
    monkeypatch: pytest.MonkeyPatch, cost: float, is_positive: bool
) -> None:
    for is_sparse in (False, True):
        for loss in (losses.squared, losses.logistic):
            problem = random_problem(
                2, loss, l1=0.2, l2=0.1, has_intercept=True, is_sparse=is_sparse, columns=9
            )
            problem = replace(problem, is_positive=is_positive)
            wanted = objective(problem, "cd")
            with monkeypatch.context() as patch:
                for kind in (DenseColumns, SparseColumns):
                    patch.setattr(kind, "gram_cost", property(lambda _: cost))
                assert objective(problem, "cd") == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_columns_that_are_nearly_the_same_are_solved_to_the_end(is_sparse: bool) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(60, 1)) + 0.02 * random.normal(size=(60, 150))
    y = x[:, :5] @ [3.0, -2.0, 1.0, -2.0, 1.0] + 0.01 * random.normal(size=60)
    table = csr_matrix(x) if is_sparse else x
    problem = LinearProblem(table, y, np.full(60, 1 / 60), losses.squared, l1=1e-5)
    model = solve(problem, "cd", 1e-8, 100_000, FitHistory())
    assert (model.certificate.relative_gap or 0.0) <= 1e-8


def test_the_gap_falls_from_certificate_to_certificate() -> None:
    history = FitHistory()
    solve(random_problem(3, losses.hinge, l2=1.0, rows=300), "sdca", 1e-6, 10_000, history)
    duals = [c.dual for c in history.certificates]
    assert len(duals) > 2 and duals == sorted(duals)
    assert history.certificates[-1].passes > 0 and history.solver == "sdca"


@pytest.mark.parametrize(
    ("solver", "loss", "more", "better"),
    [
        ("newton", losses.hinge, {"l2": 1.0}, "sdca"),
        ("cd", losses.hinge, {"l2": 1.0}, "sdca"),
        ("interior", losses.squared_hinge, {"l2": 1.0}, "newton"),
        ("sdca", losses.logistic, {"l1": 1.0}, "cd"),
        ("sdca", losses.logistic, {"l2": 1.0, "has_intercept": True}, "newton"),
        ("sdca", losses.squared, {}, "newton"),
        ("cg", losses.squared, {"l1": 1.0}, "cd"),
    ],
)
def test_a_solver_that_does_not_suit_names_one_that_does(
    solver: str, loss: Loss, more: dict[str, float], better: str
) -> None:
    problem = random_problem(0, loss, **more)  # type: ignore[arg-type]
    assert choose_solver(problem) == better
    with pytest.raises(LinearModelError, match=f"use solver='{better}'"):
        solve(problem, solver, 1e-6, 100, FitHistory())


def test_interior_points_take_over_where_passes_gain_little() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(300, 8)) * 10.0 ** np.linspace(-3, 3, 8)
    y = np.sign(x @ 10.0 ** np.linspace(3, -3, 8) + random.normal(size=300))
    for table in (x, csr_matrix(x), csr_matrix(x).tocsc()):
        problem = LinearProblem(table, y, np.ones(300), losses.hinge, 0.0, 1.0, bias=2.0)
        history = FitHistory()
        model = solve(problem, "auto", 1e-9, 10_000, history)
        assert history.solver == "interior" and (model.certificate.relative_gap or 0.0) <= 1e-9
        few = solve(problem, "auto", 1e-9, 12, FitHistory())
        assert few.certificate.passes < 30 and (few.certificate.relative_gap or 0.0) > 1e-9


def test_interior_points_need_a_table_of_few_rows_or_columns() -> None:
    x = csr_matrix((np.ones(3000), (np.arange(3000), np.arange(3000))))
    problem = LinearProblem(x, np.ones(3000), np.ones(3000), losses.hinge, 0.0, 1.0)
    with pytest.raises(LinearModelError, match="3,000 rows and 3,000 columns; use solver='sdca'"):
        solve(problem, "interior", 1e-6, 100, FitHistory())


def test_too_few_passes_leave_the_best_model_and_its_gap() -> None:
    problem = random_problem(7, losses.hinge, l2=1e-4, rows=500, columns=20)
    history = FitHistory()
    model = solve(problem, "sdca", 1e-12, 3, history)
    assert model.certificate.passes < 20
    assert (model.certificate.relative_gap or 0.0) > 1e-12 and history.best is model
