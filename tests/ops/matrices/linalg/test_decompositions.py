"""Decompositions: they compose again, have their structure, and numpy's values."""

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
from tests.ops.test_registry import check_gradients

DTYPES = ("float32", "float64", "complex64", "complex128")
sizes = st.integers(1, 5)
batches = st.lists(st.integers(1, 3), max_size=2).map(tuple)
dtypes = st.sampled_from(DTYPES)
seeds = st.integers(0, 99)


def draw_matrices(seed: int, shape: tuple[int, ...], dtype: str) -> Any:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape)
    if dtype.startswith("complex"):
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(dtype)


def adjoint(x: Any) -> Any:
    return x.conj().swapaxes(-1, -2)


def close(have: Any, want: Any) -> None:
    single = have.dtype.itemsize == (8 if have.dtype.kind == "c" else 4)
    tolerance = 2e-4 if single else 1e-9
    assert have.shape == want.shape
    np.testing.assert_allclose(have, want, rtol=tolerance, atol=tolerance * 10)


# Values -----------------------------------------------------------------------------------------


@given(sizes, batches, dtypes, st.booleans(), seeds)
def test_cholesky_factors_are_triangular_and_compose(
    n: int, batch: tuple[int, ...], dtype: str, upper: bool, seed: int
) -> None:
    a = draw_matrices(seed, (*batch, n, n), dtype)
    a = (a @ adjoint(a) + np.eye(n)).astype(dtype)
    (factor,) = evaluate([gf.linalg.cholesky(a, upper=upper)])
    assert factor.dtype == dtype
    lower = adjoint(factor) if upper else factor
    close(lower, np.linalg.cholesky((a + adjoint(a)) / 2))
    np.testing.assert_array_equal(lower, np.tril(lower))


def test_cholesky_takes_the_symmetric_part() -> None:
    skew = np.array([[0.0, 1.0], [-1.0, 0.0]])
    plain, skewed = evaluate(
        [gf.linalg.cholesky(4 * np.eye(2)), gf.linalg.cholesky(4 * np.eye(2) + skew)]
    )
    np.testing.assert_array_equal(plain, skewed)


@given(sizes, sizes, batches, dtypes, st.sampled_from(["reduced", "complete"]), seeds)
def test_qr_is_numpys(
    m: int, n: int, batch: tuple[int, ...], dtype: str, mode: str, seed: int
) -> None:
    a = draw_matrices(seed, (*batch, m, n), dtype)
    result = gf.linalg.qr(a, mode=mode)
    q, r = evaluate(list(result))
    for have, want in zip((q, r), np.linalg.qr(a, mode), strict=True):
        close(have, want)
    assert [t.shape for t in result] == [q.shape, r.shape]
    close(q @ r, a)
    close(adjoint(q) @ q, np.broadcast_to(np.eye(q.shape[-1]), (*batch, *q.shape[-1:] * 2)))


@given(sizes, batches, dtypes, seeds)
def test_eigenvalues_of_symmetric_matrices_ascend_and_compose(
    n: int, batch: tuple[int, ...], dtype: str, seed: int
) -> None:
    a = draw_matrices(seed, (*batch, n, n), dtype)
    a = ((a + adjoint(a)) / 2).astype(dtype)
    values, vectors, alone = evaluate([*gf.linalg.eigh(a), gf.linalg.eigvalsh(a)])
    assert values.dtype == alone.dtype == a.real.dtype and vectors.dtype == a.dtype
    assert (np.diff(values) >= 0).all()
    close(vectors * values[..., None, :] @ adjoint(vectors), a)
    close(alone, np.linalg.eigvalsh(a))


