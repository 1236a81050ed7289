"""Windows, padding, joining and parting against numpy, with known and unknown sizes."""

from __future__ import annotations

from collections.abc import Callable
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
from graphflow.ir.spec import Dim, is_nonnegative, minimum

A = np.arange(24, dtype="float32").reshape(2, 3, 4)

CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "pad": (lambda x: G["pad"](x, 1), lambda a: np.pad(a, 1)),
    "pad bools": (lambda x: G["pad"](x > 3, 1), lambda a: np.pad(a > 3, 1)),
    "pad sides": (
        lambda x: G["pad"](x, ((0, 1), (2, 0), (0, 0)), value=3),
        lambda a: np.pad(a, ((0, 1), (2, 0), (0, 0)), constant_values=3),
    ),
    **{
        f"pad by {mode}": (
            lambda x, mode=mode: G["pad"](x, ((0, 1), (2, 0), (3, 2)), mode),
            lambda a, mode=mode: np.pad(a, ((0, 1), (2, 0), (3, 2)), mode),
        )
        for mode in ("edge", "reflect", "symmetric", "wrap")
    },
    "flip": (lambda x: G["flip"](x, (0, 2)), lambda a: np.flip(a, (0, 2))),
    "flip all": (G["flip"], np.flip),
    "roll": (lambda x: G["roll"](x, 2, 1), lambda a: np.roll(a, 2, 1)),
    "roll back": (lambda x: G["roll"](x, -7, 1), lambda a: np.roll(a, -7, 1)),
    "roll flat": (lambda x: G["roll"](x, 5), lambda a: np.roll(a, 5)),
    "roll axes": (lambda x: G["roll"](x, (1, 3), (0, 2)), lambda a: np.roll(a, (1, 3), (0, 2))),
    "diff": (G["diff"], np.diff),
    "diff twice": (lambda x: G["diff"](x, 2, 1), lambda a: np.diff(a, 2, 1)),
    "diff to nothing": (lambda x: G["diff"](x, 3, 1), lambda a: np.diff(a, 3, 1)),
    "concat": (
        lambda x: G["concat"]([x, x[:, 1:], x], 1),
        lambda a: np.concatenate([a, a[:, 1:], a], 1),
    ),
    "concat flat": (lambda x: G["concat"]([x, x], None), lambda a: np.concatenate([a, a], None)),
    "stack": (lambda x: G["stack"]([x, x * 2.0], -1), lambda a: np.stack([a, a * 2], -1)),
    "split": (lambda x: G["split"](x, 3, 1)[1], lambda a: np.split(a, 3, 1)[1]),
    "split sizes": (lambda x: G["split"](x, (1, 3), 2)[1], lambda a: a[:, :, 1:]),
    "unstack": (lambda x: G["unstack"](x, 2)[3], lambda a: a[..., 3]),
}


@pytest.mark.parametrize("shape", [(2, 3, 4), (None, None, 4)], ids=["known", "unknown"])
@pytest.mark.parametrize("name", CALLS)
def test_values_are_numpys_for_known_and_unknown_sizes(name: str, shape: Any) -> None:
    build, reference = CALLS[name]
    x = placeholder("float32", shape)
    np.testing.assert_array_equal(evaluate([build(x)], {x: A})[0], reference(A))


@given(
    st.integers(1, 9),
    st.tuples(st.integers(0, 40), st.integers(0, 40)),
    st.sampled_from(["edge", "reflect", "symmetric", "wrap"]),
)
def test_padding_goes_on_further_than_the_axis_is_long(
    n: int, widths: tuple[int, int], mode: str
) -> None:
    a = np.arange(n)
    (value,) = evaluate([G["pad"](a, [widths], mode)], {})
    np.testing.assert_array_equal(value, np.pad(a, widths, mode))


@given(st.integers(1, 9), st.integers(-20, 20))
def test_roll_of_an_unknown_size_is_numpys(n: int, shift: int) -> None:
    x = placeholder("int64", (None,))
    (value,) = evaluate([G["roll"](x, shift, 0)], {x: np.arange(n)})
    np.testing.assert_array_equal(value, np.roll(np.arange(n), shift))


def test_concat_adds_unknown_sizes_and_splitting_subtracts_them() -> None:
    n, m = Dim.symbol("n"), Dim.symbol("m")
    x, y = placeholder("float32", ("n", 2)), placeholder("float32", ("m", 2))
    both = G["concat"]([x, y])
    assert both.shape == (n + m, 2)
    assert [part.shape for part in G["split"](both, [n, m])] == [(n, 2), (m, 2)]
    assert G["concat"]([x[:5], x[5:]]).shape == (n, 2)
    assert G["pad"](x, ((1, 2), (0, 0))).shape == (n + 3, 2)


def test_nonnegativity_of_symbolic_sizes_is_seen_where_it_is_certain() -> None:
    n = Dim.symbol("n")
    assert is_nonnegative(n) and is_nonnegative(2 * n + 1)
    assert is_nonnegative(minimum(n, 5)) and is_nonnegative(n - minimum(n, 5))
    assert not is_nonnegative(n - 1) and not is_nonnegative(minimum(n, 5) - n)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda x: G["pad"](x, -1), ShapeError, "not negative"),
        (lambda x: G["pad"](x, ((1, 1), (1, 1))), ArgumentError, "3 pairs"),
        (lambda x: G["pad"](x, 1, mode="circular"), ArgumentError, "its circular 'wrap'"),
        (lambda x: G["pad"](x, 1, mode="edge", value=1), ArgumentError, "takes no value"),
        (lambda x: G["pad"](x[:0], 1, mode="edge"), ShapeError, "axis 0 of size 0"),
        (lambda x: G["pad"](x.astype("int32"), 1, value=0.5), DTypeError, "0.5"),
        (lambda x: G["diff"](x, -1), ArgumentError, "from 0 to 1000, got -1"),
        (lambda x: G["concat"]([]), ArgumentError, "at least one"),
        (lambda x: G["concat"]([x, x[:, 1:]], 0), ShapeError, "3 != 2"),
        (lambda x: G["concat"]([x, x[0]], 0), ShapeError, "ranks differ"),
        (lambda x: G["stack"]([x, x[0]]), ShapeError, "differ"),
        (lambda x: G["stack"]([x, x[:1]]), ShapeError, r": shapes \(2, 3, 4\) and \(1, 3, 4\)"),
        (lambda x: G["split"](x, 2, 1), ShapeError, "no 2 equal parts"),
        (lambda x: G["split"](x, (1, 1), 1), ShapeError, "add up to 2"),
        (lambda x: G["roll"](x, (1, 2), 0), ArgumentError, "2 entries for 1 axes"),
        (lambda x: G["unstack"](placeholder("float32", (None, 2))), ShapeError, "not known"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    x = placeholder("float32", (2, 3, 4))
    with pytest.raises(error, match=rf"(?s)test_slicing\.py:\d+.*{words}"):
        call(x)
