"""Gossip(compress=…): neighbours send what changed through a filter, against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ShardingError
from tests.parallel.local_training.test_local_sgd import copies_of
from tests.parallel.models import mlp

Data, FixedPoint, Gossip, PowerSGD, TopK = (
    getattr(gf.parallel, name) for name in ("Data", "FixedPoint", "Gossip", "PowerSGD", "TopK")
)
SIZE, RATE = 40, 0.05
CENTRES = np.random.default_rng(0).normal(size=(8, SIZE))


class Centres:
    """Each replica pulls the weights to its own centre."""

    def __init__(self, strategy: Any) -> None:
        self.c = gf.placeholder("float64", ("B", SIZE), name="c")
        self.w = gf.variable(np.zeros(SIZE), name="w")
        loss = 0.5 * gf.mean(gf.sum((self.w - self.c) ** 2.0, 1))
        self.train = gf.optim.SGD(RATE).minimize(loss, strategy=strategy)


def choco(w: Any, share: float, rate: float, turns: int) -> Any:
    """The parameters of all replicas after some turns, by hand."""
    x = np.zeros((len(w), SIZE))
    estimates = np.zeros_like(x)
    for _ in range(turns):
        given = x - estimates
        sent = np.zeros_like(given)
        for row, own in zip(given, sent, strict=True):
            chosen = np.argsort(-np.abs(row))[: int(np.ceil(share * SIZE))]
            own[chosen] = row[chosen]
        estimates = estimates + sent
        x = x + rate * (w @ estimates - estimates) - RATE * (x - CENTRES[: len(w)])
    return x


@pytest.mark.parametrize("window", [1, 5])
@pytest.mark.parametrize(("topology", "replicas"), [("ring", 3), ("ring", 5), ("hypercube", 4)])
def test_a_turn_is_that_of_choco_sgd(topology: str, replicas: int, window: int) -> None:
    strategy = Gossip(replicas, topology, window=window, compress=TopK(0.1), consensus=0.4)
    step = Centres(strategy)
    with gf.Session() as s:
        for _ in range(20 // window):
            s.run(step.train, {step.c: np.tile(CENTRES[:replicas], (window, 1))})
        found = np.array(copies_of(s, step.w))
    wanted = choco(strategy.matrices[0], 0.1, 0.4, 20)
    assert np.abs(found - wanted).max() < 1e-13
    centre = CENTRES[:replicas].mean(0)  # the mean of replicas descends as one model does
    assert np.abs(found.mean(0) - centre * (1 - (1 - RATE) ** 20)).max() < 1e-13


@pytest.mark.parametrize(("rule", "rate"), [(FixedPoint(8), 1.0), (TopK(0.3), 0.8)], ids=repr)
def test_replicas_agree_as_far_as_without_a_filter(rule: Any, rate: float) -> None:
    spreads = []
    for how in ({}, {"compress": rule, "consensus": rate}):
        step = Centres(Gossip(5, "ring", window=10, **how))
        with gf.Session() as s:
            for _ in range(12):
                s.run(step.train, {step.c: np.tile(CENTRES[:5], (10, 1))})
            spreads.append(np.array(copies_of(s, step.w)).std(0).max())
    assert spreads[1] < 1.3 * spreads[0] < 0.3


def test_thin_factors_bring_replicas_together() -> None:
    """The sender of a matrix makes its columns orthonormal, so all neighbours have the same."""
    centres = np.random.default_rng(0).normal(size=(4, 12, 8))
    spreads = []
    for rate in (1e-9, 0.3):
        c = gf.placeholder("float64", ("B", 12, 8), name="c")
        w = gf.variable(np.zeros((12, 8)), name="w")
        loss = 0.5 * gf.mean(gf.sum((w - c) ** 2.0, (1, 2)))
        strategy = Gossip(4, "ring", window=10, compress=PowerSGD(2), consensus=rate)
        train = gf.optim.SGD(0.02).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            for _ in range(20):
                s.run(train, {c: np.tile(centres, (10, 1, 1))})
            found = np.array(copies_of(s, w))
        assert np.abs(found.mean(0) - centres.mean(0) * (1 - 0.98**200)).max() < 1e-12
        spreads.append(found.std(0).max())
    assert spreads[1] < 0.2 * spreads[0], spreads


def test_bytes_are_those_of_the_filter() -> None:
    strategy = Gossip(4, "ring", compress=FixedPoint(8), consensus=1.0)
    model = mlp(strategy, "float32")
    report = strategy.report(model.fetches[1], gf.Cluster.local(4))
    numbers = [6 * 8, 8, 8 * 3]
    links = 4 * 2
    assert report.filtered == (links * (sum(numbers) + 4 * 3), links * 4 * sum(numbers))
    assert report.bytes == report.filtered[0]


@pytest.mark.slow  # starts processes
def test_the_bytes_of_a_report_are_those_of_a_trace() -> None:
    strategy = Gossip(3, "ring", compress=FixedPoint(4), consensus=1.0)
    model, cluster = mlp(strategy, "float32"), gf.Cluster.local(3, threads=1)
    feeds = model.feeds(np.random.default_rng(1), 12)
    with gf.Session(cluster) as s:
        s.run(model.fetches, feeds)
        with s.trace() as trace:
            s.run(model.fetches, feeds)
    sent = sum(e.bytes * e.count for e in trace.edges if "client" not in e.source + e.target)
    assert strategy.report(model.fetches, cluster).bytes == sent and not trace.exchanges


@pytest.mark.parametrize("rule", [FixedPoint(4), TopK(0.2)], ids=repr)
def test_a_run_goes_on_with_the_same_bits(rule: Any, tmp_path: Path) -> None:
    def build() -> Any:
        with gf.random.seed(5):
            strategy = Gossip(3, compress=rule, consensus=0.5)
            return mlp(strategy, "float32", gf.optim.SGD(0.1))

    random, found = np.random.default_rng(1), []
    every = [[*build().feeds(random, 9).values()] for _ in range(5)]
    for loads in (False, True):
        model = build()
        keys = list(model.feeds(random, 9))
        with gf.Session() as s:
            if loads:
                s.load(tmp_path / "saved")
            for k in range(3 if loads else 0, 5):
                s.run(model.fetches, dict(zip(keys, every[k], strict=True)))
                if k == 2:
                    s.save(tmp_path / "saved")
            found.append([copies_of(s, v) for v in model.variables])
    for a, b in zip(*found, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def test_devices_of_a_replica_share_one_exchange() -> None:
    weights, reports = [], []
    for inner in (None, Data(2)):
        strategy = Gossip(3, compress=TopK(0.2), consensus=0.5)
        strategy = strategy if inner is None else strategy * inner
        model = mlp(strategy, optimizer=gf.optim.SGD(0.1))
        feeds = model.feeds(np.random.default_rng(1), 12)
        reports.append(strategy.report(model.fetches[1], gf.Cluster.local(6)))
        with gf.Session() as s:
            for _ in range(3):
                s.run(model.fetches, feeds)
            weights.append([s.get(v) for v in model.variables])
    assert reports[0].filtered == reports[1].filtered
    assert all(np.allclose(a, b, rtol=0, atol=1e-13) for a, b in zip(*weights, strict=True))


def test_what_cannot_be_is_refused() -> None:
    needed = "compress must be a filter with encode and decode"
    for rule, how, text in (
        (TopK(0.1), {}, r"needs consensus=, a number above 0 and up to 1, not None"),
        (TopK(0.1), {"consensus": 1.5}, "not 1.5"),
        (8, {"consensus": 1.0}, needed),
        (gf.parallel.Filter(), {"consensus": 1.0}, needed),
        (None, {"consensus": 1.0}, needed),
        (TopK(0.1), {"consensus": 0.4, "one_peer": True}, "neighbours that stay the same"),
    ):
        with pytest.raises(ShardingError, match=text) as caught:
            Gossip(4, compress=rule, **how)
        assert "Gossip at " in str(caught.value)
    strategy = Gossip(4, compress=TopK(0.9), consensus=1.0)
    with pytest.raises(ShardingError, match=r"Gossip at .*saves nothing for the 3 values"):
        strategy.report(mlp(strategy).fetches)
