"""Costs of kernels that read or write rows at computed places."""

from __future__ import annotations

from graphflow.ir.spec import Size, TensorSpec, maximum, product

LINE_BYTES = 64
"""Bytes of a cache line: a shorter row takes as long as this."""

ROW_FLOPS = 32
"""Elements that a kernel adds in the time that it takes to begin a row."""


def touched_bytes(count: Size, table: TensorSpec, axes: int = 1) -> Size:
    """Return the bytes that are touched in some rows of a table.

    Args:
        count: the rows.
        axes: the leading axes of the table that count rows.
    """
    row = product(table.shape[axes:]) * table.dtype.itemsize
    return count * maximum(row, LINE_BYTES)


__all__ = ["LINE_BYTES", "ROW_FLOPS", "touched_bytes"]
