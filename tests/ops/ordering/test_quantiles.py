"""Quantiles and the median, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, GraphError, ShapeError
from graphflow.frontend.interpreter import evaluate

A = np.random.default_rng(0).standard_normal((3, 5, 4))


@pytest.mark.parametrize("axis", [None, 0, -1, (0, 2)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_they_are_numpys(axis: Any, keepdims: bool) -> None:
    for q in (0.3, [0, 0.1, 0.77, 1], [[0.5], [0.25]]):
        (found,) = evaluate([gf.quantile(A, q, axis, keepdims)])
        wanted = np.quantile(A, q, axis, keepdims=keepdims)
        assert found.shape == wanted.shape
        np.testing.assert_allclose(found, wanted, rtol=1e-13)
    (middle,) = evaluate([gf.median(A, axis, keepdims)])
    np.testing.assert_allclose(middle, np.median(A, axis, keepdims=keepdims), rtol=1e-14)


def test_infinities_stay_and_nan_spreads() -> None:
    x = np.array([[1, np.inf, np.inf, np.inf], [1, 2, np.nan, 3], [-np.inf, 0, 1, np.inf]], "f")
    (found,) = evaluate([gf.quantile(x, [0, 1 / 3, 0.5, 0.9], 1)])
    inf = np.inf
    assert found[:, 0].tolist() == [1, inf, inf, inf] and np.isnan(found[:, 1]).all()
    assert found[:, 2].tolist() == [-inf, 0, 0.5, inf]


def test_sizes_may_be_unknown_and_gradients_go_to_what_was_chosen() -> None:
    x = gf.placeholder("float64", ("n", None))
    middle, most = gf.median(x, 0), gf.quantile(x, 0.75)
    fed = np.array([[3.0, 1], [1, 5], [2, 4], [8, 7]])
    found, *slopes = evaluate(
        [middle, *gf.gradients(gf.sum(middle), [x]), *gf.gradients(most, [x])], {x: fed}
    )
    assert found.tolist() == [2.5, 4.5]
    assert slopes[0].tolist() == [[0.5, 0], [0, 0.5], [0.5, 0.5], [0, 0]]
    assert slopes[1].tolist() == [[0, 0], [0, 0.75], [0, 0], [0, 0.25]]
    with gf.Session() as session:
        np.testing.assert_allclose(session.run(most, {x: A[0]}), np.quantile(A[0], 0.75))


def test_a_batch_of_medians_is_one_call() -> None:
    x = gf.placeholder("float64", (3, 5, 4))
    (found,) = evaluate([gf.vmap(lambda row: gf.median(row, 0))(x)], {x: A})
    np.testing.assert_allclose(found, np.median(A, 1))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.quantile(A, 1.5), ArgumentError, "q must be a number from 0 to 1.*1.5"),
        (lambda: gf.quantile(A, gf.constant(0.5)), GraphError, "symbolic"),
        (lambda: gf.quantile(A, "half"), ArgumentError, "q must be a number.*half"),
        (lambda: gf.median(A.astype(int)), DTypeError, "int64"),
        (lambda: gf.median(A[:, :0]), ShapeError, "no elements"),
        (lambda: gf.median(A, 3), ShapeError, "axis 3"),
    ],
)
def test_mistakes_name_the_line(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_quantiles\.py:\d+.*{words}"):
        call()
