"""Convolutions plane by plane against sums of products in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphflow.ir.op import REGISTRY
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.windows.window_arguments import Windows
from tests.ops.kernels.sharing import check_threads, chosen_kernel, three

Array = np.ndarray[Any, Any]


@st.composite
def cases(draw: Any) -> tuple[list[Array], dict[str, Any]]:
    rank = draw(st.integers(1, 2))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    kernel, dilation, stride = each(1, 5), each(1, 3), each(1, 3)
    padding = tuple(zip(each(0, 6), each(0, 6), strict=True))
    size = each(1, 40)
    spans = [(k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True)]
    rooms = [n + sum(p) - s for n, p, s in zip(size, padding, spans, strict=True)]
    assume(min(rooms) >= 0)
    out = [room // s + 1 for room, s in zip(rooms, stride, strict=True)]
    groups = draw(st.sampled_from([1, 1, 3, 17]))
    inputs, outputs = (
        (draw(st.integers(1, 7)), draw(st.integers(1, 20)))
        if groups == 1
        else (draw(st.integers(1, 2)), draw(st.integers(1, 3)))
    )
    images = draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    shapes = (
        (images, inputs * groups, *size), (outputs * groups, inputs, *kernel),
        (images, outputs * groups, *out),
    )  # fmt: skip
    attrs = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    return [rng.normal(size=s).astype("float32") for s in shapes], attrs


@given(cases())
@settings(max_examples=120, deadline=None)
def test_values_and_gradients_are_those_of_plain_sums(
    case: tuple[list[Array], dict[str, Any]],
) -> None:
    arrays, attrs = case
    wide = three(*(a.astype("float64") for a in arrays), attrs)
    for have, want in zip(three(*arrays, attrs), wide, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


LARGE = [
    pytest.param((5, 96, 30, 30), (96, 1, 3, 3), 1, 96, id="depthwise"),
    pytest.param((5, 40, 31, 30), (80, 1, 5, 5), 2, 40, id="depthwise, strided, two each"),
    pytest.param((6, 3, 70, 64), (6, 3, 7, 7), 2, 1, id="few channels"),
    pytest.param((3, 36, 20, 33), (84, 3, 3, 3), 1, 12, id="groups"),
    pytest.param((9, 64, 20, 33), (3, 64, 3, 3), 1, 1, id="few outputs"),
    pytest.param((64, 7, 13, 12), (16, 7, 3, 3), 1, 1, id="short rows"),
]


@pytest.mark.parametrize("shape, weight, stride, groups", LARGE)
def test_bits_do_not_depend_on_threads(
    shape: tuple[int, ...], weight: tuple[int, ...], stride: int, groups: int
) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=s).astype("float32") for s in (shape, weight))
    attrs = {
        "stride": (stride,) * 2, "padding": ((1, 2),) * 2, "dilation": (1, 1), "groups": groups,
        "exact": True,
    }  # fmt: skip
    out = tuple((n + 3 - k) // stride + 1 for n, k in zip(shape[2:], weight[2:], strict=True))
    windows = Windows(weight[2:], (stride,) * 2, (1, 1), (1, 1), out)
    assert chosen_kernel(x, weight[0], windows, groups) == "direct"
    g = rng.normal(size=(shape[0], weight[0], *out)).astype("float32")
    alone = three(x, w, g, attrs)
    wide = three(*(a.astype("float64") for a in (x, w, g)), attrs)
    for have, want in zip(alone, wide, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=2e-6 * np.abs(want).max())
    check_threads(lambda: three(x, w, g, attrs), alone)


def test_infinite_pixels_reach_only_what_looks_at_them() -> None:
    x = np.zeros((1, 2, 9, 40), "float32")
    x[0, 1, 4, 20] = np.inf
    w = np.ones((3, 2, 3, 3), "float32")
    attrs = {"stride": (1, 1), "padding": ((1, 1),) * 2, "dilation": (1, 1), "groups": 1}
    (y,) = REGISTRY["conv"].run(np, [x, w], attrs)
    assert np.argwhere(~np.isfinite(y[0, 0])).min(0).tolist() == [3, 19]
    assert np.argwhere(~np.isfinite(y[0, 0])).max(0).tolist() == [5, 21]
    assert (~np.isfinite(y)).sum() == 27


APART = [
    pytest.param((2, 1, 1600), (33, 1, 256), 80, True, id="spectrogram"),
    pytest.param((3, 3, 33, 32), (24, 3, 8, 8), 8, True, id="patches"),
    pytest.param((3, 3, 32, 32), (24, 3, 4, 4), 2, False, id="half overlapping"),
    pytest.param((3, 3, 32, 32), (24, 3, 3, 3), 3, False, id="low columns"),
]


@pytest.mark.parametrize("shape, weight, stride, apart", APART)
def test_windows_that_hardly_overlap_are_products_of_matrices(
    shape: tuple[int, ...], weight: tuple[int, ...], stride: int, apart: bool
) -> None:
    rng = np.random.default_rng(0)
    rank = len(shape) - 2
    kernel, one = weight[2:], (1,) * rank
    out = tuple((n - k) // stride + 1 for n, k in zip(shape[2:], kernel, strict=True))
    windows = Windows(kernel, (stride,) * rank, (0,) * rank, one, out)
    x = np.empty(shape, "float32")
    if is_jit_enabled():
        assert (chosen_kernel(x, weight[0], windows, 1) == "direct") is not apart
    shapes = (shape, weight, (shape[0], weight[0], *out))
    arrays = [rng.normal(size=s).astype("float32") for s in shapes]
    attrs = {"stride": windows.stride, "padding": ((0, 0),) * rank, "dilation": one, "groups": 1}
    wide = three(*(a.astype("float64") for a in arrays), attrs)
    for have, want in zip(three(*arrays, attrs), wide, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
