"""Plans, drawings, reports and traces of replicas that take turns of their own."""

from __future__ import annotations

import os
import signal
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel import Data, Gossip, LocalSGD
from tests.parallel.local_training.test_local_sgd import traced_bytes
from tests.parallel.models import mlp

DILOCO = gf.optim.SGD(0.7, momentum=0.9, nesterov=True)
CASES: dict[str, Any] = {
    "averaging": lambda: LocalSGD(2, 2, window=4),
    "streaming": lambda: LocalSGD(2, 4, DILOCO, fragments=3, delay=2, window=8),
    "gossip": lambda: Gossip(2, window=2),
}


def train(
    strategy: Any, runs: int, folder: Path | None = None, dying: int | None = None
) -> tuple[list[Any], list[Any]]:
    """Losses of some runs on two workers, and the weights; before one run a worker is killed."""
    model = mlp(strategy)
    random = np.random.default_rng(3)
    kept = {} if folder is None else {"checkpoint": folder, "every": 3}
    with gf.Session(gf.Cluster.local(2), **kept) as s:
        losses = []
        for run in range(runs):
            if run == dying:
                os.kill(s._life.hosts.pids[run % 2], signal.SIGKILL)
            losses.append(s.run(model.fetches, model.feeds(random, 4 * strategy.window))[0])
        return losses, [s.get(v) for v in model.variables]


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_one_device_and_two_workers_give_the_same_bits(name: str) -> None:
    strategy = CASES[name]()
    model = mlp(strategy)
    random = np.random.default_rng(3)
    with gf.Session() as s:
        losses = [
            s.run(model.fetches, model.feeds(random, 4 * strategy.window))[0] for _ in range(3)
        ]
        weights = [s.get(v) for v in model.variables]
    found = train(CASES[name](), 3)
    assert losses == found[0]
    assert all(np.array_equal(a, b) for a, b in zip(weights, found[1], strict=True))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_a_lost_worker_costs_no_bit(name: str, tmp_path: Path) -> None:
    wanted = train(CASES[name](), 6, tmp_path / "whole")
    found = train(CASES[name](), 6, tmp_path / "killed", dying=4)
    for a, b in zip((*wanted[0], *wanted[1]), (*found[0], *found[1]), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("name", CASES)
def test_plans_draw_turns_exchanges_and_results(name: str, tmp_path: Path) -> None:
    model = mlp(CASES[name]())
    placeholders = gf.Graph(model.fetches).placeholders
    shapes = {p.outputs[0]: (32, int(p.specs[0].shape[1])) for p in placeholders}
    plan = gf.plan(model.fetches, gf.Cluster.local(2), shapes)
    assert {node.task[:1] for node in plan.nodes} >= {"T", "A"}
    assert 0 < plan.makespan < 1
    assert type(CASES[name]()).__name__ in str(plan)
    for suffix in ("html", "svg"):
        plan.save(tmp_path / f"plan.{suffix}")
    page = (tmp_path / "plan.html").read_text()
    assert "turn of a replica" in page and "T1" in page


@pytest.mark.every(3)
@pytest.mark.parametrize("name", [*CASES, "two levels"])
def test_reported_bytes_are_those_of_a_trace(name: str) -> None:
    """The report counts 64 examples for an open batch, and so does this run."""
    strategy = LocalSGD(2, 2, window=4) * Data(2) if name == "two levels" else CASES[name]()
    model = mlp(strategy)
    cluster = gf.Cluster.local(4 if name == "two levels" else 2)
    report = strategy.report(model.fetches, cluster)
    random = np.random.default_rng(3)
    with gf.Session(cluster) as s:
        s.run(model.fetches, model.feeds(random, 64))
        with s.trace() as trace:
            s.run(model.fetches, model.feeds(random, 64))
    assert traced_bytes(trace) == report.bytes == sum(report.bytes_by_kind.values())


def test_devices_of_a_host_share_what_travels_between_hosts() -> None:
    """Two hosts of two devices: each device exchanges its half, so that between hosts travels what
    two single devices would exchange."""
    cluster = gf.Cluster.local(4)
    flat = mlp(one := LocalSGD(2, 4))
    both = mlp(two := LocalSGD(2, 4) * Data(2))
    parameters = sum(v.spec.nbytes for v in flat.variables)

    def count_bytes_between_hosts(strategy: Any, model: Any) -> int:
        moves = strategy.report(model.fetches, cluster).collectives
        return sum(move.bytes for move in moves if move.axis == "replica")

    assert (
        count_bytes_between_hosts(one, flat)
        == count_bytes_between_hosts(two, both)
        == 2 * parameters
    )
    unshared = mlp(four := LocalSGD(4, 4))
    assert (
        count_bytes_between_hosts(four, unshared) == 6 * parameters
    )  # four replicas that do not share a host


def test_the_longer_the_period_the_fewer_bytes() -> None:
    sent = {}
    for period in (1, 2, 4, 8):
        model = mlp(strategy := LocalSGD(2, period, window=8))
        report = strategy.report(model.fetches, gf.Cluster.local(2))
        sent[period] = report.bytes_by_kind["all-reduce"]
    assert all(sent[period] * period == sent[1] for period in sent)


def predicted_seconds(cluster: gf.Cluster, period: int) -> float:
    """The seconds of a run of eight turns with an exchange after each `period`."""
    model = mlp(LocalSGD(2, period, window=8))
    shapes = {
        p.outputs[0]: (64 * 8, int(p.specs[0].shape[1]))
        for p in gf.Graph(model.fetches).placeholders
    }
    return gf.plan(model.fetches, cluster, shapes).makespan


def test_the_period_follows_from_the_link() -> None:
    """The least for which an exchange takes a tenth of the turns, where other plans tell what both
    take."""
    periods = []
    for bandwidth in (1e8, 1e7):  # slower links would wait for the client's feeds
        cluster = gf.Cluster.hypothetical(
            2, flops=1e8, bandwidth=1e9, launch=1e-7, memory=1 << 30, link_latency=1e-6,
            link_bandwidth=bandwidth,
        )  # fmt: skip
        model = mlp(strategy := LocalSGD(2))
        notes = strategy.report(model.fetches, cluster).division.notes
        _, chosen = strategy._chosen[id(cluster)]
        assert f"period {chosen.period} turn" in notes[1] and "10%" in notes[1]
        once, twice = predicted_seconds(cluster, 8), predicted_seconds(cluster, 4)
        exchange = twice - once
        turn = (once - exchange) / 8
        assert chosen.turns_apart == pytest.approx(ceil(10 * exchange / turn), abs=1)
        periods.append(chosen.turns_apart)
    assert periods[0] < periods[1]


def test_a_period_that_is_chosen_trains() -> None:
    model = mlp(strategy := LocalSGD(2))
    random = np.random.default_rng(3)
    cluster = gf.Cluster.local(2)
    with gf.Session(cluster) as s:
        for _ in range(3):
            s.run(model.fetches, model.feeds(random, 8))
    assert "takes at most 10% of turns" in str(strategy.report(model.fetches, cluster))


def test_the_client_reads_the_counter_of_turns_only_after_other_changes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from graphflow.execution.variable_store import VariableStore

    read: list[int] = []
    peek = VariableStore.peek

    def record_read(self: VariableStore, node: Any) -> Any:
        read.append(int(peek(self, node)))
        return peek(self, node)

    monkeypatch.setattr(VariableStore, "peek", record_read)
    model = mlp(LocalSGD(2, 3))
    random = np.random.default_rng(3)
    with gf.Session(gf.Cluster.local(2)) as s:
        for _ in range(7):
            s.run(model.fetches, model.feeds(random, 8))
        variants = read[:]  # when a variant is compiled, and before its first step is known
        for _ in range(6):
            s.run(model.fetches, model.feeds(random, 8))
        assert read == variants
        s.save(tmp_path)
        s.run(model.fetches[0], model.feeds(random, 8))
        s.run(model.fetches, model.feeds(random, 8))
        assert read[len(variants) :] and set(read[len(variants) :]) == {13}
        del read[:]
        s.load(tmp_path)
        s.run(model.fetches, model.feeds(random, 8))
        assert set(read) == {13}
