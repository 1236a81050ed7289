"""Trials on the workers of a session: what they teach, and that they leave no trace."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import WorkerLost
from graphflow.execution.compiled_fetches import CompiledFetches
from graphflow.ir.graph import Graph
from graphflow.passes import optimize
from graphflow.placement.calibration.trace_corrections import TraceCorrections
from graphflow.placement.calibration.worker_speeds import with_speeds
from graphflow.placement.clusters.cluster import Cluster
from graphflow.planning import planner
from graphflow.planning.trials import worker_trial
from graphflow.planning.trials.probe_steps import StepProbe
from graphflow.planning.trials.profiling_run import synthetic_feeds
from graphflow.planning.trials.worker_trial import WorkerTrial
from graphflow.runtime.client.cluster_survey import ClusterSurvey
from tests.faults.running import Worker, cluster_file
from tests.placement.speeds import profile

TWO = Cluster.local(workers=2, threads=1)
INSECURE = "insecure = true"

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is: no worker counts as slow, and no trial as long."""
    monkeypatch.setattr(planner, "speeds_of_workers", lambda *a: {})
    monkeypatch.setattr(worker_trial, "cores", lambda: 2)
    for limit in ("TRIAL_SECONDS", "STEP_SECONDS", "SENDING_SECONDS"):
        monkeypatch.setattr(worker_trial, limit, 60.0)


def build_training() -> tuple[list[Any], gf.Tensor]:
    x = gf.placeholder("float32", (None, 64), name="x")
    w = gf.variable(np.ones((64, 64), "float32") / 64, name="w")
    loss = gf.mean(gf.square(gf.nn.dropout(gf.nn.relu(x @ w), 0.5) - 1.0))
    return [loss, gf.optim.SGD(0.1, momentum=0.9).minimize(loss)], x


def compile_fetches(fetches: list[Any]) -> CompiledFetches:
    graph = Graph(fetches)
    return CompiledFetches(tuple(fetches), graph, optimize(graph))


def test_a_session_learns_of_idle_and_of_busy_workers_and_tries_a_graph_once() -> None:
    fetches, x = build_training()
    data = np.random.default_rng(0).random((32, 64), "float32")
    with gf.Session(TWO) as session:
        session.run(fetches, {x: data})
        learned = session._planner.learned
        assert {bucket.busy for bucket in learned._nodes} == {False, True}
        assert {units for _, units, _ in learned._steps} == {1, 2}
        known = len(learned), learned.version
        session._planner.profile_first_steps(
            session._steps.last, session._steps.last.bindings({x.node: (32, 64)})
        )
        assert (len(learned), learned.version) == known


def test_variables_steps_and_random_numbers_are_those_of_a_session_without_a_trial() -> None:
    fetches, x = build_training()
    data = np.random.default_rng(0).random((32, 64), "float32")
    seen = []
    for trial in (True, False):
        with gf.Session(TWO, trial=trial) as session:
            losses = [session.run(fetches, {x: data})[0] for _ in range(3)]
            seen.append((session._steps.committed, [loss.tobytes() for loss in losses]))
    assert seen[0] == seen[1]


def test_the_workers_keep_no_variable_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten: list[str] = []
    load = StepProbe.load_program

    def record_variables(self: StepProbe, made: CompiledFetches, variables: Any = None) -> Any:
        forgotten.extend(name for names in (variables or {}).values() for name in names)
        return load(self, made, variables)

    monkeypatch.setattr(StepProbe, "load_program", record_variables)
    fetches, x = build_training()
    with gf.Session(TWO) as session:
        session.run(fetches, {x: np.ones((8, 64), "float32")})
        assert {name for name in forgotten if name.endswith("/w")} == {"trial 0/w", "trial 1/w"}
        for name in forgotten:
            with pytest.raises(Exception, match="trial"):
                session._deployment.hosts.read(int(name[6]), name)


