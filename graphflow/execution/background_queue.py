"""A queue of steps that a session runs one after the other on a background thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from graphflow.base.process.interrupts import defer_signals
from graphflow.runtime.host.session_state import register_thread


class SerialExecutor:
    """Runs submitted calls in order, on one thread that starts with the first of them.

    Attributes:
        lock: held while a call is submitted and while the queue is closed.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._runner: ThreadPoolExecutor | None = None
        self._threads: set[int] = set()  # the id of the thread, once it runs

    def submit(self, run: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run a call when those submitted before it are done. The caller must hold the lock."""
        if self._runner is None:
            # The thread keeps its initializer alive, which so must not refer to the session.
            begin = partial(register_thread, self._threads)
            self._runner = ThreadPoolExecutor(1, "graphflow-session", initializer=begin)
        with defer_signals():  # an interrupt would leave the executor's locks taken
            return self._runner.submit(run, *arguments)

    def close(self, *, wait: bool) -> None:
        """Cancel calls that have not begun.

        Args:
            wait: wait for the running call, unless the caller is on that call's thread.
        """
        if self._runner is not None:
            waits = wait and threading.get_ident() not in self._threads
            self._runner.shutdown(wait=waits, cancel_futures=True)
