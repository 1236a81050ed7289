"""Servers that join or leave while processes die: the state is that of before, or all has moved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ClusterError, WorkerLost
from graphflow.planning.migration.server_copies import ServerCopies
from tests.faults.running import Worker, cluster_file

SLOW = pytest.mark.slow
ROWS, TURNS, WORKERS = 300, 2, 2


class Clicks:
    """A table and two layers on servers. Rows of a batch are few, so windows are short."""

    def __init__(self, servers: int = 2, **options: Any) -> None:
        with gf.random.seed(4):
            self.ids = gf.placeholder("int64", ("B", 2), name="ids")
            table = gf.variable(gf.init.normal((ROWS, 8), 0.1), name="table")
            first, last = (gf.variable(gf.init.glorot((8, 8)), name=name) for name in "ab")
            hidden = gf.tanh(gf.sum(gf.nn.embedding(self.ids, table), axis=1) @ first) @ last
            loss = gf.mean(gf.square(hidden - 1.0))
            strategy = gf.parallel.ParameterServer(
                servers, "bsp", window=TURNS, workers=WORKERS, tables=["table"], **options
            )
            self.train = gf.optim.Adagrad(0.1).minimize(loss, strategy=strategy)
            self.variables = [v.outputs[0] for v in gf.Graph([self.train]).variables]
        self.windows = 0

    def run(self, s: gf.Session) -> None:
        random = np.random.default_rng(self.windows)
        s.run(self.train, {self.ids: random.integers(0, ROWS, (TURNS * WORKERS * 4, 2))})
        self.windows += 1

    def state(self, s: gf.Session) -> list[bytes]:
        return [s.get(v).tobytes() for v in self.variables]


def compute_expected_state(windows: int) -> list[bytes]:
    """The state after some windows on two servers; the number of servers changes no bit here."""
    model = Clicks()
    with gf.Session(trial=False) as s:
        for _ in range(windows):
            model.run(s)
        return model.state(s)


def local(**options: Any) -> gf.Session:
    return gf.Session(gf.Cluster.local(4, threads=1), trial=False, **options)


def kill(s: gf.Session, worker: int) -> None:
    os.kill(s._life.hosts.pids[worker], signal.SIGKILL)  # type: ignore[attr-defined]


def strike(patch: pytest.MonkeyPatch, s: gf.Session, worker: int, at: int) -> Callable[[], int]:
    """Kill a worker before one of the copies of a change; return what counts the copies."""
    run, count = ServerCopies._run, [0]

    def run_or_kill(copies: ServerCopies, *args: Any) -> None:
        if count[0] == at:
            kill(s, worker)
        count[0] += 1
        run(copies, *args)

    patch.setattr(ServerCopies, "_run", run_or_kill)
    return lambda: count[0]


@pytest.mark.parametrize("at", [3, *(pytest.param(n, marks=SLOW) for n in (0, 1, 2))])
def test_without_copies_the_session_outlives_a_server_that_was_to_join(
    at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Clicks()
    with local() as s:
        model.run(s)
        before, cluster = model.state(s), s.cluster
        strike(monkeypatch, s, 4, at)
        with pytest.raises(ClusterError, match="worker 4, on which a server was to join, was lost"):
            s.add_server()
        assert model.state(s) == before
        assert s.cluster == cluster
        model.run(s)
        assert s.add_server().servers == 3
        model.run(s)
        assert model.state(s) == compute_expected_state(3)


@SLOW
@pytest.mark.parametrize("victim", [0, 4, 2])
@pytest.mark.parametrize(
    "options", [pytest.param({"replicas": 2}, id="mirrors"), pytest.param({}, id="checkpoint")]
)
def test_a_worker_that_dies_while_rows_move_costs_no_bit(
    victim: int, options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The move is done again, unless the worker is the one that was to join."""
    if not options:
        options = {"checkpoint": tmp_path / "saved", "every": 100}
    model = Clicks()
    with local(**options) as s:
        model.run(s)
        count = strike(monkeypatch, s, victim, 2)
        if victim == 4:
            with pytest.raises(ClusterError, match="worker 4"):
                s.add_server()
            model.run(s)
        assert s.add_server().servers == 3
        assert count() > 3
        model.run(s)
        while "replicas" in options and s.mirrors().missing:
            model.run(s)
        kill(s, 1)
        model.run(s)
        assert model.state(s) == compute_expected_state(model.windows)


