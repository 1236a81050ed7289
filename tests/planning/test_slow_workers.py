"""Sessions over two workers of which one is held back: it gets less work, and plans say so."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.placement.calibration import calibrate
from graphflow.placement.calibration.profile_file import machine_key
from graphflow.planning.planner import Planner
from graphflow.runtime.client import cluster_survey
from graphflow.runtime.client.remote_hosts import RemoteHosts
from tests.faults.running import Worker, cluster_file
from tests.placement.speeds import profile

TWO = gf.Cluster.local(workers=2, threads=1)
FAST, SLOW = TWO.devices
PERIOD = 0.03  # seconds


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up machine with quick links; nothing is kept where users keep it."""
    made = profile({"process": [1e-9, 1e12]}) | {"steps": {"process": [1e-9, 2e-9]}}
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    for module in (calibrate, cluster_survey):
        monkeypatch.setattr(module, "profile", lambda *a, **k: made)


@contextmanager
def held_back(pid: int, share: float) -> Iterator[None]:
    """Let a process run for a share of each period only."""
    over = threading.Event()

    def signal_in_turns() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(PERIOD * (1 - share))
            os.kill(pid, signal.SIGCONT)
            time.sleep(PERIOD * share)

    thread = threading.Thread(target=signal_in_turns)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def products(size: int = 768) -> tuple[list[gf.Tensor], Callable[[gf.Session], int]]:
    """Eight equal products, and a function that counts those of the slow worker in a session."""
    sums = []
    for i in range(8):
        a = gf.variable(np.full((size, size), 1e-3, "float32"), name=f"a{i}")
        sums.append(gf.sum(a @ a))

    def count(s: gf.Session) -> int:
        return sum(node.op == "matmul" and node.device == SLOW for node in s.plan(sums).nodes)

    return sums, count


def told_speed(s: gf.Session) -> float:
    """The speed of the slow worker in the session's report."""
    found = re.search(rf"{SLOW} runs at (0\.\d+) of its machine's speed", str(s.plan().report()))
    return 1.0 if found is None else float(found[1])


def set_speeds(monkeypatch: pytest.MonkeyPatch, *rates: float) -> None:
    """Let all later probes find these speeds."""
    reports = {
        w: {"rate": rate, "seconds": 1.0, "threads": 1, "cores": 8} for w, rate in enumerate(rates)
    }
    monkeypatch.setattr(RemoteHosts, "probe_speeds", lambda hosts: reports)


def check_slow_worker_gets_least(s: gf.Session, pid: int) -> None:
    """Check plans of a session whose second worker, a process, has a tenth of its speed.

    If other processes keep the machine busy, the first worker waits, too. Then the difference is
    smaller, and it may take some attempts to find it.
    """
    sums, count = products()
    with held_back(pid, 0.1):
        s.run(sums)
        for _ in range(10):
            if told_speed(s) < 0.6:
                break
            s.replan()
        speed = told_speed(s)
        assert speed < 0.6
        assert count(s) <= 1 + 8 * speed / (1 + speed)


def test_a_local_worker_that_is_held_back_gets_the_least_of_the_work() -> None:
    with gf.Session(TWO, trial=False) as s:
        hosts: Any = s._life.hosts
        check_slow_worker_gets_least(s, hosts.pids[1])


@pytest.mark.slow  # both workers measure themselves
def test_a_worker_at_an_address_that_is_held_back_gets_the_least_of_the_work(
    tmp_path: Path,
) -> None:
    workers = [Worker(), Worker()]
    try:
        file = cluster_file(tmp_path, [w.ready().address for w in workers], measured=True)
        with gf.Session(str(file), trial=False) as s:
            check_slow_worker_gets_least(s, workers[1].pid)
    finally:
        for worker in workers:
            worker.end()


