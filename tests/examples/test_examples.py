"""The examples, run as a user would: what they show, and what they say of wrong arguments."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import loaded
from tests.faults.running import children

FOLDER = Path(__file__).resolve().parents[2] / "examples"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(FOLDER.parent)}
PROGRAMS = sorted(
    path.name for path in FOLDER.glob("*.py") if "__main__" in path.read_text(encoding="utf-8")
)


def ran(
    program: str, *arguments: str, cwd: Path, **environment: str
) -> subprocess.CompletedProcess[str]:
    return loaded.run_python([str(FOLDER / program), *arguments], ENVIRONMENT | environment, cwd)


ALL = pytest.param([], 15, marks=pytest.mark.slow(reason="plans and pages of all strategies"))


@pytest.mark.parametrize(("only", "count"), [(["--only", "zero bubble"], 2), ALL])
def test_every_strategy_trains_alike_with_its_plan_and_its_trace(
    only: list[str], count: int, tmp_path: Path
) -> None:
    done = ran("strategies.py", "--here", "--steps", "2", "--out", "found", *only, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (apart,) = re.findall(r"strategies' losses: (\S+)", done.stdout)
    assert float(apart) < 1e-12
    out = tmp_path / "found"
    index = (out / "index.html").read_text(encoding="utf-8")
    links = re.findall(r'href="(?!https)([^"]+)"', index)
    assert index.count("<polyline") == index.count("<section>") * 2 == len(links) == 2 * count
    for name in links:
        text = (out / name).read_text(encoding="utf-8")
        assert "traceEvents" in json.loads(text) if name.endswith(".json") else "<svg" in text
    assert "Schedule of the pipeline" in (out / "zero-bubble.plan.html").read_text("utf-8")


def test_some_strategies_train_on_two_workers(tmp_path: Path) -> None:
    """Also where there is no bokeh: plans are drawings then."""
    (tmp_path / "without").mkdir()
    (tmp_path / "without/bokeh.py").write_text("raise ImportError('there is none')")
    paths = os.pathsep.join([str(tmp_path / "without"), ENVIRONMENT["PYTHONPATH"]])
    done = ran(
        "strategies.py", "--only", "by names", "--steps", "2", cwd=tmp_path, PYTHONPATH=paths
    )
    assert done.returncode == 0, done.stderr
    assert "by-names.plan.svg by-names.trace.json" in done.stdout
    trace = json.loads((tmp_path / "strategies/by-names.trace.json").read_text("utf-8"))
    assert "/worker:1/cpu:0" in json.dumps(trace)


@pytest.mark.parametrize("workers", [pytest.param("2", marks=pytest.mark.slow), "3"])
def test_a_filtered_picture_is_that_of_one_device(workers: str, tmp_path: Path) -> None:
    size = ("--height", "61", "--width", "40", "--workers", workers)
    done = ran("image_filters.py", *size, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    rows = re.findall(r"(\d) x \1 +([\d,]+) +([\d,]+)", done.stdout)
    cuts = int(workers) - 1
    channels = {"7": 1, "5": 2}
    for size_of_window, halo, formula in rows:
        due = cuts * 2 * (int(size_of_window) // 2) * 40 * channels.get(size_of_window, 1) * 4
        assert halo == formula == f"{due:,}"
    assert len(rows) == 4
    for name in ("before.png", "after.png"):
        assert (tmp_path / "filtered" / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_a_recommender_learns_and_no_process_holds_its_tables(tmp_path: Path) -> None:
    size = ("--users", "300000", "--items", "100000", "--steps", "40", "--workers", "3")
    done = ran("recommender.py", *size, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"step +\d+: loss ([\d.]+)", done.stdout)]
    assert losses[-1] < 0.9 * losses[0]
    assert "both tables: 98 MiB" in done.stdout
    assert (tmp_path / "recommended/recommender.svg").read_text("utf-8").startswith("<svg")


@pytest.mark.slow
@pytest.mark.parametrize(
    "link", [["--loopback"], pytest.param(["--mbit", "200"], marks=pytest.mark.slow)]
)  # slow: both workers calibrate
def test_one_model_trains_by_data_and_by_local_sgd(link: list[str], tmp_path: Path) -> None:
    done = ran("slow_link.py", "--steps", "16", "--period", "4", *link, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    if "no slow link" in done.stdout:
        pytest.skip(done.stdout)
    told = re.findall(r"([\d.]+) ms a step predicted, +([\d.]+) measured, +([\d,]+)", done.stdout)
    (often, seldom) = (int(sent.replace(",", "")) for _, _, sent in told)
    assert often == pytest.approx(4 * seldom, rel=0.01)
    picture = (tmp_path / "slow_link/slow_link.svg").read_text("utf-8")
    assert picture.startswith("<svg") and picture.count("<polyline") == 4


@pytest.mark.slow
def test_a_slow_worker_takes_fewer_turns_from_a_pool(tmp_path: Path) -> None:
    done = ran("servers.py", "--windows", "2", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    turns = dict(re.findall(r"(bsp|pool): .*turns by worker \(([\d, ]+)\)", done.stdout))
    assert turns["bsp"] == "16, 16, 16"
    pooled = sorted(map(int, turns["pool"].split(", ")))
    assert sum(pooled) == 48 and pooled[0] < 12
    assert "gradients of a push: 33,024 bytes" in done.stdout
    assert (tmp_path / "servers/servers.svg").read_text("utf-8").count("<polyline") == 2
    assert (tmp_path / "servers/plan.html").stat().st_size > 100_000


@pytest.mark.parametrize("workers", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_a_file_larger_than_its_memory_is_fitted_with_proof(workers: str, tmp_path: Path) -> None:
    more = ["--workers", workers]
    done = ran("webspam.py", "--rows", "6000", "--memory", "8", *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    gaps = [float(gap) for gap in re.findall(r"relative gap ([\d.e+-]+)", done.stdout)]
    assert len(gaps) == 2 + int(workers) and max(gaps) <= (1e-4 if workers == "1" else 1e-3)
    assert "support vector machine: sdca" in done.stdout
    halves = re.findall(r"have ([\d,]+) and ([\d,]+) rows", done.stdout)[0]
    assert sum(int(each.replace(",", "")) for each in halves) == 6000
    assert (tmp_path / "webspam/webspam.svg").read_text("utf-8").count("<polyline") == 2


def test_a_body_of_saved_weights_gets_a_new_head(tmp_path: Path) -> None:
    done = ran("fine_tuning.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "12 variables loaded; not in the model: head.bias, head.weight" in done.stdout
    accuracy = {n: float(a) for n, a in re.findall(r", ([\w -]+): ([\d.]+)%", done.stdout)}
    assert accuracy["fine-tuned"] > accuracy["from the start"] + 10
    assert "body.3  Conv2d" in done.stdout
    picture = (tmp_path / "tuned/fine_tuning.svg").read_text("utf-8")
    assert picture.startswith("<svg") and picture.count("<polyline") == 3


def test_an_example_says_why_there_is_no_slow_link(tmp_path: Path) -> None:
    done = ran("slow_link.py", cwd=tmp_path, PATH=str(tmp_path))
    assert done.returncode == 0 and list(tmp_path.iterdir()) == []
    assert "no slow link can be made here (ip, tc, unshare, nsenter is not" in done.stdout


def test_a_convolutional_network_learns_digits_and_goes_on(tmp_path: Path) -> None:
    for epochs, first in (("1", "from step 0"), ("3", "from step 23"), ("3", None)):
        done = ran("digits_cnn.py", "--epochs", epochs, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        if first is None:
            assert "3 epochs were trained before" in done.stdout
            continue
        assert first in done.stdout
        (accuracy,) = re.findall(r"test accuracy ([\d.]+)%", done.stdout)
        assert float(accuracy) > (50 if epochs == "1" else 80)
    assert "<polyline" in (tmp_path / "digits_cnn/digits_cnn.svg").read_text("utf-8")


def test_a_transformer_writes_text(tmp_path: Path) -> None:
    done = ran("character_gpt.py", "--steps", "12", "--width", "32", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    before, after = map(float, re.findall(r"loss ([\d.]+) -> ([\d.]+)", done.stdout)[0])
    assert after < before - 0.2
    written = done.stdout.split(" s:\n")[1].rpartition("\nloss ")[0]
    assert written.startswith("The for statement") and len(written) == 17 + 240
    assert "<polyline" in (tmp_path / "character_gpt/character_gpt.svg").read_text("utf-8")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of data memory are Linux's")
def test_a_parquet_file_larger_than_the_memory_limit_is_trained_on(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'graphflow[data]' runs it")
    done = ran("larger_than_memory.py", "--rows", "900000", "--memory", "90", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "file: 1" in done.stdout and "no memory, as should be" in done.stdout
    assert float(re.findall(r"weights within ([\d.]+)", done.stdout)[0]) < 0.05
    picture = (tmp_path / "larger_than_memory/larger_than_memory.svg").read_text("utf-8")
    assert "<polyline" in picture and not list(tmp_path.rglob("*.parquet"))


WRONG = [
    ("larger_than_memory.py", ["--memory", "0"], "'0' is not a whole number"),
    ("larger_than_memory.py", ["--rows", "100"], "these are 0 MiB, which fit into --memory 120"),
    ("larger_than_memory.py", ["--out", "/proc/no"], "cannot write to the folder '/proc/no'"),
    ("digits_cnn.py", ["--epochs", "0"], "'0' is not a whole number"),
    ("digits_cnn.py", ["--batch", "2000"], "there are 1,438 images to train on"),
    ("digits_cnn.py", ["--out", "/proc/no"], "cannot write to the folder '/proc/no'"),
    ("character_gpt.py", ["--steps", "x"], "'x' is not a whole number"),
    ("character_gpt.py", ["--width", "9"], "--width 9: it must be a multiple of 8"),
    ("character_gpt.py", ["--out", "/proc/no"], "cannot write to the folder '/proc/no'"),
    ("slow_link.py", ["--steps", "40"], "--steps 40 --period 16"),
    ("slow_link.py", ["--mbit", "0"], "'0' is not a whole number"),
    ("slow_link.py", ["--out", "/proc/no"], "cannot write to the folder '/proc/no'"),
    ("servers.py", ["--workers", "1"], "a slow worker needs another one"),
    ("fine_tuning.py", ["--images", "3"], "--images 3: a batch has 10"),
    ("recommender.py", ["--users", "1"], "--users 1"),
    ("webspam.py", ["--rows", "10"], "--rows 10: a model needs"),
    ("webspam.py", ["--memory", "0"], "'0' is not a whole number"),
    ("webspam.py", ["--out", "/proc/no"], "cannot write to the folder '/proc/no'"),
    ("recommender.py", ["--out", "/proc/no"], "cannot write to the folder '/proc/no'"),
    ("strategies.py", ["--steps", "0"], "'0' is not a whole number from 1 on"),
    ("strategies.py", ["--steps"], "expected one argument"),
    ("strategies.py", ["--only", "dta"], "invalid choice: 'dta'"),
    ("strategies.py", ["--out", "/proc/no"], "cannot write to the folder '/proc/no'"),
    ("image_filters.py", ["--workers", "x"], "'x' is not a whole number"),
    ("image_filters.py", ["--height", "10"], "--height 10"),
    ("image_filters.py", ["--wdith", "10"], "unrecognized arguments: --wdith"),
    ("image_filters.py", ["--out", "/proc/no"], "cannot write to the folder '/proc/no'"),
    ("digits_towers.py", ["--towers", "-1"], "'-1' is not a whole number"),
    ("digits_towers.py", ["--out", "/proc/no"], "cannot write to the folder '/proc/no'"),
    ("digits_towers.py", ["--batch", "5000"], "there are 1437 images"),
    ("resume.py", ["--steps", "0"], "'0' is not a whole number"),
    ("resume.py", ["--folder", "/proc/no"], "cannot write to the folder '/proc/no'"),
    ("inspect_cluster.py", ["--steps", "many"], "'many' is not a whole number"),
    ("inspect_cluster.py", ["--metrics", "nowhere"], "nowhere"),
    ("what_if_gpt.py", ["--devices", "0"], "'0' is not a whole number"),
    ("what_if_gpt.py", ["--hardware", "abacus"], "abacus"),
    ("what_if_gpt.py", ["--billions", "-3"], "--billions"),
    ("what_if_gpt.py", ["--billions", "1e9"], "must be near one of 1, 8,"),
    ("bring_a_network.py", ["--runs", "none"], "'none' is not a whole number"),
    ("bring_a_network.py", ["missing.onnx"], "missing.onnx"),
    ("webspam.py", ["--rows", "0"], "'0' is not a whole number"),
]


@pytest.mark.parametrize(("program", "arguments", "told"), WRONG)
def test_wrong_arguments_are_told_in_a_line(
    program: str,
    arguments: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [str(FOLDER / program), *arguments])
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:  # here: twenty processes took ten seconds
        runpy.run_path(str(FOLDER / program), run_name="__main__")
    assert ended.value.code not in (None, 0)
    said = capsys.readouterr().err or str(ended.value.code)  # Python prints a text for a status
    assert told in said.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_every_example_is_tried_with_wrong_arguments() -> None:
    assert {program for program, _, _ in WRONG} == set(PROGRAMS)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_example_says_what_it_takes(program: str, tmp_path: Path) -> None:
    done = ran(program, "--help", cwd=tmp_path)
    assert done.returncode == 0 and done.stdout.startswith("usage: ") and done.stderr == ""


@pytest.mark.every(2)
@pytest.mark.parametrize("program", ["strategies.py", "image_filters.py"])
def test_ctrl_c_ends_an_example_with_a_line_and_leaves_nothing(
    program: str, tmp_path: Path
) -> None:
    process = subprocess.Popen(
        [sys.executable, str(FOLDER / program), *(
            ["--steps", "5000"] if program == "strategies.py" else ["--height", "8000"]
        )],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        cwd=tmp_path, env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
    )  # fmt: skip
    try:
        if program == "strategies.py":
            time.sleep(4)  # it starts workers at its end only
        until = time.monotonic() + 60
        while program == "image_filters.py" and len(children(process.pid)) < 3:
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.05)  # two workers, and what they are forked from
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: its workers get it, too
        _, told = process.communicate(timeout=20)
        assert process.returncode == 130
        assert told.splitlines()[-1] == "interrupted" and "Traceback" not in told
        with pytest.raises(ProcessLookupError):
            os.killpg(process.pid, 0)
        assert [path.name for path in tmp_path.iterdir()] == []
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
