"""Tables whose rows several places own train as on one device; only rows that are used travel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel.mesh.row_ranges import ring_ranges

Data, Shard = gf.parallel.Data, gf.parallel.Shard
BATCH, ROWS, WIDTH = 11, 50, 4
OPTIMISERS = {
    "sgd": gf.optim.SGD(0.1),
    "adagrad": gf.optim.Adagrad(0.1),
    "rowwise": gf.optim.RowwiseAdagrad(0.1),
    "adam": gf.optim.Adam(0.1, sparse=True),
    "momentum": gf.optim.SGD(0.1, momentum=0.9, sparse=True),
}
Array = np.ndarray[Any, Any]


class Model:
    """A factorisation of two lookups; ids are repeated, and count from either end.

    Args:
        again: look rows of the first table up for a bag of ids, too.
    """

    def __init__(
        self, optimiser: Any, strategy: Any, dtype: str = "float64", again: bool = False,
        open_batch: bool = True, rows: int = ROWS,
    ) -> None:  # fmt: skip
        random = np.random.default_rng(0)
        batch: Any = "batch" if open_batch else BATCH
        self.ids = gf.placeholder("int64", (batch,), name="ids")
        self.bags = gf.placeholder("int32", (batch, 3), name="bags")
        self.wanted = gf.placeholder(dtype, (batch,), name="wanted")
        self.tables = [
            gf.variable(random.normal(size=(rows, WIDTH)).astype(dtype), name=f"table{i}")
            for i in range(2)
        ]
        self.dense = gf.variable(random.normal(size=WIDTH).astype(dtype), name="dense")
        self.rows, self.again, self.dtype = rows, again, dtype
        users = gf.nn.embedding(self.ids, self.tables[0])
        items = gf.nn.embedding(self.bags, self.tables[0 if again else 1])
        self.scores = (users * gf.sum(items, axis=1)) @ self.dense
        self.loss = gf.mean((self.scores - self.wanted) ** 2)
        self.train = optimiser.minimize(self.loss, strategy=strategy)

    def feeds(self, number: int) -> dict[gf.Tensor, Array]:
        """Return what step number `number` is fed."""
        random = np.random.default_rng(number)
        ids = random.zipf(1.2, BATCH) % self.rows
        return {
            self.ids: ids - self.rows * (np.arange(BATCH) % 2),
            self.bags: random.integers(0, self.rows, (BATCH, 3)).astype("int32"),
            self.wanted: random.normal(size=BATCH).astype(self.dtype),
        }

    def results(self, cluster: gf.Cluster | None = None, steps: int = 3) -> list[Array]:
        """Return losses and variables of some steps."""
        with gf.Session(cluster) if cluster is not None else gf.Session() as s:
            found = [s.run([self.loss, self.train], self.feeds(i))[0] for i in range(steps)]
            used = self.tables[:1] if self.again else self.tables
            return [*found, *(s.get(v) for v in (*used, self.dense))]


def assert_same(model: Model, reference: Model, cluster: gf.Cluster | None = None) -> None:
    """Assert that a model trains as another one does on one device."""
    tolerance = 1e-5 if model.dtype == "float32" else 1e-12
    for have, want in zip(model.results(cluster), reference.results(), strict=True):
        np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance)


def kinds(strategy: Any, *fetches: Any, cluster: gf.Cluster | None = None) -> set[str]:
    """Return the kinds of exchanges of a step."""
    return {move.kind for move in strategy.report([*fetches], cluster).collectives}


def strategies(parts: int) -> Mapping[str, Any]:
    rules = {"table*": ("rows",)}
    return {
        "data": Data(parts, tables=["table*"]),
        "batch": Shard({"rows": parts}, rules, batch="rows"),
        "same batch": Shard({"rows": parts}, rules),
        "mesh": Shard({"data": 2, "rows": parts}, rules, batch="data"),
        "micro-batches": Data(parts, tables=["table*"], accumulate=2),
        "shared state": Data(parts, tables=["table*"], shard_state=True),
    }


@pytest.mark.every(7)
@pytest.mark.parametrize("parts", [1, 2, 3])
@pytest.mark.parametrize("how", list(strategies(1)))
@pytest.mark.parametrize("again", [False, True], ids=["two tables", "one table twice"])
@pytest.mark.parametrize("name", list(OPTIMISERS))
def test_owners_train_as_one_device_does(name: str, again: bool, how: str, parts: int) -> None:
    """Ids that are repeated, in one place or in several, update their row once, by the sum."""
    optimiser = OPTIMISERS[name]
    model = Model(optimiser, strategy := strategies(parts)[how], again=again)
    assert_same(model, Model(optimiser, None, again=again))
    if parts > 1 and how == "data":
        assert "gradients" in kinds(strategy, model.loss, model.train)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_owners_on_workers_train_as_one_device_does(dtype: str) -> None:
    strategy = Data(2, tables=["table*"])
    optimiser = OPTIMISERS["adam"]
    model = Model(optimiser, strategy, dtype)
    assert_same(model, Model(optimiser, None, dtype), gf.Cluster.local(2))
    cluster = gf.Cluster.local(2)
    assert kinds(strategy, model.loss, model.train, cluster=cluster) == {
        "keys", "rows", "gradients", "all-reduce",
    }  # fmt: skip


def test_only_the_rows_in_use_travel() -> None:
    """Distinct rows of the other worker travel once for each lookup, and their gradients back."""
    ids = gf.placeholder("int64", (40,), name="ids")
    table = gf.variable(np.ones((1000, 16), "float32"), name="table")
    loss = gf.mean(gf.nn.embedding(ids, table) ** 2)
    train = gf.optim.Adagrad(0.1).minimize(loss, strategy=Data(2, tables=[table]))
    owners = np.array(ring_ranges("table", 1000, 2, even=True).owners)
    mine, theirs = (np.nonzero(owners == i)[0] for i in (0, 1))
    few, more = mine[np.arange(20) % 3], theirs[np.arange(20) % 7]
    with gf.Session(gf.Cluster.local(2)) as s:
        for fed in (np.r_[more, few], np.r_[few, more], np.full(40, mine[0])):
            s.run([loss, train], {ids: fed})
            with s.trace() as trace:
                s.run([loss, train], {ids: fed})
            asked = len({*fed[:20]} & {*theirs}) + len({*fed[20:]} & {*mine})
            moved = [e.bytes for e in trace.edges if "used_rows" in e.tensor]
            assert sum(moved) == asked * (4 + 2 * 16 * 4)


def test_places_with_one_batch_send_rows_alone() -> None:
    model = Model(OPTIMISERS["sgd"], strategy := strategies(2)["same batch"])
    assert kinds(strategy, model.loss, model.train) == {"rows"}


def test_what_is_only_looked_up_needs_no_gradients() -> None:
    model = Model(OPTIMISERS["sgd"], strategies(2)["data"])
    feeds = model.feeds(0)
    del feeds[model.wanted]
    with gf.Session() as s:
        s.run([model.loss, model.train], model.feeds(1))
        scores = s.run(model.scores, feeds)
        assert scores.shape == (BATCH,)
        table, other, dense = (s.get(v) for v in (*model.tables, model.dense))
    ids, bags = feeds[model.ids], feeds[model.bags]
    np.testing.assert_allclose(scores, (table[ids] * other[bags].sum(1)) @ dense, rtol=1e-12)


def test_a_table_that_all_rows_of_move_is_summed_as_before() -> None:
    """Adam moves rows that nobody looked up: each place adds up the gradients of its rows."""
    optimiser = gf.optim.Adam(0.1)
    model = Model(optimiser, strategy := strategies(2)["data"])
    assert_same(model, Model(optimiser, None))
    assert "gradients" not in kinds(strategy, model.loss, model.train)


@pytest.mark.parametrize("wrong", [ROWS, -ROWS - 1, 2**40])
def test_an_id_outside_the_table_is_an_error_and_the_session_goes_on(wrong: int) -> None:
    model = Model(OPTIMISERS["adagrad"], strategies(2)["data"])
    feeds = model.feeds(0)
    spoilt = {**feeds, model.ids: np.array([*feeds[model.ids][:-1], wrong])}
    with gf.Session(gf.Cluster.local(2)) as s:
        message = f"index {wrong} is outside axis 0 of size {ROWS}"
        with pytest.raises(gf.errors.OpError, match=message):
            s.run([model.loss, model.train], spoilt)
        got = s.run([model.loss, model.train], feeds)[0]
    want = Model(OPTIMISERS["adagrad"], None).results(steps=1)[0]
    np.testing.assert_allclose(got, want, rtol=1e-12)


def test_ids_that_are_no_ints_are_refused_where_they_are_looked_up() -> None:
    table = gf.variable(np.ones((4, 2)), name="table")
    with pytest.raises(gf.errors.DTypeError, match=r"embedding at .*test_row_exchange.py"):
        gf.nn.embedding(gf.placeholder("float32", (3,)), table)


def test_a_batch_smaller_than_the_replicas_is_refused_and_the_session_goes_on() -> None:
    model = Model(OPTIMISERS["sgd"], strategies(3)["data"])
    with gf.Session() as s:
        message = r"a batch of 2 .* smaller than its 3 shards"
        with pytest.raises(gf.errors.ShardingError, match=message):
            s.run([model.loss, model.train], {k: v[:2] for k, v in model.feeds(0).items()})
        s.run([model.loss, model.train], model.feeds(0))


def test_bags_without_ids_change_nothing() -> None:
    """One replica's share, or all of them, may hold no id at all."""
    ids = gf.placeholder("int64", ("batch", None), name="ids")
    table = gf.variable(np.ones((6, 2)), name="table")
    loss = gf.mean(gf.sum(gf.nn.embedding(ids, table), axis=(1, 2)))
    train = gf.optim.SGD(0.5).minimize(loss, strategy=Data(2, tables=[table]))
    with gf.Session() as s:
        assert s.run([loss, train], {ids: np.zeros((4, 0), np.int64)})[0] == 0
        np.testing.assert_array_equal(s.get(table), np.ones((6, 2)))
        s.run([loss, train], {ids: np.array([[5], [5]])})
        np.testing.assert_array_equal(s.get(table)[5], [0.5, 0.5])


