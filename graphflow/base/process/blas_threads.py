"""One BLAS thread wherever a graph's values are computed.

The bits of a product depend on the number of threads that BLAS uses (measured with OpenBLAS on Zen
3). So BLAS has one thread while a program runs, while constants are folded, and in the interpreter.
Programs split large products over threads of their own, in blocks that depend on shapes alone.
"""

from __future__ import annotations

import os
import threading
from functools import cache


class _OneBlasThread:
    """Context manager that holds BLAS to one thread while any thread of the process is inside."""

    def __init__(self) -> None:
        from threadpoolctl import ThreadpoolController  # scans all loaded libraries, so only once

        self._lock = threading.RLock()
        # The thread counts that each block restores: None for all but the first. A stack, since a
        # signal handler that runs a session may enter and leave between any two lines here.
        self._before: list[list[int] | None] = []
        controllers = ThreadpoolController().lib_controllers
        self._blas = [c for c in controllers if c.user_api == "blas"]
        self._own = threading.local()
        if hasattr(os, "register_at_fork"):
            # Otherwise a child waits forever for a lock that another thread held at the fork.
            os.register_at_fork(
                before=self._lock.acquire,
                after_in_parent=self._lock.release,
                after_in_child=self._leave_others,
            )

    def __enter__(self) -> None:
        with self._lock:
            before = None
            if not self._before:
                before = [c.get_num_threads() for c in self._blas]
                self._set(before, [1] * len(before))
            self._before.append(before)
            self._own.depth = self._depth() + 1

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._own.depth = self._depth() - 1
            before = self._before.pop()
            if before is not None:
                self._set(before, before)

    def _leave_others(self) -> None:
        """Leave, in a forked child, the blocks of threads that the child does not have."""
        counts = self._before[0] if self._before else None
        rest: list[list[int] | None] = [counts, *[None] * len(self._before)]
        self._before = rest[: max(0, self._depth())]
        self._lock.release()
        if counts is not None and not self._before:
            self._set(counts, counts)

    def _depth(self) -> int:
        """Return how many blocks this thread has entered and not left.

        It is negative if the thread leaves blocks of others.
        """
        depth: int = getattr(self._own, "depth", 0)
        return depth

    def _set(self, before: list[int], counts: list[int]) -> None:
        for blas, many, count in zip(self._blas, before, counts, strict=True):
            if many != 1:
                blas.set_num_threads(count)


@cache
def one_blas_thread() -> _OneBlasThread:
    """Return the process's context manager that holds BLAS to one thread.

    Entering it again, as nested programs do, calls no BLAS function.
    """
    return _OneBlasThread()
