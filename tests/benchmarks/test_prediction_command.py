"""The command that measures random models: what it lists, refuses, reports and returns."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import graphflow as gf
from benchmarks.lib import random_predictions
from benchmarks.lib.prediction_summary import Prediction
from benchmarks.lib.regret import Regret
from benchmarks.lib.step_timing import StepTime
from benchmarks.lib.worker_pairs import LocalWorkers
from benchmarks.random_models import RandomModel, draw

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "placement" / "prediction.py"


def status_of(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> object:
    """Run the script in this process, and return its exit status."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return ended.value.code


def test_list_describes_models_without_running_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of(monkeypatch, "--random", "3", "--seed", "9", "--list") == 0
    described = [f"{index:3} {draw(9, index)}" for index in range(3)]
    assert capsys.readouterr().out.splitlines() == described
    assert status_of(monkeypatch, "--only", "2", "--seed", "9", "--list") == 0
    assert capsys.readouterr().out.splitlines() == described[2:]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--random", "-1"], "from 0 on"),
        (["--random", "1", "--slow", "2"], "a share from 0.05 to 1"),
        (["--random", "1", "--link-mbit", "0"], "a rate from 1 on"),
        (["--slow", "0.5"], "need --random or --only"),
        (["--search"], "need --random or --only"),
    ],
)
def test_wrong_options_are_refused(
    arguments: list[str],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert status_of(monkeypatch, *arguments) == 2
    assert told in capsys.readouterr().err


def test_a_model_that_fails_is_reported_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    models = [draw(2, 0), draw(2, 1)]

    def measure(
        model: RandomModel, rounds: int, *options: object
    ) -> tuple[list[Prediction], list[Regret]]:
        if model is models[0]:
            raise RuntimeError("out of luck\nand more")
        row = Prediction(model.index, "dense", str(model), 1, 1, False, 1.0, 1.0, 0.1, 0.1)
        one = StepTime(1.0, 0.1)
        return [row], [Regret.of(model.index, str(model), False, 1, one, {"one worker": one})]

    class Nothing:
        def __init__(self, *arguments: object) -> None: ...

        def restore(self) -> None: ...

    monkeypatch.setattr(random_predictions, "measure_model", measure)
    monkeypatch.setattr(random_predictions, "Calibration", Nothing)
    done = random_predictions.measure_models(models, 3, tmp_path, LocalWorkers())
    random_predictions.report(done)
    text = capsys.readouterr().out
    assert done.failed == [(models[0], "RuntimeError: out of luck")]
    assert [row.model for row in done.predictions] == [1]
    assert f"FAILED #0 of seed 2: {models[0]}" in text
    assert "Traceback" not in text


def test_the_strategy_of_the_search_trains_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    models = (draw(6, index) for index in range(100))
    model = next(m for m in models if m.choices.family == "dense" and 8 <= m.batch <= 64
                 and m.choices.trains and m.choices.dtype == "float32")  # fmt: skip
    two = gf.Cluster.here(devices=["cpu:0", "cpu:1"])
    step = model.build()
    chosen = SimpleNamespace(best=SimpleNamespace(strategy=gf.parallel.Data(replicas=2)))
    monkeypatch.setattr(gf.parallel, "auto", lambda *arguments, **options: chosen)
    found = random_predictions.search(model, step, two)
    assert found is not None
    with gf.Session() as one, gf.Session(two, trial=False) as divided:
        losses = [
            session.run(each.fetches, each.feeds)[0]
            for session, each in ((one, step), (divided, found))
        ]
        devices = {node.device for node in divided.plan(found.fetches).nodes}
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert {"/worker:0/cpu:0", "/worker:0/cpu:1"} <= devices
    chosen.best.strategy = None
    assert random_predictions.search(model, step, two) is None


@pytest.mark.slow  # calibrates, and measures a model
def test_a_small_model_is_measured_and_written(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    arguments = ["--only", "0", "--seed", "9", "--rounds", "3", "--output", str(path)]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False, timeout=100.0,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(path.read_text())["results"]
    kinds = [(row["workers"], row["refined"]) for row in rows if "workers" in row]
    assert kinds == [(1, False), (2, False), (1, True), (2, True)]
    assert [row["refined"] for row in rows if "best" in row] == [False, True]
    assert all(row["ratio"] > 0 for row in rows)
    assert "regret after traces: 1 rows" in done.stdout
