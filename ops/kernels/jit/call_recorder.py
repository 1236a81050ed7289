"""Collects the native calls of a part instead of running them.

Parts of a kernel that only call native functions (`call_native`) spend time in Python before each
call. Threads that run such parts take turns with Python's global lock. Instead, the caller's
thread collects the calls of all parts, and the threads run them without Python.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

_local = threading.local()


class CallRecorder:
    """Context in which this thread's native calls are collected for one share of a job.

    Scratch memory lasts until the calls have run. Each share has its own, and in it a place for
    each size, since a part may prepare memory that an earlier part of another size still reads.

    Args:
        share: number of the share.
    """

    def __init__(self, share: int) -> None:
        self._share = share
        self._words: list[int] = []
        self._kept: list[Any] = []
        self._sizes: dict[str, list[int]] = {}

    def __enter__(self) -> CallRecorder:
        _local.recorder = self
        return self

    def __exit__(self, *raised: object) -> None:
        _local.recorder = None

    def add(self, function: int, pointers: int, sizes: int, rows: range, kept: Any) -> None:
        """Append a call.

        Args:
            function, pointers, sizes: addresses.
            rows: its rows.
            kept: holds the pointers and sizes.
        """
        self._words += (function, pointers, sizes, rows.start, rows.stop)
        self._kept.append(kept)

    def slot(self, name: str, nbytes: int) -> str:
        """Return the name of this share's scratch memory of a name and size."""
        sizes = self._sizes.setdefault(name, [])
        if nbytes not in sizes:
            sizes.append(nbytes)
        return f"{name}, share {self._share}, size {sizes.index(nbytes)}"

    def keep(self, array: Any) -> None:
        """Keep scratch memory until the calls have run."""
        self._kept.append(array)

    def entries(self) -> np.ndarray[Any, Any]:
        """Return the calls as a table of the driver."""
        return np.array(self._words, np.int64)


def current_recorder() -> CallRecorder | None:
    """Return the recorder of this thread's native calls; None if they run at once."""
    return getattr(_local, "recorder", None)
