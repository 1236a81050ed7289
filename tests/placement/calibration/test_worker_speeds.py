"""Speeds of workers: what follows from the reports of probes, and what plans make of it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ClusterError
from graphflow.ir.graph import Graph
from graphflow.placement.calibration.worker_speeds import (
    PROBE_SECONDS,
    SETTLE_SECONDS,
    better_report,
    is_alike,
    is_speed_report,
    probe_speed,
    speeds_of,
    with_speeds,
)
from graphflow.placement.clusters.cluster import Cluster
from graphflow.placement.clusters.devices import Device, Worker
from graphflow.placement.plans.building.plan_builder import plan_graph
from tests.placement.speeds import profile

TWO = Cluster.local(workers=2, threads=1)
PROFILES = {worker: profile() for worker in range(2)}


def report(rate: float, seconds: float = 1e-3, threads: int = 1, cores: int = 8) -> dict[str, Any]:
    return {"rate": rate, "seconds": seconds, "threads": threads, "cores": cores}


def remote(*addresses: str) -> Cluster:
    devices = [Device(f"/worker:{i}/cpu:0", "cpu", 1 << 30) for i in range(len(addresses))]
    workers = [Worker(i, a, (devices[i],)) for i, a in enumerate(addresses)]
    return Cluster(tuple(workers), kind="remote", insecure=True)


def test_a_worker_that_waits_for_half_of_the_time_has_half_of_the_speed() -> None:
    assert speeds_of({0: report(980), 1: report(490)}, TWO) == {0: 1.0, 1: 0.5}


def test_differences_within_the_noise_are_none() -> None:
    assert speeds_of({0: report(980), 1: report(850)}, TWO) == {0: 1.0, 1: 1.0}
    assert is_alike(0.5, 0.45) and not is_alike(0.5, 1.0)


def test_a_slower_core_of_the_same_host_is_a_slower_worker() -> None:
    assert speeds_of({0: report(1000, 1e-3), 1: report(500, 2e-3)}, TWO) == {0: 1.0, 1: 0.5}


def test_hosts_differ_by_their_profiles_and_only_waiting_slows_a_worker() -> None:
    cluster = remote("tcp://10.0.0.1:1", "tcp://10.0.0.2:1")
    assert speeds_of({0: report(1000, 1e-3), 1: report(500, 2e-3)}, cluster) == {0: 1.0, 1: 1.0}
    assert speeds_of({0: report(1000, 1e-3), 1: report(125, 2e-3)}, cluster) == {0: 1.0, 1: 0.25}


def test_workers_that_take_turns_at_the_cores_count_as_equal() -> None:
    reports = {0: report(900, cores=2, threads=2), 1: report(450, cores=2, threads=2)}
    assert speeds_of(reports, TWO) == {0: 1.0, 1: 1.0}


def test_the_better_of_two_reports_counts() -> None:
    assert better_report(report(500, 1e-3), report(900, 2e-3)) == report(900, 1e-3)


def test_a_probe_takes_its_time_and_reports_sane_numbers() -> None:
    found = probe_speed(2)
    assert is_speed_report(found) and found["threads"] == 2
    assert found["rate"] * found["seconds"] < 1.5  # processor seconds in a second of wall time
    assert 0.1 <= SETTLE_SECONDS + PROBE_SECONDS <= 0.3


@pytest.mark.parametrize(
    "told", [None, {}, report(0), report(float("nan")), report(1, seconds=float("inf"))]
)
def test_malformed_reports_are_recognised(told: Any) -> None:
    assert not is_speed_report(told)


def test_numbers_of_a_cluster_file_precede_a_probe() -> None:
    given = Device("/worker:1/cpu:0", "cpu", 1 << 30, 1, flops=1e11, bandwidth=1e10, launch=1e-6)
    cluster = Cluster((TWO.workers[0], Worker(1, None, (given,))), kind="local")
    slow = with_speeds(cluster, {0: 0.5, 1: 0.5})
    assert [slow.device(name).speed for name in slow.devices] == [0.5, 1.0]
    assert with_speeds(slow, {0: 1.0, 1: 1.0}) == cluster


@pytest.mark.parametrize("speed", [0.0, -1.0, float("nan"), "half"])
def test_a_speed_is_a_positive_number(speed: Any) -> None:
    with pytest.raises(ClusterError, match="speed"):
        Device("/worker:0/cpu:0", "cpu", 1 << 30, speed=speed)


def products() -> Graph:
    """Eight equal products that do not depend on each other."""
    made = []
    for i in range(8):
        a = gf.variable(np.ones((512, 512), "float32"), name=f"a{i}")
        made.append(gf.sum(a @ a))
    return Graph(made)


def test_a_worker_of_a_quarter_of_the_speed_gets_a_quarter_of_the_work() -> None:
    slow = with_speeds(TWO, {1: 0.25})
    links = {("/worker:0", "/worker:1"): (1e-6, 1e12), ("/worker:1", "/worker:0"): (1e-6, 1e12)}
    graph = products()
    plan, equal = (
        plan_graph(graph, each, {}, {}, profiles=PROFILES, links=links) for each in (slow, TWO)
    )
    count = [
        sum(n.op == "matmul" and n.device == "/worker:1/cpu:0" for n in p.nodes)
        for p in (plan, equal)
    ]
    assert count[0] in (1, 2) and count[1] == 4
    name = "one device: /worker:{}/cpu:0".format
    assert plan.baselines[name(1)] > 3.5 * plan.baselines[name(0)]
    assert plan.makespan <= plan.baselines[name(0)]
    times = next(node.candidates for node in plan.nodes if node.op == "matmul")
    assert times["/worker:1/cpu:0"] == pytest.approx(4 * times["/worker:0/cpu:0"])


def test_a_plan_says_which_worker_is_slow() -> None:
    plan = plan_graph(products(), with_speeds(TWO, {1: 0.51}), {}, {}, profiles=PROFILES)
    note = "at 0.51 of its machine's speed"
    assert f"/worker:1/cpu:0 runs {note}" in str(plan.report())
    assert str(plan.report()).count(note) == 1
    assert note in str(plan) and note in repr(plan.cluster)
    read = Cluster.from_dict(json.loads(json.dumps(plan.cluster.to_dict())))
    assert read.device("/worker:1/cpu:0").speed == 0.51
    assert "machine's speed" not in str(
        plan_graph(products(), TWO, {}, {}, profiles=PROFILES).report()
    )
