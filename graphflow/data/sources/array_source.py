"""Arrays in memory, or mapped from files, as a source."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from graphflow.data.sources.source import Array, Batch
from graphflow.errors import ArgumentError


class ArraySource:
    """Columns that are arrays of the same length; memory maps are read where rows are asked for.

    Args:
        at: begins each error.
        columns: arrays by name.
    """

    def __init__(self, at: str, columns: Mapping[str, Any]) -> None:
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


class MappedFiles(ArraySource):
    """Columns of `.npy` files, which are mapped.

    Args:
        at: begins each error.
        files: the file of each column.
    """

    def __init__(self, at: str, files: Mapping[str, str]) -> None:
        self._at = at
        self._stamps = {file: _stamp(file) for file in files.values()}
        super().__init__(
            at,
            {name: np.lib.format.open_memmap(file, mode="r") for name, file in files.items()},
        )

    def __getitem__(self, indices: Array) -> Batch:
        for file, stamp in self._stamps.items():
            if _stamp(file) != stamp:
                raise ArgumentError(
                    f"{self._at}: {file!r} has changed since it was opened; open it again"
                )
        return super().__getitem__(indices)


def _stamp(file: str) -> tuple[int, int]:
    found = os.stat(file)
    return found.st_size, found.st_mtime_ns


def _counts_up(indices: Array) -> bool:
    return bool((np.diff(indices) == 1).all())
