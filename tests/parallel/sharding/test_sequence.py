"""What tensor parallel layers leave whole, cut along the sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel.sharding.propagation.propagation import is_slot
from tests.parallel.models import difference, gpt, train_on_one_device

Data, Shard, Pipeline = gf.parallel.Data, gf.parallel.Shard, gf.parallel.Pipeline
HEADS = {"*attention/weight": ("model",), "*linear1/weight": ("model",)}


def cut(model: int = 2, **options: Any) -> Shard:
    return Shard({"model": model}, HEADS, sequence="model", **options)


@pytest.mark.every(2)
@pytest.mark.parametrize("strategy", [
    cut(), Data(2) * cut(), Data(2, shard_state=True) * cut(), Pipeline(2, microbatches=2) * cut(),
    Shard({"model": 2}, {**HEADS, "embedding": ("model",), "head": (None, "model")},
          sequence="model"),
], ids=["blocks", "replicas", "shares", "stages", "vocabulary"])  # fmt: skip
def test_steps_are_those_of_one_device(strategy: Any) -> None:
    assert difference(gpt(strategy, 0.2).train(), train_on_one_device(gpt, dropout=0.2)) < 1e-12


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


@pytest.mark.parametrize("shared", [False, True])
def test_sums_over_replicas_and_sequence_wait_for_others(shared: bool) -> None:
    """Gradients of norms and other weights that both cut: one sum over all four places; or one
    piece for each replica, and one sum of these."""
    strategy = Data(2, shard_state=shared) * cut()
    report = strategy.report(gpt(strategy).fetches)
    sums = [m for m in report.collectives if m.kind in ("all-reduce", "reduce-scatter")]
    late = [(m.kind, m.axis) for m in sums if m.axis != "model" or m.kind == "all-reduce"]
    pieces, rest = ("reduce-scatter", "data"), ("all-reduce", "data")  # of a bias in stretches
    assert late == ([pieces, ("all-reduce", "model"), rest, pieces] if shared
                    else [("all-reduce", "data×model"), rest])  # fmt: skip
    variables = report.division.variables
    slots = [node for node in variables if is_slot(node) and "attention/bias" not in node.name]
    assert {"data" in variables[node].layout.axes() for node in slots} == {shared}


def test_what_is_reshaped_to_two_axes_stays_cut_along_both() -> None:
    """Rows of some samples, and of each some tokens; also where neither divides, and both are
    known only when a step is fed. No place has all tokens of a sample for its products."""
    gf.random.seed(1)
    x = gf.placeholder("float64", ("b", "t", 8), name="x")
    y = gf.placeholder("int64", ("b", "t"), name="y")
    with gf.nn.training():
        h = gf.nn.dropout(gf.nn.Linear(8, 6, dtype="float64")(x), 0.3)
    flat = gf.reshape(h, (-1, 6))
    losses = gf.nn.cross_entropy(flat, gf.reshape(y, (-1,)))
    random = np.random.default_rng(0)
    feeds = {x: random.normal(size=(5, 7, 8)), y: random.integers(0, 6, (5, 7))}
    found = []
    for strategy in (None, Data(2) * Shard({"model": 3}, sequence="model")):
        train = gf.optim.SGD(0.1).minimize(gf.mean(losses), strategy=strategy)
        with gf.Session() as s:
            found.append([s.run([losses, gf.tanh(flat), train], feeds)[:2] for _ in range(2)])
    for have, want in zip(*found, strict=True):
        for a, b in zip(have, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
    assert strategy is not None
    for each in (strategy, Data(3)):
        assert {m.kind for m in each.report(train).collectives} == {"all-reduce"}


def test_of_a_vocabulary_neither_tables_nor_logits_travel() -> None:
    """Each place looks up all positions in its part of the table, and is sent the sums of its own;
    backwards it gets the gradients of all, for its part: as many bytes as the tokens have."""
    random = np.random.default_rng(0)
    batch, time, width, words = 2, 6, 4, 240
    ids = gf.placeholder("int64", (batch, time), name="ids")
    table = gf.variable(random.normal(size=(words, width)), name="table")
    head = gf.variable(random.normal(size=(width, words)), name="head")
    loss = gf.mean(gf.nn.cross_entropy(gf.tanh(gf.nn.embedding(ids, table)) @ head, ids))
    rules = {"table": ("model",), "head": (None, "model")}
    strategies = (None, Shard({"model": 2}, rules, sequence="model"))
    steps = [gf.optim.SGD(0.1).minimize(loss, strategy=s) for s in strategies]
    found = []
    for step in steps:
        with gf.Session() as s:
            feeds = {ids: np.arange(batch * time).reshape(batch, time) * 5}
            found.append([s.run([loss, step], feeds)[0] for _ in range(3)])
    np.testing.assert_allclose(*found, rtol=0, atol=1e-12)
    assert strategies[1] is not None
    moves = strategies[1].report([loss, steps[1]]).collectives
    tokens = batch * time * width * 8
    for tensor, kind in (("take", "reduce-scatter"), ("reshape", "all-gather")):
        assert {m.bytes for m in moves if (m.tensor, m.kind) == (tensor, kind)} == {tokens}
    assert max(m.bytes for m in moves) < words * width * 8
    assert {m.kind for m in moves} == {"all-gather", "reduce-scatter", "all-reduce"}


def test_devices_keep_less_of_the_activations() -> None:
    there = gf.Cluster.hypothetical(
        4, flops=1e12, bandwidth=1e11, memory=1 << 34, link_bandwidth=1e9
    )

    def measure_memory(strategy: Any) -> int:
        h = x = gf.placeholder("float32", (8, 64, 32), name="x")
        for i in range(2):
            h = gf.nn.TransformerBlock(32, 4, name=f"block{i}")(h, causal=True)
        train = gf.optim.SGD(0.1).minimize(gf.mean((h - x) ** 2.0), strategy=strategy)
        return max(gf.plan(train, there).peak_memory.values())

    assert measure_memory(cut(4)) < 0.85 * measure_memory(Shard({"model": 4}, HEADS))


def test_an_open_sequence_of_any_length_is_cut() -> None:
    """Its sums are scattered and no more travels than of a known one; nor does of an open batch."""

    def kinds(*shape: int | None) -> list[str]:
        h = x = gf.placeholder("float32", (*shape, 8), name="x")
        h = gf.nn.TransformerBlock(8, 2, name="block")(h, causal=True)
        train = gf.optim.SGD(0.1).minimize(gf.mean((h - x) ** 2.0), strategy=cut())
        return sorted(m.kind for m in cut().report(train).collectives)

    assert kinds(4, None) == kinds(None, 8) == kinds(None, None) == kinds(4, 8)

    def run_training(strategy: Any) -> list[Any]:
        gf.random.seed(1)
        h = x = gf.placeholder("float64", (None, None, 8), name="x")
        h = gf.nn.TransformerBlock(8, 2, dtype="float64", name="block")(h, causal=True)
        loss = gf.mean((h - x) ** 2.0)
        train = gf.optim.Adam(0.1).minimize(loss, strategy=strategy)
        random = np.random.default_rng(0)
        with gf.Session() as s:
            return [s.run([loss, train], {x: random.normal(size=(3, n, 8))})[0] for n in (5, 7, 5)]

    np.testing.assert_allclose(run_training(cut()), run_training(None), rtol=0, atol=1e-12)


def test_an_axis_that_cuts_the_batch_cuts_no_sequence() -> None:
    for options, told in (
        ({"batch": "model"}, "give the mesh two axes"),
        ({"batch": "m"}, r"batch must be an axis of the mesh \(model\)"),
    ):
        with pytest.raises(gf.errors.ShardingError, match=told):
            cut(**options)
