"""NVIDIA's libraries for single ops, with stand-ins for them: used where they agree with our own
kernels, left with a word where they do not."""

from __future__ import annotations

import ctypes
import logging
import sys
import types
from math import prod
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

import graphflow as gf
from graphflow.cli.main import app
from graphflow.ir.op import REGISTRY
from graphflow.ir.spec import as_dtype
from graphflow.runtime.gpu.gpu_backend import GpuBackend
from graphflow.runtime.program import vendor_libraries as gpu_libraries
from graphflow.runtime.program.vendor_libraries import Libraries, libraries
from tests.gpu import fake_cupy
from tests.runtime.gpu.test_gpu_backend import GPU, GpuFetches, pytestmark  # noqa: F401 - the same needs


class _Cublas:
    """cuBLAS by nvmath's bindings, as far as it is called; `factor` makes 16 bits wrong."""

    Math = types.SimpleNamespace(DISALLOW_REDUCED_PRECISION_REDUCTION=16)
    ComputeType = types.SimpleNamespace(COMPUTE_32F=68, COMPUTE_64F=70)
    dtypes = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")

    def __init__(self) -> None:
        self.factor = 1.0
        self.counts: list[int] = []
        self.said: list[str] = []

    def create(self) -> int:
        return 7

    def set_stream(self, handle: int, stream: int) -> None:
        self.said.append("stream")

    def set_workspace(self, handle: int, place: int, size: int) -> None:
        assert place and self.said[-1] == "stream"
        self.said.append("workspace")

    def set_math_mode(self, handle: int, mode: int) -> None:
        assert mode == 16

    def destroy(self, handle: int) -> None:
        self.said.append("destroy")

    def gemm_strided_batched_ex(
        self, handle: int, trans_a: int, trans_b: int, m: int, n: int, k: int, alpha: int,
        pa: int, type_a: int, lda: int, sa: int, pb: int, type_b: int, ldb: int, sb: int,
        beta: int, pc: int, type_c: int, ldc: int, sc: int, count: int, compute: int, way: int,
    ) -> None:  # fmt: skip
        """As cuBLAS does it: columns run fastest."""
        assert handle == 7 and self.said[-1] == "workspace" and type_a == type_b == type_c
        self.counts.append(count)
        dtype = as_dtype(self.dtypes[type_a])
        factor = self.factor if dtype.itemsize == 2 else 1
        wide = np.dtype("float32") if dtype.itemsize == 2 else dtype
        assert compute == (70 if wide.name in ("float64", "complex128") else 68)
        scales = [_array(place, 1, wide)[0] for place in (alpha, beta)]

        def matrix(place: int, rows: int, columns: int, ld: int) -> Any:
            return _array(place, ld * columns, dtype).reshape(columns, ld).T[:rows]

        def run() -> None:
            for i in range(count):
                shapes = [(k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)]
                x = matrix(pa + dtype.itemsize * sa * i, *shapes[0], lda).astype(wide)
                y = matrix(pb + dtype.itemsize * sb * i, *shapes[1], ldb).astype(wide)
                product = (x.T if trans_a else x) @ (y.T if trans_b else y) * factor
                c = matrix(pc + dtype.itemsize * sc * i, m, n, ldc)
                before = scales[1] * c.astype(wide) if scales[1] else 0  # noise is not looked at
                c[...] = (scales[0] * product + before).astype(dtype)

        fake_cupy.current().enqueue(run)


