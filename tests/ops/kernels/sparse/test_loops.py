"""Native loops over rows and entries: numpy's sums, whatever the width, the dtype and the cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.ops.kernels.codegen.control_flow import KernelWriter
from graphflow.ops.kernels.fusion.parallel_call import call_parallel
from graphflow.ops.kernels.gemm.gemv import plan_vector_product
from graphflow.ops.kernels.jit.compiler import compiler, vector_width
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool
from graphflow.ops.kernels.sparse import csr
from graphflow.ops.kernels.sparse.distinct_numbers import find_distinct
from graphflow.ops.kernels.sparse.prefix_sum import try_running_sum
from graphflow.ops.kernels.sparse.scatter_rows import combine_rows

Array = np.ndarray[Any, Any]
WIDTHS = (1, 2, 3, 7, 16, 33, 64, 65, 130)


def _pattern(m: int, n: int, density: float, seed: int) -> tuple[Array, Array, Array]:
    """A matrix, and its columns and offsets."""
    rng = np.random.default_rng(seed)
    dense = rng.standard_normal((m, n)) * (rng.random((m, n)) < density)
    rows, columns = map(np.ascontiguousarray, np.nonzero(dense))
    offsets = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=m))])
    return dense, columns, offsets


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(WIDTHS), st.integers(1, 40), st.integers(1, 70),
    st.sampled_from([0.05, 0.5, 1.0]), st.booleans(),
    st.sampled_from(["float32", "float64", "int32", "int64"]),
    st.sampled_from(["int32", "int64"]), st.integers(0, 9),
)  # fmt: skip
def test_products_of_entries_are_those_of_the_dense_matrix(
    width: int, m: int, n: int, density: float, transpose: bool, dtype: str, index: str, seed: int
) -> None:
    dense, columns, offsets = _pattern(m, n, density, seed)
    dense = (dense * 4).astype(dtype)
    values = dense[np.nonzero(_pattern(m, n, density, seed)[0])]
    twin = dense.T if transpose else dense
    x = (np.random.default_rng(1).standard_normal((twin.shape[1], width)) * 4).astype(dtype)
    out = np.empty((twin.shape[0], width), dtype)
    parts = values, columns.astype(index), offsets.astype(index)
    csr.matmul(np, out, *parts, x, (m, n), transpose)
    wanted = twin.astype("float64") @ x
    np.testing.assert_allclose(out, wanted, atol=2e-4 if dtype == "float32" else 1e-9, rtol=1e-4)


@pytest.mark.parametrize("width", WIDTHS)
def test_entries_of_a_product_are_scalar_products(width: int) -> None:
    _, columns, offsets = _pattern(30, 50, 0.3, 0)
    rng = np.random.default_rng(0)
    rows, others = rng.standard_normal((30, width)), rng.standard_normal((50, width))
    out = np.empty(len(columns))
    csr.sample(np, out, columns, offsets, rows, others, (30, 50))
    at = np.repeat(np.arange(30), np.diff(offsets))
    np.testing.assert_allclose(out, (rows @ others.T)[at, columns], atol=1e-12)


@pytest.mark.parametrize("width", [1, 8, 200])
@pytest.mark.parametrize("transpose", [False, True])
def test_a_product_has_the_same_bits_for_any_number_of_threads(width: int, transpose: bool) -> None:
    m, n = 900, 400
    dense, columns, offsets = _pattern(m, n, 0.5 if width > 1 else 0.9, 3)
    values = dense[dense != 0].astype("float32")
    x = np.random.default_rng(0).standard_normal((m if transpose else n, width)).astype("float32")
    results = []
    for threads in (1, 2, 3):
        out = np.empty((n if transpose else m, width), "float32")
        with use_pool(Pool(threads)):
            csr.matmul(np, out, values, columns, offsets, x, (m, n), transpose)
        results.append(out.tobytes())
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("bad", [-1, 50, 1 << 40])
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("transpose", [False, True])
def test_a_column_outside_the_matrix_is_never_read(bad: int, width: int, transpose: bool) -> None:
    _, columns, offsets = _pattern(30, 50, 0.3, 0)
    columns = columns.copy()
    columns[100] = bad
    values, x = np.ones(len(columns)), np.ones((30 if transpose else 50, width))
    out = np.empty((50 if transpose else 30, width))
    with pytest.raises(IndexError, match="is outside a matrix of 50 columns"):
        csr.matmul(np, out, values, columns, offsets, x, (30, 50), transpose)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(WIDTHS), st.integers(0, 50),
    st.sampled_from(["add", "mul", "min", "max"]),
    st.sampled_from(["float32", "float64", "int8", "uint8", "int32", "uint32", "int64"]),
    st.integers(1, 3),
)  # fmt: skip
def test_rows_are_combined_as_numpy_does_in_order(
    width: int, count: int, reduction: str, dtype: str, threads: int
) -> None:
    rng = np.random.default_rng(count)
    rows = rng.integers(0, 9, count)
    updates = (rng.standard_normal((count, width)) * 50).astype("int64").astype(dtype)
    if dtype.startswith("float"):
        updates = updates / updates.dtype.type(7)
        updates[rng.random(updates.shape) < 0.05] = np.nan
    out = np.full((9, width), 3, dtype)
    wanted = out.copy()
    ufunc = {"add": np.add, "mul": np.multiply, "min": np.minimum, "max": np.maximum}[reduction]
    with np.errstate(all="ignore"):
        ufunc.at(wanted, rows, updates)
    with use_pool(Pool(threads)):
        combine_rows(np, out, rows, updates, reduction)
    np.testing.assert_array_equal(out, wanted)


def test_a_loop_that_does_not_run_gives_what_it_was_given() -> None:
    flow = KernelWriter()
    out = flow.pointer(0)
    (total,) = flow.loop("%start", "%stop", [("i64", "7")], lambda i, t: [flow.add(t, i)])
    (chosen,) = flow.when(
        flow.step("icmp sgt", total, 10), [("i64", total)], lambda: [flow.mul(total, 2)]
    )
    flow.store("i64", chosen, out, 8)
    function = compiler().function(*flow.finish())
    for rows, wanted in ((0, 7), (2, 8), (4, 26)):
        result = np.zeros(1, np.int64)
        call_parallel(function, [result], (), rows, 0)
        assert result[0] == wanted


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 1300), st.integers(1, 300), st.sampled_from(["float32", "float64"]),
    st.booleans(), st.booleans(),
)  # fmt: skip
def test_products_with_a_vector_are_sums_in_one_order(
    rows: int, columns: int, dtype: str, over: bool, swapped: bool
) -> None:
    rng = np.random.default_rng(rows)
    matrix = rng.standard_normal((rows, columns)).astype(dtype)
    vector = rng.standard_normal(rows if over else columns).astype(dtype)
    a, b = (matrix, vector.reshape(-1, 1)) if not swapped else (vector.reshape(1, -1), matrix)
    turned = over if not swapped else not over
    flags = (False, turned) if swapped else (turned, False)
    product = plan_vector_product(a.shape, b.shape, dtype, *flags)
    if product is None:
        assert matrix.size <= 4096 or min(matrix.shape) == 1
        return
    size = columns if over else rows
    found = []
    for threads in (1, 3):
        out = np.empty(size, dtype)
        with use_pool(Pool(threads)):
            product.run(out, a, b)
        found.append(out)
    task = product.task
    entry = np.empty(size, dtype)
    function = compiler().function(task.name, task.text)
    order = task.order or (0, 1)
    given_ = [(a, b)[i] for i in order]
    call_parallel(
        function, [*given_, entry, np.empty(task.scratch + 8, np.uint8)], task.sizes, task.rows, 0
    )
    assert found[0].tobytes() == found[1].tobytes() == entry.tobytes()
    wanted = (matrix.T if over else matrix).astype("float64") @ vector
    np.testing.assert_allclose(
        found[0], wanted, rtol=1e-3, atol=2e-3 if dtype == "float32" else 1e-9
    )


def _product(a: Array, b: Array, threads: int = 1) -> Array:
    made = plan_vector_product(a.shape, b.shape, a.dtype.name, False, False)
    assert made is not None
    out = np.empty((a.shape[0], b.shape[1]), a.dtype)
    with use_pool(Pool(threads)):
        made.run(out, np.ascontiguousarray(a), np.ascontiguousarray(b))
    return out


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("m, n", [(1030, 257), (2100, 128), (1100, 1025), (70, 9001)])
def test_bits_of_a_matrix_times_a_vector_do_not_depend_on_how_much_is_read_at_once(
    m: int, n: int, dtype: str
) -> None:
    """Rows of less than a page and of several, results that fit a cache and that come in tiles."""
    rng = np.random.default_rng(9)
    matrix, row = (
        rng.standard_normal((m, n)).astype(dtype),
        rng.standard_normal((1, m)).astype(dtype),
    )
    column = rng.standard_normal((n, 1)).astype(dtype)
    along, over = _product(matrix, column), _product(row, matrix)
    tolerance = 1e-3 if dtype == "float32" else 1e-11
    np.testing.assert_allclose(along, matrix.astype("f8") @ column.astype("f8"), atol=tolerance)
    np.testing.assert_allclose(over, row.astype("f8") @ matrix.astype("f8"), atol=tolerance)
    assert (_product(matrix, column, 3) == along).all() and (_product(row, matrix, 3) == over).all()
    assert (_product(matrix[-65:], column)[-1] == along[-1]).all()
    assert (_product(row, matrix[:, -60:])[0, -5:] == over[0, -5:]).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape, axis", [((9000,), 0), ((700, 30), 0), ((3, 50, 1100), 1),
                                         ((3000, 5, 2), 1), ((40, 3, 50), 2)])  # fmt: skip
@pytest.mark.parametrize("reverse", [False, True])
def test_running_sums_have_numpys_bits(
    shape: tuple[int, ...], axis: int, reverse: bool, dtype: str
) -> None:
    x = np.random.default_rng(10).standard_normal(shape).astype(dtype)
    x.flat[0] = x.flat[-1] = -0.0
    given = np.flip(x, axis) if reverse else x
    want = np.cumsum(given, axis=axis, dtype="float64").astype(dtype)
    want = np.ascontiguousarray(np.flip(want, axis) if reverse else want)
    for threads in (1, 3):
        out = np.empty_like(x)
        with use_pool(Pool(threads)):
            assert try_running_sum(out, x, axis, reverse) or vector_width() < 8
        assert out.tobytes() == want.tobytes() or vector_width() < 8
    assert not try_running_sum(out[:10], x[:10], axis, reverse) or x[:10].size >= 4096


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2000), st.sampled_from([1, 2, 7, 2047, 2048, 2049, 2**22, 2**31, 2**40]),
    st.sampled_from(["int64", "int32"]), st.integers(0, 9),
)  # fmt: skip
def test_distinct_numbers_are_numpys(count: int, bound: int, dtype: str, seed: int) -> None:
    top = min(bound, np.iinfo(dtype).max)
    numbers = np.random.default_rng(seed).integers(0, top, count).astype(dtype)
    numbers[: count // 2] = numbers[count // 2 : count // 2 * 2]
    numbers[:1] = top - 1
    distinct, places = find_distinct(np, numbers, bound)
    expected = np.unique(numbers, return_inverse=True)
    np.testing.assert_array_equal(distinct, expected[0])
    np.testing.assert_array_equal(places, expected[1].reshape(-1))
    assert distinct.dtype == places.dtype == np.int64
