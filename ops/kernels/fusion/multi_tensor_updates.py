"""Independent kernels as one native call a thread, such as an optimiser's updates.

An optimiser's updates are many kernels of very different sizes. Threads share the whole work
evenly: each has a table of rows, whole kernels and parts of others. The cut into rows changes no
bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from graphflow.ops.kernels.fusion.region_kernels import (
    GIL_RELEASE_NANOSECONDS,
    THREADING_NANOSECONDS,
)
from graphflow.ops.kernels.jit.array_address import address
from graphflow.ops.kernels.jit.call_table_driver import WORDS, driver
from graphflow.ops.kernels.jit.compiler import KernelTask, compiler
from graphflow.ops.kernels.jit.thread_pool import current_pool

_ROWS_TOGETHER = 64
"""Rows that stay together, so that parts of a kernel over elements begin at cache lines."""


class MultiTensorUpdate:
    """Tasks with the addresses of their operands and results; calling it runs them all.

    Args:
        calls: tasks without scratch memory, none of which reads what another writes.
        threads: that may share the work.
    """

    def __init__(self, calls: Sequence[tuple[KernelTask, Sequence[int]]], threads: int) -> None:
        tasks = [task for task, _ in calls]
        self.nanoseconds = sum(task.nanoseconds for task in tasks)
        self._places = [np.array(places, np.uint64) for _, places in calls]
        self._sizes = [np.array(task.sizes or (0,), np.int64) for task in tasks]
        self._functions = [compiler().function(t.name, t.text).address for t in tasks]
        parts = max(1, min(threads, int(self.nanoseconds / THREADING_NANOSECONDS * 2)))
        self.tables = [self._table(tasks, i, parts) for i in range(parts)]
        walk = driver().walk
        words = [(walk.address, address(t), 0, 0, t.size // WORDS) for t in self.tables if t.size]
        self._entries = np.array(words, np.uint64).reshape(-1, WORDS)
        self._walk = (
            walk.releasing_gil if self.nanoseconds > GIL_RELEASE_NANOSECONDS else walk.holding_gil
        )

    def _table(self, tasks: Sequence[KernelTask], part: int, parts: int) -> np.ndarray[Any, Any]:
        """Return the calls of one part: those within its share of the total time."""
        words: list[int] = []
        begin, end = (self.nanoseconds * i / parts for i in (part, part + 1))
        before = 0.0
        for i, task in enumerate(tasks):
            first, last = (
                _row_at_share(task, (at - before) / max(task.nanoseconds, 1e-9))
                for at in (begin, end)
            )
            first, last = 0 if part == 0 else first, task.rows if part == parts - 1 else last
            if first < last:
                table, sizes = address(self._places[i]), address(self._sizes[i])
                words += (self._functions[i], table, sizes, first, last)
            before += task.nanoseconds
        return np.array(words, np.uint64)

    def __call__(self) -> None:
        pool = current_pool()
        if pool is None or len(self.tables) == 1:
            self._walk(address(self._entries), None, 0, len(self._entries))
        else:
            pool.run_entries(self._entries, len(self._entries))


def _row_at_share(task: KernelTask, share: float) -> int:
    """Return the row at which a share of a task is done."""
    if share >= 1:
        return task.rows
    unit = _ROWS_TOGETHER if task.rows > 4 * _ROWS_TOGETHER else 1
    return int(max(share, 0.0) * task.rows) // unit * unit
