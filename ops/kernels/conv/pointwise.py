"""Convolutions by windows of one element, as matrix products without columns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from graphflow.ops.kernels.gemm.gemm import gemm
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.windows.window_arguments import Windows


def convolve(out: Any, x: Any, w: Any, windows: Windows) -> None:
    """Write out[n, o, p] = Σ w[o, c] · x[n, c, p·stride]."""
    gemm(_as_matrices(out), w.reshape(w.shape[:2]), _as_matrices(_visible_elements(x, windows)))


def input_gradient(out: Any, g: Any, w: Any, windows: Windows) -> None:
    """Write out[n, c, p·stride] = Σ w[o, c] · g[n, o, p], and zeros elsewhere."""
    matrix = np.ascontiguousarray(w.reshape(w.shape[:2]).T)
    if set(windows.stride) == {1} and out.shape[2:] == g.shape[2:]:
        gemm(_as_matrices(out), matrix, _as_matrices(g))
        return
    some = scratch(np, "pointwise", (*out.shape[:2], *g.shape[2:]), out.dtype)
    gemm(_as_matrices(some), matrix, _as_matrices(g))
    out[...] = 0
    out[_position_index(windows)] = some


def weight_gradient(out: Any, x: Any, g: Any, windows: Windows) -> None:
    """Write out[o, c] = Σ g[n, o, p] · x[n, c, p·stride]."""
    seen, cotangents = _as_matrices(_visible_elements(x, windows)), _as_matrices(g)
    matrix = out.reshape(out.shape[:2])
    for n, (a, b) in enumerate(zip(cotangents, seen, strict=True)):
        gemm(matrix, a, b, transpose_b=True, accumulate=n > 0)


def _as_matrices(array: Any) -> Any:
    return array.reshape(*array.shape[:2], math.prod(array.shape[2:]))


def _position_index(windows: Windows) -> Any:
    axes = zip(windows.out, windows.stride, strict=True)
    return (..., *(slice(0, (out - 1) * stride + 1, stride) for out, stride in axes))


def _visible_elements(x: Any, windows: Windows) -> Any:
    """Return the elements that windows see, contiguous."""
    part = x[_position_index(windows)]
    if part.shape == x.shape:
        return x
    result = scratch(np, "pointwise", part.shape, x.dtype)
    np.copyto(result, part)
    return result
