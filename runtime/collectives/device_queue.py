"""A device's queue of collectives, run by a thread while the program computes.

Collectives run in program order, which is the same on all devices, so no two devices wait for each
other. A program that waits for a collective runs what is left up to it on its own thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from graphflow.runtime.collectives.shared_counters import CANCEL_CHECK_SECONDS

_ABORT_SECONDS = 5.0  # for a cancelled collective to end


class QueuedCollective(Protocol):
    """A device's part in one collective.

    Attributes:
        completes_inline: whether `start` and `finish` do all its work, without the queue.
    """

    completes_inline: bool

    @property
    def program_order(self) -> Sequence[QueuedCollective]:
        """The device's collectives of this program, in program order."""

    def is_started(self, step: int) -> bool:
        """Return True if all of the device's ranks have their tensors."""

    def run(self, step: int, beside: bool) -> None:
        """Run the collective; `beside`: on the queue's thread, while the program computes."""


class DeviceCollectiveQueue:
    """Runs a device's collectives in program order, on a thread or on that of the program."""

    def __init__(self, device: str) -> None:
        self._device = device
        # Acquired as a lock, not through the Condition: that acquires it in Python code, where an
        # interrupt would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._step = -1
        self._queue: Sequence[QueuedCollective] = ()
        self._next = 0
        self._busy = False
        self._error: BaseException | None = None
        self._closed = False

    def notify_started(self, step: int, member: QueuedCollective, meanwhile: bool) -> None:
        """Record that a collective has its tensors.

        Args:
            meanwhile: whether the program computes something else before it waits for the result.
                Only then the queue's thread runs the collective.
        """
        with self._lock:
            if step != self._step:
                self._step, self._queue, self._next = step, member.program_order, 0
                self._error = None
            if member.completes_inline or not meanwhile:
                return
            if self._thread is None:
                name = f"collectives-{self._device.strip('/')}"
                self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def finish(self, step: int, member: QueuedCollective, go_on: Callable[[], None]) -> None:
        """Run what is left of the queue up to a collective, or wait until the thread has run it.

        Args:
            go_on: raises if the step was cancelled.
        """
        while True:
            with self._lock:
                while True:
                    if self._error is not None:
                        raise self._error
                    if self._step != step or self._is_done(member):
                        return
                    if not self._busy and (due := self._next_due()) is not None:
                        self._busy = True
                        break
                    self._changed.wait(CANCEL_CHECK_SECONDS)
                    go_on()
            self._run(due, step, beside=False)

    def _is_done(self, member: QueuedCollective) -> bool:
        return member not in self._queue[self._next :]

    def _next_due(self) -> QueuedCollective | None:
        """Return the next collective if it has its tensors; skip those that complete inline."""
        while self._next < len(self._queue):
            member = self._queue[self._next]
            if not member.is_started(self._step):
                return None
            if not member.completes_inline:
                return member
            self._next += 1
        return None

    def _run(self, member: QueuedCollective, step: int, beside: bool) -> None:
        error: BaseException | None = None
        try:
            member.run(step, beside)
        except BaseException as raised:
            error = raised
        with self._lock:
            self._busy = False
            if self._step == step:
                self._next += 1
                self._error = self._error or error
            self._changed.notify_all()

    def _serve(self) -> None:
        while True:
            with self._lock:
                while self._busy or self._error is not None or (due := self._next_due()) is None:
                    if self._closed:
                        return
                    self._changed.wait()
                if self._closed:
                    return
                self._busy, step = True, self._step
            self._run(due, step, beside=True)

    def abort(self) -> bool:
        """Forget the step, and wait for the collective that still runs; return True if it ended."""
        with self._lock:
            self._queue, self._step = (), -1
            return self._changed.wait_for(lambda: not self._busy, _ABORT_SECONDS)

    def close(self) -> None:
        """End the thread."""
        left = self.abort()
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None and left:
            self._thread.join()
