"""Sorting and running extrema, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY

A = np.random.default_rng(0).standard_normal((4, 5, 6))
# Few different values, so that there are ties; NaN and both zeros among them.
few = st.sampled_from([np.nan, -0.0, 0.0, 1.0, -np.inf, np.inf, 2.5, -3.0])
shapes = arrays.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=12)
floats = arrays.arrays("float32", shapes, elements=few)
ints = arrays.arrays(
    st.sampled_from(["int8", "uint8", "int64", "uint64"]), shapes, elements=st.integers(0, 9)
)


def value(x: Any) -> Any:
    return evaluate([x])[0]


def _order(x: Any, axis: int, descending: bool) -> Any:
    """Stable, by Python's sort; NaN is the largest."""

    def line(row: Any) -> Any:
        keys = [(v != v, 0.0 if v != v else v) for v in row.tolist()]
        # `reverse` keeps the order of equals, too
        return np.array(sorted(range(len(row)), key=keys.__getitem__, reverse=descending), int)

    return np.apply_along_axis(line, axis, x) if x.size else np.zeros(x.shape, int)


@given(floats | ints, st.booleans(), st.data())
def test_sorting_is_stable_in_both_directions(x: Any, descending: bool, data: Any) -> None:
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    places = value(gf.argsort(x, axis, descending=descending))
    np.testing.assert_array_equal(places, _order(x, axis, descending))
    result = value(gf.sort(x, axis, descending=descending))
    np.testing.assert_array_equal(result, np.take_along_axis(x, places, axis))
    assert places.dtype == np.int64 and result.dtype == x.dtype


@given(floats | ints, st.booleans(), st.booleans(), st.data())
def test_the_k_largest_are_the_first_of_a_stable_order(
    x: Any, largest: bool, in_order: bool, data: Any
) -> None:
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    k = data.draw(st.integers(0, x.shape[axis]))
    values, places = evaluate(gf.top_k(x, k, axis, largest, in_order))
    order = np.take(_order(x, axis, largest), range(k), axis)
    wanted = order if in_order else np.sort(order, axis)
    np.testing.assert_array_equal(places, wanted)
    np.testing.assert_array_equal(values, np.take_along_axis(x, wanted, axis))


@pytest.mark.parametrize("values", [3, 1000])
@pytest.mark.parametrize("largest", [True, False])
def test_a_few_of_many_are_chosen_as_if_all_were_sorted(largest: bool, values: int) -> None:
    rng = np.random.default_rng(1)
    for dtype in ("float32", "int16", "uint8"):
        x = rng.integers(0, min(values, 250), (7, 400)).astype(dtype)
        for k in (1, 5, 100):
            places = evaluate(gf.top_k(x, k, 1, largest))[1]
            np.testing.assert_array_equal(places, _order(x, 1, largest)[:, :k])


@given(arrays.arrays("float64", shapes.filter(lambda s: 0 not in s), elements=few), st.data())
def test_running_extrema_are_numpys(x: Any, data: Any) -> None:
    axis = data.draw(st.integers(-x.ndim, x.ndim - 1))
    highest, lowest = evaluate([gf.cummax(x, axis), gf.cummin(x, axis)])
    np.testing.assert_array_equal(highest, np.maximum.accumulate(x, axis))
    np.testing.assert_array_equal(lowest, np.minimum.accumulate(x, axis))


def test_the_gradient_goes_back_to_where_an_element_came_from() -> None:
    x = gf.placeholder("float64", (None, 5))
    w = np.array([1.0, 2, 3, 4, 5])
    sorted_, top = gf.sort(x), gf.top_k(x, 2)[0]
    slopes = gf.gradients(gf.sum(sorted_ * w), [x]) + gf.gradients(gf.sum(top * w[:2]), [x])
    slopes += gf.gradients(gf.sum(gf.cummax(x) * w), [x])
    fed = {x: np.array([[3.0, 1, 2, 2, 9]])}
    a, b, c = evaluate(slopes, fed)
    assert a.tolist() == [[4, 1, 2, 3, 5]]
    assert b.tolist() == [[2, 0, 0, 0, 1]]
    assert c.tolist() == [[1 + 2 + 3 + 4, 0, 0, 0, 5]]


def test_sizes_may_be_unknown() -> None:
    x = gf.placeholder("float32", ("n", "m"))
    n = x.shape[0]
    assert gf.sort(x, 0).shape == x.shape
    values, places = gf.top_k(x, n, 0)
    assert values.shape == places.shape == x.shape
    with gf.Session() as session:
        data = A[0].astype("float32")
        np.testing.assert_array_equal(session.run(values, {x: data}), -np.sort(-data, 0))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.sort(A, 3), ShapeError, "axis 3"),
        (lambda: gf.sort(A, descending=1), ArgumentError, "descending must be True or False"),
        (lambda: gf.argsort(A, stable="no"), ArgumentError, "stable"),
        (lambda: gf.sort(A.astype("complex128")), DTypeError, "complex128"),
        (lambda: gf.top_k(A, 7), ShapeError, "k is 7.*6 elements along axis 2"),
        (lambda: gf.top_k(A, -1), ArgumentError, "k must be an int"),
        (lambda: gf.top_k(A, 2.0), ArgumentError, "k must be an int"),
        (lambda: gf.top_k(A > 0, 1), DTypeError, "bool"),
        (lambda: gf.cummax(A, 5), ShapeError, "axis 5"),
    ],
)
def test_mistakes_name_the_line(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_sort\.py:\d+.*{words}"):
        call()


class _NanFirst:
    """Numpy, but for a partition that puts NaN before all others: CuPy's puts them anywhere."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def partition(self, x: Any, edge: int, axis: int) -> Any:
        return np.sort(np.where(np.isnan(x), -np.inf, x), axis=axis)


@pytest.mark.parametrize("largest", [True, False])
def test_nan_is_the_largest_wherever_a_partition_puts_it(largest: bool) -> None:
    rows = np.arange(24, dtype="float32").reshape(2, 12)
    rows[0, 3] = np.nan
    given = {"k": 2, "axis": 1, "largest": largest, "sorted": True}
    op = REGISTRY["top_k"]
    for have, want in zip(
        op.run(_NanFirst(), [rows], given), op.run(np, [rows], given), strict=True
    ):
        np.testing.assert_array_equal(have, want)
