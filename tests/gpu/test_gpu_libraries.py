"""NVIDIA's libraries for single ops, with stand-ins for them: used where they agree with our own
kernels, left with a word where they do not."""

from __future__ import annotations

import ctypes
import logging
import sys
import types
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import graphflow as gf
from graphflow.cli import app
from graphflow.runtime import gpu_libraries
from graphflow.runtime.gpu_libraries import Libraries, libraries
from tests.gpu import fake_cupy
from tests.gpu.fake_cupy import raw
from tests.gpu.test_gpu import GPU, OnGpu, pytestmark  # noqa: F401 - the same needs


class _Matmul:
    """nvmath's, as far as it is called; `factor` makes it wrong."""

    factor = 1.0
    made = 0

    def __init__(self, a: Any, b: Any, c: Any, *, beta: float, options: Any, stream: Any) -> None:
        assert beta == 0.0 and options == {"inplace": True}
        type(self).made += 1
        self._operands = (a, b, c)
        self._planned = False

    def plan(self, *, stream: Any) -> None:
        self._planned = True

    def reset_operands(self, *, a: Any, b: Any, c: Any, beta: float, stream: Any) -> None:
        self._operands = (a, b, c)

    def execute(self, *, stream: Any) -> None:
        assert self._planned
        a, b, c = map(raw, self._operands)

        def run() -> None:
            wide = a.astype("float32") @ b.astype("float32") * self.factor
            c[...] = wide.astype(c.dtype)

        stream.add(run)


@pytest.fixture
def nvmath(monkeypatch: pytest.MonkeyPatch) -> type[_Matmul]:
    fake_cupy.install(monkeypatch)
    found = type("Matmul", (_Matmul,), {})
    advanced = types.SimpleNamespace(Matmul=found)
    monkeypatch.setitem(sys.modules, "nvmath", types.ModuleType("nvmath"))
    monkeypatch.setitem(sys.modules, "nvmath.linalg", types.SimpleNamespace(advanced=advanced))
    monkeypatch.setattr(gpu_libraries, "_is_there", lambda module: module == "nvmath")
    monkeypatch.setattr(gpu_libraries, "_told", set())
    return found


def _products() -> tuple[OnGpu, np.ndarray[Any, Any]]:
    a = np.random.default_rng(0).normal(size=(6, 5)).astype("float16")
    x = gf.placeholder("float16", (6, 5), name="x")
    return OnGpu(gf.matmul(x, x, transpose_b=True)), a


def test_products_of_16_bits_are_nvmaths(nvmath: type[_Matmul]) -> None:
    here, a = _products()
    for _ in range(3):
        have = here.step(x=a)[0]
    wide = a.astype("float32")
    np.testing.assert_allclose(have, (wide @ wide.T).astype("float16"), rtol=2e-3)
    assert nvmath.made == 1


def test_products_of_32_bits_are_cublas_by_cupy(nvmath: type[_Matmul]) -> None:
    x = gf.placeholder("float32", (6, 5), name="x")
    OnGpu(gf.matmul(x, x, transpose_b=True)).step(x=np.ones((6, 5), "float32"))
    assert nvmath.made == 0


def test_a_library_that_disagrees_is_left_with_one_word(
    nvmath: type[_Matmul], caplog: pytest.LogCaptureFixture
) -> None:
    nvmath.factor = 1.5
    with caplog.at_level(logging.WARNING, "graphflow.gpu"):
        here, a = _products()
        _products()
    have = here.step(x=a)[0]
    wide = a.astype("float32")
    np.testing.assert_allclose(have, (wide @ wide.T).astype("float16"), rtol=2e-3)
    (record,) = caplog.records
    shapes = "float16(6, 5), float16(6, 5)"
    assert record.message.startswith(f'gpu.fallback device=gpu:0 op=matmul shapes="{shapes}"')
    assert "is off by" in record.message


