"""CUDA kernels of scatters and of sparse products.

One thread computes an element of the result from all its updates, in order; atomic operations would
come in any order. Each step rounds as in the CPU's loops (`scatter_row_loops.py`, `csr_loops.py`).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from graphflow.ir.spec import is_half
from graphflow.ops.kernels.cuda.module_prelude import PRELUDE
from graphflow.ops.kernels.cuda.nvrtc import compile_module

_THREADS = 256
_MOST_BLOCKS = 1 << 20  # each goes on in strides
_NAME = "graphflow_rows"
_TYPES = {
    "bool": "u8", "int8": "s8", "int16": "s16", "int32": "s32", "int64": "s64", "uint8": "u8",
    "uint16": "u16", "uint32": "u32", "uint64": "u64", "float32": "float", "float64": "double",
    "complex64": "gf_complex<float>", "complex128": "gf_complex<double>",
}  # fmt: skip
_STEPS = {
    "none": "u",
    "add": "total + u",
    "mul": "total * u",
    # NaN wins: it differs from itself
    "min": "total < u || total != total ? total : u",
    "max": "total > u || total != total ? total : u",
}
_ARITHMETIC = r"""
template <typename F> struct gf_complex { F re, im; };
template <typename F> static __device__ __forceinline__ gf_complex<F>
operator+(const gf_complex<F> a, const gf_complex<F> b) { return {a.re + b.re, a.im + b.im}; }
template <typename F> static __device__ __forceinline__ gf_complex<F>
operator*(const gf_complex<F> a, const gf_complex<F> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}
template <typename I> static __device__ __forceinline__ I
gf_fma(const I a, const I b, const I c) { return a * b + c; }
static __device__ __forceinline__ float
gf_fma(const float a, const float b, const float c) { return __fmaf_rn(a, b, c); }
static __device__ __forceinline__ double
gf_fma(const double a, const double b, const double c) { return __fma_rn(a, b, c); }
"""


def combine(xp: Any, out: Any, rows: Any, updates: Any, reduction: str) -> None:
    """Combine rows of a GPU's arrays; see `sparse.scatter_rows.combine_rows`."""
    order = xp.argsort(rows, kind="stable")
    bounds = xp.searchsorted(rows[order], xp.arange(out.shape[0] + 1))
    if reduction == "none" and is_half(
        out.dtype
    ):  # bits are copied; other reductions come in float32
        out, updates = out.view(np.uint16), updates.view(np.uint16)
    text = combine_source(out.dtype, reduction)
    _launch(xp, text, (xp.ascontiguousarray(updates), order, bounds, out))


def multiply(
    xp: Any, out: Any, values: Any, dense: Any, order: Any, sources: Any, bounds: Any
) -> None:
    """Write out[r] = Σ values[e]·dense[sources[e]] over the entries e of row r.

    The entries of row r are order[j] for j from bounds[r] to bounds[r + 1].
    """
    given = (xp.ascontiguousarray(values), xp.ascontiguousarray(dense), order, sources, bounds)
    _launch(xp, multiply_source(out.dtype), (*given, out))


@cache
def combine_source(dtype: np.dtype[Any], reduction: str) -> str:
    """Return the source that combines rows of a dtype."""
    return _source(
        dtype,
        "const T* updates, const s64* order, const s64* bounds",
        "out[i]",
        f"const T u = updates[order[j] * width + column]; total = {_STEPS[reduction]};",
    )


@cache
def multiply_source(dtype: np.dtype[Any]) -> str:
    """Return the source that multiplies matrices of a dtype."""
    return _source(
        dtype,
        "const T* values, const T* dense, const s64* order, const s64* sources, const s64* bounds",
        "0",
        "const s64 e = order[j]; "
        "total = gf_fma(values[e], dense[sources[e] * width + column], total);",
    )


def _source(dtype: np.dtype[Any], operands: str, first: str, step: str) -> str:
    return f"""{PRELUDE}{_ARITHMETIC}
typedef {_TYPES[dtype.name]} T;
extern "C" __global__ void __launch_bounds__({_THREADS})
{_NAME}({operands}, T* out, const u64 width, const u64 size) {{
  const u64 stride = (u64)gridDim.x * blockDim.x;
  for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < size; i += stride) {{
    const u64 row = i / width, column = i % width;
    T total = {first};
    for (s64 j = bounds[row]; j < bounds[row + 1]; ++j) {{ {step} }}
    out[i] = total;
  }}
}}
"""


def _launch(xp: Any, text: str, arrays: tuple[Any, ...]) -> None:
    out = arrays[-1]
    if not out.size:
        return
    blocks = min(-(-out.size // _THREADS), _MOST_BLOCKS)
    sizes = np.uint64(out.shape[1]), np.uint64(out.size)
    _kernel_function(xp, xp.cuda.Device().id, text)((blocks,), (_THREADS,), (*arrays, *sizes))


@cache
def _kernel_function(xp: Any, device: int, text: str) -> Any:
    """Return the kernel of a source on the current device."""
    return compile_module(xp, text).get_function(_NAME)
