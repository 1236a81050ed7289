"""LocalSGD: replicas that train by themselves, against the same computed by hand with numpy."""

from __future__ import annotations

import itertools
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ShardingError
from graphflow.parallel import Data, LocalSGD
from tests.parallel.models import mlp

RANDOM = np.random.default_rng(0)
SIZE = 5
CURVATURES = [(a := RANDOM.normal(size=(SIZE, SIZE))) @ a.T / SIZE + np.eye(SIZE) for _ in range(4)]
CENTRES = [RANDOM.normal(size=SIZE) for _ in range(4)]
RATE = 0.1


def quadratics(strategy: Any) -> tuple[gf.Tensor, gf.Tensor, gf.Tensor]:
    """The curvature, the centre and a step of a quadratic loss of one example: its own minimum is
    the centre."""
    a = gf.placeholder("float64", ("B", SIZE, SIZE), name="a")
    c = gf.placeholder("float64", ("B", SIZE), name="c")
    w = gf.variable(np.zeros(SIZE), name="w")
    away = w - c
    loss = 0.5 * gf.mean(gf.sum(away * gf.sum(a * gf.reshape(away, (-1, 1, SIZE)), 2), 1))
    return loss, gf.optim.SGD(RATE).minimize(loss, strategy=strategy), w


def descend(period: int, steps: int) -> np.ndarray[Any, Any]:
    """Local descent on four quadratics, by hand."""
    each = [np.zeros(SIZE) for _ in range(4)]
    for step in range(1, steps + 1):
        each = [w - RATE * (a @ (w - c)) for w, a, c in zip(each, CURVATURES, CENTRES, strict=True)]
        if step % period == 0:
            each = [sum(each) / 4] * 4
    mean: np.ndarray[Any, Any] = sum(each) / 4
    return mean


@pytest.mark.parametrize("period", [1, 2, 8, 32])
def test_four_quadratics_end_where_descent_by_hand_does(period: int) -> None:
    loss, train, w = quadratics(LocalSGD(4, period, window=4))
    a, c = (node.outputs[0] for node in gf.Graph([loss]).placeholders)
    feeds = {a: np.concatenate([CURVATURES] * 4), c: np.concatenate([CENTRES] * 4)}
    with gf.Session() as s:
        for _ in range(16):
            s.run(train, feeds)
        assert np.abs(s.get(w) - descend(period, 64)).max() < 1e-14


def test_the_longer_the_period_the_farther_the_end_is_from_the_optimum() -> None:
    whole = sum(CURVATURES)
    best = np.linalg.solve(whole, sum(a @ c for a, c in zip(CURVATURES, CENTRES, strict=True)))
    once = sum(CENTRES) / 4  # each replica at its own optimum
    distances = [np.linalg.norm(descend(h, 1000) - best) for h in (1, 2, 8, 32, 1000)]
    assert distances[0] < 1e-13
    assert all(a < b for a, b in itertools.pairwise(distances))
    assert distances[-1] == pytest.approx(np.linalg.norm(once - best), rel=1e-6)


def run_training(strategy: Any, steps: int = 6, window: int = 1) -> list[Any]:
    """The weights after some turns, of which `window` are one run."""
    model = mlp(strategy, optimizer=gf.optim.SGD(0.1))
    random = np.random.default_rng(1)
    every = [model.feeds(random, 8) for _ in range(steps)]
    with gf.Session() as s:
        for first in range(0, steps, window):
            group = every[first : first + window]
            s.run(model.fetches, {x: np.concatenate([f[x] for f in group]) for x in group[0]})
        return [s.get(v) for v in model.variables]


