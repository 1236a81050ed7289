"""`gf.fit`: the plain loop's results, callbacks, checkpoints, and what it says."""

from __future__ import annotations

import csv
import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, CheckpointError, OpError
from graphflow.training import CsvLog, EarlyStopping, JsonLog, TensorBoard

_random = np.random.default_rng(0)
X = _random.normal(size=(100, 3)).astype("float32")
Y = (X @ np.array([1.0, -2.0, 0.5], "float32") + 0.1).astype("float32")
DATA = gf.data.arrays(x=X[:80], y=Y[:80]).shuffle(1).batch(16)
TEST = gf.data.arrays(x=X[80:], y=Y[80:]).batch(7)


class Model:
    """Linear regression."""

    def __init__(self, rate: float = 0.1) -> None:
        self.x = gf.placeholder("float32", (None, 3), name="x")
        self.y = gf.placeholder("float32", (None,), name="y")
        self.w = gf.variable(np.zeros(3, "float32"), name="w")
        self.b = gf.variable(np.float32(0), name="b")
        out = self.x @ self.w + self.b
        self.loss = gf.mean(gf.square(out - self.y))
        self.train = gf.optim.SGD(rate).minimize(self.loss)
        self.metrics = {"mse": gf.metrics.mse(out, self.y), "r2": gf.metrics.r2(out, self.y)}


