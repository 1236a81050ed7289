"""A training step of an MLP 784-512-256-10 with momentum, against torch and JAX in one run.

    python benchmarks/mlp.py [--rounds 40] [--output results/mlp.json]

All contenders take the same batch from numpy and hand the loss back to Python. "matmuls" is numpy
doing the step's matrix products alone, the floor for anything that calls the same BLAS.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from peers import arguments, interleaved, optional, report, write

SIZES = (784, 512, 256, 10)
RATE, MOMENTUM = 0.05, 0.9
Arrays = list[np.ndarray]


def weights() -> Arrays:
    random = np.random.default_rng(0)
    shapes = list(pairwise(SIZES))
    return [(random.normal(size=s) * np.sqrt(2 / s[0])).astype("float32") for s in shapes]


def graphflow_step(x: np.ndarray, y: np.ndarray) -> Callable[[], object]:
    import graphflow as gf

    images = gf.placeholder("float32", (None, SIZES[0]))
    labels = gf.placeholder("int64", (None,))
    h = images
    for i, w in enumerate(weights()):
        h = h @ gf.variable(w) + gf.variable(np.zeros(w.shape[1], "float32"))
        h = gf.nn.relu(h) if i < len(SIZES) - 2 else h
    loss = gf.mean(gf.nn.cross_entropy(h, labels))
    train = gf.optim.SGD(RATE, momentum=MOMENTUM).minimize(loss)
    session = gf.Session()
    return lambda: float(session.run([loss, train], {images: x, labels: y})[0])


def torch_step(x: np.ndarray, y: np.ndarray) -> Callable[[], object]:
    import torch

    layers: list[torch.nn.Module] = []
    for i, w in enumerate(weights()):
        layer = torch.nn.Linear(*w.shape)
        with torch.no_grad():
            layer.weight.copy_(torch.from_numpy(w.T))
            layer.bias.zero_()
        layers += [layer, torch.nn.ReLU()] if i < len(SIZES) - 2 else [layer]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)

    def step() -> float:
        optimizer.zero_grad()
        logits = model(torch.from_numpy(x))
        loss = torch.nn.functional.cross_entropy(logits, torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        return float(loss)

    return step


def jax_step(x: np.ndarray, y: np.ndarray) -> Callable[[], object]:
    import jax
    import jax.numpy as jnp

    parameters = [(jnp.asarray(w), jnp.zeros(w.shape[1])) for w in weights()]
    state = [parameters, jax.tree.map(jnp.zeros_like, parameters)]

    def loss_of(parameters, x, y):
        h = x
        for i, (w, b) in enumerate(parameters):
            h = h @ w + b
            h = jax.nn.relu(h) if i < len(parameters) - 1 else h
        return -jnp.mean(jax.nn.log_softmax(h)[jnp.arange(len(y)), y])

    @jax.jit
    def update(parameters, velocity, x, y):
        loss, grads = jax.value_and_grad(loss_of)(parameters, x, y)
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
        return jax.tree.map(lambda w, v: w - RATE * v, parameters, velocity), velocity, loss

    def step() -> float:
        state[0], state[1], loss = update(*state, x, y)
        return float(loss)

    return step


def matmuls(x: np.ndarray, y: np.ndarray) -> Callable[[], object]:
    """The step's eight matrix products with `out=`."""
    ws = weights()
    hs = [x] + [np.ones((len(x), w.shape[1]), "float32") for w in ws]
    gs = [np.empty_like(h) for h in hs]
    dws = [np.empty_like(w) for w in ws]

    def step() -> None:
        for w, h, out in zip(ws, hs, hs[1:], strict=False):
            np.matmul(h, w, out=out)
        for i in reversed(range(len(ws))):
            np.matmul(hs[i].T, gs[i + 1], out=dws[i])
            if i:
                np.matmul(gs[i + 1], ws[i].T, out=gs[i])

    return step


def main() -> None:
    options = arguments("MLP training step").parse_args()
    results = []
    for batch in (16, 128):
        random = np.random.default_rng(1)
        x = random.normal(size=(batch, SIZES[0])).astype("float32")
        y = random.integers(0, SIZES[-1], batch)
        steps = {
            "graphflow": graphflow_step(x, y),
            **optional("torch", lambda x=x, y=y: torch_step(x, y)),
            **optional("jax", lambda x=x, y=y: jax_step(x, y)),
            "matmuls": matmuls(x, y),
        }
        losses = {name: step() for name, step in steps.items() if name != "matmuls"}
        spread = max(losses.values()) - min(losses.values())
        assert spread < 1e-3, f"contenders compute different losses: {losses}"
        results.append(report(f"MLP step, batch {batch}", interleaved(steps, options.rounds)))
    write("mlp", results, options.output)


if __name__ == "__main__":
    main()
