"""Kernels compute nothing with what earlier work left in scratch memory.

Such lanes are never stored, so no result shows them. But if they hold integers, they are denormal
as floats, and each operation on one takes some hundred cycles. The processor notes in its MXCSR
register that an operand was denormal.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.ops.kernels.gemm import native_product
from graphflow.ops.kernels.jit import scratch_memory
from graphflow.ops.kernels.jit.denormals import is_x86
from graphflow.runtime.memory.backend import CpuBackend

pytestmark = pytest.mark.skipif(not is_x86(), reason="reads a register of x86 processors")

_DENORMAL_OPERAND = 2
_MXCSR_OFFSET = 28  # in fenv_t of glibc and musl on x86-64


def _clear_flags() -> None:
    default = ctypes.c_void_p(-1)  # FE_DFL_ENV
    assert ctypes.CDLL(None).fesetenv(default) == 0


def _has_met_denormal() -> bool:
    environment = (ctypes.c_uint8 * 64)()
    assert ctypes.CDLL(None).fegetenv(environment) == 0
    (register,) = np.frombuffer(environment, np.uint32, 1, _MXCSR_OFFSET)
    return bool(register & _DENORMAL_OPERAND)


def _fill_scratch_with_denormals() -> None:
    kept = [
        *vars(scratch_memory._local).values(),
        getattr(native_product._thread_local, "memory", None),
    ]
    kept += [each._scratch for each in gc.get_objects() if isinstance(each, CpuBackend)]
    for memory in kept:
        if memory is not None:
            whole = memory.nbytes // 4 * 4
            memory.view(np.uint8)[:whole].view(np.uint32)[:] = 1


def _check(
    build: Callable[..., Any], shapes: Sequence[tuple[int, ...]], dtype: str = "float32"
) -> None:
    """Run a result and its gradients on normal numbers, after scratch memory was filled."""
    rng = np.random.default_rng(0)
    feeds = {gf.placeholder(dtype, s): rng.normal(size=s).astype(dtype) for s in shapes}
    y = build(*feeds)
    loss = gf.sum(y * y)
    with gf.Session(gf.Cluster.here(threads=1)) as session:
        for fetched in (y, gf.gradients(loss, list(feeds))):
            for _ in range(2):
                session.run(fetched, feeds)
            _fill_scratch_with_denormals()
            _clear_flags()
            session.run(fetched, feeds)
            assert not _has_met_denormal(), (shapes, dtype)


def test_the_register_shows_a_denormal_operand() -> None:
    x = gf.placeholder("float32", (64,))
    y = x * 3 + 1
    with gf.Session(gf.Cluster.here(threads=1)) as session:
        for value, met in ((1.0, False), (1e-40, True), (1.0, False)):
            fed = np.full(64, value, "float32")
            session.run(y, {x: fed})
            _clear_flags()
            session.run(y, {x: fed})
            assert _has_met_denormal() is met


@pytest.mark.parametrize("seed", range(12))
def test_products_read_only_the_columns_that_they_packed(seed: int) -> None:
    rng = np.random.default_rng(seed)
    m, k, n = (int(rng.integers(1, size)) for size in (300, 400, 300))
    narrow = int(rng.integers(9, 16))  # a panel of one register, in part
    dtype = ("float32", "float64")[seed % 2]
    _check(lambda a, b: a @ b, [(m, k), (k, n)], dtype)
    _check(lambda a, b: gf.matmul(a, b, transpose_b=True), [(narrow, k), (n, k)], dtype)
    _check(lambda a, b: gf.matmul(a, b, transpose_a=True), [(k, narrow), (k, n)], dtype)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_attention_reads_only_the_keys_that_there_are(seed: int, causal: bool) -> None:
    rng = np.random.default_rng(seed)
    rows, keys, d = (int(n) for n in rng.integers(2, 70, 3))
    shapes = [(2, 3, rows, d), (2, 3, keys, d), (2, 3, keys, d)]
    _check(lambda q, k, v: gf.nn.attention(q, k, v, causal=causal), shapes)


@pytest.mark.parametrize("seed", range(12))
def test_convolutions_read_only_what_they_wrote(seed: int) -> None:
    rng = np.random.default_rng(seed)
    images, inputs, outputs = (int(n) for n in rng.integers(1, (4, 70, 70)))
    height, width = (int(n) for n in rng.integers(5, 30, 2))
    kernel, stride = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    shapes = [(images, inputs, height, width), (outputs, inputs, kernel, kernel)]
    _check(lambda x, w: gf.nn.conv2d(x, w, stride=stride, padding=kernel // 2), shapes)
