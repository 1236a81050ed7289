"""The namespace `gf.linalg`: its names, and the functions that are made there."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from tests.ops.matrices.linalg.test_decompositions import draw_matrices, dtypes, seeds

ARRAY_API = """
    cholesky cross det diagonal eigh eigvalsh inv matmul matrix_norm matrix_power matrix_rank
    matrix_transpose outer pinv qr slogdet solve svd svdvals tensordot trace vecdot vector_norm
"""


def test_every_name_of_the_array_api_is_there() -> None:
    assert [name for name in ARRAY_API.split() if name not in gf.linalg.__all__] == []
    assert all(callable(getattr(gf.linalg, name)) for name in gf.linalg.__all__)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(-5, 5), dtypes)
def test_diagonals_and_traces_are_numpys(m: int, n: int, offset: int, dtype: str) -> None:
    x = draw_matrices(0, (2, m, n), dtype)
    diagonal, trace = evaluate(
        [gf.linalg.diagonal(x, offset=offset), gf.linalg.trace(x, offset=offset)]
    )
    np.testing.assert_array_equal(diagonal, np.diagonal(x, offset, -2, -1))
    np.testing.assert_allclose(trace, np.trace(x, offset, -2, -1), rtol=1e-5)


def test_diagonals_of_matrices_of_unknown_size() -> None:
    x = gf.placeholder("float64", ("m", "n"))
    y = [gf.linalg.diagonal(x, offset=k) for k in (0, 1, -1)]
    for shape in ((3, 4), (4, 2)):
        a = draw_matrices(1, shape, "float64")
        for value, k in zip(evaluate(y, {x: a}), (0, 1, -1), strict=True):
            np.testing.assert_array_equal(value, np.diagonal(a, k))


@given(st.sampled_from([((3,), (3,)), ((2, 3), (3,)), ((2, 1, 3), (4, 3))]), dtypes, seeds)
def test_cross_products_are_numpys(shapes: Any, dtype: str, seed: int) -> None:
    a, b = draw_matrices(seed, shapes[0], dtype), draw_matrices(seed + 1, shapes[1], dtype)
    (value,) = evaluate([gf.linalg.cross(a, b)])
    np.testing.assert_allclose(value, np.cross(a, b), rtol=1e-4, atol=1e-5)


def test_cross_products_along_another_axis_and_of_ints() -> None:
    a, b = np.arange(12).reshape(3, 4), np.arange(12)[::-1].reshape(3, 4).copy()
    first, last = evaluate([gf.linalg.cross(a, b, axis=0), gf.linalg.cross(a, b, axis=-2)])
    np.testing.assert_array_equal(first, np.cross(a, b, axis=0))
    np.testing.assert_array_equal(last, first)


@given(st.lists(st.integers(1, 4), min_size=3, max_size=6), st.booleans(), st.booleans())
def test_multi_dot_is_numpys(sizes: list[int], row: bool, column: bool) -> None:
    arrays = [draw_matrices(i, pair, "float64") for i, pair in enumerate(pairwise(sizes))]
    if row:
        arrays[0] = arrays[0][0]
    if column:
        arrays[-1] = arrays[-1][:, 0]
    (value,) = evaluate([gf.linalg.multi_dot(arrays)])
    np.testing.assert_allclose(value, np.linalg.multi_dot(arrays), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.linalg.diagonal(np.ones(3)), ShapeError, "matrices"),
        (lambda: gf.linalg.diagonal(np.eye(3), offset=0.5), ArgumentError, "0.5"),
        (lambda: gf.linalg.trace(np.ones(3)), ShapeError, "matrices"),
        (lambda: gf.linalg.cross(np.ones(2), np.ones(2)), ShapeError, "2 != 3"),
        (lambda: gf.linalg.cross(np.ones((3, 2)), np.ones(3), axis=0), ShapeError, "as -2"),
        (lambda: gf.linalg.cross(np.ones(3, bool), np.ones(3, bool)), DTypeError, "bool"),
        (lambda: gf.linalg.multi_dot([np.eye(2)]), ArgumentError, "2"),
        (lambda: gf.linalg.multi_dot(np.eye(2)), ArgumentError, "list"),
        (lambda: gf.linalg.multi_dot([np.eye(2), np.ones(2), np.eye(2)]), ShapeError, "number 1"),
        (lambda: gf.linalg.multi_dot([np.eye(2), np.eye(3)]), ShapeError, "3"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_linalg_namespace\.py:\d+.*{words}"):
        call()