class Counts:
    """A callback that notes what it is called for."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def begin(self, run: Any) -> None:
        self.called.append("begin")

    def step(self, run: Any) -> None:
        self.called.append(f"step {run.step}")

    def epoch(self, run: Any) -> None:
        self.called.append(f"epoch {run.epoch}")

    def end(self, run: Any) -> None:
        self.called.append("end")


def test_it_does_what_a_loop_does() -> None:
    m, counts = Model(), Counts()
    history = gf.fit(m.train, DATA, loss=m.loss, epochs=2, metrics=m.metrics, validate=TEST,
                     callbacks=[counts], progress=False)  # fmt: skip
    plain = Model()
    with gf.Session() as session:
        losses = [float(session.run([plain.train, plain.loss], b)[1]) for b in DATA.epochs(2)]
        assert np.array_equal(session.get(plain.w), history.session.get(m.w))
    assert history.losses == losses and history.stopped == ""
    assert [row["step"] for row in history.epochs] == [5, 10]
    assert history.values("loss") == [pytest.approx(np.mean(losses[:5])), np.mean(losses[5:])]
    w = history.session.get(m.w)
    mse = np.mean((X[80:] @ w + history.session.get(m.b) - Y[80:]) ** 2)
    assert history.values("mse")[-1] == pytest.approx(mse, rel=1e-5)
    steps = [f"step {i}" for i in range(1, 11)]
    assert counts.called == ["begin", *steps[:5], "epoch 0", *steps[5:], "epoch 1", "end"]
    history.session.close()


def test_a_few_steps_are_a_quick_try() -> None:
    m = Model()
    with gf.Session() as session:
        history = gf.fit(m.train, DATA, loss=m.loss, steps=2, session=session, progress=False)
        assert len(history.losses) == 2 and history.epochs[-1]["step"] == 2
        more = gf.fit(m.train, DATA, loss=m.loss, steps=2, session=session, progress=False)
    assert len(more.losses) == 2 and more.losses[0] != history.losses[0]


@pytest.mark.parametrize("ends", ["patience", "epochs"])
def test_early_stopping_restores_the_best_epoch_however_it_ends(ends: str) -> None:
    m = Model(rate=0.1)
    seen: list[Any] = []

    class Spoil:
        """Move the weights away after the second epoch."""

        def epoch(self, run: Any) -> None:
            seen.append(run.session.get(m.w))
            if run.epoch >= 1:
                run.session.set(m.w, np.full(3, 9.0 + run.epoch, "float32"))

    stopping = EarlyStopping("mse", patience=2 if ends == "patience" else 9)
    history = gf.fit(m.train, DATA, loss=m.loss, epochs=6, metrics=m.metrics, validate=TEST,
                     callbacks=[stopping, Spoil()], progress=False)  # fmt: skip
    best = int(np.argmin(history.values("mse")))
    assert best == 1 and np.array_equal(history.session.get(m.w), seen[best])
    assert ("mse was best 3 epochs ago" in history.stopped) == (ends == "patience")
    history.session.close()


def test_logs_hold_a_row_for_each_epoch(tmp_path: Path) -> None:
    m = Model()
    logs = [CsvLog(tmp_path / "h.csv"), JsonLog(tmp_path / "h.jsonl")]
    history = gf.fit(m.train, DATA, loss=m.loss, epochs=3, metrics=m.metrics, validate=TEST,
                     callbacks=logs, progress=False)  # fmt: skip
    with open(tmp_path / "h.csv") as stream:
        rows = list(csv.DictReader(stream))
    assert [float(row["r2"]) for row in rows] == history.values("r2")
    lines = (tmp_path / "h.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == history.epochs
    picture = history.plot(tmp_path / "h.svg", ["mse"])
    assert (tmp_path / "h.svg").read_text() == picture and picture.count("<polyline") == 2
    history.session.close()


def test_scalars_go_to_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="pip install tensorboardX runs it")
    m = Model()
    with gf.Session() as session:
        history = gf.fit(m.train, DATA, loss=m.loss, epochs=1, session=session, progress=False,
                         callbacks=[TensorBoard(tmp_path, every=1)])  # fmt: skip
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) > 200
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator",
        reason="pip install tensorboard runs it",
    )
    events = reader.EventAccumulator(str(tmp_path))
    events.Reload()
    read = [(event.step, event.value) for event in events.Scalars("loss")]
    assert read == [(i + 1, pytest.approx(loss)) for i, loss in enumerate(history.losses)]


def test_a_training_goes_on_at_its_checkpoint(tmp_path: Path) -> None:
    class Crash:
        def step(self, run: Any) -> None:
            if run.step == 7:
                raise RuntimeError("crash")

    def run_training(folder: Path, callbacks: Any = ()) -> Any:
        m = Model()
        with gf.random.seed(0):
            return m, gf.fit(m.train, DATA, loss=m.loss, epochs=3, metrics=m.metrics,
                             validate=TEST, checkpoint=folder, every=2, callbacks=callbacks,
                             progress=False)  # fmt: skip

    with pytest.raises(RuntimeError, match="crash"):
        run_training(tmp_path / "a", [Crash()])
    m, rest = run_training(tmp_path / "a")
    plain, whole = run_training(tmp_path / "b")
    assert 0 < rest.first_step <= 7
    assert rest.losses == whole.losses[rest.first_step :]
    assert np.array_equal(rest.session.get(m.w), whole.session.get(plain.w))
    for history in (rest, whole):
        history.session.close()


def test_a_training_in_changed_files_does_not_go_on(tmp_path: Path) -> None:
    """Whichever file it is; a file at another place is the same one."""

    def run_training(folder: Path, **options: Any) -> list[float]:
        m = Model()
        data = gf.data.npy(x=folder / "x.npy", y=folder / "y.npy").batch(16)
        history = gf.fit(m.train, data, loss=m.loss, checkpoint=tmp_path / "c", progress=False,
                         **options)  # fmt: skip
        history.session.close()
        return history.losses

    for name, array in (("x", X), ("y", Y)):
        for folder in ("a", "b", "changed"):
            (tmp_path / folder).mkdir(exist_ok=True)
            np.save(tmp_path / folder / f"{name}.npy", array)
    np.save(tmp_path / "changed" / "y.npy", Y + 1)
    assert len(run_training(tmp_path / "a", steps=3)) == 3
    with pytest.raises(ArgumentError, match=r"y\.npy' has changed since the 3 steps of the check"):
        run_training(tmp_path / "changed")
    assert len(run_training(tmp_path / "b")) == 4


def test_replicas_on_workers_train_alike() -> None:
    m = Model()
    with gf.Session() as session:
        alone = gf.fit(m.train, DATA, loss=m.loss, epochs=1, session=session, progress=False)
    m.train = gf.optim.SGD(0.1).minimize(m.loss, strategy=gf.parallel.Data(2))
    history = gf.fit(m.train, DATA, loss=m.loss, epochs=1, cluster=gf.Cluster.local(2),
                     progress=False)  # fmt: skip
    np.testing.assert_allclose(history.losses, alone.losses, 1e-5)
    history.session.close()


# What it says --------------------------------------------------------------------------------


SCRIPT = """
import sys; sys.path.insert(0, {root!r})
from tests.training.test_fit import *
m = Model()
gf.fit(m.train, DATA, loss=m.loss, epochs=2, metrics=m.metrics, validate=TEST)
"""


def test_a_pipe_gets_a_line_for_each_epoch_and_no_control_characters() -> None:
    root = str(Path(__file__).resolve().parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(root=root)], capture_output=True, check=True
    )
    lines = done.stderr.decode().splitlines()
    assert len(lines) == 2 and lines[0].startswith("epoch 1  step 5  loss ")
    assert not done.stdout and all(c.isprintable() for c in "".join(lines))


def test_a_terminal_gets_a_bar() -> None:
    root = str(Path(__file__).resolve().parents[2])
    parent, child = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", SCRIPT.format(root=root)], stderr=child,
                               env={**os.environ, "TERM": "xterm", "COLUMNS": "100"})  # fmt: skip
    os.close(child)
    text = b""
    try:
        while chunk := os.read(parent, 4096):
            text += chunk
    except OSError:  # the terminal's other side is closed
        pass
    assert process.wait(60) == 0
    shown = text.decode()
    assert "steps/s" in shown and "10/10" in shown and "epoch 2  step 10" in shown


# One batch -----------------------------------------------------------------------------------


def test_a_model_that_learns_one_batch_is_well_and_one_that_does_not_is_named() -> None:
    m = Model()
    batch = DATA.read((0, 0))
    assert gf.check_training(m.loss, m.train, batch).learns
    dead = gf.variable(np.ones(3, "float32"), name="dead")
    left = gf.variable(np.ones(3, "float32"), name="left")
    loss = m.loss + gf.mean(gf.nn.relu(dead * 0.0 - 1.0)) + gf.mean(left * m.w)
    train = gf.optim.SGD(0.01).minimize(loss, [m.w, m.b, dead])
    found = gf.check_training(loss, train, batch)
    assert found.without_gradient == ["dead"] and found.not_trained == ["left"]
    assert not found.learns and "dead: the gradient is 0 everywhere" in str(found)
    wild = Model(rate=50.0)
    assert not gf.check_training(wild.loss, wild.train, batch).learns


# Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"loss": 3.0}, "loss must be a float scalar of the graph, not 3.0"),
        ({"data": [1]}, "data must be a dataset, such as"),
        ({"data": DATA.map(lambda b: {"x": b["x"], "Y": b["y"]})}, "no placeholder is called 'Y'"),
        ({"data": DATA.columns("x")}, "the placeholder 'y' has no column; the data has x"),
        ({"metrics": {"mse": None}}, "metrics are computed over validate="),
        ({"callbacks": [3]}, "3 is no callback; it has none of the methods begin, step"),
        ({"train": "sgd"}, "train must be the result of minimize"),
        ({"epoch": 3}, "unknown argument 'epoch'|did you mean|epochs"),
        ({"checkpoint": "c", "session": 3}, "belong to a session that fit opens"),
    ],
)
def test_wrong_arguments_are_told(change: dict[str, Any], message: str) -> None:
    m = Model()
    given = {"train": m.train, "data": DATA, "loss": m.loss, **change}
    with pytest.raises(ArgumentError, match=message):
        gf.fit(**given)


def test_a_checkpoint_of_another_model_is_refused_also_where_no_step_is_left(
    tmp_path: Path,
) -> None:
    for steps in (2, None):
        m = Model()
        gf.fit(
            m.train, DATA, loss=m.loss, checkpoint=tmp_path, steps=steps, progress=False
        ).session.close()
        other = gf.variable(np.zeros(3, "float32"), name="other")
        loss = gf.mean(gf.square(m.x @ other - m.y))
        train = gf.optim.SGD(0.1).minimize(loss)
        with pytest.raises(CheckpointError, match="other"):
            gf.fit(train, DATA, loss=loss, checkpoint=tmp_path, progress=False)


def test_a_last_batch_without_a_row_for_each_replica_is_told_before_the_first_step() -> None:
    m = Model()
    train = gf.optim.SGD(0.1).minimize(m.loss, strategy=gf.parallel.Data(3))
    with pytest.raises(
        ArgumentError, match=r"has 2 rows, of 80 in batches of 13, .* 3 parts; take"
    ):
        gf.fit(train, DATA.batch(13), loss=m.loss)


def test_an_error_in_a_step_names_its_batch() -> None:
    x, y = (
        gf.placeholder("float32", (None, 3), name="x"),
        gf.placeholder("int64", (None,), name="y"),
    )
    loss = gf.nn.cross_entropy(gf.nn.Linear(3, 2)(x), y, reduction="mean")
    data = gf.data.arrays(x=X, y=np.arange(100) // 50 + (np.arange(100) == 99)).batch(16)
    with pytest.raises(OpError, match=r"class numbers in \[0, 2\), got values from 1 to 2") as told:
        gf.fit(gf.optim.SGD(0.1).minimize(loss), data, loss=loss, progress=False)
    assert told.value.__notes__ == ["in a training by fit, at batch 6 of epoch 0"]


def test_a_step_that_trains_nothing_is_refused() -> None:
    m = Model()
    with pytest.raises(ArgumentError, match="trains nothing; give"):
        gf.fit(m.loss, DATA, loss=m.loss)
