"""The small pool of threads that a device's kernels share.

The executor of a device sets its pool for its thread (`with using(pool):`); kernels that split
their work (matmul) run the parts on `current_pool()`. How work is split never depends on the pool,
so any number of threads, or none, gives the same bits. A hand-over is one lock released and one
acquired, each way.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence

import numpy as np

from graphflow.errors import DeviceError

Part = Callable[[int], None]


class _Worker:
    """A thread that waits for `go`, does its share, and releases `done`."""

    def __init__(self, name: str) -> None:
        self.go = threading.Lock()
        self.done = threading.Lock()
        self.go.acquire()
        self.done.acquire()
        self.part: Part | None = None
        self.share: range = range(0)
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self.thread.start()

    def _loop(self) -> None:
        np.seterr(all="ignore")  # as in the caller's thread, where a program runs: inf is a value
        while True:
            self.go.acquire()
            part = self.part
            if part is None:
                return
            try:
                for i in self.share:
                    part(i)
            except BaseException as error:
                self.error = error
            self.part = part = None
            self.done.release()


def _stop(workers: Sequence[_Worker]) -> None:
    for worker in workers:
        worker.part = None
        # Where Ctrl-C came just after it was told to go, it is on its way, and finds nothing to do.
        if worker.go.locked():
            worker.go.release()


class Pool:
    """`threads` threads, the caller's included; idle ones sleep on a lock.

    One caller uses it at a time; a second one at that time, or a part that calls `run` itself, does
    its parts alone.

    Raises:
        DeviceError: the system does not let a process have so many.
    """

    def __init__(self, threads: int) -> None:
        self.threads = max(1, threads)
        self._busy = threading.Lock()
        self._workers: list[_Worker] = []
        try:
            for i in range(1, self.threads):
                self._workers.append(_Worker(f"graphflow-kernel-{i}"))
        except RuntimeError:
            _stop(self._workers)
            raise DeviceError(
                f"of the {self.threads} threads of a device the system starts "
                f"{len(self._workers) + 1}; give fewer, no more than there are cores"
            ) from None
        self._finalizer = weakref.finalize(self, _stop, self._workers)

    def run(self, part: Part, parts: int) -> None:
        """part(0), …, part(parts - 1), each once, in no particular order.

        Raises:
            whatever a part raises; of several errors, that of the first thread.
        """
        if parts < 2 or not self._workers or not self._busy.acquire(blocking=False):
            _run_alone(part, parts)
            return
        try:
            self._run_shared(part, parts)
        finally:
            self._busy.release()

    def _run_shared(self, part: Part, parts: int) -> None:
        threads = min(self.threads, parts)
        helping = self._workers[: threads - 1]
        for first, worker in enumerate(helping, start=1):
            worker.part, worker.share = part, range(first, parts, threads)
            worker.go.release()
        try:
            for i in range(0, parts, threads):
                part(i)
        finally:
            for worker in helping:
                worker.done.acquire()
            errors = [worker.error for worker in helping if worker.error is not None]
            for worker in helping:
                worker.error = None
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Let the threads end; afterwards the caller does all parts alone."""
        with self._busy:
            self._finalizer()
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.thread.join()


_local = threading.local()


class using:
    """Kernels that this thread runs in the block share `pool`. Not a generator: it is entered in
    every step."""

    __slots__ = ("_before", "_pool")

    def __init__(self, pool: Pool | None) -> None:
        self._pool = pool
        self._before: Pool | None = None

    def __enter__(self) -> None:
        self._before = current_pool()
        _local.pool = self._pool

    def __exit__(self, *raised: object) -> None:
        _local.pool = self._before


def current_pool() -> Pool | None:
    """The pool of the device whose kernels this thread runs."""
    return getattr(_local, "pool", None)


def run_parts(part: Part, parts: int) -> None:
    """part(0), …, part(parts - 1) on the current pool, or one after the other without one."""
    pool = current_pool()
    if pool is None:
        _run_alone(part, parts)
    else:
        pool.run(part, parts)


def _run_alone(part: Part, parts: int) -> None:
    for i in range(parts):
        part(i)
