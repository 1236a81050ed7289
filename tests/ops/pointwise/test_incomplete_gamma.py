"""The incomplete gamma functions against scipy's, and their gradients by both arguments."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scipy import special

import graphflow as gf
from graphflow.errors import DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate

RANGES = [(1e-9, 1e-2), (1e-2, 1.0), (1.0, 12.0), (12.0, 100.0), (100.0, 1e8)]


def draw(low: float, high: float, spread: float, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a = np.exp(rng.uniform(np.log(low), np.log(high), 500))
    near = np.abs(a + rng.uniform(-spread, spread, 500) * np.sqrt(a))
    x = np.where(rng.random(500) < 0.5, near, rng.uniform(0.3, 2, 500) * np.minimum(a, 50))
    return a.astype(dtype), x.astype(dtype)


@pytest.mark.parametrize("dtype, near", [("float32", 7e-8), ("float64", 3e-13)])
@pytest.mark.parametrize("low, high", RANGES)
def test_both_functions_keep_their_digits_in_the_tails(
    low: float, high: float, dtype: str, near: float
) -> None:
    a, x = draw(low, high, 4.4, dtype)  # further away scipy itself is less accurate
    have = evaluate([gf.gammainc(a, x), gf.gammaincc(a, x)])
    wide = a.astype("float64"), x.astype("float64")
    for value, want in zip(have, (special.gammainc(*wide), special.gammaincc(*wide)), strict=True):
        assert value.dtype == dtype
        told = want > 1e-25
        np.testing.assert_allclose(value[told], want[told], rtol=near)


def test_the_ends_of_both_arguments() -> None:
    ends = [0.0, 1.0, 11.999999, 12.0, 1e300, np.inf, np.nan, -1.0]
    a, x = (each.ravel() for each in np.meshgrid(ends, ends))
    lower, upper = evaluate([gf.gammainc(a, x), gf.gammaincc(a, x)])
    want = special.gammainc(a, x)
    want[(a == 0) & (x == 0)] = np.nan
    np.testing.assert_allclose(lower, want, rtol=1e-12)
    np.testing.assert_allclose(upper, 1 - lower, atol=1e-14)


@pytest.mark.parametrize("low, high", [*RANGES[1:4], (100.0, 1e4)])
def test_the_gradient_by_a_agrees_with_differences_of_scipy(low: float, high: float) -> None:
    a, x = draw(low, high, 3.0, "float64")
    slopes = [gf.gradients(f(t, x), [t])[0] for f in (gf.gammainc, gf.gammaincc)
              for t in [gf.constant(a)]]  # fmt: skip
    lower, upper = evaluate(slopes)
    h = np.minimum(0.02 * np.sqrt(a), a / 8)
    parts = [
        c * (special.gammainc(a + k * h, x) - special.gammainc(a - k * h, x))
        for k, c in enumerate((4 / 5, -1 / 5, 4 / 105, -1 / 280), 1)
    ]
    np.testing.assert_allclose(lower, sum(parts) / h, rtol=1e-8, atol=1e-10)
    np.testing.assert_array_equal(upper, -lower)


def test_derivatives_by_x_and_by_both() -> None:
    a, x = gf.placeholder("float64", ()), gf.placeholder("float64", (5,))
    at = {a: np.array(2.5), x: np.array([0.1, 1.0, 2.5, 6.0, 30.0])}
    y = gf.sum(gf.gammainc(a, x))
    by_a, by_x = gf.gradients(y, [a, x])
    density = gf.exp((a - 1) * gf.log(x) - x - gf.lgamma(a))
    built = [by_x, *gf.gradients(by_x, [x]), *gf.gradients(by_a, [x]), gf.jvp(y, [a], [1.0])]
    (slope,), (mixed,) = gf.gradients(density, [x]), gf.gradients(by_x, [a])
    wanted = [density, slope, density * (gf.log(x) - gf.digamma(a)), by_a]
    for have, want in zip(evaluate(built, at), evaluate(wanted, at), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-12, atol=1e-16)
    np.testing.assert_allclose(
        evaluate([mixed], at)[0], evaluate([gf.sum(wanted[2])], at)[0], rtol=1e-10
    )
    assert np.isnan(evaluate(gf.gradients(by_a, [a]), at)[0])


def test_the_density_at_zero_is_that_of_its_limit() -> None:
    a, x = gf.constant([0.5, 1.0, 2.0]), gf.placeholder("float32", (3,))
    (slope,) = evaluate(gf.gradients(gf.gammainc(a, x), [x]), {x: np.zeros(3, "float32")})
    assert slope.tolist() == [np.inf, 1.0, 0.0]


def test_sessions_batches_and_empty_arrays() -> None:
    a, x = gf.placeholder("float32", (None, 1)), gf.placeholder("float32", (None,))
    y = gf.gammaincc(a, x) * 2.0
    rows = gf.vmap(gf.gammainc, (0, None))(a, x)
    feeds = {a: np.array([[0.5], [20.0]], "float32"), x: np.array([1.0, 15.0, 30.0], "float32")}
    with gf.Session() as s:
        upper, lower = s.run([y, rows], feeds)
        assert s.run(y, {a: np.zeros((0, 1)), x: np.ones(3)}).shape == (0, 3)
    np.testing.assert_allclose(upper, 2 * special.gammaincc(feeds[a], feeds[x]), rtol=1e-6)
    np.testing.assert_allclose(lower, special.gammainc(feeds[a], feeds[x]), rtol=1e-6)


@pytest.mark.parametrize(
    "error, arguments",
    [
        (DTypeError, (np.ones(2, "int64"), np.ones(2, "int64"))),
        (DTypeError, (np.ones(2, "complex64"), 1.0)),
        (ShapeError, (np.ones(3), np.ones(2))),
    ],
)
def test_bad_input_is_told(error: Any, arguments: Any) -> None:
    for f in (gf.gammainc, gf.gammaincc):
        with pytest.raises(error, match=r"gammainc at .*test_incomplete_gamma\.py:\d+: "):
            f(*arguments)
