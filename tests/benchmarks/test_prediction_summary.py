"""Errors beyond noise, percentiles and factors on rows that are made up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.lib.prediction_summary import (
    GOALS,
    Prediction,
    Summary,
    show_summary,
    summary_lines,
)
from benchmarks.lib.step_timing import BLOCK_STEPS, MIN_ROUNDS, StepTime, time_by_turns

ROW = Prediction(0, "dense", "dense: depth 1", 1, 1, False, 1.0, 1.0, 0.0, 0.1)


def row(predicted: float, measured: float = 1.0, noise: float = 0.0) -> Prediction:
    return replace(ROW, predicted=predicted, measured=measured, noise=noise)


def test_errors_count_beyond_half_of_the_noise() -> None:
    assert row(1.3).error == pytest.approx(0.3)
    assert row(0.7).error == pytest.approx(0.3)
    assert row(1.3, noise=0.2).error == pytest.approx(0.2)
    assert row(1.05, noise=0.2).error == 0.0
    assert row(3.0, measured=2.0).error == pytest.approx(0.5)


def test_factors_are_the_same_for_predictions_above_and_below() -> None:
    assert row(2.0).factor == pytest.approx(2.0)
    assert row(0.5).factor == pytest.approx(2.0)
    assert row(2.2, noise=0.2).factor == pytest.approx(2.0)
    assert row(0.45, noise=0.2).factor == pytest.approx(2.0)
    assert row(0.95, noise=0.2).factor == 1.0


def test_a_summary_has_median_percentile_and_worst_factor() -> None:
    found = Summary.of([row(1 + i / 100, noise=0.0) for i in range(101)])
    assert found.rows == 101
    assert found.median == pytest.approx(0.50)
    assert found.most == pytest.approx(0.95)
    assert found.factor == pytest.approx(2.0)
    assert found.misses(GOALS[False]) == ["median", "most", "factor"]
    assert Summary.of([row(1.05), row(0.95)]).misses(GOALS[False]) == []
    assert Summary.of([row(1.07), row(0.93)]).misses(GOALS[True]) == ["median"]


def test_the_report_tells_workers_and_traces_apart_and_the_worst_first() -> None:
    rows = [
        replace(row(1.05), model=1),
        replace(row(4.0), model=2, workers=2, used=2),
        replace(row(1.0), model=3, refined=True),
    ]
    lines = list(summary_lines(rows))
    assert lines[0].startswith("before traces, one worker ")
    assert "reached" in lines[0]
    assert lines[1].startswith("before traces, two workers")
    assert "MISSED (median, most, factor)" in lines[1]
    assert lines[2].startswith("before traces, all")
    assert not any("after traces, two workers" in line for line in lines)
    worst = lines[lines.index("furthest off before traces (predicted / measured):") + 1]
    assert "#2" in worst


def test_goals_that_only_noise_reaches_are_not_reached() -> None:
    assert "too noisy to judge" in show_summary(Summary.of([row(1.1, noise=0.5)]), GOALS[False])
    assert "MISSED" in show_summary(Summary.of([row(3.0, noise=0.5)]), GOALS[False])


def test_step_times_are_medians_of_blocks_and_the_scatter_of_steps() -> None:
    found = StepTime.from_blocks([[1.0, 1.0, 1.0], [1.0, 9.0, 1.0], [2.0, 2.0, 2.0]])
    assert found.seconds == 1.0
    assert found.noise == pytest.approx(1.0)
    assert StepTime.from_blocks([[2.0, 2.0, 2.0]] * 3).noise == 0.0


def test_turns_interleave_and_blocks_are_long_enough() -> None:
    calls: list[str] = []
    found = time_by_turns({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, 4, 0.0)
    assert set(found) == {"a", "b"}
    order = [name for i, name in enumerate(calls) if i == 0 or calls[i - 1] != name]
    assert order == ["a", "b"] * (MIN_ROUNDS + 1), "one turn finds the lengths of blocks"
    assert calls.count("a") > MIN_ROUNDS * BLOCK_STEPS


def test_the_report_tells_families_and_the_direction_of_their_errors() -> None:
    rows = [
        replace(row(2.0), model=1, family="tied"),
        replace(row(4.0), model=2, family="tied"),
        replace(row(0.5), model=3),
        replace(row(1.1), model=3, refined=True),
    ]
    lines = list(summary_lines(rows))
    assert "   3.00      –  tied, 2 models" in lines
    assert "   0.50   1.10  dense, 1 model" in lines
