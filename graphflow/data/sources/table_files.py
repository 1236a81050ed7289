"""Files of tables as a source: Parquet, Arrow, CSV and JSON lines, read by pyarrow in blocks.

A block is a row group of Parquet, a record batch of Arrow, or about a megabyte of whole lines.
Blocks that were read last are kept, so a table larger than memory can be read in any order of
blocks.
"""

from __future__ import annotations

import io
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from graphflow.data.sources.source import Array, Batch
from graphflow.errors import ArgumentError

BLOCK_BYTES = 1 << 20
"""Bytes of lines in a block."""
KEPT_BYTES = 1 << 28
"""Bytes of blocks that are kept in memory."""


class _Block(NamedTuple):
    """Rows that are read together.

    Attributes:
        rows: how many.
        read: returns them as a pyarrow table.
    """

    rows: int
    read: Any


class TableFiles:
    """Rows of files of one format, in the order of the files.

    Args:
        at: begins each error.
        kind: the format: the name of the public function.
        files: their paths.
        memory: bytes of blocks that are kept in memory; None: `KEPT_BYTES`.
        columns: names of the columns to read; None: all.

    Attributes:
        starts: the first row of each block.
    """

    def __init__(
        self, at: str, kind: str, files: Sequence[str], columns: Sequence[str] | None,
        memory: int | None = None,
    ) -> None:  # fmt: skip
        self._at = at
        _import_pyarrow(self._at)
        self._columns = None if columns is None else list(columns)
        self._stamps: dict[Path, tuple[int, int]] = {}
        self._blocks: list[_Block] = []
        find = {
            "parquet": self._parquet, "arrow": self._arrow, "csv": self._csv,
            "json_lines": self._json_lines,
        }[kind]  # fmt: skip
        for file in map(Path, files):
            self._stamps[file] = _stamp(file)
            try:
                self._blocks += find(file)
            except (OSError, ValueError) as error:
                raise ArgumentError(f"{self._at}: {str(file)!r}: {error}") from error
        ends = np.cumsum([block.rows for block in self._blocks], dtype=np.int64)
        self._rows = int(ends[-1]) if len(ends) else 0
        self.starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        self._kept: OrderedDict[int, Batch] = OrderedDict()
        self._bytes = 0
        self._most = KEPT_BYTES if memory is None else memory

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, indices: Array) -> Batch:
        which = np.searchsorted(self.starts, indices, "right") - 1
        numbers, inverse = np.unique(which, return_inverse=True)
        if not len(numbers):
            return {name: array[:0] for name, array in self._block(0).items()}
        parts = {int(n): self._block(int(n)) for n in numbers}
        names = list(parts[int(numbers[0])])
        offsets = indices - self.starts[which]
        found: Batch = {}
        for name in names:
            first = parts[int(numbers[0])][name]
            out = np.empty((len(indices), *first.shape[1:]), first.dtype)
            for position, number in enumerate(numbers):
                mine = inverse == position
                out[mine] = parts[int(number)][name][offsets[mine]]
            found[name] = out
        return found

    def _block(self, number: int) -> Batch:
        """Return the columns of a block, kept ones first."""
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        for file, stamp in self._stamps.items():
            if _stamp(file) != stamp:
                raise ArgumentError(
                    f"{self._at}: {str(file)!r} has changed since it was opened; open it again"
                )
        table = self._blocks[number].read()
        if table.num_rows != self._blocks[number].rows:
            block = self._blocks[number].read
            where = f"{str(block.file)!r}, from line {block.line}: " if _is_text(block) else ""
            raise ArgumentError(
                f"{self._at}: {where}{table.num_rows} rows in {self._blocks[number].rows} lines; "
                "write each row on a line of its own, without empty lines"
            )
        names = self._columns or table.column_names
        missing = [name for name in names if name not in table.column_names]
        if missing:
            raise ArgumentError(
                f"{self._at}: there is no column {missing[0]!r}; there are "
                f"{', '.join(table.column_names)}"
            )
        block = {name: self._to_array(name, table.column(name)) for name in names}
        self._kept[number] = block
        self._bytes += _size(block)
        while self._bytes > self._most and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return block

    def _to_array(self, name: str, column: Any) -> Array:
        """Return a column as an array: lists of one length as rows of a matrix."""
        import pyarrow as arrow

        kind = column.type
        whole = column.combine_chunks()
        if arrow.types.is_fixed_size_list(kind) or arrow.types.is_list(kind):
            values = np.asarray(whole.flatten().to_numpy(zero_copy_only=False))
            rows = len(whole)
            lengths = whole.value_lengths().to_numpy(zero_copy_only=False)
            if rows and (lengths != lengths[0]).any():
                raise ArgumentError(f"{self._at}: the lists of column {name!r} differ in length")
            return values.reshape(rows, -1) if rows else values.reshape(0, 0)
        if column.null_count and arrow.types.is_integer(kind):
            raise ArgumentError(
                f"{self._at}: column {name!r} of integers has {column.null_count} empty fields; "
                "fill them, or store floats, where an empty field is NaN"
            )
        array: Array = whole.to_numpy(zero_copy_only=False)
        return array.astype("str") if array.dtype == object else array

    # Formats -------------------------------------------------------------------------------------

    def _parquet(self, file: Path) -> list[_Block]:
        from pyarrow import parquet

        opened = parquet.ParquetFile(file)
        self._check_columns(opened.schema_arrow.names)
        return [
            _Block(
                opened.metadata.row_group(i).num_rows,
                lambda i=i: opened.read_row_group(i, columns=self._columns),
            )
            for i in range(opened.num_row_groups)
        ]

    def _arrow(self, file: Path) -> list[_Block]:
        import pyarrow as arrow

        opened = arrow.ipc.open_file(arrow.memory_map(str(file)))
        self._check_columns(opened.schema.names)

        def read(i: int) -> Any:
            return arrow.Table.from_batches([opened.get_batch(i)])

        rows = [opened.get_batch(i).num_rows for i in range(opened.num_record_batches)]
        return [_Block(count, lambda i=i: read(i)) for i, count in enumerate(rows)]

    def _csv(self, file: Path) -> list[_Block]:
        from pyarrow import csv

        with open(file, "rb") as stream:
            head = stream.readline()
        names = csv.read_csv(io.BytesIO(head + head)).column_names
        twice = [name for i, name in enumerate(names) if name in names[:i]]
        if twice:
            raise ArgumentError(
                f"{self._at}: {str(file)!r}: two columns are called {twice[0]!r}; rename one"
            )
        self._check_columns(names)
        types = None

        def read(data: bytes, line: int) -> Any:
            bad: list[str] = []

            def refuse(row: Any) -> str:
                number = "" if row.number is None else f"line {line + row.number - 1}: "
                bad.append(
                    f"{number}{row.actual_columns} fields where the header has "
                    f"{row.expected_columns}: {row.text.strip()[:60]!r}"
                )
                return "skip"

            options = csv.ReadOptions(column_names=names, use_threads=False)
            parse = csv.ParseOptions(invalid_row_handler=refuse)
            convert = csv.ConvertOptions(column_types=types)
            table = csv.read_csv(io.BytesIO(data), options, parse, convert)
            if bad:
                raise ArgumentError(f"{self._at}: {str(file)!r}, {bad[0]}")
            return table

        blocks, line, first = [], 2, True
        for start, data_size, rows in _line_blocks(file, len(head)):
            if first:
                first = False
                sample = read(_read_bytes(file, start, data_size), line)
                types = dict(zip(sample.column_names, sample.schema.types, strict=True))
            blocks.append(_Block(rows, _Lines(file, start, data_size, line, read, self._at)))
            line += rows
        return blocks

    def _json_lines(self, file: Path) -> list[_Block]:
        from pyarrow import json

        def read(data: bytes, line: int) -> Any:
            return json.read_json(io.BytesIO(data), json.ReadOptions(use_threads=False))

        blocks, line = [], 1
        for start, data_size, rows in _line_blocks(file, 0):
            blocks.append(_Block(rows, _Lines(file, start, data_size, line, read, self._at)))
            line += rows
        return blocks

    def _check_columns(self, names: Sequence[str]) -> None:
        missing = [name for name in self._columns or () if name not in names]
        if missing:
            raise ArgumentError(
                f"{self._at}: there is no column {missing[0]!r}; there are {', '.join(names)}"
            )


