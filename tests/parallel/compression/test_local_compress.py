"""LocalSGD(compress=…): what replicas learnt between two exchanges travels through a filter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ShardingError
from tests.parallel.models import mlp

Data, FixedPoint, LocalSGD, PowerSGD, TopK = (
    getattr(gf.parallel, name) for name in ("Data", "FixedPoint", "LocalSGD", "PowerSGD", "TopK")
)
SIZE, RATE = 40, 0.1
CENTRES = np.random.default_rng(0).normal(size=(6, SIZE))


class Centres:
    """Each example pulls the weights to its own centre."""

    def __init__(self, strategy: Any) -> None:
        self.strategy = strategy
        self.c = gf.placeholder("float64", ("B", SIZE), name="c")
        self.w = gf.variable(np.zeros(SIZE), name="w")
        self.loss = 0.5 * gf.mean(gf.sum((self.w - self.c) ** 2.0, 1))
        self.train = gf.optim.SGD(RATE).minimize(self.loss, strategy=strategy)

    def residuals(self, s: gf.Session) -> np.ndarray[Any, Any]:
        """The mean over replicas of what they keep."""
        ((residual,),) = self.strategy._filter._states.values()
        return s.get(residual.outputs[0])


def descend(replicas: int, period: int, turns: int, share: float, outer: float) -> Any:
    """Local descent with top-k and feedback, by hand: θ, and the mean of the residuals."""
    theta = np.zeros(SIZE)
    each, kept = np.zeros((replicas, SIZE)), np.zeros((replicas, SIZE))
    for turn in range(1, turns + 1):
        each -= RATE * (each - CENTRES[:replicas])
        if turn % period == 0:
            given = theta - each + kept
            sent = np.zeros_like(given)
            for row, own in zip(given, sent, strict=True):
                chosen = np.argsort(-np.abs(row))[: int(np.ceil(share * SIZE))]
                own[chosen] = row[chosen]
            kept = given - sent
            theta = theta - outer * sent.mean(0)
            each[:] = theta
    return theta, kept.mean(0)


@pytest.mark.parametrize("window", [1, 2, 6])
@pytest.mark.parametrize(("outer", "rate"), [(None, 1.0), (gf.optim.SGD(0.7), 0.7)])
@pytest.mark.parametrize("replicas", [2, 3])
def test_top_k_of_differences_is_that_by_hand(
    replicas: int, outer: Any, rate: float, window: int
) -> None:
    step = Centres(LocalSGD(replicas, 2, outer=outer, window=window, compress=TopK(0.1)))
    with gf.Session() as s:
        for _ in range(12 // window):
            s.run(step.train, {step.c: np.tile(CENTRES[:replicas], (window, 1))})
        theta, kept = descend(replicas, 2, 12, 0.1, rate)
        assert np.abs(s.get(step.w) - theta).max() < 1e-14
        assert np.abs(step.residuals(s) - kept).max() < 1e-14
        assert np.abs(kept).max() > 0.01


@pytest.mark.every(2)
@pytest.mark.parametrize("rule", [FixedPoint(8), TopK(0.2), PowerSGD(1)], ids=repr)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"outer": gf.optim.SGD(0.7, momentum=0.9, nesterov=True)},
        {"window": 4, "fragments": 2, "delay": 1},
    ],
)
def test_training_comes_near_that_without_a_filter(rule: Any, how: dict[str, Any]) -> None:
    losses = []
    for compress in (None, rule):
        model = mlp(LocalSGD(2, 4, compress=compress, **how), "float32", gf.optim.SGD(0.05))
        window = how.get("window", 1)
        random = np.random.default_rng(1)
        fed = [model.feeds(random, 16) for _ in range(4)]
        with gf.Session() as s:
            for k in range(80 // window):
                group = [fed[(k * window + j) % 4] for j in range(window)]
                feeds = {x: np.concatenate([f[x] for f in group]) for x in group[0]}
                loss = float(s.run(model.fetches, feeds)[0])
        losses.append(loss)
    assert losses[1] < 1.5 * losses[0] + 0.1


def test_bytes_are_those_of_the_filter_and_of_the_period() -> None:
    strategy = LocalSGD(2, 4, window=4, compress=FixedPoint(8))
    model = mlp(strategy, "float32")
    report = strategy.report(model.fetches[1], gf.Cluster.local(2))
    numbers = [6 * 8, 8, 8 * 3]
    assert report.filtered == (2 * (sum(numbers) + 4 * 3), 2 * 4 * sum(numbers))
    assert report.bytes == report.filtered[0]


@pytest.mark.every(5)
@pytest.mark.parametrize("saved_at", [1, 2, 3, 4])
@pytest.mark.parametrize("rule", [FixedPoint(4), TopK(0.2), PowerSGD(1)], ids=repr)
def test_a_run_goes_on_from_any_turn_with_the_same_bits(
    rule: Any, saved_at: int, tmp_path: Path
) -> None:
    outer = gf.optim.SGD(0.7, momentum=0.9)

    def build() -> Any:
        with gf.random.seed(5):
            strategy = LocalSGD(2, 2, outer=outer, compress=rule)
            return mlp(strategy, "float32", gf.optim.SGD(0.1))

    random, model = np.random.default_rng(1), build()
    every = [list(model.feeds(random, 8).values()) for _ in range(7)]

    def take(s: gf.Session, model: Any, turns: range) -> list[Any]:
        keys = list(model.feeds(np.random.default_rng(0), 8))
        for k in turns:
            s.run(model.fetches, dict(zip(keys, every[k], strict=True)))
        return [s.get(v) for v in model.variables]

    with gf.Session() as s:
        take(s, model, range(saved_at))
        s.save(tmp_path / "saved")
        wanted = take(s, model, range(saved_at, 7))
    again = build()
    with gf.Session() as s:
        s.load(tmp_path / "saved")
        found = take(s, again, range(saved_at, 7))
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("count", [2, 5])
def test_another_number_of_replicas_keeps_the_mean_of_the_residuals(
    count: int, tmp_path: Path
) -> None:
    step = Centres(LocalSGD(3, 1, compress=TopK(0.1)))
    with gf.Session() as s:
        for _ in range(4):
            s.run(step.train, {step.c: CENTRES[:3]})
        kept = step.residuals(s)
        s.save(tmp_path / "saved")
    other = Centres(LocalSGD(count, 1, compress=TopK(0.1)))
    with gf.Session() as s:
        s.run(other.train, {other.c: CENTRES[:count]})
        s.load(tmp_path / "saved")
        assert np.allclose(other.residuals(s), kept, rtol=0, atol=1e-15)


def test_devices_of_a_replica_share_one_exchange() -> None:
    """The first devices exchange; what the filter sends is that of two replicas of one device."""
    reports, weights = [], []
    for inner in (None, Data(2)):
        strategy = LocalSGD(2, 2, window=2, compress=TopK(0.2))
        strategy = strategy if inner is None else strategy * inner
        model = mlp(strategy, optimizer=gf.optim.SGD(0.1))
        feeds = model.feeds(np.random.default_rng(1), 16)
        reports.append(strategy.report(model.fetches[1], gf.Cluster.local(4)))
        with gf.Session() as s:
            for _ in range(3):
                s.run(model.fetches, feeds)
            weights.append([s.get(v) for v in model.variables])
    assert reports[0].filtered == reports[1].filtered
    assert all(np.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(*weights, strict=True))


@pytest.mark.slow  # starts processes
@pytest.mark.parametrize("rule", [FixedPoint(8), TopK(0.1), PowerSGD(1)], ids=repr)
def test_the_bytes_of_a_report_are_those_of_a_trace(rule: Any) -> None:
    strategy = LocalSGD(2, 2, window=2, compress=rule)
    model = mlp(strategy, "float32")
    cluster = gf.Cluster.local(2, threads=1)
    feeds = model.feeds(np.random.default_rng(1), 16)
    with gf.Session(cluster) as s:
        s.run(model.fetches, feeds)
        with s.trace() as trace:
            s.run(model.fetches, feeds)
    sent = sum(e.bytes * e.count for e in trace.edges if "client" not in e.source + e.target)
    sent += sum(2 * e.bytes * e.count for e in trace.exchanges)
    assert strategy.report(model.fetches, cluster).bytes == sent


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ShardingError, match=r"LocalSGD at .*compress must be a filter.*not 8"):
        LocalSGD(2, 4, compress=8)
    with pytest.raises(ShardingError, match=r"so a filter goes there: LocalSGD\(…, compress=TopK"):
        LocalSGD(2, 4) * Data(2, compress=TopK(0.1))
    strategy = LocalSGD(2, 4, compress=TopK(0.9))
    model = mlp(strategy)
    with pytest.raises(ShardingError, match=r"LocalSGD at .*saves nothing for the 3 parameters"):
        strategy.report(model.fetches)
