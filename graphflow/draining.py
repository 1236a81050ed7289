"""Draining: at SIGTERM a session finishes its step, writes a checkpoint and ends the process.

The handler is Python's, so it runs on the main thread, between two bytecodes: perhaps in the midst
of a step. Then it only takes note, and the session asks at the step's end.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any


class Drain:
    """What happens at SIGTERM, while a session is open that was opened on the main thread.

    A handler of the user's own is left alone. Several sessions leave one after the other, the last
    one first.

    Args:
        lock: held while the session works.
        queue: held while it takes up something that another thread will do.
        leave: writes a checkpoint, closes the session and raises SystemExit.

    Attributes:
        asked: whether SIGTERM came while the session worked.
    """

    def __init__(self, lock: Any, queue: Any, leave: Callable[[], None]) -> None:
        self.asked = False
        self._lock = lock
        self._queue = queue
        self._leave = leave
        self._process = os.getpid()
        self._before: Any = None
        self._installed = False
        if threading.current_thread() is not threading.main_thread():
            return
        before = signal.getsignal(signal.SIGTERM)
        if before == signal.SIG_DFL or isinstance(getattr(before, "__self__", None), Drain):
            self._before = signal.signal(signal.SIGTERM, self._handle)
            self._installed = True

    def _handle(self, number: int, frame: object) -> None:
        if os.getpid() != self._process:  # a fork of the user's, which ends as it would have
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.raise_signal(signal.SIGTERM)
            return
        self.asked = True
        if (
            self._lock._is_owned() or self._queue._is_owned()
        ):  # in the midst of something: its end is the time
            return
        with self._lock:  # of a step that another thread runs
            self._go_on(number, frame)

    def heed(self) -> None:
        """At the end of what the session did: go, if SIGTERM came meanwhile.

        Raises:
            SystemExit: with status 0. On another thread it ends that one; the main thread, which
                waits for the lock, ends the process.
        """
        if not self.asked:
            return
        if threading.current_thread() is threading.main_thread():
            self._go_on(signal.SIGTERM, None)
        self._leave()

    def _go_on(self, number: int, frame: object) -> None:
        try:
            self._leave()
        finally:
            self.end()
            if callable(self._before):  # another session's
                self._before(number, frame)

    def end(self) -> None:
        """Put back what was there."""
        if self._installed and threading.current_thread() is threading.main_thread():
            self._installed = False
            if signal.getsignal(signal.SIGTERM) == self._handle:
                signal.signal(signal.SIGTERM, self._before)
