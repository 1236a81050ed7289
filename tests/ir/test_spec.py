"""Sizes as polynomials, shapes that broadcast, dtypes that promote."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import DTypeError, GraphError, ShapeError
from graphflow.ir.spec import (
    DTYPES,
    Dim,
    Size,
    TensorSpec,
    as_dtype,
    broadcast_shapes,
    equate,
    evaluate,
    floordiv,
    is_inexact,
    kind,
    maximum,
    minimum,
    normalize_shape,
    product,
    promote,
    record_equations,
    show_shape,
    spec,
    symbols,
)

N, M = Dim.symbol("n"), Dim.symbol("m")
BINDINGS = st.fixed_dictionaries({"n": st.integers(1, 9), "m": st.integers(1, 9)})
LEAVES = st.sampled_from([N, M]) | st.integers(-4, 6)
SIZES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(lambda ab: ab[0] + ab[1]),
        st.tuples(inner, inner).map(lambda ab: ab[0] - ab[1]),
        st.tuples(inner, inner).map(lambda ab: ab[0] * ab[1]),
        st.tuples(inner, inner).map(lambda ab: minimum(*ab)),
        st.tuples(inner, inner).map(lambda ab: maximum(*ab)),
    ),
    max_leaves=6,
)


@given(SIZES, SIZES, BINDINGS)
def test_evaluation_commutes_with_arithmetic(a: Size, b: Size, bindings: dict[str, int]) -> None:
    x, y = evaluate(a, bindings), evaluate(b, bindings)
    assert evaluate(a + b, bindings) == x + y
    assert evaluate(a - b, bindings) == x - y
    assert evaluate(a * b, bindings) == x * y
    assert evaluate(-a, bindings) == -x
    assert evaluate(minimum(a, b), bindings) == min(x, y)
    assert evaluate(maximum(a, b), bindings) == max(x, y)
    if y:
        assert evaluate(floordiv(a, b), bindings) == x // y


@given(SIZES, SIZES, SIZES)
def test_polynomials_have_one_form(a: Size, b: Size, c: Size) -> None:
    assert (a + b) * c == a * c + b * c
    assert a + b == b + a and a * b == b * a
    assert a - a == 0
    assert hash((a + b) * c) == hash(a * c + b * c)


@given(SIZES, st.sampled_from([1, 2, 6, N, 3 * N, N * M]))
def test_a_product_divides_exactly_by_its_factors(a: Size, b: Size) -> None:
    assert floordiv(a * b, b) == a


@given(SIZES, BINDINGS)
def test_a_size_depends_on_no_other_symbol_than_it_names(a: Size, bindings: dict[str, int]) -> None:
    assert set(symbols(a)) <= {"n", "m"}
    assert evaluate(a, {k: v for k, v in bindings.items() if k in set(symbols(a))}) == evaluate(
        a, bindings
    )


def test_constants_are_plain_ints_and_sizes_print_as_written() -> None:
    assert (N + 2) - N == 2 and isinstance((N + 2) - N, int)
    assert repr(2 * N + 1) == "2*n + 1" and repr(-N) == "-n" and repr(M - 3 * N) == "m - 3*n"
    assert repr((N + 1) // 2 * 3) == "3*((n + 1) // 2)" and repr(7 // (2 * N)) == "(7 // (2*n))"
    assert show_shape((N, 64)) == "(n, 64)" and show_shape((3,)) == "(3,)"
    assert N // 2 != N and floordiv(7, N) == 7 // N


def test_each_unnamed_size_is_equal_to_no_other_and_shown_as_users_write_it() -> None:
    a, b = normalize_shape((None, None), of="x")
    assert a != b and a == a and a != normalize_shape(None, of="x")[0]
    assert normalize_shape(("n", 3)) == (N, 3)
    assert repr(a * b - 1) == "x.shape[0]*x.shape[1] - 1"
    assert repr(spec("float32", (None, 3))) == "float32(None, 3)"
    with gf.name_scope("tower"):
        assert str(gf.placeholder("float32", (None,), name="x").shape[0]) == "tower/x.shape[0]"


def test_only_what_is_fed_may_have_any_size() -> None:
    with pytest.raises(ShapeError, match=r"test_spec\.py:\d+.*None is any size.*x\.shape\[0\]"):
        gf.zeros((None, 3))


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "2n", "", object()])
def test_what_is_no_size_is_refused(wrong: object) -> None:
    with pytest.raises(ShapeError):
        normalize_shape((wrong,))


SHAPES = st.lists(st.integers(0, 3), max_size=4).map(tuple)


@given(SHAPES, SHAPES)
def test_known_shapes_broadcast_as_numpys(a: tuple[int, ...], b: tuple[int, ...]) -> None:
    try:
        wanted = np.broadcast_shapes(a, b)
    except ValueError:
        with pytest.raises(ShapeError, match="do not broadcast"):
            broadcast_shapes(a, b)
    else:
        assert broadcast_shapes(a, b) == wanted


def test_a_symbol_broadcasts_with_itself_or_one_and_else_is_equated() -> None:
    with record_equations() as equations:
        assert broadcast_shapes((N, 3), (1, 3)) == (N, 3)
        assert broadcast_shapes((N, 3), (N, 1)) == (N, 3)
    assert equations == []
    with record_equations() as equations:
        assert broadcast_shapes((N, 1), (M, 4)) == (N, 4)
        assert broadcast_shapes((N,), (7,)) == (7,)
    assert equations == [(N, M), (N, 7)]


def test_equating_known_sizes_that_differ_names_both() -> None:
    with pytest.raises(ShapeError, match="rows: 3 != 4"):
        equate(3, 4, "rows")


def test_specs_bind_and_count() -> None:
    x = spec("float64", ("n", 3))
    assert x.rank == 2 and x.size == 3 * N and x.nbytes == 24 * N and not x.is_concrete
    assert x.bind({"n": 5}) == TensorSpec((5, 3), np.dtype("float64"))
    assert repr(x) == "float64(n, 3)" and product(()) == 1
    with pytest.raises(KeyError):
        x.bind({"m": 5})


@pytest.mark.parametrize("wrong", ["clongdouble", "object", "U3", None, "float99", "datetime64[s]"])
def test_other_dtypes_are_refused_with_the_list(wrong: object) -> None:
    with pytest.raises(DTypeError, match="use one of bool"):
        as_dtype(wrong)


# Python array API standard, "Type Promotion Rules": smallest type that holds both.
MIXED_INTS = {
    ("int8", "uint8"): "int16", ("int8", "uint16"): "int32", ("int8", "uint32"): "int64",
    ("int16", "uint8"): "int16", ("int16", "uint16"): "int32", ("int16", "uint32"): "int64",
    ("int32", "uint8"): "int32", ("int32", "uint16"): "int32", ("int32", "uint32"): "int64",
    ("int64", "uint8"): "int64", ("int64", "uint16"): "int64", ("int64", "uint32"): "int64",
}  # fmt: skip


def promoted_floats(a: str, b: str) -> str:
    """The smallest float or complex dtype that holds both; a complex one has parts of 32 bits or
    more."""
    if a == b:
        return a
    bits = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64, "complex64": 32,
            "complex128": 64}  # fmt: skip
    most = max(bits[a], bits[b], 32)
    return f"complex{2 * most}" if "complex" in a + b else f"float{most}"


@pytest.mark.parametrize("a, b", list(itertools.product(DTYPES, DTYPES)))
def test_dtypes_promote_by_the_array_api_table(a: str, b: str) -> None:
    x, y = np.dtype(a), np.dtype(b)
    if is_inexact(x) and is_inexact(y):
        assert promote(x, y) == promote(y, x) == np.dtype(promoted_floats(a, b))
        return
    kinds_differ = kind(x) != kind(y)
    if kinds_differ or ({a[:1], b[:1]} == {"i", "u"} and "uint64" in (a, b)):
        with pytest.raises(DTypeError, match="do not mix"):
            promote(x, y)
        return
    mixed = MIXED_INTS.get((a, b)) or MIXED_INTS.get((b, a))
    assert promote(x, y) == (mixed or max(x, y, key=lambda d: d.itemsize))


@pytest.mark.parametrize(
    "asked",
    [int, float, range, np.zeros, lambda n: n < 3, lambda n: n <= 3, lambda n: max(n, 1)],
)
def test_a_size_known_by_name_only_is_no_number_and_says_so_on_the_users_line(
    asked: Callable[[Any], Any],
) -> None:
    with pytest.raises(GraphError, match=r"test_spec\.py:\d+: the size n is a number when a step"):
        asked(Dim.symbol("n"))


@pytest.mark.parametrize(
    ("asked", "op"),
    [
        (lambda n: n / 2, "divide"),
        (lambda n: 2 / n, "divide"),
        (lambda n: n % 2, "remainder"),
        (lambda n: n * 2.5, "multiply"),
        (lambda n: np.float32(2) * n, "multiply"),
        (lambda n: n + 0.5, "add"),
        (lambda n: 0.5 - n, "subtract"),
        (lambda n: n - 0.5, "subtract"),
        (lambda n: n // 0.5, "floor_divide"),
        (lambda n: 0.5 // n, "floor_divide"),
        (lambda n: n**2, "pow"),
    ],
)
def test_sizes_go_by_whole_numbers_only(asked: Callable[[Any], Any], op: str) -> None:
    told = rf"test_spec\.py:\d+: the size n, which only a feed fixes, .* use gf\.{op}$"
    with pytest.raises(GraphError, match=told):
        asked(Dim.symbol("n"))
    x = gf.placeholder("float32", ("n",))
    assert asked(x).shape == x.shape and hasattr(gf, op)  # a tensor, with any number
    assert (x.shape[0] / x).shape == (x.shape[0] * x).shape == x.shape  # a tensor takes sizes
