"""Convolutions as products of gathered rows against sums of products in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from graphflow.ops.kernels.conv import kernel_table
from graphflow.ops.kernels.conv.implicit.implicit_gemm_text import BLOCK
from graphflow.ops.kernels.conv.implicit.tap_tables import WindowMap, block_tables
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.windows.window_arguments import Windows
from tests.ops.kernels.sharing import check_threads, chosen_kernel, three

Array = np.ndarray[Any, Any]


def draw_operands(
    seed: int, images: int, channels: tuple[int, int], size: Any, attrs: Any
) -> list[Array]:
    """x, a weight and a cotangent, if a window fits; `attrs` with the kernel."""
    kernel = attrs["kernel"]
    axes = zip(size, kernel, attrs["stride"], attrs["padding"], attrs["dilation"], strict=True)
    out = [(n + sum(p) - (k - 1) * d - 1) // s + 1 for n, k, s, p, d in axes]
    if min(out) < 1:
        return []
    rng = np.random.default_rng(seed)
    inputs, outputs = channels  # of a group
    groups = attrs.get("groups", 1)
    shapes = (
        (images, groups * inputs, *size), (groups * outputs, inputs, *kernel),
        (images, groups * outputs, *out),
    )  # fmt: skip
    return [rng.normal(size=s).astype("float32") for s in shapes]


@st.composite
def cases(draw: Any) -> tuple[list[Array], dict[str, Any]]:
    rank = draw(st.integers(1, 3))

    def each(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=rank, max_size=rank)))

    attrs = {
        "kernel": each(1, 3), "stride": each(1, 3), "dilation": each(1, 2), "exact": True,
        "padding": tuple(zip(each(0, 4), each(0, 4), strict=True)),
        "groups": draw(st.sampled_from([1, 1, 2, 5])),
    }  # fmt: skip
    counts = st.one_of(st.integers(1, 20), st.integers(12, 140))
    channels = draw(counts), draw(counts)
    size = each(1, 12 if rank < 3 else 5)
    arrays = draw_operands(draw(st.integers(0, 9)), draw(st.integers(1, 4)), channels, size, attrs)
    assume(arrays)
    return arrays, {k: v for k, v in attrs.items() if k != "kernel"}


def assert_close(have: Array, want: Array) -> None:
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=2e-6 * np.abs(want).max())


@given(cases())
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_are_those_of_plain_sums(
    case: tuple[list[Array], dict[str, Any]],
) -> None:
    arrays, attrs = case
    wide = three(*(a.astype("float64") for a in arrays), attrs)
    (kernel,) = (k for k in kernel_table.TABLE if k.name == "implicit_gemm")
    with pytest.MonkeyPatch.context() as patch:
        if is_jit_enabled():
            patch.setattr(kernel_table, "choose", lambda *_: kernel)
        found = three(*arrays, attrs)
    for have, want in zip(found, wide, strict=True):
        assert_close(have, want)


LARGE = [
    pytest.param(20, (64, 130), (33, 30), 2, 1, 1, id="chunks of images"),
    pytest.param(9, (256, 80), (8, 8), 2, 1, 1, id="many channels"),
    pytest.param(3, (26, 40), (80, 90), 1, 2, 1, id="dilated"),
    pytest.param(20, (7, 90), (33, 30), 2, 1, 1, id="few channels"),
    pytest.param(5, (40, 66), (9, 8), 1, 1, 3, id="groups"),
]


@pytest.mark.parametrize("images, channels, size, stride, dilation, groups", LARGE)
def test_bits_do_not_depend_on_threads(
    images: int, channels: tuple[int, int], size: tuple[int, int], stride: int,
    dilation: int, groups: int,
) -> None:  # fmt: skip
    attrs: dict[str, Any] = {
        "stride": (stride,) * 2, "padding": ((1, 2),) * 2, "dilation": (dilation,) * 2,
        "groups": groups,
    }  # fmt: skip
    x, w, g = draw_operands(0, images, channels, size, {**attrs, "kernel": (3, 3)})
    windows = Windows((3, 3), attrs["stride"], (1, 1), attrs["dilation"], g.shape[2:])
    assert chosen_kernel(x, groups * channels[1], windows, groups) == "implicit_gemm"
    alone = three(x, w, g, attrs)
    for have, want in zip(
        alone, three(*(a.astype("float64") for a in (x, w, g)), attrs), strict=True
    ):
        assert_close(have, want)
    check_threads(lambda: three(x, w, g, attrs), alone)


def test_an_image_has_the_same_bits_whatever_stands_beside_it() -> None:
    attrs: dict[str, Any] = {"stride": (2, 2), "padding": ((1, 1),) * 2, "dilation": (1, 1)}
    x, w, g = draw_operands(0, 30, (40, 70), (18, 18), {**attrs, "kernel": (3, 3)})
    attrs["groups"] = 1
    whole = three(x, w, g, attrs)[:2]
    single = three(x[7:8], w, g[7:8], attrs)[:2]
    for all_images, one in zip(whole, single, strict=True):
        assert all_images[7:8].tobytes() == one.tobytes()


def test_positions_near_an_edge_leave_out_the_taps_that_see_padding() -> None:
    """The atrous windows of DeepLab: most taps of most positions see no pixel."""
    windows = Windows((3, 3), (1, 1), (12, 12), (12, 12), (14, 14))
    tables = block_tables(WindowMap((14, 14), windows, False), 2)
    positions = np.concatenate([table.targets.reshape(-1) for _, table, _ in tables])
    assert len(np.unique(positions)) == 2 * 14 * 14
    work = sum(blocks * len(table.taps) for blocks, table, _ in tables)
    assert work < 2 * 14 * 14 * 9 / BLOCK / 4
    attrs = {"stride": (1, 1), "padding": ((12, 12),) * 2, "dilation": (12, 12)}
    arrays = draw_operands(0, 2, (70, 30), (14, 14), {**attrs, "kernel": (3, 3)})
    attrs["groups"] = 1
    wide = three(*(a.astype("float64") for a in arrays), attrs)
    for have, want in zip(three(*arrays, attrs), wide, strict=True):
        assert_close(have, want)
