"""CUDA kernels of scatters and sparse products, run by the host's compiler: a CPU's bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphflow.ops.kernels.cuda.cupy_module import import_cupy
from graphflow.ops.kernels.cuda.scatter_rows import combine_source, multiply_source
from graphflow.ops.kernels.sparse.csr import matmul
from graphflow.ops.kernels.sparse.scatter_rows import REDUCTIONS, combine_rows
from tests.gpu import cuda_on_cpu, fake_cupy
from tests.gpu.compilers import compiler

EDGES = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -3e-45, 1e-39, 0.1, -7.3, 3.0]


@pytest.fixture
def xp(monkeypatch: pytest.MonkeyPatch) -> Any:
    if (missing := cuda_on_cpu.explain_missing_compiler()) is not None:
        pytest.skip(missing)
    fake_cupy.install(monkeypatch)
    return import_cupy()


def _draw_array(dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(0)
    if np.dtype(dtype).kind in "fc":
        found = rng.choice(EDGES, shape)
        return (found + 1j * rng.choice(EDGES[3:], shape) if dtype[0] == "c" else found).astype(
            dtype
        )
    return rng.integers(0, 2 if dtype == "bool" else 100, shape).astype(dtype)


def _copy_to_device(xp: Any, *arrays: np.ndarray[Any, Any]) -> list[Any]:
    return [xp.asarray(array) for array in arrays]


CASES = [
    *((dtype, reduction) for dtype in ("float32", "int16") for reduction in REDUCTIONS),
    *((dtype, "add") for dtype in ("float64", "uint8", "int64", "complex128")),
    ("complex64", "mul"), ("uint32", "max"), ("bool", "none"),
]  # fmt: skip


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype, reduction", CASES)
@pytest.mark.parametrize("width", [1, 5])
def test_rows_are_combined_with_the_bits_of_a_cpu(
    xp: Any, dtype: str, reduction: str, width: int
) -> None:
    """In the order of the updates, denormals kept."""
    out, updates = _draw_array(dtype, (7, width)), _draw_array(dtype, (60, width))
    rows = np.random.default_rng(1).integers(0, 6, 60)
    there = _copy_to_device(xp, out, rows, updates)
    with np.errstate(all="ignore"):
        combine_rows(np, out, rows, updates, reduction)
    combine_rows(xp, *there, reduction)
    np.testing.assert_array_equal(there[0].get(), out)
    known = ~np.isnan(out)
    assert there[0].get()[known].tobytes() == out[known].tobytes()


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", ["int32", "float32", "float64"])
def test_sparse_products_round_once_as_a_cpus_do(xp: Any, dtype: str, transpose: bool) -> None:
    rng = np.random.default_rng(2)
    offsets = np.array([0, 3, 3, 9, 14, 20])
    columns, values = rng.integers(0, 6, 20), rng.normal(size=20) * 100
    dense = rng.normal(size=(5 if transpose else 6, 4)) * 100
    given = [values.astype(dtype), columns, offsets, dense.astype(dtype)]
    out = np.empty((6 if transpose else 5, 4), dtype)
    there = _copy_to_device(xp, out, *given)
    matmul(np, out, *given, (5, 6), transpose)
    matmul(xp, *there, (5, 6), transpose)
    assert there[0].get().tobytes() == out.tobytes()


@pytest.mark.skipif(compiler() is None, reason="there is neither nvcc nor NVRTC")
def test_their_sources_compile(tmp_path: Path) -> None:
    compile_ = compiler()
    assert compile_ is not None
    for dtype, reduction in CASES[1::3]:
        compile_(combine_source(np.dtype(dtype), reduction), tmp_path)
    for dtype in ("int32", "float32"):
        compile_(multiply_source(np.dtype(dtype)), tmp_path)
