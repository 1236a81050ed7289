"""Whole Jacobians and Hessians, and vector-Jacobian products, against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DifferentiationError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate

AT = np.array([[0.3, -0.7, 1.1], [0.9, 0.2, -1.3]])


def differences(f: Callable[[np.ndarray], np.ndarray], at: np.ndarray) -> np.ndarray:
    """The derivative of f by central differences, of the shape of f(at) and that of at."""
    columns = []
    for place in np.ndindex(at.shape):
        step = np.zeros_like(at)
        step[place] = 1e-5
        columns.append((f(at + step) - f(at - step)) / 2e-5)
    return np.stack(columns, -1).reshape(*np.shape(f(at)), *at.shape)


def wide(x: Any, xp: Any = gf) -> Any:
    """More outputs than inputs: (2, 3) to (2, 2, 3)."""
    return xp.stack([xp.sin(x) * xp.sum(x), xp.exp(x) * x[0]])


def narrow(x: Any, xp: Any = gf) -> Any:
    """Fewer outputs than inputs: (2, 3) to (2,)."""
    return xp.sum(xp.tanh(x) * x[::-1], axis=1)


def scalar(x: Any, xp: Any = gf) -> Any:
    return xp.sum(xp.sin(x) * xp.exp(x[:1]))


@pytest.mark.parametrize("f", [wide, narrow, scalar])
@pytest.mark.parametrize("shape", [(2, 3), ("n", 3)])
def test_a_jacobian_has_the_axes_of_outputs_and_then_of_inputs(f: Any, shape: Any) -> None:
    x = gf.placeholder("float64", shape)
    (have,) = evaluate([gf.jacobian(f(x), x)], {x: AT})
    want = differences(lambda at: f(at, np), AT)
    assert have.shape == want.shape
    np.testing.assert_allclose(have, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("shape", [(2, 3), ("n", 3)])
def test_a_hessian_is_the_derivative_of_the_gradient(shape: Any) -> None:
    x = gf.placeholder("float64", shape)
    y = scalar(x)
    slope = gf.gradients(y, [x])[0]
    (have,) = evaluate([gf.hessian(y, x)], {x: AT})
    want = differences(lambda at: evaluate([slope], {x: at})[0], AT)
    assert have.shape == (2, 3, 2, 3)
    np.testing.assert_allclose(have, want, rtol=1e-7, atol=1e-8)


def test_lists_of_inputs_give_lists_and_blocks() -> None:
    random = np.random.default_rng(0)
    a, w = gf.placeholder("float64", (4,)), gf.placeholder("float64", (4, 2))
    feeds = {a: random.normal(size=4), w: random.normal(size=(4, 2))}
    y = gf.tanh(a @ w)
    by_a, by_w = evaluate(gf.jacobian(y, [a, w]), feeds)
    slope = 1 - np.tanh(feeds[a] @ feeds[w]) ** 2
    np.testing.assert_allclose(by_a, slope[:, None] * feeds[w].T, rtol=1e-12)
    want = np.einsum("j,i,jk->jik", slope, feeds[a], np.eye(2))
    np.testing.assert_allclose(by_w, want, rtol=1e-12)
    blocks = gf.hessian(gf.sum(gf.square(a @ w)), [a, w])
    assert [[block.shape for block in row] for row in blocks] == [
        [(4, 4), (4, 4, 2)], [(4, 2, 4), (4, 2, 4, 2)],
    ]  # fmt: skip
    values = evaluate([block for row in blocks for block in row], feeds)
    np.testing.assert_allclose(values[0], 2 * feeds[w] @ feeds[w].T, rtol=1e-12)
    np.testing.assert_allclose(values[1], np.moveaxis(values[2], 2, 0), rtol=1e-12)
    want = 2 * np.einsum("i,k,jl->ijkl", feeds[a], feeds[a], np.eye(2))
    np.testing.assert_allclose(values[3], want, rtol=1e-12)


def test_what_does_not_depend_is_zero_and_what_is_empty_is_empty() -> None:
    x, other = gf.placeholder("float64", (2, 3)), gf.placeholder("float64", (4,))
    zero, empty, none = evaluate(
        [gf.jacobian(narrow(x), other), gf.jacobian(other[:0], other), gf.hessian(gf.sum(x), x)],
        {x: AT, other: np.ones(4)},
    )
    assert zero.shape == (2, 4) and not zero.any()
    assert empty.shape == (0, 4)
    assert none.shape == (2, 3, 2, 3) and not none.any()


def test_jacobians_pass_through_loops_and_are_differentiated_again() -> None:
    x = gf.placeholder("float64", (3,))
    last, _ = gf.scan(lambda c, row: (gf.sin(c) * row, c), x, gf.constant(AT))
    (have,) = evaluate([gf.jacobian(last, x)], {x: AT[0]})
    want = differences(lambda at: np.sin(np.sin(at) * AT[0]) * AT[1], AT[0])
    np.testing.assert_allclose(have, want, rtol=1e-8, atol=1e-9)
    both = [gf.gradients(gf.sum(gf.jacobian(gf.sin(x) * x, x)), [x])[0]]
    want = 2 * np.cos(AT[0]) - AT[0] * np.sin(AT[0])
    np.testing.assert_allclose(evaluate(both, {x: AT[0]})[0], want, rtol=1e-12)


def test_a_vjp_of_tensors_is_that_of_the_function_and_of_the_jacobian() -> None:
    x = gf.placeholder("float64", (2, 3))
    cotangent = np.random.default_rng(1).normal(size=(2, 2, 3))
    (by_tensors,) = gf.vjp(wide(x), [x], cotangent)
    value, (by_function,) = gf.vjp(wide, (x,), cotangent)
    found = evaluate([by_tensors, by_function, value], {x: AT})
    want = np.tensordot(cotangent, differences(lambda at: wide(at, np), AT), 3)
    np.testing.assert_allclose(found[0], want, rtol=1e-8)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-13)
    np.testing.assert_allclose(found[2], wide(AT, np), rtol=1e-13)


def test_a_vjp_takes_nests_and_leaves_out_outputs_without_cotangent() -> None:
    def f(parts: Any, b: Any) -> Any:
        return {"sum": parts["a"] + b, "product": parts["a"] * b, "left out": b * 5.0}

    a, b = gf.placeholder("float64", (3,)), gf.placeholder("float64", (3,))
    cotangents = {"product": AT[1], "sum": np.ones(3), "left out": None}
    value, (of_parts, of_b) = gf.vjp(f, ({"a": a}, b), cotangents | {"sum": np.ones(3)})
    found = evaluate([of_parts["a"], of_b, value["product"]], {a: AT[0], b: AT[1]})
    np.testing.assert_allclose(found[0], 1 + AT[1] * AT[1], rtol=1e-13)
    np.testing.assert_allclose(found[1], 1 + AT[1] * AT[0], rtol=1e-13)
    np.testing.assert_allclose(found[2], AT[0] * AT[1], rtol=1e-13)
    _, (first, second) = gf.vjp(gf.multiply, (a, a), np.ones(3))  # twice the same: two inputs
    assert [v.tolist() for v in evaluate([first, second], {a: AT[0]})] == [AT[0].tolist()] * 2


X, INTS = gf.placeholder("float32", (3,)), gf.placeholder("int64", (3,))


@pytest.mark.parametrize(
    ("mistake", "error", "told"),
    [
        (lambda: gf.hessian(gf.sin(X), X), ShapeError, r"hessian at .*\(3,\).*one number"),
        (lambda: gf.jacobian(X, INTS), DifferentiationError, "jacobian at .*int64.*astype"),
        (lambda: gf.jacobian(gf.sin, X), DifferentiationError, "y is .*not a tensor"),
        (lambda: gf.jacobian(INTS, [X]), DifferentiationError, "int64"),
        (lambda: gf.hessian(gf.sum(X), 3.0), DifferentiationError, r"x is 3\.0, not a tensor"),
        (lambda: gf.jacobian(gf.complex(X, X), X), DifferentiationError, "complex64.*gf.real"),
        (lambda: gf.vjp(gf.sin, X, X), ArgumentError, "vjp at .*give lists"),
        (lambda: gf.vjp(gf.sin, (X,), None), ArgumentError, "no output has a cotangent"),
        (lambda: gf.vjp([X, X], [X], [X]), ArgumentError, "as many cotangents as outputs.* 2, n"),
        (lambda: gf.vjp({"a": X}, [X], {"b": X}), ArgumentError, "cotangents of a dict"),
        (lambda: gf.vjp(gf.sin(X), [X], np.ones(4, "f")), ShapeError, r"\(4,\).*\(3,\)"),
        (lambda: gf.vjp(gf.sin(X), [X], gf.constant(np.ones(3))), DTypeError, "float64"),
        (lambda: gf.vjp(gf.abs, (INTS,), INTS), DifferentiationError, "int64"),
    ],
)  # fmt: skip
def test_mistakes_are_told(mistake: Callable[[], Any], error: type[Exception], told: str) -> None:
    with pytest.raises(error, match=told):
        mistake()
