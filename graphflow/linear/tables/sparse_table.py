"""Sparse tables in files: their rows are kept in binary form on disk once they were read."""

from __future__ import annotations

import zipfile
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

import numpy as np

from graphflow.base.progress import show_progress, show_stage
from graphflow.errors import LinearModelError
from graphflow.linear.losses import Floats
from graphflow.linear.tables.disk_table import DiskTable
from graphflow.linear.tables.row_store import RowArrays, RowsInMemory, RowStore
from graphflow.linear.tables.svmlight import TextRows, byte_range, read_blocks
from graphflow.linear.tables.svmlight_loops import MOST_COLUMNS

_ENTRY = 12
"""Bytes of an entry in memory."""
_ITEMS = 1 << 17
"""Items of an array that are read at a time."""


class SparseTable(DiskTable):
    """A table whose rows are read once, and are kept on disk if they may not fit into memory."""

    _GROWTH: ClassVar[int]
    """Bytes in memory for a byte of the file, at most."""
    _store: RowArrays | None = None
    _offsets: Any
    _columns: int
    _base: int

    @property
    def rows(self) -> int:
        self._read_all()
        return len(self._offsets) - 1

    @property
    def columns(self) -> int:
        self._read_all()
        return self._columns

    @property
    def row_ends(self) -> Any:
        self._read_all()
        return self._offsets * _ENTRY + np.arange(len(self._offsets)) * 8

    def read(self, first: int, stop: int) -> Any:
        from scipy.sparse import csr_matrix

        store = self._read_all()
        self.check_unchanged()
        begin, end = (int(self._offsets[each]) for each in (first, stop))
        columns, values = store.read("columns", begin, end), store.read("values", begin, end)
        if self._base:
            columns = columns - np.int32(self._base)
        offsets = self._offsets[first : stop + 1] - begin
        if end - begin < MOST_COLUMNS:
            offsets = offsets.astype(np.int32)
        found = csr_matrix((values, columns, offsets), (stop - first, self._columns), copy=False)
        if isinstance(self, SvmlightTable):
            found.has_canonical_format = True
        elif not found.has_canonical_format:
            found = found.copy()
            found.sum_duplicates()
        return found

    def close(self) -> None:
        with self._lock:
            if self._store is not None:
                self._store.close()
                self._store = None

    @abstractmethod
    def _fill(self, store: RowArrays) -> None:
        """Read all rows into a store, and note offsets, columns and the number of the first."""

    def _read_all(self) -> RowArrays:
        """Return the store of the rows, which are read if they were not yet."""
        with self._lock:
            if self._store is None:
                self.check_unchanged()
                is_small = self._identity[0] * self._GROWTH <= self.memory
                store: RowArrays = RowsInMemory() if is_small else RowStore()
                with show_progress("reading", where=self.path):
                    self._fill(store)
                self.check_unchanged()
                self._store = store
            return self._store


