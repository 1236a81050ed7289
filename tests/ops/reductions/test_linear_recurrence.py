"""Running products, and the recurrences that their gradients are."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import FUNCTIONS
from graphflow.transforms.op_testing import compare_gradients

RNG = np.random.default_rng(0)


def test_running_products_are_numpys() -> None:
    x = RNG.standard_normal((3, 5, 2))
    found = evaluate([gf.cumprod(x, axis) for axis in (0, 1, -1)])
    for axis, have in zip((0, 1, -1), found, strict=True):
        np.testing.assert_array_equal(have, np.cumprod(x, axis))
    small = np.array([2, 3, 100], "int8")
    (whole,) = evaluate([gf.cumprod(small)])
    assert whole.tolist() == [2, 6, 600] and whole.dtype == np.int64
    assert gf.cumprod(np.ones((0,))).shape == (0,)
    with pytest.raises(ArgumentError, match="rank 3; give the axis"):
        gf.cumprod(x)


@pytest.mark.parametrize("zeros", [(), (1,), (0, 3)])
def test_the_gradient_is_exact_at_zeros(zeros: tuple[int, ...]) -> None:
    x = RNG.uniform(0.5, 2, (5,))
    x[list(zeros)] = 0
    v = gf.placeholder("float64", ("n",))
    weights = np.arange(1.0, 6)
    (slope,) = evaluate(gf.gradients(gf.sum(gf.cumprod(v) * weights), [v]), {v: x})

    def compute_slope(i: int) -> float:  # of one factor each product is a linear function
        one, none = (np.cumprod(np.where(np.arange(5) == i, e, x)) for e in (1.0, 0.0))
        return float(((one - none) * weights).sum())

    np.testing.assert_allclose(slope, [compute_slope(i) for i in range(5)], rtol=1e-12)
    compare_gradients(gf.cumprod, [x], RNG)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_recurrence_is_a_loop(reverse: bool) -> None:
    a, b = RNG.standard_normal((2, 4, 3))
    (found,) = evaluate([FUNCTIONS["linear_recurrence"](a, b, axis=0, reverse=reverse)])
    state = np.zeros(3)
    for i in range(4)[:: -1 if reverse else 1]:
        state = a[i] * state + b[i]
        np.testing.assert_allclose(found[i], state)
