"""Collectives in sessions: one device, several in a process, workers on this host by shared memory
and by tcp alone; the same bits, and ends of steps that fail."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import CheckError, LinkLost, StepTimeout, WorkerLost
from graphflow.ir.op import Node
from graphflow.ops.communication.collectives import groups_of
from graphflow.runtime.client import remote_hosts as coordinator
from graphflow.runtime.host.session_state import MAX_AGREED_FORMS
from graphflow.runtime.partitioning.partition import Partition, partition
from tests.faults.running import stop
from tests.runtime.workers import segments_of

Array = np.ndarray[Any, Any]
SIZES = ((), (0, 3), (5, 3), (700, 901))
APART = Path(__file__).with_name("apart_host.py")


def build_all_collectives(
    devices: Sequence[str], size: tuple[int, ...], algorithm: str, op: str
) -> Any:
    """Fetches that go through all collectives, one after the other, and their feeds."""
    xs = []
    for i, name in enumerate(devices):
        with gf.device(name):
            xs.append(gf.placeholder("float32", size, name=f"x{i}") * 2 + i)
    hosts = [0, 0, 1] if algorithm == "two_level" else None
    ys = [y + 1 for y in gf.parallel.all_reduce(xs, op, algorithm, hosts)]
    fetches = [*ys]
    if len(size) == 2:
        parts = gf.parallel.reduce_scatter([y * y for y in ys], 1)
        whole = gf.parallel.all_gather(parts, 1)
        turned = gf.parallel.all_to_all(whole, 0, 1)
        spread = gf.parallel.broadcast(turned[0] * 3, len(devices), like=turned)
        fetches += [*parts, *whole, *turned, *spread]
    graph = gf.Graph(fetches)
    rng = np.random.default_rng(len(devices))
    feeds = {n.outputs[0]: rng.normal(size=size).astype("f4") for n in graph.placeholders}
    return fetches, feeds


def bits(values: Sequence[Array]) -> list[Any]:
    return [(v.shape, v.dtype, v.tobytes()) for v in values]


def agrees(cluster: gf.Cluster, devices: Sequence[str], *algorithms: str) -> None:
    """Assert that all collectives have the bits of one device there, step after step."""
    with gf.Session(cluster) as session, gf.Session(gf.Cluster.here()) as one:
        for algorithm in algorithms:
            for size in SIZES:
                fetches, feeds = build_all_collectives(devices, size, algorithm, "mean")
                alone = build_all_collectives(["cpu:0"] * len(devices), size, algorithm, "mean")
                expected = bits(one.run(*alone))
                for _ in range(3):
                    assert bits(session.run(fetches, feeds)) == expected


CLUSTERS: dict[str, Callable[[], tuple[gf.Cluster, list[str]]]] = {
    "three devices of this process": lambda: (
        gf.Cluster.here(["cpu:0", "cpu:1", "cpu:2"]), ["cpu:0", "cpu:1", "cpu:2"]),
    "three workers": lambda: (
        gf.Cluster.local(3), ["/worker:0", "/worker:1", "/worker:2"]),
    "two workers, one of two devices": lambda: (
        gf.Cluster.local(2, ["cpu:0", "cpu:1"]),
        ["/worker:0/cpu:0", "/worker:0/cpu:1", "/worker:1/cpu:0"]),
    "two ranks on one device": lambda: (
        gf.Cluster.local(2), ["/worker:0", "/worker:1", "/worker:0"]),
}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize("which", CLUSTERS)
def test_any_cluster_gives_the_bits_of_one_device(which: str) -> None:
    cluster, devices = CLUSTERS[which]()
    agrees(cluster, devices, "ring")


@pytest.mark.every(2)
@pytest.mark.parametrize("which", ["no worker", pytest.param("one worker", marks=pytest.mark.slow)])
def test_workers_that_share_no_memory_give_the_same_bits(
    which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if which == "no worker":
        monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", "off")
    else:

        class Apart(coordinator.RemoteHosts):
            def __init__(self, *args: Any, **more: Any) -> None:
                super().__init__(*args, host=f"{APART}:Host", **more)

        monkeypatch.setattr(coordinator, "RemoteHosts", Apart)
    local = gf.Cluster.local(3)
    agrees(local, ["/worker:0", "/worker:1", "/worker:2"], "ring", "halving", "two_level")
    agrees(local, ["/worker:0", "/worker:2", "/worker:0"], "tree", "auto")


# The ends of steps ----------------------------------------------------------------------------


def build_all_reduces(size: int, guard: bool) -> tuple[list[gf.Tensor], gf.Tensor]:
    """All-reduces of what two workers are fed; worker 1's fails where it is negative."""
    x = gf.placeholder("float32", (size,), name="x")
    xs = []
    for worker in (0, 1):
        with gf.device(f"/worker:{worker}"):
            mine = x + worker
            xs.append(gf.debug.check(mine, mine > 0, "not positive") if worker and guard else mine)
    return gf.parallel.all_reduce(xs), x


