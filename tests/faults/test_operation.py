"""What a cluster meets in daily use: clocks that jump, sessions side by side, servers that die."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ClusterError, WorkerLost
from tests.faults.network.test_hosts import results, train_in_one_process
from tests.faults.recovery import training
from tests.faults.running import Running, Worker, cluster_file, stop, took

STEPS = 30


@pytest.fixture
def jumping(tmp_path: Path) -> dict[str, str]:
    """The environment of processes whose wall clock jumps by two hours every second. A namespace
    for times shifts other clocks only, and the machine's own is not a test's to set."""
    library, source = tmp_path / "jumping.so", Path(__file__).with_name("jumping_clock.c")
    if sys.platform != "linux" or (compiler := shutil.which("cc")) is None:
        pytest.skip("another clock for all of a process needs Linux and a C compiler")
    command = [compiler, "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=60)
    shifted = {"LD_PRELOAD": str(library)}
    told = subprocess.run(
        ["date", "+%s"], env={**os.environ, **shifted}, capture_output=True, text=True, check=True,
        timeout=10,
    )  # fmt: skip
    assert abs(abs(int(told.stdout) - time.time()) - 3600) < 60
    return shifted


@pytest.mark.slow  # processes under other clocks, one of which has to be missed
@pytest.mark.fault(46)
def test_wall_clocks_that_jump_by_an_hour_have_no_effect(
    workers: Callable[..., list[Worker]],
    running: list[Running],
    jumping: dict[str, str],
    tmp_path: Path,
) -> None:
    """Workers of one session on such clocks; it is right to the bit, checkpoints are written each
    second, and one that freezes is missed when it is time, neither earlier nor later."""
    two = workers(2, env=jumping)
    file = cluster_file(tmp_path, [worker.address for worker in two])
    command = [sys.executable, training.__file__, str(file), str(STEPS), "pause=0.1"]
    options = ['every="1s"', f'checkpoint="{tmp_path}/c"', "rejoin=0"]
    run = Running([*command, *options], env=jumping)
    running.append(run)
    run.line("step 20 ")
    assert len(list((tmp_path / "c").glob("step-*"))) > 1, "of about two seconds"
    stop(two[1].pid)
    assert run.wait() == 0, run.describe_output()
    assert results(run.lines) == train_in_one_process(STEPS)
    took(46, "longest step, a worker frozen under wall clocks that jump", run.gap())
    assert 4.0 < run.gap() < 2 * 5.0


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


def test_one_process_under_two_names_is_refused(running: list[Running], tmp_path: Path) -> None:
    """Where the names do not show it: one that listens at all addresses."""
    running.append(worker := Worker("tcp://0.0.0.0:*", "--insecure"))
    port = worker.ready().address.rpartition(":")[2]
    names = [f"tcp://127.0.0.{host}:{port}" for host in (1, 2)]
    with pytest.raises(ClusterError, match=r"worker 0 at .*1:.* and worker 1 at .*one process"):
        gf.Session(cluster_file(tmp_path, names))


@pytest.mark.fault(47, 5)
def test_a_session_whose_client_dies_harms_no_other(
    workers: Callable[..., list[Worker]], running: list[Running], tmp_path: Path
) -> None:
    two = workers(2)
    file = cluster_file(tmp_path, [worker.address for worker in two])
    command = ["-m", "tests.faults.recovery.training", str(file), str(STEPS)]
    first, second = (Running([*command, f"pause={p}"], python=True) for p in ("0.2", "0.05"))
    running += [first, second]
    first.line("step 2 ")
    second.line("step 2 ")
    first.send(signal.SIGKILL)
    assert second.wait() == 0, second.describe_output()
    assert results(second.lines) == train_in_one_process(STEPS)


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
        os.kill(s._life.hosts.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(WorkerLost) as failure:
            for i in range(STEPS):
                s.run(step, fed(i))
        assert failure.value.worker == 1
    with gf.Session(local, checkpoint=tmp_path, every=3) as s:
        have = []
        for i in range(STEPS):
            have.append(s.run(step, fed(i))[0].tobytes())
            if i in (7, 15):
                os.kill(s._life.hosts.pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
        assert have == expected
        assert int(s.get(seen)) == STEPS
