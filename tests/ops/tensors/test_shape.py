"""Reshapes, permutations and broadcasts against numpy, with known and unknown sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow.ops  # noqa: F401 - fills the registry
from graphflow.errors import ArgumentError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import FUNCTIONS as G
from graphflow.ir.spec import Dim
from graphflow.transforms.reverse_mode import gradients

A = np.arange(24, dtype="float32").reshape(2, 3, 4)

# name -> (graph, numpy), on a (2, 3, 4) tensor
CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "reshape": (lambda x: G["reshape"](x, (-1, 4)), lambda a: a.reshape(-1, 4)),
    "flat": (lambda x: x.reshape(-1), lambda a: a.reshape(-1)),
    "rows": (lambda x: x.reshape((x.shape[0], -1)), lambda a: a.reshape(2, -1)),
    "one by one": (lambda x: x.reshape(x.shape[0], -1), lambda a: a.reshape(2, -1)),
    "expand_dims": (lambda x: G["expand_dims"](x, (0, -1)), lambda a: a[None, ..., None]),
    "permute_dims": (lambda x: G["permute_dims"](x, (2, 0, 1)), lambda a: a.transpose(2, 0, 1)),
    "matrix_transpose": (lambda x: x.mT, lambda a: a.swapaxes(1, 2)),
    "swapaxes": (lambda x: G["swapaxes"](x, 0, -1), lambda a: a.swapaxes(0, -1)),
    "moveaxis": (
        lambda x: G["moveaxis"](x, (0, 1), (2, 0)),
        lambda a: np.moveaxis(a, (0, 1), (2, 0)),
    ),
    "broadcast_to": (
        lambda x: G["broadcast_to"](x, (5, *x.shape)),
        lambda a: np.broadcast_to(a, (5, *a.shape)),
    ),
    "tile": (lambda x: G["tile"](x, (2, 1, 3, 1)), lambda a: np.tile(a, (2, 1, 3, 1))),
    "tile last": (lambda x: G["tile"](x, 2), lambda a: np.tile(a, 2)),
    "repeat": (lambda x: G["repeat"](x, 3, 1), lambda a: np.repeat(a, 3, 1)),
    "repeat flat": (lambda x: G["repeat"](x, 2), lambda a: np.repeat(a, 2)),
}


@pytest.mark.parametrize("shape", [(2, 3, 4), (None, None, 4)], ids=["known", "unknown"])
@pytest.mark.parametrize("name", CALLS)
def test_values_and_gradients_are_numpys_for_known_and_unknown_sizes(name: str, shape: Any) -> None:
    build, reference = CALLS[name]
    x = placeholder("float32", shape)
    y = build(x)
    value, slope = evaluate([y, gradients(G["sum"](y * y), [x])[0]], {x: A})
    np.testing.assert_array_equal(value, reference(A))
    # each element is copied as often as it occurs in the result
    times = np.bincount(reference(A).astype(int).reshape(-1), minlength=24).reshape(A.shape)
    np.testing.assert_allclose(slope, 2 * A * times)


@given(st.permutations(range(4)))
def test_permuting_and_permuting_back_is_the_identity(axes: list[int]) -> None:
    a = np.arange(2 * 3 * 1 * 4).reshape(2, 3, 1, 4)
    x = placeholder("int64", a.shape)
    there = G["permute_dims"](x, axes)
    back = G["permute_dims"](there, [axes.index(i) for i in range(4)])
    value, original = evaluate([there, back], {x: a})
    np.testing.assert_array_equal(value, a.transpose(axes))
    np.testing.assert_array_equal(original, a)


def test_reshape_divides_unknown_sizes_exactly() -> None:
    x = placeholder("float32", ("n", 3, 4))
    assert G["reshape"](x, (-1, 6)).shape == (2 * Dim.symbol("n"), 6)
    assert G["reshape"](x, (-1, 12)).shape == (Dim.symbol("n"), 12)


def test_nothing_to_do_makes_no_node() -> None:
    x = placeholder("float32", (2, 3))
    assert G["reshape"](x, (2, -1)) is x
    assert G["permute_dims"](x, (0, 1)) is x
    assert G["broadcast_to"](x, (2, 3)) is x
    assert G["squeeze"](x) is x


@pytest.mark.parametrize("indexing", ["xy", "ij"])
@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_grids_are_numpys(indexing: str, count: int) -> None:
    vectors = [np.arange(3), np.arange(4.0), np.arange(2)][:count]
    wanted = np.meshgrid(*vectors, indexing=indexing)
    for found, want in zip(G["meshgrid"](*vectors, indexing=indexing), wanted, strict=True):
        np.testing.assert_array_equal(evaluate([found], {})[0], want)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x: G["meshgrid"](x, x), ShapeError, "made of vectors"),
        (lambda x: G["meshgrid"](x[0, 0], indexing="yx"), ArgumentError, "one of 'xy', 'ij'"),
        (lambda x: G["reshape"](x, (5, -1)), ShapeError, "no multiple|are no"),
        (lambda x: G["reshape"](x, (-1, -1)), ShapeError, "only one"),
        (lambda x: G["reshape"](x, (4, 4)), ShapeError, "24 != 16|16 != 24"),
        (lambda x: G["reshape"](x, (None, 4)), ShapeError, "-1"),
        (lambda x: G["permute_dims"](x, (0, 0, 1)), ArgumentError, "no permutation"),
        (lambda x: G["squeeze"](x, 1), ShapeError, "axis 1"),
        (lambda x: G["expand_dims"](x, 7), ShapeError, "axis 7"),
        (lambda x: G["broadcast_to"](x, (2, 5, 4)), ShapeError, "does not broadcast"),
        (lambda x: G["broadcast_to"](x, (4,)), ShapeError, "does not broadcast"),
        (lambda x: G["moveaxis"](x, (0, 1), 0), ArgumentError, "equally many distinct axes, got"),
        (lambda x: G["repeat"](x, [1, 2, 3], 0), ArgumentError, "each of the 2 elements of axis 0"),
        (lambda x: G["repeat"](x, -1, 0), ShapeError, "not negative"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    x = placeholder("float32", (2, 3, 4))
    with pytest.raises(error, match=rf"(?s)test_shape\.py:\d+.*({words})"):
        call(x)
