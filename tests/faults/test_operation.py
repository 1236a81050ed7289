"""What a cluster meets in daily use: clocks that jump, sessions side by side, servers that die."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import WorkerLost
from tests.faults import training
from tests.faults.running import Running, Worker, cluster_file
from tests.faults.test_hosts import alone, results

STEPS = 30

# The wall clock goes forward an hour and back again, every second, in a process of its own time.
JUMPING = """
_time, _time_ns = time.time, time.time_ns
def _shift():
    return 3600 * (1 if int(time.monotonic()) % 2 else -1)
time.time = lambda: _time() + _shift()
time.time_ns = lambda: _time_ns() + _shift() * 10**9
"""


@pytest.mark.slow  # twelve seconds: processes under other clocks
@pytest.mark.fault(46)
def test_wall_clocks_that_jump_by_an_hour_have_no_effect(
    workers: Callable[..., list[Worker]], running: list[Running], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(JUMPING)
    path = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{training.EXAMPLE.parents[1]}"}
    two = workers(2, env=path)
    file = cluster_file(tmp_path, [worker.address for worker in two])
    command = [sys.executable, training.__file__, str(file), str(STEPS), "pause=0.08"]
    run = Running([*command, 'every="1s"', f'checkpoint="{tmp_path}/c"'], env=path)
    running.append(run)
    assert run.wait() == 0, run.told()
    assert results(run.lines) == alone(STEPS)


@pytest.mark.fault(47)
def test_two_sessions_on_one_cluster_are_isolated_and_one_outlives_the_others_failure(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    two = workers(2)
    file = cluster_file(tmp_path, [worker.address for worker in two])
    counted: dict[int, list[float]] = {}
    errors: list[BaseException] = []

    def count(number: int, steps: int) -> None:
        try:
            with gf.device("/worker:1"):
                w = gf.variable(np.zeros((), "float32"), name="w")  # the same name in both
                step = gf.assign(w, w + float(number))
            with gf.Session(file) as s:
                for _ in range(steps):
                    counted.setdefault(number, []).append(float(s.run(step)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=count, args=(n, 40 * n)) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert errors == []
    assert counted == {n: [float(n * (i + 1)) for i in range(40 * n)] for n in (1, 2)}


@pytest.mark.fault(47, 5)
def test_a_session_whose_client_dies_harms_no_other(
    workers: Callable[..., list[Worker]], running: list[Running], tmp_path: Path
) -> None:
    two = workers(2)
    file = cluster_file(tmp_path, [worker.address for worker in two])
    command = [sys.executable, training.__file__, str(file)]
    first, second = (Running([*command, str(STEPS), f"pause={p}"]) for p in ("0.2", "0.05"))
    running += [first, second]
    first.line("step 2 ")
    second.line("step 2 ")
    first.send(signal.SIGKILL)
    assert second.wait() == 0, second.told()
    assert results(second.lines) == alone(STEPS)


@pytest.mark.fault(8)
def test_a_server_of_variables_that_dies_is_named_and_no_update_is_applied_twice(
    tmp_path: Path,
) -> None:
    x = gf.placeholder("float32", (4,), name="x")
    with gf.device("/worker:1"):  # it holds the variables
        w = gf.variable(np.zeros(4, "float32"), name="w")
        seen = gf.variable(np.zeros((), "int64"), name="seen")
    with gf.device("/worker:0"):  # it computes
        gradient = gf.tanh(w) + x
    with gf.device("/worker:1"):
        step = [gf.assign(w, w - gradient * 0.1), gf.assign(seen, seen + 1)]

    def fed(number: int) -> dict[gf.Tensor, np.ndarray]:
        return {x: np.full(4, number % 5, "float32")}

    local = gf.Cluster.local(workers=2, threads=1)
    with gf.Session(local) as s:
        expected = [s.run(step, fed(i))[0].tobytes() for i in range(STEPS)]
        os.kill(s._hosts.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(WorkerLost) as failure:
            for i in range(STEPS):
                s.run(step, fed(i))
        assert failure.value.worker == 1
    with gf.Session(local, checkpoint=tmp_path, every=3) as s:
        have = []
        for i in range(STEPS):
            have.append(s.run(step, fed(i))[0].tobytes())
            if i in (7, 15):
                os.kill(s._hosts.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
        assert have == expected
        assert int(s.get(seen)) == STEPS
