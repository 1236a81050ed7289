"""ParameterServer, against Data, and against the same loop by hand in the order that came."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import FeedError, ShardingError
from graphflow.frontend.interpreter import evaluate
from graphflow.frontend.pytree import fed_sizes
from graphflow.ops.communication.channel_scheduler import random_order
from graphflow.parallel import Data, ParameterServer
from tests.parallel.models import mlp
from tests.parallel.servers.windows import (
    difference,
    feeds_of,
    parts_of,
    traced_bytes,
    traced_links,
    train,
    window_by_hand,
)

OPTIMIZERS = {
    "sgd": gf.optim.SGD(0.05),
    "momentum": gf.optim.SGD(0.05, momentum=0.9, nesterov=True),
    "adam": gf.optim.Adam(0.01),
    "adamw": gf.optim.AdamW(0.01),
    "rmsprop": gf.optim.RMSProp(0.01),
    "adagrad": gf.optim.Adagrad(0.1),
}


# Bulk synchronous ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "servers"),
    [(name, 1 + i % 3) for i, name in enumerate(OPTIMIZERS)]
    + [pytest.param("adam", servers, marks=pytest.mark.slow) for servers in (1, 2)],
)
def test_bsp_is_data_parallelism(name: str, servers: int) -> None:
    optimizer = OPTIMIZERS[name]
    strategy = ParameterServer(servers, "bsp", window=4, workers=3)
    served, data = mlp(strategy, optimizer=optimizer), mlp(Data(3), optimizer=optimizer)
    found = train(served, feeds_of(served, 2, 24))
    turns = [part for feeds in feeds_of(data, 2, 24) for part in parts_of(feeds, 4)]
    wanted = train(data, turns)
    assert difference(found.values, wanted.values) < 1e-12
    np.testing.assert_allclose(found.losses, np.mean(np.reshape(wanted.losses, (2, 4)), 1), 1e-12)


def test_bsp_has_the_same_bits_on_workers_and_on_one_device() -> None:
    strategy = ParameterServer(2, "bsp", window=3, workers=2)
    model = mlp(strategy)
    here = train(model, feeds_of(model, 3, 12))
    there = train(model, feeds_of(model, 3, 12), gf.Cluster.local(4, threads=1))
    assert difference(here.values, there.values) == 0
    assert here.losses == there.losses


# By hand ------------------------------------------------------------------------------------------

SIZE = 5


def squares(strategy: Any, rate: float = 0.05) -> tuple[Any, Any, Any, Any]:
    """The rows, the loss, a step and the weights of a regression of one row a micro-batch."""
    x = gf.placeholder("float64", ("B", SIZE), name="x")
    w = gf.variable(np.linspace(-1.0, 1.0, SIZE), name="w")
    loss = gf.mean(gf.sum((x - w) * (x - w) * 0.5, 1))
    return x, loss, gf.optim.SGD(rate).minimize(loss, strategy=strategy), w


START = np.linspace(-1.0, 1.0, SIZE)


@pytest.mark.parametrize(
    ("consistency", "aggregate", "jit"),
    [("async", 1, "on"), ("async", 2, "off"), ("pool", 1, "off"), ("pool", 4, "on")],
)
def test_any_order_given_is_the_loop_by_hand_bit_for_bit(
    consistency: Any, aggregate: int, jit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", jit)
    random = np.random.default_rng(aggregate)
    strategy = ParameterServer(consistency=consistency, window=4, workers=3, aggregate=aggregate)
    x, loss, step, w = squares(strategy)
    rows = random.normal(size=(12, SIZE))
    for _ in range(4):
        order = random.permutation(np.repeat(np.arange(3), 4))
        if consistency == "pool":  # a worker takes any number of turns, and the last one at its end
            order = np.concatenate([random.integers(0, 3, 9), random.permutation(3)])
        with gf.Session() as s:
            s.run([loss, step], {x: rows, strategy.order: order[None].astype("int32")})
            (came,) = s.history()
            np.testing.assert_array_equal(came.order[0], order)
            numbers = came.micro_batches[0].tolist()
            wanted = window_by_hand(strategy, START, rows, order.tolist(), numbers, 0.05)
            np.testing.assert_array_equal(s.get(w), wanted.weights)


def test_workers_take_the_micro_batches_of_their_turns() -> None:
    strategy = ParameterServer(consistency="async", window=3, workers=2)
    x, loss, step, _ = squares(strategy)
    with gf.Session() as s:
        s.run([loss, step], {x: np.ones((6, SIZE))})
        (came,) = s.history()
    for k in range(2):
        assert came.micro_batches[0][came.order[0] == k].tolist() == [k, k + 2, k + 4]


def test_fetches_are_means_and_rows_in_the_order_of_the_feeds() -> None:
    for consistency, options in [("pool", {}), ("ssp", {"staleness": 1}), ("bsp", {})]:
        strategy = ParameterServer(
            consistency=consistency, window=2, workers=3, servers=1, **options
        )
        x, loss, step, w = squares(strategy, rate=0.0)
        rows = np.random.default_rng(3).normal(size=(18, SIZE))
        with gf.Session() as s:
            mean, sums, _, before = s.run([loss, gf.sum(x, 1), step, w], {x: rows})
        start = np.linspace(-1.0, 1.0, SIZE)
        np.testing.assert_allclose(sums, rows.sum(1), rtol=1e-14)
        np.testing.assert_allclose(mean, (0.5 * (rows - start) ** 2).sum(1).mean(), rtol=1e-14)
        np.testing.assert_array_equal(before, start)


def test_a_micro_batch_draws_its_own_numbers_whichever_worker_takes_it() -> None:
    def masks(strategy: Any, order: Any = None, cluster: Any = None) -> list[Any]:
        gf.random.seed(5)
        x = gf.placeholder("float64", ("B", 6), name="x")
        w = gf.variable(np.ones(6), name="w")
        with gf.nn.training():
            h = gf.nn.dropout(x, 0.5) * w
            rest, _ = gf.scan(lambda c, row: (c + gf.nn.dropout(row, 0.5), None), h[0], h)
        step = gf.optim.SGD(0.0).minimize(gf.mean(h) + gf.mean(rest), strategy=strategy)
        fed = {x: np.ones((12, 6))}
        if order is not None:
            fed[strategy.order] = np.array([order], np.int32)
        with gf.Session(cluster) as s:
            return [s.run([h, gf.mean(rest), step], fed)[:2] for _ in range(2)]

    pool, rounds = (
        ParameterServer(window=3, workers=2),
        ParameterServer(1, "bsp", window=3, workers=2),
    )
    wanted = masks(pool, [0, 1, 0, 1, 0, 1])
    for found in (
        masks(pool, [1, 1, 1, 1, 0, 1]),
        masks(rounds),
        masks(pool, cluster=gf.Cluster.local(3, threads=1)),
    ):
        for (h, rest), (same, total) in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(h, same)
            assert rest == total
    parts = [part for h, _ in wanted for part in np.split(h, 6)]
    assert len({part.tobytes() for part in parts}) == 12


# Backup workers -----------------------------------------------------------------------------------


def test_late_pushes_of_backup_workers_are_dropped_and_counted() -> None:
    strategy = ParameterServer(consistency="bsp", aggregate=2, window=3, workers=4)
    x, loss, step, w = squares(strategy)
    rows = np.random.default_rng(4).normal(size=(12, SIZE))
    # Workers 2 and 3 are late in the first round; worker 3 takes part in the second nevertheless.
    order = [0, 1, 2, 3, 3, 0, 1, 2, 3, 0]
    fed = np.array([[*order, -1, -1]], np.int32)
    with gf.Session() as s:
        value, _ = s.run([loss, step], {x: rows, strategy.order: fed})
        (came,) = s.history()
        found = s.get(w)
    np.testing.assert_array_equal(came.order, fed)
    assert came.staleness[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, -1, -1]
    numbers = came.micro_batches[0][:10].tolist()
    assert numbers == [0, 1, 2, 3, 7, 4, 5, 6, 11, 8]
    assert came.dropped == 4 + 2
    assert came.turns == (3, 2, 2, 3)
    wanted = window_by_hand(strategy, START, rows, order, numbers, 0.05)
    np.testing.assert_array_equal(found, wanted.weights)
    used = [0, 1, 7, 4, 11, 8]
    seen = [START, START]
    seen += [seen[0] - 0.05 * 0.5 * ((seen[0] - rows[0]) + (seen[0] - rows[1]))] * 2
    seen += [seen[2] - 0.05 * 0.5 * ((seen[2] - rows[7]) + (seen[2] - rows[4]))] * 2
    losses = [0.5 * ((w - rows[m]) ** 2).sum() for w, m in zip(seen, used, strict=True)]
    assert value == pytest.approx(np.mean(losses), rel=1e-13)


def test_backup_workers_run_on_workers_and_repeat() -> None:
    strategy = ParameterServer(consistency="bsp", aggregate=2, window=4, workers=3)
    model = mlp(strategy)
    windows = feeds_of(model, 3, 24)
    found = train(model, windows, gf.Cluster.local(4, threads=1), trial=False)
    again = [{**f, strategy.order: c.order} for f, c in zip(windows, found.history, strict=True)]
    repeated = train(model, again)
    assert repeated.losses == found.losses
    assert difference(repeated.values, found.values) == 0


# State that is not trained ------------------------------------------------------------------------


def test_moments_move_by_the_mean_of_what_turns_would_change() -> None:
    """With rounds, that is the mean of what replicas with moments of their own parts have."""

    def build(strategy: Any) -> tuple[Any, ...]:
        x = gf.placeholder("float64", ("B", SIZE), name="x")
        w = gf.variable(np.ones(SIZE), name="w")
        moment = gf.variable(np.zeros(SIZE), name="moment", trainable=False)
        steps = gf.variable(np.array(0), name="steps", trainable=False)
        average = gf.variable(np.zeros(SIZE), name="average", trainable=False)
        train = gf.optim.Adam(0.1).minimize(gf.mean(gf.sum(x * w, 1)), strategy=strategy)
        updates = [
            gf.assign(moment, 0.9 * moment + 0.1 * gf.mean(x, 0)),
            gf.assign(steps, steps + 1),
            gf.assign(average, 0.5 * average + 0.5 * w),
        ]
        return x, [train, *updates], [w, moment, steps, average]

    rows = np.random.default_rng(0).normal(size=(12, SIZE))
    values = []
    for strategy, parts in ((ParameterServer(1, "bsp", window=3, workers=2), 1), (Data(2), 3)):
        x, fetches, variables = build(strategy)
        with gf.Session() as s:
            for part in np.split(rows, parts):
                s.run(fetches, {x: part})
            values.append([s.get(v) for v in variables])
    assert difference(*values) < 1e-12
    assert values[0][2] == 3


def test_integers_of_the_batch_are_refused() -> None:
    x, loss, step, _ = squares(ParameterServer(window=2, workers=2))
    count = gf.variable(np.array(0), name="count", trainable=False)
    more = gf.assign(count, count + gf.sum((x > 0.0).astype("int64")))
    with gf.Session() as s, pytest.raises(ShardingError, match=r"'count'.*have no mean"):
        s.run([loss, step, more], {x: np.ones((4, SIZE))})


# On workers ---------------------------------------------------------------------------------------

CONSISTENCIES: list[tuple[str, dict[str, Any]]] = [
    ("pool", {}), ("bsp", {}), ("async", {}), ("ssp", {"staleness": 1})
]  # fmt: skip


@pytest.mark.parametrize(
    ("consistency", "options", "servers"),
    [
        (*each, 1 + number % 2) if number in (0, 3) else pytest.param(
            *each, 1 + number % 2, marks=pytest.mark.slow
        )
        for number, each in enumerate([*CONSISTENCIES, *CONSISTENCIES[::-1]])
    ],
)  # fmt: skip
def test_the_report_counts_the_bytes_of_the_trace_and_an_order_repeats_a_window(
    consistency: Any, servers: int, options: dict[str, Any]
) -> None:
    cluster = gf.Cluster.local(servers + 2, threads=1)
    strategy = ParameterServer(servers, consistency, window=3, workers=2, **options)
    model = mlp(strategy)
    windows = feeds_of(model, 3, 12)
    with gf.Session(cluster, trial=False) as s:
        losses = [s.run(model.fetches, feeds)[0] for feeds in windows[:2]]
        with s.trace() as trace:
            losses.append(s.run(model.fetches, windows[2])[0])
        values = [s.get(v) for v in model.variables]
        came = s.history()
        report = strategy.report(model.fetches, cluster)
    assert report.bytes == traced_bytes(trace) == sum(report.bytes_by_link.values())
    if consistency != "pool":
        assert report.bytes_by_link == traced_links(trace)
    assert report.bytes_by_kind["push"] == report.bytes_by_kind["pull"] > 0
    assert [each.order.shape for each in came] == [(servers, 6)] * 3
    again = [{**f, strategy.order: c.order} for f, c in zip(windows, came, strict=True)]
    for where in (None,):
        repeated = train(model, again, where)
        assert repeated.losses == losses
        assert difference(repeated.values, values) == 0
        for one, other in zip(repeated.history, came, strict=True):
            np.testing.assert_array_equal(one.order, other.order)
            np.testing.assert_array_equal(one.staleness, other.staleness)


@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_lost_worker_or_server_costs_no_bit(lost: int, tmp_path: Path) -> None:
    """The windows since the checkpoint are done again in the orders that came."""
    strategy = ParameterServer(2, "async", window=4, workers=2)
    model = mlp(strategy)
    windows = feeds_of(model, 6, 16)
    cluster = gf.Cluster.local(4, threads=1)
    with gf.Session(cluster, checkpoint=tmp_path, every=4, trial=False) as s:
        losses = []
        for number, feeds in enumerate(windows):
            if number == 3:
                os.kill(s._life.hosts.pids[lost], signal.SIGKILL)
            losses.append(s.run(model.fetches, feeds)[0])
        values = [s.get(v) for v in model.variables]
        came = s.history()
    assert [each.step for each in came] == [*range(6)]
    again = [{**f, strategy.order: c.order} for f, c in zip(windows, came, strict=True)]
    repeated = train(model, again)
    assert repeated.losses == losses
    assert difference(repeated.values, values) == 0


def test_a_session_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    strategy = ParameterServer(2, "bsp", window=2, workers=2)
    model = mlp(strategy)
    windows = feeds_of(model, 4, 8)
    whole = train(model, windows)
    first = train(model, windows[:2], checkpoint=tmp_path)
    second = train(model, windows[2:], checkpoint=tmp_path)
    assert [*first.losses, *second.losses] == whole.losses
    assert difference(second.values, whole.values) == 0


def test_graphs_that_do_not_train_read_what_servers_have() -> None:
    strategy = ParameterServer(2, window=2, workers=2)
    model = mlp(strategy)
    feeds, other = feeds_of(model, 1, 8) + feeds_of(model, 1, 7, seed=2)
    for cluster in (None, gf.Cluster.local(4, threads=1)):
        with gf.Session(cluster, trial=False) as s:
            s.run(model.fetches[0], other)
            s.run(model.fetches, feeds)
            loss = s.run(model.fetches[0], other)
            values = [s.get(v) for v in model.variables]
            s.run(gf.assign(model.variables[0], 2.0 * model.variables[0]))
            np.testing.assert_array_equal(s.get(model.variables[0]), 2.0 * values[0])
            s.run(model.fetches, feeds)
        plain = mlp()
        with gf.Session() as s:
            for v, value in zip(plain.variables, values, strict=True):
                s.set(v, value)
            x, t = (p.outputs[0] for p in gf.Graph(plain.fetches[0]).placeholders)
            fed = {key.name: value for key, value in other.items()}
            assert s.run(plain.fetches[0], {x: fed["x"], t: fed["t"]}) == pytest.approx(
                loss, rel=1e-14
            )


# Staleness ----------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("bound", [0, 1, 3])
def test_no_read_is_older_than_the_bound_in_any_order(bound: int) -> None:
    """From the log alone: at each push, its worker is at most `bound` turns ahead of all others
    that still run."""
    strategy = ParameterServer(2, "ssp", staleness=bound, window=4, workers=3)
    model = mlp(strategy)
    (feeds,) = feeds_of(model, 1, 24)
    division = strategy.divide(gf.Graph(model.fetches), gf.Cluster.here())
    outputs = [division.graph.outputs[i] for i in division.facts.outputs]
    sizes = fed_sizes(division.source, {x.node: v.shape for x, v in feeds.items()})
    arrays = {x.node: v for x, v in feeds.items()}
    fed = {n.outputs[0]: v for n, v in division.feeds(arrays, sizes).items()}
    widest = 0
    orders = set()
    for seed in range(15):
        with random_order(seed):
            history = division.facts.describe(0, evaluate(outputs, fed))
        for order in history.order:
            orders.add(tuple(order))
            widest = max(widest, largest_lead(order, 3, 4))
    assert widest <= bound
    assert len(orders) > 10 - 5 * (bound == 0)
    assert widest > 0 or bound == 0


def largest_lead(order: Any, workers: int, turns: int) -> int:
    """How far the worker of a push was ahead of the slowest one that still ran when it was
    answered: when its push before this one, or a later one of another worker, came."""
    clocks = np.zeros(workers, int)
    most = 0
    for k in order:
        # The answer came before this push, so other clocks were at most what they are now.
        running = [c for j, c in enumerate(clocks) if c < turns and j != k]
        if running:
            most = max(most, int(clocks[k]) - min(running))
        clocks[k] += 1
    return most


@pytest.mark.parametrize(
    ("delay", "limit"),
    [
        (0, 2.0),
        (2, 0.618),
        (8, 0.1845),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in [(1, 1.0), (4, 0.347)]),
    ],
)
def test_delayed_descent_is_stable_below_its_limit_only(delay: int, limit: float) -> None:
    """τ + 1 workers in turn have gradients that are τ updates old: the rate times the curvature has
    to stay below 2 sin(π / (2(2τ + 1)))."""
    each = 1200 // (delay + 1)
    strategy = ParameterServer(consistency="async", window=each, workers=delay + 1)
    x, rate = gf.placeholder("float64", ("B",), name="x"), gf.placeholder("float64", ())
    w = gf.variable(np.array(1.0), name="w")
    loss = gf.mean(0.5 * (w - 0.0 * x) ** 2.0)
    step = gf.optim.SGD(rate).minimize(loss, strategy=strategy)
    turns = each * (delay + 1)
    order = np.tile(np.arange(delay + 1, dtype=np.int32), each)[None]
    ends = []
    for factor in (0.95, 1.05):
        with gf.Session() as s:
            s.run(step, {x: np.zeros(turns), rate: factor * limit, strategy.order: order})
            assert s.history()[0].staleness[0][delay:].tolist() == [delay] * (turns - delay)
            ends.append(abs(float(s.get(w))))
    assert ends[0] < 1e-1 < 1e1 < ends[1]


# Embeddings that no tables= names -----------------------------------------------------------------


def looked_up(strategy: Any, optimizer: Any) -> tuple[Any, list[Any], list[Any]]:
    """The ids, fetches and variables of a model with an embedding."""
    ids = gf.placeholder("int64", ("B", 3), name="ids")
    table = gf.variable(np.random.default_rng(0).normal(size=(20, 4)), name="table")
    w = gf.variable(np.ones(4), name="w")
    loss = gf.mean((gf.sum(gf.nn.embedding(ids, table), 1) @ w - 1.0) ** 2.0)
    return ids, [loss, optimizer.minimize(loss, strategy=strategy)], [table, w]


@pytest.mark.parametrize("optimizer", [gf.optim.SGD(0.01), gf.optim.Adagrad(0.1)])
def test_an_embedding_is_pushed_whole_and_updated_at_its_server(optimizer: Any) -> None:
    rows = np.random.default_rng(1).integers(0, 20, (24, 3))
    values = []
    for strategy, parts in (ParameterServer(2, "bsp", window=4, workers=3), 1), (Data(3), 4):
        ids, fetches, variables = looked_up(strategy, optimizer)
        with gf.Session() as s:
            for part in np.split(rows, parts):
                s.run(fetches, {ids: part})
            values.append([s.get(v) for v in variables])
    assert difference(*values) < 1e-12


def test_updates_of_rows_alone_need_tables() -> None:
    with pytest.raises(ShardingError, match=r"ParameterServer at .*tables=\['table'\]"):
        looked_up(ParameterServer(), gf.optim.Adam(0.01, sparse=True))


# What is refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"servers": 0}, "servers must be an int of at least 1"),
        ({"window": 2.5}, "window must be an int of at least 1"),
        ({"consistency": "eventual"}, "consistency must be one of 'pool', 'bsp', 'ssp', 'async'"),
        ({"consistency": "bsp", "staleness": 2}, 'staleness=2 is for consistency="ssp"'),
        ({"consistency": "ssp"}, "staleness must be the number of turns"),
        ({"consistency": "ssp", "staleness": -1}, "an int from 0, not -1"),
        ({"consistency": "ssp", "staleness": 1, "aggregate": 2}, "leave out aggregate=2"),
    ],
)
def test_arguments_that_say_nothing_are_refused_at_their_line(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ShardingError, match=message) as caught:
        ParameterServer(**options)
    assert "test_parameter_server.py" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({"servers": 2}, 8, "servers=2, but the step trains only 1 variables"),
        ({"aggregate": 3}, 8, r"4 micro-batches .* do not divide into updates of aggregate=3"),
        ({"consistency": "bsp", "aggregate": 3}, 8, "aggregate=3, but"),
        ({"consistency": "bsp", "aggregate": 1, "servers": 2}, 8, "leaves 1 as backups"),
        ({"devices": ["cpu:0"]}, 8, "a name for each of 1 server"),
        ({}, 6, r"a batch of 6 \(.*\) does not divide into 4 micro-batches"),
        ({}, 2, "does not divide into 4 micro-batches"),
    ],
)
def test_steps_that_do_not_fit_are_refused_at_the_line_of_the_strategy(
    options: dict[str, Any], rows: int, message: str
) -> None:
    x, loss, step, _ = squares(ParameterServer(**{"window": 2, "workers": 2, **options}))
    with gf.Session() as s, pytest.raises(ShardingError, match=message) as caught:
        s.run([loss, step], {x: np.ones((rows, SIZE))})
    assert "ParameterServer at " in str(caught.value)
    assert "test_parameter_server.py" in str(caught.value)


def test_a_fixed_batch_is_refused() -> None:
    x = gf.placeholder("float64", (8, SIZE), name="x")
    w = gf.variable(np.zeros(SIZE), name="w")
    strategy = ParameterServer(window=2, workers=2)
    step = gf.optim.SGD(0.1).minimize(gf.mean((x - w) ** 2.0), strategy=strategy)
    with gf.Session() as s, pytest.raises(ShardingError, match="leave the batch open"):
        s.run(step, {x: np.ones((8, SIZE))})


def test_what_needs_all_gradients_takes_one_server() -> None:
    def build_clipped_model(strategy: Any) -> Any:
        model = mlp(strategy)
        loss = model.fetches[0]
        train = gf.optim.SGD(0.1).minimize(
            loss, strategy=strategy, transform=lambda g: gf.optim.clip_by_global_norm(g, 1e-3)[0]
        )
        model.fetches = [loss, train]
        return model

    served, data = (
        build_clipped_model(ParameterServer(1, "bsp", window=2, workers=2)),
        build_clipped_model(Data(2)),
    )
    found = train(served, feeds_of(served, 1, 8))
    wanted = train(data, [p for f in feeds_of(data, 1, 8) for p in parts_of(f, 2)])
    assert difference(found.values, wanted.values) < 1e-12
    several = build_clipped_model(ParameterServer(2, "bsp", window=2, workers=2))
    with pytest.raises(ShardingError, match=r"global norm .* take servers=1"):
        train(several, feeds_of(several, 1, 8))


def test_losses_are_scaled_by_one_server() -> None:
    def build_scaled_model(strategy: Any) -> Any:
        model = mlp(strategy, dtype="float16")
        scaling = gf.optim.LossScaling(2.0**30, interval=2)
        loss = model.fetches[0]
        train = gf.optim.SGD(0.01).minimize(loss, strategy=strategy, scaling=scaling)
        scale = next(v for v in gf.Graph(train).variables if "loss_scale" in v.name)
        model.fetches = [loss, train]
        model.variables = [*model.variables, scale.outputs[0]]
        return model

    served, data = (
        build_scaled_model(ParameterServer(1, "bsp", window=4, workers=2)),
        build_scaled_model(Data(2)),
    )
    found = train(served, feeds_of(served, 2, 8))
    wanted = train(data, [p for f in feeds_of(data, 2, 8) for p in parts_of(f, 4)])
    assert found.values[-1] == wanted.values[-1] < 2.0**30
    assert difference(found.values[:-1], wanted.values[:-1]) < 2e-3


def test_inner_steps_are_refused_and_one_is_the_optimiser_itself() -> None:
    strategy = ParameterServer(consistency="bsp", window=2, workers=2)
    once = mlp(strategy, optimizer=gf.optim.Emso(gf.optim.SGD(0.1), 1, 0.5))
    plain = mlp(strategy, optimizer=gf.optim.SGD(0.1))
    values = [train(model, feeds_of(model, 1, 8)).values for model in (once, plain)]
    assert difference(*values) == 0
    several = mlp(strategy, optimizer=gf.optim.Emso(gf.optim.SGD(0.1), 2, 0.5))
    with pytest.raises(ShardingError, match=r"inner steps of gf\.optim\.Emso"):
        train(several, feeds_of(several, 1, 8))


def test_rates_may_follow_from_losses_and_counts() -> None:
    def build(strategy: Any) -> Any:
        step = gf.variable(np.array(0.0), name="step", trainable=False)
        model = mlp(strategy)
        loss = model.fetches[0]
        rate = 0.1 / (1.0 + step) + 0.001 * gf.stop_gradient(loss)
        optimizer = gf.optim.SGD(rate)
        model.fetches = [loss, optimizer.minimize(loss, strategy=strategy)]
        model.fetches += [gf.assign(step, step + 1.0), rate]
        model.variables = [*model.variables, step]
        return model

    served = build(ParameterServer(2, "bsp", window=3, workers=2))
    data = build(Data(2))
    found = train(served, feeds_of(served, 2, 12))
    wanted = train(data, [p for f in feeds_of(data, 2, 12) for p in parts_of(f, 3)])
    assert difference(found.values, wanted.values) < 1e-12
    assert found.values[-1] == 6


@pytest.mark.parametrize(
    ("options", "order", "message"),
    [
        ({}, [0, 1, 0], r"shape \(1, 3\).* one of shape \(1, 4\)"),
        ({}, [0, 1, 1, 1], "worker 1 at place 3, which cannot push"),
        ({}, [0, 0, 2, 1], "worker 2 at place 2"),
        ({"consistency": "async"}, [0, 0, 0, 1], "worker 0 at place 2"),
        ({"consistency": "ssp", "staleness": 0}, [0, 0, 1, 1], "worker 0 at place 1"),
    ],
)
def test_orders_that_cannot_come_are_refused(
    options: dict[str, Any], order: list[int], message: str
) -> None:
    strategy = ParameterServer(**{"window": 2, "workers": 2, **options})
    x, _, step, _ = squares(strategy)
    with gf.Session() as s, pytest.raises(FeedError, match=message):
        s.run(step, {x: np.ones((4, SIZE)), strategy.order: np.array([order], np.int32)})
