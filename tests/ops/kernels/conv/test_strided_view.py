"""Convolutions of one channel, as spectrograms, against sums of products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphflow.ir.op import REGISTRY
from graphflow.ops.windows.window_arguments import Windows
from tests.ops.kernels.sharing import HAS_PRODUCTS, check_threads, chosen_kernel


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("images, size, taps, stride", [(1, 12_000, 512, 160), (3, 333, 32, 1)])
def test_values_are_those_of_plain_sums_with_any_threads(
    dtype: str, images: int, size: int, taps: int, stride: int
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(images, 1, size)).astype(dtype)
    w = rng.normal(size=(40, 1, taps)).astype(dtype)
    seen = np.lib.stride_tricks.sliding_window_view(x[:, 0], taps, 1)[:, ::stride]
    windows = Windows((taps,), (stride,), (0,), (1,), (seen.shape[1],))
    assert (chosen_kernel(x, 40, windows) == "strided_view") == HAS_PRODUCTS
    assert chosen_kernel(x, 40, windows._replace(before=(1,))) != "strided_view"
    attrs = {"stride": (stride,), "padding": ((0, 0),), "dilation": (1,), "groups": 1}

    def compute() -> list[Any]:
        return REGISTRY["conv"].run(np, [x, w], attrs)

    have = compute()
    want = np.einsum("npk,ok->nop", seen.astype("float64"), w[:, 0].astype("float64"))
    near = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(have[0], want, rtol=near, atol=near * np.abs(want).max())
    check_threads(compute, have)
