"""Filters of parameter servers: by hand, and against the bytes of traces."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ShardingError
from graphflow.frontend.interpreter import evaluate
from graphflow.parallel import ParameterServer
from graphflow.parallel.compression.filters.key_cache import hash_keys
from tests.parallel.models import mlp
from tests.parallel.servers.windows import difference, feeds_of, traced_bytes, train

FixedPoint, KeyCache, Kkt, PowerSGD, RandomSkip, Significant, TopK = (
    getattr(gf.parallel, name)
    for name in ("FixedPoint", "KeyCache", "Kkt", "PowerSGD", "RandomSkip", "Significant", "TopK")
)
SIZE = 40
START = np.linspace(-1.0, 1.0, SIZE)
CONSISTENCIES = [("pool", {}), ("bsp", {}), ("async", {}), ("ssp", {"staleness": 1})]


class Sums:
    """Weights whose gradient is the mean of the rows of a micro-batch, wherever they are."""

    def __init__(self, strategy: Any, rate: float = 1.0, squares: float = 0.0) -> None:
        self.x = gf.placeholder("float64", ("B", 8, 5), name="x")
        self.w = gf.variable(START.reshape(8, 5), name="w")
        loss = gf.mean(gf.sum(self.x * self.w, (1, 2))) + gf.sum(self.w**2.0) * squares
        self.train = gf.optim.SGD(rate).minimize(loss, strategy=strategy)

    def residual(self, s: gf.Session) -> Any:
        """What all workers keep."""
        states = self.train.node.attrs["strategy"]._filters._states.values()
        (kept,) = [node for node in states if node.name == "push/w/residual"]
        return s.get(kept.outputs[0])


def rows_of(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, 8, 5))


@pytest.mark.every(3)
@pytest.mark.parametrize(("consistency", "options"), CONSISTENCIES)
@pytest.mark.parametrize(
    "rule",
    [
        [TopK(0.1)], [Significant(0.5)], [Significant(lambda t: 4.0 / t), FixedPoint(4)],
        [PowerSGD(1)], [RandomSkip(0.2, feedback=True)],
    ],
    ids=lambda rule: type(rule[0]).__name__,
)  # fmt: skip
def test_what_was_pushed_and_what_is_kept_is_the_sum_of_the_gradients(
    rule: Any, consistency: Any, options: Any
) -> None:
    strategy = ParameterServer(
        consistency=consistency, window=3, workers=2, filters={"push": rule}, **options
    )
    step, total = Sums(strategy), np.zeros((8, 5))
    with gf.Session() as s:
        for seed in range(3):
            rows = rows_of(12, seed)
            s.run(step.train, {step.x: rows})
            total += rows.reshape(6, 2, 8, 5).mean(1).sum(0)
        pushes = 2 if consistency in ("pool", "bsp") else 1  # their mean is an update
        sent = pushes * (START.reshape(8, 5) - s.get(step.w))
        kept = step.residual(s)
    assert kept.shape == (2, 8, 5)
    np.testing.assert_allclose(sent + kept.sum(0), total, rtol=0, atol=1e-12)
    assert np.abs(kept).max() > 0.01


def top(x: Any, count: int) -> Any:
    chosen = np.argsort(-np.abs(x).ravel())[:count]
    found = np.zeros(x.size)
    found[chosen] = x.ravel()[chosen]
    return found.reshape(x.shape)


@pytest.mark.parametrize("jit", ["on", "off"])
def test_a_window_with_filters_both_ways_is_the_loop_by_hand(
    jit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each worker keeps what it did not push; the server notes what each worker has."""
    monkeypatch.setenv("GRAPHFLOW_JIT", jit)
    filters = {"push": [TopK(0.1)], "pull": [TopK(0.3)]}
    strategy = ParameterServer(consistency="async", window=4, workers=3, filters=filters)
    step = Sums(strategy, rate=0.1, squares=0.5)
    random, rows = np.random.default_rng(1), rows_of(24)
    order = random.permutation(np.repeat(np.arange(3), 4)).astype("int32")
    w = START.reshape(8, 5)
    kept, seen = np.zeros((3, 8, 5)), np.stack([w] * 3)
    with gf.Session() as s:
        for _ in range(2):
            s.run(step.train, {step.x: rows, strategy.order: order[None]})
            numbers = s.history()[-1].micro_batches[0]
            for k, m in zip(order, numbers, strict=True):
                given = rows[2 * m : 2 * m + 2].mean(0) + seen[k] + kept[k]
                sent = top(given, 4)
                kept[k] = given - sent
                w = w - 0.1 * sent
                seen[k] = seen[k] + top(w - seen[k], 12)
            np.testing.assert_allclose(s.get(step.w), w, rtol=0, atol=1e-13)
            np.testing.assert_allclose(step.residual(s), kept, rtol=0, atol=1e-13)
            seen = np.stack([w] * 3)  # a window begins with whole values


