"""Random orders of pushes, by the interpreter alone: each is the loop by hand, within its rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.frontend.pytree import fed_sizes
from graphflow.ops.communication.channel_scheduler import random_order
from graphflow.parallel import ParameterServer
from tests.parallel.servers.windows import window_by_hand

RATE, SIZE = 0.25, 2
STRATEGIES: dict[str, dict[str, Any]] = {
    "pool": {"consistency": "pool"},
    "pool of single pushes": {"consistency": "pool", "aggregate": 1},
    "async": {"consistency": "async"},
    "async by pairs": {"consistency": "async", "aggregate": 2},
    "lock step": {"consistency": "ssp", "staleness": 0},
    "bounded": {"consistency": "ssp", "staleness": 1},
    "rounds": {"consistency": "bsp"},
    "backups": {"consistency": "bsp", "aggregate": 2},
}


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("count", [6, pytest.param(150, marks=pytest.mark.slow)])
def test_a_random_order_is_the_loop_by_hand(name: str, count: int) -> None:
    workers, window = (3, 2) if count < 100 else (3, 4)
    strategy = ParameterServer(workers=workers, window=window, **STRATEGIES[name])
    total = workers * window
    start = np.array([1.0, -1.0])
    x = gf.placeholder("float64", ("B", SIZE), name="x")
    w = gf.variable(start, name="w")
    loss = gf.mean(gf.sum((x - w) * (x - w) * 0.5, 1))
    step = gf.optim.SGD(RATE).minimize(loss, strategy=strategy)
    end = gf.Graph([loss, step])
    division: Any = strategy.divide(end, gf.Cluster.here())
    last = next(n.inputs[1] for n in division.graph.of_op("assign"))
    outputs = [last, *(division.graph.outputs[i] for i in division.facts.outputs)]
    rules = division.facts.rules
    orders = set()
    for seed in range(count):
        rows = np.random.default_rng(seed).integers(-9, 9, (total, SIZE)) * 0.5
        fed = _feeds(division, {x.node: rows})
        with random_order(seed):
            weights, *facts = evaluate(outputs, fed)
        came = division.facts.describe(0, facts)
        order, numbers = (
            [int(v) for v in a[0] if v >= 0] for a in (came.order, came.micro_batches)
        )
        wanted = window_by_hand(strategy, start, rows, order, numbers, RATE)
        np.testing.assert_array_equal(weights, wanted.weights)
        assert came.staleness[0][: len(order)].tolist() == wanted.staleness
        assert rules.has_fixed_order or rules.first_impossible(order) is None
        if rules.has_backups:
            assert came.dropped == wanted.dropped + 1
        else:
            assert sorted(numbers) == [*range(total)]
        if strategy.consistency == "ssp":
            assert wanted.lead <= strategy.staleness
        orders.add(tuple(order))
        if seed % 10 == 0:  # given back, it leaves nothing to chance
            again = _feeds(division, {x.node: rows, strategy.order.node: came.order})
            with random_order(seed + 1):
                np.testing.assert_array_equal(evaluate(outputs[:1], again)[0], weights)
    assert len(orders) > (1 if rules.has_fixed_order else count // 3) - rules.has_fixed_order


def _feeds(division: Any, arrays: dict[Any, Any]) -> dict[Any, Any]:
    """Feeds of the placeholders of a division."""
    sizes = fed_sizes(division.source, {node: a.shape for node, a in arrays.items()})
    return {n.outputs[0]: v for n, v in division.feeds(arrays, sizes).items()}
