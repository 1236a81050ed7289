"""`gf.linalg.matrix_exp` against exponentials that have closed forms, and its derivatives."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate

EPSILON = {"float32": 1.2e-7, "float64": 2.2e-16, "complex64": 1.2e-7, "complex128": 2.2e-16}


def exponential(at: np.ndarray) -> np.ndarray:
    x = gf.placeholder(at.dtype, at.shape)
    (found,) = evaluate([gf.linalg.matrix_exp(x)], {x: at})
    assert found.dtype == at.dtype and found.shape == at.shape
    return np.asarray(found)


@pytest.mark.parametrize("dtype", list(EPSILON))
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 12.0])
def test_symmetric_matrices_have_the_exponentials_of_their_eigenvalues(
    dtype: str, scale: float
) -> None:
    rng = np.random.default_rng(0)
    at = rng.normal(size=(5, 4, 4)) + (1j * rng.normal(size=(5, 4, 4)) if dtype[0] == "c" else 0)
    at = ((at + at.conj().swapaxes(-1, -2)) * 0.5 * scale).astype(dtype)
    w, v = np.linalg.eigh(at.astype("complex128"))
    want = (v * np.exp(w)[:, None, :]) @ v.conj().swapaxes(-1, -2)
    size = np.abs(want).max((-2, -1), keepdims=True)
    error = (np.abs(exponential(at) - want) / size).max()
    assert error < EPSILON[dtype] * (30 + 30 * scale)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("angle", [0.1, 3.0, 100.0])
def test_skew_matrices_are_rotations(angle: float, dtype: str) -> None:
    have = exponential(np.array([[0, -angle], [angle, 0]], dtype))
    want = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    np.testing.assert_allclose(have, want, atol=EPSILON[dtype] * 20 * max(1.0, angle))


def test_nilpotent_matrices_have_few_terms_however_large() -> None:
    at = np.array([[0, 1e5, 2.0], [0, 0, 3e5], [0, 0, 0]])
    np.testing.assert_allclose(exponential(at), np.eye(3) + at + at @ at / 2, rtol=1e-12)


def test_each_matrix_of_a_batch_is_scaled_by_itself() -> None:
    rng = np.random.default_rng(0)
    at = rng.normal(size=(40, 6, 6)) * np.geomspace(1e-3, 30, 40)[:, None, None]
    together = exponential(at)
    for one, alone in zip(together, at, strict=True):
        np.testing.assert_array_equal(one, exponential(alone))


def test_empty_infinite_and_overflowing_matrices() -> None:
    for shape in ((0, 0), (2, 0, 0), (0, 3, 3)):
        assert exponential(np.zeros(shape)).shape == shape
    for value in (math.nan, math.inf, 1e6):
        assert not np.isfinite(exponential(np.diag([value, 0.0]))).all()
    np.testing.assert_array_equal(exponential(-1e4 * np.eye(2)), np.zeros((2, 2)))


def test_its_derivative_along_itself_is_its_product() -> None:
    """d exp(t·x)/dt = x·exp(t·x); the registry's tests compare gradients with differences."""
    at = np.random.default_rng(0).normal(size=(2, 4, 4))
    x, t = gf.placeholder("float64", (2, 4, 4)), gf.placeholder("float64")
    y = gf.linalg.matrix_exp(x * t)
    tangent = gf.jvp(y, [t], [1.0])
    second = gf.jvp(tangent, [t], [1.0])
    (slope,) = gf.gradients(gf.sum(y), [t])
    have = evaluate([tangent, second, slope, y], {x: at, t: np.array(1.3)})
    np.testing.assert_allclose(have[0], at @ have[3], rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(have[1], at @ at @ have[3], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(have[2], (at @ have[3]).sum(), rtol=1e-11)


def test_it_runs_in_a_session_with_symbolic_sizes_and_gradients() -> None:
    x = gf.placeholder("float32", (None, "n", "n"))
    y = gf.linalg.matrix_exp(x)
    slope = gf.gradients(gf.sum(gf.linalg.trace(y)), [x])[0]  # exp(x)ᵀ
    with gf.Session() as s:
        value, g = s.run([y, slope], {x: np.random.default_rng(0).normal(size=(3, 4, 4))})
    np.testing.assert_allclose(g, value.swapaxes(-1, -2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "error, shape, dtype", [
        (ShapeError, (3,), "float32"), (ShapeError, (2, 3), "float32"),
        (DTypeError, (3, 3), "int64"),
    ],
)  # fmt: skip
def test_bad_input_is_told(error: Any, shape: Any, dtype: str) -> None:
    with pytest.raises(error, match=r"matrix_exp at .*test_exponential\.py:\d+: expected"):
        gf.linalg.matrix_exp(gf.zeros(shape, dtype))
