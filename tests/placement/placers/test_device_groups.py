"""Islands: hosts far from each other, and that more of them never make a plan slower."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf
from graphflow.optim import SGD
from graphflow.placement import Problem
from graphflow.placement.placers.construction.device_groups import islands, on_island


def hosts(sizes: list[int], across: float = 100.0, client: bool = False) -> Problem:
    """Devices in hosts: 1 s within a host, `across` between them; the client near to all."""
    host = np.repeat(np.arange(len(sizes)), sizes)
    latency = np.where(host[:, None] == host, 1.0, across)
    if client:
        latency = np.pad(latency, (0, 1))
    d = len(latency)
    compute = np.ones((3, d))
    if client:
        compute[:, -1] = np.inf
    return Problem(
        compute, [[0, 1], [1, 2]], [0.0, 0.0], latency=latency, client=d - 1 if client else None
    )


@pytest.mark.parametrize("client", [False, True])
def test_hosts_are_islands_and_equal_ones_appear_once(client: bool) -> None:
    assert [i.tolist() for i in islands(hosts([2, 3], client=client))] == [[0, 1], [2, 3, 4]]
    assert [i.tolist() for i in islands(hosts([2, 2, 2], client=client))] == [[0, 1]]


@pytest.mark.parametrize(
    ("sizes", "across"),
    [([4], 100.0), ([2, 2], 1.0), ([2, 2], 2.0), ([1, 1, 1], 100.0), ([2], 9.0)],
)
def test_devices_that_are_alike_far_or_alone_are_no_islands(
    sizes: list[int], across: float
) -> None:
    assert islands(hosts(sizes, across)) == []


def test_on_an_island_only_nodes_that_cannot_be_there_are_elsewhere() -> None:
    problem = hosts([2, 2])
    compute = np.array(problem.compute)
    compute[1, :2] = np.inf
    pinned = Problem(compute, problem.edges, problem.bytes, latency=problem.latency)
    alone = on_island(pinned, np.array([0, 1]))
    assert np.isfinite(alone.compute).tolist() == [
        [True, True, False, False], [False, False, True, True], [True, True, False, False],
    ]  # fmt: skip


@pytest.mark.slow
def test_a_second_host_over_a_slow_network_never_makes_a_plan_slower() -> None:
    x = gf.placeholder("float32", (512, 1024), name="x")
    total = None
    for i in range(8):
        h = x
        for j in range(2):
            h = gf.tanh(h @ gf.variable(gf.init.zeros((1024, 1024)), name=f"w{i}{j}"))
        total = gf.sum(h) if total is None else total + gf.sum(h)
    assert total is not None
    fetches = [total, SGD(0.1).minimize(total)]
    one = gf.plan(fetches, gf.Cluster.hypothetical("4xh100"))
    two = gf.plan(fetches, gf.Cluster.hypothetical("2x4xh100", network="100gbe"))
    assert two.makespan <= one.makespan * (1 + 1e-6)  # less than a nanosecond
