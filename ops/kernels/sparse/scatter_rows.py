"""Combining rows at computed places, in the order of the updates, for all scatters.

The order is fixed on every device, so results do not change from run to run, whatever the number of
duplicates.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.ir.spec import is_half
from graphflow.ops.kernels.codegen.control_flow import element_of
from graphflow.ops.kernels.cuda import scatter_rows as cuda_rows
from graphflow.ops.kernels.fusion.parallel_call import call_parallel, native_function
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.sparse import scatter_row_loops

REDUCTIONS = ("none", "add", "mul", "min", "max")
_UFUNCS = {"add": "add", "mul": "multiply", "min": "minimum", "max": "maximum"}
# Elements of a row from which a call for each row pays (measured: 0.5 µs a call, 2 ns an element).
_WIDE_ROW = 512
_CHUNK_ELEMENTS = 16384  # elements whose places are computed together, which stay in the cache


def normalize_indices(xp: Any, indices: Any, n: int, axis: int | None = None) -> Any:
    """Return indices as int64, counted from the front.

    Raises:
        IndexError: one is outside [-n, n).
    """
    if indices.size:
        low, high = int(indices.min()), int(indices.max())  # before uint64 turns negative
        if low < -n or high >= n:
            where = "an axis" if axis is None else f"axis {axis}"
            raise IndexError(f"index {low if low < -n else high} is outside {where} of size {n}")
        indices = indices.astype(np.int64, copy=False)
        if low < 0:
            indices = xp.where(indices < 0, indices + n, indices)
    return indices.astype(np.int64, copy=False)


def take_into(xp: Any, out: Any, x: Any, indices: Any, axis: int | None = None) -> None:
    """Write the slices of x at normalised indices along an axis (None: of x flattened).

    Consecutive indices are copied as one slice, several times as fast along inner axes.
    """
    if xp is np and axis and _are_consecutive(indices):
        start = int(indices[0])
        np.copyto(out, x[(slice(None),) * axis + (slice(start, start + indices.size),)])
    elif xp is np:
        np.take(x, indices, axis, out=out, mode="wrap")  # the mode that does not buffer `out`
    else:
        xp.take(x, indices, axis, out=out)


def _are_consecutive(indices: Any) -> bool:
    """Return True if each index is the one before it plus 1."""
    if indices.ndim != 1 or indices.size < 2 or indices[-1] - indices[0] != indices.size - 1:
        return False
    return bool((indices[1:] - indices[:-1] == 1).all())


def combine_rows(xp: Any, out: Any, rows: Any, updates: Any, reduction: str) -> None:
    """Write out[rows[j]] = out[rows[j]] ∘ updates[j] for j = 0, 1, … in this order.

    Args:
        out: (n, m), contiguous.
        rows: (k,) int64 in [0, n).
        updates: (k, m).
        reduction: ∘, of `REDUCTIONS`; "none" keeps the last update. 16-bit floats are combined in
            float32.
    """
    if not updates.size:
        return
    if reduction != "none" and is_half(out.dtype):
        wide = out.astype(np.float32)
        combine_rows(xp, wide, rows, updates.astype(np.float32), reduction)
        out[...] = wide
    elif xp is not np:
        cuda_rows.combine(xp, out, rows, updates, reduction)
    elif reduction == "none":
        out[rows] = updates
    elif _try_native_combine(out, rows, updates, reduction):
        return
    elif out.shape[1] >= _WIDE_ROW:
        _combine_wide(out, rows, updates, getattr(np, _UFUNCS[reduction]))
    else:
        _combine_narrow(out, rows, updates, getattr(np, _UFUNCS[reduction]))


def _try_native_combine(out: Any, rows: Any, updates: Any, reduction: str) -> bool:
    """Combine by a native loop; returns False if there is none."""
    known = out.dtype.kind in "iuf" and updates.dtype == out.dtype
    plain = out.flags.c_contiguous and updates.flags.c_contiguous and rows.flags.c_contiguous
    if not (known and plain and is_jit_enabled()):
        return False
    count, width = updates.shape
    element = element_of(out.dtype)
    lanes = scatter_row_loops.lanes_for(element, width)
    loop = native_function(
        scatter_row_loops.combine, element, reduction, out.dtype.kind == "i", lanes
    )
    pieces = -(-width // (lanes * scatter_row_loops.PIECE))
    work = count * (2 + 0.06 * width * out.itemsize)
    call_parallel(loop, [out, rows, updates], [count, width], pieces, work)
    return True


def _combine_wide(out: Any, rows: Any, updates: Any, ufunc: Any) -> None:
    for row, update in zip(rows.tolist(), updates, strict=True):
        target = out[row]
        ufunc(target, update, out=target)


def _combine_narrow(out: Any, rows: Any, updates: Any, ufunc: Any) -> None:
    """Combine element by element, since `ufunc.at` is fast on one axis only."""
    width = out.shape[1]
    flat = out.reshape(-1)
    if width == 1:
        ufunc.at(flat, rows, updates.reshape(-1))
        return
    columns = np.arange(width)
    step = max(1, _CHUNK_ELEMENTS // width)
    for first in range(0, len(rows), step):
        part = slice(first, first + step)
        places = (rows[part, None] * width + columns).reshape(-1)
        ufunc.at(flat, places, updates[part].reshape(-1))
