"""Launchers: workers by several engines, killed and back, with the curve of an unbroken run."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, LaunchError
from graphflow.launch import LaunchedWorker, Processes, Ranks, Slurm, Ssh, WorkerLauncher, start
from tests.ssh_server import needs_sshd, ssh_server

STEPS, KILLS = 200, {51: 1, 125: 0, 126: 1}


def train(
    cluster: gf.Cluster, folder: Path, kills: Mapping[int, int], steps: int = STEPS
) -> list[bytes]:
    """Train over two workers, and kill some before given steps; return the bits of each loss.

    Prints the seconds of the steps that begin with a kill.
    """
    x = gf.placeholder("float32", (None, 4), name="x")
    w = gf.variable(np.ones((4, 4), "float32"), name="w")
    loss = gf.mean((x @ w) ** 2)
    step = gf.optim.Adam(1e-2).minimize(loss, strategy=gf.parallel.Data(2))
    rows, curve = np.linspace(0, 1, 32, dtype="float32").reshape(8, 4), []
    with gf.Session(cluster, checkpoint=folder, every=10) as s:
        for number in range(steps):
            started = time.monotonic()
            if number in kills:
                pid = s.workers[kills[number]].pid
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
            curve.append(s.run([loss, step], {x: rows + number})[0].tobytes())
            if number in kills:
                print(f"step {number}, with a lost worker: {time.monotonic() - started:.2f} s")
        assert s.step == steps and [each.state for each in s.workers] == ["up", "up"]
    return curve


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def check_recovery(
    launcher: WorkerLauncher, folder: Path, kills: Mapping[int, int] = KILLS, steps: int = STEPS
) -> None:
    """Kill workers in a training, three times by default: its curve is that of an unbroken one, and
    no process of a worker is left."""
    with start(launcher, 2, threads=1) as cluster:
        first = [each.address for each in cluster.workers]
        broken = train(cluster, folder / "broken", kills, steps)
        last = launcher.workers()
        pids = [each.announcement.pid for each in last if each.announcement]
        assert len(pids) == 2 and all(map(is_alive, pids))
        addresses = [each.announcement.address for each in last if each.announcement]
        assert len({*first} & {*addresses}) == 2 - len({*kills.values()}), "they listen elsewhere"
    assert broken == train(gf.Cluster.local(2, threads=1), folder / "whole", {}, steps)
    until = time.monotonic() + 10.0
    while any(map(is_alive, pids)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


@pytest.mark.slow
def test_killed_processes_come_back_elsewhere_and_change_no_bit(tmp_path: Path) -> None:
    check_recovery(Processes(), tmp_path)


# Errors of starting -------------------------------------------------------------------------------


def test_a_worker_that_ends_before_it_listens_shows_what_it_wrote() -> None:
    with (
        pytest.raises(LaunchError, match=r"exit status 2.*before it listened[\s\S]*tpu:0"),
        start(Processes(), 1, devices=["cpu:0"], options=["--devices", "tpu:0"]),
    ):
        pass


class Never:
    """A launcher whose engine has no room."""

    stopped = False

    def start(self, count: int, options: Sequence[str], env: Mapping[str, str]) -> None:
        self.count = count

    def workers(self) -> list[LaunchedWorker]:
        where = "waits for 64 CPU; 2 are free"
        return [LaunchedWorker(i, None, "waiting", where) for i in range(self.count)]

    def restart(self, index: int) -> None:
        raise AssertionError("nothing was lost")

    def stop(self) -> None:
        self.stopped = True


def test_an_engine_without_room_is_an_error_that_says_who_waits_for_what() -> None:
    launcher = Never()
    with (
        pytest.raises(LaunchError, match=r"after 0.2 s: worker 0 \(waits for 64 CPU.*worker 1"),
        start(launcher, 2, deadline=0.2),
    ):
        pass
    assert launcher.stopped


# ssh ----------------------------------------------------------------------------------------------


@pytest.fixture
def ssh_options(tmp_path: Path) -> Iterator[list[str]]:
    """The options with which ssh reaches an sshd on loopback."""
    with ssh_server(tmp_path) as options:
        yield options


@needs_sshd
@pytest.mark.slow
def test_killed_workers_behind_ssh_come_back_and_change_no_bit(
    ssh_options: list[str], tmp_path: Path
) -> None:
    check_recovery(Ssh(["127.0.0.1"], python=sys.executable, options=ssh_options), tmp_path)


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs the OpenSSH client")
@pytest.mark.parametrize(
    ("host", "says"),
    [("no-such-host.invalid", "Could not resolve"), ("127.0.0.1", "Connection refused")],
)
def test_a_host_that_is_not_there_is_an_error_with_sshs_own_line(host: str, says: str) -> None:
    with socket.socket() as taken:  # bound, so that nobody else listens there
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        with (
            pytest.raises(LaunchError, match=rf"{host}, by ssh, exit status 255[\s\S]*{says}"),
            start(Ssh([host], options=["-p", port, "-F", "none"]), 1),
        ):
            pass


@pytest.mark.parametrize("hosts", ["node1", [], ["-oProxyCommand=touch x"], [""], [1]])
def test_hosts_that_are_none_are_refused(hosts: Any) -> None:
    with pytest.raises(ArgumentError, match="Ssh"):
        Ssh(hosts)


# Slurm --------------------------------------------------------------------------------------------

SRUN = """#!{python}
import os, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
words = [w.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:") for w in words]
os.execvp(words[0], words)
"""
SCONTROL = """#!/bin/sh
[ "$1 $2 $3" = "show hostnames node[1-2]" ] && printf 'node1\\nnode2\\n'
"""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in PATH with an srun that runs commands here, inside a job of two tasks."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "srun").write_text(SRUN.format(python=sys.executable))
    (folder / "scontrol").write_text(SCONTROL)
    for tool in folder.iterdir():
        tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    monkeypatch.setenv("SLURM_NTASKS", "2")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    return folder


def test_killed_steps_of_a_slurm_job_come_back_and_change_no_bit(
    slurm: Path, tmp_path: Path
) -> None:
    launcher = Slurm(python=sys.executable)
    check_recovery(launcher, tmp_path, {11: 1}, steps=40)
    place = launcher.place(3, [], {})
    assert "--nodelist=node2" in place.command and place.where == "node2, by srun"


@pytest.mark.slow
def test_steps_of_a_slurm_job_that_are_killed_three_times_change_no_bit(
    slurm: Path, tmp_path: Path
) -> None:
    check_recovery(Slurm(python=sys.executable), tmp_path)


def test_slurm_without_a_job_a_tool_or_enough_tasks_is_an_error_and_never_this_host(
    slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match=r"has 2 tasks, and 3 workers.*--ntasks=3"):
        Slurm().start(3, [], {})
    monkeypatch.setenv("SLURM_JOB_NODELIST", "else")
    with pytest.raises(LaunchError, match="nodes of job 17"):
        Slurm().start(1, [], {})
    (slurm / "srun").unlink()
    with pytest.raises(LaunchError, match="no `srun` in PATH"):
        Slurm().start(1, [], {})
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(LaunchError, match="sbatch"):
        Slurm().start(1, [], {})


# Ranks --------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
import numpy as np, graphflow as gf
from graphflow.runtime.launch.engines import ranks
ranks.EVERYWHERE = "127.0.0.1"
x = gf.placeholder("float32", (None, 4), name="x")
w = gf.variable(np.ones((4, 4), "float32"), name="w")
loss = gf.mean((x @ w) ** 2)
step = gf.optim.SGD(1e-2).minimize(loss, strategy=gf.parallel.Data(2))
with gf.launch.start(gf.launch.Ranks(), workers=2, threads=1) as cluster:
    with gf.Session(cluster, checkpoint=sys.argv[1], every=5) as s:
        for number in range(20):
            if number == 9:
                os.kill(s.workers[1].pid, signal.SIGKILL)
            value, _ = s.run([loss, step], {x: np.ones((4, 4), "float32")})
        print(s.step, float(value))
"""


@contextmanager
def ranks(program: str, count: int, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes that mpirun would start."""
    started = []
    for rank in range(count):
        told = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": str(count)}
        environment = {**os.environ, **told, "PMIX_NAMESPACE": "prterun-box-123@1"}
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", program, str(folder / "steps")], cwd=folder,
                env={**environment, "PYTHONPATH": str(Path(gf.__file__).parents[1])},
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )
        )  # fmt: skip
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


@pytest.mark.slow
def test_ranks_of_a_program_are_its_workers_and_one_that_is_killed_comes_back(
    tmp_path: Path,
) -> None:
    with ranks(PROGRAM, 3, tmp_path) as started:
        told, errors = started[0].communicate(timeout=90)
        assert started[0].returncode == 0, errors
        assert told.split()[0] == "20" and float(told.split()[1]) > 0
        assert [process.wait(20) for process in started[1:]] == [0, 0]
    assert not list(tmp_path.glob(".graphflow-ranks*"))


def test_another_number_of_workers_than_of_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(LaunchError, match=r"OMPI_COMM_WORLD_RANK.*mpirun -n 5"):
        Ranks(tmp_path / "ranks")
    for name, value in (("RANK", "0"), ("SIZE", "4")):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", value)
    with pytest.raises(ArgumentError, match="give a folder="):
        Ranks()
    with pytest.raises(LaunchError, match="4 ranks are a client and 3 workers, and workers=2"):
        Ranks(tmp_path / "ranks").start(2, [], {})
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "1")
    with pytest.raises(LaunchError, match=r"rank 1 saw no .*start\.json"):
        Ranks(tmp_path / "ranks", deadline=0.1).start(3, [], {})


# Ray and Dask -------------------------------------------------------------------------------------


def test_an_engine_that_is_not_installed_is_an_error_that_says_how(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(LaunchError, match=r"pip install 'graphflow\[ray\]'"):
        gf.launch.Ray().start(1, [], {})
    with pytest.raises(LaunchError, match=r"pip install 'graphflow\[dask\]'"):
        gf.launch.Dask(None)


@pytest.mark.slow
def test_killed_workers_on_ray_come_back_and_change_no_bit(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="pip install 'graphflow[ray]'")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        check_recovery(gf.launch.Ray(listen="127.0.0.1"), tmp_path)
        with (
            pytest.raises(LaunchError, match=r"waits in Ray for 64 CPU; \d CPU are free"),
            start(gf.launch.Ray(cpus=64), 1, deadline=2.0),
        ):
            pass
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_killed_workers_on_dask_come_back_and_change_no_bit(tmp_path: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="pip install 'graphflow[dask]'")
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, dashboard_address=None, host="127.0.0.1"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        check_recovery(gf.launch.Dask(client), tmp_path)
        with pytest.raises(LaunchError, match="has 2 workers, and 3 are wanted"):
            gf.launch.Dask(client).start(3, [], {})
        with pytest.raises(ArgumentError, match=r"distributed\.Client"):
            gf.launch.Dask("tcp://127.0.0.1:8786")