class Recorded:
    """A trial whose steps are not run, but noted."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        self.devices: list[tuple[str, ...]] = []
        self.error: Exception | None = None
        self.learned = TraceCorrections("a")

        def note(
            trial: WorkerTrial, made: Any, bindings: Any, arrays: Any, units: tuple[str, ...],
            known: Any,
        ) -> None:  # fmt: skip
            self.devices.append(tuple(units))
            if self.error is not None:
                raise self.error

        monkeypatch.setattr(WorkerTrial, "_profile_copies", note)
        nothing: Any = None
        survey = ClusterSurvey({worker.index: profile() for worker in cluster.workers})
        self.trial = WorkerTrial(self.learned, cluster, survey, nothing, nothing)

    def run(self) -> int:
        x = gf.placeholder("float32", (32, 64))
        w = gf.variable(np.eye(64, 8, dtype="float32"))
        return self.trial.profile(compile_fetches([gf.tanh(x) @ w]), {})


@pytest.fixture
def record_trial(monkeypatch: pytest.MonkeyPatch) -> Callable[[Cluster], Recorded]:
    return lambda cluster: Recorded(cluster, monkeypatch)


def test_one_worker_is_tried_and_then_all_if_each_has_a_core(
    record_trial: Callable[[Cluster], Recorded],
) -> None:
    two = record_trial(TWO)
    assert two.run() == 2 and two.devices == [TWO.devices[:1], TWO.devices]
    assert two.run() == 0
    three = record_trial(Cluster.local(workers=3, threads=1))
    assert three.run() == 1 and [len(devices) for devices in three.devices] == [1]


def test_workers_that_are_slow_at_the_moment_take_no_part(
    record_trial: Callable[[Cluster], Recorded],
) -> None:
    slow = record_trial(with_speeds(TWO, {0: 0.5, 1: 1.0}))
    assert slow.run() == 1 and slow.devices == [TWO.devices[1:]]
    assert record_trial(with_speeds(TWO, {0: 0.5, 1: 0.5})).run() == 0


def test_workers_of_other_machines_are_tried_one_of_each_and_then_all(
    record_trial: Callable[[Cluster], Recorded], tmp_path: Path
) -> None:
    addresses = ["tcp://10.0.0.1:7001", "tcp://10.0.0.1:7002", "tcp://10.0.0.2:7001"]
    machines = Cluster.load(cluster_file(tmp_path, addresses, INSECURE, measured=True))
    a, b, c = machines.devices
    made = record_trial(machines)
    assert made.run() == 3 and made.devices == [(a,), (c,), (a, b, c)]


def test_a_graph_that_reaches_other_machines_late_is_not_tried(
    record_trial: Callable[[Cluster], Recorded],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(worker_trial, "SENDING_SECONDS", 1e-5)
    with caplog.at_level(logging.DEBUG, "graphflow.trial"):
        file = cluster_file(tmp_path, ["tcp://10.0.0.1:7001"], INSECURE, measured=True)
        assert record_trial(Cluster.load(file)).run() == 0
        assert "sending the graph takes" in caplog.text
        assert record_trial(TWO).run() == 2  # shared memory


def test_devices_whose_speed_a_file_gives_are_not_tried(
    record_trial: Callable[[Cluster], Recorded], tmp_path: Path
) -> None:
    file = cluster_file(tmp_path, ["tcp://10.0.0.1:7001"], INSECURE)
    assert record_trial(Cluster.load(file)).run() == 0


def test_a_session_tries_a_graph_on_workers_at_addresses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    workers = [Worker(), Worker()]
    try:
        file = cluster_file(tmp_path, [w.ready().address for w in workers], measured=True)
        fetches, x = build_training()
        seen = []
        with caplog.at_level(logging.DEBUG, "graphflow.trial"):
            for _ in range(3):  # other load of the machine may end a trial
                with gf.Session(str(file)) as session:
                    session.run(fetches, {x: np.ones((32, 64), "float32")})
                    learned = session._planner.learned
                    busy = {bucket.busy for bucket in learned._nodes}
                    seen.append((busy, {units for _, units, _ in learned._steps}))
                if seen[-1] == ({False, True}, {1, 2}):
                    break
        assert seen[-1] == ({False, True}, {1, 2}), (seen, caplog.text)
    finally:
        for worker in workers:
            worker.end()


def test_an_error_is_left_to_the_first_step_unless_a_worker_is_lost(
    record_trial: Callable[[Cluster], Recorded], caplog: pytest.LogCaptureFixture
) -> None:
    made = record_trial(TWO)
    made.error = ValueError("no such row")
    with caplog.at_level(logging.DEBUG, "graphflow.trial"):
        assert made.run() == 0
    assert "no such row" in caplog.text and len(made.devices) == 1
    made.error = WorkerLost("worker 0 was lost")
    with pytest.raises(WorkerLost):
        made.run()


@pytest.mark.parametrize("limit", ["STEP_SECONDS", "MAX_KINDS"])
def test_long_steps_and_many_kinds_of_nodes_are_not_tried(
    limit: str,
    record_trial: Callable[[Cluster], Recorded],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(worker_trial, limit, 0)
    with caplog.at_level(logging.DEBUG, "graphflow.trial"):
        assert record_trial(TWO).run() == 0
    assert "kinds of nodes is predicted to take" in caplog.text


def test_a_trial_that_took_long_on_one_worker_is_not_repeated(
    record_trial: Callable[[Cluster], Recorded], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_trial, "TRIAL_SECONDS", 0.0)
    made = record_trial(TWO)
    assert made.run() == 1 and len(made.devices) == 1


@pytest.mark.parametrize("rows", [1, 7, 300])
def test_made_up_indices_are_within_bounds_and_differ(rows: int) -> None:
    ids = gf.placeholder("int64", (64, 3), name="ids")
    labels = gf.placeholder("uint8", (64,), name="labels")
    table = gf.variable(np.ones((rows, 4), "float32"), name="table")
    h = gf.reshape(gf.take(table, gf.reshape(ids, (192,)), axis=0), (64, 12))
    loss = gf.mean(gf.nn.cross_entropy(h, labels))
    made = compile_fetches([loss, gf.optim.Adagrad(0.1).minimize(loss)])
    feeds = {n.name: a for n, a in synthetic_feeds(made.graph, {}).items()}
    assert feeds["ids"].min() >= 0 and feeds["ids"].max() < rows
    assert len(np.unique(feeds["ids"])) > (0 if rows == 1 else rows // 4)
    assert feeds["labels"].max() < 12 and len(np.unique(feeds["labels"])) > 4
    with gf.Session(Cluster.here(threads=1)) as session:
        session.run([loss], {ids: feeds["ids"], labels: feeds["labels"]})


def test_an_unknown_use_of_ints_is_fed_zeros() -> None:
    ids = gf.placeholder("int64", (5,), name="ids")
    made = compile_fetches([gf.take(gf.constant(np.ones(9, "float32")), ids + 4, axis=0)])
    (array,) = synthetic_feeds(made.graph, {}).values()
    assert not array.any()
