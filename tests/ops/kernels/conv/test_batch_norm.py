"""Batch norm's sweeps over channels against numpy in float64, and under any number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.ir.op import REGISTRY
from graphflow.ops.kernels.conv import batch_norm as channels
from tests.ops.kernels.sharing import check_threads

Array = np.ndarray[Any, Any]


def inputs(seed: int, shape: tuple[int, ...], channel: int) -> list[Array]:
    """x far from zero, a cotangent, scale and bias."""
    rng = np.random.default_rng(seed)
    size = shape[channel]
    arrays = rng.normal(3, 2, shape), rng.normal(size=shape), rng.normal(size=size), np.arange(size)
    return [a.astype("float32") for a in arrays]


def results(x: Array, g: Array, scale: Array, bias: Array, channel: int) -> list[Array]:
    attrs = {"channel": channel, "epsilon": 1e-3}
    given = np.linspace(0.5, 2, len(scale)).astype(x.dtype)
    return [
        *REGISTRY["batch_norm"].run(np, [x, scale, bias], attrs),
        *REGISTRY["batch_norm_grad"].run(np, [g, x, scale], attrs),
        *REGISTRY["channel_affine"].run(np, [x, scale, bias, bias, given], attrs),
    ]


@given(
    seed=st.integers(0, 9),
    shape=st.lists(st.integers(1, 9), min_size=3, max_size=4),
    last=st.integers(8, 70),
    channel=st.integers(0, 1),
)
@settings(max_examples=60, deadline=None)
def test_moments_results_and_gradients_are_those_of_float64(
    seed: int, shape: list[int], last: int, channel: int
) -> None:
    arrays = inputs(seed, (*shape, last), channel)
    assert channels.is_supported(np, arrays[0], channel)
    wide = results(*(a.astype("float64") for a in arrays), channel)
    for have, want in zip(results(*arrays, channel), wide, strict=True):
        assert have.dtype == np.float32
        largest = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * largest)


def test_large_means_do_not_drown_the_variance() -> None:
    x, g, scale, bias = inputs(0, (40, 2, 60, 60), 1)
    x += 1000
    exact = x.astype("float64").var((0, 2, 3))
    _, mean, variance, *_ = results(x, g, scale, bias, 1)
    np.testing.assert_allclose(variance, exact, rtol=1e-5)
    np.testing.assert_allclose(mean, x.mean((0, 2, 3), dtype="float64"), rtol=1e-7)


def test_bits_do_not_depend_on_threads() -> None:
    arrays = inputs(0, (9, 23, 31, 37), 1)
    alone = results(*arrays, 1)
    check_threads(lambda: results(*arrays, 1), alone)