@pytest.mark.every(3)
@pytest.mark.parametrize(("consistency", "options"), CONSISTENCIES)
def test_training_comes_near_training_without(consistency: Any, options: Any) -> None:
    losses = []
    for filters in ((), [FixedPoint(8)], {"push": [TopK(0.2), FixedPoint(8)]}):
        strategy = ParameterServer(
            consistency=consistency, window=4, workers=2, filters=filters, **options
        )
        model = mlp(strategy, optimizer=gf.optim.Adam(0.02))
        losses.append(train(model, feeds_of(model, 8, 16)).losses[-1])
    assert max(losses[1:]) < losses[0] * 1.5 + 0.1, losses


# On workers ---------------------------------------------------------------------------------------

FIXED = [
    [FixedPoint(8)],
    {"push": [TopK(0.1), FixedPoint(4)], "pull": [RandomSkip(0.3, feedback=True), FixedPoint(8)]},
    {"push": [PowerSGD(1)]},
]


@pytest.mark.every(5)
@pytest.mark.parametrize("filters", FIXED, ids=["rounded", "chains", "factors"])
@pytest.mark.parametrize(
    ("consistency", "options"),
    [
        CONSISTENCIES[0],
        *(pytest.param(*each, marks=pytest.mark.slow) for each in CONSISTENCIES[1:]),
    ],
)
def test_the_bytes_of_a_report_are_those_of_a_trace_and_an_order_repeats_a_window(
    filters: Any, consistency: Any, options: Any
) -> None:
    cluster = gf.Cluster.local(3, threads=1)
    strategy = ParameterServer(
        consistency=consistency, window=3, workers=2, filters=filters, **options
    )
    model = mlp(strategy, "float32")
    windows = feeds_of(model, 3, 12)
    with gf.Session(cluster, trial=False) as s:
        losses = [s.run(model.fetches, feeds)[0] for feeds in windows[:2]]
        with s.trace() as trace:
            losses.append(s.run(model.fetches, windows[2])[0])
        values = [s.get(v) for v in model.variables]
        came = s.history()
    report = strategy.report(model.fetches, cluster)
    assert report.bytes == traced_bytes(trace)
    filtered, plain = report.filtered or (0, 0)
    assert 0 < filtered < 0.5 * plain
    again = [{**f, strategy.order: c.order} for f, c in zip(windows, came, strict=True)]
    repeated = train(model, windows if consistency == "bsp" else again)
    assert repeated.losses == losses
    assert difference(repeated.values, values) == 0


def test_the_report_tells_the_bytes_before_and_after_each_filter() -> None:
    strategy = ParameterServer(window=2, workers=2, filters={"push": [TopK(0.1), FixedPoint(8)]})
    step = Sums(strategy)
    text = str(strategy.report(step.train, gf.Cluster.local(3)))
    assert "gradients of a push: 320 bytes → TopK(share=0.1, feedback=True): 40" in text
    assert "→ FixedPoint(bits=8): 20" in text  # 4 integers, 4 positions of 2 bytes, a scale


@pytest.mark.parametrize(
    ("consistency", "options"),
    [
        CONSISTENCIES[0],
        *(pytest.param(*each, marks=pytest.mark.slow) for each in CONSISTENCIES[1:]),
    ],
)
def test_the_history_counts_the_bytes_that_follow_from_the_data(
    consistency: Any, options: Any
) -> None:
    """A trace has means over messages, in whole bytes."""
    window, workers, whole = 4, 2, SIZE * 8
    filters = {
        "push": [Significant(0.3), KeyCache(), FixedPoint(4)], "pull": [Significant(0.2)],
    }  # fmt: skip
    strategy = ParameterServer(
        consistency=consistency, window=window, workers=workers, filters=filters, **options
    )
    step = Sums(strategy, 0.1, 0.5)
    with gf.Session(gf.Cluster.local(3, threads=1), trial=False) as s:
        for seed in range(3):
            with s.trace() as trace:
                s.run(step.train, {step.x: rows_of(16, seed)})
        filtered = s.history()[-1].filtered
    turns = window * workers
    assert filtered["push"][1] == turns * whole
    assert filtered["pull"][1] == (turns - workers) * whole
    numbers = turns * 4 * (2 if consistency == "pool" else 1)
    counted = filtered["push"][0] + filtered["pull"][0] + workers * whole + numbers
    rounding = sum(e.count for e in trace.edges) / 2
    assert abs(traced_bytes(trace) - counted) <= rounding
    assert 0 < filtered["push"][0] < 0.6 * filtered["push"][1]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("consistency", "options"),
    [*CONSISTENCIES, ("bsp", {"aggregate": 1}), ("bsp", {"aggregate": 2})],
)
def test_filters_that_leave_nothing_out_change_no_bit(consistency: Any, options: Any) -> None:
    """What workers have is noted for each, also if some are answered and others are not."""
    order, values = None, []
    for filters in ((), [Significant(0.0), KeyCache()]):
        strategy = ParameterServer(
            consistency=consistency, window=3, workers=3, filters=filters, **options
        )
        model = mlp(strategy)
        windows = feeds_of(model, 2, 18)
        if order is not None:
            windows = [{**f, strategy.order: c} for f, c in zip(windows, order, strict=True)]
        found = train(model, windows)
        order = order or [each.order for each in found.history]
        values.append(found.values)
    assert difference(*values) < 1e-14


