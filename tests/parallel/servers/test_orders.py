"""Random orders of whole windows, run by the interpreter alone: what holds in each of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.frontend.pytree import fed_sizes
from graphflow.ops.communication.channel_scheduler import random_order
from graphflow.parallel import ParameterServer
from graphflow.parallel.servers.window_history import WindowHistory

RATE = 0.125
WORKERS, TURNS = 3, 2
SIZES = (3, 2)
"""Elements of weights, one for each server."""


class Window:
    """A window whose turns the interpreter runs in any order.

    The loss is a half of the squared distance between each weight and the rows of its placeholder,
    so a gradient is weight − row, exactly.
    """

    def __init__(self, strategy: ParameterServer) -> None:
        sizes = SIZES[: strategy.servers]
        xs = [gf.placeholder("float64", ("B", n), name=f"x{n}") for n in sizes]
        ws = [gf.variable(np.linspace(-1.0, 1.0, n), name=f"w{n}") for n in sizes]
        loss = sum(gf.mean(gf.sum((w - x) * (w - x) * 0.5, 1)) for x, w in zip(xs, ws, strict=True))
        step = gf.optim.SGD(RATE).minimize(loss, strategy=strategy)
        random = np.random.default_rng(0)
        self.rows = [random.integers(-9, 9, (WORKERS * TURNS, n)) * 1.0 for n in sizes]
        division = strategy.divide(gf.Graph([loss, step]), gf.Cluster.here())
        arrays = {x.node: rows for x, rows in zip(xs, self.rows, strict=True)}
        known = fed_sizes(division.source, {node: v.shape for node, v in arrays.items()})
        fed = division.feeds(division.facts.complete_feeds(arrays), known)
        self.fed = {node.outputs[0]: value for node, value in fed.items()}
        self.division = division
        kept = {n: own.nodes[0] for n, own in division.variables.items()}
        assigned = {n.inputs[0].node: n.inputs[1] for n in division.graph.of_op("assign")}
        self.ends = [assigned[kept[w.node]] for w in ws]
        self.outputs = [division.graph.outputs[i] for i in division.facts.outputs]

    def run(self, seed: int) -> tuple[WindowHistory, list[Any]]:
        """The record of a window in some order, and the last weights."""
        count = len(self.ends)
        with random_order(seed):
            found = evaluate([*self.ends, *self.outputs], self.fed)
        return self.division.facts.describe(0, found[count:]), found[:count]


def replay(
    order: Any, numbers: Any, rows: Any, aggregate: int, bound: int | None = None
) -> tuple[Any, list[int]]:
    """The last weight of a server that takes pushes in an order, by a loop; and how many updates
    old what each push was computed from was.

    Args:
        bound: workers are answered once no other that still runs is more turns behind; None: each
            after its push.
    """
    weight = np.linspace(-1.0, 1.0, rows.shape[1])
    clocks = np.zeros(WORKERS, int)
    seen, waiting = dict.fromkeys(range(WORKERS), (weight, 0)), set[int]()
    pushed: list[Any] = []
    updates, ages = 0, []
    for worker, number in zip(order.tolist(), numbers.tolist(), strict=True):
        assert worker not in waiting
        value, version = seen[worker]
        ages.append(updates - version)
        pushed.append(value - rows[number])
        if len(pushed) == aggregate:
            total = sum(pushed[1:], pushed[0])
            weight = weight - RATE * (total * (1.0 / aggregate) if aggregate > 1 else total)
            pushed, updates = [], updates + 1
        clocks[worker] += 1
        waiting.add(worker)
        least = min((c for c in clocks if c < TURNS), default=0)
        for each in [*waiting]:
            if bound is None or clocks[each] - least <= bound:
                seen[each] = weight, updates
                waiting.remove(each)
    return weight, ages


def lead(order: Any) -> int:
    """How many turns a worker was ahead of the slowest that still ran, at most, when it pushed."""
    clocks, most = np.zeros(WORKERS, int), 0
    for worker in order:
        running = [c for k, c in enumerate(clocks) if c < TURNS and k != worker]
        most = max([most, *(int(clocks[worker]) - min(running) for _ in running[:1])])
        clocks[worker] += 1
    return most


CASES: list[tuple[str, int, dict[str, Any], int]] = [
    ("pool", 1, {}, 200), ("async", 1, {"aggregate": 2}, 300), ("ssp", 1, {"staleness": 0}, 150),
    ("ssp", 1, {"staleness": 1}, 250), ("pool", 2, {}, 100),
]  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.parametrize(("consistency", "servers", "options", "orders"), CASES)
def test_a_thousand_orders_keep_their_promises(
    consistency: Any, servers: int, options: dict[str, Any], orders: int
) -> None:
    """Each micro-batch counts once at each server, a worker's pushes stay in order, a server's last
    weight is that of a loop over its pushes, which also says how stale each was, and no worker is
    ahead by more than its bound."""
    strategy = ParameterServer(servers, consistency, window=TURNS, workers=WORKERS, **options)
    window = Window(strategy)
    aggregate = strategy.aggregate or (WORKERS if consistency == "pool" else 1)
    every, ahead = set(), 0
    for seed in range(orders):
        came, ends = window.run(seed)
        for server in range(servers):
            order, numbers = came.order[server], came.micro_batches[server]
            assert sorted(numbers.tolist()) == [*range(WORKERS * TURNS)]
            for worker in range(WORKERS):
                own = numbers[order == worker].tolist()
                wanted = range(worker, WORKERS * TURNS, WORKERS)
                assert own == (sorted(own) if consistency == "pool" else [*wanted])
            bound = options.get("staleness")
            weight, ages = replay(order, numbers, window.rows[server], aggregate, bound)
            np.testing.assert_array_equal(ends[server], weight)
            assert came.staleness[server].tolist() == ages
            ahead = max(ahead, lead(order))
            every.add((server, order.tobytes()))
    assert consistency != "ssp" or ahead <= options["staleness"]
    assert len(every) > 4
