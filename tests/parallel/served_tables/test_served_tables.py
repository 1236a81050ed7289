"""Tables on parameter servers, against Data, and against one loop by hand."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel import Data, ParameterServer
from graphflow.parallel.mesh.row_ranges import ring_ranges
from tests.parallel.served_tables.by_hand import HandRules, window_by_hand

ROWS, WIDTH = 50, 4
OPTIMISERS = {
    "sgd": gf.optim.SGD(0.1),
    "adagrad": gf.optim.Adagrad(0.1),
    "rowwise": gf.optim.RowwiseAdagrad(0.1),
    "adam": gf.optim.Adam(0.1, sparse=True),
    "momentum": gf.optim.SGD(0.1, momentum=0.9, sparse=True),
}
Array = np.ndarray[Any, Any]


class Model:
    """A factorisation of two lookups and a dense layer; ids are repeated, and count from either
    end.

    Args:
        again: look rows of the first table up for a bag of ids, too.
    """

    def __init__(self, optimiser: Any, strategy: Any, again: bool = False) -> None:
        random = np.random.default_rng(0)
        self.ids = gf.placeholder("int64", ("B",), name="ids")
        self.bags = gf.placeholder("int32", ("B", 3), name="bags")
        self.wanted = gf.placeholder("float64", ("B",), name="wanted")
        self.tables = [
            gf.variable(random.normal(size=(ROWS, WIDTH)), name=f"table{i}")
            for i in range(1 if again else 2)
        ]
        self.dense = gf.variable(random.normal(size=WIDTH), name="dense")
        users = gf.nn.embedding(self.ids, self.tables[0])
        items = gf.nn.embedding_bag(self.bags, self.tables[-1], mode="sum")
        self.scores = (users * items) @ self.dense
        self.loss = gf.mean((self.scores - self.wanted) ** 2)
        self.train = optimiser.minimize(self.loss, strategy=strategy)

    def feeds(self, number: int, rows: int) -> dict[gf.Tensor, Array]:
        """Return what step number `number` is fed."""
        random = np.random.default_rng(number)
        return {
            self.ids: random.zipf(1.2, rows) % ROWS - ROWS * (np.arange(rows) % 2),
            self.bags: random.integers(0, ROWS, (rows, 3)).astype("int32"),
            self.wanted: random.normal(size=rows),
        }

    @property
    def variables(self) -> list[gf.Tensor]:
        return [*self.tables, self.dense]


def parts_of(feeds: Mapping[gf.Tensor, Array], count: int) -> list[dict[gf.Tensor, Array]]:
    return [{x: np.split(own, count)[i] for x, own in feeds.items()} for i in range(count)]


# Synchronous --------------------------------------------------------------------------------------


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize(("servers", "name"), [*zip([1, 2, 3, 2, 1], OPTIMISERS, strict=True)])
def test_bsp_is_data_parallelism_with_tables(servers: int, name: str, again: bool) -> None:
    strategy = ParameterServer(servers, "bsp", window=4, workers=3, tables=["table*"])
    served = Model(OPTIMISERS[name], strategy, again)
    other = Model(OPTIMISERS[name], Data(3, tables=["table*"]), again)
    with gf.Session() as s, gf.Session() as t:
        for window in range(2):
            loss = s.run([served.loss, served.train], served.feeds(window, 36))[0]
            turns = parts_of(other.feeds(window, 36), 4)
            losses = [t.run([other.loss, other.train], each)[0] for each in turns]
            np.testing.assert_allclose(loss, np.mean(losses), rtol=1e-12)
        for a, b in zip(served.variables, other.variables, strict=True):
            np.testing.assert_allclose(s.get(a), t.get(b), atol=1e-12)


def test_two_equal_pushes_of_adagrad_move_a_row_by_less_and_less() -> None:
    """The row occurs twice in a micro-batch, whose gradients are summed before they are squared."""
    ids = gf.placeholder("int64", ("B",), name="ids")
    table = gf.variable(np.zeros((5, 2)), name="table")
    loss = gf.sum(gf.nn.embedding(ids, table))
    strategy = ParameterServer(consistency="async", window=2, workers=1, tables=[table])
    train = gf.optim.Adagrad(0.1).minimize(loss, strategy=strategy)
    with gf.Session() as s:
        s.run(train, {ids: np.array([3, 3, 3, 3])})
        moved = -s.get(table)[3, 0]
    np.testing.assert_allclose(moved, 0.1 * (1 + 1 / np.sqrt(2)), rtol=1e-6)


# By hand ------------------------------------------------------------------------------------------


class Squares:
    """Rows that are drawn to numbers; the gradient of a row depends on its value."""

    def __init__(self, strategy: Any, rate: float = 0.1) -> None:
        self.ids = gf.placeholder("int64", ("B", 3), name="ids")
        self.wanted = gf.placeholder("float64", ("B", 3, WIDTH), name="wanted")
        self.start = np.random.default_rng(0).normal(size=(ROWS, WIDTH))
        self.table = gf.variable(self.start, name="table")
        apart = gf.nn.embedding(self.ids, self.table) - self.wanted
        self.loss = gf.sum(apart * apart * 0.5)
        self.train = gf.optim.SGD(rate).minimize(self.loss, strategy=strategy)

    def feeds(self, rows: int, seed: int = 0) -> dict[gf.Tensor, Array]:
        random = np.random.default_rng(seed)
        ids = random.zipf(1.3, (rows, 3)) % ROWS
        return {self.ids: ids, self.wanted: random.normal(size=(rows, 3, WIDTH))}

    def gradient(self, feeds: Mapping[gf.Tensor, Array], count: int) -> Any:
        parts = parts_of(feeds, count)

        def of(table: Array, number: int) -> Array:
            ids, wanted = parts[number][self.ids], parts[number][self.wanted]
            found = np.zeros_like(table)
            np.add.at(found, ids.reshape(-1), (table[ids] - wanted).reshape(-1, WIDTH))
            return found

        return of

    def by_hand(
        self, feeds: Mapping[gf.Tensor, Array], came: Any, rules: HandRules, servers: int
    ) -> Array:
        ranges = ring_ranges("table", ROWS, servers)
        owners = np.repeat(ranges.owners, ranges.width)[:ROWS]
        gradient = self.gradient(feeds, rules.workers * rules.turns)
        return window_by_hand(
            self.start, owners, came.order, came.micro_batches, rules, gradient, 0.1
        )


CASES: list[tuple[str, dict[str, Any], int]] = [
    ("async", {}, 1), ("async", {"aggregate": 2}, 2), ("ssp", {"staleness": 1}, 2),
    ("pool", {}, 2), ("pool", {"aggregate": 1}, 3),
]  # fmt: skip


@pytest.mark.parametrize(("consistency", "options", "servers"), CASES)
def test_any_order_is_the_loop_by_hand(
    consistency: Any, options: dict[str, Any], servers: int
) -> None:
    aggregate = options.get("aggregate", 3 if consistency == "pool" else 1)
    rules = HandRules(3, 4, aggregate, options.get("staleness"))
    strategy = ParameterServer(servers, consistency, window=4, workers=3, tables=["*"], **options)
    model = Squares(strategy)
    feeds = model.feeds(24)
    with gf.Session() as s:
        s.run([model.loss, model.train], feeds)
        (came,) = s.history()
        found = s.get(model.table)
    np.testing.assert_allclose(found, model.by_hand(feeds, came, rules, servers), atol=1e-12)


@pytest.mark.parametrize("consistency", ["async", "pool"])
def test_workers_and_servers_are_processes(consistency: Any) -> None:
    """The order that came gives the same bits on one device."""
    strategy = ParameterServer(2, consistency, window=3, workers=2, tables=["table*"])
    model = Model(gf.optim.Adagrad(0.1), strategy)
    with gf.Session(gf.Cluster.local(4, threads=1), trial=False) as s:
        for window in range(3):
            s.run([model.loss, model.train], model.feeds(window, 24))
        orders = [came.order for came in s.history()]
        values = [s.get(v) for v in model.variables]
        scores = s.run(model.scores, model.feeds(9, 5))
    again = Model(gf.optim.Adagrad(0.1), strategy)
    with gf.Session() as s:
        for window, order in enumerate(orders):
            feeds = {**again.feeds(window, 24), strategy.order: order}
            s.run([again.loss, again.train], feeds)
        for a, b in zip(again.variables, values, strict=True):
            np.testing.assert_array_equal(s.get(a), b)
        np.testing.assert_allclose(s.run(again.scores, again.feeds(9, 5)), scores, rtol=1e-12)
