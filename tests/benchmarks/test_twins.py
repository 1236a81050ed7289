"""Twins drawn from a seed: they repeat, train, agree with torch, and are summarized."""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from benchmarks.lib.step_timing import StepTime
from benchmarks.lib.twin_races import (
    DisagreementError,
    Race,
    check_twins,
    compare_losses,
    compare_weights,
    summary_lines,
)
from benchmarks.twins import FAMILIES, OPTIMIZERS, GraphflowStep, Part, Twin, draw
from benchmarks.twins.description import CLASSES, Input
from benchmarks.twins.graphflow_step import make_layer

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "models" / "random_training.py"
SMALL = Twin(
    0, 0, "MLP", ("small",), 8,
    Part("TwinNetwork", (), (Part("Linear", (4, 6)), Part("ReLU"), Part("Linear", (6, 3)))),
    (Input((4,)), Input((), 3)), CLASSES, "SGD", product_rows=8,
)  # fmt: skip


def state_of(twin: Twin) -> dict[str, np.ndarray[Any, Any]]:
    """Return weights by torch's names, without torch: those that graphflow's layers begin with."""
    with gf.Session() as session:
        return make_layer(twin.body).state(session, names="torch")


def test_a_seed_and_an_index_give_the_same_twin_and_the_same_feeds() -> None:
    for index in range(12):
        one, two = draw(4, index), draw(4, index)
        assert one == two
        for a, b in zip(one.feeds(), two.feeds(), strict=True):
            assert np.array_equal(a, b)


def test_every_family_optimizer_and_loss_is_drawn() -> None:
    twins = [draw(5, index) for index in range(120)]
    assert {twin.family for twin in twins} == set(FAMILIES)
    assert {twin.optimizer for twin in twins} == set(OPTIMIZERS)
    assert len({twin.loss for twin in twins}) == 4
    assert len(set(map(str, twins))) > 115
    dropping = [twin for twin in twins if twin.body != twin.without_dropout().body]
    assert {"MLP", "transformer", "recurrent"} <= {twin.family for twin in dropping}
    assert all("dropout" in str(twin) for twin in dropping)


def test_a_twin_trains_in_graphflow() -> None:
    step = GraphflowStep(replace(SMALL, optimizer="SGD"), state_of(SMALL), threads=1)
    losses = [step() for _ in range(30)]
    step.close()
    assert losses[-1] < losses[0]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed")
@pytest.mark.parametrize("family", FAMILIES)
def test_both_libraries_compute_the_same(family: str) -> None:
    twins = (draw(6, index) for index in range(100))
    small = (t for t in twins if t.family == family and t.batch < 32)
    check_twins(next(small), (1, 2))


def test_other_losses_and_gradients_are_refused() -> None:
    compare_losses((1.0, 1.00005))
    with pytest.raises(DisagreementError, match=r"1\.001 and 1"):
        compare_losses((1.001, 1.0))
    before = {"w": np.zeros((2, 2)), "b": np.zeros(2)}
    moved = {"w": np.full((2, 2), 0.5), "b": np.full(2, 0.1)}
    compare_weights(before, moved, moved)
    with pytest.raises(DisagreementError, match="gradient of b"):
        compare_weights(before, {**moved, "b": np.full(2, 0.11)}, moved)
    with pytest.raises(DisagreementError, match="gradient of b"):
        compare_weights(before, {**moved, "b": np.full(2, np.nan)}, moved)


def test_the_summary_names_the_worst_and_the_slower() -> None:
    def race(index: int, ours: float, ours_on_two: float) -> Race:
        names = ("graphflow 1", "graphflow 2", "torch 1", "torch 2")
        seconds = (ours, ours_on_two, 0.010, 0.008)
        times = {n: StepTime(s, 0.02) for n, s in zip(names, seconds, strict=True)}
        return Race(replace(SMALL, index=index, product_rows=128), times, 0.1)

    lines = summary_lines([race(3, 0.005, 0.002), race(7, 0.020, 0.024)], (1, 2))
    one, both, speed = (line.split() for line in (lines[1], lines[4], lines[7]))
    assert one == ["all", "2", "1.00", "1.85", "2.00", "#7"]
    assert both == ["all", "2", "0.87", "2.73", "3.00", "#7"]
    assert speed == ["all", "2", "0.69", "1.12", "1.20", "#7"]
    assert lines[9].strip().endswith("1 of 2 are 1.6 times as fast with 2 threads")
    assert lines[10].strip() == "slower with 2 threads than with one: #7"


def test_the_command_lists_models_and_refuses_wrong_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--random", "3", "--seed", "9", "--list"])
    runpy.run_path(str(SCRIPT), run_name="__main__")
    described = [f"{index:3} {draw(9, index)}" for index in range(3)]
    assert capsys.readouterr().out.splitlines() == described
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--threads", "0"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    assert ended.value.code == 2
    assert "from 1 on" in capsys.readouterr().err
