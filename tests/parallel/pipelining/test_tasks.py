"""What rules and passes make of a pipeline's nodes belongs to their tasks, and to their scopes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.parallel import Data, Pipeline, Shard

UPDATES = ("assign", "group", "placeholder", "variable", "constant")


def encoder(strategy: Any) -> tuple[list[Any], dict[gf.Tensor, Any]]:
    """A step of two blocks with heads, dropout and a table at both ends; and a batch of eight."""
    gf.random.seed(3)
    rng = np.random.default_rng(0)
    ids = gf.placeholder("int64", (8, 6), name="ids")
    table = gf.variable(rng.normal(size=(12, 16)), name="table")

    def weight(*shape: int, name: str) -> gf.Tensor:
        return gf.variable(rng.normal(size=shape) * 0.3, name=name)

    with gf.name_scope("embed"):
        h = gf.nn.embedding(ids, table)
    for i in range(2):
        with gf.name_scope(f"layer{i}"), gf.nn.training():
            q, k, v = (
                gf.permute_dims(gf.reshape(h @ weight(16, 16, name=n), (8, 6, 4, 4)), (0, 2, 1, 3))
                for n in "qkv"
            )
            rows = gf.permute_dims(gf.nn.attention(q, k, v, causal=True), (0, 2, 1, 3))
            h = h + gf.nn.dropout(gf.reshape(rows, (8, 6, 16)) @ weight(16, 16, name="o"), 0.2)
    with gf.name_scope("head"):
        logits = gf.nn.layer_norm(h) @ gf.matrix_transpose(table)
        loss = gf.mean(gf.nn.cross_entropy(logits, ids))
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    return [loss, train], {ids: rng.integers(0, 12, (8, 6))}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_every_node_of_a_micro_batch_is_of_a_task_of_its_own(schedule: str) -> None:
    fetches, _ = encoder(Pipeline(2, schedule, 4))
    plan = gf.plan(fetches, gf.Cluster.hypothetical("2xa100"))
    ops = set()
    for node in plan.nodes:
        micro, _, rest = node.name.partition("/")
        if micro.startswith("micro=") and node.op not in UPDATES and not rest.startswith("train/"):
            assert node.task, node.name
            if node.task[1:] == micro.removeprefix("micro="):
                ops.add(node.op)
            else:
                assert node.op == "add", node.name  # gradients of several, up to this one
    assert {"attention", "attention_grad", "random_bernoulli", "matmul", "sum"} <= ops


@pytest.mark.parametrize(
    "strategy", [Pipeline(2, "1f1b", 4), Data(2), Shard({"m": 2}, {"layer*/q": (None, "m")})]
)
def test_what_stands_for_a_node_is_named_by_its_scope(strategy: Any) -> None:
    fetches, _ = encoder(strategy)
    plan = gf.plan(fetches, gf.Cluster.hypothetical("2xa100"))
    scopes = {"attention": "layer", "random_bernoulli": "layer", "attention_grad": "grad"}
    found = [(node.op, node.name.split("/")[1]) for node in plan.nodes if node.op in scopes]
    assert {op for op, _ in found} == set(scopes)
    assert all(scope.startswith(scopes[op]) for op, scope in found)


def test_masks_are_drawn_when_their_micro_batch_comes() -> None:
    """Not all of them at first, where each is kept until its turn."""
    fetches, _ = encoder(Pipeline(2, "1f1b", 4))
    plan = gf.plan(fetches, gf.Cluster.hypothetical("2xa100"))
    nodes = {node.name: node for node in plan.nodes}
    for layer in ("layer0", "layer1"):
        last = nodes[f"micro=3/{layer}/random_bernoulli"]
        first = [n for n in plan.nodes if n.task == "F0" and n.device == last.device]
        assert last.start > max(node.finish for node in first)


def test_a_pass_keeps_the_results_of_a_pipeline() -> None:
    fetches, feeds = encoder(None)
    with gf.Session() as s:
        wanted = [s.run(fetches, feeds)[0] for _ in range(3)]
    for schedule in ("1f1b", "gpipe", "zb-h1"):
        fetches, feeds = encoder(Pipeline(2, schedule, 4))
        with gf.Session() as s:
            found = [s.run(fetches, feeds)[0] for _ in range(3)]
        np.testing.assert_allclose(found, wanted, rtol=1e-12)


def test_one_device_takes_turns_as_many_do_and_keeps_no_more_than_the_schedule_stores() -> None:
    """Node by node as they were built, all micro-batches would be alive at once."""

    def measure_memory(strategy: Any) -> tuple[int, int]:
        """Bytes of a session's only device, and those of its plan."""
        h = x = gf.placeholder("float32", ("batch", 64))
        for i in range(8):
            with gf.name_scope(f"layer{i}"):
                h = gf.tanh(h @ gf.variable(gf.init.glorot((64, 64)), name=f"w{i}"))
        loss = gf.mean(gf.square(h))
        fetches = [loss, gf.optim.SGD(0.1).minimize(loss, strategy=strategy)]
        images = np.ones((4096, 64), "float32")
        with gf.Session() as s:
            s.run(fetches, {x: images})
            (own,) = s.memory().values()
        plan = gf.plan(fetches, gf.Cluster.here(), shapes={x: images.shape})
        (planned,) = plan.peak_memory.values()
        return own.predicted, planned

    whole, _ = measure_memory(None)
    accumulated, planned = measure_memory(Data(1, accumulate=8))
    assert accumulated == planned and accumulated < whole / 2
    sizes = {}
    for schedule in ("1f1b", "gpipe"):
        sizes[schedule], planned = measure_memory(Pipeline(4, schedule, 8, recompute=False))
        assert sizes[schedule] == planned
    assert sizes["1f1b"] < 0.85 * sizes["gpipe"]


def test_of_gradients_two_or_three_micro_batches_are_kept_and_not_all() -> None:
    """Also where a batch of open size leaves products to libraries, which add to nothing."""

    def measure_memory(strategy: Any) -> int:
        h = x = gf.placeholder("float32", ("batch", 128))
        for i in range(2):
            h = gf.tanh(h @ gf.variable(gf.init.glorot((128, 128)), name=f"w{i}"))
        fetches = gf.optim.SGD(0.1).minimize(gf.mean(gf.square(h)), strategy=strategy)
        plan = gf.plan(fetches, gf.Cluster.local(2), shapes={x: (16, 128)})
        return max(plan.peak_memory.values())

    gradient = 128 * 128 * 4
    assert (
        measure_memory(Data(1, accumulate=16)) - measure_memory(Data(1, accumulate=2))
        < 4 * gradient
    )
    assert (
        measure_memory(Pipeline(2, "1f1b", 16)) - measure_memory(Pipeline(2, "1f1b", 2))
        < 3 * gradient
    )


def test_what_is_computed_again_is_not_kept_for_biases() -> None:
    """Their gradients are sums over all micro-batches of what is as large as activations."""

    def measure_memory(recompute: bool) -> int:
        h = x = gf.placeholder("float32", ("batch", 64))
        for i in range(8):
            with gf.name_scope(f"layer{i}"):
                h = gf.nn.gelu(gf.nn.Linear(64, 64)(h))
        strategy = Pipeline(2, "gpipe", 6, recompute=recompute)
        fetches = gf.optim.SGD(0.1).minimize(gf.mean(gf.square(h)), strategy=strategy)
        plan = gf.plan(fetches, gf.Cluster.local(2), shapes={x: (4096, 64)})
        return max(plan.peak_memory.values())

    assert measure_memory(recompute=True) < 0.7 * measure_memory(recompute=False)