@SLOW
@pytest.mark.parametrize("victim", [4, 0])
def test_what_has_moved_has_mirrors_at_once(victim: int) -> None:
    model = Clicks()
    with local(replicas=2) as s:
        model.run(s)
        with s.trace() as trace:
            done = s.add_server()
        assert not s.mirrors().missing
        sent = sum(e.bytes * e.count for e in trace.edges if "client" not in e.source + e.target)
        assert 2 * done.nbytes <= sent < 0.85 * done.total  # rows that stay come from mirrors
        kill(s, victim)
        model.run(s)
        assert model.state(s) == compute_expected_state(2)


@SLOW
@pytest.mark.parametrize("at", [0, 2])
def test_a_server_that_dies_while_it_hands_over_costs_no_bit(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Clicks(3)
    with gf.Session(
        gf.Cluster.local(5, threads=1), trial=False, checkpoint=tmp_path / "saved", every=100
    ) as s:
        model.run(s)
        strike(monkeypatch, s, 1, at)
        assert s.remove_server(1).servers == 2
        model.run(s)
        kill(s, 0)
        model.run(s)
        assert model.state(s) == compute_expected_state(3)


@SLOW
def test_without_copies_a_lost_server_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Clicks()
    with local() as s:
        model.run(s)
        strike(monkeypatch, s, 0, 1)
        with pytest.raises(WorkerLost, match="worker 0"):
            s.add_server()
        with pytest.raises(WorkerLost):
            model.run(s)


@SLOW
def test_a_join_while_pushes_are_under_way_waits_for_the_window() -> None:
    """Two threads use the session. Windows are whole, with two servers or with three."""
    model = Clicks()
    with local() as s:
        model.run(s)
        changed: list[Any] = []
        thread = threading.Thread(target=lambda: changed.append(s.add_server()))
        thread.start()
        while thread.is_alive():
            model.run(s)
        thread.join()
        model.run(s)
        assert changed[0].servers == 3
        assert len(s.history()[-1].order) == 3
        assert model.state(s) == compute_expected_state(model.windows)


@SLOW
@pytest.mark.parametrize("worker", [0, 1])
def test_a_server_whose_worker_is_asked_to_end_hands_over(worker: int) -> None:
    """Also in a session without checkpoints and mirrors."""
    model = Clicks()
    with local() as s:
        model.run(s)
        os.kill(s._life.hosts.pids[worker], signal.SIGTERM)  # type: ignore[attr-defined]
        until = time.monotonic() + 20
        while len(s.cluster.devices) == 4 and time.monotonic() < until:
            time.sleep(0.01)
        assert f"/worker:{worker}/cpu:0" not in s.cluster.devices
        model.run(s)
        assert len(s.history()[-1].order) == 1
        assert model.state(s) == compute_expected_state(2)


@SLOW  # processes start
def test_a_worker_elsewhere_joins_by_its_address_and_leaves(
    workers: Callable[..., list[Worker]], tmp_path: Path
) -> None:
    own = workers(5)
    model = Clicks()
    with gf.Session(cluster_file(tmp_path, [w.address for w in own[:4]]), trial=False) as s:
        model.run(s)
        with pytest.raises(ClusterError, match="a worker on which the server is to run is missing"):
            s.add_server()
        with pytest.raises(ClusterError, match="takes part already"):
            s.add_server(own[0].address)
        model.run(s)
        assert s.add_server(own[4].address).servers == 3
        model.run(s)
        assert s.remove_server(0).servers == 2
        model.run(s)
        own[0].process.kill()  # it is no part of the session any more
        model.run(s)
        assert model.state(s) == compute_expected_state(5)