def test_rows_of_tables_travel_as_they_are() -> None:
    values = []
    for filters in ((), {"push": [TopK(0.1)], "pull": [FixedPoint(8)]}):
        ids = gf.placeholder("int64", ("B",), name="ids")
        random = np.random.default_rng(0)
        table = gf.variable(random.normal(size=(50, 6)), name="table")
        w = gf.variable(random.normal(size=(6, 40)), name="w")
        strategy = ParameterServer(
            consistency="bsp", window=1, workers=2, tables=["table"], filters=filters
        )
        loss = gf.mean(gf.tanh(gf.nn.embedding(ids, table) @ w) ** 2.0)
        step = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            s.run(step, {ids: np.arange(16) % 50})
            values.append((s.get(table), s.get(w)))
        report = str(strategy.report(step))
        assert ("rows of tables travel without filters" in report) == bool(filters)
    assert difference([values[0][0]], [values[1][0]]) == 0  # the first pull is whole
    assert difference([values[0][1]], [values[1][1]]) > 1e-6


def test_only_the_numbers_that_are_chosen_travel() -> None:
    cluster = gf.Cluster.local(3, threads=1)
    moved = []
    for delta in (0.0, 1e6):
        strategy = ParameterServer(
            consistency="async", window=3, workers=2, filters={"push": [Significant(delta)]}
        )
        step = Sums(strategy)
        with gf.Session(cluster, trial=False) as s:
            s.run(step.train, {step.x: rows_of(6)})
            with s.trace() as trace:
                s.run(step.train, {step.x: rows_of(6, 1)})
            moved.append(traced_bytes(trace))
            kept = step.residual(s)
        assert np.all(kept == 0) == (delta < 1)
    pushes, number = 2 * 3, SIZE
    assert moved[0] - moved[1] == pushes * number * (8 + 2)


@pytest.mark.every(2)
@pytest.mark.parametrize("lost", [0, 2])
def test_a_lost_server_or_worker_costs_no_bit(lost: int, tmp_path: Path) -> None:
    """What workers keep is in the window's commit."""
    filters = {"push": [TopK(0.1), KeyCache(), FixedPoint(8)], "pull": [FixedPoint(8)]}
    strategy = ParameterServer(consistency="async", window=3, workers=2, filters=filters)
    model = mlp(strategy)
    windows = feeds_of(model, 5, 12)
    cluster = gf.Cluster.local(3, threads=1)
    with gf.Session(cluster, checkpoint=tmp_path, every=4, trial=False) as s:
        losses = []
        for number, feeds in enumerate(windows):
            if number == 3:
                os.kill(s._life.hosts.pids[lost], signal.SIGKILL)
            losses.append(s.run(model.fetches, feeds)[0])
        values = [s.get(v) for v in model.variables]
        came = s.history()
    again = [{**f, strategy.order: c.order} for f, c in zip(windows, came, strict=True)]
    repeated = train(model, again)
    assert repeated.losses == losses
    assert difference(repeated.values, values) == 0


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_what_a_lost_worker_kept_is_taken_from_its_mirror(lost: int) -> None:
    values: list[Any] = []
    windows = [rows_of(12, seed) for seed in range(4)]
    orders: list[Any] = [None] * 4
    for replicas in (2, 1):
        strategy = ParameterServer(
            consistency="async", window=3, workers=2, replicas=replicas,
            filters={"push": [TopK(0.1)], "pull": [TopK(0.4)]},
        )  # fmt: skip
        step = Sums(strategy, 0.1, 0.5)
        cluster = gf.Cluster.local(3, threads=1) if replicas > 1 else None
        with gf.Session(cluster, trial=False, replicas=replicas) as s:
            for number, (rows, order) in enumerate(zip(windows, orders, strict=True)):
                if number == 2 and replicas > 1:
                    os.kill(s._life.hosts.pids[lost], signal.SIGKILL)
                feeds = {step.x: rows} if order is None else {step.x: rows, strategy.order: order}
                s.run(step.train, feeds)
            orders = [each.order for each in s.history()]
            values.append([s.get(step.w), step.residual(s)])
    assert difference(*values) == 0


