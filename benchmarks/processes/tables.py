"""A table whose rows lie on two local workers, against two processes of torch's.

    python benchmarks/processes/tables.py [--rounds 20] [--small] [--output results/tables.json]

Each step looks up ids that follow Zipf's law, with another batch each time, and updates the rows by
Adagrad. Ours divides the rows over two workers of one thread each. Torch's two processes hold
`EmbeddingBag(sparse=True)` each and exchange sparse gradients over gloo, by
DistributedDataParallel. The first losses must agree. Bytes are those of a trace.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import arguments, interleaved, optional, report, write
from torch_pair import TorchPair, process_group, serve_steps

GOAL = 1 / 3
WORKERS = 2
RATE = 0.05
BATCHES = 8
EXPONENT = 1.05
TARGET_BYTES, TARGET_SECONDS = 2.5e6, 15e-3


def sizes(small: bool) -> tuple[int, int, int]:
    """Rows, width and lookups a step."""
    return (10_000, 16, 512) if small else (1_000_000, 64, 16_384)


def table(small: bool) -> np.ndarray:
    rows, width, _ = sizes(small)
    return (np.random.default_rng(0).normal(size=(rows, width)) * 0.1).astype("float32")


def batches(small: bool) -> list[np.ndarray]:
    """Ids of each step; the most frequent id is 0."""
    rows, _, lookups = sizes(small)
    shares = 1 / np.arange(1, rows + 1) ** EXPONENT
    random = np.random.default_rng(1)
    return [random.choice(rows, lookups, p=shares / shares.sum()) for _ in range(BATCHES)]


# Ours -------------------------------------------------------------------------------------------


class Ours:
    """A step of a session over two local workers."""

    def __init__(self, small: bool) -> None:
        import graphflow as gf

        _, _, lookups = sizes(small)
        ids = gf.placeholder("int64", (lookups,), name="ids")
        rows = gf.variable(table(small), name="table")
        loss = gf.mean(gf.sum(gf.nn.embedding(ids, rows), axis=1) ** 2)
        strategy = gf.parallel.Data(WORKERS, tables=[rows])
        train = gf.optim.Adagrad(RATE).minimize(loss, strategy=strategy)
        self._session = gf.Session(gf.Cluster.local(WORKERS, threads=1))
        self._fetches, self._ids = [loss, train], ids
        self._batches: Iterator[np.ndarray] = cycle(batches(small))

    def __call__(self) -> float:
        found = self._session.run(self._fetches, {self._ids: next(self._batches)})
        return float(found[0])

    def bytes(self) -> float:
        """Bytes between the workers in a step: the mean over all batches."""
        with self._session.trace() as trace:
            for _ in range(BATCHES):
                self()
        inside = (e for e in trace.edges if "client" not in e.source + e.target)
        return sum(e.bytes * e.count for e in inside) / BATCHES

    def close(self) -> None:
        self._session.close()


# Torch's ----------------------------------------------------------------------------------------


def serve(small: bool, rank: int, store: str) -> None:
    """One of torch's processes: a step for each line."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    with process_group(rank, store):
        bag = torch.nn.EmbeddingBag.from_pretrained(
            torch.from_numpy(table(small)), freeze=False, mode="sum", sparse=True
        )
        model = DistributedDataParallel(bag)
        optimizer = torch.optim.Adagrad(model.parameters(), RATE, eps=1e-10)
        share = sizes(small)[2] // WORKERS
        parts = cycle(
            torch.from_numpy(ids[rank * share : (rank + 1) * share])[:, None]
            for ids in batches(small)
        )

        def step() -> float:
            optimizer.zero_grad()
            loss = (model(next(parts)).sum(1) ** 2).mean()
            loss.backward()
            optimizer.step()
            return float(loss.item())

        serve_steps(step)


# Contest ----------------------------------------------------------------------------------------


def contest(small: bool, rounds: int) -> dict[str, Any]:
    ours = Ours(small)
    made: list[TorchPair] = []

    def torch() -> Callable[[], object]:
        made.append(TorchPair([os.path.abspath(__file__), *["--small"] * small]))
        return made[0]

    steps: dict[str, Any] = {"graphflow": ours, **optional("torch", torch)}
    losses = {name: [step() for _ in range(3)] for name, step in steps.items()}
    for found in losses.values():
        assert np.allclose(found, losses["graphflow"], rtol=1e-3), losses
    seconds = interleaved(steps, rounds, each=BATCHES)
    moved = ours.bytes()
    for each in (ours, *made):
        each.close()
    rows, width, lookups = sizes(small)
    title = f"table of {rows:,} x {width}, {lookups:,} lookups a step"
    result = report(title, seconds, goal=GOAL)
    median = result["median_seconds"]["graphflow"]
    print(f"  {moved / 1e6:.2f} MB a step between workers (goal {TARGET_BYTES / 1e6} MB)")
    print(f"  {median * 1e3:.2f} ms a step (goal {TARGET_SECONDS * 1e3:.0f} ms)", flush=True)
    return {**result, "bytes": moved, "goal_bytes": TARGET_BYTES, "goal_seconds": TARGET_SECONDS}


if __name__ == "__main__":
    parser = arguments(__doc__ or "")
    parser.add_argument("--small", action="store_true", help="sizes of a moment, to try it")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--store", default="")
    parser.set_defaults(rounds=20)
    options = parser.parse_args()
    if options.store:
        serve(options.small, options.rank, options.store)
    else:
        write("tables", [contest(options.small, options.rounds)], options.output)
