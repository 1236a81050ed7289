"""A chain of 1,000 tiny nodes: products of 8×8 matrices and tanh by turns, forward only.

    python benchmarks/runtime/chain.py [--threads 1] [--rounds 20] [--output results/chain.json]

Reported a node, with how long the first call took.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import Steps, interleaved, optional, pinned_arguments, report, write

NODES, SIZE = 1_000, 8


def arrays() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x, w = (random.normal(size=(SIZE, SIZE)).astype("float32") for _ in range(2))
    return x, w / np.float32(np.sqrt(SIZE))


def chained(x: Any, w: Any, tanh: Callable[[Any], Any]) -> Any:
    for _ in range(NODES // 2):
        x = tanh(x @ w)
    return x


def graphflow_chain() -> Callable[[], np.ndarray]:
    import graphflow as gf

    x, w = arrays()
    fed = gf.placeholder("float32", x.shape)
    y = chained(fed, gf.variable(w), gf.tanh)
    session = gf.Session(devices=["cpu:0"])
    return lambda: session.run(y, {fed: x})


def torch_chain() -> Callable[[], Any]:
    import torch

    x, w = map(torch.from_numpy, arrays())

    def step() -> Any:
        with torch.no_grad():
            return chained(x, w, torch.tanh).numpy()

    return step


def jax_chain() -> Callable[[], Any]:
    import jax
    import jax.numpy as jnp

    x, w = arrays()
    run = jax.jit(lambda x, w: chained(x, w, jnp.tanh))
    w = jnp.asarray(w)
    return lambda: np.asarray(run(x, w))


def numpy_chain() -> Callable[[], np.ndarray]:
    x, w = arrays()
    one, two = np.empty_like(x), np.empty_like(x)

    def step() -> np.ndarray:
        one[...] = x
        for _ in range(NODES // 2):
            np.matmul(one, w, out=two)
            np.tanh(two, out=one)
        return one.copy()

    return step


def main() -> None:
    options = pinned_arguments("a chain of tiny nodes", rounds=20)
    steps: Steps = {"graphflow": graphflow_chain(), **optional("torch", torch_chain)}
    steps |= {**optional("jax", jax_chain), "numpy": numpy_chain()}
    first, values = {}, {}
    for name, step in steps.items():
        start = time.perf_counter()
        values[name] = np.asarray(step())
        first[name] = time.perf_counter() - start
    for name, value in values.items():
        if not np.allclose(value, values["graphflow"], atol=1e-4):
            raise SystemExit(f"{name} computes another chain")
    title = f"chain of {NODES:,} nodes of {SIZE}×{SIZE}"
    result = report(title, interleaved(steps, options.rounds), goal=0.1)
    result["first_call_seconds"] = first
    for name, seconds in result["median_seconds"].items():
        ready = f", first call {first[name]:.2f} s"
        print(f"    {name:<12} {seconds / NODES * 1e6:.3f} µs a node{ready}")
    write("chain", [result], options.output)


if __name__ == "__main__":
    main()
