"""Keeps the threads of a team off the processor that their caller runs on.

A thread that sleeps and is woken in every step may stay on its caller's processor for seconds, with
another one idle: the system balances threads that run at the same time for milliseconds. Then a
team is as slow as one thread. So the processor of the caller is taken from the set of the others
whenever the caller has moved. The system chooses among the rest.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache


class ProcessorSpread:
    """The threads of a team, and the processor that they were told to leave to the caller."""

    def __init__(self) -> None:
        self._threads: set[int] = set()
        self._avoided = -1

    def add_thread(self) -> None:
        """Add the calling thread to the threads that leave their caller's processor."""
        self._threads.add(threading.get_native_id())
        self._avoided = -1

    def leave_processor(self) -> None:
        """Take the calling thread's processor from the set of the others, if it has moved.

        The others may use what else the calling thread may use. If that is nothing, or if the
        system allows no change, they stay where they are.
        """
        processor = current_processor()
        if processor == self._avoided or not self._threads:
            return
        self._avoided = processor
        rest = os.sched_getaffinity(0) - {processor} if processor >= 0 else set()
        if rest:
            for thread in tuple(self._threads):
                with suppress(OSError):  # the thread has ended, or the system forbids it
                    os.sched_setaffinity(thread, rest)


def current_processor() -> int:
    """Return the number of the processor that runs the calling thread; -1 if it is unknown."""
    return _reader()()


@cache
def _reader() -> Callable[[], int]:
    read = getattr(ctypes.PyDLL(None), "sched_getcpu", None)
    if read is None or not hasattr(os, "sched_setaffinity"):
        return lambda: -1
    read.restype = ctypes.c_int
    return read  # type: ignore[no-any-return]
