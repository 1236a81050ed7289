"""Elementwise functions and their slopes at the ends of their intervals: a step beside each border
of their pieces, at infinities, and where squares leave the range of the dtype."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphflow as gf

INF, NAN = math.inf, math.nan
DTYPES = ["float32", "float64"]
JIT = ["on", "off"]
Unary = Callable[[Any], Any]


@pytest.fixture(params=JIT, autouse=True)
def jit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", request.param)


def values_and_slopes(function: Any, *points: Any) -> list[Any]:
    """The values of a function, and the derivatives along each of its arguments."""
    xs = [gf.placeholder(p.dtype, p.shape) for p in points]
    y = function(*xs)
    with gf.Session() as session:
        return session.run([y, *gf.gradients(y, xs)], dict(zip(xs, points, strict=True)))


# At infinity, and far out -----------------------------------------------------------------------

# function: values at -inf and inf, slopes there
LIMITS: dict[str, tuple[Unary, tuple[float, float], tuple[float, float]]] = {
    "gelu": (gf.nn.gelu, (0, INF), (0, 1)),
    "gelu by tanh": (lambda x: gf.nn.gelu(x, approximate="tanh"), (0, INF), (0, 1)),
    "silu": (gf.nn.silu, (0, INF), (0, 1)),
    "swish": (lambda x: gf.nn.swish(x, 0.3), (0, INF), (0, 1)),
    "swish of a negative beta": (lambda x: gf.nn.swish(x, -2.0), (-INF, 0), (1, 0)),
    "swish of beta 0": (lambda x: gf.nn.swish(x, 0.0), (-INF, INF), (0.5, 0.5)),
    "mish": (gf.nn.mish, (0, INF), (0, 1)),
    "hard_swish": (gf.nn.hard_swish, (0, INF), (0, 1)),
    "softsign": (gf.nn.softsign, (-1, 1), (0, 0)),
    "softplus": (gf.nn.softplus, (0, INF), (0, 1)),
    "log_sigmoid": (gf.nn.log_sigmoid, (-INF, 0), (1, 0)),
    "sigmoid": (gf.nn.sigmoid, (0, 1), (0, 0)),
    "tanh": (gf.tanh, (-1, 1), (0, 0)),
    "elu": (gf.nn.elu, (-1, INF), (0, 1)),
    "relu": (gf.nn.relu, (0, INF), (0, 1)),
    "relu6": (gf.nn.relu6, (0, 6), (0, 0)),
    "hard_tanh": (gf.nn.hard_tanh, (-1, 1), (0, 0)),
    "hard_sigmoid": (gf.nn.hard_sigmoid, (0, 1), (0, 0)),
    "hard_shrink": (gf.nn.hard_shrink, (-INF, INF), (1, 1)),
    "erf": (gf.erf, (-1, 1), (0, 0)),
    "erfc": (gf.erfc, (2, 0), (0, 0)),
    "exp": (gf.exp, (0, INF), (0, INF)),
    "expm1": (gf.expm1, (-1, INF), (0, INF)),
    "asinh": (gf.asinh, (-INF, INF), (0, 0)),
    "atan": (gf.atan, (-math.pi / 2, math.pi / 2), (0, 0)),
    "power of 0": (lambda x: gf.pow(x, gf.zeros_like(x)), (1, 1), (0, 0)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LIMITS)
def test_values_and_slopes_at_infinity_are_limits(name: str, dtype: str) -> None:
    function, ends, slopes = LIMITS[name]
    x = np.array([-INF, INF, NAN], dtype)
    found, slope = values_and_slopes(function, x)
    np.testing.assert_allclose(found[:2], ends, rtol=1e-6)
    np.testing.assert_allclose(slope[:2], slopes, rtol=1e-6)
    if name != "power of 0":  # as in C, 1
        assert np.isnan(found[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "name", [n for n, (_, _, slopes) in LIMITS.items() if all(map(math.isfinite, slopes))]
)
def test_slopes_far_out_are_finite(name: str, dtype: str) -> None:
    function, _, slopes = LIMITS[name]
    far = np.logspace(4, np.log10(float(np.finfo(dtype).max)) - 0.1, 60).astype(dtype)
    for sign, slope in zip((-1, 1), slopes, strict=True):
        _, found = values_and_slopes(function, far * far.dtype.type(sign))
        np.testing.assert_allclose(found, slope, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["gelu", "gelu by tanh", "silu", "softsign"])
def test_second_slopes_far_out_are_0(activation: str, dtype: str) -> None:
    x = gf.placeholder(dtype, (4,))
    (slope,) = gf.gradients(LIMITS[activation][0](x), [x])
    (second,) = gf.gradients(slope, [x])
    far = np.array([-INF, -1e20, 1e20, INF], dtype)
    with gf.Session() as session:
        np.testing.assert_allclose(session.run(second, {x: far}), 0, atol=1e-12)


# Beside borders ---------------------------------------------------------------------------------


def sign(x: float) -> float:
    return math.copysign(1.0, x)


def lgamma(x: float) -> float:
    return INF if x <= 0 and x == math.floor(x) else math.lgamma(x)


# function, exact, slope, borders of the pieces
BORDERS: dict[str, tuple[Unary, Any, Any, tuple[float, ...]]] = {
    "lgamma": (gf.lgamma, lgamma, None, (
        *(k / 2 for k in range(-21, 22) if k % 2 or k > 0), 0.5, 1.5, 2.5, 8.0, 1e4
    )),
    "erf": (gf.erf, math.erf, lambda x: 2 / math.sqrt(math.pi) * math.exp(-x * x), (
        0.46875, 0.5, 1.0, 4.0, 6.0
    )),
    "erfc": (gf.erfc, math.erfc, lambda x: -2 / math.sqrt(math.pi) * math.exp(-x * x), (
        0.46875, 0.5, 1.0, 4.0, 6.0
    )),
    "expm1": (gf.expm1, math.expm1, math.exp, (2.0**-54, 0.35, 0.5, 1.0, 45.0, 20.0, 37.0)),
    "log1p": (gf.log1p, math.log1p, lambda x: 1 / (1 + x), (2.0**-54, 0.4, 0.5, 1.0, 1e10)),
    "tanh": (gf.tanh, math.tanh, lambda x: 1 / math.cosh(x) ** 2, (0.3, 0.55, 9.0, 20.0)),
    "asinh": (gf.asinh, math.asinh, lambda x: 1 / math.hypot(1, x), (1e-8, 1.0, 2.0, 1e10, 1e25)),
    "acosh": (gf.acosh, math.acosh, lambda x: 1 / math.sqrt(x - 1) / math.sqrt(x + 1), (
        1.001, 2.0, 1e5, 1e25
    )),
    "atanh": (gf.atanh, math.atanh, lambda x: 1 / ((1 - x) * (1 + x)), (0.5, 0.999)),
    "asin": (gf.asin, math.asin, lambda x: 1 / math.sqrt((1 - x) * (1 + x)), (0.5, 0.9999)),
    "acos": (gf.acos, math.acos, lambda x: -1 / math.sqrt((1 - x) * (1 + x)), (0.5, 0.9999)),
    "atan": (gf.atan, math.atan, lambda x: 1 / (1 + x * x), (0.5, 1.0, 2.0, 1e10)),
    "softsign": (gf.nn.softsign, lambda x: x / (1 + abs(x)), lambda x: (1 + abs(x)) ** -2, (
        0.5, 1.0, 1e6, 1e12, 1e18
    )),
    "silu": (gf.nn.silu, lambda x: x / (1 + math.exp(-x)), None, (1.0, 20.0, 80.0)),
    "hard_sigmoid": (gf.nn.hard_sigmoid, lambda x: min(max(x / 6 + 0.5, 0), 1), None, (3.0,)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BORDERS)
def test_both_sides_of_a_border_are_exact(name: str, dtype: str) -> None:
    function, exact, slope, borders = BORDERS[name]
    at = np.array([b for b in borders for b in (b, -b)], dtype)
    ends = (np.nextafter(at, np.array(end, dtype)) for end in (INF, -INF))
    x = np.concatenate([at, *ends])
    kept = [v for v in x.tolist() if not (name == "acosh" and v < 1)]
    kept = [v for v in kept if not (name == "log1p" and v <= -1)]
    x = np.array(kept, dtype)
    found, slopes = values_and_slopes(function, x)
    eps = float(np.finfo(dtype).eps)
    # the logarithm of gamma has zeros, where an error is one of what is subtracted
    floor = 32 if name == "lgamma" else 1 if name in ("hard_sigmoid", "log1p") else 0
    want = np.array([exact(v) for v in kept])
    np.testing.assert_allclose(found, want, rtol=16 * eps, atol=4 * eps * floor)
    if slope is not None:
        floor = 1 if name in ("tanh",) else 0  # from the value, whose digits are those near 1
        rtol = (
            16 * eps * (np.square(x.astype("float64")).clip(1, 100).max() if "erf" in name else 1)
        )
        want = np.array([slope(v) for v in kept])
        np.testing.assert_allclose(slopes, want, rtol=rtol, atol=16 * eps * floor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_even_derivatives_of_digamma_keep_their_digits_half_way_between_poles(dtype: str) -> None:
    half = np.arange(-30, 0).astype(dtype) + np.array(0.5, dtype)
    (found, _) = values_and_slopes(lambda x: gf.polygamma(2, x), half)
    # ψ″(x) = ψ″(1 - x) at half-way points, where the cotangent's second derivative is 0
    (mirrored, _) = values_and_slopes(lambda x: gf.polygamma(2, x), 1 - half)
    np.testing.assert_allclose(found, mirrored, rtol=64 * float(np.finfo(dtype).eps))


# Of two numbers ---------------------------------------------------------------------------------


def pairs(dtype: str) -> list[tuple[float, float]]:
    big, small = float(np.finfo(dtype).max), float(np.finfo(dtype).tiny)
    sizes = (1.0, big, big / 3, math.sqrt(big) * 4, small, small * 8, math.sqrt(small) / 4)
    return [(s * a, t * b) for a in sizes for b in sizes for s in (1, -1) for t in (1, -1)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes_of_hypot_and_atan2_survive_squares_out_of_range(dtype: str) -> None:
    a, b = np.array(pairs(dtype), dtype).T
    rtol = 32 * float(np.finfo(dtype).eps)
    la, lb = a.astype(np.longdouble), b.astype(np.longdouble)
    y = np.hypot(la, lb)
    _, da, db = values_and_slopes(gf.hypot, a, b)
    tiny = float(np.finfo(dtype).tiny)
    np.testing.assert_allclose(da, la / y, rtol=rtol, atol=tiny)
    np.testing.assert_allclose(db, lb / y, rtol=rtol, atol=tiny)
    _, da, db = values_and_slopes(gf.atan2, a, b)
    with np.errstate(over="ignore"):
        for found, exact in ((da, lb / y / y), (db, -la / y / y)):
            np.testing.assert_allclose(found, exact.astype(dtype), rtol=rtol, atol=tiny)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes_of_hypot_and_atan2_at_infinity_and_0(dtype: str) -> None:
    a, b = np.array([(INF, 1), (1, -INF), (-INF, INF), (0, 0)], dtype).T
    _, da, db = values_and_slopes(gf.hypot, a, b)
    np.testing.assert_allclose(da, [1, 0, -math.sqrt(0.5), 0], rtol=1e-6, atol=1e-30)
    np.testing.assert_allclose(db, [0, -1, math.sqrt(0.5), 0], rtol=1e-6, atol=1e-30)
    _, da, db = values_and_slopes(gf.atan2, a, b)
    np.testing.assert_allclose([da, db], np.zeros((2, 4)), atol=1e-30)


@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes_of_powers_are_finite_where_the_power_is_0_or_vanishes(dtype: str) -> None:
    a = np.array([INF, -INF, 0, INF], dtype)
    b = np.array([0, 0, 0, -1], dtype)
    _, da, db = values_and_slopes(gf.pow, a, b)
    assert da.tolist() == [0, 0, 0, 0]
    assert db[1:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_slopes_of_logsumexp_are_0_in_a_row_of_minus_infinity_and_1_at_infinity(dtype: str) -> None:
    x = np.array([[-INF, -INF], [INF, 1], [-INF, 2]], dtype)
    found, slopes = values_and_slopes(lambda x: gf.logsumexp(x, axis=1), x)
    assert found.tolist() == [-INF, INF, 2]
    assert slopes.tolist() == [[0, 0], [1, 0], [0, 1]]
