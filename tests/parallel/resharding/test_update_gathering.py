"""New values that places made in shares are gathered together, as gradients are scattered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel import Data

LAYERS = 4


def model(strategy: Any) -> tuple[list[Any], list[gf.Tensor], list[gf.Tensor]]:
    """Fetches, placeholders and variables of a few small layers."""
    gf.random.seed(3)
    x = gf.placeholder("float64", ("n", 6), name="x")
    y = gf.placeholder("int64", ("n",), name="y")
    h = x
    variables: list[gf.Tensor] = []
    for i in range(LAYERS):
        layer = gf.nn.Linear(6, 6, dtype="float64", name=f"layer{i}")
        h = gf.tanh(layer(h))
        assert layer.bias is not None
        variables += [layer.weight, layer.bias]
    loss = gf.mean(gf.nn.cross_entropy(h, y))
    return [loss, gf.optim.Adam(0.05).minimize(loss, strategy=strategy)], [x, y], variables


def run_training(strategy: Any, session: Any = gf.Session) -> list[Any]:
    fetches, (x, y), variables = model(strategy)
    random = np.random.default_rng(0)
    with session() as s:
        feeds = [{x: random.normal(size=(7, 6)), y: random.integers(0, 6, 7)} for _ in range(4)]
        losses = [s.run(fetches, each)[0] for each in feeds]
        return [*losses, *(s.get(v) for v in variables)]


def kinds(strategy: Data) -> list[tuple[str, int]]:
    report = strategy.report(model(strategy)[0])
    return [(c.kind, c.bytes) for c in report.collectives]


@pytest.mark.parametrize("replicas", [2, 3])
def test_small_new_values_are_gathered_at_once(replicas: int) -> None:
    size = LAYERS * (6 * 6 + 6) * 8 * (replicas - 1)
    whole = [("reduce-scatter", size), ("all-gather", size)]
    assert kinds(Data(replicas, shard_state=True)) == whole
    apart = kinds(Data(replicas, shard_state=True, bucket=0))
    assert [kind for kind, _ in apart].count("all-gather") == 2 * LAYERS
    assert sum(size for _, size in apart) == 2 * size


@pytest.mark.parametrize("bucket", [0, 600, 5000, 4 << 20])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_weights_are_those_of_one_device(bucket: int, accumulate: int) -> None:
    strategy = Data(3 - accumulate // 2, shard_state=True, accumulate=accumulate, bucket=bucket)
    for have, want in zip(run_training(strategy), run_training(None), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-13)


def test_workers_gather_the_same_bits() -> None:
    strategy = Data(2, shard_state=True)
    away = run_training(strategy, lambda: gf.Session(gf.Cluster.local(2)))
    for a, b in zip(away, run_training(strategy), strict=True):
        assert np.array_equal(a, b)
