"""BLAS on one thread, wherever a graph's values are computed.

A product's bits depend on how many threads BLAS shares it among (measured: OpenBLAS on Zen 3), so
it has one while a program runs, while constants are folded, and in the interpreter. Programs share
products among threads of their own, in blocks that depend on shapes alone.
"""

from __future__ import annotations

import threading
from functools import cache


class _OneThread:
    """Holds BLAS to one thread while anybody of the process is inside, and then restores it."""

    def __init__(self) -> None:
        from threadpoolctl import ThreadpoolController  # scans loaded libraries: once, when needed

        self._lock = threading.Lock()
        self._users = 0
        self._before: list[int] = []
        controllers = ThreadpoolController().lib_controllers
        self._blas = [c for c in controllers if c.user_api == "blas"]

    def __enter__(self) -> None:
        with self._lock:
            self._users += 1
            if self._users == 1:
                self._before = [c.get_num_threads() for c in self._blas]
                self._set([1] * len(self._blas))

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                self._set(self._before)

    def _set(self, counts: list[int]) -> None:
        for blas, before, count in zip(self._blas, self._before, counts, strict=True):
            if before != 1:
                blas.set_num_threads(count)


@cache
def one_thread() -> _OneThread:
    """BLAS held to one thread inside; entering it again, as programs do, asks no library."""
    return _OneThread()
