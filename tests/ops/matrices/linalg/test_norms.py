"""Norms and condition numbers against numpy; their gradients where elements are 0 or equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, CheckError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from tests.ops.matrices.linalg.test_decompositions import close, draw_matrices, dtypes, seeds

INF = float("inf")
orders = st.sampled_from([2, 1, 0, INF, -INF, 3, 0.5, -1, -2.5, 2.0])
shapes = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@given(shapes, st.data(), orders, st.booleans(), dtypes, seeds)
def test_vector_norms_are_numpys(
    shape: tuple[int, ...], data: Any, ord: float, keepdims: bool, dtype: str, seed: int
) -> None:
    x = draw_matrices(seed, shape, dtype)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    one, every = evaluate(
        [
            gf.linalg.vector_norm(x, axis=axis, keepdims=keepdims, ord=ord),
            gf.linalg.vector_norm(x, ord=ord),
        ]
    )
    assert one.dtype == x.real.dtype
    close(one, np.asarray(np.linalg.norm(x, ord, axis, keepdims)))
    close(every, np.asarray(np.linalg.norm(x.reshape(-1), ord)))


def test_a_norm_over_several_axes_is_that_of_their_elements() -> None:
    x = draw_matrices(0, (2, 3, 4), "float64")
    some, kept = evaluate(
        [
            gf.linalg.vector_norm(x, axis=(0, 2), ord=3),
            gf.linalg.vector_norm(x, axis=(2, 0), ord=3, keepdims=True),
        ]
    )
    wanted = (np.abs(x) ** 3).sum((0, 2)) ** (1 / 3)
    np.testing.assert_allclose(some, wanted)
    np.testing.assert_allclose(kept, wanted[None, :, None])


@given(
    st.integers(1, 4), st.integers(1, 4), st.booleans(), dtypes, seeds,
    st.sampled_from(["fro", "nuc", 1, -1, 2, -2, INF, -INF]),
)  # fmt: skip
def test_matrix_norms_are_numpys(
    m: int, n: int, keepdims: bool, dtype: str, seed: int, ord: Any
) -> None:
    x = draw_matrices(seed, (2, m, n), dtype)
    value, same = evaluate(
        [
            gf.linalg.matrix_norm(x, keepdims=keepdims, ord=ord),
            gf.linalg.norm(x, ord, (-2, -1), keepdims),
        ]
    )
    close(value, np.linalg.norm(x, ord, (-2, -1), keepdims))
    np.testing.assert_array_equal(value, same)


def test_norm_tells_vectors_from_matrices_as_numpy_does() -> None:
    x = draw_matrices(0, (2, 3, 4), "float64")
    calls: list[tuple[Any, dict[str, Any]]] = [
        (x, {}), (x[0], {}), (x[0], {"ord": 1}), (x[0, 0], {"ord": 1}), (x, {"axis": 1}),
        (x, {"axis": (2, 0), "ord": 1}), (x, {"axis": (0, 2), "ord": 1, "keepdims": True}),
        (x, {"keepdims": True}), (x, {"axis": (0, 1)}),
    ]  # fmt: skip
    for array, options in calls:
        (value,) = evaluate([gf.linalg.norm(array, **options)])
        np.testing.assert_allclose(value, np.linalg.norm(array, **options), err_msg=str(options))


@pytest.mark.parametrize("p", [None, "fro", 1, -1, 2, -2, INF, -INF])
def test_condition_numbers_are_numpys(p: Any) -> None:
    x = draw_matrices(3, (2, 3, 3), "float64") + 2 * np.eye(3)
    (value,) = evaluate([gf.linalg.cond(x, p)])
    np.testing.assert_allclose(value, np.linalg.cond(x, p))


def test_the_condition_of_a_singular_matrix_is_infinite() -> None:
    (value,) = evaluate([gf.linalg.cond(np.zeros((2, 2)) + np.diag([1.0, 0.0]))])
    assert value == INF


def slope_at(x: Any, **options: Any) -> Any:
    p = gf.placeholder(x.dtype, x.shape)
    (slope,) = gf.gradients(gf.linalg.vector_norm(p, **options), [p])
    (value,) = evaluate([slope], {p: x})
    return value


@pytest.mark.parametrize("ord", [2, 1, 3, 1.5, 0.5, INF, 0])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_the_gradient_is_zero_at_zero(ord: float, dtype: str) -> None:
    np.testing.assert_array_equal(slope_at(np.zeros(3, dtype), ord=ord), np.zeros(3))


@pytest.mark.parametrize("ord", [2, 1, 3, 1.5, 0.5])
def test_elements_that_are_zero_among_others_get_no_gradient(ord: float) -> None:
    value = slope_at(np.array([0.0, 3.0, -4.0]), ord=ord)
    assert value[0] == 0 and value[1] > 0 > value[2] and np.isfinite(value).all()


def test_largest_elements_that_are_equal_share_the_gradient() -> None:
    np.testing.assert_array_equal(slope_at(np.array([2.0, -2, 1]), ord=INF), [0.5, -0.5, 0])
    np.testing.assert_array_equal(slope_at(np.array([2.0, -2, 1]), ord=-INF), [0, 0, 1])


@pytest.mark.parametrize("ord", ["fro", "nuc", 2, -2])
def test_norms_by_singular_values_have_the_gradient_0_where_these_are_0(ord: Any) -> None:
    x = gf.placeholder("float64", (2, 3, 3))
    a = np.stack([np.zeros((3, 3)), np.outer([1.0, 2, 2], [2.0, 0, 0])])
    (slope,) = evaluate(gf.gradients(gf.linalg.matrix_norm(x, ord=ord), [x]), {x: a})
    least = 0 if ord == -2 else 1
    np.testing.assert_allclose(slope, [a[0], least * a[1] / 6], atol=1e-12)


def test_the_second_derivative_at_zero_is_nan_and_that_of_the_square_is_right() -> None:
    x = gf.placeholder("float64", (3,))
    norm = gf.linalg.vector_norm(x)
    for y, expected in ((norm, np.nan), (norm * norm, 2.0)):
        (slope,) = gf.gradients(y, [x])
        (value,) = evaluate(gf.gradients(slope, [x]), {x: np.zeros(3)})
        np.testing.assert_array_equal(value, [expected] * 3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_floats_of_16_bits_are_summed_in_32(dtype: str) -> None:
    x = gf.full((1000,), 20.0, dtype)  # the squares add up to 400,000, beyond float16
    norm = gf.linalg.vector_norm(x)
    (value,) = evaluate([norm])
    assert value.dtype.name == norm.dtype.name == dtype
    assert float(value) == pytest.approx(20 * 1000**0.5, rel=0.01)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.linalg.vector_norm(np.ones(3, "int32")), DTypeError, "int32"),
        (lambda: gf.linalg.vector_norm(np.ones(3), ord="fro"), ArgumentError, "'fro'"),
        (lambda: gf.linalg.vector_norm(np.ones(3), ord=float("nan")), ArgumentError, "nan"),
        (lambda: gf.linalg.vector_norm(np.ones(3), axis=1), ShapeError, "axis 1"),
        (lambda: gf.linalg.vector_norm(np.ones((0,)), ord=INF), ShapeError, "no elements"),
        (lambda: gf.linalg.vector_norm(np.ones(3), keepdims=1), ArgumentError, "keepdims"),
        (lambda: gf.linalg.matrix_norm(np.ones(3)), ShapeError, "matrices"),
        (lambda: gf.linalg.matrix_norm(np.eye(2), ord=3), ArgumentError, "got 3"),
        (lambda: gf.linalg.matrix_norm(np.eye(2), ord=[1]), ArgumentError, r"\[1\]"),
        (lambda: gf.linalg.norm(np.ones((2, 2, 2)), 1), ShapeError, "got 3"),
        (lambda: gf.linalg.norm(np.ones(2), "nuc"), ArgumentError, "'nuc'"),
        (lambda: gf.linalg.cond(np.ones((2, 3)), 1), ShapeError, "square"),
        (lambda: gf.linalg.cond(np.ones((0, 3))), ShapeError, "no singular values"),
        (lambda: gf.linalg.cond(np.eye(2), "x"), ArgumentError, "'x'"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_norms\.py:\d+.*{words}"):
        call()


def test_the_condition_in_another_norm_of_a_singular_matrix_is_an_error() -> None:
    with pytest.raises(CheckError, match="singular"):
        evaluate([gf.linalg.cond(np.ones((2, 2)), 1)])
