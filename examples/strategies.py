"""One small GPT, trained by each strategy: the model stays, the numbers stay, what travels differs.

    python examples/strategies.py                 # all shards in this process
    python examples/strategies.py --workers       # two worker processes
    python examples/strategies.py --plans plans   # a page for each plan

Prints the loss curves side by side, what each strategy sends in a step, and the report of one.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import graphflow as gf

TEXT = (
    "a graph is cut along a mesh of devices, the pieces are computed where they are, and what one "
    "needs of another travels between them. "
) * 8
BATCH, TIME, WIDTH, HEADS, LAYERS = 8, 32, 32, 2, 2

STRATEGIES: dict[str, Any] = {
    "one device": None,
    "data": gf.parallel.Data(2),
    "data, state": gf.parallel.Data(2, shard_state=True),
    "data, 2 turns": gf.parallel.Data(2, accumulate=2),
    "tensor": gf.parallel.Shard(
        {"model": 2},
        {
            "*linear1/weight": ("model",),
            "*linear1/bias": ("model",),
            "*linear2/weight": (None, "model"),
        },
    ),
    "vocabulary": gf.parallel.Shard({"model": 2}, {"head": (None, "model")}),
    "sequence": gf.parallel.Shard({"time": 2}, {"letters": (None, "time")}),
    "pipeline": gf.parallel.Pipeline(2, "1f1b", microbatches=4),
    "zero bubble": gf.parallel.Pipeline(2, "zb-h1", microbatches=4),
}


class Trainer:
    """The model, its training step and its data."""

    def __init__(self, strategy: Any) -> None:
        gf.random.seed(0)
        letters = sorted(set(TEXT))
        self._codes = np.array([letters.index(c) for c in TEXT])
        random = np.random.default_rng(0)
        self.ids = gf.placeholder("int64", (BATCH, TIME), name="letters")
        self.targets = gf.placeholder("int64", (BATCH, TIME), name="next")
        table = gf.variable(random.normal(size=(len(letters), WIDTH)) * 0.1, name="embedding")
        places = gf.variable(random.normal(size=(TIME, WIDTH)) * 0.1, name="places")
        head = gf.variable(random.normal(size=(WIDTH, len(letters))) * 0.1, name="head")
        h = gf.nn.embedding(self.ids, table) + places
        for i in range(LAYERS):
            block = gf.nn.TransformerBlock(WIDTH, HEADS, dtype="float64", name=f"block{i}")
            h = block(h, causal=True)
        logits = gf.nn.layer_norm(h) @ head
        self.loss = gf.mean(gf.nn.cross_entropy(logits, self.targets))
        self.train = gf.optim.Adam(3e-3).minimize(self.loss, strategy=strategy)

    def curve(self, cluster: gf.Cluster | None, steps: int) -> list[float]:
        """The losses of some steps."""
        random = np.random.default_rng(1)
        losses = []
        with gf.Session(cluster) as session:
            for _ in range(steps):
                starts = random.integers(0, len(self._codes) - TIME - 1, BATCH)
                rows = self._codes[starts[:, None] + np.arange(TIME + 1)]
                feeds = {self.ids: rows[:, :-1], self.targets: rows[:, 1:]}
                losses.append(float(session.run([self.loss, self.train], feeds)[0]))
        return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--workers", action="store_true", help="two worker processes")
    parser.add_argument("--plans", type=Path, help="folder for a page with each plan")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error(f"--steps is a number from 1 on, not {options.steps}")
    cluster = gf.Cluster.local(2) if options.workers else None
    trainers = {name: Trainer(strategy) for name, strategy in STRATEGIES.items()}
    curves = {
        name: trainer.curve(None if name == "one device" else cluster, options.steps)
        for name, trainer in trainers.items()
    }
    print("step  " + "  ".join(f"{name:>13}" for name in curves))
    for step, losses in enumerate(zip(*curves.values(), strict=True)):
        print(f"{step:4}  " + "  ".join(f"{loss:13.9f}" for loss in losses))
    apart = max(abs(a - b) for c in curves.values() for a, b in zip(c, curves["data"], strict=True))
    print(f"\nlargest difference between any two strategies' losses: {apart:.1e}\n")
    for name, strategy in STRATEGIES.items():
        if strategy is None:
            continue
        trainer = trainers[name]
        report = strategy.report([trainer.loss, trainer.train])
        kinds = dict.fromkeys(move.kind for move in report.collectives)
        told = ", ".join(f"{report.count(kind)} {kind}" for kind in kinds)
        plan = gf.plan([trainer.loss, trainer.train], gf.Cluster.local(2))
        if isinstance(strategy, gf.parallel.Pipeline):
            sent = sum(t.bytes for t in plan.transfers if "/client" not in (t.source, t.target))
            print(f"{name:>13}: {sent:>9,} bytes a step (from stage to stage)")
        else:
            print(f"{name:>13}: {report.bytes:>9,} bytes a step ({told})")
        if options.plans is not None:
            options.plans.mkdir(parents=True, exist_ok=True)
            plan.save(options.plans / f"{name.replace(', ', '-').replace(' ', '-')}.html")
    print("\nTensor parallelism, in full:")
    trainer = trainers["tensor"]
    print(STRATEGIES["tensor"].report([trainer.loss, trainer.train]))


if __name__ == "__main__":
    main()
