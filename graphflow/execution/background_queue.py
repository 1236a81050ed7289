"""Queued: steps that a session runs later, one after the other, on a thread of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from graphflow.base.interrupts import defer_signals
from graphflow.runtime.host.session_state import register_thread


class SerialExecutor:
    """What is queued in a session.

    Attributes:
        lock: held while something is put into the queue, and when it is closed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._runner: ThreadPoolExecutor | None = None
        self._threads: set[int] = set()  # the one, once it runs

    def submit(self, run: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run something when what was put before it is done; by who holds the lock."""
        if self._runner is None:
            # The thread keeps what it begins with: not this, or it would outlive its session.
            begin = partial(register_thread, self._threads)
            self._runner = ThreadPoolExecutor(1, "graphflow-session", initializer=begin)
        with defer_signals():  # the executor's own locks would stay taken
            return self._runner.submit(run, *arguments)

    def close(self, *, wait: bool) -> None:
        """Cancel what has not begun; `wait` for what has, unless that is who calls."""
        if self._runner is not None:
            waits = wait and threading.get_ident() not in self._threads
            self._runner.shutdown(wait=waits, cancel_futures=True)
