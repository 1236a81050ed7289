"""Roots of sums of squares at 0: their gradient is 0, their second derivative NaN, and that of what
is smooth there (squares, powers, masks) right, in every mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import Tensor

Array = np.ndarray[Any, Any]
Root = Callable[[Tensor], Tensor]
ROOTS: dict[str, Root] = {
    "vector_norm": gf.linalg.vector_norm,
    "matrix_norm": lambda x: gf.linalg.matrix_norm(gf.reshape(x, (1, 2))),
    "norm of a complex vector": lambda x: gf.linalg.vector_norm(as_complex(x)),
    "hypot": lambda x: gf.hypot(x[0], x[1]),
    "hypot that broadcasts": lambda x: gf.hypot(x[:1, None], x[None, 1:]),
    "abs of a complex number": lambda x: gf.abs(as_complex(x)),
    "std": lambda x: gf.std(gf.concat([x, -x]) * np.sqrt(2)),
}
DIRECTION = np.array([1.0, 2.0])


def as_complex(x: Tensor) -> Tensor:
    made: Tensor = gf.complex(x[:1], x[1:])
    return made


def reverse(y: Tensor, x: Tensor) -> Tensor:
    found: Tensor = gf.gradients(y, [x], None if not y.shape else [DIRECTION])[0]
    return found


def forward(y: Tensor, x: Tensor) -> Tensor:
    found: Tensor = gf.jvp(y, [x], [DIRECTION])
    return found


def curvatures(function: Root, at: Array) -> list[Array]:
    """The Hessian times DIRECTION: reverse or forward over reverse, and reverse over forward."""
    x = gf.placeholder("float64", at.shape)
    y = gf.sum(function(x))
    slope, moved = reverse(y, x), forward(y, x)
    with np.errstate(all="ignore"):
        first, *rest = evaluate(
            [slope, reverse(slope, x), forward(slope, x), reverse(moved, x)], {x: at}
        )
    assert (first == 0).all() or (at != 0).any()
    return rest


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_squares_and_powers_of_a_root_have_second_derivatives_at_0(root: Root) -> None:
    for function, factor in (
        (lambda x: root(x) ** 2, 2.0),
        (lambda x: gf.square(3 * root(x)), 18.0),
        (lambda x: 3 * (r := root(x)) * r + r**2, 8.0),
        (lambda x: gf.exp(root(x) ** 2), 2.0),
        (lambda x: (r := root(x)) ** 2.0 / (1 + r**4), 2.0),
        (lambda x: root(x) ** 3, 0.0),
    ):
        for found in curvatures(function, np.zeros(2))[:2]:
            np.testing.assert_allclose(found, factor * DIRECTION, err_msg=str(factor))


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_a_root_itself_and_what_bends_with_it_have_none_at_0(root: Root) -> None:
    for function in (root, lambda x: gf.sinh(root(x)) * 3, lambda x: root(x) ** 1.5):
        assert all(np.isnan(found).any() for found in curvatures(function, np.zeros(2)))


def test_an_angle_has_no_second_derivative_at_0() -> None:
    for angle in (lambda x: gf.atan2(x[0], x[1]), lambda x: gf.angle(as_complex(x))):
        assert all(np.isnan(found).any() for found in curvatures(angle, np.zeros(2)))


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_a_root_that_is_masked_at_0_adds_nothing(root: Root) -> None:
    for mask in (
        lambda r: gf.maximum(r, 0.5) ** 2,
        lambda r: gf.exp(gf.clip(r, 0.5, 9.0)),
        lambda r: 3 * gf.nn.relu(r - 1),
        lambda r: gf.where(r > 1, r, 1.0),
        lambda r: gf.where(r < 1, 1.0, r * 3),
    ):
        found = curvatures(lambda x, mask=mask: mask(root(x)) + gf.sum(x * x), np.zeros(2))
        for curvature in found[:2]:
            np.testing.assert_allclose(curvature, 2 * DIRECTION)


@pytest.mark.parametrize("root", ROOTS.values(), ids=ROOTS)
def test_elements_of_0_beside_others_have_second_derivatives_in_every_mode(root: Root) -> None:
    at = np.array([0.0, 3.0])
    for found in curvatures(root, at):
        np.testing.assert_allclose(found, [1 / 3, 0], atol=1e-12)
    x = gf.placeholder("float64", (2,))
    (twice,) = evaluate([forward(forward(gf.sum(root(x)), x), x)], {x: at})
    np.testing.assert_allclose(twice, 1 / 3)


def test_the_square_of_a_plain_square_root_has_derivatives_at_0() -> None:
    for found in curvatures(lambda x: gf.sqrt(gf.sum(x * x)) ** 2, np.zeros(2))[:2]:
        np.testing.assert_allclose(found, 2 * DIRECTION)


SHAPED: dict[str, tuple[Root, float]] = {
    "reshape": (lambda r: gf.reshape(r, (1, 1)) ** 2, 2.0),
    "expand_dims": (lambda r: gf.squeeze(gf.expand_dims(r, (0, 1)) ** 2, (0, 1)), 2.0),
    "broadcast": (lambda r: gf.broadcast_to(r, (3, 2)) ** 2, 12.0),
    "times a vector": (lambda r: (r * np.array([1.0, 2.0])) ** 2, 10.0),
    "times a column": (lambda r: (gf.expand_dims(r, 0) * np.array([[1.0], [2.0]])) ** 4, 0.0),
    "plus its square": (lambda r: (r * np.ones(3)) ** 2 + r**2 * np.array([1.0, 0.0, 2.0]), 12.0),
    "astype": (lambda r: gf.astype(gf.astype(r, "float32") ** 2, "float64"), 2.0),
}


@pytest.mark.parametrize("function, factor", SHAPED.values(), ids=SHAPED)
def test_squares_of_a_root_in_another_shape_have_second_derivatives_at_0(
    function: Root, factor: float
) -> None:
    for found in curvatures(lambda x: function(gf.linalg.vector_norm(x)), np.zeros(2))[:2]:
        np.testing.assert_allclose(found, factor * DIRECTION)


def test_norms_of_the_rows_of_a_batch_of_any_size_have_second_derivatives_at_0() -> None:
    x, at = gf.placeholder("float64", ("b", 2)), np.array([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]])
    norms = gf.linalg.vector_norm(x, axis=1)
    weights = np.array([[1.0, 2.0, 3.0]])
    for y in (
        gf.sum(norms[:, None] ** 2 * weights),
        gf.sum((gf.expand_dims(norms, 1) * weights) ** 2) * 6 / 14,
        gf.sum(gf.reshape(norms, (-1, 1)) ** 2) * 6,
        gf.sum(gf.linalg.vector_norm(x, axis=1, keepdims=True) ** 2) * 6,
    ):
        (slope,) = gf.gradients(y, [x])
        (found,) = evaluate([gf.jvp(slope, [x], [gf.ones_like(x)])], {x: at})
        np.testing.assert_allclose(found, 12 * np.ones_like(at))


def test_what_mixes_roots_has_no_second_derivative_where_one_is_0() -> None:
    """A sum of several norms does not have one of them as a factor."""
    x, at = gf.placeholder("float64", (2, 2)), np.array([[0.0, 0.0], [3.0, 4.0]])
    norms = gf.linalg.vector_norm(x, axis=1)
    (slope,) = gf.gradients(gf.sum(norms) ** 2, [x])
    with np.errstate(all="ignore"):
        first, second = evaluate([slope, gf.jvp(slope, [x], [np.ones((2, 2))])], {x: at})
    np.testing.assert_allclose(first, [[0, 0], [6, 8]])
    assert np.isnan(second[0]).all()


def test_the_product_of_a_root_by_itself_is_its_square() -> None:
    norm = gf.linalg.vector_norm
    for product in (lambda x: norm(x) * norm(x), lambda x: gf.abs(x) * gf.abs(x)):
        for found in curvatures(product, np.zeros(2))[:2]:
            np.testing.assert_allclose(found, 2 * DIRECTION)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("order", [3, 4])
def test_a_norm_to_the_power_of_its_order_has_second_derivatives_at_0(
    order: int, dtype: str
) -> None:
    x = gf.placeholder(dtype, (3,))
    slope = gf.gradients(gf.linalg.vector_norm(x, ord=order) ** order, [x])[0]
    at = np.array([0.0, 0.0, 2.0], dtype)
    for point in (at, 0 * at):
        g, h = evaluate([slope, gf.jvp(slope, [x], [np.ones(3, dtype)])], {x: point})
        np.testing.assert_allclose(g, order * point ** (order - 1), atol=1e-12)
        np.testing.assert_allclose(h, order * (order - 1) * point ** (order - 2), atol=1e-12)
