"""Workers read the rows of a batch themselves: the same bits as when the client feeds them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.base.process.data_folders import restrict_data_folders
from graphflow.data import row_reader
from graphflow.errors import ArgumentError, FeedError, GraphflowError, OpError
from tests.data.test_sources import write_table

Array = np.ndarray[Any, Any]
ROWS = 203
_random = np.random.default_rng(0)
X, Y = _random.normal(size=(ROWS, 4)).astype("float32"), _random.normal(size=ROWS)


class Model:
    """Linear regression on x and y."""

    def __init__(self, strategy: Any = None) -> None:
        self.x = gf.placeholder("float32", (None, 4), name="x")
        self.y = gf.placeholder("float32", (None,), name="y")
        self.w = gf.variable(np.zeros(4, "float32"), name="w")
        out = self.x @ self.w
        self.loss = gf.mean(gf.square(out - self.y))
        self.metrics = {"r2": gf.metrics.r2(out, self.y)}
        self.train = gf.optim.Adam(0.05).minimize(self.loss, strategy=strategy)


@pytest.fixture
def data(tmp_path: Path) -> gf.data.Dataset:
    """Rows in `.npy` files; y is float64 there, and float32 in the model."""
    np.save(tmp_path / "x.npy", X)
    np.save(tmp_path / "y.npy", Y)
    return gf.data.npy(x=tmp_path / "x.npy", y=tmp_path / "y.npy").shuffle(3).batch(16)


@pytest.fixture(autouse=True)
def unrestricted() -> Iterator[None]:
    yield
    restrict_data_folders(None)


def read(data: gf.data.Dataset) -> list[dict[str, Array]]:
    """Return the batches as a step in this process reads them."""
    first = data.read((0, 0))
    columns = [gf.placeholder(a.dtype, (None, *a.shape[1:]), name=n) for n, a in first.items()]
    reading = gf.data.bind(data, columns)
    with gf.Session() as session:
        found = [session.run(reading.fetches, feeds) for feeds in reading.start()]
    return [dict(zip(first, each, strict=True)) for each in found]


def equals_batches(found: list[dict[str, Array]], data: gf.data.Dataset) -> bool:
    fed = list(data)
    return len(found) == len(fed) and all(
        np.array_equal(a[name], b[name]) and a[name].dtype == b[name].dtype
        for a, b in zip(found, fed, strict=True)
        for name in b
    )


# Sources -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "arrow"])
def test_tables_are_read_as_they_are_fed(kind: str, tmp_path: Path) -> None:
    data = write_table(tmp_path, kind).shuffle(2, blocks=3).batch(300).epochs(2)
    assert equals_batches(read(data), data)


def test_arrays_images_and_svmlight_are_read_as_they_are_fed(tmp_path: Path) -> None:
    np.savez(tmp_path / "t.npz", a=X, b=Y)
    (tmp_path / "t.svm").write_text("1 1:2.0 3:1.0\n-1 2:1.0\n1 1:0.5\n")
    made = [gf.data.npz(tmp_path / "t.npz").batch(50, drop_last=True)]
    pytest.importorskip("sklearn", reason="pip install 'graphflow[linear]' runs it")
    made.append(gf.data.svmlight(tmp_path / "t.svm", columns=4).batch(2))
    image = pytest.importorskip("PIL.Image", reason="pip install 'graphflow[data]' runs it")
    (tmp_path / "images" / "cat").mkdir(parents=True)
    for number in range(3):
        pixels = np.full((8, 10), 50 * number, "uint8")
        image.fromarray(pixels).save(tmp_path / "images" / "cat" / f"{number}.png")
    made.append(gf.data.images(tmp_path / "images", size=(4, 5), channels=1).batch(2))
    for data in made:
        assert equals_batches(read(data.shuffle(1).epochs(2)), data.shuffle(1).epochs(2))


def test_parts_of_a_split_and_some_columns_are_read(data: gf.data.Dataset) -> None:
    for part in data.split(0.7, seed=5)[0].split(0.5):
        assert equals_batches(read(part), part) and equals_batches(
            read(part.columns("y")), part.columns("y")
        )


# Training ------------------------------------------------------------------------------------


def run_training(data: gf.data.Dataset, replicas: int = 2, **options: Any) -> tuple[Any, ...]:
    """Return losses, metrics and weights of a training by two replicas."""
    model = Model(gf.parallel.Data(replicas))
    history = gf.fit(
        model.train, data, loss=model.loss, validate=data.epochs(1), metrics=model.metrics,
        progress=False, cluster=gf.Cluster.local(replicas), **options,
    )  # fmt: skip
    weights = history.session.get(model.w).tolist()
    history.session.close()
    return history.losses, history.values("r2"), weights


def test_a_training_has_the_same_bits_and_the_client_sends_a_position(
    data: gf.data.Dataset,
) -> None:
    fed = run_training(data.epochs(2))
    assert run_training(data.epochs(2).on_workers()) == fed
    model = Model(gf.parallel.Data(2))
    reading = gf.data.bind(data, [model.train, model.loss])
    with gf.Session(gf.Cluster.local(2), trial=False) as session:
        losses = [session.run(reading.fetches, f)[1] for f in reading.start()]
        sent = session._life.hosts.meters.value("graphflow_feed_bytes_total")  # type: ignore[union-attr]
    assert losses == fed[0][:13] and 0 < sent <= 13 * 2 * 16  # a position for each worker


@pytest.mark.parametrize(
    "strategy",
    [
        gf.parallel.Data(2, accumulate=3, batch=["x", "y"]),
        gf.parallel.Shard({"rows": 2}, batch="rows"),
        gf.parallel.ParameterServer(servers=1, workers=1, window=2),
        gf.parallel.LocalSGD(2, period=2),
        gf.parallel.Pipeline(2, microbatches=2),
    ],
    ids=lambda each: type(each).__name__,
)
def test_strategies_divide_rows_as_those_of_a_feed(strategy: Any, data: gf.data.Dataset) -> None:
    model = Model(strategy)
    losses = []
    data = data.batch(16, drop_last=True)  # servers need equal micro-batches
    reading = gf.data.bind(data, [model.train, model.loss])
    for fetches, batches in (([model.train, model.loss], iter(data)),
                             (reading.fetches, reading.start())):  # fmt: skip
        with gf.Session(gf.Cluster.here(devices=["cpu:0", "cpu:1"])) as session:
            losses.append([float(session.run(fetches, batch)[1]) for batch in batches])
    assert losses[0] == losses[1]


def test_a_worker_that_is_replaced_reads_the_same_batches(
    data: gf.data.Dataset, tmp_path: Path
) -> None:
    class Kill:
        def step(self, run: Any) -> None:
            if run.step == 6:
                os.kill(run.session._life.hosts.pids[1], signal.SIGKILL)

    fed = run_training(data.epochs(1))
    killed = run_training(data.epochs(1).on_workers(), checkpoint=tmp_path / "c", every=4,
                     callbacks=[Kill()])  # fmt: skip
    assert killed == fed


# Reading ahead -------------------------------------------------------------------------------


def test_the_next_batch_is_read_ahead_also_where_it_is_smaller(
    data: gf.data.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_parts: list[tuple[Any, ...]] = []
    whole = gf.data.Dataset.read_part

    def count(self: Any, *part: Any) -> Any:
        read_parts.append(tuple(map(int, (*part[0], *part[1:]))))
        return whole(self, *part)

    text = row_reader.describe(data)
    reader = row_reader.RowReader(text)
    monkeypatch.setattr(gf.data.Dataset, "read_part", count)
    for epoch in range(2):  # 12 batches of 16 rows and one of 11, in parts for a replica
        for batch in range(13):
            part = (8, 8) if batch < 12 else (6, 5)
            found = reader.read((epoch, batch), *part)
            assert np.array_equal(found["x"], data.read((epoch, batch))["x"][slice(*_ends(part))])
    reader.read((2, 0), 8, 8)
    asked = [each for each in read_parts if each[3] < 11]
    assert asked[:2] == [(0, 0, 8, 8), (0, 1, 8, 8)] and len(asked) == len(set(asked))


def _ends(part: tuple[int, int]) -> tuple[int, int]:
    return part[0], sum(part)


def test_a_reader_without_work_ends_and_another_one_goes_on(
    data: gf.data.Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_reader, "IDLE_SECONDS", 0.05)
    before = set(threading.enumerate())
    assert equals_batches(read(data), data)
    own = row_reader.describe(data)
    until = time.monotonic() + 20
    while own in row_reader._readers or any(
        t.name == "graphflow-rows" for t in {*threading.enumerate()} - before
    ):
        assert time.monotonic() < until
        time.sleep(0.02)
    assert equals_batches(read(data), data)


# Errors --------------------------------------------------------------------------------------


def test_rows_that_workers_cannot_read_are_refused(data: gf.data.Dataset) -> None:
    with pytest.raises(ArgumentError, match=r"only; save them \(np\.save\), and open the files"):
        gf.data.arrays(x=X).on_workers()
    with pytest.raises(ArgumentError, match="functions of map run in this process only; write"):
        data.map(lambda batch: batch).on_workers()
    other = gf.placeholder("float32", (None,), name="other")
    with pytest.raises(ArgumentError, match="the columns are x, y, the placeholders other"):
        gf.data.bind(data, [other])
    with pytest.raises(FeedError, match=r"x' .* has shape \(None, 5\)"):
        gf.data.bind(data, [gf.placeholder("float32", (None, 5), name="x")])
    narrow = gf.placeholder("int64", (None,), name="y")
    with pytest.raises(FeedError, match="which does not convert safely"):
        gf.data.bind(data, [narrow])


def test_a_file_that_differs_on_the_worker_or_changes_is_named(
    data: gf.data.Dataset, tmp_path: Path
) -> None:
    text = row_reader.describe(data)
    assert data.files is not None
    x = data.files.paths[0]
    np.save(x, X[:50])
    with pytest.raises(ArgumentError, match=r"x\.npy' is not the file that the client opened"):
        row_reader.open_described(text)
    with pytest.raises(ArgumentError, match=r"x\.npy' has changed since it was opened"):
        data.read((0, 0))
    os.remove(x)
    with pytest.raises(ArgumentError, match=r"there is no file '.*x\.npy' on this machine"):
        row_reader.open_described(text)


def test_images_that_lead_out_of_an_allowed_folder_are_refused(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image", reason="pip install 'graphflow[data]' runs it")
    (tmp_path / "in" / "cat").mkdir(parents=True)
    image.fromarray(np.zeros((2, 2), "uint8")).save(tmp_path / "out.png")
    shutil.copy(tmp_path / "out.png", tmp_path / "in" / "cat" / "a.png")
    text = row_reader.describe(gf.data.images(tmp_path / "in", (2, 2)).batch(1))
    restrict_data_folders([str(tmp_path / "in" / "cat")])
    with pytest.raises(ArgumentError, match="--allow-data"):
        row_reader.open_described(text)
    restrict_data_folders([str(tmp_path / "in")])
    assert row_reader.open_described(text).rows == 1
    os.symlink(tmp_path / "out.png", tmp_path / "in" / "cat" / "b.png")
    text = row_reader.describe(gf.data.images(tmp_path / "in", (2, 2)).batch(1))
    with pytest.raises(ArgumentError, match="--allow-data"):
        row_reader.open_described(text)


@pytest.mark.parametrize("allowed", [False, True])
def test_a_worker_for_others_reads_below_its_folders_only(
    allowed: bool, data: gf.data.Dataset, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "graphflow", "worker", "--listen", "tcp://127.0.0.1:*",
               "--devices", "cpu:0"]  # fmt: skip
    command += ["--allow-data", str(tmp_path)] if allowed else []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split(" on ")[1].split(" ")[0]
        (tmp_path / "cluster.toml").write_text(f'[[workers]]\naddress = "{address}"\n')
        model = Model()
        reading = gf.data.bind(data, [model.train, model.loss])
        with gf.Session(gf.Cluster.load(tmp_path / "cluster.toml"), trial=False) as session:
            if allowed:
                want = np.mean(data.read((0, 0))["y"].astype("float32") ** 2)
                loss = session.run(reading.fetches, reading.feeds((0, 0)))[1]
                assert loss == pytest.approx(want)
            else:
                with pytest.raises(GraphflowError, match=r"start it with --allow-data"):
                    session.run(reading.fetches, reading.feeds((0, 0)))
    finally:
        process.terminate()
        process.wait(20)


def test_a_number_beyond_the_placeholder_s_range_is_told(tmp_path: Path) -> None:
    np.save(tmp_path / "y.npy", np.array([1.0, 1.0, 1e300, 1.0]))
    data = gf.data.npy(y=tmp_path / "y.npy").batch(2)
    reading = gf.data.bind(data, [gf.placeholder("float32", (None,), name="y")])
    with gf.Session() as session:
        session.run(reading.fetches, reading.feeds((0, 0)))
        with pytest.raises(OpError, match=r"column 'y': 1e\+300 at index .* is out of the range"):
            session.run(reading.fetches, reading.feeds((0, 1)))


def test_a_description_holds_plain_data_only(data: gf.data.Dataset) -> None:
    given = json.loads(row_reader.describe(data.split(0.5)[0]))
    assert given["kind"] == "npy" and given["splits"] == [[0.5, 0, 0]] and given["size"] == 16
    assert all(len(digest) == 16 for digest in given["digests"])
