"""Tensors out of nothing, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import FUNCTIONS as G


@given(st.integers(-9, 9), st.integers(-9, 9), st.integers(-4, 4).filter(bool))
def test_arange_of_ints_is_numpys(start: int, stop: int, step: int) -> None:
    (value,) = evaluate([G["arange"](start, stop, step)])
    np.testing.assert_array_equal(value, np.arange(start, stop, step))
    assert value.dtype == np.int64


@given(st.integers(1, 12), st.integers(0, 4), st.integers(1, 3))
def test_arange_counts_unknown_sizes(n: int, start: int, step: int) -> None:
    x = placeholder("float32", ("n",))
    up, down = G["arange"](start, x.shape[0], step), G["arange"](x.shape[0], start, -step)
    values = evaluate([up, down, x], {x: np.zeros(n, "float32")})
    np.testing.assert_array_equal(values[0], np.arange(start, n, step))
    np.testing.assert_array_equal(values[1], np.arange(n, start, -step))


def test_filled_tensors_take_the_shape_of_others() -> None:
    x = placeholder("float32", ("n", 2))
    y = G["zeros"](x.shape) + G["ones"]((x.shape[0], 1)) * 2.0
    assert y.shape == x.shape
    value, _ = evaluate([y, x], {x: np.zeros((3, 2), "float32")})
    np.testing.assert_array_equal(value, np.full((3, 2), 2, "float32"))


def test_full_takes_the_dtype_of_its_value_unless_told() -> None:
    assert G["full"](2, 1).dtype == "int64"
    assert G["full"](2, 1.5).dtype == "float32"
    assert G["full"](2, True).dtype == "bool"
    assert G["full"](2, 1, "float16").dtype == "float16"
    assert G["full"]((2, 3), placeholder("int8")).shape == (2, 3)


def test_eye_linspace_and_float_arange_are_numpys() -> None:
    values = evaluate(
        [G["eye"](3, 5, k=-1), G["linspace"](0, 1, 7, dtype="float64"), G["arange"](0.0, 1.0, 0.25)]
    )
    np.testing.assert_array_equal(values[0], np.eye(3, 5, k=-1))
    np.testing.assert_array_equal(values[1], np.linspace(0, 1, 7))
    np.testing.assert_array_equal(values[2], np.arange(0, 1, 0.25, "float32"))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: G["arange"](0, 5, 0), ArgumentError, "step"),
        (lambda: G["arange"]("5"), ArgumentError, "numbers"),
        (lambda: G["zeros"]((-1,)), ShapeError, "not negative"),
        (lambda: G["zeros"](2, "complex256"), DTypeError, "complex256"),
        (lambda: G["full"](2, 0.5, "int32"), DTypeError, "0.5"),
        (lambda: G["full"](2, 300, "uint8"), DTypeError, "range"),
        (lambda: G["linspace"](0, 1, -1), ArgumentError, "-1"),
    ],
)
def test_mistakes_name_the_line_and_the_value(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_creation\.py:\d+.*{words}"):
        call()


@pytest.mark.parametrize(
    "build",
    [
        lambda k: G["eye"](3, k=k),
        lambda k: G["tril"](np.ones((3, 3)), k=k),
        lambda k: G["triu"](np.ones((3, 3)), k=k),
    ],
)
@pytest.mark.parametrize("k", [1.5, None, True, {1}])
def test_the_number_of_a_diagonal_is_an_int(build: Any, k: Any) -> None:
    with pytest.raises(ArgumentError, match=r"test_creation\.py.*k must be an int, not"):
        build(k)
