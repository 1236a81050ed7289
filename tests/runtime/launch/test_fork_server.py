"""Nurseries: workers that are forked end, and are told of, as processes of their own would be."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphflow.errors import RendezvousTimeout, WorkerLost
from graphflow.placement.clusters.cluster import Cluster
from graphflow.runtime.client import worker_membership as membership
from graphflow.runtime.client.remote_hosts import RemoteHosts
from graphflow.runtime.diagnostics.crash_recorder import CrashRecorder
from graphflow.runtime.diagnostics.oom_detection import MemoryKills
from graphflow.runtime.launch import local
from graphflow.runtime.launch.fork_server import ForkServer, _prepare_child, can_fork
from graphflow.runtime.launch.local import LocalWorker, LocalWorkers
from tests.faults.running import stop

HOST = f"{Path(__file__).parents[1] / 'protocol' / 'fake_host.py'}:FakeHost"
START = 30.0

pytestmark = pytest.mark.usefixtures("own_fork_servers")
needs_forks = pytest.mark.skipif(not can_fork(), reason="processes have no descriptors here")


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer(dict(os.environ))
    yield made
    made.close()


def becomes_true(done: object, seconds: float = 5.0) -> bool:
    until = time.monotonic() + seconds
    while not done() and time.monotonic() < until:  # type: ignore[operator]
        time.sleep(0.02)
    return bool(done())  # type: ignore[operator]


DAEMON = """
import os, sys, graphflow as gf
if __name__ == "__main__":
    with gf.Session(gf.Cluster.local(workers=1, threads=1)) as s:
        os._exit(int(s.run(gf.constant(7.0))))
