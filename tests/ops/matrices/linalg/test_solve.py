"""Systems, inverses and powers: numpy's values, over batches of any shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, CheckError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate

DTYPES = ("float32", "float64", "complex64", "complex128")
TOLERANCE = {"float16": 2e-2, "float32": 2e-4, "complex64": 2e-4, "float64": 1e-9}

sizes = st.integers(1, 5)
batches = st.lists(st.integers(1, 3), max_size=2).map(tuple)


def draw_regular_matrices(rng: Any, shape: tuple[int, ...], dtype: str) -> Any:
    """Well conditioned matrices."""
    x = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        x = x + 1j * rng.standard_normal(shape)
    return (x + 4 * max(shape[-2:]) * np.eye(*shape[-2:])).astype(dtype)


def vectors(rng: Any, shape: tuple[int, ...], dtype: str) -> Any:
    x = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(dtype)


def close(have: Any, want: Any, dtype: str) -> None:
    assert have.shape == want.shape
    np.testing.assert_allclose(have, want, rtol=TOLERANCE.get(dtype, 1e-9), atol=1e-5)


@given(sizes, sizes, batches, st.sampled_from(DTYPES), st.integers(0, 99))
def test_solve_is_numpys_over_batches_and_dtypes(
    n: int, k: int, batch: tuple[int, ...], dtype: str, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    a, b = draw_regular_matrices(rng, (*batch, n, n), dtype), vectors(rng, (n, k), dtype)
    solved = gf.linalg.solve(a, b)
    (value,) = evaluate([solved])
    assert value.dtype == dtype == solved.dtype
    close(value, np.linalg.solve(a, np.broadcast_to(b, (*batch, n, k))), dtype)


@pytest.mark.parametrize("batch", [(4,), (2, 3), (0,)], ids=str)
@pytest.mark.parametrize("lower", [True, False])
def test_a_batch_of_right_sides_shares_one_matrix(batch: tuple[int, ...], lower: bool) -> None:
    rng = np.random.default_rng(0)
    a, b = draw_regular_matrices(rng, (3, 3), "float64"), rng.standard_normal((*batch, 3, 2))
    solved, triangular = evaluate(
        [gf.linalg.solve(a, b), gf.linalg.triangular_solve(a, b, lower=lower)]
    )
    wide = np.broadcast_to(a, (*batch, 3, 3))
    close(solved, np.linalg.solve(wide, b), "float64")
    close(triangular, np.linalg.solve(np.tril(wide) if lower else np.triu(wide), b), "float64")


def test_a_vector_on_the_right_gives_vectors() -> None:
    rng = np.random.default_rng(0)
    a, b = draw_regular_matrices(rng, (2, 3, 3), "float64"), rng.standard_normal(3)
    (value,) = evaluate([gf.linalg.solve(a, b)])
    close(value, np.linalg.solve(a, b[None, :, None])[..., 0], "float64")


@given(
    st.integers(1, 6), sizes, batches, st.booleans(), st.booleans(), st.booleans(),
    st.sampled_from(DTYPES),
)  # fmt: skip
def test_triangular_solve_reads_its_triangle_alone(
    n: int, k: int, batch: tuple[int, ...], lower: bool, adjoint: bool, unit: bool, dtype: str
) -> None:
    rng = np.random.default_rng(n)
    a, b = draw_regular_matrices(rng, (*batch, n, n), dtype), vectors(rng, (*batch, n, k), dtype)
    triangle = np.tril(a) if lower else np.triu(a)
    if unit:
        triangle[..., range(n), range(n)] = 1
    if adjoint:
        triangle = triangle.conj().swapaxes(-1, -2)
    flags = {"lower": lower, "adjoint": adjoint, "unit_diagonal": unit}
    (value,) = evaluate([gf.linalg.triangular_solve(a, b, **flags)])
    # of a unit diagonal the off-diagonal elements may grow the solution
    np.testing.assert_allclose(triangle @ value, b, rtol=5e-2, atol=5e-2 * np.abs(value).max())
    if not unit:
        close(value, np.linalg.solve(triangle, b), dtype)


@pytest.mark.parametrize("n", [64, 65, 200])
def test_large_triangular_systems_are_solved_by_blocks(n: int) -> None:
    rng = np.random.default_rng(n)
    a, b = draw_regular_matrices(rng, (n, n), "float64"), rng.standard_normal((n, 3))
    lower, upper = evaluate(
        [gf.linalg.triangular_solve(a, b), gf.linalg.triangular_solve(a, b, lower=False)]
    )
    np.testing.assert_allclose(np.tril(a) @ lower, b, atol=1e-10)
    np.testing.assert_allclose(np.triu(a) @ upper, b, atol=1e-10)


def test_substitution_does_not_pivot() -> None:
    a = np.array([[1e-8, 0.0], [1.0, 1.0]])
    (value,) = evaluate([gf.linalg.triangular_solve(a, np.array([1.0, 0.0]))])
    np.testing.assert_array_equal(value, [1e8, -1e8])


@given(sizes, batches, st.sampled_from(DTYPES), st.integers(-3, 5))
def test_inverses_and_powers_are_numpys(
    n: int, batch: tuple[int, ...], dtype: str, power: int
) -> None:
    a = draw_regular_matrices(np.random.default_rng(n), (*batch, n, n), dtype) / (4 * n)
    inverse, raised = evaluate([gf.linalg.inv(a), gf.linalg.matrix_power(a, power)])
    close(inverse, np.linalg.inv(a), dtype)
    close(raised, np.linalg.matrix_power(a, power), dtype)
    assert inverse.dtype == raised.dtype == a.dtype


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_floats_of_16_bits_are_computed_in_32(dtype: str) -> None:
    a = draw_regular_matrices(np.random.default_rng(0), (3, 3), "float32")
    half = gf.astype(a, dtype)
    inverse, solved, det = evaluate(
        [gf.linalg.inv(half), gf.linalg.solve(half, half), gf.linalg.det(half)]
    )
    assert (inverse.dtype.name, solved.dtype.name, det.dtype.name) == (dtype,) * 3
    np.testing.assert_allclose(inverse.astype("float32"), np.linalg.inv(a), rtol=0.1, atol=0.01)
    np.testing.assert_allclose(solved.astype("float32"), np.eye(3), atol=0.02)


def test_no_matrices_and_matrices_of_nothing_are_fine() -> None:
    none, nothing = np.ones((0, 2, 2)), np.ones((2, 0, 0))
    values = evaluate(
        [
            gf.linalg.inv(none),
            gf.linalg.det(nothing),
            gf.linalg.solve(nothing, np.ones((2, 0, 3))),
            gf.linalg.solve(nothing[0], np.ones((2, 0, 3))),
        ]
    )
    assert [v.shape for v in values] == [(0, 2, 2), (2,), (2, 0, 3), (2, 0, 3)]
    np.testing.assert_array_equal(values[1], [1, 1])


def test_a_batch_of_unknown_size_solves_and_differentiates() -> None:
    x = gf.placeholder("float64", ("n", 3, 3))
    y = gf.linalg.solve(x, gf.linalg.det(x)[:, None, None] * gf.ones((3, 2), "float64"))
    (slope,) = gf.gradients(y, [x])
    assert slope.shape == x.shape
    a = draw_regular_matrices(np.random.default_rng(0), (2, 3, 3), "float64")
    value, grad = evaluate([y, slope], {x: a})
    close(value, np.linalg.solve(a, np.linalg.det(a)[:, None, None] * np.ones((3, 2))), "float64")
    assert np.isfinite(grad).all()


# Bad input --------------------------------------------------------------------------------------

SINGULAR = np.stack([np.eye(3), np.ones((3, 3))])


@pytest.mark.parametrize(
    "build",
    [
        gf.linalg.inv,
        lambda x: gf.linalg.solve(x, np.ones(3)),
        lambda x: gf.linalg.matrix_power(x, -2),
    ],
)
def test_a_singular_matrix_is_named_with_node_and_line(build: Any) -> None:
    x = gf.placeholder("float64", (None, 3, 3))
    wanted = (
        r"made at .*test_solve\.py:\d+.*the matrix at index \(1,\) of shape \(3, 3\) is singular"
    )
    with gf.Session() as session, pytest.raises(CheckError, match=wanted):
        session.run(build(x), {x: SINGULAR})


def test_a_zero_on_a_triangles_diagonal_is_named() -> None:
    with pytest.raises(CheckError, match=r"diagonal is 0 at index \(1, 2\)"):
        evaluate(
            [gf.linalg.triangular_solve(np.stack([np.eye(3), np.diag([1.0, 2, 0])]), np.ones(3))]
        )


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.linalg.inv(np.ones((2, 3))), ShapeError, r"square.*\(2, 3\)"),
        (lambda: gf.linalg.inv(np.ones(3)), ShapeError, r"matrices.*\(3,\)"),
        (lambda: gf.linalg.inv(np.ones((2, 2), "int32")), DTypeError, "int32"),
        (lambda: gf.linalg.solve(np.eye(2), np.ones((3, 1))), ShapeError, "rows differ: 2 != 3"),
        (lambda: gf.linalg.solve(np.ones((2, 3)), np.ones((2, 1))), ShapeError, "square"),
        (lambda: gf.linalg.solve(np.eye(2), 3.0), ShapeError, "right side"),
        (lambda: gf.linalg.triangular_solve(np.eye(2), np.ones((3, 1))), ShapeError, "2 != 3"),
        (
            lambda: gf.linalg.triangular_solve(np.eye(2), np.ones(2), lower=1),
            ArgumentError,
            "lower must be True or False",
        ),
        (lambda: gf.linalg.matrix_power(np.eye(2), 0.5), ArgumentError, "int, not 0.5"),
        (lambda: gf.linalg.matrix_power(np.ones((2, 3)), 2), ShapeError, "square"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_solve\.py:\d+.*{words}"):
        call()
