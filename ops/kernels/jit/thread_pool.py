"""The small pool of threads that a device's kernels share.

A device's executor sets its pool for its thread (`with use_pool(pool):`). Kernels that split their
work run the parts on `current_pool()`. How work is split never depends on the pool, so any number
of threads, or none, gives the same bits. Parts are Python functions (`Pool.run`) or entries of a
table of native calls (`Pool.run_entries`), which threads claim without Python (`thread_team.py`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from graphflow.errors import DeviceError
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.call_recorder import CallRecorder, current_recorder
from graphflow.ops.kernels.jit.call_table_driver import WORDS, driver
from graphflow.ops.kernels.jit.thread_team import MOST_SHARES, ThreadTeam

Part = Callable[[int], None]


class _ThreadShare:
    """One thread's part of a run: part(i) for each i that it takes from `numbers`.

    All threads of a run take from the same numbers.
    """

    __slots__ = ("_owner", "done", "error", "numbers", "part")

    def __init__(self, part: Part | None = None, numbers: Iterable[int] = ()) -> None:
        self.part = part
        self.numbers = numbers
        self.done = part is None
        self.error: BaseException | None = None
        self._owner: dict[str, object] = {}

    def belongs_to(self, who: object) -> bool:
        """Return True if the first that asked is `who`: the thread that does the share, or the
        caller that withdraws it."""
        return self._owner.setdefault("first", who) is who

    def do(self) -> None:
        assert self.part is not None
        try:
            for i in self.numbers:
                self.part(i)
        except BaseException as error:
            self.error = error
        self.part = None
        self.done = True


class _PoolThread:
    """A thread that runs native shares of its team, until it is given a share in Python.

    Ctrl-C may come between any two lines of the caller. So a request is only a wake-up, which may
    come once too often. The share alone says what there is to do and whether it is done.
    """

    def __init__(self, team: ThreadTeam, number: int) -> None:
        self._share: _ThreadShare | None = _ThreadShare()
        self._team = team
        self._number = number
        self.thread = threading.Thread(
            target=self._loop, name=f"graphflow-kernel-{number}", daemon=True
        )
        self.thread.start()

    def _loop(self) -> None:
        np.seterr(
            all="ignore"
        )  # like the caller's thread, since infinities are values of a program
        requests = 0
        while True:
            requests = self._team.serve(self._number, requests)
            share = self._share
            if share is None:
                return
            if not share.done and share.belongs_to(self):
                share.do()

    def assign(self, share: _ThreadShare | None) -> None:
        """Give the thread a share, or None to end it; for one caller at a time."""
        self._share = share
        self._team.request(self._number)

    def wait(self) -> None:
        """Wait until the share is done. A share that the thread has not begun is withdrawn: all
        parts are taken by now."""
        share = self._share
        while share is not None and not share.done and not share.belongs_to(share):
            self._team.wait(self._number)


def _stop(workers: Sequence[_PoolThread]) -> None:
    for worker in workers:
        worker.assign(None)


class Pool:
    """`threads` threads, the caller's included; idle ones sleep.

    One caller uses the pool at a time. A second caller at that time, and a part that calls `run`
    itself, run their parts alone.

    Attributes:
        team: the native side; None with one thread.

    Raises:
        DeviceError: the system does not allow a process so many threads.
    """

    def __init__(self, threads: int) -> None:
        self.threads = max(1, threads)
        self._busy = threading.Lock()
        self._workers: list[_PoolThread] = []
        self.team = ThreadTeam(self.threads) if self.threads > 1 else None
        try:
            for i in range(1, self.threads):
                assert self.team is not None
                self._workers.append(_PoolThread(self.team, i))
        except RuntimeError:
            _stop(self._workers)
            raise DeviceError(
                f"of the {self.threads} threads of a device the system starts "
                f"{len(self._workers) + 1}; give fewer, no more than there are cores"
            ) from None
        self._finalizer = weakref.finalize(self, _stop, self._workers)

    def run(self, part: Part, parts: int) -> None:
        """Run part(0) to part(parts - 1), each once, in no particular order.

        Raises:
            Exception: whatever a part raises; of several errors, that of the first thread.
        """
        if parts < 2 or not self._workers or not self._busy.acquire(blocking=False):
            _run_alone(part, parts)
            return
        try:
            self._run_shared(part, parts)
        finally:
            self._busy.release()

    def run_entries(self, entries: np.ndarray[Any, Any], count: int) -> None:
        """Run the entries of a table of native calls, each once, in no particular order."""
        if self.team is None or not self._workers or count > MOST_SHARES:
            driver().walk.releasing_gil(address(entries), None, 0, count)
        else:
            self.team.run(entries, count)

    def _run_shared(self, part: Part, parts: int) -> None:
        threads = min(self.threads, parts)
        helping = self._workers[: threads - 1]
        numbers = iter(range(parts))
        shares = [_ThreadShare(part, numbers) for _ in range(threads)]
        interrupted: BaseException | None = None
        try:
            for worker, share in zip(helping, shares[1:], strict=True):
                worker.assign(share)
            for i in numbers:
                part(i)
        except BaseException as error:
            interrupted = error
        # Helpers write to the caller's memory, so the caller must not leave before them, however
        # often Ctrl-C comes.
        waiting = True
        while waiting:
            try:
                for worker in helping:
                    worker.wait()
                waiting = False
            except BaseException as error:
                interrupted = interrupted or error
        for failed in (interrupted, *(share.error for share in shares)):
            if failed is not None:
                raise failed

    def close(self) -> None:
        """End the threads; afterwards callers run all parts alone."""
        with self._busy:
            self._finalizer()
            workers, self._workers = self._workers, []
        for worker in workers:
            worker.thread.join()


_local = threading.local()


class use_pool:
    """Let kernels that this thread runs in the block share `pool`.

    A class and not a generator, since it is entered in every step.
    """

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
    """Return the pool of the device whose kernels this thread runs."""
    return getattr(_local, "pool", None)


def run_parts(part: Part, parts: int) -> None:
    """Run part(0) to part(parts - 1) on the current pool, or in order without one."""
    pool, recorder = current_pool(), current_recorder()
    if recorder is not None:
        _record_parts(recorder, part, parts, are_native=False)
    elif pool is None:
        _run_alone(part, parts)
    else:
        pool.run(part, parts)


def run_native_parts(part: Part, parts: int) -> None:
    """Run part(0) to part(parts - 1), which only call native functions by `call_native`.

    The calls are collected on this thread, so that threads run them without Python. Arrays that
    the calls use must outlive the parts, or be scratch memory.
    """
    pool, recorder = current_pool(), current_recorder()
    if recorder is not None:
        _record_parts(recorder, part, parts)
        return
    shares = 1 if pool is None else min(pool.threads, parts, MOST_SHARES)
    if pool is None or shares < 2:
        _run_alone(part, parts)
        return
    recorders = [CallRecorder(share) for share in range(shares)]
    for share, recorder in enumerate(recorders):
        with recorder:
            for i in range(parts * share // shares, parts * (share + 1) // shares):
                part(i)
    tables = [recorder.entries() for recorder in recorders]
    walk = driver().walk.address
    words = [(walk, address(table), 0, 0, table.size // WORDS) for table in tables]
    pool.run_entries(np.array(words, np.int64), shares)


def run_native_ranges(part: Callable[[int, int], None], count: int, parts: int) -> None:
    """Run part(first, last), as `run_native_parts` does, over nearly equal ranges of 0 to `count`.

    Args:
        parts: ranges, as far as there are as many numbers; at least one.
    """
    parts = min(count, max(1, parts))
    run_native_parts(lambda i: part(count * i // parts, count * (i + 1) // parts), parts)


def _record_parts(recorder: CallRecorder, part: Part, parts: int, are_native: bool = True) -> None:
    """Collect the calls of parts: as a stage of a recorded kernel, or within a share."""
    recording = recorder.recording
    if recording is not None and recording.is_between_parts(recorder):
        recording.add_parts(part, parts, are_native or recording.keeps_calls)
    else:
        _run_alone(part, parts)


def run_ranges(part: Callable[[int, int], None], count: int, most: int | None = None) -> None:
    """Run part(first, last) over nearly equal ranges of 0 to `count`, one for each thread.

    Args:
        most: ranges at most; default: as many as the current pool has threads.
    """
    pool, recorder = current_pool(), current_recorder()
    threads = 1 if pool is None else pool.threads
    if recorder is not None:
        threads = 1 if recorder.recording is None else recorder.recording.threads
    parts = min(threads, count if most is None else most)
    if parts < 2:
        part(0, count)
        return
    edges = [count * i // parts for i in range(parts + 1)]
    run_parts(lambda i: part(edges[i], edges[i + 1]), parts)


def _run_alone(part: Part, parts: int) -> None:
    for i in range(parts):
        part(i)
