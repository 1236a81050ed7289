"""A sparse table and its labels as a source of dense rows; svmlight files, read by scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np

from graphflow.data.sources.source import Array, Batch
from graphflow.errors import ArgumentError


class SparseRows:
    """Rows of a sparse table, dense in batches, and their labels.

    Args:
        table: a scipy CSR matrix.
        labels: one for each row.
    """

    def __init__(self, table: Any, labels: Any) -> None:
        self._table, self._labels = table, labels

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, indices: Array) -> Batch:
        return {"x": self._table[indices].toarray(), "y": self._labels[indices]}


def read_svmlight(at: str, path: str, columns: int | None) -> SparseRows:
    """Return the rows of an svmlight file.

    Args:
        at: begins each error.
        path: of the file.
        columns: their number; None: the largest that occurs.
    """
    try:
        from sklearn.datasets import load_svmlight_file
    except ImportError:
        raise ArgumentError(f"{at} needs scikit-learn: pip install 'graphflow[linear]'") from None
    table, labels = load_svmlight_file(path, n_features=columns, dtype=np.float32)
    return SparseRows(table, labels)
