"""A CUDA kernel of dual coordinate ascent: a block a row, whose threads share the row's entries.

    block: partial sums of x_i·w, strided → summed in the block's memory → thread 0 finds the best
           dual variable → all threads add the step to w by atomic operations

Blocks run at the same time, and each sees the weights as others have left them by then.

Source: Parnell et al., IPDPS Workshops 2017 (TPA-SCD).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from graphflow.ops.kernels.cuda.module_prelude import PRELUDE

NAME = "graphflow_coordinate_rows"
MOST_THREADS = 256
"""Threads of a block, at most."""
_TYPES = {"float32": "float", "float64": "double", "int32": "s32", "int64": "s64"}
_STEPS = r"""
static __device__ __forceinline__ double gf_least(const double a, const double b) {
  return b < a ? b : a;
}
static __device__ __forceinline__ double gf_most(const double a, const double b) {
  return b > a ? b : a;
}
static __device__ __forceinline__ double gf_soft(const double x, const double threshold) {
  return x > threshold ? x - threshold : x < -threshold ? x + threshold : 0.0;
}
static __device__ double
gf_best_logistic(const double old, const double margin, const double q, const double c) {
  const double start = gf_least(gf_most(old, 1e-12 * c), (1.0 - 1e-12) * c);
  double low = -margin - q * (c - old), high = -margin + q * old;
  double t = gf_least(gf_most(log(start / (c - start)), low), high);
  double a = c / (1.0 + exp(-t));
  for (int turn = 0; turn < 30; ++turn) {
    const double slope = q * (a - old) + margin + t;
    if (slope > 0.0) high = t; else low = t;
    const double step = slope / (1.0 + q * a * (1.0 - a / c));
    t = t - step;
    if (t < low || t > high) t = 0.5 * (low + high);
    a = c / (1.0 + exp(-t));
    if (gf_most(step, -step) < 1e-14 * (1.0 + gf_most(t, -t))) break;
  }
  return a;
}
static __device__ double
gf_best_dual(const u64 loss, const double old, const double u, const double q, const double y,
             const double c, const double parameter) {
  const double off = y - u + q * old;
  switch (loss) {
    case 0: return old + (y - u - old / c) / (q + 1.0 / c);
    case 1: return y * gf_best_logistic(y * old, y * u, q, c);
    case 2:
      if (q <= 0.0) return y * c;
      return y * gf_least(gf_most(y * old + (1.0 - y * u) / q, 0.0), c);
    case 3: {
      const double a = y * old;
      return y * gf_most(a + (1.0 - y * u - a / (2.0 * c)) / (q + 0.5 / c), 0.0);
    }
    case 4: {
      const double free = old + (y - u - old / c) / (q + 1.0 / c);
      return gf_least(gf_most(free, -c * parameter), c * parameter);
    }
    case 5:
      if (q <= 0.0) return off > parameter ? c : off < -parameter ? -c : 0.0;
      return gf_least(gf_most(gf_soft(off, parameter) / q, -c), c);
    default: return gf_soft(off, parameter) / (q + 0.5 / c);
  }
}
"""


@cache
def row_source(dtype: np.dtype[Any], index: np.dtype[Any] | None) -> str:
    """Return the source of the kernel.

    Its arguments are arrays `order` (the rows to visit), `values`, `places` and `offsets` of the
    matrix in CSR form (`values` alone counts for a dense one), `squares`, `y`, `c`, `numbers`
    (1/l2, bias, the loss's parameter), `beta` and `w`; and the numbers of rows to visit, of
    columns, and of the loss.

    Args:
        dtype: of the matrix: float32 or float64.
        index: of its columns and offsets: int32 or int64; None for a dense matrix.
    """
    kind = "s64" if index is None else _TYPES[index.name]
    if index is None:
        first, stop, place = "i * (s64)columns", "(i + 1) * (s64)columns", "p - first"
    else:
        first, stop, place = "offsets[i]", "offsets[i + 1]", "places[p]"
    operands = (
        "const s64* order, const T* values, const I* places, const I* offsets, "
        "const double* squares, const double* y, const double* c, const double* numbers, "
        "double* beta, double* w, const u64 count, const u64 columns, const u64 loss"
    )
    return f"""{PRELUDE}{_STEPS}
typedef {_TYPES[dtype.name]} T;
typedef {kind} I;
extern "C" __global__ void __launch_bounds__({MOST_THREADS})
{NAME}({operands}) {{
  __shared__ double sums[{MOST_THREADS}];
  const volatile double* seen = w;  // no thread may keep what others change
  const double inverse = numbers[0], bias = numbers[1];
  for (u64 k = blockIdx.x; k < count; k += gridDim.x) {{
    const s64 i = order[k], first = {first}, stop = {stop};
    double sum = 0.0;
    for (s64 p = first + threadIdx.x; p < stop; p += blockDim.x) {{
      sum += (double)values[p] * seen[{place}];
    }}
    sums[threadIdx.x] = sum;
    __syncthreads();
    for (unsigned half = blockDim.x / 2; half > 0; half /= 2) {{
      if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
      __syncthreads();
    }}
    if (threadIdx.x == 0) {{
      const double u = sums[0] + bias * seen[columns], q = squares[i] * inverse;
      const double best = gf_best_dual(loss, beta[i], u, q, y[i], c[i], numbers[2]);
      sums[0] = (best - beta[i]) * inverse;
      beta[i] = best;
      if (bias != 0.0) atomicAdd(w + columns, sums[0] * bias);
    }}
    __syncthreads();
    const double step = sums[0];
    if (step != 0.0) {{
      for (s64 p = first + threadIdx.x; p < stop; p += blockDim.x) {{
        atomicAdd(w + ({place}), step * (double)values[p]);
      }}
    }}
    __syncthreads();
  }}
}}
"""


__all__ = ["MOST_THREADS", "NAME", "row_source"]
