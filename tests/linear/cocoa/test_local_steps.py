"""The choice of the number of local steps."""

from __future__ import annotations

from typing import Any

import pytest

from graphflow.errors import LinearModelError
from graphflow.linear.cocoa.local_steps import (
    HALF,
    LocalSteps,
    best_share,
    check_local_steps,
)

MOST = 10_000


def choose(exchange: float, step: float, most: int = MOST) -> LocalSteps:
    choice = LocalSteps("auto", most)
    for _ in range(12):
        choice.note_round(choice.steps, exchange + choice.steps * step)
    return choice


def gain(steps: int, exchange: float) -> float:
    return steps / (steps + HALF * MOST) / (exchange + steps * 1e-6)


def most_gain(exchange: float) -> float:
    return max(gain(steps, exchange) for steps in range(1, MOST))


@pytest.mark.parametrize("exchange", [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1])
def test_the_chosen_steps_gain_as_much_in_a_second_as_the_best(exchange: float) -> None:
    choice = choose(exchange, 1e-6)
    assert gain(choice.steps, exchange) > 0.95 * most_gain(exchange)
    assert choice.exchange == pytest.approx(exchange)
    assert choice.step == pytest.approx(1e-6)


def test_a_round_is_at_most_a_pass_over_the_part() -> None:
    assert choose(1.0, 1e-6).steps == MOST
    assert choose(1.0, 1e-6, most=1).steps == 1
    assert best_share(1.0, 1e-6) == 1.0


def test_the_steps_of_a_round_grow_with_the_root_of_what_an_exchange_costs() -> None:
    assert best_share(4e-6, 1.0) == pytest.approx(2 * best_share(1e-6, 1.0), rel=0.01)


def test_a_round_that_was_slow_by_chance_does_not_decide() -> None:
    choice = LocalSteps("auto", MOST)
    for turn in range(12):
        slow = 5.0 if turn == 2 else 1.0
        choice.note_round(choice.steps, slow * (1e-4 + choice.steps * 1e-6))
    assert gain(choice.steps, 1e-4) > 0.85 * most_gain(1e-4)


def test_a_given_number_stays() -> None:
    choice = LocalSteps(77, 10)
    choice.note_round(77, 1.0)
    choice.note_gap(1.0, 0.1, 1e-15, 1.0)
    assert choice.steps == 77


def test_twice_as_many_steps_are_kept_if_the_gap_falls_faster() -> None:
    choice = choose(1e-4, 1e-6)
    first = choice.steps
    choice.note_gap(1.0, 0.5, 1e-15, 1.0)
    choice.note_round(choice.steps, 1e-3)
    assert choice.steps == 2 * first
    choice.note_gap(0.5, 0.1, 1e-15, 1.0)
    choice.note_round(choice.steps, 1e-3)
    assert choice.steps == 4 * first
    choice.note_gap(0.1, 0.05, 1e-15, 1.0)
    assert choice.steps == 2 * first


def test_numbers_that_are_no_better_are_tried_once() -> None:
    choice = choose(1e-4, 1e-6)
    first, seen = choice.steps, []
    for _ in range(6):
        choice.note_gap(1.0, 0.5, 1e-15, 1.0)
        choice.note_round(choice.steps, 1e-3)
        seen.append(choice.steps)
    assert seen == [2 * first, first // 2, first, first, first, first]


def test_nothing_is_tried_when_the_fit_is_about_to_end() -> None:
    choice = choose(1e-4, 1e-6)
    first = choice.steps
    choice.note_gap(1.0, 1e-3, 1e-4, 1.0)
    assert choice.steps == first


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "many", None], ids=str)
def test_other_numbers_of_steps_are_refused(given: Any) -> None:
    with pytest.raises(LinearModelError, match='"auto" or an int of at least 1'):
        check_local_steps(given)
