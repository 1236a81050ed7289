"""Histograms and linear interpolation against numpy, with gradients and bad input."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate

RNG = np.random.default_rng(0)
EDGES = np.array([-1.0, 0.0, 0.5, 2.0])


@pytest.mark.parametrize("size", [1, 5, 300])
@pytest.mark.parametrize(
    ("bins", "limits"), [(10, (-2, 2)), (7, (-1, 3)), (EDGES, None), (4, None)]
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_histograms_are_numpys(size: int, bins: Any, limits: Any, is_weighted: bool) -> None:
    x = RNG.standard_normal(size)
    x[0] = 2.0  # an end of an interval
    if size == 1 and limits is None and isinstance(bins, int):
        pytest.skip("the ends of one number are the same")
    weights = RNG.random(size) if is_weighted else None
    counts, edges = evaluate(list(gf.histogram(x, bins, limits, weights)))
    wanted, at = np.histogram(x, bins, limits, weights=weights)
    np.testing.assert_allclose(counts, wanted, rtol=1e-12)
    np.testing.assert_allclose(edges, at, rtol=1e-12, atol=1e-12)


def test_what_is_no_number_or_outside_is_not_counted() -> None:
    x = gf.placeholder("float32", (None,))
    counts, _ = gf.histogram(x, 2, (0.0, 1.0))
    with gf.Session() as s:
        fed = np.array([np.nan, np.inf, -np.inf, -0.1, 0.0, 0.5, 1.0, 1.1], "float32")
        assert s.run(counts, {x: fed}).tolist() == [1, 2]


@pytest.mark.parametrize("ends", [{}, {"left": -1.0}, {"left": -1.0, "right": 7.0}])
def test_interpolation_is_numpys_and_has_gradients(ends: dict[str, float]) -> None:
    xp, fp, x = np.sort(RNG.random(9)), RNG.random(9), RNG.random((3, 40)) * 1.4 - 0.2
    np.testing.assert_allclose(
        evaluate([gf.interp(x, xp, fp, **ends)])[0], np.interp(x, xp, fp, **ends), rtol=1e-12
    )
    at, values = gf.placeholder("float64", x.shape), gf.placeholder("float64", fp.shape)
    total = gf.sum(gf.interp(at, xp, values, **ends) ** 2)
    slopes = evaluate(gf.gradients(total, [at, values]), {at: x, values: fp})
    for slope, fed in zip(slopes, (x, fp), strict=True):
        step = 1e-6 * RNG.standard_normal(fed.shape)
        ups = [np.interp(*_shift(x, xp, fp, fed, sign * step), **ends) ** 2 for sign in (1, -1)]
        wanted = (ups[0].sum() - ups[1].sum()) / 2
        assert np.isclose((slope * step).sum(), wanted, rtol=1e-3, atol=1e-9)


def _shift(x: Any, xp: Any, fp: Any, fed: Any, step: Any) -> tuple[Any, Any, Any]:
    return (x + step, xp, fp) if fed is x else (x, xp, fp + step)


def test_bad_input_is_told_with_numbers() -> None:
    with pytest.raises(ArgumentError, match="bins must be 1 or more, got 0"):
        gf.histogram(np.ones(3), 0)
    with pytest.raises(ArgumentError, match="range must ascend"):
        gf.histogram(np.ones(3), 3, (1.0, 1.0))
    with pytest.raises(ShapeError, match="two edges or more"):
        gf.histogram(np.ones(3), np.ones(1))
    with pytest.raises(DTypeError):
        gf.histogram(np.ones(3, int))
    with pytest.raises(ShapeError, match="the same size"):
        gf.interp(np.ones(3), np.ones(3), np.ones(4))
