"""Cotangents that readers in one stage made are sent back as one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ir.graph import Graph

STAGES = ["layer0", "layer1", "layer2", ["layer3", "loss"]]


def build_skipping_layers(strategy: Any, readers: int) -> tuple[gf.Tensor, gf.Tensor, gf.Tensor]:
    """Layers, of which the last two read the first several times."""
    random = np.random.default_rng(0)
    x = gf.placeholder("float64", ("n", 5), name="x")
    h = first = x
    for i in range(4):
        with gf.name_scope(f"layer{i}"):
            h = gf.tanh(h @ gf.variable(random.normal(size=(5, 5)) / 2, name=f"w{i}"))
            first = h if i == 0 else first
            for k in range(readers if i >= 2 else 0):
                h = h + gf.sin(first * (k + 1.0))
    with gf.name_scope("loss"):
        loss = gf.mean(gf.square(h - x))
    return x, loss, gf.optim.SGD(0.1).minimize(loss, strategy=strategy)


def run_training(strategy: Any, readers: int) -> list[Any]:
    x, loss, train = build_skipping_layers(strategy, readers)
    random = np.random.default_rng(1)
    with gf.Session() as s:
        losses = [s.run([loss, train], {x: random.normal(size=(7, 5))})[0] for _ in range(3)]
        return [*losses, *(s.get(v.outputs[0]) for v in Graph([loss]).variables)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_readers_in_a_stage_send_back_one_cotangent(schedule: str) -> None:
    strategy = gf.parallel.Pipeline(STAGES, schedule, microbatches=3)
    x, loss, train = build_skipping_layers(strategy, 3)
    plan = gf.plan([loss, train], gf.Cluster.local(4), {x: (6, 5)})
    sent = Counter((t.source, t.target) for t in plan.transfers if t.bytes == 2 * 5 * 8)
    names = plan.cluster.devices
    for stage in (2, 3):
        assert sent[names[0], names[stage]] == sent[names[stage], names[0]] == 3
    for a, b in zip(run_training(strategy, 3), run_training(None, 3), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_what_two_branches_of_the_next_stage_read_sends_back_one_cotangent(schedule: str) -> None:
    x = gf.placeholder("float64", ("n", 5), name="x")
    h = x
    for i in range(2):
        with gf.name_scope(f"layer{i}"):
            h = h + gf.tanh(h @ gf.variable(np.eye(5), name=f"w{i}"))
    with gf.name_scope("loss"):
        loss = gf.mean(gf.square(h))
    strategy = gf.parallel.Pipeline(["layer0", ["layer1", "loss"]], schedule, microbatches=3)
    train = gf.optim.SGD(0.1).minimize(loss, strategy=strategy)
    plan = gf.plan([loss, train], gf.Cluster.local(2), {x: (6, 5)})
    first, second = plan.cluster.devices
    sent = Counter((t.source, t.target) for t in plan.transfers if t.bytes == 2 * 5 * 8)
    assert sent[first, second] == sent[second, first] == 3


def test_a_gradient_that_is_fetched_is_the_same() -> None:
    strategy = gf.parallel.Pipeline(STAGES, "1f1b", microbatches=3)
    value = np.random.default_rng(2).normal(size=(6, 5))
    found = []
    for each in (strategy, None):
        x, loss, train = build_skipping_layers(each, 2)
        (gradient,) = gf.gradients(loss, [x])
        with gf.Session() as s:
            found.append(s.run([gradient, train], {x: value})[0])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-12, atol=1e-15)


def build_tied_network(strategy: Any) -> tuple[gf.Tensor, gf.Tensor, gf.Tensor]:
    """A network whose last stage reads the weight of the first one several times."""
    random = np.random.default_rng(0)
    x = gf.placeholder("float64", ("n", 5), name="x")
    shared = gf.variable(random.normal(size=(5, 5)) / 2, name="shared")
    with gf.name_scope("first"):
        h = gf.tanh(x @ shared)
    with gf.name_scope("between"):
        h = gf.tanh(h @ gf.variable(random.normal(size=(5, 5)), name="between"))
    with gf.name_scope("last"):
        for _ in range(3):
            h = gf.tanh(h @ shared)
        loss = gf.mean(gf.square(h - x))
    return x, loss, gf.optim.SGD(0.1, momentum=0.9).minimize(loss, strategy=strategy)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "pipedream"])
def test_the_gradient_of_a_shared_weight_is_sent_once(schedule: str) -> None:
    strategy = gf.parallel.Pipeline(["first", "between", "last"], schedule, microbatches=4)
    x, loss, train = build_tied_network(strategy)
    plan = gf.plan([loss, train], gf.Cluster.local(3), {x: (12, 5)})
    names = plan.cluster.devices
    sent = Counter((t.source, t.target) for t in plan.transfers if t.bytes == 5 * 5 * 8)
    # one that does not flush updates, and so sends, after each micro-batch
    assert sent[names[2], names[0]] == (4 if schedule == "pipedream" else 1)


@pytest.mark.parametrize("beside", [None, gf.parallel.Data(2)], ids=["alone", "data"])
def test_a_shared_weight_is_trained_as_on_one_device(beside: Any) -> None:
    strategy = gf.parallel.Pipeline(["first", "between", "last"], "1f1b", microbatches=3)
    found = []
    for each in (strategy if beside is None else strategy * beside, None):
        x, loss, train = build_tied_network(each)
        random = np.random.default_rng(1)
        with gf.Session() as s:
            losses = [s.run([loss, train], {x: random.normal(size=(7, 5))})[0] for _ in range(3)]
            found.append([*losses, *(s.get(v.outputs[0]) for v in Graph([loss]).variables)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)
