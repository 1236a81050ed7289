"""Scheduled coordinate descent: beside random choice, and what moves at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ShardingError
from graphflow.ops.communication.active_sum import active_sum
from tests.parallel.blocks.problems import Array, LassoProblem, Model

BlockScheduled, L1 = gf.parallel.BlockScheduled, gf.linear.L1


def build_correlated_lasso(seed: int, columns: int = 500) -> LassoProblem:
    """A lasso whose columns are alike in groups of 10, all of length 1."""
    problem = LassoProblem(300, columns, alike=10, share=0.8, strength=0.05, seed=seed)
    problem.features /= np.linalg.norm(problem.features, axis=0)
    problem.targets = problem.features @ np.random.default_rng(seed).laplace(size=columns)
    problem.strength = 0.05 * float(abs(problem.features.T @ problem.targets).max())
    return problem


def move_at_random(problem: LassoProblem, parallel: int, rounds: int, seed: int) -> Array:
    """Weights of parallel coordinate descent on columns that are drawn evenly."""
    random, x = np.random.default_rng(seed), problem.features
    w = np.zeros(x.shape[1])
    p = x @ w
    for _ in range(rounds):
        chosen = random.choice(len(w), parallel, replace=False)
        moved = w[chosen] - x[:, chosen].T @ (p - problem.targets)
        moved = np.sign(moved) * np.maximum(abs(moved) - problem.strength, 0)
        p = p + x[:, chosen] @ (moved - w[chosen])
        w[chosen] = moved
    return w


def test_a_schedule_beats_random_choice_on_correlated_columns() -> None:
    """50 rounds of up to 32 columns, on instances that are drawn anew."""
    ratios = []
    for seed in range(3):
        problem = build_correlated_lasso(seed)
        gf.random.seed(seed)
        model = Model(problem, BlockScheduled(32, penalty=L1(problem.strength), window=10))
        found = problem.objective(model.run(5))
        ratios.append(found / problem.objective(move_at_random(problem, 32, 50, seed)))
    assert max(ratios) < 1
    assert np.mean(ratios) < 0.93


def test_columns_that_are_alike_diverge_if_all_move_at_once() -> None:
    """Where the check of correlations is left out, and odds follow the moves."""
    problem = build_correlated_lasso(0)
    start = problem.objective(np.zeros(500))
    for correlation, grows in ((0.1, False), (2.0, True)):
        gf.random.seed(0)
        strategy = BlockScheduled(
            32, correlation=correlation, penalty=L1(problem.strength), window=10
        )
        assert (problem.objective(Model(problem, strategy).run(5)) > start) == grows


def test_no_two_columns_that_move_at_once_are_alike() -> None:
    problem = build_correlated_lasso(2, 60)
    cosines = abs(problem.features.T @ problem.features)
    model = Model(problem, BlockScheduled(8, 0.3, penalty=L1(problem.strength), window=1))
    before, most = np.zeros(60), 0
    with gf.Session() as s:
        for _ in range(30):
            s.run(model.train, model.feeds)
            after = s.get(model.weights)
            moved = np.flatnonzero(after != before)
            others = cosines[np.ix_(moved, moved)] - np.eye(len(moved))
            assert len(moved) <= 8 and (others < 0.3).all()
            most = max(most, len(moved))
            before = after
    assert most >= 4


def test_one_column_at_a_time_reaches_the_optimum() -> None:
    problem = LassoProblem(60, 20)
    model = Model(problem, BlockScheduled(1, penalty=L1(problem.strength), window=20))
    assert problem.excess(model.run(40), problem.find_least_value()) < 1e-10


def test_columns_that_move_are_drawn_more_often() -> None:
    """Marks on moves tell which columns a turn draws."""
    problem = LassoProblem(60, 80)
    model = Model(problem, BlockScheduled(2, penalty=L1(problem.strength), window=1))
    moves, marked, visits = model.state("moves"), np.repeat([1e-3, 0.1], 40), np.zeros(80)
    with gf.Session() as s:
        s.run(model.train, model.feeds)
        for _ in range(100):
            s.set(moves, marked)
            s.run(model.train, model.feeds)
            visits += s.get(moves) != marked
    assert 300 < visits.sum() <= 400  # four a turn, without those that were held back
    assert visits[40:].sum() > 0.95 * visits.sum()


def test_workers_compute_what_one_device_does() -> None:
    problem = LassoProblem(40, 30)
    gf.random.seed(5)
    options: dict[str, Any] = {"correlation": 0.4, "penalty": L1(problem.strength), "window": 3}
    alone = Model(problem, BlockScheduled(4, **options)).run(8)
    gf.random.seed(5)
    strategy = BlockScheduled(4, **options) * gf.parallel.Data(2)
    cluster = gf.Cluster.here(devices=["cpu:0", "cpu:1"])
    np.testing.assert_allclose(Model(problem, strategy).run(8, cluster), alone, atol=1e-12)
    assert np.count_nonzero(alone)


def test_a_turn_is_one_exchange() -> None:
    problem = LassoProblem(40, 30)
    strategy = BlockScheduled(4, penalty=L1(problem.strength), window=3) * gf.parallel.Data(2)
    model = Model(problem, strategy)
    cluster = gf.Cluster.local(2)
    report = strategy.report(model.train, cluster)
    drawn = 8
    exchanges = [move for move in report.collectives if move.bytes > 16]
    assert [move.bytes for move in exchanges] == [2 * 8 * drawn * (drawn + 1)] * 3
    assert "3 turns a run, each of up to 4 columns with |cos| below 0.1" in str(report)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "no count": (lambda: BlockScheduled(0), "parallel must be an int of at least 1, not 0"),
    "no floor": (lambda: BlockScheduled(2, floor=0.0), "floor=0.0 must be above 0"),
    "too many": (
        lambda: Model(LassoProblem(20, 12), BlockScheduled(13)),
        r"parallel=13, but 'w' .* has only 12 columns",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_meaning_is_refused(name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ShardingError, match=words):
        make()


def test_active_rows_stay_and_others_are_zero() -> None:
    gradient = np.arange(6.0).reshape(3, 2) + 1
    with gf.Session() as s:
        found = s.run(active_sum(gf.constant(gradient), gf.constant(np.array([True, False, True]))))
    np.testing.assert_array_equal(found, [[1, 2], [0, 0], [5, 6]])
