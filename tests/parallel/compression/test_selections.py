"""Filters that send some numbers: which ones, what is kept of the others, and how many bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.ir.spec import spec
from graphflow.parallel.compression.filter import Filter
from graphflow.parallel.compression.traffic import traffic_of
from tests.parallel.compression.test_data_compress import Regression
from tests.parallel.compression.test_filters import draw, exchange

Chain, Data, FixedPoint, Kkt, RandomSkip, Significant, TopK = (
    getattr(gf.parallel, name)
    for name in ("Chain", "Data", "FixedPoint", "Kkt", "RandomSkip", "Significant", "TopK")
)
Array = np.ndarray[Any, Any]
KEEPING = [
    Significant(0.3),
    Significant(lambda t: 2.0 / t),
    RandomSkip(0.3, feedback=True),
    Chain([TopK(0.2), FixedPoint(4)]),
    Chain([Significant(0.5), FixedPoint(2)]),
    Chain([RandomSkip(0.5, feedback=True), TopK(0.5)]),
]


@settings(max_examples=12)
@given(
    rule=st.sampled_from(KEEPING),
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    replicas=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_what_was_sent_and_what_is_kept_is_what_was_given(
    rule: Filter, shape: list[int], replicas: int, seed: int
) -> None:
    xs = [draw(*shape, dtype="float64", seed=seed + k) for k in range(replicas)]
    steps = exchange(rule, xs, 5, draw(*shape, dtype="float64", seed=seed + 9))
    sent = sum(step[0][0] for step in steps)
    kept = sum(state[0] for _, state in steps[-1])
    assert np.allclose(sent + kept, 5 * sum(xs), rtol=0, atol=1e-12)
    assert all(np.array_equal(step[0][0], total) for step in steps for total, _ in step)


# Significant ------------------------------------------------------------------------------------


@pytest.mark.parametrize("delta", [0.0, 0.5, lambda t: 2.0 / t])
def test_a_number_travels_once_its_changes_reach_the_limit(delta: Any) -> None:
    x, value = draw(6, 7, dtype="float64"), 1.5 * draw(6, 7, dtype="float64", seed=1)
    scale = np.sqrt(np.mean(value**2))
    kept = np.zeros_like(x)
    for t, ((total, (residual, *_)),) in enumerate(exchange(Significant(delta), [x], 8, value), 1):
        kept = kept + x
        sent = np.abs(kept) >= (delta(t) if callable(delta) else delta) * scale
        assert np.array_equal(total, np.where(sent, kept, 0.0))
        kept = np.where(sent, 0.0, kept)
        assert np.array_equal(residual, kept)


def test_zeros_never_travel_and_a_variable_of_zeros_holds_nothing_back() -> None:
    x = draw(40)
    x[::2] = 0.0
    for value in (np.zeros(40, "float32"), np.ones(40, "float32")):
        total = exchange(Significant(0.0), [x], 1, value)[0][0][0]
        assert np.array_equal(total, x)


def test_a_limit_that_falls_comes_near_the_optimum_and_a_constant_one_stalls() -> None:
    """Two replicas with a goal each, through filters on their gradients."""
    random = np.random.default_rng(0)
    goals = random.normal(size=(2, 100))
    goal = goals.mean(0)
    distances = []
    for delta in (2.0, lambda t: 20.0 / t):
        t = gf.placeholder("float64", (2, 100))
        w = gf.variable(np.ones(100), name="w")
        loss = gf.mean(gf.sum((w - t) ** 2.0, 1))
        rule = Significant(delta, share=0.2)
        train = gf.optim.SGD(0.1).minimize(loss, strategy=Data(2, compress=rule))
        with gf.Session() as s:
            for _ in range(300):
                s.run(train, {t: goals})
            distances.append(np.linalg.norm(s.get(w) - goal) / np.linalg.norm(goal))
    assert distances[1] < 0.01 < 0.04 < distances[0], distances


# Kkt --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("delta", [0.0, 0.3])
def test_gradients_of_weights_that_the_penalty_holds_at_zero_do_not_travel(
    replicas: int, delta: float
) -> None:
    value = draw(300, 9)
    value[::2] = 0.0
    xs = [draw(300, 9, seed=k) for k in range(replicas)]
    total = exchange(Kkt(1.2, delta), xs, 1, value)[0][0][0]
    bound = np.float32((1.2 - delta) / replicas)
    wanted = sum(np.where((value == 0) & (np.abs(x) < bound), 0.0, x) for x in xs)
    np.testing.assert_allclose(total, wanted, rtol=1e-6)
    skipped = np.all([(value == 0) & (np.abs(x) < bound) for x in xs], 0)
    assert skipped.any() and np.all(np.abs(sum(xs))[skipped] < 1.2)


@dataclass(frozen=True)
class Proximal(gf.optim.Optimizer):
    """w ← soft(w − lr·g, lr·penalty), the step for a penalty of |w|."""

    lr: float = 0.1
    penalty: float = 0.1

    def _update(self, value: Any, gradient: Any, target: Any, shared: Any) -> Any:
        moved = value - self.lr * gradient
        return gf.sign(moved) * gf.maximum(abs(moved) - self.lr * self.penalty, 0.0)


def test_a_lasso_reaches_the_objective_that_it_reaches_without_the_filter() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(200, 100)) / np.sqrt(200)
    t = x[:, :5] @ np.array([3.0, -2.0, 4.0, 1.0, -5.0]) + 0.01 * random.normal(size=200)
    x, t, penalty = np.concatenate([x, x]), np.concatenate([t, t]), 0.002
    found = []
    for rule in (None, Kkt(penalty), Kkt(penalty, penalty / 2)):
        rows, goal = gf.placeholder("float64", (400, 100)), gf.placeholder("float64", (400,))
        w = gf.variable(np.zeros(100), name="w")
        loss = gf.mean((rows @ w - goal) ** 2.0)
        strategy = Data(2, compress=rule)
        train = Proximal(30.0, penalty).minimize(loss, strategy=strategy)
        with gf.Session() as s:
            for _ in range(200):
                s.run(train, {rows: x, goal: t})
            after = s.get(w)
        found.append(np.mean((x @ after - t) ** 2) + penalty * np.abs(after).sum())
        assert 3 < np.count_nonzero(after) < 50
    np.testing.assert_allclose(found[1:], found[0], rtol=1e-9)


# RandomSkip -------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(size=st.integers(1, 60), keep=st.floats(0.02, 1.0))
def test_each_number_is_among_as_many_choices_as_every_other(size: int, keep: float) -> None:
    """Over all starts, each position comes as often; and no message holds one twice."""
    rule, what = RandomSkip(keep), spec("float32", (size,))
    (count,) = rule.numbers_spec(what).shape
    start = gf.placeholder("int64", ())
    places = rule._places(what, start)
    with gf.Session() as s:
        every = [s.run(places, {start: k}) for k in range(size)]
    assert all(len({*each}) == count for each in every)
    assert np.array_equal(np.bincount(np.concatenate(every), minlength=size), [count] * size)


def test_skipping_is_right_on_average_and_differs_between_replicas_and_steps() -> None:
    x = draw(53, dtype="float64")
    steps = 600
    totals = np.array([step[0][0] for step in exchange(RandomSkip(0.3), [x], steps)])
    allowed = 5 * np.abs(x) * np.sqrt((1 / 0.3 - 1) / steps)
    assert np.all(np.abs(totals.mean(0) - x) <= allowed)
    assert len({tuple(total != 0) for total in totals}) == 53
    (one, two), *_ = exchange(RandomSkip(0.3, feedback=True), [x, x])
    assert not np.array_equal(one[1][0], two[1][0])


@dataclass(frozen=True)
class Both(RandomSkip):
    """Rescaling and feedback together, which `RandomSkip` refuses."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rescale", True)
        object.__setattr__(self, "feedback", True)


