"""How a thread waits for many sockets at once, and how it is woken by something that is none."""

from __future__ import annotations

import math
import os
import select
import socket
from time import monotonic

AWAKE = 2e-4
"""Seconds for which who expects a message soon does not fall asleep: a processor that has nothing
else to do takes about as long to wake up."""

CROWDED = 5e-4
"""Seconds after which a yield of the processor has come back late: somebody computes there, and a
slice of theirs is many round trips."""

_SHORTEST, _LONGEST = 1e-2, 1.0
"""Seconds for which who found the processor crowded falls asleep at once, before it looks again."""


class Bell:
    """Wakes a thread that polls sockets from another thread, or from a signal handler."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """What to poll."""
        return self._read.fileno()

    def ring(self) -> None:
        """Wakes the thread; rings that it has not heard yet become one."""
        try:
            self._write.send(b"!")
        except (BlockingIOError, OSError):
            return  # it has rung already, or nobody listens any more

    def hear(self) -> None:
        """Takes the rings in, before looking for what they were about."""
        try:
            while self._read.recv(4096):
                pass
        except BlockingIOError:
            return

    def close(self) -> None:
        """Frees its sockets."""
        self._read.close()
        self._write.close()


class Sleeper:
    """Waits for any of many file descriptors, each known by a tag; the time that this takes does
    not depend on how many there are."""

    def __init__(self) -> None:
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._poll: select.epoll | select.poll = self._epoll or select.poll()
        self._tags: dict[int, int] = {}
        self._crowded_until, self._crowded_for = 0.0, _SHORTEST

    def add(self, fd: int, tag: int) -> None:
        """Waits for this one, too."""
        self._tags[fd] = tag
        self._poll.register(fd, select.POLLIN)

    def sleep(self, seconds: float, awake: float = 0.0) -> list[int]:
        """The tags of those that are ready, after waiting for the first one; the first `awake`
        seconds without falling asleep."""
        if seconds < 0.0:
            seconds = 0.0
        if awake and self._epoll is not None and seconds > awake:
            ready = self._look(self._epoll, awake)
            if ready:
                return [self._tags[fd] for fd, _ in ready]
        ready = self._poll.poll(seconds if self._epoll is not None else math.ceil(seconds * 1000))
        if len(ready) == 1:  # nearly always
            return [self._tags[ready[0][0]]]
        return [self._tags[fd] for fd, _ in ready]

    def _look(self, epoll: select.epoll, awake: float) -> list[tuple[int, int]]:
        """Looks again and again, unless this processor has other work: then each look would cost a
        slice of it, where a sleeper is woken in between."""
        now = monotonic()
        if now < self._crowded_until:
            return []
        until = now + awake
        while now < until:
            ready = epoll.poll(0.0)
            if ready:
                return ready
            os.sched_yield()  # whoever has more to do than to look
            before, now = now, monotonic()
            if now - before > CROWDED:
                self._crowded_until = now + self._crowded_for
                self._crowded_for = min(2 * self._crowded_for, _LONGEST)
                return []
        self._crowded_for = _SHORTEST
        return []

    def close(self) -> None:
        """Frees what it waits with."""
        if self._epoll is not None:
            self._epoll.close()
