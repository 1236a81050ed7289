"""A training whose client is killed goes on with the batches of one that is not.

Whether the client feeds them, or workers read them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

TRAINING = """
import hashlib, os, signal, sys
import numpy as np
import graphflow as gf

folder, workers, killed, reads = sys.argv[1], *map(int, sys.argv[2:])
random = np.random.default_rng(0)
columns = {"x": random.normal(size=(10_007, 4)).astype("float32"), "y": random.normal(size=10_007)}
data = gf.data.arrays(columns)
if reads:
    for name, column in columns.items():
        if not os.path.exists(f"{folder}/../{name}.npy"):
            np.save(f"{folder}/../{name}.npy", column)
    data = gf.data.npy(**{name: f"{folder}/../{name}.npy" for name in columns})
data = data.shuffle(seed=9).batch(64).epochs(2).prefetch(2)
x = gf.placeholder("float32", (None, 4), name="x")
y = gf.placeholder("float64", (None,), name="y")
w = gf.variable(np.zeros(4, "float32"), name="w")
loss = gf.mean(gf.square((x @ w).astype("float64") - y))
train = gf.optim.SGD(0.1).minimize(loss, strategy=gf.parallel.Data(2))
reading = gf.data.bind(data, [train, x, y]) if reads else None
with gf.Session(gf.Cluster.local(workers), checkpoint=folder, every=25, trial=False) as session:
    for batch in (reading or data).start(session.step):
        at = session.step
        if at == killed:
            os.kill(os.getpid(), signal.SIGKILL)
        if reading is None:
            session.run(train, batch)
        else:
            batch = dict(zip("xy", session.run(reading.fetches, batch)[1:]))
        digest = hashlib.sha256(batch["x"].tobytes() + batch["y"].tobytes()).hexdigest()
        print(at, *data.position(at), digest, flush=True)
"""


def batches(folder: Path, workers: int, killed: int = -1, reads: bool = False) -> dict[int, str]:
    """Return what a training prints for each step.

    Args:
        folder: for checkpoints; files of rows lie beside it.
        workers: how many.
        killed: the step at which the client is killed; -1: none.
        reads: whether workers read the rows.
    """
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, str(folder), str(workers), str(killed),
         str(int(reads))],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == (0 if killed < 0 else -signal.SIGKILL), done.stderr
    return {int(line.split()[0]): line for line in done.stdout.splitlines()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    found = batches(tmp_path_factory.mktemp("whole"), 2)
    assert sorted(found) == list(range(2 * 157))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("killed", [60, 156, 157], ids=["60", "last batch", "between epochs"])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("reads", [False, True], ids=["fed", "read"])
def test_a_killed_client_goes_on_with_the_same_batches(
    killed: int, workers: int, reads: bool, unbroken: dict[int, str], tmp_path: Path
) -> None:
    before = batches(tmp_path / "c", 2, killed, reads)
    after = batches(tmp_path / "c", workers, reads=reads)
    assert len(before) == killed and min(after) <= killed, "it begins at the last checkpoint"
    assert before | after == unbroken
