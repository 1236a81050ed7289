"""Matrix products on a GPU by cuBLAS, through nvmath-python's bindings.

CuPy calls cuBLAS as well, but refuses to do so during a capture, and copies the operands of
batches. Here one function of cuBLAS covers all dtypes, batches and transposes. 16-bit floats are
accumulated in float32 and rounded once. TF32 is off.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from math import prod
from types import ModuleType
from typing import Any

import numpy as np

_WORKSPACE_BYTES = 32 << 20
"""Bytes of cuBLAS's workspace, as NVIDIA advises for its newest devices. cuBLAS cannot allocate one
during a capture."""
_DEFAULT_ALGORITHM = -1
"""Let cuBLAS choose the algorithm by the sizes."""


class Cublas:
    """A cuBLAS handle on a stream of the current GPU.

    Args:
        stream: address of the CUDA stream.
        memory: (bytes) -> memory of the GPU.

    Raises:
        Exception: raised by nvmath if cuBLAS is missing or fails.
    """

    def __init__(self, cupy: Any, stream: int, memory: Callable[[int], Any]) -> None:
        from nvmath import CudaDataType as Data
        from nvmath.bindings import cublas

        self._xp = cupy
        self._library = cublas
        self._handle = cublas.create()
        cublas.set_stream(self._handle, stream)  # before the workspace: it resets that
        self._workspace = memory(_WORKSPACE_BYTES)
        cublas.set_workspace(self._handle, self._workspace.ptr, _WORKSPACE_BYTES)
        cublas.set_math_mode(self._handle, cublas.Math.DISALLOW_REDUCED_PRECISION_REDUCTION)
        single, double = cublas.ComputeType.COMPUTE_32F, cublas.ComputeType.COMPUTE_64F
        self._types = {
            "float16": (Data.CUDA_R_16F, single, "float32"),
            "bfloat16": (Data.CUDA_R_16BF, single, "float32"),
            "float32": (Data.CUDA_R_32F, single, "float32"),
            "float64": (Data.CUDA_R_64F, double, "float64"),
            "complex64": (Data.CUDA_C_32F, single, "complex64"),
            "complex128": (Data.CUDA_C_64F, double, "complex128"),
        }

    def close(self) -> None:
        """Destroy the handle and free its workspace."""
        self._library.destroy(self._handle)
        self._workspace = None

    def matmul(self, a: Any, b: Any, out: Any = None) -> Any:
        """As `cupy.matmul`; by cuBLAS if both operands are batches of matrices of one dtype."""
        if a.dtype != b.dtype or a.dtype.name not in self._types or min(a.ndim, b.ndim) < 2:
            return self._xp.matmul(a, b, out=out)
        batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        shape = (*batch, a.shape[-2], b.shape[-1])
        if out is not None and (out.shape != shape or out.dtype != a.dtype):
            return self._xp.matmul(a, b, out=out)
        direct = out is not None and out.flags.c_contiguous
        made = out if direct else self._xp.empty(shape, a.dtype)
        self.multiply(made, a, b)
        if out is None or direct:
            return made
        self._xp.copyto(out, made)
        return out

    def multiply(self, out: Any, a: Any, b: Any, added: bool = False) -> None:
        """Write a @ b to the contiguous array `out`, or add it to `out` if `added`.

        cuBLAS is column-major, so it computes Cᵀ = BᵀAᵀ.
        """
        (m, n), k, batch = out.shape[-2:], a.shape[-1], out.shape[:-2]
        if not out.size or not k:
            if not added:
                out.fill(0)
            return
        data, compute, scale = self._types[out.dtype.name]
        one, weight = np.ones((), scale), np.full((), float(added), scale)
        x, turned_x, row_x, apart_x = _as_blas_operand(self._xp, a, batch)
        y, turned_y, row_y, apart_y = _as_blas_operand(self._xp, b, batch)
        self._library.gemm_strided_batched_ex(
            self._handle, turned_y, turned_x, n, m, k, one.ctypes.data,
            y.data.ptr, data, row_y, apart_y, x.data.ptr, data, row_x, apart_x,
            weight.ctypes.data, out.data.ptr, data, n, m * n, prod(batch), compute,
            _DEFAULT_ALGORITHM,
        )  # fmt: skip

    def module(self) -> ModuleType:
        """Return CuPy as a module whose `matmul` is this one."""
        return _Module(self._xp, self.matmul)


class _Module(ModuleType):
    """CuPy with another `matmul`."""

    def __init__(self, cupy: Any, matmul: Callable[..., Any]) -> None:
        super().__init__(cupy.__name__)
        self.__dict__.update({**vars(cupy), "matmul": matmul})
        self._cupy = cupy

    def __getattr__(self, name: str) -> Any:  # attributes that CuPy makes on demand
        return getattr(self._cupy, name)


def _as_blas_operand(xp: Any, x: Any, batch: tuple[int, ...]) -> tuple[Any, int, int, int]:
    """Describe a batch of matrices to cuBLAS; copy it if cuBLAS cannot express its strides.

    Returns:
        The array, 1 if it is transposed, the leading dimension, and the stride between matrices,
        both in elements.
    """
    size = x.dtype.itemsize
    apart = _matrix_stride(x, batch)
    if apart is None:
        x = xp.ascontiguousarray(xp.broadcast_to(x, (*batch, *x.shape[-2:])))
        apart = prod(x.shape[-2:]) * size
    (rows, columns), (down, along) = x.shape[-2:], x.strides[-2:]
    if (along == size or columns == 1) and (down >= columns * size or rows == 1):
        return x, 0, max(down // size, columns) if rows > 1 else columns, apart // size
    if (down == size or rows == 1) and (along >= rows * size or columns == 1):
        return x, 1, max(along // size, rows) if columns > 1 else rows, apart // size
    return _as_blas_operand(xp, xp.ascontiguousarray(x), batch)


def _matrix_stride(x: Any, batch: tuple[int, ...]) -> int | None:
    """Return the bytes from one matrix of a batch to the next; None if they are not constant."""
    lead = len(batch) - (x.ndim - 2)
    strides = [
        0 if have == 1 else stride
        for have, stride in zip(x.shape[:-2], x.strides[:-2], strict=True)
    ]
    steps = [(n, s) for n, s in zip(batch, [0] * lead + strides, strict=True) if n > 1]
    for (_, outer), (n, inner) in pairwise(steps):
        if outer != n * inner:
            return None
    return steps[-1][1] if steps else 0
