"""Mistakes that other libraries for linear models made, and the tests that they are not made here.

| mistake | test |
|---|---|
| the gap by a vector that lost writes is negative | test_problem::test_a_vector_that_lost_writes_does_not_make_the_gap_small, solvers/test_threads::test_racing_threads_are_certified_from_weights_computed_again |
| tol multiplied by the squares of the targets | test_mistakes_of_peers::test_a_tolerance_means_the_same_in_any_unit |
| a comparison by < never ends where the gap is 0 | test_problem::test_a_gap_of_nothing_of_nothing_is_0_and_stops |
| a dual without a penalty, or none with l2 alone | estimators/test_estimators::test_without_a_penalty_the_answer_is_least_squares_and_has_no_certificate, test_problem::test_no_gap_is_less_than_what_is_left_to_gain |
| gaps that are NaN | test_mistakes_of_peers::test_no_gap_is_nan_where_tables_or_targets_say_nothing |
| cancellation in float32 | test_problem::test_float32_is_multiplied_in_float64, estimators/test_hard_inputs::test_a_gap_that_float32_hides_is_reached_by_sums_in_float64 |
| the intercept left out of sparse tables, or penalised | test_mistakes_of_peers::test_targets_that_are_shifted_move_the_intercept_alone |
| weights by their roots | test_mistakes_of_peers::test_a_weight_of_two_is_a_row_twice |
| CoCoA with the rows of a part in place of all | cocoa/test_rounds::test_the_certificate_of_rows_is_that_of_the_whole_problem, cocoa/test_cluster_fit::test_workers_find_the_model_of_one_machine |
| one seed for all parts | test_mistakes_of_peers::test_each_part_has_an_order_of_its_own |
| changes added that were not overrated (σ') | cocoa/test_rounds::test_adding_diverges_if_workers_do_not_overrate_their_changes |
| stuck at a worse objective on badly scaled columns | estimators/test_hard_inputs::test_no_fit_gets_stuck_on_badly_scaled_columns |
| constant, zero and doubled columns | estimators/test_estimators::test_columns_and_rows_that_say_nothing |
| constant, zero and doubled rows | test_mistakes_of_peers::test_rows_that_say_nothing_or_the_same |
| one class only | estimators/test_estimators::test_one_class_names_itself |
| labels that are strings | estimators/test_estimators::test_classifications_are_scikit_learns |
| more columns than rows, and the reverse | estimators/test_estimators::test_columns_and_rows_that_say_nothing |
| an empty part: fewer rows than workers | cocoa/test_rounds::test_more_workers_than_coordinates_are_refused_with_both_numbers, cocoa/test_cluster_fit::test_files_that_workers_cannot_use_are_refused |
"""  # noqa: E501

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

import graphflow as gf
from graphflow.linear.cocoa.rounds import Rounds
from graphflow.linear.cocoa.table_parts import cut_table
from graphflow.linear.problem import LinearProblem
from tests.linear.problems import LOSSES, random_problem

REGRESSIONS = [
    gf.linear.Ridge(2.0),
    gf.linear.Lasso(0.1),
    gf.linear.ElasticNet(0.1),
    gf.linear.LinearSVR(epsilon=0.1, C=0.1),
]
CLASSIFIERS = [
    gf.linear.LogisticRegression(C=0.5),
    gf.linear.LinearSVC(C=0.5),
    gf.linear.LinearSVC(loss="hinge", C=0.5),
]


def name_of(model: Any) -> str:
    return f"{type(model).__name__}-{getattr(model, 'loss', '')}"


