"""Mistakes of other parameter servers, each of which these tests would show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ops.communication.channel_scheduler import random_order
from graphflow.parallel import ParameterServer
from tests.ops.communication.servers import by_hand, server_and_workers
from tests.parallel.models import mlp
from tests.parallel.servers.windows import difference, feeds_of


@pytest.mark.parametrize("servers", [1, 2])
def test_a_servers_adagrad_remembers_each_push(servers: int) -> None:
    """Two equal pushes move by the rate, and by the rate over √2."""
    x = gf.placeholder("float64", ("B",), name="x")
    weights = [gf.variable(np.zeros(2), name=f"w{i}") for i in range(servers)]
    loss = sum(gf.mean(gf.sum(w) * x) for w in weights)
    strategy = ParameterServer(servers, "async", window=1, workers=2)
    step = gf.optim.Adagrad(0.1).minimize(loss, strategy=strategy)
    with gf.Session() as s:
        moves = [np.zeros(2)]
        for _ in range(2):
            s.run(step, {x: np.full(2, 3.0)})
            moves.append(s.get(weights[-1]))
    steps = 0.1 / np.sqrt([1, 2, 3, 4])
    np.testing.assert_allclose(-np.diff(moves, axis=0)[:, 0], [steps[:2].sum(), steps[2:].sum()])


def test_state_that_is_no_parameter_goes_on_after_each_window_at_other_parties(
    tmp_path: Path,
) -> None:
    """Adam's moments and its count of steps come from a checkpoint, whoever takes them over."""
    layouts = [(1, 2), (2, 3), (3, 1), (1, 6), (2, 2)]

    def build(servers: int, workers: int) -> Any:
        return mlp(ParameterServer(servers, "bsp", window=3, workers=workers))

    whole = build(1, 2)
    windows = feeds_of(whole, len(layouts), 36)
    with gf.Session() as s:
        wanted = [s.run(whole.fetches, feeds)[0] for feeds in windows]
        values = [s.get(v) for v in whole.variables]
    for number, (servers, workers) in enumerate(layouts):
        model = build(servers, workers)
        (feeds,) = feeds_of(model, number + 1, 36)[number:]
        with gf.Session() as s:
            if number:
                s.load(tmp_path / "kept")
            assert s.run(model.fetches, feeds)[0] == pytest.approx(wanted[number], rel=1e-12)
            s.save(tmp_path / "kept")
            last = [s.get(v) for v in model.variables]
    assert difference(last, values) < 1e-12


def test_a_server_tells_more_than_256_workers_apart() -> None:
    start, turns = np.linspace(0.1, 1.0, 3), [1] * 300
    weights, order, _ = server_and_workers(start, turns)
    with random_order(3):
        result, came = evaluate([weights, order])
    assert sorted(came.tolist()) == [*range(300)]
    assert came.tolist() != sorted(came.tolist())
    np.testing.assert_array_equal(result, by_hand(start, came, 300))


@pytest.mark.parametrize("consistency", ["pool", pytest.param("async", marks=pytest.mark.slow)])
def test_a_message_that_came_in_an_earlier_window_counts_in_no_later_one(consistency: Any) -> None:
    """Sessions that begin anew, and windows one after the other, each count every push once."""
    strategy = ParameterServer(1, consistency, window=2, workers=2, aggregate=1)
    x = gf.placeholder("float64", ("B",), name="x")
    total = gf.variable(np.zeros(()), name="total")
    step = gf.optim.SGD(1.0).minimize(gf.mean(total * x), strategy=strategy)
    for _ in range(2):
        with gf.Session(gf.Cluster.local(3, threads=1), trial=False) as s:
            for number in range(1, 4):
                s.run(step, {x: -np.array([1.0, 10.0, 100.0, 1000.0])})
                assert s.get(total) == 1111.0 * number


def test_workers_of_unequal_numbers_of_turns_all_end() -> None:
    """Workers of different numbers of turns: the order has each one's, and the window ends."""
    start, turns = np.linspace(0.1, 1.0, 3), [1, 5, 0, 3]
    weights, order, _ = server_and_workers(start, turns)
    for seed in range(20):
        with random_order(seed):
            result, came = evaluate([weights, order])
        assert np.bincount(came, minlength=4).tolist() == turns
        np.testing.assert_array_equal(result, by_hand(start, came, 4))
