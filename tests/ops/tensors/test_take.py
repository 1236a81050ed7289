"""Taking and adding elements at computed places, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import FUNCTIONS as G
from graphflow.ir.op import REGISTRY
from graphflow.transforms.reverse_mode import gradients

A = np.random.default_rng(0).standard_normal((4, 5, 6))


@given(st.integers(0, 2), st.lists(st.integers(-4, 3), max_size=6), st.booleans())
def test_take_is_numpys_for_every_axis_and_negative_indices(
    axis: int, places: list[int], known: bool
) -> None:
    i = np.array(places, np.int32)
    x, j = (
        placeholder("float64", A.shape if known else (None, None, None)),
        placeholder("int32", (None,)),
    )
    (value,) = evaluate([G["take"](x, j, axis)], {x: A, j: i})
    np.testing.assert_array_equal(value, np.take(A, i, axis))


@given(st.integers(0, 2), st.lists(st.integers(-4, 3), max_size=6))
def test_scatter_add_adds_every_update_in_order(axis: int, places: list[int]) -> None:
    i = np.array(places, np.int64)
    updates = np.take(A, i, axis) * 3
    wanted = A.copy()
    moved, parts = np.moveaxis(wanted, axis, 0), np.moveaxis(updates, axis, 0)
    for place, part in zip(places, parts, strict=True):
        moved[place] += part
    (value,) = evaluate([G["scatter_add"](A, i, updates, axis)])
    np.testing.assert_array_equal(value, wanted)


@given(st.integers(0, 2), st.integers(0, 4), st.integers(0, 99))
def test_take_along_axis_is_numpys(axis: int, count: int, seed: int) -> None:
    shape = tuple(count if i == axis else n for i, n in enumerate(A.shape))
    i = np.random.default_rng(seed).integers(-A.shape[axis], A.shape[axis], shape)
    (value,) = evaluate([G["take_along_axis"](A, i, axis)])
    np.testing.assert_array_equal(value, np.take_along_axis(A, i, axis))


@given(st.integers(0, 2), st.lists(st.integers(-4, 3), max_size=6))
def test_the_gradient_of_take_is_scatter_add_into_zeros(axis: int, places: list[int]) -> None:
    i = np.array(places, np.int64)
    g = np.take(A, i, axis) * 3
    have = REGISTRY["take_grad"](g, i, shape=A.shape, axis=axis)
    want = G["scatter_add"](np.zeros(A.shape), i, g, axis)
    assert evaluate([have])[0].tobytes() == evaluate([want])[0].tobytes()


@pytest.mark.parametrize("count", [0, 3, 2000])
def test_additions_to_one_row_come_in_order_however_wide_it_is(count: int) -> None:
    for width in (1, 7, 600):
        updates = np.random.default_rng(width).standard_normal((count, width)).astype("float32")
        total = np.zeros(width, "float32")
        for update in updates:
            total += update
        have = G["scatter_add"](np.zeros((2, width), "float32"), [1] * count, updates)
        assert evaluate([have])[0][1].tobytes() == total.tobytes()


def test_float16_updates_are_added_in_float32() -> None:
    updates = np.full((4000, 1), 1.0, "float16")
    (value,) = evaluate([G["scatter_add"](np.zeros((1, 1), "float16"), [0] * 4000, updates)])
    assert value[0, 0] == 4000  # in float16, adding 1 to 2048 changes nothing


def test_the_gradient_of_a_lookup_adds_up_repeated_rows() -> None:
    x, i = placeholder("float64", (None, 3)), placeholder("int64", (None,))
    (slope,) = gradients(G["sum"](G["take"](x, i, 0)), [x])
    (value,) = evaluate([slope], {x: np.zeros((4, 3)), i: np.array([2, 0, 2, -2])})
    np.testing.assert_array_equal(value, np.array([1, 0, 3, 0])[:, None] * np.ones(3))


@pytest.mark.parametrize("wrong", [4, -5])
@pytest.mark.parametrize("name", ["take", "scatter_add", "one_hot"])
def test_an_index_outside_its_axis_is_an_error_of_the_kernel(name: str, wrong: int) -> None:
    i = np.array([0, wrong])
    calls: dict[str, Any] = {
        "take": lambda op: op.run(np, [A, i], {"axis": 0}),
        "scatter_add": lambda op: op.run(np, [A, i, A[:2]], {"axis": 0}),
        "one_hot": lambda op: op.run(np, [i], {"depth": 4, "dtype": "float32"}),
    }
    with pytest.raises(IndexError, match=str(wrong)):
        calls[name](REGISTRY[name])


def test_one_hot_marks_the_class() -> None:
    y = placeholder("int64", ("n", 2))
    hot = G["one_hot"](y, 3)
    assert hot.shape == (*y.shape, 3)
    (value,) = evaluate([hot], {y: np.array([[0, 2], [1, 1]])})
    np.testing.assert_array_equal(value, np.eye(3, dtype="float32")[[[0, 2], [1, 1]]])


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: G["take"](A, np.array([0.5]), 0), DTypeError, "int"),
        (lambda: G["take"](A, [0]), ArgumentError, "3 axes; give the axis"),
        (lambda: G["scatter_add"](A, [0, 1], A, 0), ShapeError, "4 != 2"),
        (lambda: G["scatter_add"](A, [0], A[:1].astype("float32")), ArgumentError, "float32"),
        (lambda: G["take_along_axis"](A, [0], 0), ShapeError, "ranks differ"),
        (lambda: G["one_hot"](np.array([0.0]), 3), DTypeError, "int"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_take\.py:\d+.*{words}"):
        call()


ROW = np.arange(5.0)
ONE = np.array([9.0])
PLACED = {
    "take": lambda i: G["take"](ROW, i),
    "getitem": lambda i: G["getitem"](gf.constant(ROW), i),
    "take_along_axis": lambda i: G["take_along_axis"](ROW, i),
    "gather": lambda i: G["gather"](ROW, i),
    "gather_nd": lambda i: G["gather_nd"](ROW, G["reshape"](i, (1, 1))),
    "scatter": lambda i: G["scatter"](gf.constant(ROW), i, gf.constant(ONE)),
    "scatter_add": lambda i: G["scatter_add"](gf.constant(ROW), i, gf.constant(ONE)),
    "put_along_axis": lambda i: G["put_along_axis"](ROW, i, ONE),
    "ravel_multi_index": lambda i: G["ravel_multi_index"]([i], (5,)),
}


@pytest.mark.parametrize("name", PLACED)
def test_an_unsigned_index_is_never_counted_from_the_end(name: str) -> None:
    """2**64 - 1 has the bits of -1."""
    i = placeholder("uint64", (1,))
    with pytest.raises(IndexError, match="index 18446744073709551615 is outside"):
        evaluate([PLACED[name](i)], {i: np.array([2**64 - 1], "uint64")})


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_consecutive_positions_give_what_others_do(axis: int, dtype: str) -> None:
    """They are copied as one slice."""
    x = np.arange(4.0 * 5 * 6).reshape(4, 5, 6)
    lists = [[1, 2, 3], [0, 1], [2], [3, 2, 1], [1, 3], [0, 1, 3], [1, 1, 2], [2, 3, 3]]
    with gf.Session() as s:
        for positions in lists:
            chosen = np.array(positions, dtype)
            found = s.run(gf.take(gf.constant(x), gf.constant(chosen), axis))
            np.testing.assert_array_equal(found, np.take(x, positions, axis))
        negative = s.run(gf.take(gf.constant(x), gf.constant(np.array([-3, -2, -1])), 1))
        np.testing.assert_array_equal(negative, x[:, -3:])