@given(sizes, batches, dtypes, seeds)
def test_eigenvalues_of_any_matrices_are_complex(
    n: int, batch: tuple[int, ...], dtype: str, seed: int
) -> None:
    a = draw_matrices(seed, (*batch, n, n), dtype)
    values, vectors, alone = evaluate([*gf.linalg.eig(a), gf.linalg.eigvals(a)])
    wanted = {"float32": "complex64", "float64": "complex128"}.get(dtype, dtype)
    assert values.dtype == vectors.dtype == alone.dtype == wanted
    close(a @ vectors, vectors * values[..., None, :])
    np.testing.assert_array_equal(values, alone)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_floats_of_16_bits_are_computed_in_32(dtype: str) -> None:
    x = gf.astype(2 * np.eye(3) + 1, dtype)
    results = [gf.linalg.cholesky(x), *gf.linalg.qr(x), *gf.linalg.eigh(x)]
    assert {t.dtype.name for t in results} == {dtype}
    values = [v.astype("float32") for v in evaluate(results)]
    np.testing.assert_allclose(values[0] @ values[0].T, 2 * np.eye(3) + 1, atol=0.05)
    np.testing.assert_allclose(values[1] @ values[2], 2 * np.eye(3) + 1, atol=0.05)
    np.testing.assert_allclose(values[3], [2, 2, 5], atol=0.05)


def test_a_batch_of_unknown_size_decomposes() -> None:
    x = gf.placeholder("float64", ("n", 3, 3))
    (slope,) = gf.gradients(list(gf.linalg.qr(x)) + list(gf.linalg.eigh(x)), [x])
    (value,) = evaluate([slope], {x: draw_matrices(0, (2, 3, 3), "float64")})
    assert value.shape == (2, 3, 3) and np.isfinite(value).all()


SQUARE: dict[str, Any] = {
    "cholesky": lambda x: gf.linalg.cholesky(gf.matmul(x, x.mT) + x * 0.0),
    "qr": lambda x: list(gf.linalg.qr(x)),
    "eigh": lambda x: list(gf.linalg.eigh(x)),
    "eig": lambda x: gf.abs(gf.linalg.eig(x)[0]),
    "svd": lambda x: list(gf.linalg.svd(x)),
    "det": gf.linalg.det,
    "slogdet": lambda x: gf.linalg.slogdet(x)[1],
    "inv": gf.linalg.inv,
    "matrix_power": lambda x: gf.linalg.matrix_power(x, 3) + gf.linalg.matrix_power(x, 0),
    "pinv": gf.linalg.pinv,
    "cond": gf.linalg.cond,
}


@pytest.mark.parametrize("name", SQUARE)
def test_matrices_of_unknown_size_have_the_gradients_of_known_ones(name: str) -> None:
    a = draw_matrices(0, (4, 4), "float64") + np.diag([3.0, 6.0, 9.0, 12.0])
    slopes = []
    for size in (4, "n"):
        x = gf.placeholder("float64", (size, size))
        slopes += evaluate(gf.gradients(SQUARE[name](x), [x]), {x: a})
    np.testing.assert_allclose(slopes[0], slopes[1], rtol=1e-9, atol=1e-12)


# Gradients --------------------------------------------------------------------------------------


def projector(vectors: Tensor) -> Tensor:
    """What does not depend on signs and phases: the projection on the first two columns."""
    some = vectors[..., :2]
    return gf.matmul(some, gf.linalg.matrix_transpose(gf.conj(some)))


COMPOSED: dict[str, Any] = {
    "cholesky": lambda x: gf.linalg.cholesky(
        gf.matmul(x, gf.linalg.matrix_transpose(gf.conj(x))) + gf.eye(3, dtype="float64")
    ),
    "eigh": lambda x: [gf.linalg.eigh(x)[0], projector(gf.linalg.eigh(x)[1])],
    "eigvalsh": gf.linalg.eigvalsh,
    "eig": lambda x: [
        gf.linalg.eig(x)[0],
        gf.abs(gf.linalg.eig(x)[1]),
    ],
    "qr": lambda x: list(gf.linalg.qr(x[:, :2])) + list(gf.linalg.qr(x[:2])),
}


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("name", COMPOSED)
def test_what_does_not_depend_on_phases_has_exact_gradients(name: str, dtype: str) -> None:
    x = draw_matrices(5, (3, 3), dtype) + np.diag([4.0, -1.0, 8.0])
    check_gradients(COMPOSED[name], [x], np.random.default_rng(0))


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex128"])
@pytest.mark.parametrize("shape", [(4, 3), (3, 3), (3, 5)], ids=str)
def test_qr_of_dependent_columns_has_no_gradient_and_leaves_the_rest_of_a_batch_alone(
    shape: tuple[int, int], dtype: str
) -> None:
    free = draw_matrices(0, shape, dtype)
    summed, without = free.copy(), free.copy()
    summed[:, 2], without[:, 1] = free[:, 0] + free[:, 1], 0
    batch = np.stack([free, summed, without, np.zeros_like(free)])
    x, one = gf.placeholder(dtype, batch.shape), gf.placeholder(dtype, shape)

    def slope(x: Tensor) -> Any:
        q, r = gf.linalg.qr(x)
        return gf.gradients(gf.sum(gf.real(gf.matmul(q[..., :2], r[..., :2, :]))), [x])[0]

    slopes, alone = evaluate([slope(x), slope(one)], {x: batch, one: free})
    close(slopes[0], alone)
    assert np.isnan(slopes[1:, :, :3]).all()


