"""Pooling by generated kernels: one or two spatial axes of float32 on CPUs.

A part is some planes. Planes are independent, so parts change no bits.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.images.pooling_scatter_text import window_scatter
from graphflow.ops.kernels.images.pooling_text import window_reduction
from graphflow.ops.kernels.jit.compiler import NativeFunction
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.thread_pool import run_native_ranges
from graphflow.ops.windows.window_arguments import Ints, Windows

_UNROLLED_TAPS = 9
_THREADING_TAPS = 1 << 14  # taps from which handing a part to another thread pays


def is_supported(xp: Any, x: Any, windows: Windows) -> bool:
    """Return whether there are kernels for these windows over x."""
    taps = 1
    for k in windows.kernel:
        taps *= k
    return (
        xp is np
        and x.dtype == np.float32
        and len(windows.out) in (1, 2)
        and taps <= 256
        and is_jit_enabled()
    )


def max_pool(out: Any, x: Any, windows: Windows) -> None:
    """Write the largest element of each window; NaN if it has one."""
    _run(window_reduction("max", *_form(windows)), x, x, out, x.shape[2:], windows)


def max_taps(out: Any, x: Any, y: Any, windows: Windows) -> None:
    """Write the number, as uint8, of each window's first tap that equals its maximum y."""
    _run(window_reduction("taps", *_form(windows)), x, y, out, x.shape[2:], windows)


def mean_pool(out: Any, x: Any, factors: Any, windows: Windows) -> None:
    """Write the sum of each window times the factor (float32) of its position."""
    _run(window_reduction("mean", *_form(windows)), x, factors, out, x.shape[2:], windows)


def scatter_to_taps(out: Any, g: Any, chosen: Any, windows: Windows) -> None:
    """Write zeros, and add each window's number to the element of its chosen tap (uint8)."""
    _run(window_scatter("taps", _stride(windows)), g, chosen, out, out.shape[2:], windows)


def scatter_means(out: Any, g: Any, factors: Any, windows: Windows) -> None:
    """Write zeros, and add each window's number times its factor to all of its elements."""
    _run(window_scatter("means", _stride(windows)), g, factors, out, out.shape[2:], windows)


def _form(windows: Windows) -> tuple[int, Ints | None]:
    """Return the stride of columns and the kernel, as far as reductions differ by them."""
    kernel = windows.kernel if len(windows.kernel) == 2 else (1, *windows.kernel)
    return _stride(windows), kernel if math.prod(kernel) <= _UNROLLED_TAPS else None


def _stride(windows: Windows) -> int:
    """Return the stride of columns, as far as kernels differ by it."""
    return min(windows.stride[-1], 3)


def _run(function: NativeFunction, a: Any, b: Any, out: Any, sizes: Ints, windows: Windows) -> None:
    a, b = as_contiguous(a), as_contiguous(b)
    (kernel, stride, before, dilation, count), extent = windows, sizes
    if len(sizes) == 1:
        extent, count, kernel = (1, *sizes), (1, *count), (1, *kernel)
        stride, before, dilation = (1, *stride), (0, *before), (1, *dilation)
    numbers = (
        *extent, *count, *kernel,
        stride[0], before[0], dilation[0], stride[1], before[1], dilation[1],
    )  # fmt: skip
    planes = a.shape[0] * a.shape[1]
    work = planes * count[0] * count[1] * kernel[0] * kernel[1]
    places = operand_place(a), operand_place(b), operand_place(out)
    run_native_ranges(
        partial(call_native, function, places, numbers), planes, work // _THREADING_TAPS
    )
