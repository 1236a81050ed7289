"""Gradients of grouped convolutions with masks for padding against sums in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from graphflow.ops.kernels.conv.direct import (
    masked_input_gradient,
    masked_weight_gradient,
    phases,
)
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.windows.window_arguments import Windows
from tests.ops.kernels.sharing import check_threads, chosen_kernel, three

pytestmark = pytest.mark.skipif(
    not is_jit_enabled() or vector_width() != 16, reason="kernels of 16 lanes"
)
Axes = st.tuples(st.integers(1, 40), st.integers(0, 5), st.integers(0, 4))


class Drawn:
    """A convolution of drawn arrays: x, w and the cotangent g."""

    def __init__(
        self, kernel: Any, stride: Any, dilation: Any, channels: Any, axes: Any, images: int
    ) -> None:
        self.groups, inputs, outputs = channels
        spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
        rooms = [n + low + high - s for (n, low, high), s in zip(axes, spans, strict=True)]
        if min(rooms) < 0:
            reject()
        out = tuple(room // s + 1 for room, s in zip(rooms, stride, strict=True))
        rng = np.random.default_rng(0)
        space = tuple(n for n, _, _ in axes)
        self.windows = Windows(kernel, stride, tuple(low for _, low, _ in axes), dilation, out)
        self.x, self.w, self.g = (
            rng.normal(size=shape).astype("float32")
            for shape in (
                (images, self.groups * inputs, *space),
                (self.groups * outputs, inputs, *kernel),
                (images, self.groups * outputs, *out),
            )
        )
        self.attrs = {
            "stride": stride, "padding": tuple((low, high) for _, low, high in axes),
            "dilation": dilation, "groups": self.groups,
        }  # fmt: skip

    def compute_in_float64(self) -> list[Any]:
        return three(*(a.astype("float64") for a in (self.x, self.w, self.g)), self.attrs)

    def weight_gradient(self) -> Any:
        have = np.full_like(self.w, np.nan)
        assert masked_weight_gradient.write_depthwise_gradient(have, self.x, self.g, self.windows)
        return have

    def input_gradient(self) -> Any:
        have = np.full_like(self.x, np.nan)
        assert masked_input_gradient.write_input_gradient(
            have, self.g, self.w, self.windows, self.groups
        )
        return have

    def input_gradient_by_phases(self) -> Any:
        have = np.full_like(self.x, np.nan)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(masked_input_gradient, "write_input_gradient", lambda *_: False)
            phases.input_gradient(have, self.g, self.w, self.windows, self.groups)
        return have


def _check_close(have: Any, want: Any) -> None:
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * max(1e-30, np.abs(want).max()))


@given(
    kernel=st.sampled_from([(1, 2), (3, 3), (5, 5), (4, 1), (7, 7), (2, 9)]),
    stride=st.sampled_from([(1, 1), (2, 2), (3, 1), (1, 2)]),
    dilation=st.sampled_from([(1, 1), (2, 3)]),
    channels=st.sampled_from([(2, 1, 1), (5, 1, 1), (7, 1, 3)]),
    axes=st.tuples(Axes, Axes),
    images=st.integers(1, 4),
)
@settings(max_examples=80, deadline=None)
def test_gradients_in_the_weight_are_plain_sums(**drawn: Any) -> None:
    case = Drawn(**drawn)
    _check_close(case.weight_gradient(), case.compute_in_float64()[2])


@given(
    kernel=st.sampled_from([(1, 2), (3, 3), (5, 5), (4, 1), (7, 7), (2, 9)]),
    stride=st.sampled_from([(2, 2), (1, 2)]),
    dilation=st.just((1, 1)),
    channels=st.sampled_from([(2, 1, 1), (5, 1, 2), (3, 2, 3), (1, 3, 8)]),
    axes=st.tuples(Axes, Axes),
    images=st.integers(1, 3),
)
@settings(max_examples=80, deadline=None)
def test_gradients_in_the_input_are_plain_sums(**drawn: Any) -> None:
    case = Drawn(**drawn)
    have = case.input_gradient()
    _check_close(have, case.compute_in_float64()[1])
    if phases.has_phases(case.windows):
        np.testing.assert_array_equal(have, case.input_gradient_by_phases())


@pytest.mark.parametrize("stride", [1, 2])
def test_infinities_that_no_window_sees_do_not_reach_the_weight(stride: int) -> None:
    axes = ((9, 0, 0), (10, 0, 0))  # windows of 4 with stride 2 end at column 9, of 3 with 3 at 8
    case = Drawn((2, 3), (1, stride), (1, 1), (3, 1, 1), axes, 2)
    seen = (case.windows.out[1] - 1) * stride + 3
    case.x[..., seen:] = np.inf
    assert seen + stride > 10 and np.isfinite(case.weight_gradient()).all()


def test_bits_do_not_depend_on_threads() -> None:
    axes = ((30, 2, 2), (33, 2, 2))
    case = Drawn((5, 5), (2, 2), (1, 1), (96, 1, 1), axes, 4)
    assert chosen_kernel(case.x, 96, case.windows, 96) == "direct"
    for compute in (case.weight_gradient, case.input_gradient):
        alone = compute()
        check_threads(lambda compute=compute: [compute()], [alone])
