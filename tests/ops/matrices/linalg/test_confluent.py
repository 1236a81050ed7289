"""Gradients where eigenvalues or singular values are equal, close or 0, against what is known of
the functions: they are right, or NaN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import Tensor

Array = np.ndarray[Any, Any]
linalg = gf.linalg
GAPS = (0.0, 1e-16, 1e-14, 1e-12, 1e-9, 1e-7, 1e-5)


def draw_unitary(seed: int, n: int, dtype: str) -> Array:
    """A unitary matrix."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(n, n)) + (1j * rng.normal(size=(n, n)) if dtype == "complex128" else 0)
    return np.linalg.qr(x)[0]


def adjoint(x: Array) -> Array:
    return x.conj().swapaxes(-1, -2)


def slope(build: Callable[[Tensor], Tensor], x: Array, g: Array) -> Array:
    """The cotangent of x from that of what is built of it."""
    given = gf.placeholder(x.dtype, x.shape)
    (found,) = gf.gradients(build(given), [given], [g])
    with np.errstate(all="ignore"):
        result: Array = evaluate([found], {given: x})[0]
    return result


def by_differences(function: Callable[[Array], Array], x: Array, g: Array) -> Array:
    """The cotangent of x by central differences along each element, and each times i."""
    found, h = np.zeros_like(x), 1e-5
    for at in np.ndindex(*x.shape):
        for unit in (1, 1j) if x.dtype.kind == "c" else (1,):
            step = np.zeros_like(x)
            step[at] = h * unit
            change = (function(x + step) - function(x - step)) / (2 * h)
            found[at] += unit * np.sum((g.conj() * change).real)
    return found


def matrix_function(a: Array, f: Callable[[Array], Array]) -> Array:
    """V·f(w)·Vᴴ of the symmetric part."""
    w, v = np.linalg.eigh((a + adjoint(a)) / 2)
    result: Array = (v * f(w)[..., None, :]) @ adjoint(v)
    return result


def by_eigh(a: Tensor) -> Tensor:
    w, v = linalg.eigh(a)
    product: Tensor = gf.matmul(v * gf.expand_dims(gf.exp(w), -2), gf.matrix_transpose(gf.conj(v)))
    return product


def by_svd(a: Tensor) -> Tensor:
    """U·atan(S)·Vᴴ, which is smooth in any matrix."""
    u, s, vh = linalg.svd(a, full_matrices=False)
    product: Tensor = gf.matmul(u * gf.expand_dims(gf.atan(s), -2), vh)
    return product


def odd_function(a: Array) -> Array:
    u, s, vh = np.linalg.svd(a, full_matrices=False)
    result: Array = (u * np.arctan(s)[..., None, :]) @ vh
    return result


def polar(a: Tensor) -> Tensor:
    u, _, vh = linalg.svd(a, full_matrices=False)
    return gf.matmul(u, vh)


# Eigenvalues ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize(
    "values", [(1, 1, 1, 1), (0, 0, 0, 0), (1, 1, 2, 2), (0, 0, 0, 5), (1, 2, 3, 4)], ids=str
)
def test_a_function_of_a_matrix_by_eigh_has_its_gradient(
    values: tuple[float, ...], dtype: str
) -> None:
    q, g = draw_unitary(0, 4, dtype), draw_unitary(1, 4, dtype)
    a = (q * np.array(values, float)) @ adjoint(q)
    want = by_differences(lambda a: matrix_function(a, np.exp), a, g)
    np.testing.assert_allclose(slope(by_eigh, a, g), want, atol=1e-7)


@pytest.mark.parametrize("gap", GAPS)
def test_close_eigenvalues_keep_the_digits_of_the_gradient(gap: float) -> None:
    """Divided by a gap of 1e-14, rounding made errors of 1e-2."""
    q, g = draw_unitary(0, 4, "float64"), draw_unitary(1, 4, "float64")
    w = np.array([1, 1 + gap, 2, 2 + gap])
    a = (q * w) @ q.T
    between = np.subtract.outer(w, w)
    mean = np.add.outer(w, w) / 2  # (eᵃ - eᵇ) / (a - b) = e^mean·sinh(d)/d of half the gap d
    half = np.where(between == 0, 1, between / 2)
    divided = np.exp(mean) * np.where(between == 0, 1, np.sinh(half) / half)
    want = q @ (divided * (q.T @ ((g + g.T) / 2) @ q)) @ q.T
    np.testing.assert_allclose(slope(by_eigh, (a + a.T) / 2, g), want, atol=1e-8)


@pytest.mark.parametrize("gap", GAPS)
def test_close_eigenvalues_of_any_matrix_keep_digits_too(gap: float) -> None:
    rng = np.random.default_rng(0)
    v, g = rng.normal(size=(4, 4)) + 2 * np.eye(4), rng.normal(size=(4, 4))
    a = (v * np.array([1, 1 + gap, 2, 2 + gap])) @ np.linalg.inv(v)

    def cube(a: Tensor) -> Tensor:
        w, v = linalg.eig(a)
        return gf.real(gf.matmul(v * gf.expand_dims(w * w * w, -2), linalg.inv(v)))

    want = sum(  # of a·a·a
        np.linalg.matrix_power(a, i).T @ g @ np.linalg.matrix_power(a, 2 - i).T for i in range(3)
    )
    np.testing.assert_allclose(slope(cube, a, g), want, rtol=1e-5, atol=1e-5)


