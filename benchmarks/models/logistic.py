"""A step of logistic regression on the whole data: dense, and sparse in CSR form.

    python benchmarks/models/logistic.py [--threads 1] [--rounds 20] [--output FILE]

The sparse one runs against torch's CSR tensors, JAX's BCOO (which has no CSR on CPUs), and scipy's
CSR products in numpy, as scikit-learn does them.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import Steps, interleaved, optional, pinned_arguments, report, write
from training import Model, contest

ROWS, COLUMNS = 20_000, 256
SPARSE_ROWS, SPARSE_COLUMNS, EACH = 20_000, 10_000, 30
RATE = 0.1


# Dense ------------------------------------------------------------------------------------------


def graphflow_loss(p: Any, x: Any, y: Any) -> Any:
    import graphflow as gf

    return gf.mean(gf.nn.binary_cross_entropy_with_logits(x @ p["w"] + p["b"], y))


def torch_loss(p: Any, x: Any, y: Any) -> Any:
    from torch.nn import functional

    return functional.binary_cross_entropy_with_logits(x @ p["w"] + p["b"], y)


def jax_loss(p: Any, x: Any, y: Any) -> Any:
    import jax
    import jax.numpy as jnp

    logits = x @ p["w"] + p["b"]
    return jnp.mean(jax.nn.softplus(logits) - y * logits)


def dense() -> Model:
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, COLUMNS)).astype("float32")
    y = (x @ random.normal(size=COLUMNS) > 0).astype("float32")
    start = {"w": np.zeros(COLUMNS, "float32"), "b": np.zeros((), "float32")}
    return Model(
        f"logistic regression, dense {ROWS}×{COLUMNS}", 0.8, start, (x, y),
        graphflow_loss, torch_loss, jax_loss, RATE,
    )  # fmt: skip


# Sparse -----------------------------------------------------------------------------------------


def data() -> tuple[Any, np.ndarray]:
    """A scipy CSR matrix with `EACH` entries a row, and labels."""
    from scipy import sparse

    random = np.random.default_rng(0)
    columns = np.sort(random.integers(0, SPARSE_COLUMNS, (SPARSE_ROWS, EACH)), axis=1)
    values = random.normal(size=columns.size).astype("float32")
    offsets = np.arange(0, columns.size + 1, EACH)
    shape = (SPARSE_ROWS, SPARSE_COLUMNS)
    matrix = sparse.csr_matrix((values, columns.reshape(-1), offsets), shape)
    matrix.sum_duplicates()
    return matrix, random.integers(0, 2, SPARSE_ROWS).astype("float32")


def graphflow_sparse(matrix: Any, y: np.ndarray) -> Callable[[], float]:
    import graphflow as gf

    x = gf.sparse.from_scipy(matrix)
    w, b = gf.variable(np.zeros(SPARSE_COLUMNS, "f4")), gf.variable(np.zeros((), "f4"))
    labels = gf.placeholder("float32", y.shape)
    logits = gf.sparse.spmv(x, w) + b
    loss = gf.mean(gf.nn.binary_cross_entropy_with_logits(logits, labels))
    update = gf.optim.SGD(RATE).minimize(loss)
    session = gf.Session(devices=["cpu:0"])
    return lambda: float(session.run([loss, update], {labels: y})[0])


def torch_sparse(matrix: Any, y: np.ndarray) -> Callable[[], float]:
    import torch

    warnings.filterwarnings("ignore", module=__name__)  # torch: its CSR tensors are in beta state
    parts = (torch.from_numpy(a) for a in (matrix.indptr, matrix.indices, matrix.data))
    x = torch.sparse_csr_tensor(*parts, size=matrix.shape)
    w, b = torch.zeros(SPARSE_COLUMNS, requires_grad=True), torch.zeros((), requires_grad=True)
    optimizer = torch.optim.SGD([w, b], RATE, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        loss = torch_loss({"w": w, "b": b}, x, torch.from_numpy(y))
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def jax_sparse(matrix: Any, y: np.ndarray) -> Callable[[], float]:
    import jax
    import jax.numpy as jnp
    from jax.experimental import sparse

    x = sparse.BCOO.from_scipy_sparse(matrix)
    state = {"w": jnp.zeros(SPARSE_COLUMNS), "b": jnp.zeros(())}

    @jax.jit
    def update(state: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(jax_loss)(state, x, y)
        return jax.tree.map(lambda w, g: w - RATE * g, state, grads), loss

    def step() -> float:
        nonlocal state
        state, loss = update(state, y)
        return float(loss)

    return step


def scipy_sparse(matrix: Any, y: np.ndarray) -> Callable[[], float]:
    w, b = np.zeros(SPARSE_COLUMNS, "f4"), np.float32(0)

    def step() -> float:
        nonlocal b
        logits = matrix @ w + b
        loss = np.mean(np.logaddexp(0, logits) - y * logits)
        gradient = (1 / (1 + np.exp(-logits)) - y) / np.float32(len(y))
        w[:] -= RATE * (matrix.T @ gradient)
        b = np.float32(b - RATE * gradient.sum())
        return float(loss)

    return step


def sparse(rounds: int) -> dict[str, Any]:
    matrix, y = data()
    steps: Steps = {
        "graphflow": graphflow_sparse(matrix, y),
        **optional("torch", lambda: torch_sparse(matrix, y)),
        **optional("jax", lambda: jax_sparse(matrix, y)),
        "scipy": scipy_sparse(matrix, y),
    }
    losses = {name: [step() for _ in range(3)][-1] for name, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 1e-3:
        raise SystemExit(f"the contenders' losses differ: {losses}")
    title = f"logistic regression, CSR {SPARSE_ROWS}×{SPARSE_COLUMNS}, {EACH} a row"
    return report(title, interleaved(steps, rounds), goal=0.8)


def main() -> None:
    options = pinned_arguments("logistic regression", rounds=20)
    write("logistic", [contest(dense(), options.rounds), sparse(options.rounds)], options.output)


if __name__ == "__main__":
    main()
