"""Products of matrices on a GPU: cuBLAS by nvmath-python's bindings.

CuPy calls cuBLAS as well, but refuses to do so while work is captured, and copies the operands of
batches. One call of cuBLAS does everything here: floats and complex numbers of all widths, batches,
transposes as flags. 16 bits are added in float32 and rounded once; TF32 is off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from graphflow.spec import Shape, TensorSpec

_WORKSPACE = 32 << 20
"""Bytes that cuBLAS may work in: what NVIDIA advises for its newest devices. It may not take any
while work is captured."""


class Cublas:
    """cuBLAS on the stream of one GPU.

    Args:
        memory: (bytes) -> memory of the GPU, which is active.

    Raises:
        Exception: of nvmath: cuBLAS is not there, or fails.
    """

    def __init__(self, stream: int, memory: Any) -> None:
        from nvmath import CudaDataType as Data
        from nvmath.bindings import cublas

        self._library = cublas
        self._handle = cublas.create()
        cublas.set_stream(self._handle, stream)  # first: it takes the workspace back
        self._workspace = memory(_WORKSPACE)
        cublas.set_workspace(self._handle, self._workspace.ptr, _WORKSPACE)
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
        self._library.destroy(self._handle)

    def product(
        self, a: TensorSpec, b: TensorSpec, out: TensorSpec, attrs: Mapping[str, Any], added: bool
    ) -> Any:
        """(out, a, b): out = a @ b, or out + a @ b, of contiguous arrays of these sizes, of one
        dtype; None where cuBLAS cannot, since leading axes broadcast.

        cuBLAS counts along columns, so it is given the operands the other way round: Cᵀ = BᵀAᵀ.
        """
        shapes = [_sizes(spec) for spec in (a, b, out)]
        batches = {shape[:-2] for shape in shapes[:2] if len(shape) > 2}
        if a.dtype.name not in self._types or not batches <= {shapes[2][:-2]}:
            return None
        data, compute, scale = self._types[a.dtype.name]
        flags = [int(bool(attrs.get(name))) for name in ("transpose_b", "transpose_a")]
        one, weight = np.ones((), scale), np.full((), float(added), scale)
        count, (m, n) = prod(shapes[2][:-2]), shapes[2][-2:]
        k = shapes[0][-2] if flags[1] else shapes[0][-1]
        apart = [prod(shape[-2:]) if len(shape) > 2 else 0 for shape in shapes[:2]]
        rows = [shape[-1] for shape in shapes[:2]]
        multiply, handle = self._library.gemm_strided_batched_ex, self._handle

        def kernel(c: Any, x: Any, y: Any) -> None:
            multiply(
                handle, *flags, n, m, k, one.ctypes.data,
                y.data.ptr, data, rows[1], apart[1], x.data.ptr, data, rows[0], apart[0],
                weight.ctypes.data, c.data.ptr, data, n, m * n, count, compute, _ANY,
            )  # fmt: skip

        return kernel


_ANY = -1
"""Whichever algorithm cuBLAS takes for the sizes."""


def _sizes(spec: TensorSpec) -> Sequence[int]:
    shape: Shape = spec.shape
    return shape  # type: ignore[return-value]
