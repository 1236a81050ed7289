"""Direct convolutions with masks for padding against those of planes with padding around them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphflow.ops.kernels.conv.direct import direct, masked_direct
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.windows.window_arguments import Windows
from tests.ops.kernels.sharing import check_threads

pytestmark = pytest.mark.skipif(
    not is_jit_enabled() or vector_width() != 16, reason="kernels of 16 lanes"
)
Axes = st.tuples(st.integers(1, 40), st.integers(0, 4), st.integers(0, 4))


@given(
    kernel=st.sampled_from([(1, 2), (3, 3), (5, 5), (4, 1)]),
    stride=st.sampled_from([(1, 1), (2, 2), (3, 1), (1, 2)]),
    dilation=st.sampled_from([(1, 1), (2, 3)]),
    channels=st.sampled_from([(1, 1, 1), (5, 1, 1), (7, 2, 3), (1, 3, 10), (1, 8, 7), (1, 2, 32)]),
    axes=st.tuples(Axes, Axes),
    images=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_bits_are_those_of_padded_planes(
    kernel: Any, stride: Any, dilation: Any, channels: Any, axes: Any, images: int
) -> None:
    groups, inputs, outputs = channels
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    rooms = [n + low + high - s for (n, low, high), s in zip(axes, spans, strict=True)]
    assume(min(rooms) >= 0)
    out = tuple(room // s + 1 for room, s in zip(rooms, stride, strict=True))
    before = tuple(low for _, low, _ in axes)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(images, groups * inputs, *(n for n, _, _ in axes))).astype("float32")
    w = rng.normal(size=(groups * outputs, inputs, *kernel)).astype("float32")
    windows = Windows(kernel, stride, before, dilation, out)
    have, want = (np.full((images, groups * outputs, *out), np.nan, "float32") for _ in range(2))
    planned = masked_direct.plan(images, x.shape[1], len(w), x.shape[2:], windows, groups)
    assert planned is not None
    masked_direct.convolve(have, x, w, planned)
    # Distances between elements of x are for padded planes alone; those of 1 change nothing.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masked_direct, "plan", lambda *_: None)
        direct.convolve(want, x, w, windows, groups)
    assert have.tobytes() == want.tobytes()


def test_bits_do_not_depend_on_threads() -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype("float32") for s in ((3, 96, 30, 33), (96, 1, 5, 5)))
    windows = Windows((5, 5), (1, 1), (2, 2), (1, 1), (30, 33))
    planned = masked_direct.plan(3, 96, 96, (30, 33), windows, 96)
    assert planned is not None

    def compute() -> list[Any]:
        out = np.empty_like(x)
        masked_direct.convolve(out, x, w, planned)
        return [out]

    check_threads(compute, compute())


def test_large_windows_have_no_plan() -> None:
    windows = Windows((1, 512), (1, 1), (0, 0), (1, 1), (1, 1000))
    assert masked_direct.plan(1, 1, 257, (1, 1511), windows, 1) is None