def table(seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    x = random.normal(size=(90, 7)) * (random.random((90, 7)) < 0.5)
    return x, x @ random.normal(size=7) + 0.3 * random.normal(size=90)


def test_every_test_of_the_table_exists() -> None:
    folder = Path(__file__).parent
    named = re.findall(r"([\w/]+)::(test_\w+)", __doc__ or "")
    assert len(named) > 18
    for file, test in named:
        assert f"def {test}(" in (folder / f"{file}.py").read_text(encoding="utf-8"), test


@pytest.mark.parametrize("factor", [1e-6, 1e6])
def test_a_tolerance_means_the_same_in_any_unit(factor: float) -> None:
    x, y = table()
    x /= np.linalg.norm(x, axis=0)
    one = gf.linear.ElasticNet(0.05, l1_ratio=1.0).fit(x, y)
    other = gf.linear.ElasticNet(0.05 * factor, l1_ratio=1.0).fit(x, factor * y)
    np.testing.assert_allclose(other.coef_, factor * one.coef_, rtol=1e-6, atol=1e-9 * factor)
    one = gf.linear.ElasticNet(0.05, l1_ratio=0.0).fit(x, y)
    other = gf.linear.ElasticNet(0.05, l1_ratio=0.0).fit(x, factor * y)
    np.testing.assert_allclose(other.coef_, factor * one.coef_, rtol=1e-4)
    for model in (one, other):
        assert model.certificate_.relative_gap <= 1e-6
    assert len(other.history_.gaps) == len(one.history_.gaps)


@pytest.mark.parametrize("model", [*REGRESSIONS, *CLASSIFIERS], ids=name_of)
def test_no_gap_is_nan_where_tables_or_targets_say_nothing(model: Any) -> None:
    x, y = table()
    is_class = model in CLASSIFIERS
    for rows, targets in (
        (0.0 * x, y),
        (1e-160 * x, y),
        (np.ones_like(x), y),
        (x, 0.0 * y if not is_class else y),
        (sp.csr_matrix(x.shape), y),
    ):
        model.fit(rows, targets > 0 if is_class else targets)
        assert all(np.isfinite(gap) and gap >= 0.0 for gap in model.history_.gaps)
        assert model.certificate_.relative_gap <= model.tol and np.isfinite(model.coef_).all()


@pytest.mark.parametrize("form", [np.asarray, sp.csr_matrix, sp.csc_matrix])
def test_targets_that_are_shifted_move_the_intercept_alone(form: Any) -> None:
    x, y = table()
    for model in REGRESSIONS[:3]:
        model.set_params(tol=1e-10)
        first = model.fit(form(x), y).coef_, model.intercept_
        moved = model.fit(form(x), y + 1000.0).coef_, model.intercept_
        np.testing.assert_allclose(moved[0], first[0], atol=1e-4)
        assert moved[1] - first[1] == pytest.approx(1000.0, abs=1e-4)


@pytest.mark.parametrize("model", [*REGRESSIONS, *CLASSIFIERS], ids=name_of)
def test_a_weight_of_two_is_a_row_twice(model: Any) -> None:
    x, y = table()
    y = y > 0 if model in CLASSIFIERS else y
    times = np.random.default_rng(1).integers(1, 4, size=len(y))
    model.set_params(tol=1e-9)
    weighted = model.fit(x, y, sample_weight=times).coef_
    objective = model.certificate_.primal
    repeated = model.fit(np.repeat(x, times, axis=0), np.repeat(y, times)).coef_
    np.testing.assert_allclose(weighted, repeated, atol=2e-3)
    assert model.certificate_.primal == pytest.approx(objective, rel=1e-8)


@pytest.mark.parametrize("model", [*REGRESSIONS, *CLASSIFIERS], ids=name_of)
def test_rows_that_say_nothing_or_the_same(model: Any) -> None:
    x, y = table()
    x[:5], x[5:10], x[10:15] = 0.0, 3.0, x[15]
    targets = y > 0 if model in CLASSIFIERS else y
    for rows in (x, sp.csr_matrix(x)):
        model.fit(rows, targets)
        assert model.certificate_.relative_gap <= model.tol
        predicted = model.predict(rows)[10:16]
        assert np.isfinite(model.coef_).all() and (predicted == predicted[0]).all()


def test_each_part_has_an_order_of_its_own() -> None:
    """Four parts with the same rows: with one seed, all would visit the same."""
    made = random_problem(3, LOSSES[0], l2=1.0, rows=10, columns=4)
    rows = np.repeat(np.arange(10), 4)
    problem = LinearProblem(
        np.ascontiguousarray(made.x[rows]), made.y[rows], made.c[rows], made.loss, 0.0, 1.0
    )
    devices = [f"/worker:0/cpu:{k}" for k in range(4)]
    rounds = Rounds(problem, cut_table(problem.x, "rows", devices), "rows")
    names = [name.split("/")[-1] for name in devices]
    with gf.Session(gf.Cluster.here(devices=names, threads=1), trial=False) as s:
        s.run([rounds.start, rounds.certificate])
        s.run(rounds.round, {rounds.steps: np.zeros((4, 0), np.float32)})
        visited = [own != 0.0 for own in s.run([has["own"] for has in rounds.vectors])]
    assert all(each.sum() == 4 for each in visited)
    assert len({each.tobytes() for each in visited}) > 1
