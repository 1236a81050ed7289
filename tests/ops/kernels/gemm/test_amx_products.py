"""Products of bfloat16 by AMX tiles: values, bits, and what is computed without them."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY
from graphflow.ops.kernels.gemm import amx_products
from graphflow.ops.kernels.gemm.amx_products import plan_half_product
from graphflow.ops.kernels.gemm.contiguous_products import plan_if_faster_than_blas
from graphflow.ops.kernels.jit.amx_permission import may_use_amx
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from graphflow.ops.matrices.matmul import native_matmul
from tests.ops.kernels.sharing import check_threads

BF16 = ml_dtypes.bfloat16
Array = np.ndarray[Any, Any]
needs_amx = pytest.mark.skipif(not may_use_amx(), reason="needs a processor with AMX")
# Around the sizes of tiles (16), panels and blocks (32), slices (512) and chunks (1024).
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 225]))
LENGTHS = st.one_of(st.integers(0, 70), st.sampled_from([511, 512, 513, 1024, 1025, 1600]))
FLAGS = [(False, False), (False, True), (True, False), (True, True)]


def draw_half(random: np.random.Generator, *shape: int) -> Array:
    return random.normal(size=shape).astype(BF16)


def operands(m: int, k: int, n: int, flags: tuple[bool, bool], batch: tuple[int, ...] = ()) -> Any:
    """Random operands that are stored as the flags say."""
    random = np.random.default_rng(m + 7 * k + 31 * n)
    a = draw_half(random, *batch, *((k, m) if flags[0] else (m, k)))
    return a, draw_half(random, *batch, *((n, k) if flags[1] else (k, n)))


def multiply(a: Array, b: Array, flags: tuple[bool, bool] = (False, False)) -> Array:
    attrs = {"transpose_a": flags[0], "transpose_b": flags[1]}
    (out,) = REGISTRY["matmul"].run(np, [a, b], attrs)
    assert out.dtype == BF16
    return np.asarray(out)


def as_multiplied(a: Array, b: Array, flags: tuple[bool, bool]) -> list[Array]:
    return [
        x.astype("float64").swapaxes(-1, -2) if flag else x.astype("float64")
        for x, flag in zip((a, b), flags, strict=True)
    ]


def check_near(out: Array, a: Array, b: Array, flags: tuple[bool, bool]) -> None:
    """Each element is rounded to bfloat16 once, after sums in float32."""
    x, y = as_multiplied(a, b, flags)
    exact = x @ y
    bound = abs(exact) * 2.0**-8 + (x.shape[-1] + 2) * 2.0**-24 * (abs(x) @ abs(y))
    assert (abs(out.astype("float64") - exact) <= bound).all()


@needs_amx
@settings(max_examples=80, deadline=None)
@given(SIZES, LENGTHS, SIZES, st.sampled_from(FLAGS))
def test_any_product_is_rounded_once(m: int, k: int, n: int, flags: tuple[bool, bool]) -> None:
    a, b = operands(m, k, n, flags)
    check_near(multiply(a, b, flags), a, b, flags)


@needs_amx
@pytest.mark.parametrize("flags", FLAGS)
@pytest.mark.parametrize("shape", [(1100, 1030, 40), (40, 2100, 1000)])
def test_products_of_several_blocks_and_chunks(
    shape: tuple[int, int, int], flags: tuple[bool, bool]
) -> None:
    a, b = operands(*shape, flags)
    check_near(multiply(a, b, flags), a, b, flags)


@needs_amx
def test_scratch_memory_of_wide_products_is_bounded() -> None:
    wide, wider = (plan_half_product((512, 4096), (4096, n)) for n in (1 << 16, 1 << 20))
    assert wide is not None and wider is not None
    assert wide.scratch < 100 << 20 and wider.scratch < 2 << 20


@needs_amx
@pytest.mark.parametrize("flags", FLAGS)
def test_batches_broadcast(flags: tuple[bool, bool]) -> None:
    a, b = operands(20, 33, 9, flags, (2, 3))
    check_near(multiply(a, b[:1], flags), a, b[:1], flags)
    check_near(multiply(a[0], b, flags), a[0], b, flags)
    check_near(multiply(a[:, :1], b[:1], flags), a[:, :1], b[:1], flags)


@needs_amx
@settings(max_examples=40, deadline=None)
@given(SIZES, LENGTHS, SIZES)
def test_bits_follow_from_a_row_and_a_column_alone(m: int, k: int, n: int) -> None:
    a, b = operands(m, k, n, (False, False))
    whole = multiply(a, b)
    for flags in FLAGS[1:]:
        x, y = (
            np.ascontiguousarray(v.T) if flag else v for v, flag in zip((a, b), flags, strict=True)
        )
        assert multiply(x, y, flags).tobytes() == whole.tobytes()
    row, column = m // 2, n - 1
    one = multiply(a[row : row + 1], b[:, column:])
    assert one.tobytes() == whole[row : row + 1, column:].tobytes()


@needs_amx
@pytest.mark.parametrize("shape", [(700, 300, 60), (60, 300, 700), (5, 1500, 999)])
@pytest.mark.parametrize("flags", FLAGS)
def test_threads_change_no_bits(shape: tuple[int, int, int], flags: tuple[bool, bool]) -> None:
    a, b = operands(*shape, flags)
    alone = multiply(a, b, flags)
    check_threads(lambda: [multiply(a, b, flags)], [alone])
    for threads in (4, 5):
        pool = Pool(threads)
        with use_pool(pool):
            shared = multiply(a, b, flags)
        pool.close()
        assert shared.tobytes() == alone.tobytes()


@needs_amx
def test_shares_of_any_number_make_the_whole_product() -> None:
    a, b = operands(300, 70, 500, (False, True))
    product = plan_half_product(a.shape, b.shape, False, True)
    assert product is not None
    whole = multiply(a, b, (False, True))
    for count in range(1, 8):
        assert len(product.cut(count)) == count
        pool, out = Pool(count), np.zeros((300, 500), BF16)
        with use_pool(pool):
            product.run(address(out), address(a), address(b))
        pool.close()
        assert out.tobytes() == whole.tobytes()


@needs_amx
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (3, 4, 0)])
def test_empty_products(shape: tuple[int, int, int]) -> None:
    for flags in FLAGS:
        out = multiply(*operands(*shape, flags), flags)
        assert out.shape == (shape[0], shape[2]) and not out.any()


@needs_amx
def test_views_that_are_not_contiguous() -> None:
    a, b = operands(40, 50, 60, (False, False))
    wide = np.zeros((80, 100), BF16)
    wide[::2, ::2] = a
    assert multiply(wide[::2, ::2], b).tobytes() == multiply(a, b).tobytes()


@needs_amx
@pytest.mark.parametrize("flags", FLAGS)
def test_nan_and_infinity_reach_their_own_rows_and_columns_only(flags: tuple[bool, bool]) -> None:
    a, b = operands(40, 45, 50, flags)
    (a.T if flags[0] else a)[3, 44] = np.nan
    (b.T if flags[1] else b)[44, 7] = np.inf
    out = multiply(a, b, flags).astype("float32")
    x, y = as_multiplied(a, b, flags)
    wanted = x @ y
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    np.testing.assert_array_equal(np.isinf(out), np.isinf(wanted))
    assert np.isfinite(out).sum() == 39 * 49


@needs_amx
def test_large_numbers_become_infinite_and_denormal_ones_zero() -> None:
    large = np.full((1, 1), 3e38, BF16)
    assert np.isposinf(multiply(large, np.full((1, 1), 2, BF16)).astype("float32")).all()
    tiny = np.full((1, 1), 1e-39, BF16)
    assert multiply(tiny, np.full((1, 1), 1e30, BF16))[0, 0] == 0


@needs_amx
@pytest.mark.parametrize("threads", [1, 2])
def test_a_program_has_the_bits_of_the_interpreter(threads: int) -> None:
    a, b = operands(260, 200, 300, (False, False))
    x, w = gf.placeholder("bfloat16", (None, 200)), gf.variable(b, name="w")
    y = gf.matmul(x, w)
    gradient = gf.gradients(gf.sum(gf.nn.relu(y)), [w])[0]
    with gf.Session(gf.Cluster.here(threads=threads)) as session:
        found = session.run([y, gradient], {x: a})
    expected = evaluate([y, gradient], {x: a, w: b})
    assert [f.tobytes() for f in found] == [e.tobytes() for e in expected]
    assert found[0].tobytes() == multiply(a, b).tobytes()


@needs_amx
def test_a_product_is_a_native_call_of_a_program() -> None:
    a, b = gf.placeholder("bfloat16", (8, 16)).spec, gf.placeholder("bfloat16", (16, 8)).spec
    assert native_matmul(a, b) is not None
    product = plan_half_product(a.shape, b.shape)
    assert product is not None and native_matmul(a, b) == product.task


@pytest.mark.parametrize("flags", FLAGS)
def test_without_amx_the_float32_product_is_rounded(
    flags: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAPHFLOW_AMX", "off")
    a, b = operands(40, 300, 50, flags)
    assert plan_half_product(a.shape, b.shape, *flags) is None
    assert plan_if_faster_than_blas(a.shape, b.shape, "bfloat16", *flags) is None
    wide = REGISTRY["matmul"].run(
        np, [x.astype("float32") for x in (a, b)],
        {"transpose_a": flags[0], "transpose_b": flags[1]},
    )[0]  # fmt: skip
    assert multiply(a, b, flags).tobytes() == wide.astype(BF16).tobytes()


def test_a_product_that_is_added_to_something_is_computed_in_float32() -> None:
    assert plan_if_faster_than_blas((8, 8), (8, 8), "bfloat16", False, False, True) is None


def test_a_batch_whose_axes_do_not_join_is_computed_in_float32() -> None:
    random = np.random.default_rng(0)
    a, b = draw_half(random, 2, 1, 3, 1, 4, 5), draw_half(random, 1, 2, 1, 3, 5, 4)
    if may_use_amx():
        assert amx_products.plan_half_product(a.shape, b.shape) is None
    check_near(multiply(a, b), a, b, (False, False))