def test_rescaling_with_feedback_explodes_and_is_refused() -> None:
    with pytest.raises(gf.errors.ArgumentError, match=r"squared norm by 3 on average"):
        RandomSkip(0.25, feedback=True, rescale=True)
    x = draw(400, dtype="float64")
    norms = [np.square(step[0][1][0]).sum() for step in exchange(Both(0.25), [x], 20)]
    assert norms[-1] > 1.4**15 * norms[4]
    with pytest.raises(gf.errors.ArgumentError, match="residual grows without bound"):
        gf.parallel.check_filter(Both(0.25), rounds=20)


# Chains -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Chain([]), "filters must be a list of filters"),
        (lambda: Chain([FixedPoint(8), TopK(0.1)]), r"FixedPoint\(bits=8\) chooses no numbers"),
        (lambda: Chain([TopK(0.1), Filter()]), "cannot be in a chain"),
        (lambda: Chain([TopK(0.1), Significant(0.1)]), "make it the first filter"),
        (lambda: Chain([TopK(0.1), RandomSkip(0.5)]), "does not go with the feedback"),
        (lambda: Chain([Kkt(1.0), TopK(0.1)]), "does not go with the feedback"),
        (lambda: RandomSkip(0), r"keep must be above 0 and at most 1, not 0"),
        (lambda: RandomSkip(0.5, rescale=False), "only 0.5 of the sum would arrive"),
        (lambda: Significant(-1), "delta must be a number from 0, not -1"),
        (lambda: Significant(gf.constant(1.0)), "delta must be a number or a function"),
        (lambda: Significant(0.1, share=2), "share must be above 0 and at most 1, not 2"),
        (lambda: Kkt(0), "penalty must be above 0 and finite"),
        (lambda: Kkt(1, 2), "delta must be a number from 0 to 1, not 2"),
    ],
)
def test_wrong_numbers_and_chains_are_refused_at_the_users_line(make: Any, text: str) -> None:
    with pytest.raises(gf.errors.ArgumentError, match=text) as caught:
        make()
    assert "test_selections.py:" in str(caught.value)


