"""Rounds of CoCoA: how fast they converge, what diverges, and certificates from parts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import LinearModelError
from graphflow.linear import losses
from graphflow.linear.cocoa.rounds import Rounds, choose_axis
from graphflow.linear.cocoa.table_parts import cut_table
from graphflow.linear.problem import LinearProblem, certify
from tests.linear.problems import LOSSES, random_problem

WORKERS = 4
DEVICES = [f"/worker:0/cpu:{k}" for k in range(WORKERS)]

CASES = [
    pytest.param(loss, bool(sparse), id=f"{loss.name}-{sparse}")
    for sparse, loss in zip([0, 1, 0, 1, 0, 1, 0], LOSSES, strict=True)
]


def session() -> gf.Session:
    devices = [f"cpu:{k}" for k in range(WORKERS)]
    return gf.Session(gf.Cluster.here(devices=devices, threads=1), trial=False)


def make_rounds(problem: LinearProblem, **options: Any) -> Rounds:
    axis = choose_axis(problem)
    return Rounds(problem, cut_table(problem.x, axis, DEVICES), axis, **options)


def run_rounds(s: gf.Session, rounds: Rounds, steps: int, count: int = 1) -> None:
    for _ in range(count):
        s.run(rounds.round, {rounds.steps: np.zeros((steps, 0), np.float32)})


@pytest.fixture(scope="module")
def ridge() -> LinearProblem:
    """A ridge of 2,000 rows and 500 columns, λ 1e-3."""
    random = np.random.default_rng(0)
    x = random.normal(size=(2000, 500))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y = x @ random.normal(size=500) + 0.1 * random.normal(size=2000)
    return LinearProblem(x, y, np.full(2000, 1 / 2000), losses.squared, 0.0, 1e-3)


def count_rounds(problem: LinearProblem, steps: int, most: int = 150, **options: Any) -> int:
    """Return the rounds until the relative gap is 1e-6; `most` if it is not by then."""
    rounds = make_rounds(problem, **options)
    with session() as s:
        s.run([rounds.start, rounds.certificate])
        for count in range(1, most):
            run_rounds(s, rounds, steps)
            gap = rounds.read(s.run(rounds.certificate))[0].relative_gap
            if gap is not None and gap < 1e-6:
                return count
    return most


@pytest.mark.parametrize(
    "steps, most", [pytest.param(100, 90, marks=pytest.mark.slow), (300, 36), (1000, 32)]
)
def test_rounds_until_a_gap_of_a_millionth(ridge: LinearProblem, steps: int, most: int) -> None:
    """A prototype in numpy took 80, 33 and 29, on a problem of the same sizes."""
    assert 0.7 * most < count_rounds(ridge, steps) <= most


def test_adding_diverges_if_workers_do_not_overrate_their_changes(ridge: LinearProblem) -> None:
    rounds = make_rounds(ridge, sigma=1.0)
    with session() as s:
        s.run([rounds.start, rounds.certificate])
        run_rounds(s, rounds, 1000, 20)
        assert rounds.read(s.run(rounds.certificate))[0].gap > 1.0


def test_averaging_converges_and_takes_more_rounds(ridge: LinearProblem) -> None:
    few = ridge.x[::4], ridge.y[::4], ridge.c[::4] * 4
    problem = LinearProblem(*few, losses.squared, 0.0, 1e-2)
    adding = count_rounds(problem, 125)
    assert adding < count_rounds(problem, 125, gamma=1 / WORKERS) < 150


@pytest.mark.every(3)
@pytest.mark.parametrize("loss, is_sparse", CASES)
def test_the_certificate_of_rows_is_that_of_the_whole_problem(loss: Any, is_sparse: bool) -> None:
    problem = random_problem(5, loss, l2=1.5, bias=0.7, is_sparse=is_sparse, rows=31)
    rounds = make_rounds(problem)
    with session() as s:
        s.run([rounds.start, rounds.certificate])
        run_rounds(s, rounds, 5, 3)
        owns = s.run([has["own"] for has in rounds.vectors])
        found, w, b = rounds.read(s.run(rounds.certificate))
    beta = np.empty(problem.rows)
    for part, own in zip(rounds.parts, owns, strict=True):
        beta[part.number :: WORKERS] = own
    whole = certify(problem, w, b, beta)
    assert np.allclose(w, problem.correlate(beta) / problem.l2)
    assert np.isclose(found.primal, whole.primal) and np.isclose(found.dual, whole.dual)


@pytest.mark.every(3)
@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize(
    "l1, l2, is_positive", [(0.5, 0, 0), (0.5, 0.3, 0), (0, 0.3, 0), (0.5, 0, 1)]
)
def test_the_certificate_of_columns_is_that_of_the_whole_problem(
    l1: float, l2: float, is_positive: int, is_sparse: bool
) -> None:
    made = random_problem(6, LOSSES[0], is_sparse=is_sparse, columns=11)
    problem = LinearProblem(
        made.x, made.y, made.c, made.loss, l1, l2, True, is_positive=bool(is_positive)
    )
    rounds = make_rounds(problem)
    with session() as s:
        s.run([rounds.start, rounds.certificate])
        run_rounds(s, rounds, 2, 4)
        found, w, b = rounds.read(s.run(rounds.certificate))
    whole = certify(problem, w, b)
    assert np.isclose(found.primal, whole.primal) and np.isclose(found.dual, whole.dual)


def test_a_round_that_does_no_step_changes_nothing(ridge: LinearProblem) -> None:
    rounds = make_rounds(ridge)
    with session() as s:
        before = s.run([has["shared"] for has in rounds.vectors])
        run_rounds(s, rounds, 0)
        after = s.run([has["shared"] for has in rounds.vectors])
    assert all((a == b).all() for a, b in zip(before, after, strict=True))


def test_more_workers_than_coordinates_are_refused_with_both_numbers() -> None:
    problem = random_problem(0, LOSSES[0], l2=1.0, rows=3)
    with pytest.raises(LinearModelError, match=r"3 rows for 4 workers.*at most 3 workers"):
        make_rounds(problem)


@pytest.mark.parametrize(
    "loss, options, reason",
    [
        (LOSSES[1], {"l2": 1.0, "has_intercept": True}, "the intercept has no penalty"),
        (LOSSES[1], {"l1": 1.0}, "of the l1 penalty"),
        (LOSSES[0], {}, "there is no penalty"),
    ],
    ids=["intercept", "l1", "none"],
)
def test_problems_that_rounds_do_not_solve_are_refused(
    loss: Any, options: Any, reason: str
) -> None:
    with pytest.raises(LinearModelError, match=reason):
        choose_axis(random_problem(0, loss, **options))