@pytest.mark.parametrize("size", [10, 1 << 20])
def test_a_step_that_fails_on_one_worker_leaves_the_next_one_right(size: int) -> None:
    ys, x = build_all_reduces(size, guard=True)
    good, bad = np.ones(size, "f4"), -np.full(size, 5, "f4")
    with gf.Session(gf.Cluster.local(2)) as session:
        for value in range(1, 4):
            for _ in range(2):
                found = session.run(ys, {x: good * value})
                assert all((y == 2 * value + 1).all() for y in found)
            started = time.monotonic()
            with pytest.raises(CheckError):
                session.run(ys, {x: bad})
            assert time.monotonic() - started < 10


@pytest.mark.every(3)
@pytest.mark.parametrize("size", [10, 1 << 20])
@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
def test_a_step_that_fails_where_others_took_no_part_leaves_their_exchanges_right(
    size: int, ahead: bool
) -> None:
    """Workers agree on a way once, and forget it together, or they would wait for each other."""
    ys, x = build_all_reduces(size, guard=False)
    with gf.device("/worker:1"):
        alone = gf.debug.check(gf.constant(1.0), gf.constant(False), "as it was told to")
    feeds = [{x: np.full(size, value, "f4")} for value in range(6)]
    with gf.Session(gf.Cluster.local(2), deadline=20.0, trial=False) as s:
        for _ in range(2):
            if ahead:
                found = [y for y, _ in zip(s.run(ys, feeds, steps=6), range(4), strict=False)]
            else:
                found = [s.run(ys, each) for each in feeds]
            assert all((y == 2 * v + 1).all() for v, both in enumerate(found) for y in both)
            with pytest.raises(CheckError):
                s.run(alone)


