"""Pooling against torch, on random shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.frontend.interpreter import evaluate
from graphflow.ops import nn

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402

F = torch.nn.functional
Window = tuple[np.ndarray[Any, Any], dict[str, Any]]


@st.composite
def windows(draw: Any, low: int = 1, high: int = 3, dilations: int = 2) -> Window:
    """x, and arguments that torch takes: padding is at most half of the kernel."""
    rank = draw(st.integers(low, high))

    def each(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(least, most), min_size=rank, max_size=rank)))

    kernel, dilation = each(1, 3), each(1, dilations)
    padding = tuple(min(p, k // 2) for p, k in zip(each(0, 1), kernel, strict=True))
    size = tuple(
        (k - 1) * d + 1 + more for k, d, more in zip(kernel, dilation, each(0, 4), strict=True)
    )
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    # few different numbers, so that windows have equal elements
    x = rng.integers(-3, 3, (2, 2, *size)).astype("float64")
    attrs = {
        "stride": each(1, 3),
        "padding": padding,
        "dilation": dilation,
        "ceil_mode": draw(st.booleans()),
    }
    return x, {"kernel": kernel, **attrs}


def torchs(attrs: dict[str, Any]) -> dict[str, Any]:
    names = {"kernel": "kernel_size"}
    return {names.get(k, k): v for k, v in attrs.items()}


@given(windows())
@settings(max_examples=60)
def test_max_pool(case: Window) -> None:
    x, attrs = case
    name = f"max_pool{x.ndim - 2}d"
    agree(
        lambda x: getattr(nn, name)(x, **attrs), lambda x: getattr(F, name)(x, **torchs(attrs)), [x]
    )
    p = gf.placeholder("float64", x.shape)
    have = evaluate(list(nn.max_pool(p, **attrs, return_indices=True)), {p: x})
    want = getattr(F, name)(torch.tensor(x), **torchs(attrs), return_indices=True)
    for a, b in zip(have, want, strict=True):
        np.testing.assert_array_equal(a, b.numpy())


@given(windows(dilations=1), st.booleans())
@settings(max_examples=60)
def test_avg_pool(case: Window, counted: bool) -> None:
    x, attrs = case
    del attrs["dilation"]
    name = f"avg_pool{x.ndim - 2}d"
    agree(
        lambda x: getattr(nn, name)(x, **attrs, count_include_pad=counted),
        lambda x: getattr(F, name)(x, **torchs(attrs), count_include_pad=counted),
        [x],
    )


@given(windows(2, 2, dilations=1), st.sampled_from([1, 2, 3]))
@settings(max_examples=30)
def test_lp_pool_of_positive_numbers(case: Window, p: int) -> None:
    x, attrs = case
    agree(
        lambda x: nn.lp_pool2d(x, attrs["kernel"], p, attrs["stride"]),
        lambda x: F.lp_pool2d(x, p, attrs["kernel"], attrs["stride"]),
        [x + 5],
    )


@given(windows(), st.lists(st.integers(1, 4), min_size=3, max_size=3))
@settings(max_examples=60)
def test_adaptive_pooling(case: Window, sizes: list[int]) -> None:
    x, _ = case
    rank = x.ndim - 2
    for kind in ("avg", "max"):
        agree(
            lambda x, kind=kind: getattr(nn, f"adaptive_{kind}_pool")(x, sizes[:rank]),
            lambda x, kind=kind: getattr(F, f"adaptive_{kind}_pool{rank}d")(x, sizes[:rank]),
            [x],
        )


def test_global_max_pool_gives_the_first_of_equals_the_gradient() -> None:
    x = np.array([[[[1.0, 3.0], [3.0, 0.0]]]])
    agree(nn.global_max_pool, lambda x: F.adaptive_max_pool2d(x, 1), [x])


@given(windows(dilations=1))
@settings(max_examples=30)
def test_max_unpool(case: Window) -> None:
    x, attrs = case
    rank = x.ndim - 2
    # windows that do not overlap: torch leaves open which of several values stays
    kernel = attrs["kernel"]
    x = np.random.default_rng(0).normal(size=x.shape)
    y, indices = getattr(F, f"max_pool{rank}d")(torch.tensor(x), kernel, return_indices=True)
    size = x.shape[2:]
    agree(
        lambda y: nn.max_unpool(y, indices.numpy(), kernel, output_size=size),
        lambda y: getattr(F, f"max_unpool{rank}d")(y, indices, kernel, output_size=size),
        [y.numpy()],
    )