def largest_difference(a: list[Any], b: list[Any]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def copies_of(s: gf.Session, variable: gf.Tensor) -> list[Any]:
    """The value of each replica's copy of a variable."""
    return [s.get(n.outputs[0]) for n in s._deployment.state.shards[variable.node].nodes]


def traced_bytes(trace: Any) -> int:
    """The bytes that two workers sent each other."""
    edges = (e for e in trace.edges if "client" not in e.source + e.target)
    sent: int = sum(e.bytes * e.count for e in edges)
    return sent + sum(2 * e.bytes * e.count for e in trace.exchanges)


def test_a_period_of_one_turn_is_synchronous_training() -> None:
    assert largest_difference(run_training(LocalSGD(2, 1)), run_training(Data(2))) < 1e-15


@pytest.mark.parametrize("period", [1, 2, 3, 6])
def test_windows_of_any_length_are_the_same_turns(period: int) -> None:
    wanted = run_training(LocalSGD(2, period))
    for window in (2, 3, 6):
        assert (
            largest_difference(run_training(LocalSGD(2, period, window=window), 6, window), wanted)
            == 0
        )


@pytest.mark.parametrize("limit", [0, 64, 4 << 20])
@pytest.mark.parametrize("replicas", [2, 3])
def test_all_copies_are_equal_after_an_exchange(limit: int, replicas: int) -> None:
    random = np.random.default_rng(limit + replicas)
    sizes = random.integers(1, 12, 9)
    x = gf.placeholder("float32", ("B",), name="x")
    variables = [gf.variable(random.normal(size=n).astype("float32")) for n in sizes]
    loss = gf.mean(x * sum(gf.sum(v * v) for v in variables))
    strategy = LocalSGD(replicas, 3, bucket=limit)
    train = gf.optim.SGD(0.01).minimize(loss, strategy=strategy)
    with gf.Session() as s:
        for turn in range(1, 7):
            s.run(train, {x: random.normal(size=replicas * 2).astype("float32")})
            for v in variables:
                copies = copies_of(s, v)
                assert all(np.array_equal(c, copies[0]) for c in copies) == (turn % 3 == 0)


def test_an_exchange_is_bitwise_the_mean_of_replicas() -> None:
    """Descent of a linear loss moves each replica by its own feed."""
    x = gf.placeholder("float32", ("B", 7), name="x")
    w = gf.variable(np.zeros(7, "float32"), name="w")
    train = gf.optim.SGD(1.0).minimize(gf.mean(gf.sum(x * w, 1)), strategy=LocalSGD(2, 1))
    fed = np.random.default_rng(2).normal(size=(2, 7)).astype("float32")
    with gf.Session() as s:
        s.run(train, {x: fed})
        assert np.array_equal(s.get(w), (-fed[0] + -fed[1]) / np.float32(2))


def test_slots_stay_local_and_moments_are_averaged() -> None:
    x = gf.placeholder("float64", ("B",), name="x")
    w = gf.variable(np.array(0.0), name="w")
    centre = gf.variable(np.array(0.0), name="centre", trainable=False)
    train = gf.optim.SGD(1.0, momentum=0.5).minimize(gf.mean(x * w), strategy=LocalSGD(2, 2))
    update = gf.assign(centre, 0.5 * centre + gf.mean(x))
    with gf.Session() as s:
        for _ in range(2):
            s.run([train, update], {x: np.array([1.0, 3.0])})
        state = s._deployment.state
        copies = {
            state.names[n]: float(s.get(n.outputs[0]))
            for pieces in state.shards.values()
            for n in pieces.nodes
        }
        assert s.get(centre) == 3.0  # (1.5 + 4.5) / 2
    slots = [value for name, value in sorted(copies.items()) if "momentum" in name]
    assert slots == [1.5, 4.5]
    assert [value for name, value in copies.items() if name.startswith("centre@")] == [3.0, 3.0]


def test_dropout_differs_between_replicas_as_it_does_with_data() -> None:
    def run_dropout_step(strategy: Any) -> Any:
        gf.random.seed(5)
        x = gf.placeholder("float64", ("B", 6), name="x")
        w = gf.variable(np.ones(6), name="w")
        with gf.nn.training():
            h = gf.nn.dropout(x, 0.5) * w
        train = gf.optim.SGD(0.0).minimize(gf.mean(h), strategy=strategy)
        with gf.Session() as s:
            return s.run([h, train], {x: np.ones((8, 6))})[0]

    local = run_dropout_step(LocalSGD(2, 4))
    assert np.array_equal(local, run_dropout_step(Data(2)))
    turns = run_dropout_step(LocalSGD(2, 4, window=2))
    assert not np.array_equal(turns[:4], turns[4:])  # each turn draws anew


# Graphs that do not train -------------------------------------------------------------------------


def test_a_graph_that_does_not_train_sees_the_means() -> None:
    model = mlp(LocalSGD(2, 3))
    random = np.random.default_rng(3)
    with gf.Session(gf.Cluster.local(2)) as s:
        for turn in range(1, 7):
            s.run(model.fetches, model.feeds(random, 8))
            fed = model.feeds(random, 8)
            plain = mlp()
            found = s.run(model.fetches[0], fed)
            with gf.Session() as other:
                for own, mean in zip(plain.variables, model.variables, strict=True):
                    other.set(own, s.get(mean))
                values = dict(zip((t.name for t in fed), fed.values(), strict=True))
                x, t = (p.outputs[0] for p in gf.Graph(plain.fetches[0]).placeholders)
                wanted = other.run(plain.fetches[0], {x: values["x"], t: values["t"]})
            assert found == pytest.approx(wanted, rel=1e-14), turn
            with s.trace() as trace:
                s.run(model.fetches[0], fed)
            parameters = sum(v.spec.nbytes for v in model.variables)
            assert traced_bytes(trace) == (0 if turn % 3 == 0 else parameters)


@pytest.mark.parametrize("product", [False, True])
def test_what_such_a_graph_assigns_is_assigned_to_all_replicas(product: bool) -> None:
    strategy = LocalSGD(2, 3) * Data(2) if product else LocalSGD(2, 3)
    model = mlp(strategy)
    random = np.random.default_rng(3)
    w = model.variables[0]
    with gf.Session() as s:
        s.run(model.fetches, model.feeds(random, 8))
        before = s.get(w)
        s.run(gf.assign(w, 2.0 * w))
        copies = copies_of(s, w)
        assert all(np.array_equal(copy, copies[0]) for copy in copies)
        assert np.abs(copies[0] - 2 * before).max() < 1e-15
        s.set(w, before)
        assert all(np.array_equal(copy, before) for copy in copies_of(s, w))
        s.run(model.fetches, model.feeds(random, 8))


def test_fetched_variables_and_updates_are_means() -> None:
    x = gf.placeholder("float64", ("B",), name="x")
    w = gf.variable(np.array(1.0), name="w")
    moment = gf.variable(np.array(0.0), name="moment", trainable=False)
    train = gf.optim.SGD(1.0).minimize(gf.mean(x * w), strategy=LocalSGD(2, 4))
    update = gf.assign(moment, gf.mean(x))
    with gf.Session() as s:
        assert s.run([w, train, update], {x: np.array([1.0, 3.0])}) == [1.0, None, 2.0]
        assert s.run([w, train, update], {x: np.array([1.0, 5.0])}) == [-1.0, None, 3.0]


def test_a_fetch_with_a_value_for_each_replica_is_refused_with_the_remedy() -> None:
    model = mlp(LocalSGD(2, 3))
    random = np.random.default_rng(3)
    sums = gf.sum(model.fetches[0] * model.variables[1], keepdims=True)
    with gf.Session() as s:
        with pytest.raises(ShardingError, match=r"2 replicas and 1 turns; fetch floats"):
            s.run([sums, model.fetches[1]], model.feeds(random, 8))
        s.run(model.fetches, model.feeds(random, 8))


# Products -----------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("options", [{}, {"shard_state": True}, {"accumulate": 2}])
def test_replicas_of_two_devices_are_replicas_of_one(options: dict[str, Any]) -> None:
    def weights(strategy: Any, cluster: Any = None) -> list[Any]:
        model = mlp(strategy)
        random = np.random.default_rng(1)
        with gf.Session(cluster) as s:
            for _ in range(5):
                s.run(model.fetches, model.feeds(random, 13))
            return [s.get(v) for v in model.variables]

    flat = weights(LocalSGD(2, 2))
    product = LocalSGD(2, 2) * Data(2, **options)
    assert largest_difference(flat, weights(product)) < 1e-12
    assert largest_difference(flat, weights(product, gf.Cluster.local(4))) < 1e-12


def test_a_table_over_the_devices_of_a_replica_is_exchanged_by_shards() -> None:
    def weights(strategy: Any) -> list[Any]:
        random = np.random.default_rng(2)
        ids = gf.placeholder("int64", ("B", 4), name="ids")
        table = gf.variable(random.normal(size=(40, 6)), name="table")
        w = gf.variable(random.normal(size=6), name="w")
        loss = gf.mean(gf.square(gf.sum(gf.sum(gf.nn.embedding(ids, table), 1) * w, 1)))
        train = gf.optim.SGD(0.01).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            for _ in range(5):
                s.run([loss, train], {ids: random.integers(0, 40, (8, 4))})
            return [s.get(table), s.get(w), s.run(loss, {ids: random.integers(0, 40, (8, 4))})]

    product = LocalSGD(2, 2) * Data(2, tables=["table"])
    assert largest_difference(weights(LocalSGD(2, 2)), weights(product)) < 1e-12


def test_one_replica_is_a_device() -> None:
    assert largest_difference(run_training(LocalSGD(1, 2)), run_training(None)) < 1e-15


def test_products_are_with_one_data() -> None:
    for other in (LocalSGD(2, 2), Data(2, devices=["cpu:0", "cpu:1"]), 3):
        with pytest.raises(ShardingError, match=r"a LocalSGD goes with one Data"):
            LocalSGD(2, 2) * other


# On workers --------------------------------------------------------------------------------------


def steps_with(
    folder: Path, dying: int | None = None, stop: int | None = None, replicas: int = 2
) -> list[Any]:
    """Losses and weights of ten turns with an exchange every four; a worker may be killed, and the
    session may end before a step and go on from its checkpoint."""
    model = mlp(LocalSGD(replicas, 4))
    random = np.random.default_rng(3)
    every = [model.feeds(random, 8) for _ in range(10)]
    found: list[Any] = []
    ranges = [range(10)] if stop is None else [range(stop), range(stop, 10)]
    for steps in ranges:
        with gf.Session(gf.Cluster.local(2), checkpoint=folder, every=3) as s:
            for step in steps:
                if step == dying:
                    os.kill(s._life.hosts.pids[step % 2], signal.SIGKILL)
                found.append(s.run(model.fetches, every[step])[0])
            weights = [s.get(v) for v in model.variables]
    return [*found, *weights]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "change", [{"dying": 6}, {"stop": 5}, pytest.param({"stop": 8}, marks=pytest.mark.slow)]
)
def test_a_lost_worker_or_a_pause_within_a_round_costs_no_bit(
    change: dict[str, Any], tmp_path: Path
) -> None:
    wanted = steps_with(tmp_path / "whole")
    found = steps_with(tmp_path / "broken", **change)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))


