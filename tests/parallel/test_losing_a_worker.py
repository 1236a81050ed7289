"""Whatever the strategy: a worker that dies costs a pause, and not a bit of the result."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph

rng = np.random.default_rng(0)
WEIGHTS = [rng.normal(size=(16, 16)).astype("float32") / 4 for _ in range(4)]
X = rng.normal(size=(8, 16)).astype("float32")

STRATEGIES = {
    "data": gf.parallel.Data(2),
    "sharded state": gf.parallel.Data(2, shard_state=True),
    "model": gf.parallel.Shard({"model": 2}, {"w0": (None, "model"), "w1": ("model", None)}),
    "stale sums": gf.parallel.AsyncModel("model", refresh=3)
    * gf.parallel.Shard({"model": 2}, {"w0": (None, "model"), "w1": ("model", None)}),
    "pipeline": gf.parallel.Pipeline(2, "zb-h1", 4),
    "without flush": gf.parallel.Pipeline(2, "pipedream", 4),
}
MORE = {
    "micro-batches of replicas": gf.parallel.Data(2, accumulate=2),
    "flushed": gf.parallel.Pipeline(2, "gpipe", 3),
    "by turns": gf.parallel.Pipeline(2, "1f1b", 4),
    "two stages each": gf.parallel.Pipeline(4, "interleaved", 4),
    "late weights": gf.parallel.Pipeline(2, "zb-h2", 4),
    "a v": gf.parallel.Pipeline(4, "zb-v", 4),
    "two directions": gf.parallel.Pipeline(2, "chimera", 4),
    "vertical": gf.parallel.Pipeline(2, partial(gf.parallel.pipedream, updates="vertical"), 4),
    "two versions": gf.parallel.Pipeline(
        2, partial(gf.parallel.pipedream, updates="double-buffered"), 4
    ),
}


def run_training(strategy: Any, dying: int | None, **options: Any) -> list[Any]:
    """Losses and weights of some steps; before one of them, a worker is killed."""
    x = gf.placeholder("float32", ("B", 16), name="x")
    h = x
    for i, value in enumerate(WEIGHTS):
        h = gf.tanh(h @ gf.variable(value, name=f"w{i}"))
    loss = gf.mean(gf.square(h - x))
    train = gf.optim.Adam(0.01).minimize(loss, strategy=strategy)
    found: list[Any] = []
    with gf.Session(gf.Cluster.local(2), **options) as s:
        for step in range(8):
            if step == dying:
                os.kill(s._life.hosts.pids[step % 2], signal.SIGKILL)
            found.append(s.run([loss, train], {x: X + step})[0])
        return [*found, *(s.get(v.outputs[0]) for v in Graph([loss]).variables)]


@pytest.mark.every(15)
@pytest.mark.parametrize(
    "name", [*STRATEGIES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
)  # slow: each starts five processes, two to four seconds
def test_a_worker_that_dies_costs_no_bit(name: str, tmp_path: Path) -> None:
    strategy = {**STRATEGIES, **MORE}[name]
    wanted = run_training(strategy, None, checkpoint=tmp_path / "whole", every=3)
    found = run_training(strategy, 5, checkpoint=tmp_path / "killed", every=3)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", [*STRATEGIES, *MORE])
def test_mirrors_take_the_part_of_a_worker_that_dies(name: str) -> None:
    strategy = {**STRATEGIES, **MORE}[name]
    wanted = run_training(strategy, None)
    found = run_training(strategy, 5, replicas=2)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))
