"""Windows, frames and short-time spectra against their definitions in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, DTypeError, FeedError, ShapeError
from graphflow.frontend.interpreter import evaluate
from tests.ops.matrices.linalg.test_decompositions import draw_matrices, seeds
from tests.ops.test_registry import check_gradients


def value_of(tensor: Any) -> Any:
    return evaluate([tensor])[0]


# Windows ----------------------------------------------------------------------------------------


@given(st.integers(0, 12))
def test_symmetric_windows_are_numpys_and_periodic_ones_lack_the_last_element(size: int) -> None:
    pairs = [
        (gf.signal.hann_window, np.hanning),
        (gf.signal.hamming_window, np.hamming),
        (gf.signal.blackman_window, np.blackman),
    ]
    for ours, theirs in pairs:
        symmetric = value_of(ours(size, periodic=False, dtype="float64"))
        periodic = value_of(ours(size, dtype="float64"))
        np.testing.assert_allclose(symmetric, theirs(size), atol=1e-12)
        np.testing.assert_allclose(
            periodic, theirs(size + 1)[:-1] if size > 1 else np.ones(size), atol=1e-12
        )


def test_a_hamming_window_takes_other_weights() -> None:
    window = value_of(gf.signal.hamming_window(4, alpha=25 / 46))
    assert window.dtype == "float32"
    np.testing.assert_allclose(window, [4 / 46, 25 / 46, 1, 25 / 46], rtol=1e-6)


# Frames -----------------------------------------------------------------------------------------


def cut_frames(x: Any, length: int, step: int) -> Any:
    starts = range(0, x.shape[-1] - length + 1, step)
    return np.stack([x[..., i : i + length] for i in starts], axis=-2)


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_frames_are_slices_and_overlap_add_puts_them_back(
    n: int, length: int, step: int, batched: bool
) -> None:
    length = min(n, length)
    x = np.arange(1.0, n + 1) * (np.ones((2, 1)) if batched else 1.0)
    frames = gf.signal.frame(x, length, step)
    want = cut_frames(x, length, step)
    assert frames.shape == want.shape
    np.testing.assert_array_equal(value_of(frames), want)
    total = np.zeros((*x.shape[:-1], (want.shape[-2] - 1) * step + length))
    for i in range(want.shape[-2]):
        total[..., i * step : i * step + length] += want[..., i, :]
    np.testing.assert_array_equal(value_of(gf.signal.overlap_add(frames, step)), total)


def test_frames_of_a_signal_of_unknown_length_and_their_gradient() -> None:
    x = gf.placeholder("float64", ("b", "t"))
    frames = gf.signal.frame(x, 4, 2)
    (slope,) = gf.gradients(frames, [x])
    for n in (4, 9):
        a = draw_matrices(0, (2, n), "float64")
        value, counts = evaluate([frames, slope], {x: a})
        np.testing.assert_array_equal(value, cut_frames(a, 4, 2))
        want = np.zeros((2, n))
        for i in range(0, n - 3, 2):
            want[:, i : i + 4] += 1
        np.testing.assert_array_equal(counts, want)


def test_a_fed_signal_that_is_too_short_is_an_error_of_the_step() -> None:
    x = gf.placeholder("float64", (None,))
    frames = gf.signal.frame(x, 4, 2)
    with pytest.raises(FeedError, match="to be at least 0, but these shapes make it -1"):
        evaluate([frames], {x: np.ones(3)})


# Short-time spectra -----------------------------------------------------------------------------


@given(st.integers(1, 5), st.integers(1, 9), st.booleans(), st.integers(0, 3), seeds)
def test_stft_is_the_fft_of_windowed_frames(
    step: int, length: int, onesided: bool, longer: int, seed: int
) -> None:
    x = draw_matrices(seed, (2, length + 3 * step + 1), "float64")
    window = np.hamming(length)
    spectra = gf.signal.stft(
        x, length, step, window=window, fft_length=length + longer, onesided=onesided
    )
    transform = np.fft.rfft if onesided else np.fft.fft
    want = transform(cut_frames(x, length, step) * window, length + longer)
    assert spectra.shape == want.shape
    np.testing.assert_allclose(value_of(spectra), want, atol=1e-9)


def test_stft_of_a_complex_signal_has_all_bins() -> None:
    x = draw_matrices(0, (3, 10), "complex64")
    spectra = value_of(gf.signal.stft(x, 4, 3, onesided=False))
    assert spectra.dtype == "complex64"
    np.testing.assert_allclose(spectra, np.fft.fft(cut_frames(x, 4, 3)), atol=1e-5)


@given(st.integers(1, 4), st.booleans(), st.integers(0, 3), seeds)
def test_istft_undoes_stft_where_windows_cover(
    step: int, onesided: bool, longer: int, seed: int
) -> None:
    x = draw_matrices(seed, (2, 8 + 4 * step), "float64" if onesided else "complex128")
    attrs: dict[str, Any] = {
        "window": gf.signal.hamming_window(8), "fft_length": 8 + longer, "onesided": onesided,
    }  # fmt: skip
    back = gf.signal.istft(gf.signal.stft(x, 8, step, **attrs), 8, step, **attrs)
    assert back.dtype == x.dtype
    np.testing.assert_allclose(value_of(back), x, atol=1e-6)


def test_what_no_window_covers_is_zero() -> None:
    x = np.arange(1.0, 9.0)
    back = gf.signal.istft(gf.signal.stft(x, 2, 3), 2, 3)
    np.testing.assert_allclose(value_of(back), [1, 2, 0, 4, 5, 0, 7, 8], atol=1e-12)


def test_short_time_spectra_are_differentiable_twice() -> None:
    window = np.hamming(4)

    def build(x: Any) -> Any:
        spectra = gf.signal.stft(x, 4, 2, window=window)
        power = gf.abs(spectra) ** 2 * spectra
        return [gf.abs(spectra), gf.signal.istft(power, 4, 2, window=window)]

    check_gradients(build, [draw_matrices(0, (2, 9), "float64")], np.random.default_rng(0))


# Mel filters ------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(8, 64), st.sampled_from([8000, 16000.0]))
def test_mel_filters_are_triangles_between_the_edges(bands: int, points: int, rate: float) -> None:
    low, high = 20.0, 0.45 * rate
    matrix = value_of(gf.signal.mel_weight_matrix(bands, points, rate, low, high, "float64"))
    assert matrix.shape == (points // 2 + 1, bands)
    assert (matrix.max(0) == 1).all() and (matrix >= 0).all()
    peaks = matrix.argmax(0)
    assert (np.diff(peaks) >= 0).all()
    for band, peak in zip(matrix.T, peaks, strict=True):
        assert (np.diff(band[: peak + 1]) >= 0).all() and (np.diff(band[peak:]) <= 0).all()


def test_mel_filters_of_a_case_worked_by_hand() -> None:
    """Edges at bins 0, 1, 2, 3, 4, 6, 9 of a transform of 16 points, at 8192 Hz."""
    matrix = value_of(gf.signal.mel_weight_matrix(8, 16, 8192, 0.0, 4096.0))
    assert matrix.dtype == "float32" and matrix.shape == (9, 8)
    mels = np.arange(10) * (2595 * np.log10(1 + 4096 / 700) / 10)
    edges = np.floor(17 * 700 * (10 ** (mels / 2595) - 1) / 8192).astype(int)
    for i, (left, peak, right) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        want = np.zeros(9)
        want[left : peak + 1] = np.linspace(0, 1, peak - left + 1)
        want[peak : right + 1] = np.linspace(1, 0, right - peak + 1)
        want[peak] = 1
        np.testing.assert_allclose(matrix[:, i], want, atol=1e-6)


# Bad input --------------------------------------------------------------------------------------

X = np.ones(8)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.signal.hann_window(-1), ArgumentError, "-1"),
        (lambda: gf.signal.hann_window(3, periodic=1), ArgumentError, "periodic"),
        (lambda: gf.signal.hamming_window(3, alpha="x"), ArgumentError, "alpha"),
        (lambda: gf.signal.hamming_window(2.5), ArgumentError, "2.5"),
        (lambda: gf.signal.blackman_window(3, dtype="int32"), DTypeError, "int32"),
        (lambda: gf.signal.frame(X, 9, 1), ShapeError, "8 elements has no frame of 9"),
        (lambda: gf.signal.frame(X, 0, 1), ArgumentError, "length"),
        (lambda: gf.signal.frame(X, 2, 0), ArgumentError, "step"),
        (lambda: gf.signal.frame(3.0, 1, 1), ShapeError, "scalar"),
        (lambda: gf.signal.overlap_add(X, 1), ShapeError, "two axes"),
        (lambda: gf.signal.overlap_add(np.eye(2), -1), ArgumentError, "-1"),
        (lambda: gf.signal.overlap_add(np.eye(2, dtype=bool), 1), DTypeError, "bool"),
        (lambda: gf.signal.stft(X, 4, 2, window=np.ones(3)), ShapeError, r"\(3,\)"),
        (lambda: gf.signal.stft(X, 4, 2, fft_length=3), ArgumentError, "fft_length 3"),
        (lambda: gf.signal.stft(X, 4, 0), ArgumentError, "frame_step"),
        (lambda: gf.signal.stft(X.astype("int32"), 4, 2), DTypeError, "int32"),
        (lambda: gf.signal.stft(X.astype("complex64"), 4, 2), DTypeError, "onesided=False"),
        (lambda: gf.signal.istft(np.ones((3, 4)), 4, 2), ShapeError, "4 != 3"),
        (lambda: gf.signal.istft(X, 4, 2), ShapeError, "two axes"),
        (lambda: gf.signal.mel_weight_matrix(0, 16, 8e3, 0.0, 4e3), ArgumentError, "num_mel_bins"),
        (lambda: gf.signal.mel_weight_matrix(4, 16, 8e3, 0.0, 5e3), ArgumentError, "5000"),
        (
            lambda: gf.signal.mel_weight_matrix(4, 16, "8", 0, 5e3),
            ArgumentError,
            "must be a number",
        ),
        (lambda: gf.signal.mel_weight_matrix(4, 16, 8e3, 0, 4e3, "int32"), DTypeError, "int32"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_signal\.py:\d+.*{words}"):
        call()
