"""Sparse matrices against their dense twins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, OpError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool

Array = np.ndarray[Any, Any]


def _matrix(m: int, n: int, density: float, seed: int = 0, dtype: str = "float64") -> Array:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((m, n)) * (rng.random((m, n)) < density)).astype(dtype)


matrices = st.builds(
    _matrix,
    st.integers(0, 6), st.integers(1, 6), st.sampled_from([0.0, 0.3, 1.0]), st.integers(0, 99),
)  # fmt: skip


@given(matrices, st.integers(0, 3), st.booleans())
def test_products_are_those_of_the_dense_matrix(a: Array, width: int, transpose: bool) -> None:
    twin = a.T if transpose else a
    x = np.random.default_rng(1).standard_normal((twin.shape[1], width))
    s = gf.sparse.from_dense(a)
    values = evaluate([gf.sparse.spmm(s, x, transpose=transpose), gf.sparse.to_dense(s)])
    np.testing.assert_allclose(values[0], twin @ x, atol=1e-12)
    np.testing.assert_array_equal(values[1], a)
    v = x[:, 0] if width else np.ones(len(x))
    (vector,) = evaluate([gf.sparse.spmv(s, v, transpose=transpose)])
    np.testing.assert_allclose(vector, twin @ v, atol=1e-12)


@settings(deadline=None)
@given(matrices, st.integers(1, 3), st.booleans())
def test_gradients_are_those_of_the_dense_matrix(a: Array, width: int, transpose: bool) -> None:
    rows, columns = np.nonzero(a)
    s = gf.sparse.from_dense(a)
    entries = gf.placeholder("float64", (len(rows),))
    m = gf.placeholder("float64", a.shape)
    x = gf.placeholder("float64", (a.shape[0 if transpose else 1], width))
    dense = gf.tanh((m.mT if transpose else m) @ x)
    sparse = gf.tanh(gf.sparse.spmm(s.with_values(entries), x, transpose=transpose))
    fed = {x: np.random.default_rng(2).standard_normal(x.shape), m: a, entries: a[rows, columns]}
    by_m, by_x = gf.gradients(gf.sum(dense), [m, x])
    by_entries, by_x2 = gf.gradients(gf.sum(sparse), [entries, x])
    (second,) = gf.gradients(gf.sum(gf.square(by_x)), [m])
    (second2,) = gf.gradients(gf.sum(gf.square(by_x2)), [entries])
    v = evaluate([by_m, by_x, by_entries, by_x2, second, second2], fed)
    np.testing.assert_allclose(v[2], v[0][rows, columns], atol=1e-10)
    np.testing.assert_allclose(v[3], v[1], atol=1e-10)
    np.testing.assert_allclose(v[5], v[4][rows, columns], atol=1e-10)


def test_operators_multiply_from_both_sides() -> None:
    a, x = _matrix(3, 4, 0.5), np.arange(8.0).reshape(4, 2)
    s = gf.sparse.from_dense(a)
    y, z = gf.constant(x), gf.constant(x[:3])
    values = evaluate([s @ y, s @ y[:, 0], z.mT @ s, z[:, 0] @ s])
    for have, want in zip(values, (a @ x, a @ x[:, 0], x[:3].T @ a, x[:3, 0] @ a), strict=True):
        np.testing.assert_allclose(have, want)
    assert s.shape == (3, 4) and s.dtype == np.float64 and s.entries == np.count_nonzero(a)


def test_entries_of_one_place_add_up() -> None:
    s = gf.sparse.csr([1.0, 2.0, 4.0], [1, 1, 0], [0, 2, 3], (2, 2))
    dense, product = evaluate([gf.sparse.to_dense(s), s @ gf.constant(np.eye(2, dtype="float32"))])
    assert dense.tolist() == product.tolist() == [[0, 3], [4, 0]]


def test_a_pattern_may_be_fed() -> None:
    a = _matrix(5, 4, 0.4)
    rows, columns = np.nonzero(a)
    values, places = gf.placeholder("float64", ("e",)), gf.placeholder("int32", ("e",))
    offsets = gf.placeholder("int32", (6,))
    y = gf.sparse.csr(values, places, offsets, (5, 4)) @ gf.constant(np.eye(4))
    fed = {values: a[rows, columns], places: columns.astype("int32"),
           offsets: np.searchsorted(rows, np.arange(6)).astype("int32")}  # fmt: skip
    with gf.Session() as session:
        np.testing.assert_array_equal(session.run(y, fed), a)
        with pytest.raises(OpError, match=r"test_sparse\.py:\d+.*column 9 .* 4 columns"):
            session.run(y, fed | {places: np.full(len(rows), 9, "int32")})


def test_sums_do_not_depend_on_threads_and_float16_is_summed_in_float32() -> None:
    a, x = _matrix(400, 300, 0.1, dtype="float32"), _matrix(300, 40, 1, dtype="float32")
    s = gf.sparse.from_dense(a)
    for transpose in (False, True):
        y = gf.sparse.spmm(s, x if not transpose else np.resize(x, (400, 40)), transpose)
        (alone,) = evaluate([y])
        pool = Pool(3)
        with use_pool(pool):
            (shared,) = evaluate([y])
        pool.close()
        assert alone.tobytes() == shared.tobytes()
    half = gf.sparse.from_dense(a.astype("float16"))
    (value,) = evaluate([half @ gf.constant(x.astype("float16"))])
    exact = a.astype("float16").astype("float64") @ x.astype("float16").astype("float64")
    np.testing.assert_allclose(value, exact, rtol=2e-3, atol=2e-3)


def test_scipys_attributes_are_enough() -> None:
    matrix = SimpleNamespace(
        data=np.array([2.0]), indices=np.array([1]), indptr=np.array([0, 0, 1]), shape=(2, 3)
    )
    (value,) = evaluate([gf.sparse.to_dense(gf.sparse.from_scipy(matrix))])
    assert value.tolist() == [[0, 0, 0], [0, 2, 0]]


def test_values_are_trained_in_a_session() -> None:
    weights = gf.variable(np.zeros(3, "float32"), name="weights")
    s = gf.sparse.csr(weights, [0, 2, 1], [0, 2, 3], (2, 3))
    loss = gf.sum(gf.square(s @ gf.constant(np.array([1, 2, 3], "float32")) - 1.0))
    step = gf.optim.SGD(0.02).minimize(loss)
    with gf.Session() as session:
        for _ in range(100):
            session.run(step)
        assert session.run(loss) < 1e-3


C = gf.constant


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.sparse.csr([1.0], [3], [0, 1], (1, 3)), ArgumentError, "column 3 .* 3 columns"),
        (lambda: gf.sparse.csr([1.0], [-1], [0, 1], (1, 3)), ArgumentError, "column -1"),
        (lambda: gf.sparse.csr([1.0], [0], [0, 2], (1, 3)), ArgumentError, "from 0 to 2.*1"),
        (lambda: gf.sparse.csr([1.0, 2.0], [0, 1], [0, 2, 1, 2], (3, 3)), ArgumentError, "row 1"),
        (lambda: gf.sparse.csr([1.0], [0], [0, 1], (2, 3)), ShapeError, "one more than the 2 rows"),
        (lambda: gf.sparse.csr([1.0], [0, 1], [0, 2], (1, 3)), ShapeError, "every entry"),
        (lambda: gf.sparse.csr([1.0], [0.0], [0, 1], (1, 3)), DTypeError, "columns must be ints"),
        (lambda: gf.sparse.csr([True], [0], [0, 1], (1, 3)), DTypeError, "bool"),
        (lambda: gf.sparse.csr([1.0], [0], [0, 1], (1, 3, 1)), ShapeError, "rows and columns"),
        (lambda: gf.sparse.from_dense(C(np.eye(2))), ArgumentError, "give an array"),
        (lambda: gf.sparse.from_dense([1.0, 2.0]), ShapeError, "matrix"),
        (lambda: gf.sparse.from_scipy(np.eye(2)), ArgumentError, "indices.*tocsr"),
        (lambda: gf.sparse.spmm(np.eye(2), np.eye(2)), ArgumentError, "sparse.csr"),
        (lambda: gf.sparse.to_dense(3), ArgumentError, "sparse.csr"),
        (lambda: gf.sparse.from_dense(np.eye(3)) @ np.eye(2), ShapeError, "3 != 2"),
        (lambda: gf.sparse.from_dense(np.eye(3, dtype="f")) @ np.eye(3), DTypeError, "float64"),
        (lambda: gf.sparse.spmv(gf.sparse.from_dense(np.eye(3)), np.eye(3)), ShapeError, "spmm"),
    ],
)  # fmt: skip
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_sparse\.py:\d+.*{words}"):
        call()