def test_a_replan_finds_a_worker_that_is_slow_now_and_one_that_has_recovered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sums, count = products(256)
    set_speeds(monkeypatch, 1.0, 1.0)
    with gf.Session(TWO, trial=False) as s:
        before = s.run(sums)
        assert count(s) == 4 and "machine's speed" not in str(s.plan().report())
        set_speeds(monkeypatch, 1.0, 0.25)
        s.replan()
        assert count(s) in (1, 2) and told_speed(s) == 0.25
        set_speeds(monkeypatch, 1.0, 1.0)
        s.replan()
        assert count(s) == 4
        assert s.run(sums) == before


def test_workers_are_probed_once_for_each_cluster_and_not_for_one_worker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probes: list[RemoteHosts] = []
    real = RemoteHosts.probe_speeds

    def probe(hosts: RemoteHosts) -> dict[int, dict[str, Any]]:
        probes.append(hosts)
        return {w: {**each, "rate": 1.0, "seconds": 1.0} for w, each in real(hosts).items()}

    monkeypatch.setattr(RemoteHosts, "probe_speeds", probe)
    sums, _ = products(64)
    with gf.Session(TWO, trial=False) as s:
        s.run(sums)
        s.run(sums[:2])
        assert len(probes) == 1
    for cluster in (gf.Cluster.local(workers=1), gf.Cluster.here(devices=("cpu:0", "cpu:1"))):
        with gf.Session(cluster, trial=False) as s:
            s.run(sums)
            s.plan(sums)
    assert len(probes) == 1


def test_the_machines_profile_keeps_nothing_that_a_slow_worker_delayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bare = profile() | {"key": machine_key()}
    del bare["links"]["process"]
    saved: list[Any] = []
    for module in (calibrate, cluster_survey):
        monkeypatch.setattr(module, "profile", lambda *a, **k: bare)
    for name in ("save_links", "save_step_cost"):
        for module in (calibrate, cluster_survey):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, lambda *a, **k: saved.append(a))
    set_speeds(monkeypatch, 1.0, 0.25)
    sums, _ = products(64)
    with gf.Session(TWO, trial=False) as s:
        s.run(sums)
        survey = s._planner._survey
        assert survey is not None and survey.links and survey.steps
    assert not saved


def test_steps_of_a_slow_worker_teach_nothing_about_other_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_speeds(monkeypatch, 1.0, 0.25)
    with gf.device("/worker:1"):
        a = gf.variable(np.full((256, 256), 1e-3, "float32"), name="a")
        there = gf.sum(a @ a)
    with gf.Session(TWO, trial=False) as s:
        s.run(there)
        with s.trace():
            for _ in range(4):
                s.run(there)
        assert not s._planner.learned._nodes


@pytest.mark.slow
def test_a_worker_that_is_slow_to_feed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Planner._feed_seconds
    rates = {0: 1e12, 1: 1e12}  # bytes/s; what feeds really take is a part of what is told
    fed: list[float] = []

    def feed_seconds(planner: Planner, worker: int, nbytes: int, repeats: int) -> float:
        fed.append(real(planner, worker, nbytes, 1))
        return nbytes / rates[worker]

    monkeypatch.setattr(Planner, "_feed_seconds", feed_seconds)
    set_speeds(monkeypatch, 1.0, 1.0)
    x = gf.placeholder("float32", (256, 1024), name="x")
    sums = [gf.sum(x @ gf.variable(np.ones((1024, 512), "float32"))) for _ in range(4)]
    feeds = {x: np.ones((256, 1024), "float32")}
    workers = [Worker(), Worker()]
    try:
        file = cluster_file(tmp_path, [w.ready().address for w in workers], measured=True)
        with gf.Session(str(file), trial=False) as s:
            before = s.run(sums, feeds)
            assert {n.device for n in s.plan(sums).nodes if n.op == "matmul"} == {FAST, SLOW}
            rates[1] = 1e6
            s.replan()
            assert {n.device for n in s.plan(sums).nodes if n.op == "matmul"} == {FAST}
            assert s.run(sums, feeds) == before
            assert s.step == 2
    finally:
        for worker in workers:
            worker.end()
    assert all(0 < seconds < 1 for seconds in fed)
