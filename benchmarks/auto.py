"""The strategy that the search chooses, against every candidate run on two local workers.

    python benchmarks/auto.py [mlp|tall|cnn|gpt …] [--rounds 5] [--output results/auto.json]

Candidates take turns, a few steps each. The goal: what the search chooses takes at most 5 % longer
than the best of all that were run. What is kept of this machine from before is not used: the search
calibrates in a folder of its own, as on a machine that it meets for the first time.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import pairwise
from statistics import median
from typing import Any

import gpt
import numpy as np
from peers import arguments, interleaved, write

import graphflow as gf
from graphflow.op import Tensor

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
    return gf.mean(gf.nn.cross_entropy(h, y)), {x: images, y: random.integers(0, 10, batch)}


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
    "cnn": ("three convolutions, batch 32 of 32×32", convolutions),
    "gpt": ("two GPT blocks, batch 8", blocks),
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
