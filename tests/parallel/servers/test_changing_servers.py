"""Servers that join and leave a running session: the same numbers, and only what moves travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ClusterError, MemoryLimitError, SessionError, ShardingError
from graphflow.parallel.mesh.row_ranges import ring_ranges

ROWS, TURNS, WORKERS = 1500, 2, 2
Change = Callable[[gf.Session], Any]
NONE: Mapping[int, Change] = {}


class Regression:
    """Rows of a table and three layers, on servers."""

    def __init__(self, servers: int, tables: Any = (), **options: Any) -> None:
        with gf.random.seed(2):
            self.x = gf.placeholder("float32", ("B", 12), name="x")
            self.ids = gf.placeholder("int64", ("B", 3), name="ids")
            self.table = gf.variable(gf.init.normal((ROWS, 12), 0.1), name="table")
            weights = [gf.variable(gf.init.glorot((12, 12)), name=n) for n in ("a", "b", "c")]
            hidden = self.x + gf.sum(gf.nn.embedding(self.ids, self.table), axis=1)
            for weight in weights:
                hidden = gf.nn.dropout(gf.tanh(hidden @ weight), 0.1)
            self.loss = gf.mean(gf.square(hidden - 1.0))
            self.strategy = gf.parallel.ParameterServer(
                servers, window=TURNS, workers=WORKERS, tables=tables, **options
            )
            adam = gf.optim.Adam(0.05, sparse=bool(tables))
            self.train = adam.minimize(self.loss, strategy=self.strategy)
        self.scores = gf.sum(gf.nn.embedding(self.ids, self.table), axis=2)
        self.variables = [v.outputs[0] for v in gf.Graph([self.train]).variables]

    def feeds(self, number: int) -> dict[Any, Any]:
        random = np.random.default_rng(number)
        rows = TURNS * WORKERS * 5
        return {
            self.x: random.normal(size=(rows, 12)).astype("float32"),
            self.ids: random.integers(0, ROWS, (rows, 3)),
        }

    def run(
        self, changes: Mapping[int, Change], cluster: Any = None, windows: int = 5, **options: Any
    ) -> list[Any]:
        """Losses, the scores after each window, and all variables at the end.

        Args:
            changes: what is done before a window.
        """
        with gf.Session(cluster, trial=False, **options) as s:
            found: list[Any] = []
            for number in range(windows):
                if number in changes:
                    changes[number](s)
                feeds = self.feeds(number)
                found.append(s.run([self.loss, self.train], feeds)[0])
                found.append(s.run(self.scores, {self.ids: feeds[self.ids]}))
            return [*found, *(s.get(v) for v in self.variables)]


def assert_same(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other)
    for a, b in zip(one, other, strict=True):
        np.testing.assert_array_equal(a, b)


def join(s: gf.Session) -> None:
    s.add_server()


def leave(number: int) -> Change:
    return lambda s: s.remove_server(number)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "tables",
    [pytest.param((), marks=pytest.mark.slow, id="whole"), pytest.param(("table",), id="rows")],
)
@pytest.mark.parametrize("consistency", ["bsp", pytest.param("async", marks=pytest.mark.slow)])
def test_windows_after_a_change_are_those_of_so_many_servers(tables: Any, consistency: Any) -> None:
    """On one device all runs have the same order, so they have the same bits."""

    def run(servers: int, changes: Mapping[int, Change]) -> list[Any]:
        return Regression(servers, tables, consistency=consistency).run(changes)

    want = run(3, NONE)
    assert_same(run(2, {2: join}), want)
    assert_same(run(3, {1: leave(0), 3: join}), want)
    assert_same(run(1, {1: join, 2: join, 3: leave(1)}), want)


@pytest.mark.slow  # three sessions
def test_what_filters_have_not_sent_yet_stays() -> None:
    """Residuals of pushes are at workers. What a pull's filter remembers moves with its variable.

    Both begin a window with what the window before left there."""

    def run(servers: int, changes: Mapping[int, Change]) -> list[Any]:
        filters = {
            "push": [gf.parallel.Significant(0.02)],
            "pull": [gf.parallel.Significant(0.001)],
        }
        return Regression(servers, consistency="bsp", filters=filters).run(changes)

    want = run(2, NONE)
    assert_same(run(1, {2: join}), want)
    assert_same(run(2, {1: leave(0), 3: join}), want)


def test_the_order_of_a_window_with_one_server_more_can_be_fed() -> None:
    model = Regression(1, consistency="async")
    with gf.Session(trial=False) as s:
        s.run(model.train, model.feeds(0))
        assert s.history()[-1].order.shape == (1, TURNS * WORKERS)
        s.add_server()
        s.run(model.train, model.feeds(1))
        order = s.history()[-1].order
        assert order.shape == (2, TURNS * WORKERS)
        s.run(model.train, {**model.feeds(2), model.strategy.order: order})
        np.testing.assert_array_equal(s.history()[-1].order, order)


def test_only_a_share_travels_from_server_to_server() -> None:
    """The counts are those of the trace. Nothing of a variable comes through the client."""
    model = Regression(3, ("table",), consistency="bsp")
    slots = 3  # the table and two moments of Adam
    with gf.Session(gf.Cluster.local(5, threads=1), trial=False) as s:
        s.run(model.train, model.feeds(0))
        for change, share in ((s.add_server, 1 / 4), (lambda: s.remove_server(1), 1 / 4)):
            with s.trace() as trace:
                done = change()
            between = [e for e in trace.edges if "client" not in e.source + e.target]
            assert sum(e.bytes * e.count for e in between) == done.nbytes
            assert all(e.source != e.target for e in between)
            assert done.ranges == pytest.approx(ROWS * share, rel=0.15)
            rows = done.ranges * slots * 12 * 4
            assert rows <= done.nbytes <= rows + 3 * slots * 12 * 12 * 4
            assert 0.5 * share < done.nbytes / done.total < 1.3 * share
        assert [d for d in s.cluster.devices if "worker:1/" in d] == []
        s.run(model.train, model.feeds(1))


@pytest.mark.slow  # processes start and end
def test_processes_join_and_leave_without_a_difference() -> None:
    want = Regression(3, ("table",), consistency="bsp").run(NONE)
    model = Regression(2, ("table",), consistency="bsp")
    changes = {1: leave(0), 2: join, 3: join}
    assert_same(model.run(changes, gf.Cluster.local(4, threads=1)), want)


@pytest.mark.slow  # processes start and end
def test_a_server_may_join_on_a_device_of_the_session() -> None:
    want = Regression(2, consistency="bsp").run(NONE)
    model = Regression(1, consistency="bsp")
    changes = {2: lambda s: s.add_server("/worker:1/cpu:0")}
    assert_same(model.run(changes, gf.Cluster.local(3, threads=1)), want)


def test_a_ring_that_grows_and_shrinks_moves_ranges_of_one_owner_only() -> None:
    ranges = ring_ranges("table", 40_000, 4)
    more = ranges.join("table")
    assert more.owners == ring_ranges("table", 40_000, 5).owners
    assert {(a, b) for a, b in zip(ranges.owners, more.owners, strict=True) if a != b} == {
        (i, 4) for i in range(4)
    }
    less = more.leave("table", 1)
    both = [*zip(more.owners, less.owners, strict=True)]
    assert all(b == a - (a > 1) for a, b in both if a != 1)
    shares = np.bincount([b for a, b in both if a == 1])
    assert shares.min() / shares.sum() > 0.15
    back = less.join("table")  # it gets the place on the ring that is free
    names = {0: 0, 1: 2, 2: 3, 3: 4, 4: 1}
    assert [names[owner] for owner in back.owners] == [*more.owners]


def test_what_cannot_be_is_refused_and_changes_nothing() -> None:
    model = Regression(2, consistency="bsp")
    with gf.Session(trial=False) as s:
        with pytest.raises(SessionError, match="once a session has run a step with a Parameter"):
            s.add_server()
        s.run(model.train, model.feeds(0))
        with pytest.raises(ShardingError, match=r"no server 2; 2 servers are numbered from 0 to 1"):
            s.remove_server(2)
        with pytest.raises(SessionError, match="number"):
            s.remove_server("0")  # type: ignore[arg-type]
        s.add_server()
        s.add_server()  # a table and three layers
        with pytest.raises(ShardingError, match="4 servers keep 4 variables"):
            s.add_server()
        for _ in range(3):
            s.remove_server()
        with pytest.raises(ShardingError, match="the last server cannot leave"):
            s.remove_server()
        s.run(model.train, model.feeds(1))


@pytest.mark.slow  # processes start and end
def test_a_worker_that_cannot_join_is_refused() -> None:
    model = Regression(1, consistency="bsp")
    with gf.Session(gf.Cluster.local(3, threads=1), trial=False) as s:
        s.run(model.train, model.feeds(0))
        with pytest.raises(ClusterError, match="the session starts its workers itself"):
            s.add_server("tcp://127.0.0.1:9")
        before = s.cluster
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                "graphflow.planning.migration.server_copies.ServerCopies.check_memory",
                _raise_no_room,
            )
            with pytest.raises(MemoryLimitError, match="no room"):
                s.add_server()
        assert s.cluster == before
        s.run(model.train, model.feeds(1))
        s.add_server()
        s.run(model.train, model.feeds(2))


def _raise_no_room(copies: Any) -> None:
    raise MemoryLimitError("no room")
