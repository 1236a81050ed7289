"""Grid sampling, shuffled pixels and local response normalisation against torch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphflow.ops import nn

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402

F = torch.nn.functional
SPACES = st.lists(st.integers(1, 5), min_size=2, max_size=3)


@given(
    SPACES,
    st.lists(st.integers(1, 4), min_size=3, max_size=3),
    st.sampled_from(["bilinear", "nearest", "bicubic"]),
    st.sampled_from(["zeros", "border", "reflection"]),
    st.booleans(),
    st.integers(0, 99),
)
@settings(max_examples=100)
def test_grid_sample(
    space: list[int], to: list[int], mode: str, padding: str, align: bool, seed: int
) -> None:
    rank = len(space)
    mode = "bilinear" if rank == 3 and mode == "bicubic" else mode
    rng = np.random.default_rng(seed)
    agree(
        lambda x, g: nn.grid_sample(x, g, mode, padding, align),
        lambda x, g: F.grid_sample(x, g, mode, padding, align),
        [rng.normal(size=(2, 3, *space)), rng.uniform(-2, 2, (2, *to[:rank], rank))],
    )


@given(st.lists(st.integers(2, 5), min_size=2, max_size=3), st.booleans())
@settings(max_examples=25)
def test_affine_grid(space: list[int], align: bool) -> None:
    rank = len(space)
    theta = np.random.default_rng(rank).normal(size=(2, rank, rank + 1))
    agree(
        lambda t: nn.affine_grid(t, (2, 3, *space), align),
        lambda t: F.affine_grid(t, [2, 3, *space], align_corners=align),
        [theta],
    )


@given(*[st.integers(1, 3)] * 4)
@settings(max_examples=25)
def test_pixel_shuffle_and_back(c: int, h: int, w: int, factor: int) -> None:
    rng = np.random.default_rng(c)
    deep, wide = (2, c * factor**2, h, w), (2, c, h * factor, w * factor)
    agree(
        lambda x: nn.pixel_shuffle(x, factor),
        lambda x: F.pixel_shuffle(x, factor),
        [rng.normal(size=deep)],
    )
    agree(
        lambda x: nn.pixel_unshuffle(x, factor),
        lambda x: F.pixel_unshuffle(x, factor),
        [rng.normal(size=wide)],
    )


@given(st.integers(1, 7), st.integers(1, 5), st.lists(st.integers(1, 3), min_size=1, max_size=2))
@settings(max_examples=40)
def test_local_response_norm(channels: int, size: int, space: Any) -> None:
    x = np.random.default_rng(size).normal(size=(2, channels, *space))
    agree(
        lambda x: nn.local_response_norm(x, size, 0.3, 0.6, 1.5),
        lambda x: F.local_response_norm(x, size, 0.3, 0.6, 1.5),
        [x],
    )
