"""Which kernel the table chooses for a convolution and for its two gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from graphflow.ops.kernels.conv.conv_shape import ConvShape, Target
from graphflow.ops.kernels.conv.kernel_table import TABLE, choose
from graphflow.ops.windows.window_arguments import Windows
from tests.ops.kernels.sharing import HAS_PRODUCTS

TARGETS: tuple[Target, ...] = ("y", "x", "w")


def shape(
    channels: tuple[int, int], size: int, kernel: int, *, rank: int = 2, stride: int = 1,
    groups: int = 1, images: int = 8, dtype: str = "float32", **more: Any,
) -> ConvShape:  # fmt: skip
    """Square images and windows, padded so that stride 1 keeps the size."""
    before = kernel // 2
    out = (size + 2 * before - kernel) // stride + 1
    sizes = (kernel, stride, before, 1, out)
    windows = Windows(*((n,) * rank for n in sizes))
    return ConvShape(
        np, np.dtype(dtype), images, *channels, (size,) * rank, windows, groups, **more
    )


CASES = {
    "3x3": (shape((64, 64), 32, 3), "winograd winograd winograd"),
    "exact": (shape((64, 64), 32, 3, exact=True), "implicit_gemm implicit_gemm implicit_gemm"),
    "strided": (shape((64, 128), 32, 3, stride=2), "implicit_gemm implicit_gemm implicit_gemm"),
    "few inputs": (shape((3, 64), 32, 3), "direct direct implicit_gemm"),
    "few inputs, strided": (
        shape((3, 64), 32, 7, stride=2), "implicit_gemm phases implicit_gemm"
    ),
    "few channels of large images": (shape((3, 64), 224, 7, stride=2), "direct phases direct"),
    "patches": (shape((3, 64), 32, 8, stride=8), "im2col phases im2col"),
    "one small image": (shape((64, 64), 7, 3, images=1), "one_image winograd winograd"),
    "spectrogram": (
        shape((1, 257), 4000, 512, rank=1)._replace(
            windows=Windows((512,), (160,), (0,), (1,), (22,))
        ),
        "strided_view phases im2col",
    ),
    "few on both sides": (shape((16, 24), 32, 3), "direct direct winograd"),
    "1x1": (shape((128, 128), 28, 1), "pointwise pointwise pointwise"),
    "depthwise": (shape((128, 128), 28, 3, groups=128), "direct direct direct"),
    "depthwise, strided": (shape((128, 128), 28, 3, groups=128, stride=2), "direct direct direct"),
    "depthwise, strided, 5x5": (
        shape((128, 128), 28, 5, groups=128, stride=2), "direct phases direct"
    ),
    "depthwise, 3 axes": (
        shape((8, 8), 9, 3, rank=3, groups=8), "implicit_gemm implicit_gemm implicit_gemm"
    ),
    "3 axes": (shape((6, 9), 9, 3, rank=3), "implicit_gemm implicit_gemm implicit_gemm"),
    "groups": (shape((64, 64), 16, 3, groups=4), "direct direct implicit_gemm"),
    "wide groups": (
        shape((256, 256), 7, 3, groups=4), "implicit_gemm implicit_gemm implicit_gemm"
    ),
    "large images": (shape((64, 64), 256, 5), "im2col im2col im2col"),
}  # fmt: skip

WITHOUT_PRODUCTS = {"one_image": "winograd", "pointwise": "im2col", "strided_view": "im2col"}


@pytest.mark.parametrize("case, names", CASES.values(), ids=CASES)
def test_a_shape_has_these_kernels_forward_and_back(case: ConvShape, names: str) -> None:
    expected = names.split()
    if not HAS_PRODUCTS:
        expected = [WITHOUT_PRODUCTS.get(name, name) for name in expected]
    assert [choose(case, target).name for target in TARGETS] == expected


def test_without_generated_kernels_columns_do_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    found = {choose(case, target).name for case, _ in CASES.values() for target in TARGETS}
    assert found == {"im2col"}


def test_every_kernel_of_the_table_is_some_shapes_choice() -> None:
    found = {name for _, names in CASES.values() for name in names.split()}
    assert found == {kernel.name for kernel in TABLE}
