"""Kernels of float32 that take 16-bit floats: operands are widened and results rounded natively.

The conversions are calls of generated kernels, so a program records them with the calls of a kernel
that consists of native ones. numpy converts bfloat16 element by element, which took longer than
attention itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np

from graphflow.ir.op import REGISTRY
from graphflow.ir.spec import is_half
from graphflow.ops.kernels.codegen.memory_loops import call_native
from graphflow.ops.kernels.codegen.region import Operand, Region, RegionOp, freeze_attributes
from graphflow.ops.kernels.fusion.region_kernels import (
    RegionKernel,
    is_jit_enabled,
    kernel_of,
    trace_op,
)
from graphflow.ops.kernels.jit.compiler import compiler, cut_rows
from graphflow.ops.kernels.jit.kernel_recording import ArrayStandIn, operand_place
from graphflow.ops.kernels.jit.scratch_memory import scratch
from graphflow.ops.kernels.jit.thread_pool import run_native_parts

_SHARE = 1 << 17
"""Elements of a share of a conversion, which threads take."""
_LINE = 64
_SINGLE = np.dtype("float32")


def run_in_float32(
    into: Callable[..., None], out: Any, arrays: Sequence[Any], attrs: Mapping[str, Any]
) -> None:
    """Run a kernel of float32 on arrays some of which have 16 bits, and round its results once.

    Args:
        into: (xp, out, *arrays, **attrs), as an op declares it.
        out: the array to write, or a tuple of several.
    """
    outs = out if isinstance(out, tuple) else (out,)
    is_outermost = not getattr(_local, "is_running", False)
    _local.is_running = True
    try:
        given = [
            _widen(a, f"float32 operand {i}", is_outermost) if is_half(a.dtype) else a
            for i, a in enumerate(arrays)
        ]
        results = tuple(
            _float_buffer(o, f"float32 result {i}", is_outermost) if is_half(o.dtype) else o
            for i, o in enumerate(outs)
        )
        into(np, results if isinstance(out, tuple) else results[0], *given, **attrs)
    finally:
        _local.is_running = not is_outermost
    for target, result in zip(outs, results, strict=True):
        if result is not target:
            _convert(result, target)


_local = threading.local()


def _widen(array: Any, slot: str, is_outermost: bool) -> Any:
    wide = _float_buffer(array, slot, is_outermost)
    _convert(array, wide)
    return wide


def _float_buffer(like: Any, slot: str, is_outermost: bool) -> Any:
    """Return a float32 array of a shape. A kernel within a kernel gets memory of its own, since
    scratch memory holds the outer one's operands."""
    return scratch(np, slot, like.shape, _SINGLE) if is_outermost else np.empty(like.shape, _SINGLE)


def _convert(source: Any, target: Any) -> None:
    """Convert an array to the dtype of another one of its shape."""
    kernel = _conversion(source.dtype, target.dtype) if is_jit_enabled() else None
    if kernel is None or not _are_contiguous(source, target):
        np.copyto(target, source, casting="unsafe")
        return
    size = prod(source.shape)
    task = kernel.task((size,))
    function = compiler().function(task.name, task.text)
    places = operand_place(source), operand_place(target)
    shares = cut_rows(size, _LINE, max(1, size // _SHARE))

    def part(i: int) -> None:
        call_native(function, places, task.sizes, shares[i].start, shares[i].stop)

    if size:
        run_native_parts(part, len(shares))


def _are_contiguous(*arrays: Any) -> bool:
    return all(isinstance(a, ArrayStandIn) or a.flags.c_contiguous for a in arrays)


@cache
def _conversion(source: np.dtype[Any], target: np.dtype[Any]) -> RegionKernel | None:
    """Return the kernel of a conversion; None if registers of this processor do not convert."""
    attrs = {"dtype": target.name}
    items = freeze_attributes(attrs)
    if items is None or trace_op(REGISTRY["astype"], [source], attrs) is None:
        return None
    applied = RegionOp(REGISTRY["astype"], items, ((False, 0),))
    return kernel_of(Region(1, (Operand(source.name, (True,)),), (applied,), (0,)))
