"""A training step of two GPT blocks: batch 8, 128 tokens, width 256, 4 heads, 256 characters.

    python benchmarks/models/gpt.py [--threads 1] [--rounds 10] [--output results/gpt.json]

"matmuls" is numpy doing the step's matrix products alone, those of attention over whole sequences
included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import pinned_arguments, write
from training import Arrays, Model, contest

BATCH, TIME, WIDTH, HEADS, LAYERS, VOCABULARY = 8, 128, 256, 4, 2, 256
HEAD = WIDTH // HEADS
MATRICES = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH),
            "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}  # fmt: skip


def weights() -> Arrays:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) * 0.02).astype("float32")

    named = {"tokens": normal(VOCABULARY, WIDTH), "places": normal(TIME, WIDTH)}
    for i in range(LAYERS):
        for name, shape in MATRICES.items():
            named[f"{name}{i}"] = normal(*shape)
            named[f"{name}_bias{i}"] = np.zeros(shape[1], "float32")
        for name in ("first", "second"):
            named[f"{name}_scale{i}"] = np.ones(WIDTH, "float32")
            named[f"{name}_shift{i}"] = np.zeros(WIDTH, "float32")
    return {**named, "head": normal(WIDTH, VOCABULARY)}


def graphflow_loss(p: Any, ids: Any, targets: Any) -> Any:
    import graphflow as gf

    def heads(x: Any) -> Any:
        return gf.permute_dims(gf.reshape(x, (BATCH, TIME, HEADS, HEAD)), (0, 2, 1, 3))

    h = gf.nn.embedding(ids, p["tokens"]) + p["places"]
    for i in range(LAYERS):
        n = gf.nn.layer_norm(h, p[f"first_scale{i}"], p[f"first_shift{i}"])
        q, k, v = gf.split(n @ p[f"qkv{i}"] + p[f"qkv_bias{i}"], 3, axis=-1)
        seen = gf.nn.attention(heads(q), heads(k), heads(v), causal=True)
        seen = gf.reshape(gf.permute_dims(seen, (0, 2, 1, 3)), (BATCH, TIME, WIDTH))
        h = h + seen @ p[f"out{i}"] + p[f"out_bias{i}"]
        n = gf.nn.layer_norm(h, p[f"second_scale{i}"], p[f"second_shift{i}"])
        n = gf.nn.gelu(n @ p[f"up{i}"] + p[f"up_bias{i}"])
        h = h + n @ p[f"down{i}"] + p[f"down_bias{i}"]
    return gf.mean(gf.nn.cross_entropy(h @ p["head"], targets))


def torch_loss(p: Any, ids: Any, targets: Any) -> Any:
    from torch.nn import functional

    def norm(x: Any, name: str, i: int) -> Any:
        return functional.layer_norm(x, (WIDTH,), p[f"{name}_scale{i}"], p[f"{name}_shift{i}"])

    h = functional.embedding(ids, p["tokens"]) + p["places"]
    for i in range(LAYERS):
        n = norm(h, "first", i)
        q, k, v = (n @ p[f"qkv{i}"] + p[f"qkv_bias{i}"]).split(WIDTH, -1)
        q, k, v = (t.view(BATCH, TIME, HEADS, HEAD).transpose(1, 2) for t in (q, k, v))
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        seen = seen.transpose(1, 2).reshape(BATCH, TIME, WIDTH)
        h = h + seen @ p[f"out{i}"] + p[f"out_bias{i}"]
        n = functional.gelu(norm(h, "second", i) @ p[f"up{i}"] + p[f"up_bias{i}"])
        h = h + n @ p[f"down{i}"] + p[f"down_bias{i}"]
    return functional.cross_entropy((h @ p["head"]).view(-1, VOCABULARY), targets.view(-1))


def jax_loss(p: Any, ids: Any, targets: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def norm(x: Any, name: str, i: int) -> Any:
        x = x - x.mean(-1, keepdims=True)
        x = x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)
        return x * p[f"{name}_scale{i}"] + p[f"{name}_shift{i}"]

    h = p["tokens"][ids] + p["places"]
    for i in range(LAYERS):
        qkv = norm(h, "first", i) @ p[f"qkv{i}"] + p[f"qkv_bias{i}"]
        q, k, v = (t.reshape(BATCH, TIME, HEADS, HEAD) for t in jnp.split(qkv, 3, -1))
        seen = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        h = h + seen.reshape(BATCH, TIME, WIDTH) @ p[f"out{i}"] + p[f"out_bias{i}"]
        n = norm(h, "second", i) @ p[f"up{i}"] + p[f"up_bias{i}"]
        h = h + jax.nn.gelu(n, approximate=False) @ p[f"down{i}"] + p[f"down_bias{i}"]
    rows = jax.nn.log_softmax(h @ p["head"])
    return -jnp.mean(jnp.take_along_axis(rows, targets[..., None], -1))


def tensorflow_loss(p: Any, ids: Any, targets: Any) -> Any:
    import tensorflow as tf

    def norm(x: Any, name: str, i: int) -> Any:
        mean, variance = tf.nn.moments(x, -1, keepdims=True)
        scale, shift = p[f"{name}_scale{i}"], p[f"{name}_shift{i}"]
        return tf.nn.batch_normalization(x, mean, variance, shift, scale, 1e-5)

    def heads(x: Any) -> Any:
        return tf.transpose(tf.reshape(x, (BATCH, TIME, HEADS, HEAD)), (0, 2, 1, 3))

    def product(x: Any, name: str) -> Any:  # of rows: a batched product is slower
        y = tf.reshape(x, (BATCH * TIME, x.shape[-1])) @ p[name]
        return tf.reshape(y, (BATCH, TIME, y.shape[-1]))

    unseen = np.triu(np.full((TIME, TIME), -1e9, "float32"), 1)
    h = tf.gather(p["tokens"], ids) + p["places"]
    for i in range(LAYERS):
        q, k, v = tf.split(product(norm(h, "first", i), f"qkv{i}") + p[f"qkv_bias{i}"], 3, -1)
        scores = tf.matmul(heads(q), heads(k), transpose_b=True) * HEAD**-0.5 + unseen
        seen = tf.transpose(tf.nn.softmax(scores) @ heads(v), (0, 2, 1, 3))
        seen = tf.reshape(seen, (BATCH, TIME, WIDTH))
        h = h + product(seen, f"out{i}") + p[f"out_bias{i}"]
        n = tf.nn.gelu(product(norm(h, "second", i), f"up{i}") + p[f"up_bias{i}"])
        h = h + product(n, f"down{i}") + p[f"down_bias{i}"]
    rows = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, product(h, "head"))
    return tf.reduce_mean(rows)


def products() -> Callable[[], object]:
    """Each product forward, and its two gradients; attention's seven of a layer (its scores are
    computed twice)."""
    rows = BATCH * TIME
    shapes = [*MATRICES.values()] * LAYERS + [(WIDTH, VOCABULARY)]
    given, taken = ([[np.ones(s, "float32") for s in ((rows, n), (n, m), (rows, m))]
                     for n, m in shapes] for _ in range(2))  # fmt: skip
    narrow, narrow_out = (np.ones((BATCH * HEADS, TIME, HEAD), "float32") for _ in range(2))
    square, square_out = (np.ones((BATCH * HEADS, TIME, TIME), "float32") for _ in range(2))

    def step() -> None:
        for (x, w, g), (gx, gw, y) in zip(given, taken, strict=True):
            np.matmul(x, w, out=y)
            np.matmul(x.T, g, out=gw)
            np.matmul(g, w.T, out=gx)
        for _ in range(LAYERS):
            for _ in range(3):
                np.matmul(narrow, narrow.swapaxes(1, 2), out=square_out)
            for _ in range(4):
                np.matmul(square, narrow, out=narrow_out)

    return step


def model() -> Model:
    random = np.random.default_rng(1)
    feeds = tuple(random.integers(0, VOCABULARY, (BATCH, TIME)) for _ in range(2))
    return Model(
        "two GPT blocks (B 8, T 128, d 256, h 4)", 0.95, weights(), feeds,
        graphflow_loss, torch_loss, jax_loss, products=products(),
        tensorflow=tensorflow_loss,
    )  # fmt: skip


def main() -> None:
    options = pinned_arguments("GPT training step", rounds=10)
    write("gpt", [contest(model(), options.rounds, each=3)], options.output)


if __name__ == "__main__":
    main()
