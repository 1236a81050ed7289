"""Convolutions of one channel along one axis: products with a view of the windows, as spectrograms.

Windows are rows of a matrix whose rows overlap in memory, so nothing is copied. Sums run over the
taps in order. float32 and float64, on CPUs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from graphflow.ops.kernels.gemm.gemm import MatrixProduct, plan_product
from graphflow.ops.kernels.jit.compiler import KernelTask
from graphflow.ops.kernels.jit.kernel_recording import as_contiguous, operand_place
from graphflow.ops.windows.window_arguments import Windows


def plan(images: int, outputs: int, size: int, windows: Windows, dtype: str) -> MatrixProduct:
    """Plan the product of w (outputs, taps) and the windows (images, taps, positions) as columns.

    Args:
        size: elements of an image.
    """
    (taps,), (stride,), (positions,) = windows.kernel, windows.stride, windows.out
    item = np.dtype(dtype).itemsize
    product = plan_product(
        (images,), outputs, taps, positions, dtype,
        (outputs * positions * item, positions * item, item),
        (0, taps * item, item),
        (size * item, item, stride * item),
    )  # fmt: skip
    assert product is not None  # each operand has a contiguous axis
    return product


def task(images: int, outputs: int, size: int, windows: Windows, dtype: str) -> KernelTask:
    """Return the kernel for operands x and w."""
    product = plan(images, outputs, size, windows, dtype)
    return replace(product.task, order=() if product.swapped else (1, 0))


def convolve(out: Any, x: Any, w: Any, windows: Windows) -> None:
    """Write out[n, o, p] = Σ w[o, 0, k] · x[n, 0, p·stride + k]."""
    x, w = as_contiguous(x), as_contiguous(w)
    product = plan(len(x), len(w), x.shape[2], windows, out.dtype.name)
    product.run(operand_place(out), operand_place(w), operand_place(x))
