"""Uncertainty of predictions: what widens an interval, what narrows it, and what cancels."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphflow.ir.op import REGISTRY
from graphflow.placement.calibration.uncertainty import (
    PredictedStep,
    calibration_deviation,
    interval,
    log_scatter,
    observed_deviation,
    overhead_deviation,
)
from tests.placement.speeds import speeds

SECONDS = st.floats(1e-9, 1e3)
DEVIATIONS = st.floats(0.0, 3.0)
RATIOS = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=9)
ERRORS = st.dictionaries(st.sampled_from("abcdef"), st.floats(0.0, 1e3))


@given(SECONDS, DEVIATIONS)
def test_an_interval_contains_its_prediction(seconds: float, deviation: float) -> None:
    low, high = interval(seconds, deviation)
    assert 0 < low <= seconds <= high
    assert low * high == pytest.approx(seconds**2)


@given(st.floats(0.05, 20.0), st.floats(0.01, 2.0), st.integers(0, 30))
def test_more_observations_of_one_scatter_narrow_an_interval(
    ratio: float, prior: float, count: int
) -> None:
    fewer, more = (observed_deviation([ratio] * n, prior) for n in (count, count + 1))
    assert more < fewer <= prior
    assert observed_deviation([ratio] * 1000, prior) < 0.05 * prior


@given(RATIOS, st.floats(0.01, 2.0), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_observations_of_less_similar_nodes_leave_a_wider_interval(
    ratios: list[float], prior: float, one: float, other: float
) -> None:
    far, near = sorted((one, other))
    assert observed_deviation(ratios, prior, near) <= observed_deviation(ratios, prior, far)
    assert observed_deviation(ratios, prior, far) >= log_scatter(ratios)


@given(RATIOS, st.floats(1.1, 5.0))
def test_ratios_that_scatter_more_widen_an_interval(ratios: list[float], power: float) -> None:
    wider = [ratio**power for ratio in ratios]
    assert log_scatter(wider) == pytest.approx(power * log_scatter(ratios))
    assert observed_deviation(wider, 0.1) >= observed_deviation(ratios, 0.1)


def test_one_step_on_a_busy_machine_does_not_widen_an_interval() -> None:
    calm = [1.0, 1.01, 0.99, 1.0, 1.02, 0.98, 1.0, 1.01, 0.99]
    assert observed_deviation([*calm[:-1], 50.0], 0.3) < 1.1 * observed_deviation(calm, 0.3)


def test_an_overhead_is_known_by_its_observations_or_as_well_as_a_link() -> None:
    calibrated = overhead_deviation(1e-3, 1e-2, [], 0.0)
    assert 0.2e-3 < calibrated < 0.5e-3
    assert overhead_deviation(1e-3, 1e-2, [0.1] * 20, 1.0) < 0.25 * calibrated
    assert overhead_deviation(1e-3, 1e-2, [0.1, 0.9, 0.1, 0.9], 1.0) > calibrated
    assert overhead_deviation(0.0, 1e-2, [], 0.0) == 0.0


@given(ERRORS)
def test_a_step_surely_takes_as_long_as_itself(errors: dict[str, float]) -> None:
    step = PredictedStep(1.0, errors)
    assert step.margin_to(step) == 0.0
    low, high = step.interval
    assert low <= 1.0 <= high


@given(ERRORS, ERRORS)
def test_margins_are_those_of_both_steps_at_most(
    one: dict[str, float], other: dict[str, float]
) -> None:
    first, second, exact = (PredictedStep(1.0, errors) for errors in (one, other, {}))
    margin = first.margin_to(second)
    assert margin == pytest.approx(second.margin_to(first))
    most = first.margin_to(exact) + second.margin_to(exact)
    assert margin <= most * (1 + 1e-9)


def test_errors_of_one_source_add_up_and_those_of_several_partly_cancel() -> None:
    exact = PredictedStep(1.0, {})
    one, two = (PredictedStep(1.0, errors) for errors in ({"a": 0.2}, {"a": 0.1, "b": 0.1}))
    assert one.margin_to(exact) > two.margin_to(exact)
    assert one.margin_to(two) == pytest.approx(two.margin_to(exact))
    assert PredictedStep(1.0, {"b": 0.2}).margin_to(one) == pytest.approx(
        math.sqrt(2) * one.margin_to(exact)
    )


@pytest.mark.parametrize(
    ("op", "expected"), [("exp", 0.3), ("tanh", 0.5), ("sum", 1.5), ("matmul", 1.5)]
)
def test_calibration_is_surest_of_ops_that_it_tried(op: str, expected: float) -> None:
    made = speeds(
        scatter={"all": [1.0, 1.5], "elementwise": [0.1, 0.5]},
        ops={"exp": {"launch": 2e-6, "rate": 5e9, "itemsize": 4, "scatter": 0.3}},
    )
    assert calibration_deviation(made, REGISTRY[op]) == expected


def test_a_measured_op_without_a_scatter_has_that_of_its_class() -> None:
    made: dict[str, Any] = speeds(scatter={"all": [1.0, 1.5], "elementwise": [0.1, 0.5]})
    assert calibration_deviation(made, REGISTRY["exp"]) == 0.1


def test_speeds_without_a_scatter_tell_no_uncertainty() -> None:
    assert calibration_deviation(speeds(), REGISTRY["exp"]) is None
