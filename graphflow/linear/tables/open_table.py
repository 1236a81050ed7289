"""The door to tables in files: `gf.linear.open`."""

from __future__ import annotations

from typing import Any, Literal

from graphflow.errors import LinearModelError
from graphflow.linear.tables.disk_table import ArrayTable, DiskTable, file_suffix
from graphflow.linear.tables.sparse_table import NpzTable, SvmlightTable


def open_table(
    path: Any, *, zero_based: bool | Literal["auto"] = "auto", n_features: int | None = None,
    memory: int | None = None,
) -> DiskTable:  # fmt: skip
    """Open a table in a file, which estimators take for X.

        gf.linear.LinearSVC().fit(gf.linear.open("train.svm"))

    Args:
        path: `.npy`, `.npz` (by `scipy.sparse.save_npz`), or a svmlight file under any other name.
        zero_based: of svmlight files: True if columns are numbered from 0, False if from 1; "auto":
            from 1, unless there is a column 0.
        n_features: of svmlight files: the number of columns, where some may have no entry.
        memory: bytes that a fit may use beside what the process has; None: half of what is free.

    Raises:
        LinearModelError: the file cannot be read, or is of another kind.
    """
    kinds: dict[str, type[DiskTable]] = {".npy": ArrayTable, ".npz": NpzTable}
    kind = kinds.get(file_suffix(path))
    if kind is None:
        return SvmlightTable(path, zero_based=zero_based, n_features=n_features, memory=memory)
    if zero_based != "auto" or n_features is not None:
        raise LinearModelError(f"zero_based and n_features are of svmlight files, not of {path}")
    return kind(path, memory)


__all__ = ["open_table"]