def test_equal_eigenvalues_leave_the_gradient_of_a_projection_exact() -> None:
    rng = np.random.default_rng(3)
    basis, _ = np.linalg.qr(rng.standard_normal((4, 4)))
    a = basis @ np.diag([1.0, 1.0, 3.0, 3.0]) @ basis.T
    check_first_order(lambda x: projector(gf.linalg.eigh(x)[1]), a, rng)
    check_first_order(lambda x: gf.linalg.eigh(x)[0] * np.array([1.0, 1.0, 2.0, 2.0]), a, rng)


def check_first_order(build: Any, a: Any, rng: Any) -> None:
    x = gf.placeholder("float64", a.shape)
    y = build(x)
    weights = rng.standard_normal(a.shape)
    weights = (weights + weights.T) / 2 if len(y.shape) == 2 else np.ones(y.shape)
    loss = gf.sum(y * weights)
    (slope,) = evaluate(gf.gradients(loss, [x]), {x: a})
    assert np.isfinite(slope).all()
    way = rng.standard_normal(a.shape)
    up, down = (evaluate([loss], {x: a + by * way})[0] for by in (1e-5, -1e-5))
    assert (slope * way).sum() == pytest.approx((up - down) / 2e-5, rel=1e-5)


# Bad input --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "build, value, words",
    [
        (gf.linalg.cholesky, -np.eye(3), "is not positive definite"),
        (lambda x: gf.linalg.eigh(x)[0], np.full((3, 3), np.nan), "eigenvalues"),
        (gf.linalg.eigvalsh, np.full((3, 3), np.nan), "eigenvalues"),
        (gf.linalg.eigvals, np.full((3, 3), np.inf), "eigenvalues"),
    ],
)
def test_matrices_that_lapack_refuses_are_named_with_node_and_line(
    build: Any, value: Any, words: str
) -> None:
    x = gf.placeholder("float64", (None, 3, 3))
    batch = np.stack([np.eye(3), value])
    wanted = rf"made at .*test_decompositions\.py:\d+.*the matrix at index \(1,\).*{words}"
    with gf.Session() as session, pytest.raises(CheckError, match=wanted):
        session.run(build(x), {x: batch})


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.linalg.cholesky(np.ones((2, 3))), ShapeError, r"square.*\(2, 3\)"),
        (lambda: gf.linalg.cholesky(np.eye(2), upper="U"), ArgumentError, "'U'"),
        (lambda: gf.linalg.cholesky(np.eye(2, dtype="int32")), DTypeError, "int32"),
        (lambda: gf.linalg.qr(np.ones(3)), ShapeError, r"matrices.*\(3,\)"),
        (lambda: gf.linalg.qr(np.eye(2), mode="raw"), ArgumentError, "'raw'"),
        (lambda: gf.linalg.eigh(np.ones((2, 3))), ShapeError, "square"),
        (lambda: gf.linalg.eigvalsh(np.ones((2, 3))), ShapeError, "square"),
        (lambda: gf.linalg.eig(np.ones((2, 3))), ShapeError, "square"),
        (lambda: gf.linalg.eigvals(np.ones((2, 2), bool)), DTypeError, "bool"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_decompositions\.py:\d+.*{words}"):
        call()


@pytest.mark.parametrize(
    "shape, mode, words", [((4, 2), "complete", "not unique"), ((None, 2), "reduced", "longer")]
)
def test_a_qr_without_gradient_says_why(shape: Any, mode: str, words: str) -> None:
    x = gf.placeholder("float64", shape)
    with pytest.raises(DifferentiationError, match=rf"test_decompositions\.py:\d+.*{words}"):
        gf.gradients(gf.linalg.qr(x, mode=mode)[1], [x])
