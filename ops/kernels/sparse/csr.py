"""Kernels of sparse matrices in CSR form.

On a CPU, native loops go over the entries (`csr_loops.py`). Without them, numpy computes a column
of the dense side at a time: a column fits in the cache, where its entries are gathered, and numpy
sums segments fast on one axis only. Work is split into blocks by the sizes alone, and each sum has
a fixed order, so threads do not change bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.ops.kernels.codegen.control_flow import element_of
from graphflow.ops.kernels.cuda import scatter_rows as cuda_rows
from graphflow.ops.kernels.fusion.parallel_call import call_parallel, native_function
from graphflow.ops.kernels.fusion.region_kernels import is_jit_enabled
from graphflow.ops.kernels.jit.thread_pool import run_parts
from graphflow.ops.kernels.sparse import csr_loops
from graphflow.ops.kernels.sparse.scatter_rows import combine_rows

_MOST_BLOCKS = 8
_MOST_COLUMNS = 1024  # columns of the dense side that a native loop is written for
_NUMBERS = ("float32", "float64", "int32", "int64")
_THREADING_PRODUCTS = 200_000  # products from which handing a block to another thread pays
_CHUNK_ELEMENTS = 32_768  # elements of gathered rows that stay in the cache


def require_structure(columns: Any, offsets: Any, shape: tuple[Any, ...]) -> None:
    """Check the structure of a matrix.

    Raises:
        IndexError: a column outside the matrix, or offsets that do not start at 0, fall, or end
            elsewhere than at the number of entries.
    """
    entries = columns.shape[0]
    if int(offsets[0]) != 0 or int(offsets[-1]) != entries:
        raise IndexError(
            f"row offsets go from {int(offsets[0])} to {int(offsets[-1])}; they must go from 0 to "
            f"the number of entries, {entries}"
        )
    falls = offsets[1:] < offsets[:-1]
    if bool(falls.any()):
        row = int(falls.argmax())
        raise IndexError(
            f"row offsets fall from {int(offsets[row])} to {int(offsets[row + 1])} in row {row}"
        )
    if entries:
        low, high = int(columns.min()), int(columns.max())
        if low < 0 or high >= shape[1]:
            raise IndexError(
                f"column {low if low < 0 else high} is outside a matrix of {shape[1]} columns"
            )


def _require_offsets(columns: Any, offsets: Any, shape: tuple[Any, ...]) -> None:
    """Check the offsets alone; native loops check the columns as they go."""
    ends = int(offsets[0]) == 0 and int(offsets[-1]) == columns.shape[0]
    if not ends or bool((offsets[1:] < offsets[:-1]).any()):
        require_structure(columns, offsets, shape)


def _entry_rows(xp: Any, offsets: Any) -> Any:
    """Return the row of each entry."""
    if xp is np:
        return np.repeat(np.arange(offsets.shape[0] - 1), np.diff(offsets))
    entries = xp.arange(int(offsets[-1]))
    return xp.searchsorted(offsets.astype(np.int64), entries, side="right") - 1


def flat_places(xp: Any, columns: Any, offsets: Any, shape: tuple[int, int]) -> Any:
    """Return the index of each entry in the flattened dense matrix."""
    require_structure(columns, offsets, shape)
    return _entry_rows(xp, offsets) * shape[1] + columns.astype(np.int64, copy=False)


def matmul(
    xp: Any,
    out: Any,
    values: Any,
    columns: Any,
    offsets: Any,
    dense: Any,
    shape: tuple[int, int],
    transpose: bool,
) -> None:
    """Write A @ dense, or Aᵀ @ dense."""
    if xp is np and _try_native_matmul(out, values, columns, offsets, dense, shape, transpose):
        return
    require_structure(columns, offsets, shape)
    columns = columns.astype(np.int64, copy=False)
    if not values.size:
        out[...] = 0
    elif xp is not np:
        _multiply_on_gpu(xp, out, values, columns, offsets, dense, transpose)
    elif transpose:
        _add_columns(out, values, columns, _entry_rows(np, offsets), dense)
    else:
        _sum_rows(out, values, columns, offsets, dense)


def _native_types(dtype: Any, columns: Any, offsets: Any, shape: tuple[int, int]) -> Any:
    """Return the element types of native loops; None if there are no loops or no entries."""
    if not is_jit_enabled() or not columns.size or min(shape) == 0 or shape[1] >= 1 << 31:
        return None
    kinds = (columns.dtype.name, offsets.dtype.name)
    if dtype.name not in _NUMBERS or any(kind not in ("int32", "int64") for kind in kinds):
        return None
    return tuple(map(element_of, (dtype, *kinds)))


def _try_native_matmul(
    out: Any, values: Any, columns: Any, offsets: Any, dense: Any, shape: tuple[int, int],
    transpose: bool,
) -> bool:  # fmt: skip
    """Write the product by a native loop; returns False if there is none."""
    kinds = _native_types(values.dtype, columns, offsets, shape)
    width = dense.shape[1]
    if kinds is None or not 0 < width <= _MOST_COLUMNS:
        return False
    wrong = np.zeros(1, np.int64)
    work = 0.7 * len(values) * (4 + width * values.itemsize / 16)
    sizes: list[int] = [*shape]
    given = [values, columns, offsets, dense]
    _require_offsets(columns, offsets, shape)
    if not transpose:
        loop = native_function(csr_loops.sum_rows, *kinds, width)
        call_parallel(loop, [*given, out, wrong], sizes, shape[0], work)
    else:
        loop = native_function(csr_loops.add_columns, *kinds, width)
        pieces = csr_loops.piece_count(kinds[0], width)
        if pieces > 1:
            out[...] = 0
            call_parallel(loop, [*given, out, wrong], sizes, pieces, work)
        else:
            blocks = max(
                1,
                min(
                    _MOST_BLOCKS, len(values) // (4 * shape[1]), len(values) // _THREADING_PRODUCTS
                ),
            )
            edges = [shape[0] * i // blocks for i in range(blocks + 1)]
            sums = out if blocks == 1 else np.empty((blocks, *out.shape), out.dtype)
            sums[...] = 0
            call_parallel(loop, [*given, sums, wrong], [*sizes, *edges], blocks, work)
            if blocks > 1:
                np.add.reduce(sums, axis=0, out=out)
    if wrong[0]:
        require_structure(columns, offsets, shape)
    return True


def _run_columns(part: Any, width: int, entries: int) -> None:
    """Run part(j) for each column of the dense side, in blocks."""
    blocks = min(_MOST_BLOCKS, width) if width * entries >= _THREADING_PRODUCTS else 1

    def block(i: int) -> None:
        for j in range(width * i // blocks, width * (i + 1) // blocks):
            part(j)

    run_parts(block, blocks)


def _sum_rows(out: Any, values: Any, columns: Any, offsets: Any, dense: Any) -> None:
    """Sum the entries of each row; empty rows are left out, since reduceat would misread them."""
    filled = offsets[1:] > offsets[:-1]
    starts = offsets[:-1][filled].astype(np.int64, copy=False)
    every = len(starts) == len(filled)
    if not every:
        out[...] = 0
    lines = np.ascontiguousarray(dense.T)

    def column(j: int) -> None:
        products = np.take(lines[j], columns)
        np.multiply(products, values, out=products)
        sums = np.add.reduceat(products, starts, dtype=out.dtype)
        if every:
            out[:, j] = sums
        else:
            out[filled, j] = sums

    _run_columns(column, dense.shape[1], len(values))


def _add_columns(out: Any, values: Any, columns: Any, rows: Any, dense: Any) -> None:
    """Add each entry's product to the row of its column, in order."""
    lines = np.ascontiguousarray(dense.T)
    sums = np.zeros(out.shape[::-1], out.dtype)

    def column(j: int) -> None:
        products = np.take(lines[j], rows)
        np.multiply(products, values, out=products)
        combine_rows(np, sums[j].reshape(-1, 1), columns, products.reshape(-1, 1), "add")

    _run_columns(column, dense.shape[1], len(values))
    np.copyto(out, sums.T)


