"""What a worker tells of itself and of others is looked at before it is reckoned with."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import graphflow as gf
from graphflow.errors import ProtocolError
from graphflow.runtime.client.cluster_survey import (
    measure_remote_links,
    measure_speeds,
    measure_undescribed,
)
from graphflow.runtime.client.handshake import LEASE, Rendezvous
from graphflow.runtime.protocol.coordinator_events import Replies
from graphflow.runtime.protocol.worker import MAX_LEASE
from graphflow.runtime.wire.messages import Hello, Meet, Met, Open, Ready, Welcome
from tests.faults.running import cluster_file


@pytest.fixture
def cluster(tmp_path: Path) -> gf.Cluster:
    file = tmp_path / "cluster.toml"
    file.write_text('[[workers]]\naddress = "tcp://127.0.0.1:7001"\ndevices = ["cpu:0"]\n')
    return gf.Cluster.load(file)


@pytest.mark.parametrize("told", [None, 5, [], {}, {"cpu:0": None}, {"format": 1, "devices": {}}])
def test_speeds_that_are_none_are_refused_by_the_workers_name(
    told: Any, cluster: gf.Cluster
) -> None:
    class Hosts:
        def measure(self) -> dict[int, Any]:
            return {0: told}

    hosts: Any = Hosts()
    with pytest.raises(ProtocolError, match=r"worker 0 at tcp:.* reports invalid speeds"):
        measure_undescribed(hosts, cluster, lambda *a: 0.0)


def test_links_from_the_client_are_measured_unless_the_file_describes_all_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_CACHE", str(tmp_path))
    addresses = ["tcp://127.0.0.1:7001", "tcp://127.0.0.1:7002"]
    hosts: Any = SimpleNamespace(probe_link=lambda a, b, nbytes, repeats: 1e-3 + nbytes / 1e8)

    def feed_seconds(worker: int, nbytes: int, repeats: int) -> float:
        return 1e-4 + nbytes / (1e9, 1e7)[worker]

    cluster = gf.Cluster.load(cluster_file(tmp_path, addresses, measured=True))
    found = measure_remote_links(hosts, cluster, feed_seconds)
    assert found["/worker:0", "/worker:1"] == pytest.approx((1e-3, 1e8), rel=1e-3)
    assert found["/client", "/worker:0"] == pytest.approx((1e-4, 1e9), rel=1e-3)
    assert found["/worker:1", "/client"] == pytest.approx((1e-4, 1e7), rel=1e-3)
    described = gf.Cluster.load(cluster_file(tmp_path, addresses))
    assert measure_remote_links(hosts, described, lambda *a: pytest.fail("measured")) == {}


class ProbedHosts:
    """Hosts whose probes find what a test says, one report a worker for each round."""

    def __init__(self, *rounds: list[float]) -> None:
        self.rounds = list(rounds)

    def probe_speeds(self) -> dict[int, Any]:
        rates = self.rounds.pop(0)
        return {
            w: {"rate": rate, "seconds": 1.0, "threads": 1, "cores": 8}
            for w, rate in enumerate(rates)
        }


def test_equal_workers_are_probed_once() -> None:
    hosts: Any = ProbedHosts([0.9, 0.95])
    assert measure_speeds(hosts, gf.Cluster.local(2, threads=1)) == {0: 1.0, 1: 1.0}
    assert not hosts.rounds


def test_a_worker_is_slow_if_it_is_slow_in_each_of_three_probes() -> None:
    two = gf.Cluster.local(2, threads=1)
    hosts: Any = ProbedHosts([1.0, 0.4], [1.0, 0.5], [1.0, 0.45])
    assert measure_speeds(hosts, two) == {0: 1.0, 1: 0.5}
    hosts = ProbedHosts([1.0, 0.4], [0.5, 1.0])
    assert measure_speeds(hosts, two) == {0: 1.0, 1: 1.0}


def test_a_malformed_report_of_a_probe_names_its_worker(cluster: gf.Cluster) -> None:
    hosts: Any = ProbedHosts([float("nan")])
    with pytest.raises(ProtocolError, match=r"worker 0 at tcp:.* reports invalid speeds"):
        measure_speeds(hosts, cluster)


@pytest.mark.parametrize("missing", [[-1], [1], [10**9, 0]])
def test_a_worker_misses_none_but_the_sessions(missing: list[int], cluster: gf.Cluster) -> None:
    answers = iter([Welcome(1, "", 0, "", ["cpu:0"]), Ready(2), Met(3, missing)])

    def ask(request: int, orders: Any, seconds: float) -> Replies:
        return Replies({0: next(answers)})

    loop: Any = SimpleNamespace(duplicate_workers=list)
    meeting = Rendezvous("s", ["tcp://127.0.0.1:7001"], [""], loop, itertools.count(1), ask)
    with pytest.raises(ProtocolError, match="does not reach workers that the session"):
        meeting.run(cluster, 1e12, 1.0, [], False)


@pytest.mark.parametrize("local", [True, False])
def test_own_workers_wait_for_a_session_that_stands_still_and_others_for_their_lease(
    local: bool, cluster: gf.Cluster
) -> None:
    found = []

    def ask(request: int, orders: Any, seconds: float) -> Replies:
        message = orders[0].message
        if isinstance(message, Open):
            found.append(message.lease)
        answers = {Hello: Welcome(1, "", 0, "", ["cpu:0"]), Open: Ready(2), Meet: Met(3, [])}
        return Replies({0: answers[type(message)]})

    loop: Any = SimpleNamespace(duplicate_workers=list)
    meeting = Rendezvous("s", ["tcp://127.0.0.1:7001"], [""], loop, itertools.count(1), ask)
    where = gf.Cluster.local(workers=1) if local else cluster
    meeting.run(where, 1e12, 1.0, [], False)
    assert found == [MAX_LEASE if local else LEASE]


def test_a_fetch_that_no_worker_has_told_is_named() -> None:
    fetched = gf.constant(1.0) + gf.variable(2.0, name="v")
    with gf.Session() as s:
        s.run(fetched)
        compiled = s._deployment.find([fetched])
        assert compiled is not None
        with pytest.raises(ProtocolError, match=r"'add' at .*test_cluster_survey\.py:\d+"):
            compiled.values({}, {})
