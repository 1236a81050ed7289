"""Waiting for many sockets at once, and waking the thread that waits."""

from __future__ import annotations

import math
import os
import select
import socket
from time import monotonic

SPIN_SECONDS = 2e-4
"""Seconds for which a thread that expects a message soon polls without sleeping.

An idle processor takes about as long to wake up."""

CROWDED = 5e-4
"""Seconds after which `sched_yield` is late: another thread computes on this processor, and its
time slice is as long as many round trips."""

_SHORTEST, _LONGEST = 1e-2, 1.0
"""Seconds for which a thread that found its processor busy sleeps at once, without spinning."""


class WakeupFd:
    """A socket pair that wakes a polling thread from another thread or from a signal handler."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """Return the file descriptor to poll."""
        return self._read.fileno()

    def wake(self) -> None:
        """Wake the polling thread. Wake-ups that it has not drained yet count as one."""
        try:
            self._write.send(b"!")
        except (BlockingIOError, OSError):
            return  # a wake-up is pending, or the poller has closed its end

    def drain(self) -> None:
        """Clear pending wake-ups. Call it before looking for the work they announce."""
        try:
            while self._read.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Close both sockets."""
        self._read.close()
        self._write.close()


class EpollWaiter:
    """Waits for any of many file descriptors, each with a tag.

    With epoll the time does not depend on how many there are; other systems use poll."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._poll: select.epoll | select.poll = self._epoll or select.poll()
        self._tags: dict[int, int] = {}
        self._crowded_until, self._crowded_for = 0.0, _SHORTEST

    def add(self, fd: int, tag: int) -> None:
        """Wait for this file descriptor, too."""
        self._tags[fd] = tag
        self._poll.register(fd, select.POLLIN)

    def wait(self, seconds: float, spin: float = 0.0) -> list[int]:
        """Wait at most `seconds` and return the tags of the descriptors that are ready.

        For the first `spin` seconds the thread polls without sleeping."""
        if seconds < 0.0:
            seconds = 0.0
        if spin and self._epoll is not None and seconds > spin:
            ready = self._spin(self._epoll, spin)
            if ready:
                return [self._tags[fd] for fd, _ in ready]
        ready = self._poll.poll(seconds if self._epoll is not None else math.ceil(seconds * 1000))
        if len(ready) == 1:  # nearly always
            return [self._tags[ready[0][0]]]
        return [self._tags[fd] for fd, _ in ready]

    def _spin(self, epoll: select.epoll, seconds: float) -> list[tuple[int, int]]:
        """Poll again and again, unless this processor has other work: each poll would then wait for
        a whole time slice, while a sleeping thread is woken within it."""
        now = monotonic()
        if now < self._crowded_until:
            return []
        until = now + seconds
        while now < until:
            ready = epoll.poll(0.0)
            if ready:
                return ready
            os.sched_yield()  # lets threads that compute go first
            before, now = now, monotonic()
            if now - before > CROWDED:
                self._crowded_until = now + self._crowded_for
                self._crowded_for = min(2 * self._crowded_for, _LONGEST)
                return []
        self._crowded_for = _SHORTEST
        return []

    def close(self) -> None:
        """Close the epoll descriptor."""
        if self._epoll is not None:
            self._epoll.close()
