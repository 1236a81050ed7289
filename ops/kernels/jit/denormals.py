"""Flush-to-zero: numbers too small for the usual format count as zero, on x86 processors.

Arithmetic on denormal numbers takes some hundred cycles on many processors. The mode belongs to a
thread (bits FTZ and DAZ of its MXCSR register); the threads of a pool take over that of the thread
whose work they share (`thread_team.py`).
"""

from __future__ import annotations

import platform
from functools import cache

import numpy as np

from graphflow.errors import DeviceError
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, name_module

FLUSH_BITS = 0x8040
"""FTZ and DAZ: results that are denormal become zero, and so do operands."""

# mode(kept, none, flush, 0) stores the register, then sets the bits; with flush = 0 it restores it.
_MODE = f"""(ptr %kept, ptr %none, i64 %flush, i64 %stop) {{
entry:
  %new = alloca i32, align 4
  %on = icmp ne i64 %flush, 0
  br i1 %on, label %set, label %restore
set:
  call void @llvm.x86.sse.stmxcsr(ptr %kept)
  %old = load i32, ptr %kept, align 4
  %bits = or i32 %old, {FLUSH_BITS}
  store i32 %bits, ptr %new, align 4
  call void @llvm.x86.sse.ldmxcsr(ptr %new)
  br label %done
restore:
  call void @llvm.x86.sse.ldmxcsr(ptr %kept)
  br label %done
done:
  ret void
}}"""
_NEEDS = "declare void @llvm.x86.sse.stmxcsr(ptr)\ndeclare void @llvm.x86.sse.ldmxcsr(ptr)"


def is_x86() -> bool:
    """Return whether this process runs on an x86 processor."""
    return platform.machine().lower() in ("x86_64", "amd64")


@cache
def _mode_function() -> NativeFunction:
    return compiler().function(*name_module(_MODE, _NEEDS))


class FlushDenormals:
    """Context in which this thread counts denormal numbers as zero.

    It is entered by one thread at a time.

    Raises:
        DeviceError: the processor is no x86.
    """

    def __init__(self) -> None:
        if not is_x86():
            raise DeviceError(
                f"flush_denormals needs an x86 processor, this is {platform.machine()}; "
                "leave it out"
            )
        self._kept = np.zeros(1, np.int64)
        self._place = address(self._kept)
        self._mode = _mode_function().holding_gil

    def __enter__(self) -> None:
        self._mode(self._place, None, 1, 0)

    def __exit__(self, *raised: object) -> None:
        self._mode(self._place, None, 0, 0)