"""


def test_a_program_without_standard_streams_has_workers_too(tmp_path: Path) -> None:
    """Its own files and sockets have their numbers."""
    (tmp_path / "daemon.py").write_text(DAEMON)
    closed = f"exec {sys.executable} {tmp_path / 'daemon.py'} <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", closed], timeout=START, check=False).returncode == 7


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_ctrl_c_while_a_nursery_begins_is_none_of_its_business(server: ForkServer) -> None:
    os.kill(server.pid, signal.SIGINT)
    state = Path(f"/proc/{server.pid}/status")

    def has(what: str) -> bool:
        line = next(line for line in state.read_text().splitlines() if line.startswith(what))
        return bool(int(line.split()[1], 16) >> signal.SIGINT - 1 & 1)

    assert becomes_true(lambda: has("SigIgn") and not has("SigBlk"))
    assert not is_gone(server.pid)
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_forks_do_not_draw_the_same_random_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    before = np.random.get_state()
    drawn = []
    for _ in range(2):
        np.random.set_state(before)  # as a fork has it
        _prepare_child([], [])
        drawn.append(np.random.random())
    assert drawn[0] != drawn[1]


@needs_forks
def test_a_fork_has_streams_of_its_own_and_tells_how_it_ended(server: ForkServer) -> None:
    recorder = CrashRecorder()
    until = time.monotonic() + START
    wrong = server.fork(["--listen", "nonsense"], recorder.descriptors, until)
    assert wrong.wait(START) == 1 and wrong.poll() == 1
    assert b"graphflow worker: " in wrong.stderr.read() and wrong.stdout.read() == b""
    parent = ["--parent", str(server.pid)]
    other = server.fork(["--listen", "tcp://127.0.0.1:*", *parent], recorder.descriptors, until)
    assert b"listening on" in other.stdout.readline() and other.pid != wrong.pid
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.01)
    other.kill()
    assert other.wait(START) == -signal.SIGKILL
    other.terminate()  # of what has ended, which is nothing
    for stream in (wrong.stdin, wrong.stdout, wrong.stderr):
        stream.close()
    for stream in (other.stdin, other.stdout, other.stderr):
        stream.close()
    recorder.close()


@needs_forks
def test_a_worker_that_nobody_waits_for_is_seen_off_by_its_nursery(server: ForkServer) -> None:
    recorder = CrashRecorder()
    arguments = ["--listen", "tcp://127.0.0.1:*", "--parent", str(server.pid)]
    worker = server.fork(arguments, recorder.descriptors, time.monotonic() + START)
    assert b"listening on" in worker.stdout.readline()
    for stream in (worker.stdin, worker.stdout, worker.stderr):
        stream.close()
    server.close()
    with pytest.raises(ProcessLookupError):  # not even as one that has ended
        os.kill(worker.pid, 0)
    recorder.close()


@needs_forks
def test_a_worker_whose_start_was_interrupted_ends_with_the_nursery_that_is_closed(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder, started = CrashRecorder(), list[int]()

    class Interrupted(queue.SimpleQueue):  # type: ignore[type-arg]
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            started.append(super().get(block, timeout)[1])
            stop(started[0])  # it cannot look whether anybody wants it
            raise KeyboardInterrupt

    monkeypatch.setattr(server, "_answers", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        server.fork(
            ["--listen", "tcp://127.0.0.1:*"], recorder.descriptors, time.monotonic() + START
        )
    server.close()
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)
    recorder.close()


@needs_forks
def test_a_nursery_outlives_a_request_to_end_and_closes_twice(server: ForkServer) -> None:
    recorder = CrashRecorder()
    server.fork(["--listen", "nonsense"], recorder.descriptors, time.monotonic() + START).wait(5)
    os.kill(server.pid, signal.SIGTERM)
    assert not becomes_true(lambda: is_gone(server.pid), 0.3) and server.is_alive
    server.close()
    server.close()
    assert is_gone(server.pid) and not server.is_alive
    with pytest.raises(RendezvousTimeout, match="could not be started"):
        server.fork([], recorder.descriptors, time.monotonic() + 1.0)
    recorder.close()


@needs_forks
def test_workers_end_with_their_nursery_and_come_again_from_another() -> None:
    workers = LocalWorkers(2, threads=1, deadline=START, host=HOST)
    try:
        before = workers.pids
        server = workers._fork_servers[-1]
        os.kill(server.pid, signal.SIGKILL)
        assert becomes_true(lambda: all(map(is_gone, before)))
        assert becomes_true(lambda: not server.is_alive)
        assert str(workers.wait_exit(0, 5.0)) == "with its fork server, killed by signal 9"
        assert workers.restart_ended([], [], START) == [0, 1]
        assert not set(before) & set(workers.pids) and len(set(workers.addresses)) == 2
    finally:
        workers.stop()
    assert all(map(is_gone, workers.pids))


@needs_forks
def test_workers_whose_nursery_linux_ended_for_want_of_memory_are_lost_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    workers = LocalWorkers(1, threads=1, deadline=START, host=HOST)
    monkeypatch.setattr(MemoryKills, "has_happened", lambda self: True)
    try:
        os.kill(workers._fork_servers[-1].pid, signal.SIGKILL)
        assert str(workers.wait_exit(0, 5.0)) == "out of memory"
    finally:
        workers.stop()


@needs_forks
def test_linux_ends_a_worker_before_its_nursery_and_its_client() -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text())

    workers = LocalWorkers(1, threads=1, deadline=START, host=HOST)
    try:
        server = score(workers._fork_servers[-1].pid)
        assert server == score(os.getpid())
        assert score(workers.pids[0]) == min(1000, server + 100)
    finally:
        workers.stop()


@needs_forks
def test_a_session_is_told_that_its_workers_have_ended_with_their_nursery() -> None:
    cluster = Cluster.local(workers=2, threads=1)
    with RemoteHosts(cluster, deadline=START, host=HOST) as hosts:
        assert hosts._local is not None
        os.kill(hosts._local._fork_servers[-1].pid, signal.SIGKILL)
        assert becomes_true(
            lambda: hosts._loop is not None and len(hosts._loop.loss_reasons()) == 2
        )
        with pytest.raises(WorkerLost) as failure:
            hosts.load("p", {0: (b"", []), 1: (b"", [])})
    known = ("the process that it was started from has ended", "with its fork server")
    assert any(each in failure.value.reason for each in known), failure.value.reason


@needs_forks
def test_a_worker_that_is_renewed_comes_from_the_same_nursery() -> None:
    workers = LocalWorkers(2, threads=1, deadline=START, host=HOST)
    try:
        server, (first, second) = workers._fork_servers[-1].pid, workers.pids
        os.kill(second, signal.SIGKILL)
        ended = workers.wait_exit(1, 5.0)
        assert str(ended) == "killed by signal 9" and workers.wait_exit(0) is None
        assert workers.restart_ended([], [], START) == [1]
        assert workers.pids[0] == first and workers.pids[1] != second
        assert [each.pid for each in workers._fork_servers] == [server]
    finally:
        workers.stop()


def test_a_worker_that_is_killed_while_it_ends_by_request_is_renewed_too() -> None:
    workers = LocalWorkers(1, threads=1, deadline=START, host=HOST)
    try:
        os.kill(workers.pids[0], signal.SIGKILL)
        assert workers.restart_ended([], [0], START) == [0]
    finally:
        workers.stop()


def test_without_forks_workers_are_processes_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "can_fork", lambda: False)
    workers = LocalWorkers(2, threads=1, deadline=START, host=HOST)
    try:
        assert not workers._fork_servers and len(set(workers.addresses)) == 2
    finally:
        workers.stop()
    assert all(map(is_gone, workers.pids))


@needs_forks
@pytest.mark.slow  # three sessions' workers start
@pytest.mark.fault(1)
def test_workers_that_are_killed_while_their_session_opens_are_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started, opened = LocalWorker.wait_ready, RemoteHosts._connect
    struck: list[int] = []

    def strike(pid: int) -> None:
        struck.append(pid)
        os.kill(pid, signal.SIGKILL)

    def wait_ready(self: LocalWorker, until: float) -> None:
        if not struck:
            strike(self.pid)
        started(self, until)

    def connect(self: RemoteHosts, *arguments: Any) -> None:
        if len(struck) == 1:
            strike(self.pids[1])
        opened(self, *arguments)

    monkeypatch.setattr(LocalWorker, "wait_ready", wait_ready)
    monkeypatch.setattr(RemoteHosts, "_connect", connect)
    with RemoteHosts(Cluster.local(2, threads=1), deadline=START, host=HOST) as hosts:
        assert len(struck) == 2 and not set(struck) & set(hosts.pids)


def test_workers_that_something_kills_each_time_are_not_started_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = []

    def launch(*given: Any) -> None:
        tries.append(given)
        raise WorkerLost("killed by signal 9")

    monkeypatch.setattr(membership, "_launch_local", launch)
    with pytest.raises(WorkerLost, match="killed by signal 9"):
        RemoteHosts(Cluster.local(2, threads=1), deadline=START)
    assert len(tries) == 3
