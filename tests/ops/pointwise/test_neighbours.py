"""`gf.nextafter` against numpy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import graphflow as gf
from graphflow.errors import DTypeError
from graphflow.frontend.interpreter import evaluate


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_the_next_floats_are_numpys(dtype: str) -> None:
    info = np.finfo(dtype)
    ends = [0, -0.0, 1, -1, np.inf, -np.inf, np.nan, info.max, info.smallest_subnormal, -info.tiny]
    x = np.array([*ends, 3.5], dtype)
    with np.errstate(all="ignore"):
        wanted = np.nextafter(x[:, None], x)
    (got,) = evaluate([gf.nextafter(x[:, None], x)])
    assert got.dtype == wanted.dtype and np.array_equal(got, wanted, equal_nan=True)
    assert (np.signbit(got) == np.signbit(wanted))[~np.isnan(wanted)].all()


def test_halves_have_neighbours_and_ints_none() -> None:
    (got,) = evaluate([gf.nextafter(np.float16(1), np.float16(2))])
    assert got == np.float16(1.001)
    with pytest.raises(DTypeError):
        gf.nextafter(1, 2)
