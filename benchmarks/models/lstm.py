"""A training step of an LSTM over 64 steps: batch 32, width 256.

    python benchmarks/models/lstm.py [--threads 1] [--rounds 10] [--output results/lstm.json]

graphflow and torch use their layer, JAX and TensorFlow a scan over the cell.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import pinned_arguments, write
from training import Arrays, Model, contest

TIME, BATCH, WIDTH = 64, 32, 256


def weights() -> Arrays:
    """Gates in the order input, forget, cell, output."""
    random = np.random.default_rng(0)
    bound = WIDTH**-0.5

    def uniform(*shape: int) -> np.ndarray:
        return random.uniform(-bound, bound, shape).astype("float32")

    size = 4 * WIDTH
    return {"w": uniform(size, WIDTH), "r": uniform(size, WIDTH), "b": uniform(size)}


def graphflow_loss(p: Any, x: Any, y: Any) -> Any:
    import graphflow as gf

    bias = gf.concat([p["b"], gf.zeros(4 * WIDTH)], axis=0)
    w, r, bias = (gf.expand_dims(t, 0) for t in (p["w"], p["r"], bias))
    hidden, _ = gf.nn.lstm(x, w, r, bias, gates="ifgo")
    return gf.mean(gf.square(gf.reshape(hidden, (TIME, BATCH, WIDTH)) - y))


def torch_loss(p: Any, x: Any, y: Any) -> Any:
    import torch

    start = torch.zeros(1, BATCH, WIDTH)
    flat = [p["w"], p["r"], p["b"], torch.zeros(4 * WIDTH)]
    hidden, _, _ = torch._VF.lstm(x, (start, start), flat, True, 1, 0.0, True, False, False)
    return ((hidden - y) ** 2).mean()


def jax_loss(p: Any, x: Any, y: Any) -> Any:
    import jax
    import jax.numpy as jnp

    given = x @ p["w"].T + p["b"]

    def cell(state: Any, row: Any) -> Any:
        h, c = state
        i, f, g, o = jnp.split(row + h @ p["r"].T, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((BATCH, WIDTH))
    _, hidden = jax.lax.scan(cell, (start, start), given)
    return jnp.mean((hidden - y) ** 2)


def tensorflow_loss(p: Any, x: Any, y: Any) -> Any:
    import tensorflow as tf

    given = tf.reshape(x, (TIME * BATCH, WIDTH))
    given = tf.matmul(given, p["w"], transpose_b=True) + p["b"]
    given = tf.reshape(given, (TIME, BATCH, 4 * WIDTH))

    def cell(state: Any, row: Any) -> Any:
        h, c = state
        i, f, g, o = tf.split(row + tf.matmul(h, p["r"], transpose_b=True), 4, -1)
        c = tf.sigmoid(f) * c + tf.sigmoid(i) * tf.tanh(g)
        return tf.sigmoid(o) * tf.tanh(c), c

    start = tf.zeros((BATCH, WIDTH))
    hidden, _ = tf.scan(cell, given, (start, start))
    return tf.reduce_mean((hidden - y) ** 2)


def model() -> Model:
    random = np.random.default_rng(1)
    feeds = tuple(random.normal(size=(TIME, BATCH, WIDTH)).astype("float32") for _ in range(2))
    return Model(
        f"LSTM of {TIME} steps (batch {BATCH}, width {WIDTH})", 0.95, weights(), feeds,
        graphflow_loss, torch_loss, jax_loss, compiled=False, tensorflow=tensorflow_loss,
    )  # fmt: skip


def main() -> None:
    options = pinned_arguments("LSTM training step", rounds=10)
    write("lstm", [contest(model(), options.rounds, each=3)], options.output)


if __name__ == "__main__":
    main()
