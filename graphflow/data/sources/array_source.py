"""Arrays in memory, or mapped from files, as a source."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphflow.data.sources.source import Array, Batch
from graphflow.errors import ArgumentError
from graphflow.ir.op import user_location


class ArraySource:
    """Columns that are arrays of the same length; memory maps are read where rows are asked for."""

    def __init__(self, columns: Mapping[str, Any]) -> None:
        at = f"gf.data.arrays at {user_location()}"
        if not columns:
            raise ArgumentError(f"{at}: give at least one column, such as x=images")
        self._columns: dict[str, Array] = {}
        for name, value in columns.items():
            array = value if isinstance(value, np.ndarray) else np.asarray(value)
            if array.ndim == 0:
                raise ArgumentError(f"{at}: column {name!r} has no rows, it is {value!r}")
            if array.dtype == object:
                raise ArgumentError(
                    f"{at}: column {name!r} is no array of numbers or strings; its rows differ in "
                    "length or kind"
                )
            self._columns[str(name)] = array
        lengths = {name: len(array) for name, array in self._columns.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise ArgumentError(f"{at}: columns differ in their number of rows: {listed}")

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, indices: Array) -> Batch:
        if len(indices) and indices[-1] - indices[0] == len(indices) - 1 and _counts_up(indices):
            rows = slice(int(indices[0]), int(indices[-1]) + 1)  # one copy, and no gather
            return {name: np.array(a[rows]) for name, a in self._columns.items()}
        return {name: np.take(a, indices, 0) for name, a in self._columns.items()}


def _counts_up(indices: Array) -> bool:
    return bool((np.diff(indices) == 1).all())
