"""The scatter of calibration: predictions are compared with sizes that they do not rest on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from graphflow.ir.op import REGISTRY, Op
from graphflow.placement.calibration import held_out, profile_file
from graphflow.placement.calibration.held_out import is_scatter, with_scatter
from graphflow.placement.calibration.measure import KernelTimer, ScaledSample
from graphflow.placement.calibration.roofline import Rates
from tests.placement.speeds import profile, scatter, speeds

OPS = ("exp", "tanh", "sin", "sum", "softmax")


class Clock(KernelTimer):
    """A machine on which each op takes a number of times as long as predicted."""

    def __init__(self, known: dict[str, Any], factors: dict[str, float]) -> None:
        super().__init__("cpu", np, lambda: None, lambda: 0.0)
        self._rates, self._factors = Rates(known), factors
        self._times: dict[Callable[[], object], float] = {}

    def call(self, op: Op, case: ScaledSample | None) -> Callable[[], object] | None:
        assert case is not None
        seconds = self._rates.seconds(op, case.inputs, case.outputs, case.attrs)
        call = lambda: None  # noqa: E731 - a new object each time
        self._times[call] = seconds * self._factors.get(op.name, 1.0)
        return call

    def seconds(self, call: Callable[[], object], rounds: int = 0) -> float:
        return self._times[call]


def measure_scatter(factors: dict[str, float]) -> dict[str, Any]:
    ops = {name: {"launch": 1e-6, "rate": 1e9, "itemsize": 4} for name in OPS}
    known = speeds(ops=ops)
    return with_scatter(Clock(known, factors), known)


def test_predictions_that_hold_have_the_least_scatter() -> None:
    made = measure_scatter({})
    assert is_scatter(made)
    assert made["scatter"]["all"][0] == held_out.LEAST_SCATTER
    assert all(entry["scatter"] <= held_out.LEAST_SCATTER for entry in made["ops"].values())


def test_the_scatter_is_the_typical_error_and_the_own_one_of_an_op() -> None:
    made = measure_scatter({name: 2.0 if i % 2 else 0.5 for i, name in enumerate(OPS)})
    typical = math.log(2.0) / 0.6745
    assert made["scatter"]["all"][0] == pytest.approx(typical)
    wrong = measure_scatter({"exp": 8.0})
    assert wrong["scatter"]["all"][0] == held_out.LEAST_SCATTER
    assert wrong["ops"]["exp"]["scatter"] > 1.0 > wrong["ops"]["tanh"]["scatter"]


def test_ops_that_were_not_measured_are_as_uncertain_as_those_that_are_left_out() -> None:
    rates = {name: 10.0**i for i, name in enumerate(OPS)}
    ops = {name: {"launch": 1e-6, "rate": 1e8 * rates[name], "itemsize": 4} for name in OPS}
    known = speeds(ops=ops)
    measured, unmeasured = with_scatter(Clock(known, {}), known)["scatter"]["all"]
    assert measured == held_out.LEAST_SCATTER < unmeasured


def test_too_few_ops_tell_nothing() -> None:
    known = speeds(ops={"exp": {"launch": 1e-6, "rate": 1e9, "itemsize": 4}})
    assert with_scatter(Clock(known, {}), known) == known


def test_a_real_clock_tries_ops_on_new_sizes() -> None:
    ops = {name: {"launch": 1e-6, "rate": 1e9, "itemsize": 4} for name in OPS}
    made = held_out.add_cpu_scatter(speeds(ops=ops))
    assert is_scatter(made) and set(made["ops"]) == set(OPS)
    assert all("scatter" in made["ops"][name] for name in OPS if REGISTRY[name].elementwise)


@pytest.mark.parametrize(
    "damaged",
    [5, {}, {"sum": [1.0, 1.0]}, {"all": 1.0}, {"all": [1.0]}, {"all": [1.0, -1.0]},
     {"all": [1.0, float("nan")]}, {"all": ["1", 1.0]}],
)  # fmt: skip
def test_a_profile_with_a_damaged_scatter_is_refused(damaged: Any) -> None:
    base = {**profile(), "format": profile_file.FORMAT}
    good = {**base, "devices": {"cpu": speeds(scatter=scatter(0.3))}}
    assert profile_file.is_profile(base) and profile_file.is_profile(good)
    assert not profile_file.is_profile({**base, "devices": {"cpu": speeds(scatter=damaged)}})
    ops = {"exp": {"launch": 1e-6, "scatter": "wide"}}
    assert not profile_file.is_profile({**base, "devices": {"cpu": speeds(ops=ops)}})