def test_a_limit_that_is_no_scalar_is_refused_with_the_strategys_line() -> None:
    rule = Significant(lambda t: gf.ones((3,)) * t)
    with pytest.raises(gf.errors.GraphflowError, match="delta must return a scalar"):
        Regression(Data(2, compress=rule))


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        (RandomSkip(0.25), 250 * 4 + 8),
        (Chain([TopK(0.05), FixedPoint(8)]), 50 * (1 + 2) + 4),
        (Chain([RandomSkip(0.1), FixedPoint(4)]), 50 + 4 + 8),
        (Significant(0.1, share=0.2), 200 * (4 + 2) + 2),
        (Chain([Kkt(0.1), FixedPoint(2)]), 25 + 4 + 100 * 2 + 2),
    ],
    ids=repr,
)
def test_the_bytes_that_are_told(rule: Filter, wanted: int) -> None:
    assert traffic_of(rule, spec("float32", (1000,)), 2).filtered == wanted


# Strategies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", [Significant(0.1), Chain([Significant(0.1), FixedPoint(4)])])
def test_only_the_numbers_that_are_chosen_travel(rule: Filter) -> None:
    """The others stay at their worker as padding, of which an edge leaves out the bytes."""
    step = Regression(Data(2, compress=rule), "float32", gf.optim.SGD(0.01))
    with gf.Session(gf.Cluster.local(2, threads=1)) as s:
        for k in range(3):
            s.run(step.train, step.feeds(k))
            with s.trace() as trace:
                s.run(step.train, step.feeds(k))
            number = [int(np.count_nonzero(row == 0)) for rows in step.state(s) for row in rows]
            moved = sum(e.bytes for e in trace.edges if "used_rows" in e.tensor)
            if isinstance(rule, Significant):
                assert moved == sum(number) * (4 + 2) and 0 < sum(number) < 2 * 240
            else:
                assert moved < 2 * 240 * (0.5 + 2)


@pytest.mark.parametrize("rule", [RandomSkip(0.3), Chain([TopK(0.05), FixedPoint(8)])], ids=repr)
def test_the_bytes_of_fixed_messages_are_those_of_a_trace(rule: Filter) -> None:
    strategy = Data(2, compress=rule)
    step, cluster = Regression(strategy, "float32"), gf.Cluster.local(2, threads=1)
    with gf.Session(cluster) as s:
        s.run(step.train, step.feeds(0))
        with s.trace() as trace:
            s.run(step.train, step.feeds(1))
    sent = sum(e.bytes * e.count * 2 for e in trace.exchanges)
    assert strategy.report(step.train, cluster).bytes == sent


@pytest.mark.parametrize("rule", [Significant(0.01), RandomSkip(0.5, feedback=True)], ids=repr)
def test_replicas_that_train_alone_exchange_through_them(rule: Filter) -> None:
    sgd = gf.optim.SGD(0.05)
    plain = Regression(gf.parallel.LocalSGD(2, period=1), "float64", sgd)
    kept = Regression(gf.parallel.LocalSGD(2, period=1, compress=rule), "float64", sgd)
    gossip = gf.parallel.Gossip(3, compress=rule, consensus=0.5)
    mixed = Regression(gossip, "float64", sgd)
    losses = []
    for step in (plain, kept, mixed):
        with gf.Session() as s:
            first = float(s.run(step.loss, step.feeds(0)))
            for k in range(60):
                s.run(step.train, step.feeds(k % 4))
            losses.append(float(s.run(step.loss, step.feeds(0))) / first)
    assert max(losses) < losses[0] * 1.3 + 0.02, losses


def test_a_key_cache_is_refused_where_receivers_remember_nothing() -> None:
    rule = Chain([TopK(0.1), gf.parallel.KeyCache()])
    with pytest.raises(gf.errors.ShardingError, match=r"Data at .*has a KeyCache, which needs"):
        Regression(Data(2, compress=rule))
    with pytest.raises(gf.errors.ShardingError, match=r"LocalSGD at .*has a KeyCache"):
        gf.parallel.LocalSGD(2, compress=rule)
    with pytest.raises(gf.errors.ShardingError, match=r"Gossip at .*has a KeyCache"):
        gf.parallel.Gossip(3, compress=rule, consensus=1.0)
    with pytest.raises(gf.errors.ArgumentError, match=r"check_filter at .*has a KeyCache"):
        gf.parallel.check_filter(rule)


def test_a_filter_for_gradients_is_refused_where_parameters_travel() -> None:
    with pytest.raises(gf.errors.ShardingError, match=r"LocalSGD at .*decides by gradients"):
        gf.parallel.LocalSGD(2, compress=Kkt(0.1))
    with pytest.raises(gf.errors.ShardingError, match=r"Gossip at .*decides by gradients"):
        gf.parallel.Gossip(3, compress=Chain([Kkt(0.1), FixedPoint(8)]), consensus=1.0)
