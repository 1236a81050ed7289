"""bfloat16: training steps under autocast, and products by AMX tiles, over torch and float32.

    python benchmarks/models/autocast.py [--threads 1] [--rounds 20] [--output FILE]

The models are those of `mlp.py` and `gpt.py`. Ratios of products are medians over rounds, in which
contenders take turns: a machine's tiles run at several speeds, and both see the same.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
import gpt
import mlp
from peers import Steps, interleaved, optional, pinned_arguments, report, write
from training import Model, Ours, torch_step

HALF = "bfloat16"
GOAL = 0.95
PRODUCTS = (
    (16, 784, 512), (128, 784, 512), (128, 512, 256), (1024, 256, 1024), (1024, 1024, 1024),
    (2048, 2048, 2048),
)  # fmt: skip
WAYS = {"x @ w": (False, False), "g @ w.T": (False, True), "x.T @ g": (True, False)}
LEAST_SECONDS = 1e-3


def under_autocast(model: Model) -> Model:
    """The model with its losses of graphflow and torch under autocast."""

    def ours(*given: Any) -> Any:
        import graphflow as gf

        with gf.autocast(HALF):
            return model.ours(*given)

    def torch_loss(*given: Any) -> Any:
        import torch

        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.torch(*given)

    return replace(model, ours=ours, torch=torch_loss)


def step_times(model: Model, rounds: int) -> dict[str, Any]:
    """Seconds of a step under autocast and in float32, of graphflow and torch."""
    half = under_autocast(model)
    steps: Steps = {"graphflow": Ours(half), "graphflow float32": Ours(model)}
    steps |= optional("torch", lambda: torch_step(half))
    steps |= optional("torch float32", lambda: torch_step(model))
    return report(f"{model.title}, autocast", interleaved(steps, rounds), goal=GOAL)


def product_times(rows: int, terms: int, columns: int, way: str, rounds: int) -> dict[str, Any]:
    """Our ratio to torch for a product of a layer, forward or of a gradient."""
    turns = WAYS[way]
    sizes = {"x": (rows, terms), "w": (terms, columns), "g": (rows, columns)}
    random = np.random.default_rng(0)
    a, b = (random.normal(size=sizes[name[0]]).astype(HALF) for name in way.split(" @ "))
    runs = {"graphflow": _ours(a, b, turns), **optional("torch", lambda: _torch(a, b, turns))}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    flops = 2.0 * rows * terms * columns
    count = max(1, int(LEAST_SECONDS / (flops / 1e12)))
    for turn in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(count):
                run()
            if turn:
                seconds[name].append((time.perf_counter() - start) / count)
    pairs = zip(seconds["graphflow"], seconds.get("torch", []), strict=False)
    ratio = median([ours / theirs for ours, theirs in pairs] or [math.nan])
    title = f"{rows}x{terms}x{columns} {way}"
    fastest = min(seconds["graphflow"])
    print(f"{title:<26} {fastest * 1e6:9.1f} us {flops / fastest / 1e9:7.0f} GF/s   {ratio:.2f}")
    return {"title": title, "seconds": fastest, "ratios": {"torch": ratio}}


def _ours(a: Any, b: Any, turns: tuple[bool, bool]) -> Callable[[], object]:
    from graphflow.ops.matrices.matmul import matmul_into

    shape = (a.shape[turns[0]], b.shape[1 - turns[1]])
    out = np.empty(shape, HALF)
    return lambda: matmul_into(np, out, a, b, *turns)


def _torch(a: Any, b: Any, turns: tuple[bool, bool]) -> Callable[[], object]:
    import torch

    x, y = (torch.from_numpy(m.view(np.int16)).view(torch.bfloat16) for m in (a, b))
    x, y = (m.t() if turned else m for m, turned in zip((x, y), turns, strict=True))
    out = torch.empty(x.shape[0], y.shape[1], dtype=torch.bfloat16)
    return lambda: torch.mm(x, y, out=out)


def main() -> None:
    options = pinned_arguments("bfloat16", rounds=20)
    models = (mlp.model(16), mlp.model(128), gpt.model())
    results = [step_times(model, options.rounds) for model in models]
    products = [
        product_times(*sizes, way, options.rounds) for way in WAYS for sizes in PRODUCTS
    ]  # fmt: skip
    mean = geometric_mean([each["ratios"]["torch"] for each in products])
    print(f"products over torch, geometric mean: {mean:.2f}")
    write("autocast", [*results, *products], options.output)


if __name__ == "__main__":
    main()
