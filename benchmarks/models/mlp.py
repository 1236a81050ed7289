"""A training step of an MLP 784-512-256-10 with momentum, at batch 16 and 128.

    python benchmarks/models/mlp.py [--threads 1] [--rounds 40] [--output results/mlp.json]

"matmuls" is numpy doing the step's eight matrix products alone, the floor for anything that calls
the same BLAS.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import pinned_arguments, write
from training import Arrays, Model, contest

SIZES = (784, 512, 256, 10)
LAYERS = len(SIZES) - 1


def weights() -> Arrays:
    random = np.random.default_rng(0)
    named = {}
    for i, (n, m) in enumerate(pairwise(SIZES)):
        named[f"w{i}"] = (random.normal(size=(n, m)) * np.sqrt(2 / n)).astype("float32")
        named[f"b{i}"] = np.zeros(m, "float32")
    return named


def batch_of(size: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(1)
    images = random.normal(size=(size, SIZES[0])).astype("float32")
    return images, random.integers(0, SIZES[-1], size)


def graphflow_loss(p: Any, x: Any, y: Any) -> Any:
    import graphflow as gf

    for i in range(LAYERS):
        x = x @ p[f"w{i}"] + p[f"b{i}"]
        x = gf.nn.relu(x) if i < LAYERS - 1 else x
    return gf.mean(gf.nn.cross_entropy(x, y))


def torch_loss(p: Any, x: Any, y: Any) -> Any:
    import torch

    for i in range(LAYERS):
        x = torch.addmm(p[f"b{i}"], x, p[f"w{i}"])
        x = torch.relu(x) if i < LAYERS - 1 else x
    return torch.nn.functional.cross_entropy(x, y)


def jax_loss(p: Any, x: Any, y: Any) -> Any:
    import jax
    import jax.numpy as jnp

    for i in range(LAYERS):
        x = x @ p[f"w{i}"] + p[f"b{i}"]
        x = jax.nn.relu(x) if i < LAYERS - 1 else x
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1))


def tensorflow_loss(p: Any, x: Any, y: Any) -> Any:
    import tensorflow as tf

    for i in range(LAYERS):
        x = x @ p[f"w{i}"] + p[f"b{i}"]
        x = tf.nn.relu(x) if i < LAYERS - 1 else x
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, x))


def products(size: int) -> Callable[[], object]:
    """The step's eight matrix products with `out=`."""
    shapes = list(pairwise(SIZES))
    given, taken = ([[np.ones(s, "float32") for s in ((size, n), (n, m), (size, m))]
                     for n, m in shapes] for _ in range(2))  # fmt: skip

    def step() -> None:
        for i, ((x, w, g), (gx, gw, y)) in enumerate(zip(given, taken, strict=True)):
            np.matmul(x, w, out=y)
            np.matmul(x.T, g, out=gw)
            if i:
                np.matmul(g, w.T, out=gx)

    return step


def model(size: int) -> Model:
    return Model(
        f"MLP 784-512-256-10, batch {size}", 0.95, weights(), batch_of(size),
        graphflow_loss, torch_loss, jax_loss, products=products(size), tensorflow=tensorflow_loss,
    )  # fmt: skip


def main() -> None:
    options = pinned_arguments("MLP training step")
    write("mlp", [contest(model(size), options.rounds) for size in (16, 128)], options.output)


if __name__ == "__main__":
    main()
