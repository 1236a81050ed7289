"""Programs for HiGHS: optima, bounds, and what stands in their place where there are none."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from graphflow.errors import PlacementError
from graphflow.placement.solvers.highs import Live, MixedIntegerProgram


def knapsack() -> MixedIntegerProgram:
    """Most value of four things within ten kilograms: the second and the fourth, 90."""
    model = MixedIntegerProgram()
    first = model.columns(4, upper=1.0, integer=True)
    for column, value in enumerate((10.0, 40.0, 30.0, 50.0)):
        model.cost[first + column] = -value
    model.row(dict(zip(range(4), (5.0, 4.0, 6.0, 3.0), strict=True)), upper=10.0)
    return model


def test_an_integer_program_is_solved_and_its_relaxation_is_below(
    capfd: pytest.CaptureFixture[str],
) -> None:
    found = knapsack().solve()
    assert capfd.readouterr().out == "", "a new solver may print its licence"
    assert found.values is not None
    assert np.round(found.values).tolist() == [0.0, 1.0, 0.0, 1.0]
    assert found.objective == pytest.approx(-90.0)
    assert found.bound == pytest.approx(-90.0)
    relaxed = knapsack()
    relaxed.integer = [False] * 4
    assert relaxed.solve().objective == pytest.approx(-105.0)


def test_duals_say_what_another_kilogram_is_worth() -> None:
    model = knapsack()
    model.integer = [False] * 4
    found = model.solve()
    assert found.duals is not None
    assert found.duals.tolist() == pytest.approx([-5.0])


def test_what_has_no_point_has_an_infinite_bound() -> None:
    model = knapsack()
    model.row({0: 1.0, 1: 1.0}, lower=3.0)
    found = model.solve()
    assert found.values is None
    assert found.bound == np.inf


def test_nothing_beyond_a_cutoff_is_of_interest() -> None:
    found = knapsack().solve(cutoff=-95.0)
    assert found.bound >= -95.0 - 1e-6


def test_a_model_is_solved_again_with_other_bounds_costs_and_columns() -> None:
    live = Live(knapsack())
    assert live.solve().objective == pytest.approx(-90.0)
    live.bounds(3, 0.0, 0.0)
    assert live.solve().objective == pytest.approx(-70.0)
    live.costs(0, np.array([-99.0]))
    assert live.solve().objective == pytest.approx(-139.0)
    live.row_upper(0, 5.0)
    assert live.solve().objective == pytest.approx(-99.0)
    live.add(-1.0, np.array([0]), np.array([1.0]))
    live.row_upper(0, 7.0)
    assert live.solve().objective == pytest.approx(-101.0)


def test_without_the_library_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    with pytest.raises(PlacementError, match="pip install highspy"):
        knapsack().solve()
