"""Resizing: known rows, and what holds for every rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, GraphError, ShapeError
from graphflow.frontend.builders import placeholder
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn
from graphflow.ops.kernels.images.resample import (
    COORDINATES,
    MODES,
    ROUNDINGS,
    ResampleRule,
    WeightTable,
    transposed_table,
    weight_table,
)

Array = np.ndarray[Any, Any]
RULES = st.builds(
    ResampleRule,
    st.sampled_from(MODES),
    st.sampled_from(COORDINATES),
    st.sampled_from([None, 0.4, 1.3, 2.0]),
    st.sampled_from(ROUNDINGS),
    st.sampled_from([-0.5, -0.75]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([0.0, -0.3, 0.2]),
    st.sampled_from([1.0, 0.8, 1.4]),
)


def value(build: Any, x: Array) -> Array:
    p = placeholder(x.dtype, (None, *x.shape[1:]))
    return np.asarray(evaluate([build(p)], {p: x})[0])


def make_dense(rows: WeightTable, n: int) -> Array:
    matrix = np.zeros((len(rows.inputs), n))
    np.add.at(matrix, (np.arange(len(matrix))[:, None], rows.inputs), rows.weights)
    return matrix


@given(st.integers(1, 9), st.integers(1, 9), RULES)
def test_tables_take_means_and_their_transposes_are_tables(
    n: int, m: int, rule: ResampleRule
) -> None:
    rows = weight_table(n, m, rule)
    assert (
        rows.inputs.shape == rows.weights.shape and 0 <= rows.inputs.min() <= rows.inputs.max() < n
    )
    matrix = make_dense(rows, n)
    sums = matrix.sum(axis=1)
    inside = np.abs(sums - 1) < 1e-9
    assert (inside | (sums == 0)).all()
    if rule.coordinates != "tf_crop_and_resize" and not rule.exclude_outside:
        assert inside.all()
    np.testing.assert_array_equal(make_dense(transposed_table(n, m, rule), m), matrix.T)


LINE = np.array([[[1.0, 2.0, 4.0, 8.0]]])
KNOWN: dict[str, tuple[dict[str, Any], list[float]]] = {
    "nearest twice": ({"scale": 2}, [1, 1, 2, 2, 4, 4, 8, 8]),
    "nearest, smaller": (
        {"size": 2, "coordinates": "asymmetric", "rounding": "floor"},
        [1, 4],
    ),
    "linear": ({"size": 7, "mode": "linear", "coordinates": "align_corners"},
               [1, 1.5, 2, 3, 4, 6, 8]),
    "half pixels": ({"scale": 2, "mode": "linear"}, [1, 1.25, 1.75, 2.5, 3.5, 5, 7, 8]),
    "antialiased": ({"size": 2, "mode": "linear", "antialias": True, "exclude_outside": True},
                    [(3 + 6 + 4) / 7, (2 + 12 + 24) / 7]),
    "area": ({"size": 3, "mode": "area"}, [1.5, 3, 6]),
    "cropped": (
        {"size": 3, "mode": "linear", "coordinates": "tf_crop_and_resize",
         "roi": [(0.5, 1.5)], "extrapolation_value": -1.0},
        [3, 8, -1],
    ),
    "cropped to the middle": (
        {"size": 1, "mode": "linear", "coordinates": "tf_crop_and_resize", "roi": [(0, 1)]},
        [3],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_known_rows(name: str) -> None:
    attrs, wanted = KNOWN[name]
    np.testing.assert_allclose(value(lambda x: nn.resize(x, **attrs), LINE)[0, 0], wanted)


def test_axes_one_after_the_other_and_channels_last() -> None:
    a = np.random.default_rng(0).normal(size=(2, 3, 4, 5))
    both = value(lambda x: nn.interpolate(x, (6, 3), mode="bicubic"), a)
    apart = value(
        lambda x: nn.resize(
            nn.resize(x, [6], mode="cubic", axes=[2]), [3], mode="cubic", axes=[-1]
        ),
        a,
    )
    np.testing.assert_allclose(both, apart, rtol=1e-12)
    last = value(
        lambda x: nn.interpolate(x, (6, 3), mode="bicubic", channels_last=True),
        np.moveaxis(a, 1, -1).copy(),
    )
    np.testing.assert_array_equal(np.moveaxis(last, -1, 1), both)
    rows = weight_table(4, 6, ResampleRule("cubic"))
    np.testing.assert_allclose(
        both,
        np.einsum(
            "ih,nchw,jw->ncij",
            make_dense(rows, 4),
            a,
            make_dense(weight_table(5, 3, ResampleRule("cubic")), 5),
        ),
        rtol=1e-12,
    )


def test_nearest_keeps_any_dtype_and_infinities() -> None:
    a = np.array([[[1, 200]]], "uint8")
    assert value(lambda x: nn.interpolate(x, 4), a).tolist() == [[[1, 1, 200, 200]]]
    b = np.array([[[1.0, np.inf]]])
    assert value(lambda x: nn.interpolate(x, 4), b).tolist() == [[[1, 1, np.inf, np.inf]]]


def test_what_no_output_reads_has_a_gradient_of_zero_beside_infinite_ones() -> None:
    x = gf.placeholder("float64", (1, 1, 8))
    y = gf.nn.interpolate(x, 2, mode="nearest")
    (gradient,) = gf.gradients(gf.sum(y * np.array([np.inf, 1.0])), [x])
    (found,) = evaluate([gradient], {x: np.ones((1, 1, 8))})
    assert found[0, 0].tolist() == [np.inf, 0, 0, 0, 1, 0, 0, 0]


def test_a_size_that_stays_costs_nothing() -> None:
    x = placeholder("float32", (None, 2, 4))
    assert nn.interpolate(x, 4) is x
    assert nn.resize(x, scale=1.0, mode="cubic") is x


def test_unknown_sizes_take_whole_factors() -> None:
    x = placeholder("float32", (None, 2, "n"))
    y = nn.interpolate(x, scale=2, mode="linear")
    assert evaluate([y], {x: np.ones((1, 2, 3), "float32")})[0].shape == (1, 2, 6)
    with pytest.raises(ShapeError, match=r"test_resize\.py:\d+.*factor that is an int, got 1\.5"):
        nn.interpolate(x, scale=1.5)


X = np.zeros((2, 4, 6, 6), "float32")
WRONG: dict[str, tuple[Any, type[GraphError], str]] = {
    "neither": (lambda: nn.resize(X), ArgumentError, "neither size nor scale is given"),
    "mode": (lambda: nn.resize(X, 2, mode="lanczos"), ArgumentError, "'lanczos' is none of"),
    "torch's mode": (lambda: nn.interpolate(X, 2, mode="lanczos"), ArgumentError, "is none of"),
    "coordinates": (lambda: nn.resize(X, 2, coordinates="x"), ArgumentError, "'x' is none of"),
    "rounding": (lambda: nn.resize(X, 2, rounding="up"), ArgumentError, "'up' is none of"),
    "sizes": (lambda: nn.resize(X, (2, 2, 2)), ArgumentError, "3 entries for 2 axes"),
    "scale": (lambda: nn.resize(X, scale=0), ArgumentError, "scale must be a positive number"),
    "axes": (lambda: nn.resize(X, 2, axes=[1, 1]), ArgumentError, "an axis twice"),
    "ints": (lambda: nn.resize(X.astype(int), 2, mode="linear"), DTypeError, "float"),
    "roi": (
        lambda: nn.resize(X, 2, coordinates="tf_crop_and_resize", roi=[(0, 1)]),
        ArgumentError,
        "roi must be a pair",
    ),
    "no space": (lambda: nn.resize(X[0, 0], 2), ShapeError, "name the axes"),
    "nothing": (lambda: nn.resize(X[:, :, :0], 2), ShapeError, "no elements to resize"),
    "corners": (
        lambda: nn.interpolate(X, 2, align_corners=True),
        ArgumentError,
        "align_corners needs a linear or cubic mode",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_told_with_their_line(name: str) -> None:
    call, kind, message = WRONG[name]
    with pytest.raises(kind, match=rf"(?s)test_resize\.py:\d+.*({message})"):
        call()
