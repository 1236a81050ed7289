"""Dual ascent as a CUDA kernel: run by the host's compiler, beside the same algorithm in numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from graphflow.errors import DeviceError, LinearModelError
from graphflow.linear import losses
from graphflow.linear.fit_history import FitHistory, FitMonitor
from graphflow.linear.loops.dual_steps import best_dual
from graphflow.linear.losses import Loss
from graphflow.linear.solve import solve
from graphflow.linear.solvers.dual_ascent import gpu_ascent
from graphflow.ops.kernels.cuda.coordinate_rows import NAME, row_source
from tests.gpu import cuda_on_cpu, fake_cupy
from tests.gpu.compilers import compiler
from tests.linear.problems import LOSSES, random_problem

needs_host_compiler = pytest.mark.skipif(
    cuda_on_cpu.explain_missing_compiler() is not None, reason="no g++ runs CUDA sources here"
)


def visit_rows(
    order: Any, dense: Any, is_dense: bool, y: Any, c: Any, loss: Loss, numbers: Any, beta: Any,
    w: Any, blocks: int, threads: int,
) -> None:  # fmt: skip
    """One launch, block after block: partial sums, their tree, the best variable, the step."""
    inverse, bias, parameter = numbers
    for block in range(blocks):
        for i in order[block::blocks]:
            places = np.arange(dense.shape[1]) if is_dense else np.flatnonzero(dense[i])
            values = dense[i, places].astype(np.float64)
            sums = np.zeros(threads)
            for p, (value, place) in enumerate(zip(values, places, strict=True)):
                sums[p % threads] += value * w[place]
            while len(sums) > 1:
                sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
            q = ((dense[i].astype(np.float64) ** 2).sum() + bias**2) * inverse
            u = sums[0] + bias * w[-1]
            new = best_dual(loss.code, beta[i], u, q, y[i], c[i], parameter)
            step, beta[i] = (new - beta[i]) * inverse, new
            w[places] += step * values
            w[-1] += step * bias


@needs_host_compiler
@pytest.mark.parametrize(
    "dtype, index",
    [
        ("float32", None),
        ("float64", "int32"),
        pytest.param("float64", None, marks=pytest.mark.slow),
        pytest.param("float32", "int64", marks=pytest.mark.slow),
    ],
)
def test_a_launch_is_the_algorithm_in_numpy(dtype: str, index: str | None) -> None:
    random = np.random.default_rng(0)
    dense = random.normal(size=(11, 40)).astype(dtype)
    dense[random.random(dense.shape) < 0.6] = 0
    csr = sp.csr_matrix(dense)
    y, c = random.choice([-1.0, 1.0], size=11), random.uniform(0.5, 2.0, size=11)
    order, numbers = random.permutation(11), np.array([0.7, 0.5, 0.3])
    squares = (dense.astype(np.float64) ** 2).sum(axis=1) + 0.25
    kind = None if index is None else np.dtype(index)
    places = [np.zeros(1, np.int64)] * 2
    if index is not None:
        places = [csr.indices.astype(index), csr.indptr.astype(index)]
    values = dense.reshape(-1) if index is None else csr.data
    module = cuda_on_cpu.EmulatedModule(row_source(np.dtype(dtype), kind))
    for loss in LOSSES:
        found = [0.3 * y * c, random.normal(size=41)]
        wanted = [each.copy() for each in found]
        args = [order, values, *places, squares, y, c, numbers, *found, 11, 40, loss.code]
        module.launch(NAME, 3, 8, args)
        visit_rows(order, dense, index is None, y, c, loss, numbers, *wanted, 3, 8)
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-14)


@needs_host_compiler
@pytest.mark.parametrize(
    "is_sparse, loss",
    [(True, losses.hinge), pytest.param(False, losses.logistic, marks=pytest.mark.slow)],
    ids=["sparse-hinge", "dense-logistic"],
)
def test_a_fit_is_certified(monkeypatch: pytest.MonkeyPatch, is_sparse: bool, loss: Loss) -> None:
    fake_cupy.install(monkeypatch)
    problem = random_problem(1, loss, l2=20.0, rows=130, columns=8, bias=0.5, is_sparse=is_sparse)
    gap = solve(problem, "tpa", 1e-2, 100, FitHistory()).certificate.relative_gap
    assert gap is not None and gap <= 1e-2


@needs_host_compiler
def test_too_many_blocks_at_once_are_halved(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables of the best certificate come back, also where others are not finite."""
    fake_cupy.install(monkeypatch)
    problem = random_problem(1, losses.squared, l2=1.0, rows=300, columns=4)
    monitor = FitMonitor(problem, 0.0, 100, FitHistory())
    random = np.random.default_rng(0)
    ascent = gpu_ascent.GpuAscent(problem, np.zeros(300), random, monitor, gpu_ascent.import_cupy())
    blocks = ascent.blocks
    good = 0.01 * problem.y
    for beta in (good, 50.0 * good):
        ascent.beta[:] = beta
        v = problem.correlate(ascent.beta)
        monitor.accept(v / problem.l2, 0.0, ascent.beta, v=v)
        ascent._go_on()
    assert ascent.blocks == blocks // 2 and ascent.beta.tobytes() == good.tobytes()
    ascent.beta[0] = np.nan
    ascent.w[:] = np.nan
    ascent._go(1.0)
    assert ascent.beta.tobytes() == good.tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("is_sparse", [False, True])
def test_a_real_gpu_fits(is_sparse: bool) -> None:
    for loss in LOSSES:
        problem = random_problem(
            1, loss, l2=50.0, rows=2000, columns=30, bias=0.5, is_sparse=is_sparse
        )
        gap = solve(problem, "tpa", 1e-4, 1000, FitHistory()).certificate.relative_gap
        assert gap is not None and gap <= 1e-4


def test_without_a_gpu_another_solver_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_cupy() -> Any:
        raise DeviceError("a gpu device needs CuPy: pip install 'graphflow[gpu]'")

    problem = random_problem(0, losses.hinge, l2=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(gpu_ascent, "import_cupy", no_cupy)
        with pytest.raises(LinearModelError, match=r"needs CuPy.*use solver='sdca'"):
            solve(problem, "tpa", 1e-6, 100, FitHistory())
    fake_cupy.install(monkeypatch, devices=0)
    with pytest.raises(LinearModelError, match=r"no NVIDIA GPU; use solver='sdca'"):
        solve(problem, "tpa", 1e-6, 100, FitHistory())


@pytest.mark.skipif(compiler() is None, reason="there is neither nvcc nor NVRTC")
@pytest.mark.parametrize("index", [None, np.dtype("int32")], ids=["dense", "sparse"])
def test_the_source_compiles(index: np.dtype[Any] | None, tmp_path: Path) -> None:
    compile_ = compiler()
    assert compile_ is not None
    compile_(row_source(np.dtype("float32"), index), tmp_path)
