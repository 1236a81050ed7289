"""`gf.associative_scan` equals a fold, step by step, at a depth of about 2·log2(n) calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, ShapeError
from graphflow.frontend.interpreter import evaluate

SIZES = [1, 2, 3, 4, 5, 7, 8, 13, 16]


def fold(f: Callable[[Any, Any], Any], xs: np.ndarray, reverse: bool = False) -> np.ndarray:
    rows = list(xs[::-1] if reverse else xs)
    for i in range(1, len(rows)):
        rows[i] = f(rows[i - 1], rows[i])
    return np.stack(rows[::-1] if reverse else rows)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("n", SIZES)
def test_products_of_matrices_equal_a_fold(n: int, reverse: bool) -> None:
    """Matrix products are associative, and not commutative."""
    x = gf.placeholder("float64", (n, 2, 2))
    at = draw(n, 2, 2)
    (have,) = evaluate([gf.associative_scan(gf.matmul, x, reverse=reverse)], {x: at})
    np.testing.assert_allclose(have, fold(np.matmul, at, reverse), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("dtype", ["float32", "int64"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_any_axis_and_dtype(axis: int, dtype: str) -> None:
    at = (draw(3, 5, 6) * 8).astype(dtype)
    x = gf.placeholder(dtype, at.shape)
    have = evaluate([gf.associative_scan(f, x, axis=axis) for f in (gf.add, gf.maximum)], {x: at})
    assert all(y.dtype == dtype for y in have)
    np.testing.assert_allclose(have[0], at.cumsum(axis), rtol=2e-5)
    np.testing.assert_array_equal(have[1], np.maximum.accumulate(at, axis))


def recur(a: Any, b: Any) -> Any:
    """The composition of two maps x → m·x + c, one scale for a row of shifts."""
    return {"m": a["m"] * b["m"], "c": b["m"] * a["c"] + b["c"]}


@pytest.mark.parametrize("n", [1, 6, 9])
def test_a_linear_recurrence_over_a_nest_has_the_values_and_gradients_of_a_scan(n: int) -> None:
    m, c = gf.placeholder("float64", (n,)), gf.placeholder("float64", (n, 3))
    tree = gf.associative_scan(recur, {"m": m, "c": c})["c"]

    def step(state: gf.Tensor, row: Any) -> Any:
        state = row[0] * state + row[1]
        return state, state

    _, loop = gf.scan(step, gf.zeros((3,), "float64"), (m, c))
    weights = draw(n, 3)
    both = [[y, *gf.gradients(gf.sum(gf.sin(y) * weights), [m, c])] for y in (tree, loop)]
    feeds = {m: draw(n), c: draw(n, 3)}
    for have, want in zip(*(evaluate(each, feeds) for each in both), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-11, atol=1e-12)


def test_second_derivatives_and_tangents() -> None:
    x = gf.placeholder("float64", (5,))
    tree, plain = gf.associative_scan(gf.multiply, x), gf.cumprod(x, 0)
    built = [
        [gf.hessian(gf.sum(gf.sin(y)), x), gf.jvp(y, [x], [np.arange(5.0)])] for y in (tree, plain)
    ]
    for have, want in zip(*(evaluate(each, {x: draw(5)}) for each in built), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-10, atol=1e-12)


def depth_of(y: gf.Tensor, op: str) -> int:
    """The most nodes of an op on one path to y."""
    depth: dict[Any, int] = {}
    for node in gf.Graph([y]).nodes:
        longest = max((depth[t.node] for t in node.inputs), default=0)
        depth[node] = longest + (node.op.name == op)
    return depth[y.node]


def test_the_tree_is_of_logarithmic_depth() -> None:
    x = gf.placeholder("float32", (1024,))
    assert depth_of(gf.associative_scan(gf.multiply, x), "multiply") <= 2 * 10


def test_it_maps_and_runs_in_a_session() -> None:
    x = gf.placeholder("float32", (None, 6))
    y = gf.vmap(lambda row: gf.associative_scan(gf.multiply, row))(x)
    at = draw(4, 6).astype("float32")
    with gf.Session() as s:
        np.testing.assert_allclose(s.run(y, {x: at}), np.cumprod(at, 1), rtol=1e-5)


def test_an_empty_axis_and_empty_slices() -> None:
    for shape in ((0, 3), (4, 0)):
        x = gf.placeholder("float32", shape)
        (have,) = evaluate([gf.associative_scan(gf.add, x)], {x: np.zeros(shape, "float32")})
        assert have.shape == shape


HERE = r"associative_scan at .*test_associative_scan\.py:\d+: [\s\S]*"


@pytest.mark.parametrize(
    "error, build, message",
    [
        (ArgumentError, lambda x: gf.associative_scan(3, x), "f must be a function"),
        (ArgumentError, lambda x: gf.associative_scan(gf.add, ()), "no tensor"),
        (ArgumentError, lambda x: gf.associative_scan(gf.add, x, reverse=1), "True or False"),
        (ArgumentError, lambda x: gf.associative_scan(gf.add, x, axis="a"), "axis"),
        (ShapeError, lambda x: gf.associative_scan(gf.add, x, axis=2), "2"),
        (ShapeError, lambda x: gf.associative_scan(gf.add, (x, x[:2])), "4 and 2 slices"),
        (
            ShapeError,
            lambda x: gf.associative_scan(gf.add, gf.placeholder("float32", ("n", 3))),
            "gf.scan",
        ),
        (
            ShapeError,
            lambda x: gf.associative_scan(lambda a, b: gf.sum(a + b), x),
            "without the axis",
        ),
        (
            ShapeError,
            lambda x: gf.associative_scan(lambda a, b: (a + b).astype("float64"), x),
            "float64",
        ),
        (ArgumentError, lambda x: gf.associative_scan(lambda a, b: (a, b), x), "return the nest"),
        (ArgumentError, lambda x: gf.associative_scan(lambda a: a, x), "2 arguments"),
    ],
)
def test_bad_input_is_told_with_a_remedy(error: Any, build: Any, message: str) -> None:
    with pytest.raises(error, match=HERE + message):
        build(gf.placeholder("float32", (4, 3)))