def test_tables_that_name_nothing_are_refused() -> None:
    with pytest.raises(gf.errors.ShardingError, match=r"tables must be a list .* not 'table'"):
        Data(2, tables="table")  # type: ignore[arg-type]
    model = Model(OPTIMISERS["sgd"], Data(2, tables=["tabel*"]))
    with gf.Session() as s, pytest.raises(gf.errors.ShardingError, match="names 'tabel"):
        s.run([model.loss, model.train], model.feeds(0))


def test_a_report_and_a_plan_expect_the_distinct_rows_of_ids_that_are_equally_likely() -> None:
    rows, lookups = 400, 600
    ids = gf.placeholder("int64", (lookups,), name="ids")
    table = gf.variable(np.ones((rows, 8), "float32"), name="table")
    loss = gf.mean(gf.nn.embedding(ids, table) ** 2)
    strategy = Data(2, tables=[table])
    optimiser = gf.optim.Adam(0.1, sparse=True)
    train = optimiser.minimize(loss, strategy=strategy)
    cluster = gf.Cluster.local(2)
    distinct = rows * (1 - (1 - 1 / rows) ** (lookups // 2))  # of which some are the other's
    report = strategy.report(train, cluster)
    found = {move.kind: move.bytes for move in report.collectives}
    assert found["keys"] == pytest.approx(distinct * 4, abs=2)
    assert found["rows"] == found["gradients"] == pytest.approx(distinct * 32, abs=2)
    plan = gf.plan(train, cluster, shapes={ids: (lookups,)})
    moved = sum(t.bytes for t in plan.transfers if "used_rows" in t.tensor)
    assert moved == pytest.approx(distinct * (4 + 2 * 32), rel=0.01)
    random = np.random.default_rng(0)
    with gf.Session(cluster) as s:
        s.run(train, {ids: random.integers(0, rows, lookups)})
        with s.trace() as trace:
            s.run(train, {ids: random.integers(0, rows, lookups)})
    traced = sum(e.bytes for e in trace.edges if "used_rows" in e.tensor)
    assert traced == pytest.approx(distinct * (4 + 2 * 32), rel=0.1)
