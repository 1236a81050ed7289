"""Regret: which alternative is the best, and what noise explains."""

from __future__ import annotations

import pytest

from benchmarks.lib.regret import Regret, regret_lines
from benchmarks.lib.step_timing import StepTime


def regret(placed: float, noise: float = 0.0, refined: bool = False, **others: float) -> Regret:
    times = {name: StepTime(seconds, noise) for name, seconds in others.items()}
    return Regret.of(7, "dense: depth 1", refined, 2, StepTime(placed, noise), times)


def test_the_fastest_alternative_counts() -> None:
    row = regret(3.0, one=2.0, dealt=4.0)
    assert row.best == "one"
    assert row.ratio == pytest.approx(1.5)
    assert row.beyond_noise == pytest.approx(1.5)
    assert regret(1.0, one=2.0).ratio == pytest.approx(0.5)
    assert regret(1.0, one=2.0).beyond_noise == 1.0


def test_the_noise_of_both_sides_explains_a_part() -> None:
    row = regret(1.2, noise=0.2, one=1.0)
    assert row.noise == pytest.approx(0.1 * 2**0.5)
    assert row.beyond_noise == pytest.approx(1.2 / (1 + 0.1 * 2**0.5))
    assert regret(1.1, noise=0.2, one=1.0).beyond_noise == 1.0


def test_the_summary_judges_median_and_worst_before_and_after_traces() -> None:
    rows = [regret(1.0, one=1.0), regret(1.0, one=1.0), regret(1.3, one=1.0)]
    rows += [regret(1.0, refined=True, one=1.0)] * 2
    lines = list(regret_lines(rows))
    assert lines[0].startswith("regret before traces: 3 rows, median 1.00")
    assert lines[0].endswith("MISSED (worst)")
    assert "1.30" in lines[1]
    assert "one 1000.00" in lines[1]
    assert lines[2].endswith("reached")
    assert len(lines) == 3


def test_goals_that_only_noise_reaches_are_not_reached() -> None:
    (line,) = regret_lines([regret(1.2, noise=0.8, one=1.0)])
    assert line.endswith("too noisy to judge")
