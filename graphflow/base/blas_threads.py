"""BLAS on one thread, wherever a graph's values are computed.

A product's bits depend on how many threads BLAS shares it among (measured: OpenBLAS on Zen 3), so
it has one while a program runs, while constants are folded, and in the interpreter. Programs share
products among threads of their own, in blocks that depend on shapes alone.
"""

from __future__ import annotations

import threading
from functools import cache


class _OneBlasThread:
    """Holds BLAS to one thread while anybody of the process is inside, and then restores it."""

    def __init__(self) -> None:
        from threadpoolctl import ThreadpoolController  # scans loaded libraries: once, when needed

        self._lock = threading.RLock()
        # What each who is inside puts back: None but for the first. A signal's handler that runs a
        # session comes between any two lines here, and has to leave everything as it found it.
        self._before: list[list[int] | None] = []
        controllers = ThreadpoolController().lib_controllers
        self._blas = [c for c in controllers if c.user_api == "blas"]

    def __enter__(self) -> None:
        with self._lock:
            before = None
            if not self._before:
                before = [c.get_num_threads() for c in self._blas]
                self._set(before, [1] * len(before))
            self._before.append(before)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            before = self._before.pop()
            if before is not None:
                self._set(before, before)

    def _set(self, before: list[int], counts: list[int]) -> None:
        for blas, many, count in zip(self._blas, before, counts, strict=True):
            if many != 1:
                blas.set_num_threads(count)


@cache
def one_blas_thread() -> _OneBlasThread:
    """BLAS held to one thread inside; entering it again, as programs do, asks no library."""
    return _OneBlasThread()
