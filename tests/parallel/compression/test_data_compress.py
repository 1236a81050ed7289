"""Data(compress=…): replicas exchange gradients through a filter, and nothing is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph
from tests.parallel.test_report import Step

Data, FixedPoint, PowerSGD, TopK = (
    getattr(gf.parallel, name) for name in ("Data", "FixedPoint", "PowerSGD", "TopK")
)
FILTERS = [FixedPoint(8), FixedPoint(4), TopK(0.1), PowerSGD(2)]
Array = np.ndarray[Any, Any]


class Regression:
    """Two layers, trained by SGD with a rate of 1, so that the weights move by what was sent."""

    def __init__(
        self, strategy: Any, dtype: str = "float64", optimizer: Any = None, **how: Any
    ) -> None:
        random = np.random.default_rng(0)
        with gf.random.seed(3):
            self.x = gf.placeholder(dtype, (None, 16), name="x")
            self.t = gf.placeholder(dtype, (None, 4), name="t")
            self.w = gf.variable(random.normal(size=(16, 12)).astype(dtype), name="w")
            self.v = gf.variable(random.normal(size=(12, 4)).astype(dtype), name="v")
            error = gf.tanh(self.x @ self.w) @ self.v - self.t
            self.loss = gf.mean((error * error).astype("float64"))
            self.gradients = gf.gradients(self.loss, [self.w, self.v])
            optimizer = optimizer or gf.optim.SGD(1.0)
            self.train = optimizer.minimize(self.loss, strategy=strategy, **how)
        self.dtype = dtype

    def feeds(self, step: int) -> dict[gf.Tensor, Array]:
        random = np.random.default_rng(step)
        x, t = random.normal(size=(12, 16)), random.normal(size=(12, 4))
        return {self.x: x.astype(self.dtype), self.t: t.astype(self.dtype)}

    def state(self, session: gf.Session, name: str = "residual") -> list[Array]:
        """What the replicas keep, in the order of the variables."""
        found = {
            node.name: session.get(node.outputs[0])
            for node in Graph(self.train).variables
            if node.name.endswith(name)
        }
        return [found[f"train/{v}/{name}"] for v in ("w", "v")]


@pytest.mark.parametrize("how", [{}, {"accumulate": 2}, {"shard_state": True}, {"bucket": 0}])
@pytest.mark.parametrize("rule", [TopK(0.1), PowerSGD(2)], ids=repr)
@pytest.mark.parametrize("replicas", [2, 3])
def test_what_was_sent_and_what_is_kept_is_the_sum_of_the_gradients(
    rule: Any, how: dict[str, Any], replicas: int
) -> None:
    """The weights move by minus what was sent, since the rate is 1."""
    step = Regression(Data(replicas, compress=rule, **how))
    whole = Regression(None)
    total = [np.zeros((16, 12)), np.zeros((12, 4))]
    with gf.Session() as s, gf.Session() as reference:
        first = [s.get(step.w), s.get(step.v)]
        for k in range(6):
            reference.set(whole.w, s.get(step.w))
            reference.set(whole.v, s.get(step.v))
            for sum_, gradient in zip(
                total, reference.run(whole.gradients, whole.feeds(k)), strict=True
            ):
                sum_ += gradient
            s.run(step.train, step.feeds(k))
        sent = [a - s.get(v) for a, v in zip(first, (step.w, step.v), strict=True)]
        kept = step.state(s)
    assert all(rows.shape[0] == replicas for rows in kept)
    for a, rows, wanted in zip(sent, kept, total, strict=True):
        assert np.allclose(a + rows.sum(0), wanted, rtol=0, atol=1e-11)
        assert not np.allclose(a, wanted, atol=1e-3)  # something was kept


@pytest.mark.every(5)
@pytest.mark.parametrize("rule", FILTERS, ids=repr)
@pytest.mark.parametrize("how", [{}, {"accumulate": 3}, {"shard_state": True}])
def test_training_with_a_filter_comes_near_training_without(rule: Any, how: Any) -> None:
    losses = []
    for strategy in (Data(2), Data(2, compress=rule, **how)):
        step = Regression(strategy, "float32", gf.optim.Adam(0.01))
        with gf.Session() as s:
            first = float(s.run(step.loss, step.feeds(0)))
            for k in range(80):
                s.run(step.train, step.feeds(k % 4))
            losses.append(float(s.run(step.loss, step.feeds(0))))
    assert losses[1] < 0.5 * first and losses[1] < 1.7 * losses[0] + 0.05


def test_feedback_converges_where_top_k_alone_does_not() -> None:
    """Replicas pull in opposite directions, so the largest gradients of both cancel (Karimireddy et
    al., "Error Feedback Fixes SignSGD", ICML 2019, section 3)."""
    random = np.random.default_rng(0)
    goal = random.normal(size=200)
    pulls = random.normal(size=200) * 2
    targets = np.stack([goal + pulls, goal - pulls])
    distances = {}
    for feedback in (False, True):
        t = gf.placeholder("float64", (2, 200))
        w = gf.variable(np.zeros(200), name="w")
        loss = gf.mean(gf.sum((w - t) ** 2.0, 1) / 2.0)
        strategy = Data(2, compress=TopK(0.01, feedback=feedback))
        train = gf.optim.SGD(0.005).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            for _ in range(1500):
                s.run(train, {t: targets})
            distances[feedback] = np.linalg.norm(s.get(w) - goal) / np.linalg.norm(goal)
    assert distances[True] < 0.25 and distances[False] > 0.9, distances


def test_an_exchange_without_loss_is_that_of_data() -> None:
    """All numbers travel: the sums are those of an all-reduce, and the bytes are refused."""
    step = Regression(Data(3, compress=PowerSGD(2)))
    plain = Regression(Data(3))
    report = step.train.node.attrs["strategy"].report(step.train)
    small = [m for m in report.collectives if m.plain is None]
    assert not small  # both matrices are compressed
    for rule in (TopK(1.0), TopK(0.7)):
        with pytest.raises(gf.errors.ShardingError, match=r"saves nothing: with 3 replicas each"):
            Regression(Data(3, compress=rule))
    assert plain.train.node.attrs["strategy"].report(plain.train).filtered is None


def test_one_replica_exchanges_nothing() -> None:
    step = Regression(Data(1, compress=TopK(0.1)))
    whole = Regression(None)
    with gf.Session() as s, gf.Session() as other:
        s.run(step.train, step.feeds(0))
        other.run(whole.train, whole.feeds(0))
        assert np.allclose(s.get(step.w), other.get(whole.w), rtol=1e-14)


@pytest.mark.parametrize("optimizer", [gf.optim.SGD(0.1), gf.optim.Adam(0.01, sparse=True)])
@pytest.mark.parametrize("tables", [(), ("table",)])
def test_rows_of_tables_travel_as_rows(optimizer: Any, tables: tuple[str, ...]) -> None:
    """A filter is for dense gradients; an update that reads rows gets these rows, exactly."""
    found = []
    for rule in (None, TopK(0.1)):
        random = np.random.default_rng(0)
        ids = gf.placeholder("int64", (8,), name="ids")
        table = gf.variable(random.normal(size=(50, 6)), name="table")
        w = gf.variable(random.normal(size=(6, 40)), name="w")
        strategy = Data(2, tables=tables, compress=rule)
        loss = gf.mean(gf.tanh(gf.nn.embedding(ids, table) @ w) ** 2.0)
        train = optimizer.minimize(loss, strategy=strategy)
        names = {n.name for n in Graph(train).variables if n.name.endswith("residual")}
        assert names == ({"train/w/residual"} if rule else set())
        with gf.Session() as s:
            s.run(train, {ids: np.array([3, 1, 4, 1, 5, 9, 2, 6])})
            found.append((s.get(table), s.get(w)))
    (table, w), (other, moved) = found
    assert np.allclose(table, other, rtol=0, atol=1e-15) and not np.allclose(w, moved)


def test_a_gradient_that_is_fetched_too_is_the_whole_sum() -> None:
    step, whole = Regression(Data(2, compress=TopK(0.1))), Regression(None)
    with gf.Session() as s, gf.Session() as other:
        fetched = s.run([step.train, *step.gradients], step.feeds(0))[1:]
        wanted = other.run(whole.gradients, whole.feeds(0))
        assert all(np.allclose(a, b, rtol=1e-12) for a, b in zip(fetched, wanted, strict=True))


def test_clipping_sees_what_was_exchanged() -> None:
    """The norm is that of the sum that replicas got, not of what they had."""
    norms: list[gf.Tensor] = []

    def clip(gradients: list[gf.Tensor]) -> list[gf.Tensor]:
        clipped, norm = gf.optim.clip_by_global_norm(gradients, 1e9)
        norms.append(norm)
        return clipped

    step = Regression(Data(2, compress=TopK(0.1)), transform=clip)
    with gf.Session() as s:
        before = s.get(step.w), s.get(step.v)
        _, norm = s.run([step.train, norms[0]], step.feeds(0))
        moved = [a - s.get(v) for a, v in zip(before, (step.w, step.v), strict=True)]
    assert norm == pytest.approx(np.sqrt(sum((m**2).sum() for m in moved)))


# State ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule",
    [
        *(TopK(0.1), PowerSGD(1), FixedPoint(4), gf.parallel.RandomSkip(0.2)),
        gf.parallel.Chain([gf.parallel.Significant(lambda t: 0.5 / t), FixedPoint(8)]),
    ],
    ids=lambda rule: type(rule).__name__,
)
def test_a_run_that_is_continued_gives_the_same_bits(rule: Any, tmp_path: Path) -> None:
    step = Regression(Data(2, compress=rule), "float32", gf.optim.SGD(0.05))
    with gf.Session() as s:
        for k in range(3):
            s.run(step.train, step.feeds(k))
        s.save(tmp_path / "third")
        for k in range(3, 6):
            s.run(step.train, step.feeds(k))
        wanted = [s.get(step.w), s.get(step.v)]
    again = Regression(Data(2, compress=rule), "float32", gf.optim.SGD(0.05))
    with gf.Session() as s:
        s.load(tmp_path / "third")
        for k in range(3, 6):
            s.run(again.train, again.feeds(k))
        found = [s.get(again.w), s.get(again.v)]
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("used", [False, True], ids=["new session", "used session"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_residuals_go_to_another_number_of_replicas(count: int, used: bool, tmp_path: Path) -> None:
    step = Regression(Data(3, compress=TopK(0.1)), optimizer=gf.optim.SGD(0.05))
    with gf.Session() as s:
        for k in range(4):
            s.run(step.train, step.feeds(k))
        before = step.state(s)
        s.save(tmp_path / "saved")
    if count == 1:
        return
    other = Regression(Data(count, compress=TopK(0.1)), optimizer=gf.optim.SGD(0.05))
    with gf.Session() as s:
        if used:
            s.run(other.train, other.feeds(9))
        s.load(tmp_path / "saved")
        after = other.state(s)
        for old, new in zip(before, after, strict=True):
            assert new.shape == (count, *old.shape[1:])
            assert np.allclose(new.sum(0), old.sum(0), rtol=0, atol=1e-14)
        s.run(other.train, other.feeds(4))
        assert not np.array_equal(other.state(s)[0], after[0])


def test_a_residual_of_another_shape_is_still_refused(tmp_path: Path) -> None:
    step = Regression(Data(2, compress=TopK(0.1)))
    with gf.Session() as s:
        s.run(step.train, step.feeds(0))
        s.save(tmp_path / "saved")
    strategy = Data(2, compress=TopK(0.1))
    w = gf.variable(np.zeros((16, 12)), name="w")
    v = gf.variable(np.zeros((5, 5)), name="v")
    train = gf.optim.SGD(1.0).minimize(
        gf.mean(w**2.0) + gf.mean(gf.sum(gf.placeholder("float64", (4, 5)) @ v)), strategy=strategy
    )
    assert train.node.attrs["strategy"] is strategy
    with gf.Session() as s, pytest.raises(gf.errors.CheckpointError, match="does not fit"):
        s.load(tmp_path / "saved")
        s.get(v)


def test_a_step_whose_gradients_are_not_finite_keeps_the_residuals() -> None:
    scaling = gf.optim.LossScaling(initial=1024.0)
    step = Regression(Data(2, compress=TopK(0.1)), "float32", gf.optim.SGD(0.05), scaling=scaling)
    plain = Regression(Data(2, compress=TopK(0.1)), "float32", gf.optim.SGD(0.05))
    with gf.Session() as s, gf.Session() as other:
        for k in range(3):
            s.run(step.train, step.feeds(k))
            other.run(plain.train, plain.feeds(k))
        for a, b in zip(step.state(s), plain.state(other), strict=True):
            assert np.allclose(a, b, rtol=1e-5, atol=1e-6)  # in units of the loss, not of its scale
        before = [*step.state(s), s.get(step.w)]
        bad = step.feeds(3)
        bad[step.x][5, 5] = np.inf
        with np.errstate(all="ignore"):
            s.run(step.train, bad)
        after = [*step.state(s), s.get(step.w)]
        assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
        s.run(step.train, step.feeds(4))
        assert not np.array_equal(step.state(s)[0], after[0])


@pytest.mark.parametrize(
    "rule", [pytest.param(FixedPoint(4), marks=pytest.mark.slow), TopK(0.1)], ids=repr
)
def test_a_worker_that_dies_costs_no_bit(rule: Any, tmp_path: Path) -> None:
    found = []
    for dying in (None, 4):
        step = Regression(Data(2, compress=rule), "float32", gf.optim.SGD(0.05))
        folder = tmp_path / str(dying)
        with gf.Session(gf.Cluster.local(2, threads=1), checkpoint=folder, every=3) as s:
            for k in range(6):
                if k == dying:
                    os.kill(s._life.hosts.pids[1], signal.SIGKILL)
                s.run(step.train, step.feeds(k))
            found.append([s.get(step.w), s.get(step.v)])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


# Bytes ------------------------------------------------------------------------------------------


def test_the_report_tells_bytes_before_and_after_the_filter() -> None:
    strategy = Data(2, compress=TopK(0.05))
    step = Regression(strategy, "float32")
    report = strategy.report([step.loss, step.train], gf.Cluster.local(2))
    sizes = 16 * 12, 12 * 4
    kept = sum(int(np.ceil(0.05 * size)) for size in sizes)
    after, before = 2 * kept * (4 + 2), 2 * sum(sizes) * 4
    assert report.filtered == (after, before)
    assert f"of these {after:,} through filters, in place of {before:,}" in str(report)
    assert report.bytes == after + 8  # and the loss of the other replica


@pytest.mark.slow  # starts four processes each
@pytest.mark.parametrize("how", [{}, {"accumulate": 2}, {"shard_state": True}])
@pytest.mark.parametrize("rule", [FixedPoint(8), TopK(0.02), PowerSGD(2)], ids=repr)
def test_the_bytes_of_a_report_are_those_of_a_trace(rule: Any, how: Any) -> None:
    step = Step(Data(2, compress=rule, **how))
    cluster = gf.Cluster.local(2, threads=1)
    assert step.report(step.loss, cluster=cluster).bytes == step.count_traced_bytes(
        cluster, step.loss
    )


@pytest.mark.slow  # starts three processes
def test_the_bytes_of_three_workers_are_those_of_a_trace() -> None:
    strategy = Data(3, compress=FixedPoint(8))
    step, cluster = Regression(strategy, "float32"), gf.Cluster.local(3, threads=1)
    with gf.Session(cluster) as s:
        s.run(step.train, step.feeds(0))
        with s.trace() as trace:
            s.run(step.train, step.feeds(1))
    turns = {"all_gather": 3 * 2, "all_to_all": 2}  # times what a worker contributes
    sent = sum(e.bytes * e.count * turns[e.kind] for e in trace.exchanges)
    assert strategy.report(step.train, cluster).bytes == sent
    assert {e.kind for e in trace.exchanges} == {"all_gather", "all_to_all"}


def test_workers_give_the_bits_of_one_process() -> None:
    found = []
    for cluster in (None, gf.Cluster.local(2, threads=1)):
        step = Regression(Data(2, compress=FixedPoint(4)), "float32", gf.optim.SGD(0.05))
        with gf.Session(cluster) as s:
            for k in range(3):
                s.run(step.train, step.feeds(k))
            found.append([s.get(step.w), s.get(step.v)])
    assert all(np.array_equal(a, b) for a, b in zip(*found, strict=True))


def test_a_plan_counts_the_seconds_that_a_filter_saves_on_a_slow_link() -> None:
    bandwidth = 1.25e7  # 100 Mbit/s
    cluster = gf.Cluster.hypothetical(
        2, flops=1e11, bandwidth=2e10, launch=2e-6, memory=1 << 33, link_latency=1e-4,
        link_bandwidth=bandwidth,
    )  # fmt: skip
    seconds, received = [], []
    for rule in (None, FixedPoint(8), PowerSGD(4)):
        x = gf.placeholder("float32", (64, 256), name="x")
        weights = [gf.variable(np.ones((256, 256), "float32")) for _ in range(2)]
        loss = gf.mean(gf.nn.relu(gf.nn.relu(x @ weights[0]) @ weights[1]) ** 2.0)
        strategy = Data(2, compress=rule)
        train = gf.optim.SGD(0.01).minimize(loss, strategy=strategy)
        seconds.append(gf.plan(train, cluster).makespan)
        received.append(strategy.report(train, cluster).bytes / 2)
    for after, sent in zip(seconds[1:], received[1:], strict=True):
        saved = (received[0] - sent) / bandwidth
        assert seconds[0] - after == pytest.approx(saved, rel=0.05)


# Refusals ---------------------------------------------------------------------------------------


def test_what_no_filter_is_for_is_refused_with_the_strategys_line() -> None:
    with pytest.raises(gf.errors.ShardingError, match=r"Data at .*py:\d+: compress must be a fil"):
        Data(2, compress=8)
    with pytest.raises(gf.errors.ShardingError, match="and a Shard cuts them"):
        Data(2, compress=TopK(0.1)) * gf.parallel.Shard({"model": 2})
    with pytest.raises(gf.errors.ScheduleError, match="leave out compress="):
        Data(2, compress=TopK(0.1)) * gf.parallel.Pipeline(2)
    with pytest.raises(gf.errors.ShardingError, match=r"Data at .*applies to none of the 2 grad"):
        Regression(Data(2, compress=PowerSGD(50)))
    with pytest.raises(gf.errors.ShardingError, match=r"Data at .*: Odd\(\): the sum must have"):
        Regression(Data(2, compress=Odd()))


class Odd(gf.parallel.Filter):
    """Gives back one row less."""

    def encode(self, tensor: gf.Tensor, state: Any) -> Any:
        return (tensor.astype("float16")[1:],), state

    def decode(self, parts: Any, spec: Any) -> gf.Tensor:
        return parts[0].astype(spec.dtype)

    def __repr__(self) -> str:
        return "Odd()"
