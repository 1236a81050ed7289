"""Products of tiny matrices: the bits of any other product."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.ops.kernels.gemm.gemm import gemm, is_supported
from graphflow.ops.kernels.gemm.tiny import tiny_task
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import compiler

pytestmark = pytest.mark.skipif(not is_supported("float32"), reason="needs AVX2")
SIZES = st.sampled_from([1, 2, 3, 5, 8, 13, 16, 27, 32])
ROWS = st.sampled_from([1, 3, 8, 16, 25, 32, 49, 64])


@given(ROWS, SIZES, SIZES, st.sampled_from(["float32", "float64"]), st.booleans(), st.booleans(),
       st.integers(0, 2**32 - 1))  # fmt: skip
@settings(max_examples=40, deadline=None)
def test_a_tiny_product_has_the_bits_of_a_large_ones_kernel(
    m: int, k: int, n: int, dtype: str, transpose_a: bool, transpose_b: bool, seed: int
) -> None:
    task = tiny_task(m, k, n, dtype, transpose_a, transpose_b)
    if task is None:
        return
    random = np.random.default_rng(seed)
    a = random.normal(size=(k, m) if transpose_a else (m, k)).astype(dtype)
    b = random.normal(size=(n, k) if transpose_b else (k, n)).astype(dtype)
    for array in (a, b):
        array.flat[random.integers(array.size)] = random.choice([0.0, -0.0, np.inf, 1e-40, np.nan])
    out, want = np.full((m, n), 7, dtype), np.empty((m, n), dtype)
    around = np.full(3 * m * n, 5, dtype)
    table = np.array([address(a), address(b), address(around[m * n :])], np.uint64)
    compiler().function(task.name, task.text).holding_gil(address(table), None, 0, 1)
    out[...] = around[m * n : 2 * m * n].reshape(m, n)
    gemm(want, a, b, transpose_a=transpose_a, transpose_b=transpose_b)
    np.testing.assert_array_equal(out, want)
    assert (np.signbit(out) == np.signbit(want))[~np.isnan(out)].all()
    assert (around[: m * n] == 5).all() and (around[2 * m * n :] == 5).all()


def test_what_is_not_tiny_has_no_such_kernel() -> None:
    assert tiny_task(65, 8, 8, "float32") is None
    assert tiny_task(8, 33, 8, "float32") is None
    assert tiny_task(8, 8, 27, "float32") is None
    assert tiny_task(8, 0, 8, "float32") is None
    assert tiny_task(8, 8, 8, "int32") is None
    assert tiny_task(8, 8, 8, "float32") is not None