@pytest.mark.parametrize("size", [10, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_a_worker_that_stops_in_an_exchange_is_named_within_the_deadline(size: int) -> None:
    ys, x = build_all_reduces(size, guard=False)
    feeds = {x: np.ones(size, "f4")}
    with gf.Session(gf.Cluster.local(2), deadline=5.0) as session:
        session.run(ys, feeds)
        victim = session._life.hosts.pids[-1]
        stop(victim)
        started = time.monotonic()
        try:
            with pytest.raises((StepTimeout, WorkerLost), match="1") as failure:
                session.run(ys, feeds)
            assert isinstance(failure.value, StepTimeout | WorkerLost)
            assert failure.value.worker in (1, None)  # None: the machine was too busy to be told
            assert time.monotonic() - started < 12
        finally:
            os.kill(victim, signal.SIGCONT)


def test_a_worker_that_is_killed_in_an_exchange_is_lost() -> None:
    ys, x = build_all_reduces(1 << 20, guard=False)
    feeds = {x: np.ones(1 << 20, "f4")}
    with gf.Session(gf.Cluster.local(2)) as session:
        session.run(ys, feeds)
        victim = session._life.hosts.pids[-1]
        threading.Timer(0.2, os.kill, (victim, signal.SIGKILL)).start()
        with pytest.raises(WorkerLost, match="worker 1"):
            for _ in range(100_000):
                session.run(ys, feeds)


def test_programs_of_many_sizes_keep_and_forget_their_exchanges_alike() -> None:
    x = gf.placeholder("float32", (None,), name="x")
    xs = []
    for worker in (0, 1):
        with gf.device(f"/worker:{worker}"):
            xs.append(x * (worker + 1))
    ys = gf.parallel.all_reduce(xs)
    with gf.Session(gf.Cluster.local(2)) as session:
        held = []
        for _ in range(3):
            for size in [*range(1, 20), *range(300_000, 320_000, 1_000)]:
                for y in session.run(ys, {x: np.ones(size, "f4")}):
                    assert y.shape == (size,) and (y == 3).all()
            held.append([segments_of(pid) for pid in session._life.hosts.pids])
        assert held[2] == held[1], "whose memory is let go of, does so at both ends"
        assert max(held[2]) < 3 * MAX_AGREED_FORMS


# Partitions -----------------------------------------------------------------------------------


def cut(devices: Sequence[str], fetched: int = 3) -> dict[str, Partition]:
    xs = [gf.constant(np.ones(4, "f4")) * i for i in range(3)]
    ys = gf.parallel.all_reduce(xs)[:fetched]
    graph = gf.Graph([y + 1 for y in ys])
    (group,) = groups_of(graph.nodes) or [[n for n in graph.nodes if n.op.name == "all_reduce"]]
    places: dict[Node, str] = {}
    for rank, node in enumerate(group):
        for each in (node, node.inputs[rank].node, *graph.consumers[node]):
            places[each] = devices[rank]
    for node in graph.nodes:
        if node.op.name != "constant":
            places.setdefault(node, devices[2])
    return partition(graph, places)


def test_a_group_on_several_devices_is_one_exchange_and_no_edge() -> None:
    parts = cut([f"/worker:{i}/cpu:0" for i in range(3)])
    for part in parts.values():
        names = [node.op.name for node in part.graph.nodes]
        assert names.count("collective_start") == names.count("collective_finish") == 1
        assert not {"send", "recv", "all_reduce"} & set(names)


def test_a_group_on_one_device_is_computed_there() -> None:
    (part,) = cut(["/worker:0/cpu:0"] * 3).values()
    names = [node.op.name for node in part.graph.nodes]
    assert names.count("all_reduce") == 3 and "collective_start" not in names


def test_a_group_of_which_a_rank_is_not_wanted_goes_over_edges() -> None:
    parts = cut([f"/worker:{i}/cpu:0" for i in range(3)], fetched=1)
    names = [n.op.name for part in parts.values() for n in part.graph.nodes]
    assert names.count("all_reduce") == 1 and names.count("send") == 2


def test_a_lost_link_of_an_exchange_or_an_edge_names_the_tensor_and_the_users_line() -> None:
    """Whatever a worker says that it has sent: only what is known is told."""
    devices = ["cpu:0", "cpu:1"]
    fetches, feeds = build_all_collectives(devices, (5, 3), "ring", "sum")
    with gf.Session(gf.Cluster.here(devices)) as s:
        s.run(fetches, feeds)
        compiled = s._deployment.find(fetches)
        assert compiled is not None

        def explain_loss(edge: Any) -> str:
            return str(
                compiled.explain_link_loss(LinkLost("cut", source=0, target=1, step=3, edge=edge))
            )

        (group, *_) = {start.group for start in compiled.exchanges({}).values()}
        for rest in ("offer", "0/1/2"):
            text = explain_loss(f"collective/p0/{group}/{rest}")
            assert re.match(r"cut; it is of \w+ '[^']+', made at .*_sessions\.py:\d+", text)
        for key in ("collective/p0/99/offer", "collective/", "collective/p0/x/1", "", "taken/"):
            assert explain_loss(key) == "cut"
        for key in (None, "taken/x/1", 2**31):
            assert explain_loss(key) == "cut"
