"""Batches of 60,000 rows of 784 floats in random order, against torch's DataLoader.

    python benchmarks/runtime/data.py [--threads 1] [--rounds 5] [--output FILE]

One epoch of batches of 128 as arrays. torch's loader reads a
TensorDataset without worker processes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import interleaved, optional, pinned_arguments, report, write

ROWS, WIDTH, BATCH = 60_000, 784, 128


def torch_epoch(x: Any, y: Any) -> Any:
    """Return a function that reads an epoch by torch's loader."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.tensor(x), torch.tensor(y)), BATCH, shuffle=True)
    return lambda: sum(len(labels) for _, labels in loader)


if __name__ == "__main__":
    options = pinned_arguments(__doc__ or "", rounds=5)
    import graphflow as gf

    random = np.random.default_rng(0)
    x, y = random.random((ROWS, WIDTH), "float32"), random.integers(0, 10, ROWS)
    ours = gf.data.arrays(x=x, y=y).shuffle(0).batch(BATCH)
    steps = {"graphflow": lambda: sum(len(batch["y"]) for batch in ours)}
    seconds = interleaved(steps | optional("torch", lambda: torch_epoch(x, y)), options.rounds, 1)
    write("data", [report("an epoch of batches", seconds, goal=0.5)], options.output)
