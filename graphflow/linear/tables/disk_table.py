"""Tables in files that estimators take for X: svmlight text, and numpy's and scipy's files."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from pathlib import Path
from stat import S_ISREG
from typing import Any, Self

import numpy as np

from graphflow.errors import LinearModelError
from graphflow.linear.losses import Floats
from graphflow.placement.clusters.machine.host_facts import free_memory

_SHARE = 0.5
"""Share of the free memory that a fit may use by default."""


class DiskTable(ABC):
    """A table in a file; rows are read when they are needed.

    Estimators take it for X, as in `fit(table)`: y=None stands for the file's own labels. A table
    that fits into memory is loaded; rows of a larger one are read chunk by chunk, in each pass.

    Args:
        path: the file.
        memory: bytes that a fit may use; None: half of what is free then, on this host or in the
            container.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Any, memory: int | None = None) -> None:
        self.path = os.fspath(path)
        if memory is not None and (isinstance(memory, bool) or not memory >= 1):
            raise LinearModelError(f"memory must be a positive number of bytes, not {memory!r}")
        self._memory = memory
        self._identity = self._look()
        self._lock = threading.RLock()

    @property
    def memory(self) -> int:
        """Bytes that a fit may use."""
        return int(free_memory() * _SHARE) if self._memory is None else int(self._memory)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.rows, self.columns

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of rows."""

    @property
    @abstractmethod
    def columns(self) -> int:
        """The number of columns."""

    @property
    def targets(self) -> Floats | None:
        """The labels in the file, (rows,); None if it holds none."""
        return None

    @property
    @abstractmethod
    def row_ends(self) -> Any:
        """The bytes of all rows up to each, (rows + 1,) from 0, once they are in memory."""

    @abstractmethod
    def read(self, first: int, stop: int) -> Any:
        """Return rows, as a CSR matrix or a dense array in C order; threads may call it at once.

        Raises:
            LinearModelError: the file has changed since it was opened.
        """

    def load(self) -> Any:
        """Return the whole table."""
        return self.read(0, self.rows)

    def close(self) -> None:
        """Free what the table keeps on disk beside its file."""
        return

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise LinearModelError(f"{self!r} is no array; give table.load(), if it fits into memory")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.path!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k not in ("_lock", "_store")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.RLock())

    def check_unchanged(self) -> None:
        """Check that the file is as it was when it was opened.

        Raises:
            LinearModelError: it is another one.
        """
        now = self._look()
        if now != self._identity:
            raise LinearModelError(
                f"{self.path} has changed since it was opened: {self._identity[0]:,} bytes then, "
                f"{now[0]:,} now; open it again, and fit again"
            )

    def _look(self) -> tuple[int, int]:
        """Return the file's size, and the time of its last change."""
        try:
            found = os.stat(self.path)
        except OSError as error:
            raise LinearModelError(f"{self.path} cannot be read: {error.strerror}") from None
        if not S_ISREG(found.st_mode):
            raise LinearModelError(f"{self.path} is no file; give the path of a table in a file")
        return found.st_size, found.st_mtime_ns


class ArrayTable(DiskTable):
    """A dense table: a `.npy` file, or a memory map of one.

    Args:
        path: the file.
        memory: as of `DiskTable`.
        array: the memory map, if it is known.
    """

    def __init__(self, path: Any, memory: int | None = None, array: Any = None) -> None:
        super().__init__(path, memory)
        if array is None:
            try:
                array = np.lib.format.open_memmap(self.path, mode="r")
            except ValueError as error:
                raise LinearModelError(f"{self.path} is no array of numbers: {error}") from None
        if array.ndim != 2 or array.dtype.kind not in "fiu":
            raise LinearModelError(
                f"{self.path} holds {array.dtype} of shape {array.shape}; a table is (rows, "
                "columns) of numbers"
            )
        self._shape, self._dtype, self._start = array.shape, array.dtype, array.offset
        self._is_by_rows = bool(array.flags.c_contiguous)

    @property
    def rows(self) -> int:
        return int(self._shape[0])

    @property
    def columns(self) -> int:
        return int(self._shape[1])

    @property
    def row_ends(self) -> Any:
        size = 4 if self._dtype == np.float32 else 8
        return np.arange(self.rows + 1, dtype=np.int64) * (size * self.columns)

    def read(self, first: int, stop: int) -> Any:
        self.check_unchanged()
        if not self._is_by_rows:
            raise LinearModelError(
                f"{self.path} lies column by column, so its rows cannot be read in chunks; save "
                "np.ascontiguousarray of it, or raise memory="
            )
        count, width = (stop - first) * self.columns, self._dtype.itemsize * self.columns
        found = np.fromfile(self.path, self._dtype, count, offset=self._start + first * width)
        wanted = np.float32 if self._dtype == np.float32 else np.float64
        return found.reshape(stop - first, self.columns).astype(wanted, copy=False)

    def load(self) -> Any:
        if self._is_by_rows:
            return super().load()
        self.check_unchanged()
        return np.array(np.memmap(self.path, self._dtype, "r", self._start, self._shape, "F"))


def file_suffix(path: Any) -> str:
    """Return the end of a path's name, such as ".npy"."""
    return Path(os.fspath(path)).suffix.lower()


__all__ = ["ArrayTable", "DiskTable", "file_suffix"]
