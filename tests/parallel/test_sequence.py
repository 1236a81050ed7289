"""What tensor parallel layers leave whole, cut along the sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from tests.parallel.models import difference, gpt

Data, Shard, Pipeline = gf.parallel.Data, gf.parallel.Shard, gf.parallel.Pipeline
HEADS = {"*attention/weight": ("model",), "*linear1/weight": ("model",)}


def cut(model: int = 2, **options: Any) -> Shard:
    return Shard({"model": model}, HEADS, sequence="model", **options)


@pytest.mark.parametrize("strategy", [
    cut(), Data(2, shard_state=True) * cut(), Pipeline(2, microbatches=2) * cut(),
    Shard({"model": 2}, {**HEADS, "embedding": ("model",), "head": (None, "model")},
          sequence="model"),
], ids=["blocks", "replicas", "stages", "vocabulary"])  # fmt: skip
def test_steps_are_those_of_one_device(strategy: Any) -> None:
    assert difference(gpt(strategy, 0.2).train(), gpt(None, 0.2).train()) < 1e-12


def test_sums_are_scattered_and_gathered_and_once_more_for_the_weights() -> None:
    """A block's sums, two each way, travel as scatters and gathers of as many bytes; what was
    gathered for its products is gathered again for their weights' gradients, not kept."""
    model, tokens = gpt(cut()), 4 * 8 * 16 * 8
    inside = [m for m in cut().report(model.fetches).collectives if "block" in m.tensor
              or m.tensor == "gradients/reshape"]  # fmt: skip
    kinds = [m.kind for m in inside]
    assert kinds.count("reduce-scatter") == 2 * (2 + 2)
    assert kinds.count("all-gather") == 2 * (2 + 2 + 2)
    assert {m.bytes for m in inside} == {tokens}


def test_devices_keep_less_of_the_activations() -> None:
    there = gf.Cluster.hypothetical(
        4, flops=1e12, bandwidth=1e11, memory=1 << 34, link_bandwidth=1e9
    )

    def taken(strategy: Any) -> int:
        h = x = gf.placeholder("float32", (8, 64, 32), name="x")
        for i in range(2):
            h = gf.nn.TransformerBlock(32, 4, name=f"block{i}")(h, causal=True)
        train = gf.optim.SGD(0.1).minimize(gf.mean((h - x) ** 2.0), strategy=strategy)
        return max(gf.plan(train, there).peak_memory.values())

    assert taken(cut(4)) < 0.85 * taken(Shard({"model": 4}, HEADS))


def test_an_open_sequence_of_any_length_is_cut() -> None:
    def trained(strategy: Any) -> list[Any]:
        gf.random.seed(1)
        h = x = gf.placeholder("float64", (None, None, 8), name="x")
        h = gf.nn.TransformerBlock(8, 2, dtype="float64", name="block")(h, causal=True)
        loss = gf.mean((h - x) ** 2.0)
        train = gf.optim.Adam(0.1).minimize(loss, strategy=strategy)
        random = np.random.default_rng(0)
        with gf.Session() as s:
            return [s.run([loss, train], {x: random.normal(size=(3, n, 8))})[0] for n in (5, 7, 5)]

    np.testing.assert_allclose(trained(cut()), trained(None), rtol=0, atol=1e-12)


def test_an_axis_that_cuts_the_batch_cuts_no_sequence() -> None:
    for options, told in (
        ({"batch": "model"}, "give the mesh two axes"),
        ({"batch": "m"}, r"batch is an axis of the mesh \(model\)"),
    ):
        with pytest.raises(gf.errors.ShardingError, match=told):
            cut(**options)
