"""The gamma function's logarithm and its derivatives, and the error function's kin, against
Python's own and against what is known of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError
from graphflow.frontend.interpreter import evaluate

DTYPES = ["float32", "float64"]


def value(x: Any) -> Any:
    return evaluate([x])[0]


def ulps(found: Any, exact: Any, least: float = 0.0) -> float:
    """How many units of the last place a result is off, at most; of that of `least` where it is
    smaller."""
    unit = np.spacing(np.maximum(np.abs(exact), least).astype(found.dtype))
    close = np.abs(found.astype("float64") - exact) / unit
    return float(np.max(np.where(found == exact, 0, close)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_logarithm_of_gamma_is_right_to_a_few_ulp(dtype: str) -> None:
    far = np.concatenate([np.linspace(2.2, 30, 800), np.logspace(1, 30, 100)])
    low = np.concatenate([np.logspace(-30, -0.2, 200), np.linspace(1.2, 1.8, 100)])
    x = np.concatenate([low, far, -np.linspace(0.01, 1.99, 100), [-4.5, -7.25]]).astype(dtype)
    exact = np.array([math.lgamma(v) for v in x.tolist()])  # to a few ulp of 1
    assert ulps(value(gf.lgamma(x)), exact, least=1.0) <= 8
    # Near its zeros Python's is not exact; it goes through 1 with slope -γ, and 2 with 1 - γ.
    z = np.spacing(np.ones(3, dtype)) * np.array([64, -64, 512], dtype)
    for at, slope in ((1, -np.euler_gamma), (2, 1 - np.euler_gamma)):
        want = slope * z.astype("float64") + (math.pi**2 / 12 - (at - 1) / 2) * z.astype(float) ** 2
        assert ulps(value(gf.lgamma(at + z)), want) <= 4
    odd = np.array([0.0, -1, -2, np.inf, -np.inf, np.nan, 1, 2], dtype)
    assert value(gf.lgamma(odd)).tolist()[:5] == [np.inf] * 5
    assert np.isnan(value(gf.lgamma(odd))[5]) and value(gf.lgamma(odd))[6:].tolist() == [0, 0]


@pytest.mark.parametrize("dtype, close", [("float32", 3e-6), ("float64", 1e-13)])
def test_its_derivatives_obey_what_is_known_of_them(dtype: str, close: float) -> None:
    x = np.concatenate([np.linspace(0.1, 30, 200), -np.linspace(0.1, 4, 79) - 0.02]).astype(dtype)
    for n in (0, 1, 2, 7):
        here, there = (value(gf.polygamma(n, at)) for at in (x, x + x.dtype.type(1)))
        step = (-1) ** n * math.factorial(n) / (x.astype("float64") ** (n + 1))
        scale = np.abs(here) + np.abs(there) + np.abs(step)
        assert np.max(np.abs(there - here - step) / scale) < close * 30
    at = [value(gf.polygamma(n, np.ones((), dtype))) for n in (0, 1, 3)]
    np.testing.assert_allclose(at, [-np.euler_gamma, math.pi**2 / 6, math.pi**4 / 15], rtol=close)
    odd = value(gf.digamma(np.array([0.0, -1, -3, np.inf], dtype)))
    assert odd[0] == -np.inf and np.isnan(odd[1:3]).all() and odd[3] == np.inf
    assert value(gf.polygamma(1, np.array([0.0, -2, np.inf], dtype))).tolist() == [np.inf] * 2 + [0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_complement_of_the_error_function_keeps_its_digits(dtype: str) -> None:
    x = np.linspace(-7, 9 if dtype == "float32" else 26, 1500).astype(dtype)
    assert ulps(value(gf.erfc(x)), np.array([math.erfc(v) for v in x.tolist()])) <= 6
    odd = value(gf.erfc(np.array([-np.inf, np.inf, 60, np.nan], dtype)))
    assert odd[:3].tolist() == [2, 0, 0] and np.isnan(odd[3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_inverse_of_the_error_function_leads_back(dtype: str) -> None:
    y = np.concatenate([np.linspace(-2.5, 2.5, 400), np.logspace(-30, -1, 60), [2.9, 3.4]])
    x = np.array([math.erf(v) for v in y]).astype(dtype)
    found = value(gf.erfinv(x)).astype("float64")
    # An ulp of x is so much of y.
    step = np.spacing(np.abs(x)).astype("float64") * math.sqrt(math.pi) / 2 * np.exp(y * y)
    assert np.max(np.abs(found - y) / (step + 4 * np.spacing(np.abs(y).astype(dtype)))) < 1
    odd = value(gf.erfinv(np.array([1, -1, 1.5, np.nan, 0], dtype)))
    assert odd[:2].tolist() == [np.inf, -np.inf] and np.isnan(odd[2:4]).all() and odd[4] == 0


def test_an_order_that_is_none_is_refused_on_the_users_line() -> None:
    for n in (-1, 21, 1.0, True):
        with pytest.raises(
            ArgumentError, match=r"polygamma at .*test_special\.py:\d+: n (is|must be) an int"
        ):
            gf.polygamma(n, np.ones(3))  # type: ignore[arg-type]
