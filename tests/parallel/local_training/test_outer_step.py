"""The outer step of LocalSGD, with fragments and delays, against the same computed by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import CheckError, ShardingError
from graphflow.parallel import LocalSGD
from graphflow.parallel.local_training.exchange_schedule import (
    schedule_exchanges,
    split_parameters,
)
from graphflow.parallel.local_training.outer_step import is_averaging

Array = np.ndarray[Any, Any]
COUNT, REPLICAS, RATE = 7, 2, 0.1
DILOCO = gf.optim.SGD(0.7, momentum=0.9, nesterov=True)


class Scalars:
    """Seven parameters, each drawn to the numbers that are fed, to large ones more strongly."""

    def __init__(self, strategy: Any) -> None:
        self.x = gf.placeholder("float64", ("B", COUNT), name="x")
        self.weights = [gf.variable(np.array(float(i)), name=f"w{i}") for i in range(COUNT)]
        away = gf.stack(self.weights) - self.x
        loss = 0.5 * gf.mean(gf.sum(gf.square(self.x * away), 1))
        self.train = gf.optim.SGD(RATE).minimize(loss, strategy=strategy)

    def run(self, feeds: Sequence[Array], window: int = 1, folder: Path | None = None) -> Array:
        """The parameters after some turns. With a folder, the session is left and resumed after
        each run."""
        groups = [np.concatenate(feeds[i : i + window]) for i in range(0, len(feeds), window)]
        if folder is None:
            with gf.Session() as s:
                for group in groups:
                    s.run(self.train, {self.x: group})
                return self.read(s)
        for i, group in enumerate(groups):
            with gf.Session() as s:
                if i:
                    s.load(folder / str(i))
                s.run(self.train, {self.x: group})
                s.save(folder / str(i + 1))
                found = self.read(s)
        return found

    def read(self, s: gf.Session) -> Array:
        """The parameters of a session."""
        return np.array([s.get(w) for w in self.weights])


def by_hand(
    feeds: Sequence[Array],
    period: int,
    outer: tuple[float, float, bool] = (1.0, 0.0, False),
    fragments: int = 1,
    delay: int = 0,
    window: int = 1,
) -> Array:
    """The mean over replicas of the parameters of `Scalars` after some turns."""
    rate, momentum, nesterov = outer
    each = np.tile(np.arange(COUNT, dtype=float), (REPLICAS, 1))
    theta, velocity = each[0].copy(), np.zeros(COUNT)
    owner = np.repeat(range(fragments), [len(p) for p in split_parameters(NODES, fragments)])
    pending: list[tuple[int, Array, Array, Array]] = []
    for turn, feed in enumerate(feeds, 1):
        each = each - RATE * feed**2 * (each - feed)
        for fragment in range(fragments):
            if (turn + fragment * period // fragments) % period == 0:
                mine = owner == fragment
                end = -(-turn // window) * window
                difference = (theta - each).mean(0)
                pending.append((min(turn + delay, end), mine, each.copy(), difference))
        for _, mine, before, difference in [p for p in pending if p[0] == turn]:
            velocity[mine] = momentum * velocity[mine] + difference[mine]
            step = difference + momentum * velocity if nesterov else velocity
            theta[mine] -= rate * step[mine]
            each[:, mine] = theta[mine] + (each - before)[:, mine]
        pending = [p for p in pending if p[0] > turn]
    mean: Array = each.mean(0)
    return mean


NODES = [gf.variable(np.array(0.0)).node for _ in range(COUNT)]
FEEDS = [np.random.default_rng(i).normal(size=(REPLICAS, COUNT)) for i in range(24)]


@pytest.mark.parametrize("outer", [(1.0, 0.0, False), (0.5, 0.0, False), (0.7, 0.9, True)])
@pytest.mark.parametrize("steps", [6, 8, 11])
def test_the_outer_step_goes_the_right_way(outer: tuple[float, float, bool], steps: int) -> None:
    rate, momentum, nesterov = outer
    strategy = LocalSGD(REPLICAS, 4, gf.optim.SGD(rate, momentum=momentum, nesterov=nesterov))
    found = Scalars(strategy).run(FEEDS[:steps])
    assert np.abs(found - by_hand(FEEDS[:steps], 4, outer)).max() < 1e-13


@pytest.mark.parametrize("fragments", [1, 2, 7])
@pytest.mark.parametrize("outer", [None, DILOCO])
def test_fragments_take_turns_and_a_session_resumes_at_every_turn(
    fragments: int, outer: Any, tmp_path: Path
) -> None:
    numbers = (1.0, 0.0, False) if outer is None else (0.7, 0.9, True)
    wanted = by_hand(FEEDS[:14], 6, numbers, fragments)
    whole = Scalars(LocalSGD(REPLICAS, 6, outer, fragments)).run(FEEDS[:14])
    assert np.abs(whole - wanted).max() < 1e-13
    resumed = Scalars(LocalSGD(REPLICAS, 6, outer, fragments)).run(FEEDS[:14], folder=tmp_path)
    assert np.array_equal(resumed, whole)


@pytest.mark.parametrize("delay", [1, 3])
@pytest.mark.parametrize("outer", [None, DILOCO])
@pytest.mark.parametrize("window", [4, 6, 8])
def test_what_is_learnt_while_a_fragment_travels_is_kept(
    delay: int, outer: Any, window: int
) -> None:
    numbers = (1.0, 0.0, False) if outer is None else (0.7, 0.9, True)
    strategy = LocalSGD(REPLICAS, 6, outer, 3, delay, window=window)
    found = Scalars(strategy).run(FEEDS, window)
    assert np.abs(found - by_hand(FEEDS, 6, numbers, 3, delay, window)).max() < 1e-13


@pytest.mark.parametrize("fragments", [1, 2, 7])
@pytest.mark.parametrize("window", [1, 4, 5])
def test_rounds_are_the_turns_divided_by_the_period(fragments: int, window: int) -> None:
    period = 8
    counts = [0] * fragments
    for done in range(0, 40 * window, window):
        for turn in schedule_exchanges(done, window, period, fragments, 0):
            for fragment in turn.sent:
                counts[fragment] += 1
        assert min(counts) == counts[0] == (done + window) // period
        if (done + window) % period == 0:
            assert set(counts) == {(done + window) // period}


def test_an_outer_rate_of_one_is_bitwise_the_mean_of_replicas() -> None:
    feeds = FEEDS[:8]
    plain = Scalars(LocalSGD(REPLICAS, 4)).run(feeds)
    assert np.array_equal(Scalars(LocalSGD(REPLICAS, 4, gf.optim.SGD(1.0))).run(feeds), plain)
    assert is_averaging(gf.optim.SGD(1.0)) and not is_averaging(DILOCO)
    assert not is_averaging(gf.optim.SGD(1.0, momentum=0.5))


def test_fragments_are_of_about_equal_size_and_never_empty() -> None:
    random = np.random.default_rng(0)
    for _ in range(100):
        sizes = random.integers(1, 1000, random.integers(1, 12))
        nodes = [gf.variable(np.zeros(n, "float32")).node for n in sizes]
        for count in range(1, len(nodes) + 1):
            groups = split_parameters(nodes, count)
            assert len(groups) == count and all(groups)
            assert [n for group in groups for n in group] == nodes


def test_integers_that_the_batch_changes_have_to_agree() -> None:
    x = gf.placeholder("float64", ("B",), name="x")
    w = gf.variable(np.array(0.0), name="w")
    seen = gf.variable(np.array(0), name="seen", trainable=False)
    train = gf.optim.SGD(0.1).minimize(gf.mean(x * w), strategy=LocalSGD(2, 2))
    update = gf.assign(seen, seen + gf.sum(gf.astype(x > 0, "int64")))
    with gf.Session() as s:
        for _ in range(2):
            s.run([train, update], {x: np.array([1.0, 2.0])})
        assert s.get(seen) == 2
        s.run([train, update], {x: np.array([1.0, -2.0])})
        with pytest.raises(CheckError, match=r"'seen' .*has to be equal at all replicas"):
            s.run([train, update], {x: np.array([1.0, 2.0])})
        s.run([train, update], {x: np.array([-1.0, 2.0])})  # the refused turn changed nothing
        assert s.get(seen) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"fragments": 0}, "fragments must be an int"),
        ({"delay": 2, "window": 2}, r"delay=2 .*less than the period of 4 .*the 2 turns"),
        ({"delay": 4, "window": 8}, "delay=4 .*less than the period of 4"),
        ({"outer": 0.7}, "outer must be an optimiser"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ShardingError, match=rf"LocalSGD at .*test_outer_step.*{message}"):
        LocalSGD(2, 4, **arguments)


def test_more_fragments_than_parameters_are_refused_with_both_numbers() -> None:
    model = Scalars(LocalSGD(REPLICAS, 4, fragments=8))
    with pytest.raises(ShardingError, match=r"fragments=8, .*trains only 7"):
        model.run(FEEDS[:1])
