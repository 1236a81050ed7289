"""Datasets of other libraries as a source: of torch, Hugging Face, polars, pandas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from graphflow.data.sources.source import Array, Batch
from graphflow.errors import ArgumentError
from graphflow.ir.op import user_location


class WrappedSource:
    """An object with a length and rows.

    It may answer a list of row numbers with a dict of arrays, or a table with columns (`to_dict`,
    `columns`), or one row number with a row: a dict, a tuple, or an array.

    Args:
        names: names of the columns, for rows that are tuples or arrays.
    """

    def __init__(self, rows: Any, names: tuple[str, ...] = ()) -> None:
        at = f"gf.data.wrap at {user_location()}"
        if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
            raise ArgumentError(
                f"{at}: {type(rows).__name__} has no len() and no [indices]; for an iterator, take "
                "gf.data.iterate"
            )
        self._rows = rows
        self._names = names
        try:
            count = len(rows)
        except TypeError as error:
            raise ArgumentError(f"{at}: {rows!r} has no rows: {error}") from error
        self._by_list = count > 0 and self._answers_lists()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, indices: Array) -> Batch:
        if self._by_list:
            return self._columns(self._rows[indices.tolist()], len(indices))
        return self._collate([self._row(int(i)) for i in indices])

    def _answers_lists(self) -> bool:
        """Return True if a list of row numbers is answered with columns."""
        try:
            found = self._rows[[0]]
        except Exception:
            return False
        return isinstance(found, Mapping) or hasattr(found, "columns")

    def _columns(self, found: Any, count: int) -> Batch:
        """Return a dict or table of columns as arrays."""
        names = list(found) if isinstance(found, Mapping) else list(found.columns)
        columns = {str(name): np.asarray(found[name]) for name in names}
        for name, array in columns.items():
            if len(array) != count:
                raise ArgumentError(
                    f"column {name!r} of {type(self._rows).__name__} has {len(array)} rows for "
                    f"{count} numbers"
                )
        return columns

    def _row(self, index: int) -> Mapping[str, Any]:
        row = self._rows[index]
        if isinstance(row, Mapping):
            return row
        values = row if isinstance(row, tuple | list) else (row,)
        names = self._names or tuple("xyz"[: len(values)])
        if len(names) != len(values):
            raise ArgumentError(
                f"rows of {type(self._rows).__name__} hold {len(values)} values, and there are "
                f"{len(names)} names; give gf.data.wrap(rows, names=[…]) one name for each"
            )
        return dict(zip(names, values, strict=True))

    def _collate(self, rows: list[Mapping[str, Any]]) -> Batch:
        """Return rows as columns."""
        if not rows:
            return {name: np.asarray([v])[:0] for name, v in self._row(0).items()}
        columns = {}
        for name in rows[0]:
            try:
                columns[str(name)] = np.stack([np.asarray(row[name]) for row in rows])
            except ValueError as error:
                shapes = sorted({np.shape(row[name]) for row in rows})
                raise ArgumentError(
                    f"rows of column {name!r} differ in shape: {shapes[:4]}; bring them to one"
                ) from error
        return columns
