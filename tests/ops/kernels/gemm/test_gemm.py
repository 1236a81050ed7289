"""Matrix products by generated kernels."""

from __future__ import annotations

import ctypes
import mmap
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.errors import ShapeError
from graphflow.ops.kernels.gemm import gemm as module
from graphflow.ops.kernels.gemm import tiling as gemm_cut
from graphflow.ops.kernels.gemm.contiguous_products import plan_if_faster_than_blas
from graphflow.ops.kernels.gemm.gemm import gemm, is_supported, plan_product
from graphflow.ops.kernels.gemm.kernel_form import GemmSize
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool

pytestmark = pytest.mark.skipif(vector_width() < 8, reason="made for AVX2 and up")

# Around the sizes of tiles (14), vectors (16), panels (32 and 64) and chunks (384).
SIZES = st.one_of(st.integers(1, 70), st.sampled_from([96, 127, 225]))
LENGTHS = st.one_of(st.integers(0, 70), st.sampled_from([383, 384, 385, 769]))


@dataclass
class Case:
    """A product: views of arrays, whose last two axes are as they are multiplied."""

    a: np.ndarray
    b: np.ndarray
    flags: tuple[bool, bool]
    out: np.ndarray
    accumulate: bool

    @property
    def operands(self) -> tuple[np.ndarray, np.ndarray]:
        a, b = (x.swapaxes(-1, -2) if f else x for x, f in zip((self.a, self.b), self.flags,
                                                               strict=True))  # fmt: skip
        return a, b


