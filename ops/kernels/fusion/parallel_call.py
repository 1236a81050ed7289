"""Calls of native functions over arrays, whose rows the threads of the current pool share.

A function computes rows start to stop independently, so the cut into rows changes no bits.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from graphflow.ops.kernels.fusion.region_kernels import (
    GIL_RELEASE_NANOSECONDS,
    THREADING_NANOSECONDS,
)
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.compiler import NativeFunction, compiler, cut_rows
from graphflow.ops.kernels.jit.thread_pool import current_pool


@cache
def native_function(write: Callable[..., tuple[str, str]], *args: Any) -> NativeFunction:
    """Return the native function of the name and text that `write(*args)` gives; written once."""
    return compiler().function(*write(*args))


def call_parallel(
    function: NativeFunction,
    arrays: Sequence[Any],
    sizes: Sequence[int],
    rows: int,
    nanoseconds: float,
) -> None:
    """Run rows 0 to `rows` over contiguous arrays.

    Args:
        nanoseconds: a rough estimate of the time of all rows on one thread.
    """
    table = np.array([address(a) for a in arrays], np.uint64)
    meta = np.array(sizes or (0,), np.int64)
    given = (ctypes.c_void_p(address(table)), ctypes.c_void_p(address(meta)))
    pool = current_pool()
    parts = (
        min(rows, pool.threads) if pool is not None and nanoseconds > THREADING_NANOSECONDS else 1
    )
    if parts < 2 or pool is None:
        (function.releasing_gil if nanoseconds > GIL_RELEASE_NANOSECONDS else function.holding_gil)(
            *given, 0, rows
        )
        return
    entries = [
        (function.address, address(table), address(meta), share.start, share.stop)
        for share in cut_rows(rows, 1, parts)
    ]
    pool.run_entries(np.array(entries, np.uint64), len(entries))
