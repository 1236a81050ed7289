"""CUDA C++ of ours run by the host's compiler: what a kernel means, without a GPU.

The module is compiled with g++ behind a header that makes blocks and threads loops, and intrinsics
the IEEE steps that they name. Where threads of a block meet (`__syncthreads`), each runs on a stack
of its own, and the meeting point switches to the next one.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

HEADER = r"""
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>
using std::memcpy;
struct Three { unsigned x, y, z; };
static Three threadIdx, blockIdx, blockDim, gridDim;
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(n)
#define __shared__ static
#define __align__(n) alignas(n)

#define STEP(name, type, expression) \
  static inline type name(type a, type b) { return expression; }
STEP(__fadd_rn, float, a + b) STEP(__fsub_rn, float, a - b)
STEP(__fmul_rn, float, a * b) STEP(__fdiv_rn, float, a / b)
STEP(__dadd_rn, double, a + b) STEP(__dsub_rn, double, a - b)
STEP(__dmul_rn, double, a * b) STEP(__ddiv_rn, double, a / b)
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
static inline double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
static inline float __fsqrt_rn(float a) { return __builtin_sqrtf(a); }
static inline double __dsqrt_rn(double a) { return __builtin_sqrt(a); }
static inline double atomicAdd(double* a, double b) { double o = *a; *a += b; return o; }
static inline float __double2float_rn(double a) { return (float)a; }
template <typename To, typename From> static inline To cast(From x) {
  To y; memcpy(&y, &x, sizeof y); return y;
}
static inline unsigned __float_as_uint(float x) { return cast<unsigned>(x); }
static inline float __uint_as_float(unsigned x) { return cast<float>(x); }
static inline long long __double_as_longlong(double x) { return cast<long long>(x); }
static inline double __longlong_as_double(long long x) { return cast<double>(x); }

static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> alive;
static unsigned current;
static void (*body)(void**);
static void** arguments;
static void __syncthreads() { swapcontext(&fibers[current], &scheduler); }
static void fiber() { body(arguments); alive[current] = 0; }
static void run_block_together() {
  const unsigned n = blockDim.x;
  const size_t size = 1 << 16;
  static std::vector<char> stacks;
  stacks.resize(size * n);
  fibers.assign(n, ucontext_t());
  alive.assign(n, 1);
  for (unsigned t = 0; t < n; ++t) {
    getcontext(&fibers[t]);
    fibers[t].uc_stack.ss_sp = &stacks[size * t];
    fibers[t].uc_stack.ss_size = size;
    fibers[t].uc_link = &scheduler;
    makecontext(&fibers[t], fiber, 0);
  }
  for (bool any = true; any;) {
    any = false;
    for (unsigned t = 0; t < n; ++t) {
      if (!alive[t]) continue;
      current = t;
      threadIdx.x = t;
      swapcontext(&scheduler, &fibers[t]);
      any = any || alive[t];
    }
  }
}
static void run_grid(void (*kernel)(void**), void** given, unsigned blocks, unsigned threads,
                     int together) {
  gridDim.x = blocks; blockDim.x = threads; body = kernel; arguments = given;
  for (unsigned b = 0; b < blocks; ++b) {
    blockIdx.x = b;
    if (together) { run_block_together(); continue; }
    for (unsigned t = 0; t < threads; ++t) { threadIdx.x = t; kernel(given); }
  }
}
"""
_KERNEL = re.compile(
    r'extern "C" __global__ void __launch_bounds__\(\d+\)\n(\w+)\(([^)]*)\) \{(.*?)\n\}\n', re.S
)


def explain_missing_compiler() -> str | None:
    """Why nothing can be compiled here, or None."""
    return None if shutil.which("g++") else "there is no g++ to run CUDA sources with"


@functools.cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="cuda_on_cpu_"))


class EmulatedModule:
    """A module of CUDA text that the CPU runs.

    Every launch may be made to wait: `launch` gives a function to call later.
    """

    def __init__(self, text: str) -> None:
        wrappers = []
        self.counts: dict[str, int] = {}
        for name, parameters, kernel in _KERNEL.findall(text):
            kinds = [p.rsplit(" ", 1)[0] for p in parameters.split(", ")]
            self.counts[name] = len(kinds)
            given = ", ".join(f"*({kind}*)args[{i}]" for i, kind in enumerate(kinds))
            together = int("__shared__" in kernel)
            wrappers.append(
                f"static void call_{name}(void** args) {{ {name}({given}); }}\n"
                f'extern "C" void run_{name}(void** args, unsigned blocks, unsigned threads) '
                f"{{ run_grid(call_{name}, args, blocks, threads, {together}); }}"
            )
        source = "\n".join([HEADER, text, *wrappers])
        place = _folder() / hashlib.sha256(source.encode()).hexdigest()[:24]
        library = place.with_suffix(".so")
        if not library.exists():
            place.with_suffix(".cpp").write_text(source)
            subprocess.run(
                ["g++", "-std=c++17", "-O0", "-w", "-march=native", "-ffp-contract=off",
                 "-fno-strict-aliasing", "-shared", "-fPIC",
                 "-o", library, place.with_suffix(".cpp")],
                check=True, capture_output=True, text=True,
            )  # fmt: skip
        self._library = ctypes.CDLL(str(library))

    def launch(self, name: str, blocks: int, threads: int, args: Sequence[Any]) -> None:
        """Run a kernel on numpy arrays and 64-bit numbers."""
        assert len(args) == self.counts[name], (name, len(args), self.counts[name])
        words = np.array(
            [a.ctypes.data if isinstance(a, np.ndarray) else int(a) for a in args], np.uint64
        )
        pointers = (ctypes.c_void_p * len(args))(
            *(words.ctypes.data + 8 * i for i in range(len(args)))
        )
        getattr(self._library, f"run_{name}")(pointers, blocks, threads)
