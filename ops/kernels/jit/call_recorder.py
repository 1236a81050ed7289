"""Collects native calls instead of running them.

Some kernels are lists of native calls (`call_native`), with Python before each call. Threads that
run parts of such a kernel would take turns with Python's global lock. Instead, the caller's thread
collects the calls of all parts (`CallRecorder`), and the threads run them without Python.

A program goes further: it collects the calls of a whole kernel once (`kernel_recording.py`).
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

_local = threading.local()


class RecordedCall(NamedTuple):
    """A native call that has not run yet.

    Attributes:
        function: address of the code.
        table: its pointers, then its sizes.
        pointers: how many of the table's numbers are pointers.
        start, stop: its rows.
    """

    function: int
    table: array[int]
    pointers: int
    start: int
    stop: int


class Recording(Protocol):
    """A recording of a whole kernel, as its recorders use it (`kernel_recording.py`)."""

    threads: int
    kept: dict[int, Any]
    keeps_calls: bool

    def is_between_parts(self, recorder: CallRecorder) -> bool:
        """Return True if a recorder is not that of a share."""

    def add_parts(self, part: Callable[[int], None], parts: int, keeps_sizes: bool = True) -> None:
        """Append a stage of part(0) to part(parts - 1), which threads may run in any order."""

    def scratch(self, slot: str, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return a stand-in for scratch memory."""


class CallRecorder:
    """Context in which this thread's native calls are collected for one share of a job.

    Memory that calls use lasts until they have run. Each share has its own, and in it a place for
    each size, since a part may prepare memory that an earlier part of another size still reads.

    Args:
        share: number of the share.
        recording: the recording of a whole kernel that the calls belong to.
        keeps_sizes: False: memory for another size takes the place of the last, as it does when
            each part runs at once.
    """

    def __init__(
        self, share: int, recording: Recording | None = None, keeps_sizes: bool = True
    ) -> None:
        self.calls: list[RecordedCall] = []
        self.recording = recording
        self._share = share
        self._keeps_sizes = keeps_sizes
        self._kept: list[Any] = []
        self._sizes: dict[str, list[int]] = {}
        self._outer: CallRecorder | None = None

    def __enter__(self) -> CallRecorder:
        self._outer = current_recorder()
        _local.recorder = self
        return self

    def __exit__(self, *raised: object) -> None:
        _local.recorder = self._outer

    @property
    def keeps_calls(self) -> bool:
        """Whether the calls are of use; if not, the recording only counts scratch memory."""
        return self.recording is None or self.recording.keeps_calls

    def slot(self, name: str, nbytes: int) -> str:
        """Return the name of this share's scratch memory of a name and size."""
        if not self._keeps_sizes:
            return f"{name}, share {self._share}"
        sizes = self._sizes.setdefault(name, [])
        if nbytes not in sizes:
            sizes.append(nbytes)
        return f"{name}, share {self._share}, size {sizes.index(nbytes)}"

    def keep(self, kept: Any) -> None:
        """Keep memory that calls use until they have run."""
        if self.recording is None:
            self._kept.append(kept)
        else:
            self.recording.kept[id(kept)] = kept

    def entries(self) -> np.ndarray[Any, Any]:
        """Return the calls as a table of the driver."""
        words: list[int] = []
        for call in self.calls:
            place = call.table.buffer_info()[0]
            words += (call.function, place, place + 8 * call.pointers, call.start, call.stop)
        return np.array(words, np.int64)


def current_recorder() -> CallRecorder | None:
    """Return the recorder of this thread's native calls; None if they run at once."""
    return getattr(_local, "recorder", None)