@pytest.mark.every(3)
@pytest.mark.parametrize("turns", range(1, 6))
@pytest.mark.parametrize("product", [False, True])
def test_a_checkpoint_of_any_turn_goes_on_with_other_replicas_from_the_means(
    turns: int, product: bool, tmp_path: Path
) -> None:
    def strategy(replicas: int) -> LocalSGD:
        plain = LocalSGD(replicas, 4, gf.optim.SGD(0.7, momentum=0.9))
        return plain * Data(2) if product else plain

    model = mlp(strategy(2))
    random = np.random.default_rng(3)
    with gf.Session() as s:
        for _ in range(turns):
            s.run(model.fetches, model.feeds(random, 12))
        s.save(tmp_path)
        mean = [s.get(v) for v in model.variables]
    for replicas in (1, 3):
        other = mlp(strategy(replicas))
        with gf.Session() as s:
            s.load(tmp_path)
            assert largest_difference([s.get(v) for v in other.variables], mean) == 0
            for _ in range(6):
                loss, _ = s.run(other.fetches, other.feeds(random, 12))
            assert np.isfinite(loss)


def test_a_checkpoint_of_data_goes_on_with_local_replicas(tmp_path: Path) -> None:
    model, other = mlp(Data(2)), mlp(LocalSGD(2, 2, gf.optim.SGD(0.5)))
    random = np.random.default_rng(3)
    with gf.Session() as s:
        s.run(model.fetches, model.feeds(random, 8))
        s.save(tmp_path)
        mean = [s.get(v) for v in model.variables]
    with gf.Session() as s:
        s.load(tmp_path)
        s.run(other.fetches, other.feeds(random, 8))
        s.run(other.fetches, other.feeds(random, 8))
        moved = largest_difference([s.get(v) for v in other.variables], mean)
        assert 0 < moved < 1  # a step from there, not from the initial values


