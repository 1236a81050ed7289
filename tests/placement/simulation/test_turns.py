"""Windows of turns as they are predicted: races, gates, rounds and pools."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.errors import ProblemError
from graphflow.ops.control_flow.turn_rules import Consistency, TurnRules
from graphflow.placement.simulation.turns import (
    SimulatedWindow,
    TurnSeconds,
    simulate_window,
)


def rules(
    workers: int, turns: int, consistency: Consistency, bound: int | None = None, **others: Any
) -> TurnRules:
    """Rules of a window in which party 0 is the server."""
    parties = tuple(range(1, workers + 1))
    return TurnRules((0,), parties, (turns,) * workers, consistency, bound, **others)


def simulate(found: TurnRules, turn: Any = None, update: float = 0.0, scale: Any = None) -> Any:
    turn = np.ones(len(found.workers)) if turn is None else np.asarray(turn)
    updates = np.full(len(found.servers), update)
    return simulate_window(found, TurnSeconds.without_messages(turn, updates), scale)


def jitter(seed: int, found: TurnRules) -> Any:
    """One turn in ten takes five times as long."""
    pooled = found.consistency == "pool"
    shape = (sum(found.turns),) if pooled else (len(found.workers), max(found.turns))
    return np.where(np.random.default_rng(seed).random(shape) < 0.1, 5.0, 1.0)


def mean_turn(found: TurnRules, turn: Any = None, draws: int = 60) -> float:
    """Seconds of a turn with jitter, the mean over windows."""
    took = [simulate(found, turn, scale=jitter(i, found)).seconds for i in range(draws)]
    return float(np.mean(took)) / max(found.turns)


LEVEL, HALF = np.ones(8), np.array([2.0, *np.ones(7)])


@pytest.mark.parametrize(
    ("bound", "known", "undrained"),
    [(0, 3.35, 3.35), (1, 2.39, 2.36), (3, 1.86, 1.80), (7, 1.74, 1.59), (15, 1.73, 1.51)],
)
def test_less_waiting_makes_a_window_shorter(bound: int, known: float, undrained: float) -> None:
    assert mean_turn(rules(8, 32, "ssp", bound)) == pytest.approx(known, rel=0.05)
    assert mean_turn(rules(8, 512, "ssp", bound), draws=3) == pytest.approx(undrained, rel=0.05)


def test_a_pool_hides_a_slow_worker() -> None:
    assert mean_turn(rules(8, 32, "pool")) == pytest.approx(1.48, rel=0.05)
    assert mean_turn(rules(8, 32, "pool"), HALF) == pytest.approx(1.60, rel=0.05)
    assert mean_turn(rules(8, 512, "pool"), draws=3) == pytest.approx(1.41, rel=0.05)
    assert mean_turn(rules(8, 512, "pool"), HALF, 3) == pytest.approx(1.51, rel=0.05)
    for bound in (7, 15):
        assert mean_turn(rules(8, 32, "ssp", bound), HALF) == pytest.approx(2.91, rel=0.05)


def test_rounds_are_a_bound_of_no_turn() -> None:
    synchronous, gated = rules(8, 32, "bsp", aggregate=8), rules(8, 32, "ssp", 0)
    for seed in range(5):
        scale = jitter(seed, gated)
        rounds = simulate(synchronous, scale=scale)
        assert rounds.seconds == pytest.approx(simulate(gated, scale=scale).seconds)
        assert rounds.seconds == pytest.approx(scale.max(axis=0).sum())


def test_backup_workers_shorten_rounds() -> None:
    """A round of two in three waits for the second; the late push is dropped."""
    scale = np.ones((3, 4))
    scale[0] = [5.0, 1.0, 1.0, 1.0]
    found = simulate(rules(3, 4, "bsp", aggregate=2), scale=scale)
    assert found.seconds == 5.0  # the other two were done after four turns
    assert simulate(rules(3, 4, "bsp", aggregate=3), scale=scale).seconds == 8.0


def turn_times(found: SimulatedWindow, workers: int, count: int) -> tuple[Any, Any]:
    """Start and finish of each turn, (workers, turns)."""
    start, finish = np.zeros((workers, count)), np.zeros((workers, count))
    for bar in found.bars:
        if bar.letter == "T":
            start[bar.party - 1, bar.number] = bar.start
            finish[bar.party - 1, bar.number] = bar.finish
    return start, finish


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.integers(0, 3), st.integers(0, 99))
def test_gates_hold_and_nobody_waits_without_need(
    workers: int, count: int, bound: int, seed: int
) -> None:
    scale = np.random.default_rng(seed).uniform(0.1, 2.0, (workers, count))
    found = simulate(rules(workers, count, "ssp", bound), scale=scale)
    start, finish = turn_times(found, workers, count)
    np.testing.assert_allclose(finish - start, scale)
    for k in range(workers):
        for c in range(1, count):
            needs = [finish[k, c - 1]]
            if c > bound:
                needs += list(finish[:, c - 1 - bound])
            assert start[k, c] == pytest.approx(max(needs))
    assert np.bincount(found.order, minlength=workers).tolist() == [count] * workers


def test_workers_that_end_early_hold_nobody_back() -> None:
    uneven = replace(rules(2, 4, "ssp", 0), turns=(1, 4))
    assert simulate(uneven).seconds == 4.0


def test_one_server_makes_its_updates_one_after_the_other() -> None:
    assert simulate(rules(3, 2, "async"), update=0.5).seconds == 4.0
    assert simulate(rules(2, 2, "pool"), update=1.0).seconds == 5.0
    two = replace(rules(3, 2, "async"), servers=(0, 4))
    assert simulate(two, update=0.5).seconds == 4.0  # beside each other
    assert simulate(two, update=0.5).busy == {0: 3.0, 4: 3.0, 1: 2.0, 2: 2.0, 3: 2.0}


def test_messages_keep_their_senders_busy() -> None:
    """A pull, then twice: turn, push, update, pull; each arrives a tenth later."""
    seconds = TurnSeconds(
        np.ones(1), np.full(1, 0.25), np.full((1, 1), 0.5), np.full((1, 1), 0.75),
        np.full((1, 1), 0.1),
    )  # fmt: skip
    found = simulate_window(rules(1, 2, "async"), seconds)
    assert found.seconds == pytest.approx(2 * (0.75 + 0.1 + 1 + 0.5 + 0.1 + 0.25))
    assert [(b.party, b.letter, b.number) for b in found.bars] == [
        (0, "E", 0), (0, "A", 0), (0, "E", 1), (0, "A", 1),
        (1, "T", 0), (1, "E", 0), (1, "T", 1), (1, "E", 1),
    ]  # fmt: skip
    assert found.busy == {0: pytest.approx(2 * 0.75 + 2 * 0.25), 1: 3.0}


@pytest.mark.parametrize("turn", [np.ones((3, 1)), np.ones(0), [np.nan], [-1.0]])
def test_bad_seconds_are_refused(turn: Any) -> None:
    with pytest.raises(ProblemError, match="turn has 1 axes"):
        simulate(rules(1, 1, "async"), turn)


def test_seconds_of_other_windows_are_refused() -> None:
    with pytest.raises(ProblemError, match="2 workers and 1 servers"):
        simulate(rules(2, 1, "async"), np.ones(3))
    with pytest.raises(ProblemError, match="scale has 2 axes"):
        simulate(rules(2, 3, "async"), scale=np.ones(6))
    with pytest.raises(ProblemError, match=r"scale has the shape \(6,\)"):
        simulate(rules(2, 3, "pool"), scale=np.ones(5))