class SvmlightTable(SparseTable):
    """A text file with a line `target column:value column:value …` for each row.

    Args:
        path: the file.
        zero_based: True if columns are numbered from 0, False if from 1; "auto": from 1, unless
            the file has a column 0.
        n_features: the number of columns; None: as the file has them.
        memory: as of `DiskTable`.
    """

    _GROWTH = 8

    def __init__(
        self, path: Any, *, zero_based: bool | Literal["auto"] = "auto",
        n_features: int | None = None, memory: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(path, memory)
        if zero_based not in (True, False, "auto"):
            raise LinearModelError(f"zero_based is True, False or 'auto', not {zero_based!r}")
        if n_features is not None and not 0 < n_features <= MOST_COLUMNS:
            raise LinearModelError(
                f"n_features must be from 1 to {MOST_COLUMNS:,}, not {n_features!r}"
            )
        self._zero_based, self._given_columns = zero_based, n_features
        self._part = (0, 1)
        with open(self.path, "rb") as file:
            if file.read(3)[:2] in (b"\x1f\x8b", b"BZ", b"PK"):
                raise LinearModelError(f"{self.path} is compressed; unpack it first")

    @property
    def targets(self) -> Floats | None:
        store = self._read_all()
        found: Floats = store.read("targets", 0, self.rows)
        return found

    def part(self, k: int, parts: int) -> SvmlightTable:
        """Return part k of `parts` parts of about the same number of bytes.

        It begins after the first newline from k · size / parts on. It has the columns of the whole
        file, which is read for that unless `zero_based` and `n_features` were given.
        """
        if not 0 <= k < parts:
            raise LinearModelError(f"part {k} of {parts} parts: parts are numbered from 0")
        if self._part != (0, 1):
            raise LinearModelError(f"{self!r} is a part itself; take parts of the whole file")
        base, columns = self._zero_based, self._given_columns
        if base == "auto" or columns is None:
            columns = self.columns
            base = not self._base
        found = SvmlightTable(self.path, zero_based=base, n_features=columns, memory=self._memory)
        found._part, found._identity = (k, parts), self._identity
        return found

    def place_columns(self, lowest: int, highest: int) -> tuple[int, int]:
        """Return the number of the first column in the text, and the number of columns.

        Args:
            lowest, highest: the extreme columns in the text, as workers found them.

        Raises:
            LinearModelError: one is not within what the user gave.
        """
        self._note_columns(lowest, highest)
        return self._base, self._columns

    def _fill(self, store: RowArrays) -> None:
        ends, at = [np.zeros(1, np.int64)], 0
        lowest, highest = MOST_COLUMNS, -1
        for block in self._blocks():
            store.append(targets=block.targets, columns=block.columns, values=block.values)
            ends.append(block.offsets[1:] + at)
            at += len(block.values)
            lowest, highest = min(lowest, block.lowest), max(highest, block.highest)
            show_stage("rows", sum(map(len, ends)) - 1)
        self._offsets = np.concatenate(ends)
        self._note_columns(lowest, highest)

    def _blocks(self) -> Iterator[TextRows]:
        return read_blocks(self.path, *byte_range(self.path, *self._part))

    def _note_columns(self, lowest: int, highest: int) -> None:
        """Note the number of columns, and the number of the first.

        Raises:
            LinearModelError: a column is not within what the user gave.
        """
        is_from_0 = lowest == 0 if self._zero_based == "auto" else bool(self._zero_based)
        self._base = 0 if is_from_0 else 1
        if lowest < self._base:
            raise LinearModelError(
                f"{self.path} has a column 0, and zero_based=False says that they begin with 1; "
                "use zero_based=True or 'auto'"
            )
        known, wanted = highest + 1 - self._base, self._given_columns
        if wanted is not None and known > wanted:
            raise LinearModelError(
                f"{self.path} has {known:,} columns, and n_features={wanted:,} is less; leave it "
                "out, or give at least as many"
            )
        self._columns = max(known, 0) if wanted is None else wanted


class NpzTable(SparseTable):
    """A CSR matrix that `scipy.sparse.save_npz` wrote."""

    _GROWTH = 20

    def _fill(self, store: RowArrays) -> None:
        with zipfile.ZipFile(self.path) as archive:
            names = {name.removesuffix(".npy") for name in archive.namelist()}
            kind = bytes(_whole(archive, "format")).decode() if "format" in names else ""
            if kind != "csr":
                raise LinearModelError(
                    f"{self.path} holds no CSR matrix; write one by "
                    "scipy.sparse.save_npz(path, matrix.tocsr())"
                )
            self._offsets = _whole(archive, "indptr").astype(np.int64)
            self._columns = int(_whole(archive, "shape")[1])
            self._base = 0
            for columns in _pieces(archive, "indices"):
                if len(columns) and not 0 <= columns.min() <= columns.max() < self._columns:
                    raise LinearModelError(
                        f"{self.path} has an entry outside its {self._columns:,} columns"
                    )
                store.append(columns=columns)
            for values in _pieces(archive, "data"):
                store.append(values=values)


def _pieces(archive: zipfile.ZipFile, name: str) -> Iterator[Any]:
    """Read an array of an archive piece by piece."""
    with archive.open(f"{name}.npy") as file:
        version = np.lib.format.read_magic(file)
        header = (
            np.lib.format.read_array_header_1_0(file)
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0(file)
        )
        dtype = header[2]
        while data := file.read(_ITEMS * dtype.itemsize):
            yield np.frombuffer(data, dtype)


def _whole(archive: zipfile.ZipFile, name: str) -> Any:
    return np.concatenate(list(_pieces(archive, name)))


__all__ = ["NpzTable", "SparseTable", "SvmlightTable"]
