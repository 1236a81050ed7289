"""The choice of the number of local steps."""

from __future__ import annotations

from typing import Any

import pytest

from graphflow.errors import LinearModelError
from graphflow.linear.cocoa.local_steps import LocalSteps, check_local_steps


def chosen(exchange: float, step: float, most: int = 10_000) -> LocalSteps:
    choice = LocalSteps("auto", most)
    for _ in range(4):
        choice.note_round(choice.steps, exchange + choice.steps * step)
    return choice


@pytest.mark.parametrize("exchange", [1e-5, 1e-4, 1e-3])
def test_the_steps_of_a_round_take_four_times_as_long_as_its_exchange(exchange: float) -> None:
    choice = chosen(exchange, 1e-6)
    assert choice.steps == pytest.approx(4 * exchange / 1e-6, rel=0.25)
    assert choice.exchange == pytest.approx(exchange)


def test_a_round_is_at_most_a_pass_over_the_part() -> None:
    assert chosen(1.0, 1e-6).steps == 10_000
    assert chosen(1.0, 1e-6, most=1).steps == 1


def test_exchanges_that_cost_nothing_are_made_after_each_step() -> None:
    assert chosen(0.0, 1e-6).steps == 1


def test_a_given_number_stays() -> None:
    choice = LocalSteps(77, 10)
    choice.note_round(77, 1.0)
    choice.note_gap(1.0, 0.1, 1.0)
    assert choice.steps == 77


def test_twice_as_many_steps_are_kept_if_the_gap_falls_faster() -> None:
    choice = chosen(1e-4, 1e-6)
    first = choice.steps
    choice.note_gap(1.0, 0.5, 1.0)
    assert choice.steps == 2 * first
    choice.note_gap(0.5, 0.1, 1.0)
    assert choice.steps == 4 * first
    choice.note_gap(0.1, 0.05, 1.0)
    assert choice.steps == 2 * first


def test_numbers_that_are_no_better_are_tried_once() -> None:
    choice = chosen(1e-4, 1e-6)
    first, seen = choice.steps, []
    for _ in range(6):
        choice.note_gap(1.0, 0.5, 1.0)
        seen.append(choice.steps)
    assert seen == [2 * first, first // 2, first, first, first, first]


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "many", None], ids=str)
def test_other_numbers_of_steps_are_refused(given: Any) -> None:
    with pytest.raises(LinearModelError, match='"auto" or an int of at least 1'):
        check_local_steps(given)
