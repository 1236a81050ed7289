"""Each strategy on processes of its own: the bits of one process, whatever carries them and whoever
dies; and it is drawn, traced and planned again as any step is."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph

Data, Pipeline, Shard = gf.parallel.Data, gf.parallel.Pipeline, gf.parallel.Shard
WIDTH, STEPS, DYING = 16, 6, 4
random = np.random.default_rng(0)
WEIGHTS = [random.normal(size=(WIDTH, WIDTH)) / 4 for _ in range(4)]
X = random.normal(size=(9, WIDTH))
COLUMNS = {"*w0": (None, "model"), "*w2": (None, "model")}
HALVES = [["layer0", "layer1"], ["layer2", "layer3", "loss"]]


def step(strategy: Any) -> tuple[gf.Tensor, gf.Tensor, gf.Tensor]:
    """A placeholder, a loss and a step of training."""
    h = x = gf.placeholder("float64", ("B", WIDTH), name="x")
    for i, value in enumerate(WEIGHTS):
        with gf.name_scope(f"layer{i}"):
            h = gf.tanh(h @ gf.variable(value, name=f"w{i}"))
    with gf.name_scope("loss"):
        loss = gf.mean(gf.square(h - x))
    return x, loss, gf.optim.Adam(0.01).minimize(loss, strategy=strategy)


def run_training(
    strategy: Any, cluster: gf.Cluster | None = None, folder: Path | None = None
) -> list[Any]:
    """Losses of some steps, and the weights after them. With a folder for checkpoints, the last
    worker is killed on the way."""
    x, loss, train = step(strategy)
    found: list[Any] = []
    options: dict[str, Any] = {} if folder is None else {"checkpoint": folder, "every": 2}
    with gf.Session(cluster, **options) as s:
        for number in range(STEPS):
            if folder is not None and number == DYING:
                os.kill(s._life.hosts.pids[-1], signal.SIGKILL)
            found.append(s.run([loss, train], {x: X + number})[0])
        return [*found, *(s.get(v.outputs[0]) for v in Graph([loss]).variables)]


def bits(found: list[Any]) -> list[bytes]:
    return [np.asarray(each).tobytes() for each in found]


def mark_slow(names: Iterable[str], one: str) -> list[Any]:
    """All names, of which only one is for the default run: each starts two to four processes, and
    takes two to five seconds."""
    return [n if n == one else pytest.param(n, marks=pytest.mark.slow) for n in names]


FOUR: dict[str, Callable[[], Any]] = {
    "pipeline, data": lambda: Pipeline(2, "1f1b", 3) * Data(2),
    "pipeline, data, sharded state": lambda: Pipeline(2, "zb-h1", 3) * Data(2, shard_state=True),
    "pipeline, tensor": lambda: Pipeline(HALVES, "1f1b", 3) * Shard({"model": 2}, COLUMNS),
    "data, tensor": lambda: Data(2, shard_state=True) * Shard({"model": 2}, COLUMNS),
    "two axes": lambda: Shard({"data": 2, "model": 2}, COLUMNS, batch="data"),
    "sharded state": lambda: Data(4, shard_state=True),
    "two directions": lambda: Pipeline(4, "chimera", 4),
    "two stages each": lambda: Pipeline(8, "interleaved", 4),
}


@pytest.mark.parametrize("name", mark_slow(FOUR, "pipeline, data"))
def test_four_workers_give_the_bits_of_one_process(name: str) -> None:
    here = run_training(FOUR[name]())
    for a, b in zip(here, run_training(None), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
    assert bits(run_training(FOUR[name](), gf.Cluster.local(4, threads=1))) == bits(here)


@pytest.mark.slow  # each starts four processes, and one more: five to ten seconds
@pytest.mark.parametrize("name", FOUR)
def test_four_workers_give_these_bits_also_if_one_dies(name: str, tmp_path: Path) -> None:
    killed = run_training(FOUR[name](), gf.Cluster.local(4, threads=1), tmp_path)
    assert bits(killed) == bits(run_training(FOUR[name]()))


TWO: dict[str, Callable[[], Any]] = {
    "data": lambda: Data(2),
    "sharded state": lambda: Data(2, shard_state=True),
    "tensor": lambda: Shard({"model": 2}, COLUMNS),
    "pipeline": lambda: Pipeline(2, "1f1b", 3),
    "two directions": lambda: Pipeline(2, "chimera", 4),
    "without flush": lambda: Pipeline(2, "pipedream", 3),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", mark_slow(TWO, "pipeline"))
def test_what_carries_tensors_changes_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = bits(run_training(TWO[name]()))
    assert bits(run_training(TWO[name](), gf.Cluster.local(2, threads=1))) == here
    monkeypatch.setenv("GRAPHFLOW_SHARED_MEMORY", "off")
    assert bits(run_training(TWO[name](), gf.Cluster.local(2, threads=1))) == here


@pytest.mark.parametrize("name", mark_slow(TWO, "pipeline"))
def test_every_strategy_is_drawn_traced_and_planned_again(name: str, tmp_path: Path) -> None:
    x, loss, train = step(TWO[name]())
    wanted = run_training(TWO[name]())
    with gf.Session(gf.Cluster.local(2, threads=1)) as s:
        s.run([loss, train], {x: X})
        with s.trace() as trace:
            s.run([loss, train], {x: X + 1})
        replanned = s.replan()
        assert "the placement stays" in str(replanned) or "placed anew" in str(replanned)
        assert s.run([loss, train], {x: X + 2})[0] == wanted[2]
        plan = s.plan()
    for kind in ("html", "svg", "json", "dot"):
        assert Path(plan.save(tmp_path / f"plan.{kind}")).stat().st_size > 10_000
    assert plan.makespan > 0
    seen = [event for event in trace.steps[0].events if event.kind == "compute"]
    assert {event.track for event in seen} == {str(device) for device in plan.cluster.devices}
    assert any("layer0/matmul" in e.name for e in seen)
    assert any("layer3/tanh" in e.name for e in seen)


def test_shared_state_takes_a_share_of_the_gradients_only() -> None:
    """Each worker gives the gradients once, and gets its share of their sums and of new values."""
    x, loss, train = step(Data(2, shard_state=True))
    with gf.Session(gf.Cluster.local(2, threads=1)) as s:
        s.run([loss, train], {x: X})
        with s.trace() as trace:
            s.run([loss, train], {x: X})
    given = {}
    for event in trace.steps[0].events:
        if event.exchange is not None:
            each = event.exchange
            given[each.kind, each.group] = each.bytes
    weights = sum(value.nbytes for value in WEIGHTS)
    kinds = {kind for kind, _ in given}
    assert kinds == {"reduce_scatter", "all_gather"}
    assert sum(n for (kind, _), n in given.items() if kind == "reduce_scatter") == weights
    assert sum(n for (kind, _), n in given.items() if kind == "all_gather") == weights / 2
    moves = Data(2, shard_state=True).report([loss, train]).collectives
    assert sum(m.bytes for m in moves if m.kind == "reduce-scatter") == weights
    assert sum(m.bytes for m in moves if m.kind == "all-gather") == weights
