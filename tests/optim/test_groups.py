"""Parameter groups, accumulation, moving averages and schedules in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, VariableError

schedules = gf.optim.schedules


def line() -> tuple[gf.Tensor, gf.Tensor, gf.Tensor]:
    """Return a weight, a bias, and a loss whose gradients are 1 and 2."""
    w = gf.variable(np.array([1.0, 2.0]), name="layer/weight")
    b = gf.variable(np.array([4.0]), name="layer/bias")
    return w, b, gf.sum(w) + 2.0 * gf.sum(b)


# Groups --------------------------------------------------------------------------------------


def test_each_variable_follows_the_first_pattern_that_fits() -> None:
    w, b, loss = line()
    decaying, plain = gf.optim.SGD(0.5, weight_decay=0.5), gf.optim.SGD(0.25)
    train = gf.optim.Groups({"*bias": plain, "*": decaying}, None).minimize(loss)
    with gf.Session() as session:
        session.run(train)
        assert session.get(b).tolist() == [4.0 - 0.25 * 2]
        assert session.get(w).tolist() == [1 - 0.5 * 1.5, 2 - 0.5 * 2.0]


def test_variables_of_no_rule_stay_as_they_are() -> None:
    w, b, loss = line()
    train = gf.optim.Groups({"*bias": None}, gf.optim.Adam(0.5)).minimize(loss)
    with gf.Session() as session:
        session.run(train)
        assert session.get(b).tolist() == [4.0] and session.get(w)[0] < 1


def test_tables_of_a_group_are_updated_by_rows() -> None:
    table = gf.variable(np.ones((9, 2), "float32"), name="table")
    w = gf.variable(np.ones(2, "float32"), name="w")
    loss = gf.sum(gf.nn.embedding([1, 3, 1], table) * w)
    rule = gf.optim.Groups({"table": gf.optim.Adam(0.1, sparse=True)}, gf.optim.SGD(0.1))
    train = rule.minimize(loss)
    with gf.Session() as session:
        session.run(train)
        changed = np.flatnonzero((session.get(table) != 1).any(1))
    assert changed.tolist() == [1, 3]


@pytest.mark.parametrize(
    ("make", "kind", "message"),
    [
        (lambda: gf.optim.Groups({"*bais": gf.optim.SGD(0.1)}, gf.optim.SGD(0.1)), VariableError,
         "no variable's name fits '.bais'"),
        (lambda: gf.optim.Groups({"*": 0.1}, None), ArgumentError, "must be an optimiser or None"),
        (lambda: gf.optim.Groups({"*": None}, None), VariableError, "no trainable variable"),
        (lambda: gf.optim.Groups([gf.optim.SGD(0.1)], None), ArgumentError, "must be a dict"),
    ],
)  # fmt: skip
def test_groups_that_fit_nothing_are_refused(make: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        make().minimize(line()[2])


# Accumulation --------------------------------------------------------------------------------


def test_three_accumulated_steps_are_one_of_their_mean() -> None:
    x = gf.placeholder("float64", (2,), name="x")
    w = gf.variable(np.zeros(2), name="w")
    train = gf.optim.Accumulate(gf.optim.SGD(1.0, momentum=0.5), 3).minimize(gf.sum(w * x))
    feeds = np.random.default_rng(0).normal(size=(6, 2))
    first = feeds[:3].mean(0)
    with gf.Session() as session:
        for i, feed in enumerate(feeds):
            session.run(train, {x: feed})
            if i == 1:
                assert session.get(w).tolist() == [0, 0]
            if i in (2, 4):
                np.testing.assert_allclose(session.get(w), -first)
        wanted = -first - (0.5 * first + feeds[3:].mean(0))
        np.testing.assert_allclose(session.get(w), wanted)


# Moving averages -----------------------------------------------------------------------------


def test_averages_begin_at_the_first_step_and_predict_apart_from_weights(tmp_path: Path) -> None:
    w, _, _ = line()
    loss = gf.sum(w * w)
    train = gf.optim.MovingAverage(gf.optim.SGD(0.1), 0.75).minimize(loss)
    now, mean = w * 10.0, gf.optim.apply_averages(w * 10.0, train)
    value = average = np.array([1.0, 2.0])
    with gf.Session() as session:
        for t in range(5):
            session.run(train)
            value = value - 0.2 * value
            average = value if t == 0 else 0.75 * average + 0.25 * value
        found = session.run([now, mean])
        np.testing.assert_allclose(found, [value * 10, average * 10])
        session.save(tmp_path / "saved")
    with gf.Session() as session:
        session.load(tmp_path / "saved")
        np.testing.assert_allclose(session.run(mean), average * 10)


def test_a_step_without_averages_is_refused() -> None:
    w, _, loss = line()
    train = gf.optim.SGD(0.1).minimize(loss)
    with pytest.raises(ArgumentError, match="train keeps no averages; make it by"):
        gf.optim.apply_averages(w, train)


# Schedules -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        (schedules.linear(1.0, 0.0, 4), [1, 0.75, 0.5, 0.25, 0, 0]),
        (schedules.cosine(1.0, 2, 0.5), [1, 0.75, 0.5, 0.5]),
        (schedules.exponential(1.0, 0.25, 2), [1, 0.5, 0.25, 0.125]),
        (schedules.piecewise({0: 1.0, 2: 0.5, 3: 0.1}), [1, 1, 0.5, 0.1, 0.1]),
        (schedules.warmup(1.0, 4), [0, 0.25, 0.5, 0.75, 1, 1]),
        (schedules.warmup(schedules.linear(1.0, 0.0, 2), 2, 0.5), [0.5, 0.75, 1, 0.5, 0]),
        (schedules.inverse_sqrt(1.0, 4), [0.25, 0.5, 0.75, 1, (4 / 5) ** 0.5]),
        (schedules.constant(0.5), [0.5, 0.5]),
        (gf.optim.RateSchedule(lambda step: 1.0 / (step + 1.0)), [1, 0.5, 1 / 3]),
    ],
)
def test_a_schedule_gives_its_rates_and_steps_follow_them(schedule: Any, rates: Any) -> None:
    assert [schedule.rate_at(i) for i in range(len(rates))] == pytest.approx(rates)
    w = gf.variable(np.float64(0), name="w")
    train = gf.optim.SGD(schedule).minimize(-w)
    with gf.Session() as session:
        for i in range(len(rates)):
            session.run(train)
            assert session.get(w) == pytest.approx(sum(rates[: i + 1]))


def test_a_step_that_loss_scaling_leaves_out_is_not_counted() -> None:
    x = gf.placeholder("float64", (), name="x")
    w = gf.variable(np.float64(0), name="w")
    rate = schedules.piecewise({0: 1.0, 1: 0.25})
    train = gf.optim.SGD(rate).minimize(w * x, scaling=gf.optim.LossScaling())
    with gf.Session() as session:
        for value in (np.inf, -1.0, -1.0):
            session.run(train, {x: value})
        assert session.get(w) == 1.25


def test_a_plateau_needs_more_bad_means_than_its_patience() -> None:
    x = gf.placeholder("float64", (), name="x")
    w = gf.variable(np.float64(0), name="w")
    rate = schedules.plateau(1.0, x, factor=0.5, patience=1, least=0.3, every=2)
    train = gf.optim.SGD(rate).minimize(-w)
    #        best     bad      bad      falls    bad      falls to the least
    metrics = [2.0, 2.0, 3.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0]
    moved, at = [], 0.0
    with gf.Session() as session:
        for metric in metrics:
            session.run(train, {x: metric})
            moved.append(round(float(session.get(w)) - at, 6))
            at = float(session.get(w))
    assert moved == [1.0] * 6 + [0.5] * 4 + [0.3] * 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: schedules.cosine(0.1, 0), "steps must be an int from 1, not 0"),
        (lambda: schedules.linear("a", 0.0, 3), "start must be a number, not 'a'"),
        (lambda: schedules.piecewise({5: 0.1}), "from step to rate that begins at 0"),
        (lambda: schedules.one_cycle(0.1, 10, rise=1.5), "rise must be a share between 0 and 1"),
        (lambda: schedules.plateau(0.1, 3.0), "metric must be a scalar of the graph, not 3.0"),
        (lambda: schedules.warmup(schedules.plateau(0.1, line()[2]), 3), "follows its metric"),
    ],
)
def test_wrong_schedules_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


# Clipping ------------------------------------------------------------------------------------


def test_clipping_by_value_and_by_each_norm() -> None:
    a = gf.constant(np.array([3.0, -4.0], "float32"))
    b = gf.constant(np.array([0.3, -0.4]))
    with gf.Session() as session:
        cut = session.run(gf.optim.clip_by_value([a, b], 0.35))
        scaled = session.run(gf.optim.clip_by_norm([a, b], 1.0))
    assert cut[0].dtype == "float32"
    np.testing.assert_allclose(cut[0], [0.35, -0.35])
    np.testing.assert_allclose(cut[1], [0.3, -0.35])
    np.testing.assert_allclose(scaled[0], [0.6, -0.8], 1e-6)
    np.testing.assert_allclose(scaled[1], [0.3, -0.4])
    with pytest.raises(ArgumentError, match="limit must be a positive number, not 0"):
        gf.optim.clip_by_value([a], 0)
