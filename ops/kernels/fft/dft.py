"""Discrete Fourier transforms along one axis, by native loops.

There are loops if there are enough transforms and their size has small factors.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.control_flow import lanes_of
from graphflow.ops.kernels.fft.dft_lanes import APART, CLOSE, ROWS
from graphflow.ops.kernels.fft.dft_loops import radices, transform, twiddles
from graphflow.ops.kernels.fusion.parallel_call import native_function
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import NativeFunction, vector_width
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_ranges

_LONGEST_LOOP = 4096
_LEAST_ELEMENTS = 4096
"""Elements from which a native call pays."""
_LEAST_TRANSFORMS = 4
"""Transforms from which vectors of them pay."""
_THREADING_WORK = 100_000
_REAL = {"float32": "float", "float64": "double"}
_ELEMENTS = {"complex64": "float", "complex128": "double"}


def is_native(x: Any, axes: Sequence[int]) -> bool:
    """Return whether there are native loops for the transforms of x along each of some axes."""
    if x.dtype.name not in _ELEMENTS or not is_jit_enabled() or vector_width() < 8:
        return False
    return x.size >= _LEAST_ELEMENTS and all(_is_supported_size(x.shape, a) for a in axes)


def _is_supported_size(shape: Sequence[int], axis: int) -> bool:
    n = shape[axis]
    if n > _LONGEST_LOOP:
        return math.prod(shape[axis + 1 :]) == 1 and balanced_factors(n) is not None
    return math.prod(shape) >= _LEAST_TRANSFORMS * n > n and radices(n) is not None


def balanced_factors(n: int) -> tuple[int, int] | None:
    """Return a long size as a product of two similar ones; None if there is none."""
    sizes = [1, 1]
    for radix in sorted(radices(n) or (), reverse=True):
        sizes[sizes.index(min(sizes))] *= radix
    return (
        None
        if max(sizes) > _LONGEST_LOOP or min(sizes) < _LEAST_TRANSFORMS
        else (sizes[0], sizes[1])
    )


def transform_along(x: Any, out: Any, axis: int, inverse: bool, scale: float) -> None:
    """Transform contiguous x along an axis, times a number, into contiguous `out`, which may be x.

    `is_native` must hold.
    """
    if x.shape[axis] > _LONGEST_LOOP:
        _transform_long(x, out, x.shape[axis], inverse, scale)
        return
    n = x.shape[axis]
    many = x.size // n
    element = _ELEMENTS[x.dtype.name]
    inner = math.prod(x.shape[axis + 1 :])
    lanes = lanes_of(element)
    offsets = _offsets(many // inner, n, inner, x.itemsize, lanes)
    layout = CLOSE if inner % lanes == 0 else APART
    if inner == 1 and n % (lanes // 2) == 0:
        layout = ROWS
    loop = native_function(transform, element, n, layout, inverse, scale != 1.0)
    steps = (inner * x.itemsize, inner * x.itemsize, many)
    given = [x, out, offsets, offsets, _twiddles(n, x.real.dtype.name)]
    _run(loop, given, steps, scale, n, lanes)


def _run(
    loop: NativeFunction,
    given: Sequence[Any],
    steps: Sequence[int],
    scale: float,
    n: int,
    lanes: int,
) -> None:
    """Run all groups of transforms, on the threads of the current pool."""
    many = steps[2]
    bits = struct.unpack("<q", struct.pack("<d", scale))[0]
    sizes = np.array([*steps, bits], np.int64)
    places = [address(a) for a in given]
    groups = -(-many // lanes)

    def part(first: int, last: int) -> None:
        memory = scratch(np, "transforms", (4 * lanes * (n + 1),), given[4].dtype)
        table = np.array([*places, address(memory)], np.int64)
        where, meta = (ctypes.c_void_p(address(a)) for a in (table, sizes))
        loop.releasing_gil(where, meta, first, last)

    run_ranges(part, groups, None if many * n * n.bit_length() > _THREADING_WORK else 1)


# Real numbers ---------------------------------------------------------------------------------


def is_native_real(dtype: Any, shape: Sequence[int], axis: int) -> bool:
    """Return whether there are native loops for transforms of real numbers to half spectra and
    back.

    They go along the last axis, for even sizes.
    """
    n, many = shape[axis], math.prod(shape[:-1])
    element = _REAL.get(np.dtype(dtype).name)
    if (
        element is None
        or axis != len(shape) - 1
        or n % 2
        or not is_jit_enabled()
        or vector_width() < 8
    ):
        return False
    whole = n // 2 % (lanes_of(element) // 2) == 0
    return (
        whole
        and n * many >= _LEAST_ELEMENTS
        and n // 2 <= _LONGEST_LOOP
        and _is_supported_size((many, n // 2), 1)
    )


def transform_real(x: Any, out: Any, n: int, scale: float) -> None:
    """Transform rows of n real numbers to n/2 + 1 frequencies, times a number; or back if x is
    complex.

    `is_native_real` must hold.
    """
    back = x.dtype.kind == "c"
    numbers = out if back else x
    element = _REAL[numbers.dtype.name]
    half, many, lanes = n // 2, numbers.size // n, lanes_of(element)
    item = 2 * numbers.itemsize
    offsets = [_offsets(many, size, 1, item, lanes) for size in (half, half + 1)]
    loop = native_function(transform, element, half, ROWS, False, True, "whole" if back else "half")
    given = [x, out, *(offsets[::-1] if back else offsets), _real_twiddles(n, numbers.dtype.name)]
    _run(loop, given, (item, item, many), scale, half, lanes)


@lru_cache(maxsize=64)
def _real_twiddles(n: int, dtype: str) -> Any:
    """Return the twiddles of half the size, and the roots that join even and odd elements."""
    angles = -2 * np.pi / n * np.arange(n // 4 + 1)
    roots = np.stack([np.cos(angles), np.sin(angles)], -1).reshape(-1)
    return np.concatenate([twiddles(n // 2, np.float64)[:-1], roots, [0, 0]]).astype(dtype)


# Long ones ------------------------------------------------------------------------------------


def _transform_long(x: Any, out: Any, n: int, inverse: bool, scale: float) -> None:
    """Transform rows of n elements as matrices: columns, twiddles, then rows.

    The result is transposed. Source: Bailey, Journal of Supercomputing 4, 1990.
    """
    first, second = balanced_factors(n) or (n, 1)
    work = np.empty((x.size // n, first, second), x.dtype)
    transform_along(x.reshape(work.shape), work, 1, inverse, 1.0)
    work *= _inner_twiddles(first, second, inverse, x.dtype.name)
    transform_along(work, work, 2, inverse, scale)
    np.copyto(out.reshape(-1, second, first), work.swapaxes(1, 2))


@lru_cache(maxsize=4)
def _inner_twiddles(first: int, second: int, inverse: bool, dtype: str) -> Any:
    places = np.outer(np.arange(first), np.arange(second))
    angles = (2 if inverse else -2) * np.pi / (first * second) * places
    return (np.cos(angles) + 1j * np.sin(angles)).astype(dtype)


@lru_cache(maxsize=64)
def _offsets(outer: int, n: int, inner: int, itemsize: int, lanes: int) -> Any:
    """Return the bytes at which transforms begin, the last one repeated to fill a vector."""
    starts = np.arange(outer)[:, None] * (n * inner) + np.arange(inner)
    flat = (starts * itemsize).reshape(-1)
    return np.concatenate([flat, np.repeat(flat[-1:], -len(flat) % lanes)])


@lru_cache(maxsize=64)
def _twiddles(n: int, dtype: str) -> Any:
    return twiddles(n, dtype)
