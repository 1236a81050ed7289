"""Rows of a sparse table on disk, as binary arrays of which any range of rows can be read."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from graphflow.errors import LinearModelError
from graphflow.ops.kernels.jit.object_cache import cache_folder

_SHARE = 0.8
"""Share of the free disk that a store may take."""
_ARRAYS = {"targets": np.float64, "columns": np.int32, "values": np.float64}


class RowArrays(Protocol):
    """Arrays of rows that grow at their ends, and of which parts are read."""

    def append(self, **arrays: Any) -> None:
        """Write arrays at the ends of those of the same names.

        Args:
            arrays: of "targets", "columns" and "values".
        """

    def read(self, name: str, first: int, stop: int) -> Any:
        """Return the items of an array between two positions; threads may call it at once."""

    def close(self) -> None:
        """Free the disk."""


class RowsInMemory:
    """Rows in memory."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[Any]] = {name: [] for name in _ARRAYS}

    def append(self, **arrays: Any) -> None:
        for name, array in arrays.items():
            self._pieces[name].append(np.asarray(array, _ARRAYS[name]))

    def read(self, name: str, first: int, stop: int) -> Any:
        if len(self._pieces[name]) != 1:
            self._pieces[name] = [np.concatenate([np.zeros(0, _ARRAYS[name]), *self._pieces[name]])]
        found = self._pieces[name][0][first:stop]
        found.flags.writeable = False  # shared with all that is read
        return found

    def close(self) -> None:
        return


class RowStore:
    """Rows in files without names: they vanish with the store, or with the process.

    Args:
        limit: bytes that the files may take; None: a share of what is free on their disk.

    Attributes:
        nbytes: what they take.
    """

    def __init__(self, limit: int | None = None) -> None:
        self._folder = cache_folder()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._files = {name: _open_nameless(self._folder) for name in _ARRAYS}
        except OSError:
            self._folder = Path(tempfile.gettempdir())
            self._files = {name: _open_nameless(self._folder) for name in _ARRAYS}
        self._close = weakref.finalize(self, _close_all, list(self._files.values()))
        free = shutil.disk_usage(self._folder).free
        self._limit = int(_SHARE * free) if limit is None else limit
        self.nbytes = 0

    def append(self, **arrays: Any) -> None:
        """Write arrays at the ends of files.

        Raises:
            LinearModelError: the disk is full.
        """
        for name, array in arrays.items():
            data = np.ascontiguousarray(array, _ARRAYS[name]).view(np.uint8).data
            self.nbytes += len(data)
            if self.nbytes > self._limit:
                raise self._full()
            try:
                while data:
                    data = data[os.write(self._files[name], data) :]
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                raise self._full() from None

    def read(self, name: str, first: int, stop: int) -> Any:
        out = np.empty(stop - first, _ARRAYS[name])
        data, at = out.view(np.uint8).data, first * out.itemsize
        while data:
            got = os.preadv(self._files[name], [data], at)
            if got == 0:
                raise LinearModelError(
                    f"the rows kept in {self._folder} end early; open them again"
                )
            data, at = data[got:], at + got
        return out

    def close(self) -> None:
        self._close()

    def _full(self) -> LinearModelError:
        return LinearModelError(
            f"the rows of the table need more than {self._limit:,} bytes in {self._folder}, which "
            "is what may be used there; free that disk, or set GRAPHFLOW_CACHE to a folder on a "
            "larger one"
        )


def _open_nameless(folder: Path) -> int:
    """Return the descriptor of a new file without a name."""
    descriptor, path = tempfile.mkstemp(prefix="rows-", dir=folder)
    os.unlink(path)
    return descriptor


def _close_all(descriptors: list[int]) -> None:
    for each in descriptors:
        os.close(each)


__all__ = ["RowStore", "RowArrays", "RowsInMemory"]
