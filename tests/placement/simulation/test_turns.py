"""Windows of turns as they are predicted: races, gates and pools."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.errors import ProblemError
from graphflow.placement.simulation.turns import simulate_pool, simulate_turns


def jitter(seed: int, *shape: int) -> Any:
    """One turn in ten takes five times as long."""
    return np.where(np.random.default_rng(seed).random(shape) < 0.1, 5.0, 1.0)


@pytest.mark.parametrize(("staleness", "known"), [(0, 3.09), (1, 2.29), (3, 1.78), (7, 1.61)])
def test_less_waiting_makes_a_window_shorter(staleness: int, known: float) -> None:
    seconds = [
        simulate_turns(jitter(seed, 8, 128), staleness=staleness).seconds / 128
        for seed in range(10)
    ]
    assert np.mean(seconds) == pytest.approx(known, rel=0.05)


def test_a_pool_hides_a_slow_worker() -> None:
    level, half = np.ones(8), np.array([2.0, *np.ones(7)])
    pool = [simulate_pool(jitter(seed, 256), level).seconds / 32 for seed in range(20)]
    assert np.mean(pool) == pytest.approx(1.48, rel=0.05)
    pool = [simulate_pool(jitter(seed, 256), half).seconds / 32 for seed in range(20)]
    assert np.mean(pool) == pytest.approx(1.60, rel=0.05)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.integers(0, 99))
def test_gates_hold_and_nobody_waits_without_need(
    workers: int, count: int, staleness: int, seed: int
) -> None:
    turns = np.random.default_rng(seed).uniform(0.1, 2.0, (workers, count))
    found = simulate_turns(turns, 0.0, staleness)
    np.testing.assert_allclose(found.finish - found.start, turns)
    for k in range(workers):
        for c in range(1, count):
            needs = [found.finish[k, c - 1]]
            if c > staleness:
                needs += list(found.finish[:, c - 1 - staleness])
            assert found.start[k, c] == pytest.approx(max(needs))
    assert np.bincount(found.order, minlength=workers).tolist() == [count] * workers


def test_one_server_makes_its_updates_one_after_the_other() -> None:
    found = simulate_turns(np.ones((3, 2)), update=0.5)
    assert found.seconds == 4.0
    assert simulate_pool(np.ones(4), np.ones(2), update=1.0).seconds == 5.0
    assert simulate_pool(np.ones(4), np.ones(2), update=1.0, aggregate=2).seconds == 3.0
    assert simulate_pool(np.ones(3), np.ones(2), update=1.0, aggregate=2).seconds == 3.0


@pytest.mark.parametrize("turns", [np.ones(3), np.ones((0, 2)), [[np.nan]], [[-1.0]]])
def test_bad_turns_are_refused(turns: Any) -> None:
    with pytest.raises(ProblemError, match="turns has 2 axes"):
        simulate_turns(turns)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(ProblemError, match=r"staleness are not negative, got 0.0 and -1"):
        simulate_turns(np.ones((1, 1)), staleness=-1)
    with pytest.raises(ProblemError, match=r"aggregate is positive, got 0.0 and 0"):
        simulate_pool(np.ones(2), np.ones(1), aggregate=0)