@st.composite
def cases(draw: Any) -> Case:
    dtype = draw(st.sampled_from(["float32", "float64"]))
    m, n, k = draw(SIZES), draw(SIZES), draw(LENGTHS)
    batch = draw(st.sampled_from([(), (3,), (2, 3), (1, 2)])) if m * n * k < 50_000 else ()
    flags = draw(st.booleans()), draw(st.booleans())
    random = np.random.default_rng(draw(st.integers(0, 99)))

    def matrix(rows: int, columns: int, may_spread: bool) -> np.ndarray:
        """A matrix for each of the batch, or one for all; with a gap after each row, or without;
        rows and columns stored in either order."""
        own = batch if not may_spread or draw(st.booleans()) else (1,) * len(batch)
        gap = draw(st.sampled_from([0, 3]))
        if draw(st.booleans()):
            return random.normal(size=(*own, rows, columns + gap)).astype(dtype)[..., :columns]
        turned = random.normal(size=(*own, columns, rows + gap)).astype(dtype)[..., :rows]
        return turned.swapaxes(-1, -2)

    a = matrix(*((k, m) if flags[0] else (m, k)), True)
    b = matrix(*((n, k) if flags[1] else (k, n)), True)
    out = matrix(m, n, False)
    return Case(a, b, flags, out, draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_any_product_is_within_the_bound_of_its_length(case: Case) -> None:
    a, b = (x.astype(np.float64) for x in case.operands)
    before = case.out.astype(np.float64) if case.accumulate else 0.0
    if not case.accumulate:
        case.out[...] = np.nan
    gemm(case.out, case.a, case.b, *case.flags, accumulate=case.accumulate)
    bound = (a.shape[-1] + 2) * np.finfo(case.out.dtype).eps
    assert (abs(case.out - (before + a @ b)) <= bound * (abs(a) @ abs(b) + abs(before))).all()


@settings(max_examples=80, deadline=None)
@given(cases())
def test_bits_follow_from_rows_and_columns_alone(case: Case) -> None:
    a, b = case.operands
    shape = case.out.shape
    whole, single = np.empty(shape, a.dtype), np.empty((1, 1), a.dtype)
    gemm(whole, np.ascontiguousarray(a), np.ascontiguousarray(b))
    gemm(case.out, case.a, case.b, *case.flags)
    np.testing.assert_array_equal(case.out, whole)
    row, column = np.random.default_rng(0).integers(0, shape[-2:])
    first = (0,) * (a.ndim - 2)
    gemm(single, a[first][row : row + 1], b[first][:, column : column + 1])
    np.testing.assert_array_equal(single[0, 0], whole[first][row, column])


@settings(max_examples=50, deadline=None)
@given(cases())
def test_a_sum_into_the_result_has_the_bits_of_a_product_and_an_addition(case: Case) -> None:
    product = np.empty(case.out.shape, case.out.dtype)
    gemm(product, case.a, case.b, *case.flags)
    expected = case.out + product
    gemm(case.out, case.a, case.b, *case.flags, accumulate=True)
    np.testing.assert_array_equal(case.out, expected)


@pytest.mark.parametrize("shape", [(300, 200, 130), (20, 900, 700), (700, 900, 20), (3, 400, 999)])
@pytest.mark.parametrize("transposes", [(False, False), (True, True)])
@pytest.mark.parametrize("accumulate", [False, True])
def test_threads_change_no_bits(
    shape: tuple[int, int, int], transposes: tuple[bool, bool], accumulate: bool
) -> None:
    m, k, n = shape
    random = np.random.default_rng(0)
    a = random.normal(size=(k, m) if transposes[0] else (m, k))
    b = random.normal(size=(n, k) if transposes[1] else (k, n))
    alone, shared = np.ones((m, n)), np.ones((m, n))
    gemm(alone, a, b, *transposes, accumulate=accumulate)
    pool = Pool(3)
    with use_pool(pool):
        gemm(shared, a, b, *transposes, accumulate=accumulate)
    pool.close()
    np.testing.assert_array_equal(alone, shared)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_registers_of_256_bits_give_the_same_bits(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(0)
    cases = []
    for m, k, n in ((70, 300, 61), (16, 40, 200), (5, 9, 3)):
        a, b = (random.normal(size=s).astype(dtype) for s in ((m, k), (n, k)))
        cases.append((a, b, np.empty((m, n), dtype)))
        gemm(cases[-1][2], a, b, transpose_b=True)
    plans = (gemm_cut.choose_tiling, module.plan_product, module._plan_for_arrays)
    for plan in plans:
        plan.cache_clear()
    monkeypatch.setattr(gemm_cut, "vector_width", lambda: 8)
    try:
        for a, b, expected in cases:
            out = np.empty_like(expected)
            gemm(out, a, b, transpose_b=True)
            np.testing.assert_array_equal(out, expected)
    finally:
        for plan in plans:
            plan.cache_clear()


@pytest.mark.parametrize("shape", [(64, 700, 900), (13, 1100, 520), (150, 1030, 1000)])
@pytest.mark.parametrize("transpose_a", [False, True])
def test_panels_that_take_turns_have_the_bits_of_each_alone(
    shape: tuple[int, int, int], transpose_a: bool
) -> None:
    m, k, n = shape
    random = np.random.default_rng(0)
    a = random.normal(size=(k, m) if transpose_a else (m, k)).astype("float32")
    b = random.normal(size=(k, n)).astype("float32")
    product = plan_if_faster_than_blas(a.shape, b.shape, "float32", transpose_a, False)
    assert product is not None and not product.swapped
    assert product.sizes[GemmSize.GROUP] > product.sizes[GemmSize.PANEL_COLUMNS]
    together, alone = np.empty((2, m, n), "float32")
    gemm(together, a, b, transpose_a=transpose_a)
    for start in range(0, n, 33):
        gemm(alone[:, start : start + 33], a, b[:, start : start + 33], transpose_a=transpose_a)
    np.testing.assert_array_equal(together, alone)
    np.testing.assert_allclose(together, (a.T if transpose_a else a) @ b, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_stays_in_its_row(odd: float) -> None:
    a, b, out = np.ones((40, 30), "f4"), np.ones((30, 50), "f4"), np.empty((40, 50), "f4")
    a[7, 3] = odd
    gemm(out, a, b)
    np.testing.assert_array_equal(out[7], np.full(50, odd, "f4"))
    np.testing.assert_array_equal(np.delete(out, 7, axis=0), np.full((39, 50), 30, "f4"))
    a[7, 3], b[3, 4] = 0.0, odd
    gemm(out, a, b)
    assert np.isnan(out[7, 4])  # 0 times infinity, as IEEE 754 has it


def test_nothing_times_nothing_is_zero() -> None:
    out = np.full((3, 4), np.nan, "f4")
    gemm(out, np.empty((3, 0), "f4"), np.empty((0, 4), "f4"))
    np.testing.assert_array_equal(out, np.zeros((3, 4), "f4"))
    gemm(np.empty((0, 4), "f4"), np.empty((0, 5), "f4"), np.empty((5, 4), "f4"))
    gemm(np.empty((0, 3, 4), "f4"), np.empty((0, 3, 5), "f4"), np.empty((5, 4), "f4"))


def test_nothing_beyond_the_result_is_written() -> None:
    memory = np.full((40, 50), 7.0, "f4")
    gemm(memory[3:33, 5:42], np.ones((30, 20), "f4"), np.ones((20, 37), "f4"))
    outside = np.ones((40, 50), bool)
    outside[3:33, 5:42] = False
    assert (memory[outside] == 7).all()
    assert (memory[3:33, 5:42] == 20).all()


@pytest.mark.skipif(sys.platform != "linux", reason="protects memory by mprotect")
@pytest.mark.parametrize("rows", [61, 255])
def test_nothing_beyond_a_transposed_operand_is_read(rows: int) -> None:
    """Packing reads whole vectors: behind the operand's last element is memory that none may
    read."""
    k, page = 1025, mmap.PAGESIZE
    nbytes = -(-rows * k * 4 // page) * page
    memory = mmap.mmap(-1, nbytes + page)
    whole = np.frombuffer(memory, np.uint8)
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    assert protect(whole.ctypes.data + nbytes, page, 0) == 0
    a = whole[nbytes - rows * k * 4 : nbytes].view(np.float32).reshape(k, rows)
    a[...] = np.random.default_rng(0).normal(size=a.shape)
    b = np.ones((k, 128), np.float32)
    out = np.empty((rows, 128), np.float32)
    gemm(out, a, b, transpose_a=True)
    assert np.allclose(out, a.T @ b, atol=1e-2)


@pytest.mark.parametrize(
    ("out", "a", "b"),
    [
        (np.empty((3, 4)), np.empty((3, 5)), np.empty((6, 4))),
        (np.empty((3, 4)), np.empty((2, 5)), np.empty((5, 4))),
        (np.empty((3, 4), "f4"), np.empty((3, 5)), np.empty((5, 4))),
        (np.empty((3, 4), "i4"), np.empty((3, 5), "i4"), np.empty((5, 4), "i4")),
        (np.empty((3, 4)), np.empty((3, 20))[:, ::2], np.empty((10, 8))[:, ::2]),
    ],
    ids=["inner", "rows", "dtypes", "integers", "strides"],
)
def test_what_does_not_fit_is_refused(out: Any, a: Any, b: Any) -> None:
    with pytest.raises(ShapeError, match="no kernel for"):
        gemm(out, a, b)


def test_a_batch_of_permuted_axes_is_walked_as_it_is() -> None:
    random = np.random.default_rng(0)
    heads = random.normal(size=(2, 3, 9, 4, 5, 8)).astype("f4")
    q = heads[0].swapaxes(1, 2)  # (3, 4, 9, 5, 8): three axes, of which two join
    assert is_supported("float32")
    out = np.empty((3, 4, 9, 5, 5), "f4")
    q = np.ascontiguousarray(q)
    gemm(out, q, q, transpose_b=True)
    np.testing.assert_allclose(out, q @ q.swapaxes(-1, -2), rtol=1e-5, atol=1e-5)
    apart = (1,) * 5, (9, 8, 7, 24, 4), (0, 5, 3, 28, 4)
    assert plan_product((2, 3, 4), 5, 6, 7, "float32", *apart) is None