def test_a_library_that_fails_is_left(
    nvmath: type[_Matmul], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Any, *, stream: Any) -> None:
        raise OSError("no cuBLASLt")

    monkeypatch.setattr(nvmath, "plan", refuse)
    here, a = _products()
    assert here.step(x=a)[0].shape == (6, 6)
    assert "no cuBLASLt" in caplog.text


def test_what_is_installed_is_told_and_can_be_switched_off(
    nvmath: type[_Matmul], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert libraries() == Libraries(nvmath=True, cudnn=False)
    assert str(libraries()) == "nvmath-python found, cudnn-frontend not found"
    monkeypatch.setenv("GRAPHFLOW_GPU_LIBRARIES", "off")
    assert libraries() == Libraries(nvmath=False, cudnn=False)
    assert GPU.endswith("gpu:0")


def test_the_list_of_devices_tells_of_gpus_and_what_computes_on_them(
    nvmath: type[_Matmul], monkeypatch: pytest.MonkeyPatch
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


@pytest.mark.parametrize("a, b, flags", [
    ((3, 4, 5), (3, 5, 6), (False, False)),
    ((3, 5, 4), (3, 5, 6), (True, False)),
    ((3, 4, 5), (3, 6, 5), (False, True)),
    ((2, 3, 5, 4), (2, 3, 6, 5), (True, True)),
])  # fmt: skip
def test_batches_of_products_are_one_call_of_cublas(
    nvmath: type[_Matmul],
    monkeypatch: pytest.MonkeyPatch,
    a: tuple[int, ...],
    b: tuple[int, ...],
    flags: tuple[bool, bool],
) -> None:
    calls = []

    def multiply(handle: int, trans_a: int, trans_b: int, m: int, n: int, k: int, alpha: int,
                 pa: int, lda: int, sa: int, pb: int, ldb: int, sb: int, beta: int,
                 pc: int, ldc: int, sc: int, count: int) -> None:  # fmt: skip
        """As cuBLAS does it: columns run fastest."""
        calls.append(count)

        def matrix(place: int, rows: int, columns: int, ld: int) -> Any:
            flat = (ctypes.c_float * (ld * columns)).from_address(place)
            return np.frombuffer(flat, np.float32).reshape(columns, ld).T[:rows]

        def run() -> None:
            for i in range(count):
                shapes = [(k, m) if trans_a else (m, k), (n, k) if trans_b else (k, n)]
                x = matrix(pa + 4 * sa * i, *shapes[0], lda)
                y = matrix(pb + 4 * sb * i, *shapes[1], ldb)
                product = (x.T if trans_a else x) @ (y.T if trans_b else y)
                matrix(pc + 4 * sc * i, m, n, ldc)[...] = product

        fake_cupy.current().enqueue(run)

    cublas = types.SimpleNamespace(sgemmStridedBatched=multiply, dgemmStridedBatched=None)
    monkeypatch.setitem(sys.modules, "cupy_backends", types.ModuleType("cupy_backends"))
    monkeypatch.setitem(
        sys.modules, "cupy_backends.cuda.libs", types.SimpleNamespace(cublas=cublas)
    )
    sys.modules["cupy"].cuda.device = types.SimpleNamespace(get_cublas_handle=lambda: 1)
    monkeypatch.setattr(gpu_libraries, "_is_there", lambda module: module == "cupy_backends")
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=a).astype("float32"), rng.normal(size=b).astype("float32")
    fed = [gf.placeholder("float32", shape, name=n) for shape, n in ((a, "x"), (b, "y"))]
    product = gf.matmul(*fed, transpose_a=flags[0], transpose_b=flags[1])
    have = OnGpu(product).step(x=x, y=y)[0]
    wanted = (x.swapaxes(-1, -2) if flags[0] else x) @ (y.swapaxes(-1, -2) if flags[1] else y)
    np.testing.assert_allclose(have, wanted, rtol=1e-5, atol=1e-5)
    assert len(calls) == 2  # compared with our own, and run
