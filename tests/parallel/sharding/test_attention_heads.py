"""Attention of `gf.nn`'s layers under tensor parallelism: one weight for queries, keys and values
is cut by heads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel import Data, Shard
from graphflow.parallel.searching.candidates import tensor_rules

SIZE, HEADS = 16, 4
RULES = {"*attention/weight": ("model",), "*linear1/weight": ("model",)}


def model(strategy: Any = None, blocks: int = 2, **options: Any) -> tuple[list[Any], Any, Any]:
    """Fetches, a placeholder, and the fused weight and bias of the first block."""
    gf.random.seed(5)
    x = gf.placeholder("float64", (None, 6, SIZE), name="x")
    mask = options.pop("mask", None)
    layers = [
        gf.nn.TransformerBlock(SIZE, HEADS, dtype="float64", name=f"block{i}", **options)
        for i in range(blocks)
    ]
    h = x
    for layer in layers:
        h = layer(h, causal=True, mask=mask)
    loss = gf.mean(h * h)
    train = gf.optim.SGD(0.1, momentum=0.9).minimize(loss, strategy=strategy)
    attention = layers[0].attention
    return [loss, train], x, [attention.weight, attention.bias, attention.out.weight]


def run_training(strategy: Any, steps: int = 3, **options: Any) -> list[Any]:
    """Losses and variables after some steps."""
    fetches, x, variables = model(strategy, **options)
    random = np.random.default_rng(0)
    with gf.Session() as s:
        found = [
            float(s.run(fetches, {x: random.normal(size=(3, 6, SIZE))})[0]) for _ in range(steps)
        ]
        return [*found, *(s.get(v) for v in variables)]


def close(a: list[Any], b: list[Any]) -> bool:
    return all(np.allclose(x, y, rtol=1e-12, atol=1e-12) for x, y in zip(a, b, strict=True))


SLOPES = -np.arange(1.0, 5.0)[:, None, None] * np.arange(6.0)[None, None]
"""What is added to scores, of each head its own (ALiBi)."""
KINDS: list[dict[str, Any]] = [
    {}, {"rotary": 1e4}, {"shared": 2}, {"shared": 2, "rotary": 1e4}, {"mask": np.zeros((6, 6))},
    {"mask": SLOPES}, {"mask": SLOPES, "shared": 2}, {"mask": np.tri(6, dtype=bool), "shared": 2},
]  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.parametrize("options", KINDS, ids=lambda o: ",".join(o) or "plain")
@pytest.mark.parametrize("shards", [2, 4])
def test_a_block_takes_two_all_reduces_each_way_and_gathers_nothing(
    shards: int, options: dict[str, Any]
) -> None:
    if shards > options.get("shared", HEADS):
        return
    strategy = Shard({"model": shards}, RULES)
    report = strategy.report(model(strategy, blocks=2, **options)[0])
    assert [c.kind for c in report.collectives] == ["all-reduce"] * (4 * 2)


def test_the_search_cuts_the_blocks_of_layers_in_that_way_too() -> None:
    x = gf.placeholder("float64", (None, 6, SIZE), name="x")
    h = gf.nn.TransformerBlock(SIZE, HEADS, dtype="float64", name="block")(x)
    loss = gf.mean(h * h)
    train = gf.optim.SGD(0.1).minimize(
        loss, strategy=(strategy := Shard({"model": 2}, tensor_rules(loss)))
    )
    report = strategy.report([loss, train])
    assert [c.kind for c in report.collectives] == ["all-reduce"] * 4


@pytest.mark.parametrize("mask", [None, np.tri(6, dtype=bool)])
def test_shards_by_heads_train_as_one_device(mask: Any) -> None:
    alone = run_training(None, mask=mask)
    for shards in (2, 3, 4):
        assert close(run_training(Shard({"model": shards}, RULES), mask=mask), alone), shards


@pytest.mark.every(2)
@pytest.mark.parametrize("options", [*KINDS[1:], {"norm_first": False}, {"shared": 1}])
def test_any_attention_may_have_its_weight_cut(options: Any) -> None:
    assert close(run_training(Shard({"model": 2}, RULES), **options), run_training(None, **options))


def test_heads_are_cut_beside_replicas() -> None:
    strategy = Data(2) * Shard({"model": 2}, RULES)
    report = strategy.report(model(strategy)[0])
    assert not report.count("all-gather")
    assert close(run_training(strategy), run_training(None))


def test_each_shard_has_the_queries_keys_and_values_of_its_heads() -> None:
    fetches, _, (weight, _, _) = model(strategy := Shard({"model": 2}, RULES))
    pieces = strategy.report(fetches).division.variables[weight.node]
    assert [piece.specs[0].shape for piece in pieces.nodes] == [(24, SIZE)] * 2
    value = np.arange(48.0 * SIZE).reshape(48, SIZE)
    rows = value.reshape(3, 16, SIZE)
    for i, ((span, _), each) in enumerate(zip(pieces.spans, pieces.nodes, strict=True)):
        mine = value[span.to_index(48)]
        assert mine.shape == each.specs[0].shape
        assert np.array_equal(mine, rows[:, 8 * i : 8 * i + 8].reshape(24, SIZE))


def test_weights_cut_by_heads_are_read_set_and_saved_whole(tmp_path: Path) -> None:
    batch = np.random.default_rng(1).normal(size=(3, 6, SIZE))
    fetches, x, (weight, *_) = model(Shard({"model": 2}, RULES))
    given = np.random.default_rng(2).normal(size=weight.shape)
    with gf.Session(gf.Cluster.local(2)) as s:
        s.run(fetches, {x: batch})
        s.set(weight, given)
        assert np.array_equal(s.get(weight), given)
        s.save(tmp_path / "cut")
        expected = float(s.run(fetches, {x: batch})[0])
    fetches, x, (weight, *_) = model(None)
    with gf.Session() as s:
        s.load(tmp_path / "cut")
        assert np.array_equal(s.get(weight), given)
        assert np.isclose(float(s.run(fetches, {x: batch})[0]), expected, rtol=1e-12)


def test_what_was_trained_whole_goes_on_by_heads() -> None:
    batch = np.random.default_rng(1).normal(size=(3, 6, SIZE))
    found = []
    for strategy in (None, Shard({"model": 4}, RULES)):
        fetches, x, (weight, *_) = model(strategy)
        with gf.Session() as s:
            first = float(s.run(fetches[0], {x: batch}))
            rest = [float(s.run(fetches, {x: batch})[0]) for _ in range(2)]
            found.append([first, *rest, s.get(weight)])
    assert close(*found)


def test_weights_with_fewer_keys_than_queries_are_read_set_and_saved_whole(tmp_path: Path) -> None:
    batch = np.random.default_rng(1).normal(size=(3, 6, SIZE))
    options: dict[str, Any] = {"shared": 2, "rotary": 1e4}
    fetches, x, (weight, *_) = model(strategy := Shard({"model": 2}, RULES), **options)
    pieces = strategy.report(fetches).division.variables[weight.node]
    value = np.arange(32.0 * SIZE).reshape(32, SIZE)
    for i, (span, _) in enumerate(pieces.spans):
        rows = [
            *range(8 * i, 8 * i + 8),
            *range(16 + 4 * i, 20 + 4 * i),
            *range(24 + 4 * i, 28 + 4 * i),
        ]
        assert np.array_equal(value[span.to_index(32)], value[rows])
    with gf.Session(gf.Cluster.local(2)) as s:
        s.run(fetches, {x: batch})
        s.set(weight, value / value.size)
        assert np.array_equal(s.get(weight), value / value.size)
        s.save(tmp_path / "cut")
        expected = float(s.run(fetches, {x: batch})[0])
    fetches, x, (weight, *_) = model(None, **options)
    with gf.Session() as s:
        s.load(tmp_path / "cut")
        assert np.array_equal(s.get(weight), value / value.size)
        assert np.isclose(float(s.run(fetches, {x: batch})[0]), expected, rtol=1e-12)
