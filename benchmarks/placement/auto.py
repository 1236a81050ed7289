"""The strategy that the search chooses, against every candidate run on two local workers.

    python benchmarks/placement/auto.py [mlp|tall|tiny|cnn|head|gpt|lstm|wide …] [--rounds 5]

Candidates take turns, a few steps each. The goal: what the search chooses takes at most 5 % longer
than the best of all that were run. What is kept of this machine from before is not used: the search
calibrates in a folder of its own, as on a machine that it meets for the first time.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import graphflow as gf
from graphflow.op import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "models"))
import gpt
from peers import arguments, interleaved, write

GOAL = 1.05
Network = Callable[[], tuple[Tensor, dict[Tensor, np.ndarray]]]


def layers(batch: int, *widths: int) -> tuple[Tensor, dict[Tensor, np.ndarray]]:
    """An MLP."""
    random = np.random.default_rng(0)
    x, y = gf.placeholder("float32", (batch, widths[0])), gf.placeholder("int64", (batch,))
    h: Any = x
    for i, (n, m) in enumerate(pairwise(widths)):
        w = gf.variable((random.normal(size=(n, m)) / n**0.5).astype("float32"), name=f"w{i}")
        last = i == len(widths) - 2
        h = h @ w if last else gf.nn.relu(h @ w + gf.variable(np.zeros(m, "float32")))
    images = random.normal(size=(batch, widths[0])).astype("float32")
    return gf.mean(gf.nn.cross_entropy(h, y)), {
        x: images, y: random.integers(0, widths[-1], batch)
    }  # fmt: skip


def convolutions() -> tuple[Tensor, dict[Tensor, np.ndarray]]:
    """Three convolutions, pooling after each."""
    random = np.random.default_rng(0)
    batch, channels = 32, (3, 32, 64, 128)
    x = gf.placeholder("float32", (batch, 3, 32, 32))
    y = gf.placeholder("int64", (batch,))
    h: Any = x
    for i, (n, m) in enumerate(pairwise(channels)):
        w = gf.variable(random.normal(size=(m, n, 3, 3)).astype("float32") * 0.1, name=f"w{i}")
        h = gf.nn.max_pool(gf.nn.relu(gf.nn.conv(h, w, padding="same")), 2)
    head = gf.variable(random.normal(size=(channels[-1], 10)).astype("float32"), name="head")
    loss = gf.mean(gf.nn.cross_entropy(gf.mean(h, axis=(2, 3)) @ head, y))
    images = random.normal(size=(batch, 3, 32, 32)).astype("float32")
    return loss, {x: images, y: random.integers(0, 10, batch)}


def large_head() -> tuple[Tensor, dict[Tensor, np.ndarray]]:
    """Two convolutions, whose output a large product reads."""
    random = np.random.default_rng(0)
    batch, channels, wide = 32, (3, 16, 32), 1024
    x, y = gf.placeholder("float32", (batch, 3, 32, 32)), gf.placeholder("int64", (batch,))
    h: Any = x
    for i, (n, m) in enumerate(pairwise(channels)):
        w = gf.variable(random.normal(size=(m, n, 3, 3)).astype("float32") * 0.1, name=f"w{i}")
        h = gf.nn.max_pool(gf.nn.relu(gf.nn.conv(h, w, padding="same")), 2)
    h = gf.reshape(h, (batch, -1))
    for n, m in ((2048, wide), (wide, 10)):
        w = gf.variable((random.normal(size=(n, m)) / n**0.5).astype("float32"), name=f"head{m}")
        h = h @ w if m == 10 else gf.nn.relu(h @ w)
    images = random.normal(size=(batch, 3, 32, 32)).astype("float32")
    return gf.mean(gf.nn.cross_entropy(h, y)), {x: images, y: random.integers(0, 10, batch)}


def recurrent() -> tuple[Tensor, dict[Tensor, np.ndarray]]:
    """An LSTM over 32 steps, and a class for the last."""
    random = np.random.default_rng(0)
    gf.random.seed(0)
    x, y = gf.placeholder("float32", (64, 32, 128)), gf.placeholder("int64", (64,))
    states, _ = gf.nn.LSTM(128, 256)(gf.permute_dims(x, (1, 0, 2)))  # which has time first
    logits = gf.nn.Linear(256, 10)(states[-1])
    series = random.normal(size=(64, 32, 128)).astype("float32")
    return gf.mean(gf.nn.cross_entropy(logits, y)), {x: series, y: random.integers(0, 10, 64)}


def wide_and_deep() -> tuple[Tensor, dict[Tensor, np.ndarray]]:
    """Eight categories of a large table, beside numbers, through an MLP; and each one's own
    weight."""
    random = np.random.default_rng(0)
    batch, rows, dim, widths = 256, 50_000, 16, (8 * 16 + 13, 512, 256, 1)
    ids, dense = gf.placeholder("int64", (batch, 8)), gf.placeholder("float32", (batch, 13))
    y = gf.placeholder("float32", (batch,))
    table, wide = (
        gf.variable((random.normal(size=(rows, n)) * 0.1).astype("float32"), name=name)
        for n, name in ((dim, "table"), (1, "wide"))
    )
    h: Any = gf.concat([gf.reshape(gf.take(table, ids, axis=0), (batch, 8 * dim)), dense], axis=1)
    for i, (n, m) in enumerate(pairwise(widths)):
        w = gf.variable((random.normal(size=(n, m)) / n**0.5).astype("float32"), name=f"w{i}")
        h = h @ w if m == 1 else gf.nn.relu(h @ w)
    own = gf.sum(gf.reshape(gf.take(wide, ids, axis=0), (batch, 8)), axis=1)
    loss = gf.mean(gf.square(gf.reshape(h, (batch,)) + own - y))
    return loss, {
        ids: random.integers(0, rows, (batch, 8)),
        dense: random.normal(size=(batch, 13)).astype("float32"),
        y: random.normal(size=batch).astype("float32"),
    }


def blocks() -> tuple[Tensor, dict[Tensor, np.ndarray]]:
    """Two GPT blocks."""
    given = gpt.model()
    p = {name: gf.variable(value, name=name) for name, value in gpt.weights().items()}
    ids, targets = (gf.placeholder("int64", f.shape) for f in given.feeds)
    loss = gpt.graphflow_loss(p, ids, targets)
    return loss, dict(zip((ids, targets), given.feeds, strict=True))


MODELS: dict[str, tuple[str, Network]] = {
    "mlp": (
        "MLP 784-1024-1024-1024-10, batch 512",
        lambda: layers(512, 784, 1024, 1024, 1024, 10),
    ),
    "tall": ("MLP 2048-2048-2048-2048-10, batch 32", lambda: layers(32, *[2048] * 4, 10)),
    "tiny": ("MLP 4-16-2, batch 16", lambda: layers(16, 4, 16, 2)),
    "cnn": ("three convolutions, batch 32 of 32×32", convolutions),
    "head": ("two convolutions and a product of 2048 × 1024, batch 32 of 32×32", large_head),
    "gpt": ("two GPT blocks, batch 8", blocks),
    "lstm": ("LSTM of width 256 over 32 steps, batch 64", recurrent),
    "wide": ("wide and deep: a table of 50,000 × 16, batch 256", wide_and_deep),
}


def contest(title: str, network: Network, rounds: int) -> dict[str, Any]:
    """The search, and then all that it could have chosen."""
    cluster = gf.Cluster.local(2, threads=1)
    loss, feeds = network()
    optimizer = gf.optim.Adam(1e-3)
    shapes = {t: a.shape for t, a in feeds.items()}
    started = time.perf_counter()
    found = gf.parallel.auto(loss, cluster, shapes=shapes, optimizer=optimizer)
    searched = time.perf_counter() - started
    with ExitStack() as stack:
        steps = {}
        for each in found.tried:
            if each.why_not:
                continue
            alone = gf.parallel.Shard(mesh={"one": 1})
            train = optimizer.minimize(loss, strategy=each.strategy or alone)
            s = stack.enter_context(gf.Session(cluster, trial=False))
            steps[each.name] = lambda s=s, train=train: s.run([loss, train], feeds)
        seconds = {name: median(t) for name, t in interleaved(steps, rounds, each=3).items()}
    best = min(seconds, key=seconds.__getitem__)
    ratio = seconds[found.best.name] / seconds[best]
    predicted = {t.name: t.seconds for t in found.tried}
    print(f"\n{title}: searched in {searched:.1f} s; measured, predicted, their ratio")
    for name in sorted(seconds, key=seconds.__getitem__):
        measured, told = seconds[name] * 1e3, predicted[name] * 1e3
        print(f"  {name:<28} {measured:8.1f} ms {told:8.1f} ms {told / measured:6.2f}")
    print(f"chosen {found.best.name}; best {best}: {ratio:.3f} (goal {GOAL})", flush=True)
    return {
        "title": title, "chosen": found.best.name, "best": best, "ratio": ratio, "goal": GOAL,
        "search_seconds": searched, "median_seconds": seconds, "predicted_seconds": predicted,
    }  # fmt: skip


def main() -> None:
    parser = arguments("strategies that the search chooses")
    parser.add_argument("models", nargs="*", help="default: all")
    options = parser.parse_args()
    results = []
    for name in options.models or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["GRAPHFLOW_CACHE"] = folder
            results.append(contest(*MODELS[name], min(options.rounds, 5)))
    write("auto", results, options.output)


if __name__ == "__main__":
    main()