def test_only_the_degenerate_matrices_of_a_batch_take_the_limit() -> None:
    q, g = (
        draw_unitary(0, 4, "float64"),
        np.stack([draw_unitary(i, 4, "float64") for i in (1, 2, 3)]),
    )
    a = np.stack([q * np.array(w) @ q.T for w in ([1.0, 2, 3, 4], [1.0, 1, 1, 1], [1.0, 1, 2, 3])])
    want = by_differences(lambda a: matrix_function(a, np.exp), a, g)
    np.testing.assert_allclose(slope(by_eigh, a, g), want, atol=1e-7)
    alone = slope(lambda a: linalg.eigh(a)[1], a, g)
    assert np.isnan(alone).all((1, 2)).tolist() == [False, True, True]


@pytest.mark.parametrize("a", [np.eye(3), np.diag([1.0, 1.0, 4.0])], ids=["all", "two"])
def test_vectors_of_equal_eigenvalues_have_no_derivative(a: Array) -> None:
    g = draw_unitary(1, 3, "float64")
    assert np.isnan(slope(lambda a: linalg.eigh(a)[1], a, g)).any()
    x = gf.placeholder("float64", (3, 3))
    tangent = gf.jvp(linalg.eigh(x)[1], [x], [g + g.T])
    with np.errstate(all="ignore"):
        assert np.isnan(evaluate([tangent], {x: a})[0][:, :2]).all()


def test_a_defective_matrix_has_no_derivative_of_its_vectors() -> None:
    a = np.eye(3) + np.diag([1.0, 0.0], 1)
    assert np.isnan(
        slope(lambda a: gf.real(linalg.eig(a)[1]), a, draw_unitary(1, 3, "float64"))
    ).any()


@pytest.mark.parametrize("a", [np.eye(3), np.diag([2.0, 2.0, 5.0])], ids=["all", "two"])
def test_symmetric_functions_of_equal_eigenvalues_have_second_derivatives(a: Array) -> None:
    x, d = gf.placeholder("float64", (3, 3)), draw_unitary(1, 3, "float64")
    d = d + d.T
    for f, want in (
        (lambda x: gf.sum(linalg.eigvalsh(x) ** 2), 2 * d),
        (lambda x: gf.sum(gf.log(linalg.eigvalsh(x))), -np.linalg.inv(a) @ d @ np.linalg.inv(a)),
    ):
        (g,) = gf.gradients(f(x), [x])
        (second,) = evaluate([gf.gradients(g, [x], [d])[0]], {x: a})
        np.testing.assert_allclose(second, want, atol=1e-12)


# Singular values --------------------------------------------------------------------------------


@pytest.mark.every(5)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("shape", [(4, 3), (3, 3), (3, 4)], ids=str)
@pytest.mark.parametrize(
    "values", [(2, 2, 1), (1, 1, 1), (2, 1, 0), (2, 0, 0), (2, 2, 0), (0, 0, 0)], ids=str
)
def test_a_smooth_function_by_svd_has_its_gradient(
    values: tuple[float, ...], shape: tuple[int, int], dtype: str
) -> None:
    m, n = shape
    u, vh, g = (
        draw_unitary(0, m, dtype)[:, :3],
        draw_unitary(1, n, dtype)[:3],
        draw_unitary(2, 4, dtype)[:m, :n],
    )
    a = (u * np.array(values, float)) @ vh
    want = by_differences(odd_function, a, g)
    np.testing.assert_allclose(slope(by_svd, a, g), want, atol=1e-7)
    unitary = slope(polar, a, g)
    if min(values):
        want = by_differences(
            lambda a: np.linalg.svd(a, False)[0] @ np.linalg.svd(a, False)[2], a, g
        )
        np.testing.assert_allclose(unitary, want, atol=1e-7)
    elif shape != (3, 3) or values.count(0) > 1:  # else its determinant's sign only jumps
        assert np.isnan(unitary).all()


@pytest.mark.parametrize("gap", GAPS)
def test_close_singular_values_keep_the_digits_of_the_gradient(gap: float) -> None:
    u, vh, g = (draw_unitary(i, 4, "float64") for i in range(3))
    a = (u * np.array([2 + gap, 2, 1, 0.5 * gap])) @ vh
    np.testing.assert_allclose(slope(by_svd, a, g), by_differences(odd_function, a, g), atol=3e-8)


@pytest.mark.parametrize("values", [(3, 2, 1), (2, 2, 2), (2, 0, 0), (0, 0, 0)], ids=str)
def test_the_sum_of_squared_singular_values_has_second_derivatives(
    values: tuple[float, ...],
) -> None:
    x, d = gf.placeholder("float64", (3, 3)), draw_unitary(2, 3, "float64")
    a = (draw_unitary(0, 3, "float64") * np.array(values, float)) @ draw_unitary(1, 3, "float64")
    (g,) = gf.gradients(gf.sum(linalg.svdvals(x) ** 2), [x])
    (second,) = evaluate([gf.gradients(g, [x], [d])[0]], {x: a})
    np.testing.assert_allclose(second, 2 * d, atol=1e-12)
