"""The helm: which of a process's threads drives its sockets.

A message that one thread receives for another costs a wake-up, which takes longer than most small
steps compute. So the thread that waits for something drives the sockets itself until it has come;
a watch, another thread, drives while nobody does, and notices soon when sockets are left alone.
"""

from __future__ import annotations

import threading
from time import monotonic, sleep

from graphflow.runtime.polling.wakeup import Bell

SLICE = 0.002  # seconds between two looks of the watch
LINGER = 0.02  # seconds for which whoever drove last is expected back
_OFTEN = SLICE / 2  # seconds from one time that the helm is left to the next, in small steps
_LONGEST = 0.25  # seconds between two looks of the watch while one thread stays at the helm


class Helm:
    """One thread at a time is at the helm, and only that one touches the sockets, and the state of
    the protocol, that it stands for."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell  # wakes whoever is at the helm
        self._lock = threading.Lock()
        self._watched = False
        self._left = monotonic()
        self._times = 0  # that the helm was left
        # By the watch: how often, since when no more often, and when it looked.
        self._seen, self._since, self._looked = -1, 0.0, 0.0
        self._rests = False  # the watch waits for a thread that has been at the helm for long
        self._woken = threading.Event()
        self.wanted = False
        """Whether the watch should leave: a thread waits for the helm."""

    def free(self) -> bool:
        """Take the helm if nobody is there."""
        return self._lock.acquire(blocking=False)

    def take(self, seconds: float) -> bool:
        """Take the helm: at once if nobody is there, within `seconds` if it is the watch. False:
        another thread drives, and will see what comes."""
        if self._lock.acquire(blocking=False):
            return True
        return self._watched and self.seize(seconds)

    def seize(self, seconds: float) -> bool:
        """Take the helm from whoever is there: the watch, or a thread that was told to stop; False:
        it was not left within `seconds`."""
        self.wanted = True
        self._bell.ring()
        taken = self._lock.acquire(timeout=seconds)
        self.wanted = False
        return taken

    def leave(self) -> None:
        """Leave the helm, which this thread has taken."""
        self._watched = False
        self._left = monotonic()
        self._times += 1
        self._lock.release()
        if self._rests:
            self._woken.set()

    def watch(self, alone: float) -> bool:
        """Take the helm as the watch, if nobody was there for `alone` seconds."""
        if monotonic() - self._left < alone or not self._lock.acquire(blocking=False):
            return False
        self._watched = True
        return True

    def rest(self) -> None:
        """Sleep as the watch, until the next look: a moment; longer while small steps follow each
        other, of which each look takes a part; or until a thread that has been at the helm for long
        leaves it, as one that waits for a long step."""
        now, times = monotonic(), self._times
        is_busy = now - self._looked < (times - self._seen) * _OFTEN
        self._looked = now
        if not self._lock.locked() or self._seen != times:
            self._seen, self._since = times, now
        if now - self._since < LINGER:
            sleep(LINGER if is_busy else SLICE)
            return
        self._woken.clear()
        self._rests = True
        if self._lock.locked() and self._seen == self._times:  # not left just now
            self._woken.wait(_LONGEST)
        self._rests = False
