"""`gf.linalg.lu` against its definition, and its gradient against that of a solve."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import CheckError, DifferentiationError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate

SHAPES = [(5, 5), (3, 7, 4), (2, 3, 8), (1, 1), (4, 1), (1, 4), (2, 3, 4, 4), (70, 70), (90, 70)]
EMPTY = [(0, 0), (3, 0), (0, 3), (2, 0, 3), (0, 3, 3)]
DTYPES = ["float32", "float64", "complex64", "complex128"]


def draw(dtype: str, shape: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    parts = rng.normal(size=(2, *shape))
    return (parts[0] + 1j * parts[1] if dtype[0] == "c" else parts[0]).astype(dtype)


def factors(at: np.ndarray) -> list[np.ndarray]:
    x = gf.placeholder(at.dtype, at.shape)
    return list(evaluate(list(gf.linalg.lu(x)), {x: at}))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES + EMPTY, ids=str)
def test_the_factors_are_triangles_of_permuted_rows(shape: Any, dtype: str) -> None:
    at = draw(dtype, shape)
    p, low, up = factors(at)
    (m, n), k = shape[-2:], min(shape[-2:])
    assert (p.shape, low.shape, up.shape) == (
        (*shape[:-2], m, m), (*shape[:-2], m, k), (*shape[:-2], k, n),
    )  # fmt: skip
    assert all(x.dtype == dtype for x in (p, low, up))
    np.testing.assert_array_equal(p @ p.swapaxes(-1, -2), np.broadcast_to(np.eye(m), p.shape))
    np.testing.assert_array_equal(np.tril(low, -1) + np.eye(m, k), low)
    np.testing.assert_array_equal(np.triu(up), up)
    assert (np.abs(low) <= 1 + 1e-6).all()  # the pivot is the largest of its column
    near = 1e-4 if dtype in ("float32", "complex64") else 1e-12
    np.testing.assert_allclose(p @ low @ up, at, rtol=near, atol=near)


def test_singular_matrices_have_factors_and_no_gradient() -> None:
    for at in (np.zeros((3, 3)), np.ones((3, 3)), np.diag([1.0, 0.0, 2.0])):
        p, low, up = factors(at)
        np.testing.assert_allclose(p @ low @ up, at)
    x = gf.placeholder("float64", (3, 3))
    (slope,) = gf.gradients(gf.sum(gf.linalg.lu(x)[1]), [x])
    with gf.Session() as s, pytest.raises(CheckError, match="singular"):
        s.run(slope, {x: np.ones((3, 3))})


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_the_gradient_through_both_triangles_is_that_of_their_product(dtype: str) -> None:
    """log |det| is the sum of the logarithms of u's diagonal; l·u is x with other rows."""
    x = gf.placeholder(dtype, (2, 4, 4))
    p, low, up = gf.linalg.lu(x)
    weights = draw(dtype, (4, 4))
    size = gf.sum(gf.log(gf.abs(gf.linalg.diagonal(up))))
    product = gf.real(gf.sum((p @ (low @ up)) * weights))
    found = gf.gradients(size, [x]) + gf.gradients(product, [x])
    by_size, by_product = evaluate(found, {x: draw(dtype, (2, 4, 4))})
    want = evaluate(gf.gradients(gf.sum(gf.linalg.slogdet(x)[1]), [x]), {x: draw(dtype, (2, 4, 4))})
    np.testing.assert_allclose(by_size, want[0], rtol=1e-9)
    np.testing.assert_allclose(by_product, np.broadcast_to(weights.conj(), (2, 4, 4)), rtol=1e-9)


def test_every_order_of_rows_gets_its_own_gradient() -> None:
    base = np.array([[4.0, 1.0, 2.0], [1.0, 3.0, 0.5], [0.5, 0.2, 2.0]])
    x = gf.placeholder("float64", (6, 3, 3))
    at = np.stack([base[list(rows)] for rows in itertools.permutations(range(3))])
    loss = gf.sum(gf.sin(gf.linalg.lu(x)[2]))
    (slopes,) = evaluate(gf.gradients(loss, [x]), {x: at})
    for rows, slope in zip(itertools.permutations(range(3)), slopes, strict=True):
        np.testing.assert_allclose(slope, slopes[0][list(rows)], rtol=1e-12)


def test_it_runs_in_a_session_with_symbolic_sizes() -> None:
    x = gf.placeholder("float32", (None, "n", "n"))
    p, low, up = gf.linalg.lu(x)
    slope = gf.gradients(gf.sum(low * low) + gf.sum(up), [x])[0]
    at = draw("float32", (3, 4, 4))
    with gf.Session() as s:
        product, g = s.run([p @ low @ up, slope], {x: at})
    np.testing.assert_allclose(product, at, atol=1e-5)
    assert g.shape == at.shape


def test_bad_input_is_told() -> None:
    here = r"lu at .*test_lu\.py:\d+: "
    with pytest.raises(ShapeError, match=here + "expected matrices"):
        gf.linalg.lu(gf.zeros((3,)))
    with pytest.raises(DTypeError, match=here + "expected float or complex"):
        gf.linalg.lu(gf.zeros((3, 3), "int64"))
    x = gf.placeholder("float32", ("m", "n"))
    with pytest.raises(DifferentiationError, match="give known sizes"):
        gf.gradients(gf.sum(gf.linalg.lu(x)[2]), [x])
