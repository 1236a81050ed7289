"""Sessions with replicas=2, without faults: where mirrors are, what travels, and what is refused.
Losses of real processes are in tests/faults."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, ClusterError
from graphflow.planning.mirrors.mirror_devices import choose_mirror_device
from tests.faults.recovery.model import Model


def cluster_of(*addresses: str) -> gf.Cluster:
    return gf.Cluster.from_dict(
        {
            "workers": [
                {
                    "index": index,
                    "address": address,
                    "devices": [
                        {"name": f"/worker:{index}/cpu:0", "kind": "cpu", "memory": 1 << 30}
                    ],
                }
                for index, address in enumerate(addresses)
            ],
            "links": [],
            "kind": "remote",
        }
    )


def mirrored_by(cluster: gf.Cluster, *lost: int) -> dict[int, int | None]:
    """The worker that mirrors each one that is left."""
    left = [worker for worker in cluster.workers if worker.index not in lost]
    loads = Counter(worker.devices[0].name for worker in left)
    found: dict[int, int | None] = {}
    for worker in left:
        place = choose_mirror_device(cluster, worker.devices[0].name, lost, loads)
        found[worker.index] = None if place is None else int(place.split(":")[1].split("/")[0])
        loads[place or ""] += 1
    return found


def local(**options: Any) -> gf.Session:
    return gf.Session(gf.Cluster.local(workers=2, threads=1), trial=False, **options)


# Where ----------------------------------------------------------------------------------------


def test_a_mirror_is_on_another_host_and_each_worker_has_about_as_many() -> None:
    hosts = cluster_of("tcp://a:1", "tcp://a:2", "tcp://b:1", "tcp://b:2")
    found = mirrored_by(hosts)
    assert {found[0], found[1]} == {2, 3} and {found[2], found[3]} == {0, 1}
    uneven = mirrored_by(cluster_of("tcp://a:1", "tcp://a:2", "tcp://a:3", "tcp://b:1"))
    assert [uneven[w] for w in (0, 1, 2)] == [3, 3, 3] and uneven[3] in (0, 1, 2)


def test_on_one_host_a_mirror_is_in_another_process_and_lost_workers_hold_none() -> None:
    one = cluster_of("tcp://a:1", "tcp://a:2", "tcp://a:3")
    assert mirrored_by(one) == {0: 1, 1: 2, 2: 0}
    assert mirrored_by(one, 1) == {0: 2, 2: 0}
    assert mirrored_by(one, 0, 1) == {2: None}


@pytest.mark.parametrize(
    ("replicas", "error", "told"),
    [
        (3, ClusterError, "replicas=3 needs 3 workers, and the cluster has 2"),
        (0, ArgumentError, "replicas must be 1 or 2, not 0"),
        (True, ArgumentError, "replicas must be 1 or 2, not True"),
        ("2", ArgumentError, "replicas must be 1 or 2, not '2'"),
    ],
)
def test_wrong_numbers_of_replicas_are_refused(replicas: Any, error: type, told: str) -> None:
    with pytest.raises(error, match=re.escape(told)):
        local(replicas=replicas)


def test_more_replicas_than_hosts_or_workers_are_refused_with_both_numbers() -> None:
    with pytest.raises(ClusterError, match="replicas=2 needs 2 workers, and the cluster has 1"):
        gf.Session(replicas=2)
    two_hosts = cluster_of("tcp://a:1", "tcp://a:2", "tcp://b:1")
    with pytest.raises(ClusterError, match="replicas=3 needs 3 hosts, and the cluster has 2"):
        gf.Session(two_hosts, replicas=3)


# What travels ---------------------------------------------------------------------------------


def read_mirror(s: gf.Session, variable: gf.Tensor) -> Any:
    state = s._state
    name, place = state.names[variable.node], state.mirrors.homes[variable.node]
    return s._life.hosts.read(int(place.split(":")[1].split("/")[0]), "<mirror>/" + name)


def test_mirrors_have_the_bits_of_their_variables_after_each_step() -> None:
    model = Model(2)
    variables = [v.outputs[0] for v in gf.Graph(model.train).variables]
    with local(replicas=2) as s:
        for number in range(4):
            if number == 2:
                s.set(model.rate, 1.5)
            s.run([model.loss, model.train], model.feed(number))
            for variable in variables:
                assert read_mirror(s, variable).tobytes() == s.get(variable).tobytes()
        report = s.mirrors()
        assert any("mirrors on /worker:1/cpu:0" in note for note in s.plan().notes)
    assert len(report.places) == len(variables) and not report.missing
    for home, mirror in report.places.values():
        assert home != mirror
    assert "15 variables with a mirror" in str(report)


def test_adam_sends_a_mirror_the_gradient_alone_and_a_table_its_changed_rows() -> None:
    rows, width, lookups = 4096, 16, 8
    with gf.device("/worker:0"):
        w = gf.variable(gf.init.glorot((64, 32)), name="w")
        table = gf.variable(gf.init.normal((rows, width)), name="table")
        ids = gf.placeholder("int64", (lookups,), name="ids")
        x = gf.placeholder("float32", (4, 64), name="x")
        dense = gf.optim.Adam(0.1).minimize(gf.mean(gf.square(x @ w)))
        sparse = gf.optim.RowwiseAdagrad(0.1).minimize(gf.mean(gf.square(gf.take(table, ids, 0))))
    batch = {ids: np.arange(lookups) * 3 % 5}
    with local(replicas=2) as s:
        s.run([dense], {x: np.ones((4, 64), "float32")})
        sent = s.mirrors().sent["/worker:1/cpu:0"]
        assert w.node.specs[0].nbytes <= sent <= w.node.specs[0].nbytes + 256
        for _ in range(3):
            s.run([sparse], batch)
        sent = s.mirrors().sent["/worker:1/cpu:0"]
        assert 0 < sent <= 4 * lookups * width * 4 < table.node.specs[0].nbytes / 10
        assert read_mirror(s, table).tobytes() == s.get(table).tobytes()


def test_copies_that_a_strategy_keeps_are_mirrors_of_each_other() -> None:
    with gf.random.seed(3):
        w = gf.variable(gf.init.glorot((8, 4)), name="w")
        x = gf.placeholder("float32", (None, 8), name="x")
        loss = gf.mean(gf.square(x @ w))
        train = gf.optim.Adam(0.1).minimize(loss, strategy=gf.parallel.Data(replicas=2))
    with local(replicas=2) as s:
        s.run([loss, train], {x: np.ones((4, 8), "float32")})
        assert s.mirrors().memory == {} and s.mirrors().missing == ()


def test_checkpoints_hold_no_mirrors(tmp_path: Any) -> None:
    model = Model(2)
    with local(replicas=2, checkpoint=tmp_path / "c", every=2) as s:
        for number in range(4):
            s.run([model.loss, model.train], model.feed(number))
        wanted = [s.get(v.outputs[0]) for v in gf.Graph(model.train).variables]
    with gf.Session(checkpoint=tmp_path / "c") as s:
        assert s.step == 4
        found = [s.get(v.outputs[0]) for v in gf.Graph(model.train).variables]
    assert [a.tobytes() for a in found] == [a.tobytes() for a in wanted]
