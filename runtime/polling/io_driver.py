"""The driver lock: it lets one thread at a time poll a process's sockets.

If one thread received a message for another, the wake-up would take longer than most small steps
compute. So the thread that waits for a message polls the sockets itself until the message has come.
A background thread polls while no other thread does.
"""

from __future__ import annotations

import threading
from time import monotonic, sleep

from graphflow.runtime.polling.wakeup import WakeupFd

SLICE = 0.002
"""Seconds between two looks of the background thread."""

LINGER = 0.02
"""Seconds within which the last driver is expected to poll again."""

_OFTEN = SLICE / 2
"""Seconds between two releases of the lock while small steps follow each other."""

_LONGEST = 0.25
"""Seconds between two looks of the background thread while one thread holds the lock."""


class SocketDriverLock:
    """Lock of a process's sockets and of the protocol state behind them.

    Args:
        wakeup: wakes the thread that holds the lock out of its poll.
    """

    def __init__(self, wakeup: WakeupFd) -> None:
        self._wakeup = wakeup
        self._lock = threading.Lock()
        self._is_background = False
        self._released_at = monotonic()
        self._releases = 0
        # What the background thread saw: the count of releases, since when, and its last look.
        self._seen, self._since, self._looked = -1, 0.0, 0.0
        self._waits_long = False
        self._released = threading.Event()
        self.wanted = False
        """Whether another thread asks the holder to release the lock."""

    def try_acquire(self) -> bool:
        """Acquire the lock if it is free; return False if it is not."""
        return self._lock.acquire(blocking=False)

    def acquire(self, seconds: float) -> bool:
        """Acquire the lock if it is free, or preempt the background thread within `seconds`.

        Return False if another thread polls: that thread will see what arrives.
        """
        if self._lock.acquire(blocking=False):
            return True
        return self._is_background and self.preempt(seconds)

    def preempt(self, seconds: float) -> bool:
        """Ask the holder to release the lock and acquire it; return False after `seconds`."""
        self.wanted = True
        self._wakeup.wake()
        acquired = self._lock.acquire(timeout=seconds)
        self.wanted = False
        return acquired

    def release(self) -> None:
        """Release the lock, which this thread holds."""
        self._is_background = False
        self._released_at = monotonic()
        self._releases += 1
        self._lock.release()
        if self._waits_long:
            self._released.set()

    def acquire_as_background(self, idle: float) -> bool:
        """Acquire the lock for the background thread if no thread held it for `idle` seconds."""
        if monotonic() - self._released_at < idle or not self._lock.acquire(blocking=False):
            return False
        self._is_background = True
        return True

    def wait_in_background(self) -> None:
        """Sleep until the background thread's next look.

        The sleep is short as a rule. It is longer while small steps follow each other, because each
        look takes time from them. If one thread has held the lock for long, as during a long step,
        the background thread sleeps until the lock is released.
        """
        now, releases = monotonic(), self._releases
        is_busy = now - self._looked < (releases - self._seen) * _OFTEN
        self._looked = now
        if not self._lock.locked() or self._seen != releases:
            self._seen, self._since = releases, now
        if now - self._since < LINGER:
            sleep(LINGER if is_busy else SLICE)
            return
        self._released.clear()
        self._waits_long = True
        # A release between the two checks has set no event, so the holder is looked for again.
        if self._lock.locked() and self._seen == self._releases:
            self._released.wait(_LONGEST)
        self._waits_long = False