class _Lines(NamedTuple):
    """A block of whole lines of a text file."""

    file: Path
    start: int
    size: int
    line: int
    parse: Callable[[bytes, int], Any]
    at: str

    def __call__(self) -> Any:
        try:
            return self.parse(_read_bytes(self.file, self.start, self.size), self.line)
        except ValueError as error:
            row = re.search(r"Row #(\d+)|in row (\d+)", str(error))
            where = f"in the block from line {self.line}"
            if row is not None:  # CSV counts rows of a block from 1, JSON from 0
                number = int(row[1]) - 1 if row[1] else int(row[2])
                where = f"line {self.line + number}"
            raise ArgumentError(f"{self.at}: {str(self.file)!r}, {where}: {error}") from error


def _is_text(read: Any) -> bool:
    """Return True if a block is lines of a text file."""
    return isinstance(read, _Lines)


def _line_blocks(file: Path, start: int) -> list[tuple[int, int, int]]:
    """Return (first byte, bytes, lines) of blocks of whole lines."""
    blocks = []
    size = file.stat().st_size
    with open(file, "rb") as stream:
        while start < size:
            stream.seek(start)
            data = stream.read(BLOCK_BYTES)
            data += b"" if data.endswith(b"\n") else stream.readline()
            if data.strip():
                lines = data.count(b"\n") + (not data.endswith(b"\n"))
                blocks.append((start, len(data), lines))
            start += len(data)
    return blocks


def _read_bytes(file: Path, start: int, size: int) -> bytes:
    with open(file, "rb") as stream:
        stream.seek(start)
        return stream.read(size)


def expand_pattern(at: str, files: Any) -> list[str]:
    """Return the paths of files.

    Args:
        at: begins each error.
        files: a path, a pattern such as "part-*.parquet", or a list of them.
    """
    given = [files] if isinstance(files, str | os.PathLike) else list(files)
    found: list[str] = []
    for each in given:
        text = os.fspath(each)
        matches = sorted(glob(text)) if any(c in text for c in "*?[") else [text]
        if not matches or not Path(matches[0]).is_file():
            raise ArgumentError(f"{at}: there is no file {text!r}")
        found += matches
    if not found:
        raise ArgumentError(f"{at}: give at least one file")
    return found


def _stamp(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns


def _size(block: Batch) -> int:
    return sum(array.nbytes for array in block.values())


def _import_pyarrow(at: str) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ArgumentError(f"{at} needs pyarrow: pip install 'graphflow[data]'") from None
