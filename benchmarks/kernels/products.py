"""Products of matrices, shape by shape: our kernels, numpy's BLAS, torch, JAX.

    python benchmarks/kernels/products.py [--threads 1] [--rounds 40] [--output FILE]

The least of many times, since a product is short and the machine may be shared. The shapes are
those of the MLP at batch 16 and 128, of two GPT blocks, and batches of small matrices; "T" marks an
operand that is stored transposed. Where graphflow leaves a product to BLAS, "ours" is still the
kernel, and the line says so.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "lib"))
from peers import optional, pinned_arguments, write

MLP = ((784, 512), (512, 256), (256, 10))
GPT = ((256, 768), (256, 256), (256, 1024), (1024, 256))
BATCHES = (
    ((32,), 128, 64, 128, False, True), ((32,), 128, 128, 64, False, False),
    ((32,), 128, 128, 64, True, False), ((64,), 8, 8, 8, False, False),
    ((36,), 196, 64, 64, False, False), ((), 8, 8, 8, False, False),
    ((), 64, 64, 64, False, False),
)  # fmt: skip
Case = tuple[tuple[int, ...], int, int, int, bool, bool]


def cases() -> list[Case]:
    found: list[Case] = []
    for rows, layers in ((16, MLP), (128, MLP), (1024, GPT)):
        for n, m in layers:
            found += [
                ((), rows, n, m, False, False),
                ((), n, rows, m, True, False),
                ((), rows, m, n, False, True),
            ]
    return [*found, *BATCHES]


def contenders(case: Case) -> dict[str, Callable[[], object]]:
    batch, m, k, n, ta, tb = case
    random = np.random.default_rng(0)
    a = random.normal(size=(*batch, *((k, m) if ta else (m, k)))).astype("float32")
    b = random.normal(size=(*batch, *((n, k) if tb else (k, n)))).astype("float32")
    out, other = (np.empty((*batch, m, n), "float32") for _ in range(2))
    left, right = (x.swapaxes(-1, -2) if t else x for x, t in ((a, ta), (b, tb)))

    def torch() -> Callable[[], object]:
        import torch

        x, y, z = torch.from_numpy(left), torch.from_numpy(right), torch.empty(*batch, m, n)
        return lambda: torch.matmul(x, y, out=z)

    def jax() -> Callable[[], object]:
        import jax
        import jax.numpy as jnp

        turn = lambda x, t: x.swapaxes(-1, -2) if t else x  # noqa: E731
        run = jax.jit(lambda x, y: turn(x, ta) @ turn(y, tb))
        x, y = jnp.asarray(a), jnp.asarray(b)
        return lambda: run(x, y).block_until_ready()

    return {
        "ours": _bound(case, out, a, b),
        "numpy": lambda: np.matmul(left, right, out=other),
        **optional("torch", torch), **optional("jax", jax),
    }  # fmt: skip


def _bound(case: Case, *arrays: np.ndarray) -> Callable[[], object]:
    """Our kernel as a program calls it: its operands are known before."""
    from graphflow.ops.kernels.gemm.gemm import plan_product

    batch, m, k, n, ta, tb = case
    steps = [x.strides if not t else (*x.strides[:-2], *x.strides[:-3:-1])
             for x, t in zip(arrays, (False, ta, tb), strict=True)]  # fmt: skip
    product = plan_product(batch, m, k, n, "float32", *steps)
    assert product is not None
    places = [x.__array_interface__["data"][0] for x in arrays]
    memory = np.empty(product.scratch + 64, np.uint8)
    scratch = -(-memory.__array_interface__["data"][0] // 64) * 64
    out, a, b = places
    x, y = (b, a) if product.swapped else (a, b)
    pointers = np.array([x, y, out, scratch], np.uint64)
    table = product.table
    given = [ctypes.c_void_p(t.__array_interface__["data"][0]) for t in (pointers, table)]
    kept = (memory, pointers, table, arrays)

    def run() -> object:
        product.function.holding_gil(*given, 0, product.units)
        return kept

    return run


def measured(case: Case, rounds: int) -> dict[str, Any]:
    """Seconds of each contender, and our ratio to each."""
    batch, m, k, n, ta, tb = case
    flops = 2.0 * math.prod(batch) * m * k * n
    each = max(1, int(3e7 / flops))
    runs = contenders(case)
    least = dict.fromkeys(runs, math.inf)
    for _ in range(rounds):
        for name, run in runs.items():
            run()
            start = time.perf_counter()
            for _ in range(each):
                run()
            least[name] = min(least[name], (time.perf_counter() - start) / each)
    ratios = {name: least["ours"] / seconds for name, seconds in least.items() if name != "ours"}
    shape = "x".join(map(str, (*batch, m, k, n))) + " " + "NT"[ta] + "NT"[tb]
    rate = flops / least["ours"] / 1e9
    blas = "" if _generated(case) else "   BLAS in programs"
    shown = "   ".join(f"/ {name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"{shape:<22} {least['ours'] * 1e6:9.1f} us {rate:6.1f} GF/s   {shown}{blas}", flush=True)
    return {"shape": shape, "seconds": least, "ratios": ratios, "generated": not blas}


def _generated(case: Case) -> bool:
    from graphflow.ops.kernels.gemm.contiguous_products import plan_if_faster_than_blas

    batch, m, k, n, ta, tb = case
    a, b = (k, m) if ta else (m, k), (n, k) if tb else (k, n)
    return plan_if_faster_than_blas((*batch, *a), (*batch, *b), "float32", ta, tb) is not None


def main() -> None:
    options = pinned_arguments("products of matrices", rounds=40)
    write("products", [measured(case, options.rounds) for case in cases()], options.output)


if __name__ == "__main__":
    main()
