"""The optimiser's state in shares of places with other parts of the batch, beside other cuts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph
from tests.parallel.models import cnn, difference, gpt, mlp, train_on_one_device

Data, Shard, Pipeline = gf.parallel.Data, gf.parallel.Shard, gf.parallel.Pipeline
EXACT = 1e-12
COLUMNS = Shard({"model": 2}, {"w1": (None, "model")})
HEADS = {"*attention/weight": ("model",), "*linear1/weight": ("model",)}


def make_strategy(replicas: int = 2, **options: Any) -> Data:
    return Data(replicas, shard_state=True, **options)


PRODUCTS = {
    "tensor": lambda: make_strategy() * COLUMNS,
    "each by itself": lambda: COLUMNS * make_strategy(bucket=0),
    "turns": lambda: make_strategy(3, accumulate=2) * COLUMNS,
    "one mesh": lambda: Shard(
        {"d": 2, "model": 3}, {"w1": (None, "model")}, "d", shard_state=True, accumulate=2
    ),
    "pipeline": lambda: Pipeline(2, microbatches=2) * make_strategy(),
    "pipeline, tensor": lambda: Pipeline(2, "zb-h1", 2) * (COLUMNS * make_strategy(3)),
    "two directions, tensor": lambda: Pipeline(2, "chimera", 2) * make_strategy() * COLUMNS,
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_with_shared_state_update_as_one_device(name: str) -> None:
    assert difference(mlp(PRODUCTS[name]()).train(), train_on_one_device(mlp)) < EXACT


@pytest.mark.parametrize("optimizer", [
    gf.optim.SGD(0.1, momentum=0.9, nesterov=True), gf.optim.AdamW(0.1),
    gf.optim.RMSProp(0.01, momentum=0.5), gf.optim.Adagrad(0.1),
    gf.optim.RowwiseAdagrad(0.1),
], ids=lambda o: type(o).__name__)  # fmt: skip
def test_every_optimiser_shares_its_state_beside_other_cuts(optimizer: Any) -> None:
    have, want = mlp(PRODUCTS["turns"](), optimizer=optimizer), mlp(optimizer=optimizer)
    assert difference(have.train(steps=2), want.train(steps=2)) < EXACT


def test_blocks_cut_by_heads_and_vocabulary_share_their_state() -> None:
    rules = {**HEADS, "embedding": ("model",), "head": (None, "model")}
    strategy = make_strategy() * Shard({"model": 2}, rules)
    assert difference(gpt(strategy, batch=5).train(), train_on_one_device(gpt, batch=5)) < EXACT


def test_norms_may_look_at_their_own_share_beside_other_cuts() -> None:
    """Four shares, whether replicas alone have them, or their micro-batches, or a pipeline's."""
    rules = Shard({"model": 2}, {"w3": (None, "model")})
    shape = (8, 3, 6, 6)
    wanted = cnn(Data(4, synchronised=False), shape).train()
    for strategy in (
        Data(2, synchronised=False, accumulate=2) * rules,
        Pipeline(2, microbatches=2) * Data(2, synchronised=False),
        Pipeline(2, microbatches=2) * (make_strategy(synchronised=False) * rules),
    ):
        assert difference(cnn(strategy, shape).train(), wanted) < EXACT
    assert difference(cnn(None, shape).train(), wanted) > 1e-3


def step(strategy: Any, width: int = 8) -> tuple[gf.Tensor, list[Any], list[gf.Tensor]]:
    gf.random.seed(1)
    h = x = gf.placeholder("float64", ("n", width), name="x")
    layers = [gf.nn.Linear(width, width, dtype="float64", name=f"l{i}") for i in range(4)]
    for layer in layers:
        h = gf.tanh(layer(h))
    loss = gf.mean((h - x) ** 2.0)
    train = gf.optim.Adam(0.01).minimize(
        loss, strategy=strategy, transform=lambda g: gf.optim.clip_by_global_norm(g, 0.01)[0]
    )
    return x, [loss, train], Graph([loss]).of_op("variable")


PAIRS = Shard({"model": 2}, {"l0/weight": ("model",), "l2/weight": ("model",)})


def run_training(strategy: Any, steps: range, folder: Path, session: Any = gf.Session) -> list[Any]:
    """What variables are after some steps; they begin with what a checkpoint has, and end so."""
    x, fetches, variables = step(strategy)
    random = np.random.default_rng(0)
    feeds = [random.normal(size=(7, 8)) for _ in range(steps.stop)]
    with session() as s:
        if steps.start:
            s.run(fetches[0], {x: feeds[0]})
            s.load(folder)
        for number in steps:
            s.run(fetches, {x: feeds[number]})
        s.save(folder)
        return [s.get(v.outputs[0]) for v in variables]


def test_a_checkpoint_goes_on_under_other_strategies_and_back(tmp_path: Path) -> None:
    wanted = run_training(None, range(6), tmp_path / "whole")
    every = [
        make_strategy() * PAIRS,
        None,
        Pipeline(2, microbatches=3) * make_strategy(),
        make_strategy(3, accumulate=2) * PAIRS,
    ]
    found: list[Any] = []
    for number, strategy in enumerate([*every, every[0], Data(2)]):
        found = run_training(strategy, range(number, number + 1), tmp_path / "cut")
    for have, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=0, atol=EXACT)


def test_places_send_what_the_closed_form_says_and_keep_less() -> None:
    """Of a model shard's weights each replica gets its share of the sums, and all others' new
    values: twice (d − 1)/d of its bytes, in all 2·(d − 1) times the weights, as an all-reduce."""
    there = gf.Cluster.hypothetical(
        4, flops=1e12, bandwidth=1e11, memory=1 << 34, link_bandwidth=1e9
    )
    peaks, width = [], 512
    for strategy in (Data(2) * PAIRS, make_strategy() * PAIRS):
        x, fetches, variables = step(strategy, width)
        plan = gf.plan(fetches, there, shapes={x: (4, width)})
        peaks.append(max(plan.peak_memory.values()))
    cut = sum(v.specs[0].size for v in variables if "weight" in v.name or v.name[1] in "02")
    both = 2 * sum(v.specs[0].size for v in variables if "bias" in v.name and v.name[1] in "13")
    report = strategy.report(fetches)
    for kind in ("reduce-scatter", "all-gather"):
        sent = sum(m.bytes for m in report.collectives if (m.kind, m.axis) == (kind, "data"))
        assert sent == (cut + both) * 8
    slots = 2 * cut * 8 / 2
    assert peaks[0] - peaks[1] > slots / 4


def test_what_a_product_needs_to_know_is_said() -> None:
    with pytest.raises(gf.errors.ShardingError, match=r"which axis of the mesh .* batch='a'"):
        Shard({"a": 2}, {"w1": (None, "a")}, shard_state=True)
    strategy = Data(2, batch=["t", "x"], accumulate=2) * Shard({"m": 2}, {"x": (None, "m")})
    told = r"Shard at .*test_shared.*a batch of 3 .*its 4 shards, 2 \(data\) × 2 micro-batches"
    with pytest.raises(gf.errors.ShardingError, match=told):
        mlp(strategy).train(batch=3)
    assert difference(mlp(strategy).train(), train_on_one_device(mlp)) < EXACT
