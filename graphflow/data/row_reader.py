"""Readers of rows in the process of a worker: they open a dataset once, and read ahead.

    read_data op ─read_rows→ RowReader ─thread→ rows of this batch, then those of the next one

A reader is a cache only: which rows a batch has follows from the description of the dataset. After
a minute without work its thread ends, and its files are closed.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from graphflow.base.array_conversion import cast_in_range
from graphflow.base.process.data_folders import check_data_file
from graphflow.data.dataset import Dataset, Position
from graphflow.data.source_files import SourceFiles, open_source
from graphflow.data.sources.image_folder import ImageFolder
from graphflow.data.sources.source import Array, Batch
from graphflow.errors import ArgumentError, OpError

IDLE_SECONDS = 60.0


class _Part(NamedTuple):
    """Some rows of a batch."""

    position: Position
    first: int
    rows: int


def describe(data: Dataset) -> str:
    """Return a dataset of files as JSON, by which `open_described` opens it elsewhere."""
    assert data.files is not None
    return json.dumps(
        {
            "kind": data.files.kind, "paths": data.files.paths, "options": data.files.options,
            "digests": data.files.digests(), "seed": data.order.seed, "blocks": data.order.blocks,
            "splits": data.order.splits, "size": data.size, "drop_last": data.drop_last,
            "columns": data.chosen_columns,
        }
    )  # fmt: skip


def open_described(text: str) -> Dataset:
    """Return the dataset of a description.

    Raises:
        ArgumentError: a file may not be read here, cannot be opened, or has other content than the
            client's.
    """
    given = json.loads(text)
    at = f"gf.data.{given['kind']} on this worker"
    files = SourceFiles(given["kind"], tuple(given["paths"]), tuple(given["options"]))
    real = tuple([_resolve_path(at, path) for path in files.paths])
    for path, before, now in zip(real, given["digests"], replace(files, paths=real).digests(),
                                 strict=True):  # fmt: skip
        if before != now:
            raise ArgumentError(
                f"{at}: {path!r} is not the file that the client opened: its size or content "
                "differs; copy it, or wait until it is written"
            )
    source = open_source(replace(files, paths=real), at)
    if isinstance(source, ImageFolder):
        for file in source.files:
            check_data_file(str(file))
    data = Dataset(source)
    for share, seed, part in given["splits"]:
        data = data.split(share, seed)[part]
    order = replace(data.order, seed=given["seed"], blocks=given["blocks"])
    columns = given["columns"] and tuple(given["columns"])
    return replace(
        data, order=order, size=given["size"], drop_last=given["drop_last"], chosen_columns=columns
    )


def _resolve_path(at: str, path: str) -> str:
    """Return the real path of a file or folder that this process may read."""
    if os.path.isdir(path):
        return os.path.dirname(check_data_file(os.path.join(os.path.realpath(path), "*")))
    real = check_data_file(path)
    if not os.path.isfile(real):
        raise ArgumentError(
            f"{at}: there is no file {path!r} on this machine; put it there, or let the client "
            "feed the rows, without on_workers()"
        )
    return real


class RowReader:
    """Reads parts of batches on a thread, and the same parts of the next batch ahead.

    Args:
        text: describes the dataset.

    Attributes:
        users: calls under way, counted under the lock of all readers.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._lock = threading.Lock()
        self._found: dict[_Part, Future[Batch]] = {}
        self._parts: dict[int, set[tuple[int, int]]] = {}  # asked for, by rows of the batch
        self._waiting: queue.SimpleQueue[tuple[_Part, Future[Batch]]] = queue.SimpleQueue()
        self._data: Dataset | None = None
        self.users = 0
        threading.Thread(target=self._serve, name="graphflow-rows", daemon=True).start()

    def read(self, position: tuple[int, int], first: int, count: int) -> Batch:
        """Return rows of a batch; the caller must not change them."""
        part = _Part(Position(*position), first, count)
        with self._lock:
            future = self._ask(part)
            current = {part.position, self._next_position(part.position)}
            for other in [p for p in self._found if p.position not in current]:
                del self._found[other]
        found = future.result()
        with self._lock:
            self._ask_ahead(part)
        return found

    def _ask(self, part: _Part) -> Future[Batch]:
        if part not in self._found:
            future: Future[Batch] = Future()
            self._found[part] = future
            self._waiting.put((part, future))
        return self._found[part]

    def _ask_ahead(self, part: _Part) -> None:
        """Ask for the parts of the next batch that batches of its size are asked for."""
        data = self._data
        following = self._next_position(part.position)
        if data is None or following is None:
            return
        own = (part.first, part.rows)
        rows = data.batch_rows(part.position)
        self._parts.setdefault(rows, set()).add(own)
        next_rows = data.batch_rows(following)
        for first, count in (own,) if next_rows == rows else self._parts.get(next_rows, ()):
            self._ask(_Part(following, first, count))

    def _next_position(self, position: Position) -> Position | None:
        if self._data is None:
            return None
        if position.batch + 1 < self._data.batches_per_epoch:
            return Position(position.epoch, position.batch + 1)
        return Position(position.epoch + 1, 0)

    def _serve(self) -> None:
        while True:
            try:
                part, future = self._waiting.get(timeout=IDLE_SECONDS)
            except queue.Empty:
                if _can_retire(self._text, self):
                    return
                continue
            try:
                if self._data is None:
                    self._data = open_described(self._text)
                future.set_result(self._read(self._data, part))
            except BaseException as error:
                future.set_exception(error)
                with self._lock, suppress(KeyError):
                    del self._found[part]  # read again if it is asked for again

    def _read(self, data: Dataset, part: _Part) -> Batch:
        rows = data.batch_rows(part.position)
        if part.first + part.rows > rows:
            raise OpError(
                f"rows {part.first} to {part.first + part.rows} of batch {part.position.batch} of "
                f"epoch {part.position.epoch}, which has {rows}"
            )
        return data.read_part(*part)

    def is_idle(self) -> bool:
        """Return True if nothing waits to be read. Call it under the lock of all readers."""
        return not self.users and self._waiting.empty()


_readers: dict[str, RowReader] = {}
_readers_lock = threading.Lock()


def read_rows(
    text: str, position: tuple[int, int], first: int, shape: Sequence[int], column: str, dtype: Any
) -> Array:
    """Return rows of one column, which the caller must not change.

    Args:
        text: describes the dataset.
        position: of the batch.
        first: the first row in the batch.
        shape: the shape of the result; its first size is the number of rows.
        column: its name.
        dtype: of the result.

    Raises:
        ArgumentError: see `open_described`; or a row cannot be read.
        OpError: the column has another shape, or a number is out of the range of the dtype.
    """
    with _readers_lock:
        reader = _readers.get(text)
        if reader is None:
            reader = _readers[text] = RowReader(text)
        reader.users += 1
    try:
        array = reader.read(position, first, shape[0])[column]
    finally:
        with _readers_lock:
            reader.users -= 1
    if array.shape != tuple(shape):
        raise OpError(f"rows of column {column!r} have shape {array.shape}, not {tuple(shape)}")
    if array.dtype == dtype:
        return array
    try:
        return np.asarray(cast_in_range(array, dtype))
    except OverflowError as error:
        raise OpError(f"column {column!r}: {error}") from None


def _can_retire(text: str, reader: RowReader) -> bool:
    """Return True if the thread of a reader may end; the reader is forgotten then."""
    with _readers_lock:
        if not reader.is_idle():
            return False
        if _readers.get(text) is reader:
            del _readers[text]
        return True
