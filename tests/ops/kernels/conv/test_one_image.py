"""Convolutions of one small image against sums of products in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphflow.ir.op import REGISTRY
from graphflow.ops.kernels.conv.one_image import MOST_POSITIONS
from graphflow.ops.windows.window_arguments import Windows, drop_unseen_taps
from tests.ops.kernels.sharing import HAS_PRODUCTS, check_threads, chosen_kernel

Axis = st.tuples(
    *(st.integers(low, high) for low, high in ((1, 9), (1, 3), (1, 3), (1, 2), (0, 2)))
)


@given(axes=st.lists(Axis, min_size=1, max_size=3), channels=st.tuples(*[st.integers(1, 70)] * 2))
@settings(max_examples=60, deadline=None)
def test_values_are_those_of_plain_sums(axes: Any, channels: tuple[int, int]) -> None:
    size, kernel, stride, dilation, before = zip(*axes, strict=True)
    rooms = [n + 2 * b - (k - 1) * d - 1 for n, k, _, d, b in axes]
    assume(min(rooms) >= 0)
    out = tuple(room // s + 1 for room, s in zip(rooms, stride, strict=True))
    assume(np.prod(out) <= MOST_POSITIONS)
    inputs, outputs = channels
    rng = np.random.default_rng(0)
    x = rng.normal(size=(1, inputs, *size)).astype("float32")
    w = rng.normal(size=(outputs, inputs, *kernel)).astype("float32")
    windows, _ = drop_unseen_taps(Windows(kernel, stride, before, dilation, out), size)
    if max(windows.kernel) > 1 or out != size:
        assert (chosen_kernel(x, outputs, windows) == "one_image") == HAS_PRODUCTS
    attrs = {
        "stride": stride, "padding": tuple((b, b) for b in before), "dilation": dilation,
        "groups": 1,
    }  # fmt: skip
    (have,) = REGISTRY["conv"].run(np, [x, w], attrs)
    (want,) = REGISTRY["conv"].run(np, [x.astype("float64"), w.astype("float64")], attrs)
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=2e-6 * np.abs(want).max())


def test_bits_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype("float32") for s in ((1, 200, 7, 7), (300, 200, 3, 3)))
    attrs = {"stride": (1, 1), "padding": ((1, 1),) * 2, "dilation": (1, 1), "groups": 1}

    def compute() -> list[Any]:
        return REGISTRY["conv"].run(np, [x, w], attrs)

    check_threads(compute, compute())
