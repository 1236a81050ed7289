"""Fused elementwise kernels by themselves: bias and GELU, and optimisers' updates of the MLP.

    python benchmarks/kernels/fused.py [--rounds 40] [--threads 2] [--output results/fused.json]

Everything stays where it is: inputs and results are variables, and a step hands nothing back. The
peers run as many threads; torch updates by its fused optimisers, JAX by one jitted function that
gives its buffers away.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import arguments, interleaved, optional, report, write

ROWS, COLUMNS = 512, 3072
SIZES = (784, 512, 256, 10)
RATE, MOMENTUM, BETA1, BETA2 = 1e-3, 0.9, 0.9, 0.999
SHAPES = [shape for a, b in pairwise(SIZES) for shape in ((a, b), (b,))]


def arrays(seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return [random.normal(size=s).astype("float32") for s in SHAPES]


def activation_inputs() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, COLUMNS)).astype("float32")
    return x, random.normal(size=COLUMNS).astype("float32")


def graphflow_activation(threads: int) -> Callable[[], object]:
    import graphflow as gf
    from graphflow.op import REGISTRY

    x, bias = (gf.variable(a) for a in activation_inputs())
    result = gf.variable(np.zeros((ROWS, COLUMNS), "float32"))
    done = REGISTRY["group"](gf.assign(result, gf.nn.gelu(x + bias)))  # hands nothing back
    session = gf.Session(gf.Cluster.here(devices=["cpu:0"], threads=threads))
    return lambda: session.run(done)


def torch_activation(threads: int) -> Callable[[], object]:
    import torch

    torch.set_num_threads(threads)
    x, bias = (torch.from_numpy(a) for a in activation_inputs())
    return lambda: torch.nn.functional.gelu(x + bias)


def jax_activation() -> Callable[[], object]:
    import jax
    import jax.numpy as jnp

    x, bias = (jnp.asarray(a) for a in activation_inputs())
    run = jax.jit(lambda x, b: jax.nn.gelu(x + b, approximate=False))
    return lambda: run(x, bias).block_until_ready()


def graphflow_update(adam: bool, threads: int) -> Callable[[], object]:
    import graphflow as gf

    grads = [gf.variable(a, trainable=False) for a in arrays(1)]
    optimizer = gf.optim.Adam(RATE, BETA1, BETA2) if adam else gf.optim.SGD(RATE, MOMENTUM)
    update = optimizer.apply(grads, [gf.variable(a) for a in arrays(0)])
    session = gf.Session(gf.Cluster.here(devices=["cpu:0"], threads=threads))
    return lambda: session.run(update)


def torch_update(adam: bool, threads: int) -> Callable[[], object]:
    import torch

    torch.set_num_threads(threads)
    ws = [torch.from_numpy(a).requires_grad_() for a in arrays(0)]
    for w, g in zip(ws, arrays(1), strict=True):
        w.grad = torch.from_numpy(g)
    if adam:
        return torch.optim.Adam(ws, RATE, (BETA1, BETA2), fused=True).step
    return torch.optim.SGD(ws, RATE, MOMENTUM, fused=True).step


def jax_update(adam: bool) -> Callable[[], object]:
    import jax
    import jax.numpy as jnp

    def by_adam(w, m, v, g, t):
        m, v = BETA1 * m + (1 - BETA1) * g, BETA2 * v + (1 - BETA2) * g * g
        step = RATE / (1 - BETA1**t) * m
        return w - step / (jnp.sqrt(v / (1 - BETA2**t)) + 1e-8), m, v

    def by_momentum(w, m, v, g, t):
        m = MOMENTUM * m + g
        return w - RATE * m, m, v

    rule = by_adam if adam else by_momentum
    update = jax.jit(
        lambda states, grads, t: [rule(*s, g, t) for s, g in zip(states, grads, strict=True)],
        donate_argnums=0,
    )
    grads = [jnp.asarray(a) for a in arrays(1)]
    kept = [[(jnp.asarray(a), jnp.zeros(a.shape), jnp.zeros(a.shape)) for a in arrays(0)], 0.0]

    def step() -> None:
        kept[1] += 1.0
        kept[0] = update(kept[0], grads, kept[1])
        kept[0][-1][0].block_until_ready()

    return step


def main() -> None:
    parser = arguments("fused elementwise kernels")
    parser.add_argument("--threads", type=int, default=2, help="of each contender but JAX")
    options = parser.parse_args()
    threads = options.threads
    results = []
    contests = {
        f"bias + GELU, {ROWS}×{COLUMNS}": (
            graphflow_activation, torch_activation, jax_activation, ()
        ),
        "momentum update": (graphflow_update, torch_update, jax_update, (False,)),
        "Adam update": (graphflow_update, torch_update, jax_update, (True,)),
    }  # fmt: skip
    for title, (ours, torchs, jaxs, given) in contests.items():
        steps = {
            "graphflow": ours(*given, threads),
            **optional("torch", lambda make=torchs, given=given: make(*given, threads)),
            **optional("jax", lambda make=jaxs, given=given: make(*given)),
        }
        results.append(report(f"{title}, {threads} threads", interleaved(steps, options.rounds)))
    write("fused", results, options.output)


if __name__ == "__main__":
    main()