# Key caches ---------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_a_hash_is_that_of_all_keys_in_use_and_of_nothing_else(
    keys: list[int], data: st.DataObject
) -> None:
    """A prefix of the keys, or their sum, would take other keys for those of the cache."""
    number = data.draw(st.integers(0, min(len(keys), 7)))
    padded = np.array([*keys, *[0] * (8 - len(keys))], "int32")
    i = data.draw(st.integers(0, 7))
    other = padded.copy()
    other[i] += data.draw(st.integers(1, 3))
    swapped = padded[::-1].copy()
    one, two, three, longer = (
        int(evaluate([hash_keys(gf.constant(k), gf.constant(np.int64(n)))])[0])
        for k, n in ((padded, number), (other, number), (swapped, 8), (padded, number + 1))
    )
    assert one != 0
    assert (one == two) == (i >= number)  # what is behind the keys in use does not matter
    assert longer != one
    whole = evaluate([hash_keys(gf.constant(padded), gf.constant(np.int64(8)))])[0]
    assert (three == int(whole)) == np.array_equal(swapped, padded)


@pytest.mark.parametrize(("consistency", "options"), CONSISTENCIES)
def test_a_key_cache_changes_no_bit(consistency: Any, options: Any) -> None:
    values = []
    for cache in ([], [KeyCache()]):
        filters = {"push": [TopK(0.1), *cache], "pull": [Significant(0.1), *cache]}
        strategy = ParameterServer(
            consistency=consistency, window=4, workers=2, filters=filters, **options
        )
        step = Sums(strategy, 0.1, 0.5)
        with gf.Session() as s:
            for seed in range(2):
                s.run(step.train, {step.x: rows_of(16, seed)})
            values.append([s.get(step.w), step.residual(s)])
    assert difference(*values) == 0


def test_keys_travel_when_they_change_and_at_the_beginning_of_a_window() -> None:
    """Four positions, of two bytes each, take the place of their hash in these messages."""
    cluster, window = gf.Cluster.local(3, threads=1), 4
    filters = {"push": [TopK(0.1, feedback=False), KeyCache()]}
    strategy = ParameterServer(consistency="async", window=window, workers=2, filters=filters)
    step = Sums(strategy)
    same = np.zeros((2 * window, 8, 5))
    same.reshape(2 * window, SIZE)[:, [3, 7, 20, 39]] = [5.0, -4.0, 3.0, 2.0]
    changing = same.copy()
    changing[4:6] = np.roll(changing[4:6].reshape(2, SIZE), 1, 1).reshape(2, 8, 5)
    moved = []
    with gf.Session(cluster, trial=False) as s:
        s.run(step.train, {step.x: same})
        for rows in (same, changing):
            with s.trace() as trace:
                s.run(step.train, {step.x: rows})
            moved.append(traced_bytes(trace))
        found = s.get(step.w)
    start = START.reshape(8, 5)
    np.testing.assert_allclose(found, start - 2 * same.sum(0) - changing.sum(0), atol=1e-12)
    messages = 2 * window * (4 * 8 + 8 + 4) + 2 * window * SIZE * 8  # pushes, numbers, pulls
    assert moved[0] == messages + 2 * 4 * 2
    assert moved[1] == messages + 2 * 4 * 2 * 3  # and when they change, there and back


@pytest.mark.parametrize("value", [0.0, 2.0])
@pytest.mark.parametrize("filters", [[FixedPoint(2)], {"push": [RandomSkip(1.0), FixedPoint(4)]}])
def test_zeros_and_constants_come_through(filters: Any, value: float) -> None:
    """No scale divides by zero, and nothing is drawn from a clock."""
    values = []
    for _ in range(2):
        with gf.random.seed(3):
            strategy = ParameterServer(consistency="bsp", window=2, workers=2, filters=filters)
            step = Sums(strategy)
            with gf.Session() as s:
                s.run(step.train, {step.x: np.full((4, 8, 5), value)})
                values.append([s.get(step.w)])
    np.testing.assert_allclose(values[0][0], START.reshape(8, 5) - 2 * value, atol=1e-12)
    assert difference(*values) == 0