def test_bytes_are_those_of_the_trace_and_one_exchange_a_period() -> None:
    model = mlp(strategy := LocalSGD(2, 3))
    random = np.random.default_rng(3)
    cluster = gf.Cluster.local(2)
    report = strategy.report(model.fetches, cluster)
    parameters = sum(v.spec.nbytes for v in model.variables)
    assert sum(move.bytes for move in report.collectives) == 2 * parameters
    moved, quiet = [], []
    with gf.Session(cluster) as s:
        s.run(model.fetches, model.feeds(random, 8))
        for turn in range(2, 8):
            with s.trace() as trace:
                s.run(model.fetches, model.feeds(random, 8))
            total = traced_bytes(trace)
            (moved if turn % 3 == 0 else quiet).append(total)
    assert moved == [report.bytes] * 2
    assert quiet == [sum(move.bytes for move in report.fetched)] * 4


# Refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("period", [0, -1, 2.5, True, "often"])
def test_a_period_is_a_count(period: Any) -> None:
    with pytest.raises(ShardingError, match=r"test_local_sgd.py:\d+.*period must be an int"):
        LocalSGD(2, period)


def test_more_replicas_than_devices_are_refused_with_both_numbers() -> None:
    model = mlp(strategy := LocalSGD(3, 2))
    message = r"LocalSGD at .*replica 3\) takes 3 devices, and the cluster has 2"
    with pytest.raises(ShardingError, match=message):
        strategy.report(model.fetches, gf.Cluster.local(2))


def test_a_fixed_batch_is_refused() -> None:
    x = gf.placeholder("float64", (8, 2), name="x")
    w = gf.variable(np.ones(2), name="w")
    train = gf.optim.SGD(0.1).minimize(gf.mean(x * w), strategy=LocalSGD(2, 2))
    message = r"LocalSGD at .*2 micro-batches.*'x' \(8, 2\)"
    with gf.Session() as s, pytest.raises(ShardingError, match=message):
        s.run(train, {x: np.ones((8, 2))})


def test_a_batch_below_replicas_times_turns_is_refused_and_the_session_goes_on() -> None:
    model = mlp(LocalSGD(2, 2, window=2))
    random = np.random.default_rng(3)
    with gf.Session() as s:
        with pytest.raises(ShardingError, match=r"LocalSGD at .*a batch of 3.*than its 4 shards"):
            s.run(model.fetches, model.feeds(random, 3))
        s.run(model.fetches, model.feeds(random, 4))
