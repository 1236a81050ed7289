"""A bell: how a thread that polls sockets is woken by something that is no socket."""

from __future__ import annotations

import socket


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