def sample(
    xp: Any, out: Any, columns: Any, offsets: Any, rows: Any, others: Any, shape: tuple[int, int]
) -> None:
    """Write out[e] = the scalar product of the rows of both matrices that entry e names."""
    if xp is np and _try_native_sample(out, columns, offsets, rows, others, shape):
        return
    require_structure(columns, offsets, shape)
    columns = columns.astype(np.int64, copy=False)
    entry_rows = _entry_rows(xp, offsets)
    width = rows.shape[1]
    if xp is np and width == 1:
        np.multiply(np.take(rows, entry_rows), np.take(others, columns), out=out)
        return
    step = max(1, _CHUNK_ELEMENTS // max(1, width)) if xp is np else max(1, len(columns))

    def chunk(i: int) -> None:
        part = slice(i * step, (i + 1) * step)
        products = xp.take(rows, entry_rows[part], 0)
        xp.multiply(products, xp.take(others, columns[part], 0), out=products)
        out[part] = products.sum(axis=1, dtype=out.dtype)

    run_parts(chunk, -(-len(columns) // step))


def _try_native_sample(
    out: Any, columns: Any, offsets: Any, rows: Any, others: Any, shape: tuple[int, int]
) -> bool:
    kinds = _native_types(out.dtype, columns, offsets, shape)
    width = rows.shape[1]
    if kinds is None or not 0 < width <= _MOST_COLUMNS:
        return False
    _require_offsets(columns, offsets, shape)
    wrong = np.zeros(1, np.int64)
    loop = native_function(csr_loops.sample_entries, *kinds, width)
    work = 0.7 * len(columns) * (8 + width * rows.itemsize / 16)
    sizes = [*shape]
    call_parallel(loop, [columns, offsets, rows, others, out, wrong], sizes, shape[0], work)
    if wrong[0]:
        require_structure(columns, offsets, shape)
    return True


def _multiply_on_gpu(
    xp: Any, out: Any, values: Any, columns: Any, offsets: Any, dense: Any, transpose: bool
) -> None:
    """Compute an element with a thread, over the entries of its row (or column) in order."""
    order = xp.arange(len(values))
    sources, bounds = columns, offsets.astype(np.int64)
    if transpose:
        order = xp.argsort(columns, kind="stable")
        sources = _entry_rows(xp, offsets)
        bounds = xp.searchsorted(columns[order], xp.arange(out.shape[0] + 1))
    cuda_rows.multiply(xp, out, values, dense, order, sources, bounds)
