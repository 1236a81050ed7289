"""Tables on disk as estimators take them: which are streamed, and what their labels are."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from graphflow.errors import LinearModelError
from graphflow.linear.tables.disk_table import ArrayTable, DiskTable
from graphflow.linear.tables.table_stream import TableStream

_COPIES = 3
"""Times that a table may be in memory while a solver works: as given, ordered, squared."""


def as_disk_table(x: Any) -> DiskTable | None:
    """Return the table on disk that a user gave for X; None for tables in memory.

    A memory map of a whole file is one if it is too large for memory.
    """
    if isinstance(x, DiskTable):
        return x
    if not isinstance(x, np.memmap) or not isinstance(x.base, mmap.mmap) or x.filename is None:
        return None
    if x.ndim != 2 or x.dtype.kind not in "fiu":
        return None
    table = ArrayTable(x.filename, array=x)
    return None if fits_memory(table) else table


def fits_memory(table: DiskTable) -> bool:
    """Return True if a table, and what solvers make of it, fit into its memory."""
    return bool(int(table.row_ends[-1]) * _COPIES <= table.memory)


def table_targets(table: DiskTable, y: Any) -> Any:
    """Return y, or the labels in the file if it is None.

    Raises:
        LinearModelError: there are none.
    """
    found = table.targets if y is None else y
    if found is None:
        raise LinearModelError(f"{table.path} holds no labels; give them as y")
    return found


def multiply_table(table: DiskTable, w: Any) -> Any:
    """Return X @ w of a table, read chunk by chunk.

    Args:
        w: (columns,) or (columns, outputs); dense or sparse.

    Raises:
        LinearModelError: the table has another number of columns.
    """
    if table.columns != w.shape[0]:
        raise LinearModelError(
            f"{table.path} has {table.columns:,} columns, and the model has {w.shape[0]:,}; open "
            f"the file with n_features={w.shape[0]}"
        )
    dense = w if isinstance(w, np.ndarray) else w.toarray()
    return TableStream(table, table.memory) @ dense


__all__ = ["as_disk_table", "fits_memory", "multiply_table", "table_targets"]
