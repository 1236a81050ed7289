"""Bits, shifts and the arithmetic of every int dtype, against numpy."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import graphflow as gf
from graphflow.errors import DTypeError
from graphflow.frontend.interpreter import evaluate

INTS = ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]


def value(x: Any) -> Any:
    return evaluate([x])[0]


@st.composite
def pairs(draw: Any, dtypes: Any = tuple(INTS)) -> tuple[Any, Any]:
    dtype = draw(st.sampled_from(dtypes))
    each = arrays.arrays(dtype, (3, 2), elements=arrays.from_dtype(np.dtype(dtype)))
    return draw(each), draw(each)


@given(pairs((*INTS, "bool")))
def test_bits_are_numpys_and_operators_mean_them(pair: Any) -> None:
    a, b = pair
    x, y = gf.constant(a), gf.constant(b)
    for symbol in (operator.and_, operator.or_, operator.xor):
        np.testing.assert_array_equal(value(symbol(x, y)), symbol(a, b))
    np.testing.assert_array_equal(value(~x), ~a)
    np.testing.assert_array_equal(value(gf.bitwise_and(a, b)), a & b)


@given(pairs(), st.integers(0, 7))
def test_shifts_are_numpys(pair: Any, by: int) -> None:
    a, _ = pair
    x = gf.constant(a)
    amount = np.array(by, a.dtype)
    np.testing.assert_array_equal(value(x << by), np.left_shift(a, amount))
    np.testing.assert_array_equal(value(x >> by), np.right_shift(a, amount))
    np.testing.assert_array_equal(
        value(1 << gf.constant(amount)), np.left_shift(a.dtype.type(1), amount)
    )


@pytest.mark.parametrize("dtype", INTS)
def test_shifting_all_bits_out_leaves_zero_or_the_sign(dtype: str) -> None:
    bits = np.dtype(dtype).itemsize * 8
    x = gf.constant(np.array([1, 100], dtype))
    assert value(x << bits).tolist() == value(x >> bits).tolist() == [0, 0]
    if dtype.startswith("int"):
        assert value(gf.constant(np.array([-5], dtype)) >> bits).tolist() == [-1]


ARITHMETIC = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "maximum": np.maximum,
    "minimum": np.minimum, "floor_divide": np.floor_divide, "remainder": np.remainder,
    "fmod": np.fmod, "less": np.less, "equal": np.equal,
}  # fmt: skip


@given(pairs())
def test_ints_compute_as_numpy_does_in_their_own_dtype(pair: Any) -> None:
    a, b = pair
    with np.errstate(all="ignore"):
        for name, ufunc in ARITHMETIC.items():
            have, want = value(getattr(gf, name)(a, b)), ufunc(a, b)
            assert have.dtype == want.dtype, name
            np.testing.assert_array_equal(have, want, name)
        for name in ("abs", "sign", "square", "negative"):
            have = value(getattr(gf, name)(a))
            assert have.dtype == a.dtype
            np.testing.assert_array_equal(have, getattr(np, name)(a), name)


@pytest.mark.parametrize("dtype", ["int32", "int8", "float32", "float64"])
def test_fmod_has_the_sign_of_the_dividend_and_remainder_that_of_the_divisor(dtype: str) -> None:
    a = np.array([-4, 7, 5, 4, -7, 8], dtype)
    b = np.array([2, -3, 8, -2, 3, 5], dtype)
    assert value(gf.fmod(a, b)).tolist() == [0, 1, 5, 0, -1, 3]
    assert value(gf.remainder(a, b)).tolist() == [0, -2, 5, 0, 2, 3]


@given(arrays.arrays("float32", (4,)))
def test_bits_survive_a_cast_and_back(x: Any) -> None:
    bits = gf.bitcast(x, "uint32")
    np.testing.assert_array_equal(value(bits), x.view("uint32"))
    assert value(gf.bitcast(bits, "float32")).tobytes() == x.tobytes()


def test_bits_run_in_a_session() -> None:
    x = gf.placeholder("float32", ("n",))
    parity = (gf.bitcast(x, "int32") >> 23) & 0xFF
    with gf.Session() as session:
        data = np.array([1.0, 2.0, 0.25, 3.5], "float32")
        assert session.run(parity, {x: data}).tolist() == [127, 128, 125, 128]


I = np.array([1, 2])  # noqa: E741
F = np.array([1.0, 2.0], "float32")


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda: gf.constant(F) & gf.constant(F), "bitwise_and at .*bool or int"),
        (lambda: ~gf.constant(F), "bitwise_invert at .*bool or int"),
        (lambda: gf.constant(I) << gf.constant(F), "do not mix"),
        (lambda: gf.constant(I > 0) << 1, "does not fit bool"),
        (lambda: gf.bitwise_right_shift(I > 0, I > 0), "int"),
        (lambda: gf.constant(I) | (I > 0), "do not mix"),
        (lambda: gf.bitcast(F, "int64"), "32 bits, int64 has 64"),
        (lambda: gf.bitcast(np.array([7], "uint8"), "bool"), "compare it with 0"),
        (lambda: gf.bitcast(F, "nonsense"), "nonsense"),
    ],
)
def test_mistakes_name_the_line(call: Any, words: str) -> None:
    with pytest.raises(DTypeError, match=words) as error:
        call()
    assert "test_bitwise.py" in str(error.value)
