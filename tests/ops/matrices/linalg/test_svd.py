"""Singular values, ranks, pseudo-inverses and least squares against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import (
    ArgumentError,
    CheckError,
    DifferentiationError,
    DTypeError,
    ShapeError,
)
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import Tensor
from tests.ops.matrices.linalg.test_decompositions import (
    adjoint,
    batches,
    check_first_order,
    close,
    draw_matrices,
    dtypes,
)
from tests.ops.test_registry import check_gradients

sizes = st.integers(1, 5)
seeds = st.integers(0, 99)


@given(sizes, sizes, batches, dtypes, st.booleans(), seeds)
def test_singular_vectors_and_values_compose(
    m: int, n: int, batch: tuple[int, ...], dtype: str, full: bool, seed: int
) -> None:
    a = draw_matrices(seed, (*batch, m, n), dtype)
    result = gf.linalg.svd(a, full_matrices=full)
    u, s, vh, alone = evaluate([*result, gf.linalg.svdvals(a)])
    assert [t.shape for t in result] == [u.shape, s.shape, vh.shape]
    assert (u.dtype, s.dtype, alone.dtype) == (a.dtype, a.real.dtype, a.real.dtype)
    k = min(m, n)
    assert u.shape[-1] == (m if full else k) and vh.shape[-2] == (n if full else k)
    close(u[..., :k] * s[..., None, :] @ vh[..., :k, :], a)
    close(s, np.linalg.svd(a, compute_uv=False))
    close(alone, s)
    close(adjoint(u) @ u, np.broadcast_to(np.eye(u.shape[-1]), (*batch, *u.shape[-1:] * 2)))


@given(sizes, sizes, st.integers(0, 3), batches, dtypes, seeds)
def test_ranks_and_pseudo_inverses_are_numpys_for_any_rank(
    m: int, n: int, rank: int, batch: tuple[int, ...], dtype: str, seed: int
) -> None:
    a = draw_matrices(seed, (*batch, m, rank), dtype) @ draw_matrices(
        seed + 1, (*batch, rank, n), dtype
    )
    inverse, counted = evaluate([gf.linalg.pinv(a, rtol=1e-4), gf.linalg.matrix_rank(a, rtol=1e-4)])
    np.testing.assert_array_equal(counted, np.linalg.matrix_rank(a, rtol=1e-4))
    assert counted.dtype == "int64"
    wanted = np.linalg.pinv(a, rcond=1e-4)
    tolerance = 1e-9 if inverse.dtype in ("float64", "complex128") else 2e-3
    np.testing.assert_allclose(inverse, wanted, atol=tolerance * (1 + np.abs(wanted).max()))


def test_what_is_below_the_rounding_does_not_count_by_default() -> None:
    a = np.diag([1.0, 1e-14, 1e-17]).astype("float64")
    rank, coarse, inverse = evaluate(
        [gf.linalg.matrix_rank(a), gf.linalg.matrix_rank(a, rtol=1e-3), gf.linalg.pinv(a)]
    )
    assert (rank, coarse) == (2, 1)
    np.testing.assert_allclose(inverse, np.diag([1, 1e14, 0]))


@given(sizes, sizes, st.integers(1, 4), st.integers(1, 2), batches, dtypes, seeds)
def test_least_squares_are_numpys_for_any_rank(
    m: int, n: int, rank: int, k: int, batch: tuple[int, ...], dtype: str, seed: int
) -> None:
    a = draw_matrices(seed, (m, rank), dtype) @ draw_matrices(seed + 1, (rank, n), dtype)
    b = draw_matrices(seed + 2, (*batch, m, k), dtype)
    (value,) = evaluate([gf.linalg.lstsq(a, b, rtol=1e-3)])
    assert value.shape == (*batch, n, k) and value.dtype == dtype
    tolerance = 1e-8 if dtype in ("float64", "complex128") else 5e-3
    for index in np.ndindex(*batch):
        want = np.linalg.lstsq(a, b[index], rcond=1e-3)[0]
        np.testing.assert_allclose(value[index], want, atol=tolerance * (1 + np.abs(want).max()))


def test_a_vector_on_the_right_gives_a_vector() -> None:
    a, b = draw_matrices(0, (5, 3), "float64"), draw_matrices(1, (5,), "float64")
    (value,) = evaluate([gf.linalg.lstsq(a, b)])
    np.testing.assert_allclose(value, np.linalg.lstsq(a, b)[0])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_floats_of_16_bits_are_computed_in_32(dtype: str) -> None:
    x = gf.astype(2 * np.eye(3) + 1, dtype)
    results = [
        gf.linalg.svdvals(x),
        gf.linalg.pinv(x, rtol=0.0),
        gf.linalg.lstsq(x, x),
        gf.astype(gf.linalg.matrix_rank(x), dtype),
    ]
    values = [v.astype("float32") for v in evaluate(results)]
    assert {t.dtype.name for t in results} == {dtype}
    np.testing.assert_allclose(values[0], [5, 2, 2], atol=0.05)
    np.testing.assert_allclose(values[1], np.linalg.inv(2 * np.eye(3) + 1), atol=0.05)
    np.testing.assert_allclose(values[2], np.eye(3), atol=0.05)
    assert values[3] == 3


# Gradients --------------------------------------------------------------------------------------


def rebuilt(x: Tensor) -> list[Tensor]:
    """Of the singular vectors what does not depend on signs and phases."""
    u, s, vh = gf.linalg.svd(x, full_matrices=False)
    left = gf.matmul(u[:, :1], gf.linalg.matrix_transpose(gf.conj(u[:, :1])))
    return [left, s, gf.matmul(u[:, :2], vh[:2]), gf.abs(vh)]


COMPOSED: dict[str, Any] = {
    "svd": rebuilt,
    "svdvals": gf.linalg.svdvals,
    "pinv": gf.linalg.pinv,
    "lstsq": lambda x: gf.linalg.lstsq(x, x[:, 0] * x[:, 1] + 1.0),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("shape", [(3, 3), (4, 2), (2, 4)], ids=str)
@pytest.mark.parametrize("name", COMPOSED)
def test_what_does_not_depend_on_phases_has_exact_gradients(
    name: str, shape: tuple[int, int], dtype: str
) -> None:
    x = draw_matrices(5, shape, dtype) + np.diag([4.0, -1.5, 8.0, 2.0])[: shape[0], : shape[1]]
    check_gradients(COMPOSED[name], [x], np.random.default_rng(0))


def test_equal_singular_values_leave_the_gradient_of_a_product_exact() -> None:
    rng = np.random.default_rng(3)
    left, _ = np.linalg.qr(rng.standard_normal((4, 4)))
    right, _ = np.linalg.qr(rng.standard_normal((4, 4)))
    a = left @ np.diag([3.0, 3.0, 1.0, 1.0]) @ right

    def project(x: Tensor) -> Tensor:
        u, _, _ = gf.linalg.svd(x)
        return gf.matmul(u[:, :2], u[:, :2].T)

    check_first_order(project, a, rng)


def test_the_pseudo_inverse_of_low_rank_has_a_gradient_along_that_rank() -> None:
    """Finite differences along P·x·Q, which keep the rank."""
    rng = np.random.default_rng(0)
    a = rng.standard_normal((4, 2)) @ rng.standard_normal((2, 5))
    left, right = rng.standard_normal((4, 4)), rng.standard_normal((5, 5))
    x = gf.placeholder("float64", (4, 5))
    weights = rng.standard_normal((5, 4))
    loss = gf.sum(gf.linalg.pinv(x, rtol=1e-6) * weights)
    (slope,) = evaluate(gf.gradients(loss, [x]), {x: a})
    way = left @ a + a @ right
    small = 1e-6
    turned = [(np.eye(4) + h * left) @ a @ (np.eye(5) + h * right) for h in (small, -small)]
    up, down = (evaluate([loss], {x: t})[0] for t in turned)
    assert (slope * way).sum() == pytest.approx((up - down) / (2 * small), rel=1e-5)


# Bad input --------------------------------------------------------------------------------------


def test_a_matrix_of_nan_has_no_singular_values_and_is_named() -> None:
    x = gf.placeholder("float64", (None, 3, 3))
    batch = np.stack([np.eye(3), np.full((3, 3), np.nan)])
    for build in (gf.linalg.svdvals, gf.linalg.pinv, lambda x: gf.linalg.svd(x)[1]):
        wanted = r"made at .*test_svd\.py:\d+.*the matrix at index \(1,\).*singular values.*NaN"
        with gf.Session() as session, pytest.raises(CheckError, match=wanted):
            session.run(build(x), {x: batch})


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.linalg.svd(np.ones(3)), ShapeError, r"matrices.*\(3,\)"),
        (lambda: gf.linalg.svd(np.eye(2), full_matrices=1), ArgumentError, "full_matrices"),
        (lambda: gf.linalg.svdvals(np.eye(2, dtype="int32")), DTypeError, "int32"),
        (lambda: gf.linalg.pinv(np.ones(3)), ShapeError, "matrices"),
        (lambda: gf.linalg.pinv(np.eye(2), rtol=-1.0), ArgumentError, "-1.0"),
        (lambda: gf.linalg.matrix_rank(np.ones(3)), ShapeError, "matrices"),
        (lambda: gf.linalg.matrix_rank(np.eye(2), rtol="a"), ArgumentError, "'a'"),
        (lambda: gf.linalg.lstsq(np.ones((3, 2)), np.ones(2)), ShapeError, "3 != 2"),
        (lambda: gf.linalg.lstsq(np.ones(3), np.ones(3)), ShapeError, "matrices"),
        (lambda: gf.linalg.lstsq(np.eye(2), np.ones(2), rtol=True), ArgumentError, "True"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_svd\.py:\d+.*{words}"):
        call()


def test_vectors_that_are_not_unique_have_no_gradient() -> None:
    x = gf.placeholder("float64", (4, 2))
    with pytest.raises(DifferentiationError, match=r"test_svd\.py:\d+.*full_matrices=False"):
        gf.gradients(gf.linalg.svd(x)[0], [x])
