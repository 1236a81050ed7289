"""Native Fourier transforms against numpy's: any axis, small factors, norms, threads."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from graphflow.ir.op import REGISTRY
from graphflow.ops.kernels.fft.dft import is_native, is_native_real, transform_along
from graphflow.ops.kernels.fft.dft_loops import radices
from graphflow.ops.kernels.jit.compiler import vector_width
from graphflow.ops.kernels.jit.thread_pool import Pool, use_pool

needs_wide_registers = pytest.mark.skipif(
    vector_width() < 8, reason="numpy transforms where registers hold four float32 or fewer"
)
SIZES = (2, 3, 4, 5, 6, 8, 9, 15, 16, 25, 32, 48, 60, 64, 100, 128, 243)


@settings(
    deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.sampled_from(SIZES), st.integers(1, 40), st.integers(1, 33), st.booleans(),
    st.sampled_from(["complex64", "complex128"]), st.booleans(),
)  # fmt: skip
def test_transforms_are_those_of_numpy(
    n: int, outer: int, inner: int, inverse: bool, dtype: str, in_place: bool
) -> None:
    rng = np.random.default_rng(n)
    x = rng.standard_normal((outer, n, inner)) + 1j * rng.standard_normal((outer, n, inner))
    x = x.astype(dtype)
    wanted = (np.fft.ifft if inverse else np.fft.fft)(x.astype("complex128"), axis=1)
    out = x if in_place else np.empty_like(x)
    transform_along(x, out, 1, inverse, 1 / n if inverse else 1.0)
    close = 1e-5 if dtype == "complex64" else 1e-13
    np.testing.assert_allclose(out, wanted, rtol=0, atol=close * np.abs(wanted).max())


@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@pytest.mark.parametrize("inverse", [False, True])
@needs_wide_registers
def test_transforms_along_several_axes_are_scaled_once(norm: str, inverse: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((6, 20, 60)) + 1j * rng.standard_normal((6, 20, 60))
    assert is_native(x, (1, 2))
    (y,) = REGISTRY["fft"].run(np, [x], {"axes": (1, 2), "inverse": inverse, "norm": norm})
    wanted = (np.fft.ifftn if inverse else np.fft.fftn)(x, axes=(1, 2), norm=norm)
    np.testing.assert_allclose(y, wanted, rtol=1e-11, atol=1e-11)


def test_transforms_have_the_same_bits_for_any_number_of_threads() -> None:
    rng = np.random.default_rng(0)
    for axis in (0, 1):
        x = (rng.standard_normal((320, 320)) + 1j).astype("complex64")
        found = []
        for threads in (1, 2, 3):
            out = np.empty_like(x)
            with use_pool(Pool(threads)):
                transform_along(x, out, axis, False, 1.0)
            found.append(out.tobytes())
        assert found[0] == found[1] == found[2]


def test_sizes_with_other_factors_are_left_to_numpy() -> None:
    assert radices(7) is None
    assert math.prod(radices(4096 * 15) or ()) == 4096 * 15
    assert not is_native(np.zeros((64, 77), "complex64"), (1,))
    assert not is_native(np.zeros((2, 4096), "complex64"), (1,))
    assert not is_native(np.zeros((0, 64), "complex64"), (1,))
    assert not is_native(np.zeros((1 << 14, 3), "complex64"), (0,))


@pytest.mark.parametrize("n", [8192, 3 * 2**12, 10**4, 2**15])
@pytest.mark.parametrize("inverse", [False, True])
@needs_wide_registers
def test_long_transforms_go_by_way_of_a_matrix(n: int, inverse: bool) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, n)) + 1j * rng.standard_normal((2, n))
    assert is_native(x, (1,))
    out = np.empty_like(x)
    transform_along(x, out, 1, inverse, 0.5)
    wanted = (np.fft.ifft(x, norm="forward") if inverse else np.fft.fft(x)) / 2
    np.testing.assert_allclose(out, wanted, atol=1e-10)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [32, 80, 96, 240, 1024])
@pytest.mark.parametrize("norm", ["backward", "ortho", "forward"])
@needs_wide_registers
def test_half_spectra_of_real_numbers_are_those_of_numpy(n: int, dtype: str, norm: str) -> None:
    x = np.random.default_rng(0).standard_normal((7, 19, n)).astype(dtype)
    assert is_native_real(x.dtype, x.shape, 2)
    attrs = {"axis": 2, "norm": norm, "inner": 1.0}
    (half,) = REGISTRY["rfft"].run(np, [x], attrs)
    wanted = np.fft.rfft(x.astype("float64"), norm=norm)
    close = 1e-5 if dtype == "float32" else 1e-13
    np.testing.assert_allclose(half, wanted, rtol=0, atol=close * np.abs(wanted).max())
    bent = half + half.dtype.type(0.25j)  # the imaginary parts of the first and last do not count
    (whole,) = REGISTRY["irfft"].run(np, [bent], {"size": n, **attrs})
    wanted = np.fft.irfft(bent.astype("complex128"), n, norm=norm)
    np.testing.assert_allclose(whole, wanted, rtol=0, atol=close * np.abs(wanted).max())
