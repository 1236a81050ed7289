"""Fourier transforms and spectra against torch: values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import graphflow as gf
from graphflow.frontend.interpreter import evaluate

torch = pytest.importorskip("torch", reason="needs torch: pip install 'graphflow[bench]'")

from tests.peers.comparing import agree  # noqa: E402

SHAPES = st.lists(st.integers(2, 5), min_size=1, max_size=3).map(tuple)
NORMS = st.sampled_from(["backward", "ortho", "forward"])
SEEDS = st.integers(0, 99)


def draw_signal(seed: int, shape: tuple[int, ...], is_complex: bool) -> Any:
    rng = np.random.default_rng(seed)
    x: Any = rng.normal(size=shape)
    return x + 1j * rng.normal(size=shape) if is_complex else x


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("name", ["fft", "ifft", "rfft", "irfft", "hfft", "ihfft"])
@given(SHAPES, st.data(), NORMS, SEEDS)
@settings(max_examples=15)
def test_transforms_along_an_axis(
    name: str, is_complex: bool, shape: tuple[int, ...], data: Any, norm: str, seed: int
) -> None:
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    n = data.draw(st.none() | st.integers(1, 7))
    ours, theirs = getattr(gf.fft, name), getattr(torch.fft, name)
    agree(
        lambda x: ours(x, n, axis, norm),
        lambda x: theirs(x, n, axis, norm),
        [draw_signal(seed, shape, is_complex and name not in ("rfft", "ihfft"))],
    )


@pytest.mark.parametrize("is_complex", [False, True])
@pytest.mark.parametrize("name", ["fftn", "ifftn", "rfftn", "irfftn"])
@given(SHAPES, st.data(), NORMS, SEEDS)
@settings(max_examples=15)
def test_transforms_along_several_axes(
    name: str, is_complex: bool, shape: tuple[int, ...], data: Any, norm: str, seed: int
) -> None:
    count = data.draw(st.integers(1, len(shape)))
    s = data.draw(st.none() | st.lists(st.integers(1, 6), min_size=count, max_size=count))
    axes = data.draw(st.permutations(range(len(shape))))[:count]
    ours, theirs = getattr(gf.fft, name), getattr(torch.fft, name)
    agree(
        lambda x: ours(x, s, axes, norm),
        lambda x: theirs(x, s, axes, norm),
        [draw_signal(seed, shape, is_complex and name != "rfftn")],
    )


@given(st.integers(1, 4), st.integers(4, 9), st.integers(0, 3), st.booleans(), SEEDS)
@settings(max_examples=20)
def test_short_time_spectra_and_back(
    step: int, length: int, longer: int, onesided: bool, seed: int
) -> None:
    points = length + longer
    x = draw_signal(seed, (2, points + 3 * step), False)
    # torch cuts frames of fft_length, the window in their middle
    window = np.zeros(points)
    window[longer // 2 : longer // 2 + length] = np.hamming(length)
    theirs_window = torch.tensor(np.hamming(length))
    agree(
        lambda x: gf.signal.stft(x, points, step, window=window, onesided=onesided),
        lambda x: torch.stft(
            x, points, step, length, theirs_window, center=False, onesided=onesided,
            return_complex=True,
        ).mT,
        [x],
    )  # fmt: skip
    if step <= length // 2 and longer == 0:
        agree(
            lambda x: gf.signal.istft(
                gf.signal.stft(x, points, step, window=window) ** 2, points, step, window=window
            ),
            lambda x: torch.istft(
                torch.stft(x, points, step, window=theirs_window, center=False, return_complex=True)
                ** 2,
                points,
                step,
                window=theirs_window,
                center=False,
            ),
            [x],
        )


@pytest.mark.parametrize("periodic", [True, False])
@pytest.mark.parametrize("size", [1, 2, 7, 16])
def test_windows(size: int, periodic: bool) -> None:
    for name in ("hann_window", "hamming_window", "blackman_window"):
        (value,) = evaluate([getattr(gf.signal, name)(size, periodic, dtype="float64")])
        want = getattr(torch, name)(size, periodic, dtype=torch.float64).numpy()
        np.testing.assert_allclose(value, want, atol=1e-12)