# Checkpoints --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [[TopK(0.1)], [Significant(lambda t: 4.0 / t)], [PowerSGD(1)]])
def test_a_session_goes_on_from_its_checkpoint(rule: Any, tmp_path: Path) -> None:
    values = []
    for parts in ([5], [2, 3]):
        strategy = ParameterServer(consistency="bsp", window=2, workers=2, filters=rule)
        step, seed = Sums(strategy, rate=0.1, squares=0.1), 0
        for part in parts:
            with gf.Session() as s:
                if seed:
                    s.load(tmp_path / "saved")
                for _ in range(part):
                    s.run(step.train, {step.x: rows_of(8, seed)})
                    seed += 1
                s.save(tmp_path / "saved")
                found = [s.get(step.w), step.residual(s)]
        values.append(found)
    assert difference(*values) == 0


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_what_is_kept_goes_to_another_number_of_workers(workers: int, tmp_path: Path) -> None:
    def make(count: int) -> Sums:
        return Sums(
            ParameterServer(
                consistency="async", window=2, workers=count, filters={"push": [TopK(0.1)]}
            )
        )

    step, other = make(3), make(workers)
    total = START.reshape(8, 5).copy()
    with gf.Session() as s:
        s.run(step.train, {step.x: rows_of(12)})
        total -= rows_of(12).reshape(6, 2, 8, 5).mean(1).sum(0)
        s.save(tmp_path / "saved")
    with gf.Session() as s:
        s.load(tmp_path / "saved")
        rows = rows_of(4 * workers, 1)
        s.run(other.train, {other.x: rows})
        total -= rows.reshape(2 * workers, 2, 8, 5).mean(1).sum(0)
        kept = other.residual(s)
        assert kept.shape == (workers, 8, 5)
        np.testing.assert_allclose(s.get(other.w) - kept.sum(0), total, rtol=0, atol=1e-12)


# Refusals -----------------------------------------------------------------------------------------


class Summed(gf.parallel.Filter):
    """A filter that asks for sums over replicas."""

    def __repr__(self) -> str:
        return "Summed()"

    def reduce(self, tensor: Any, state: Any, rank: int, count: int) -> Any:
        raise AssertionError


@pytest.mark.parametrize(
    ("filters", "text"),
    [
        (FixedPoint(8), "filters must be a list of filters"),
        ([8], "filters must be a list of filters"),
        ({"pul": [FixedPoint(8)]}, "filters are for 'push' and 'pull', not for 'pul'"),
        ([Kkt(0.1)], "decides by gradients, and a pull sends the changes"),
        ([RandomSkip(0.5)], "multiplies what it sends, so differences would grow"),
        ([FixedPoint(8), TopK(0.1)], "chooses no numbers"),
        ([TopK(0.1), Significant(0.1)], "make it the first filter"),
        ([KeyCache()], "a KeyCache comes second"),
        ([TopK(0.1), FixedPoint(8), KeyCache()], "a KeyCache comes second"),
        ([RandomSkip(0.5, feedback=True), KeyCache()], "sends no positions"),
        ([Summed()], "needs a filter with encode and decode"),
    ],
    ids=str,
)
def test_filters_that_cannot_be_are_refused_with_the_strategys_line(
    filters: Any, text: str
) -> None:
    with pytest.raises(ShardingError, match=rf"ParameterServer at .*py:\d+: .*{text}"):
        ParameterServer(filters=filters)


def test_filters_of_rows_alone_are_refused() -> None:
    """A worker looks up other rows in each turn, and could keep nothing for them."""
    ids = gf.placeholder("int64", ("B",), name="ids")
    table = gf.variable(np.ones((50, 6)), name="table")
    strategy = ParameterServer(workers=2, tables=["table"], filters={"push": [TopK(0.1)]})
    loss = gf.mean(gf.nn.embedding(ids, table) ** 2.0)
    step = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    with pytest.raises(ShardingError, match=r"ParameterServer at .*: rows of tables travel as"):
        strategy.report(step)


def test_filters_that_save_nothing_are_refused() -> None:
    strategy = ParameterServer(window=2, workers=2, filters={"push": [TopK(0.9)]})
    step = Sums(strategy)
    with pytest.raises(ShardingError, match=r"saves nothing of the 1 gradients; send less"):
        strategy.report(step.train)
