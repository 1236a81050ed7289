"""Sweeps: many updates as one call a thread, whose work is cut evenly and changes no bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.ir.op import REGISTRY, Tensor
from graphflow.ops.kernels.codegen.region import Operand, Region, RegionOp
from graphflow.ops.kernels.fusion.multi_tensor_updates import MultiTensorUpdate
from graphflow.ops.kernels.fusion.region_kernels import kernel_of
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool

Array = np.ndarray[Any, Any]
TANH = Region(
    1, (Operand("float32", (True,)),), (RegionOp(REGISTRY["tanh"], (), ((False, 0),)),), (0,)
)


@given(st.lists(st.integers(1, 200_000), min_size=1, max_size=9), st.integers(1, 4))
def test_every_row_is_done_once_whatever_the_sizes_and_threads(
    sizes: list[int], threads: int
) -> None:
    xs = [np.random.default_rng(n).normal(size=n).astype("float32") for n in sizes]
    outs = [np.full_like(x, np.nan) for x in xs]
    kernel = kernel_of(TANH)
    calls = [
        (kernel.task((x.size,)), (address(x), address(out)))
        for x, out in zip(xs, outs, strict=True)
    ]
    sweep = MultiTensorUpdate(calls, threads)
    rows = sum(int(table.reshape(-1, 5)[:, 4].sum() - table.reshape(-1, 5)[:, 3].sum())
               for table in sweep.tables)  # fmt: skip
    assert rows == sum(sizes) and len(sweep.tables) <= threads
    pool = Pool(threads)
    with use_pool(pool):
        sweep()
    pool.close()
    for x, out in zip(xs, outs, strict=True):
        assert out.tobytes() == REGISTRY["tanh"].run(np, [x], {})[0].tobytes()


def test_the_work_is_shared_evenly() -> None:
    x = np.zeros(1_000_000, "float32")
    task = kernel_of(TANH).task((x.size,))
    small = kernel_of(TANH).task((100,))
    sweep = MultiTensorUpdate(
        [(small, (address(x), address(x))), (task, (address(x), address(x)))], 3
    )
    rows = [int(t.reshape(-1, 5)[:, 4].sum() - t.reshape(-1, 5)[:, 3].sum()) for t in sweep.tables]
    assert max(rows) - min(rows) < 1000


def update_variables(optimizer: gf.optim.Optimizer, threads: int) -> list[Array]:
    rng = np.random.default_rng(0)
    shapes = [(300, 400), (400,), (400, 250), (250,), (1,), ()]
    ws = [gf.variable(rng.normal(size=s).astype("float32"), name=f"w{i}")
          for i, s in enumerate(shapes)]  # fmt: skip
    gs: list[Tensor] = [gf.constant(rng.normal(size=s).astype("float32")) * 0.5 for s in shapes]
    step = optimizer.apply(gs, ws)
    with gf.Session(gf.Cluster.here(threads=threads)) as session:
        for _ in range(3):
            session.run(step)
        return [session.get(w) for w in ws]


@pytest.mark.parametrize(
    "optimizer",
    [gf.optim.SGD(0.1, momentum=0.9), gf.optim.Adam(1e-3), gf.optim.AdamW(1e-3)],
    ids=["momentum", "adam", "adamw"],
)
def test_an_optimiser_updates_all_parameters_alike_on_any_number_of_threads(
    optimizer: gf.optim.Optimizer,
) -> None:
    alone = update_variables(optimizer, 1)
    for threads in (2, 3):
        for have, want in zip(update_variables(optimizer, threads), alone, strict=True):
            assert have.tobytes() == want.tobytes()
