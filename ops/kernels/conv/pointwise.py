"""Convolutions by windows of one element, as matrix products without columns.

The gradient in the input also takes windows that tile the input, as transposed convolutions that
double the size have them.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np

from graphflow.ops.kernels.conv.direct.plane_copies import (
    copies_natively,
    gather_positions,
    scatter_positions,
)
from graphflow.ops.kernels.gemm.contiguous_products import plan_contiguous
from graphflow.ops.kernels.gemm.gemm import MatrixProduct, gemm
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.windows.window_arguments import Ints, Windows

_PARTS = 4  # into which copies of channels are split, for threads


def convolve(out: Any, x: Any, w: Any, windows: Windows) -> None:
    """Write out[n, o, p] = Σ w[o, c] · x[n, c, p·stride]."""
    product = plan(len(x), x.shape[1], len(w), windows, out.dtype.name)
    w, seen = as_contiguous(w), as_contiguous(_visible_elements(x, windows))
    operands = (seen, w) if _are_rows(len(x), windows) else (w, seen)
    product.run(operand_place(out), *map(operand_place, operands))


def plan(images: int, inputs: int, outputs: int, windows: Windows, dtype: str) -> MatrixProduct:
    """Plan the product w @ x of each image; or of many images of one element, that of x and wᵀ.

    Both sum over channels in order, so an image has the same bits in a batch of any size.
    """
    size = math.prod(windows.out)
    if _are_rows(images, windows):
        product = plan_contiguous((images, inputs), (outputs, inputs), dtype, transpose_b=True)
    else:
        product = plan_contiguous((outputs, inputs), (images, inputs, size), dtype)
    assert product is not None  # contiguous operands always fit
    return product


_FEW_IMAGES = 4


def _are_rows(images: int, windows: Windows) -> bool:
    """Return whether images are rows of one matrix; of a few, each is a faster product."""
    return math.prod(windows.out) == 1 and images > _FEW_IMAGES


def task(
    images: int, inputs: int, outputs: int, space: Ints, windows: Windows, dtype: str
) -> KernelTask | None:
    """Return the kernel for operands x and w; None if windows have a stride, since x is copied."""
    if windows.out != space:
        return None
    product = plan(images, inputs, outputs, windows, dtype)
    weight_first = not _are_rows(images, windows)
    return replace(product.task, order=(1, 0) if weight_first != product.swapped else ())


def input_gradient(out: Any, g: Any, w: Any, windows: Windows) -> None:
    """Write out[n, c, p·stride + k] = Σ w[o, c, k] · g[n, o, p], and zeros elsewhere."""
    matrix = w.reshape(len(w), -1)
    if math.prod(windows.stride) == 1 and out.shape[2:] == g.shape[2:]:
        gemm(_as_matrices(out), as_contiguous(matrix), _as_matrices(g), transpose_a=True)
        return
    channels, kernel = w.shape[1], windows.kernel
    some = scratch(np, "pointwise", (len(g), channels, *kernel, *g.shape[2:]), out.dtype)
    flat = some.reshape(len(g), matrix.shape[1], -1)
    gemm(flat, as_contiguous(matrix), _as_matrices(g), transpose_a=True)
    if copies_natively(out):
        scatter_positions(out, some, windows)
        return
    if kernel != windows.stride:
        out[...] = 0

    parts = min(channels, _PARTS)

    def part(i: int) -> None:
        several = slice(channels * i // parts, channels * (i + 1) // parts)
        for tap in np.ndindex(*kernel):
            target = out[:, several][_position_index(windows, tap)]
            np.copyto(target, some[(slice(None), several, *tap)])

    run_parts(part, parts)


def weight_gradient(out: Any, x: Any, g: Any, windows: Windows) -> None:
    """Write out[o, c] = Σ g[n, o, p] · x[n, c, p·stride]."""
    seen, cotangents = _as_matrices(_visible_elements(x, windows)), _as_matrices(g)
    matrix = out.reshape(out.shape[:2])
    for n, (a, b) in enumerate(zip(cotangents, seen, strict=True)):
        gemm(matrix, a, b, transpose_b=True, accumulate=n > 0)


def _as_matrices(array: Any) -> Any:
    return array.reshape(*array.shape[:2], math.prod(array.shape[2:]))


def _position_index(windows: Windows, tap: Ints | None = None) -> Any:
    """Return the index of the elements that a tap sees; of the first one by default."""
    axes = zip(windows.out, windows.stride, tap or (0,) * len(windows.out), strict=True)
    return (..., *(slice(k, k + (out - 1) * step + 1, step) for out, step, k in axes))


def _visible_elements(x: Any, windows: Windows) -> Any:
    """Return the elements that windows see, contiguous."""
    if (*x.shape[:2], *windows.out) == x.shape:
        return x
    if copies_natively(x):
        return gather_positions(x, windows)
    part = x[_position_index(windows)]
    result = scratch(np, "pointwise", part.shape, x.dtype)
    np.copyto(result, part)
    return result
