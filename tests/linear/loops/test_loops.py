"""Loops as machine code give the bits of the same loops as Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp

from graphflow.linear.loops import (
    column_cycles,
    column_passes,
    coordinate_orders,
    dot_products,
    hessian_rows,
    pair_steps,
    row_passes,
    thread_meetings,
)
from graphflow.ops.kernels.compiled_loops.loop_compiler import native


def compare_loops(module: Any, name: str, *arguments: Any) -> None:
    """Run a loop both ways on copies, and compare results and arrays."""
    found = []
    for function in (native(module, name), getattr(module, name)):
        own = [a.copy() if isinstance(a, np.ndarray) else a for a in arguments]
        result = function(*own)
        found.append((result, [a.tobytes() for a in own if isinstance(a, np.ndarray)]))
    assert found[0] == found[1]


def table(seed: int, dtype: Any, index: Any) -> tuple[Any, Any]:
    dense = np.random.default_rng(seed).normal(size=(13, 19)).astype(dtype)
    dense[np.random.default_rng(seed + 1).random(dense.shape) < 0.6] = 0
    sparse = sp.csr_matrix(dense)
    sparse.indices, sparse.indptr = sparse.indices.astype(index), sparse.indptr.astype(index)
    return dense, sparse


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("index", [np.int32, np.int64])
def test_passes_over_rows(dtype: Any, index: Any) -> None:
    random = np.random.default_rng(3)
    dense, sparse = table(0, dtype, index)
    n, d = dense.shape
    squares = (dense.astype(np.float64) ** 2).sum(axis=1) + 0.25
    order, c = random.permutation(n), random.uniform(0.5, 2.0, size=n)
    y = random.choice([-1.0, 1.0], size=n)
    beta, w = 0.3 * y * c, random.normal(size=d + 1)
    parts = (sparse.data, sparse.indices, sparse.indptr)
    for loss in range(7):
        rest = (d, squares, y, c, loss, 0.3, 0.7, 0.5, beta, w)
        compare_loops(row_passes, "dense_rows", order, dense.reshape(-1), *rest)
        compare_loops(row_passes, "sparse_rows", order, *parts, *rest)
    for is_squared in (False, True):
        bounds = np.array([-0.5, 0.5, 0.0, 0.0, 0.0])
        ends = (d, squares, y, c, is_squared, 0.7, 0.5, beta, w)
        compare_loops(row_passes, "dense_svm_rows", order, n, bounds, dense.reshape(-1), *ends)
        compare_loops(row_passes, "sparse_svm_rows", order, n, bounds, *parts, *ends)
        start = (3 * n, 1e-3, np.array([n, 5]), order, bounds)
        compare_loops(row_passes, "dense_svm_passes", *start, dense.reshape(-1), *ends)
        compare_loops(row_passes, "sparse_svm_passes", *start, *parts, *ends)
    compare_loops(row_passes, "sparse_squares", sparse.data, sparse.indptr, np.zeros(n))


def test_a_shuffled_order_has_the_same_numbers_in_all_orders() -> None:
    order, seed, seen = np.arange(40), 7, set()
    for _ in range(20):
        compare_loops(coordinate_orders, "shuffle", order, 30, seed)
        seed = native(coordinate_orders, "shuffle")(order, 30, seed)
        assert sorted(order[:30]) == list(range(30)) and list(order[30:]) == list(range(30, 40))
        seen.add(tuple(order))
    assert len(seen) == 20
    firsts = set()
    for _ in range(500):
        seed = native(coordinate_orders, "shuffle")(order, 30, seed)
        firsts.add(int(order[0]))
    assert firsts == set(range(30))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("is_positive", [False, True])
def test_passes_over_columns(dtype: Any, is_positive: bool) -> None:
    random = np.random.default_rng(4)
    dense, _ = table(1, dtype, np.int32)
    n, d = dense.shape
    h, residual, w = random.uniform(size=n), random.normal(size=n), random.normal(size=d)
    means = random.normal(size=d)
    curvatures = (dense.astype(np.float64) ** 2).T @ h
    order = random.permutation(d)
    ends = (w, 0.2, 0.1, is_positive)
    flat = dense.reshape(-1, order="F")
    compare_loops(
        column_passes, "dense_columns", order, flat, n, curvatures, means, h, residual, *ends
    )
    csc = sp.csc_matrix(dense)
    shift = np.array([0.3])
    compare_loops(
        column_passes, "sparse_columns", order, csc.data, csc.indices, csc.indptr, curvatures,
        means, h, residual, shift, *ends,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("limit", [0.0, 0.3])
@pytest.mark.parametrize("is_positive", [False, True])
def test_cycles_over_columns(dtype: Any, limit: float, is_positive: bool) -> None:
    random = np.random.default_rng(6)
    dense, _ = table(2, dtype, np.int32)
    n, d = dense.shape
    squares = (dense.astype(np.float64) ** 2).sum(axis=0)
    residual, w = random.normal(size=n), random.normal(size=d)
    w[::3] = 0.0
    kept, ends = np.zeros(3 * d), (0.2, 0.1, is_positive, limit)
    flat = dense.reshape(-1, order="F")
    places = random.permutation(d)
    compare_loops(
        column_cycles, "cycle_dense", 3, places, flat, n, squares, residual, w, kept, *ends
    )
    compare_loops(column_cycles, "add_columns", places, flat, n, w, residual)
    compare_loops(column_cycles, "multiply_columns", places, flat, n, residual, np.zeros(d))
    compare_loops(column_cycles, "square_columns", places, flat, n, np.zeros(d))
    csc = sp.csc_matrix(dense)
    sums, shift = random.normal(size=d), np.array([0.3])
    compare_loops(
        column_cycles, "cycle_sparse", 3, csc.data, csc.indices, csc.indptr, squares, sums, 7.0,
        residual, shift, w, kept, *ends,
    )  # fmt: skip
    gram = (dense.T @ dense).astype(np.float64)
    slopes = random.normal(size=d)
    compare_loops(column_cycles, "cycle_products", 3, gram.reshape(-1), slopes, w, kept, *ends)


def test_steps_of_pairs() -> None:
    random = np.random.default_rng(5)
    x = random.normal(size=(20, 3))
    kernel = np.exp(-((x[:, None] - x[None]) ** 2).sum(axis=-1))
    y, c = np.where(np.arange(20) % 2, 1.0, -1.0), random.uniform(0.5, 2.0, size=20)
    compare_loops(
        pair_steps, "optimize_pairs", 20, kernel.reshape(-1), y, c, np.zeros(20), np.full(20, -1.0),
        np.zeros(80), 1e-6, 500,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_products_that_read_each_row_once(dtype: Any) -> None:
    random = np.random.default_rng(7)
    n, d = 13, 37
    x = random.normal(size=n * d).astype(dtype)
    c, f, p, image = (random.normal(size=size) for size in (n, n, d, d))
    y = random.choice([-1.0, 1.0], size=n)
    compare_loops(dot_products, "multiply_rows", n, d, x, p, np.zeros(n))
    compare_loops(dot_products, "add_columns", n, d, x, c, np.zeros(d))
    compare_loops(hessian_rows, "dense_products", n, d, x, c, p, 0.3, image)
    compare_loops(hessian_rows, "row_squares", n, d, x, image)
    for is_squared in (False, True):
        slopes = (n, d, x, y, c, is_squared, p, f, np.zeros(n), np.zeros(d))
        compare_loops(hessian_rows, "dense_slopes", *slopes)


@pytest.mark.parametrize("n", [3, 8, 29])
def test_steps_of_a_copy_and_their_square(n: int) -> None:
    copy, w, steps = np.random.default_rng(n).normal(size=(3, n))
    for is_first in (True, False):
        compare_loops(thread_meetings, "add_step", copy, w, steps, is_first, n)
    wanted = steps + (copy - w)
    square = native(thread_meetings, "add_step")(copy, w, steps, False, n)
    np.testing.assert_array_equal(steps, wanted)
    assert square == pytest.approx(float((copy - w) @ (copy - w)), rel=1e-14)
