"""Training steps on sequences of many lengths, as texts have them: two blocks of attention.

    python benchmarks/runtime/sizes.py [--threads 1] [--rounds 3] [--output results/sizes.json]

Batches of 4 sequences of 16 to 75 tokens, width 128, each length once a pass, in an order that is
drawn anew each time. "first pass": all lengths are new, and whoever compiles does so for each of
them. Later passes: what a step takes once all were met.
"""

from __future__ import annotations

import math
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import Steps, optional, pinned_arguments, report, write
from training import AGREEING, Arrays, Model, Ours, jax_step, torch_step

BATCH, WIDTH, LAYERS, VOCABULARY = 4, 128, 2, 256
LENGTHS = range(16, 76)
NAMES = ("q", "k", "v", "out")


def weights() -> Arrays:
    random = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (random.normal(size=shape) / math.sqrt(shape[0])).astype("float32")

    square = {f"{name}{i}": normal(WIDTH, WIDTH) for i in range(LAYERS) for name in NAMES}
    up = {f"up{i}": normal(WIDTH, 4 * WIDTH) for i in range(LAYERS)}
    down = {f"down{i}": normal(4 * WIDTH, WIDTH) for i in range(LAYERS)}
    ends = {"tokens": normal(VOCABULARY, WIDTH), "head": normal(WIDTH, VOCABULARY)}
    return {**ends, **square, **up, **down}


def graphflow_loss(p: Any, ids: Any, targets: Any) -> Any:
    import graphflow as gf

    h = gf.nn.embedding(ids, p["tokens"])
    for i in range(LAYERS):
        n = gf.nn.layer_norm(h)
        q, k, v = (gf.expand_dims(n @ p[f"{name}{i}"], 1) for name in "qkv")
        h = h + gf.squeeze(gf.nn.attention(q, k, v, causal=True), 1) @ p[f"out{i}"]
        h = h + gf.nn.gelu(gf.nn.layer_norm(h) @ p[f"up{i}"]) @ p[f"down{i}"]
    return gf.mean(gf.nn.cross_entropy(h @ p["head"], targets))


def torch_loss(p: Any, ids: Any, targets: Any) -> Any:
    from torch.nn import functional

    h = functional.embedding(ids, p["tokens"])
    for i in range(LAYERS):
        n = functional.layer_norm(h, (WIDTH,))
        q, k, v = ((n @ p[f"{name}{i}"]).unsqueeze(1) for name in "qkv")
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + seen.squeeze(1) @ p[f"out{i}"]
        up = functional.layer_norm(h, (WIDTH,)) @ p[f"up{i}"]
        h = h + functional.gelu(up) @ p[f"down{i}"]
    return functional.cross_entropy((h @ p["head"]).view(-1, VOCABULARY), targets.view(-1))


def jax_loss(p: Any, ids: Any, targets: Any) -> Any:
    import jax
    import jax.numpy as jnp

    def norm(x: Any) -> Any:
        x = x - x.mean(-1, keepdims=True)
        return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)

    h = p["tokens"][ids]
    for i in range(LAYERS):
        n = norm(h)
        q, k, v = (jnp.expand_dims(n @ p[f"{name}{i}"], 2) for name in "qkv")
        h = h + jax.nn.dot_product_attention(q, k, v, is_causal=True)[:, :, 0] @ p[f"out{i}"]
        h = h + jax.nn.gelu(norm(h) @ p[f"up{i}"], approximate=False) @ p[f"down{i}"]
    rows = jax.nn.log_softmax(h @ p["head"])
    return -jnp.mean(jnp.take_along_axis(rows, targets[..., None], -1))


def feeds(length: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(length)
    return tuple(random.integers(0, VOCABULARY, (BATCH, length)) for _ in range(2))


def passes(steps: Steps, rounds: int) -> list[dict[str, list[float]]]:
    """Seconds of each contender's steps in the first pass, and in all others. By turns, a pass of
    one length after the other, all with the same one."""
    order = np.random.default_rng(1)
    found: list[dict[str, list[float]]] = [{name: [] for name in steps} for _ in range(2)]
    for turn in range(rounds + 1):
        for length in order.permutation(LENGTHS):
            fed = feeds(int(length))
            for name, step in steps.items():
                start = time.perf_counter()
                step(*fed)
                found[min(turn, 1)][name].append(time.perf_counter() - start)
    return found


def main() -> None:
    options = pinned_arguments("training steps on sequences of many lengths", rounds=3)
    model = Model(
        "", 0.9, weights(), feeds(LENGTHS[0]), graphflow_loss, torch_loss, jax_loss, any_size=True
    )
    steps: Steps = {"graphflow": Ours(model)}
    steps |= optional("torch", lambda: torch_step(model))
    steps |= optional("jax", lambda: jax_step(model))
    losses = {name: [step() for _ in range(AGREEING)] for name, step in steps.items()}
    for name, found in losses.items():
        assert np.allclose(found, losses["graphflow"], rtol=1e-4), f"{name} has other losses"
    first, later = passes(steps, options.rounds)
    title = f"{len(LENGTHS)} lengths, {LENGTHS[0]} to {LENGTHS[-1]}, d {WIDTH}"
    write(
        "sizes",
        [
            report(f"first pass over {title}", first),
            report(f"later passes over {title}", later, goal=model.goal),
        ],
        options.output,
    )


if __name__ == "__main__":
    main()
