"""The strategy that the search chooses, against every candidate run on two local workers.

    python benchmarks/auto.py [--rounds 5] [--output results/auto.json]

Candidates take turns, a few steps each. The goal: what the search chooses takes at most 5 % longer
than the best of all that were run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any

import gpt
import numpy as np
from peers import arguments, interleaved, write

import graphflow as gf
from graphflow.op import Tensor

GOAL = 1.05
Network = Callable[[], tuple[Tensor, dict[Tensor, np.ndarray]]]


def mlp() -> tuple[Tensor, dict[Tensor, np.ndarray]]:
    random = np.random.default_rng(0)
    x, y = gf.placeholder("float32", (512, 784)), gf.placeholder("int64", (512,))
    h: Any = x
    for i, (n, m) in enumerate([(784, 1024), (1024, 1024), (1024, 1024), (1024, 10)]):
        w = gf.variable((random.normal(size=(n, m)) / n**0.5).astype("float32"), name=f"w{i}")
        h = h @ w if i == 3 else gf.nn.relu(h @ w + gf.variable(np.zeros(m, "float32")))
    images = random.normal(size=(512, 784)).astype("float32")
    return gf.mean(gf.nn.cross_entropy(h, y)), {x: images, y: random.integers(0, 10, 512)}


def blocks() -> tuple[Tensor, dict[Tensor, np.ndarray]]:
    given = gpt.model()
    p = {name: gf.variable(value, name=name) for name, value in gpt.weights().items()}
    ids, targets = (gf.placeholder("int64", f.shape) for f in given.feeds)
    loss = gpt.graphflow_loss(p, ids, targets)
    return loss, dict(zip((ids, targets), given.feeds, strict=True))


def contest(title: str, network: Network, rounds: int) -> dict[str, Any]:
    cluster = gf.Cluster.local(2, threads=1)
    loss, feeds = network()
    optimizer = gf.optim.Adam(1e-3)
    shapes = {t: a.shape for t, a in feeds.items()}
    found = gf.parallel.auto(loss, cluster, shapes=shapes, optimizer=optimizer)
    with ExitStack() as stack:
        steps = {}
        for each in found.tried:
            if each.why_not:
                continue
            train = optimizer.minimize(loss, strategy=each.strategy)
            s = stack.enter_context(gf.Session(cluster))
            steps[each.name] = lambda s=s, train=train: s.run([loss, train], feeds)
        seconds = {name: median(t) for name, t in interleaved(steps, rounds, each=3).items()}
    best = min(seconds, key=seconds.__getitem__)
    ratio = seconds[found.best.name] / seconds[best]
    print(f"\n{title}: candidates, measured and predicted")
    for each in sorted(found.tried, key=lambda t: seconds.get(t.name, np.inf)):
        if each.name in seconds:
            print(
                f"  {each.name:<28} {seconds[each.name] * 1e3:8.1f} ms {each.seconds * 1e3:8.1f} ms"
            )
    print(f"chosen {found.best.name}; best {best}: {ratio:.3f} (goal {GOAL})", flush=True)
    predicted = {t.name: t.seconds for t in found.tried if not t.why_not}
    return {
        "title": title, "chosen": found.best.name, "best": best, "ratio": ratio, "goal": GOAL,
        "median_seconds": seconds, "predicted_seconds": predicted,
    }  # fmt: skip


def main() -> None:
    options = arguments("strategies that the search chooses").parse_args()
    rounds = min(options.rounds, 5)
    results = [
        contest("MLP 784-1024-1024-1024-10, batch 512", mlp, rounds),
        contest("two GPT blocks, batch 8", blocks, rounds),
    ]
    write("auto", results, options.output)


if __name__ == "__main__":
    main()
