"""Convolutions by windows of one element against sums of products."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.ir.op import REGISTRY
from graphflow.ops.kernels.conv.conv_shape import ConvShape
from graphflow.ops.kernels.conv.kernel_table import choose
from graphflow.ops.windows.window_arguments import Windows
from tests.ops.kernels.sharing import HAS_PRODUCTS, check_threads, chosen_kernel, three


@given(
    dtype=st.sampled_from(["float32", "float64"]),
    images=st.integers(1, 3),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    axes=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 3)), min_size=1, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_values_and_gradients_are_products_of_matrices(
    dtype: str, images: int, inputs: int, outputs: int, axes: list[tuple[int, int]]
) -> None:
    sizes, stride = zip(*axes, strict=True)
    if np.prod(sizes) > 900:
        sizes = tuple(min(n, 9) for n in sizes)
    rank = len(sizes)
    seen = tuple(slice(None, None, s) for s in stride)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(images, inputs, *sizes)).astype(dtype)
    w = rng.normal(size=(outputs, inputs, *(1,) * rank)).astype(dtype)
    g = rng.normal(size=(images, outputs, *x[(0, 0, *seen)].shape)).astype(dtype)
    windows = Windows((1,) * rank, stride, (0,) * rank, (1,) * rank, g.shape[2:])
    attrs: dict[str, Any] = {
        "stride": stride, "padding": ((0, 0),) * rank, "dilation": (1,) * rank, "groups": 1,
    }  # fmt: skip
    copied = images == 1 and dtype == "float32" and g.shape != (1, outputs, *sizes)
    products = "one_image" if copied else "pointwise"
    assert chosen_kernel(x, outputs, windows, 1) == (products if HAS_PRODUCTS else "im2col")
    assert chosen_kernel(x, outputs, windows._replace(before=(1,) * rank), 1) != "pointwise"
    assert chosen_kernel(x, outputs, windows, 2) != "pointwise"
    matrix, part = w.reshape(outputs, inputs).astype("float64"), x[(..., *seen)].astype("float64")
    back = np.zeros(x.shape)
    back[(..., *seen)] = np.einsum("oc,no...->nc...", matrix, g)
    flat = [a.reshape(images, a.shape[1], -1) for a in (g, part)]
    wanted = (
        np.einsum("oc,nc...->no...", matrix, part),
        back,
        np.einsum("nop,ncp->oc", *flat).reshape(w.shape),
    )
    have = (
        REGISTRY["conv"].run(np, [x, w], attrs)[0],
        REGISTRY["conv_transpose"].run(np, [g, w], {**attrs, "sizes": sizes})[0],
        REGISTRY["conv_weight_grad"].run(np, [x, g], {**attrs, "kernel": (1,) * rank})[0],
    )
    near = 1e-5 if dtype == "float32" else 1e-12
    for a, b in zip(have, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=near, atol=near * max(1.0, np.abs(b).max()))


@pytest.mark.parametrize("stride", [1, 2])
def test_bits_do_not_depend_on_threads(stride: int) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(5, 96, 30, 30)).astype("float32")
    w = rng.normal(size=(130, 96, 1, 1)).astype("float32")
    g = rng.normal(size=(5, 130, 30 // stride, 30 // stride)).astype("float32")
    attrs = {
        "stride": (stride,) * 2, "padding": ((0, 0),) * 2, "dilation": (1, 1), "groups": 1,
    }  # fmt: skip

    def results() -> list[Any]:
        return three(x, w, g, attrs)

    check_threads(results, results())


@pytest.mark.parametrize("rank, kernel", [(1, 3), (2, 2), (3, 2)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_windows_that_tile_the_input_are_products_going_back(
    rank: int, kernel: int, dtype: str
) -> None:
    rng = np.random.default_rng(0)
    g = rng.normal(size=(2, 30, *(5,) * rank)).astype(dtype)
    w = rng.normal(size=(30, 13, *(kernel,) * rank)).astype(dtype)
    sizes = (5 * kernel,) * rank
    attrs: dict[str, Any] = {
        "stride": (kernel,) * rank, "padding": ((0, 0),) * rank, "dilation": (1,) * rank,
        "groups": 1, "sizes": sizes,
    }  # fmt: skip
    windows = Windows((kernel,) * rank, (kernel,) * rank, (0,) * rank, (1,) * rank, g.shape[2:])
    shape = ConvShape(np, g.dtype, 2, 13, 30, sizes, windows, 1)
    assert (choose(shape, "x").name == "pointwise") == HAS_PRODUCTS
    assert choose(shape._replace(space=tuple(n + 1 for n in sizes)), "x").name != "pointwise"

    def compute() -> list[Any]:
        return REGISTRY["conv_transpose"].run(np, [g, w], attrs)

    (have,) = compute()
    letters = "xyz"[:rank], "XYZ"[:rank]
    pairs = "".join(a + b for a, b in zip(*letters, strict=True))
    want = np.einsum(f"no{letters[0]},oc{letters[1]}->nc{pairs}", g, w).reshape(have.shape)
    near = 1e-5 if dtype == "float32" else 1e-12
    np.testing.assert_allclose(have, want, rtol=near, atol=near * np.abs(want).max())
    check_threads(compute, [have])
