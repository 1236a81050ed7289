"""Where graphs begin: placeholders, variables, constants, assignments, initial values."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError, VariableError
from graphflow.ir.spec import DTYPES


def test_a_placeholder_takes_ints_none_and_names_as_sizes() -> None:
    x = gf.placeholder("float32", (3, None, "n"))
    assert x.shape[0] == 3 and str(x.shape[2]) == "n" and x.ndim == 3
    assert gf.placeholder(np.int8, 5).shape == (5,)
    assert gf.placeholder("bool").shape == ()
    a, b = gf.placeholder("bool", (None,)), gf.placeholder("bool", (None,))
    assert a.shape != b.shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_variable_keeps_dtype_and_shape_of_its_array(dtype: str) -> None:
    v = gf.variable(np.ones((2, 0, 3), dtype))
    assert (v.dtype, v.shape) == (np.dtype(dtype), (2, 0, 3))


def test_plain_floats_become_float32_and_plain_ints_stay_int64() -> None:
    assert gf.variable(1.5).dtype == gf.variable([1.5]).dtype == "float32"
    assert gf.variable([1]).dtype == "int64"
    assert gf.variable(np.float64(1.5)).dtype == "float64"
    assert gf.variable([1, 2], dtype="float64").dtype == "float64"
    assert gf.constant([0.5]).dtype == "float32"


def test_initial_values_and_constants_are_copies() -> None:
    array = np.array([1.0, 2.0], ">f8")
    v, c = gf.variable(array), gf.constant(array)
    array[:] = 0
    with gf.Session() as s:
        assert s.get(v).tolist() == s.run(c).tolist() == [1, 2]


def test_assign_takes_plain_values_by_the_rules_of_feeds() -> None:
    v = gf.variable([1.0, 2.0])
    n = gf.variable(np.int64(1))
    with gf.Session() as s:
        assert s.run(gf.assign(v, [3, 4])).tolist() == [3, 4]
        assert s.run(gf.assign(v, np.array([5.0, 6.0]))).tolist() == [5, 6]
        assert s.run(gf.assign(n, 7)) == 7


@pytest.mark.parametrize(
    ("make", "low", "high"),
    [
        (lambda: gf.init.zeros((50, 40)), 0, 0),
        (lambda: gf.init.ones([50, 40], "float64"), 1, 1),
        (lambda: gf.init.full((50, 40), -2.5), -2.5, -2.5),
        (lambda: gf.init.uniform((50, 40), -1, 3), -1, 3),
        (lambda: gf.init.normal((50, 40), 1.0, 0.5), -2, 4),
        (lambda: gf.init.glorot((50, 40)), -np.sqrt(6 / 90), np.sqrt(6 / 90)),
        (lambda: gf.init.he((50, 40)), -5 * np.sqrt(2 / 50), 5 * np.sqrt(2 / 50)),
    ],
)
def test_initializers_draw_what_they_say_and_the_same_under_a_seed(
    make: Any, low: float, high: float
) -> None:
    with gf.random.seed(1):
        first, second = make(), make()
    with gf.random.seed(1):
        again = make()
    value = first()
    assert value.shape == (50, 40) and value.dtype == first.dtype
    assert low <= value.min() and value.max() <= high
    assert np.array_equal(value, first()) and np.array_equal(value, again())
    if low != high:
        assert not np.array_equal(value, second())
        assert value.mean() == pytest.approx((low + high) / 2, abs=(high - low) / 20)


def test_infinity_may_fill_a_variable() -> None:
    assert gf.init.full((2,), -np.inf)().tolist() == [-np.inf, -np.inf]
    assert gf.init.full((), 2**40, "int64")() == 2**40
    assert gf.init.full((), True, "bool")() == True  # noqa: E712


MISTAKES: list[tuple[type[Exception], Any, str]] = [
    (ShapeError, lambda: gf.placeholder("float32", (-1,)), "not negative"),
    (ShapeError, lambda: gf.placeholder("float32", (2.5,)), "2.5"),
    (ShapeError, lambda: gf.placeholder("float32", 2.5), "tuple of sizes"),
    (ShapeError, lambda: gf.placeholder("float32", ("a b",)), "identifier"),
    (ShapeError, lambda: gf.placeholder("float32", (True,)), "True"),
    (DTypeError, lambda: gf.placeholder("complex256"), "complex256"),
    (DTypeError, lambda: gf.placeholder(None), "None"),
    (DTypeError, lambda: gf.placeholder((None, 3)), "gf.placeholder('float32', (None, 3))"),
    (DTypeError, lambda: gf.placeholder({"a": 1}), "not supported"),
    (ArgumentError, lambda: gf.placeholder("bool", name=3), "name is a str"),
    (ArgumentError, lambda: gf.variable(1.0, name=""), "name is a str"),
    (ArgumentError, lambda: gf.variable(1.0, trainable=1), "True or False"),
    (VariableError, lambda: gf.variable(gf.constant(1.0)), "is a tensor"),
    (DTypeError, lambda: gf.variable([gf.constant(1.0)]), "no array"),
    (DTypeError, lambda: gf.variable([[1], [1, 2]]), "no array"),
    (DTypeError, lambda: gf.variable("one"), "not supported"),
    (DTypeError, lambda: gf.variable(None), "not supported"),
    (DTypeError, lambda: gf.variable(1.0, dtype="float8"), "not supported"),
    (DTypeError, lambda: gf.variable(gf.init.zeros(2), dtype="float8"), "not supported"),
    (DTypeError, lambda: gf.constant({}), "dict"),
    (DTypeError, lambda: gf.constant([[1], [1, 2]]), "no regular array"),
    (DTypeError, lambda: gf.constant(1.0, "float8"), "not supported"),
    (ArgumentError, lambda: gf.constant(gf.constant(1.0), name="c"), "tensor already"),
    (VariableError, lambda: gf.assign(gf.constant(1.0), 2.0), "not a variable"),
    (VariableError, lambda: gf.assign(np.ones(2), 2.0), "not a variable"),
    (DTypeError, lambda: gf.assign(gf.variable(np.int64(1)), 1.5), "float64"),
    (DTypeError, lambda: gf.assign(gf.variable(1.0), gf.constant(np.float64(1))), "astype"),
    (ShapeError, lambda: gf.assign(gf.variable([1.0, 2.0]), [1.0]), "2 != 1"),
    (ShapeError, lambda: gf.assign(gf.variable([1.0, 2.0]), 1.0), "ranks differ"),
    (ShapeError, lambda: gf.init.zeros((None,)), "must be ints"),
    (ShapeError, lambda: gf.init.zeros(None), "must be ints"),
    (ShapeError, lambda: gf.init.glorot((None, 4)), "must be ints"),
    (ShapeError, lambda: gf.init.he("n"), "must be ints"),
    (DTypeError, lambda: gf.init.zeros((2,), "float8"), "not supported"),
    (DTypeError, lambda: gf.init.normal((2,), dtype="int32"), "need a float dtype"),
    (ArgumentError, lambda: gf.init.normal((2,), std=-1.0), "negative"),
    (ArgumentError, lambda: gf.init.normal((2,), mean=np.nan), "finite"),
    (ArgumentError, lambda: gf.init.uniform((2,), 2.0, 1.0), "above high"),
    (ArgumentError, lambda: gf.init.uniform((2,), "a"), "finite numbers"),
    (ArgumentError, lambda: gf.init.full((2,), "x"), "not a value of dtype"),
    (ArgumentError, lambda: gf.init.full((2,), 1.5, "int64"), "not a value of dtype"),
    (ArgumentError, lambda: gf.init.full((2,), 300, "uint8"), "not a value of dtype"),
    (ArgumentError, lambda: gf.init.full((2,), np.nan, "int64"), "not a value of dtype"),
]


@pytest.mark.parametrize(("error", "wrong", "told"), MISTAKES)
def test_a_mistake_is_told_where_it_is_made(error: type[Exception], wrong: Any, told: str) -> None:
    with pytest.raises(error, match=r"test_builders\.py:\d+: .*") as caught:
        wrong()
    assert told in str(caught.value)


def test_a_name_that_checkpoints_cannot_hold_is_refused_on_the_users_line() -> None:
    with pytest.raises(
        ArgumentError, match=r"test_builders.py:\d+.*'__metadata__'.*choose another"
    ):
        gf.variable(1.0, name="__metadata__")
    with gf.name_scope("model"):
        assert gf.variable(1.0, name="__metadata__").name
