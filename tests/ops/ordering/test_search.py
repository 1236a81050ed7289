"""Searching with stated sizes, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import graphflow as gf
from graphflow.errors import ArgumentError, CheckError, DTypeError, OpError, ShapeError
from graphflow.frontend.interpreter import evaluate

shapes = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
small = arrays.arrays("int32", shapes, elements=st.integers(-1, 3))


@given(small, st.integers(0, 3))
def test_nonzero_is_numpys_padded(x: Any, extra: int) -> None:
    wanted = np.nonzero(x)
    size = len(wanted[0]) + extra
    places, count = gf.nonzero(x, size, fill=-7)
    values = evaluate([*places, count])
    assert values[-1] == len(wanted[0])
    for have, want in zip(values[:-1], wanted, strict=True):
        np.testing.assert_array_equal(have, np.append(want, [-7] * extra))
    axis = x.ndim - 1
    (total,) = evaluate([gf.count_nonzero(x, axis)])
    np.testing.assert_array_equal(total, np.count_nonzero(x, axis))


@given(small, st.integers(0, 3), st.data())
def test_compress_is_numpys_padded(x: Any, extra: int, data: Any) -> None:
    axis = data.draw(st.none() | st.integers(0, x.ndim - 1))
    n = x.size if axis is None else x.shape[axis]
    condition = data.draw(arrays.arrays(bool, st.integers(0, n).map(lambda k: (k,))))
    wanted = np.compress(condition, x, axis)
    size = int(condition.sum()) + extra
    values, count = evaluate(gf.compress(condition, x, size, axis, fill=9))
    assert count == condition.sum()
    along = 0 if axis is None else axis
    np.testing.assert_array_equal(np.take(values, range(count), along), wanted)
    assert (np.take(values, range(count, size), along) == 9).all()


@given(small, st.integers(0, 3), st.booleans(), st.data())
def test_unique_is_numpys_padded(x: Any, extra: int, ascending: bool, data: Any) -> None:
    axis = data.draw(st.none() | st.integers(0, x.ndim - 1))
    if axis is not None and x.size == 0:
        return
    wanted = np.unique(x, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    values, first, inverse, counts = wanted
    inverse = inverse.reshape(x.shape if axis is None else (-1,))
    along = axis or 0
    if not ascending:
        order = np.argsort(first)
        values, first, counts = np.take(values, order, along), first[order], counts[order]
        inverse = np.argsort(order)[inverse]
    n = len(first)
    found = gf.unique_all(x, n + extra, fill=5, sorted=ascending, axis=axis)
    have = evaluate(list(found))
    assert have[4] == n
    np.testing.assert_array_equal(np.take(have[0], range(n), along), values)
    assert (np.take(have[0], range(n, n + extra), along) == 5).all()
    np.testing.assert_array_equal(have[1][:n], first)
    np.testing.assert_array_equal(have[2], inverse)
    np.testing.assert_array_equal(have[3], np.append(counts, [0] * extra))


def test_of_nothing_the_padding_remains_where_the_size_is_not_known() -> None:
    x, row = gf.placeholder("int64", (None, 2)), gf.placeholder("bool", (None,))
    found = gf.unique_all(x, 3, fill=7, axis=0)
    chosen, count = gf.compress(row, x, 2, axis=0, fill=5)
    feeds = {x: np.ones((0, 2), "int64"), row: np.ones(0, bool)}
    with gf.Session() as s:
        values, number, rows, kept = s.run([found.values, found.number, chosen, count], feeds)
        (some,) = s.run([found.values], {x: np.array([[2, 1], [2, 1], [0, 3]])})
    assert values.tolist() == [[7, 7]] * 3 and rows.tolist() == [[5, 5]] * 2
    assert number == kept == 0
    assert some.tolist() == [[0, 3], [2, 1], [7, 7]]


def test_the_parts_of_unique_are_those_of_the_whole() -> None:
    x = np.array([3, 1, 3])
    values, number = evaluate(gf.unique_values(x, 3))
    assert values.tolist() == [1, 3, 0] and number == 2
    assert evaluate(gf.unique_inverse(x, 2))[1].tolist() == [1, 0, 1]
    assert evaluate(gf.unique_counts(x, 2, sorted=False))[1].tolist() == [2, 1]


def test_each_nan_is_one_of_its_own_as_the_array_api_has_it() -> None:
    x = np.array([np.nan, 1.0, np.nan])
    values, number = evaluate(gf.unique_values(x, 3))
    assert number == 3 and np.isnan(values[1:]).all()


def test_the_gradient_of_distinct_values_goes_to_where_they_occur_first() -> None:
    x = gf.placeholder("float64", (None,))
    values, _ = gf.unique_values(x, 4)
    chosen, _ = gf.compress(gf.constant(np.array([False, True, True, False])), x, 3)
    slopes = gf.gradients(gf.sum(values * np.array([1.0, 2, 3, 4])), [x])
    slopes += gf.gradients(gf.sum(chosen * np.array([1.0, 2, 3])), [x])
    a, b = evaluate(slopes, {x: np.array([5.0, 2, 5, 2])})
    assert a.tolist() == [2, 1, 0, 0]
    assert b.tolist() == [0, 1, 2, 0]


@given(
    arrays.arrays("float32", st.integers(0, 6), elements=st.integers(-3, 3)),
    arrays.arrays("float32", shapes, elements=st.integers(-4, 4)),
    st.sampled_from(["left", "right"]),
)
def test_searchsorted_is_numpys(line: Any, values: Any, side: Any) -> None:
    order = np.argsort(line)
    for have in (
        gf.searchsorted(line[order], values, side),
        gf.searchsorted(line, values, side, sorter=order),
    ):
        np.testing.assert_array_equal(
            evaluate([have])[0], np.searchsorted(line[order], values, side)
        )


@given(arrays.arrays("uint8", shapes, elements=st.integers(0, 4)), st.integers(5, 8))
def test_bincount_is_numpys_with_and_without_weights(x: Any, size: int) -> None:
    weights = np.random.default_rng(0).standard_normal(x.shape)
    have = evaluate([gf.bincount(x, size), gf.bincount(x, size, weights)])
    np.testing.assert_array_equal(have[0], np.bincount(x.ravel(), minlength=size))
    wanted = np.bincount(x.ravel(), weights.ravel(), size)
    np.testing.assert_allclose(have[1], wanted, atol=1e-12)


@pytest.mark.parametrize(
    "build, words",
    [
        (lambda x: gf.nonzero(x, 2)[1], "3 elements are not zero, but size is 2"),
        (lambda x: gf.unique_all(x, 2).values, "3 elements differ, but size is 2"),
        (lambda x: gf.compress(x > 0, x, 1)[0], "3 elements are not zero, but size is 1"),
    ],
)
def test_more_than_the_stated_size_names_both_and_the_line(build: Any, words: str) -> None:
    x = gf.placeholder("int64", (None,))
    y = build(x)
    with gf.Session() as session:
        with pytest.raises(CheckError, match=rf"test_search\.py:\d+.*{words}"):
            session.run(y, {x: [1, 2, 3]})
        session.run(y, {x: [1]})


def test_an_int_that_no_bin_counts_is_an_error() -> None:
    x = gf.placeholder("int64", (None,))
    with gf.Session() as session, pytest.raises(OpError, match=r"7 is outside \[0, 3\)"):
        session.run(gf.bincount(x, 3), {x: [0, 7]})


A = np.arange(6.0).reshape(2, 3)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.nonzero(A, -1), ArgumentError, "size must be the most results"),
        (lambda: gf.nonzero(A, 2.5), ArgumentError, "size"),
        (lambda: gf.nonzero(A, 6, fill=0.5), ArgumentError, "fill"),
        (lambda: gf.nonzero(3, 1), ShapeError, "no axis"),
        (lambda: gf.compress(A[0], A, 2, 1), DTypeError, "bool"),
        (lambda: gf.compress(A > 0, A, 2, 1), ShapeError, "one axis"),
        (lambda: gf.compress([True] * 4, A, 2, 1), ShapeError, "3 or fewer"),
        (lambda: gf.unique_all(A, 2, sorted=1), ArgumentError, "sorted"),
        (lambda: gf.unique_values(A.astype("complex64"), 2), DTypeError, "complex"),
        (lambda: gf.searchsorted(A, A), ShapeError, "one axis"),
        (lambda: gf.searchsorted(A[0], A, "middle"), ArgumentError, "left"),
        (lambda: gf.searchsorted(A[0], [1, 2]), DTypeError, "do not mix"),
        (lambda: gf.bincount(A, 3), DTypeError, "int"),
        (lambda: gf.bincount([1, 2], 3, A), ShapeError, "updates"),
    ],
)
def test_mistakes_name_the_line(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_search\.py:\d+.*{words}"):
        call()
