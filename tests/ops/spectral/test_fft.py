"""Fourier transforms: numpy's values for every size, axis and norm; gradients that are adjoints."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphflow as gf
from graphflow.errors import ArgumentError, CheckError, DTypeError, ShapeError
from graphflow.frontend.interpreter import evaluate
from tests.ops.matrices.linalg.test_decompositions import draw_matrices, dtypes, seeds
from tests.ops.test_registry import check_gradients

norms = st.sampled_from(["backward", "ortho", "forward"])
shapes = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)
SINGLE = {"float32": "complex64", "float64": "complex128"}
REAL = {"complex64": "float32", "complex128": "float64"}


def close(have: Any, want: Any) -> None:
    single = have.dtype in ("float32", "complex64")
    assert have.shape == want.shape
    np.testing.assert_allclose(have, want, rtol=1e-4 if single else 1e-9, atol=1e-4)


@given(shapes, st.data(), norms, dtypes, seeds)
def test_transforms_along_an_axis_are_numpys(
    shape: tuple[int, ...], data: Any, norm: str, dtype: str, seed: int
) -> None:
    x = draw_matrices(seed, shape, dtype)
    axis = data.draw(st.integers(-len(shape), len(shape) - 1))
    n = data.draw(st.none() | st.integers(1, 7))
    names = ["fft", "ifft", "hfft", "irfft"]
    if dtype.startswith("float"):
        names += ["rfft", "ihfft"]
    if n is None and shape[axis] == 1:
        names = [name for name in names if name not in ("hfft", "irfft")]  # 0 elements
    tensors = [getattr(gf.fft, name)(x, n, axis, norm) for name in names]
    for name, tensor, value in zip(names, tensors, evaluate(tensors), strict=True):
        want = getattr(np.fft, name)(x, n, axis, norm)
        close(value, want)
        real = name in ("hfft", "irfft")
        wanted = REAL.get(dtype, dtype) if real else SINGLE.get(dtype, dtype)
        assert value.dtype == wanted == tensor.dtype
        assert tensor.shape == value.shape


@given(shapes, st.data(), norms, dtypes, seeds)
def test_transforms_along_several_axes_are_numpys(
    shape: tuple[int, ...], data: Any, norm: str, dtype: str, seed: int
) -> None:
    x = draw_matrices(seed, shape, dtype)
    rank = len(shape)
    axes = data.draw(st.none() | st.permutations(range(rank)).map(lambda p: p[: max(1, rank - 1)]))
    count = rank if axes is None else len(axes)
    s = data.draw(st.none() | st.lists(st.integers(1, 6), min_size=count, max_size=count))
    if s is not None and axes is None:
        axes = list(range(rank))  # numpy is about to ask for them
    last = s[-1] if s is not None else shape[-1 if axes is None else axes[-1]]
    names = ["fftn", "ifftn"] + (["rfftn"] if dtype.startswith("float") else [])
    names += ["irfftn"] if s is not None or last > 1 else []
    tensors = [getattr(gf.fft, name)(x, s, axes, norm) for name in names]
    for name, value in zip(names, evaluate(tensors), strict=True):
        close(value, getattr(np.fft, name)(x, s, axes, norm=norm))


def test_transforms_of_two_axes_are_numpys() -> None:
    x = draw_matrices(0, (2, 4, 5), "float64")
    z = draw_matrices(1, (2, 4, 5), "complex128")
    pairs = [("fft2", z), ("ifft2", z), ("rfft2", x), ("irfft2", z)]
    values = evaluate(
        [getattr(gf.fft, name)(a) for name, a in pairs]
        + [getattr(gf.fft, name)(a, (3, 6), (0, 1)) for name, a in pairs]
    )
    wanted = [getattr(np.fft, name)(a) for name, a in pairs]
    wanted += [getattr(np.fft, name)(a, (3, 6), (0, 1)) for name, a in pairs]
    for value, want in zip(values, wanted, strict=True):
        close(value, want)


@given(st.integers(1, 9), st.sampled_from([1.0, 0.25, 2]), st.integers(0, 2))
def test_frequencies_are_numpys_for_sizes_known_or_not(n: int, d: float, extra: int) -> None:
    x = gf.placeholder("float32", ("n",))
    size = x.shape[0] + extra
    known, half, later, half_later = evaluate(
        [
            gf.fft.fftfreq(n + extra, d, "float64"),
            gf.fft.rfftfreq(n + extra, d, "float64"),
            gf.fft.fftfreq(size, d, "float64"),
            gf.fft.rfftfreq(size, d, "float64"),
        ],
        {x: np.zeros(n, "float32")},
    )
    np.testing.assert_allclose(known, np.fft.fftfreq(n + extra, d))
    np.testing.assert_allclose(half, np.fft.rfftfreq(n + extra, d))
    np.testing.assert_allclose(later, known)
    np.testing.assert_allclose(half_later, half)


@given(shapes, st.data())
def test_shifts_are_numpys_and_undo_each_other(shape: tuple[int, ...], data: Any) -> None:
    x = np.arange(np.prod(shape)).reshape(shape)
    axes = data.draw(st.none() | st.integers(-len(shape), len(shape) - 1))
    p = gf.placeholder("int64", (None,) * len(shape))
    forward, back, both = evaluate(
        [
            gf.fft.fftshift(x, axes),
            gf.fft.ifftshift(p, axes),
            gf.fft.ifftshift(gf.fft.fftshift(p, axes), axes),
        ],
        {p: x},
    )
    np.testing.assert_array_equal(forward, np.fft.fftshift(x, axes))
    np.testing.assert_array_equal(back, np.fft.ifftshift(x, axes))
    np.testing.assert_array_equal(both, x)


def test_sizes_that_are_known_only_when_fed_transform_there_and_back() -> None:
    x = gf.placeholder("float64", ("n", "t"))
    time = x.shape[1]
    spectrum = gf.fft.rfft(x)
    tensors = [
        spectrum,
        gf.fft.irfft(spectrum, time),
        gf.fft.irfft(spectrum),
        gf.fft.fft(x, 4),
        gf.fft.fft(x, axis=0),
        gf.fft.rfft(x, time + 2),
    ]
    (slope,) = gf.gradients(gf.sum(gf.abs(spectrum) ** 2), [x])
    for shape in ((3, 6), (2, 5), (1, 2)):
        a = draw_matrices(0, shape, "float64")
        half, again, even, four, columns, padded, g = evaluate([*tensors, slope], {x: a})
        close(half, np.fft.rfft(a))
        close(again, a)
        assert even.shape == (shape[0], 2 * (shape[1] // 2))
        close(four, np.fft.fft(a, 4))
        close(columns, np.fft.fft(a, axis=0))
        close(padded, np.fft.rfft(a, shape[1] + 2))
        assert g.shape == shape


def test_a_fed_spectrum_of_one_frequency_is_no_half_of_nothing() -> None:
    z = gf.placeholder("complex64", (None,))
    with pytest.raises(CheckError, match="1 frequencies are no half of 0 elements"):
        evaluate([gf.fft.irfft(z)], {z: np.ones(1, "complex64")})


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_floats_of_16_bits_are_transformed_in_32(dtype: str) -> None:
    x = gf.astype(np.arange(6.0), dtype)
    half, whole = gf.fft.rfft(x), gf.fft.fft(x)
    assert half.dtype == whole.dtype == "complex64"
    values = evaluate([half, whole])
    close(values[0], np.fft.rfft(np.arange(6.0)).astype("complex64"))
    close(values[1], np.fft.fft(np.arange(6.0)).astype("complex64"))
    (slope,) = gf.gradients(gf.sum(gf.abs(half)), [x])
    assert slope.dtype.name == dtype


COMPOSED: dict[str, Any] = {
    "fft": lambda x, z: gf.fft.fft(z, 5, 0) * gf.fft.fft(x, 3, 0)[:1],
    "ifft2": lambda x, z: gf.fft.ifft2(z, (2, 6), norm="ortho"),
    "rfft": lambda x, z: gf.fft.rfft(x, 5) * gf.fft.rfft(x, norm="forward"),
    "irfft": lambda x, z: gf.fft.irfft(z) * gf.fft.irfft(z, 6, norm="ortho"),
    "odd irfft": lambda x, z: gf.fft.irfft(z, 7, axis=0) ** 2,
    "rfftn": lambda x, z: gf.abs(gf.fft.rfftn(x, (3, 5))),
    "irfftn": lambda x, z: gf.fft.irfftn(z, norm="forward"),
    "hfft": lambda x, z: gf.fft.hfft(z),
    "ihfft": lambda x, z: gf.fft.ihfft(x, 4, axis=0),
    "fftshift": lambda x, z: gf.fft.fftshift(z) * gf.fft.ifftshift(x, 1),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_gradients_match_finite_differences_to_second_order(name: str) -> None:
    x, z = draw_matrices(0, (3, 4), "float64"), draw_matrices(1, (3, 4), "complex128")
    check_gradients(COMPOSED[name], [x, z], np.random.default_rng(0))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: gf.fft.fft(np.ones(3, "int32")), DTypeError, "int32"),
        (lambda: gf.fft.fft(np.ones(3), norm="half"), ArgumentError, "'half'"),
        (lambda: gf.fft.fft(np.ones(3), axis=1), ShapeError, "axis 1"),
        (lambda: gf.fft.ifft(np.ones(3), 0), ShapeError, "at least 1"),
        (lambda: gf.fft.fft(np.ones(3), 1.5), ShapeError, "1.5"),
        (lambda: gf.fft.fft(np.ones((2, 0))), ShapeError, "no elements"),
        (lambda: gf.fft.fft(3.0), ShapeError, "rank 0"),
        (lambda: gf.fft.fftn(np.ones((2, 2)), axes=(0, 0)), ArgumentError, "twice"),
        (lambda: gf.fft.ifftn(np.ones((2, 2)), s=(1,), axes=(0, 1)), ArgumentError, "1 sizes"),
        (lambda: gf.fft.fftn(np.ones(2), s=(1, 2)), ArgumentError, "2 sizes"),
        (lambda: gf.fft.fftn(np.ones(2), s=4), ArgumentError, "list"),
        (lambda: gf.fft.fft2(np.ones(2)), ShapeError, "axis -2"),
        (lambda: gf.fft.ifft2(np.ones(2)), ShapeError, "axis -2"),
        (lambda: gf.fft.fftn(3.0), ArgumentError, "axes is empty"),
        (lambda: gf.fft.rfft(np.ones(3, "complex64")), DTypeError, "gf.fft.fft"),
        (lambda: gf.fft.ihfft(np.ones(3, "complex64")), DTypeError, "complex64"),
        (lambda: gf.fft.rfftn(np.ones(3, "complex64")), DTypeError, "complex64"),
        (lambda: gf.fft.rfft2(np.ones(3)), ShapeError, "axis -2"),
        (lambda: gf.fft.irfft(np.ones(1)), ShapeError, "give n=1"),
        (lambda: gf.fft.irfftn(np.ones((2, 1))), ShapeError, "give n=1"),
        (lambda: gf.fft.irfft2(np.ones(3)), ShapeError, "axis -2"),
        (lambda: gf.fft.hfft(np.ones(1)), ShapeError, "give n=1"),
        (lambda: gf.fft.fftfreq(0), ShapeError, "at least 1"),
        (lambda: gf.fft.fftfreq(3, d=0), ArgumentError, "got 0"),
        (lambda: gf.fft.rfftfreq(3, dtype="int32"), DTypeError, "int32"),
        (lambda: gf.fft.fftshift(np.ones(3), 1), ShapeError, "axis 1"),
        (lambda: gf.fft.ifftshift(np.ones(3), (0, 0)), ArgumentError, "twice"),
    ],
)
def test_mistakes_name_the_line_and_the_numbers(call: Any, error: type, words: str) -> None:
    with pytest.raises(error, match=rf"test_fft\.py:\d+.*{words}"):
        call()
