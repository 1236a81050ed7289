"""A training that goes back to an older checkpoint and is killed goes on from that one, or later on
its line: never from what was written before, whose steps are higher."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import graphflow as gf
from tests.faults.recovery.model import Model
from tests.faults.recovery.test_recovery import digest
from tests.faults.running import Script

BACK, BEFORE, OTHER = 6, 30, 1000
"""The step that is loaded, the last one before that, and where the feeds from then on begin."""

GOING_BACK = """
import sys, time, graphflow as gf
from tests.faults.recovery.model import Model
from tests.faults.recovery.test_after_load import BACK, BEFORE, OTHER
cluster, folder, every, pause = sys.argv[1:]
every = int(every) if every.isdigit() else every
local = cluster == "local"
where = gf.Cluster.local(workers=2, threads=1) if local else gf.Cluster.here(threads=1)
model = Model(2 if local else 1)
with gf.Session(where, trial=False, checkpoint=folder, every=every) as s:
    def train(until, feeds, pause):
        while s.step < until:
            s.run([model.loss, model.train], model.feed(feeds + s.step))
            print("step", s.step, flush=True)
            time.sleep(pause)
    train(BACK, 0, 0.0)
    s.save(folder + "-best")
    train(BEFORE, 0, 0.002)
    s.save()
    s.load(folder + "-best")
    print("loaded", flush=True)
    time.sleep(float(pause))
    train(1000, OTHER, 0.002)
"""


@pytest.fixture(scope="module")
def lines() -> dict[int, list[bytes]]:
    """The state after each step from what is loaded on, of a training that nothing befalls."""
    model, found = Model(1), {}
    with gf.Session(gf.Cluster.here(threads=1)) as s:
        while s.step < BEFORE + 200:
            s.run([model.loss, model.train], model.feed(s.step + (OTHER if s.step >= BACK else 0)))
            if s.step >= BACK:
                found[s.step] = digest(s, model)
    return found


@pytest.mark.every(12)
@pytest.mark.fault(7)
@pytest.mark.parametrize("last", [BACK, BACK + 4, BEFORE + 12])
@pytest.mark.parametrize("every", ["5", "20ms"])
@pytest.mark.parametrize("cluster", ["here", "local"])
def test_a_client_that_is_killed_after_it_went_back_goes_on_from_there(
    cluster: str, every: str, last: int, script: Callable[..., Script], tmp_path: Path,
    lines: dict[int, list[bytes]],
) -> None:  # fmt: skip
    folder = tmp_path / "c"
    pause = 60.0 if last == BACK else 0.0
    process = script(GOING_BACK, cluster, str(folder), every, str(pause))
    process.line("loaded")
    if last > BACK:
        process.line(f"step {last}")
    process.send(signal.SIGKILL)
    process.wait()
    model = Model(1)
    with gf.Session(gf.Cluster.here(threads=1), checkpoint=folder, every="1h") as s:
        assert s.step >= BACK, "what was written before is taken for newer"
        assert s.step == BACK if last == BACK else s.step > BACK or last == BACK + 4
        assert digest(s, model) == lines[s.step]