def _array(place: int, size: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    memory = (ctypes.c_uint8 * (size * dtype.itemsize)).from_address(place)
    return np.frombuffer(memory, np.uint8).view(dtype)


def check_products_of_views(backend: GpuBackend, draw: Any) -> None:
    """Arrays that are turned, cut and repeated multiply as numpy's do."""
    m, k, n = (draw(st.integers(0, 5)) for _ in range(3))
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    dtype = draw(st.sampled_from(["float32", "complex128"]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    pairs = []
    for shape in ((m, k), (k, n)):
        lead = batch[draw(st.integers(0, len(batch))) :]
        lead = tuple(1 if draw(st.booleans()) else size for size in lead)
        axes = draw(st.permutations(range(len(lead) + 2)))
        whole = (*lead, *shape)
        stored = [0] * len(whole)
        for place, axis in enumerate(axes):
            stored[place] = whole[axis] + draw(st.integers(0, 1))
        host = rng.integers(-4, 5, stored).astype(dtype)
        back = [axes.index(axis) for axis in range(len(whole))]
        cut = tuple(slice(0, size) for size in whole)
        there = backend.to_device(host).transpose(back)[cut]
        pairs.append((host.transpose(back)[cut], there))
    (a, a_there), (b, b_there) = pairs
    wanted = np.matmul(a, b)
    with backend.active():
        made = backend.cublas.matmul(a_there, b_there)
        out = backend.xp.empty((*wanted.shape, 2), dtype)[..., 0]  # not contiguous
        assert backend.cublas.matmul(a_there, b_there, out=out) is out
        found = [backend.to_host(backend.xp.ascontiguousarray(x)) for x in (made, out)]
    assert found[0].dtype == wanted.dtype
    assert np.array_equal(found[0], wanted) and np.array_equal(found[1], wanted)


@pytest.fixture
def cublas(monkeypatch: pytest.MonkeyPatch) -> _Cublas:
    fake_cupy.install(monkeypatch)
    found = _Cublas()
    names = ("R_16F", "R_16BF", "R_32F", "R_64F", "C_32F", "C_64F")
    nvmath: Any = types.ModuleType("nvmath")
    nvmath.CudaDataType = types.SimpleNamespace(**{f"CUDA_{n}": i for i, n in enumerate(names)})
    monkeypatch.setitem(sys.modules, "nvmath", nvmath)
    monkeypatch.setitem(sys.modules, "nvmath.bindings", types.SimpleNamespace(cublas=found))
    monkeypatch.setattr(gpu_libraries, "_is_installed", lambda module: module == "nvmath")
    monkeypatch.setattr(gpu_libraries, "_logged", set())
    return found


@pytest.fixture
def gpu(cublas: _Cublas) -> GpuBackend:
    return GpuBackend(0)


def _products() -> tuple[GpuFetches, np.ndarray[Any, Any]]:
    a = np.random.default_rng(0).normal(size=(6, 5)).astype("float16")
    x = gf.placeholder("float16", (6, 5), name="x")
    return GpuFetches(gf.matmul(x, x, transpose_b=True)), a


@pytest.mark.every(11)
@pytest.mark.parametrize("a, b, flags", [
    ((4, 5), (5, 6), (False, False)),
    ((5, 4), (6, 5), (True, True)),
    ((3, 4, 5), (3, 5, 6), (False, False)),
    ((3, 5, 4), (3, 5, 6), (True, False)),
    ((3, 4, 5), (3, 6, 5), (False, True)),
    ((3, 5, 4), (5, 6), (True, False)),
    ((2, 3, 5, 4), (2, 3, 6, 5), (True, True)),
])  # fmt: skip
@pytest.mark.parametrize("dtype", _Cublas.dtypes)
@pytest.mark.parametrize("added", [False, True])
def test_products_are_one_call_of_cublas(
    cublas: _Cublas,
    a: tuple[int, ...],
    b: tuple[int, ...],
    flags: tuple[bool, bool],
    dtype: str,
    added: bool,
) -> None:
    rng = np.random.default_rng(0)
    x, y = (rng.normal(size=shape).astype("float32").astype(as_dtype(dtype)) for shape in (a, b))
    fed = [gf.placeholder(dtype, shape, name=n) for shape, n in ((a, "x"), (b, "y"))]
    attrs = {"transpose_a": flags[0], "transpose_b": flags[1]}
    wide = "complex128" if dtype.startswith("complex") else "float64"
    transposed = [v.swapaxes(-1, -2) if flag else v for v, flag in zip((x, y), flags, strict=True)]
    wanted = transposed[0].astype(wide) @ transposed[1].astype(wide)
    feeds = {"x": x, "y": y}
    if added:
        c = rng.normal(size=wanted.shape).astype("float32").astype(as_dtype(dtype))
        wanted = wanted + c.astype(wide)
        feeds["c"] = c
        product = REGISTRY["accumulate_product"](
            gf.placeholder(dtype, c.shape, name="c"), *fed, **attrs
        )
    else:
        product = REGISTRY["matmul"](*fed, **attrs)
    here = GpuFetches(product)
    for _ in range(3):
        have = here.step(**feeds)[0]
    off = 2.0**-6 if as_dtype(dtype).itemsize == 2 else 1e-5
    np.testing.assert_allclose(have.astype(wide), wanted, rtol=off, atol=off)
    if as_dtype(dtype).itemsize == 2:
        calls = 4  # one to compare with our own, which is one in float32
    else:
        calls = 2 if added else 3  # what takes memory, for the product to be added, is replayed
    assert cublas.counts == [prod(wanted.shape[:-2])] * calls


def test_products_are_captured(cublas: _Cublas) -> None:
    x = gf.placeholder("float32", (6, 6), name="x")
    here = GpuFetches(gf.tanh(gf.tanh(x @ x) @ x))
    for _ in range(4):
        here.step(x=np.ones((6, 6), "float32"))
    assert here.code.steps.graphs == 1
    assert len(cublas.counts) == 2 + 2  # run, and captured
    assert fake_cupy.current().violations == []


def test_products_that_are_alike_are_compared_once(cublas: _Cublas) -> None:
    x = gf.placeholder("float16", (6, 6), name="x")
    GpuFetches(gf.tanh(gf.tanh(x @ x) @ x))
    assert len(cublas.counts) == 1


@settings(max_examples=200, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(st.data())
def test_products_of_any_views_are_numpys(gpu: GpuBackend, data: Any) -> None:
    check_products_of_views(gpu, data.draw)


def test_a_gpu_that_is_let_go_of_ends_cublas(cublas: _Cublas) -> None:
    here, a = _products()
    here.step(x=a)
    here.backend.close()
    assert cublas.said[-1] == "destroy"


def test_a_library_that_disagrees_is_left_with_one_word(
    cublas: _Cublas, caplog: pytest.LogCaptureFixture
) -> None:
    cublas.factor = 1.5
    with caplog.at_level(logging.WARNING, "graphflow.gpu"):
        here, a = _products()
        _products()
    have = here.step(x=a)[0]
    wide = a.astype("float32")
    np.testing.assert_allclose(have, (wide @ wide.T).astype("float16"), rtol=2e-3)
    (record,) = caplog.records
    shapes = "float16(6, 5), float16(6, 5)"
    assert record.message.startswith(f'gpu.fallback device=gpu:0 op=matmul shapes="{shapes}"')
    assert "differs from ours by" in record.message


def test_a_library_that_fails_is_left(
    cublas: _Cublas, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> int:
        raise OSError("no cuBLAS")

    monkeypatch.setattr(cublas, "create", refuse)
    here, a = _products()
    assert here.step(x=a)[0].shape == (6, 6)
    assert "no cuBLAS" in caplog.text


def test_what_is_installed_is_told_and_can_be_switched_off(
    cublas: _Cublas, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert libraries() == Libraries(nvmath=True, cudnn=False)
    assert str(libraries()) == "nvmath-python found, cudnn-frontend not found"
    monkeypatch.setenv("GRAPHFLOW_GPU_LIBRARIES", "off")
    assert libraries() == Libraries(nvmath=False, cudnn=False)
    assert GPU.endswith("gpu:0")


def test_the_list_of_devices_tells_of_gpus_and_what_computes_on_them(
    cublas: _Cublas, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = CliRunner().invoke(app, ["devices"], env={"COLUMNS": "120"}).output
    assert "/worker:0/gpu:0" in told
    assert (
        "gpu:0 is Imaginary 1000, compute capability 9.0; CuPy 14.2.0, CUDA graphs on; "
        "nvmath-python found, cudnn-frontend not found" in told
    )
    monkeypatch.setitem(sys.modules, "cupy", None)
    told = CliRunner().invoke(app, ["devices"], env={"COLUMNS": "120"}).output
    assert "cpu:0" in told and "gpu" not in told
