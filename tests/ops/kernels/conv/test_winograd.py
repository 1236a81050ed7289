"""Winograd's convolution against sums of products in float64: values, gradients, threads, and when
it is left aside."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError
from graphflow.frontend.interpreter import evaluate
from graphflow.ir.op import REGISTRY
from graphflow.ops import nn
from graphflow.ops.windows.window_arguments import Windows
from tests.ops.kernels.sharing import check_threads, chosen_kernel, three

Array = np.ndarray[Any, Any]
CLOSE = 1e-5  # of the largest number


@pytest.fixture(autouse=True)
def generated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHFLOW_WINOGRAD", raising=False)


def attributes(padding: tuple[tuple[int, int], ...], **more: Any) -> dict[str, Any]:
    return {"stride": (1, 1), "padding": padding, "dilation": (1, 1), "groups": 1, **more}


def inputs(
    seed: int, images: int, channels: int, outputs: int, size: tuple[int, int], padding: Any
) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(seed)
    out = tuple(n + sum(p) - 2 for n, p in zip(size, padding, strict=True))
    shapes = (images, channels, *size), (outputs, channels, 3, 3), (images, outputs, *out)
    x, w, g = (rng.normal(size=shape).astype("float32") for shape in shapes)
    return x, w, g


def assert_close(have: Array, want: Array) -> None:
    assert np.isfinite(have).all()
    assert np.abs(have - want).max() <= CLOSE * np.abs(want).max()


@given(
    seed=st.integers(0, 9),
    images=st.integers(1, 5),
    channels=st.integers(16, 140),
    outputs=st.integers(16, 140),
    size=st.tuples(st.integers(3, 21), st.integers(3, 21)),
    padding=st.tuples(*[st.tuples(st.integers(0, 4), st.integers(0, 4))] * 2),
)
@settings(max_examples=40, deadline=None)
def test_values_and_gradients_are_those_of_plain_sums(
    seed: int, images: int, channels: int, outputs: int, size: Any, padding: Any
) -> None:
    x, w, g = inputs(seed, images, channels, outputs, size, padding)
    attrs = attributes(padding)
    wide = three(*(a.astype("float64") for a in (x, w, g)), attrs)
    for have, want in zip(three(x, w, g, attrs), wide, strict=True):
        assert_close(have, want)


SHAPES = [
    pytest.param(9, 64, 64, (32, 32), id="chunks of images"),
    pytest.param(1, 32, 48, (90, 70), id="bands of one image"),
    pytest.param(4, 320, 272, (8, 8), id="few tiles, many channels"),
    pytest.param(40, 256, 128, (16, 16), id="several passes"),
]


@pytest.mark.parametrize("images, channels, outputs, size", SHAPES)
def test_bits_do_not_depend_on_threads(
    images: int, channels: int, outputs: int, size: tuple[int, int]
) -> None:
    padding = ((1, 1), (1, 1))
    x, w, g = inputs(0, images, channels, outputs, size, padding)
    attrs = attributes(padding)
    windows = Windows((3, 3), (1, 1), (1, 1), (1, 1), size)
    assert chosen_kernel(x, outputs, windows, 1) == "winograd"
    alone = three(x, w, g, attrs)
    for have, want in zip(alone, three(x, w, g, {**attrs, "exact": True}), strict=True):
        assert_close(have, want)
    check_threads(lambda: three(x, w, g, attrs), alone)


def test_an_image_has_the_same_bits_whatever_stands_beside_it() -> None:
    padding = ((1, 1), (1, 1))
    x, w, g = inputs(0, 20, 96, 272, (9, 8), padding)
    attrs = attributes(padding)
    whole = three(x, w, g, attrs)[:2]
    single = three(x[7:8], w, g[7:8], attrs)[:2]
    for all_images, one in zip(whole, single, strict=True):
        assert all_images[7:8].tobytes() == one.tobytes()


def test_it_is_left_aside_where_it_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.zeros((2, 48, 8, 8), "float32")
    plain = Windows((3, 3), (1, 1), (1, 1), (1, 1), (8, 8))
    assert chosen_kernel(x, 16, plain, 1) == "winograd"
    assert chosen_kernel(x.astype("float64"), 16, plain, 1) != "winograd"
    assert chosen_kernel(x, 15, plain, 1) != "winograd"
    assert chosen_kernel(x, 16, plain, 2) != "winograd"
    for change in (
        {"stride": (2, 2)}, {"dilation": (2, 2)}, {"kernel": (3, 1)}, {"out": (1, 1)},
    ):  # fmt: skip
        assert chosen_kernel(x, 16, plain._replace(**change), 1) != "winograd"
    monkeypatch.setenv("GRAPHFLOW_JIT", "off")
    assert chosen_kernel(x, 16, plain, 1) != "winograd"


def test_whole_numbers_stay_whole_where_it_is_opted_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    x, w = rng.integers(-9, 9, (2, 32, 12, 12)), rng.integers(-9, 9, (32, 32, 3, 3))
    exact = REGISTRY["conv"].run(np, [x.astype("float64"), w.astype("float64")], attributes(
        ((1, 1), (1, 1))))[0]  # fmt: skip
    a, b = x.astype("float32"), w.astype("float32")

    def value(**how: Any) -> Array:
        return np.asarray(evaluate([nn.conv2d(a, b, padding=1, **how)], {})[0])

    assert (value(exact=True) == exact).all()
    assert not (value() == exact).all()
    monkeypatch.setenv("GRAPHFLOW_WINOGRAD", "off")
    assert (value() == exact).all()
    assert not (value(exact=False) == exact).all()
    layer = nn.Conv2d(32, 32, 3, exact=True)
    (node,) = [n for n in gf.Graph([layer(a)]).nodes if n.op.name == "conv"]
    assert node.attrs["exact"] is True


def test_the_choice_passes_on_to_the_gradients() -> None:
    x = gf.placeholder("float32", (2, 16, 8, 8))
    w = gf.placeholder("float32", (16, 16, 3, 3))
    slopes = gf.gradients(nn.conv2d(x, w, padding=1, exact=True), [x, w])
    gradients = [t.node for t in slopes]
    assert [n.op.name for n in gradients] == ["conv_transpose", "conv_weight_grad"]
    assert all(n.attrs["exact"] is True for n in gradients)


def test_exact_is_a_truth_value() -> None:
    x, w = np.zeros((1, 16, 8, 8), "float32"), np.zeros((16, 16, 3, 3), "float32")
    with pytest.raises(ArgumentError, match="exact must be True or False or None, not 'no'"):
        nn.conv2d(x, w, exact="no")


def test_a_nan_reaches_all_that_look_at_it_and_no_other_tile() -> None:
    x, w, _ = inputs(0, 1, 40, 40, (12, 12), ((1, 1), (1, 1)))
    x[0, 3, 6, 6] = np.nan
    y = REGISTRY["conv"].run(np, [x, w], attributes(((1, 1), (1, 1))))[0]
    assert np.isnan(y[0, :, 5:8, 5:8]).all()
    assert np.isfinite(y[0, :, :4]).all()
