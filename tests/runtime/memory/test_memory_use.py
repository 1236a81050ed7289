"""What a step takes of memory is known before it runs, and what it really took is counted."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from tests.loaded import ROOT

Case = tuple[list[Any], dict[Any, Any]]
RANDOM = np.random.default_rng(0)


def weight(*shape: int) -> Any:
    return gf.variable((RANDOM.normal(size=shape) * 0.05).astype("float32"))


def zeros(*shape: int) -> Any:
    return gf.variable(np.zeros(shape, "float32"))


def mlp(optimizer: gf.optim.Optimizer, batch: int = 128) -> Case:
    sizes = (784, 256, 128, 10)
    x = gf.placeholder("float32", (batch, sizes[0]))
    y = gf.placeholder("int64", (batch,))
    h = x
    for n, m in pairwise(sizes):
        h = h @ weight(n, m) + zeros(m)
        h = gf.nn.relu(h) if m != sizes[-1] else h
    loss = gf.mean(gf.nn.cross_entropy(h.astype("float32"), y))
    feeds = {x: np.ones((batch, sizes[0]), "float32"), y: np.zeros(batch, "int64")}
    return [loss, optimizer.minimize(loss)], feeds


def mlp_in_16_bits() -> Case:
    with gf.autocast("bfloat16"):
        return mlp(gf.optim.SGD(0.05, momentum=0.9))


def convnet(batch: int = 16) -> Case:
    x = gf.placeholder("float32", (batch, 1, 28, 28))
    y = gf.placeholder("int64", (batch,))
    h, channels = x, 1
    for k in (16, 32):
        h = gf.nn.conv2d(h, weight(k, channels, 3, 3), padding="same") + zeros(k, 1, 1)
        h = gf.nn.max_pool2d(gf.nn.relu(h), 2)
        channels = k
    h = gf.reshape(h, (batch, 7 * 7 * channels)) @ weight(7 * 7 * channels, 10)
    loss = gf.mean(gf.nn.cross_entropy(h, y))
    feeds = {x: np.ones((batch, 1, 28, 28), "float32"), y: np.zeros(batch, "int64")}
    return [loss, gf.optim.Adam(1e-3).minimize(loss)], feeds


def gpt(batch: int = 4, time: int = 64, width: int = 128, heads: int = 4) -> Case:
    ids = gf.placeholder("int64", (batch, time))
    h = gf.nn.embedding(ids, weight(256, width)) + weight(time, width)
    one = np.ones(width, "float32")

    def split(x: Any) -> Any:
        parts = gf.reshape(x, (batch, time, heads, width // heads))
        return gf.permute_dims(parts, (0, 2, 1, 3))

    for _ in range(2):
        n = gf.nn.layer_norm(h, gf.variable(one), zeros(width))
        q, k, v = map(split, gf.split(n @ weight(width, 3 * width), 3, axis=-1))
        seen = gf.permute_dims(gf.nn.attention(q, k, v, causal=True), (0, 2, 1, 3))
        h = h + gf.reshape(seen, (batch, time, width)) @ weight(width, width)
        n = gf.nn.layer_norm(h, gf.variable(one), zeros(width))
        h = h + gf.nn.gelu(n @ weight(width, 4 * width)) @ weight(4 * width, width)
    loss = gf.mean(gf.nn.cross_entropy(h @ weight(width, 256), ids))
    return [loss, gf.optim.Adam(1e-3).minimize(loss)], {ids: np.zeros((batch, time), "int64")}


def lstm(time: int = 16, batch: int = 16, width: int = 64) -> Case:
    x = gf.placeholder("float32", (time, batch, width))
    w, b = weight(2 * width, 4 * width), zeros(4 * width)

    def cell(state: Any, now: Any) -> Any:
        h, c = state
        i, f, g, o = gf.split(gf.concat([now, h], axis=1) @ w + b, 4, axis=1)
        c = gf.nn.sigmoid(f) * c + gf.nn.sigmoid(i) * gf.tanh(g)
        h = gf.nn.sigmoid(o) * gf.tanh(c)
        return (h, c), h

    start = gf.zeros((batch, width), "float32")
    _, hs = gf.scan(cell, (start, start), x)
    loss = gf.mean(gf.square(hs))
    train = gf.optim.SGD(0.1, momentum=0.9).minimize(loss)
    return [loss, train], {x: np.ones((time, batch, width), "float32")}


def build_deep_case(checkpoint: bool, layers: int = 24, batch: int = 512, width: int = 64) -> Case:
    x = gf.placeholder("float32", (batch, width))

    def group(h: Any, *ws: Any) -> Any:
        for w in ws:
            h = gf.tanh(h @ w)
        return h

    h = x
    for _ in range(0, layers, 4):
        ws = [weight(width, width) for _ in range(4)]
        h = (gf.checkpoint(group) if checkpoint else group)(h, *ws)
    loss = gf.mean(gf.square(h))
    return [loss, gf.optim.SGD(0.1).minimize(loss)], {x: np.ones((batch, width), "float32")}


def deep_scan(checkpoint: bool, layers: int = 16, batch: int = 256, width: int = 64) -> Case:
    x = gf.placeholder("float32", (batch, width))
    ws = weight(layers, width, width)

    def block(h: Any, w: Any) -> Any:
        for _ in range(4):
            h = gf.tanh(h @ w)
        return h

    kept = gf.checkpoint(block) if checkpoint else block
    h, _ = gf.scan(lambda h, w: (kept(h, w), h[0, 0]), x, ws)
    loss = gf.mean(gf.square(h))
    return [loss, gf.optim.SGD(0.1).minimize(loss)], {x: np.ones((batch, width), "float32")}


def sums_of_products(rows: int = 1200, width: int = 512) -> Case:
    """Whose terms a library makes, as so many rows are better left to."""
    xs = [gf.placeholder("float32", (None, width)) for _ in range(2)]
    one, other = (gf.matmul(x, x * 2.0, transpose_a=True) for x in xs)
    return [one + other], {x: np.ones((rows, width), "float32") for x in xs}


MODELS: dict[str, Callable[[], Case]] = {
    "sgd": lambda: mlp(gf.optim.SGD(0.05, momentum=0.9)),
    "adam": lambda: mlp(gf.optim.Adam(1e-3)),
    "16 bits": mlp_in_16_bits,
    "convnet": convnet,
    "gpt": gpt,
    "lstm": lstm,
    "sums of products": sums_of_products,
    "checkpoint": lambda: build_deep_case(True),
    "checkpoint in a scan": lambda: deep_scan(True),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("model", MODELS)
def test_what_is_predicted_is_what_a_step_takes(model: str) -> None:
    fetches, feeds = MODELS[model]()
    with gf.Session() as s:
        s.run(fetches, feeds)
        with s.trace(memory=True):
            s.run(fetches, feeds)
        ((name, each),) = s.memory().items()
        assert name in s.memory()._repr_html_()
        assert each.recorded is not None
        assert each.recorded == pytest.approx(each.predicted, rel=0.05)
        plan = s.plan()
        assert plan.measured is not None
        assert plan.peak_memory[name] == each.predicted
        assert plan.measured.peak_memory[name] == each.recorded


def test_a_plan_without_a_session_predicts_the_same() -> None:
    fetches, feeds = mlp(gf.optim.Adam(1e-3))
    planned = gf.plan(fetches)
    with gf.Session() as s:
        s.run(fetches, feeds)
        assert dict(planned.peak_memory) == {n: m.predicted for n, m in s.memory().items()}


def test_a_process_without_a_session_predicts_the_same() -> None:
    program = (
        "import graphflow as gf; x = gf.placeholder('float32', (16, 64, 32, 32));"
        "w = gf.placeholder('float32', (64, 64, 3, 3)); y = gf.nn.conv2d(x, w, padding=1);"
        "print(dict(gf.plan([y], gf.Cluster.here(['cpu:0'], threads=2)).peak_memory))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT
    )
    x = gf.placeholder("float32", (16, 64, 32, 32))
    w = gf.placeholder("float32", (64, 64, 3, 3))
    here = gf.plan([gf.nn.conv2d(x, w, padding=1)], gf.Cluster.here(["cpu:0"], threads=2))
    assert done.stdout == f"{dict(here.peak_memory)}\n"


def test_devices_beside_each_other_have_figures_of_their_own() -> None:
    x = gf.placeholder("float32", (64, 64))
    with gf.device("cpu:0"):
        y = gf.tanh(x @ weight(64, 64))
    with gf.device("cpu:1"):
        z = gf.sum(y @ weight(64, 64))
    with gf.Session(gf.Cluster.here(("cpu:0", "cpu:1"))) as s:
        s.run(z, {x: np.ones((64, 64), "float32")})
        with s.trace():
            s.run(z, {x: np.ones((64, 64), "float32")})
        report = s.memory(z)
        first, second = report.values()
        assert (first.use.feeds, first.use.recvs) == (64 * 64 * 4, 0)
        assert (second.use.feeds, second.use.recvs) == (0, 64 * 64 * 4)
        assert {n: m.predicted for n, m in report.items()} == dict(s.plan().peak_memory)
        assert all(m.recorded == m.predicted for m in report.values())
        assert "arrivals" in str(report)


@pytest.mark.parametrize("model", [build_deep_case, deep_scan])
def test_a_checkpoint_takes_less_memory(model: Callable[[bool], Case]) -> None:
    arenas = []
    for checkpoint in (False, True):
        fetches, feeds = model(checkpoint)
        with gf.Session() as s:
            s.run(fetches, feeds)
            (each,) = s.memory().values()
        arenas.append(each.use.arena)
    assert arenas[1] < 0.75 * arenas[0]


def test_memory_of_nothing_is_refused() -> None:
    with gf.Session() as s:
        with pytest.raises(gf.errors.SessionError, match="run them first"):
            s.memory()
        with (
            pytest.raises(gf.errors.ArgumentError, match="memory must be True or False"),
            s.trace(memory=1),  # type: ignore[arg-type]
        ):
            pass
