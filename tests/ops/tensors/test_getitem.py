"""`x[...]` against numpy, with known and unknown sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis.extra import numpy as arrays

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import ArgumentError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.spec import Dim
from graphflow.ir.spec import evaluate as size_of

A = np.arange(4 * 5 * 6).reshape(4, 5, 6)
I = np.array([[0, 1], [2, -1]])  # noqa: E741


@given(arrays.basic_indices(A.shape, allow_newaxis=True))
def test_basic_indexing_is_numpys(index: Any) -> None:
    x = placeholder("int64", A.shape)
    y = x[index]
    assert y.shape == A[index].shape
    np.testing.assert_array_equal(evaluate([y], {x: A})[0], A[index])


INDICES = [
    np.s_[1:], np.s_[:3], np.s_[:, ::2], np.s_[-1], np.s_[..., 0], np.s_[None, 1, ..., None],
    np.s_[::-1], np.s_[1:-1], np.s_[-2:], np.s_[-3:-1], np.s_[:-2], np.s_[2:1], np.s_[:10],
    np.s_[5:], np.s_[-9:], np.s_[::-2], np.s_[1::2, :, 2:5:2], np.s_[...],
    np.s_[I], np.s_[:, I], np.s_[0, :, I], np.s_[I, 0], np.s_[0, I], np.s_[I, :, 0],
    np.s_[:, I, None, 0], np.s_[:, [3, 1]], np.s_[np.array(2)], np.s_[[]],
    np.s_[I, I], np.s_[I, :, I], np.s_[:, I, I], np.s_[:, I[0], I], np.s_[I, 0, I], np.s_[I, I, I],
    np.s_[0, :, I], np.s_[I, None, I], np.s_[None, I, ::2, I], np.s_[I, I[:, :1], -1],
    np.s_[1:, I, I],
]  # fmt: skip


@pytest.mark.parametrize("shape", [A.shape, (None, None, None)], ids=["known", "unknown"])
@pytest.mark.parametrize("index", INDICES, ids=str)
def test_indexing_is_numpys_for_known_and_unknown_sizes(index: Any, shape: Any) -> None:
    x = placeholder("int64", shape)
    wanted = A[index] if not (isinstance(index, list) and not index) else A[np.array([], int)]
    np.testing.assert_array_equal(evaluate([x[index]], {x: A})[0], wanted)


def test_a_tensor_of_ints_chooses_as_take_does() -> None:
    x, i = placeholder("int64", A.shape), placeholder("int64", (None,))
    (value,) = evaluate([x[:, i]], {x: A, i: np.array([4, 0, -1])})
    np.testing.assert_array_equal(value, A[:, [4, 0, -1]])


@given(arrays.integer_array_indices(A.shape))
def test_several_arrays_choose_as_numpy_has_it(index: Any) -> None:
    x = placeholder("int64", A.shape)
    np.testing.assert_array_equal(evaluate([x[index]], {x: A})[0], A[index])


def test_an_index_outside_names_its_axis() -> None:
    x, i = placeholder("int64", A.shape), placeholder("int64", (None,))
    with pytest.raises(IndexError, match="index 5 is outside axis 1 of size 5"):
        evaluate([x[[0, 1], i]], {x: A, i: np.array([5, 0])})


def test_unknown_sizes_keep_what_can_be_said_of_them() -> None:
    n = Dim.symbol("n")
    x = placeholder("float32", ("n", 3))
    assert x[1:].shape == (n - 1, 3) and x[:-1].shape == (n - 1, 3)
    assert x[:1].shape == (1, 3) and x[-1:].shape == (1, 3) and x[-1].shape == (3,)
    assert size_of(x[:10].shape[0], {"n": 7}) == 7 and size_of(x[:10].shape[0], {"n": 70}) == 10
    assert size_of(x[::2].shape[0], {"n": 7}) == 4


def test_what_an_index_assumes_of_an_unknown_size_is_recorded() -> None:
    x = placeholder("float32", ("n",))
    for y, least in ((x[2], 3), (x[-2], 2), (x[1:-1], 2), (x[:1], 1)):
        equations = [e for t in (y, *y.node.inputs) for e in t.node.equations]
        for n in range(5):
            holds = all(size_of(a, {"n": n}) == size_of(b, {"n": n}) for a, b in equations)
            assert holds == (n >= least)


@pytest.mark.parametrize(
    "index, error, words",
    [
        (4, ShapeError, "index 4 is outside axis 0 of size 4"),
        ((0, -6), ShapeError, "index -6 is outside axis 1"),
        ((0, 0, 0, 0), ShapeError, "4 indices"),
        ((Ellipsis, Ellipsis), ArgumentError, "one Ellipsis"),
        (A > 3, ArgumentError, "boolean mask"),
        (True, ArgumentError, "boolean mask"),
        (np.array([0.5]), ArgumentError, "float64"),
        ((A > 3, I), ArgumentError, "compress"),
        ((I, [0, 1, 2]), ShapeError, "do not broadcast"),
        ("a", ArgumentError, "str"),
        (slice(None, None, 0), ArgumentError, "step"),
        (slice(0.5, 2), ArgumentError, "bounds"),
    ],
)
def test_mistakes_name_the_line_and_a_remedy(index: Any, error: type, words: str) -> None:
    x = placeholder("int64", A.shape)
    with pytest.raises(error, match=rf"(getitem|index) at .*test_getitem\.py:\d+.*{words}"):
        x[index]


def test_a_negative_step_with_bounds_needs_a_known_size() -> None:
    with pytest.raises(ArgumentError, match="negative step"):
        placeholder("int64", (None,))[5:1:-1]
