"""Tables on parameter servers, against Data, and against one loop by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import OpError, ShardingError
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

        def sum_rows(table: Array, number: int) -> Array:
            ids, wanted = parts[number][self.ids], parts[number][self.wanted]
            found = np.zeros_like(table)
            np.add.at(found, ids.reshape(-1), (table[ids] - wanted).reshape(-1, WIDTH))
            return found

        return sum_rows

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


# Hybrids ------------------------------------------------------------------------------------------


def hybrid_by_hand(
    model: Model, windows: list[Mapping[gf.Tensor, Array]], orders: list[Array], workers: int
) -> list[Array]:
    """The tables and the dense layer after windows of SGD, by one loop in the order that came."""
    first, second, dense = (np.array(v.node.attrs["initial"]) for v in model.variables)
    for feeds, order in zip(windows, orders, strict=True):
        parts = parts_of(feeds, len(order))
        seen = [(first.copy(), second.copy()) for _ in range(workers)]
        clocks, sums, pushes = [0] * workers, np.zeros(WIDTH), 0
        for k in order.tolist():
            part = parts[clocks[k] * workers + k]
            ids, bags = part[model.ids], part[model.bags]
            users, items = seen[k][0][ids], seen[k][1][bags].sum(1)
            apart = 2 * ((users * items) @ dense - part[model.wanted])[:, None] / len(ids)
            np.add.at(first, ids, -0.1 * apart * items * dense)
            np.add.at(second, bags, np.repeat((-0.1 * apart * users * dense)[:, None], 3, 1))
            sums += (apart * users * items).sum(0)
            seen[k] = first.copy(), second.copy()
            clocks[k], pushes = clocks[k] + 1, pushes + 1
            if pushes % workers == 0:
                dense = dense - 0.1 * sums / workers
                sums = np.zeros(WIDTH)
    return [first, second, dense]


@pytest.mark.parametrize("processes", [1, 4])
def test_a_hybrid_updates_rows_at_once_and_other_layers_in_rounds(processes: int) -> None:
    strategy = ParameterServer(window=4, tables=["*"]) * Data(3)
    model = Model(gf.optim.SGD(0.1), strategy)
    windows = [model.feeds(window, 36) for window in range(2)]
    with gf.Session(gf.Cluster.local(processes, threads=1), trial=False) as s:
        for feeds in windows:
            s.run([model.loss, model.train], feeds)
        orders = [came.order for came in s.history()]
        values = [s.get(v) for v in model.variables]
    by_hand = hybrid_by_hand(model, windows, [order[0] for order in orders], 3)
    for a, b in zip(values, by_hand, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-12)
    again = Model(gf.optim.SGD(0.1), strategy)
    with gf.Session() as s:
        for window, order in enumerate(orders):
            s.run(again.train, {**again.feeds(window, 36), strategy.order: order})
        for v, a in zip(again.variables, values, strict=True):
            np.testing.assert_array_equal(s.get(v), a)


def test_a_hybrid_of_one_worker_is_plain_training() -> None:
    strategy = Data(1) * ParameterServer(2, window=4, tables=["*"])
    model, plain = (Model(gf.optim.Adam(0.1, sparse=True), each) for each in (strategy, None))
    with gf.Session() as s, gf.Session() as t:
        s.run(model.train, model.feeds(0, 12))
        for each in parts_of(plain.feeds(0, 12), 4):
            t.run(plain.train, each)
        for a, b in zip(model.variables, plain.variables, strict=True):
            np.testing.assert_allclose(s.get(a), t.get(b), atol=1e-12)


@pytest.mark.parametrize(
    ("servers", "other", "message"),
    [
        ({}, Data(2), "has no tables="),
        ({"tables": ["*"]}, gf.parallel.Shard({"rows": 2}), "goes with a Data"),
        ({"tables": ["*"], "consistency": "bsp"}, Data(2), "leave out consistency='bsp'"),
        ({"tables": ["*"], "workers": 3}, Data(2), "3 workers, and the Data 2 replicas"),
        ({"tables": ["*"]}, Data(2, shard_state=True), "shard_state=True of the Data"),
        ({"tables": ["*"]}, Data(2, tables=["x"]), "both would keep tables"),
    ],
)
def test_hybrids_without_meaning_are_refused(
    servers: dict[str, Any], other: Any, message: str
) -> None:
    with pytest.raises(ShardingError, match=message):
        ParameterServer(**servers) * other


# Outside of windows -------------------------------------------------------------------------------


def test_tables_are_read_and_restored_on_other_servers(tmp_path: Path) -> None:
    model = Model(
        gf.optim.Adagrad(0.1), ParameterServer(2, "bsp", window=2, workers=2, tables=["*"])
    )
    feeds = model.feeds(9, 5)
    del feeds[model.wanted]
    with gf.Session() as s:
        for _ in range(2):  # as they begin, and trained
            scores = s.run(model.scores, feeds)
            first, second, dense = (s.get(v) for v in model.variables)
            items = second[feeds[model.bags]].sum(1)
            np.testing.assert_allclose(scores, (first[feeds[model.ids]] * items) @ dense)
            np.testing.assert_allclose(s.run(gf.sum(model.tables[0])), first.sum())
            s.run(model.train, model.feeds(0, 24))
        s.save(tmp_path / "two")
        s.run(model.train, model.feeds(1, 24))
        values = [s.get(v) for v in model.variables]
        s.run(gf.assign(model.tables[0], np.ones((ROWS, WIDTH))))
        assert (s.get(model.tables[0]) == 1).all()
    strategy = ParameterServer(3, "bsp", window=2, workers=2, tables=["*"])
    other = Model(gf.optim.Adagrad(0.1), strategy)
    with gf.Session() as s:
        s.load(tmp_path / "two")
        s.run(other.train, other.feeds(1, 24))
        for v, a in zip(other.variables, values, strict=True):
            np.testing.assert_allclose(s.get(v), a, atol=1e-12)


@pytest.mark.slow
def test_ranges_move_to_servers_that_are_asked_for_less() -> None:
    rows = 20_000
    initial = np.random.default_rng(1).normal(size=(rows, 8)).astype("float32")
    values = []
    for moves in (True, False):
        ids = gf.placeholder("int64", ("B", 64), name="ids")
        table = gf.variable(initial, name="table")
        loss = gf.mean(gf.sum(gf.nn.embedding(ids, table) ** 2.0, axis=2))
        strategy = ParameterServer(2, "bsp", window=2, workers=2, tables=[table])
        train = gf.optim.Adagrad(0.1).minimize(loss, strategy=strategy)
        hot = np.flatnonzero(np.repeat(ring_ranges("table", rows, 2).owners, 5)[:rows] == 0)
        random = np.random.default_rng(0)
        with gf.Session(gf.Cluster.local(2, threads=1), trial=False) as s:
            for step in range(4):
                s.run(train, {ids: hot[random.zipf(1.1, (64, 64)) % 500]})
                if moves and step == 2:
                    replanned = s.replan()
                    assert replanned.ranges and replanned.load_after < replanned.load_before
            values.append(s.get(table))
    np.testing.assert_array_equal(*values)


# Memory and errors --------------------------------------------------------------------------------


def test_a_window_keeps_as_many_rows_as_it_has_lookups() -> None:
    strategy = ParameterServer(2, "async", window=4, workers=2, tables=["*"])
    ids = gf.placeholder("int64", ("B",), name="ids")
    table = gf.variable(gf.init.zeros((1 << 16, 64)), name="table")
    loss = gf.mean(gf.sum(gf.nn.embedding(ids, table), axis=1))
    train = gf.optim.Adagrad(0.1).minimize(loss, strategy=strategy)
    with gf.Session(gf.Cluster.local(4, threads=1), trial=False) as s:
        s.run(train, {ids: np.arange(256)})
        report = s.memory(train)
    for server in ("/worker:0/cpu:0", "/worker:1/cpu:0"):
        use = report[server].use
        lookups, row = 256, 4 * 64
        assert 2 * lookups * row <= use.arena < 4 * lookups * row
        assert use.variables < 1.1 * 2 * (1 << 15) * row


def whole_use(table: Any, ids: Any) -> Any:
    return gf.sum(table) + gf.sum(gf.nn.embedding(ids, table))


def trained_ids(table: Any, ids: Any) -> Any:
    offset = gf.variable(np.int64(1), name="offset", trainable=False)
    return gf.sum(gf.nn.embedding(ids + offset, table))


def drawn_ids(table: Any, ids: Any) -> Any:
    return gf.sum(gf.nn.embedding(ids * 0 + gf.random.randint(0, 3), table))


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (whole_use, "its update moves all rows"),
        (trained_ids, "depend on variable 'offset'"),
        (drawn_ids, "depend on random_integers"),
    ],
)
def test_what_is_no_table_is_refused_by_name(use: Any, message: str) -> None:
    ids = gf.placeholder("int64", ("B",), name="ids")
    table = gf.variable(np.zeros((7, 2)), name="table")
    strategy = ParameterServer(consistency="async", window=2, workers=1, tables=["table"])
    train = gf.optim.SGD(0.1).minimize(use(table, ids), strategy=strategy)
    with gf.Session() as s, pytest.raises(ShardingError, match=message):
        s.run(train, {ids: np.zeros(4, int)})


def test_names_that_match_nothing_and_ids_outside_are_errors() -> None:
    with pytest.raises(ShardingError, match="must be a list"):
        ParameterServer(tables="table")
    model = Squares(ParameterServer(consistency="async", window=2, workers=1, tables=["tabel"]))
    with gf.Session() as s, pytest.raises(ShardingError, match="'table'"):
        s.run(model.train, model.feeds(4))
    model = Squares(ParameterServer(consistency="async", window=2, workers=1, tables=["*"]))
    feeds = model.feeds(4)
    feeds[model.ids][1, 1] = ROWS
    with gf.Session() as s:
        s.run(model.train, model.feeds(4))
        before = s.get(model.table)
        with pytest.raises(OpError, match=f"{ROWS} .*size {ROWS}"):
            s.run(model.train, feeds)
        np.testing.assert_array_equal(s.get(model.table), before)
