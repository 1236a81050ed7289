"""`gf.convolve` against numpy, and its errors."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate


@pytest.mark.parametrize("mode", ["full", "same", "valid"])
def test_all_sizes_give_what_numpy_does(mode: str) -> None:
    rng = np.random.default_rng(0)
    for n in range(1, 8):
        for m in range(1, 8):
            a, v = rng.random(n), rng.random(m)
            (got,) = evaluate([gf.convolve(a, v, mode)])
            np.testing.assert_allclose(got, np.convolve(a, v, mode), rtol=1e-12)


def test_bad_input_is_told() -> None:
    with pytest.raises(ArgumentError, match="full, same, valid"):
        gf.convolve(np.ones(3), np.ones(2), "half")
    with pytest.raises(ShapeError, match="two lines"):
        gf.convolve(np.ones((3, 3)), np.ones(2))
    with pytest.raises(ShapeError, match="two lines"):
        gf.convolve(np.ones(0), np.ones(2))
    with pytest.raises(DTypeError):
        gf.convolve(np.ones(3, int), np.ones(2, int))
